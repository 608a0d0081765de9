"""What runs the stages of an output."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .figures import Named
from .layout import Layout, Training

MICRO_BATCHES = 4  # of a step, all replicas together, as far as they share them out evenly
RATE, MOMENTUM = 0.05, 0.9
Batch = dict[str, Any]


def micro_batches(layout: Layout) -> int:
    """How many micro-batches each replica adds up: several, and about as many for all alike."""
    return max(2, MICRO_BATCHES // layout.data)


def optimizer_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """What trains the original as well as the stages."""
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)


class DeepSpeed:
    """Runs stages on DeepSpeed's own pipeline engine.

    Another engine is another class with the same methods, all of which every rank calls, in the
    order in which they stand here. `Staged` picks it and knows nothing else of it.

    Attributes:
        replica: Which replica this rank is part of.
        stage: The stage that this rank holds.

    Args:
        layout: The ranks.
        training: How they train.
        rank: This one.
    """

    def __init__(self, layout: Layout, training: Training, rank: int) -> None:
        self.layout, self.training = layout, training
        self.replica = rank // layout.tensor % layout.data  # of pipe, data and model
        os.environ.update(
            DS_ACCELERATOR="cpu",
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(layout.ranks),
        )

    def build(self, pipeline: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Builds the stages, once this process is in its group.

        Args:
            pipeline: The output's `pipeline.py`.
            args: What the model's class is given.
            kwargs: That by name.
        """
        deepspeed = importlib.import_module("deepspeed")
        topologies = importlib.import_module("deepspeed.runtime.pipe.topology")
        # For collectives in shared memory, which would be compiled here and now.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend="gloo")
        layout = self.layout
        topology = topologies.PipeModelDataParallelTopology(layout.pipe, layout.tensor, layout.data)
        self.pipeline = pipeline
        self.module = pipeline.build(*args, topology=topology, **kwargs)
        self.stage: nn.Module = next(
            m for m in self.module.modules() if isinstance(m, pipeline.STAGES)
        )

    def load(self, full: Named) -> None:
        """Takes the original's state dict."""
        self.pipeline.load_full(self.module, full)

    def full(self) -> Named:
        """The original's state dict, from all stages; also at any later time."""
        return dict(self.pipeline.to_full(self.module))

    def start(self, before_update: Callable[[], None]) -> None:
        """Gets ready to train.

        Args:
            before_update: Called when the gradients of a step are there, where they are.
        """
        parameters = list(self.stage.parameters())
        optimizer = optimizer_of(parameters)
        optimizer.register_step_pre_hook(lambda *_: before_update())
        self.engine, *_ = importlib.import_module("deepspeed").initialize(
            model=self.module,
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
        """The loss of this replica's micro-batches in eval mode, the mean of all replicas'."""
        return float(self.engine.eval_batch(self._pairs(batches), compute_loss=True))

    def step(self, batches: Iterable[Batch]) -> float:
        """Trains on this replica's micro-batches; the loss, the mean of all replicas'."""
        return float(self.engine.train_batch(self._pairs(batches)))

    def _pairs(self, batches: Iterable[Batch]) -> Any:
        return iter([self.pipeline.batch(**inputs) for inputs in batches])
