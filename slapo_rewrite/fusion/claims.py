"""What a rule would write in the place of a match, and why it may not."""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from slapo_rewrite import errors
from slapo_rewrite.changes.replace_statement import ReplaceStatement
from slapo_rewrite.changes.state import ModuleRequests
from slapo_rewrite.code.arguments import Signature
from slapo_rewrite.code.dataflow import body_of
from slapo_rewrite.code.edit import substituted
from slapo_rewrite.code.evaluate import Constant
from slapo_rewrite.code.facts import Resolver, dotted, live_names
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.syntax import position
from slapo_rewrite.code.text import joined_path
from slapo_rewrite.groups import grouped
from slapo_rewrite.model.tree import Node
from slapo_rewrite.patterns.pattern import located, names_around
from slapo_rewrite.patterns.search import Match
from slapo_rewrite.patterns.value_graph import Value

# Gives the text for a dotted name, `torch.nn.functional.gelu`.
Speller = Callable[[str], str]


@dataclass(frozen=True)
class Template:
    """An expression with parameters."""

    name: str  # of the function that it was read from
    parameters: tuple[str, ...]  # in order
    file: SourceFile  # of that function
    node: ast.expr  # the expression
    resolve: Resolver  # what the other names in it mean

    def reads(self) -> list[str]:
        """The parameters in the order in which the expression reads them."""
        found = [n for n in ast.walk(self.node) if isinstance(n, ast.Name)]
        found = [n for n in found if n.id in self.parameters]
        return [n.id for n in sorted(found, key=position)]

    def names(self) -> list[str]:
        """The dotted names of what it uses from elsewhere."""
        return [dotted for _, dotted in self._outside()]

    def written(self, operands: Mapping[str, str], spell: Speller) -> str:
        """The expression's text."""
        texts = {node: spell(dotted) for node, dotted in self._outside()}
        for node in ast.walk(self.node):
            if isinstance(node, ast.Name) and node.id in self.parameters:
                texts[node] = operands[node.id]
        return substituted(self.file, self.node, texts)

    def _outside(self) -> Iterator[tuple[ast.expr, str]]:
        """Names and attributes of names that mean something of another module."""
        waiting: list[ast.AST] = [self.node]
        while waiting:
            node = waiting.pop(0)
            dotted = self._dotted(node) if isinstance(node, (ast.Attribute, ast.Name)) else None
            if dotted is not None:
                assert isinstance(node, ast.expr)
                yield node, dotted
            else:
                waiting += ast.iter_child_nodes(node)

    def _dotted(self, node: ast.expr) -> str | None:
        tail: list[str] = []
        while isinstance(node, ast.Attribute):
            tail.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id in self.parameters:
            return None
        meaning = self.resolve(node.id)
        if meaning is None or isinstance(meaning, Constant):
            if hasattr(builtins, node.id) and not tail:
                return None
            raise errors.BadPattern(
                f"`{node.id}` in a replacement is no function or module that can be imported",
                at=self.file.at(node),
            )
        if tail and meaning == node.id and hasattr(builtins, node.id):
            return None
        return ".".join([meaning, *reversed(tail)])


def template_of(function: Callable[..., object]) -> Template:
    """Reads a replacement that is a function of one `return`."""
    unwrapped = inspect.unwrap(function)
    file, node, name = located(unwrapped)
    match body_of(node):
        case [ast.Return(value=ast.expr() as value)]:
            pass
        case _:
            raise errors.BadPattern(
                "a replacement is one `return` of an expression", at=file.at(node)
            )
    takes = Signature.of(node)
    if takes.rest or takes.options:
        raise errors.BadPattern("a replacement names each of its parameters", at=file.at(node))
    resolve = live_names(names_around(unwrapped))
    return Template(name, tuple(takes.names), file, value, resolve)


@dataclass(frozen=True)
class Calling:
    """A call of a function with its parameters in order."""

    name: str  # of the function
    origin: str  # its dotted name
    parameters: tuple[str, ...]  # given by position
    keywords: tuple[str, ...] = ()  # given by name

    @classmethod
    def of(
        cls,
        function: Callable[..., object],
        parameters: Sequence[str],
        keywords: Sequence[str],
        given: Mapping[str, str],
    ) -> Calling:
        """A call of a live function with those of the arguments that are given."""
        origin = dotted(function)
        assert origin is not None
        by_position, by_name = (tuple(k for k in ks if k in given) for ks in (parameters, keywords))
        return cls(origin.rpartition(".")[2], origin, by_position, by_name)

    def reads(self) -> list[str]:
        """The parameters in the order in which they are read."""
        return [*self.parameters, *self.keywords]

    def written(self, operands: Mapping[str, str], spell: Speller) -> str:
        """The call's text."""
        given = [operands[name] for name in self.parameters]
        given += [f"{name}={operands[name]}" for name in self.keywords]
        return f"{spell(self.origin)}({', '.join(given)})"


@dataclass(frozen=True)
class Renamed:
    """A call of a function with the arguments of the call that stands there."""

    name: str  # of the function
    origin: str  # its dotted name
    arguments: str  # the text, from parenthesis to parenthesis

    @classmethod
    def of(cls, function: Callable[..., object], arguments: str) -> Renamed:
        """A call of a live function."""
        origin = dotted(function)
        assert origin is not None
        return cls(origin.rpartition(".")[2], origin, arguments)

    def reads(self) -> list[str]:
        """Nothing: the arguments stay as they are."""
        return []

    def written(self, operands: Mapping[str, str], spell: Speller) -> str:
        """The call's text."""
        return spell(self.origin) + self.arguments


# What can be written with operands.
Expression = Template | Calling | Renamed


class MultiSiteRewrite(Protocol):
    """How an expression is written that changes more than one place."""

    @property
    def idle(self) -> tuple[str, ...]:
        """The modules whose calls it leaves out, some or all, relative to the module."""
        ...

    @property
    def absent(self) -> tuple[str, ...]:
        """The outputs that are None in training then, by name or number."""
        ...

    def edits(self, text: str, what: str, spell: Speller) -> dict[ast.stmt, ReplaceStatement]:
        """What changes, by statement."""
        ...


@dataclass(frozen=True)
class Claim:
    """A match that an expression takes the place of."""

    match: Match
    node: Node  # the module whose function it stands in
    expression: Expression  # what is written
    operands: Mapping[str, str]  # the text of each of its parameters
    what: str  # who asks: a rule's name, or a function's
    # A method that the expression calls, to stand behind the one of the match.
    method: str | None = None
    # A function that the expression calls, to stand above the class of the match.
    function: str | None = None
    # A statement for the end of the constructor: it makes what is called.
    constructor: str | None = None
    moved: bool = False  # whether the statements go there, with their comments
    # What stands for each parameter; the match's own values where None.
    values: Mapping[str, Value] | None = None
    # The linear layer of the match, which the expression hands over to be called.
    linear: str | None = None
    spread: MultiSiteRewrite | None = None  # how it is written where one place is not enough
    backend: str = ""  # what the rule's function is carried out by; a kernel where it is empty
    why: str = ""  # what that was chosen for, in words

    def called(self) -> list[str]:
        """The paths of the modules that are called in the match."""
        return [self._below(called) for called in self.match.calls]

    def splits(self, path: str, state: ModuleRequests) -> bool:
        """Whether what is asked of a module is that its linear layer be split, which is called."""
        rest = replace(state, shards=(), syncs=(), infer_sync=None)
        return self.linear is not None and path == self._below(self.linear) and rest.is_plain()

    def idle(self) -> list[str]:
        """The paths of modules that are called elsewhere, and not always any more."""
        return [self._below(path) for path in self.spread.idle] if self.spread else []

    def _below(self, relative: str) -> str:
        return joined_path(self.node.path, relative)

    def place(self) -> errors.Span:
        """Where it stands."""
        return self.match.file.at(self.match.replaced.node)


@dataclass(frozen=True)
class Skipped:
    """A match that is left as it is, and why."""

    claim: Claim  # the match
    reason: str  # in words
    hint: str | None = None  # what can be done
    harmless: bool = False  # whether the others can be carried out all the same
    # Whether it is to be looked for again when they have been: it stands in the text of one of
    # them, and computes something else.
    waits: bool = False


def by_text(claims: Sequence[Claim]) -> list[list[Claim]]:
    """Claims of the same text for several modules, together."""

    def text(claim: Claim) -> tuple[object, ...]:
        operands = tuple(sorted(claim.operands.items()))
        return id(claim.match.replaced.node), claim.what, operands, claim.backend

    return list(grouped((text(claim), claim) for claim in claims).values())


def misuse(claim: Claim) -> str | None:
    """Why an expression cannot be written with these operands."""
    reads = claim.expression.reads()
    values = claim.match.values if claim.values is None else claim.values
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
    given = claim.match.operands if claim.values is None else claim.operands
    text = given.get(name, "")
    if text.isidentifier():
        return False
    here = {id(node) for node in ast.walk(value.site.node)}
    return any(v.random for v in value.walk() if not v.is_leaf and id(v.site.node) in here)
