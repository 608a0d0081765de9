"""A loss beside its logits: what is written where only one of them is computed in training."""

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
    """The statements that make logits and those that make a loss of them.

    In training nothing but the loss is computed, and the logits are None.
    """

    graph: Graph  # the function's values
    head: Head  # where the logits come from
    name: str  # what they are called
    making: tuple[ast.stmt, ...]  # the statements that make them, neighbours in one block
    given: str  # the name that is not None where the loss is computed; empty where it always is
    # The `if` around the loss that stands in the same block; None where the loss does.
    guard: ast.If | None
    # The statements that make the loss, neighbours in one block; the last gives it.
    losing: tuple[ast.stmt, ...]
    loss: ast.Call  # the call that computes it
    hidden: str  # the head's input, as text where the fork is
    # The same as an expression that gets the name `hidden` above the fork; empty where it has a
    # name, or is computed for the loss alone.
    named: str
    labels: str  # the labels, likewise
    absent: tuple[str, ...]  # the outputs that are None in training, by name or number
    alone: bool  # whether nobody else reads the logits: they are not made at all then

    @property
    def idle(self) -> tuple[str, ...]:
        """The modules that are not called in training any more."""
        return self.head.modules

    def condition(self, is_plain: str) -> str:
        """Where the loss is computed without logits.

        `is_plain` is how the function is written that looks for hooks and adapters.
        """
        function = self.graph.function
        assert function is not None
        me = function.args.args[0].arg
        given = f" and {self.given} is not None" if self.given else ""
        layer = accessor(self.head.path).replace("self", me, 1)
        return f"{me}.training{given} and {is_plain}({layer})"

    def holds_as_well(self, name: ast.Name) -> bool:
        """Whether a name in the loss's own call holds the same where the ways part."""
        held = self.graph.names[self.place].get(name.id)
        return held is self.graph.names[self.losing[-1]].get(name.id)

    @property
    def place(self) -> ast.stmt:
        """The statement above which the loss is computed without logits."""
        if self.guard is not None and [*self.losing] in (self.guard.body, self.guard.orelse):
            return self.guard
        return self.losing[0]

    def edits(self, text: str, what: str, spell: Callable[[str], str]) -> Changes:
        """What changes, by statement.

        `text` is the call that takes the place of head and loss.
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
