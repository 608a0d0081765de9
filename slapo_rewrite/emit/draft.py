"""An output before it is written: its files, the causes of lines, and the used helpers."""

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
# Inspects an imported output; gets the layers of its model that need to be made.
Trial = Callable[[Emitted, Shortening], None]


@dataclass(frozen=True)
class Options:
    """Options for writing an output."""

    settings: Sequence[str] = ()  # knobs, as `name=value`
    # Whether the helpers go into the model file, instead of files beside it.
    single_file: bool = False
    # Requested helpers beside those in use, by helper module.
    further: Mapping[str, set[str]] = field(default_factory=dict)
    # The name of the folder beside the output for its helpers.
    support: str | None = None
    # Called with the imported output; None to run a small model of it against the original's.
    tries: Trial | None = None
    on_ranks: bool = True  # whether recomputation budgets are for ranks that shard layers


@dataclass(frozen=True)
class Causes:
    """The directives that caused the lines of an output."""

    files: Mapping[str, str]  # the output's files
    # The lines that the tool wrote into the files that it rewrote, by file name.
    changes: Mapping[str, Sequence[Change]]
    # The directives that need each of the other files.
    helpers: Mapping[str, Sequence[Directive]]

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Turns failures of the output into errors with places, in the context.

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
                f"the new output does not work: {words}",
                at=at,
                also=also,
                hint="this is a defect of slapo-rewrite, not of your input; nothing was written",
            )
        return errors.OutputFails(
            f"the rewritten file does not work: {words}",
            at=at,
            also=also,
            hint="it is imported together with the original, as another module in another folder: "
            "change the line that does not allow this (a registry may accept a name twice), "
            "or move it into a module that both import",
        )

    def _causes(self, name: str, line: int) -> Sequence[Directive]:
        """The directives that caused a line of the output."""
        for change in self.changes.get(name, ()):
            if change.first <= line <= change.last:
                return change.causes
        return self.helpers.get(name, ())


@dataclass
class Draft:
    """The files of an output before it is written."""

    model_file: str  # the name of the rewritten model file
    texts: dict[str, str] = field(default_factory=dict)  # the rewritten files, by name
    # The line length of each file.
    lengths: dict[str, int] = field(default_factory=dict)
    # The changed lines of each file, by name.
    changes: dict[str, list[Change]] = field(default_factory=dict)
    # The names that the output uses from each helper module.
    used: dict[str, set[str]] = field(default_factory=dict)
    helpers: dict[str, str] = field(default_factory=dict)  # the other files, by name
    # The directives that need each helper module.
    causes: dict[str, Directives] = field(default_factory=dict)
    # The names that it uses from its support folder, by helper module; None without one.
    uses: dict[str, set[str]] | None = None
    warnings: list[str] = field(default_factory=list)  # such as checks that were not possible

    @property
    def files(self) -> dict[str, str]:
        """All files of the output, by name."""
        return {**self.texts, **self.helpers}

    def use(self, names: Mapping[str, set[str]]) -> None:
        """Adds used names of helper modules."""
        for module, own in names.items():
            self.used.setdefault(module, set()).update(own)

    def because(self, module: str, causes: Directives) -> None:
        """Adds directives that need a helper module."""
        self.causes[module] = merged_causes(self.causes.get(module, ()), causes)

    def helper_causes(self) -> dict[str, Directives]:
        """The directives that need each helper file, for some through other helpers."""
        parallel = self.causes.get("tensor_parallel", ())
        return {name: self.causes.get(Path(name).stem) or parallel for name in self.helpers}

    def who_wrote(self) -> Causes:
        """The causes of the output's lines, for errors."""
        return Causes(self.files, self.changes, self.helper_causes())
