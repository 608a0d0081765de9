"""From what was asked of each module to changes at places of the class that makes it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from slapo_rewrite import errors
from slapo_rewrite.changes.add_bias import AddBias
from slapo_rewrite.changes.around_forward import WrapForward
from slapo_rewrite.changes.bases import DeriveFrom
from slapo_rewrite.changes.change import Change
from slapo_rewrite.changes.collective import Collective
from slapo_rewrite.changes.construction import ReplaceModule, UseParallelLayer
from slapo_rewrite.changes.hook import RegisterHook
from slapo_rewrite.changes.imports import Function
from slapo_rewrite.changes.output_files import OutputFile, OutputFiles
from slapo_rewrite.changes.parameters import ShardParameter
from slapo_rewrite.changes.placement import Placement, Requested
from slapo_rewrite.changes.places import (
    AtBase,
    AtCalls,
    AtForward,
    AtNode,
    AtParameter,
    BehindSite,
    EndOfConstructor,
)
from slapo_rewrite.changes.pretrained import (
    MAPPED,
    keep_checkpoints,
    keep_treatment,
    specially_treated,
)
from slapo_rewrite.changes.reads import in_forward, readings
from slapo_rewrite.changes.sizes import (
    ChangeArgument,
    DivideByReplicas,
    ParallelNormStatistic,
    ReadFullSize,
    ShardAttribute,
)
from slapo_rewrite.changes.state import Decompose, ModuleState, Shard, Share, Sync
from slapo_rewrite.changes.sync import SyncCall, SyncInput, SyncOutput
from slapo_rewrite.changes.vocab_parallel_loss import VocabParallelLoss
from slapo_rewrite.code.text import returns
from slapo_rewrite.directive import Directive, merged_causes
from slapo_rewrite.edit.blocks import BlockWriter, fixed, length_of
from slapo_rewrite.edit.gradients import Gradients
from slapo_rewrite.model.join import find_parameter_site, find_site
from slapo_rewrite.model.layers import (
    IN_UNITS,
    MULTIPLIED,
    SHARES,
    Layer,
    Written,
    base_of,
    qualified,
    replicated,
    scatters,
    size_of,
)
from slapo_rewrite.model.tree import Node, Tree
from slapo_rewrite.runtime.tensor_parallel import Blocks, ReduceScatter
from slapo_rewrite.sharding import (
    ArgumentChange,
    Attribute,
    ModuleBoundary,
    ParallelLoss,
    ShardedParameter,
    ShardingRequest,
    ShardingResult,
    Statistic,
    layer_key,
)
from slapo_rewrite.sharding import Place as FollowedPlace
from slapo_rewrite.source.sites import Site


def collect(
    tree: Tree,
    states: Mapping[str, ModuleState],
    asked: ShardingRequest,
    followed: ShardingResult,
    files: OutputFiles,
    before: tuple[Directive, ...],
) -> None:
    """Adds to the files what was asked and what follows from it.

    Args:
        tree: The module tree.
        states: What was asked of each module path.
        asked: The layers and split parameters among it.
        followed: What follows from the sharded sizes.
        files: Take the changes.
        before: The directives that have changed the source already.

    Raises:
        RewriteError: There is no place for something.
    """
    _Collection(tree, states, files, before).run(asked, followed)


class _Collection:
    def __init__(
        self,
        tree: Tree,
        states: Mapping[str, ModuleState],
        files: OutputFiles,
        before: tuple[Directive, ...],
    ) -> None:
        self.tree, self.states, self.files, self.before = tree, states, files, before
        self.sources = files.sources
        self.placement = Placement(states, files)

    def run(self, asked: ShardingRequest, followed: ShardingResult) -> None:
        """Everything, in order."""
        layers, parameters = asked.layers, asked.parameters
        for path, state in self.states.items():
            node = self.tree.nodes[path]
            self._check_called(path, state)
            if path in layers:
                assert node.owner is not None
                layer = self._fitted(node, layers[path], followed)
                layer = self._with_parts(node, layer, followed)
                causes = merged_causes(
                    (s.cause for s in state.shards), (s.cause for s in state.syncs)
                )
                base = base_of(node.cls)
                assert base is not None
                if base is node.cls and state.replacement:
                    pass  # a layer in another's place, below
                elif base is node.cls:
                    self.files.making(node).changes.at_site(node, UseParallelLayer(layer), causes)
                else:
                    what: Change = DeriveFrom(layer, base.__name__)
                    self.placement.home(node).changes.add(node.path, AtBase(), what, causes)
            if state.replacement:
                new = state.replacement
                causes = merged_causes([new.cause], (s.cause for s in state.shards + state.syncs))
                own = layers.get(path) if base_of(node.cls) is node.cls else None
                fitted = own and self._fitted(node, own, followed)
                fitted = fitted and self._with_parts(node, fitted, followed)
                what = ReplaceModule(new.target, new.arguments, new.weights, fitted)
                self.files.making(node).changes.at_site(node, what, causes)
                if new.weights:
                    keep_checkpoints(self.files, node, MAPPED, (new.cause,))
            for shard in state.shards if path in parameters else ():
                self._split_parameter(node, shard, followed)
            self._syncs(node, asked.borders.get(path, ()), path in layers, followed)
            if state.decompose:
                self._decompose(node, state, layers.get(path), followed)
            for change, cause in state.asks(Requested):
                change.place(self.placement, node, cause)
        self._sizes(layers, parameters, followed)
        for loss in followed.losses.values():
            self._loss(loss)
        for statistic in followed.statistics:
            self._statistic(statistic)
        for path, layer in layers.items():
            self._read_sizes(self.tree.nodes[path], layer)
        self._keep_treatment()

    def _keep_treatment(self) -> None:
        """Whatever changes the file takes the model's classes out of transformers."""
        changes = (known for output in self.files for known in output.changes.causes.values())
        cuts = [state.cut.cause for state in self.states.values() if state.cut]
        causes = merged_causes(
            self.before, cuts, *(why for known in changes for why in known.values())
        )
        for node in specially_treated(self.tree) if causes else ():
            keep_treatment(self.files, node, causes[:1])

    def _check_called(self, path: str, state: ModuleState) -> None:
        """What happens when a module is called cannot be asked of one that is not."""
        asked = [s.cause for s in (*state.syncs, state.decompose) if s]
        asked += [cause for change, cause in state.asks(Requested) if change.is_called]
        if state.inlined and asked:
            raise errors.ConflictingEdits(
                f"`{path}` is inlined, so it is not called any more",
                at=asked[0].at,
                cause=state.inlined.cause,
                hint="schedule what it holds, or the module that calls it",
            )

    def _split_parameter(self, node: Node, shard: Shard, followed: ShardingResult) -> None:
        site = find_parameter_site(self.sources, node, shard.name)
        home = self.files.of_file(site.file)
        if site.file is not home.file:
            raise errors.UnfollowableConstruction(
                f"`{node.path}.{shard.name}` is made in another file, {site.file.display}",
                at=site.file.at(site.value),
                cause=shard.cause,
            )
        start = home.file.span(site.value)[0]
        home.changes.sites[start] = site
        parts = self._parts(node, shard, site, length_of(site, shard.axis), followed)
        change = ShardParameter(shard.name, shard.axis, parts)
        home.changes.add(node.path, AtParameter(start, (shard.name,)), change, (shard.cause,))

    def _syncs(
        self,
        node: Node,
        borders: Sequence[ModuleBoundary],
        is_layer: bool,
        followed: ShardingResult,
    ) -> None:
        """The collectives at a module's borders, those that a layer carries out itself apart."""
        syncs = self.states[node.path].syncs if borders else ()
        sides: dict[tuple[str, str | None], list[Sync]] = {}
        for border in borders:
            sync = syncs[border.number]
            if isinstance(sync.op, Function):
                self._attach(node, sync, sync.op)
            elif sync.op != "keep":
                if (node.path, border.number) in followed.summed:
                    sync = replace(sync, partial_gradient=True)
                side = "result" if sync.mode == "fwd_post" else "argument"
                sides.setdefault((side, sync.of), []).append(sync)
        for (side, of), asked in sorted(
            sides.items(), key=lambda item: (item[0][0], item[0][1] or "")
        ):
            causes = merged_causes(s.cause for s in asked)
            collectives = tuple(map(_collective, asked))
            home = self.files.computing(node.cls)
            outside = is_layer or home is None or self.placement.is_outside(node, home)
            if home is not None and not outside:
                what = (
                    SyncInput(collectives, of)
                    if side == "argument"
                    else SyncOutput(
                        collectives, node.path in followed.nested, self._containers(node.cls, home)
                    )
                )
                home.changes.add(node.path, AtForward(side, of or ""), what, causes)
            elif of is not None:
                raise errors.Unsupported(
                    f"`{of}` of `{node.path}` can only be synchronised where `forward` begins, and "
                    "that is not written in a file that is rewritten",
                    at=causes[0].at,
                    hint="put the sync on a module around it that takes the value as an argument",
                )
            elif node.owner is None:
                raise errors.Unsupported(
                    "the model itself is not called by another module", at=causes[0].at
                )
            else:
                calling, caller, relative = self.placement.calling(node)
                name = next(iter(inspect.signature(node.live.forward).parameters), None)
                call = SyncCall(collectives, side, name)
                calling.changes.add(caller.path, AtCalls(relative, side), call, causes)

    def _decompose(
        self, node: Node, state: ModuleState, layer: Layer | None, followed: ShardingResult
    ) -> None:
        """The product and the sum where the layer is called, with what else the layer does."""
        assert node.owner is not None and state.decompose is not None
        cause = state.decompose.cause
        hooks = [s.cause for s in state.syncs if isinstance(s.op, Function)]
        wraps = [cause for _, cause in state.asks(WrapForward)]
        around = _around(layer, state.decompose)
        if hooks or wraps or around is None:
            others = [*hooks, *wraps, *state.causes()]
            raise errors.Unsupported(
                f"`{node.path}` cannot be decomposed: what else is asked of it needs the layer "
                "to be called",
                at=cause.at,
                cause=others,
                hint="a layer split over its inputs is decomposed with fwd_post all_reduce, one "
                "split over its outputs without a gather",
            )
        calling, caller, relative = self.placement.calling(node)
        shared = frozenset(name for path, name in followed.shared if path == node.path)
        product = MULTIPLIED[qualified(node.cls)]
        what = AddBias(product, *around, state.decompose.adds, shared)
        causes = merged_causes([cause], state.causes())
        calling.changes.add(caller.path, AtCalls(relative, "bias"), what, causes)

    def _attach(self, node: Node, sync: Sync, function: Function) -> None:
        causes = (sync.cause,)
        places = self.files.making(node).changes
        at, owner = places.site(node, causes)
        place = BehindSite(at.start, at.index, (sync.mode, function.name))
        places.add(owner.path, place, RegisterHook(sync.mode, function), causes)

    def _containers(self, cls: type, home: OutputFile) -> tuple[tuple[str, str], ...]:
        """The classes that `forward` returns its values in, and the first field of each."""
        forward = home.classes.method(cls.__name__, "forward")
        known = vars(sys.modules[cls.__module__])
        found = {}
        for statement in returns(forward) if forward else ():
            if isinstance(statement.value, ast.Call):
                name = ast.unparse(statement.value.func)
                holder = known.get(name)
                if dataclasses.is_dataclass(holder):
                    found[name] = dataclasses.fields(holder)[0].name
                elif isinstance(holder, type) and hasattr(holder, "_fields"):
                    found[name] = holder._fields[0]
        return tuple(sorted(found.items()))

    def _fitted(self, node: Node, layer: Layer, followed: ShardingResult) -> Layer:
        """The layer with what followed of how it may be split."""
        key = layer_key(node)
        if key in followed.replicated:
            return replicated(layer, f"self.{followed.replicated[key]}") or layer
        unit = followed.units.get(key)
        return replace(layer, unit=unit) if unit and layer.name in IN_UNITS else layer

    def _with_parts(self, node: Node, layer: Layer, followed: ShardingResult) -> Layer:
        """The layer with the blocks that its split axis packs written where it is made."""
        state = self.states[node.path]
        shard = next((s for s in state.shards if s.as_sizes), state.shards[0])
        if "parts" not in dict(layer.keywords):
            return layer
        site, size = None, None
        if base_of(node.cls) is node.cls:
            site, call = find_site(self.sources, node), None
            if state.replacement is not None and state.replacement.arguments is not None:
                call = ast.parse(f"_({state.replacement.arguments})", mode="eval").body
            call = call or site.value
            size = size_of(layer, call) if isinstance(call, ast.Call) else None
        parts = self._parts(node, shard, site, size, followed)
        return replace(layer, keywords=(*dict(layer.keywords, parts=parts).items(),))

    def _parts(
        self,
        node: Node,
        shard: Shard,
        site: Site | None,
        size: ast.expr | None,
        followed: ShardingResult,
    ) -> int | Written | Blocks:
        """How the blocks of a tensor are written at its site, or in its own class."""
        full = getattr(node.live, shard.name).shape[shard.axis]
        if site is None:
            return fixed(shard, full)
        classes = self.files.of_file(site.file).classes
        writer = BlockWriter(self.sources, classes, node, site)
        cuts = [(place, number) for path, place, number in followed.cuts if path == node.path]
        return writer.parts(shard, full, size, sorted(cuts, key=lambda cut: cut[0].line))

    def _sizes(
        self,
        layers: Mapping[str, Layer],
        parameters: Mapping[str, Sequence[ShardedParameter]],
        followed: ShardingResult,
    ) -> None:
        """What follows from the shards, on every module that holds sharded parameters."""
        owners: dict[str, list[Directive]] = {}
        for path in (*layers, *parameters):
            node = self.tree.nodes[path]
            owner = node.owner if path in layers else node
            if owner is not None:
                owners.setdefault(owner.path, []).extend(s.cause for s in self.states[path].shards)
        for path, holder in self._holders(owners).items():
            cls, causes = self.tree.nodes[path].cls, merged_causes(owners[holder.path])
            home = self.files.constructing(cls) or self.files.making(self.tree.nodes[path])
            shared = _sharing(cls, followed)
            for attribute in sorted(followed.sizes | followed.repeats, key=lambda a: a.name):
                if attribute != Attribute(cls, holder.cls, attribute.name):
                    continue
                what: Change = ShardAttribute(shared if attribute in followed.few else None)
                if attribute in followed.repeats and shared:
                    what = DivideByReplicas(shared)
                home.changes.add(path, EndOfConstructor(attribute.name), what, causes)
        for path, state in self.states.items():
            for share in state.shares:
                self._share_attribute(self.tree.nodes[path], share, followed)
        for change in followed.arguments:
            self._argument(change, owners, followed)
        Gradients(self.tree, self.states, self.files, followed).share(owners, self._holders(owners))

    def _share_attribute(self, node: Node, share: Share, followed: ShardingResult) -> None:
        """An attribute that the schedule itself splits."""
        few = {(a.cls, a.name) for a in followed.few if a.asked}
        layer = _sharing(node.cls, followed) if (node.cls, share.name) in few else None
        what = ShardAttribute(layer)
        home = self.files.constructing(node.cls) or self.files.making(node)
        home.changes.add(node.path, EndOfConstructor(share.name), what, (share.cause,))

    def _argument(
        self,
        change: ArgumentChange,
        owners: Mapping[str, list[Directive]],
        followed: ShardingResult,
    ) -> None:
        """An argument written differently, below sharded parameters or where their parts come."""
        place = change.place
        at = _at_node("argument", place, change.index)
        holders, home = self._holders(owners), self.files.at(place)
        paths = [
            path
            for path, node in self.tree.nodes.items()
            if any(home.classes.holds(c, place.line) for c in self.files.lineage(node.cls, home))
        ]
        if not paths:
            source = self.states.get(change.source or "")
            text = home.file.line(place.line)
            also = [s.cause.at for s in source.shards if s.cause.at] if source else []
            raise errors.UnfollowableSize(
                "this number would be a rank's share, and stands in a function of no class",
                at=errors.Span(home.file.display, place.line, place.column + 1, 1, text),
                also=also[:1],
                hint="keep the size in an integer attribute of the module, and pass it",
            )
        whole = followed.given_whole - followed.given_parts
        paths = [path for path in paths if (place, path) not in whole]
        below = [path for path in paths if path in holders]
        for path in below or paths:
            causes = [s.cause for s in self.states[change.source].shards] if change.source else []
            causes = owners[holders[path].path] if path in holders else causes
            what = ChangeArgument(change.template, change.index)
            home.changes.add(path, at, what, merged_causes(causes))

    def _loss(self, loss: ParallelLoss) -> None:
        """A loss of the parts that a head gives."""
        state, place = self.states[loss.head], loss.place
        causes = merged_causes((s.cause for s in state.shards), (s.cause for s in state.syncs))
        head = loss.head[len(loss.owner) + 1 if loss.owner else 0 :]
        change = VocabParallelLoss(loss.function, head, loss.names)
        at = _at_node("loss", place)
        self.files.at(place).changes.add(loss.owner, at, change, causes)

    def _statistic(self, statistic: Statistic) -> None:
        """A mean or variance over all ranks, of features that a parameter is split along."""
        place, name = statistic.place, statistic.parameter
        causes = [s.cause for s in self.states[statistic.owner].shards if s.name == name]
        change, at = ParallelNormStatistic(statistic.function, name), _at_node("statistic", place)
        self.files.at(place).changes.add(statistic.owner, at, change, merged_causes(causes))

    def _read_sizes(self, node: Node, layer: Layer) -> None:
        """Whoever reads the size of a layer that is split means the whole layer's."""
        share, whole = SHARES[layer.name]
        files = [output for output in self.files if f".{share}" in output.file.text]
        causes = tuple(s.cause for s in self.states[node.path].shards)
        above = node.parent
        while above is not None and files:
            home = self.placement.home(above)
            relative = node.path[len(above.path) + 1 if above.path else 0 :]
            for reading in readings(home.classes, above.cls.__name__, relative, share):
                if whole is None and in_forward(home.classes, above.cls.__name__, reading):
                    continue  # the share was followed there, to wherever it is used
                if whole is None:
                    raise errors.UnfollowableSize(
                        f"`{node.path}` is split, so its `{share}` is this rank's share, and is "
                        "read here",
                        at=home.file.at(reading),
                        cause=causes,
                        hint="read the size from where the layer's constructor has it",
                    )
                end = (reading.end_lineno or 0, reading.end_col_offset or 0)
                at = AtNode("read", end[0], 0, *end)
                home.changes.add(above.path, at, ReadFullSize(whole), causes)
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


def _at_node(kind: str, place: FollowedPlace, what: object = ()) -> AtNode:
    """Where a run of the model came by, as a place in a class."""
    ends = (place.line, place.column, place.end_line, place.end_column)
    return AtNode(kind, *ends, what=what)


def _around(
    layer: Layer | None, asked: Decompose
) -> tuple[Collective | None, Collective | None] | None:
    """The collectives before and after a layer's product; None where the layer does more."""
    if layer is None:
        return None, None
    more = dict(layer.keywords).keys() - {"parts"}
    if layer.name.startswith("ColumnParallel") and more <= {"reduce_input_gradient"}:
        return (None if more else Collective("all_reduce_gradient")), None
    if layer.name.startswith("RowParallel") and not more:
        return None, Collective("all_reduce")
    if layer.name.startswith("RowParallel") and scatters(layer) and not asked.adds:
        reduce = dict(layer.keywords)["reduce"]
        assert isinstance(reduce, ReduceScatter)
        return None, Collective("reduce_scatter", (("axis", reduce.axis),))
    return None


def _sharing(cls: type, followed: ShardingResult) -> str | None:
    """A layer that a class makes of which several ranks may hold the same heads."""
    return min((name for maker, name in followed.replicated if maker is cls), default=None)


def _collective(sync: Sync) -> Collective:
    """The call that carries a sync out."""
    if sync.mode == "bwd_post":
        return Collective("all_reduce_gradient")
    assert isinstance(sync.op, str)
    keywords: dict[str, object] = {}
    if sync.op == "all_to_all":
        keywords = {"gather_axis": sync.axis, "scatter_axis": sync.scatter_axis}
    elif sync.axis is not None and (sync.op, sync.axis) != ("all_gather", -1):
        keywords = {"axis": sync.axis}
    if sync.partial_gradient:
        keywords["tensor_parallel_output_grad"] = True
    return Collective(sync.op, tuple(keywords.items()))
