"""Writes expressions as they read in a flat `forward`."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.code.dataflow import bound_in
from slapo_rewrite.code.evaluate import (
    Constant,
    KnownKwargs,
    KnownObject,
    Unknown,
    Worth,
    field_at,
    truth_of,
)
from slapo_rewrite.code.text import accessor
from slapo_rewrite.stages.defining_files import DefiningFile, DefiningFiles
from slapo_rewrite.stages.environment import Environment
from slapo_rewrite.stages.flat import Line, Scope
from slapo_rewrite.stages.function_syntax import is_made_for
from slapo_rewrite.stages.program import Cut
from slapo_rewrite.stages.written_text import closed, dedented, span_of, written_out

# Stands for an expression whose names mean something else by now.
OUTDATED = ""
_CLOSED = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True)
class Method:
    """A method of a module of the model."""

    live: Any  # the module
    path: str
    home: DefiningFile  # the file in which the method stands
    function: ast.FunctionDef  # the method


class Expressions(ABC):
    """Writes expressions: what is the same in every step is left out.

    Args:
        model: The model, built without memory.
        inside: Paths of the modules whose `forward` is written out: those on the way to a cut.
        cuts: Where stages end; the first one's line is shown in refusals.
    """

    def __init__(
        self,
        model: Any,
        files: DefiningFiles,
        inside: set[str],
        cuts: Sequence[Cut],
    ) -> None:
        self.model, self.files, self.inside = model, files, inside
        self.cuts = [cut.path for cut in cuts]
        self.also = [cut.cause.at for cut in cuts[:1] if cut.cause.at]
        # Attributes of the model that decisions rest on so far, by path.
        self.settings: dict[str, Any] = {}
        self.out: list[Line] = []  # takes the lines
        self.comments: list[str] = []  # those that wait for the next statement
        self.is_aside = False  # whether what is being written is looked at only
        self.named: set[ast.NamedExpr] = set()  # the `:=` that were written on lines of their own
        self.changing = files.changing(map(model.get_submodule, sorted(inside)))
        self.depth = 0  # in how many branches and loops the statement is that is being written

    def environment(self, method: Method, values: dict[str, Worth]) -> Environment:
        """What the names of a method stand for, its parameters and local names apart."""
        world, settings = method.home.world, self.settings
        return Environment(None, method.live, method.path, values, world, settings, self.changing)

    def refused(
        self, message: str, scope: Scope, node: ast.AST, hint: str | None = None
    ) -> errors.CannotCut:
        """The error for something in a function."""
        return errors.CannotCut(message, at=scope.file.at(node), also=self.also, hint=hint)

    @abstractmethod
    def method_of(self, module: Any, path: str, name: str, behind: type | None = None) -> Method:
        """The method of a module, as it stands in the file that defines it."""

    @abstractmethod
    def call(self, node: ast.Call, scope: Scope) -> str | None:
        """How a call reads; None where as it stands."""

    @abstractmethod
    def element(self, node: ast.Subscript, scope: Scope) -> str | None:
        """An element of what a call gives; None where it is read as it stands."""

    def text(self, node: ast.expr | ast.stmt | ast.keyword, scope: Scope) -> str:
        """The text of an expression or simple statement in the result."""
        start, end = scope.file.span(node)
        text, position = [], start
        for first, last, new in sorted(self.edits(node, scope)):
            text += [scope.file.text[position:first], new]
            position = last
        joined = "".join([*text, scope.file.text[position:end]])
        return dedented(joined, scope.file, node)

    def edits(self, node: ast.AST, scope: Scope) -> Iterator[tuple[int, int, str]]:
        """What reads differently in the result."""
        names = scope.names
        new: str | None = None
        if isinstance(node, _CLOSED):
            own = {n: names.values[n] for n in bound_in(node) if n in names.values}
            names.values.update(dict.fromkeys(own, Unknown()))
            for child in ast.iter_child_nodes(node):
                yield from list(self.edits(child, scope))
            names.values.update(own)
            return
        match node:
            case ast.Name():
                new = self.name(node, scope)
            case ast.NamedExpr(target=target) if node in self.named:
                read = ast.Name(target.id, ast.Load())
                new = self.name(read, scope) or target.id
            case ast.Attribute() if (value := self.field(node, scope)) is not None:
                new = value
            case ast.Subscript() if (value := self.field(node, scope)) is not None:
                new = value
            case ast.Subscript() if (value := self.element(node, scope)) is not None:
                new = value
            case ast.Subscript(value=listed) if self.is_all_of_it(node, scope):
                new = self.text(listed, scope)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                one, other = names.value(body), names.value(orelse)
                if one == other and isinstance(one, Constant) and not one.is_setting:
                    new = repr(one.value)
                elif (known := names.decided(test)) is not None:
                    chosen = body if known else orelse
                    new = closed(self.text(chosen, scope), chosen)
            case ast.BoolOp():
                new = self.shortened(node, scope)
            case ast.Compare() | ast.UnaryOp(op=ast.Not()):
                if (truth := names.decided(node)) is not None:
                    new = repr(truth)
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
                added = names.value(right)
                if isinstance(right, ast.Name) and added == Constant(0):
                    new = closed(self.text(left, scope), left)
                elif (
                    isinstance(left, ast.Name)
                    and isinstance(node.op, ast.Add)
                    and names.value(left) == Constant(0)
                ):
                    new = closed(self.text(right, scope), right)
            case ast.Call():
                new = self.call(node, scope)
        if new is not None:
            yield (*span_of(node, scope.file), new)
            return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr_context | ast.operator | ast.boolop | ast.cmpop):
                continue
            yield from self.edits(child, scope)

    def name(self, node: ast.Name, scope: Scope) -> str | None:
        """How the result spells a name; None where as it stands."""
        if node.id == scope.names.me:
            return scope.prefix if scope.prefix != node.id else None
        value = scope.names.values.get(node.id)
        if isinstance(node.ctx, ast.Load) and isinstance(value, Constant):
            return repr(value.value)
        if isinstance(value, Unknown) and value.steps and isinstance(node.ctx, ast.Load):
            return accessor(scope.names.path_of([*value.steps]))
        if isinstance(value, KnownObject) and isinstance(node.ctx, ast.Load):
            if OUTDATED in value.texts.values():
                raise self.refused("what this was made of has another value by now", scope, node)
            return written_out(value)
        return scope.written.get(node.id)

    def field(self, node: ast.Attribute | ast.Subscript, scope: Scope) -> str | None:
        """The expression that an attribute, or an element by number, of a known object is."""
        base = scope.names.value(node.value)
        if isinstance(base, KnownKwargs):
            match node:
                case ast.Subscript(slice=ast.Constant(value=str(key)), ctx=ast.Load()):
                    return self.current(base, scope, node).get(key)
        if not isinstance(base, KnownObject):
            return None
        name: str | None = None
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int):
            name = field_at(base.cls, base.values, node.slice.value)
        if name is None:
            return None
        text = base.texts.get(name, "None")
        if text == OUTDATED:
            raise self.refused("what this was made of has another value by now", scope, node)
        return text

    def first_fields(self, node: ast.expr, scope: Scope) -> tuple[str, ...]:
        """The expressions that the first elements of a known object are: of `outputs[:2]`, two."""
        match node:
            case ast.Subscript(
                value=base,
                slice=ast.Slice(lower=None, upper=ast.Constant(value=int(count)), step=None),
                ctx=ast.Load(),
            ) if isinstance(scope.names.value(base), KnownObject):
                each = (ast.Subscript(base, ast.Constant(n), ast.Load()) for n in range(count))
                found = [self.field(ast.copy_location(one, node), scope) for one in each]
                return tuple(text for text in found if text) if all(found) else ()
        return ()

    def current(self, extra: KnownKwargs, scope: Scope, node: ast.AST) -> Mapping[str, str]:
        """The elements of a dictionary, where they are what they were."""
        for name, text in extra.texts.items():
            if text == OUTDATED:
                raise self.refused(
                    f"what `{name}` was made of has another value by now", scope, node
                )
        return extra.texts

    def is_all_of_it(self, node: ast.Subscript, scope: Scope) -> bool:
        """Whether a slice of layers ends where the list does, as `__init__` makes it."""
        steps = scope.names.chain(node.value)
        if not steps or not isinstance(node.slice, ast.Slice):
            return False
        upper = node.slice.upper
        if node.slice.lower or node.slice.step or upper is None:
            return False
        try:
            owner = scope.names.object_at(steps[:-1])
            init = self.method_of(owner, ".".join(steps[:-1]), "__init__")
            full = len(getattr(owner, steps[-1]))
        except (AttributeError, TypeError, errors.CannotCut):
            return False
        number = ast.unparse(upper).removeprefix(f"{scope.names.me}.")
        same = scope.names.value(upper) == Constant(full, is_setting=True)
        return same and is_made_for(init.function, steps[-1], number)

    def shortened(self, node: ast.BoolOp, scope: Scope) -> str | None:
        """`a and b` without what is known to be true, `a or b` without what is false."""
        value = scope.names.value(node)
        if isinstance(value, Constant) and not value.is_setting:
            scope.names.decided(node)
            return repr(value.value)
        neutral = isinstance(node.op, ast.And)
        *first, last = node.values
        kept = [v for v in first if truth_of(scope.names.value(v)) is not neutral]
        if len(kept) == len(first):
            return None
        for operand in first:
            if operand not in kept:
                scope.names.decided(operand)
        if not kept:
            return closed(self.text(last, scope), last)
        word = " and " if neutral else " or "
        loose = ast.BoolOp | ast.IfExp | ast.Lambda | ast.NamedExpr
        texts = [(self.text(v, scope), v) for v in [*kept, last]]
        return f"({word.join(f'({t})' if isinstance(v, loose) else t for t, v in texts)})"
