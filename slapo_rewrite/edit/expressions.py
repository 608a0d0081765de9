"""Changes one expression or statement; libcst parses no more than that text."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import black
import libcst as cst
from black.mode import TargetVersion


def replace_call(
    text: str,
    callee: str | None = None,
    keywords: Sequence[tuple[str, str]] = (),
    arguments: str | None = None,
) -> str:
    """A call with another callee, other arguments, or keyword arguments added.

    `nn.Linear(a, b)  ->  ColumnParallelLinear(a, b, parts=3)`
    """
    call = cst.parse_expression(text)
    if not isinstance(call, cst.Call):
        raise TypeError(f"not a call: {text}")
    if callee is not None:
        call = call.with_changes(func=cst.parse_expression(callee))
    if arguments is not None:
        other = cst.parse_expression(f"f({arguments})")
        assert isinstance(other, cst.Call)
        call = call.with_changes(
            args=other.args, whitespace_before_args=other.whitespace_before_args
        )
    for name, value in keywords:
        call = call.with_changes(args=_appended(call.args, name, value))
    return cst.Module([]).code_for_node(call)


def _appended(args: Sequence[cst.Arg], name: str, value: str) -> list[cst.Arg]:
    added = cst.Arg(
        cst.parse_expression(value),
        keyword=cst.Name(name),
        equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
    )
    if not args:
        return [added]
    *before, last = args
    separator = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    if isinstance(last.comma, cst.Comma):  # a trailing comma stays one
        added = added.with_changes(comma=last.comma)
    else:
        added = added.with_changes(whitespace_after_arg=last.whitespace_after_arg)
        last = last.with_changes(whitespace_after_arg=cst.SimpleWhitespace(""))
    return [*before, last.with_changes(comma=separator), added]


def parenthesised(text: str) -> str:
    """`text` in parentheses, unless it stands for itself in every context."""
    node = cst.parse_expression(text)
    simple = (cst.Name, cst.Attribute, cst.Call, cst.Subscript, cst.BaseNumber, cst.SimpleString)
    closed = (cst.List, cst.ListComp, cst.Dict, cst.Set, cst.DictComp, cst.SetComp)
    return text if isinstance(node, simple + closed) or node.lpar else f"({text})"


@functools.cache
def _mode(line_length: int) -> black.Mode:
    return black.Mode(
        line_length=line_length,
        string_normalization=False,
        target_versions={TargetVersion.PY311},
    )


@functools.cache
def literal(text: str) -> str:
    """A literal on one line, with the quotes that `black` prefers."""
    return black.format_str(text, mode=black.Mode(line_length=10_000)).rstrip("\n")


def formatted(text: str, indent: int, line_length: int) -> str:
    """Statements as `black` lays them out at `indent` columns, ready to stand there.

    The first line carries no indentation, as it stands behind what is there already; the others
    carry all of theirs.
    """
    laid_out = black.format_str(text, mode=_mode(max(20, line_length - indent))).rstrip("\n")
    lines = laid_out.split("\n")
    return "\n".join([lines[0], *((" " * indent + line) if line else line for line in lines[1:])])
