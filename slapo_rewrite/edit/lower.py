"""From what was asked of each module to edits of the source.

Three steps. What was asked of a module becomes changes at places of the class that makes it
(`_collect`). Instances of a class whose changes do not contradict each other share one definition
(`merged`). A class whose instances all agree is changed in place; where only some want a change,
they get a subclass, and the place that makes them picks (`_settle`).
"""

from __future__ import annotations

import ast
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.edit.classes import ClassWriter, IndexSets
from slapo_rewrite.edit.definition import (
    Attach,
    ChangeArgument,
    Definition,
    DeriveFrom,
    Key,
    MakeClass,
    MakeLayer,
    MakeOther,
    OwnShare,
    ReadWhole,
    Recompute,
    ShareParameter,
    SplitParameter,
    What,
    WrapCall,
    WrapInput,
    WrapOutput,
    common,
    merged,
    united,
)
from slapo_rewrite.edit.imports import Imports
from slapo_rewrite.edit.layers import choose_layer
from slapo_rewrite.edit.splice import Edit
from slapo_rewrite.edit.state import EMPTY, Directive, Function, ModuleState, Shard, Sync
from slapo_rewrite.model.alike import Alike
from slapo_rewrite.model.follow import (
    Asked,
    Border,
    CannotFollow,
    CannotRun,
    Followed,
    ShardedParameter,
    follow,
)
from slapo_rewrite.model.join import (
    Sources,
    find_parameter_site,
    find_site,
    resolve_callee,
)
from slapo_rewrite.model.layers import SHARES, Layer, arguments_of, base_of, splits_of
from slapo_rewrite.model.tree import Node, Tree
from slapo_rewrite.source.index import SourceFile
from slapo_rewrite.source.sites import Site

RECOMPUTE: Key = ("recompute",)


@dataclass
class Lowered:
    """The edits of the model file, and what they need beside it.

    Attributes:
        edits: Of the model file.
        imports: Names used of the helper modules.
        warnings: What could not be checked, in words.
    """

    edits: list[Edit]
    imports: Imports
    warnings: list[str] = field(default_factory=list)


def lower(
    tree: Tree,
    states: Mapping[str, ModuleState],
    sources: Sources,
    step_inputs: Callable[[], dict[str, Any]],
    line_length: int,
) -> Lowered:
    """The edits that carry out what was asked.

    Args:
        tree: The module tree.
        states: What was asked of each module path.
        sources: The source files.
        step_inputs: Makes the keyword arguments of one training step.
        line_length: The file's own.

    Raises:
        RewriteError: What was asked does not fit together, or the source cannot be changed so.
    """
    return _Lowering(tree, dict(states), sources, line_length).run(step_inputs)


class _Lowering:
    def __init__(
        self, tree: Tree, states: dict[str, ModuleState], sources: Sources, line_length: int
    ) -> None:
        self.tree, self.states, self.sources = tree, states, sources
        self.file: SourceFile = sources.main
        self.line_length = line_length
        self.sites: dict[int, Site] = {}
        self.indices = IndexSets()
        self.imports = Imports(self.file)
        lineages = {
            cls.__name__: tuple(
                c.__name__
                for c in cls.__mro__
                if c.__name__ in self.file.classes and sources.file_of(c) is self.file
            )
            for cls in {node.cls: None for node in tree.nodes.values()}
        }
        self.writer = ClassWriter(self.file, self.sites, self.imports, line_length, lineages)
        self.made: dict[tuple[str, Key], dict[str, What]] = {}
        self.changes: dict[str, dict[Key, What]] = {}
        self.causes: dict[str, dict[Key, tuple[Directive, ...]]] = {}
        self.warnings: list[str] = []
        self.class_names: set[str] = set()
        self.siblings: dict[str, tuple[str, ...]] = {}
        self.variants: dict[Any, str] = {}

    def run(self, step_inputs: Callable[[], dict[str, Any]]) -> Lowered:
        """Everything, in order."""
        follow_ties(self.tree, self.states)
        alike, every = Alike(self.tree, self.states), self.states
        self.siblings = alike.siblings
        with alike.reduced():
            self.states = {path: every[path] for path in every if path in self.tree.nodes}
            asked = self._asked()
            try:
                with alike.shortened():
                    followed: Followed | None = self._follow(asked, step_inputs)
            except CannotRun:
                followed = None
        if followed is None:
            # Some models count their layers by the configuration: run all of them.
            few, self.states = self.states, every
            followed = self._follow_whole(step_inputs)
            self.states = few
        with alike.reduced():
            self._collect(asked.layers, asked.parameters, followed)
            edits = self._settle()
        return Lowered(edits, self.imports, self.warnings)

    def _asked(self) -> Asked:
        layers, parameters = self._layers_and_parameters()
        return Asked(layers, parameters, self._borders(layers))

    # What was asked, as layers and split parameters.

    def _layers_and_parameters(self) -> tuple[dict[str, Layer], dict[str, list[ShardedParameter]]]:
        """The layers that take others' places, and split parameters, by module path."""
        layers: dict[str, Layer] = {}
        parameters: dict[str, list[ShardedParameter]] = {}
        known: dict[Any, Layer] = {}
        for path, state in self.states.items():
            if not state.shards:
                continue
            node = self.tree.nodes[path]
            if self._extends_layer(node.cls):
                key = (node.cls, state, tuple(node.parameters))
                if key not in known:
                    known[key] = choose_layer(node, state)
                layers[path] = known[key]
            elif self.sources.file_of(node.cls) is self.file:
                parameters[path] = [ShardedParameter(s.name, s.axis, s.parts) for s in state.shards]
            else:
                raise errors.Unsupported(
                    f"`{path}` is a {node.cls.__module__}.{node.cls.__qualname__}: it cannot "
                    "be sharded",
                    at=state.shards[0].cause.at,
                    hint="Linear, Embedding and transformers' Conv1D can be, "
                    f"and parameters of classes that {self.file.path.name} defines",
                )
        return layers, parameters

    def _extends_layer(self, cls: type) -> bool:
        """Whether a class is a layer that can be split, or computes with one by `super()` alone."""
        base = base_of(cls)
        if base is None or base is cls:
            return base is cls
        between = cls.__mro__[: cls.__mro__.index(base)]
        return all(
            self.sources.file_of(c) is self.file and self.writer.extends_forward(c.__name__)
            for c in between
        )

    def _follow(self, asked: Asked, step_inputs: Callable[[], dict[str, Any]]) -> Followed:
        """What follows from the sharded sizes.

        Raises:
            CannotRun: The model does not run on the meta device.
            UnfollowableSize: Something does not fit.
        """
        known = any(b.operation != "function" for found in asked.borders.values() for b in found)
        if not (asked.layers or asked.parameters or known):
            return Followed()
        names = {
            str(self.file.path),
            os.path.realpath(self.file.path),
            os.path.abspath(self.file.path),
        }
        try:
            return follow(self.tree, asked, step_inputs(), names.__contains__)
        except CannotFollow as error:
            at = None
            if error.place is not None:
                place = error.place
                text = self.file.line(place.line)
                start = len(text.encode()[: place.column].decode(errors="ignore"))
                end = len(text.encode()[: place.end_column].decode(errors="ignore"))
                last = end if place.end_line == place.line else len(text)
                at = errors.Span(
                    self.file.display, place.line, start + 1, max(1, last - start), text
                )
            cause = self._a_cause(error.path)
            places = [p for p in (at, cause) if p is not None]
            raise errors.UnfollowableSize(
                str(error), at=places[0] if places else None, also=places[1:], hint=error.hint
            ) from None

    def _follow_whole(self, step_inputs: Callable[[], dict[str, Any]]) -> Followed:
        """The same with every layer; a model that does not run is warned of."""
        try:
            return self._follow(self._asked(), step_inputs)
        except CannotRun as error:
            self.warnings.append(
                "the model does not run on the meta device, so sizes inside `forward` were not "
                f"followed ({str(error).splitlines()[0]}); `--verify` tells whether they had to be"
            )
            return Followed()

    def _borders(self, layers: Mapping[str, Layer]) -> dict[str, list[Border]]:
        """The collectives that no layer carries out by itself."""
        return {
            path: borders
            for path, state in self.states.items()
            if (
                borders := [
                    Border(
                        sync.mode, sync.op if isinstance(sync.op, str) else "function", sync.axis
                    )
                    for sync in state.syncs
                    if path not in layers or not isinstance(sync.op, str)
                ]
            )
        }

    def _a_cause(self, path: str | None) -> errors.Span | None:
        for candidate in [path] if path else self.states:
            state = self.states.get(candidate)
            if state and state.shards:
                return state.shards[0].cause.at
        return None

    # Changes at places of classes.

    def _collect(
        self,
        layers: Mapping[str, Layer],
        parameters: Mapping[str, Sequence[ShardedParameter]],
        followed: Followed,
    ) -> None:
        for path, state in self.states.items():
            node = self.tree.nodes[path]
            if path in layers:
                assert node.owner is not None
                unit = followed.units.get((node.owner.cls, node.relative))
                layer = replace(layers[path], unit=unit) if unit else layers[path]
                causes = united((s.cause for s in state.shards), (s.cause for s in state.syncs))
                base = base_of(node.cls)
                assert base is not None
                if base is node.cls:
                    self._at_site(node, MakeLayer(layer), causes)
                else:
                    self._add(node.path, ("base",), DeriveFrom(layer, base.__name__), causes)
            if state.replacement:
                new = state.replacement
                self._at_site(node, MakeOther(new.target, new.arguments), (new.cause,))
            for shard in state.shards if path in parameters else ():
                self._split_parameter(node, shard)
            for sync in state.syncs:
                self._sync(node, sync, path in layers)
            if state.checkpoint:
                self._add(node.path, RECOMPUTE, Recompute(), (state.checkpoint.cause,))
        self._sizes(layers, parameters, followed)
        for path, layer in layers.items():
            self._read_sizes(self.tree.nodes[path], layer)

    def _add(self, path: str, key: Key, what: What, causes: tuple[Directive, ...]) -> None:
        self.changes.setdefault(path, {})[key] = what
        known = self.causes.setdefault(path, {})
        known[key] = united(known.get(key, ()), causes)

    def _site(self, node: Node, causes: tuple[Directive, ...]) -> tuple[Key, Node]:
        """The place that makes a module, and the module whose class holds it."""
        try:
            site = find_site(self.sources, node)
        except errors.RewriteError as error:
            error.also = (*error.also, *(c.at for c in causes[:1] if c.at))
            raise
        if site.file is not self.file:
            raise errors.UnfollowableConstruction(
                f"`{node.path}` is made in another file, {site.file.display}",
                at=site.file.at(site.value),
                also=[c.at for c in causes[:1] if c.at],
                hint=f"copy class `{site.class_name}` into {self.file.path.name}",
            )
        assert node.owner is not None
        return self._note(site, node), node.owner

    def _note(self, site: Site, node: Node) -> Key:
        start = self.file.span(site.value)[0]
        self.sites[start] = site
        # Where a place outside of loops puts its module may differ between instances.
        index = _index(site.path, node.relative) if site.loops else ""
        for name in self.siblings.get(node.path, ()) if index else ():
            self.indices.add(start, _sibling(index, name))
        self.indices.add(start, index)
        return ("site", start, index)

    def _alike(self, key: Key, node: Node) -> list[Key]:
        """The place of a module, and those of the elements that it stands for."""
        if not key[2]:
            return [key]
        names = self.siblings.get(node.path, (node.name,))
        return [(key[0], key[1], _sibling(key[2], name)) for name in names]

    def _at_site(self, node: Node, what: What, causes: tuple[Directive, ...]) -> None:
        if node.owner is None:
            raise errors.Unsupported(
                "the model itself is not made by another module",
                at=causes[0].at if causes else None,
            )
        key, owner = self._site(node, causes)
        if isinstance(what, MakeLayer):
            self._check_callee(self.sites[key[1]], node, causes)
            self._check_arguments(self.sites[key[1]], what.layer, causes)
        self.made.setdefault((owner.path, key), {})[node.path] = what
        for place in self._alike(key, node):
            self._add(owner.path, place, what, causes)

    def _check_callee(self, site: Site, node: Node, causes: tuple[Directive, ...]) -> None:
        """A layer takes the place of a call of its own class, whose arguments it knows."""
        if site.callee is not None:
            name = self.file.qualified(site.callee) or ""
            if name.rpartition(".")[2] == node.cls.__name__:
                return
            if resolve_callee(self.sources, site, node) is node.cls:
                return
        raise errors.UnfollowableConstruction(
            f"`{node.path}` is a {node.cls.__name__}, but is not made by a call of that class here",
            at=self.file.at(site.value),
            also=[c.at for c in causes[:1] if c.at],
            hint=f"write the construction out: self.{site.path} = nn.{node.cls.__name__}(...)",
        )

    def _check_arguments(self, site: Site, layer: Layer, causes: tuple[Directive, ...]) -> None:
        """Refuses constructor arguments that the sharded layer has no equal for."""
        for keyword in site.value.keywords if isinstance(site.value, ast.Call) else ():
            if keyword.arg is not None and keyword.arg not in arguments_of(layer):
                raise errors.Unsupported(
                    f"a sharded layer does not take the argument `{keyword.arg}`",
                    at=self.file.at(keyword),
                    also=[c.at for c in causes[:1] if c.at],
                    hint=f"{layer.name} takes {', '.join(arguments_of(layer))}",
                )

    def _split_parameter(self, node: Node, shard: Shard) -> None:
        site = find_parameter_site(self.sources, node, shard.name)
        if site.file is not self.file:
            base = base_of(node.cls)
            raise errors.UnfollowableConstruction(
                f"`{node.path}.{shard.name}` is made in another file, {site.file.display}"
                + (
                    f", and `{node.cls.__name__}` computes with it in a way of its own"
                    if base
                    else ""
                ),
                at=site.file.at(site.value),
                also=[shard.cause.at] if shard.cause.at else [],
                hint=f"let its `forward` call `super().forward(...)`, or use {base.__name__} itself"
                if base
                else None,
            )
        start = self.file.span(site.value)[0]
        self.sites[start] = site
        key = ("parameter", start, "", shard.name)
        self._add(node.path, key, SplitParameter(shard.axis, shard.parts), (shard.cause,))

    def _sync(self, node: Node, sync: Sync, is_layer: bool) -> None:
        causes = (sync.cause,)
        if isinstance(sync.op, Function):
            key, owner = self._site(node, causes)
            self._add(
                owner.path,
                ("hook", *key[1:], sync.mode, sync.op.name),
                Attach(sync.mode, sync.op),
                causes,
            )
        elif is_layer:
            return  # the layer does it
        elif self.sources.file_of(node.cls) is self.file:
            what: What
            if sync.mode == "bwd_post":
                what = WrapInput("all_reduce_gradient")
            elif sync.mode == "fwd_post":
                what = WrapOutput(sync.op, sync.axis)
            else:
                raise self._unavailable(node, sync)
            self._add(node.path, ("forward", sync.mode, sync.op), what, causes)
        else:
            around = "result" if sync.mode == "fwd_post" else "argument"
            function = "all_reduce_gradient" if sync.mode == "bwd_post" else sync.op
            if sync.mode == "fwd_pre" or node.owner is None:
                raise self._unavailable(node, sync)
            key = ("call", node.relative, "", sync.mode)
            self._add(node.owner.path, key, WrapCall(function, around, sync.axis), causes)

    def _unavailable(self, node: Node, sync: Sync) -> errors.RewriteError:
        return errors.Unsupported(
            f"`{sync.op}` in mode `{sync.mode}` is not available for `{node.path}`",
            at=sync.cause.at,
        )

    def _sizes(
        self,
        layers: Mapping[str, Layer],
        parameters: Mapping[str, Sequence[ShardedParameter]],
        followed: Followed,
    ) -> None:
        """What follows from the shards, on every module that holds sharded parameters."""
        owners: dict[str, list[Directive]] = {}
        for path in (*layers, *parameters):
            node = self.tree.nodes[path]
            owner = node.owner if path in layers else node
            if owner is not None:
                owners.setdefault(owner.path, []).extend(s.cause for s in self.states[path].shards)
        for path, holder in self._holders(owners).items():
            cls, causes = self.tree.nodes[path].cls, united(owners[holder.path])
            for attribute in sorted(
                a.name for a in followed.sizes if (a.cls, a.holder) == (cls, holder.cls)
            ):
                self._add(path, ("size", attribute), OwnShare(), causes)
            for change in followed.arguments:
                if any(
                    self.writer.holds(c, change.place.line)
                    for c in self.writer.lineage(cls.__name__)
                ):
                    place = change.place
                    key = (
                        "argument", place.line, place.column, place.end_line, place.end_column,
                        change.index,
                    )  # fmt: skip
                    self._add(path, key, ChangeArgument(change.template), causes)
        for path, name in sorted(followed.shared):
            self._share_parameter(path, name, owners)

    def _read_sizes(self, node: Node, layer: Layer) -> None:
        """Whoever reads the size of a layer that is split means the whole layer's."""
        share, whole = SHARES[layer.name]
        if f".{share}" not in self.file.text:
            return
        causes = tuple(s.cause for s in self.states[node.path].shards)
        above = node.parent
        while above is not None:
            relative = node.path[len(above.path) + 1 if above.path else 0 :]
            for reading in self.writer.readings(above.cls.__name__, relative, share):
                if whole is None:
                    raise errors.UnfollowableSize(
                        f"`{node.path}` is split, so its `{share}` is this rank's share, and is "
                        "read here",
                        at=self.file.at(reading),
                        also=[c.at for c in causes[:1] if c.at],
                        hint="read the size from where the layer's constructor has it",
                    )
                key = ("read", self.file.span(reading)[1])
                self._add(above.path, key, ReadWhole(whole), causes)
            above = above.parent

    def _holders(self, owners: Mapping[str, list[Directive]]) -> dict[str, Node]:
        """For every module below sharded parameters or with some: the nearest that has them."""
        found: dict[str, Node] = {}
        for path, node in self.tree.nodes.items():
            if path in owners:
                found[path] = node
            elif node.parent is not None and node.parent.path in found:
                found[path] = found[node.parent.path]
        return found

    def _share_parameter(self, path: str, name: str, owners: Mapping[str, list[Directive]]) -> None:
        """Adds up the gradients of a whole parameter that meets parts, wherever its like does."""
        holder = self._holders(owners)[path]
        relative = path[len(holder.path) :]
        for owner, causes in owners.items():
            node = self.tree.nodes.get(owner + relative)
            if node is None or self.tree.nodes[owner].cls is not holder.cls:
                continue
            if self.sources.file_of(node.cls) is not self.file:
                raise errors.Unsupported(
                    f"`{node.path}.{name}` is whole on every rank, but is used on parts: its "
                    f"gradients have to be added up, and `{node.cls.__qualname__}` is not a class "
                    "of this file that could be changed for that",
                    at=causes[0].at,
                    hint=f"copy class `{node.cls.__name__}` into {self.file.path.name}",
                )
            self._add(node.path, ("gradient", name), ShareParameter(name), united(causes))

    # Classes in place, and subclasses.

    def _settle(self) -> list[Edit]:
        edits: list[Edit] = []
        by_class: dict[type, list[Node]] = {}
        heights: dict[str, int] = {}
        height_of: dict[type, int] = {}
        for path in reversed(self.tree.nodes):
            node = self.tree.nodes[path]
            heights[path] = 1 + max((heights[c.path] for c in node.children.values()), default=0)
            height_of[node.cls] = max(height_of.get(node.cls, 0), heights[path])
            by_class.setdefault(node.cls, []).append(node)
        for nodes in by_class.values():
            nodes.reverse()
        for cls in sorted(by_class, key=lambda c: height_of[c]):
            nodes = by_class[cls]
            if any(n.path in self.changes for n in nodes):
                edits += self._settle_class(cls, nodes)
        return _each_once(edits)

    def _settle_class(self, cls: type, nodes: list[Node]) -> list[Edit]:
        if self.sources.file_of(cls) is not self.file:
            return self._settle_foreign(cls, nodes)
        definitions = self._definitions(nodes)
        shared = common(definitions) - {RECOMPUTE}
        edits: list[Edit] = []
        everything = Definition()
        for definition in definitions:
            everything.absorb(
                Definition(
                    {k: v for k, v in definition.changes.items() if k in shared},
                    {k: v for k, v in definition.causes.items() if k in shared},
                )
            )
        if everything.changes:
            self._check_homes(cls, everything)
            edits += self.writer.in_place(cls.__name__, everything, self.indices)
        for definition in definitions:
            edits += self._specialise(cls, definition, definition.changes.keys() - shared)
        return edits

    def _definitions(self, nodes: list[Node]) -> list[Definition]:
        """The definitions that a class's instances want, as few as can be."""
        alike: dict[Any, Definition] = {}
        for node in nodes:
            changes = self.changes.get(node.path, {})
            present = self._present(node)
            key = (frozenset(changes.items()), frozenset(present))
            if key not in alike:
                alike[key] = Definition(dict(changes), {}, present)
            definition = alike[key]
            definition.nodes.append(node)
            for place, causes in self.causes.get(node.path, {}).items():
                known = definition.causes.get(place, ())
                if known != causes:
                    definition.causes[place] = united(known, causes)
        return merged(alike.values())

    def _present(self, node: Node) -> set[Key]:
        """The construction sites that an instance went through, and the parameters it made."""
        present: set[Key] = set()
        for child in _owned(node):
            try:
                site = find_site(self.sources, child)
            except errors.UnfollowableConstruction:
                continue
            if site.file is self.file:
                key = self._note(site, child)
                if key in present:
                    self._check_made_alike(node, key, child)
                present.update(self._alike(key, child))
        for start, site in self.sites.items():
            if site.kind in ("parameter", "buffer") and site.path in node.parameters:
                present.add(("parameter", start, ""))
        return present

    def _check_made_alike(self, node: Node, key: Key, child: Node) -> None:
        """Modules that one line makes can only be changed all in the same way."""
        made = self.made.get((node.path, key), {})
        alike = [c for c in _owned(node) if self._key(c) == key]
        if made and len({made.get(c.path) for c in alike}) > 1:
            other = next(c for c in alike if made.get(c.path) != made.get(child.path))
            causes = self.causes[node.path][key]
            raise errors.UnfollowableConstruction(
                f"`{other.path}` and `{child.path}` are made by one line, and are scheduled "
                "differently",
                at=self.file.at(self.sites[key[1]].value),
                also=[c.at for c in causes[:1] if c.at],
                hint="give each a line of its own",
            )

    def _key(self, node: Node) -> Key | None:
        try:
            site = find_site(self.sources, node)
        except errors.UnfollowableConstruction:
            return None
        return self._note(site, node) if site.file is self.file else None

    def _check_homes(self, cls: type, definition: Definition) -> None:
        """What several classes inherit cannot be changed in place for one of them alone."""
        for key in definition.changes:
            home = self.writer.home(cls.__name__, key)
            if home == cls.__name__:
                continue
            for node in self.tree.nodes.values():
                if node.cls is cls or home not in self.writer.lineage(node.cls.__name__):
                    continue
                if key in self.changes.get(node.path, {}):
                    continue
                if key[0] in ("site", "parameter", "hook") and key not in self._present(node):
                    continue
                raise errors.Unsupported(
                    f"`{cls.__name__}` inherits what changes from `{home}`, and so does "
                    f"`{node.cls.__name__}` at `{node.path}`, which is not scheduled alike",
                    at=definition.causes[key][0].at,
                    hint="schedule both alike",
                )

    def _relatives(self, definition: Definition) -> tuple[dict[int, str], set[int]]:
        """Where places outside of loops put what they make, and which not all instances have."""
        found: dict[int, str] = {}
        count: Counter[int] = Counter()
        for node in definition.nodes:
            for child in _owned(node):
                try:
                    site = find_site(self.sources, child)
                except errors.UnfollowableConstruction:
                    continue
                if site.file is not self.file or site.loops:
                    continue
                start = self.file.span(site.value)[0]
                count[start] += 1
                if found.setdefault(start, child.relative) != child.relative:
                    raise errors.UnfollowableConstruction(
                        f"`{child.path}` is made here, and so is `{found[start]}` of another "
                        f"`{node.cls.__name__}`",
                        at=self.file.at(site.value),
                        hint="schedule all instances alike",
                    )
        return found, {start for start in found if count[start] < len(definition.nodes)}

    def _specialise(self, cls: type, definition: Definition, extra: set[Key]) -> list[Edit]:
        """Gives the instances that want more than the class does a subclass of their own."""
        if not extra:
            return []
        edits: list[Edit] = []
        name = cls.__name__
        beyond = extra - {RECOMPUTE}
        if not beyond:
            causes = definition.causes[RECOMPUTE]
            definition.nodes = [
                n for n in definition.nodes if not self._checkpointed_other(n, causes, edits)
            ]
            if not definition.nodes:
                return edits
        if beyond:
            variant = (cls, frozenset((k, definition.changes[k]) for k in beyond))
            name = self.variants.get(variant, "")
            if not name:
                causes = united(*(definition.causes.get(k, ()) for k in beyond))
                self._check_base(cls, definition, beyond)
                prefix, doc = self._described(definition, beyond)
                name = self.variants[variant] = self._new_name(f"{prefix}{cls.__name__}")
                text = self.writer.subclass(
                    cls.__name__,
                    name,
                    definition,
                    beyond,
                    self.indices,
                    *self._relatives(definition),
                    f"A `{cls.__name__}` {doc}.",
                )
                edits.append(
                    self._class_after(cls.__name__, text, causes, f"`{name}`, for some instances")
                )
        if RECOMPUTE in extra:
            causes = definition.causes[RECOMPUTE]
            base = name
            name = f"Checkpointed{base}"
            if name not in self.class_names:
                self._new_name(name)
                text = self.writer.recomputing(cls.__name__, name, base, causes)
                edits.append(
                    self._class_after(cls.__name__, text, causes, f"`{base}`, checkpointed")
                )
        self._rename(
            definition.nodes, name, cls.__name__, united(*(definition.causes[k] for k in extra))
        )
        return edits

    def _check_base(self, cls: type, definition: Definition, extra: set[Key]) -> None:
        if ("base",) in extra:
            raise errors.Unsupported(
                f"some instances of `{cls.__name__}` are split, some not: a class has one base",
                at=definition.causes[("base",)][0].at,
                hint="schedule all instances alike",
            )

    def _described(self, definition: Definition, extra: set[Key]) -> tuple[str, str]:
        wanted = [definition.changes[k] for k in extra]
        parallel = (
            MakeLayer,
            SplitParameter,
            OwnShare,
            WrapInput,
            WrapOutput,
            WrapCall,
            Attach,
            ChangeArgument,
            ShareParameter,
        )
        made = [w.name for w in wanted if isinstance(w, MakeClass)]
        if any(isinstance(w, parallel) for w in wanted) or any(
            n.startswith("TensorParallel") for n in made
        ):
            return "TensorParallel", "whose layers are split over the tensor-parallel group"
        if made:
            return "Scheduled", f"made of {' and '.join(f'`{n}`' for n in sorted(set(made)))}"
        others = sorted({w.target.name for w in wanted if isinstance(w, MakeOther)})
        return "Scheduled", f"made of {' and '.join(f'`{n}`' for n in others)}"

    def _new_name(self, name: str) -> str:
        unique, number = name, 2
        while unique in self.class_names or unique in self.file.names:
            unique, number = f"{name}{number}", number + 1
        self.class_names.add(unique)
        return unique

    def _class_after(
        self, class_name: str, text: str, causes: tuple[Directive, ...], why: str
    ) -> Edit:
        end = self.file.span(self.file.classes[class_name])[1]
        return Edit(end, end, "\n\n\n" + text.rstrip("\n"), causes, why)

    def _class_before(
        self, class_name: str, text: str, causes: tuple[Directive, ...], why: str
    ) -> Edit:
        node = self.file.classes[class_name]
        line = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        start = self.file.offset(line, 0)
        return Edit(start, start, text.rstrip("\n") + "\n\n\n", causes, why)

    def _settle_foreign(self, cls: type, nodes: list[Node]) -> list[Edit]:
        """A class of another file can be given a subclass here, before the class that makes it."""
        edits: list[Edit] = []
        name = f"Checkpointed{cls.__name__}"
        for node in nodes:
            causes = self.causes.get(node.path, {}).get(RECOMPUTE)
            if causes is None or self._checkpointed_other(node, causes, edits):
                continue
            key, _ = self._site(node, causes)
            site = self.sites[key[1]]
            if name not in self.class_names:
                name = self._new_name(name)
                shown = self.file.segment(site.callee) if site.callee else cls.__name__
                text = self.writer.recomputing(cls.__name__, name, shown, causes)
                edits.append(
                    self._class_before(site.class_name, text, causes, f"`{shown}`, checkpointed")
                )
            self._rename([node], name, cls.__name__, causes)
        return edits

    def _rename(
        self, nodes: list[Node], name: str, original: str, causes: tuple[Directive, ...]
    ) -> None:
        for node in nodes:
            if node.owner is None:
                raise errors.Unsupported(
                    "the model itself cannot be checkpointed as a whole",
                    at=causes[0].at if causes else None,
                    hint="select modules inside it",
                )
            self._at_site(node, MakeClass(name, original), causes)

    def _checkpointed_other(
        self, node: Node, causes: tuple[Directive, ...], edits: list[Edit]
    ) -> bool:
        """Checkpoints the class that stands in the place of the original's, if one does."""
        if node.owner is None:
            return False
        key, owner = self._site(node, causes)
        what = self.changes.get(owner.path, {}).get(key)
        if not isinstance(what, (MakeLayer, MakeOther)):
            return False
        if isinstance(what, MakeLayer):
            shown = self.imports.helper(what.layer.module, what.layer.name, causes)
        else:
            shown = self.imports.function(what.target, causes)
        name = f"Checkpointed{shown.rpartition('.')[2]}"
        self._at_site(node, replace(what, subclass=name), causes)
        if name not in self.class_names:
            self._new_name(name)
            text = self.writer.recomputing("", name, shown, causes)
            home = self.sites[key[1]].class_name
            edits.append(self._class_before(home, text, causes, f"`{shown}`, checkpointed"))
        return True


def _each_once(edits: list[Edit]) -> list[Edit]:
    """The edits without repetition: several classes may ask for one in what they inherit."""
    found: dict[tuple[int, int, str], Edit] = {}
    for edit in edits:
        key = (edit.start, edit.end, edit.text)
        known = found.get(key)
        found[key] = replace(edit, causes=united(known.causes, edit.causes)) if known else edit
    return list(found.values())


def _owned(node: Node) -> list[Node]:
    """The modules whose owner is `node`: its children, and theirs where they are containers."""
    found = []
    waiting = list(node.children.values())
    while waiting:
        child = waiting.pop()
        if child.owner is node:
            found.append(child)
            if child.is_container:
                waiting += child.children.values()
    return found


def _sibling(index: str, name: str) -> str:
    """The index of another element of the same list."""
    return ".".join([*index.split(".")[:-1], name])


def _index(pattern: str, path: str) -> str:
    """What stands in a path for the `*` of its pattern."""
    steps = zip(pattern.split("."), path.split("."), strict=False)
    return ".".join(have for want, have in steps if want == "*")


def follow_ties(tree: Tree, states: dict[str, ModuleState]) -> None:
    """Shards what is tied to a sharded parameter the same way.

    A module that is split because of a tie keeps its meaning for whoever calls it: what it gives
    out is made whole.

    Raises:
        ConflictingEdits: Tied parameters are sharded along different axes.
    """
    changed = True
    while changed:
        changed = False
        for names in tree.ties.values():
            members = [(tree.nodes[n.rpartition(".")[0]], n.rpartition(".")[2]) for n in names]
            sharded = [
                (node, s) for node, name in members for s in _shards(states, node) if s.name == name
            ]
            if not sharded:
                continue
            first_node, first = sharded[0]
            for node, other in sharded[1:]:
                if (other.axis, other.parts) != (first.axis, first.parts):
                    raise errors.ConflictingEdits(
                        f"`{first_node.path}.{first.name}` and `{node.path}.{other.name}` are "
                        "one tied parameter, "
                        "sharded in two ways",
                        at=other.cause.at,
                        also=[first.cause.at] if first.cause.at else [],
                    )
            for node, name in members:
                if not any(s.name == name for s in _shards(states, node)):
                    states[node.path] = _tied(node, states.get(node.path, EMPTY), name, first)
                    changed = True


def _shards(states: Mapping[str, ModuleState], node: Node) -> tuple[Shard, ...]:
    return states.get(node.path, EMPTY).shards


def _tied(node: Node, state: ModuleState, name: str, shard: Shard) -> ModuleState:
    splits = splits_of(node.cls)
    added = [Shard(name, shard.axis, shard.parts, shard.cause)]
    if splits is None or (name, shard.axis) not in splits:
        return replace(state, shards=(*state.shards, *added))
    split = splits[name, shard.axis]
    present = {s.name for s in state.shards} | {name}
    added += [
        Shard(other, axis, shard.parts, shard.cause)
        for (other, axis), how in splits.items()
        if how == split and other in node.parameters and other not in present
    ]
    syncs = list(state.syncs)
    if not state.shards:
        operation = "all_gather" if split.output == "partition" else "all_reduce"
        axis = -1 if operation == "all_gather" else None
        wanted = [Sync("fwd_post", operation, axis, False, shard.cause)]
        if split.has_input_gradient:
            wanted.append(Sync("bwd_post", "all_reduce", None, False, shard.cause))
        have = {(s.mode, s.op) for s in syncs}
        syncs += [s for s in wanted if (s.mode, s.op) not in have]
    return replace(state, shards=(*state.shards, *added), syncs=tuple(syncs))
