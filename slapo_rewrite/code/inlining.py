"""Inlines a submodule's `forward` into the methods that call it."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

from slapo_rewrite import errors
from slapo_rewrite.code.arguments import (
    BoundArguments,
    Signature,
    first_parameter,
    given_by,
    parameters,
)
from slapo_rewrite.code.build import parenthesised, reindented
from slapo_rewrite.code.dataflow import body_of, bound_in, names_in, uses_of
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.layout import at_column
from slapo_rewrite.code.names import is_name, module_paths
from slapo_rewrite.code.runs import comments_above
from slapo_rewrite.code.splice import Edit, apply_edits
from slapo_rewrite.code.syntax import end_position, position
from slapo_rewrite.code.text import accessor, returns, within
from slapo_rewrite.directive import Directive

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
CLOSED = (*_SCOPES, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_TAKING_TURNS = (*CLOSED, ast.IfExp, ast.BoolOp)
# Statements that may evaluate their expressions several times, or not at all.
_HOLDING = (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.Match, ast.Assert)


def inline_edits(
    file: SourceFile,
    methods: list[ast.FunctionDef],
    path: str,
    forward: ast.FunctionDef,
    cause: Directive,
) -> list[Edit]:
    """The edits that replace the calls of a module by its `forward`; raises if that is unsafe."""
    body = _Body(file, path, forward, cause)
    edits: list[Edit] = []
    for method in methods:
        for call in ast.walk(method):
            meant = module_paths(call.func, method) if isinstance(call, ast.Call) else ()
            if isinstance(call, ast.Call) and path in meant:
                if len(meant) > 1:
                    raise body.refused("this call is one of several modules", call)
                text, start, end = _Site(file, body, method, call, cause).written()
                indent = start - file.text.rindex("\n", 0, start) - 1
                text = at_column(text, indent, file.line_length)
                edits.append(Edit(start, end, text, (cause,), f"`{path}` written in"))
    if not edits:
        raise errors.Unsupported(
            f"no method calls `{accessor(path)}(...)`: there is no place to write its `forward` "
            "into",
            at=cause.at,
            hint="do not inline a module that is called through a container or a loop, or that an "
            "earlier line has replaced, by a fused function for example",
        )
    return edits


@dataclass
class _Body:
    """A `forward` to be inlined."""

    file: SourceFile
    path: str
    forward: ast.FunctionDef
    cause: Directive
    loads: dict[str, list[ast.Name]] = field(default_factory=dict)  # the names that it reads
    # The names that it binds, without its parameters.
    stores: dict[str, list[ast.Name]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check()
        self.statements = body_of(self.forward)
        self.me = first_parameter(self.forward)
        for statement in self.statements:
            for node in ast.walk(statement):
                if isinstance(node, ast.Name):
                    names = self.loads if isinstance(node.ctx, ast.Load) else self.stores
                    names.setdefault(node.id, []).append(node)

    def refused(self, message: str, node: ast.AST, hint: str | None = None) -> errors.Unsupported:
        """The error for something in the body."""
        return errors.Unsupported(
            f"`{self.path}` cannot be inlined: {message}",
            at=self.file.at(node),
            cause=self.cause,
            hint=hint,
        )

    def _check(self) -> None:
        if self.forward.decorator_list:
            raise self.refused("its `forward` is decorated", self.forward.decorator_list[0])
        for node in ast.walk(self.forward):
            if isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await)):
                raise self.refused("its `forward` is a generator", node)
            if isinstance(node, (ast.Global, ast.Nonlocal, ast.NamedExpr)):
                raise self.refused("it binds a name in an unusual way", node)
            if isinstance(node, _SCOPES) and node is not self.forward:
                raise self.refused("it defines a function inside", node)
            if isinstance(node, ast.Name) and node.id in ("super", "__class__", "locals"):
                raise self.refused(f"it uses `{node.id}`", node)
            private = isinstance(node, ast.Attribute) and node.attr.startswith("__")
            if private and not ast.unparse(node).endswith("__"):
                raise self.refused("it uses a name that is private to its class", node)
        last = self.forward.body[-1]
        hint = "bind the result to a name, and return it at the end"
        if not isinstance(last, ast.Return) or last.value is None:
            raise self.refused("it does not end by returning a value", last, hint)
        early = [r for r in returns(self.forward) if r is not last]
        if early:
            raise self.refused("it returns before its end", early[0], hint)
        if self.forward.args.vararg is not None:
            raise self.refused("it takes `*args`", self.forward)


class _Site:
    """One call to be replaced by the body."""

    def __init__(
        self,
        file: SourceFile,
        body: _Body,
        method: ast.FunctionDef,
        call: ast.Call,
        cause: Directive,
    ) -> None:
        self.file, self.body, self.method, self.call, self.cause = file, body, method, call, cause
        self.statement = self._statement()

    def _statement(self) -> ast.stmt:
        """The statement of the call; raises if it is compound or calls something else before."""
        innermost = self.file.statement_of(self.call)
        hint = "write the call on a separate line: result = ..."
        if not isinstance(innermost, (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr)):
            raise self.body.refused("it is called inside of another statement", innermost, hint)
        for _, node in reversed([*self.file.around(self.call, innermost)]):
            if isinstance(node, _TAKING_TURNS):
                raise self.body.refused(
                    "whether it is called depends on the code around it", node, hint
                )
        value = innermost.value
        for node in ast.walk(value) if value is not None else ():
            if not isinstance(node, ast.Call) or within(node, self.call) or within(self.call, node):
                continue
            if position(node) < position(self.call):
                raise self.body.refused("something else is called before it here", node, hint)
        return innermost

    def written(self) -> tuple[str, int, int]:
        """The replacement of the statement, without indentation, and its start and end."""
        given = self._bound()
        names = self._names(given)
        replaced: dict[ast.Name, str] = {}
        lead: list[str] = []
        late = self._read_where_given(given)
        for name, value in given.items():
            self._pass(name, value, names, late.get(name), replaced, lead)
        for name in (*self.body.loads, *self.body.stores):
            for node in (*self.body.loads.get(name, ()), *self.body.stores.get(name, ())):
                if name == self.body.me:
                    replaced[node] = accessor(self.body.path)
                elif name in names:
                    replaced.setdefault(node, names[name])
        return self._text(replaced, lead)

    def _bound(self) -> dict[str, ast.expr]:
        """The argument of each parameter of the body."""
        bound = Signature.of(self.body.forward, bound=True).bind(given_by(self.call))
        given, missing = bound.given, bound.missing
        if bound.stars:
            raise self.body.refused("it is called with `*`", self.call)
        if bound.spread and missing:
            raise self.body.refused(
                f"`**` may lack `{missing[0]}`",
                bound.spread[0],
                "write the argument out",
            )
        self._take_rest(bound)
        for name in missing:
            given[name] = bound.signature.defaults.get(name, self.call)
            if not isinstance(given[name], (ast.Constant, ast.UnaryOp)):
                raise self.body.refused(f"this call does not pass `{name}`", self.call)
        return given

    def _take_rest(self, bound: BoundArguments[ast.expr]) -> None:
        """Binds the body's `**kwargs`."""
        rest = bound.signature.options
        if rest is None or rest not in {**self.body.loads, **self.body.stores}:
            unused = [*bound.spread, *(value for _, value in bound.extra)]
            if rest is None and unused:
                raise self.body.refused("it is called with unknown arguments", unused[0])
            for each in unused:
                if not isinstance(each, (ast.Name, ast.Constant, ast.Attribute)):
                    raise self.body.refused("an argument is computed, but not used", each)
            return
        value = bound.spread[0] if len(bound.spread) == 1 and not bound.extra else None
        spread = {
            id(k.value)
            for s in self.body.statements
            for k in (n for n in ast.walk(s) if isinstance(n, ast.keyword))
            if k.arg is None
        }
        only_spread = all(id(n) in spread for n in self.body.loads.get(rest, ()))
        if not isinstance(value, ast.Name) or not only_spread or rest in self.body.stores:
            raise self.body.refused(f"the contents of `{rest}` are not known", self.call)
        bound.given[rest] = value

    def _names(self, given: dict[str, ast.expr]) -> dict[str, str]:
        """New names for variables of the body whose names the method uses."""
        here = {*names_in(self.method), *parameters(self.method)}
        bound = {*bound_in(self.method), *parameters(self.method)}
        own = {*self.body.stores, *given}
        for name, nodes in self.body.loads.items():
            if name not in own and name != self.body.me and name in bound:
                raise self.body.refused(
                    f"`{name}` means something else where it is called", nodes[0]
                )
        leaf = self.body.path.rpartition(".")[2]
        leaf = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", leaf).lower()
        taken = here | own | self.file.names
        names: dict[str, str] = {}
        for name in (*given, *self.body.stores):
            if name in here and name not in names and self._is_needed(name, given):
                new = f"{leaf}_{name}"
                while new in taken:
                    new += "_"
                names[name] = new
                taken.add(new)
        return names

    def _is_needed(self, name: str, given: dict[str, ast.expr]) -> bool:
        """Whether the method still reads its own `name` after the body has started."""
        around = self.file.around(self.statement, self.method)
        if any(isinstance(outer, (ast.For, ast.While)) for _, outer in around):
            return True
        end = end_position(self.statement)
        for node in uses_of(self.method, name, ast.Load):
            inside = within(self.statement, node) and not within(self.call, node)
            if inside or position(node) >= end:
                return True
        return any(name in names_in(value) for other, value in given.items() if other != name)

    def _early(self, name: str) -> list[ast.Name]:
        """The reads of a parameter in the body, before the body reassigns it."""
        loads, first = self.body.loads.get(name, []), self.body.statements[0]
        if name not in self.body.stores:
            return loads
        binds = isinstance(first, ast.Assign) and any(is_name(t, name) for t in first.targets)
        return [n for n in loads if within(first, n)] if binds else []

    def _read_where_given(self, given: dict[str, ast.expr]) -> dict[str, ast.Name]:
        """The reads in the body that a computed argument can replace: no call comes before them.

        The order of evaluation remains that of the call; assigned arguments come before these.
        """
        first, found = self.body.statements[0], dict[str, ast.Name]()
        if isinstance(first, _HOLDING):
            return found
        before = [n for n in ast.walk(first) if isinstance(n, ast.Call)]
        turns = [n for n in ast.walk(first) if isinstance(n, _TAKING_TURNS)]
        end = end_position(first)
        for name, value in reversed(given.items()):
            if isinstance(value, (ast.Name, ast.Constant)):
                continue  # the same at any place
            reads = self._early(name)
            if not reads and isinstance(value, ast.Attribute) and name not in self.body.stores:
                continue  # not evaluated at all
            if len(reads) != 1 or not within(first, reads[0]):
                break
            if any(within(each, reads[0]) for each in turns) or end_position(reads[0]) > end:
                break
            end = position(reads[0])
            if any(end_position(each) <= end for each in before):
                break
            found[name] = reads[0]
        return found

    def _pass(
        self,
        name: str,
        value: ast.expr,
        names: dict[str, str],
        late: ast.Name | None,
        replaced: dict[ast.Name, str],
        lead: list[str],
    ) -> None:
        """Puts an argument where the body reads it, or binds it to a name before."""
        text = self.file.segment(value)
        reads = self._early(name)
        if isinstance(value, (ast.Name, ast.Constant)):
            if reads or name not in self.body.stores:
                replaced.update({n: self._fitting(text, value, n) for n in reads})
                return
        elif late is not None:
            replaced[late] = self._fitting(text, value, late)
            return
        elif not self.body.loads.get(name) and isinstance(value, ast.Attribute):
            return
        target = names.get(name, name)
        if target != text:
            lead.append(f"{target} = {text}")

    def _fitting(self, text: str, value: ast.expr, node: ast.Name) -> str:
        """An argument's text as it can stand where a name stood."""
        if isinstance(value, ast.Name):
            return text
        _, outer = next(self.file.around(node))
        alone = isinstance(outer, (ast.Call, ast.keyword, ast.Assign, ast.Return))
        return text if alone and "\n" not in text else parenthesised(text)

    def _text(self, replaced: dict[ast.Name, str], lead: list[str]) -> tuple[str, int, int]:
        file, last = self.file, self.body.statements[-1]
        assert isinstance(last, ast.Return) and last.value is not None
        result = self._within(replaced, *file.span(last.value))
        begin = file.offset(self._first_line(), 0)
        end = file.offset(last.lineno, 0)
        text = self._within(replaced, begin, end)
        text = reindented(text.strip(), last.col_offset, 0) if text.strip() else ""
        lines = [*lead, *text.splitlines()]
        start, stop = file.span(self.statement)
        call_start, call_end = file.span(self.call)
        plain = file.text[start:call_start], file.text[call_end:stop]
        previous = self._renamed_result(lines, last.value, replaced, plain)
        if previous is not None:
            return previous, start, stop
        if not self._stands_alone():
            result = parenthesised(result)
        lines += (plain[0] + result + plain[1]).splitlines()
        return "\n".join(lines), start, stop

    def _first_line(self) -> int:
        """The line after the header or the docstring: the comments there belong to the body."""
        body = self.body.forward.body
        first = self.body.statements[0]
        if first is not body[0]:
            return (body[0].end_lineno or 0) + 1
        return comments_above(self.file, first.lineno)

    def _within(self, replaced: dict[ast.Name, str], begin: int, end: int) -> str:
        edits = []
        for node, text in replaced.items():
            start, stop = self.file.span(node)
            if begin <= start and stop <= end:
                edits.append(Edit(start - begin, stop - begin, text))
        return apply_edits(self.file.text[begin:end], edits)[0]

    def _renamed_result(
        self,
        lines: list[str],
        value: ast.expr,
        replaced: dict[ast.Name, str],
        around: tuple[str, str],
    ) -> str | None:
        """The lines, if the last assignment can bind the result to the statement's own target."""
        match self.statement, self.body.statements[-2:-1]:
            case (
                ast.Assign(value=whole) | ast.Return(value=whole),
                [ast.Assign(targets=[ast.Name() as target]) as before],
            ) if whole is self.call and is_name(value, target.id):
                name = replaced.get(target, target.id)
            case _:
                return None
        count = (before.end_lineno or 0) - before.lineno + 1
        for number in range(len(lines) - 1, -1, -1):
            if lines[number].startswith(f"{name} = ") and len(lines) - number <= count + 1:
                if self.file.line(self.body.statements[-1].lineno - 1).lstrip().startswith("#"):
                    return None
                bound = around[0] + lines[number].removeprefix(f"{name} = ")
                return "\n".join([*lines[:number], bound, *lines[number + 1 :]])
        return None

    def _stands_alone(self) -> bool:
        """Whether any expression may replace the call without parentheses."""
        whole = (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr, ast.keyword, ast.Tuple, ast.List)
        _, outer = next(self.file.around(self.call))
        return isinstance(outer, whole) or (isinstance(outer, ast.Call) and self.call in outer.args)
