"""Losses of logits that stay split over the vocabulary, and whole logits where there is no loss."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from slapo_rewrite import errors
from slapo_rewrite.edit.definition import Key, LossOfParts
from slapo_rewrite.edit.expressions import formatted
from slapo_rewrite.edit.forward import nodes_at
from slapo_rewrite.edit.imports import Imports
from slapo_rewrite.edit.lineages import Lineages
from slapo_rewrite.edit.lines import At
from slapo_rewrite.edit.splice import Edit
from slapo_rewrite.edit.state import Directive
from slapo_rewrite.edit.text import accessor, returns, within

MODULE = "vocab_parallel_loss"
PLAIN = "vocab_parallel_cross_entropy"
CROSS_ENTROPY = "torch.nn.functional.cross_entropy"
# What a vocabulary-parallel loss takes by name.
KEYWORDS = {"input", "target", "weight", "ignore_index", "reduction", "label_smoothing"}


@dataclass(frozen=True)
class _Branch:
    """A condition around the loss.

    Attributes:
        node: The statement, or the expression, that decides.
        taken: Whether the loss is computed where the condition holds.
    """

    node: ast.If | ast.IfExp
    taken: bool


class LossWriter:
    """Changes one method that computes a loss.

    Args:
        lineages: The classes of the model file.
        imports: Takes the names that the changes refer to.
        class_name: The class.
        at: Takes the changes, by their statements.
        line_length: The file's own.
    """

    def __init__(
        self, lineages: Lineages, imports: Imports, class_name: str, at: At, line_length: int
    ) -> None:
        self.lineages, self.imports, self.class_name, self.at = lineages, imports, class_name, at
        self.line_length = line_length
        self.file = lineages.file

    def write(self, key: Key, change: LossOfParts, causes: tuple[Directive, ...]) -> None:
        """Puts a loss of parts where the loss is, and a gather wherever it is not computed.

        Raises:
            Unsupported: The call, or a branch without it, is written in a way that cannot be
                changed.
        """
        found = [
            (method, statement, node)
            for method, statement, node in nodes_at(self.lineages, self.class_name, key)
            if isinstance(node, ast.Call)
        ]
        if not found:
            raise self._refused(
                "the loss of this rank's part of the logits cannot be told apart here",
                errors.Span(self.file.display, key[1], key[2] + 1, 1, self.file.line(key[1])),
                causes,
            )
        method, statement, call = found[0]
        size = f"{accessor(change.head)}.full_out_features"
        self._change_call(statement, call, change, size, causes)
        for name, axis in change.names:
            self._make_whole(method, statement, call, (name, axis), size, causes)

    def _change_call(
        self,
        statement: ast.stmt,
        call: ast.Call,
        change: LossOfParts,
        size: str,
        causes: tuple[Directive, ...],
    ) -> None:
        """Calls the vocabulary-parallel loss with the arguments that stand there."""
        edits = self.at(statement).inside
        why = "a loss of this rank's part of the logits"
        start, end = self.file.span(call.func)
        if change.function is not None:
            name = self.imports.helper(MODULE, change.function, causes)
            edits.append(Edit(start, end, name, causes, why))
            if change.function == PLAIN:
                edits.append(self._with_size(call, size, causes, why))
            return
        plain = self.file.qualified(call.func) == CROSS_ENTROPY
        strange = {k.arg for k in call.keywords} - KEYWORDS
        if (
            len(call.args) > 2 + plain
            or strange
            or any(isinstance(a, ast.Starred) for a in call.args)
        ):
            raise self._refused(
                "a vocabulary-parallel loss takes logits, targets, weights of classes, and by name "
                "`ignore_index`, `reduction` and `label_smoothing`",
                self.file.at(call),
                causes,
            )
        if plain:
            name = self.imports.helper(MODULE, PLAIN, causes)
            edits.append(Edit(start, end, name, causes, why))
        else:
            name = self.imports.helper(MODULE, "vocab_parallel_criterion", causes)
            opening = self.file.text.index("(", end) + 1
            text = f"{name}({self.file.segment(call.func)}, "
            edits.append(Edit(start, opening, text, causes, why))
        edits.append(self._with_size(call, size, causes, why))

    def _with_size(
        self, call: ast.Call, size: str, causes: tuple[Directive, ...], why: str
    ) -> Edit:
        """How many classes there are in all, as a further argument."""
        closing = self.file.span(call)[1] - 1
        last = len(self.file.text[:closing].rstrip())
        comma = self.file.text[last - 1] == ","
        text = f" vocab_size={size}," if comma else f", vocab_size={size}"
        return Edit(last, last, text, causes, why)

    def _make_whole(
        self,
        method: ast.FunctionDef,
        statement: ast.stmt,
        call: ast.Call,
        value: tuple[str, int],
        size: str,
        causes: tuple[Directive, ...],
    ) -> None:
        """Gathers a variable on every way through the method that leaves the loss out."""
        name, axis = value

        def line() -> tuple[str, tuple[Directive, ...], str]:
            gather = self.imports.helper("tensor_parallel", "all_gather", causes)
            where = "" if axis == -1 else f"axis={axis}, "
            return f"{name} = {gather}({name}, {where}full_size={size})", causes, "whole logits"

        branches = list(_branches(method, statement, call))
        for branch in branches:
            if isinstance(branch.node, ast.IfExp):
                if _read_after(method, name, statement):
                    text = f"if {self._opposite(branch)}:\n    {line()[0]}"
                    self.at(statement).after.append((text, *line()[1:]))
                continue
            other = branch.node.orelse if branch.taken else branch.node.body
            stored = [s for s in other if _stores(s, name)]
            read = any(_loads(s, name) for s in other) or _read_after(method, name, branch.node)
            if not read or not (stored or _bound_before(method, name, branch.node)):
                continue
            if stored:
                self.at(stored[-1]).after.append(line())
            elif other and self._is_elif(other):
                raise self._refused(
                    f"`{name}` must be gathered where this condition does not hold, but other "
                    "conditions follow",
                    self.file.at(other[0]),
                    causes,
                )
            elif other:
                self.at(other[0]).before.append(line())
            else:
                self._add_else(branch.node, line())
        around = [b.node for b in branches if isinstance(b.node, ast.If)]
        for leaving in returns(method):
            early = leaving.lineno < statement.lineno and not any(
                within(node, leaving) for node in around
            )
            if early and _loads(leaving, name) and _bound_before(method, name, leaving):
                self.at(leaving).before.append(line())

    def _opposite(self, branch: _Branch) -> str:
        test = branch.node.test
        text = self.file.segment(test)
        if not branch.taken:
            return text
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            shown, other = " is not ", " is "
            if isinstance(test.ops[0], ast.Is):
                shown, other = other, shown
            if isinstance(test.ops[0], (ast.Is, ast.IsNot)) and text.count(shown) == 1:
                return text.replace(shown, other)
        return f"not ({text})"

    def _is_elif(self, block: list[ast.stmt]) -> bool:
        start = self.file.span(block[0])[0]
        return isinstance(block[0], ast.If) and self.file.text.startswith("elif", start)

    def _add_else(self, node: ast.If, line: tuple[str, tuple[Directive, ...], str]) -> None:
        text, causes, why = line
        end = self.file.span(node)[1]
        rest = self.file.text[end : self.file.text.find("\n", end)]
        end += len(rest.rstrip()) if rest.strip().startswith("#") else 0
        pad = "\n" + " " * node.col_offset
        known = [e for e in self.at(node).around if e.start == end]
        inner = formatted(text, node.col_offset + 4, self.line_length)
        opening = "" if known else f"{pad}else:"
        self.at(node).around.append(Edit(end, end, f"{opening}{pad}    {inner}", causes, why))

    def _refused(
        self, words: str, at: errors.Span, causes: tuple[Directive, ...]
    ) -> errors.Unsupported:
        return errors.Unsupported(
            words,
            at=at,
            also=[c.at for c in causes[:1] if c.at],
            hint='gather the logits instead: .sync("fwd_post", "all_gather", axis=-1)',
        )


def _branches(method: ast.FunctionDef, statement: ast.stmt, call: ast.Call) -> Iterator[_Branch]:
    """The conditions around a call, outermost first."""
    for node in ast.walk(method):
        if isinstance(node, ast.If) and within(node, statement):
            if not any(within(inner, statement) for inner in (node.test,)):
                yield _Branch(node, any(within(inner, statement) for inner in node.body))
        elif isinstance(node, ast.IfExp) and within(node, call) and not within(node.test, call):
            yield _Branch(node, within(node.body, call))


def _names(node: ast.AST, name: str, context: type[ast.expr_context]) -> Iterator[ast.Name]:
    for found in ast.walk(node):
        if isinstance(found, ast.Name) and found.id == name and isinstance(found.ctx, context):
            yield found


def _loads(node: ast.AST, name: str) -> bool:
    return any(True for _ in _names(node, name, ast.Load))


def _stores(node: ast.AST, name: str) -> bool:
    return any(True for _ in _names(node, name, ast.Store))


def _read_after(method: ast.FunctionDef, name: str, node: ast.stmt) -> bool:
    end = (node.end_lineno or node.lineno, node.end_col_offset or 0)
    return any((n.lineno, n.col_offset) >= end for n in _names(method, name, ast.Load))


def _bound_before(method: ast.FunctionDef, name: str, node: ast.stmt) -> bool:
    return any(n.lineno < node.lineno for n in _names(method, name, ast.Store))
