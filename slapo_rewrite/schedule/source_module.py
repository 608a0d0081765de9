"""Makes a module of the source: imports its file, or runs a text that is not on disk."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import linecache
import os
import sys
import traceback
import types
from collections.abc import Iterable, Iterator
from contextlib import chdir
from pathlib import Path

from slapo_rewrite import errors
from slapo_rewrite.changes.imports import Reference
from slapo_rewrite.code.decorators import decorated_alike
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.own_files import is_own
from slapo_rewrite.model.tree import uncompiled


def import_source(file: SourceFile) -> types.ModuleType:
    """Imports the module of a source file, as its own package would.

    It can import files beside it, as if it were run in its own folder.
    """
    path = Path(os.path.abspath(file.path))  # as code is known by: without `..`
    folder = path.parents[file.package.count(".") + 1 if file.package else 0]
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # at the end, so that it hides no module
    try:
        if file.package or not is_own(str(file.path)):
            with chdir("."):
                module = importlib.import_module(file.name)
            if Path(str(module.__file__)).resolve() == file.path.resolve():
                return module
        spec = importlib.util.spec_from_file_location(file.name, path)
        assert spec is not None and spec.origin is not None
        sys.modules[file.name] = module = importlib.util.module_from_spec(spec)
        # Compiles the text that was read: cached bytecode is compared by size and seconds only.
        code = compile(file.text, spec.origin, "exec", dont_inherit=True)
        with chdir("."):
            exec(code, vars(module))
        return module
    except (errors.RewriteError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a file that calls sys.exit() as well
        here = os.path.realpath(file.path)
        places = traceback.walk_tb(error.__traceback__)
        own = (line for f, line in places if os.path.realpath(f.f_code.co_filename) == here)
        line = next(own, None)
        if isinstance(error, SyntaxError) and os.path.realpath(error.filename or "") == here:
            line = error.lineno  # a text that parses may fail to compile
        at = errors.Span.of_line(file.display, line, file.line(line)) if line else None
        raise errors.SourceError(
            f"`{file.display}` cannot be imported: {type(error).__name__}: {error}",
            at=at,
            hint=_import_hint(error),
        ) from error


def _import_hint(error: BaseException) -> str | None:
    if isinstance(error, ModuleNotFoundError) and error.name and "." not in error.name:
        return f"the tool runs the source: install `{error.name}` for slapo-rewrite's Python"
    if isinstance(error, ImportError):
        return "if the file is part of a package, give its dotted module name"
    return None


def run_source(file: SourceFile, references: Iterable[Reference] = ()) -> types.ModuleType:
    """Runs a file's text, which differs from the one on disk, and returns the module."""
    module = types.ModuleType(file.name)
    path = os.path.abspath(file.path)  # the file name that an import would use
    module.__file__, module.__package__ = path, file.package
    for reference in references:
        home, _, name = reference.origin.rpartition(".")
        value = getattr(importlib.import_module(home), name) if home else None
        owner, _, written = reference.written.rpartition(".")
        if owner:
            setattr(module.__dict__.setdefault(owner, types.SimpleNamespace()), written, value)
        else:
            setattr(module, written, value)
    if "." not in file.name:
        sys.modules[file.name] = module
    tree = ast.parse(file.text, path)
    with uncompiled(), _read_as(path, file.text):
        while True:
            try:
                exec(compile(tree, path, "exec", dont_inherit=True), module.__dict__)
                return module
            except Exception as error:
                # A registry may refuse a name that it has. Whether the decorator can be left out
                # is checked when the output is imported.
                places = traceback.walk_tb(error.__traceback__)
                own = [line for frame, line in places if frame.f_code.co_filename == path]
                if not own or not (refused := decorated_alike(tree, own[-1])):
                    raise
                for definition, decorator in refused:
                    definition.decorator_list.remove(decorator)


@contextlib.contextmanager
def _read_as(path: str, text: str) -> Iterator[None]:
    """Lets code that reads the lines of a function, as TorchScript does, find this text's."""
    before = linecache.cache.get(path)
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    try:
        yield
    finally:
        del linecache.cache[path]
        if before is not None:
            linecache.cache[path] = before
