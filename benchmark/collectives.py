"""What do the bundled schedules send between GPUs, in every layer?

    python -m benchmark.collectives

The collectives of a training step on fake tensors and in a fake process group, once with one more
layer than the other time: the difference is a layer's. Sizes are of the whole tensor, in units of
batch x tokens x hidden size. Megatron-LM's are the least that splitting a layer costs: an
all-reduce behind attention and one behind the MLP, and as many backwards (arXiv 1909.08053); with
sequence parallelism a reduce-scatter and an all-gather each instead, likewise (arXiv 2205.05198).

Writes `benchmark/results/collectives.json`.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmark import report
from benchmark.counted import size, tensors
from benchmark.steps import DTYPE, STEPS, Step
from benchmark.traffic import Variant, has_knobs, module_of
from slapo_rewrite.model.meta_device import pretend_world

NAME = "collectives"
WORLD = 2
KINDS = ("all-reduce", "all-gather", "reduce-scatter")
VARIANTS = (
    Variant("tensor parallel", "sdpa", ()),
    Variant("and sequence parallel", "sdpa", ("sequence_parallel=true",)),
)
# What a step's configuration calls its layers, and its hidden size.
LAYERS = {"GPT2Config": "n_layer", "T5Config": "num_layers"}
HIDDEN = {"GPT2Config": "n_embd", "T5Config": "d_model"}

# (kind, whether backwards) -> how many, and bytes
Sent = Counter[tuple[str, bool, int]]


class Listener(TorchDispatchMode):
    """Notes every collective.

    Attributes:
        sent: How often each kind, forwards or backwards, and of so many bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: Sent = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            whole = max(sum(map(size, tensors(a))) for a in args)
            backward = torch._C._current_autograd_node() is not None
            self.sent[kind_of(func._schema.name), backward, whole] += 1
        return func(*args, **(kwargs or {}))


def kind_of(name: str) -> str:
    """The usual name of a collective, of the operator's."""
    plain = name.rpartition(":")[2].replace("_", "")
    return next((kind for kind in KINDS if kind.replace("-", "") in plain), plain)


def sent(step: Step, variant: Variant, module: ModuleType) -> Sent:
    """The collectives of a step."""
    with pretend_world(WORLD), FakeTensorMode():
        model, inputs = step.build(module, variant.attention), step.inputs(0)
        with Listener() as listener:
            model(**inputs).loss.backward()
    return listener.sent


def of_a_layer(step: Step, variant: Variant) -> list[dict[str, Any]]:
    """A layer's collectives; of T5, a layer of the encoder and one of the decoder together."""
    step = step.tiny()
    layers = LAYERS.get(step.config, "num_hidden_layers")
    more = replace(step, sizes={**step.sizes, layers: step.sizes[layers] + 1})
    with tempfile.TemporaryDirectory() as folder:
        module, _ = module_of(step, variant, Path(folder))
        one, other = sent(step, variant, module), sent(more, variant, module)
    hidden = step.sizes[HIDDEN.get(step.config, "hidden_size")]
    unit = step.batch * step.tokens * hidden * DTYPE.itemsize
    found: dict[tuple[str, bool], list[float]] = {}
    for (kind, backward, whole), number in (other - one).items():
        # The gradients of a norm's weight under sequence parallelism are nothing beside the rest.
        if whole * 16 > unit:
            row = found.setdefault((kind, backward), [0, 0.0])
            row[0] += number
            row[1] += number * whole / unit
    return [
        {"kind": kind, "backward": backward, "number": row[0], "size": round(row[1], 3)}
        for (kind, backward), row in sorted(found.items())
    ]


def measure(steps: tuple[Step, ...] = STEPS) -> dict[str, Any]:
    """Every model's collectives, with every schedule that it has."""
    return {
        step.name: {
            variant.name: of_a_layer(step, variant)
            for variant in VARIANTS
            if has_knobs(step, variant)
        }
        for step in steps
    }


def table(results: dict[str, Any]) -> str:
    """The results for the README."""
    rows = []
    for name, variants in results["steps"].items():
        for variant, collectives in variants.items():
            cells = [
                ", ".join(
                    f"{c['number']} {c['kind']} ({c['size']:.2f})"
                    for c in collectives
                    if c["backward"] is backward
                )
                for backward in (False, True)
            ]
            rows.append([f"{name}, {variant}", *cells])
    return report.rendered(["a layer's collectives (size)", "forward", "backward"], rows)


def main() -> None:
    """Counts and writes down."""
    results = {"versions": report.versions(("torch", "transformers")), "steps": measure()}
    report.write(NAME, results, table(results))


if __name__ == "__main__":
    main()
