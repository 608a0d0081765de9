"""Facts about the attributes of live modules, for the analysis of `forward`."""

from __future__ import annotations

import ast
import functools
import inspect
import types
from typing import Any

import torch
from torch import nn

from slapo_rewrite.code.evaluate import Constant, is_plain
from slapo_rewrite.code.facts import Fact, Function, Other, Property, Submodule, Tensor, dotted
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.model.join import known_site
from slapo_rewrite.model.sources import Sources
from slapo_rewrite.model.tree import Node
from slapo_rewrite.model.uncalled import beyond_forward

# Modules of torch that draw random numbers; the others of `torch.nn` without children do not.
_RANDOM = (
    *("Dropout", "RReLU", "FractionalMaxPool", "MultiheadAttention", "Transformer"),
    *("RNN", "LSTM", "GRU"),
)


class NodeFacts:
    """Facts about the attributes of one module of the tree."""

    def __init__(self, node: Node, sources: Sources) -> None:
        self.node, self.sources = node, sources
        self._known: dict[str, Fact | None] = {}

    def look(self, path: str) -> Fact | None:
        """The fact about the attribute at a dotted path; None if no attribute is known there."""
        if path not in self._known:
            self._known[path] = self._look(path)
        return self._known[path]

    def _look(self, path: str) -> Fact | None:
        found = self._at(path)
        if not isinstance(found, nn.Module):
            return None if found is _MISSING else _fact(found)
        # Cached, since each function that names a list of layers walks it to its leaves.
        known = self.sources.submodules
        if id(found) not in known:
            known[id(found)] = found, submodule(found)
        return known[id(found)][1]

    def method(self, path: str, name: str) -> tuple[SourceFile, ast.FunctionDef] | None:
        """A method of a submodule's class ('' is the module itself), and its file."""
        live = self._at(path)
        return method_of(self.sources, type(live), name) if isinstance(live, nn.Module) else None

    def place(self, path: str) -> tuple[SourceFile, ast.AST] | None:
        """The expression that makes a submodule, and its file."""
        node = self.node.at(path)
        site = known_site(self.sources, node) if node is not None else None
        return (site.file, site.value) if site is not None else None

    def _at(self, path: str) -> Any:
        """The value at a dotted path; `_MISSING` if none is known."""
        found: Any = self.node.live
        for name in path.split(".") if path else ():
            found = _attribute(found, name)
        return found


def method_of(sources: Sources, cls: type, name: str) -> tuple[SourceFile, ast.FunctionDef] | None:
    """The method that an instance of a class runs, and the file that defines it."""
    for each in cls.__mro__:
        if name in vars(each):
            file = sources.file_of(each)
            method = file.method(each.__name__, name) if file is not None else None
            return (file, method) if file is not None and method is not None else None
    return None


def runs(cls: type) -> str:
    """The dotted name of the class along the MRO whose `forward` runs."""
    owner = next((c for c in cls.__mro__ if "forward" in vars(c)), cls)
    return dotted(owner) or owner.__name__


def submodule(live: nn.Module) -> Submodule:
    """A live module as a fact. A module with hooks, for example, is not its class alone."""
    cls = type(live)
    kinds: set[type] = {type(inner) for inner in live.modules()}
    plain = beyond_forward(live) is None
    return Submodule(
        runs(cls) if plain else f"hooked {runs(cls)}",
        any(map(_draws, kinds)),
        not any(True for _ in (*live.parameters(), *live.buffers())),
        plain,
        tuple(live._modules),
        getattr(live, "slapo_path", None),
    )


@functools.cache
def _draws(cls: type) -> bool:
    """Whether an instance's own methods may draw random numbers."""
    name = runs(cls)
    if name.startswith("torch.nn."):
        return any(part in name for part in _RANDOM)
    own = [c for c in cls.__mro__ if not c.__module__.startswith("torch.")]
    return any(_names_random(f, 0) for c in own for f in vars(c).values())


def _names_random(function: object, depth: int) -> bool:
    """Whether a function, or a function that it names, names a random operation."""
    function = inspect.unwrap(function) if callable(function) else function
    if not isinstance(function, types.FunctionType) or depth > 3:
        return False
    names = function.__code__.co_names
    if any("dropout" in n or "rand" in n or n == "bernoulli" for n in names):
        return True
    named = (function.__globals__.get(name) for name in names)
    return any(_names_random(f, depth + 1) for f in named if isinstance(f, types.FunctionType))


_MISSING = object()


def _attribute(owner: Any, name: str) -> Any:
    """An attribute, without running a property or any other code of the user's."""
    if isinstance(owner, nn.Module):
        for held in (owner._parameters, owner._buffers, owner._modules, vars(owner)):
            if name in held:
                return held[name]
    elif isinstance(owner, torch.Tensor):
        return _MISSING
    elif name in getattr(owner, "__dict__", {}):
        return vars(owner)[name]
    found = next((vars(c)[name] for c in type(owner).__mro__ if name in vars(c)), _MISSING)
    return found if is_plain(found) or isinstance(found, property) else _MISSING


def _fact(value: Any) -> Fact:
    if isinstance(value, nn.Module):
        return submodule(value)
    if isinstance(value, torch.Tensor):
        return Tensor()
    if is_plain(value):
        return Constant(value)
    if isinstance(value, property):
        return Property()
    if isinstance(value, functools.partial) and not value.args:
        inner = _fact(value.func)
        plain = all(is_plain(v) for v in value.keywords.values())
        if isinstance(inner, Function) and plain:
            return Function(inner.name, inner.method, tuple(value.keywords.items()))
    if isinstance(value, types.MethodType):
        return Function(method=value.__name__)
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        name = dotted(value)
        return Function(name) if name else Other()
    return Other()
