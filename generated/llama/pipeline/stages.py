# Written by slapo-rewrite 0.1.0 for modeling_llama.py; rewrite.json says from what.
"""Stages of a model: what each holds, and its weights under the original names."""

import re
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .deferred_init import Recording, take_drawn
from .shards import world_size


def check_ties(model: nn.Module, ties: Iterable[tuple[str, ...]]) -> None:
    """Refuses a model that shares other parameters than the stages were written for.

    Args:
        model: The whole model.
        ties: The names that each shared parameter had then, numbers written as `*`.

    Raises:
        ValueError: A parameter is shared that was not, or the other way round.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(re.sub(r"\d+", "*", name))
    found = {tuple(sorted(set(group))) for group in names.values() if len(group) > 1}
    if other := found ^ set(ties):
        raise ValueError(
            f"parameters are shared otherwise than in the stages: {sorted(other)}; "
            "let slapo-rewrite write them again for this model"
        )


def keep(model: nn.Module, recording: Recording, *held: nn.Module | Tensor) -> None:
    """Leaves nothing in a model but what a stage holds, and gives that its memory.

    Other names of a parameter that is held stay as well, so that each stage has all
    names of its weights. What else is taken out is None from then on.

    Args:
        model: The model, built inside the recording.
        recording: What was to be done to initialise it.
        *held: Modules and parameters.

    Raises:
        ValueError: The model is not as deep as the one that was cut.
    """
    if any(isinstance(m, nn.ModuleList) and not len(m) for m in held):
        raise ValueError(
            "a stage would hold none of the layers: the model has fewer than the one that "
            "was cut; let slapo-rewrite write the stages again for this model"
        )
    modules = {inner for m in held if isinstance(m, nn.Module) for inner in m.modules()}
    tensors = {id(t) for t in held if isinstance(t, Tensor)}
    tensors |= {id(t) for m in modules for t in own_tensors(m).values()}
    real: dict[int, Tensor] = {}
    for module in list(model.modules()):
        for name, tensor in own_tensors(module).items():
            if id(tensor) not in tensors:
                setattr(module, name, None)
                getattr(module, "sharded_parameters", {}).pop(name, None)
                continue
            if id(tensor) not in real:
                real[id(tensor)] = with_memory(tensor, recording)
            if isinstance(tensor, nn.Parameter):
                module.register_parameter(name, real[id(tensor)])  # type: ignore[arg-type]
            else:
                setattr(module, name, real[id(tensor)])
    drop(model, modules)


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters, buffers and other tensors, by name."""
    own: dict[str, Any] = {**vars(module), **module._parameters, **module._buffers}
    return {name: value for name, value in own.items() if isinstance(value, Tensor)}


def with_memory(tensor: Tensor, recording: Recording) -> Tensor:
    """A recorded tensor with its values."""
    value = recording.value(tensor)
    if not isinstance(tensor, nn.Parameter):
        return value.detach()
    made = nn.Parameter(value.detach(), tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    made._backward_hooks = tensor._backward_hooks
    return made


def drop(module: nn.Module, held: set[nn.Module]) -> bool:
    """Takes out the submodules that hold nothing of a stage; whether any is left."""
    left = module in held or bool(own_tensors(module))
    for name, child in list(module.named_children()):
        if drop(child, held):
            left = True
        else:
            setattr(module, name, None)
    return left


def draw_parts(
    stage: nn.Module, recording: Recording, make: Callable[[], nn.Module]
) -> None:
    """Gives a stage its parts of the weights that the whole model would draw.

    Each rank draws the weights of the whole model and holds one full tensor at a time.

    Args:
        stage: The stage.
        recording: What it was built inside.
        make: Makes the model.
    """
    if world_size() > 1:
        recording.generator.set_state(recording.start)
        take_drawn(stage, make)


def check_layout(count: int, num_stages: int | None, topology: Any) -> None:
    """Refuses a number of stages or of ranks that does not fit.

    Args:
        count: How many stages there are.
        num_stages: How many are asked for; None for no matter how many.
        topology: Which ranks are to hold which stage, if that is said.

    Raises:
        ValueError: There are others.
    """
    asked = num_stages if topology is None else topology.get_dim("pipe")
    if asked not in (None, count) or num_stages not in (None, asked):
        raise ValueError(
            f"the model is cut into {count} stages, not {asked}: "
            "change the cuts in the schedule, or the topology"
        )
    world = dist.get_world_size()
    wanted = count if topology is None else topology.world_size()
    if world % wanted or (topology is not None and world != wanted):
        raise ValueError(f"{world} processes do not make up a layout of {wanted} ranks")


def take_own_parts(stage: nn.Module) -> None:
    """Lets a stage load a rank's parts as DeepSpeed writes them.

    The files' names say whose they are; what a state dict notes of that is lost.
    """
    for module in stage.modules():
        if hasattr(module, "sharded_parameters"):
            module.takes_parts = True  # type: ignore[assignment]


def seed_apart(module: Any) -> None:
    """Lets each stage of each replica draw random numbers of its own from now on.

    The tensor-parallel ranks of a stage go on drawing the same ones.
    """
    grid = module.mpu()
    sizes = (module.num_stages, grid.get_data_parallel_world_size())
    seeds = torch.randint(2**62, sizes, device="cpu")
    seed = seeds[module.stage_id, grid.get_data_parallel_rank()]
    torch.manual_seed(int(seed))


def model_parallel_group(topology: Any) -> Any:
    """This rank's tensor-parallel group: the ranks along the axis `model`, if any."""
    listed = [] if topology is None else topology.get_axis_comm_lists("model")
    listed = listed or [[rank] for rank in range(dist.get_world_size())]
    group: Any = None
    for ranks in listed:  # every rank takes part in making each group
        made = dist.new_group(ranks)
        group = made if dist.get_rank() in ranks else group
    return group


def stage_of(module: nn.Module, kinds: tuple[type, ...]) -> Any:
    """The stage that this rank holds of a `PipelineModule`."""
    return next(m for m in module.modules() if isinstance(m, kinds))


def has_place(model: nn.Module, name: str) -> bool:
    """Whether a stage holds the module that a weight of the whole model belongs to."""
    found: Any = model
    for step in name.split(".")[:-1]:
        found = getattr(found, step, model)
        if found is None:
            return False
    return getattr(found, name.rpartition(".")[2], model) is not None


def gathered(
    named: Mapping[str, Tensor], group: Any, first_rank_only: bool = False
) -> dict[str, Tensor]:
    """The tensors of all stages, by name, on every rank. Every rank calls it.

    Args:
        named: Those of this rank's stages.
        group: The ranks that hold the stages of one model.
        first_rank_only: Give them to the first of all processes alone, on its CPU.
    """
    mine = {name: (tensor.shape, tensor.dtype) for name, tensor in named.items()}
    listed: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(listed, mine, group=group)
    device = next(iter(named.values())).device
    full: dict[str, Tensor] = {}
    known: set[str] = set()
    for number, theirs in enumerate(listed):
        for name, (shape, dtype) in theirs.items():
            if name in known:
                continue
            known.add(name)
            if number == dist.get_rank(group):
                tensor = (
                    named[name].detach().clone(memory_format=torch.contiguous_format)
                )
            else:
                tensor = torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(tensor, dist.get_global_rank(group, number), group=group)
            if not first_rank_only:
                full[name] = tensor
            elif dist.get_rank() == 0:
                full[name] = tensor.cpu()
    return full


def count_once(module: Any, layers: list[Any], kinds: tuple[type, ...]) -> None:
    """Lets the norm of the gradients count each parameter once, on one rank.

    DeepSpeed takes all parameters of a tied layer for copies, on every stage but the
    first that holds it; of a whole stage only those that are tied are. Without ZeRO it
    takes no notice of copies, and of what is not marked `model_parallel` only on the
    first rank of the first stage.
    """
    stage = stage_of(module, kinds)
    tied = [getattr(layer, "tied_weight_attr", ()) for layer in layers]
    names, is_copy = tied[module.stage_id], any(tied[: module.stage_id])
    is_first = module.mpu().get_slice_parallel_rank() == 0

    def mark(*_: object) -> None:
        copies = {id(attrgetter(name)(stage)) for name in names} if is_copy else set()
        for parameter in stage.parameters():
            is_own = id(parameter) not in copies
            counted = is_first or getattr(parameter, "model_parallel", False)
            parameter.ds_pipe_replicated = not is_own
            parameter.model_parallel = is_own and counted

    mark()
    stage.register_load_state_dict_post_hook(mark)  # parts are marked anew by loading
