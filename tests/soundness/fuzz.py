"""Runs random models and schedules through the tool and compares the numbers.

    python -m tests.soundness.fuzz --seconds 600

Every defect is made smaller and written to a folder, as a model file and a schedule file, with the
command that shows it again.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from tests.soundness import blocks, mutate, ops, spelled
from tests.soundness.pairs import (
    CRASHED,
    DEFECTS,
    LATE,
    MOOT,
    REFUSED,
    RIGHT,
    UNFIT,
    WARNED,
    Judge,
    Pair,
    Verdict,
)
from tests.soundness.ranks import Ranks
from tests.soundness.shrinking import shrunk

GENERATORS = {
    "ops": ops.pair,
    "blocks": blocks.pair,
    "mutate": mutate.pair,
    "spelled": spelled.pair,
}
FRESH = 1500  # pairs that one process judges; what torch and the tool remember grows


@dataclass
class Summary:
    """What became of how many pairs, by generator."""

    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    codes: Counter[tuple[str, str]] = field(default_factory=Counter)
    worlds: Counter[int] = field(default_factory=Counter)

    def add(self, generator: str, verdict: Verdict) -> None:
        """Counts one."""
        self.kinds[generator, verdict.kind] += 1
        if verdict.kind == REFUSED:
            self.codes[generator, verdict.code] += 1
        self.worlds.update(verdict.worlds)

    def merge(self, other: Summary) -> None:
        """Counts those of another."""
        self.kinds += other.kinds
        self.codes += other.codes
        self.worlds += other.worlds

    def render(self) -> str:
        """A table."""
        names = list(dict.fromkeys(g for g, _ in self.kinds))
        columns = [RIGHT, REFUSED, *DEFECTS, WARNED, LATE, UNFIT, MOOT]
        rows = [["", "pairs", *columns]]
        for name in [*names, "all"]:
            counts = [
                sum(n for (g, k), n in self.kinds.items() if k == c and name in (g, "all"))
                for c in columns
            ]
            rows.append([name, *map(str, [sum(counts), *counts])])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
        for name in names:
            codes = [f"{c} {n}" for (g, c), n in sorted(self.codes.items()) if g == name]
            lines.append(f"{name} refused: {', '.join(codes)}")
        ran = [f"{n} at {w}" for w, n in sorted(self.worlds.items())]
        return "\n".join([*lines, f"ran: {', '.join(ran)} ranks"])


def pairs(seed: int, kinds: list[str]) -> Iterator[tuple[str, int, Pair]]:
    """Pairs without end; each by its generator and a seed of its own."""
    number = 0
    while True:
        for kind in kinds:
            own = seed * 1_000_003 + number
            yield kind, own, GENERATORS[kind](random.Random(own))
        number += 1


def main() -> int:
    """Runs the command line; 1 where there was a defect."""
    parser = argparse.ArgumentParser(prog="python -m tests.soundness.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--kinds", default=",".join(GENERATORS))
    parser.add_argument("--out", type=Path, default=Path("fuzz"), help="where defects are written")
    parser.add_argument("--again", type=Path, help="judge what is in this folder, no more")
    parser.add_argument("--breadth", action="store_true", help="tell what is refused in vain")
    parser.add_argument("--no-shrinking", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.again:
        return again(options.again)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    summary, seen = Summary(), Counter[str]()
    asked = vain = 0
    deadline = time.monotonic() + options.seconds
    print(f"seed {seed}", flush=True)

    def stop(*_: object) -> None:  # and say what there was until then
        nonlocal deadline
        deadline = 0.0

    signal.signal(signal.SIGTERM, stop)
    with Ranks() as ranks:
        judge = Judge(ranks)
        for done, (kind, own, pair) in enumerate(pairs(seed, options.kinds.split(","))):
            if time.monotonic() > deadline:
                break
            if done % FRESH == FRESH - 1:
                ranks.stop()
                print(summary.render(), flush=True)
            verdict = judge(pair)
            summary.add(kind, verdict)
            if options.breadth and verdict.kind == REFUSED and pair.statement:
                asked += 1
                if judge.is_refused_in_vain(pair):
                    vain += 1
                    print(f"refused, and would be right: {pair.name!r}", flush=True)
            if not verdict.is_defect:
                continue
            if not options.no_shrinking:
                at = replace(judge, worlds=verdict.worlds[-1:] or judge.worlds)
                pair = shrunk(pair, verdict, at)
                verdict = at(pair)
            key = f"{verdict.kind} {verdict.code} {essence(pair)}"
            seen[key] += 1
            if seen[key] > 1:
                continue
            folder = options.out / f"{verdict.kind}_{kind}_{own}"
            write(folder, pair, verdict)
            lines = verdict.text.strip().splitlines()
            print(f"{verdict.kind} {verdict.code}: {pair.name!r}")
            print(f"    {' '.join(lines[-1:] if verdict.kind == CRASHED else lines[:2])}")
            print(f"    {sys.executable} -m tests.soundness.fuzz --again {folder}", flush=True)
    print(summary.render())
    if options.breadth:
        print(f"{vain} of {asked} refused statements would be right")
    return 1 if any(summary.kinds[k, d] for k in GENERATORS for d in DEFECTS) else 0


def essence(pair: Pair) -> str:
    """What two pairs that show the same defect have in common: the body of `forward`."""
    bodies = re.findall(r"def forward.*?(?=\n\S|\n    def|\Z)", pair.source, re.DOTALL)
    return re.sub(r"\d+", "0", " ".join(bodies[:1]))


def write(folder: Path, pair: Pair, verdict: Verdict) -> None:
    """Writes a pair down, with what became of it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(pair.source)
    (folder / "schedule.py").write_text(pair.schedule)
    (folder / "verdict.txt").write_text(
        f"{verdict.kind} {verdict.code}\n{pair.name}\n{verdict.text}\n"
    )


def again(folder: Path) -> int:
    """Judges a pair that was written down, or all in the folders below."""
    found = 0
    with Ranks() as ranks:
        judge = Judge(ranks)
        for path in sorted(folder.rglob("model.py")):
            name = (path.parent / "verdict.txt").read_text().splitlines()[1]
            pair = Pair(path.read_text(), (path.parent / "schedule.py").read_text(), name)
            verdict = judge(pair)
            found += verdict.is_defect
            print(f"{path.parent.name}: {verdict.kind} {verdict.code} {name}")
            if path.parent == folder:
                print(verdict.text)
    return 1 if found else 0


if __name__ == "__main__":
    # One thread: read before torch is imported, and by the ranks as well.
    if os.environ.get("OMP_NUM_THREADS") != "1":
        sys.exit(
            subprocess.call(
                [sys.executable, "-m", "tests.soundness.fuzz", *sys.argv[1:]],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        )
    sys.exit(main())
