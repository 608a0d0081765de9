# Written by slapo-rewrite 0.2.0 for modeling_t5.py; rewrite.json says from what.
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
        stages: The classes of the stages.
        inputs: The model's arguments that the first stage takes.
        labels: The model's arguments that the loss takes.
        shared: For each parameter that several stages hold, its name by stage.
        unread: The model's arguments that it never reads.
    """

    # These differ with and without tensor parallelism.
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
        """Builds the `PipelineModule` of the stages, for `deepspeed.initialize`.

        Each rank makes the weights of its own stage only, which are those of the whole
        model from the same seed: seed all ranks alike. Afterwards each stage of each
        replica draws its own random numbers, for dropout.

        With an axis `model` in the topology, the engine's configuration needs
        `"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}`.

        `engine.eval_batch(data)` returns the loss in eval mode, and with
        `return_logits=True` the logits too, on the last stage. It always computes the
        loss.

        Args:
            *args: The arguments of the model's class.
            num_stages: The number of stages, to be checked.
            topology: DeepSpeed's layout of the ranks; without it, the ranks that are
                left over are data-parallel replicas.
            dynamic_shape: Whether batches differ in shape, which is then sent along.
            **kwargs: The arguments of the model's class.

        Raises:
            ValueError: The number of stages or of processes does not fit.
        """
        from deepspeed.pipe import PipelineModule  # checkpoints do without it

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
        """DeepSpeed's specification of a stage, with its tied parameters."""
        from deepspeed.pipe import LayerSpec, TiedLayerSpec

        names = [names[number] for names in self.shared if number in names]
        if not names:
            return LayerSpec(self.stages[number], *args, **kwargs)
        kwargs["tied_weight_attr"] = names
        return TiedLayerSpec("shared", self.stages[number], *args, **kwargs)

    def stage_of(self, module: nn.Module) -> Any:
        """This rank's stage in a `PipelineModule`."""
        return next(m for m in module.modules() if isinstance(m, self.stages))

    def batch(self, **inputs: Any) -> tuple[Any, Any]:
        """Arranges the model's arguments as the (inputs, labels) that the engine takes.

        All are tensors. The engine trains the mean of the losses of all micro-batches.

        Raises:
            TypeError: These are not the arguments that the stages were written for.
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
            module: What `build` returned.
            first_rank_only: Gather it on the CPU of the first process only; the others
                get an empty dictionary, and hold no more than a stage at a time.
        """
        group = module.mpu().get_pipe_parallel_group()
        return gathered(self.stage_of(module).full_state(), group, first_rank_only)

    def load_full(self, module: nn.Module, full: Mapping[str, Tensor]) -> None:
        """Loads the original's state dict. Call it before `deepspeed.initialize`."""
        load_held(self.stage_of(module), full)

    def read_checkpoint(
        self, folder: str | Path, *args: Any, tag: str | None = None, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Reads the original's state dict from what `engine.save_checkpoint` wrote.

        It needs one process and no engine. The weights are those that the engine
        computes with: in half precision, if it trains so.

        Args:
            folder: The folder that `save_checkpoint` was given.
            *args: The arguments of the model's class.
            tag: The tag of the checkpoint; without it, the latest is read.
            **kwargs: The arguments of the model's class.

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

        `engine.load_checkpoint(folder, load_module_only=True)` loads it.

        Args:
            folder: The folder to write to.
            full: The original's state dict.
            *args: The arguments of the model's class.
            tensor_parallel_size: The number of ranks that will share each stage.
            **kwargs: The arguments of the model's class.

        Raises:
            FileExistsError: The folder has such a checkpoint already.
            ValueError: The model does not divide over so many ranks.
        """
        stages = [partial(stage, *args, **kwargs) for stage in self.stages]
        for rank in range(tensor_parallel_size):
            with self.as_rank(tensor_parallel_size, rank):
                write_layers(folder, full, stages, rank)


class ShardedPipeline(Pipeline):
    """A pipeline with its weights divided over tensor-parallel groups."""

    read = staticmethod(joined)

    def lay_out(self, topology: Any) -> None:
        """Sets the tensor-parallel group: the ranks along the axis `model`, if any."""
        listed = [] if topology is None else topology.get_axis_comm_lists("model")
        listed = listed or [[rank] for rank in range(dist.get_world_size())]
        for ranks in listed:  # every rank takes part in making each group
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                set_group(group)

    def ready(self, stage: nn.Module) -> None:
        """Lets the stage load the parts in DeepSpeed's files.

        They lack the metadata that says whose parts they are; the file's name says it.
        """
        for module in stage.modules():
            if hasattr(module, "sharded_parameters"):
                module.takes_parts = True  # type: ignore[assignment]

    def as_rank(self, size: int, rank: int) -> AbstractContextManager[None]:
        """A context in which stages are made as by one of the ranks that share them."""
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
        raise ValueError(f"{world} processes do not fit a topology of {wanted} ranks")


def with_all_gradients(module: nn.Module, given: tuple[Any, ...]) -> Any:
    """A hook: gives every input of a stage a gradient, of zeros if it is not used.

    DeepSpeed sends the gradient of every input back, and fails where there is none.
    """
    several = isinstance(given[0], tuple)
    return (SendableGradients.apply(*given[0]),) if several else None  # type: ignore[no-untyped-call]


def with_all_tracked(_: nn.Module, __: Any, outputs: Any) -> Any:
    """A hook: makes every floating-point output of a stage require a gradient.

    DeepSpeed runs backward from all of them, and fails for one that does not, such as
    an output of frozen layers.
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
    """A hook: gives parameters that other stages share a gradient, of zeros at first.

    DeepSpeed all-reduces those that exist: a stage that did not use its parameter would
    leave the others waiting.
    """
    for name in names if torch.is_grad_enabled() else ():
        parameter = attrgetter(name)(stage)
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def seed_apart(module: Any) -> None:
    """Seeds each stage of each replica differently.

    The tensor-parallel ranks of a stage keep drawing the same numbers.
    """
    grid = module.mpu()
    sizes = (module.num_stages, grid.get_data_parallel_world_size())
    seeds = torch.randint(2**62, sizes, device="cpu")
    seed = seeds[module.stage_id, grid.get_data_parallel_rank()]
    torch.manual_seed(int(seed))


def count_once(module: Any, stage: Any, shared: Sequence[Mapping[int, str]]) -> None:
    """Makes DeepSpeed count each parameter once in the norm of the gradients.

    With ZeRO it takes all parameters of a tied layer for copies, on every stage but the
    first; here the layer is a whole stage, of which few parameters are tied. Without
    ZeRO it counts what is marked `model_parallel` on every rank, copies included, and
    what is not on the first rank only.
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
    stage.register_load_state_dict_post_hook(mark)  # loading marks parts again
