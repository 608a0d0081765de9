"""The errors that users can cause, and the only code that renders them.

Every kind of mistake is a subclass of `RewriteError`. It has the place in the user's files
(`Span`), further places that belong to it, and a hint what to do, and renders like a compiler's
diagnostic. A user only sees a traceback for a defect of the tool.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Span:
    """A place in a user's file."""

    path: str  # the file, as shown to the user
    line: int  # 1-based
    column: int = 1  # 1-based, in characters
    width: int = 1  # the number of underlined characters; at least 1
    text: str = ""  # the whole line
    note: str = ""  # a note beside the caret

    @classmethod
    def of_line(cls, path: str, line: int, text: str, note: str = "") -> Span:
        """The whole line without its indentation."""
        indent = len(text) - len(text.lstrip())
        return cls(path, line, indent + 1, max(1, len(text) - indent), text, note)

    @classmethod
    def of_bytes(
        cls, path: str, place: tuple[int, int, int, int], text: str, note: str = ""
    ) -> Span:
        """A place in Python's form: lines, and columns from 0 in UTF-8 bytes."""
        line, column, last, end = place
        start, stop = (len(text.encode()[:n].decode(errors="ignore")) for n in (column, end))
        width = (stop if last == line else len(text)) - start
        return cls(path, line, start + 1, max(1, width), text, note)

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}"


def warning(text: str, at: Span | None) -> str:
    """The text of a warning, after its place if it has one: `file.py:3: text`."""
    return f"{at.path}:{at.line}: {text}" if at is not None else text


def first_line(error: BaseException) -> str:
    """The first line of a foreign exception's message; its type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class Cause(Protocol):
    """The call in the schedule that asked for something."""

    @property
    def at(self) -> Span | None:
        """The place of the call."""
        ...


class RewriteError(Exception):
    """A mistake that the user can correct."""

    code = "SR000"  # identifies the kind of mistake; never reused
    exit_code = 2  # of the command

    def __init_subclass__(cls, code: str, exit_code: int = 2) -> None:
        cls.code, cls.exit_code = code, exit_code

    def __init__(
        self,
        message: str,
        *,
        at: Span | None = None,
        also: Sequence[Span | None] = (),
        hint: str | None = None,
        cause: Cause | Sequence[Cause] | None = None,
    ) -> None:
        """Creates the error; see the attributes below.

        Only the first of several causes is shown as a place.
        """
        super().__init__(message)
        self.message = message
        self.at = at  # the place; None if no file is involved, as for a bad option
        asked = [cause] if cause is not None and not isinstance(cause, Sequence) else cause or ()
        # Other places that belong to it, usually the schedule's line.
        others = (*also, *(c.at for c in asked[:1]))
        self.also = tuple(p for p in dict.fromkeys(others) if p is not None and p != at)
        self.hint = hint  # what the user can do

    def record(self) -> dict[str, Any]:
        """The error as data: the code as the reason, the message, the places, the hint."""
        return {
            "reason": self.code,
            "error": type(self).__name__,
            "message": self.message,
            "places": [
                {"path": p.path, "line": p.line, "column": p.column} for p in self._places()
            ],
            "hint": self.hint,
        }

    def render(self) -> str:
        """The diagnostic: a headline, each place with its line and a caret, the hint."""
        return excerpt(f"error[{self.code}]: {self.message}", self._places(), self.hint)

    def _places(self) -> list[Span]:
        return [*([self.at] if self.at else []), *self.also]


def excerpt(headline: str, places: Sequence[Span], hint: str | None = None) -> str:
    """A headline, each place with its line and a caret, a hint."""
    lines = [headline]
    gutter = len(str(max((p.line for p in places), default=0)))
    for number, place in enumerate(places):
        lines.append(f"{' ' * gutter}{' -->' if number == 0 else ' :::'} {place}")
        if place.text:
            lead = place.text[: place.column - 1].expandtabs(4)
            carets = "^" * max(1, min(place.width, len(place.text) - place.column + 1))
            lines.append(f"{' ' * gutter} |")
            lines.append(f"{place.line:>{gutter}} | {place.text.expandtabs(4)}")
            lines.append(f"{' ' * gutter} | {' ' * len(lead)}{carets} {place.note}".rstrip())
    if hint:
        lines.append(f"{' ' * gutter} = help: {hint}")
    return "\n".join(lines)


class SourceError(RewriteError, code="SR101"):
    """The source cannot be found, read or parsed."""


class ModelError(RewriteError, code="SR102"):
    """`model(m)` is missing, fails, or does not return a module."""


class UnfollowableConstruction(RewriteError, code="SR103"):
    """The module is not made at a construction site that the rewriter can edit."""


class UnfollowableSize(RewriteError, code="SR104"):
    """A `forward` uses a sharded value or size in a way that is not known to be right."""


class NameTaken(RewriteError, code="SR105"):
    """A name that the rewrite needs already means something else in the source."""


class OtherNumbers(RewriteError, code="SR106"):
    """The rewritten model computes something else than the original."""


class ScheduleError(RewriteError, code="SR201"):
    """The schedule file cannot be read, does not parse, or fails while it runs."""


class UnknownPath(RewriteError, code="SR202"):
    """A selection selects nothing."""


class UnknownParameter(RewriteError, code="SR203"):
    """A module has no parameter, buffer or attribute of this name."""


class UnknownKnob(RewriteError, code="SR204"):
    """`--set` names a knob that the schedule does not have."""


class BadKnob(RewriteError, code="SR205"):
    """`--set` gives a knob a value that its annotation does not allow."""


class BadArgument(RewriteError, code="SR206"):
    """A primitive is called with an argument that it does not take."""


class UnknownPrimitive(RewriteError, code="SR207"):
    """There is no primitive of this name."""


class BadPattern(RewriteError, code="SR210"):
    """The pattern is not a pure computation, or its source cannot be read."""


class BadAxis(RewriteError, code="SR301"):
    """The axis is out of range for the parameter, or cannot be sharded there."""


class BadSize(RewriteError, code="SR302"):
    """A size that the world size or the packed parts do not divide."""


class ShardedTwice(RewriteError, code="SR303"):
    """The same parameter is sharded a second time."""


class SyncMismatch(RewriteError, code="SR304"):
    """A collective that does not fit the value or layer that it is applied to."""


class Unsupported(RewriteError, code="SR305"):
    """A request that this primitive does not support for this kind of module."""


class ConflictingEdits(RewriteError, code="SR306"):
    """Two lines of the schedule contradict each other."""


class IncompleteShard(RewriteError, code="SR307"):
    """A parameter has to be sharded together with another one, but is not."""


class WeightsMisfit(RewriteError, code="SR308"):
    """A replacement's weights cannot be made from the original's, or the reverse."""


class NoMatch(RewriteError, code="SR309"):
    """The code to replace is not found, or must not be replaced there."""


class CannotCut(RewriteError, code="SR310"):
    """A place where no pipeline stage can end, or a value that stages cannot send."""


class OutputEdited(RewriteError, code="SR401"):
    """The output folder holds hand edits, or files that the tool did not write."""


class OutputUnwritable(RewriteError, code="SR402"):
    """The output folder cannot be written."""


class NotAnOutput(RewriteError, code="SR403"):
    """The folder was not written by slapo-rewrite, or its record is damaged."""


class OutputFails(RewriteError, code="SR404"):
    """The output cannot be imported or its model built, although the original's can."""


class BrokenOutput(RewriteError, code="SR405", exit_code=3):
    """The output fails at a line that the tool wrote, which is a defect."""


class OthersWouldChange(RewriteError, code="SR406"):
    """A support folder was made by another version of the tool, for other outputs as well."""


class UsageError(RewriteError, code="SR501"):
    """The command line is wrong or incomplete."""


class MissingPackage(RewriteError, code="SR502"):
    """An optional package that a command needs is not installed."""


class BadSpace(RewriteError, code="SR601"):
    """The space to tune has no choices, no points, or too many."""


class BadGrid(RewriteError, code="SR602"):
    """A file of measured throughputs is not what `tune --replay` reads."""


class RunFails(RewriteError, code="SR603"):
    """The training command fails, or does not report its throughput."""


class OtherTrials(RewriteError, code="SR604"):
    """The record of trials belongs to another model, schedule, space or command."""


class NothingFits(RewriteError, code="SR605"):
    """No way to train a model fits the available memory."""


class BadHardware(RewriteError, code="SR606"):
    """The table of a GPU is not what `plan --gpu FILE.toml` reads."""


def unwritable(path: object, error: OSError) -> OutputUnwritable:
    """The error for a file or folder that cannot be written."""
    return OutputUnwritable(f"cannot write `{path}`: {error.strerror or error}")


def nearest(asked: str, known: Iterable[str], least: float = 0.3) -> list[str]:
    """The at most three names in `known` most similar to `asked`, best first."""
    names = sorted(set(known))
    close = difflib.get_close_matches(asked, names, n=3, cutoff=0.6)
    tail = asked.rsplit(".", 1)[-1]
    close += [n for n in names if n.rsplit(".", 1)[-1] == tail and n not in close]
    if not close:
        close = difflib.get_close_matches(asked, names, n=3, cutoff=least)
    return close[:3]


def did_you_mean(asked: str, known: Iterable[str]) -> str | None:
    """A hint with the nearest names; None if no name is near."""
    return offered(nearest(asked, known))


def offered(names: Iterable[str]) -> str | None:
    """A hint with some names; None if there are none."""
    shown = " or ".join(f"`{name}`" for name in names)
    return f"did you mean {shown}?" if shown else None
