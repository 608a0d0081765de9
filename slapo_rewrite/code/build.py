"""Makes libcst nodes, expressions and calls, from templates.

A template is Python with `{name}` where a node goes. A node that becomes an operand gets
parentheses if it needs them; one in a place for any expression loses its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import libcst as cst

# Expressions that never need parentheses.
_CLOSED = (
    cst.Name, cst.Attribute, cst.Call, cst.Subscript, cst.BaseNumber, cst.SimpleString,
    cst.FormattedString, cst.List, cst.ListComp, cst.Dict, cst.DictComp, cst.Set, cst.SetComp,
    cst.Ellipsis,
)  # fmt: skip
# Expressions that need parentheses where others do not: `f((a, b))`.
_OPEN = (cst.Tuple, cst.Yield, cst.NamedExpr, cst.GeneratorExp)
# Parents of expressions that need no parentheses, unless they are in `_OPEN`.
_HOLDERS = (
    cst.Arg, cst.Assign, cst.AnnAssign, cst.AugAssign, cst.AssignTarget, cst.Return, cst.Expr,
    cst.Element, cst.DictElement, cst.Index, cst.Param, cst.Annotation, cst.For, cst.If, cst.While,
    cst.WithItem, cst.Assert, cst.Decorator, cst.ListComp, cst.SetComp, cst.GeneratorExp,
    cst.DictComp,
)  # fmt: skip
# Those parents whose child may also be a tuple without parentheses.
_WHOLE = (
    cst.Assign, cst.AnnAssign, cst.AugAssign, cst.Return, cst.Expr, cst.Index, cst.For, cst.CompFor,
)  # fmt: skip

_BINDING: dict[type[cst.BaseBinaryOp], int] = {
    cst.Add: 1, cst.Subtract: 1, cst.Multiply: 2, cst.Divide: 2, cst.FloorDivide: 2, cst.Modulo: 2,
    cst.MatrixMultiply: 2, cst.Power: 3,
}  # fmt: skip

Operand = cst.BaseExpression | str

_PLACEHOLDER = "slapo_rewrite_operand_"
_EMPTY = cst.Module([])


def code(node: cst.CSTNode) -> str:
    """The text of a node, without the line end of a statement."""
    return _EMPTY.code_for_node(node).rstrip("\n")


def parsed(text: str) -> cst.BaseExpression:
    """An expression from its text."""
    return cst.parse_expression(text)


def reindented(text: str, column: int, indent: int) -> str:
    """Moves statements from one column to another.

    Multi-line strings stay the same. The first line has no indentation, before and afterwards.
    """
    if column == indent:
        return text
    module = cst.parse_module(f"if True:\n{' ' * column}{text}\n" if column else f"{text}\n")
    module = module.visit(_Blank())
    block: Any = cst.ensure_type(module.body[0], cst.If).body if column else module
    first, *others = block.body
    if not column:  # comments above the first statement
        first = first.with_changes(leading_lines=[*module.header, *first.leading_lines])
    body, footer = [first, *others], block.footer
    if not indent:
        return module.with_changes(body=body, footer=footer).code.rstrip("\n")
    inner = cst.IndentedBlock(body, footer=footer, indent=" " * indent)
    around = cst.If(cst.Name("True"), inner)
    printed = module.with_changes(body=[around], footer=[], header=[]).code
    return printed.partition("\n")[2].removeprefix(" " * indent).rstrip("\n")


class _Blank(cst.CSTTransformer):
    """Keeps blank lines without indentation."""

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        if isinstance(updated_node, cst.EmptyLine):
            return updated_node.with_changes(indent=updated_node.comment is not None)
        return updated_node


def paren(node: cst.BaseExpression) -> cst.BaseExpression:
    """An expression that is safe in every context: in parentheses if it needs them anywhere."""
    if isinstance(node, _CLOSED) or node.lpar:
        return node
    return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def parenthesised(text: str) -> str:
    """An expression's text, in parentheses unless it is safe in every context without."""
    node = parsed(text)
    return text if isinstance(node, _CLOSED) or node.lpar else f"({text})"


def bare(node: cst.BaseExpression) -> cst.BaseExpression:
    """An expression without the parentheses that it does not need as an argument, for example.

    Parentheses with a comment in them stay, as do those of a tuple.
    """
    if not node.lpar or isinstance(node, _OPEN) or len(node.lpar) != len(node.rpar):
        return node
    around = [*(p.whitespace_after for p in node.lpar), *(p.whitespace_before for p in node.rpar)]
    if not all(isinstance(space, cst.SimpleWhitespace) for space in around):
        return node
    return node.with_changes(lpar=[], rpar=[])


def fitting(node: cst.BaseExpression, parent: cst.CSTNode | None) -> cst.BaseExpression:
    """An expression for use in a parent node: in parentheses if it needs them there."""
    if isinstance(parent, _WHOLE):
        return node
    if isinstance(parent, _HOLDERS):
        is_starred = isinstance(parent, cst.Arg) and bool(parent.star)
        return paren(node) if isinstance(node, _OPEN) or is_starred else node
    if isinstance(parent, cst.BinaryOperation) and isinstance(node, cst.BinaryOperation):
        return node if _binds(node) > _binds(parent) else paren(node)
    return paren(node)


def _binds(node: cst.BinaryOperation) -> int:
    """How tightly an operation binds its operands."""
    return next((n for kind, n in _BINDING.items() if isinstance(node.operator, kind)), 0)


def expression(template: str, **operands: Operand) -> cst.BaseExpression:
    """An expression from a template, with nodes or texts in place of its `{names}`."""
    places = {name: f"{_PLACEHOLDER}{name}" for name in operands}
    filling = _Filling({places[name]: operand for name, operand in operands.items()})
    parsed: Any = _expression(template.format_map(places))
    made: cst.BaseExpression = parsed.visit(filling)
    return made


def call(
    callee: str, *arguments: Operand, keywords: Iterable[tuple[str, Operand]] = ()
) -> cst.Call:
    """A call of a dotted name."""
    given = [cst.Arg(_argument(a)) for a in arguments]
    given += [_keyword(name, value) for name, value in keywords]
    return cst.Call(parsed(callee), given)


def conditional(
    body: cst.BaseExpression, test: Operand, orelse: cst.BaseExpression
) -> cst.BaseExpression:
    """`body if test else orelse`; the last may be a conditional expression as well."""
    last = orelse if isinstance(orelse, cst.IfExp) else paren(orelse)
    return cst.IfExp(test=_node(test), body=paren(body), orelse=last)


def with_keywords(made: cst.Call, keywords: Iterable[tuple[str, Operand]]) -> cst.Call:
    """A call with further keyword arguments; its layout and its trailing comma stay."""
    for name, value in keywords:
        made = made.with_changes(args=_appended(made.args, _keyword(name, value)))
    return made


def with_callee(made: cst.Call, callee: Operand) -> cst.Call:
    """A call with another callee and the same arguments."""
    return made.with_changes(func=paren(_node(callee)))


def _node(operand: Operand) -> cst.BaseExpression:
    return parsed(operand) if isinstance(operand, str) else operand


def _argument(operand: Operand) -> cst.BaseExpression:
    node = bare(_node(operand))
    return paren(node) if isinstance(node, _OPEN) else node


def _keyword(name: str, value: Operand) -> cst.Arg:
    space = cst.SimpleWhitespace("")
    return cst.Arg(
        _argument(value),
        keyword=cst.Name(name),
        equal=cst.AssignEqual(whitespace_before=space, whitespace_after=space),
    )


def _appended(args: Iterable[cst.Arg], added: cst.Arg) -> list[cst.Arg]:
    given = [*args]
    if not given:
        return [added]
    *before, last = given
    if isinstance(last.comma, cst.Comma):  # a trailing comma stays one
        added = added.with_changes(comma=last.comma)
    else:
        added = added.with_changes(whitespace_after_arg=last.whitespace_after_arg)
        last = last.with_changes(whitespace_after_arg=cst.SimpleWhitespace(""))
    separator = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    return [*before, last.with_changes(comma=separator), added]


@functools.lru_cache(maxsize=256)
def _expression(text: str) -> cst.BaseExpression:
    return cst.parse_expression(text)


class _Filling(cst.CSTTransformer):
    """Replaces the placeholders of a parsed template by operands; all nodes are new."""

    def __init__(self, operands: Mapping[str, Operand]) -> None:
        super().__init__()
        self.operands = operands
        self.parents: list[cst.CSTNode] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        self.parents.append(node)
        return True

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        self.parents.pop()
        if not (isinstance(original_node, cst.Name) and original_node.value in self.operands):
            return updated_node
        node = _node(self.operands[original_node.value])
        parent = self.parents[-1] if self.parents else None
        if parent is None:
            return node
        return fitting(bare(node) if isinstance(parent, _HOLDERS) else node, parent)
