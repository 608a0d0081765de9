"""The engines that run the pipeline stages of an output."""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .figures import Named, gradients_of
from .original import from_all_ranks
from .rank_layout import Layout, Training

MICRO_BATCHES = 4  # of a step, over all replicas, if this divides evenly among them
# A smaller rate is used if at a larger one losses overflow or rounding errors grow too much.
RATES, MOMENTUM = (0.05, 5e-4, 5e-6), 0.9
Batch = dict[str, Any]


def micro_batches(layout: Layout) -> int:
    """The number of micro-batches whose gradients each replica accumulates: at least 2."""
    return max(2, MICRO_BATCHES // layout.data)


def optimizer_of(parameters: Iterable[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """The optimizer for the original as well as for the stages."""
    return torch.optim.SGD(parameters, lr=rate, momentum=MOMENTUM)


class Engine(ABC):
    """Runs stages. Every rank calls all methods, in the order in which they are defined here.

    Attributes:
        replica: The number of this rank's replica.
        pipeline: The module `pipeline.py` of the output, once the stages are built.
        built: The result of that module's `build`.
        stage: The stage on this rank.
        rate: The learning rate.
    """

    pipeline: Any
    built: Any
    stage: nn.Module

    def __init__(self, layout: Layout, training: Training, rank: int) -> None:
        self.layout, self.training, self.rate = layout, training, RATES[0]
        self.replica = rank // layout.tensor % layout.data  # in order (pipe, data, tensor)

    @abstractmethod
    def build(self, pipeline: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Builds the stages; the process group exists by then."""

    def load(self, full: Named) -> None:
        """Loads the original's state dict with the output's own `load_full`."""
        self.pipeline.load_full(self.built, full)

    def full(self) -> Named:
        """The state dict in the original's form, gathered from all stages; may be called again."""
        return dict(self.pipeline.to_full(self.built))

    @abstractmethod
    def start(self, before_update: Callable[[], None]) -> None:
        """Prepares training; `before_update` runs before each optimizer step."""

    @abstractmethod
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """The loss in eval mode, as the mean over all replicas' micro-batches."""

    @abstractmethod
    def step(self, batches: Iterable[Batch]) -> float:
        """Trains on this replica's micro-batches; returns the mean loss of all replicas."""


class DeepSpeed(Engine):
    """Runs stages on DeepSpeed's own pipeline engine."""

    def __init__(self, layout: Layout, training: Training, rank: int) -> None:
        super().__init__(layout, training, rank)
        os.environ.update(
            DS_ACCELERATOR="cpu",
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(layout.ranks),
        )

    def build(self, pipeline: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Builds a `PipelineModule`."""
        deepspeed = importlib.import_module("deepspeed")
        topologies = importlib.import_module("deepspeed.runtime.pipe.topology")
        # Otherwise DeepSpeed compiles its collectives in shared memory at this point.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend="gloo")
        layout = self.layout
        topology = topologies.PipeModelDataParallelTopology(layout.pipe, layout.tensor, layout.data)
        self.pipeline = pipeline
        self.built = pipeline.build(*args, topology=topology, **kwargs)
        self.stage = next(m for m in self.built.modules() if isinstance(m, pipeline.STAGES))

    def start(self, before_update: Callable[[], None]) -> None:
        """Initialises the engine."""
        optimizer = optimizer_of(self.stage.parameters(), self.rate)
        optimizer.register_step_pre_hook(lambda *_: before_update())
        self.engine, *_ = importlib.import_module("deepspeed").initialize(
            model=self.built,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": micro_batches(self.layout),
                "gradient_clipping": self.training.clipping,
                "zero_optimization": {"stage": self.training.zero},
                "zero_allow_untested_optimizer": True,
                "bf16": {"enabled": self.training.bf16},
                "steps_per_print": 1000,
                "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
            },
        )

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Calls `eval_batch`, which works before training only."""
        return float(self.engine.eval_batch(self._pairs(batches), compute_loss=True))

    def step(self, batches: Iterable[Batch]) -> float:
        """Calls `train_batch`."""
        return float(self.engine.train_batch(self._pairs(batches)))

    def _pairs(self, batches: Iterable[Batch]) -> Any:
        return iter([self.pipeline.batch(**inputs) for inputs in batches])


class Torch(Engine):
    """Runs stages on `torch.distributed.pipelining`, with the schedule 1F1B.

    This class averages the replicas' gradients itself: torch's `DistributedDataParallel` fails
    around a stage if there are no more micro-batches than stages.
    """

    def __init__(self, layout: Layout, training: Training, rank: int) -> None:
        super().__init__(layout, training, rank)
        if training != Training():
            raise ValueError("ZeRO, clipping and bfloat16 are DeepSpeed's: torch trains plainly")

    def build(self, pipeline: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Builds this rank's `PipelineStage`."""
        meshes = importlib.import_module("torch.distributed.device_mesh")
        sizes = (self.layout.pipe, self.layout.data, self.layout.tensor)
        self.mesh = meshes.init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp"))
        self.pipeline = pipeline
        self.built = pipeline.build(*args, mesh=self.mesh, **kwargs)
        self.stage = self.built[0].submod

    def start(self, before_update: Callable[[], None]) -> None:
        """Creates the optimizer and the schedule."""
        self.optimizer = optimizer_of(self.stage.parameters(), self.rate)
        self.optimizer.register_step_pre_hook(lambda *_: before_update())
        schedules = importlib.import_module("torch.distributed.pipelining")
        count = micro_batches(self.layout)
        self.schedule = self.pipeline.schedule(self.built, schedules.Schedule1F1B, count)

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Calls the schedule's `eval`."""
        self.stage.eval()
        _, losses = self.schedule.eval(**self._joined(batches))
        self.stage.train()
        return _mean_of_all(losses)

    def step(self, batches: Iterable[Batch]) -> float:
        """Calls the schedule's `step` and then the optimizer."""
        losses = self.schedule.step(**self._joined(batches))
        group = self.mesh.get_group("dp")
        for gradient in gradients_of(self.stage).values():
            dist.all_reduce(gradient.div_(self.layout.data), group=group)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return _mean_of_all(losses)

    def _joined(self, batches: Iterable[Batch]) -> Batch:
        """All micro-batches as one batch, which the schedule splits again."""
        first, *rest = batches
        joined = {
            name: torch.cat([value, *(batch[name] for batch in rest)])
            if isinstance(value, Tensor)
            else value
            for name, value in first.items()
        }
        return dict(self.pipeline.batch(**joined))


def _mean_of_all(losses: list[Tensor]) -> float:
    """The mean over the ranks that have losses, all equally many."""
    known = [loss for each in from_all_ranks([float(loss) for loss in losses]) for loss in each]
    return sum(known) / len(known)


ENGINES: dict[str, type[Engine]] = {"deepspeed": DeepSpeed, "torch": Torch}
