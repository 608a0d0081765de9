"""How close is the splitting of `--schedule auto` to the best one, by predicted step time?

    python -m benchmark.auto_exhaustive

In ten models the layers have so few matrices that all splits can be tried: each matrix whole, split
over its outputs (in as many parts as a packed one may have) or over its inputs, in every
combination, the same in all layers; with one sum for the gradients of a block's input, or with one
for each matrix. A combination is legal if the tool accepts it. Outside of the layers all of them
split what `auto` splits. The step of each legal combination is counted and predicted as by
`slapo-rewrite plan`, for the GPUs and the batch that `auto` assumes, but on as many ranks as all of
these models can be split over.

Writes `benchmark/results/auto_exhaustive.json`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmark import report
from slapo_rewrite.auto.derive import derive
from slapo_rewrite.auto.flow import flow_of, is_column, is_row, pattern_of
from slapo_rewrite.auto.oracle import Oracle
from slapo_rewrite.auto.placement_search import ON, TOKENS, Search
from slapo_rewrite.auto.shard_groups import Group, Shard, common_pattern, lines_of, with_parts
from slapo_rewrite.auto.step import Given
from slapo_rewrite.model.folded_step import StepShape
from slapo_rewrite.model.layers import splits_of
from slapo_rewrite.plan.candidates import Predictor, Way
from slapo_rewrite.plan.rewritten_step import counted_rewrite
from slapo_rewrite.project import Project

NAME = "auto_exhaustive"
MODELS = (
    *("gpt2", "gpt_neox", "gpt_neox_japanese", "openai", "codegen"),
    *("mpt", "phi3", "bloom", "bert", "opt"),
)
RANKS = 4  # which divides twelve heads
SEQUENCE = 512
BAR = 1.01


@dataclass(frozen=True)
class Case:
    """A model, and what it can be asked.

    Attributes:
        source: The modeling module.
        oracle: Says what is legal.
        pieces: For each matrix, the sizes of pieces that its result may be packed of: those that
            the model takes it apart into, and that `auto` chose.
        chosen: What `auto` splits in the layers.
        outside: What it splits elsewhere.
    """

    source: str
    oracle: Oracle
    pieces: dict[str, set[tuple[int, ...]]]
    chosen: tuple[Group, ...]
    outside: tuple[Group, ...]

    @classmethod
    def of(cls, source: str, wanted: str = "") -> Case:
        """A source's, and what is said of its model, as `derive` takes them."""
        step = Given("", (), "", written=derive(source, wanted).head)
        oracle = Oracle(source, step)
        model, inputs = oracle.small()
        flow = flow_of(model.train(), inputs, oracle.project.tree.root.live)
        groups = Search(oracle, flow, step.has_loss).run().groups
        inside = tuple(g for g in groups if all("*" in pattern for pattern in g.patterns))
        pieces: dict[str, set[tuple[int, ...]]] = {}
        for pattern, passage in flow.layers.items():
            equal = {(1,) * len(sizes) for sizes in passage.pieces if len(set(sizes)) == 1}
            pieces.setdefault(pattern, set()).update(equal)
        for shard in (shard for group in inside for shard in group.shards if shard.parts):
            parts = shard.parts if len(set(shard.parts)) > 1 else (1,) * len(shard.parts)
            pieces.setdefault(shard.pattern, set()).add(parts)
        return cls(source, oracle, pieces, inside, tuple(g for g in groups if g not in inside))

    def lines(self, groups: Sequence[Group]) -> list[str]:
        """A schedule's lines that split layers so."""
        return lines_of([*groups, *self.outside]) or ["pass"]

    def is_legal(self, groups: Sequence[Group]) -> bool:
        """Whether the tool carries that out."""
        return self.oracle.refusal(self.lines(groups)) is None

    def seconds(self, groups: Sequence[Group]) -> float:
        """The predicted seconds of a step."""
        body = "".join(f"    {line}\n" for line in self.lines(groups))
        shape = StepShape(SEQUENCE, torch.bfloat16, is_gpu=True)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "s.py"
            file.write_text(f"{self.oracle.head}\n\ndef schedule(s):\n{body}", encoding="utf-8")
            project = Project(self.source, str(file))
            counted = counted_rewrite(project, [], [RANKS], shape)
        # Where nothing is split, it is counted on one rank, and is the same on each.
        both = counted[RANKS]
        assert not isinstance(both, str), both
        predictor = Predictor((both[0], None), ON, "bf16", RANKS, lambda stages: ())
        return predictor.predicted(Way(tensor=RANKS, rows=TOKENS // SEQUENCE)).seconds


def units(model: nn.Module) -> dict[str, nn.Module]:
    """The matrices of the repeated layers, by pattern."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        pattern = pattern_of(model, path)
        if "*" in pattern and any(map(is_column, (splits_of(module) or {}).values())):
            found.setdefault(pattern, module)
    return found


def placements(
    pattern: str, module: nn.Module, pieces: Collection[tuple[int, ...]]
) -> Iterator[tuple[Shard, ...]]:
    """Every way to place a matrix, whose result is taken apart into pieces of some sizes."""
    yield ()
    for wanted in (is_column, is_row):
        by_axis: dict[int, list[str]] = {}
        for (name, axis), split in (splits_of(module) or {}).items():
            if wanted(split) and getattr(module, name) is not None:
                by_axis.setdefault(axis, []).append(name)
        shards = tuple(Shard(pattern, tuple(names), axis) for axis, names in by_axis.items())
        if shards:
            yield shards
        for sizes in pieces if shards and wanted is is_column else ():
            yield with_parts(shards, sizes)


def combinations(case: Case) -> Iterator[tuple[Group, ...]]:
    """Every legal combination, gradients summed once where that is legal, too."""
    model = case.oracle.project.tree.root.live
    known = units(model)
    ways = [
        [*placements(pattern, module, case.pieces.get(pattern, ()))]
        for pattern, module in known.items()
    ]
    for chosen in itertools.product(*ways):
        shards = tuple(shard for way in chosen for shard in way)
        plain = (Group(shards),) if shards else ()
        if not case.is_legal(plain):
            continue
        yield plain
        columns = [s.pattern for s in shards if _is_column(known[s.pattern], s)]
        for parents in _parents(columns):
            if case.is_legal(once := (Group(shards, summed=parents),)):
                yield once


def _is_column(module: nn.Module, shard: Shard) -> bool:
    return is_column((splits_of(module) or {})["weight", shard.axis])


def _parents(columns: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Modules that several matrices that are split over their outputs are given one value by."""
    beside: dict[str, list[str]] = {}
    for pattern in columns:
        beside.setdefault(pattern.rpartition(".")[0], []).append(pattern)
    found = [common_pattern(own) for own in beside.values() if len(own) > 1]
    for count in range(1, len(found) + 1):
        yield from itertools.combinations([p for p in found if not p.endswith("*")], count)


def outcome(case: Case) -> dict[str, Any]:
    """The choice of `auto`, and the best combination."""
    tried = 0
    best: tuple[Group, ...] = ()
    seconds = case.seconds(())
    whole = seconds
    for groups in combinations(case):
        tried += 1
        if (took := case.seconds(groups)) < seconds:
            best, seconds = groups, took
    return {
        "units": len(units(case.oracle.project.tree.root.live)),
        "asked": case.oracle.asked,
        "legal": tried,
        "auto": case.lines(case.chosen),
        "auto_seconds": case.seconds(case.chosen),
        "best": case.lines(best),
        "best_seconds": seconds,
        "whole_seconds": whole,
    }


def table(content: dict[str, Any]) -> str:
    """The results for the README."""
    rows = []
    for found in content["models"]:
        times = [found[f"{name}_seconds"] for name in ("whole", "best", "auto")]
        row: list[Any] = [found["model"], found["units"], found["asked"], found["legal"]]
        row += [f"{1000 * each:.2f}" for each in times]
        rows.append([*row, f"{times[2] / times[1]:.3f}"])
    header = ["layers of", "matrices", "asked", "legal", "whole, ms", "best, ms", "auto, ms"]
    return report.rendered([*header, "auto over best"], rows)


def main() -> None:
    """Tries everything and writes down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=MODELS, help="models, the others as they are")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    path = report.FOLDER / "results" / f"{NAME}.json"
    done = {f["model"]: f for f in report.read(NAME)["models"]} if path.exists() else {}
    for family in options.only or MODELS:
        case = Case.of(f"transformers.models.{family}.modeling_{family}")
        done[family] = {"model": family, **outcome(case)}
        content = {
            "versions": report.versions(("torch", "transformers")),
            "models": [done[known] for known in MODELS if known in done],
        }
        report.write(NAME, content, table(content))


if __name__ == "__main__":
    main()
