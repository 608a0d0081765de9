"""The module tree of an output, with applied primitives and the parameters of a rank."""

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
    shape: tuple[int, ...]  # the full shape
    local: tuple[int, ...]  # the shape on a rank
    placement: str  # `Replicate` or `Shard(AXIS)`; '' on one rank


@dataclass(frozen=True)
class Applied:
    """A primitive or rule that was applied to a module."""

    kind: str  # the primitive, or `rule`
    text: str  # the call, or the rule's name
    line: int | None  # the schedule's line


@dataclass(frozen=True)
class ModuleRow:
    """A module, or several equal neighbours in a list."""

    path: str  # its path, `encoder.layer.[0-5]` for several; the class for the model itself
    count: int  # the number of modules
    cls: str  # its class
    was: str | None  # the original's class, if it is a different one
    parameters: tuple[Placed, ...]  # its own parameters
    applied: tuple[Applied, ...]  # the applied primitives and rules
    whole: int  # the number of parameter elements at and below all of the modules
    local: int  # the same on one rank
    bytes: int  # the bytes of these on one rank
    children: tuple[ModuleRow, ...]  # the rows of its submodules
    is_repeated: bool  # whether its submodules' rows repeat earlier rows

    @property
    def name(self) -> str:
        """The last segment of its path."""
        segments: list[str] = re.findall(r"\[[^]]*\]|[^.]+", self.path)
        return segments[-1]


def module_rows(recorded: Recorded, models: Models) -> ModuleRow:
    """The row of the model, with the rows of all submodules."""
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
        """The paths that match patterns of a record; only the changed ones, if any changed."""
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
        """A key that is equal for modules which share a row."""
        inner = tuple((name, self._key(child)) for name, child in node.children.items())
        own = tuple(self.applied.get(node.path, ()))
        self.keys[id(node)] = (node.cls, self._was(node), self._placed(node), own, inner)
        return self.keys[id(node)]

    def _was(self, node: Node) -> str | None:
        was = self.models.original.nodes.get(node.path)
        return was.cls.__name__ if was and was.cls.__name__ != node.cls.__name__ else None

    def row(self, first: Node, last: Node, shown: str) -> ModuleRow:
        """The row of a run of equal modules."""
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
        """The elements and bytes of each parameter at and below some modules, by `id`."""
        parameters = (p for node in nodes for p in node.live.parameters())
        return {id(p): (p.numel(), p.nbytes) for p in parameters}


def call_of(text: str) -> str:
    """A call without its object: `layers["*"].shard("weight", axis=0) -> shard(...)`."""
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:
        return text
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        end = node.func.value.end_col_offset or 0
        return text.encode()[end:].decode().lstrip(". ")
    return text
