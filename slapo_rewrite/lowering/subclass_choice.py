"""Subclasses for instances that need more changes than their class."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.changes.add_bias import AddBias
from slapo_rewrite.changes.around_forward import WRAPPERS, ForkRandom, Recompute
from slapo_rewrite.changes.border_syncs import SyncInput, SyncOutput
from slapo_rewrite.changes.change import Change
from slapo_rewrite.changes.change_set import ChangeSet, Held
from slapo_rewrite.changes.class_writer import ClassWriter, Subclass
from slapo_rewrite.changes.collective import described
from slapo_rewrite.changes.construction import ReplaceModule, UseParallelLayer, UseSubclass
from slapo_rewrite.changes.definition import Definition
from slapo_rewrite.changes.imports import Function, Imports
from slapo_rewrite.changes.output_files import OutputFiles
from slapo_rewrite.changes.parameter_attributes import Annotate
from slapo_rewrite.changes.places import AtBase, AtSite, Place
from slapo_rewrite.changes.pretrained import LIBRARY, is_of_library, is_pretrained
from slapo_rewrite.changes.regions import ForkRegion, RecomputeRegion
from slapo_rewrite.changes.replace_statement import ReplaceStatement
from slapo_rewrite.code.dataflow import names_in
from slapo_rewrite.code.names import unique
from slapo_rewrite.code.runs import above, apart, behind
from slapo_rewrite.code.splice import Edit
from slapo_rewrite.code.text import listed, with_article, within
from slapo_rewrite.directive import Causes, merged_causes
from slapo_rewrite.model.auto_classes import lookup_of
from slapo_rewrite.model.construction_sites import Site
from slapo_rewrite.model.join import find_site
from slapo_rewrite.model.tree import Node

# The docstring of a subclass with several changes of these kinds lists them one by one.
_TOLD = (RecomputeRegion, ForkRegion, Annotate, AddBias)


# Wrappers of `forward` with their directives, the inner one first.
_Wrappers = Sequence[tuple[Change, Causes]]


class SubclassChoice:
    """Writes and names subclasses, and makes construction sites select them.

    `held` has modules with their construction sites, by the path of the site's owner.
    """

    def __init__(
        self,
        changes: ChangeSet,
        writer: ClassWriter,
        imports: Imports,
        files: OutputFiles,
        held: Held,
    ) -> None:
        self.changes, self.writer, self.imports, self.file = changes, writer, imports, changes.file
        self.files, self.held = files, held
        self.class_names: set[str] = set()
        self.known: dict[Any, str] = {}

    def specialise(self, cls: type, definition: Definition, extra: set[Place]) -> list[Edit]:
        """Writes a subclass for instances that need the `extra` changes."""
        if not extra:
            return []
        every = merged_causes(*(definition.causes[k] for k in extra))
        self._check_own(cls, definition, extra)
        edits: list[Edit] = []
        name = cls.__name__
        beyond = extra - set(WRAPPERS)
        wrappers = [
            (definition.changes[key], definition.causes[key]) for key in WRAPPERS if key in extra
        ]
        if not beyond:
            definition.nodes = [
                n for n in definition.nodes if not self._wrapped_other(n, wrappers, edits)
            ]
            if not definition.nodes:
                return edits
        if cls.__name__ not in self.file.classes:
            raise self._unnamed(definition.nodes[0], every)
        put = functools.partial(self._class_after, cls.__name__)
        if beyond:
            variant = (cls, frozenset((k, definition.changes[k]) for k in beyond))
            name = self.known.get(variant, "")
            if not name:
                causes = merged_causes(*(definition.causes.get(k, ()) for k in beyond))
                self._check_base(cls, definition, beyond)
                prefix, doc = self._described(definition, beyond)
                name = self.known[variant] = self._new_name(f"{prefix}{cls.__name__}")
                doc = f"{with_article(cls.__name__)} {doc}."
                new = Subclass(cls.__name__, name, doc, *self._relatives(definition))
                text = self.writer.subclass(new, definition, beyond, self.changes.indices)
                edits += put(text, causes, f"`{name}`, for some instances")
        name = self._wrapped(cls, cls.__name__, name, wrappers, put, edits)
        self._rename(definition.nodes, name, cls.__name__, every, "" if beyond else cls.__name__)
        return edits

    def of_foreign(self, cls: type, nodes: list[Node]) -> list[Edit]:
        """Writes a wrapper of a class of another file, before the class that constructs it."""
        edits: list[Edit] = []
        wanted = []
        for node in nodes:
            changes = self.changes.by_path.get(node.path, {})
            wrappers = [
                (changes[key], self.changes.causes[node.path][key])
                for key in WRAPPERS
                if key in changes
            ]
            if not wrappers or self._wrapped_other(node, wrappers, edits):
                continue
            every = merged_causes(*(causes for _, causes in wrappers))
            at, _ = self.changes.site(node, every)
            made = self.changes.made_at(node, at)
            wanted.append((node, wrappers, every, at, made))
        # Several modules may share a site: read what it constructs for all before changing it.
        for node, wrappers, every, at, made in wanted:
            site = self.changes.sites[at.start]
            called = self.changes.class_called(site, node)
            known: object = cls
            here = self.changes.sources.file_named(cls.__module__) is self.file
            if isinstance(made, UseSubclass):  # its own file has already specialised the class
                known = name = made.reference(self.imports, every)
            elif called is not None and self.file.qualified(called) and not here:
                name = ast.unparse(called)
            elif (named := self.changes.name_of(cls, site, node)) and not here:
                name = named
            elif lookup_of(site, node) or not (here or self.changes.names_class(site, node)):
                name = self.imports.function(Function(cls.__name__, cls.__module__), every)
            elif site.callee is None and not here:
                name = cls.__name__
            else:
                raise self._unnamed(node, every)
            mixed = ""
            if known is cls and is_pretrained(cls) and is_of_library(cls):
                mixed = f"{self.imports.helper('pretrained', LIBRARY, every)}, "
            put = functools.partial(self._class_before, site)
            same = name
            name = self._wrapped(known, cls.__name__, name, wrappers, put, edits, mixed)
            self._rename([node], name, cls.__name__, every, same)
        return edits

    def _unnamed(self, node: Node, causes: Causes) -> errors.UnfollowableConstruction:
        """The error for a class that has no name here from which a subclass could derive."""
        name = node.cls.__name__
        return errors.UnfollowableConstruction(
            f"{node.shown} needs a subclass of `{name}`, which this file does not define or "
            "import exactly once at the top level",
            at=self.file.at(self.changes.sites[self.changes.site(node, causes)[0].start].value),
            cause=causes,
            hint=f"define or import `{name}` there and write the construction out: {name}(...)",
        )

    def _wrapped(
        self,
        base: object,
        class_name: str,
        shown: str,
        wrappers: _Wrappers,
        put: Callable[[str, Causes, str], list[Edit]],
        edits: list[Edit],
        mixed: str = "",
    ) -> str:
        """The name of the subclass that wraps a class's `forward`; written once."""
        for what, causes in wrappers:
            own = shown.rpartition(".")[2]
            key = (base, own, what)
            if key not in self.known:
                fork = isinstance(what, ForkRandom)
                name = self.known[key] = self._new_name(
                    f"{'Forked' if fork else 'Checkpointed'}{own}"
                )
                if isinstance(what, Recompute):
                    text = self.writer.recomputing(class_name, name, shown, mixed, what, causes)
                else:
                    text = self.writer.forking(name, shown, mixed, causes)
                why = " with random numbers of this rank" if fork else ", checkpointed"
                edits += put(text, causes, f"`{shown}`{why}")
            shown, mixed = self.known[key], ""
        return shown

    def _relatives(self, definition: Definition) -> tuple[dict[int, str], set[int]]:
        """The paths that sites outside of loops assign to, and the sites some instances skip."""
        made: dict[int, list[Node]] = {}
        for node in definition.nodes:
            for child, site in self.held.get(node.path, ()):
                if site.file is self.file and not site.loops and not site.is_given:
                    made.setdefault(self.file.span(site.value)[0], []).append(child)
        few = {start for start, own in made.items() if len(own) < len(definition.nodes)}
        return {start: self._common_place(own) for start, own in made.items()}, few

    def _common_place(self, children: list[Node]) -> str:
        """The path that one site assigns these modules to, from a list's end if need be."""
        for place in (lambda c: c.relative, _from_end):
            first, *others = dict.fromkeys(map(place, children))
            if first and not others:
                return str(first)
        one = children[0]
        other = next(c for c in children if c.relative != one.relative)
        assert other.owner is not None
        raise errors.UnfollowableConstruction(
            f"{other.shown} is constructed here, and so is `{one.relative}` of another "
            f"`{other.owner.cls.__name__}`",
            at=self.file.at(find_site(self.changes.sources, one).value),
            hint="schedule all instances alike",
        )

    def _check_own(self, cls: type, definition: Definition, extra: set[Place]) -> None:
        """Raises if a changed module is an argument of another module's constructor.

        A subclass repeats constructions of its class only. A module made outside of the class is
        not constructed there, and one already passed to another module would stay the old one.
        """
        changed = {at.start for _, at in self.changes.made}
        given = [s for n, s in self.changes.sites.items() if s.is_given and n in changed]
        for place in extra:
            site = self.changes.sites[place.start] if isinstance(place, AtSite) else None
            if site is not None and any(other.function is site.function for other in given):
                raise errors.UnfollowableConstruction(
                    f"instances of `{cls.__name__}` differ, but a module constructed here is "
                    "scheduled and also passed to another module",
                    at=self.file.at(site.value),
                    cause=definition.causes[place],
                    hint="schedule all instances alike",
                )

    def _check_base(self, cls: type, definition: Definition, extra: set[Place]) -> None:
        if AtBase() in extra:
            raise errors.Unsupported(
                f"only some instances of `{cls.__name__}` are split, but a class has one base",
                at=definition.causes[AtBase()][0].at,
                hint="schedule all instances alike",
            )

    def _described(self, definition: Definition, extra: set[Place]) -> tuple[str, str]:
        """The prefix of a subclass's name, and the phrase about its instances in the docstring."""
        wanted = [definition.changes[k] for k in extra]
        made = sorted({w.name for w in wanted if isinstance(w, UseSubclass)})
        syncs = [w for w in wanted if isinstance(w, (SyncInput, SyncOutput))]
        if len(syncs) == len(wanted):
            syncs.sort(key=lambda w: isinstance(w, SyncOutput))
            return described([(w.side, w.collectives) for w in syncs])
        texts = sorted({w.what for w in wanted if isinstance(w, ReplaceStatement)})
        if all(isinstance(w, ReplaceStatement) for w in wanted):
            return "Fused", f"with {listed(texts)} applied"
        kinds = {(w.prefix, w.says) for w in wanted}
        if len(kinds) == 1 and not any(isinstance(w, (UseSubclass, ReplaceModule)) for w in wanted):
            return kinds.pop()
        if any(w.is_parallel for w in wanted) or any(n.startswith("TensorParallel") for n in made):
            return Change.prefix, Change.says
        if made:
            prefix = "Fused" if all(n.startswith("Fused") for n in made) else "Scheduled"
            return prefix, f"made of {listed(made)}"
        told = [k for k in _TOLD if any(isinstance(w, k) for w in wanted)]
        if all(isinstance(w, _TOLD) for w in wanted):
            return "Scheduled", ", ".join(kind.says for kind in told)
        others = sorted({w.target.name for w in wanted if isinstance(w, ReplaceModule)})
        return "Scheduled", f"made of {listed(others)}"

    def _new_name(self, name: str) -> str:
        new = unique(name, {*self.class_names, *self.file.names}.__contains__)
        self.class_names.add(new)
        return new

    def _class_after(self, class_name: str, text: str, causes: Causes, why: str) -> list[Edit]:
        base = self.file.classes[class_name]
        placed = [behind(self.file, base, text, 2), *apart(self.file, base, 2)]
        return [each.caused_by(causes, why) for each in placed]

    def _check_super(self, cls: type, causes: Causes) -> None:
        """Raises for `super(self.__class__, self)` in a base: a subclass makes it recurse."""
        own = (c.__name__ for c in cls.__mro__ if self.changes.sources.defines(self.file, c))
        texts = [self.file.classes[name] for name in own if name in self.file.classes]
        for node in (node for text in texts for node in ast.walk(text)):
            match node:
                case ast.Call(func=ast.Name("super"), args=[of, _]) if "self" in names_in(of):
                    raise errors.Unsupported(
                        f"`{cls.__name__}` needs a subclass for this, but there "
                        f"`{ast.unparse(node)}` would call `{cls.__name__}` itself",
                        at=self.file.at(node),
                        cause=causes,
                        hint="write super() without arguments",
                    )

    def _class_before(self, site: Site, text: str, causes: Causes, why: str) -> list[Edit]:
        around = next(s for s in self.file.tree.body if within(s, site.value))
        return [above(self.file, around, text).caused_by(causes, why)]

    def _rename(
        self, nodes: list[Node], name: str, original: str, causes: Causes, same_state: str
    ) -> None:
        for node in nodes:
            if node.owner is None:
                raise errors.Unsupported(
                    f"`{original}` would need a subclass for this, but the model itself is "
                    "constructed by its user",
                    at=causes[0].at if causes else None,
                    hint="select modules inside it",
                )
            self._check_super(node.cls, causes)
            places = self.files.making(node).changes
            used = self.files.use_at(places.file, self.file, name, original)
            what: Change = replace(used, same_state=same_state)
            made = places.made_at(node, places.site(node, causes)[0])
            # The site already constructs a replacement.
            if used.module and isinstance(made, ReplaceModule):
                what = replace(made, target=replace(made.target, name=name))
            places.at_site(node, what, causes)

    def _wrapped_other(self, node: Node, wrappers: _Wrappers, edits: list[Edit]) -> bool:
        """Wraps the class that replaces the original at its site, if one does."""
        if node.owner is None:
            return False
        every = merged_causes(*(causes for _, causes in wrappers))
        at, _ = self.changes.site(node, every)
        made = self.changes.made_at(node, at)
        if not isinstance(made, (UseParallelLayer, ReplaceModule)):
            return False
        if isinstance(made, ReplaceModule) and made.layer is None:
            name = self.imports.function(made.target, every)
        else:
            assert made.layer is not None
            name = self.imports.helper(made.layer.module, made.layer.name, every)
        site = self.changes.sites[at.start]
        name = self._wrapped(
            "", "", name, wrappers, functools.partial(self._class_before, site), edits
        )
        self.changes.at_site(node, replace(made, subclass=name), every)
        return True


def _from_end(node: Node) -> str:
    """A module's path in its owner, with a negative list index; '' if it is not in a list.

    Its positive index differs between instances if some append a layer before it.
    """
    within = node.parent
    if within is None or not within.is_container or not node.name.isdigit():
        return ""
    return f"{within.relative}.{int(node.name) - len(within.children)}"
