"""What every primitive is made of."""

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
    """Refuses arguments of other types than those of a signature (`BadArgument`)."""
    for name, kinds in _annotations(takes).items():
        value = arguments[name]
        if not any(_is_a(value, kind) for kind in kinds):
            *first, last = (_words(kind) for kind in kinds if kind is not types.NoneType)
            said = " or ".join([*filter(None, [", ".join(first)]), last])
            raise errors.BadArgument(
                f"`{name}` must be {said}, not {value!r}", hint=f"{called}{as_written(takes)}"
            )


def as_written(takes: Callable[..., None]) -> str:
    """A signature's names and defaults, without its types: `(n, by='parameters')`."""
    signature = inspect.signature(takes)
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


@functools.cache
def _annotations(takes: Callable[..., None]) -> dict[str, tuple[Any, ...]]:
    """The alternatives that each argument has."""
    found = typing.get_type_hints(takes)
    found.pop("return", None)
    unions = typing.Union, types.UnionType
    return {
        name: typing.get_args(kind) if typing.get_origin(kind) in unions else (kind,)
        for name, kind in found.items()
    }


def _is_a(value: Any, kind: Any) -> bool:
    """Whether a value is of a type, which is no union."""
    if kind in (Any, object):
        return True
    origin: Any = typing.get_origin(kind) or kind
    of = typing.get_args(kind)
    if not isinstance(origin, type):  # what is no class is for the primitive to judge
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

# Counts a model's tree, given the modules of its output.
Count = Callable[[Tree, Iterable[types.ModuleType]], Any]
# What that gives on one of so many ranks; `DoesNotFit` says why nothing.
OnRanks = Callable[[int, Count], Any]


class DoesNotFit(Exception):
    """What a schedule gives is not counted on so many ranks, in words."""


@dataclass(frozen=True)
class Call:
    """One call of a primitive."""

    directive: Directive  # who asks
    schedule: types.ModuleType  # the schedule's namespace
    arguments: dict[str, Any]  # by name
    sources: Sources  # the files that the model's classes come from
    tree: Tree  # the module tree
    states: Mapping[str, ModuleRequests]  # what was asked of modules so far
    done: Rewrite | None = None  # what it changed in the source, once that is done
    references: tuple[Reference, ...] = ()  # what earlier changes of the source use from elsewhere
    # Counts what the schedule gives on one of several ranks; None while that is done.
    on_ranks: OnRanks | None = None
    # The paths of other modules that would do, where the chosen ones do not.
    instead: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chosen:
    """The modules that a call is about."""

    nodes: Iterable[Node]  # these
    # Why these, in words, where the primitive has chosen among those selected.
    outcome: str | None = None
    instead: tuple[str, ...] = ()  # the paths of others that would do, where these do not


class Primitive:
    """One verb of the schedule language.

    A subclass says what its call means for one module: `apply` reads the module and what was asked
    of it so far, and returns what is asked of it now, or raises. How that becomes source is decided
    later and elsewhere (`edit/`, `changes/`).
    """

    name: ClassVar[str]  # what the schedule calls it
    # A stub, which has the arguments that it takes in a schedule.
    takes: ClassVar[Callable[..., None]]
    needs_calls: ClassVar[bool] = True  # whether it does nothing for a module that is never called
    examples: ClassVar[tuple[Example, ...]] = ()
    refusals: ClassVar[tuple[Refusal, ...]] = ()

    def apply(self, call: Call, node: Node, state: ModuleRequests) -> ModuleRequests:
        """What is asked of `node` after this call; no more than before where it is not said."""
        return state

    def targets(self, call: Call, nodes: list[Node]) -> Iterable[Node]:
        """The modules that the call is about; those selected, as a rule."""
        return nodes

    def choose(self, call: Call, nodes: list[Node]) -> Chosen:
        """The same, for a primitive that says why."""
        return Chosen(self.targets(call, nodes))

    def check_whole(self, call: Call) -> None:
        """Refuses what the rest of the schedule leaves no room for; asked of what has chosen."""

    def rewrites(self, call: Call, nodes: list[Node]) -> Rewrite | None:
        """How the source changes before the schedule goes on; None where it does not."""
        return None

    def replacement(self, call: Call, node: Node) -> nn.Module | None:
        """What later calls find in the place of the module; None where that is the module."""
        return None

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The call's arguments by name, checked against what it takes, defaults filled in."""
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
    """A verb that asks: it looks at the selected modules, and changes nothing."""

    def answer(self, call: Call, nodes: list[Node]) -> Any:
        """What the call gives to the schedule."""
        raise NotImplementedError


class Rewriting(Primitive):
    """A verb that changes the source before the schedule goes on.

    The schedule goes on with the model that the changed source defines; the call has `done` then.
    """

    needs_calls = False


def parameter_hint(name: str, node: Node, known: Iterable[str]) -> str:
    """What to write in the place of a name that is no parameter of a module."""
    path, _, own = name.rpartition(".")
    inner = node.at(path)
    if path and inner is not None and own in {**inner.parameters, **inner.buffers}:
        return f'select the module that has it: s[...]["{path}"], and name `{own}` alone'
    names = list(known)
    return errors.did_you_mean(name, names) or f"it has {', '.join(names) or 'none of its own'}"


def check_called(call: Call, node: Node) -> None:
    """Refuses a container that holds modules and is never called itself (`Unsupported`)."""
    if node.is_container and node.cls.__name__ in ("ModuleList", "ModuleDict"):
        raise errors.Unsupported(
            f"{node.shown} is a {node.cls.__name__}: it is never called",
            hint=f'select its elements: s["{node.path}.*"].{call.directive.primitive}()',
        )


def function_of(call: Call, value: Any, what: str) -> Function:
    """A function or class of the schedule, by its name at the top level of its file."""
    name = getattr(value, "__qualname__", None)
    if not callable(value) or name is None or "<" in name or "." in name:
        raise errors.BadArgument(
            f"{what} must be a class or function with a name of its own at the top level of a "
            "file, "
            f"not {value!r}"
        )
    home = getattr(value, "__module__", None)
    if home == call.schedule.__name__:
        return Function(name, None)
    if not home or home == "builtins":
        raise errors.BadArgument(f"{what} `{name}` cannot be imported")
    return Function(name, home)


def subgraph_of(call: Call) -> Subgraph | None:
    """The part of `forward` that a call's `subgraph` means; None where it means all of it."""
    given, name = call.arguments["subgraph"], call.arguments.get("name")
    if name is not None and not may_be_bound(name):
        raise errors.BadArgument(f"{name!r} is no name for a method")
    if given is None:
        if name is not None:
            raise errors.BadArgument("`name` is for a part: give a `subgraph` as well")
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
            hint='name the calls of `forward` that are meant: ["attention", "mlp"]',
        )
    return Subgraph(tuple(given), name)
