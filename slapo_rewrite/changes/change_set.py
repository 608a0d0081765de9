"""Collects the changes of classes by place, and finds construction sites of modules."""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from slapo_rewrite import errors
from slapo_rewrite.changes.change import Change
from slapo_rewrite.changes.construction import ReplaceModule, UseParallelLayer, UseSubclass
from slapo_rewrite.changes.elements import ElementList, IndexSets
from slapo_rewrite.changes.places import AtSite, Place
from slapo_rewrite.code.dataflow import uses_of
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.directive import Causes, Directive, merged_causes
from slapo_rewrite.model.auto_classes import lookup_of
from slapo_rewrite.model.construction_sites import RECORDED, Site
from slapo_rewrite.model.join import (
    Sources,
    find_site,
    given_partial,
    holder_of,
    known_site,
    resolve,
    size_at,
)
from slapo_rewrite.model.layers import Layer
from slapo_rewrite.model.tree import Node, Tree

# Modules with their construction sites, by the path of the module whose class has the site.
Held = dict[str, list[tuple[Node, Site]]]


@dataclass
class ChangeSet:
    """The changes collected so far for one file."""

    sources: Sources  # the source files
    file: SourceFile
    # The names of the list elements that an element stands in for, itself included, by its path.
    siblings: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # Equal directives for those elements, by the number of the representative's directive.
    same: dict[int, dict[int, Directive]] = field(default_factory=dict)
    # Construction sites, by the offset of the first character of their expression.
    sites: dict[int, Site] = field(default_factory=dict)
    # The elements that each site in a loop makes.
    indices: IndexSets = field(default_factory=IndexSets)
    # The changes, by the path of the module whose class they change, and by place.
    by_path: dict[str, dict[Place, Change]] = field(default_factory=dict)
    # The directives behind each change.
    causes: dict[str, dict[Place, Causes]] = field(default_factory=dict)
    # The change of each module that a site constructs, by the owner's path and the site.
    made: dict[tuple[str, AtSite], dict[str, Change]] = field(default_factory=dict)

    def add(self, path: str, place: Place, change: Change, causes: Causes) -> None:
        """Adds a change, and its causes to those of the place."""
        self.by_path.setdefault(path, {})[place] = change
        known = self.causes.setdefault(path, {})
        same = (self.same[c.number].values() for c in causes if c.number in self.same)
        known[place] = merged_causes(known.get(place, ()), causes, *same)

    def site(self, node: Node, causes: Causes) -> tuple[AtSite, Node]:
        """The construction site of a module, and the module whose class has the site."""
        try:
            site = find_site(self.sources, node)
        except errors.RewriteError as error:
            error.also = (*error.also, *(c.at for c in causes[:1] if c.at))
            raise
        if site.file is not self.file:
            raise errors.UnfollowableConstruction(
                f"{node.shown} is constructed in another file, {site.file.display}",
                at=site.file.at(site.value),
                cause=causes,
                hint=own_copy(site.class_name, self.file)
                if stands_in_its_class(site)
                else f"construct it in {self.file.path.name}: a call of its class for each",
            )
        return self.note(site, node), holder_of(site, node)[0]

    def note(self, site: Site, node: Node) -> AtSite:
        """Records a construction site; returns the place in it that constructs the module."""
        start = self.file.span(site.value)[0]
        self.sites[start] = site
        # The path that a site outside of loops assigns to may differ between instances.
        relative = holder_of(site, node)[1]
        index = _index(site.path, relative)
        for each in self._indices(site, node) if index else (index,):
            self.indices.add(start, each)
        _, *around = node.outwards()
        lists = (n for n in around if index.isdecimal() and _is_list(n, site))
        if (holder := next(lists, None)) is not None:
            length = len(list(holder.live.children()))
            counted = functools.partial(_counted, site, node)
            self.indices.add_list(start, ElementList(holder.path, length, counted))
        return AtSite(start, index)

    def alike(self, place: AtSite, node: Node) -> list[AtSite]:
        """The place of a module, and those of the elements that it stands in for."""
        if not place.index:
            return [place]
        site = self.sites[place.start]
        return [AtSite(place.start, index) for index in self._indices(site, node)]

    def _indices(self, site: Site, node: Node) -> list[str]:
        """The indices of a module, and of those that it or a list element above stands in for."""
        names = []
        relative = holder_of(site, node)[1]
        path = node.path[: len(node.path) - len(relative)]
        for want, have in zip(site.path.split("."), relative.split("."), strict=False):
            path += have
            if want == "*":
                names.append(self.siblings.get(path, (have,)))
            path += "."
        return [".".join(index) for index in itertools.product(*names)]

    def place_of(self, node: Node) -> AtSite | None:
        """The construction site of a module, if it is known and in this file."""
        site = known_site(self.sources, node)
        return self.note(site, node) if site is not None and site.file is self.file else None

    def made_at(self, node: Node, at: AtSite) -> Change | None:
        """The change at a module's construction site that was added so far, if any."""
        holder = holder_of(self.sites[at.start], node)[0]
        return self.by_path.get(holder.path, {}).get(at)

    def at_site(self, node: Node, what: Change, causes: Causes) -> None:
        """Adds a change to the construction site of a module."""
        if node.owner is None:
            raise errors.Unsupported(
                "the model itself is not made by another module",
                at=causes[0].at if causes else None,
            )
        at, owner = self.site(node, causes)
        site = self.sites[at.start]
        held = given_partial(site, node)
        named = self.name_of(held.func, site, node) if held is not None else ""
        if isinstance(what, UseParallelLayer | UseSubclass) and named:
            what = replace(what, given=named, of_partial=True)
        if isinstance(what, UseParallelLayer):
            # What stands in the call tells sizes by their place.
            if not named or held is None or held.args:
                self._check_callee(site, node, causes)
            self._check_arguments(site, what.layer, held.keywords if held else (), causes)
        if isinstance(what, UseSubclass) and not named:
            what = replace(what, lookup=lookup_of(site, node))
            is_made = bool(what.same_state) and site.kind != "alias"
            what = replace(what, recast=is_made and not self.names_class(site, node))
            if what.lookup is None and not what.recast:
                self._check_class(site, node, causes)
        called = ast.walk(site.callee or ast.Pass()) if isinstance(what, ReplaceModule) else ()
        if any(isinstance(n, ast.Call | ast.IfExp) for n in called):
            self._check_class(site, node, causes)
        if isinstance(what, ReplaceModule | UseParallelLayer | UseSubclass) and not named:
            what = replace(what, given=self._value_called(site, node, what))
        self.made.setdefault((owner.path, at), {})[node.path] = what
        for place in self.alike(at, node):
            self.add(owner.path, place, what, causes)

    def _check_callee(self, site: Site, node: Node, causes: Causes) -> None:
        """Raises unless the site calls the layer's class: only its arguments are known."""
        called = self.class_called(site, node)
        if called is not None and called is not getattr(site.callee, "value", None):
            return
        raise errors.UnfollowableConstruction(
            f"{node.shown} is a {node.cls.__name__}, but no call of that class constructs it",
            at=self.file.at(site.value),
            cause=causes,
            hint=f"write the construction out: self.{site.path} = nn.{node.cls.__name__}(...)",
        )

    def class_called(self, site: Site, node: Node) -> ast.expr | None:
        """The expression that names a module's class at its site, if it calls it or its method."""
        made = site.partial
        names = (
            [site.callee, getattr(site.callee, "value", None)] if made is None else made.args[:1]
        )
        for named in names:
            if not isinstance(named, ast.Name | ast.Attribute | ast.Subscript):
                continue
            live = resolve(named, site, node)
            name = self.file.qualified(named) or ""
            # If the source was changed, the class is a new one with the same name.
            same = live is None or (isinstance(live, type) and live.__name__ == node.cls.__name__)
            if live is node.cls or (same and name.rpartition(".")[2] == node.cls.__name__):
                return named
        return None

    def _check_class(self, site: Site, node: Node, causes: Causes) -> None:
        """Raises unless the site calls the class itself, which a subclass can replace."""
        if self.names_class(site, node):
            return
        raise errors.UnfollowableConstruction(
            f"{node.shown} may be of another class: this call does not name the class itself",
            at=self.file.at(site.value),
            cause=causes,
            hint="call the class by its name, or through a variable that holds only this class",
        )

    def names_class(self, site: Site, node: Node) -> bool:
        """Whether another class can be named there, or where the variable that it calls is set."""
        named = any(uses_of(statement, node.cls.__name__) for statement in site.variable)
        return named or site.callee is None or self.class_called(site, node) is not None

    def name_of(self, cls: object, site: Site, node: Node) -> str:
        """The name of a class at the top level of the file; "" if the file does not name it."""
        for name in self.file.names:
            for expr in (
                ast.Name(name),
                ast.Attribute(ast.Name(name), getattr(cls, "__name__", "")),
            ):
                if resolve(expr, site, node) is cls:
                    return ast.unparse(expr)
        return ""

    def _value_called(self, site: Site, node: Node, what: Change) -> str:
        """The name of the class that the called value is; "" if the call names it."""
        called = site.callee
        if not isinstance(called, ast.Name | ast.Attribute | ast.Subscript) or any(
            isinstance(n, ast.Call | ast.NamedExpr) for n in ast.walk(called)
        ):
            return ""
        bound: list[ast.expr] = [s.value for s in site.variable if isinstance(s, ast.Assign)]
        names = (self.file.qualified(each) or "" for each in bound or [called])
        cls = resolve(called, site, node)
        if not isinstance(cls, type) or all(n.rpartition(".")[2] == cls.__name__ for n in names):
            return ""
        is_other = isinstance(what, UseSubclass) and (what.lookup or cls is not node.cls)
        return "" if is_other else self.name_of(cls, site, node)

    def _check_arguments(
        self, site: Site, layer: Layer, further: Collection[str], causes: Causes
    ) -> None:
        """Raises for constructor arguments that the sharded layer does not support."""
        if not layer.arguments or not isinstance(site.call, ast.Call):
            return
        for name in (*(keyword.arg for keyword in site.arguments[1]), *further):
            if name is not None and name not in layer.arguments:
                raise errors.Unsupported(
                    f"a sharded layer does not take the argument `{name}`",
                    at=self.file.at(site.value),
                    cause=causes,
                    hint=f"{layer.name} takes {', '.join(layer.arguments)}",
                )


def held(sources: Sources, tree: Tree) -> Held:
    """The modules with known construction sites, by the path of the site's owner."""
    found: Held = {}
    for node in tree.nodes.values():
        if (site := known_site(sources, node)) is not None:
            found.setdefault(holder_of(site, node)[0].path, []).append((node, site))
    return found


def _index(pattern: str, path: str) -> str:
    """The parts of a path that match the `*`s of its pattern."""
    steps = zip(pattern.split("."), path.split("."), strict=False)
    return ".".join(have for want, have in steps if want == "*")


def _counted(site: Site, node: Node) -> int | None:
    """The value of the expression for the number of elements, for the list of a module."""
    return None if site.count is None else size_at(site.count, site, node)


def _is_list(node: Node, site: Site) -> bool:
    """Whether a module is the list whose elements, or parts of them, a site constructs."""
    return node.is_container and f".{node.path}".endswith("." + site.path.partition(".*")[0])


def own_copy(name: str, into: SourceFile) -> str:
    """The hint where a class of another file would have to change."""
    return f"copy class `{name}` into {into.path.name}, and use the copy there"


def stands_in_its_class(site: Site) -> bool:
    """Whether a construction site is in a class, and not in a function."""
    return site.kind != RECORDED
