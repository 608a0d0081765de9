"""Joins the live module tree to the source: which expression made each module and parameter."""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from slapo_rewrite import errors
from slapo_rewrite.code.arguments import argument_of, arguments_by
from slapo_rewrite.code.dataflow import names_in, stays_as_it_is
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.text import joined_path
from slapo_rewrite.code.written_out import returned_by
from slapo_rewrite.model import constructed_values, construction_calls
from slapo_rewrite.model.constructed_values import Evaluator, Scene, Unknown
from slapo_rewrite.model.construction_sites import RECORDED, Site
from slapo_rewrite.model.constructor_values import Frame
from slapo_rewrite.model.recorded_sites import recorded_site
from slapo_rewrite.model.site_candidates import (
    REFERENCES,
    Candidate,
    at_assignment,
    can_be_numbered,
    element_of,
    holder_at,
    is_elsewhere,
    is_missed,
    last_certain,
    numbers_at,
    passed_through,
)
from slapo_rewrite.model.sources import Level
from slapo_rewrite.model.sources import Sources as Sources
from slapo_rewrite.model.tree import Node


def find_site(sources: Sources, node: Node) -> Site:
    """The construction site of a module.

    Raises:
        UnfollowableConstruction: No site, or no single one, can be named.
    """
    return _Search(sources).module(node)


def known_site(sources: Sources, node: Node) -> Site | None:
    """The same; None where no site, or no single one, can be named, as of the root."""
    try:
        return find_site(sources, node) if node.parent is not None else None
    except errors.UnfollowableConstruction:
        return None


def find_parameter_site(sources: Sources, node: Node, name: str) -> Site:
    """The expression that makes a parameter or buffer that a class keeps itself.

    Raises:
        UnfollowableConstruction: No site, or no single one, can be named.
    """
    return _Search(sources).parameter(node, name)


def holder_of(site: Site, node: Node) -> tuple[Node, str]:
    """The module whose class holds a module's site, and the module's path from there.

    The owner, unless somebody gave it the module that he had made.
    """
    assert node.owner is not None
    holder = holder_at(node, site) if site.is_given else None
    if holder is None:
        return node.owner, node.relative
    return holder, holder.below(node.path)


def resolve(
    sources: Sources, expr: ast.expr, site: Site, node: Node, remembers: bool = False
) -> object | None:
    """What an expression came to at the site of a module, or of a parameter of it.

    With `remembers` names mean what they meant while the model was built, where the source does not
    tell. None where that cannot be told.
    """
    holder = node if site.kind in ("parameter", "buffer") else holder_at(node, site)
    try:
        return _Search(sources, remembers).value(expr, site, holder, node) if holder else None
    except Unknown:
        return None


def size_at(sources: Sources, expr: ast.expr, site: Site, node: Node) -> int | None:
    """The whole number that an expression came to there; None where it is not known to be one."""
    value = resolve(sources, expr, site, node, remembers=True)
    return value if type(value) is int else None


def looked_up(sources: Sources, node: Node, root: str | None) -> bool:
    """Whether what makes a module looks its class up elsewhere, and would not see another one.

    It sees one where the expression names the class, where the class came in as a value, and where
    the module is a copy of another one. The root is the module that defines what the expression
    begins with, if that is imported.
    """
    site = known_site(sources, node)
    return (
        site is not None
        and root is not None
        and root.partition(".")[0] not in {"torch", *sys.stdlib_module_names}
        and names_in(site.call).isdisjoint(c.__name__ for c in node.cls.__mro__)
        and bool(construction_calls.stack_of(node.live))
    )


def called_root(site: Site) -> str | None:
    """The name that a call begins with: `AutoModel` of `AutoModel.from_config(...)`."""
    root: ast.expr | None = site.callee
    while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
        root = root.func if isinstance(root, ast.Call) else root.value
    return root.id if isinstance(root, ast.Name) else None


class _Search:
    """One search; knows the modules it is in the middle of, so that it ends.

    `remembers` is as for `resolve`.
    """

    def __init__(self, sources: Sources, remembers: bool = False) -> None:
        self.sources, self._remembers = sources, remembers
        self._busy: set[int] = set()

    # Modules --------------------------------------------------------------------------------

    def module(self, node: Node) -> Site:
        known = self.sources.known.get((id(node), ""))
        if known is None:
            known = self.sources.known[id(node), ""] = self._module(node)
        return known

    def _module(self, node: Node) -> Site:
        if id(node) in self._busy:
            raise self._nowhere(node, None)
        self._busy.add(id(node))
        try:
            site, stack = self._followed(node), construction_calls.stack_of(node.live)
            depth = construction_calls.depth(site.file, site.value, stack)
            is_outer = bool(depth) and site.written_out is None
            return (recorded_site(self.sources, node) if is_outer else None) or site
        except errors.UnfollowableConstruction:
            recorded = recorded_site(self.sources, node)
            if recorded is None:
                raise
            return recorded
        finally:
            self._busy.discard(id(node))

    def _followed(self, node: Node) -> Site:
        """The site by what the source says, from the constructors on."""
        groups = itertools.chain(self._groups(node), self._groups(node, later=True))
        chosen = (self._choose(node, group) for group in groups)
        found = next((c for c in chosen if c is not None), None)
        if found is not None and found.site.kind not in REFERENCES:
            return self._inner(found, node)
        return self._made_elsewhere(node, found)

    def _groups(self, node: Node, later: bool = False) -> Iterator[list[Candidate]]:
        """The sites that may have made a module: its owner's, and those of modules further up.

        What a module further up puts in its place runs later, so it comes first.
        """
        for holder, sites in self._sites(node, node.path, node.owner, later):
            found = [c for c in sites if can_be_numbered(c)]
            if holder is not node.owner:
                found = [c for c in found if self._fits(c, node) is not False]
                found = [c for c in found if self._guarded(c)]
            yield found

    def _sites(
        self, node: Node, path: str, owner: Node | None, later: bool
    ) -> Iterator[tuple[Node, list[Candidate]]]:
        """The sites of a path at a module, by the module that has them, the outermost first."""
        itself = [] if node.is_container or path == node.path else [node]
        for holder in reversed([*itself, *node.owners()]):
            maker = self.sources.maker(holder.cls)
            if holder is owner or later or maker.has_deep:
                matched = (maker.later if later else maker).match(holder.below(path))
                yield holder, [Candidate(site, holder, numbers) for site, numbers in matched]

    def _possible(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Those that the tests around them may let make the module."""
        reached = [(c, self._guarded(c)) for c in candidates]
        return [replace(c, certain=g is True) for c, g in reached if g is not False]

    def _choose(self, node: Node, candidates: list[Candidate]) -> Candidate | None:
        if not candidates:
            return None
        made = passed_through(candidates, node)
        if made is not None:
            return made
        fitting = [c for c in candidates if self._fits(c, node) is not False]
        fitting = [c for c in fitting if not is_missed(c, node)]
        if len(fitting) > 1 or (fitting and fitting[0].site.steps):
            possible = self._possible(fitting)
            # A config changed after construction may speak against the one expression that fits.
            exact = [c for c in fitting if self._fits(c, node)]
            fitting = possible or (exact if len(exact) == 1 else [])
        fitting = last_certain(fitting)
        if len(fitting) > 1:
            exact = [c for c in fitting if self._fits(c, node)]
            fitting = exact or fitting
        if len({id(c.site.value) for c in fitting}) > 1:
            raise self._ambiguous(node, fitting)
        return fitting[0] if fitting else None

    def _ambiguous(self, node: Node, candidates: list[Candidate]) -> errors.RewriteError:
        first, *others = [c.site for c in candidates]
        return errors.UnfollowableConstruction(
            f"{node.shown} ({node.cls.__name__}) may be made in {len(candidates)} places",
            at=first.file.at(first.value, "here"),
            also=[s.file.at(s.value, "or here") for s in others],
            hint="make it in one place, or choose between them with a test of `config` or `self`",
        )

    def _fits(self, candidate: Candidate, node: Node) -> bool | None:
        """Whether a site makes a module of this class; None where that cannot be told."""
        site = candidate.site
        if site.callee is None or site.kind in {"helper", "factory"}:
            return None
        try:
            made = self._evaluator(candidate).evaluate(site.callee)
        except Unknown:
            return None
        if not isinstance(made, type):
            return None
        if made is node.cls:
            return True
        return None if issubclass(node.cls, made) and issubclass(made, nn.Module) else False

    def _guarded(self, candidate: Candidate) -> bool | None:
        """Whether the tests around a site let it make this module; None where that is not known."""
        unknown = False
        for step in candidate.site.steps:
            test = getattr(step, "test", None)
            if test is None:
                continue
            way = self._evaluator(candidate, step.frame).truth(test)
            if way is not None and way is not getattr(step, "sense", True):
                return False
            unknown |= way is None
        return None if unknown else True

    def _inner(self, candidate: Candidate, node: Node) -> Site:
        """The site inside a helper function, where one can be named."""
        site = candidate.site
        inner = [replace(candidate, site=s) for s in site.inner if s.kind not in REFERENCES]
        try:
            found = self._choose(node, inner)
        except errors.UnfollowableConstruction:
            found = None
        if found is None:
            # A copy, say, of what the constructor is given.
            given = [replace(candidate, site=s) for s in site.inner if s.kind == "argument"]
            is_one = len(given) == len(site.inner) == 1
            return (self._given(node, given[0], copied=True) if is_one else None) or site
        made = self._inner(found, node)
        if isinstance(site.value, ast.Call) and made.frame.call is site.value:
            written = returned_by(made.function, made.value, made.call, site.value, site.function)
            if written is not None:
                return replace(site, kind="assign", written_out=written)
        return replace(made, kind="helper")

    def _made_elsewhere(self, node: Node, found: Candidate | None) -> Site:
        """The site of a module that is made under another name, or given to the constructor."""
        shared = self.sources.same_live(node)
        if shared and (recorded := recorded_site(self.sources, node)) is not None:
            return recorded  # of the first of the paths; the others are aliases
        for other in shared:
            if id(other) not in self._busy:
                try:
                    site = self.module(other)
                    return replace(site, kind="alias", alias=other.path)
                except errors.UnfollowableConstruction:
                    continue
        copied = self._copied(node)
        if copied is not None and isinstance(copied.value, ast.Call):
            return copied
        if found is not None:
            given = self._given(node, found) or self._global(node, found.site)
            if given is not None:
                return given
        raise self._nowhere(node, found)

    def _given(self, node: Node, found: Candidate, copied: bool = False) -> Site | None:
        """The expression that makes a module in the call of the constructor it is given to.

        `found` is what the module is in the class that keeps it: an argument of the constructor.
        With `copied` each element of a list is a copy of that, and not an element of it.
        """
        if not isinstance(found.site.value, ast.Name) or found.holder.parent is None:
            return None
        try:
            expr, site = self._argument(found.holder, found.site.value.id, found.site)
        except (Unknown, errors.UnfollowableConstruction):
            return None
        outer = holder_at(found.holder, site)
        if outer is None:
            return None
        path = f"{site.path}.{found.site.path}"
        given = replace(site, path=path, kind="argument", value=expr, container=False)
        if path.endswith(".*") and not copied:
            is_kept = stays_as_it_is(found.site.function, found.site.value)
            element = element_of(given, node.name) if is_kept else None
            if element is None or is_elsewhere(element, node):
                return None
            given = element
        given = at_assignment(given)
        called = Candidate(given, outer, numbers_at(site, outer, found.holder))
        makes = isinstance(given.value, ast.Call | ast.Subscript)
        return given if makes and self._fits(called, node) is not False else None

    def _copied(self, node: Node) -> Site | None:
        """The expression that makes what a stack of torch is given and makes copies of."""
        parent = node.parent
        if parent is None:
            return None
        stack, name = parent, node.name
        if parent.is_container and parent.parent is not None:
            stack, name = parent.parent, f"{parent.name}.*"
        if not stack.is_stack:
            return None
        site = self.module(stack)
        if not isinstance(site.call, ast.Call) or site.partial is not None:
            return None
        layer = next(iter(inspect.signature(stack.cls).parameters))
        given = arguments_by(site.call, *inspect.signature(stack.cls).parameters)
        expr = given.get(layer if name.endswith(".*") else name)
        if expr is None:
            return None
        return at_assignment(replace(site, path=f"{site.path}.{name}", value=expr, container=False))

    def _global(self, node: Node, site: Site) -> Site | None:
        """The module-level assignment of a module that is made once, at import."""
        name = site.file.qualified(site.value)
        home, _, attribute = (name or "").rpartition(".")
        if vars(sys.modules.get(home, object)).get(attribute) is not node.live:
            return None
        file = self.sources.file_named(home)
        for statement in file.tree.body if file else ():
            match statement:
                case ast.Assign(targets=[ast.Name(id=target)]) if target == attribute:
                    assert file is not None
                    value = statement.value
                    return replace(site, file=file, statement=statement, value=value, steps=())
        return None

    def _nowhere(self, node: Node, found: Candidate | None) -> errors.RewriteError:
        owner = node.owner
        near = self.sources.maker(owner.cls).near(node.relative) if owner else []
        named = found.site if found is not None else near[-1] if near else None
        places = [construction_calls.place(construction_calls.stack_of(node.live))]
        places.append(named.file.at(named.value, "named here") if named else None)
        if places == [None, None] and owner is not None:
            places += [f.at(f.classes[name]) for f, name in self.sources.classes(owner.cls)[:1]]
        known = [p for p in places if p is not None]
        return errors.UnfollowableConstruction(
            f"nothing that can be followed makes {node.shown} ({node.cls.__name__})",
            at=known[0] if known else None,
            also=known[1:],
            hint="make it in `__init__` of the class that uses it: `self.name = Class(...)`",
        )

    # Parameters -----------------------------------------------------------------------------

    def parameter(self, node: Node, name: str) -> Site:
        key = (id(node), name)
        if key not in self.sources.known:
            self.sources.known[key] = self._parameter(node, name)
        return self.sources.known[key]

    def _parameter(self, node: Node, name: str) -> Site:
        full = joined_path(node.path, name)
        direct = node.owner if node.is_container else node
        for later in (False, True):
            for holder, sites in self._sites(node, full, direct, later):
                possible = last_certain(self._possible(sites))
                if len({id(c.site.value) for c in possible}) > 1:
                    raise self._ambiguous(holder, possible)
                if possible:
                    return possible[0].site
        raise errors.UnfollowableConstruction(
            f"nothing in the source makes the parameter `{full}` of {node.cls.__name__}",
            hint="make it in `__init__`: `self.name = nn.Parameter(...)`",
        )

    # Values ---------------------------------------------------------------------------------

    def value(self, expr: ast.expr, site: Site, holder: Node, node: Node) -> Any:
        """What an expression at a site came to when it made `node`; raises Unknown."""
        candidate = Candidate(site, holder, numbers_at(site, holder, node))
        evaluator = self._evaluator(candidate)
        if site.kind == RECORDED:  # the arguments of its function are not those of the holder
            return evaluator.evaluate(expr, construction_calls.scope_of(node.live, 0) or {})
        try:
            return evaluator.evaluate(expr)
        except Unknown:
            names = construction_calls.scope_at(site.file, site.value, node.live)
            if names is None or not self._remembers:
                raise
            return evaluator.evaluate(expr, names)

    def _evaluator(self, candidate: Candidate, frame: Frame | None = None) -> Evaluator:
        site, holder = candidate.site, candidate.holder
        maker = self.sources.maker(holder.cls)
        level = maker.levels[maker.level_of[site]] if site in maker.level_of else None
        numbers = [int(n) for n in candidate.numbers if n.isdecimal()]
        scene = self._scene(holder, site.file, frame or site.frame, level)
        elements = constructed_values.iterations(site.loops, numbers)
        hidden = frozenset({site.path.partition(".")[0]})
        return Evaluator(replace(scene, elements=elements, hidden=hidden))

    def _scene(self, holder: Node, file: SourceFile, frame: Frame, level: Level | None) -> Scene:
        """A function as it ran for a module, in the constructor of one of its classes if any."""
        argument = partial(self._argument_value, holder, level)
        stored = self.sources.maker(holder.cls).stored(level) if level else {}
        return Scene(holder.live, file, frame, argument, stored)

    def _argument_value(self, holder: Node, level: Level | None, name: str) -> Any:
        """What a parameter of a constructor was given."""
        if level is not None and level.call is not None and level.frame is not None:
            maker = self.sources.maker(holder.cls)
            outer = maker.levels[maker.levels.index(level) - 1]
            assert level.function is not None
            given = argument_of(level.function, level.call, name)
            if given is None:
                raise Unknown
            return Evaluator(self._scene(holder, outer.file, level.frame, outer)).evaluate(given)
        if holder.parent is None:
            raise Unknown
        try:
            expr, site = self._argument(holder, name, None)
        except errors.UnfollowableConstruction as error:
            raise Unknown from error
        if isinstance(expr, ast.Constant):
            return expr.value
        outer_holder = holder_at(holder, site)
        if outer_holder is None:
            raise Unknown
        return self.value(expr, site, outer_holder, holder)

    def _argument(self, holder: Node, name: str, within: Site | None) -> tuple[ast.expr, Site]:
        """The expression that a constructor's parameter was given, and the call's site."""
        if id(holder) in self._busy:
            raise Unknown
        maker = self.sources.maker(holder.cls)
        if within is not None and maker.level_of.get(within):
            raise Unknown  # behind a call of `super().__init__`
        site = self.module(holder)
        constructor = maker.constructor
        if constructor is None or not isinstance(site.call, ast.Call) or site.partial is not None:
            raise Unknown
        given = argument_of(constructor, site.call, name)
        if given is None:
            raise Unknown
        return given, site
