# Written by slapo-rewrite 0.2.0 for modeling_llama.py; rewrite.json says from what.
"""Stages run by DeepSpeed's pipeline engine: building, loading, checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .checkpoints import joined, layer_files, write_layers
from .shards import set_group, world_of
from .stages import (
    SendableGradients,
    Stage,
    check_names,
    gathered,
    load_held,
    model_class,
)


class Pipeline:
    """The stages of a model, for DeepSpeed's pipeline engine.

    Args:
        stages: Their classes.
        inputs: The arguments of the model that the first stage is given.
        labels: Those that the loss is given.
        shared: For each parameter that several stages hold, its name there, by stage.
        unread: The arguments of the model that it never reads.
    """

    # What depends on whether ranks share a stage.
    lay_out: Callable[[Any], None]
    ready: Callable[[nn.Module], None]
    read: Callable[[Any, Callable[[], nn.Module]], dict[str, Tensor]]
    as_rank: Callable[[int, int], AbstractContextManager[None]]

    def __init__(
        self,
        stages: tuple[type[Stage], ...],
        inputs: Sequence[str],
        labels: Sequence[str],
        shared: Sequence[Mapping[int, str]] = (),
        unread: Sequence[str] = (),
    ) -> None:
        self.stages, self.shared = stages, shared
        self.inputs, self.labels, self.unread = inputs, labels, unread

    def build(
        self,
        *args: Any,
        num_stages: int | None = None,
        topology: Any = None,
        dynamic_shape: bool = False,
        **kwargs: Any,
    ) -> Any:
        """A `PipelineModule` of the stages, for `deepspeed.initialize`.

        Each rank makes the weights of its own stage only, the same as the whole model
        would have from the same seed; so ranks are to be seeded alike. From then on
        each stage of each replica draws random numbers of its own, for dropout.

        Where a topology has an axis `model`, the engine's configuration needs
        `"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}`.

        `engine.eval_batch(data)` gives the loss in eval mode, and with
        `return_logits=True` the logits as well, on the last stage; it cannot leave the
        loss out.

        Args:
            *args: Those of the model's class.
            num_stages: How many stages there are, if it is given.
            topology: Which ranks hold which stage; without it, each stage is held by as
                many ranks as there are, in data parallel.
            dynamic_shape: Whether batches are of several shapes, which are then sent
                with them.
            **kwargs: Those of the model's class.

        Raises:
            ValueError: The model is cut into other stages, or there are other processes.
        """
        from deepspeed.pipe import PipelineModule  # of which checkpoints need nothing

        check_layout(len(self.stages), num_stages, topology)
        self.lay_out(topology)

        def loss(outputs: Any, labels: Any) -> Any:
            return stage.step_loss(outputs, labels)

        module = PipelineModule(
            [self.layer(n, *args, **kwargs) for n in range(len(self.stages))],
            num_stages=None if topology else len(self.stages),
            topology=topology,
            loss_fn=loss,
            partition_method="uniform",
            dynamic_shape=dynamic_shape,
        )
        stage = self.stage_of(module)
        self.ready(stage)
        stage.register_forward_pre_hook(with_all_gradients)
        stage.register_forward_hook(with_all_tracked)
        held = [n[module.stage_id] for n in self.shared if module.stage_id in n]
        stage.register_forward_pre_hook(partial(with_gradients_of, held))
        count_once(module, stage, self.shared)
        seed_apart(module)
        return module

    def layer(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """Says of a stage how it is made, and what it shares with others."""
        from deepspeed.pipe import LayerSpec, TiedLayerSpec

        names = [names[number] for names in self.shared if number in names]
        if not names:
            return LayerSpec(self.stages[number], *args, **kwargs)
        kwargs["tied_weight_attr"] = names
        return TiedLayerSpec("shared", self.stages[number], *args, **kwargs)

    def stage_of(self, module: nn.Module) -> Any:
        """The stage that this rank holds of a `PipelineModule`."""
        return next(m for m in module.modules() if isinstance(m, self.stages))

    def batch(self, **inputs: Any) -> tuple[Any, Any]:
        """The model's arguments as the inputs and labels that the engine takes.

        All are tensors. What is trained is the mean of the losses of all micro-batches.

        Raises:
            TypeError: They are others than the stages were written for.
        """
        check_names(inputs.keys() - {*self.unread}, {*self.inputs, *self.labels})
        given, labels = (
            inputs[names[0]] if len(names) == 1 else tuple(inputs[n] for n in names)
            for names in (self.inputs, self.labels)
        )
        return given, labels

    def to_full(self, module: Any, first_rank_only: bool = False) -> dict[str, Tensor]:
        """The original's state dict, on every rank. Every rank calls it.

        Args:
            module: What `build` returns.
            first_rank_only: Give it to the first process alone, on its CPU; the others
                get an empty dictionary, and none but the first holds more than a stage.
        """
        group = module.mpu().get_pipe_parallel_group()
        return gathered(self.stage_of(module).full_state(), group, first_rank_only)

    def load_full(self, module: nn.Module, full: Mapping[str, Tensor]) -> None:
        """Takes the original's state dict; do it before `deepspeed.initialize`."""
        load_held(self.stage_of(module), full)

    def read_checkpoint(
        self, folder: str | Path, *args: Any, tag: str | None = None, **kwargs: Any
    ) -> dict[str, Tensor]:
        """The original's state dict, from what `engine.save_checkpoint(folder)` wrote.

        One process is enough, without an engine, and the original model loads it. The
        weights are those that the engine computes with: rounded ones, where it trains
        in half precision.

        Args:
            folder: That of `save_checkpoint`.
            *args: Those of the model's class.
            tag: The checkpoint's; without it, the latest is read.
            **kwargs: Those of the model's class.

        Raises:
            ValueError: The checkpoint is of other stages, or of another model.
        """
        files = layer_files(folder, tag, len(self.stages))
        return self.read(files, partial(model_class(self.stages[0]), *args, **kwargs))

    def write_checkpoint(
        self,
        folder: str | Path,
        full: Mapping[str, Tensor],
        *args: Any,
        tensor_parallel_size: int = 1,
        **kwargs: Any,
    ) -> None:
        """Writes the original's state dict as a checkpoint of the stages.

        What loads it is `engine.load_checkpoint(folder, load_module_only=True)`.

        Args:
            folder: Where the checkpoint goes.
            full: The original's state dict.
            *args: Those of the model's class.
            tensor_parallel_size: How many ranks are to share each stage.
            **kwargs: Those of the model's class.

        Raises:
            FileExistsError: The folder has such a checkpoint already.
            ValueError: The model does not divide over so many ranks.
        """
        stages = [partial(stage, *args, **kwargs) for stage in self.stages]
        for rank in range(tensor_parallel_size):
            with self.as_rank(tensor_parallel_size, rank):
                write_layers(folder, full, stages, rank)


class ShardedPipeline(Pipeline):
    """Stages whose weights are divided over tensor-parallel groups."""

    read = staticmethod(joined)

    def lay_out(self, topology: Any) -> None:
        """Names the tensor-parallel group: the ranks along the axis `model`, if any."""
        listed = [] if topology is None else topology.get_axis_comm_lists("model")
        listed = listed or [[rank] for rank in range(dist.get_world_size())]
        for ranks in listed:  # every rank takes part in making each group
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                set_group(group)

    def ready(self, stage: nn.Module) -> None:
        """Lets the stage load a rank's parts as DeepSpeed writes them.

        The files' names say whose they are; what a state dict notes of that is lost.
        """
        for module in stage.modules():
            if hasattr(module, "sharded_parameters"):
                module.takes_parts = True  # type: ignore[assignment]

    def as_rank(self, size: int, rank: int) -> AbstractContextManager[None]:
        """Makes stages as one of the ranks that share them."""
        return world_of(size, rank)


def check_layout(count: int, num_stages: int | None, topology: Any) -> None:
    """Refuses a number of stages or of ranks that does not fit `count` stages."""
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


def with_all_gradients(module: nn.Module, given: tuple[Any, ...]) -> Any:
    """Lets all that a stage is given have gradients, zeros where it needs none of a value.

    DeepSpeed sends that of every tensor back, and stops where there is none.
    """
    several = isinstance(given[0], tuple)
    return (SendableGradients.apply(*given[0]),) if several else None  # type: ignore[no-untyped-call]


def with_all_tracked(_: nn.Module, __: Any, outputs: Any) -> Any:
    """Lets all that a stage gives take part in the backward pass, in which some have no part.

    DeepSpeed runs that from every value in floating point, and stops where it cannot: a
    stage of frozen layers gives nothing that has one.
    """
    if not torch.is_grad_enabled():
        return None
    several = outputs if isinstance(outputs, tuple) else (outputs,)
    idle = [each.is_floating_point() and not each.requires_grad for each in several]
    pairs = zip(several, idle, strict=True)
    tracked = tuple(
        each.detach().requires_grad_() if alone else each for each, alone in pairs
    )
    return tracked if isinstance(outputs, tuple) else tracked[0]


def with_gradients_of(names: Sequence[str], stage: nn.Module, _: object) -> None:
    """Lets parameters that other stages hold as well have gradients, if only of zeros.

    DeepSpeed adds them up where there are any: a stage that does not come to use such a
    parameter would leave the others waiting.
    """
    for name in names if torch.is_grad_enabled() else ():
        parameter = attrgetter(name)(stage)
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def seed_apart(module: Any) -> None:
    """Lets each stage of each replica draw random numbers of its own from now on.

    The tensor-parallel ranks of a stage go on drawing the same ones.
    """
    grid = module.mpu()
    sizes = (module.num_stages, grid.get_data_parallel_world_size())
    seeds = torch.randint(2**62, sizes, device="cpu")
    seed = seeds[module.stage_id, grid.get_data_parallel_rank()]
    torch.manual_seed(int(seed))


def count_once(module: Any, stage: Any, shared: Sequence[Mapping[int, str]]) -> None:
    """Lets the norm of the gradients count each parameter once, on one rank.

    DeepSpeed takes all parameters of a tied layer for copies, on every stage but the
    first that holds it; of a whole stage only those that are tied are. Without ZeRO it
    takes no notice of copies, and of what is not marked `model_parallel` only on the
    first rank of the first stage.
    """
    number = module.stage_id
    names = [n[number] for n in shared if number in n and number > min(n)]
    is_first = module.mpu().get_slice_parallel_rank() == 0

    def mark(*_: object) -> None:
        copies = {id(attrgetter(name)(stage)) for name in names}
        for parameter in stage.parameters():
            is_own = id(parameter) not in copies
            counted = is_first or getattr(parameter, "model_parallel", False)
            parameter.ds_pipe_replicated = not is_own
            parameter.model_parallel = is_own and counted

    mark()
    stage.register_load_state_dict_post_hook(mark)  # parts are marked anew by loading
