"""The training steps that are counted and timed: models, sizes and inputs.

Every model is made by its own library's class from a configuration, in the original's module or in
a rewritten one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Step:
    """A model's training step.

    Attributes:
        name: What it is called in tables.
        source: The module that defines the model.
        schedule: The bundled schedule that rewrites it.
        model: The class that is trained, with its loss.
        config: The class of its configuration.
        sizes: The configuration's arguments.
        batch: Sequences a step.
        tokens: Tokens of a sequence.
        targets: Tokens that a decoder predicts of a sequence, where it has a sequence of its own.
        causal: Whether tokens look back only.
        liger: Whether Liger has kernels for it.
    """

    name: str
    source: str
    schedule: str
    model: str
    config: str
    sizes: Mapping[str, Any]
    batch: int
    tokens: int
    targets: int = 0
    causal: bool = False
    liger: bool = False

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, of encoder and decoder together."""
        return self.batch * (self.tokens + self.targets)

    def build(self, module: ModuleType, attention: str, dtype: torch.dtype = DTYPE) -> nn.Module:
        """The model, ready to be trained.

        Args:
            module: The original, or what it was rewritten to.
            attention: The attention implementation, by transformers' name.
            dtype: Of its weights.
        """
        import transformers

        config = getattr(transformers, self.config)(**self.sizes, use_cache=False)
        config._attn_implementation = attention
        with default_dtype(dtype):
            model: nn.Module = getattr(module, self.model)(config)
        return model.train()

    def inputs(self, seed: int, device: str | None = None) -> dict[str, Tensor]:
        """Random tokens and labels; every position is predicted.

        Args:
            seed: Of the random numbers.
            device: Where to.
        """
        generator = torch.Generator(device or "cpu").manual_seed(seed)

        def tokens(length: int) -> Tensor:
            return torch.randint(
                self.sizes["vocab_size"],
                (self.batch, length),
                generator=generator,
                device=device,
            )

        ids = tokens(self.tokens)
        return {"input_ids": ids, "labels": tokens(self.targets) if self.targets else ids}

    def tiny(self) -> Step:
        """Two layers of it, small enough for a CPU."""
        return replace(
            self,
            sizes={**self.sizes, **TINY[self.name]},
            batch=2,
            tokens=24,
            targets=self.targets and 8,
        )


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, new tensors have the dtype where they are given none."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def flops_per_token(step: Step) -> float:
    """Floating-point operations of a token, forwards and backwards, by matrix products.

    Six for each weight of a product that the token goes through; and of attention twelve for each
    feature and token that is looked at, of a decoder's half the tokens. Nothing is recomputed.
    """
    sizes = step.sizes
    if step.config == "T5Config":
        hidden, inner, layers = sizes["d_model"], sizes["d_ff"], sizes["num_layers"]
        feed = 2 * hidden * inner
        source = layers * (4 * hidden**2 + feed + 2 * hidden**2)  # with the decoder's keys, values
        target = layers * (4 * hidden**2 + feed + 2 * hidden**2) + hidden * sizes["vocab_size"]
        source_looks = 12 * layers * hidden * step.tokens
        target_looks = 12 * layers * hidden * (step.targets / 2 + step.tokens)
        both = step.tokens * (6 * source + source_looks)
        both += step.targets * (6 * target + target_looks)
        return both / (step.tokens + step.targets)
    hidden = sizes.get("hidden_size") or sizes["n_embd"]
    layers = sizes.get("num_hidden_layers") or sizes["n_layer"]
    inner = sizes.get("intermediate_size", 4 * hidden)
    if step.config == "LlamaConfig":
        shared = sizes["num_key_value_heads"] / sizes["num_attention_heads"]
        weights = layers * (2 * hidden**2 * (1 + shared) + 3 * hidden * inner)
    else:
        weights = layers * (4 * hidden**2 + 2 * hidden * inner)
    weights += hidden * sizes["vocab_size"]
    if step.config == "BertConfig":
        weights += hidden**2  # the head's own layer
    looks = 12 * layers * hidden * step.tokens
    return 6 * weights + (looks / 2 if step.causal else looks)


def _hugging_face(family: str) -> str:
    return f"transformers.models.{family}.modeling_{family}"


STEPS = (
    Step(
        "BERT-large",
        _hugging_face("bert"),
        "bert",
        "BertForMaskedLM",
        "BertConfig",
        {
            "vocab_size": 30522,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
        batch=32,
        tokens=512,
    ),
    Step(
        "GPT-2 medium",
        _hugging_face("gpt2"),
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 50257, "n_embd": 1024, "n_layer": 24, "n_head": 16},
        batch=16,
        tokens=1024,
        causal=True,
    ),
    Step(
        "Llama-3.2-1B",
        _hugging_face("llama"),
        "llama",
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
        batch=4,
        tokens=4096,
        causal=True,
        liger=True,
    ),
    Step(
        "T5-base",
        _hugging_face("t5"),
        "t5",
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 32128,
            "d_model": 768,
            "d_ff": 3072,
            "num_layers": 12,
            "num_heads": 12,
            "decoder_start_token_id": 0,
        },
        batch=32,
        tokens=512,
        targets=128,
    ),
)

TINY: dict[str, dict[str, Any]] = {
    "BERT-large": {
        "vocab_size": 203,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
    },
    "GPT-2 medium": {"vocab_size": 203, "n_embd": 64, "n_layer": 2, "n_head": 4},
    "Llama-3.2-1B": {
        "vocab_size": 203,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "T5-base": {
        "vocab_size": 203,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": 2,
        "num_heads": 4,
    },
}


def step(name: str) -> Step:
    """The step of a name."""
    return next(s for s in STEPS if s.name == name)
