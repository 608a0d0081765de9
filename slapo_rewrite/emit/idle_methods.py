"""Checks that the methods written into classes are those that run.

A later statement may assign another function to a class, a constructor may assign one to a module,
and `__init_subclass__` or a metaclass may change a new subclass. The written method would then do
nothing, or something else.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.splice import Change
from slapo_rewrite.emit.draft import Draft
from slapo_rewrite.model.emitted import Emitted
from slapo_rewrite.model.tree import Tree
from slapo_rewrite.model.watched_functions import DEPTH, made_by


@dataclass(frozen=True)
class _Written:
    """A method of a class that the tool wrote or changed."""

    cls: type  # the class
    name: str  # the method's name
    node: ast.FunctionDef | None  # its definition; None if the class's text has none
    change: Change  # the lines that the tool wrote
    is_bare: bool  # whether the tool wrote the class, and the method has no decorator

    def runs(self) -> bool:
        """Whether the class runs it, possibly inside wrappers."""
        value = vars(self.cls).get(self.name)
        if self.node is None:
            return _is_of_library(value, self.cls)
        if not isinstance(value, FunctionType):
            return True
        depth = DEPTH if not self.is_bare or _is_of_library(value, self.cls) else 1
        return made_by(self.node, value, depth) is not None


def _is_of_library(value: Any, cls: type) -> bool:
    """Whether another file wraps the methods of all classes that are derived from its own.

    Then it wraps those of a new class like those of its base, as for every derived class.
    """
    own = sys.modules[cls.__module__].__file__
    return hasattr(value, "__wrapped__") and value.__code__.co_filename != own


def check_run(emitted: Emitted, draft: Draft, built: Tree, original: ModuleType) -> None:
    """Refuses changed methods, and methods of new classes, that do not run."""
    has_own = any("forward" in vars(node.live) for node in built.nodes.values())
    written = list(_written(emitted, draft, None if has_own else vars(original)))
    for each in written:
        if not each.runs():
            raise _refusal(f"{each.cls.__name__}.{each.name}", each.change)
    forwards = {vars(w.cls).get(w.name): w for w in written if w.name == "forward"}
    for path, node in built.nodes.items():
        own = vars(node.live).get("forward")
        here = forwards.get(inspect.getattr_static(node.cls, "forward", None))
        if own is not None and here and here.node and made_by(here.node, own) is None:
            raise _refusal(f"{path}.forward", here.change)


def _written(
    emitted: Emitted, draft: Draft, known: Mapping[str, object] | None
) -> Iterator[_Written]:
    """The written methods; with `known` names, without files whose methods certainly run."""
    modules = {str(module.__file__): module for module in emitted.modules()}
    for file_name, changes in draft.changes.items():
        path = emitted.folder / file_name
        module = modules.get(str(path)) if changes else None
        if module is not None and not (known and _are_plain(module, known)):
            file = SourceFile.read(path, module.__name__)
            for name in file.classes:
                cls = vars(module).get(name)
                if isinstance(cls, type) and cls.__module__ == module.__name__:
                    yield from _methods(file, cls, changes)


def _are_plain(module: ModuleType, known: Mapping[str, object]) -> bool:
    own = (c for c in vars(module).values() if isinstance(c, type) and hasattr(c, "forward"))
    return all(_is_plain(cls, known) for cls in own if cls.__module__ == module.__name__)


def _is_plain(cls: type, known: Mapping[str, object]) -> bool:
    """Whether all functions of a class are defined in its body, and for a new class not wrapped.

    Then its text, which takes milliseconds to parse, need not be checked.
    """
    own = sys.modules[cls.__module__].__file__
    for name, value in vars(cls).items():
        if isinstance(value, FunctionType):
            inner = inspect.unwrap(value)
            code = inner.__code__ if isinstance(inner, FunctionType) else None
            if code is None or (code.co_filename, code.co_qualname) != (
                own,
                f"{cls.__qualname__}.{name}",
            ):
                return False
            if inner is not value and cls.__name__ not in known:
                return False
    return True


def _methods(file: SourceFile, cls: type, changes: Sequence[Change]) -> Iterator[_Written]:
    methods = {method.name: method for method in file.methods(cls.__name__)}
    first, last = _lines(file.classes[cls.__name__])
    new = next((c for c in changes if c.first <= first and last <= c.last), None)
    for name, method in methods.items():
        first, last = _lines(method)
        change = new or next((c for c in changes if c.first <= last and first <= c.last), None)
        if change is not None:
            yield _Written(cls, name, method, change, bool(new and not method.decorator_list))
    # Dataclasses get methods from their decorator, and named tuples from their base.
    is_module = hasattr(cls, "forward")
    if new is not None and is_module and not file.classes[cls.__name__].decorator_list:
        for name, value in vars(cls).items():
            if isinstance(value, FunctionType) and name not in methods:
                yield _Written(cls, name, None, new, is_bare=True)


def _lines(node: ast.stmt) -> tuple[int, int]:
    return node.lineno, node.end_lineno or node.lineno


def _refusal(name: str, change: Change) -> errors.Unsupported:
    return errors.Unsupported(
        f"`{name}` would not run: another function replaces it",
        at=next((c.at for c in change.causes if c.at is not None), None),
        hint="a statement outside of the class, a constructor, `__init_subclass__` or a metaclass "
        "does this: move its code into the class's own methods",
    )
