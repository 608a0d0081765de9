"""The kernels that `benchmark.kernels` measures: what they replace, at which sizes.

Eager is what Hugging Face's models do. Bytes are those that have to pass through memory once: a
kernel's inputs and outputs, and in the backward pass what it saved. They are the floor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slapo_rewrite.runtime.kernels import launch
from slapo_rewrite.runtime.kernels.bias_gelu import bias_gelu
from slapo_rewrite.runtime.kernels.cross_entropy import cross_entropy
from slapo_rewrite.runtime.kernels.dropout_residual import dropout_residual
from slapo_rewrite.runtime.kernels.gated import geglu, swiglu
from slapo_rewrite.runtime.kernels.layer_norm import LayerNormFunction, layer_norm
from slapo_rewrite.runtime.kernels.linear_cross_entropy import linear_cross_entropy
from slapo_rewrite.runtime.kernels.rms_norm import residual_rms_norm, rms_norm
from slapo_rewrite.runtime.kernels.rotary import rotary
from slapo_rewrite.runtime.kernels.softmax import masked_softmax

DTYPE = torch.bfloat16
LOSSES = ("cross_entropy", "linear_cross_entropy")


@dataclass(frozen=True)
class Kernel:
    """A kernel and its peers.

    Attributes:
        name: The public function, and what is special about this use of it.
        ours: The kernel.
        eager: The operations it stands for.
        shapes: Of its floating-point inputs, the sizes named below.
        passes: How often the first input's bytes pass through memory, forwards, and forwards and
            backwards; None where the matrix products are the floor.
        sizes: Sizes by name.
        tiny: Sizes for trying the benchmark out.
        liger: The function of `liger_kernel.transformers.functional`, called as ours is, or what
            calls it.
        random: Whether results differ from run to run.
    """

    name: str
    ours: Callable[..., Any]
    eager: Callable[..., Any]
    shapes: tuple[tuple[str, ...], ...]
    passes: tuple[float, float] | None
    sizes: dict[str, int]
    tiny: dict[str, int]
    liger: Callable[[Any], Callable[..., Any]] | None = None
    random: bool = False

    def inputs(self, device: str, tiny: bool, seed: int, share: int = 1) -> list[Tensor]:
        """Random inputs, and the labels after them where it is a loss.

        Args:
            device: Where to.
            tiny: Whether the sizes are those for trying out.
            seed: Of the random numbers.
            share: The number of rows is divided by this.
        """
        sizes = dict(self.tiny if tiny else self.sizes)
        sizes["m"] = max(sizes["m"] // share, 1)
        generator = torch.Generator(device).manual_seed(seed)

        def make(shape: tuple[str, ...]) -> Tensor:
            x = torch.randn([sizes[s] for s in shape], generator=generator, device=device)
            # A weight matrix that keeps the size of what it is given.
            return (x / sizes[shape[1]] ** 0.5 if shape[0] == "v" else x).to(DTYPE)

        found = [make(shape).requires_grad_() for shape in self.shapes]
        if self.name.split()[0] in LOSSES:
            m, v = sizes["m"], sizes["v"]
            found.append(torch.randint(v, (m,), generator=generator, device=device))
        if self.name == "rotary":
            found += [x.detach() for x in tables(sizes, device)]
        return found

    def floor_s(self, inputs: list[Tensor], copy: float, product: float) -> tuple[float, float]:
        """Seconds at least, forwards, and forwards and backwards.

        Args:
            inputs: Its inputs.
            copy: Bytes a second that a copy moves, read and written.
            product: Floating-point operations a second of a matrix product.
        """
        if self.passes is None:
            # Gradients are found in the forward pass, from the same logits.
            operations = 3 * 2 * len(inputs[0]) * inputs[1].numel()
            return operations / product, operations / product
        size = inputs[0].numel() * inputs[0].element_size()
        return self.passes[0] * size / copy, self.passes[1] * size / copy


def tables(sizes: dict[str, int], device: str) -> tuple[Tensor, Tensor]:
    """Cosines and sines, (1, T, H)."""
    rates = 10000.0 ** (-torch.arange(0, sizes["h"], 2, device=device) / sizes["h"])
    angle = torch.arange(sizes["t"], device=device)[:, None] * rates
    angle = torch.cat((angle, angle), -1)[None]
    return angle.cos().to(DTYPE), angle.sin().to(DTYPE)


def llama_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def residual_llama_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = residual + x
    return llama_norm(total, weight), total


def dropout_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, added: Tensor
) -> Tensor:
    """The operations after a linear layer, with its bias."""
    total = nn.functional.dropout(x + added, 0.1) + residual
    return nn.functional.layer_norm(total, total.shape[-1:], weight, bias)


def dropout_addition(x: Tensor, residual: Tensor) -> Tensor:
    return nn.functional.dropout(x, 0.1) + residual


def our_dropout_addition(x: Tensor, residual: Tensor) -> Tensor:
    return dropout_residual(x, residual, dropout=0.1)


def our_dropout_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, added: Tensor
) -> Tensor:
    if not launch.runs_triton(x):
        return dropout_norm(x, residual, weight, bias, added)
    normed, _ = LayerNormFunction.apply(x, residual, added, weight, bias, 1e-5, 0.1)
    return normed  # type: ignore[no-any-return]


def gelu_new(x: Tensor, bias: Tensor) -> Tensor:
    x = x + bias
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    rotated: tuple[Tensor, Tensor] = apply_rotary_pos_emb(
        q.transpose(1, 2), k.transpose(1, 2), cos, sin
    )
    return rotated


def our_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin)


def loss_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float(), labels)


def loss_of_hidden(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return loss_of_logits(nn.functional.linear(hidden, weight), labels)


def attention_weights(x: Tensor, mask: Tensor) -> Tensor:
    return (x * 0.125 + mask).softmax(-1, dtype=torch.float32).to(x.dtype)


def plain_mask(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a mask that needs no gradient."""
    return lambda x, mask: function(x, mask.detach())


ROWS = (("m", "d"), ("d",))
TINY = {"m": 6, "d": 24}

KERNELS = (
    Kernel(
        "rms_norm",
        rms_norm,
        llama_norm,
        ROWS,
        (2, 5),
        {"m": 16384, "d": 2048},
        TINY,
        lambda liger: lambda x, w: liger.liger_rms_norm(x, w, 1e-6, in_place=False),
    ),
    Kernel(
        "residual_rms_norm",
        residual_rms_norm,
        residual_llama_norm,
        (("m", "d"), *ROWS),
        (4, 8),
        {"m": 16384, "d": 2048},
        TINY,
        lambda liger: lambda x, r, w: liger.liger_fused_add_rms_norm(x, r, w, 1e-6),
    ),
    Kernel(
        "layer_norm",
        layer_norm,
        lambda x, w, b: nn.functional.layer_norm(x, x.shape[-1:], w, b),
        (*ROWS, ("d",)),
        (2, 5),
        {"m": 16384, "d": 1024},
        TINY,
        lambda liger: lambda x, w, b: liger.liger_layer_norm(x, w, b, 1e-5),
    ),
    Kernel(
        "residual_layer_norm dropout",
        our_dropout_norm,
        dropout_norm,
        (("m", "d"), *ROWS, ("d",), ("d",)),
        (4, 8),
        {"m": 16384, "d": 1024},
        TINY,
        random=True,
    ),
    Kernel(
        "dropout_residual",
        our_dropout_addition,
        dropout_addition,
        (("m", "d"), ("m", "d")),
        (3, 5),
        {"m": 16384, "d": 1024},
        TINY,
        random=True,
    ),
    Kernel(
        "bias_gelu",
        bias_gelu,
        lambda x, b: nn.functional.gelu(x + b),
        ROWS,
        (2, 5),
        {"m": 16384, "d": 4096},
        TINY,
    ),
    Kernel(
        "bias_gelu gelu_new",
        lambda x, b: bias_gelu(x, b, "tanh"),
        gelu_new,
        ROWS,
        (2, 5),
        {"m": 16384, "d": 4096},
        TINY,
    ),
    Kernel(
        "swiglu",
        swiglu,
        lambda gate, up: nn.functional.silu(gate) * up,
        (("m", "d"), ("m", "d")),
        (3, 8),
        {"m": 16384, "d": 8192},
        TINY,
        lambda liger: liger.liger_swiglu,
    ),
    Kernel(
        "geglu tanh",
        lambda gate, up: geglu(gate, up, "tanh"),
        lambda gate, up: nn.functional.gelu(gate, approximate="tanh") * up,
        (("m", "d"), ("m", "d")),
        (3, 8),
        {"m": 16384, "d": 8192},
        TINY,
        lambda liger: liger.liger_geglu,
    ),
    Kernel(
        "rotary",
        our_rotary,
        apply_rotary,
        (("m", "t", "n", "h"), ("m", "t", "k", "h")),
        (2.5, 5),  # q's bytes, and k's, a quarter of them, in and out
        {"m": 4, "t": 4096, "n": 16, "k": 4, "h": 128},
        {"m": 2, "t": 5, "n": 4, "k": 1, "h": 8},
        lambda liger: (
            lambda q, k, cos, sin: liger.liger_rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        ),
    ),
    Kernel(
        "cross_entropy 128256",
        cross_entropy,
        loss_of_logits,
        (("m", "v"),),
        (1, 3),
        {"m": 16384, "v": 128256},
        {"m": 6, "v": 50},
        lambda liger: liger.liger_cross_entropy,
    ),
    Kernel(
        "cross_entropy 30522",
        cross_entropy,
        loss_of_logits,
        (("m", "v"),),
        (1, 3),
        {"m": 16384, "v": 30522},
        {"m": 6, "v": 50},
        lambda liger: liger.liger_cross_entropy,
    ),
    Kernel(
        "linear_cross_entropy",
        linear_cross_entropy,
        loss_of_hidden,
        (("m", "d"), ("v", "d")),
        None,
        {"m": 16384, "d": 2048, "v": 128256},
        {"m": 6, "d": 8, "v": 50},
        lambda liger: liger.liger_fused_linear_cross_entropy,
    ),
    Kernel(
        "masked_softmax",
        plain_mask(lambda x, mask: masked_softmax(x, mask, 0.125)),
        plain_mask(attention_weights),
        (("m", "n", "t", "t"), ("m", "one", "t", "t")),
        (2 + 1 / 16, 5 + 1 / 16),  # the mask is a sixteenth of the scores
        {"m": 8, "n": 16, "t": 1024, "one": 1},
        {"m": 2, "n": 2, "t": 7, "one": 1},
    ),
)
