"""Imports an output before it is written, as its user will, and builds its model."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import os
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from torch import nn

from slapo_rewrite import errors
from slapo_rewrite.model.meta_device import pretend_world
from slapo_rewrite.model.short_build import ALL, Shortening
from slapo_rewrite.model.tree import Tree, build_model, uncompiled

# The temporary name of the output's package, and of the package that contains it.
PACKAGE = "slapo_rewrite_output"


class FailedOutput(Exception):
    """A file of the output fails when it is imported or run.

    Attributes:
        error: The exception.
        frames: The output's lines in its traceback, with file names, innermost last.
    """

    def __init__(self, error: BaseException, frames: list[tuple[str, int]]) -> None:
        super().__init__(str(error))
        self.error, self.frames = error, frames


@dataclass
class Emitted:
    """An imported output."""

    module: types.ModuleType  # the rewritten model file's module
    folder: Path  # the temporary folder of its files
    names: Sequence[str] = ()  # the module names of its files
    # The sharded tensors of the last tree by module path and name: the sharded axis, this rank's
    # size along it, and the full size.
    parts: dict[str, dict[str, tuple[int, int, int]]] = field(default_factory=dict)

    def tree(
        self, make: Callable[[types.ModuleType], nn.Module], world: int = 1, short: Shortening = ALL
    ) -> Tree:
        """The model that a schedule's `model(m)` builds of the output, on the meta device.

        It is built as rank 0 of `world` ranks, or of one if a size does not divide.
        """
        try:
            with _unheard(), pretend_world(world) if world > 1 else contextlib.nullcontext():
                build = functools.partial(build_model, make, self.module)
                tree = Tree(short.built(build))
                self.parts = {path: _parts(node.live) for path, node in tree.nodes.items()}
                return tree
        except errors.ModelError as error:
            if world > 1 and isinstance(error.__cause__, ValueError):
                return self.tree(make, short=short)  # a size that does not divide
            if frames := self.frames(error.__cause__):
                assert error.__cause__ is not None
                raise FailedOutput(error.__cause__, frames) from error
            raise

    def helper(self, name: str) -> types.ModuleType | None:
        """The helper module of that name, in whichever folder; None if the output has none."""
        return next((m for m in self.modules() if m.__name__.rpartition(".")[2] == name), None)

    def instead_of(self, cls: type) -> type:
        """The output's version of a class of the original; that class itself without one."""
        named = ((module, vars(module).get(cls.__name__)) for module in self.modules())
        own = (c for module, c in named if isinstance(c, type) and c.__module__ == module.__name__)
        return next(own, cls)

    def modules(self) -> list[types.ModuleType]:
        """The imported modules of all its files."""
        return [sys.modules[name] for name in self.names]

    def frames(self, error: BaseException | None) -> list[tuple[str, int]]:
        """The output's lines in an error's traceback, with file names."""
        return _frames(self.folder, error)

    def is_of_helper(self, error: BaseException) -> bool:
        """Whether a helper raises an error, whose message then tells users what to do.

        In a single-file output it may also be raised by the model.
        """
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        raised = frames[-1].f_code.co_filename if frames else ""
        files = {str(module.__file__) for module in self.modules()}
        return raised in (files - {self.module.__file__} or files)


@contextlib.contextmanager
def imported(
    files: Mapping[str, str], model_file: str, users: Collection[str] = ()
) -> Iterator[Emitted]:
    """Imports every file of an output, in the context.

    `files` maps paths from the output's folder to texts. If one fails, they are imported once more
    together with the user's own modules `users`: one of these may be a registry that accepts each
    class name once, and holds the original's.
    """
    names = [name for name in files if name.endswith(".py") and name != "__init__.py"]
    names.sort(key=lambda name: (name == "pipeline.py", name != model_file))  # stages last
    with contextlib.ExitStack() as stack:
        try:
            root = Path(os.path.realpath(stack.enter_context(tempfile.TemporaryDirectory())))
            folder = root / PACKAGE
            for name in names:
                path = Path(os.path.normpath(folder / name))
                path.parent.mkdir(exist_ok=True)
                path.write_text(files[name], encoding="utf-8", newline="")
        except OSError as error:
            raise errors.OutputUnwritable(
                f"cannot write temporary files: {error.strerror or error}",
                hint="set TMPDIR to another folder",
            ) from error
        stack.callback(_forget)
        with _unheard(), uncompiled():
            try:
                _import(folder, names)
            except FailedOutput as failed:
                others = {name: sys.modules[name] for name in users if name in sys.modules}
                if not others or isinstance(failed.error, SyntaxError):
                    raise
                stack.callback(sys.modules.update, others)
                for name in others:
                    del sys.modules[name]
                try:
                    _import(folder, names)
                except FailedOutput:
                    raise failed from failed.error
        yield Emitted(sys.modules[_module(model_file)], folder, [_module(n) for n in names])


def _import(folder: Path, names: Sequence[str]) -> None:
    _forget()
    package = sys.modules[PACKAGE] = types.ModuleType(PACKAGE)
    package.__path__ = [str(folder.parent)]
    for name in names:
        try:
            importlib.import_module(_module(name))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a file that calls sys.exit() as well
            frames = _frames(folder, error)
            if isinstance(error, SyntaxError) and error.filename:
                frames.append((os.path.relpath(error.filename, folder), error.lineno or 1))
            raise FailedOutput(error, frames or [(name, 1)]) from error


def _module(name: str) -> str:
    """The module name of a file of the output."""
    path = Path(os.path.normpath(Path(PACKAGE, PACKAGE, name)))
    return ".".join(path.with_suffix("").parts)


def _parts(live: Any) -> dict[str, tuple[int, int, int]]:
    recorded = getattr(live, "sharded_parameters", {})
    return {name: (shard.axis, shard.local_size(), shard.size) for name, shard in recorded.items()}


def _forget() -> None:
    if PACKAGE not in sys.modules:  # nor are its modules
        return
    for name in [n for n in sys.modules if n.startswith(PACKAGE)]:
        if name.partition(".")[0] != PACKAGE:
            continue
        module = sys.modules.pop(name)
        if hasattr(module, "watch_registrations"):
            for watch in module.watch_registrations():
                watch.remove()  # torch would keep the output alive


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Hides output and warnings, which the original has shown already; writes no bytecode."""
    quiet = contextlib.redirect_stdout(io.StringIO())
    uncached = mock.patch.object(sys, "dont_write_bytecode", True)
    with quiet, uncached, warnings.catch_warnings(), contextlib.chdir("."):
        warnings.simplefilter("ignore")
        yield


def _frames(folder: Path, error: BaseException | None) -> list[tuple[str, int]]:
    steps = traceback.walk_tb(error.__traceback__ if error is not None else None)
    places = ((Path(frame.f_code.co_filename), line) for frame, line in steps)
    return [(os.path.relpath(p, folder), line) for p, line in places if folder.parent in p.parents]
