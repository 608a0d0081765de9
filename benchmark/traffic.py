"""How many bytes does a training step read and write, before and after rewriting?

    python -m benchmark.traffic [--only BERT-large] [--breakdown VARIANT]

Bytes and operator calls of forward and backward, dropout on, loss with labels, counted on fake
tensors (`benchmark.counted`): no GPU, and equal figures in every run. Matrix products, except for
what they add to their results, and the kernels of flash attention are counted separately, since no
rewrite saves them; the scores that eager attention writes out are not.

The floor is the traffic if everything between matrix products were one kernel
(`floor_bytes`). Writes `benchmark/results/traffic.json`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmark import report
from benchmark.counted import ATTENTION, Call, count
from benchmark.steps import STEPS, Step
from slapo_rewrite.emit.rewrite import Output, rewrite
from slapo_rewrite.schedule.load import ScheduleFile
from slapo_rewrite.verify.isolated_imports import import_output

NAME = "traffic"
BAR = 0.8  # of the way from SDPA to the floor
LARGEST = 15  # rows of a breakdown
PACKAGES = ("torch", "transformers", "triton")


@dataclass(frozen=True)
class Variant:
    """One way to run a step.

    Attributes:
        name: What it is called in tables.
        attention: The attention implementation, by transformers' name.
        knobs: What the bundled schedule is set to, as `name=value`; None for the original.
    """

    name: str
    attention: str
    knobs: tuple[str, ...] | None = None


EAGER = Variant("eager attention", "eager")
SDPA = Variant("SDPA", "sdpa")
OURS = Variant("ours", "sdpa", ("tensor_parallel=false", "fuse=true"))
VARIANTS = (EAGER, SDPA, OURS)


def floor_bytes(step: Step) -> float:
    """Bytes a token between matrix products, where each of these is one kernel.

    In every layer:

    - residual addition (with dropout) and norm, two of them, three in a decoder that looks at an
      encoder: 4 passes over the hidden size forwards, 4 backwards
    - activation (with the bias before it): 2 passes over the inner size forwards and 3 backwards;
      of a gated one 3 and 5
    - the sum over rows that is the gradient of the bias of queries, keys and values: 1 pass over
      them, where they have one
    - rotary embedding of queries and keys: 2 passes over them forwards, and 2 backwards

    And once, the cross entropy: 3 passes over the logits, one of them backwards.
    """
    sizes = step.sizes
    if step.config == "LlamaConfig":
        hidden, inner, layers = (
            sizes[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
        )
        heads = sizes["num_attention_heads"]
        rotated = hidden * (heads + sizes["num_key_value_heads"]) // heads
        elements = layers * (2 * 8 * hidden + 8 * inner + 4 * rotated)
        return 2.0 * (elements + 3 * sizes["vocab_size"])
    if step.config == "T5Config":
        hidden, inner, layers = sizes["d_model"], sizes["d_ff"], sizes["num_layers"]
        encoder = layers * (2 * 8 * hidden + 5 * inner)
        decoder = layers * (3 * 8 * hidden + 5 * inner) + 3 * sizes["vocab_size"]
        both = step.tokens * encoder + step.targets * decoder
        return 2.0 * both / (step.tokens + step.targets)
    hidden = sizes.get("hidden_size") or sizes["n_embd"]
    layers = sizes.get("num_hidden_layers") or sizes["n_layer"]
    elements = layers * (2 * 8 * hidden + 5 * 4 * hidden + 3 * hidden)
    return 2.0 * (elements + 3 * sizes["vocab_size"])


def has_knobs(step: Step, variant: Variant) -> bool:
    """Whether the bundled schedule has all of a variant's knobs."""
    wanted = {knob.partition("=")[0] for knob in variant.knobs or ()}
    return wanted <= set(ScheduleFile.load(step.schedule).knobs)


def rewritten(step: Step, variant: Variant) -> Output:
    """A variant's output; nothing is written."""
    return rewrite(step.source, step.schedule, variant.knobs or ())


def module_of(step: Step, variant: Variant, folder: Path) -> tuple[ModuleType, ModuleType | None]:
    """The module that defines a variant's model, and its kernels where it has any.

    Args:
        step: The model.
        variant: How it runs.
        folder: Where an output is written to.
    """
    if variant.knobs is None:
        return importlib.import_module(step.source), None
    output = rewritten(step, variant)
    place = folder / f"{step.schedule}_{variant.name}".replace(" ", "_")
    place.mkdir()
    for name, text in output.files.items():
        (place / name).write_text(text, encoding="utf-8", newline="")
    module, _ = import_output(place, Path(output.model_file).stem)
    if "kernels.py" not in output.files:
        return module, None
    return module, importlib.import_module(f"{module.__package__}.kernels")


def calls_of(step: Step, variant: Variant) -> list[Call]:
    """The calls of a variant of a step."""
    with tempfile.TemporaryDirectory() as folder:
        module, kernels = module_of(step, variant, Path(folder))
        return count(lambda: step.build(module, variant.attention), lambda: step.inputs(0), kernels)


def is_fixed(call: Call) -> bool:
    """Whether no rewriting saves it: matrix products and flash attention."""
    return call.is_product or call.operator.startswith(ATTENTION)


def summed(step: Step, calls: list[Call]) -> dict[str, Any]:
    """The figures of one variant."""
    total = sum(call.bytes for call in calls)
    between = [call for call in calls if not is_fixed(call)]
    # What products add is read besides, by the original's as well.
    added = [replace(call, bytes=call.addend) for call in calls if call.addend]
    moved = sum(call.bytes for call in between + added)
    return {
        "bytes_per_token": round(moved / step.step_tokens),
        "all_bytes_per_token": round(total / step.step_tokens),
        "calls": len(between),
        "all_calls": len(calls),
        "largest": breakdown(step, between + added),
    }


def breakdown(step: Step, calls: list[Call]) -> list[dict[str, Any]]:
    """Where most of the bytes go: by class, operator and direction."""
    bytes_: Counter[tuple[str, str, bool]] = Counter()
    number: Counter[tuple[str, str, bool]] = Counter()
    for call in calls:
        key = (call.module, call.operator, call.backward)
        bytes_[key] += call.bytes
        number[key] += 1
    return [
        {
            "module": key[0],
            "operator": key[1],
            "backward": key[2],
            "calls": number[key],
            "bytes_per_token": round(moved / step.step_tokens),
        }
        for key, moved in bytes_.most_common(LARGEST)
    ]


def measure(step: Step) -> dict[str, Any]:
    """One model's figures; variants that its schedule does not offer yet are left out."""
    return {
        "batch": step.batch,
        "tokens": step.tokens,
        "targets": step.targets,
        "floor_bytes_per_token": round(floor_bytes(step)),
        "variants": {
            variant.name: summed(step, calls_of(step, variant))
            for variant in VARIANTS
            if has_knobs(step, variant)
        },
    }


def share(row: dict[str, Any]) -> float | None:
    """How much of the way from SDPA to the floor ours goes."""
    variants = row["variants"]
    if OURS.name not in variants:
        return None
    start, floor = variants[SDPA.name]["bytes_per_token"], row["floor_bytes_per_token"]
    gone: float = (start - variants[OURS.name]["bytes_per_token"]) / (start - floor)
    return gone


def table(results: dict[str, Any]) -> str:
    """The results for the README."""
    rows = []
    for name, row in results["steps"].items():
        cells: list[Any] = [name]
        for variant in VARIANTS:
            figures = row["variants"].get(variant.name)
            cells.append("-" if figures is None else f"{figures['bytes_per_token'] / 1e6:.2f}")
        cells.append(f"{row['floor_bytes_per_token'] / 1e6:.2f}")
        gone = share(row)
        cells += ["-" if gone is None else f"{gone:.0%}", f"{BAR:.0%}"]
        for variant in VARIANTS:
            figures = row["variants"].get(variant.name)
            cells.append("-" if figures is None else figures["calls"])
        rows.append(cells)
    names = [variant.name for variant in VARIANTS]
    header = ["MB a token, and calls a step", *names, "floor", "share of the way", "bar"]
    return report.rendered(header + [f"calls: {name}" for name in names], rows)


def listed(figures: dict[str, Any]) -> str:
    """A variant's breakdown."""
    rows = [
        [
            f"{row['module'] or '-'}: {row['operator']}",
            "backward" if row["backward"] else "forward",
            row["calls"],
            f"{row['bytes_per_token'] / 1e3:.1f}",
        ]
        for row in figures["largest"]
    ]
    return report.rendered(["where", "direction", "calls", "KB a token"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Counts and writes down."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="models whose names begin so; writes nothing")
    parser.add_argument("--breakdown", metavar="VARIANT", help="print where its bytes go")
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {"versions": report.versions(PACKAGES), "steps": {}}
    for step in STEPS:
        if step.name.startswith(options.only):
            results["steps"][step.name] = measure(step)
    if options.breakdown:
        for name, row in results["steps"].items():
            if options.breakdown not in row["variants"]:
                sys.exit(
                    f"benchmark.traffic: {name} has no variant {options.breakdown!r}; "
                    f"its variants are {', '.join(row['variants'])}"
                )
            print(name, listed(row["variants"][options.breakdown]), sep="\n\n")
    if options.only:
        print(table(results))
    else:
        report.write(NAME, results, table(results))


if __name__ == "__main__":
    main()
