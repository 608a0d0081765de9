"""The result of a verification, as text and as a record."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from slapo_rewrite.code.text import with_wildcards
from slapo_rewrite.verify.one_check import Check
from slapo_rewrite.verify.rank_layout import World, listed, named, ranks_of, recorded

WIDTH = 110
OUTPUTS = ("outputs", "loss", "outputs in eval mode", "loss in eval mode")


@dataclass(kw_only=True)
class Row(Check):
    """One check in one world, with the worst rank's result."""

    world: World  # the world size, or the layout of a pipeline
    rank: int  # the worst rank


@dataclass(frozen=True)
class Failure:
    """Why a world did not run to its end."""

    world: World  # the world size, or the layout of a pipeline
    headline: str  # one line: what happened, on which rank, in which step
    text: str  # the error's message, or where each rank hangs
    stage: str  # the step of the verification, as in the headline


@dataclass(frozen=True)
class Directive:
    """One line of the schedule, with the module paths that it changed."""

    place: str
    text: str
    paths: tuple[str, ...]

    def covers(self, module_path: str) -> int | None:
        """The number of levels from the nearest path down to the module; None if not below any."""
        path = with_wildcards(module_path).split(".")
        distances = [
            len(path) - len(own)
            for own in (p.split(".") if p else [] for p in map(with_wildcards, self.paths))
            if path[: len(own)] == own
        ]
        return min(distances, default=None)


@dataclass
class Report:
    """The outcome of one verification."""

    worlds: tuple[World, ...]  # the requested world sizes and layouts of pipelines
    rows: list[Row] = field(default_factory=list)  # one per check and world
    failures: list[Failure] = field(default_factory=list)  # worlds that did not run to their end
    # By world: the largest share of the original's parameters that a rank holds.
    shares: dict[World, float] = field(default_factory=dict)
    # By world: the first module whose output differs, and its error.
    modules: dict[World, tuple[str, float]] = field(default_factory=dict)
    # The schedule's lines, from the output's record.
    directives: list[Directive] = field(default_factory=list)
    # Reasons why the verdict means less than it seems to.
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # further remarks
    # The inputs that have changed since the output was written: "source", "schedule".
    changed: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether rewritten equals original in every world."""
        ran = {row.world for row in self.rows}
        return not self.failures and all(r.ok for r in self.rows) and ran == set(self.worlds)

    @property
    def verdict(self) -> str:
        """The result in one line."""
        if self.ok:
            return f"verified: rewritten equals original at {listed(self.worlds)}"
        wrong = [row for row in self.rows if not row.ok]
        if wrong:
            where = listed([w for w in self.worlds if any(row.world == w for row in wrong)])
            names = ", ".join(dict.fromkeys(row.name for row in wrong))
            return f"NOT equal at {where}: {names}"
        if self.failures:
            return f"NOT verified: {self.failures[0].headline}"
        return "NOT verified: nothing was compared"

    def render(self, width: int = WIDTH) -> str:
        """The whole report as plain text."""
        parts = [_table(self.rows, width)] if self.rows else []
        for world, share in self.shares.items():
            if ranks_of(world) > 1:
                parts.append(f"a rank of {world} holds {share:.2f} of the parameters")
        parts += [f"note: {note}" for note in self.notes]
        parts += [f"warning: {warning}" for warning in self.warnings]
        for failure in self.failures:
            parts += ["", failure.headline, *_indented(failure.text.splitlines())]
        for world in dict.fromkeys(row.world for row in self.rows if not row.ok):
            parts += ["", *self._blame(world)]
        return "\n".join([*parts, "", self.verdict]).strip("\n") + "\n"

    def _blame(self, world: World) -> list[str]:
        """Lines that say where to look for the cause of failed checks in this world."""
        wrong = [row for row in self.rows if row.world == world and not row.ok]
        lines = [f"at {named(world)}:", *map(_what, wrong)]
        if world in self.modules:
            path, error = self.modules[world]
            lines.append(f"  first module with another output: {path}, by {error:.1e}")
            lines += self._schedule_lines(path)
        row = next((row for row in wrong if row.differs), None)
        if row is not None:
            forward_ok = not any(r.name in OUTPUTS for r in wrong)
            lines += self._parameters(row, forward_ok and row.name.startswith("gradients"))
        return lines

    def _parameters(self, row: Row, backward: bool) -> list[str]:
        """Lines on the parameters to look at first, with the schedule's lines for their modules."""
        roles = {"first": row.differs[0]}
        if backward:  # the backward pass starts with the last one
            roles["last, so the first that the backward pass gets wrong"] = row.differs[-1]
        roles["worst"] = max(row.differs, key=lambda pair: pair[1])
        count = f"the {len(row.differs)} parameters" if len(row.differs) > 1 else "one parameter"
        lines = [f"  of {count} wrong in `{row.name}`, in model order:"]
        for name, error in dict.fromkeys(roles.values()):
            role = ", ".join(role for role, pair in roles.items() if pair == (name, error))
            amount = f" by {error:.1e}" if math.isfinite(error) else ""
            lines.append(f"    {role}: {name}{amount}, in module {module_of(name) or 'itself'}")
            lines += self._schedule_lines(module_of(name))
        if backward and row.after:
            lines.append(f"    right again: {row.after}, in module {module_of(row.after)}")
            lines += self._schedule_lines(module_of(row.after))
        return lines

    def _schedule_lines(self, module_path: str) -> list[str]:
        near = [
            (distance, number, directive)
            for number, directive in enumerate(self.directives)
            if (distance := directive.covers(module_path)) is not None
        ]
        lines = [f"      {d.place}: {d.text}" for *_, d in sorted(near, key=lambda n: n[:2])]
        return list(dict.fromkeys(lines)) or ["      no line of the schedule names it"]

    def record(self) -> dict[str, Any]:
        """The record for `rewrite.json`, with errors rounded up to powers of ten."""
        verdict = "equal" if self.ok else "not equal" if self.rows else "not run"
        if self.failures:
            verdict = "failed"
        return {
            "verdict": verdict,
            "worlds": [recorded(world) for world in self.worlds],
            "changed": list(self.changed),
            "parameters_on_a_rank": {str(w): round(s, 2) for w, s in self.shares.items()},
            "checks": [_record_row(row) for row in self.rows],
            "failures": [{"world": recorded(f.world), "what": f.headline} for f in self.failures],
        }


def _record_row(row: Row) -> dict[str, Any]:
    kept: dict[str, Any] = {"world": recorded(row.world), "check": row.name, "ok": row.ok}
    if row.limit is not None:
        kept["error"] = None if row.error is None else power_of_ten(row.error)
        kept["limit"] = row.limit
    return kept


def power_of_ten(value: float) -> float | str:
    """The value rounded up to a power of ten, so that machines that round differently agree."""
    if not math.isfinite(value):
        return "inf"
    return 0.0 if value == 0 else float(f"1e{math.ceil(math.log10(value))}")


def module_of(parameter: str) -> str:
    """The path of the module that holds a parameter."""
    return parameter.rpartition(".")[0]


def merge(world: World, results: Mapping[int, Mapping[str, Any]]) -> list[Row]:
    """Merges the ranks' checks to one row per check, with the worst rank's figures."""
    rows: dict[str, Row] = {}
    for rank, result in sorted(results.items()):
        for check in result.get("checks", []):
            fields = {**check, "differs": [(name, error) for name, error in check["differs"]]}
            row = Row(world=world, rank=rank, **fields)
            known = rows.get(row.name)
            if known is None or _badness(row) > _badness(known):
                rows[row.name] = row
    return list(rows.values())


def _badness(row: Row) -> tuple[bool, float]:
    return not row.ok, row.error or 0.0


def _table(rows: Iterable[Row], width: int) -> str:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading, how in (("world", "right"), ("check", "left"), ("", "left"), ("error", "right")):
        table.add_column(heading, justify=how, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("limit", justify="right", no_wrap=True)
    table.add_column("original's own", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    before: World | None = None
    for row in rows:
        table.add_row(
            str(row.world) if row.world != before else "",
            row.name,
            "ok" if row.ok else "WRONG",
            figure(row.error),
            figure(row.limit, 0),
            figure(row.own),
            row.detail if row.ok else "",
        )
        before = row.world
    text = io.StringIO()
    console = Console(file=text, width=width, color_system=None, force_terminal=False)
    console.print(table, markup=False, highlight=False)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _what(row: Row) -> str:
    """One line on a failed check."""
    rank = f" (rank {row.rank})" if ranks_of(row.world) > 1 else ""
    amount = f"differs by {figure(row.error)}" if row.error is not None else ""
    words = [text for text in (row.detail.strip().replace("\n", "\n    "), amount) if text]
    return f"  {row.name}{rank}: {' '.join([row.place, ', '.join(words)]).strip()}"


def figure(value: float | None, digits: int = 1) -> str:
    """A relative error as text for output."""
    return "" if value is None else "0" if value == 0 else f"{value:.{digits}e}"


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}".rstrip() for line in lines]
