"""Collectives, and the user's own functions, at the borders of modules."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import libcst as cst

from slapo_rewrite import errors
from slapo_rewrite.changes.change import Change
from slapo_rewrite.changes.class_text import ClassText
from slapo_rewrite.changes.collective import Collective, through
from slapo_rewrite.changes.imports import Function
from slapo_rewrite.changes.output_files import OutputFile
from slapo_rewrite.changes.placement import Placement
from slapo_rewrite.changes.places import AtCalls, AtForward, AtSite, BehindSite
from slapo_rewrite.changes.state import Sync
from slapo_rewrite.changes.value_syncs import place_value_sync
from slapo_rewrite.code.arguments import Signature, arguments_by
from slapo_rewrite.code.build import code
from slapo_rewrite.code.dataflow import body_of
from slapo_rewrite.code.text import accessor, returns
from slapo_rewrite.directive import merged_causes
from slapo_rewrite.model.tree import Node
from slapo_rewrite.sharding.types import ModuleBoundary

HOOKS = {
    "fwd_pre": "register_forward_pre_hook",
    "fwd_post": "register_forward_hook",
    "bwd_post": "register_full_backward_hook",
}


@dataclass(frozen=True)
class SyncInput(Change):
    """At the start of `forward`: collectives on its first argument."""

    collectives: tuple[Collective, ...]  # applied in this order
    of: str | None = None  # the argument, if not the first

    @property
    def side(self) -> str:
        """The argument, in words."""
        return "input" if self.of is None else f"argument `{self.of}`"

    def write_at(self, text: ClassText, place: AtForward) -> None:
        """Reassigns the argument before the first statement."""
        forward = text.forward()
        positional = Signature.of(forward, bound=True).positional
        if not positional:
            raise errors.Unsupported(
                f"`{text.class_name}.forward` has no first argument",
                **text.where(forward),
            )
        name = self.of or positional[0]
        for collective in self.collectives:
            value = code(collective.of(name, text.helper))
            line = self.where_given(forward, f"{name} = {value}")
            why = f"{collective.function} of {f'`{name}`' if self.of else 'the input'}"
            text.insert_before(body_of(forward)[0], line, why)

    def where_given(self, forward: ast.FunctionDef, text: str) -> str:
        """The statement, under a condition if the argument may be None."""
        if self.of is None:
            return text
        default = Signature.of(forward).defaults.get(self.of)
        if isinstance(default, ast.Constant) and default.value is None:
            return f"if {self.of} is not None:\n    {text}"
        return text


@dataclass(frozen=True)
class SyncOutput(Change):
    """Where `forward` returns: collectives on the value, or on its first item."""

    collectives: tuple[Collective, ...]  # applied in this order
    nested: bool = False  # whether the tensor is inside the returned value
    # The first field of each class that `forward` returns.
    first: tuple[tuple[str, str], ...] = ()
    side = "output"

    def write_at(self, text: ClassText, place: AtForward) -> None:
        """Wraps the returned tensor in the collectives."""
        why = f"{', '.join(c.function for c in self.collectives)} of the output"
        for statement in returns(text.forward()):
            if statement.value is not None:
                value = self._returned(statement.value, text)
                text.replace(value, _around(self.collectives, text), why, outer=True)

    def _returned(self, value: ast.expr, text: ClassText) -> ast.expr:
        """The first tensor in a returned expression."""
        found: ast.expr | None = None if self.nested else value
        if isinstance(value, ast.BinOp) and isinstance(value.left, ast.Tuple):
            value = value.left
        if isinstance(value, ast.Tuple) and value.elts:
            found = value.elts[0]
        elif isinstance(value, ast.Call):
            first = dict(self.first).get(ast.unparse(value.func))
            if first is not None:
                found = arguments_by(value, first).get(first)
        if found is None or isinstance(found, ast.Starred):
            raise errors.Unsupported(
                f"`{text.class_name}.forward` returns its first tensor inside of an object that "
                "is not written out here",
                **text.where(value),
                hint="return a tuple or a call that names the tensor, or put the sync on a module "
                "inside",
            )
        return found


@dataclass(frozen=True)
class SyncCall(Change):
    """At the calls of a submodule: collectives on its first argument or its result."""

    collectives: tuple[Collective, ...]  # applied in this order
    around: str  # `argument` or `result`
    name: str | None = None  # the first argument's name, if it may be passed by keyword

    def write_at(self, text: ClassText, place: AtCalls) -> None:
        """Wraps it in the collectives in every call."""
        is_result = self.around == "result"
        functions = ", ".join(c.function for c in self.collectives)
        why = f"{functions} of the {self.around} of `{place.path or 's'}`"
        for call in calls(
            text, place, self, "the collective", "put the sync on a module around it"
        ):
            value = call if is_result else self._first_argument(call, text)
            text.replace(value, _around(self.collectives, text), why, outer=not is_result)

    def _first_argument(self, call: ast.Call, text: ClassText) -> ast.expr:
        name = self.name or ""
        found = arguments_by(call, name).get(name)
        if found is None:
            raise errors.Unsupported(
                "this call does not name the argument of the collective",
                **text.where(call),
                hint="put the sync on a module around it",
            )
        return found


@dataclass(frozen=True)
class RegisterHook(Change):
    """After a construction site: a hook on the new module."""

    mode: str
    function: Function

    def write_at(self, text: ClassText, place: AtSite) -> None:
        """Registers the hook."""
        site = text.classes.sites[place.start]
        if place.index:
            raise errors.UnfollowableConstruction(
                f"`{site.path}` is constructed in a loop: one element cannot get a hook there",
                **text.where(site.value),
                hint="put the sync on a module inside the element",
            )
        function = text.imports.function(self.function, text.causes)
        line = f"{accessor(site.path)}.{HOOKS[self.mode]}({function})"
        text.insert_after(site.statement, line, f"hook on `{site.path}`")


def _around(
    collectives: Sequence[Collective], text: ClassText
) -> Callable[[cst.BaseExpression], cst.BaseExpression]:
    return lambda node: through(collectives, node, text.helper)


def calls(text: ClassText, place: AtCalls, change: Change, what: str, hint: str) -> list[ast.Call]:
    """The calls of a submodule that a change applies to.

    A call of several submodules in turn (in a loop over a tuple of them) is changed once, for the
    first of them, if all have the same change. `what` and `hint` are for the error if there is no
    call.
    """
    found = [
        (call, paths)
        for method in text.methods()
        for call, paths in text.classes.calls_of(method, place.path)
    ]
    if not found:
        raise errors.Unsupported(
            f"no method of `{text.class_name}` calls `{accessor(place.path)}(...)`: there is no "
            f"place for {what}",
            at=text.at_class(),
            cause=text.causes,
            hint=hint,
        )
    for call, paths in found:
        other = next((p for p in paths if text.wanted.get(replace(place, path=p)) != change), None)
        if other is not None:
            raise errors.Unsupported(
                f"this calls both `{place.path}` and `{other}`, and only one of them has to change",
                **text.where(call),
                hint=f"schedule both alike, or write a separate call of `{place.path}`",
            )
    return [call for call, paths in found if paths[0] == place.path]


def place_syncs(
    to: Placement, node: Node, borders: Sequence[ModuleBoundary], is_layer: bool
) -> None:
    """Places the collectives at a module's borders that no layer carries out itself."""
    syncs = to.states[node.path].syncs if borders else ()
    sides: dict[tuple[str, str | None], list[Sync]] = {}
    for border in borders:
        sync = syncs[border.number]
        if isinstance(sync.op, Function):
            place_hook(to, node, sync, sync.op)
        elif sync.op != "keep":
            if (node.path, border.number) in to.followed.summed:
                sync = replace(sync, partial_gradient=True)
            if border.value is not None:
                place_value_sync(to, node, border.value, _collective(sync), sync)
                continue
            side = "result" if sync.mode == "fwd_post" else "argument"
            sides.setdefault((side, sync.of), []).append(sync)
    for (side, of), together in sorted(sides.items(), key=lambda s: (s[0][0], s[0][1] or "")):
        _place_side(to, node, side, of, together, is_layer)


def place_hook(to: Placement, node: Node, sync: Sync, function: Function) -> None:
    """Places the registration of the user's own function after a module's construction."""
    causes = (sync.cause,)
    places = to.files.making(node).changes
    at, owner = places.site(node, causes)
    place = BehindSite(at.start, at.index, (sync.mode, function.name))
    places.add(owner.path, place, RegisterHook(sync.mode, function), causes)


def _place_side(
    to: Placement, node: Node, side: str, of: str | None, syncs: Sequence[Sync], is_layer: bool
) -> None:
    """Places the collectives of an argument or of the result: in `forward`, or at its calls."""
    causes = merged_causes(s.cause for s in syncs)
    collectives = tuple(map(_collective, syncs))
    home = to.files.computing(node.cls)
    if home is not None and not is_layer and not to.is_outside(node, home):
        what: Change = SyncInput(collectives, of)
        if side == "result":
            nested = node.path in to.followed.nested
            what = SyncOutput(collectives, nested, _containers(node.cls, home))
        home.changes.add(node.path, AtForward(side, of or ""), what, causes)
    elif of is not None:
        raise errors.Unsupported(
            f"`{of}` of {node.shown} can only be synchronised at the beginning of `forward`, "
            "which is in no file that is rewritten",
            at=causes[0].at,
            hint="put the sync on a module around it that takes the value as an argument",
        )
    elif node.owner is None:
        raise errors.Unsupported(
            "the model itself is not called by another module", at=causes[0].at
        )
    else:
        calling, caller, relative = to.calling(node)
        name = next(iter(inspect.signature(node.live.forward).parameters), None)
        call = SyncCall(collectives, side, name)
        calling.changes.add(caller.path, AtCalls(relative, side), call, causes)


def _containers(cls: type, home: OutputFile) -> tuple[tuple[str, str], ...]:
    """The dataclasses and named tuples that `forward` returns, and the first field of each."""
    forward = home.classes.method(cls.__name__, "forward")
    known = vars(sys.modules[cls.__module__])
    found = {}
    for statement in returns(forward) if forward else ():
        if isinstance(statement.value, ast.Call):
            name = ast.unparse(statement.value.func)
            holder = known.get(name)
            if dataclasses.is_dataclass(holder):
                found[name] = dataclasses.fields(holder)[0].name
            elif isinstance(holder, type) and hasattr(holder, "_fields"):
                found[name] = holder._fields[0]
    return tuple(sorted(found.items()))


def _collective(sync: Sync) -> Collective:
    """The collective call of a sync."""
    if sync.mode == "bwd_post":
        return Collective("all_reduce_gradient")
    assert isinstance(sync.op, str)
    keywords: dict[str, object] = {}
    if sync.op == "all_to_all":
        keywords = {"gather_axis": sync.axis, "scatter_axis": sync.scatter_axis}
    elif sync.axis is not None and (sync.op, sync.axis) != ("all_gather", -1):
        keywords = {"axis": sync.axis}
    if sync.partial_gradient:
        keywords["tensor_parallel_output_grad"] = True
    return Collective(sync.op, tuple(keywords.items()))
