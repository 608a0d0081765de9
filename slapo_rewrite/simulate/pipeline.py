"""Simulates the time of one training step of a pipeline in DeepSpeed's engine.

Every stage executes the instructions of `deepspeed.runtime.pipe.schedule.TrainSchedule` in order,
as the engine does. A transfer starts when both stages have reached it, and both continue when it
ends: so do the engine's blocking `send` and `recv`, over gloo, and over NCCL on the stream on
which the stage computes.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from slapo_rewrite.simulate.hardware import Link

# For each instruction of a transfer: what is moved; 1 if to or from the next stage, -1 the previous
TRANSFERS = {
    "SendActivation": ("activation", 1),
    "RecvActivation": ("activation", -1),
    "SendGrad": ("gradient", -1),
    "RecvGrad": ("gradient", 1),
}


@dataclass(frozen=True)
class Stage:
    """The costs of one stage."""

    forward: float  # seconds of one micro-batch's forward pass
    backward: float  # seconds of its backward pass, recomputation included
    # Bytes of activations per micro-batch to the next stage; as many of gradients come back.
    sent: float = 0.0
    optimizer: float = 0.0  # seconds of what follows the last micro-batch

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0:
                raise ValueError(f"a stage's `{name}` cannot be {value}")


class Event(NamedTuple):
    """One operation of a stage, with its time."""

    what: str  # `forward`, `backward`, a transfer (`activation`, `gradient`), or `optimizer`
    number: int  # the micro-batch's number
    start: float  # seconds since the step began
    end: float  # likewise


@dataclass
class Timeline:
    """What one stage does in a step."""

    # In order; between two events the stage waits.
    events: list[Event] = field(default_factory=list)
    live: int = 0  # the most micro-batches whose activations it holds at once

    @property
    def busy(self) -> float:
        """Seconds in which the stage does not wait."""
        return sum(event.end - event.start for event in self.events)


@dataclass(frozen=True)
class Step:
    """A simulated step."""

    seconds: float  # from the start of the first instruction to the end of the last
    stages: list[Timeline]

    @property
    def bubble(self) -> float:
        """The share of all stages' time that is spent waiting."""
        if not self.seconds:
            return 0.0
        busy = sum(timeline.busy for timeline in self.stages)
        return 1 - busy / (self.seconds * len(self.stages))


def simulate(stages: Sequence[Stage], micro_batches: int, *, pipeline: Link | None = None) -> Step:
    """Simulates one training step; raises `ImportError` if DeepSpeed is not installed."""
    if not stages or micro_batches < 1:
        raise ValueError("a pipeline has at least one stage and one micro-batch")
    run = _Run(stages, micro_batches, pipeline or Link())
    run.to_the_end()
    return Step(max(run.clocks), run.timelines)


def live_micro_batches(stage: int, stages: int, micro_batches: int) -> int:
    """The most micro-batches whose activations a stage holds at once."""
    return min(stages - stage, micro_batches)


def pipelined_seconds(
    stages: Sequence[Stage], micro_batches: int, pipeline: Link | None = None
) -> float:
    """Seconds of all micro-batches, by a formula that agrees with `simulate` and is faster.

    What follows the micro-batches is left out: sums over replicas and the optimizer. The slowest
    stage waits only until its first micro-batch arrives from the stages before it, and at the end
    for the backward pass of the last one there. The arguments are those of `simulate`.
    """
    link = pipeline or Link()
    sends = [2 * link.send(stage.sent) for stage in stages[:-1]]  # activations, gradients
    before, after = [0.0, *sends], [*sends, 0.0]
    busy = [s.forward + s.backward for s in stages]
    through = sum(busy) + sum(sends)
    return max(
        through + (micro_batches - 1) * (own + first + second)
        for own, first, second in zip(busy, before, after, strict=True)
    )


@dataclass
class _Run:
    """The state of a simulation: every stage's clock, and the transfers where one stage waits."""

    stages: Sequence[Stage]
    micro_batches: int
    pipeline: Link

    def __post_init__(self) -> None:
        self.clocks = [0.0] * len(self.stages)
        self.timelines = [Timeline() for _ in self.stages]
        self._programs = [self._program(number) for number in range(len(self.stages))]
        self._arrived: dict[_Operation, int] = {}

    def to_the_end(self) -> None:
        """Runs every stage until it has to wait, and again when the other one has arrived."""
        ready = list(range(len(self.stages)))
        while ready:
            number = ready.pop()
            for operation in self._programs[number]:
                if len(operation.stages) == 1:
                    self._carry_out(operation)
                    continue
                arrived = self._arrived.pop(operation, 0) + 1
                if arrived == len(operation.stages):
                    self._carry_out(operation)
                    ready.extend(operation.stages)
                else:
                    self._arrived[operation] = arrived
                break
        assert not self._arrived, f"stages wait for one another: {list(self._arrived)}"

    def _carry_out(self, operation: _Operation) -> None:
        start = max([self.clocks[number] for number in operation.stages])
        event = Event(operation.what, operation.number, start, start + operation.seconds)
        for number in operation.stages:
            self.clocks[number] = event.end
            self.timelines[number].events.append(event)

    def _program(self, number: int) -> Iterator[_Operation]:
        """The operations of a stage, in the order of the engine's instructions."""
        stage, timeline = self.stages[number], self.timelines[number]
        done: Counter[str] = Counter()
        schedule = _train_schedule()(self.micro_batches, len(self.stages), number)
        for name in (instruction.name for step in schedule for instruction in step):
            batch = done[name]
            done[name] += 1
            if name == "ForwardPass":
                timeline.live = max(timeline.live, batch + 1 - done["BackwardPass"])
                yield _Operation("forward", batch, stage.forward, (number,))
            elif name == "BackwardPass":
                yield _Operation("backward", batch, stage.backward, (number,))
            elif name in TRANSFERS:
                what, side = TRANSFERS[name]
                pair = (min(number, number + side), max(number, number + side))
                seconds = self.pipeline.send(self.stages[pair[0]].sent)
                yield _Operation(what, batch, seconds, pair)
            elif name == "OptimizerStep":
                yield _Operation("optimizer", 0, stage.optimizer, (number,))


class _Operation(NamedTuple):
    """An operation of one or two stages, which starts when all of them have reached it."""

    what: str
    number: int
    seconds: float
    stages: tuple[int, ...]


@functools.cache
def _train_schedule() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DeepSpeed imports deprecated parts of torch
        from deepspeed.runtime.pipe.schedule import TrainSchedule
    return TrainSchedule
