"""DeepSpeed's pipeline engine on stages that only wait: how long do its steps take?

By the real clock for the benchmark: waiting needs no processor, so that a few cores are enough for
many stages. What the engine does itself does need one: how long that takes for a micro-batch is
measured on stages that wait for a short time, and counted to every stage.

By a clock of each rank for the tests, which only waiting and messages move on (Lamport, *Time,
Clocks, and the Ordering of Events in a Distributed System*, 1978): the order in which the engine
computes, sends and receives is its own, and what else the machine does changes nothing.
"""

import itertools
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo_rewrite.simulate.hardware import Link
from slapo_rewrite.simulate.pipeline import Stage, simulate
from tests.processes import run

WIDTH = 8


@dataclass(frozen=True)
class Pipeline:
    """Stages that wait, and for how long each transfer between them keeps both from going on."""

    stages: Sequence[Stage]
    transfer: float = 0.0

    def of(self, count: int) -> "Pipeline":
        """The same with fewer stages."""
        return Pipeline([*self.stages[: count - 1], self.stages[-1]], self.transfer)


SHORT = Pipeline([Stage(0.01, 0.02)] * 4)
DIFFERENT = [Stage(0.05, 0.04), Stage(0.02, 0.09), Stage(0.06, 0.03), Stage(0.03, 0.06)]
PIPELINES = {
    "equal": Pipeline([Stage(0.03, 0.06)] * 4),
    "dear first": Pipeline([Stage(0.05, 0.1), *[Stage(0.03, 0.06)] * 3]),
    "dear last": Pipeline([*[Stage(0.02, 0.05)] * 3, Stage(0.06, 0.09)]),
    "all different": Pipeline(DIFFERENT),
    "all different, slow link": Pipeline(DIFFERENT, transfer=0.02),
}


@dataclass(frozen=True)
class Row:
    """A pipeline's step, in seconds.

    Attributes:
        stages: What the stages are like.
        measured: The least disturbed of several steps.
        predicted: What is simulated.
        formula: What it would be if all stages were as dear as the dearest one.
        engine: What of a micro-batch's time on a stage is the engine's own, as it was measured.
    """

    stages: str
    measured: float
    predicted: float
    formula: float
    engine: float


class RealClock:
    """Seconds on the wall."""

    def wait(self, seconds: float) -> None:
        """The rank does nothing for so long."""
        time.sleep(seconds)

    def send(self, p2p: Any, stage: int, seconds: float) -> None:
        """A tensor was sent, which keeps this rank for so long."""
        time.sleep(seconds)

    receive = send

    def now(self) -> float:
        """The time of all ranks."""
        dist.barrier()
        return time.perf_counter()


class MessageClock:
    """Seconds that waiting and transfers take; what is received is not earlier than it was sent."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wait(self, seconds: float) -> None:
        """The rank does nothing for so long."""
        self.seconds += seconds

    def send(self, p2p: Any, stage: int, seconds: float) -> None:
        """A tensor was sent, which keeps this rank for so long."""
        p2p.send(torch.tensor(self.seconds, dtype=torch.float64), stage)
        self.seconds += seconds

    def receive(self, p2p: Any, stage: int, seconds: float) -> None:
        """A tensor was received, which keeps this rank for so long once it was sent."""
        sent = torch.zeros((), dtype=torch.float64)
        p2p.recv(sent, stage)
        self.seconds = max(self.seconds, sent.item()) + seconds

    def now(self) -> float:
        """The time of all ranks: that of the last one."""
        last = torch.tensor(self.seconds, dtype=torch.float64)
        dist.all_reduce(last, dist.ReduceOp.MAX)
        self.seconds = last.item()
        return self.seconds


Clock = RealClock | MessageClock


def compared(count: int, micro_batches: int, steps: int, clock: type[Clock]) -> list[Row]:
    """Steps of real processes beside simulated ones, for pipelines of `count` stages."""
    pipelines = {name: pipeline.of(count) for name, pipeline in PIPELINES.items()}
    short = SHORT.of(count)  # before the others and after them, since other work comes and goes
    both = [short, *pipelines.values(), short]
    ranks = run(seconds_of_steps, count, both, micro_batches, steps, clock)
    # A step ends when it ends on all ranks.
    before, *measured, after = (
        min(map(max, zip(*seconds, strict=True))) for seconds in zip(*ranks, strict=True)
    )
    slots = micro_batches + count - 1
    engine = max(
        0.0, min(before, after) / slots - short.stages[0].forward - short.stages[0].backward
    )
    rows = []
    for (name, pipeline), seconds in zip(pipelines.items(), measured, strict=True):
        stages = [Stage(s.forward + engine / 2, s.backward + engine / 2) for s in pipeline.stages]
        dearest = max(stage.forward + stage.backward for stage in stages)
        step = simulate(stages, micro_batches, pipeline=Link(pipeline.transfer))
        rows.append(Row(name, seconds, step.seconds, slots * dearest, engine))
    return rows


class _Wait(torch.autograd.Function):
    """Passes a tensor on after a while, and its gradient after another."""

    @staticmethod
    def forward(ctx, x: Tensor, stage: Stage, clock: Clock) -> Tensor:
        ctx.stage, ctx.clock = stage, clock
        clock.wait(stage.forward)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.clock.wait(ctx.stage.backward)
        return gradient, None, None


class Waiting(nn.Module):
    """A layer that takes the time of a stage, and holds one small parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage(0, 0)
        self.clock: Clock = MessageClock()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return _Wait.apply(x * self.weight, self.stage, self.clock)


def seconds_of_steps(
    pipelines: Sequence[Pipeline], micro_batches: int, steps: int, clock: type[Clock]
) -> list[list[float]]:
    """Seconds that the steps of each pipeline take.

    Runs in a process of a group with as many ranks as each of them has stages.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its imports use what torch will take away
        import deepspeed
        from deepspeed.pipe import LayerSpec, PipelineModule
        from deepspeed.runtime.pipe import engine as pipe_engine
        from deepspeed.runtime.pipe import p2p
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # takes half a minute to build
    deepspeed.init_distributed("gloo", verbose=False)
    count = dist.get_world_size()
    module = PipelineModule(
        [LayerSpec(Waiting) for _ in range(count)],
        num_stages=count,
        loss_fn=lambda outputs, labels: (outputs - labels).square().mean(),
        partition_method="uniform",
    )
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": micro_batches,
            "steps_per_print": 10**9,
        },
    )
    batches = itertools.repeat((torch.ones(1, WIDTH), torch.zeros(1, WIDTH)))
    (layer,) = module.forward_funcs
    engine.train_batch(batches)  # the first one also says what shapes there are
    layer.clock = clock()
    seconds = []
    for pipeline in pipelines:
        layer.stage = pipeline.stages[dist.get_rank()]
        pipe_engine.p2p = Transfers(p2p, layer.clock, pipeline.transfer)
        seconds.append([_seconds_of_step(engine, batches, layer.clock) for _ in range(steps)])
    return seconds


@dataclass(frozen=True)
class Transfers:
    """The engine's transfers between stages, each of which takes some time more."""

    p2p: Any
    clock: Clock
    seconds: float

    def send(self, tensor: Tensor, stage: int) -> None:
        """To the rank with a stage."""
        self.p2p.send(tensor, stage)
        self.clock.send(self.p2p, stage, self.seconds)

    def recv(self, tensor: Tensor, stage: int) -> None:
        """From the rank with a stage."""
        self.p2p.recv(tensor, stage)
        self.clock.receive(self.p2p, stage, self.seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.p2p, name)


def _seconds_of_step(engine: Any, batches: Iterator[Any], clock: Clock) -> float:
    start = clock.now()
    engine.train_batch(batches)
    return clock.now() - start
