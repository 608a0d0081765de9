"""Splits statements so that a cut can go between: calls, fields of records, the loss."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace

from slapo_rewrite.code.dataflow import bound_in, names_in
from slapo_rewrite.code.inlining import CLOSED
from slapo_rewrite.code.names import is_name
from slapo_rewrite.code.subgraphs import root_of
from slapo_rewrite.errors import Span
from slapo_rewrite.stages.flat import Flat, Line
from slapo_rewrite.stages.loops import loop_over
from slapo_rewrite.stages.written_text import rewritten

# The function that the changed `forward` calls in eval mode, after the loss.
WHOLE_LOGITS = "whole_logits"


def with_loss_apart(flat: Flat, trains: Callable[[str], bool], at: Span | None = None) -> Flat:
    """Moves the last module calls out of the loss, to lines of their own.

    For a `forward` that is a single expression, their place is that of the cut, `at`. The gather of
    logits in eval mode moves before the loss, which accepts both kinds of logits.
    """
    gathers = [line for line in flat.lines if _is_gather(line)]
    others = [line for line in flat.lines if not _is_gather(line)]
    flat = with_calls_apart(replace(flat, lines=others), trains, at)
    lines = list(flat.lines)
    for gather in gathers:
        (made,) = (n for n in ast.walk(ast.parse(gather.text)) if isinstance(n, ast.Assign))
        name = ast.unparse(made.targets[0])
        bound = [bound_in(ast.parse(line.text)) for line in lines]
        last = max(n for n, line in enumerate(lines) if trains(line.text) or name in bound[n])
        text = f"if not self.training:\n    {ast.unparse(made)}"
        lines.insert(last + 1, replace(gather, text=text))
    return replace(flat, lines=lines)


def _is_gather(line: Line) -> bool:
    inner = ast.parse(line.text).body  # several statements if a call was inlined
    if len(inner) == 1 and isinstance(inner[0], ast.If) and not inner[0].orelse:
        inner = inner[0].body
    return (
        len(inner) == 1
        and isinstance(inner[0], ast.Assign)
        and isinstance(inner[0].value, ast.Call)
        and is_name(inner[0].value.func, WHOLE_LOGITS)
    )


def list_of(statement: ast.stmt) -> str:
    """The text of the first list that a loop over layers runs over."""
    loop = loop_over(statement)
    return loop.lists[0] if loop is not None else ""


def with_calls_apart(flat: Flat, trains: Callable[[str], bool], at: Span | None) -> Flat:
    """Moves the last module calls to lines of their own, apart from the loss.

    `return mse_loss(self.last(x), y)`  ->  `last_output = self.last(x)`, and the loss of that.
    """
    lines, loss = list(flat.lines), flat.loss
    if trains(loss):
        at = lines[-1].at if lines else at
        assert at is not None
        more, loss = _apart(loss, trains)
        lines += [Line(text, at) for text in more]
    else:
        number = max((n for n, line in enumerate(lines) if trains(line.text)), default=-1)
        if number >= 0 and isinstance(ast.parse(lines[number].text).body[0], ast.Assign):
            more, text = _apart(lines[number].text, trains)
            lines[number : number + 1] = [
                *(Line(each, lines[number].at) for each in more),
                replace(lines[number], text=text),
            ]
    return replace(flat, lines=lines, loss=loss)


def with_fields_apart(flat: Flat, name: str) -> Flat | None:
    """Binds the fields that are read of a record to names, right after the record's assignment.

    `outputs = self.encoder(x)` and later `self.head(outputs.hidden)`  ->
    `outputs_hidden = outputs.hidden` after the former, and `self.head(outputs_hidden)`.
    None if the record has other uses.
    """
    trees = [ast.parse(text) for text in (*(line.text for line in flat.lines), flat.loss)]
    names = names_in(*trees)
    made = [number for number, tree in enumerate(trees) if name in bound_in(tree)]
    if len(made) != 1 or name in flat.parameters:
        return None
    edits: list[dict[ast.AST, str]] = [{} for _ in trees]
    fields: dict[str, str] = {}
    for tree, edit in zip(trees[made[0] + 1 :], edits[made[0] + 1 :], strict=True):
        uses = [node for node in ast.walk(tree) if is_name(node, name)]
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=use, attr=attr, ctx=ast.Load()) if use in uses:
                    fields.setdefault(attr, f"{name}_{attr}")
                    edit[node] = fields[attr]
        if len(edit) != len(uses):
            return None
    if not fields or names & {*fields.values()}:
        return None
    lines = [
        replace(line, text=rewritten(line.text, edit))
        for line, edit in zip(flat.lines, edits, strict=False)
    ]
    at = lines[made[0]].at
    bound = [Line(f"{new} = {name}.{attr}", at) for attr, new in fields.items()]
    lines[made[0] + 1 : made[0] + 1] = bound
    return replace(flat, lines=lines, loss=rewritten(flat.loss, edits[-1]))


def _apart(text: str, trains: Callable[[str], bool]) -> tuple[list[str], str]:
    """Assignments of the outermost calls of modules with parameters, and the remaining text."""
    statement = ast.parse(text).body[0]
    if isinstance(statement, ast.Assign) and _trained(statement.value, trains):
        return [], text
    waiting: list[ast.AST] = [statement]
    edits: dict[ast.AST, str] = {}
    names = {*names_in(statement)}
    while waiting:
        node = waiting.pop(0)
        if function := _trained(node, trains):
            *_, last = re.findall(r"[a-zA-Z]\w*", function)
            name = f"{last}_output"
            while name in names:
                name += "_"
            names.add(name)
            edits[node] = name
        elif not isinstance(node, CLOSED):  # calls inside comprehensions read their variables
            waiting += ast.iter_child_nodes(node)
    return [f"{new} = {ast.unparse(node)}" for node, new in edits.items()], rewritten(text, edits)


def _trained(node: ast.AST, trains: Callable[[str], bool]) -> str | None:
    """The text of the module with parameters that a call calls, if it does."""
    if not isinstance(node, ast.Call) or not is_path(node.func):
        return None
    function = ast.unparse(node.func)
    return function if trains(function) else None


def is_path(node: ast.expr) -> bool:
    """Whether an expression is an attribute or element below `self`."""
    return root_of(node) == "self"
