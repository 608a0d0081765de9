"""Chooses the layers of the small model that stages are tested in: some of each stage, not all.

A stage computes layer by layer, and layers of one kind compute alike. So the first and the last
layer of each stage are kept, and the first of every kind. A program that uses the number of an
iteration, or the layers other than by calling them, is tested with all layers.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from slapo_rewrite.code.names import is_name
from slapo_rewrite.model.layer_kinds import kinds_of
from slapo_rewrite.model.tree import Node, Tree
from slapo_rewrite.stages.loops import is_counted, loop_over
from slapo_rewrite.stages.program import Cut, Program

# The indices of the kept layers, by the path of their list.
Kept = Mapping[str, tuple[int, ...]]


def kept_layers(tree: Tree, cuts: Sequence[Cut]) -> dict[str, tuple[int, ...]]:
    """The layers to keep of each list; lists of equal length, set by one number, keep the same."""
    by_length: dict[int, list[Node]] = {}
    for node in tree.nodes.values():
        is_inner = any(segment.isdigit() for segment in node.path.split("."))
        if isinstance(node.live, nn.ModuleList) and not is_inner:
            by_length.setdefault(len(node.children), []).append(node)
    found = {}
    for length, lists in by_length.items():
        paths = {node.path for node in lists}
        ends = {0, length}
        for cut in cuts:
            above, _, name = cut.path.rpartition(".")
            if above in paths:
                ends.add(int(name) + 1)
        below = (cut.path.partition(f"{path}.") for path in paths for cut in cuts)
        if any("." in rest for above, _, rest in below if not above):
            continue  # the layers of such a list are unrolled, so all of them are needed
        kinds = list(zip(*map(kinds_of, lists), strict=True))
        kept: set[int] = set()
        for first, stop in pairwise(sorted(ends)):
            of_each = {kinds[number]: number for number in reversed(range(first, stop))}
            kept |= {first, stop - 1, *of_each.values()}
        found.update(dict.fromkeys(paths, tuple(sorted(kept))))
    return found


def is_short_of(model: nn.Module, full: nn.Module, kept: Kept) -> bool:
    """Whether a small model has the structure of the full one with only the kept layers."""
    expected = {}
    for path, module in full.named_modules():
        if (place := _place(path, kept)) is not None:
            expected[place] = _described(module)
    return expected == {path: _described(module) for path, module in model.named_modules()}


def is_uniform(program: Program) -> bool:
    """Whether the iterations of divided loops only call their layers."""
    for piece in program.pieces:
        if piece.layers is None:
            continue
        statement, loop = piece.node, loop_over(piece.node)
        assert isinstance(statement, ast.For) and loop is not None
        nodes = [n for inner in statement.body for n in ast.walk(inner)]
        called = [n.func for n in nodes if isinstance(n, ast.Call)]
        read = [n for n in nodes if is_name(n, loop.target)]
        if loop.first or loop.stop.isdigit() or loop.read or is_counted(statement, loop):
            return False
        if len(loop.lists) > 1 or not all(name in called for name in read):
            return False
    return True


def _place(path: str, kept: Kept) -> str | None:
    """The path of a module among the kept ones; None for one that is left out."""
    for listed, numbers in kept.items():
        if path.startswith(f"{listed}."):
            number, dot, rest = path.removeprefix(f"{listed}.").partition(".")
            if int(number) not in numbers:
                return None
            return f"{listed}.{numbers.index(int(number))}{dot}{rest}"
    return path


def _described(module: nn.Module) -> Any:
    # Libraries may set private attributes only in a model with weights.
    own = vars(module).items()
    return type(module), {n: v for n, v in own if type(v) in (bool, str) and n[0] != "_"}
