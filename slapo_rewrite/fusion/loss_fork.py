"""Writes a function in which training computes only the loss, and no logits."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

from slapo_rewrite.changes.replace_statement import ReplaceStatement
from slapo_rewrite.code.arguments import values_given
from slapo_rewrite.code.edit import Edit, NoneIf, Put, substituted
from slapo_rewrite.code.runs import Run, compound, or_else
from slapo_rewrite.code.text import accessor
from slapo_rewrite.fusion.lm_head import Head
from slapo_rewrite.patterns.value_graph import Graph

Changes = dict[ast.stmt, ReplaceStatement]
IS_PLAIN = "slapo_rewrite.runtime.kernels.plain.is_plain"


@dataclass(frozen=True)
class Fork:
    """The statements that compute logits, and those that compute a loss from them.

    In training only the loss is computed, and the logits are None.
    """

    graph: Graph  # the function's values
    head: Head  # the layer that computes the logits
    name: str  # the name of the logits
    making: tuple[ast.stmt, ...]  # the consecutive statements that compute the logits
    given: str  # the name that is not None if the loss is computed; empty if it always is
    # The `if` around the loss in the same block; None if the loss is in that block itself.
    guard: ast.If | None
    # The consecutive statements that compute the loss, which the last one does.
    losing: tuple[ast.stmt, ...]
    loss: ast.Call  # the call that computes the loss
    hidden: str  # the text of the head's input at the fork
    # Its expression, to bind to the name `hidden` above the fork; empty if it has a name, or is
    # computed for the loss only.
    named: str
    labels: str  # the text of the labels at the fork
    absent: tuple[str, ...]  # the outputs that are None in training, by name or index
    alone: bool  # whether only the loss reads the logits: then they are never computed

    @property
    def idle(self) -> tuple[str, ...]:
        """The modules that training no longer calls."""
        return self.head.modules

    def condition(self, is_plain: str) -> str:
        """The condition under which the loss is computed without logits.

        `is_plain` is the text of the function that looks for hooks and adapters.
        """
        function = self.graph.function
        assert function is not None
        me = function.args.args[0].arg
        given = f" and {self.given} is not None" if self.given else ""
        layer = accessor(self.head.path).replace("self", me, 1)
        return f"{me}.training{given} and {is_plain}({layer})"

    def holds_as_well(self, name: ast.Name) -> bool:
        """Whether a name in the loss's call has the same value at the fork."""
        held = self.graph.names[self.place].get(name.id)
        return held is self.graph.names[self.losing[-1]].get(name.id)

    @property
    def place(self) -> ast.stmt:
        """The statement above which the loss without logits is inserted."""
        if self.guard is not None and [*self.losing] in (self.guard.body, self.guard.orelse):
            return self.guard
        return self.losing[0]

    def edits(self, text: str, what: str, spell: Callable[[str], str]) -> Changes:
        """The changes, by statement.

        `text` is the call that replaces head and loss.
        """
        condition = "" if self.alone else self.condition(spell(IS_PLAIN))
        return _Writer(self, text, condition, what).changes()


class _Writer:
    def __init__(self, fork: Fork, text: str, condition: str, what: str) -> None:
        self.fork, self.text, self.what, self.condition = fork, text, what, condition
        self.file = fork.graph.file

    def changes(self) -> Changes:
        fork = self.fork
        first, last = fork.making[0], fork.losing[-1]
        named = (f"{fork.hidden} = {fork.named}",) if fork.named else ()
        if fork.alone:
            return self._alone(named)
        none, condition = f"{fork.name} = None", f"if {self.condition}:"
        if self._joined():
            made = f"{none}\n{self._loss()}"
            return {first: self._fork(named, condition, made, (*fork.making, *fork.losing))}
        found: Changes = {}
        if len(fork.making) == 1:
            found[first] = self._none_or_made(first, named)
        else:
            found[first] = self._fork(named, condition, none, fork.making)
        is_none = f"if {fork.name} is None:"
        block = compound(is_none, self._loss())
        if fork.guard is not None and fork.place is fork.guard:
            placed = or_else(self.file, fork.guard, block)
            found[fork.guard] = ReplaceStatement(fork.guard, self.what, splices=(placed,))
        elif isinstance(last, ast.Return):
            place = fork.losing[0]
            found[place] = ReplaceStatement(place, self.what, before=(block,))
        else:
            found[fork.losing[0]] = self._fork((), is_none, self._loss(), fork.losing)
        return found

    def _alone(self, named: tuple[str, ...]) -> Changes:
        """The loss alone, where nobody else reads the logits."""
        making, (*before, last) = self.fork.making, self.fork.losing
        found: Changes = {s: ReplaceStatement(s, self.what, gone=True) for s in (*making, *before)}
        for text in named:
            edit = Edit(making[0], Put(text))
            found[making[0]] = ReplaceStatement(making[0], self.what, (edit,))
        found[last] = ReplaceStatement(last, self.what, (Edit(self.fork.loss, Put(self.text)),))
        return found

    def _joined(self) -> bool:
        """Whether the loss follows at once, so that one fork does."""
        end, start = self.fork.making[-1].end_lineno or 0, self.fork.losing[0].lineno
        lines = (self.file.line(n).strip() for n in range(end + 1, start))
        return self.fork.guard is None and all(not line or line.startswith("#") for line in lines)

    def _loss(self) -> str:
        """The statement that gives the loss, of the new call."""
        return substituted(self.file, self.fork.losing[-1], {self.fork.loss: self.text})

    def _none_or_made(self, statement: ast.stmt, named: tuple[str, ...]) -> ReplaceStatement:
        """An assignment of the logits, or of None."""
        assert isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None
        edits = [Edit(node, Put(text)) for node, text in self._named().items()]
        edits.append(Edit(statement.value, NoneIf(self.condition), outer=True))
        return ReplaceStatement(statement, self.what, tuple(edits), before=named)

    def _named(self) -> dict[ast.expr, str]:
        """The name of the head's input, by the expression in the head's call that gets it."""
        call = self.fork.head.call.node
        assert isinstance(call, ast.Call)
        return {values_given(call)[0]: self.fork.hidden} if self.fork.named else {}

    def _fork(
        self, named: tuple[str, ...], test: str, body: str, statements: tuple[ast.stmt, ...]
    ) -> ReplaceStatement:
        """A fork in the place of statements, which become its last way."""
        run = Run.of(self.file, statements)
        old = run.text_with(self._named())
        text = "\n".join([*named, compound(test, body, "else:", old)])
        placed = run.replaced(text)
        return ReplaceStatement(statements[0], self.what, splices=(placed,))
