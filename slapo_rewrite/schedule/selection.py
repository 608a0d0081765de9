"""Selects modules by path, and calls primitives on what was selected."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from slapo_rewrite import errors, primitives
from slapo_rewrite.model.tree import Node
from slapo_rewrite.schedule.plan import Plan


class Selection:
    """Modules of the model, in the order of the tree.

    `s[path]` selects by dotted path, relative to what is selected already: `*` is one segment, `**`
    any number, `{a,b}` one of several. `s[i]` and `s[a:b:c]` index a module list. `s.match(regex)`
    selects by regular expression on the whole path. Every primitive is a method:
    `s["mlp.*"].shard("weight", axis=0)`.
    """

    def __init__(self, plan: Plan, nodes: list[Node], said: str = "s") -> None:
        self._plan, self._found, self._said = plan, nodes, said
        self._tree = plan.tree

    @property
    def _nodes(self) -> list[Node]:
        """The modules in the model as the source defines it now.

        Raises:
            UnknownPath: One is there no more.
        """
        now = self._plan.tree
        if self._tree is not now:
            gone = next((n.path for n in self._found if n.path not in now.nodes), None)
            if gone is not None:
                raise errors.UnknownPath(
                    f"`{gone}` was part of what has been rewritten",
                    at=self._plan.schedule.caller(),
                    hint="select from `s` again",
                )
            self._found, self._tree = [now.nodes[n.path] for n in self._found], now
        return self._found

    def __getitem__(self, key: str | int | slice) -> Selection:
        if isinstance(key, str):
            return self._by_path(key)
        if isinstance(key, (int, slice)):
            return self._by_index(key)
        raise errors.BadArgument(
            f"modules are selected by path, index or slice, not by {type(key).__name__}",
            at=self._plan.schedule.caller(),
        )

    def _by_path(self, pattern: str) -> Selection:
        found: dict[str, Node] = {}
        for single in alternatives(pattern):
            steps, before = split_pattern(single), len(found)
            for node in self._nodes:
                for match in descend(node, steps):
                    found[match.path] = match
            if len(found) == before and self._nodes:
                raise self._unknown(single)
        order = self._plan.order
        nodes = sorted(found.values(), key=lambda node: order[node.path])
        return Selection(self._plan, nodes, f'{self._said}["{pattern}"]')

    def _unknown(self, pattern: str) -> errors.RewriteError:
        known = self._below()
        return errors.UnknownPath(
            f"no module `{pattern}` below `{self._said}`",
            at=self._plan.schedule.caller(),
            hint=errors.did_you_mean(pattern, known) or _children_hint(self._nodes[0]),
        )

    def _by_index(self, key: int | slice) -> Selection:
        nodes: list[Node] = []
        for node in self._nodes:
            if not node.is_container:
                raise errors.UnknownPath(
                    f"`{node.path}` is a {node.cls.__name__}, not a module list: it has no index",
                    at=self._plan.schedule.caller(),
                    hint=_children_hint(node),
                )
            items = list(node.children.values())
            try:
                picked = items[key]
            except IndexError:
                raise errors.UnknownPath(
                    f"`{node.path}` has {len(items)} modules: there is no [{key}]",
                    at=self._plan.schedule.caller(),
                ) from None
            nodes += picked if isinstance(picked, list) else [picked]
        shown = key if isinstance(key, int) else _show_slice(key)
        return Selection(self._plan, nodes, f"{self._said}[{shown}]")

    def match(self, regex: str) -> Selection:
        """The modules below the selection whose relative path the whole expression matches.

        Raises:
            UnknownPath: It matches none.
        """
        try:
            compiled = re.compile(regex)
        except re.error as error:
            raise errors.BadArgument(
                f"`{regex}` is not a regular expression: {error}", at=self._plan.schedule.caller()
            ) from None
        below = self._below()
        nodes = [node for path, node in below.items() if compiled.fullmatch(path)]
        if not nodes and self._nodes:
            raise errors.UnknownPath(
                f"no module below `{self._said}` matches `{regex}`",
                at=self._plan.schedule.caller(),
                hint=errors.did_you_mean(regex.replace("\\", ""), below),
            )
        return Selection(self._plan, nodes, f"{self._said}.match({regex!r})")

    def _below(self) -> dict[str, Node]:
        below: dict[str, Node] = {}
        for node in self._nodes:
            prefix = f"{node.path}." if node.path else ""
            for path, inner in self._plan.tree.nodes.items():
                if path.startswith(prefix) and path:
                    below.setdefault(path[len(prefix) :], inner)
        return below

    @property
    def paths(self) -> list[str]:
        """The selected module paths."""
        return [node.path for node in self._nodes]

    def __iter__(self) -> Iterator[Selection]:
        return (Selection(self._plan, [n], f's["{n.path}"]') for n in self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, pattern: str) -> bool:
        patterns = [split_pattern(single) for single in alternatives(pattern)]
        return any(descend(node, steps) for steps in patterns for node in self._nodes)

    def __repr__(self) -> str:
        return f"<{self._said}: {len(self._nodes)} modules>"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        primitive = primitives.registry().get(name)
        if primitive is None:
            raise errors.UnknownPrimitive(
                f"there is no primitive `{name}`",
                at=self._plan.schedule.caller(),
                hint=errors.did_you_mean(name, primitives.registry())
                or "the primitives are " + ", ".join(primitives.registry()),
            )

        def call(*args: Any, **kwargs: Any) -> Any:
            answer = self._plan.call(primitive, self._nodes, args, kwargs)
            return self if answer is None else answer

        return call


def alternatives(pattern: str) -> list[str]:
    """The patterns that one with braces stands for: `a.{b,c.d}` gives `a.b` and `a.c.d`."""
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
    """The segments of a path pattern as expressions; None stands for `**`."""
    return [None if part == "**" else _segment(part) for part in pattern.split(".")]


# What one star in a segment stands for.
ANY = "[^.]*"


def _segment(segment: str) -> re.Pattern[str]:
    return re.compile(re.escape(segment).replace(r"\*", ANY))


def descend(node: Node, steps: list[re.Pattern[str] | None]) -> list[Node]:
    """The nodes below `node` that the segments lead to."""
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


def _children_hint(node: Node) -> str:
    names = list(node.children)
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"`{node.path or 's'}` holds {shown}" if names else f"`{node.path}` holds no modules"


def _show_slice(key: slice) -> str:
    parts = ["" if v is None else str(v) for v in (key.start, key.stop)]
    return ":".join(parts) + (f":{key.step}" if key.step is not None else "")
