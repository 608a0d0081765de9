"""Installs the sharded layers in the model for a run as a rank, and restores the original ones.

The layers, the sharded parameters, the collectives at the borders of modules and the marked
integers go into the live model itself; all of that is undone when the run ends.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from slapo_rewrite.code.text import joined_path
from slapo_rewrite.groups import grouped
from slapo_rewrite.model.calls import around_layer, forward_as_call
from slapo_rewrite.model.layers import Layer, Unit, layer_below, replicated
from slapo_rewrite.model.results import tensors
from slapo_rewrite.model.tree import Node
from slapo_rewrite.model.uncalled import HOOKS
from slapo_rewrite.runtime.guards import watch_registrations
from slapo_rewrite.sharding.boundaries import (
    cross_value,
    enter_border,
    enter_layer,
    leave_border,
    leave_layer,
)
from slapo_rewrite.sharding.functional_layers import is_linear
from slapo_rewrite.sharding.local_values import install_values
from slapo_rewrite.sharding.own_backward import made_of_parts, refused
from slapo_rewrite.sharding.packed_parts import ratio_of
from slapo_rewrite.sharding.placements import (
    PARTIAL,
    REPLICATE,
    SHARD,
    PlacementError,
    State,
)
from slapo_rewrite.sharding.rank_state import Run, memory_of
from slapo_rewrite.sharding.tracked_sizes import Attribute, Size
from slapo_rewrite.sharding.types import (
    Indivisible,
    ModuleBoundary,
    ShardedParameter,
    layer_key,
)


@contextlib.contextmanager
def installed(run: Run, device: torch.device) -> Iterator[None]:
    """Installs sharded layers, sharded parameters, collectives and marked integers meanwhile."""
    undo: list[Callable[[], None]] = [_stop_watching]
    try:
        with device:
            places = _places(run)
            for path, layer in run.request.layers.items():
                node = run.tree.nodes[path]
                _install_layer(run, node, layer, places.get(id(node.live), []), undo)
            for path, shards in run.request.parameters.items():
                _install_parameters(run, run.tree.nodes[path], shards, undo)
        for path, borders in run.request.borders.items():
            _install_borders(run, run.tree.nodes[path], borders, undo)
        install_values(run, functools.partial(cross_value, run), undo)
        _know_parameters(run)
        for path, name in sorted(run.wanted.once):
            _install_once(run, run.tree.nodes[path], name, undo)
        for path, holder in run.request.holders(run.tree, run.request.attributes).items():
            _mark_sizes(run, run.tree.nodes[path], holder, undo)
        _watch_functions(run, undo)
        crossed = [_live_at(run.tree.nodes[path]) for path in run.request.borders]
        with forward_as_call([*run.layers, *crossed]):
            yield
    finally:
        for action in reversed(undo):
            action()


def _stop_watching() -> None:
    """Removes the global hooks on registration of modules, which sharded layers install."""
    for watch in watch_registrations():
        watch.remove()
    watch_registrations.cache_clear()


def _watch_functions(run: Run, undo: list[Callable[[], None]]) -> None:
    """Intercepts calls of `torch.autograd.Function`s, as torch's own operations are."""
    function: Any = torch.autograd.Function
    plain = vars(function)["apply"]  # written in Python or, since torch 2.14, in C

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if run.depth:
            return plain.__get__(None, cls)(*args, **kwargs)
        if cls is CheckpointFunction:  # its gradient is that of the function that it runs
            computed, _, *operands = args
            return computed(*operands)
        given, before = list(tensors((args, kwargs))), len(run.alive)
        states = [run.flow.of(t) for t in given]
        run.flow.check_backward(f"the `backward` of `{cls.__name__}`", given)
        made: list[torch.Tensor] | None = None
        if any(state.kind != REPLICATE for state in states):
            made = made_of_parts(run, cls, args, states)
        result = plain.__get__(None, cls)(*args, **kwargs)
        results = list(tensors(result))
        if made is not None:
            for one, other in zip(made, results, strict=True):
                run.same(one, other)
            return result
        inside = [run.flow.of(t) for t in run.alive[before:]]
        if any(state.kind != REPLICATE for state in inside):
            raise refused(cls, inside, "it makes that itself")
        known = run.flow.joined(cls.__name__, given, states)
        for tensor in results:
            run.flow.set(tensor, known)
            run.alive.append(tensor)
        return result

    function.apply = classmethod(apply)
    undo.append(lambda: setattr(function, "apply", plain))


def _places(run: Run) -> dict[int, list[tuple[dict[str, nn.Module | None], str]]]:
    """The places of each module, by its id: its parents' `_modules`, and its name there."""
    each = {id(node.live): node.live._modules for node in run.tree.nodes.values()}.values()
    return grouped(
        (id(held), (modules, name)) for modules in each for name, held in modules.items()
    )


def _install_layer(
    run: Run,
    node: Node,
    layer: Layer,
    places: list[tuple[dict[str, nn.Module | None], str]],
    undo: list[Callable[[], None]],
) -> None:
    if not places:  # left out of a shortened list
        return
    _check_plain(node)
    head = dict(run.wanted.replicated).get(layer_key(node))
    try:
        new = _make(layer, node.live) if head is None else _make_replicated(run, node, layer, head)
    except ValueError as error:
        raise Indivisible(f"{node.shown}: {error}") from error
    new.train()
    _watch_layer(run, node, new)
    object.__setattr__(new, "_followed_path", node.path)
    run.layers.append(new)
    if is_linear(node.live):
        run.linear.append(new)
    for modules, name in places:
        modules[name] = new
        undo.append(functools.partial(modules.__setitem__, name, node.live))
    _know_tensors(run, node, layer, new)


def _watch_layer(run: Run, node: Node, new: nn.Module) -> None:
    """Intercepts the layer's `forward`, and keeps what a subclass of the layer does around it."""
    enter, leave = functools.partial(enter_layer, run), functools.partial(leave_layer, run)
    if layer_below(node.cls) is None:
        new.register_forward_pre_hook(enter, with_kwargs=True)
        new.register_forward_hook(leave)
        return
    new.__class__ = around_layer(node.cls, type(new), enter, leave)
    held = vars(node.live)
    tables = [(vars(new)[name], held[name]) for name in ("_parameters", "_buffers", "_modules")]
    for mine, own in (*tables, (vars(new), held)):
        mine.update({name: value for name, value in own.items() if name not in mine})


def _check_plain(node: Node) -> None:
    """Raises `PlacementError` if a module has hooks, or a `forward` as an instance attribute."""
    live: Any = node.live
    hooked = (live, *live._parameters.values())
    if any(getattr(each, table, None) for each in hooked for table in HOOKS):
        reason = "has hooks"
    elif "forward" in vars(live):
        reason = "has a `forward` that is an attribute of the instance"
    else:
        return
    raise PlacementError(
        f"{node.shown} {reason}, which would get only a rank's part",
        "move what they do into the class's `forward`, or leave the layer whole",
        node.path,
    )


def _know_tensors(run: Run, node: Node, layer: Layer, new: Any) -> None:
    """Records the placements of a sharded layer's tensors, which other code may read directly."""
    ratio = ratio_of(dict(layer.keywords))
    replicated_shard = getattr(new, "replicas", 1) > 1
    originals = {**node.live._parameters, **node.live._buffers}
    for name, tensor in [*new._parameters.items(), *new._buffers.items()]:
        whole = originals.get(name)
        if tensor is None or whole is None:
            continue
        run.replaced[memory_of(whole)] = f"{node.path}.{name}"
        shape = run.whole[id(tensor)] = tuple(whole.shape)
        split = run.split_axes(tensor)
        if split:
            axis = split[0]
            packed = getattr(new.sharded_parameters[name], "blocks", None)
            packed = packed or tuple(shape[axis] * r // sum(ratio) for r in ratio)
            run.blocks[id(tensor)] = {axis: packed}
            past_call, read = (replicated_shard, axis - len(shape)), f"{node.path}.{name}"
            run.flow.set(tensor, State(SHARD, node.path, *past_call, read=read))
        else:
            grad_reduced = node.path if (node.path, name) in run.wanted.shared else None
            run.flow.set(tensor, State(grad_reduced=grad_reduced))
        run.alive.append(tensor)


def _make_replicated(run: Run, node: Node, layer: Layer, head: str) -> nn.Module:
    """A layer whose heads are replicated on several ranks of the simulated group."""
    other = replicated(layer, Unit(head))
    assert other is not None and node.owner is not None
    keywords = (*other.keywords, ("multiple_of", int(getattr(node.owner.live, head))))
    new: Any = _make(replace(other, keywords=keywords), node.live)
    if run.replicas not in (1, new.replicas):
        raise ValueError("the layers have different numbers of heads")
    run.replicas = new.replicas
    made: nn.Module = new
    return made


def _make(layer: Layer, original: nn.Module) -> nn.Module:
    """The sharded replacement of a layer, on this rank of the simulated group."""
    cls = getattr(importlib.import_module(f"slapo_rewrite.runtime.{layer.module}"), layer.name)
    known: Any = original
    if isinstance(original, nn.Transformer):
        known = _of_transformer(original.encoder.layers[0])
        known.num_encoder_layers = len(original.encoder.layers)
        known.num_decoder_layers = len(original.decoder.layers)
    elif isinstance(original, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        known = _of_transformer(original)
    elif isinstance(original, nn.MultiheadAttention):
        known = {"add_bias_kv": original.bias_k is not None, "bias": original.in_proj_bias}
        known = SimpleNamespace(**{**vars(original), **known})
    arguments = {
        name: getattr(known, name)
        for name in layer.arguments
        if name not in ("device", "dtype", "bias")
    }
    if "bias" in layer.arguments:
        arguments["bias"] = known.bias is not None
    new: nn.Module = cls(**arguments, **dict(layer.keywords))
    return new.to(next((p.dtype for p in original.parameters()), None))


def _of_transformer(layer: Any) -> SimpleNamespace:
    """The constructor's arguments of a layer of `nn.Transformer`."""
    return SimpleNamespace(
        d_model=layer.self_attn.embed_dim,
        nhead=layer.self_attn.num_heads,
        dim_feedforward=layer.linear1.out_features,
        dropout=layer.dropout.p,
        activation=layer.activation,
        layer_norm_eps=layer.norm1.eps,
        batch_first=layer.self_attn.batch_first,
        norm_first=layer.norm_first,
        bias=layer.linear1.bias,
    )


def _install_parameters(
    run: Run, node: Node, shards: Sequence[ShardedParameter], undo: list[Callable[[], None]]
) -> None:
    world = dist.get_world_size()
    for shard in shards:
        held = node.live._parameters if shard.name in node.live._parameters else node.live._buffers
        old: Any = held[shard.name]
        shape = list(old.shape)
        total = sum(shard.parts)
        whole = [shape[shard.axis] * p // total for p in shard.parts]
        shape[shard.axis] = sum(-(-b // world) for b in whole)
        new: Any = torch.zeros(shape, dtype=old.dtype)
        part = nn.Parameter(new) if isinstance(old, nn.Parameter) else new
        held[shard.name] = part
        run.blocks[id(part)] = {shard.axis: tuple(whole)}
        run.whole[id(part)] = tuple(old.shape)
        run.replaced[memory_of(old)] = joined_path(node.path, shard.name)
        run.flow.set(part, State(SHARD, node.path))
        undo.append(lambda h=held, n=shard.name, o=old: h.__setitem__(n, o))  # type: ignore[misc]


def _install_once(run: Run, node: Node, name: str, undo: list[Callable[[], None]]) -> None:
    """Makes a whole parameter a partial sum while its module runs."""
    live = node.live

    def enter(module: nn.Module, args: Any) -> None:
        summand = run.aliased(getattr(module, name))
        run.flow.set(summand, State(PARTIAL, node.path))
        vars(module)[name] = summand

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        vars(module).pop(name, None)

    undo.append(live.register_forward_pre_hook(enter).remove)
    undo.append(live.register_forward_hook(leave, always_call=True).remove)


def _install_borders(
    run: Run, node: Node, borders: Sequence[ModuleBoundary], undo: list[Callable[[], None]]
) -> None:
    live = _live_at(node)
    borders = [b for b in borders if b.value is None]
    after = [b for b in borders if b.mode == "fwd_post"]
    for border in after:
        hook = functools.partial(leave_border, run, node, border)
        undo.append(live.register_forward_hook(hook).remove)
    # Each is prepended, so the last one is registered first.
    for border in reversed([b for b in borders if b not in after]):
        enter = functools.partial(enter_border, run, node, border)
        handle: Any = live.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        undo.append(handle.remove)


def _live_at(node: Node) -> nn.Module:
    """The module installed at a place: the sharded layer, where there is one."""
    parent = node.parent
    live = parent.live._modules.get(node.name) if parent else None
    return live if isinstance(live, nn.Module) and hasattr(live, "_followed_path") else node.live


def _know_parameters(run: Run) -> None:
    split = {(p, s.name) for p, shards in run.request.parameters.items() for s in shards}
    named: dict[nn.Parameter, list[tuple[str, str]]] = {}  # tied ones have several names
    for path, node in run.tree.nodes.items():
        if path in run.request.layers:
            continue
        for name, parameter in node.live._parameters.items():
            if parameter is None:
                continue
            if (path, name) in split:
                run.flow.set(parameter, State(SHARD, path))
            else:
                named.setdefault(parameter, []).append((path, name))
    for parameter, keys in named.items():
        run.replaced.pop(memory_of(parameter), None)
        if run.wanted.shared.isdisjoint(keys):
            run.flow.set(parameter, State(parameters=frozenset(keys)))
            continue
        path, name = keys[-1]
        run.summed[memory_of(parameter)] = joined_path(path, name)
        read = nn.Parameter(parameter.detach(), parameter.requires_grad)
        run.flow.set(read, State(grad_reduced=path))
        run.read_as[id(parameter)] = read


def _mark_sizes(run: Run, node: Node, holder: Node, undo: list[Callable[[], None]]) -> None:
    module = sys.modules.get(node.cls.__module__)
    if node.path in run.request.layers or not run.editable(getattr(module, "__file__", "") or ""):
        return
    held = node.live.__dict__
    world = dist.get_world_size()
    wanted = run.request.attributes.get(node.path, frozenset())
    for name, value in list(held.items()):
        if type(value) is int and value > 1 and (name in wanted or not name.startswith("_")):
            attribute = Attribute(node.cls, holder.cls, name, name in wanted)
            if attribute.requested or attribute in run.followed.sizes:
                if value < world and run.replicas * value == world:
                    run.followed.few.add(attribute)
                elif value % world:
                    raise Indivisible(f"`{node.path or 's'}.{name}` is {value}")
                else:
                    run.followed.even.add(value)
                held[name] = Size.of(max(1, value // world), [attribute])
            elif attribute in run.followed.repeats:
                if value % run.replicas:
                    raise Indivisible(f"`{node.path or 's'}.{name}` is {value}")
                held[name] = Size.of(value // run.replicas, [attribute])
            else:
                held[name] = Size.of(value, [attribute])
            undo.append(lambda n=name, v=value: held.__setitem__(n, v))  # type: ignore[misc]
