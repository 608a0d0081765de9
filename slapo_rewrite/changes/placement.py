"""Finds the class and file for changes of a module, and defines requested changes."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from slapo_rewrite import errors
from slapo_rewrite.changes.change import Change
from slapo_rewrite.changes.change_set import own_copy
from slapo_rewrite.changes.class_hierarchy import ClassHierarchy
from slapo_rewrite.changes.output_files import OutputFile, OutputFiles
from slapo_rewrite.changes.places import AtNode, AtParameter, BehindSite
from slapo_rewrite.changes.state import ModuleRequests
from slapo_rewrite.code.subgraphs import Calls, called_names, find_calls
from slapo_rewrite.code.syntax import extent
from slapo_rewrite.code.text import Place
from slapo_rewrite.directive import Causes, Directive, merged_causes
from slapo_rewrite.model.join import find_parameter_site
from slapo_rewrite.model.tree import Node, Tree
from slapo_rewrite.sharding.types import ShardingResult


@dataclass(frozen=True)
class Subgraph:
    """A part of a `forward`, selected by the calls in it."""

    calls: tuple[str, ...] | str  # the called names, or a regular expression for them
    # The name of a method with these statements; None lets the tool choose.
    name: str | None = None


@dataclass(frozen=True)
class Placement:
    """Finds the class and the file for the requests of a module."""

    tree: Tree  # the module tree
    states: Mapping[str, ModuleRequests]  # the requests, by module path
    files: OutputFiles  # the files that may be rewritten; collect the changes
    followed: ShardingResult  # the result of the sharding analysis

    def causes(self, node: Node) -> Causes:
        """The directives that shard a module's parameters or add collectives at its border."""
        state = self.states[node.path]
        return merged_causes((s.cause for s in state.shards), (s.cause for s in state.syncs))

    def caller(self, node: Node) -> tuple[Node, str]:
        """The module whose methods call a module, and the path from it to the module."""
        assert node.owner is not None
        caller, relative = node.owner, node.relative
        while caller.owner and (state := self.states.get(caller.path)) and state.inlined:
            caller, relative = caller.owner, f"{caller.relative}.{relative}"
        return caller, relative

    def calling(self, node: Node) -> tuple[OutputFile, Node, str]:
        """Likewise, after the caller's file; raises if the module has several callers."""
        caller, relative = self.caller(node)
        for other in self.tree.nodes.values():
            if other.live is node.live and other is not node:
                outer, name = self.caller(other)
                if outer.live is not caller.live or name != relative:
                    raise errors.Unsupported(
                        f"{node.shown} is also {other.shown}, and the change goes to the calls of "
                        f"`self.{relative}` only",
                        at=self.states[node.path].causes()[0].at,
                        hint="put it on a module around the calls, or call the module by one name",
                    )
        return self.files.computing(caller.cls) or self.home(caller), caller, relative

    def home(self, node: Node) -> OutputFile:
        """The file for changes of a module's class; for a foreign class, that of its subclass."""
        return self.files.of(node.cls) or self.files.making(node)

    def around_forward(self, node: Node) -> OutputFile:
        """The file for wrappers of `forward` as a whole.

        A replacement, or a class of another file, is wrapped at its construction site.
        """
        home = self.home(node)
        if self.states[node.path].replacement or self.files.is_other(home):
            return self.files.making(node)
        return home

    def is_outside(self, node: Node, home: OutputFile) -> bool:
        """Whether a change goes to the call or construction site in another file.

        This holds for classes of files other than the model's and the schedule's, unless a request
        needs changes inside of the class.
        """
        if node.owner is None or not self.files.is_other(home):
            return False
        if self.files.computing(self.caller(node)[0].cls) is home:
            return False
        below = f"{node.path}."
        return not self.states[node.path].shards and not any(
            path.startswith(below) and state.causes() for path, state in self.states.items()
        )

    def add_to_region(self, node: Node, part: Subgraph, change: Change, cause: Directive) -> None:
        """Adds a change of a part of a method."""
        home = self.files.computing(node.cls)
        if home is None:
            raise errors.Unsupported(
                f"{node.shown} is a {node.cls.__module__}.{node.cls.__qualname__}: it has no "
                "`forward` that can be rewritten in part",
                at=cause.at,
                hint="define each of its methods once, unconditionally"
                if node.cls.__module__ == self.files.main.file.name
                else own_copy(node.cls.__name__, self.files.main.file),
            )
        calls = find_subgraph(home.classes, node.cls.__name__, part, cause)
        place = AtNode(type(change).__name__, extent(calls.run[0]), part)
        home.changes.add(node.path, place, change, (cause,))

    def add_behind_parameter(
        self, node: Node, name: str, what: str, change: Change, cause: Directive
    ) -> None:
        """Adds a line after the construction of a parameter, or of the module that owns it."""
        home = self.files.of(node.cls)
        replaced = self.states[node.path].replacement is not None
        if home is not None and not replaced and not self.is_outside(node, home):
            site = find_parameter_site(self.files.sources, node, name)
            home = self.files.of_file(site.file)
            if site.file is home.file:
                start = home.file.span(site.value)[0]
                home.changes.sites[start] = site
                home.changes.add(node.path, AtParameter(start, (name, what)), change, (cause,))
                return
        if node.owner is None:
            raise errors.Unsupported(
                f"`{name}` of the model itself is created in another file",
                at=cause.at,
                hint=f"copy the class that creates it into {self.files.main.file.path.name}",
            )
        changes = self.files.making(node).changes
        at, owner = changes.site(node, (cause,))
        for each in changes.alike(at, node):
            behind = BehindSite(each.start, each.index, (name, what))
            changes.add(owner.path, behind, change, (cause,))


class Requested(Change):
    """A change that a schedule requests directly; other changes follow from sharding."""

    is_called: ClassVar[bool] = True  # whether it takes effect when the module is called

    def place(self, to: Placement, node: Node, cause: Directive) -> None:
        """Adds the change at its place."""
        raise NotImplementedError


def at_node(kind: str, place: Place, what: object = ()) -> AtNode:
    """A place that a run of the model recorded, as a place in a class."""
    return AtNode(kind, place.at, what)


def find_subgraph(
    classes: ClassHierarchy, class_name: str, part: Subgraph, cause: Directive
) -> Calls:
    """The statements of a part, in the one method of a class that makes its calls."""
    file = classes.file
    methods: dict[str, ast.FunctionDef] = {}
    for method in classes.methods(class_name):
        if method.name != "__init__":
            methods.setdefault(method.name, method)
    found = [c for m in methods.values() if (c := find_calls(m, part.calls)) is not None]
    known = [name for method in methods.values() for name, _ in called_names(method)]
    wanted = part.calls if isinstance(part.calls, tuple) else ()
    missing = [name for name in wanted if name not in known]
    if missing or not found:
        called = missing[0] if missing else str(part.calls)
        what = f"calls `{called}`" if missing else f"calls anything that matches `{called}`"
        of_self = [name for name in known if name not in classes.file.names]
        raise errors.UnknownPath(
            f"no method of `{class_name}` {what}",
            at=cause.at,
            also=[file.at(methods["forward"])] if "forward" in methods else [],
            hint=errors.did_you_mean(called, of_self),
        )
    if len(found) > 1:
        first, second = found[:2]
        raise errors.Unsupported(
            f"the calls are in several methods of `{class_name}`",
            at=cause.at,
            also=[file.at(first.calls[0]), file.at(second.calls[0])],
            hint=f"name only those of `{first.method.name}` or those of `{second.method.name}`",
        )
    return found[0]
