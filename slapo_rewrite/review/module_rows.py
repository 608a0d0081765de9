"""The module tree of an output: what was applied where, and what a rank holds of it."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slapo_rewrite.code.text import with_wildcards
from slapo_rewrite.model.listing import runs
from slapo_rewrite.model.tree import Node
from slapo_rewrite.review.built_models import Models
from slapo_rewrite.review.recorded_review import Recorded


@dataclass(frozen=True)
class Placed:
    """A parameter of a module."""

    name: str  # its name in the module
    shape: tuple[int, ...]  # the whole tensor's
    local: tuple[int, ...]  # what a rank has
    placement: str  # `Replicate` or `Shard(AXIS)`; nothing where there is one rank


@dataclass(frozen=True)
class Applied:
    """Something that was done with a module."""

    kind: str  # the primitive, or `rule`
    text: str  # the call, or the rule's name
    line: int | None  # the schedule's line


@dataclass(frozen=True)
class ModuleRow:
    """A module, or several neighbours in a list that are alike."""

    path: str  # its path, `encoder.layer.[0-5]` for several; the class for the model itself
    count: int  # how many they are
    cls: str  # its class
    was: str | None  # the original's class, where that is another one
    parameters: tuple[Placed, ...]  # its own
    applied: tuple[Applied, ...]  # what was done with it
    whole: int  # how many numbers the parameters at and below it hold, of all of them
    local: int  # likewise on one rank
    bytes: int  # the bytes of these
    children: tuple[ModuleRow, ...]  # the rows below it
    is_repeated: bool  # whether the rows below it say what others above it have said

    @property
    def name(self) -> str:
        """The last segment of its path."""
        segments: list[str] = re.findall(r"\[[^]]*\]|[^.]+", self.path)
        return segments[-1]


def module_rows(recorded: Recorded, models: Models) -> ModuleRow:
    """The row of the model, with those below it."""
    root = models.rank.root
    return _Listing(recorded, models).row(root, root, root.cls.__name__)


class _Listing:
    def __init__(self, recorded: Recorded, models: Models) -> None:
        self.models = models
        self.applied: dict[str, dict[Applied, None]] = {}
        for directive in models.directives:
            at = directive.at.line if directive.at else None
            self._note(directive.paths, Applied(directive.primitive, call_of(directive.text), at))
        content = recorded.content
        for entry in content.get("directives", ()):
            if what := entry.get("inferred"):
                done = Applied("inferred", f"sync({json.dumps(what.split())[1:-1]})", entry["line"])
                self._note(self._expanded(entry["paths"]), done)
        for note in content.get("rules", ()):
            line = content["directives"][note["directive"]]["line"]
            done = Applied("rule", note["rule"], line)
            self._note(self._expanded(note.get("applied", ())), done)
        for path in models.cuts:
            self._note([path], Applied("cut", "a stage ends here", None))
        self.keys: dict[int, Any] = {}
        self.told: set[Any] = set()
        self._key(models.rank.root)

    def _note(self, paths: Any, done: Applied) -> None:
        for path in paths:
            self.applied.setdefault(path, {})[done] = None

    def _expanded(self, patterns: Any) -> list[str]:
        """The paths that patterns of a record stand for: of some alike, those that changed."""
        found = []
        for pattern in patterns:
            fitting = [path for path in self.models.rank.nodes if with_wildcards(path) == pattern]
            changed = [path for path in fitting if self._is_changed(path)]
            found += changed or fitting
        return found

    def _is_changed(self, path: str) -> bool:
        node, was = self.models.rank.nodes[path], self.models.original.nodes.get(path)
        split = any(placed.placement.startswith("Shard") for placed in self._placed(node))
        return split or was is None or node.cls.__name__ != was.cls.__name__

    def _placed(self, node: Node) -> tuple[Placed, ...]:
        whole = self.models.alone.nodes[node.path].parameters
        found = []
        for name, parameter in node.parameters.items():
            shape, local = tuple(whole[name].shape), tuple(parameter.shape)
            axes = [axis for axis, (a, b) in enumerate(zip(shape, local, strict=True)) if a != b]
            placement = f"Shard({axes[0]})" if axes else "Replicate"
            found.append(Placed(name, shape, local, placement if self.models.world > 1 else ""))
        return tuple(found)

    def _key(self, node: Node) -> Any:
        """What is equal for modules that are listed as one."""
        inner = tuple((name, self._key(child)) for name, child in node.children.items())
        own = tuple(self.applied.get(node.path, ()))
        self.keys[id(node)] = (node.cls, self._was(node), self._placed(node), own, inner)
        return self.keys[id(node)]

    def _was(self, node: Node) -> str | None:
        was = self.models.original.nodes.get(node.path)
        return was.cls.__name__ if was and was.cls.__name__ != node.cls.__name__ else None

    def row(self, first: Node, last: Node, shown: str) -> ModuleRow:
        """The row of a run of modules, by its first one."""
        nodes = [first]
        if first is not last:
            assert first.parent is not None
            numbers = range(int(first.name), int(last.name) + 1)
            nodes = [first.parent.children[str(number)] for number in numbers]
        whole = self._numbers([self.models.alone.nodes[node.path] for node in nodes])
        local = self._numbers(nodes)
        inner = self.keys[id(first)][-1]
        is_repeated = inner in self.told
        self.told |= {inner} if inner else set()
        prefix = f"{shown}." if first.parent is not None else ""
        children = tuple(
            self.row(a, b, prefix + (a.name if a is b else f"[{a.name}-{b.name}]"))
            for a, b in runs(first, self.keys)
        )
        return ModuleRow(
            shown,
            len(nodes),
            first.cls.__name__,
            self._was(first),
            self._placed(first),
            tuple(self.applied.get(first.path, ())),
            sum(numel for numel, _ in whole.values()),
            sum(numel for numel, _ in local.values()),
            sum(size for _, size in local.values()),
            children,
            is_repeated,
        )

    @staticmethod
    def _numbers(nodes: list[Node]) -> Mapping[int, tuple[int, int]]:
        """The parameters at and below some modules, each once: how many numbers, and bytes."""
        parameters = (p for node in nodes for p in node.live.parameters())
        return {id(p): (p.numel(), p.nbytes) for p in parameters}


def call_of(text: str) -> str:
    """A call without what it is called on: `layers["*"].shard("weight", axis=0) -> shard(...)`."""
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:
        return text
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        end = node.func.value.end_col_offset or 0
        return text.encode()[end:].decode().lstrip(". ")
    return text
