"""Prints `slapo-rewrite tree`: the modules, their parameters, and where each is made."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from slapo_rewrite.code.text import joined_path
from slapo_rewrite.model.join import Sources, known_site
from slapo_rewrite.model.tree import Node, Tree

_Shape = tuple[str, str, str, tuple[tuple[str, "_Shape"], ...]]


def render_tree(tree: Tree, sources: Sources) -> str:
    """One line for each module: path, class, its own parameters, the line that makes it.

    Equal elements of a list share one line, `layer.[0-11]`. Tied parameters are listed at the end.
    """
    shapes: dict[int, _Shape] = {}
    _shape(tree.root, shapes, sources)
    rows = list(_rows(tree.root, tree.root.cls.__name__, shapes))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (map(str.ljust, row, widths) for row in rows)
    lines = ["  ".join(row).rstrip() for row in padded]
    ties = dict.fromkeys(tree.ties.values())
    lines += ["", *(f"tied: {' = '.join(names)}" for names in ties)] if ties else []
    return "\n".join(_coloured(lines, len(rows), widths) if sys.stdout.isatty() else lines)


def tree_record(tree: Tree, sources: Sources) -> dict[str, Any]:
    """The same as data: every module, its parameters' shapes, and tied parameters."""
    return {
        "modules": [
            {
                "path": node.path,
                "class": f"{node.cls.__module__}.{node.cls.__qualname__}",
                "parameters": {name: list(p.shape) for name, p in node.parameters.items()},
                "made": _place(node, sources) or None,
            }
            for node in tree.root.walk()
        ],
        "tied": [list(names) for names in dict.fromkeys(tree.ties.values())],
    }


# Each row has the path, class, parameters, and where the module is made.
def _rows(node: Node, shown: str, shapes: dict[int, _Shape]) -> Iterator[tuple[str, str, str, str]]:
    _, parameters, place, _ = shapes[id(node)]
    yield shown, node.cls.__name__, parameters, place
    prefix = shown if node.parent is not None else ""
    for first, last in runs(node, shapes):
        name = first.name if first is last else f"[{first.name}-{last.name}]"
        yield from _rows(first, joined_path(prefix, name), shapes)


def runs(node: Node, shapes: Mapping[int, object]) -> list[tuple[Node, Node]]:
    """Groups children: runs of equal numbered neighbours, as pairs of first and last.

    `shapes` has, by a node's `id`, a key that is equal for equal nodes.
    """
    found: list[tuple[Node, Node]] = []
    for child in node.children.values():
        if found:
            first, last = found[-1]
            follows = last.name.isdecimal() and child.name == str(int(last.name) + 1)
            if follows and shapes[id(last)] == shapes[id(child)]:
                found[-1] = first, child
                continue
        found.append((child, child))
    return found


def _shape(node: Node, shapes: dict[int, _Shape], sources: Sources) -> _Shape:
    """The contents of a module's row and of the rows below it."""
    inner = tuple((name, _shape(child, shapes, sources)) for name, child in node.children.items())
    cls = f"{node.cls.__module__}.{node.cls.__qualname__}"
    parameters = ", ".join(f"{n} {list(p.shape)}" for n, p in node.parameters.items())
    shapes[id(node)] = cls, parameters, _place(node, sources), inner
    return shapes[id(node)]


def _place(node: Node, sources: Sources) -> str:
    if node.parent is None:
        return ""
    site = known_site(sources, node)
    return f"{site.file.path.name}:{site.value.lineno}" if site is not None else "?"


def _coloured(lines: list[str], rows: int, widths: list[int]) -> list[str]:
    """The same lines with the class in bold and the rest of a row dimmed, for a terminal."""
    first, second = widths[0] + 2, widths[0] + 2 + widths[1]
    return [
        f"{line[:first]}\x1b[1m{line[first:second]}\x1b[0m\x1b[2m{line[second:]}\x1b[0m"
        if number < rows
        else line
        for number, line in enumerate(lines)
    ]
