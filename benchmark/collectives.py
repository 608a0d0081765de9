"""What do the bundled schedules send between GPUs, in every layer and around the layers?

    python -m benchmark.collectives

Counts the collectives of a training step on fake tensors and in a fake process group, with one
layer and with two: the difference belongs to a layer, the rest to embedding, head and loss. Sizes
are of the whole tensor, in units of batch x tokens x hidden size. Megatron-LM's collectives are the
minimum for splitting: in a layer an all-reduce after attention and one after the MLP, and as many
in the backward pass (arXiv 1909.08053); with sequence parallelism a reduce-scatter and an
all-gather for each of them (arXiv 2205.05198); around the layers one after the embedding, one for
the gradient of the head's input, and three numbers per token for the loss.

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
    Variant("logits gathered", "sdpa", ("parallel_loss=false",)),
)
# What a step's configuration calls its layers, and its hidden size.
LAYERS = {"GPT2Config": "n_layer", "T5Config": "num_layers"}
HIDDEN = {"GPT2Config": "n_embd", "T5Config": "d_model"}

GATHERED = VARIANTS[-1].name
# How often the whole tensor goes over the wire: an all-reduce is a scatter and a gather.
ROUNDS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}

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
        waits = "wait" in func._schema.name
        if func.namespace in ("c10d", "_c10d_functional") and not waits:
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


def parts(step: Step, variant: Variant) -> dict[str, Any]:
    """The collectives of a layer, of what is around the layers, and what the latter add in all.

    T5's layer is one of the encoder and one of the decoder together.
    """
    layers = LAYERS.get(step.config, "num_hidden_layers")
    one, two = (replace(step, sizes={**step.sizes, layers: number}) for number in (1, 2))
    with tempfile.TemporaryDirectory() as folder:
        module, _ = module_of(step, variant, Path(folder))
        first, both = sent(one, variant, module), sent(two, variant, module)
    layer = both - first
    tokens = step.batch * step.tokens
    unit = tokens * step.sizes[HIDDEN.get(step.config, "hidden_size")] * DTYPE.itemsize
    # The gradients of a norm's weight under sequence parallelism are nothing beside the rest.
    found = {
        "layer": rows_of(layer, unit, unit / 16),
        "around": rows_of(first - layer, unit, tokens * DTYPE.itemsize),
    }
    time = {part: sum(r["size"] * ROUNDS[r["kind"]] for r in rows) for part, rows in found.items()}
    return {**found, "added": round(time["around"] / (time["layer"] * step.sizes[layers]), 3)}


def rows_of(collectives: Sent, unit: int, least: float) -> list[dict[str, Any]]:
    """Collectives by kind and direction, but for those of fewer bytes than `least`.

    Args:
        collectives: The collectives.
        unit: What their sizes are counted in, in bytes.
        least: The size from which one counts, in bytes.
    """
    found: dict[tuple[str, bool], list[float]] = {}
    for (kind, backward, whole), number in collectives.items():
        if whole >= least:
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
            variant.name: parts(step, variant) for variant in VARIANTS if has_knobs(step, variant)
        }
        for step in steps
    }


def table(results: dict[str, Any]) -> str:
    """The results for the README."""
    layers, around = [], []
    for name, variants in results["steps"].items():
        for variant, found in variants.items():
            if variant != GATHERED:
                layers.append([f"{name}, {variant}", *cells(found["layer"])])
            added = f"{found['added']:+.0%}"
            around.append([f"{name}, {variant}", *cells(found["around"]), added])
    first = report.rendered(["a layer's collectives (size)", "forward", "backward"], layers)
    header = ["around the layers (size)", "forward", "backward", "added to all layers'"]
    return f"{first}\n{report.rendered(header, around)}"


def cells(rows: list[dict[str, Any]]) -> list[str]:
    """The collectives forwards, and backwards."""
    return [
        ", ".join(
            f"{row['number']} {row['kind']} ({row['size']:.2f})"
            for row in rows
            if row["backward"] is backward
        )
        for backward in (False, True)
    ]


def main() -> None:
    """Counts and writes down."""
    results = {"versions": report.versions(("torch", "transformers")), "steps": measure()}
    report.write(NAME, results, table(results))


if __name__ == "__main__":
    main()
