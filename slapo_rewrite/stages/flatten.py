"""Writes a model's `forward` as one run of statements, for what is the same in every step.

Branches that training never takes are left out, and the `forward` of each module on the way to a
cut is written where it is called. What remains keeps its words, its line breaks and its comments.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.edit.text import accessor
from slapo_rewrite.errors import Span
from slapo_rewrite.source.index import SourceFile
from slapo_rewrite.source.liveness import live_after, local_names, statements
from slapo_rewrite.stages.values import (
    NONE,
    Constant,
    Extra,
    Fields,
    Names,
    Something,
    Value,
    is_module,
    truth_of,
)

_Function = ast.FunctionDef
# Keyword arguments that decorators take for themselves: what a result is wrapped in.
FOR_DECORATORS = {"return_dict"}
# Stands for an expression whose names mean something else by now.
OUTDATED = ""
_CLOSED = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_COMPOUND = (ast.For, ast.While, ast.With, ast.Try, ast.Match, ast.FunctionDef, ast.ClassDef)


@dataclass
class Line:
    """A statement of the result.

    Attributes:
        text: Its source, the comments above it included.
        at: Where it comes from.
    """

    text: str
    at: Span


@dataclass
class Flat:
    """A `forward` as one run of statements.

    Attributes:
        parameters: What a training step gives it, in the order of the signature.
        lines: The statements.
        loss: The loss, as text.
        settings: Attributes of the model that branches were left out for, by path.
    """

    parameters: tuple[str, ...]
    lines: list[Line]
    loss: str
    settings: Mapping[str, Any]


@dataclass
class Scope:
    """One function while it is written out.

    Attributes:
        function: The function.
        file: Where it is defined.
        names: What its names stand for.
        prefix: How the result spells its module.
        written: How the result spells its local names, where that is another way.
        after: The names of the result that are still needed where the function was called.
        elements: One of the modules that the variable of a loop stands for.
    """

    function: _Function
    file: SourceFile
    names: Names
    prefix: str
    written: dict[str, str]
    after: frozenset[str]
    elements: dict[str, Any] = field(default_factory=dict)

    def spelled(self, name: str) -> str:
        """A local name as the result spells it."""
        return self.written.get(name, name)


@dataclass
class Result:
    """What a function returns: its text, and what is known of it."""

    text: str
    value: Value
    parts: tuple[str, ...] = ()


class Flattening:
    """Writes out the `forward` of a model.

    Args:
        model: The model, built without memory.
        file: The file that defines it.
        world: The names of that file's module.
        inside: Paths of the modules whose `forward` is written out: those on the way to a cut.
        loss: Which attribute or element of the result is the loss; None where that is all of it.
        cause: The schedule's line, for refusals.
    """

    def __init__(
        self,
        model: Any,
        file: SourceFile,
        world: Mapping[str, Any],
        inside: set[str],
        loss: str | int | None,
        cause: Span | None,
    ) -> None:
        self.model, self.file, self.world, self.inside = model, file, world, inside
        self.loss = loss
        self.also = [cause] if cause else []
        self.settings: dict[str, Any] = {}
        self.comments: list[str] = []
        self.depth = 0

    def flat(self, given: Iterable[str]) -> Flat:
        """The model's `forward`, for a training step that gives it these arguments."""
        given = set(given)
        function = only_loss(self.method_of(self.model, "", "forward"), self.loss)
        values: dict[str, Value] = {}
        names = Names(None, self.model, "", values, self.world, self.settings)
        scope = Scope(function, self.file, names, "self", {}, frozenset())
        parameters = []
        for argument, default in own_arguments(function):
            name = argument.arg
            if name in given:
                values[name] = Something(True, self._tensor())
                parameters.append(name)
            elif name == "use_cache":
                values[name] = Constant(False)
            elif default is not None:
                values[name] = names.value(default)
            else:
                raise self.refused(
                    f"`forward` needs `{name}`, which a training step here does not give",
                    scope,
                    argument,
                    "let inputs(model) in the schedule give it",
                )
        if function.args.kwarg:
            values[function.args.kwarg.arg] = Extra()
        names.me = function.args.args[0].arg
        lines: list[Line] = []
        result = self.block(body_of(function), scope, lines)
        if result is None:
            raise self.refused("`forward` returns nothing", scope, function)
        return Flat(tuple(parameters), lines, result.text, dict(self.settings))

    @staticmethod
    def _tensor() -> type:
        from torch import Tensor

        return Tensor

    def refused(
        self, message: str, scope: Scope, node: ast.AST, hint: str | None = None
    ) -> errors.CannotCut:
        """The error for something in a function."""
        return errors.CannotCut(message, at=scope.file.at(node), also=self.also, hint=hint)

    def method_of(self, module: Any, path: str, name: str) -> _Function:
        """The method that calling a module runs, as it stands in the model's file."""
        for cls in type(module).__mro__:
            if name in vars(cls):
                if cls.__module__ == self.world.get("__name__"):
                    found = self.file.method(cls.__name__, name)
                    if found is not None:
                        return found
                break
        raise errors.CannotCut(
            f"the `{name}` of `{path or 's'}` ({type(module).__name__}) does not stand in "
            f"{self.file.path.name}, so that it cannot be cut",
            at=self.also[0] if self.also else None,
            hint=f"copy the class into {self.file.path.name}",
        )

    # Statements -------------------------------------------------------------------------------

    def block(self, body: Sequence[ast.stmt], scope: Scope, out: list[Line]) -> Result | None:
        """Writes statements; gives what they return, where they do."""
        for statement in body:
            self.comments += comments_above(scope.file, statement)
            result = self.statement(statement, scope, out)
            if result is not None:
                return result
        return None

    def statement(self, node: ast.stmt, scope: Scope, out: list[Line]) -> Result | None:
        """Writes one statement."""
        match node:
            case ast.Return():
                return self.returned(node, scope, out)
            case ast.If():
                return self.branch(node, scope, out)
            case ast.Assign(targets=[target], value=value):
                self.assigned(node, target, value, scope, out)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.assigned(node, target, value, scope, out)
            case ast.AnnAssign() | ast.Pass():
                pass
            case ast.Expr(value=value) if self.is_settled(value, scope):
                pass
            case ast.For():
                self.loop(node, scope, out)
            case ast.Raise():
                raise self.refused("a training step ends in this error", scope, node)
            case ast.Assert(test=test) if scope.names.decided(test):
                self.comments.clear()
            case ast.With():
                items = ", ".join(
                    self.text(i.context_expr, scope, out)
                    + (f" as {scope.file.segment(i.optional_vars)}" if i.optional_vars else "")
                    for i in node.items
                )
                self.compound(node, f"with {items}:", node.body, scope, out)
            case _ if isinstance(node, _COMPOUND):
                raise self.refused(
                    f"a {type(node).__name__.lower()} statement cannot be written out",
                    scope,
                    node,
                    "put it into the `forward` of a module of its own",
                )
            case _:
                self.forget(bound_in([node]), scope, node, out)
                self.emit(self.whole(node, scope, out), node, scope, out)
        return None

    def is_settled(self, value: ast.expr, scope: Scope) -> bool:
        """Whether a statement that is an expression need not be written."""
        match value:
            case ast.Constant():
                return True
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=name), attr="pop"),
                args=[ast.Constant(value=str(key)), *_],
            ):
                extra = scope.names.values.get(name)
                if isinstance(extra, Extra):
                    scope.names.values[name] = Extra(
                        {k: v for k, v in extra.texts.items() if k != key},
                        {k: v for k, v in extra.values.items() if k != key},
                    )
                    return True
        return False

    def returned(self, node: ast.Return, scope: Scope, out: list[Line]) -> Result:
        """What a function gives back."""
        self.comments.clear()
        if self.depth:
            raise self.refused(
                "a `return` inside a branch or loop that training may or may not take",
                scope,
                node,
                "let `forward` bind its result to a name, and return that at the end",
            )
        if node.value is None:
            return Result("None", NONE)
        return self.result(node.value, scope, out)

    def result(self, node: ast.expr, scope: Scope, out: list[Line]) -> Result:
        """An expression's text, and what is known of it."""
        if isinstance(node, ast.Call) and (inner := self.callee(node, scope)):
            return self.inlined(node, *inner, scope, out)
        if isinstance(node, ast.Tuple) and not any(isinstance(e, ast.Starred) for e in node.elts):
            texts = [self.result(e, scope, out).text for e in node.elts]
            return Result(", ".join(texts), Something(True), tuple(texts))
        made = self.made(node, scope, out)
        if made is not None:
            return Result(written_out(made), made)
        value = scope.names.settled(node)
        return Result(bare(self.text(node, scope, out)), value)

    def made(self, node: ast.expr, scope: Scope, out: list[Line]) -> Fields | None:
        """The object that a call of a data class with keywords makes."""
        if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
            return None
        cls = scope.names.global_at(node.func)
        if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
            return None
        texts = {str(k.arg): self.text(k.value, scope, out) for k in node.keywords}
        values = {str(k.arg): scope.names.settled(k.value) for k in node.keywords}
        return Fields(cls, texts, values)

    def branch(self, node: ast.If, scope: Scope, out: list[Line]) -> Result | None:
        """Writes the branch that training takes, or all of them."""
        decided = scope.names.decided(node.test)
        if decided is not None:
            taken = node.body if decided else node.orelse
            if not taken:
                self.comments.clear()
            return self.block(taken, scope, out)
        test = bare(self.text(node.test, scope, out))
        self.forget(bound_in([node]), scope, node, out)
        self.compound(node, f"if {test}:", node.body, scope, out, node.orelse)
        return None

    def loop(self, node: ast.For, scope: Scope, out: list[Line]) -> None:
        """Writes a loop."""
        self.forget(bound_in([node]), scope, node, out)
        for name, element in self.elements(node, scope):
            scope.names.values[name] = Something(True, type(element))
            scope.elements[name] = element
        target, iterable = self.text(node.target, scope, out), self.text(node.iter, scope, out)
        self.compound(node, f"for {target} in {iterable}:", node.body, scope, out, node.orelse)

    def elements(self, node: ast.For, scope: Scope) -> Iterator[tuple[str, Any]]:
        """The loop's variables that stand for modules, each with one of them."""
        target, listed = node.target, node.iter
        match listed:
            case ast.Call(func=ast.Name(id="enumerate"), args=[inner, *_]):
                listed = inner
                if isinstance(target, ast.Tuple):
                    target = target.elts[-1]
        if isinstance(listed, ast.Subscript):
            listed = listed.value
        steps = scope.names.chain(listed)
        if isinstance(target, ast.Name) and steps:
            try:
                found = scope.names.object_at(steps)
            except AttributeError:
                return
            if is_module(found) and len(found):
                yield target.id, next(iter(found))

    def compound(
        self,
        node: ast.stmt,
        head: str,
        body: Sequence[ast.stmt],
        scope: Scope,
        out: list[Line],
        orelse: Sequence[ast.stmt] = (),
    ) -> None:
        """Writes a statement that holds others."""
        comments, self.comments = self.comments, []
        self.depth += 1
        texts = []
        for inner in (body, orelse):
            lines: list[Line] = []
            self.block(inner, scope, lines)
            texts.append("\n".join(line.text for line in lines))
        self.depth -= 1
        self.comments = comments
        for name in bound_in([node]):  # what is known of it inside holds for one way only
            scope.names.values[name] = Something()
        if not texts[0] and not texts[1]:
            self.comments.clear()
            return
        text = f"{head}\n{textwrap.indent(texts[0] or 'pass', '    ')}"
        if texts[1]:
            text += f"\nelse:\n{textwrap.indent(texts[1], '    ')}"
        self.emit(text, node, scope, out)

    def assigned(
        self, node: ast.stmt, target: ast.expr, value: ast.expr, scope: Scope, out: list[Line]
    ) -> None:
        """Writes an assignment, unless what it binds is known."""
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Call):
            inner = self.callee(value, scope)
            if inner is not None:
                result = self.inlined(value, *inner, scope, out)
                self.unpacked(node, target, result, scope, out)
                return
        result = self.result(value, scope, out)
        if not isinstance(target, ast.Name):
            self.forget(bound_in([node]), scope, node, out)
            self.emit(self.whole(node, scope, out), node, scope, out)
            return
        self.bind(node, target, result, scope, out)

    def unpacked(
        self, node: ast.stmt, target: ast.Tuple, result: Result, scope: Scope, out: list[Line]
    ) -> None:
        """Binds each name of a tuple to its part of a result."""
        names = [e for e in target.elts if isinstance(e, ast.Name)]
        if len(names) != len(target.elts) or len(result.parts) != len(names):
            self.forget(bound_in([node]), scope, node, out)
            self.emit(f"{self.text(target, scope, out)} = {result.text}", node, scope, out)
            return
        for number, name in enumerate(names):
            text = result.parts[number]
            value = Constant(None) if text == "None" else Something()
            self.bind(node, name, Result(text, value), scope, out)

    def bind(
        self, node: ast.stmt, target: ast.Name, result: Result, scope: Scope, out: list[Line]
    ) -> None:
        """Gives a name its value; writes that down where it is not known beforehand."""
        name, value = target.id, result.value
        written = scope.spelled(name)
        inside_compound = self.depth > 0
        if isinstance(value, Constant) and not inside_compound:
            scope.names.values[name] = value
            self.comments.clear()
            return
        if isinstance(value, Fields) and not inside_compound:
            scope.names.values[name] = value
            self.comments.clear()
            return
        known = isinstance(value, Something) and value.is_given
        scope.names.values[name] = Something(known)
        self.outdate(written, scope)
        if result.text != written:
            self.emit(f"{written} = {result.text}", node, scope, out)
        else:
            self.comments.clear()

    def forget(self, bound: Iterable[str], scope: Scope, node: ast.stmt, out: list[Line]) -> None:
        """From here on these names may stand for something else; writes down what they were."""
        for name in bound:
            value = scope.names.values.get(name)
            if isinstance(value, Constant) and (hasattr(node, "body") or reads_in(node, name)):
                text = f"{scope.spelled(name)} = {value.value!r}"
                out.append(Line(text, scope.file.at(node)))
            scope.names.values[name] = Something()
            self.outdate(scope.spelled(name), scope)

    @staticmethod
    def outdate(written: str, scope: Scope) -> None:
        """A name of the result has another value now: objects made of the old one end here."""
        for name, value in scope.names.values.items():
            if isinstance(value, Fields) and written in value.texts.values():
                texts = {k: OUTDATED if t == written else t for k, t in value.texts.items()}
                scope.names.values[name] = dataclasses.replace(value, texts=texts)

    def emit(self, text: str, node: ast.stmt, scope: Scope, out: list[Line]) -> None:
        """Adds a statement, with the comments that stand above and beside it."""
        above, self.comments = self.comments, []
        if not isinstance(node, _COMPOUND) and not isinstance(node, ast.If):
            text += comment_beside(scope.file, node)
        out.append(Line("\n".join([*above, text]), scope.file.at(node)))

    def whole(self, node: ast.stmt, scope: Scope, out: list[Line]) -> str:
        """A simple statement."""
        return self.text(node, scope, out)

    # Expressions ------------------------------------------------------------------------------

    def text(self, node: ast.expr | ast.stmt | ast.keyword, scope: Scope, out: list[Line]) -> str:
        """The text of an expression or simple statement in the result."""
        start, end = scope.file.span(node)
        text, position = [], start
        for first, last, new in sorted(self.edits(node, scope, out)):
            text += [scope.file.text[position:first], new]
            position = last
        joined = "".join([*text, scope.file.text[position:end]])
        return dedented(joined, scope.file, node)

    def edits(self, node: ast.AST, scope: Scope, out: list[Line]) -> Iterator[tuple[int, int, str]]:
        """What reads differently in the result."""
        names = scope.names
        new: str | None = None
        if isinstance(node, _CLOSED):
            own = {n: names.values[n] for n in bound_in([node]) if n in names.values}
            names.values.update(dict.fromkeys(own, Something()))
            for child in ast.iter_child_nodes(node):
                yield from list(self.edits(child, scope, out))
            names.values.update(own)
            return
        match node:
            case ast.Name():
                new = self.name(node, scope)
            case ast.Attribute() if (value := self.field(node, scope)) is not None:
                new = value
            case ast.Subscript() if (value := self.field(node, scope)) is not None:
                new = value
            case ast.IfExp(test=test, body=body, orelse=orelse):
                one, other = names.value(body), names.value(orelse)
                if one == other and isinstance(one, Constant) and not one.is_setting:
                    new = repr(one.value)
                elif (known := names.decided(test)) is not None:
                    chosen = body if known else orelse
                    new = closed(self.text(chosen, scope, out), chosen)
            case ast.BoolOp():
                new = self.shortened(node, scope, out)
            case ast.Compare() | ast.UnaryOp(op=ast.Not()):
                if (truth := names.decided(node)) is not None:
                    new = repr(truth)
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
                added = names.value(right)
                if isinstance(right, ast.Name) and added == Constant(0):
                    new = closed(self.text(left, scope, out), left)
            case ast.Call():
                new = self.call(node, scope, out)
        if new is not None:
            yield (*scope.file.span(node), new)
            return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr_context | ast.operator | ast.boolop | ast.cmpop):
                continue
            yield from self.edits(child, scope, out)

    def name(self, node: ast.Name, scope: Scope) -> str | None:
        """How the result spells a name; None where as it stands."""
        if node.id == scope.names.me:
            return scope.prefix if scope.prefix != node.id else None
        value = scope.names.values.get(node.id)
        if isinstance(node.ctx, ast.Load) and isinstance(value, Constant):
            return repr(value.value)
        if isinstance(value, Fields) and isinstance(node.ctx, ast.Load):
            if OUTDATED in value.texts.values():
                raise self.refused("what this was made of has another value by now", scope, node)
            return written_out(value)
        return scope.written.get(node.id)

    def field(self, node: ast.Attribute | ast.Subscript, scope: Scope) -> str | None:
        """The expression that an attribute, or an element by number, of a known object is."""
        base = scope.names.value(node.value)
        if not isinstance(base, Fields):
            return None
        name: str | None = None
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int):
            name = scope.names.field_at(base, node.slice.value)
        if name is None:
            return None
        text = base.texts.get(name, "None")
        if text == OUTDATED:
            raise self.refused("what this was made of has another value by now", scope, node)
        return text

    def shortened(self, node: ast.BoolOp, scope: Scope, out: list[Line]) -> str | None:
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
            return closed(self.text(last, scope, out), last)
        word = " and " if neutral else " or "
        loose = ast.BoolOp | ast.IfExp | ast.Lambda | ast.NamedExpr
        texts = [(self.text(v, scope, out), v) for v in [*kept, last]]
        return f"({word.join(f'({t})' if isinstance(v, loose) else t for t, v in texts)})"

    def call(self, node: ast.Call, scope: Scope, out: list[Line]) -> str | None:
        """A call without the arguments that it has anyway; the text of a module written out."""
        match node.func:
            case ast.Attribute(value=ast.Name(id=name), attr="get" | "pop"):
                extra = scope.names.values.get(name)
                if isinstance(extra, Extra) and isinstance(node.args[0], ast.Constant):
                    key = str(node.args[0].value)
                    if key in extra.texts:
                        return extra.texts[key]
                    return self.text(node.args[1], scope, out) if len(node.args) > 1 else "None"
        if (inner := self.callee(node, scope)) is not None:
            return self.inlined(node, *inner, scope, out).text
        taken = signature_of(self.called(node, scope))
        by_name: list[tuple[str, str]] = []
        changed = False
        for keyword in node.keywords:
            value = scope.names.value(keyword.value)
            if keyword.arg is None and isinstance(value, Extra):
                changed = True
                by_name += [
                    (f"{name}={text}", "")
                    for name, text in value.texts.items()
                    if not is_default(name, value.values[name], taken)
                ]
            elif keyword.arg is not None and is_default(keyword.arg, value, taken):
                changed = True
            else:
                beside = comment_after(scope.file, keyword)
                by_name.append((self.text(keyword, scope, out), beside))
        positional = list(node.args)
        while positional and taken is not None and not isinstance(positional[-1], ast.Starred):
            parameter = positional_name(taken, len(positional) - 1)
            value = scope.names.value(positional[-1])
            written = isinstance(positional[-1], ast.Constant)
            if parameter is None or written or not is_default(parameter, value, taken):
                break
            positional.pop()
            changed = True
        if not changed:
            return None
        function = self.text(node.func, scope, out)
        kept = [(self.text(a, scope, out), comment_after(scope.file, a)) for a in positional]
        kept += by_name
        if not any(comment for _, comment in kept):
            return f"{function}({', '.join(text for text, _ in kept)})"
        body = "\n".join(f"    {text},{comment}" for text, comment in kept)
        return f"{function}(\n{body}\n)"

    def called(self, node: ast.Call, scope: Scope) -> Any:
        """The function or module that is called, where it is known."""
        if isinstance(node.func, ast.Name) and node.func.id in scope.elements:
            return scope.elements[node.func.id]
        steps = scope.names.chain(node.func)
        if steps is not None:
            try:
                return scope.names.object_at(steps)
            except AttributeError:
                return None
        return scope.names.global_at(node.func)

    def callee(self, node: ast.Call, scope: Scope) -> tuple[Any, str, str, _Function] | None:
        """The module that is called and is to be written out: itself, path, prefix, function."""
        steps = scope.names.chain(node.func)
        if not steps:
            return None
        path = ".".join([scope.names.path, *steps] if scope.names.path else steps)
        try:
            found = scope.names.object_at(steps)
        except AttributeError:
            return None
        if path in self.inside:
            if self.depth:
                raise self.refused(
                    f"`{path}` is called inside a branch or loop, and cannot be cut",
                    scope,
                    node,
                    "cut before or after it",
                )
            function = self.method_of(found, path, "forward")
            return found, path, accessor(path), function
        if len(steps) == 1 and inspect.ismethod(found) and not self.depth:
            return self.own_method(node, steps[0], scope)
        return None

    def own_method(
        self, node: ast.Call, name: str, scope: Scope
    ) -> tuple[Any, str, str, _Function] | None:
        """A method of the same module, where writing it out leaves out some of it."""
        given = [*node.args, *(k.value for k in node.keywords)]
        if not any(isinstance(scope.names.value(v), Constant) for v in given):
            return None
        try:
            function = self.method_of(scope.names.live, scope.names.path, name)
        except errors.CannotCut:
            return None
        tests = [n for n in ast.walk(function) if isinstance(n, ast.If)]
        last = function.body[-1]
        returns = [n for n in ast.walk(function) if isinstance(n, ast.Return)]
        plain = not function.decorator_list and not any(
            isinstance(n, ast.For | ast.While | ast.With | ast.Try) for n in ast.walk(function)
        )
        if not tests or returns != [last] or not plain:
            return None
        return scope.names.live, scope.names.path, scope.prefix, function

    # Writing a function where it is called ------------------------------------------------------

    def inlined(
        self,
        node: ast.Call,
        live: Any,
        path: str,
        prefix: str,
        function: _Function,
        scope: Scope,
        out: list[Line],
    ) -> Result:
        """Writes a function's statements; gives what it returns."""
        self.comments.clear()
        arguments = self.bound(node, function, scope, out)
        values: dict[str, Value] = {}
        names = Names(None, live, path, values, self.world, self.settings)
        needed = scope.after | self.needed_after(node, scope)
        inner = Scope(function, self.file, names, prefix, {}, frozenset(needed))
        bound = bound_in(function.body)
        word = path.rpartition(".")[2] or "model"
        moves: list[tuple[str, str]] = []
        for name in local_names(function) - arguments.keys():
            if name in needed:
                inner.written[name] = f"{word}_{name}"
        taken = {inner.spelled(n) for n in bound}
        for name, result in arguments.items():
            values[name] = result.value
            if not isinstance(result.value, Something):
                if name in needed and name in bound:
                    inner.written[name] = f"{word}_{name}"
                continue
            is_name = result.text.isidentifier()
            if is_name and name not in bound and result.text not in taken:
                if result.text != name:
                    inner.written[name] = result.text
                continue
            if name in needed and (name in bound or result.text != name):
                inner.written[name] = f"{word}_{name}"
            moves.append((inner.spelled(name), result.text))
        at = scope.file.at(node)
        for number, (target, text) in enumerate(moves):
            if any(re.search(rf"\b{target}\b", later) for _, later in moves[number + 1 :]):
                raise self.refused(
                    f"the arguments of `{path}` change places", scope, node, "name them apart"
                )
            if target != text:
                out.append(Line(f"{target} = {text}", at))
        names.me = function.args.args[0].arg
        returned = self.block(body_of(function), inner, out)
        self.comments.clear()
        return returned or Result("None", NONE)

    def bound(
        self, node: ast.Call, function: _Function, scope: Scope, out: list[Line]
    ) -> dict[str, Result]:
        """What each parameter of a function is given by a call."""
        if any(isinstance(a, ast.Starred) for a in node.args) or function.args.vararg:
            raise self.refused("a call with `*` cannot be written out", scope, node)
        own = own_arguments(function)
        given: dict[str, Result] = {}
        for (argument, _), value in zip(own, node.args, strict=False):
            given[argument.arg] = self.result(value, scope, out)
        texts: dict[str, str] = {}
        values: dict[str, Value] = {}
        known = {a.arg for a, _ in own}
        for keyword in node.keywords:
            if keyword.arg is None:
                extra = scope.names.value(keyword.value)
                if not isinstance(extra, Extra):
                    raise self.refused("what `**` stands for here is not known", scope, node)
                results = {k: Result(extra.texts[k], extra.values[k]) for k in extra.texts}
            else:
                results = {keyword.arg: self.result(keyword.value, scope, out)}
            for name, result in results.items():
                if name in known:
                    given[name] = result
                elif name not in FOR_DECORATORS or not function.decorator_list:
                    texts[name], values[name] = result.text, result.value
        for argument, default in own:
            if argument.arg in given:
                continue
            if argument.arg == "use_cache":
                given[argument.arg] = Result("False", Constant(False))
            elif default is None:
                raise self.refused(f"`{argument.arg}` is not given here", scope, node)
            else:
                names = dataclasses.replace(scope.names, values={}, me=None)
                given[argument.arg] = Result(ast.unparse(default), names.value(default))
        if function.args.kwarg:
            given[function.args.kwarg.arg] = Result("", Extra(texts, values))
        return given

    def needed_after(self, node: ast.AST, scope: Scope) -> set[str]:
        """The names of the result that the caller may read after a call."""
        statement = statement_of(scope.function, node)
        inside = set(ast.walk(node))
        beside = {
            n.id
            for n in ast.walk(statement)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n not in inside
        }
        found: set[str] = set()
        for name in live_after(scope.function, statement) - set(bound_in([statement])) | beside:
            value = scope.names.values.get(name)
            if isinstance(value, Fields):
                found |= {t for t in value.texts.values() if t.isidentifier()}
            elif name in scope.names.values and not isinstance(value, Constant | Extra):
                found.add(scope.spelled(name))
        return found


# Syntax -----------------------------------------------------------------------------------------


def only_loss(function: _Function, loss: str | int | None) -> _Function:
    """A `forward` that returns nothing but its loss."""
    if loss is None:
        return function
    function = copy.deepcopy(function)
    for node in ast.walk(function):
        match node:
            case ast.Return(value=ast.Tuple(elts=elts)) if isinstance(loss, int):
                node.value = elts[loss] if loss < len(elts) else None
            case ast.Return(value=ast.Call(keywords=keywords)) if isinstance(loss, str):
                found = [k.value for k in keywords if k.arg == loss]
                node.value = found[0] if found else None
            case ast.Return(value=ast.Dict(keys=keys, values=values)):
                by_key = zip(keys, values, strict=True)
                found = [v for k, v in by_key if isinstance(k, ast.Constant) and k.value == loss]
                node.value = found[0] if found else None
    return function


def statement_of(function: _Function, node: ast.AST) -> ast.stmt:
    """The innermost statement that holds a node."""
    holding = [s for s in statements(function.body) if any(n is node for n in ast.walk(s))]
    return holding[-1]


def written_out(made: Fields) -> str:
    """The call that makes an object."""
    return f"{made.cls.__name__}({', '.join(f'{k}={v}' for k, v in made.texts.items())})"


def bare(text: str) -> str:
    """An expression without parentheses around all of it."""
    while text.startswith("(") and text.endswith(")"):
        try:
            same = ast.dump(ast.parse(text[1:-1].strip(), mode="eval")) == ast.dump(
                ast.parse(text, mode="eval")
            )
        except SyntaxError:
            return text
        if not same or "\n" in text:
            return text
        text = text[1:-1].strip()
    return text


def own_arguments(function: _Function) -> list[tuple[ast.arg, ast.expr | None]]:
    """A method's parameters, the module itself left out, each with its default."""
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    found = list(zip(positional, defaults, strict=True))[1:]
    return found + list(zip(args.kwonlyargs, args.kw_defaults, strict=True))


def body_of(function: _Function) -> list[ast.stmt]:
    """A function's statements without its docstring."""
    return function.body[1:] if ast.get_docstring(function) is not None else function.body


def bound_in(body: Iterable[ast.AST]) -> list[str]:
    """The names that statements bind."""
    found = {
        n.id: None
        for s in body
        for n in ast.walk(s)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    return list(found)


def reads_in(node: ast.AST, name: str) -> bool:
    """Whether a name is read in a statement."""
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        return node.target.id == name or reads_in(node.value, name)
    return any(
        isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)
        for n in ast.walk(node)
    )


def signature_of(called: Any) -> inspect.Signature | None:
    """The signature of a function, or of a module's `forward`."""
    if called is None:
        return None
    if is_module(called):
        called = called.forward
    try:
        return inspect.signature(called)
    except (TypeError, ValueError):
        return None


def is_default(name: str, value: Value, taken: inspect.Signature | None) -> bool:
    """Whether a keyword argument is what the callee assumes without it."""
    if taken is None or not isinstance(value, Constant) or value.is_setting:
        return False
    if name in taken.parameters:
        default = taken.parameters[name].default
        return type(default) is type(value.value) and bool(default == value.value)
    return value == NONE and any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.parameters.values()
    )


def positional_name(taken: inspect.Signature, number: int) -> str | None:
    """The parameter that an argument by position is for."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [n for n, p in taken.parameters.items() if p.kind in kinds]
    return names[number] if number < len(names) else None


def closed(text: str, node: ast.expr) -> str:
    """An expression in parentheses, where it may bind less tightly than what is around it."""
    tight = ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.Constant | ast.List | ast.Dict
    if isinstance(node, tight) or text.isidentifier():
        return text
    return f"({text})"


def dedented(text: str, file: SourceFile, node: ast.AST) -> str:
    """A text of several lines with the indentation of its first line taken off the others."""
    if "\n" not in text:
        return text
    first, rest = text.split("\n", 1)
    line = file.line(getattr(node, "lineno", 1))
    indent = len(line) - len(line.lstrip())
    lines = [
        line[indent:] if not line[:indent].strip() else line.lstrip() for line in rest.split("\n")
    ]
    return "\n".join([first, *lines])


def comments_above(file: SourceFile, node: ast.stmt) -> list[str]:
    """The comments on the lines before a statement."""
    found: list[str] = []
    number = node.lineno - 1
    while (line := file.line(number).strip()).startswith("#"):
        found.insert(0, line)
        number -= 1
    return found


def comment_beside(file: SourceFile, node: ast.stmt) -> str:
    """The comment behind a statement."""
    _, end = file.span(node)
    rest = file.text[end:].partition("\n")[0].strip()
    return f"  {rest}" if rest.startswith("#") else ""


def comment_after(file: SourceFile, node: ast.AST) -> str:
    """The comment behind an argument that is the last on its line."""
    _, end = file.span(node)
    rest = file.text[end:].partition("\n")[0].strip().removeprefix(",").strip()
    return f"  {rest}" if rest.startswith("#") else ""
