"""An output in the making: its files, who wrote their lines, and what they use of helpers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slapo_rewrite import errors
from slapo_rewrite.changes.imports import MODULES
from slapo_rewrite.code.file import lines_of
from slapo_rewrite.code.splice import Change
from slapo_rewrite.directive import Directive, merged_causes
from slapo_rewrite.model.emitted import Emitted, FailedOutput
from slapo_rewrite.model.short_build import Shortening

Directives = tuple[Directive, ...]
# Looks at an output, told which layers of its model need to be made.
Trial = Callable[[Emitted, Shortening], None]


@dataclass(frozen=True)
class Options:
    """How an output is to be written."""

    settings: Sequence[str] = ()  # knobs, as `name=value`
    # Whether the helpers go into the model file, instead of a package around it.
    single_file: bool = False
    # Helpers that were asked for beside those in use, by the module that has them.
    further: Mapping[str, set[str]] = field(default_factory=dict)
    # The name of the folder beside the output that is to hold its helpers.
    support: str | None = None
    # What the output is tried with, imported and built; None to run a small model of it against the
    # original's.
    tries: Trial | None = None
    on_ranks: bool = True  # whether budgets for ranks that share layers choose what is recomputed


@dataclass(frozen=True)
class Causes:
    """Who wrote the lines of an output."""

    files: Mapping[str, str]  # the output's files
    # The lines that the tool wrote into the files that it rewrote, by file name.
    changes: Mapping[str, Sequence[Change]]
    # The directives for which each of the other files is there.
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


@dataclass
class Draft:
    """The files of an output, as far as they are made."""

    model_file: str  # the name of the rewritten model file
    texts: dict[str, str] = field(default_factory=dict)  # the rewritten files, by name
    # The length that the lines of each keep to.
    lengths: dict[str, int] = field(default_factory=dict)
    # Lines of files that the schedule caused, by the file's name.
    changes: dict[str, list[Change]] = field(default_factory=dict)
    # The names that the output uses of each helper module.
    used: dict[str, set[str]] = field(default_factory=dict)
    helpers: dict[str, str] = field(default_factory=dict)  # the other files, by name
    # The directives for which there is a helper module.
    causes: dict[str, Directives] = field(default_factory=dict)
    # The names that it uses of its support folder, by helper module; None without one.
    uses: dict[str, set[str]] | None = None
    warnings: list[str] = field(default_factory=list)  # what could not be checked, in words

    @property
    def files(self) -> dict[str, str]:
        """All of them."""
        return {**self.texts, **self.helpers}

    def use(self, names: Mapping[str, set[str]]) -> None:
        """Further names of helper modules are used."""
        for module, own in names.items():
            self.used.setdefault(module, set()).update(own)

    def because(self, module: str, causes: Directives) -> None:
        """Further directives need a helper module."""
        self.causes[module] = merged_causes(self.causes.get(module, ()), causes)

    def helper_causes(self) -> dict[str, Directives]:
        """The directives for which there is each helper file; some are there for others' sake."""
        parallel = self.causes.get("tensor_parallel", ())
        return {name: self.causes.get(Path(name).stem) or parallel for name in self.helpers}

    def who_wrote(self) -> Causes:
        """Tells of a failing line which directives it goes back to."""
        return Causes(self.files, self.changes, self.helper_causes())
