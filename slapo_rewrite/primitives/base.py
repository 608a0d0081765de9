"""The base classes of primitives, and what they share."""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
from collections import abc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from slapo_rewrite import errors
from slapo_rewrite.changes.imports import Function, Reference
from slapo_rewrite.changes.placement import Subgraph
from slapo_rewrite.changes.source_rewrite import Rewrite
from slapo_rewrite.changes.state import ModuleRequests
from slapo_rewrite.code.text import may_be_bound
from slapo_rewrite.directive import Directive
from slapo_rewrite.examples import Example as Example
from slapo_rewrite.examples import Refusal as Refusal
from slapo_rewrite.model.sources import Sources
from slapo_rewrite.model.tree import Node, Tree

WORDS = {
    str: "a string", int: "a whole number", bool: "True or False", type: "a class",
    abc.Callable: "a function", abc.Mapping: "a dictionary", abc.Sequence: "a list",
}  # fmt: skip
PLURALS = {str: "strings", int: "whole numbers"}


def check_types(called: str, takes: Callable[..., None], arguments: Mapping[str, Any]) -> None:
    """Checks arguments against the annotations of a signature (`BadArgument`)."""
    for name, kinds in _annotations(takes).items():
        value = arguments[name]
        if not any(_is_a(value, kind) for kind in kinds):
            *first, last = (_words(kind) for kind in kinds if kind is not types.NoneType)
            said = " or ".join([*filter(None, [", ".join(first)]), last])
            raise errors.BadArgument(
                f"`{name}` must be {said}, not {value!r}", hint=f"{called}{as_written(takes)}"
            )


def as_written(takes: Callable[..., None]) -> str:
    """The signature without annotations: `(n, by='parameters')`."""
    signature = inspect.signature(takes)
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


@functools.cache
def _annotations(takes: Callable[..., None]) -> dict[str, tuple[Any, ...]]:
    """The types that each argument may have."""
    found = typing.get_type_hints(takes)
    found.pop("return", None)
    unions = typing.Union, types.UnionType
    return {
        name: typing.get_args(kind) if typing.get_origin(kind) in unions else (kind,)
        for name, kind in found.items()
    }


def _is_a(value: Any, kind: Any) -> bool:
    """Whether a value is of a type that is not a union."""
    if kind in (Any, object):
        return True
    origin: Any = typing.get_origin(kind) or kind
    of = typing.get_args(kind)
    if not isinstance(origin, type):  # not a class: the primitive checks it
        return True
    if origin is int and isinstance(value, bool):
        return False
    if origin is not abc.Sequence or not isinstance(value, abc.Sequence):
        return isinstance(value, origin)
    return not isinstance(value, str | bytes) and all(_is_a(e, kind) for e in value for kind in of)


def _words(kind: Any) -> str:
    origin: Any = typing.get_origin(kind) or kind
    of = typing.get_args(kind)
    more = f" of {PLURALS[of[0]]}" if origin is abc.Sequence and of and of[0] in PLURALS else ""
    return WORDS.get(origin, f"a {origin.__name__}") + more


if TYPE_CHECKING:
    from torch import nn

# Measures something of a model's tree, given the imported modules of its output.
Count = Callable[[Tree, Iterable[types.ModuleType]], Any]
# Applies a `Count` to one of so many ranks; raises `DoesNotFit` if that is impossible.
OnRanks = Callable[[int, Count], Any]


class DoesNotFit(Exception):
    """The scheduled model cannot be measured on so many ranks; the message says why."""


@dataclass(frozen=True)
class Call:
    """One call of a primitive."""

    directive: Directive  # the call in the schedule
    schedule: types.ModuleType  # the schedule's namespace
    arguments: dict[str, Any]  # by name
    sources: Sources  # the files that define the model's classes
    tree: Tree  # the module tree
    states: Mapping[str, ModuleRequests]  # the requests of modules so far
    done: Rewrite | None = None  # how it has changed the source, if it has
    references: tuple[Reference, ...] = ()  # imports of earlier changes
    # Measures the scheduled model as one of several ranks; None while that is being done.
    on_ranks: OnRanks | None = None
    # Paths of other modules to use if the chosen ones do not fit.
    instead: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chosen:
    """The modules that a call acts on."""

    nodes: Iterable[Node]
    # If the primitive has chosen among the selected modules: which, and why.
    outcome: str | None = None
    instead: tuple[str, ...] = ()  # paths of other modules to use if these do not fit


class Primitive:
    """One verb of the schedule language.

    A subclass says what its call means for one module: `apply` reads the module and its requests
    so far, and returns its requests after the call, or raises. How they become source is decided
    later, in `lowering/` and `changes/`.
    """

    name: ClassVar[str]  # the method's name in a schedule
    # A function whose signature is that of the method in a schedule.
    takes: ClassVar[Callable[..., None]]
    needs_calls: ClassVar[bool] = True  # whether it acts where the module is called
    examples: ClassVar[tuple[Example, ...]] = ()
    refusals: ClassVar[tuple[Refusal, ...]] = ()

    def apply(self, call: Call, node: Node, state: ModuleRequests) -> ModuleRequests:
        """The requests of `node` after this call; by default, those before it."""
        return state

    def targets(self, call: Call, nodes: list[Node]) -> Iterable[Node]:
        """The modules that the call acts on; by default, those selected."""
        return nodes

    def choose(self, call: Call, nodes: list[Node]) -> Chosen:
        """The same, with the reason, for a primitive that chooses."""
        return Chosen(self.targets(call, nodes))

    def check_whole(self, call: Call) -> None:
        """Checks a choice against the rest of the schedule, at its end."""

    def rewrites(self, call: Call, nodes: list[Node]) -> Rewrite | None:
        """How the source is changed before the schedule goes on; None if it is not."""
        return None

    def replacement(self, call: Call, node: Node) -> nn.Module | None:
        """The module that later calls find in its place; None if it is not replaced."""
        return None

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Binds the call's arguments to their names, checks their types and fills in defaults."""
        signature = inspect.signature(self.takes)
        for name in kwargs:
            if name not in signature.parameters:
                raise errors.BadArgument(
                    f"`{self.name}` takes no argument `{name}`",
                    hint=errors.did_you_mean(name, signature.parameters)
                    or f"it takes {', '.join(signature.parameters) or 'none'}",
                )
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise errors.BadArgument(
                f"`{self.name}`: {error}", hint=f"{self.name}{as_written(self.takes)}"
            ) from None
        bound.apply_defaults()
        check_types(self.name, self.takes, bound.arguments)
        return dict(bound.arguments)


class Question(Primitive):
    """A primitive that returns something about the selected modules, and changes nothing."""

    def answer(self, call: Call, nodes: list[Node]) -> Any:
        """What the call returns to the schedule."""
        raise NotImplementedError


class Rewriting(Primitive):
    """A primitive that changes the source before the schedule goes on.

    The schedule goes on with the model that the changed source defines; `call.done` is set then.
    """

    needs_calls = False


def parameter_hint(name: str, node: Node, known: Iterable[str]) -> str:
    """The hint for a name that is not a parameter of the module."""
    path, _, own = name.rpartition(".")
    inner = node.at(path)
    if path and inner is not None and own in {**inner.parameters, **inner.buffers}:
        return f'select the module that owns it: s[...]["{path}"], and name `{own}` alone'
    names = list(known)
    return errors.did_you_mean(name, names) or f"it has {', '.join(names) or 'none of its own'}"


def check_called(call: Call, node: Node) -> None:
    """Refuses a module list or dictionary, which is never called itself (`Unsupported`)."""
    if node.is_container and node.cls.__name__ in ("ModuleList", "ModuleDict"):
        raise errors.Unsupported(
            f"{node.shown} is a {node.cls.__name__}: it is never called",
            hint=f'select its elements: s["{node.path}.*"].{call.directive.primitive}()',
        )


def function_of(call: Call, value: Any, what: str) -> Function:
    """A function or class that the schedule names; it must be at the top level of a file."""
    name = getattr(value, "__qualname__", None)
    if not callable(value) or name is None or "<" in name or "." in name:
        raise errors.BadArgument(
            f"{what} must be a class or function, with a name, at the top level of a file, not "
            f"{value!r}"
        )
    home = getattr(value, "__module__", None)
    if home == call.schedule.__name__:
        return Function(name, None)
    if not home or home == "builtins":
        raise errors.BadArgument(f"{what} `{name}` cannot be imported")
    return Function(name, home)


def subgraph_of(call: Call) -> Subgraph | None:
    """The part of `forward` that the argument `subgraph` selects; None for all of it."""
    given, name = call.arguments["subgraph"], call.arguments.get("name")
    if name is not None and not may_be_bound(name):
        raise errors.BadArgument(f"{name!r} is not a valid name of a method")
    if given is None:
        if name is not None:
            raise errors.BadArgument("`name` needs a `subgraph`: it names the method for that part")
        return None
    if isinstance(given, str):
        try:
            re.compile(given)
        except re.error as error:
            raise errors.BadArgument(f"{given!r} is no regular expression: {error}") from None
        return Subgraph(given, name)
    if not given:
        raise errors.BadArgument(
            "`subgraph` names nothing",
            hint='name the calls in `forward`: ["attention", "mlp"]',
        )
    return Subgraph(tuple(given), name)
