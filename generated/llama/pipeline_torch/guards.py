# Written by slapo-rewrite 0.2.0 for modeling_llama.py; rewrite.json says from what.
"""Checks that stop a training run whose weights would not be those of one process."""

import warnings
from functools import cache, partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.modules import module as hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .copies import compare_gradients, note_copies
from .shards import are_alike, named_world, parts_in, rank, world_size

# Optimizers that update each element separately, and so a part as within the whole.
BY_ELEMENT = (
    optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD, optim.SparseAdam,
)  # fmt: skip
# Sharded layers that have run: an optimizer knows its parameters, but not their layers.
layers_run: WeakSet[Any] = WeakSet()


@cache
def watch_registrations() -> tuple[Any, ...]:
    """Installs the checks below as hooks of torch's, once for all models."""
    return (
        hooks.register_module_module_registration_hook(refuse_wrappers),
        hooks.register_module_parameter_registration_hook(refuse_reworked),
        register_optimizer_step_pre_hook(look_at_optimizer),
    )


def look_at_optimizer(optimizer: Any, *_: object) -> None:
    """Before an optimizer's step: checks that it can train parts of weights."""
    if torch.compiler.is_compiling() or world_size() == 1:
        return
    is_new = vars(optimizer).get("known_state") is not optimizer.state
    optimizer.known_state = optimizer.state  # another after `load_state_dict`
    for layer in layers_run if is_new else ():  # FSDP2 replaces parameters
        mark_parts(layer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(hasattr(p, "model_parallel") for p in parameters):
        return
    note_copies(parameters, optimizer.state, is_new)
    if is_new:
        refuse_replicas(optimizer)
    shares_out = "process_group" in vars(optimizer)  # as ZeRO-1 does
    if is_new and not (isinstance(optimizer, BY_ELEMENT) or shares_out):
        said = (
            f"`{type(optimizer).__name__}` trains this rank's parts of split weights. "
            "Unless it works element by element, as AdamW does, its steps differ from "
            "those for the original model"
        )
        if type(optimizer) in vars(optim).values():  # of torch's, known not to
            raise RuntimeError(f"{said}. Train split weights with one that does")
        warnings.warn(said, stacklevel=2)


def refuse_reworked(layer: nn.Module, name: str, parameter: object) -> None:
    """Refuses pruning and weight norm of a sharded parameter: they need all of it."""
    of, _, kind = name.rpartition("_")
    parts = getattr(layer, "sharded_parameters", {})
    if of in parts and kind in ("orig", "g", "v") and world_size() > 1:
        refuse_beside_part(name, layer)


def refuse_beside_part(name: str, layer: nn.Module) -> None:
    """Raises, and says what to do instead of adding parameters to a sharded layer."""
    raise RuntimeError(
        f"`{name}` of `{type(layer).__name__}` would work on this rank's part, and each "
        "rank would train different parameters. Add LoRA adapters with "
        "`lora.add_adapters` of a model rewritten `--with add_adapters`. Exclude the "
        "layer from other adapters, parametrizations and pruning"
    )


def refuse_wrappers(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Refuses wrappers and replacements of sharded layers that train other weights.

    A parent with `save_pretrained` gets one that refuses to write parts.
    """
    if module is None or world_size() == 1:
        return
    # `torch.nn.utils.parametrize` first registers `parametrizations`.
    parametrized = name == "parametrizations" and hasattr(parent, "sharded_parameters")
    before = next((c for n, c in parent.named_children() if n == name), None)
    if parametrized or is_adapter(module, before):
        refuse_beside_part(name, parent)
    if hasattr(before, "sharded_parameters") and is_made_of(before, module):
        raise RuntimeError(
            f"`{name}` would be made from this rank's part alone: replace or resize layers "
            "in the original, in one process, save it, and load that checkpoint"
        )
    can_save = hasattr(type(parent), "save_pretrained")
    # A `forward` may slice a list of layers: such a list is not searched each time.
    if (can_save or "process_group" in vars(parent)) and parts_in(module):
        if can_save:
            vars(parent)["save_pretrained"] = partial(save_whole, parent)
        refuse_replicas(parent)


def refuse_replicas(holder: Any) -> None:
    """Refuses data parallelism that copies parts over others or clips by their norm."""
    replicas, ranks = vars(holder).get("process_group"), dist.get_process_group_ranks
    if not isinstance(replicas, dist.ProcessGroup):
        return
    if len({*ranks(replicas)} & {*ranks(named_world().group)}) > 1:
        raise RuntimeError(
            f"`{type(holder).__name__}` would treat the tensor-parallel ranks as replicas "
            "and overwrite their parts: give it the data-parallel group, or train the "
            "model itself (for Trainer and accelerate see slapo-rewrite's examples/trainer)"
        )
    if hasattr(holder, "clip_grad_norm_"):  # FSDP1 flattens parts and copies into one
        raise RuntimeError(
            f"`{type(holder).__name__}` would clip by the norm of this rank's parts: use "
            "`fully_shard` and `tensor_parallel.clip_grad_norm_`"
        )


def is_adapter(module: nn.Module, layer: Any) -> bool:
    """Whether a module wraps a sharded layer and adds parameters, as LoRA does."""
    if not hasattr(layer, "sharded_parameters") or hasattr(layer, "takes_adapters"):
        return False
    held = layer in module.modules()
    return held and not {*module.parameters()} <= {*layer.parameters()}


def is_made_of(layer: Any, module: nn.Module) -> bool:
    """Whether a module was made from a sharded layer's part: a copy, or quantised."""
    part, new = getattr(layer, "weight", None), getattr(module, "weight", None)
    if layer in module.modules() or hasattr(module, "sharded_parameters"):
        return False
    held = *module.parameters(), *module.buffers()
    if any(t.ndim and not t.is_floating_point() for t in held):
        return True
    if not type(part) is type(new) is nn.Parameter or part[:1].shape != new[:1].shape:
        return False
    known = not (part.is_meta or new.is_meta) and bool(part.any())
    return known and torch.equal(part[:1], new[:1].to(part))


def check_parts(layer: Any, ids: Tensor | None = None) -> None:
    """Checks, when a layer first runs, that this rank has its own part of the weights.

    Refuses another group than the layer was built in, and the same weights on every
    rank: one rank's part was copied over the others, or all drew the same numbers.
    `ids` must be the same on all ranks; that is checked again on the first run in eval
    mode.
    """
    shard, world, size = layer.sharded_parameters["weight"], named_world(), world_size()
    if size == 1:  # reading the weight would advance `spectral_norm`
        shard.check_group()
        return
    weight, is_compiling = layer.weight, torch.compiler.is_compiling()
    # The id, since a copied layer also has a copy of the first one's `known_parts`.
    here = id(layer), size, world.ranks, world.supposed, weight.shape, layer.training
    if not is_compiling and layer.known_parts == here:  # as in each run but the first
        compare_gradients()
        return
    shard.sizes_with(weight)
    unknown = is_compiling or weight.is_meta or hasattr(weight, "full_tensor")
    if unknown or world.supposed or dist.get_backend(world.group) == "fake":
        return
    is_known, layer.known_parts = layer.known_parts is not None, here
    layers_run.add(layer)
    mark_parts(layer)
    if ids is not None and not are_alike(ids.reshape(-1)):
        raise RuntimeError(
            "the ranks look up different ids, but ranks that share layers have to get the "
            "same batch: give each the batch of its data-parallel rank (for Trainer and "
            "accelerate see slapo-rewrite's examples/trainer)"
        )
    if is_known or shard.local_size() == shard.size:
        return
    weight = weight.detach()
    if not weight.numel() or weight.min() == weight.max():
        weight = weight.new_tensor([rank()])  # constants may be the same
    table = weight.reshape(len(weight), -1)
    sizes = shard.sizes()
    if shard.axis == 0 and len({*sizes}) > 1:  # torch draws the last numbers otherwise
        table = table[: max(1, min(sizes) - 1)]
    norm = table.float().norm().double()
    sums = [table.sum(axis, dtype=torch.float64) for axis in (0, 1)]
    if are_alike(torch.cat([norm.reshape(1), *sums])):
        raise RuntimeError(
            "all ranks have the same part of the weights. Did DeepSpeed treat the tensor-"
            "parallel ranks as replicas (give it `mpu`)? Does a checkpoint hold one rank's "
            "`state_dict()` (save `loading.full_state_dict(model)`)? Draw the weights of a "
            "new model in `loading.build`"
        )


def mark_parts(module: Any, *loaded: object) -> None:
    """Marks sharded parameters, including new ones after loading or copying.

    DeepSpeed counts a parameter in the gradient norm on every rank if it is so marked,
    else on the first rank only.
    """
    if loaded:
        module.known_parts = None  # the next run checks the weights
    for name, shard in module.sharded_parameters.items():
        parameter = getattr(module, name)
        # Where it is None, another pipeline stage holds it.
        if parameter is not None and not hasattr(parameter, "model_parallel"):
            before = [shard.ranges(r) for r in range(rank())]  # copies count once
            parameter.model_parallel = shard.ranges(rank()) not in before


def note_whose_parts(
    module: Any, state_dict: Any, prefix: str, metadata: dict[str, Any]
) -> None:
    """Notes in a state dict's metadata which rank's parts it holds."""
    if world_size() == 1:
        return
    metadata["part"] = rank(), world_size()
    is_made = named_world().supposed or torch.get_default_device().type == "meta"
    for name in module.sharded_parameters:
        part = given = state_dict.get(prefix + name)
        if hasattr(part, "to_local"):  # FSDP2's DTensor
            with torch.no_grad():
                part = part.to_local()
        if type(part) is not Tensor or part is getattr(module, name):
            continue
        # transformers asks a model on the meta device which tensors to read.
        if part.is_meta and not is_made:
            raise RuntimeError(
                "`from_pretrained` reads full tensors, but this rank holds parts: use "
                "`loading.load_pretrained` of a model rewritten `--with load_pretrained`"
            )
        # Checkpoints call the first; the second keeps these attributes out of pickles.
        refuse = partial(_refuse_parts, prefix + name)
        vars(part).update(__create_write_items__=refuse, __getstate__=dict)
        if part is given:  # safetensors asks this, and FSDP2 where it gathers
            vars(part)["is_contiguous"] = refuse


def _refuse_parts(name: str, *_: object) -> None:
    """Raises instead of saving one rank's parts as the whole."""
    raise RuntimeError(
        f"only this rank's part of `{name}` would be written: write, or pass as "
        "`state_dict=`, `loading.full_state_dict(model)`, which all ranks call. Or use "
        "`loading.save_pretrained` of a model rewritten `--with save_pretrained`, or "
        "`sharded_state(model, optimizer)` of one rewritten `--with sharded_state`"
    )


def save_whole(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The model's own `save_pretrained` for full tensors; parts are refused."""
    states = [a for a in (*args, kwargs.get("state_dict")) if isinstance(a, dict)]
    notes = [n for state in states for n in getattr(state, "_metadata", {}).values()]
    if world_size() > 1 and (not states or any("part" in each for each in notes)):
        _refuse_parts(type(model).__name__)
    return type(model).save_pretrained(model, *args, **kwargs)
