"""The parts of a review, as its page and its comment show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slapo_rewrite.groups import grouped
from slapo_rewrite.primitives.page import first_line, rules

IMPORT = "import what is used below"


@dataclass(frozen=True)
class Call:
    """A primitive call of the schedule, or a collective that one infers."""

    line: int | None  # its line in the schedule; None where that is not known
    primitive: str
    text: str  # the call as the schedule writes it
    more: str  # what the text does not say: the collective that was inferred, the share of a list
    paths: tuple[str, ...]  # the modules it was called on, `*` for any number

    @property
    def does(self) -> str:
        """What its primitive does, in a sentence."""
        return first_line(self.primitive)


@dataclass(frozen=True)
class Reason:
    """Why lines changed."""

    what: str  # what happened there
    calls: tuple[Call, ...]  # the schedule's lines that asked for it

    @property
    def is_import(self) -> bool:
        """Whether it is there only for what other lines need."""
        return self.what == IMPORT

    @property
    def by_primitive(self) -> dict[str, list[Call]]:
        """The calls of each primitive, by what it does; where a rule fired, by what that does."""
        name = self.what.strip("`")
        rule = first_line(name) if name in rules() else ""
        return grouped((rule or call.does, call) for call in self.calls)

    @property
    def lines(self) -> list[Call]:
        """A call of each line."""
        return list({call.line: call for call in self.calls}.values())


@dataclass(frozen=True)
class Row:
    """A line of a file as it was beside the one in its place."""

    kind: str  # `same`, `changed`, `added` or `removed`
    old: int | None  # the number of the original's line; None where it has none
    new: int | None  # likewise of the rewritten file's


@dataclass(frozen=True)
class Part:
    """Neighbouring lines that changed, with a few around them."""

    rows: tuple[Row, ...]  # the lines
    reasons: tuple[Reason, ...] = ()  # why they changed

    @property
    def place(self) -> str:
        """Where it stands in the rewritten file."""
        numbers = [row.new for row in self.rows if row.new is not None]
        return f"{numbers[0]}-{numbers[-1]}" if numbers else "removed"


@dataclass(frozen=True)
class Compared:
    """Two texts of a file side by side."""

    name: str  # the file's name in the output
    old: str  # the text on the left
    new: str  # the text on the right
    parts: tuple[Part, ...]  # where they differ
    absolute: int = 0  # how many imports only became absolute, which is not shown

    def count(self, *kinds: str) -> int:
        """How many lines are of these kinds."""
        return sum(row.kind in kinds for part in self.parts for row in part.rows)

    @property
    def added(self) -> int:
        """Lines that only the right side has."""
        return self.count("added", "changed")

    @property
    def removed(self) -> int:
        """Lines that only the left side has."""
        return self.count("removed", "changed")

    @property
    def length(self) -> int:
        """How many lines the left side has."""
        return len(self.old.splitlines())

    @property
    def kept(self) -> float:
        """The share of the original's lines that stand."""
        return 1 - (self.removed + self.absolute) / max(self.length, 1)


@dataclass(frozen=True)
class Helper:
    """A file that was written beside the model file."""

    name: str
    length: int  # how many lines it has
    about: str  # its first line
    reason: Reason  # what it is there for


@dataclass(frozen=True)
class RuleOutcome:
    """What became of a rule."""

    rule: str  # its name
    does: str  # what it does, in a sentence
    fired: bool  # whether it was applied anywhere
    words: tuple[str, ...]  # where, or why not
    call: Call  # the schedule's line that asked for it


@dataclass(frozen=True)
class Check:
    """One thing that verification compared, in every world."""

    name: str  # what was compared
    # For each world whether it held, with the error and its limit; None where it was not compared.
    cells: tuple[Mapping[str, Any] | None, ...]


@dataclass(frozen=True)
class Verification:
    """What verification found."""

    verdict: str  # `equal`, `not equal`, `failed` or `not run`
    worlds: tuple[str, ...]  # the world sizes, and the layouts of pipelines, in words
    checks: tuple[Check, ...]  # what was compared
    failures: tuple[str, ...]  # what went wrong where a world did not run to its end
    is_stale: bool  # whether the source or the schedule was another one by then

    @property
    def failed(self) -> int:
        """How many comparisons did not hold."""
        return sum(cell is not None and not cell["ok"] for c in self.checks for cell in c.cells)

    @property
    def compared(self) -> int:
        """How many there were."""
        return sum(cell is not None for check in self.checks for cell in check.cells)


@dataclass(frozen=True)
class ScheduleLine:
    """A line of the schedule."""

    number: int
    text: str  # the line
    causes: tuple[tuple[str, int, str], ...]  # what it caused: the places in the output, by file
