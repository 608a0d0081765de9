"""From matches to a change of the source: who shares the text, what is written, what goes."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from slapo_rewrite import errors
from slapo_rewrite.edit.rewritten import Rewrite
from slapo_rewrite.edit.splice import Edit, apply_edits
from slapo_rewrite.edit.state import Directive, ModuleState
from slapo_rewrite.edit.text import accessor
from slapo_rewrite.fusion.places import Writing, place_edits
from slapo_rewrite.fusion.sharing import Sharing
from slapo_rewrite.fusion.spelling import Speller
from slapo_rewrite.model.sources import Sources
from slapo_rewrite.model.tree import Node, Tree
from slapo_rewrite.patterns.search import Match
from slapo_rewrite.patterns.values import Value
from slapo_rewrite.source.index import SourceFile


class Expression(Protocol):
    """What can be written with operands: a template, or a call."""

    @property
    def name(self) -> str:
        """Of the function that it is of."""
        ...

    def reads(self) -> list[str]:
        """The parameters in the order in which they are read."""
        ...

    def written(self, operands: Mapping[str, str], spell: Callable[[str], str]) -> str:
        """The text."""
        ...


@dataclass(frozen=True)
class Calling:
    """A call of a function with its parameters in order.

    Attributes:
        name: Of the function.
        origin: Its dotted name.
        parameters: Given by position.
        keywords: Given by name.
    """

    name: str
    origin: str
    parameters: tuple[str, ...]
    keywords: tuple[str, ...] = ()

    def reads(self) -> list[str]:
        """The parameters in the order in which they are read."""
        return [*self.parameters, *self.keywords]

    def written(self, operands: Mapping[str, str], spell: Callable[[str], str]) -> str:
        """The call's text."""
        given = [operands[name] for name in self.parameters]
        given += [f"{name}={operands[name]}" for name in self.keywords]
        return f"{spell(self.origin)}({', '.join(given)})"


@dataclass(frozen=True)
class Claim:
    """A match that an expression takes the place of.

    Attributes:
        match: The match.
        node: The module whose function it stands in.
        expression: What is written.
        operands: The text of each of its parameters.
        what: Who asks: a rule's name, or a function's.
    """

    match: Match
    node: Node
    expression: Expression
    operands: Mapping[str, str]
    what: str

    def touched(self) -> set[int]:
        """The statements that go and the expression that is replaced, by identity."""
        replaced = self.match.replaced
        # Contexts (`ast.Load()`) are one object everywhere.
        every = (n for outer in (replaced.node, *replaced.removed) for n in ast.walk(outer))
        return {id(n) for n in every if isinstance(n, (ast.expr, ast.stmt))}

    def place(self) -> errors.Span:
        """Where it stands."""
        return self.match.file.at(self.match.replaced.node)


@dataclass(frozen=True)
class Left:
    """A match that is left as it is, and why."""

    claim: Claim
    reason: str
    hint: str | None = None


class Engine:
    """Turns claims into one change of the source.

    Args:
        tree: The module tree.
        sources: The files.
        states: What was asked of modules so far.
        cause: Who asks.
        line_length: The file's own.
    """

    def __init__(
        self,
        tree: Tree,
        sources: Sources,
        states: Mapping[str, ModuleState],
        cause: Directive,
        line_length: int,
    ) -> None:
        self.tree, self.sources, self.states = tree, sources, states
        self.cause, self.line_length = cause, line_length
        self.file: SourceFile = sources.main
        self.speller = Speller(self.file, cause)
        self.sharing = Sharing(tree, sources)
        self._functions: dict[int, ast.FunctionDef] | None = None

    def sorted_out(
        self, claims: Sequence[Claim], selected: Iterable[Node]
    ) -> tuple[list[Claim], list[Left]]:
        """The claims that can be carried out, and the others with the reason.

        Of two that want the same text, the earlier is carried out.

        Args:
            claims: The claims, those that count more first.
            selected: The modules that were looked at.
        """
        selected_paths = {node.path for node in selected}
        taken: dict[int, Claim] = {}
        kept: list[Claim] = []
        left: list[Left] = []
        for group in _by_place(claims):
            first = group[0]
            stop = self._stop(group, selected_paths)
            other = next((taken[n] for n in first.touched() if n in taken), None)
            if stop is None and other is not None:
                stop = Left(first, f"`{other.what}` takes its place already")
            if stop is not None:
                left.append(stop)
                continue
            for claim in group:
                taken |= dict.fromkeys(claim.touched(), claim)
            kept += group
        return kept, left

    def _stop(self, group: list[Claim], selected: set[str]) -> Left | None:
        """Why a text cannot be changed for those modules that claim it."""
        first = group[0]
        match = first.match
        if match.file is not self.file:
            return Left(first, f"it stands in {match.file.path.name}, which is not rewritten")
        if not match.replaced.whole:
            return Left(first, "a statement computes part of it among other things")
        if (reason := _misuse(first)) is not None:
            return Left(first, reason)
        for claim in group:
            for path in _called(claim):
                if (state := self._scheduled(path)) is not None:
                    return Left(
                        claim,
                        f"`{path}` in it was scheduled before",
                        "fuse first, then schedule what is left: " + _first_cause(state),
                    )
        if len({tuple(sorted(c.operands.items())) for c in group}) > 1:
            return Left(first, "modules that share its text would need different ones")
        claimed = {claim.node.path for claim in group}
        for node in self.sharing.sharers(self._function_of(first)):
            if node.path not in claimed:
                why = "does not match there" if node.path in selected else "is not selected"
                return Left(
                    first,
                    f"`{node.path or 'the model'}` runs the same text, and {why}",
                    "select all modules that share the text",
                )
        return None

    def _scheduled(self, path: str) -> ModuleState | None:
        """What was asked of a module or below it, annotations apart."""
        for asked, state in self.states.items():
            if asked == path or asked.startswith(f"{path}."):
                plain = ModuleState(annotations=state.annotations)
                if state != plain:
                    return state
        return None

    def _function_of(self, claim: Claim) -> ast.FunctionDef:
        """The method or function of the file that a claim stands in."""
        if self._functions is None:
            every = [*self.file.functions.values()]
            for name in self.file.classes:
                every += self.file.methods(name)
            self._functions = {id(n): f for f in every for n in ast.walk(f)}
        return self._functions[id(claim.match.replaced.node)]

    def rewrite(self, claims: Sequence[Claim], notes: tuple[Mapping[str, object], ...]) -> Rewrite:
        """The change that carries claims out."""
        edits, absorbed = self._carried_out(claims)
        live = [c for group in _by_place(claims) for c in group if not _idle(group, absorbed)]
        if len(live) < len(claims):
            self.speller = Speller(self.file, self.cause)
            edits, absorbed = self._carried_out(live)
        return Rewrite(edits, tuple(self.speller.references.values()), absorbed, notes)

    def _carried_out(self, claims: Sequence[Claim]) -> tuple[list[Edit], tuple[str, ...]]:
        """The edits, and the modules that are called no more."""
        writings = []
        for group in _by_place(claims):
            first = group[0]
            text = first.expression.written(first.operands, self.speller)
            node = first.match.replaced.node
            statement = node if isinstance(node, ast.stmt) else self._statement(first)
            why = f"`{first.what}`"
            writings.append(Writing(first.match.replaced, statement, text, self.cause, why))
        edits = place_edits(self.file, writings, self.line_length)
        self._check_names(claims)
        return edits, self._absorbed(claims, edits)

    def _statement(self, claim: Claim) -> ast.stmt:
        """The innermost statement that holds the result of a match."""
        node = claim.match.replaced.node
        holders = [
            s
            for s in ast.walk(self._function_of(claim))
            if isinstance(s, ast.stmt) and any(n is node for n in ast.walk(s))
        ]
        return holders[-1]

    def _check_names(self, claims: Sequence[Claim]) -> None:
        """A name that the new text uses must not be a local one of the function."""
        for claim in claims:
            function = self._function_of(claim)
            bound = {
                n.id
                for n in ast.walk(function)
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            } | {n.arg for n in ast.walk(function) if isinstance(n, ast.arg)}
            text = claim.expression.written(dict.fromkeys(claim.operands, "None"), self.speller)
            used = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
            if taken := used & bound:
                raise errors.NameTaken(
                    f"`{min(taken)}` is a local variable of `{function.name}`, and is needed for "
                    f"`{claim.what}`",
                    at=self.file.at(function),
                    also=[self.cause.at] if self.cause.at else [],
                    hint="rename the variable in the source",
                )

    def _absorbed(self, claims: Sequence[Claim], edits: list[Edit]) -> tuple[str, ...]:
        """The modules that were called in the matches and that the new text calls no more."""
        text, _ = apply_edits(self.file.text, edits)
        calls = {ast.unparse(n.func) for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)}
        found: dict[str, None] = {}
        for claim in claims:
            for path, called in zip(_called(claim), claim.match.calls, strict=True):
                if accessor(called) not in calls:
                    found[path] = None
        return tuple(found)

    def refused(self, left: Left) -> errors.RewriteError:
        """The error for a match that cannot be replaced."""
        at = [self.cause.at] if self.cause.at else []
        return errors.NoMatch(
            f"`{left.claim.what}` cannot take the place of what it matches: {left.reason}",
            at=left.claim.place(),
            also=at,
            hint=left.hint,
        )


def _called(claim: Claim) -> list[str]:
    lead = f"{claim.node.path}." if claim.node.path else ""
    return [f"{lead}{called}" for called in claim.match.calls]


def _idle(group: list[Claim], absorbed: Sequence[str]) -> bool:
    """Whether a text is that of modules which are no longer called."""
    return all(any(f"{c.node.path}.".startswith(f"{p}.") for p in absorbed) for c in group)


def _by_place(claims: Sequence[Claim]) -> list[list[Claim]]:
    """Claims of the same text for several modules, together."""
    groups: dict[tuple[int, str], list[Claim]] = {}
    for claim in claims:
        groups.setdefault((id(claim.match.replaced.node), claim.what), []).append(claim)
    return list(groups.values())


def _first_cause(state: ModuleState) -> str:
    causes = [c.at for c in state.causes() if c.at]
    return f"line {causes[0].line} schedules it" if causes else "it is scheduled"


def _misuse(claim: Claim) -> str | None:
    """Why an expression cannot be written with these operands."""
    reads = claim.expression.reads()
    values = claim.match.values
    for name in reads:
        if name not in claim.operands:
            return f"`{claim.expression.name}` needs `{name}`, which the pattern does not give"
        plain = name in values and (values[name].is_leaf or claim.operands[name].isidentifier())
        if reads.count(name) > 1 and not plain:
            return f"`{name}` would be computed twice"
    drawn = [name for name, value in values.items() if _drawn_here(claim, name, value)]
    if [n for n in reads if n in drawn] != sorted(drawn, key=lambda n: values[n].order):
        return "random numbers would be drawn in another order"
    return None


def _drawn_here(claim: Claim, name: str, value: Value) -> bool:
    """Whether an operand's text draws random numbers where it is written."""
    text = claim.operands.get(name, "")
    return not text.isidentifier() and any(v.random for v in value.walk() if not v.is_leaf)
