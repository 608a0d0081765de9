"""Branches in constructors: which of them a module took, and which layers each makes."""

from __future__ import annotations

import ast
import sys
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from slapo_rewrite.code.evaluate import Constant, came_to
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.syntax import encloses, end_position, extent, position
from slapo_rewrite.code.text import Position
from slapo_rewrite.model.construction_calls import is_file, scope_of, stack_of, tensor_set
from slapo_rewrite.model.tree import Node

# Elementwise modules without parameters, which work on shards as they are.
_HARMLESS = {
    nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardswish,
}  # fmt: skip
# Nodes whose body may run several times, or later, or cannot be repeated.
_REPEATED = (
    ast.For, ast.While, ast.With, ast.Try, ast.comprehension, ast.ListComp, ast.GeneratorExp,
    ast.DictComp, ast.SetComp, ast.Lambda, ast.FunctionDef, ast.ClassDef,
)  # fmt: skip


@dataclass(frozen=True)
class Branch:
    """A branch of a constructor, for one module."""

    at: Position
    first: ast.stmt  # the statement before which a line can be inserted
    condition: str | None  # for `a if b else c` in that statement: when it is taken
    is_taken: bool
    # The classes of modules and parameters that it names, without elementwise ones.
    classes: frozenset[type]


def branches(file: SourceFile, function: ast.FunctionDef, node: Node) -> Iterator[Branch]:
    """The branches of a method that makes submodules or parameters of a module.

    Branches in loops are left out, and those for which it is not known whether they were taken.
    """
    if not any(isinstance(inner, ast.If | ast.IfExp) for inner in ast.walk(function)):
        return
    names, made = _known_in(file, function, node)
    if made or function.name == "__init__":
        for branch in _decided(file, function, names):
            is_taken = branch.is_taken or any(encloses(branch.at, each) for each in made)
            yield replace(branch, is_taken=is_taken)


def _decided(
    file: SourceFile, function: ast.FunctionDef, names: Mapping[str, Any]
) -> Iterator[Branch]:
    """The branches of a method, decided by their conditions alone."""
    unreached: set[ast.AST] = set()
    for node in _once(function):
        if not isinstance(node, ast.If | ast.IfExp):
            continue
        way = came_to(node.test, names)
        if node not in unreached and not isinstance(way, Constant):
            continue
        is_yes = node not in unreached and isinstance(way, Constant) and bool(way.value)
        is_no = node not in unreached and not is_yes
        if isinstance(node, ast.IfExp):
            statement, test = file.statement_of(node), file.segment(node.test)
            if isinstance(statement, ast.If):  # in its test, which may be that of an `elif`
                continue
            test = test if "\n" not in test else ast.unparse(node.test)
            yield _branch([node.body], statement, test, is_yes, names)
            yield _branch([node.orelse], statement, f"not ({test})", is_no, names)
            continue
        yield _branch(node.body, node.body[0], None, is_yes, names)
        if node.orelse and not file.segment(node.orelse[0]).startswith("elif"):
            yield _branch(node.orelse, node.orelse[0], None, is_no, names)
        elif not is_no:
            unreached.update(node.orelse)


def _once(node: ast.AST) -> Iterator[ast.AST]:
    """The descendants of a node that run at most once, parents first."""
    for inner in ast.iter_child_nodes(node):
        if not isinstance(inner, _REPEATED):
            yield inner
            yield from _once(inner)


def _branch(
    nodes: list[Any],
    first: ast.stmt,
    condition: str | None,
    is_taken: bool,
    names: Mapping[str, Any],
) -> Branch:
    found: set[type] = set()
    for node in (inner for each in nodes for inner in ast.walk(each)):
        if isinstance(node, ast.Name | ast.Attribute):
            match came_to(node, names):
                case Constant(type() as cls) if getattr(node, "attr", "") != "__class__":
                    found.add(cls)
    classes = {cls for cls in found - _HARMLESS if issubclass(cls, (nn.Module, nn.Parameter))}
    at = (*position(nodes[0]), *end_position(nodes[-1]))
    return Branch(at, first, condition, is_taken, frozenset(classes))


def _known_in(
    file: SourceFile, function: ast.FunctionDef, node: Node
) -> tuple[Mapping[str, Any], list[Position]]:
    """The variables in a method of a module, and the places where it made what the module holds."""
    me = function.args.args[0].arg if function.args.args else ""
    names: Mapping[str, Any] = ChainMap({me: node.live}, vars(sys.modules[node.cls.__module__]))
    made: list[Position] = []
    calls = (
        (place, scope_of(below.live, number))
        for below in node.walk()
        for number, place in enumerate(stack_of(below.live))
    )
    tensors = (tensor_set(node.live, name) for name in node.parameters)
    for place, scope in (*calls, *(each for each in tensors if each is not None)):
        if scope is None or scope.get(me) is not node.live:
            continue
        if is_file(file, place.filename) and encloses(extent(function), place.at):
            names = scope
            made.append(place.at)
    return names, made
