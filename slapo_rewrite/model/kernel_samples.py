"""Sample inputs of the functions that rules call, and a function's results for them.

They serve to compare two implementations of a function, and to time them.

Shapes: M rows, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

HEADS, KEY_HEADS, BATCH = 4, 2, 2


@dataclass(frozen=True)
class Sample:
    """The arguments of one call."""

    args: tuple[Any, ...]  # positional
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # by name

    def leaves(self) -> dict[str, Tensor]:
        """The tensors that require a gradient, module parameters included, by name."""
        given = {f"argument {n}": value for n, value in enumerate(self.args, 1)} | {**self.kwargs}
        return {name: t for key, value in given.items() for name, t in _leaves(key, value)}


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, nn.Module):
        yield from ((f"{key}.{name}", p) for name, p in value.named_parameters())
    elif isinstance(value, Tensor) and value.requires_grad:
        yield key, value


@dataclass(frozen=True)
class Maker:
    """Makes random inputs."""

    rows: int  # the number of rows, M
    width: int  # the number of features, D: of a head or vocabulary as well
    dtype: torch.dtype = torch.float32  # of all floating-point tensors
    device: str = "cpu"  # of all tensors

    def tensor(self, *shape: int) -> Tensor:
        """Random numbers that require a gradient."""
        made = torch.randn(shape, device=self.device).to(self.dtype)
        return made.requires_grad_()

    def x(self, width: int | None = None) -> Tensor:
        """Rows, (M, D)."""
        return self.tensor(self.rows, width or self.width)

    def vector(self) -> Tensor:
        """A weight or bias, (D,)."""
        return self.tensor(self.width)

    def linear(self, inputs: int) -> nn.Linear:
        """A linear layer with D outputs."""
        return nn.Linear(inputs, self.width, device=self.device).to(self.dtype)

    def labels(self, *shape: int) -> Tensor:
        """Labels below D; the first is -100, which losses ignore."""
        found = torch.randint(self.width, shape, device=self.device)
        found.view(-1)[0] = -100
        return found

    @property
    def inner(self) -> int:
        """The input features of a linear layer: a quarter of D, as in a transformer's MLP.

        At most 2,048, as for the logits of a vocabulary.
        """
        return min(max(self.width // 4, 2), 2048)


def _norms(m: Maker) -> list[Sample]:
    options: list[dict[str, Any]] = [{}, {"offset": 1.0, "cast": "output"}, {"cast": "weight"}]
    with_weight = [Sample((m.x(), m.vector(), 1e-6), given) for given in options]
    return [*with_weight, Sample((m.x(), None, 1e-6))]


def _residual_norms(m: Maker) -> list[Sample]:
    dropout = nn.Dropout(0.0)
    return [
        Sample((m.x(), m.x(), m.vector(), 1e-6), {"dropout": dropout}),
        Sample((m.x(), m.x(), m.vector(), 1e-6), {"offset": 1.0, "cast": "output"}),
    ]


def _layer_norms(m: Maker) -> list[Sample]:
    norm = nn.LayerNorm(m.width, device=m.device, dtype=m.dtype)
    own = (norm.weight, norm.bias, norm.eps)
    linear, dropout = m.linear(m.width), nn.Dropout(0.0)
    return [
        Sample((m.x(), m.x(), *own), {"norm": norm, "linear": linear, "dropout": dropout}),
        Sample((m.x(), m.x(), m.vector(), m.vector(), 1e-5)),
    ]


def _additions(m: Maker) -> list[Sample]:
    linear, dropout = m.linear(m.width), nn.Dropout(0.0)
    return [
        Sample((m.x(), m.x()), {"linear": linear, "dropout": dropout}),
        Sample((m.x(), m.x()), {"dropout": 0.0}),
    ]


def _gated(activation: nn.Module) -> Callable[[Maker], list[Sample]]:
    return lambda m: [
        Sample((m.x(), m.x())),
        Sample((m.x(), m.x()), {"activation": activation, "dropout": nn.Dropout(0.0)}),
    ]


def _linear_gelu(m: Maker) -> list[Sample]:
    linear = m.linear(m.inner)
    return [
        Sample((m.x(m.inner), linear), {"activation": nn.GELU()}),
        Sample((m.x(m.inner), linear, "tanh")),
    ]


def _rotary(m: Maker) -> list[Sample]:
    tokens = max(m.rows // BATCH, 1)
    angles = torch.rand(1, tokens, m.width // 2, device=m.device).repeat(1, 1, 2)
    tables = (angles.cos().to(m.dtype), angles.sin().to(m.dtype))
    heads = (m.tensor(BATCH, n, tokens, m.width) for n in (HEADS, KEY_HEADS))
    turned = (m.tensor(BATCH, tokens, n, m.width) for n in (HEADS, KEY_HEADS))
    return [Sample((*heads, *tables)), Sample((*turned, *tables, 2))]


def _softmax(m: Maker) -> list[Sample]:
    scores = (BATCH, HEADS, max(m.rows // BATCH, 1), m.width)
    mask = torch.zeros(BATCH, 1, *scores[2:], device=m.device, dtype=m.dtype)
    mask[..., -1] = torch.finfo(m.dtype).min
    keep = mask[:, :, :1] == 0
    return [
        Sample((m.tensor(*scores), mask, 0.125)),
        Sample((m.tensor(*scores),), {"scale": 0.5, "keep": keep}),
    ]


def _losses(m: Maker) -> list[Sample]:
    given = {"label_smoothing": 0.1, "softcap": 30.0, "num_items": 3.0}
    return [Sample((m.x(), m.labels(m.rows))), Sample((m.x(), m.labels(m.rows)), given)]


def _model_losses(m: Maker) -> list[Sample]:
    logits, labels = m.tensor(1, m.rows, m.width), m.labels(1, m.rows)
    return [Sample((logits, labels, m.width)), Sample((logits, labels, m.width, 3.0))]


def _linear_losses(m: Maker) -> list[Sample]:
    inputs = m.inner
    hidden, weight = m.tensor(1, m.rows, inputs), m.tensor(m.width, inputs)
    layer = m.linear(inputs)
    return [
        Sample((hidden, weight, m.labels(1, m.rows))),
        Sample((hidden, layer.weight, m.labels(1, m.rows)), {"bias": layer.bias, "layer": layer}),
    ]


# By function name; the first sample of each is timed.
SAMPLES: dict[str, Callable[[Maker], list[Sample]]] = {
    "rms_norm": _norms,
    "residual_rms_norm": _residual_norms,
    "residual_layer_norm": _layer_norms,
    "add_layer_norm": _layer_norms,
    "dropout_residual": _additions,
    "swiglu": _gated(nn.SiLU()),
    "reglu": _gated(nn.ReLU()),
    "geglu": lambda m: [Sample((m.x(), m.x())), Sample((m.x(), m.x(), "tanh"))],
    "bias_gelu": lambda m: [Sample((m.x(), m.vector())), Sample((m.x(), m.vector(), "tanh"))],
    "linear_gelu": _linear_gelu,
    "linear_activation": lambda m: [
        Sample((m.x(m.inner), m.linear(m.inner), kind)) for kind in ("relu", "gelu")
    ],
    "activation_dropout": lambda m: [
        Sample((m.x(), kind), {"dropout": 0.0}) for kind in ("relu", "silu")
    ],
    "quick_gelu": lambda m: [Sample((m.x(),))],
    "rotary": _rotary,
    "masked_softmax": _softmax,
    "cross_entropy": _losses,
    "masked_lm_cross_entropy": _model_losses,
    "causal_lm_cross_entropy": _model_losses,
    "linear_cross_entropy": _linear_losses,
    "masked_lm_linear_cross_entropy": _linear_losses,
    "causal_lm_linear_cross_entropy": _linear_losses,
    "linear_each": lambda m: [Sample((m.x(), *(m.linear(m.width) for _ in range(3))))],
}


def samples(function: str, maker: Maker) -> list[Sample]:
    """Sample calls of a function with its options, with the same random numbers each time."""
    with torch.random.fork_rng(), torch.device(maker.device):
        torch.manual_seed(0)
        return SAMPLES[function](maker)


def results(function: Callable[..., Any], sample: Sample) -> dict[str, Tensor]:
    """The outputs of a function, and the gradients of its inputs, by name."""
    outputs = function(*sample.args, **sample.kwargs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    found = {f"output {number}": output.detach() for number, output in enumerate(outputs)}
    seeds = [torch.linspace(-1, 1, o.numel()).view_as(o).to(o) + 1.5 for o in outputs]
    leaves = sample.leaves()
    gradients = torch.autograd.grad(outputs, [*leaves.values()], seeds, allow_unused=True)
    named = zip(leaves, gradients, strict=True)
    return found | {f"the gradient of {name}": g for name, g in named if g is not None}


def largest_error(
    function: Callable[..., Any], reference: Callable[..., Any], sample: Sample
) -> tuple[float, str]:
    """The largest error against a reference, relative to the largest value, and its tensor's name.

    Infinite if a tensor is missing, or has another shape or dtype.
    """
    have, want = results(function, sample), results(reference, sample)
    worst = (0.0, "")
    for name in (*want, *(have.keys() - want.keys())):
        one, other = have.get(name), want.get(name)
        error = float("inf")
        if one is not None and other is not None and one.shape == other.shape:
            error = float((one - other).abs().max()) / (float(other.abs().max()) or 1.0)
            error = error if one.dtype == other.dtype and error == error else float("inf")
        worst = max(worst, (error, name))
    return worst
