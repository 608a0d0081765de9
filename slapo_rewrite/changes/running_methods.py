"""Finds the methods that run when a model runs, and the arguments that they change."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

from slapo_rewrite.changes.output_files import OutputFiles
from slapo_rewrite.code.arguments import argument_of, parameters
from slapo_rewrite.code.effects import own_calls, plain_calls, words_of
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.handed import Handed
from slapo_rewrite.code.names import module_paths
from slapo_rewrite.model.tree import Node

# Methods for construction, which a run of the model does not call.
CONSTRUCTING = ("__init__", "reset_parameters", "_init_weights", "init_weights")
MOST_CALLS = 3  # the depth of nested calls to follow for changes of arguments
# Cache: the names of functions that may run with the model, for each set of files.
_NAMED: WeakKeyDictionary[OutputFiles, frozenset[str]] = WeakKeyDictionary()


def running(files: OutputFiles, node: Node) -> Iterator[tuple[SourceFile, ast.FunctionDef]]:
    """The methods of a module that may run, each with the functions of its file that it calls."""
    if (home := files.of(node.cls)) is None:
        return
    for method in home.classes.methods(node.cls.__name__):
        if method.name in named_while_running(files, node):
            functions = home.file.functions
            yield home.file, method
            yield from ((home.file, functions[n]) for n in plain_calls(method) if n in functions)


def running_inside(files: OutputFiles, node: Node) -> Iterator[tuple[SourceFile, ast.FunctionDef]]:
    """The same for a module and those inside it, once for each class."""
    for inner in {each.cls: each for each in node.walk()}.values():
        yield from running(files, inner)


def named_while_running(files: OutputFiles, node: Node) -> frozenset[str]:
    """The names of functions that may run: `forward`, all names in it, and so on."""
    if files in _NAMED:
        return _NAMED[files]
    functions: dict[str, list[ast.FunctionDef]] = {}
    new = {"forward"}
    for cls in {inner.cls for inner in node.root.walk()}:
        if (home := files.of(cls)) is None:
            continue
        methods = home.classes.methods(cls.__name__)
        # A `forward` in another file may call any of them.
        is_read = any(method.name == "forward" for method in methods)
        for method in methods:
            functions.setdefault(method.name, []).append(method)
            if method.name.startswith("__") or not is_read:
                new.add(method.name)
        new.update(_handed_on(methods))
        for name, function in home.file.functions.items():
            functions.setdefault(name, []).append(function)
    named: set[str] = set()
    while new:
        named |= new
        running = (f for name in new.difference(CONSTRUCTING) for f in functions.get(name, ()))
        new = {n for function in running for n in words_of(function)} - named
    _NAMED[files] = frozenset(named - {*CONSTRUCTING})
    return _NAMED[files]


def _handed_on(methods: Sequence[ast.FunctionDef]) -> Iterator[str]:
    """Names that constructors mention but do not call, such as those of hooks."""
    called = {*CONSTRUCTING}
    waiting = [method for method in methods if method.name in called]
    while waiting:
        own = {*own_calls(method := waiting.pop())}
        yield from words_of(method) - own
        waiting += [each for each in methods if each.name in own - called]
        called |= own


def changed_by(
    call: ast.Call, files: OutputFiles, outer: Node, function: ast.FunctionDef, depth: int = 0
) -> Iterator[ast.expr]:
    """The arguments of a call that the called function, method or module changes."""
    callee: ast.FunctionDef | None = None
    inner: Node | None = None
    home = files.of(outer.cls) if depth < MOST_CALLS else None
    if isinstance(call.func, ast.Name) and home is not None:
        callee = home.file.functions.get(call.func.id)
    for path in module_paths(call.func, function) if callee is None and home is not None else ():
        inner = outer.at(path)
        while inner is not None and inner.is_container and inner.children:
            inner = next(iter(inner.children.values()))
        if inner is not None and getattr(inner.live, "inplace", False) is True:
            yield from call.args[:1]
        at, name = (home, path) if inner is None else (files.of(inner.cls), "forward")
        cls = outer.cls if inner is None else inner.cls
        callee = at.classes.method(cls.__name__, name) if at is not None else None
    for name in parameters(callee) if callee is not None else ():
        assert callee is not None
        given = argument_of(callee, call, name)
        deeper = functools.partial(
            changed_by, files=files, outer=inner or outer, function=callee, depth=depth + 1
        )
        if given is not None and Handed(changed=deeper).changed_later(callee, {name}):
            yield given
