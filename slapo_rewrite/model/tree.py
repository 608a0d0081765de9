"""The module tree of a model, built on the meta device: no memory, no weights."""

from __future__ import annotations

import contextlib
import linecache
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import type_before_parametrizations

from slapo_rewrite import errors
from slapo_rewrite.code.text import joined_path
from slapo_rewrite.model import construction_calls
from slapo_rewrite.model.meta_build import on_meta
from slapo_rewrite.model.meta_device import without_dynamo

# How many of the innermost calls that led to a module are part of its kind.
CALLS = 2

FEW_CLASSES = 6  # which an error can list
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)


def build_model(make: Callable[[ModuleType], nn.Module], module: ModuleType) -> nn.Module:
    """Calls a schedule's `model(m)` on the meta device; raises `ModelError` without a module."""
    try:
        with without_dynamo(), on_meta(), torch.no_grad(), construction_calls.recorded():
            model = make(module)
    except errors.RewriteError:
        raise
    except Exception as error:
        raise errors.ModelError(
            f"`model` fails: {type(error).__name__}: {error}".rstrip(": "),
            at=_place_raised(make, error),
            also=_deepest_place(make, error),
            hint=_hint(error, module),
        ) from error
    if not isinstance(model, nn.Module):
        raise errors.ModelError(
            f"`model` returns {_described(model)}, not a torch.nn.Module",
            at=_place_defined(make),
            hint="end it with `return` and the module",
        )
    return model


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Makes `torch.compile` do nothing in the context: functions run on the meta device."""

    def as_it_is(model: Any = None, **options: Any) -> Any:
        return (lambda function: function) if model is None else model

    with mock.patch.object(torch, "compile", as_it_is):
        yield


class Node:
    """A module at one path of the tree.

    Attributes:
        path: From the root; '' for the root itself.
        name: The last segment of the path.
        parent: The module that holds it; None for the root.
        children: Its submodules by name, in the order in which they were made.
        cls: The module's class.
        is_container: Whether it is one of torch's containers, or a subclass without a constructor
            of its own: its elements are made by the code that made the container.
        is_stack: Whether it is `nn.TransformerEncoder` or its decoder, which copy a given layer.
        owner: The nearest module above that is not a container or a stack; None for the root.
        relative: The path from `owner`, as in `layer.3`.
        kind: A number shared by modules of the same class and parameter shapes that were made by
            the same expression, and whose submodules have the same names and kinds.
    """

    __slots__ = (
        "children", "cls", "is_container", "is_stack", "kind", "live", "name", "owner", "parent",
        "path", "relative",
    )  # fmt: skip

    def __init__(self, name: str, live: nn.Module, parent: Node | None) -> None:
        self.name = name
        self.live = live
        self.parent = parent
        self.cls = type(live)
        self.is_container = is_container(self.cls)
        self.is_stack = self.cls in _STACKS
        self.children: dict[str, Node] = {}
        self.kind = -1
        if parent is None:
            self.path, self.relative, self.owner = "", "", None
            return
        self.path = joined_path(parent.path, name)
        if (parent.is_container or parent.is_stack) and parent.owner is not None:
            self.owner, self.relative = parent.owner, f"{parent.relative}.{name}"
        else:
            self.owner, self.relative = parent, name

    @property
    def shown(self) -> str:
        """The path as messages show it; `s`, as in a schedule, for the root."""
        return f"`{self.path or 's'}`"

    def __repr__(self) -> str:
        return f"Node({self.path!r}, {self.cls.__name__})"

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The module's own parameters, not those of its submodules."""
        return {n: p for n, p in self.live._parameters.items() if p is not None}

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The module's own buffers, not those of its submodules."""
        return {n: b for n, b in self.live._buffers.items() if b is not None}

    def outwards(self) -> Iterator[Node]:
        """The node and its ancestors, innermost first."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def owners(self) -> Iterator[Node]:
        """The owner of the node, the owner of that, and so on."""
        node = self.owner
        while node is not None:
            yield node
            node = node.owner

    @property
    def root(self) -> Node:
        """The root of the tree."""
        return next(node for node in self.outwards() if node.parent is None)

    def at(self, path: str) -> Node | None:
        """The node at a path below, itself at ''; None where there is none."""
        found: Node | None = self
        for name in path.split(".") if path else ():
            found = found.children.get(name) if found is not None else None
        return found

    def below(self, path: str) -> str:
        """The part of a path that follows this node's own path."""
        return path[len(self.path) + 1 :] if self.path else path

    def walk(self) -> Iterator[Node]:
        """The node and all its descendants, each module before its submodules."""
        left = [self]
        while left:
            node = left.pop()
            yield node
            left += reversed(node.children.values())


class Tree:
    """All modules of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.root = Node("", model, None)  # the model
        self.nodes: dict[str, Node] = {}  # path -> node, each module before its submodules
        self._kinds: dict[tuple[Any, ...], int] = {}
        self._build(self.root, set())
        # Full parameter name -> all names of that parameter, for tied parameters only.
        self.ties: dict[str, tuple[str, ...]] = self._ties()

    def first_paths(self) -> dict[int, str]:
        """The first path of each live module, by the module's `id`."""
        return {id(node.live): path for path, node in reversed(self.nodes.items())}

    def graft(self, modules: Mapping[str, nn.Module]) -> None:
        """Replaces the modules at some paths, in the tree and in the model.

        The node of a path stays the same object. A parameter that was tied to one outside of the
        replaced module is tied again in the new module.
        """
        for path, live in modules.items():
            self._tie_again(path, live)
            node = self.nodes[path]
            construction_calls.stand_in(live, node.live)
            assert node.parent is not None
            node.parent.live._modules[node.name] = live
            node.live, node.cls, node.children = live, type(live), {}
            node.is_container = is_container(node.cls)
            self._build(node, set())
        self.nodes = {node.path: node for node in self.root.walk()}
        for node in reversed(self.nodes.values()):
            node.kind = self._kind(node)
        self.ties = self._ties()

    def _tie_again(self, path: str, live: nn.Module) -> None:
        known = dict(live.named_parameters(remove_duplicate=False))
        for name, group in self.ties.items():
            inner = name.removeprefix(f"{path}.")
            if inner in known and any(not n.startswith(f"{path}.") for n in group):
                old_holder = self.nodes[name.rpartition(".")[0]].live
                holder, _, own = inner.rpartition(".")
                live.get_submodule(holder)._parameters[own] = old_holder._parameters[own]

    def _ties(self) -> dict[str, tuple[str, ...]]:
        names: dict[int, list[str]] = {}
        for path, node in self.nodes.items():
            for name, parameter in node.live._parameters.items():
                if parameter is not None:
                    names.setdefault(id(parameter), []).append(joined_path(path, name))
        groups = [tuple(group) for group in names.values() if len(group) > 1]
        return {n: group for group in groups for n in group}

    def _build(self, node: Node, above: set[int]) -> None:
        _check_lookup(node)
        self.nodes[node.path] = node
        above.add(id(node.live))
        for name, live in node.live._modules.items():
            if live is None:
                continue
            if id(live) in above:
                raise errors.ModelError(
                    f"`{joined_path(node.path, name)}` holds a module that contains it",
                    hint="a module that contains itself has no finite tree",
                )
            child = node.children[name] = Node(name, live, node)
            self._build(child, above)
        above.discard(id(node.live))
        _check_sizes(node)
        node.kind = self._kind(node)

    def _kind(self, node: Node) -> int:
        own = node.live._parameters
        shapes = tuple([(n, p.shape) for n, p in own.items() if p is not None]) if own else ()
        below = tuple([(n, c.kind) for n, c in node.children.items()])
        key = (
            type_before_parametrizations(node.live),
            shapes,
            construction_calls.stack_of(node.live)[:CALLS],
            below,
        )
        return self._kinds.setdefault(key, len(self._kinds))


def _check_lookup(node: Node) -> None:
    """Refuses a class whose `__getattr__` fails with something else than an AttributeError."""
    if node.cls.__getattr__ is nn.Module.__getattr__:
        return
    try:
        getattr(node.live, "parametrizations", None)
    except Exception as error:  # whatever the class raises instead of an AttributeError
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise errors.ModelError(
            f"`{node.cls.__name__}` raises {type(error).__name__} for an attribute that it does "
            "not have",
            at=_span(last.filename, last.lineno or 1),
            hint="raise AttributeError in its `__getattr__` for any other name",
        ) from error


def _check_sizes(node: Node) -> None:
    """Refuses a lazy module: its sizes are not known before its first call."""
    tensors = {**node.live._parameters, **node.live._buffers}
    if any(tensor is not None and is_lazy(tensor) for tensor in tensors.values()):
        place = construction_calls.place(construction_calls.stack_of(node.live))
        raise errors.ModelError(
            f"{node.shown} is a {node.cls.__name__}, which has no sizes before it is called",
            at=place,
            hint="make it with its sizes",
        )


_STACKS = {nn.TransformerEncoder, nn.TransformerDecoder}


def is_container(cls: type) -> bool:
    """Whether the elements of a module of this class are made by the code that made the module."""
    if not issubclass(cls, CONTAINERS):
        return False
    own = next(c for c in cls.__mro__ if "__init__" in vars(c))
    return own in CONTAINERS


def _hint(error: Exception, module: ModuleType) -> str | None:
    if isinstance(error, AttributeError) and error.obj is module:
        classes = [n for n, v in vars(module).items() if isinstance(v, type)]
        own = [n for n in classes if getattr(module, n).__module__ == module.__name__]
        listed = f"its classes: {', '.join(own)}" if own else "it defines no class"
        return listed if len(own) <= FEW_CLASSES else errors.did_you_mean(error.name or "", own)
    if "meta" in str(error):
        return "`model(m)` is called on the meta device: it must not read the values of tensors"
    return None


def _described(value: object) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _place_defined(make: Callable[[ModuleType], nn.Module]) -> errors.Span | None:
    code = getattr(make, "__code__", None)
    return _span(code.co_filename, code.co_firstlineno) if code else None


def _place_raised(make: Callable[[ModuleType], nn.Module], error: Exception) -> errors.Span | None:
    """The innermost line of the schedule's own file in the error's traceback."""
    code = getattr(make, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if code and f.filename == code.co_filename and f.lineno]
    return _span(own[-1].filename, own[-1].lineno or 1) if own else _place_defined(make)


def _deepest_place(make: Callable[[ModuleType], nn.Module], error: Exception) -> list[errors.Span]:
    """The innermost line of the traceback outside of torch, unless it is the schedule's."""
    code = getattr(make, "__code__", None)
    torch_folder = str(Path(torch.__file__).parent)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.lineno]
    frames = [f for f in frames if not f.filename.startswith(torch_folder)]
    frames = [f for f in frames if not f.filename.startswith(str(Path(__file__).parent))]
    if not code or not frames or frames[-1].filename == code.co_filename:
        return []
    return [_span(frames[-1].filename, frames[-1].lineno or 1, "raised here")]


def _span(path: str, number: int, note: str = "") -> errors.Span:
    text = linecache.getline(path, number).rstrip("\r\n")
    return errors.Span.of_line(path, number, text, note)
