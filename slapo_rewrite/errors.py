"""What can go wrong, and the only code that renders it.

Every mistake a user can make is an exception class of its own under `RewriteError`. It carries the
place in the user's files (`Span`), further places that belong to it, and a hint that says what to
do, and renders like a compiler's diagnostic. A traceback reaches a user only for a defect of the
tool.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Span:
    """A place in a user's file."""

    path: str  # the file as it is shown to the user
    line: int  # 1-based
    column: int = 1  # 1-based, in characters
    width: int = 1  # how many characters the caret underlines; at least 1
    text: str = ""  # the whole line
    note: str = ""  # words that stand beside the caret

    @classmethod
    def of_line(cls, path: str, line: int, text: str, note: str = "") -> Span:
        """All that stands in a line, its indentation apart."""
        indent = len(text) - len(text.lstrip())
        return cls(path, line, indent + 1, max(1, len(text) - indent), text, note)

    @classmethod
    def of_bytes(
        cls, path: str, place: tuple[int, int, int, int], text: str, note: str = ""
    ) -> Span:
        """What stands at a place as Python says it: lines, and columns from 0 in UTF-8 bytes."""
        line, column, last, end = place
        start, stop = (len(text.encode()[:n].decode(errors="ignore")) for n in (column, end))
        width = (stop if last == line else len(text)) - start
        return cls(path, line, start + 1, max(1, width), text, note)

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}"


def warning(text: str, at: Span | None) -> str:
    """A warning in words, behind its place if it has one: `file.py:3: text`."""
    return f"{at.path}:{at.line}: {text}" if at is not None else text


def first_line(error: BaseException) -> str:
    """What an error of somebody else's code says, in its first line; its type where it is mute."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class Cause(Protocol):
    """Who asked for something: a call in the schedule."""

    @property
    def at(self) -> Span | None:
        """Where the schedule calls it."""
        ...


class RewriteError(Exception):
    """A mistake that the user can mend."""

    code = "SR000"  # names this kind of mistake; never reused
    exit_code = 2  # what the command exits with

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
        """Says what is wrong.

        Of several causes the first is shown as a place.
        """
        super().__init__(message)
        self.message = message
        self.at = at  # where it is; None where no file is involved (a bad option, say)
        asked = [cause] if cause is not None and not isinstance(cause, Sequence) else cause or ()
        # Other places that belong to it, the schedule's line as a rule.
        others = (*also, *(c.at for c in asked[:1]))
        self.also = tuple(p for p in dict.fromkeys(others) if p is not None and p != at)
        self.hint = hint  # what to do about it

    def record(self) -> dict[str, Any]:
        """The same for programs: the code as the reason, the message, the places, the hint."""
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
    """No construction site that the rewriter can edit makes this module."""


class UnfollowableSize(RewriteError, code="SR104"):
    """A `forward` depends on a sharded size in a way that cannot be followed."""


class NameTaken(RewriteError, code="SR105"):
    """A name that the rewrite needs already means something else in the source."""


class OtherNumbers(RewriteError, code="SR106"):
    """What comes of the schedule computes something else than the original."""


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
    """What is looked for is not a pure computation, or cannot be read."""


class BadAxis(RewriteError, code="SR301"):
    """The axis is out of range for the parameter, or cannot be sharded there."""


class BadSize(RewriteError, code="SR302"):
    """A size that the world size or the packed parts do not divide."""


class ShardedTwice(RewriteError, code="SR303"):
    """The same parameter is sharded a second time."""


class SyncMismatch(RewriteError, code="SR304"):
    """A collective that does not fit what it is applied to."""


class Unsupported(RewriteError, code="SR305"):
    """A request that this primitive does not carry out on this kind of module."""


class ConflictingEdits(RewriteError, code="SR306"):
    """Two lines of the schedule want different things of the same place."""


class IncompleteShard(RewriteError, code="SR307"):
    """A parameter has to be split with another one, and is not."""


class WeightsMisfit(RewriteError, code="SR308"):
    """A replacement's weights cannot be made of the original's, or not the other way round."""


class NoMatch(RewriteError, code="SR309"):
    """What is to be replaced is not found, or may not be replaced where it is found."""


class CannotCut(RewriteError, code="SR310"):
    """A place where no pipeline stage can end, or a value that cannot go from one to the next."""


class OutputEdited(RewriteError, code="SR401"):
    """The output folder holds hand edits, or files that the tool did not write."""


class OutputUnwritable(RewriteError, code="SR402"):
    """The output folder cannot be written."""


class NotAnOutput(RewriteError, code="SR403"):
    """The folder was not written by slapo-rewrite, or its record is damaged."""


class OutputFails(RewriteError, code="SR404"):
    """What was rewritten cannot be imported, or its model not be built, where the original can."""


class BrokenOutput(RewriteError, code="SR405", exit_code=3):
    """The same, at a line that the tool itself wrote: a defect."""


class OthersWouldChange(RewriteError, code="SR406"):
    """A support folder that another version of the tool made also for other outputs."""


class UsageError(RewriteError, code="SR501"):
    """The command line does not say what is needed."""


class MissingPackage(RewriteError, code="SR502"):
    """An optional package that a command needs is not installed."""


class BadSpace(RewriteError, code="SR601"):
    """What is to be tuned has no choices, no points, or too many."""


class BadGrid(RewriteError, code="SR602"):
    """A file of measured throughputs is not what `tune --replay` reads."""


class RunFails(RewriteError, code="SR603"):
    """The command that trains fails, or does not report its throughput."""


class OtherTrials(RewriteError, code="SR604"):
    """The record of trials belongs to another model, schedule, space or command."""


class NothingFits(RewriteError, code="SR605"):
    """No way to train a model fits the memory that there is."""


class BadHardware(RewriteError, code="SR606"):
    """A table of a GPU is not what `plan --gpu FILE.toml` reads."""


def unwritable(path: object, error: OSError) -> OutputUnwritable:
    """The refusal of a file or folder that the system does not let be written."""
    return OutputUnwritable(f"cannot write `{path}`: {error.strerror or error}")


def nearest(asked: str, known: Iterable[str], least: float = 0.3) -> list[str]:
    """The names in `known` most like `asked`, three at most, best first, none below `least`."""
    names = sorted(set(known))
    close = difflib.get_close_matches(asked, names, n=3, cutoff=0.6)
    tail = asked.rsplit(".", 1)[-1]
    close += [n for n in names if n.rsplit(".", 1)[-1] == tail and n not in close]
    if not close:
        close = difflib.get_close_matches(asked, names, n=3, cutoff=least)
    return close[:3]


def did_you_mean(asked: str, known: Iterable[str]) -> str | None:
    """A hint that offers the nearest names, or None where nothing is near."""
    return offered(nearest(asked, known))


def offered(names: Iterable[str]) -> str | None:
    """A hint that offers some names, or None where there are none."""
    shown = " or ".join(f"`{name}`" for name in names)
    return f"did you mean {shown}?" if shown else None
