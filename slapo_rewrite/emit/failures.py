"""What a rewritten file's failure means to a user: which line fails, and what caused it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from slapo_rewrite import errors
from slapo_rewrite.code.file import lines_of
from slapo_rewrite.code.splice import Change
from slapo_rewrite.directive import Directive
from slapo_rewrite.emit.helpers import MODULES
from slapo_rewrite.model.emitted import FailedOutput


@dataclass(frozen=True)
class Causes:
    """Who wrote the lines of an output.

    Attributes:
        files: The output's files.
        changes: The lines that the tool wrote into the files that it rewrote, by file name.
        helpers: The directives for which each of the other files is there.
    """

    files: Mapping[str, str]
    changes: Mapping[str, Sequence[Change]]
    helpers: Mapping[str, Sequence[Directive]]

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Whatever of the output fails meanwhile is told with its place.

        Raises:
            BrokenOutput: A line that the tool wrote fails.
            OutputFails: Another line fails.
        """
        try:
            yield
        except FailedOutput as failed:
            raise self._told(failed) from failed.error

    def _told(self, failed: FailedOutput) -> errors.RewriteError:
        name, line = failed.frames[-1]
        lines = lines_of(self.files[name]) if name in self.files else []
        text = lines[line - 1] if line <= len(lines) else ""
        at = errors.Span.of_line(f"rewritten/{name}", line, text)
        words = f"{type(failed.error).__name__}: {failed.error}".rstrip(": ")
        caused = [self._causes(*frame) for frame in reversed(failed.frames)]
        also = [c.at for found in caused for c in found[:1] if c.at is not None][:1]
        own = name in self.helpers and name != f"{MODULES}.py"
        if own or caused[0]:
            return errors.BrokenOutput(
                f"what was to be written does not work: {words}",
                at=at,
                also=also,
                hint="this is a defect of slapo-rewrite, not of your input; nothing was written",
            )
        return errors.OutputFails(
            f"the rewritten file does not work: {words}",
            at=at,
            also=also,
            hint="it is imported beside the original, as another module and from another folder: "
            "change a line that does not stand this (a registry that refuses a name that it has "
            "may take the new one), or move it into a module that both import",
        )

    def _causes(self, name: str, line: int) -> Sequence[Directive]:
        """The directives that a line of the output goes back to."""
        for change in self.changes.get(name, ()):
            if change.first <= line <= change.last:
                return change.causes
        return self.helpers.get(name, ())
