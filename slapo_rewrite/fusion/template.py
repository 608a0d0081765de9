"""What takes the place of a match: an expression, written with the match's own operands."""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from slapo_rewrite import errors
from slapo_rewrite.code.arguments import Signature
from slapo_rewrite.code.dataflow import body_of
from slapo_rewrite.code.edit import substituted
from slapo_rewrite.code.evaluate import Constant
from slapo_rewrite.code.facts import Resolver, live_names
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.syntax import position
from slapo_rewrite.patterns.pattern import located, names_around

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
