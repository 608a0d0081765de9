"""Extracts a match to a function or method: moves its statements, with operands as parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from operator import itemgetter

from slapo_rewrite import errors
from slapo_rewrite.code.build import parenthesised, reindented
from slapo_rewrite.code.edit import substituted
from slapo_rewrite.code.layout import formatted
from slapo_rewrite.code.runs import comment_after, comments_before
from slapo_rewrite.code.syntax import position
from slapo_rewrite.patterns.replacement import gives, is_nested
from slapo_rewrite.patterns.search import Match
from slapo_rewrite.patterns.value_graph import Graph, Value


@dataclass
class Moved:
    """The statements of a match as the body of a function."""

    lines: list[str] = field(default_factory=list)  # the body
    # The argument of each parameter of the function.
    arguments: dict[str, str] = field(default_factory=dict)

    def written(self, head: str, docstring: str, indent: int, line_length: int) -> str:
        """The function's text at column 0, formatted for `indent` columns."""
        body = "\n".join([f'"""{docstring}"""', *self.lines])
        text = f"{head}({', '.join(self.arguments)}):\n    {reindented(body, 0, 4)}\n"
        return reindented(formatted(text, indent, line_length), indent, 0)


def moved(match: Match, graph: Graph, method: bool) -> Moved:
    """Extracts the statements of a match.

    A new `method` reads the module's attributes itself.
    """
    return _Moving(match, graph, method).run()


def _named(match: Match) -> Match:
    """The match with names for its positional operands."""
    numbered = [name for name in match.operands if name.isdigit()]
    names = dict(zip(numbered, "xyzuvw", strict=False)) if len(numbered) < 7 else {}
    operands = {names.get(n, n): text for n, text in match.operands.items()}
    values = {names.get(n, n): value for n, value in match.values.items()}
    return replace(match, operands=operands, values=values)


class _Moving:
    def __init__(self, match: Match, graph: Graph, method: bool) -> None:
        match = _named(match)
        self.match, self.graph, self.method = match, graph, method
        self.file = match.file
        self.moved = Moved()
        self.inner = {id(node) for node in match.nodes}
        self.operands = {id(value): name for name, value in match.values.items()}
        self.texts = {
            match.operands[name]: name
            for name, value in match.values.items()
            if match.operands[name].startswith("self.") and not (method and value.is_leaf)
        }
        self.found: dict[str, str] = {}
        # The names that the body binds, and the name of each value.
        self.kept: set[str] = set()
        self.named: dict[int, str] = {}

    def run(self) -> Moved:
        replaced = self.match.replaced
        node = replaced.node
        if len(self.match.results) > 1 and isinstance(node, ast.stmt):
            self.moved.lines = self._several(node)
            return self._finished()
        lines = [line for s in replaced.removed for line in self._lines(s)]
        if isinstance(node, ast.AugAssign):
            lines.append(f"return {self._augmented(node)}")
        elif isinstance(node, ast.stmt):
            lines += [*self._lines(node), f"return {replaced.target.removesuffix(' = ')}"]
        else:
            assert isinstance(node, ast.expr)
            statement = self.match.root.site.statement
            assert statement is not None
            text = self._text(node, statement)
            lines.append(f"return ({text})" if "\n" in text else f"return {text}")
        self.moved.lines = lines
        return self._finished()

    def _finished(self) -> Moved:
        """The moved statements with their parameters, the pattern's own first."""
        order = [name for name in self.match.operands if name in self.found]
        order += [name for name in self.found if name not in order]
        self.moved.arguments = {name: self.found[name] for name in order}
        return self.moved

    def _several(self, own: ast.stmt) -> list[str]:
        """The body if the call returns several results to names of their own."""
        replaced, results = self.match.replaced, self.match.results
        moved = sorted({*replaced.removed, *(() if replaced.above else (own,))}, key=position)
        read: list[ast.AST] = [*(node for node, _ in replaced.reads), *moved]
        texts: dict[int, str] = {}
        given = [r for r in results if moved and gives(moved[-1], [r])]
        last = moved[-1] if given and not self._read_as(given[0], [*read[:-1]]) else None
        moved = [statement for statement in moved if statement is not last]
        held = {b.name: b.value for s in moved for b in self.graph.bound if b.statement is s}
        self.named = {id(value): name for name, value in held.items()}
        self.kept = set(held)
        if last is not None:
            texts[id(given[0])] = self._value(last)
        lines = [(s.lineno, self._lines(s)) for s in moved]
        for result in results:
            if id(result) in texts:
                continue
            statement = result.site.statement
            assert statement is not None
            names = [name for name, value in held.items() if value in (result, result.site)]
            if (not names and statement in moved) or is_nested(result, results):
                raise errors.NoMatch(
                    "a result keeps no name",
                    at=self.file.at(result.site.node),
                    hint="bind it to a separate name, on a separate line, in the model",
                )
            if not names and (names := self._read_as(result, read)):
                text = self._text(result.site.node, statement)
                lines.append((statement.lineno, [f"{names[-1]} = {text}"]))
            texts[id(result)] = names[-1] if names else self._text(result.site.node, statement)
        body = [line for _, own_lines in sorted(lines, key=itemgetter(0)) for line in own_lines]
        return [*body, f"return {', '.join(texts[id(result)] for result in results)}"]

    def _read_as(self, result: Value, nodes: Iterable[ast.AST]) -> list[str]:
        """The names by which nodes read a result."""
        inside = [n for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name)]
        return [n.id for n in inside if self.graph.loads.get(n) in (result, result.site)]

    def _value(self, statement: ast.stmt) -> str:
        """The expression that a statement assigns."""
        if isinstance(statement, ast.AugAssign):
            return self._augmented(statement)
        assert isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None
        return self._text(statement.value, statement)

    def _augmented(self, node: ast.AugAssign) -> str:
        """The expression that `x += y` assigns."""
        left = self._text(node.target, node)
        right = parenthesised(self._text(node.value, node))
        operands = ast.Name("x"), ast.Name("y")
        symbol = ast.unparse(ast.BinOp(operands[0], node.op, operands[1])).strip("xy")
        return f"{parenthesised(left)}{symbol}{right}"

    def _lines(self, statement: ast.stmt) -> list[str]:
        """A statement with its comments, for the new function."""
        text = reindented(self._text(statement, statement), statement.col_offset, 0)
        text += comment_after(self.file, statement)
        return [*comments_before(self.file, statement), *text.splitlines()]

    def _text(self, node: ast.AST, statement: ast.stmt) -> str:
        """A node's text with operands replaced by parameter names."""
        assert isinstance(node, ast.expr | ast.stmt)
        return substituted(self.file, node, dict(self._renamed(node, statement)))

    def _renamed(self, node: ast.AST, statement: ast.stmt) -> Iterator[tuple[ast.expr, str]]:
        """The expressions inside a node that get other names in the new function."""
        if isinstance(node, ast.stmt):
            statement = node
        if isinstance(node, ast.expr) and (name := self._parameter(node, statement)) is not None:
            yield node, name
            return
        for child in ast.iter_child_nodes(node):
            yield from self._renamed(child, statement)

    def _parameter(self, node: ast.expr, statement: ast.stmt) -> str | None:
        """The parameter that replaces an expression in the new function; None if none does."""
        for name, value in self.match.values.items():
            if value.node is node and value.inside is None and not value.is_leaf:
                return self._operand(name)
        text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if text in self.texts:
            return self._operand(self.texts[text])
        if not self.method and text.startswith("self."):
            return self._given(node.attr if isinstance(node, ast.Attribute) else text, text, node)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            held = self.graph.names.get(statement, {}).get(node.id)
            if held is not None and id(held) in self.inner:
                return None if node.id in self.kept else self.named.get(id(held))
            if held is None:
                return None
            if id(held) in self.operands:
                return self._operand(self.operands[id(held)])
            if held.operation == "self":
                return None
            return self._local(node, held)
        return None

    def _operand(self, name: str) -> str:
        self.found[name] = self.match.operands[name]
        return name

    def _local(self, node: ast.Name, held: Value) -> str | None:
        last = self.match.root.site.statement
        now = self.graph.names.get(last, {}).get(node.id) if last is not None else None
        if now is not held:
            raise errors.NoMatch(
                f"`{node.id}` is needed here, but has another value where the result is computed",
                at=self.file.at(node),
            )
        return self._given(node.id, node.id, node)

    def _given(self, name: str, text: str, node: ast.expr) -> str:
        """A further parameter."""
        if self.found.get(name, text) != text or name in self.match.operands:
            raise errors.NoMatch(
                f"two different values would be called `{name}` in the new function",
                at=self.file.at(node),
                hint=f"give the pattern a parameter for `{text}`",
            )
        self.found[name] = text
        return name
