"""Patterns of module paths: `*` is one segment, `**` any number, `{a,b}` one of several."""

from __future__ import annotations

import re

from slapo_rewrite.model.tree import Node


def modules_at(node: Node, pattern: str) -> list[Node]:
    """The modules that match a pattern, relative to a module."""
    found = (m for single in alternatives(pattern) for m in descend(node, split_pattern(single)))
    return list({match.path: match for match in found}.values())


def alternatives(pattern: str) -> list[str]:
    """Expands the braces of a pattern: `a.{b,c.d}` gives `a.b` and `a.c.d`."""
    opening = re.search(r"\{([^{}]*)\}", pattern)
    if opening is None:
        return [pattern]
    before, after = pattern[: opening.start()], pattern[opening.end() :]
    return [
        full
        for choice in opening[1].split(",")
        for full in alternatives(before + choice.strip() + after)
    ]


def split_pattern(pattern: str) -> list[re.Pattern[str] | None]:
    """The segments of a path pattern as regular expressions; None for `**`."""
    return [
        None if part == "**" else re.compile(re.escape(part).replace(r"\*", ANY))
        for part in pattern.split(".")
    ]


# The regular expression of a star in a segment.
ANY = "[^.]*"


def descend(node: Node, steps: list[re.Pattern[str] | None]) -> list[Node]:
    """The descendants of a node that match the segments."""
    reached = [node]
    for step in steps:
        if step is None:
            found = {inner.path: inner for outer in reached for inner in outer.walk()}
            reached = list(found.values())
        elif step.pattern == ANY:
            reached = [child for outer in reached for child in outer.children.values()]
        else:
            reached = [child for outer in reached for child in _children(outer, step)]
    return reached


def _children(node: Node, step: re.Pattern[str]) -> list[Node]:
    literal = node.children.get(step.pattern)
    if literal is not None:
        return [literal]
    return [child for name, child in node.children.items() if step.fullmatch(name)]
