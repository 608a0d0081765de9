"""Losses of logits that stay sharded over the vocabulary, and gathers where there is no loss."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import libcst as cst

from slapo_rewrite import errors
from slapo_rewrite.changes.change import Change
from slapo_rewrite.changes.class_text import ClassText
from slapo_rewrite.changes.placement import Placement, at_node
from slapo_rewrite.changes.places import AtNode
from slapo_rewrite.code.blocks import every_block
from slapo_rewrite.code.build import call as call_of
from slapo_rewrite.code.build import parsed, with_callee, with_keywords
from slapo_rewrite.code.dataflow import bound_in, read_in, uses_of
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.runs import in_else
from slapo_rewrite.code.syntax import end_position, position
from slapo_rewrite.code.text import accessor, returns, within
from slapo_rewrite.sharding.tied_heads import head_of
from slapo_rewrite.sharding.types import ParallelLoss, TiedHead

MODULE = "vocab_parallel_loss"
GATHERED = "gather the logits where training computes no loss"
PLAIN = "vocab_parallel_cross_entropy"
CROSS_ENTROPY = "torch.nn.functional.cross_entropy"
# The keyword arguments of a vocabulary-parallel loss.
KEYWORDS = {"input", "target", "weight", "ignore_index", "reduction", "label_smoothing"}
# Methods of a tensor that return a tensor: a variable that is not None remains so.
RESHAPES = {"to", "view", "reshape", "flatten", "contiguous", "clone", "long"}


@dataclass(frozen=True)
class _Branch:
    """A branch around the loss."""

    node: ast.If | ast.IfExp  # the `if` statement or conditional expression
    taken: bool  # whether the loss is computed if the condition holds


@dataclass(frozen=True)
class VocabParallelLoss(Change):
    """Where a method computes a loss of sharded logits."""

    # The replacement of a transformers loss function; None where the code calls `cross_entropy`
    # or a criterion itself.
    function: str | None
    head: str  # the path of the layer that computes the logits, below the method's module
    # Local variables that hold sharded logits, with the split axis.
    names: tuple[tuple[str, int], ...]
    # The places of all losses of the same logits in the file, this one included.
    losses: tuple[AtNode, ...]
    told_of_part: bool  # whether its `vocab_size` is the head's own size, which is a rank's

    def write_at(self, text: ClassText, place: AtNode) -> None:
        """Replaces the loss, and gathers the logits on paths that compute no loss."""
        found = [(m, n) for m, n in text.nodes_at(place) if isinstance(n, ast.Call)]
        if not found:
            words = "the loss of this rank's part of the logits cannot be told apart here"
            raise _refused(words, text, place)
        method, call = found[0]
        self._change_call(text, call)
        calls = [n for p in self.losses for m, n in text.nodes_at(p) if m is method and n]
        if call is calls[-1]:
            gathers = _Gathers(text, method, calls)
            for name, axis in self.names:
                gathers.write(name, axis, accessor(self.head))

    def _change_call(self, text: ClassText, call: ast.Call) -> None:
        """Replaces the called function by the vocabulary-parallel loss."""
        is_plain = text.file.qualified(call.func) == CROSS_ENTROPY
        strange = {k.arg for k in call.keywords} - KEYWORDS
        starred = any(isinstance(a, ast.Starred) for a in call.args)
        if self.function is None and (len(call.args) > 2 + is_plain or strange or starred):
            raise _refused(
                "a vocabulary-parallel loss takes logits, targets, weights of classes, and by name "
                "`ignore_index`, `reduction` and `label_smoothing`",
                text,
                call,
            )
        third = len(call.args) > 2 and not any(isinstance(a, ast.Starred) for a in call.args[:3])
        is_told = third or any(k.arg == "vocab_size" for k in call.keywords)
        if self.told_of_part and not is_told:
            raise errors.Unsupported(
                "this loss needs the number of classes in a rank's part of "
                f"`{accessor(self.head)}`, but the call does not name it",
                **text.where(call),
                hint="write `vocab_size=` in the call itself, not in `*` or `**` arguments",
            )
        named = self.function or (PLAIN if is_plain else "vocab_parallel_criterion")
        name = text.helper(MODULE, named)
        takes_head = self.function is None or self.function == PLAIN

        def make(made: cst.Call) -> cst.Call:
            if self.function is None and not is_plain:
                made = call_of(name, made.func).with_changes(
                    args=[cst.Arg(made.func), *made.args],
                    whitespace_before_args=made.whitespace_before_args,
                )
            else:
                made = with_callee(made, name)
            if self.told_of_part:
                made = _told_of_all(made, f"{accessor(self.head)}.full_out_features")
            return with_keywords(made, [("head", accessor(self.head))]) if takes_head else made

        why = "a loss of this rank's part of the logits"
        text.replace(call, make, why)


def _told_of_all(made: cst.Call, classes: str) -> cst.Call:
    """The call with the full number of classes as `vocab_size`, the third argument."""
    args = list(made.args)
    named = [n for n, arg in enumerate(args) if arg.keyword and arg.keyword.value == "vocab_size"]
    number = named[0] if named else 2
    args[number] = args[number].with_changes(value=parsed(classes))
    return made.with_changes(args=args)


class _Gathers:
    """Gathers logits on every path through a method that computes no loss, and in eval mode.

    A training step that computes a loss does not need whole logits; an evaluation may.
    `calls` are those that compute losses of the logits, in their order.

    Raises:
        Unsupported: There are several losses, and a condition leaves out some of them.
    """

    def __init__(self, text: ClassText, method: ast.FunctionDef, calls: Sequence[ast.AST]) -> None:
        self.text, self.method, self.calls = text, method, calls
        self.statement = _last_of_all(method, calls)  # after it, all losses have been computed
        # The branches around it, outermost first.
        self.branches = _branches(text.file, method, self.statement, calls[-1])
        around = [branch.node for branch in self.branches]
        for node in ast.walk(method) if len(calls) > 1 else ():
            if isinstance(node, (ast.If, ast.IfExp)) and node not in around:
                sides = [_held(side, calls) for side in (node.body, node.orelse)]
                if any(sides) and not all(sides):
                    raise _refused(
                        "some of the losses of these logits are skipped if this condition is false",
                        text,
                        node,
                    )

    def write(self, name: str, axis: int, head: str) -> None:
        """Gathers one variable."""

        def line() -> str:
            gather = self.text.helper(MODULE, "whole_logits")
            where = "" if axis == -1 else f", axis={axis}"
            return f"{name} = {gather}({name}, {head}{where})"

        def gather_behind(node: ast.stmt, *conditions: str) -> None:
            # Before a `return` that computes the loss, which accepts whole logits as well.
            returned = isinstance(node, ast.Return)
            insert = self.text.insert_before if returned else self.text.insert_after
            insert(node, f"if {' or '.join(conditions)}:\n    {line()}", why)

        why, method = GATHERED, self.method
        is_read = any(_reads_after(method, name, self.statement))
        if isinstance(self.statement, ast.Return):
            loads = uses_of(self.statement, name, ast.Load)
            is_read = any(not any(within(call, load) for call in self.calls) for load in loads)
        evaluation = ["not self.training"] if is_read else []
        for branch in reversed(self.branches):
            if isinstance(branch.node, ast.IfExp):
                if is_read:
                    gather_behind(self.statement, self._opposite(branch), *evaluation)
                    evaluation = []
                continue
            if evaluation and isinstance(self.statement, ast.Return):
                gather_behind(self.statement, *evaluation)
                evaluation = []
            other = branch.node.orelse if branch.taken else branch.node.body
            stored = [s for s in other if name in bound_in(s)]
            loaded = name in read_in(*other)
            read = loaded or any(_reads_after(method, name, branch.node))
            if not read or not (stored or _bound_before(method, name, branch.node)):
                continue
            if not stored and not loaded and self._can_wait(branch.node, name):
                gather_behind(branch.node, self._opposite(branch), *evaluation)
                evaluation = []
            elif stored:
                self.text.insert_after(stored[-1], line(), why)
            elif other and self._is_elif(other):
                raise _refused(
                    f"`{name}` must be gathered if this condition is false, but other conditions "
                    "follow",
                    self.text,
                    other[0],
                )
            elif other:
                self.text.insert_before(other[0], line(), why)
            else:
                self._add_else(branch.node, line())
        if evaluation:
            gather_behind(self.statement, *evaluation)
        around = [b.node for b in self.branches if isinstance(b.node, ast.If)]
        for leaving in returns(method):
            early = leaving.lineno < self.statement.lineno and not any(
                within(node, leaving) for node in around
            )
            if early and name in read_in(leaving) and _bound_before(method, name, leaving):
                self.text.insert_before(leaving, line(), why)

    def _can_wait(self, node: ast.If, name: str) -> bool:
        """Whether a gather may follow an `if`, under the opposite of its condition."""
        plain = (ast.Compare, ast.cmpop, ast.Constant, ast.Name, ast.Load)
        inside = list(ast.walk(node.test))
        unread = not any(_reads_after(node, name, self.statement))
        fixed = all(_keeps(node, n.id) for n in inside if isinstance(n, ast.Name))
        return unread and fixed and all(isinstance(n, plain) for n in inside)

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
        edit = in_else(self.text.file, node, line)
        if any(each.start == edit.start for each in self.text.at(node).around):
            edit = in_else(self.text.file, node, line, opened=True)
        self.text.place(node, edit, GATHERED)


def _refused(words: str, text: ClassText, at: ast.AST | AtNode) -> errors.Unsupported:
    hint = 'gather the logits instead: .sync("fwd_post", "all_gather", axis=-1)'
    return errors.Unsupported(words, **text.where(at), hint=hint)


def _held(block: ast.AST | Sequence[ast.AST], calls: Sequence[ast.AST]) -> list[ast.AST]:
    nodes = [block] if isinstance(block, ast.AST) else block
    return [call for call in calls if any(within(node, call) for node in nodes)]


def _last_of_all(method: ast.FunctionDef, calls: Sequence[ast.AST]) -> ast.stmt:
    """The last statement with one of the calls, in the innermost block that contains them all."""
    blocks = [b for b in every_block(method) if len(_held(b, calls)) == len(calls)]
    last: ast.stmt = [statement for statement in blocks[-1] if _held(statement, calls)][-1]
    return last


def _branches(
    file: SourceFile, method: ast.FunctionDef, statement: ast.stmt, call: ast.AST
) -> list[_Branch]:
    """The branches around a statement, and around a call in it, outermost first."""
    found = [
        _Branch(outer, inner is outer.body)
        for inner, outer in file.around(call, method)
        if isinstance(outer, ast.IfExp) and inner is not outer.test
    ]
    found += [
        _Branch(outer, inner in outer.body)
        for inner, outer in file.around(statement, method)
        if isinstance(outer, ast.If)
    ]
    return found[::-1]


def _keeps(node: ast.AST, name: str) -> bool:
    """Whether a variable still has the same tensor afterwards, moved or reshaped at most."""
    kept: list[ast.expr] = []
    for each in ast.walk(node):
        match each:
            case ast.Assign(
                targets=[target, *_],
                value=ast.Call(func=ast.Attribute(value=ast.Name(id=of), attr=attr)),
            ) if of == name and attr in RESHAPES:
                kept.append(target)
    return all(stored in kept for stored in uses_of(node, name, ast.Store))


def _reads_after(within: ast.AST, name: str, node: ast.stmt) -> Iterator[ast.Name]:
    return (n for n in uses_of(within, name, ast.Load) if position(n) >= end_position(node))


def _bound_before(method: ast.FunctionDef, name: str, node: ast.stmt) -> bool:
    return any(n.lineno < node.lineno for n in uses_of(method, name, ast.Store))


def place_losses(to: Placement, losses: Collection[ParallelLoss]) -> None:
    """Places losses of sharded logits where methods compute them."""
    for loss in losses:
        alike = sorted(
            (
                other
                for other in losses
                if (other.head, other.owner, other.place.filename)
                == (loss.head, loss.owner, loss.place.filename)
            ),
            key=lambda other: other.place.at,
        )
        change = VocabParallelLoss(
            loss.function,
            to.tree.nodes[loss.owner].below(loss.head),
            tuple(sorted({name for other in alike for name in other.names})),
            tuple(at_node("loss", other.place) for other in alike),
            loss.told_of_part,
        )
        causes = to.causes(to.tree.nodes[loss.head])
        at = at_node("loss", loss.place)
        to.files.at(loss.place).changes.add(loss.owner, at, change, causes)


@dataclass(frozen=True)
class GatherTiedHead(Change):
    """Where a method multiplies by a sharded embedding's table: whole logits on every rank."""

    says = "whose head is the table of a split embedding"

    def write_at(self, text: ClassText, place: AtNode) -> None:
        """Replaces the product by a call of `tied_head`."""
        found = [node for _, node in text.nodes_at(place) if head_of(node)]
        if not found:
            raise errors.Unsupported(
                "the product with the table of a split embedding cannot be told apart here",
                **text.where(place),
            )
        for node in found:
            embedding = head_of(node)
            assert embedding is not None
            name = text.helper("tensor_parallel", "tied_head")

            def make(
                made: cst.BaseExpression, name: str = name, layer: str = ast.unparse(embedding)
            ) -> cst.BaseExpression:
                assert isinstance(made, (cst.BinaryOperation, cst.Call))
                x = made.left if isinstance(made, cst.BinaryOperation) else made.args[-2].value
                return call_of(name, x, layer)

            text.replace(node, make, "whole logits of a split table")


def place_tied_head(to: Placement, head: TiedHead) -> None:
    """Places whole logits where a method multiplies by a sharded embedding's table."""
    at = at_node("tied_head", head.place)
    causes = tuple(to.states[head.embedding].causes())
    to.files.at(head.place).changes.add(head.owner, at, GatherTiedHead(), causes)
