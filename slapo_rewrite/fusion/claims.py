"""Claims: the replacement that a rule proposes for a match, or the reason why it cannot."""

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

# Returns the text for a dotted name such as `torch.nn.functional.gelu`.
Speller = Callable[[str], str]


@dataclass(frozen=True)
class Template:
    """An expression with parameters, read from a function."""

    name: str  # the function's name
    parameters: tuple[str, ...]  # its parameters in order
    file: SourceFile  # the function's file
    node: ast.expr  # the expression
    resolve: Resolver  # resolves the other names in it

    def reads(self) -> list[str]:
        """The parameters in the order of evaluation."""
        found = [n for n in ast.walk(self.node) if isinstance(n, ast.Name)]
        found = [n for n in found if n.id in self.parameters]
        return [n.id for n in sorted(found, key=position)]

    def names(self) -> list[str]:
        """The dotted names of functions and modules that it uses."""
        return [dotted for _, dotted in self._outside()]

    def written(self, operands: Mapping[str, str], spell: Speller) -> str:
        """The expression's text."""
        texts = {node: spell(dotted) for node, dotted in self._outside()}
        for node in ast.walk(self.node):
            if isinstance(node, ast.Name) and node.id in self.parameters:
                texts[node] = operands[node.id]
        return substituted(self.file, self.node, texts)

    def _outside(self) -> Iterator[tuple[ast.expr, str]]:
        """The names and attributes that refer to other modules, with their dotted names."""
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
    """Reads a replacement from a function that consists of one `return`."""
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
    """A call of a function with operands as arguments."""

    name: str  # the function's name
    origin: str  # its dotted name
    parameters: tuple[str, ...]  # operands passed by position
    keywords: tuple[str, ...] = ()  # operands passed by name

    @classmethod
    def of(
        cls,
        function: Callable[..., object],
        parameters: Sequence[str],
        keywords: Sequence[str],
        given: Mapping[str, str],
    ) -> Calling:
        """A call of a live function with those of its arguments that are in `given`."""
        origin = dotted(function)
        assert origin is not None
        by_position, by_name = (tuple(k for k in ks if k in given) for ks in (parameters, keywords))
        return cls(origin.rpartition(".")[2], origin, by_position, by_name)

    def reads(self) -> list[str]:
        """The parameters in the order of evaluation."""
        return [*self.parameters, *self.keywords]

    def written(self, operands: Mapping[str, str], spell: Speller) -> str:
        """The call's text."""
        given = [operands[name] for name in self.parameters]
        given += [f"{name}={operands[name]}" for name in self.keywords]
        return f"{spell(self.origin)}({', '.join(given)})"


@dataclass(frozen=True)
class Renamed:
    """A call of another function with the arguments of the replaced call."""

    name: str  # the function's name
    origin: str  # its dotted name
    arguments: str  # the text of the arguments, with parentheses

    @classmethod
    def of(cls, function: Callable[..., object], arguments: str) -> Renamed:
        """A call of a live function."""
        origin = dotted(function)
        assert origin is not None
        return cls(origin.rpartition(".")[2], origin, arguments)

    def reads(self) -> list[str]:
        """Nothing: the arguments stay the same."""
        return []

    def written(self, operands: Mapping[str, str], spell: Speller) -> str:
        """The call's text."""
        return spell(self.origin) + self.arguments


# Replacement expressions.
Expression = Template | Calling | Renamed


class MultiSiteRewrite(Protocol):
    """A replacement that changes more than one place."""

    @property
    def idle(self) -> tuple[str, ...]:
        """Paths, relative to the module, of modules some of whose calls are left out."""
        ...

    @property
    def absent(self) -> tuple[str, ...]:
        """The outputs that become None in training, by name or index."""
        ...

    def edits(self, text: str, what: str, spell: Speller) -> dict[ast.stmt, ReplaceStatement]:
        """The changes, by statement."""
        ...


@dataclass(frozen=True)
class Claim:
    """A match to be replaced by an expression."""

    match: Match
    node: Node  # the module whose function contains it
    expression: Expression  # the replacement
    operands: Mapping[str, str]  # the text of each parameter of the replacement
    what: str  # the name of the rule or function that replaces it
    # The text of a method that the expression calls, to insert after the match's method.
    method: str | None = None
    # The text of a function that the expression calls, to insert above the match's class.
    function: str | None = None
    # A statement for the end of the constructor, which creates the called module.
    constructor: str | None = None
    moved: bool = False  # whether the match's statements and comments move to that function
    # The value of each parameter; None for the match's own values.
    values: Mapping[str, Value] | None = None
    # The linear layer of the match, which the expression passes to the function to call.
    linear: str | None = None
    spread: MultiSiteRewrite | None = None  # the replacement, if it changes several places
    backend: str = ""  # the backend of the rule's function; a kernel if empty
    why: str = ""  # the reason for that backend, in words

    def called(self) -> list[str]:
        """The paths of the modules that are called in the match."""
        return [self._below(called) for called in self.match.calls]

    def splits(self, path: str, state: ModuleRequests) -> bool:
        """Whether the requests for a module only shard the linear layer, which is still called."""
        rest = replace(state, shards=(), syncs=(), infer_sync=None)
        return self.linear is not None and path == self._below(self.linear) and rest.is_plain()

    def idle(self) -> list[str]:
        """The paths of modules some of whose calls elsewhere are left out."""
        return [self._below(path) for path in self.spread.idle] if self.spread else []

    def _below(self, relative: str) -> str:
        return joined_path(self.node.path, relative)

    def place(self) -> errors.Span:
        """The place of the match."""
        return self.match.file.at(self.match.replaced.node)


@dataclass(frozen=True)
class Skipped:
    """A match that is not replaced, and why."""

    claim: Claim  # the match
    reason: str  # the reason, in words
    hint: str | None = None  # what the user can do
    harmless: bool = False  # whether other claims can be carried out all the same
    # Whether to search for it again after other claims are carried out: its text overlaps theirs,
    # but it computes something else.
    waits: bool = False


def by_text(claims: Sequence[Claim]) -> list[list[Claim]]:
    """Groups equal claims on one text of several modules."""

    def text(claim: Claim) -> tuple[object, ...]:
        operands = tuple(sorted(claim.operands.items()))
        return id(claim.match.replaced.node), claim.what, operands, claim.backend

    return list(grouped((text(claim), claim) for claim in claims).values())


def misuse(claim: Claim) -> str | None:
    """The reason why an expression cannot be written with its operands, if any."""
    reads = claim.expression.reads()
    values = claim.match.values if claim.values is None else claim.values
    for name in reads:
        if name not in claim.operands:
            return f"`{claim.expression.name}` needs `{name}`, which the pattern does not contain"
        plain = name in values and (values[name].is_leaf or claim.operands[name].isidentifier())
        if reads.count(name) > 1 and not plain:
            return f"`{name}` would be computed twice"
    drawn = [name for name, value in values.items() if _drawn_here(claim, name, value)]
    if [n for n in reads if n in drawn] != sorted(drawn, key=lambda n: values[n].order):
        return "random numbers would be drawn in another order"
    return None


def _drawn_here(claim: Claim, name: str, value: Value) -> bool:
    """Whether the text of an operand draws random numbers."""
    given = claim.match.operands if claim.values is None else claim.operands
    text = given.get(name, "")
    if text.isidentifier():
        return False
    here = {id(node) for node in ast.walk(value.site.node)}
    return any(v.random for v in value.walk() if not v.is_leaf and id(v.site.node) in here)
