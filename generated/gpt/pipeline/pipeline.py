# Written by slapo-rewrite 0.1.0 for gpt.py; rewrite.json says from what.
"""`GPT` in 2 stages, for DeepSpeed's pipeline engine."""

import re
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch import Tensor, nn
from torch.nn import functional as F

from .delayed import Recording
from .gpt import GPT
from .loading import full_state_dict
from .tensor_parallel import set_group

# The names of parameters that have several, numbers as `*`.
TIES = (("lm_head.weight", "transformer.wte.weight"),)


class GPTStage0(GPT):
    """Stage 0.

    `transformer.wte`, `transformer.wpe`, `transformer.drop` and `transformer.h[:6]`.
    """

    def __init__(self, *args, **kwargs):
        with Recording(torch.get_default_device()) as recording:
            super().__init__(*args, **kwargs)
        check_ties(self, TIES)
        keep(
            self,
            recording,
            self.transformer.wte,
            self.transformer.wpe,
            self.transformer.drop,
            self.transformer.h[:6],
        )

    def forward(self, idx):
        T = idx.size(1)
        assert (
            T <= self.config.block_size
        ), f"{T} tokens are more than the model has positions"
        positions = torch.arange(T, device=idx.device)
        x = self.transformer.drop(
            self.transformer.wte(idx) + self.transformer.wpe(positions)
        )
        for block in self.transformer.h[:6]:
            x = block(x)
        return x


class GPTStage1(GPT):
    """Stage 1: `transformer.h[6:]`, `transformer.ln_f` and `lm_head`."""

    def __init__(self, *args, **kwargs):
        with Recording(torch.get_default_device()) as recording:
            super().__init__(*args, **kwargs)
        check_ties(self, TIES)
        keep(
            self, recording, self.transformer.h[6:], self.transformer.ln_f, self.lm_head
        )

    def forward(self, x):
        for block in self.transformer.h[6:]:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return logits

    def loss(self, logits, targets):
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


STAGES = (GPTStage0, GPTStage1)


def build(*args, num_stages=None, topology=None, **kwargs):
    """A `PipelineModule` of the stages, for `deepspeed.initialize`.

    Each rank makes its own part of the weights of its own stage. Load the model's by
    `load_full`: what ranks draw for their parts of a tensor is no whole. Where a
    topology has an axis `model`, the engine's configuration needs
    `"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}`.

    Args:
        *args: Those of `GPT`.
        num_stages: 2, if it is given.
        topology: Which ranks hold which stage; without it, each stage is held by as
            many ranks as there are, in data parallel.
        **kwargs: Those of `GPT`.

    Raises:
        ValueError: A number of stages that the model is not cut into.
    """
    asked = num_stages if topology is None else topology.get_dim("pipe")
    if asked not in (None, len(STAGES)) or num_stages not in (None, asked):
        raise ValueError(
            f"the model is cut into {len(STAGES)} stages, not {asked}: "
            "change the cuts in the schedule, or the topology"
        )

    def loss(outputs, labels):
        return stage_of(module, STAGES).loss(outputs, labels)

    set_group(model_parallel_group(topology))
    layers = [
        TiedLayerSpec(
            "wte", GPTStage0, *args, tied_weight_attr="transformer.wte.weight", **kwargs
        ),
        TiedLayerSpec(
            "wte", GPTStage1, *args, tied_weight_attr="lm_head.weight", **kwargs
        ),
    ]
    module = PipelineModule(
        layers,
        num_stages=None if topology else len(STAGES),
        topology=topology,
        loss_fn=loss,
        partition_method="uniform",
    )
    count_once(module, layers, STAGES)
    return module


def batch(idx, targets):
    """The model's arguments as the inputs and labels that the engine takes."""
    return idx, targets


def to_full(module):
    """The original's state dict, on every rank. Every rank calls it."""
    return gathered(module, full_state_dict(stage_of(module, STAGES)))


def load_full(module, full):
    """Takes the original's state dict; do it before `deepspeed.initialize`."""
    stage = stage_of(module, STAGES)
    stage.load_state_dict({n: t for n, t in full.items() if has_place(stage, n)})


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
    """
    modules = {inner for m in held if isinstance(m, nn.Module) for inner in m.modules()}
    tensors = {id(t) for t in held if isinstance(t, Tensor)}
    tensors |= {id(t) for m in modules for t in own_tensors(m).values()}
    real: dict[int, Tensor] = {}
    for module in list(model.modules()):
        for name, tensor in own_tensors(module).items():
            if id(tensor) not in tensors:
                setattr(module, name, None)
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


def gathered(module: Any, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all stages, by name, on every rank. Every rank calls it."""
    group = module.mpu().get_pipe_parallel_group()
    mine = {name: (tensor.shape, tensor.dtype) for name, tensor in named.items()}
    listed: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(listed, mine, group=group)
    device = next(iter(named.values())).device
    full: dict[str, Tensor] = {}
    for number, theirs in enumerate(listed):
        for name, (shape, dtype) in theirs.items():
            if name in full:
                continue
            if number == dist.get_rank(group):
                tensor = (
                    named[name].detach().clone(memory_format=torch.contiguous_format)
                )
            else:
                tensor = torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(tensor, dist.get_global_rank(group, number), group=group)
            full[name] = tensor
    return full


def count_once(module: Any, layers: list[Any], kinds: tuple[type, ...]) -> None:
    """Lets the norm of the gradients count each parameter once.

    DeepSpeed takes all parameters of a tied layer for copies, on every stage but the
    first that holds it; of a whole stage only those that are tied are.
    """
    stage = stage_of(module, kinds)
    tied = [getattr(layer, "tied_weight_attr", ()) for layer in layers]
    names = tied[module.stage_id]
    is_copy = any(tied[: module.stage_id])
    copies = {id(attrgetter(name)(stage)) for name in names} if is_copy else set()
    for parameter in stage.parameters():
        parameter.ds_pipe_replicated = id(parameter) in copies
