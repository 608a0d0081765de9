"""Losses of logits that stay split over the vocabulary, and whole logits where there is no loss."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import libcst as cst

from slapo_rewrite import errors
from slapo_rewrite.changes.change import Asked, Change
from slapo_rewrite.changes.class_text import ClassText
from slapo_rewrite.changes.placement import Placement, at_node
from slapo_rewrite.changes.places import AtNode
from slapo_rewrite.code.build import call as call_of
from slapo_rewrite.code.build import with_callee, with_keywords
from slapo_rewrite.code.lines import Causes
from slapo_rewrite.code.runs import in_else
from slapo_rewrite.code.text import accessor, returns, within
from slapo_rewrite.sharding import ParallelLoss

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


@dataclass(frozen=True)
class VocabParallelLoss(Change):
    """Where a method computes a loss of logits of which a rank has a part.

    Attributes:
        function: What is called in the place of a function of transformers; None where
            `cross_entropy` or a criterion stands there itself.
        head: The path of the layer that gives the logits, below the method's module.
        names: Local variables that hold such parts, with the axis that is split.
    """

    function: str | None
    head: str
    names: tuple[tuple[str, int], ...]

    def write(self, text: ClassText, here: Sequence[Asked]) -> None:
        """Puts a loss of parts where the loss is, and a gather wherever it is not computed.

        Raises:
            Unsupported: The call, or a branch without it, is written in a way that cannot be
                changed.
        """
        (asked,) = here
        assert isinstance(asked.place, AtNode)
        found = [(m, n) for m, n in text.nodes_at(asked.place) if isinstance(n, ast.Call)]
        if not found:
            raise _refused(
                "the loss of this rank's part of the logits cannot be told apart here",
                text.span_of(asked.place),
                asked.causes,
            )
        method, call = found[0]
        statement = text.file.statement_of(call)
        self._change_call(text, statement, call, asked.causes)
        gathers = _Gathers(text, method, statement, call, asked.causes)
        for name, axis in self.names:
            gathers.write(name, axis, self._size)

    @property
    def _size(self) -> str:
        return f"{accessor(self.head)}.full_out_features"

    def _change_call(
        self, text: ClassText, statement: ast.stmt, call: ast.Call, causes: Causes
    ) -> None:
        """Calls the vocabulary-parallel loss with the arguments that stand there."""
        is_plain = text.file.qualified(call.func) == CROSS_ENTROPY
        strange = {k.arg for k in call.keywords} - KEYWORDS
        starred = any(isinstance(a, ast.Starred) for a in call.args)
        if self.function is None and (len(call.args) > 2 + is_plain or strange or starred):
            raise _refused(
                "a vocabulary-parallel loss takes logits, targets, weights of classes, and by name "
                "`ignore_index`, `reduction` and `label_smoothing`",
                text.file.at(call),
                causes,
            )
        named = self.function or (PLAIN if is_plain else "vocab_parallel_criterion")
        name = text.imports.helper(MODULE, named, causes)
        takes_size = self.function is None or self.function == PLAIN

        def make(made: cst.Call) -> cst.Call:
            if self.function is None and not is_plain:
                made = call_of(name, made.func).with_changes(
                    args=[cst.Arg(made.func), *made.args],
                    whitespace_before_args=made.whitespace_before_args,
                )
            else:
                made = with_callee(made, name)
            return with_keywords(made, [("vocab_size", self._size)]) if takes_size else made

        why = "a loss of this rank's part of the logits"
        text.replace(call, statement, make, causes, why)


class _Gathers:
    """Gathers of logits on every way through a method that leaves a loss out.

    Args:
        text: The class.
        method: The method.
        statement: The statement that computes the loss.
        call: The call of it.
        causes: The directives behind it.
    """

    def __init__(
        self,
        text: ClassText,
        method: ast.FunctionDef,
        statement: ast.stmt,
        call: ast.Call,
        causes: Causes,
    ) -> None:
        self.text, self.method, self.statement, self.causes = text, method, statement, causes
        self.branches = list(_branches(method, statement, call))

    def write(self, name: str, axis: int, size: str) -> None:
        """Gathers one variable."""

        def line() -> str:
            gather = self.text.imports.helper("tensor_parallel", "all_gather", self.causes)
            where = "" if axis == -1 else f"axis={axis}, "
            return f"{name} = {gather}({name}, {where}full_size={size})"

        why, method, causes = "whole logits", self.method, self.causes
        for branch in self.branches:
            if isinstance(branch.node, ast.IfExp):
                if _read_after(method, name, self.statement):
                    text = f"if {self._opposite(branch)}:\n    {line()}"
                    self.text.insert_after(self.statement, text, causes, why)
                continue
            other = branch.node.orelse if branch.taken else branch.node.body
            stored = [s for s in other if _stores(s, name)]
            read = any(_loads(s, name) for s in other) or _read_after(method, name, branch.node)
            if not read or not (stored or _bound_before(method, name, branch.node)):
                continue
            if stored:
                self.text.insert_after(stored[-1], line(), causes, why)
            elif other and self._is_elif(other):
                raise _refused(
                    f"`{name}` must be gathered where this condition does not hold, but other "
                    "conditions follow",
                    self.text.file.at(other[0]),
                    causes,
                )
            elif other:
                self.text.insert_before(other[0], line(), causes, why)
            else:
                self._add_else(branch.node, line())
        around = [b.node for b in self.branches if isinstance(b.node, ast.If)]
        for leaving in returns(method):
            early = leaving.lineno < self.statement.lineno and not any(
                within(node, leaving) for node in around
            )
            if early and _loads(leaving, name) and _bound_before(method, name, leaving):
                self.text.insert_before(leaving, line(), causes, why)

    def _opposite(self, branch: _Branch) -> str:
        test = branch.node.test
        text = self.text.file.segment(test)
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
        start = self.text.file.span(block[0])[0]
        return isinstance(block[0], ast.If) and self.text.file.text.startswith("elif", start)

    def _add_else(self, node: ast.If, line: str) -> None:
        placed = in_else(self.text.file, node, line, self.text.line_length)
        if any(edit.start == placed.start for edit in self.text.at(node).around):
            placed = in_else(self.text.file, node, line, self.text.line_length, opened=True)
        self.text.place(node, placed, self.causes, "whole logits")


def _refused(words: str, at: errors.Span, causes: Causes) -> errors.Unsupported:
    return errors.Unsupported(
        words,
        at=at,
        cause=causes,
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


def place_loss(to: Placement, loss: ParallelLoss) -> None:
    """A loss of the parts that a head gives, where a method computes it."""
    head = loss.head[len(loss.owner) + 1 if loss.owner else 0 :]
    change = VocabParallelLoss(loss.function, head, loss.names)
    causes = to.causes(to.tree.nodes[loss.head])
    at = at_node("loss", loss.place)
    to.files.at(loss.place).changes.add(loss.owner, at, change, causes)
