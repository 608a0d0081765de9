"""The parts of a review that its page and its comment show."""

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

    line: int | None  # its line in the schedule; None if it is not known
    primitive: str
    text: str  # the call, as written in the schedule
    more: str  # details beside the text: the inferred collective, the share of a list
    paths: tuple[str, ...]  # the paths of its modules, with `*` for numbers

    @property
    def does(self) -> str:
        """The first line of its primitive's documentation."""
        return first_line(self.primitive)


@dataclass(frozen=True)
class Reason:
    """The reason of changed lines."""

    what: str  # what was changed
    calls: tuple[Call, ...]  # the schedule's lines that asked for it

    @property
    def is_import(self) -> bool:
        """Whether it is an import for other changed lines."""
        return self.what == IMPORT

    @property
    def by_primitive(self) -> dict[str, list[Call]]:
        """The calls, grouped by the description of their primitive, or of the applied rule."""
        name = self.what.strip("`")
        rule = first_line(name) if name in rules() else ""
        return grouped((rule or call.does, call) for call in self.calls)

    @property
    def lines(self) -> list[Call]:
        """One call for each line of the schedule."""
        return list({call.line: call for call in self.calls}.values())


@dataclass(frozen=True)
class Row:
    """A row of a side-by-side comparison."""

    kind: str  # `same`, `changed`, `added` or `removed`
    old: int | None  # the original's line number; None without a line
    new: int | None  # the rewritten file's line number; None without a line


@dataclass(frozen=True)
class Part:
    """Neighbouring changed lines, with a few lines of context."""

    rows: tuple[Row, ...]  # the lines
    reasons: tuple[Reason, ...] = ()  # why they changed

    @property
    def place(self) -> str:
        """Its line numbers in the rewritten file."""
        numbers = [row.new for row in self.rows if row.new is not None]
        return f"{numbers[0]}-{numbers[-1]}" if numbers else "removed"


@dataclass(frozen=True)
class Compared:
    """Two texts of a file side by side."""

    name: str  # the file's name in the output
    old: str  # the text on the left
    new: str  # the text on the right
    parts: tuple[Part, ...]  # the differing parts
    absolute: int = 0  # the number of imports that only became absolute, which are not shown

    def count(self, *kinds: str) -> int:
        """The number of lines of these kinds."""
        return sum(row.kind in kinds for part in self.parts for row in part.rows)

    @property
    def added(self) -> int:
        """The number of lines that only the right side has."""
        return self.count("added", "changed")

    @property
    def removed(self) -> int:
        """The number of lines that only the left side has."""
        return self.count("removed", "changed")

    @property
    def length(self) -> int:
        """The number of lines of the left side."""
        return len(self.old.splitlines())

    @property
    def kept(self) -> float:
        """The share of the original's lines that are unchanged."""
        return 1 - (self.removed + self.absolute) / max(self.length, 1)


@dataclass(frozen=True)
class Helper:
    """A file that was written beside the model file."""

    name: str
    length: int  # the number of lines
    about: str  # the first line of its docstring
    reason: Reason  # why it is needed


@dataclass(frozen=True)
class RuleOutcome:
    """The outcome of a rule."""

    rule: str  # its name
    does: str  # the first line of its documentation
    fired: bool  # whether it was applied anywhere
    words: tuple[str, ...]  # messages where it was applied, or why not
    call: Call  # the schedule's line that asked for it


@dataclass(frozen=True)
class Check:
    """One comparison of verification, for every world size."""

    name: str  # what was compared
    # The result for each world size, with the error and its limit; None if not compared.
    cells: tuple[Mapping[str, Any] | None, ...]


@dataclass(frozen=True)
class Verification:
    """The result of verification."""

    verdict: str  # `equal`, `not equal`, `failed` or `not run`
    worlds: tuple[str, ...]  # the world sizes and layouts of pipelines, as text
    checks: tuple[Check, ...]  # the comparisons
    failures: tuple[str, ...]  # errors of runs that did not finish
    is_stale: bool  # whether the source or the schedule had changed before

    @property
    def failed(self) -> int:
        """The number of failed comparisons."""
        return sum(cell is not None and not cell["ok"] for c in self.checks for cell in c.cells)

    @property
    def compared(self) -> int:
        """The number of comparisons."""
        return sum(cell is not None for check in self.checks for cell in check.cells)


@dataclass(frozen=True)
class ScheduleLine:
    """A line of the schedule."""

    number: int
    text: str  # the line
    causes: tuple[tuple[str, int, str], ...]  # caused changes: file, number of the part, lines
