"""Plausible schedules with one or two things wrong in them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from tests.soundness import blocks
from tests.soundness.pairs import Pair


def pair(rng: random.Random) -> Pair:
    """A network, and a schedule that is wrong, or happens to be right."""
    while True:
        net = blocks.network(rng)
        done, right = [], list(net.lines)
        for _ in range(rng.choice([1, 1, 2])):
            change = rng.choice(CHANGES)
            changed = change(rng, list(net.lines))
            if changed != net.lines:
                net.lines = changed
                done.append(change.__name__.strip("_"))
        if done and not asks_for_parallel_loss(right, net.lines):
            return net.pair(f"{', '.join(done)}: {'; '.join(blocks.described(net.blocks))}")


def asks_for_parallel_loss(right: list[str], lines: list[str]) -> bool:
    """Whether nobody gathers the logits any more, which is a schedule of its own and not wrong.

    The loss is computed of the parts then, and where there is one the model returns these.
    """
    gather = 's["head"].sync("fwd_post", "all_gather", axis=-1)'
    return gather in right and gather not in lines and 's["head"].shard("weight", 0)' in lines


def one_of(rng: random.Random, lines: list[str], pattern: str) -> int | None:
    """The number of a line that has the pattern."""
    found = [n for n, line in enumerate(lines) if re.search(pattern, line)]
    return rng.choice(found) if found else None


def _left_out(rng: random.Random, lines: list[str]) -> list[str]:
    lines.pop(rng.randrange(len(lines)))
    return lines or ["pass"]


def _sync_left_out(rng: random.Random, lines: list[str]) -> list[str]:
    number = one_of(rng, lines, r"sync\(")
    if number is not None:
        lines.pop(number)
    return lines or ["pass"]


def _twice(rng: random.Random, lines: list[str]) -> list[str]:
    number = one_of(rng, lines, r"\.sync\(|infer|checkpoint")
    if number is not None:
        lines.insert(rng.randrange(number, len(lines)) + 1, lines[number])
    return lines


def _axis(rng: random.Random, lines: list[str]) -> list[str]:
    number = one_of(rng, lines, r"(axis=|, )-?\d")
    if number is not None:
        other = rng.choice(["0", "1", "-1", "2"])
        lines[number] = re.sub(
            r"(axis=|, )-?\d", lambda m: f"{m[1]}{other}", lines[number], count=1
        )
    return lines


def _mode(rng: random.Random, lines: list[str]) -> list[str]:
    number = one_of(rng, lines, r"sync\(\"")
    if number is not None:
        other = rng.choice(["fwd_pre", "fwd_post", "bwd_post"])
        lines[number] = re.sub(r'sync\("\w+"', f'sync("{other}"', lines[number])
    return lines


def _operation(rng: random.Random, lines: list[str]) -> list[str]:
    number = one_of(rng, lines, r"\"(all_reduce|all_gather|reduce_scatter|scatter)\"")
    if number is not None:
        other = rng.choice(["all_reduce", "all_gather", "reduce_scatter", "scatter"])
        text = re.sub(
            r'"(all_reduce|all_gather|reduce_scatter|scatter)"', f'"{other}"', lines[number]
        )
        if other == "all_reduce":
            text = re.sub(r", axis=-?\d", "", text)
        elif "axis" not in text:
            text = text.replace(f'"{other}"', f'"{other}", axis={rng.choice([1, -1])}')
        lines[number] = text
    return lines


def _parts(rng: random.Random, lines: list[str]) -> list[str]:
    number = one_of(rng, lines, r"\.shard\(")
    if number is not None:
        if "parts=" in lines[number]:
            other = rng.choice(["", ", parts=2", ", parts=4", ", parts=[12, 12]"])
            lines[number] = re.sub(r", parts=(\d+|\[[^\]]*\])", other, lines[number])
        else:
            lines[number] = lines[number].replace(")", f", parts={rng.choice([2, 3])})")
    return lines


def _module(rng: random.Random, lines: list[str]) -> list[str]:
    number = one_of(rng, lines, r"\{")
    if number is not None:
        names = re.search(r"\{([\w,]+)\}", lines[number])
        assert names
        kept = names[1].split(",")
        kept.pop(rng.randrange(len(kept)))
        lines[number] = lines[number].replace(
            names[0], kept[0] if len(kept) == 1 else f"{{{','.join(kept)}}}"
        )
    return lines


def _names(rng: random.Random, lines: list[str]) -> list[str]:
    number = one_of(rng, lines, r"\['weight', 'bias'\]|\[\"weight\", \"bias\"\]")
    if number is not None:
        lines[number] = re.sub(
            r"\[.weight., .bias.\]", rng.choice(['"weight"', '"bias"']), lines[number]
        )
    return lines


def _bias_too(rng: random.Random, lines: list[str]) -> list[str]:
    number = one_of(rng, lines, r"shard\(\"weight\"")
    if number is not None:
        lines[number] = lines[number].replace('"weight"', '["weight", "bias"]')
    return lines


def _elsewhere(rng: random.Random, lines: list[str]) -> list[str]:
    number = one_of(rng, lines, r"sync\(\"")
    paths = re.findall(r's\["([\w.]+)"\]', "\n".join(lines))
    if number is not None and paths:
        path = rng.choice([*paths, *(p.rpartition(".")[0] for p in paths if "." in p)])
        lines[number] = re.sub(r's\["[^"]+"\]', f's["{path}"]', lines[number])
    return lines


def _further(rng: random.Random, lines: list[str]) -> list[str]:
    paths = re.findall(r's\["([\w.]+)"\]', "\n".join(lines)) or ["final"]
    mode, op = (
        rng.choice(["fwd_pre", "fwd_post", "bwd_post"]),
        rng.choice(["all_reduce", "all_gather", "scatter"]),
    )
    axis = "" if op == "all_reduce" else f", axis={rng.choice([1, -1])}"
    lines.insert(
        rng.randrange(len(lines) + 1), f's["{rng.choice(paths)}"].sync("{mode}", "{op}"{axis})'
    )
    return lines


CHANGES: list[Callable[[random.Random, list[str]], list[str]]] = [
    _left_out, _sync_left_out, _twice, _axis, _axis, _mode, _operation, _parts, _module, _names, _bias_too,
    _elsewhere, _further,
]  # fmt: skip
