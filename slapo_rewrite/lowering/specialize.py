"""Turns changes at places of classes into edits: of the class itself, or as subclasses.

Instances of a class whose changes do not contradict each other share one definition (`merged`). A
class whose instances all agree is edited in place. If only some instances need a change, they get a
subclass, and the construction site selects it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.changes.around_forward import FORK, RECOMPUTE, WRAPPERS
from slapo_rewrite.changes.change import Change
from slapo_rewrite.changes.change_set import Held, held, stands_in_its_class
from slapo_rewrite.changes.class_writer import ClassWriter
from slapo_rewrite.changes.definition import Definition, merged, shared_changes
from slapo_rewrite.changes.output_files import OutputFile, OutputFiles
from slapo_rewrite.changes.places import AtParameter, AtSite, BeforeBases, Place
from slapo_rewrite.code.splice import Edit
from slapo_rewrite.directive import Causes, merged_causes
from slapo_rewrite.lowering.subclass_choice import SubclassChoice
from slapo_rewrite.model import construction_calls
from slapo_rewrite.model.auto_classes import lookup_of
from slapo_rewrite.model.construction_sites import Site
from slapo_rewrite.model.tree import Node, Tree


def specialize(tree: Tree, files: OutputFiles) -> dict[str, list[Edit]]:
    """The edits of each file that carry out the collected changes, by the name of its module.

    A class comes before the classes that construct it, since the construction site needs the name
    of the subclass. The file that defines a class comes before other files.
    """
    _write_lookups_out(tree, files)
    edits: dict[str, list[Edit]] = {}
    made = held(files.sources, tree)
    settling = {output.file.name: _Specializing(tree, output, files, made) for output in files}
    for cls, nodes in _lowest_first(tree):
        home = files.of(cls)
        for name in sorted(settling, key=lambda n: home is None or n != home.file.name):
            if any(n.path in settling[name].changes.by_path for n in nodes):
                edits.setdefault(name, []).extend(settling[name].of_class(cls, nodes))
    return {name: _each_once(edits.get(name, [])) for name in settling}


def _write_lookups_out(tree: Tree, files: OutputFiles) -> None:
    """Makes construction sites that look a class up (`AutoModel`) use the output's class.

    This concerns modules that change, modules around these, and modules whose class or base gets
    another base. If a module itself is only wrapped, its construction site selects the wrapper.
    """
    holding: dict[str, Causes] = {}

    def hold(node: Node | None, why: Iterable[Causes]) -> None:
        for each in (node, *node.owners()) if node is not None else ():
            holding[each.path] = merged_causes(holding.get(each.path, ()), *why)

    for output in files:
        based: dict[str, Causes] = {}
        for path, causes in output.changes.causes.items():
            node = tree.nodes.get(path)
            if node is not None and causes.keys() <= set(WRAPPERS):
                node = node.owner
            hold(node, causes.values())
            based |= {p.class_name: why for p, why in causes.items() if isinstance(p, BeforeBases)}
        for node in tree.nodes.values() if based else ():
            bases = {c.__name__ for c in node.cls.__mro__ if files.of(c) is output}
            hold(node if bases & based.keys() else None, [based[b] for b in bases & based.keys()])
    for path, why in holding.items():
        node = tree.nodes[path]
        home, making = files.of(node.cls), files.making(node)
        at = making.changes.place_of(node) if home is not None and node.owner is not None else None
        if at is None or lookup_of(making.changes.sites[at.start], node) is None:
            continue
        assert home is not None
        if making.changes.made_at(node, at) is None:
            name = node.cls.__name__
            making.changes.at_site(node, files.use_at(making.file, home.file, name, name), why)


def _lowest_first(tree: Tree) -> list[tuple[type, list[Node]]]:
    """The classes with their instances, those lower in the module tree first."""
    by_class: dict[type, list[Node]] = {}
    heights: dict[str, int] = {}
    height_of: dict[type, int] = {}
    first = tree.first_paths()
    for path in reversed(tree.nodes):
        node = tree.nodes[path]
        heights[path] = 1 + max((heights[c.path] for c in node.children.values()), default=0)
        height_of[node.cls] = max(height_of.get(node.cls, 0), heights[path])
        if first[id(node.live)] == path:  # a module with several paths counts once
            by_class.setdefault(node.cls, []).append(node)
    for nodes in by_class.values():
        nodes.reverse()
    return [(cls, by_class[cls]) for cls in sorted(by_class, key=lambda c: height_of[c])]


class _Specializing:
    """Makes the edits of one file."""

    def __init__(self, tree: Tree, output: OutputFile, files: OutputFiles, made: Held) -> None:
        self.tree, self.file, self.held = tree, output.file, made
        self.changes, self.classes = output.changes, output.classes
        self.writer = ClassWriter(output.classes, output.imports)
        self.variants = SubclassChoice(output.changes, self.writer, output.imports, files, made)

    def of_class(self, cls: type, nodes: list[Node]) -> list[Edit]:
        """The edits for a class, or for a subclass elsewhere of a class of this file."""
        if self.changes.sources.file_of(cls) is not self.file and not self._derived_from(
            cls, nodes
        ):
            return self.variants.of_foreign(cls, nodes)
        definitions = self._definitions(nodes)
        shared = shared_changes(definitions) - {RECOMPUTE}
        if not self._has_forward_alone(cls):
            shared -= {FORK}
        shared = {k for k in shared if not self._reaches_others(cls, k)}
        shared = {k for k in shared if not self._reads_others(definitions, k, shared)}
        edits: list[Edit] = []
        everything = Definition()
        for definition in definitions:
            everything.absorb(definition.only(shared))
        if everything.changes:
            edits += self.writer.in_place(cls.__name__, everything, self.changes.indices)
        for definition in definitions:
            edits += self.variants.specialise(cls, definition, definition.changes.keys() - shared)
        return edits

    def _derived_from(self, cls: type, nodes: list[Node]) -> bool:
        """Whether a class of another file has changes in this file's text.

        These are in a class of this file that it extends, or in a function that makes its children.
        """
        keys = {key for n in nodes for key in self.changes.by_path.get(n.path, ())}
        is_made = any(isinstance(key, AtSite) for key in keys)
        is_base = bool(self.classes.names.get(cls.__name__))
        return (is_base or is_made) and not keys <= set(WRAPPERS)

    def _reaches_others(self, cls: type, place: Place) -> bool:
        """Whether a change in place would also affect another class that does not request it."""
        if isinstance(place, BeforeBases):
            return False  # it has no effect on instances without replacements
        methods = place.methods(self.classes, cls.__name__)
        home = place.home(self.classes, cls.__name__)
        reached: dict[type, bool] = {}
        for path, node in self.tree.nodes.items():
            if node.cls is cls or place in self.changes.by_path.get(path, {}):
                continue
            if node.cls not in reached:
                run = self.classes.methods(node.cls.__name__) if methods else []
                within = home in self.classes.lineage(node.cls.__name__)
                reached[node.cls] = any(m in methods for m in run) if methods else within
            is_there = methods or place.made_at is None
            if reached[node.cls] and (is_there or place.made_at in self._present(node)):
                return True
        return False

    def _reads_others(
        self, definitions: list[Definition], place: Place, shared: set[Place]
    ) -> bool:
        """Whether a change needs a changed module that only subclasses construct."""
        for definition in definitions:
            change = definition.changes.get(place)
            if change is None or change.reads is None:
                continue
            node = definition.nodes[0].at(change.reads)
            if node is not None and self.changes.place_of(node) not in shared:
                return True
        return False

    def _has_forward_alone(self, cls: type) -> bool:
        """Whether a class defines a `forward` that no other class of the model inherits."""
        return self.file.method(cls.__name__, "forward") is not None and not any(
            node.cls is not cls
            and issubclass(node.cls, cls)
            and inspect.getattr_static(node.cls, "forward") is vars(cls).get("forward")
            for node in self.tree.nodes.values()
        )

    def _definitions(self, nodes: list[Node]) -> list[Definition]:
        """The smallest set of definitions that serves a class's instances."""
        alike: dict[Any, Definition] = {}
        for node in nodes:
            changes = self.changes.by_path.get(node.path, {})
            present = self._present(node)
            key = (frozenset(changes.items()), frozenset(present))
            if key not in alike:
                alike[key] = Definition(dict(changes), {}, present)
            definition = alike[key]
            definition.nodes.append(node)
            for place, causes in self.changes.causes.get(node.path, {}).items():
                known = definition.causes.get(place, ())
                if known != causes:
                    definition.causes[place] = merged_causes(known, causes)
        return merged(alike.values())

    def _present(self, node: Node) -> set[Place]:
        """The construction sites of modules and parameters that an instance went through."""
        present: set[Place] = set()
        for child, site in self.held.get(node.path, ()):
            if site.file is self.file:
                place = self.changes.note(site, child)
                if place in present:
                    self._check_made_alike(node, place, child)
                if not stands_in_its_class(site):
                    self._check_function(site, place, child)
                present.update(self.changes.alike(place, child))
        for start, site in self.changes.sites.items():
            if site.kind in ("parameter", "buffer") and site.path in node.parameters:
                present.add(AtParameter(start))
        return present

    def _check_made_alike(self, node: Node, place: AtSite, child: Node) -> None:
        """Raises if modules that one call constructs have different changes."""
        made = self.changes.made.get((node.path, place), {})
        here = (c for c, site in self.held[node.path] if site.file is self.file)
        alike = [c for c in here if self.changes.place_of(c) == place]
        what = {id(c.live): made[c.path] for c in alike if c.path in made}
        if made and len({what.get(id(c.live)) for c in alike}) > 1:
            mine = what.get(id(child.live))
            other = next(c for c in alike if what.get(id(c.live)) != mine)
            causes = self.changes.causes[node.path][place]
            hint = "construct each on a separate line"
            site = self.changes.sites[place.start]
            if construction_calls.is_copy(child.live):
                call = f"{child.cls.__name__}(...)"
                hint = f"construct each with a call, in a loop there: [{call} for _ in ...]"
            _, *around = child.outwards()
            if (stack := next((n for n in around if n.is_stack), None)) is not None:
                hint = (
                    f"schedule all layers of {stack.shown} alike, or replace {stack.cls.__name__} "
                    f"in {self.file.path.name} by an nn.ModuleList and a loop"
                )
            raise errors.UnfollowableConstruction(
                f"{other.shown} and {child.shown} are constructed by one line, but scheduled "
                "differently",
                at=self.file.at(site.value),
                cause=causes,
                hint=hint,
            )

    def _check_function(self, site: Site, place: AtSite, child: Node) -> None:
        """Raises if modules that a function constructs for any owner have different changes."""
        nodes = self.tree.nodes
        here: dict[int, Change] = {}
        for (_, at), changes in self.changes.made.items():
            if at == place:
                here |= {id(nodes[path].live): change for path, change in changes.items()}
        if not here:
            return
        for other in nodes.values():
            if other.owner is None or here.get(id(other.live)) == here.get(id(child.live)):
                continue
            if self.changes.place_of(other) == place:
                owner, asked = next(each for each in self.changes.made if each[1] == place)
                raise errors.UnfollowableConstruction(
                    f"`{site.function.name}` constructs {child.shown} and {other.shown}, which "
                    "are scheduled differently",
                    at=self.file.at(site.value),
                    cause=self.changes.causes[owner][asked],
                    hint="schedule all its modules alike, or write the construction out where they "
                    "differ",
                )


def _each_once(edits: list[Edit]) -> list[Edit]:
    """The edits without duplicates: subclasses may both request an edit of their base."""
    found: dict[tuple[int, int, str], Edit] = {}
    for edit in edits:
        key = (edit.start, edit.end, edit.text)
        known = found.get(key)
        found[key] = (
            replace(edit, causes=merged_causes(known.causes, edit.causes)) if known else edit
        )
    return list(found.values())
