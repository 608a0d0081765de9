"""Ways to train a model on so many GPUs, and what each is predicted to take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property, partial
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from slapo_rewrite.model.folded_step import Counted
from slapo_rewrite.model.step_profile import NOTHING, Part
from slapo_rewrite.simulate.hardware import Hardware, Link, part_seconds, sent_seconds
from slapo_rewrite.simulate.pipeline import Stage, live_micro_batches, pipelined_seconds
from slapo_rewrite.simulate.step_memory import Runs, States, Unfolded, in_runs, states


@dataclass(frozen=True)
class Way:
    """One way to train."""

    tensor: int = 1  # ranks that share each layer
    pipeline: int = 1  # stages
    data: int = 1  # replicas
    rows: int = 1  # rows of a micro-batch
    micro_batches: int = 1  # micro-batches of a replica's step
    recomputed: float = 0.0  # the share of the layers that are
    zero: int = 0  # the stage of ZeRO
    sequence_parallel: bool = False  # whether slices of the sequence stand between split layers
    fused: bool = False  # whether kernels are fused


@dataclass(frozen=True)
class Predicted:
    """What a way takes."""

    way: Way
    seconds: float  # a step
    memory: float  # bytes that the fullest rank holds at most
    states: float  # bytes of these for parameters, gradients and the optimizer
    # The share of the step in which ranks wait for others of their pipeline, on average.
    bubble: float
    # The share of the step that each kind of work takes on the slowest stage, its own waiting among
    # them: 1 in all.
    shares: Mapping[str, float] = field(default_factory=dict)

    @property
    def bound(self) -> str:
        """What takes most of the step."""
        return max(self.shares, key=lambda kind: self.shares[kind])

    def as_json(self) -> dict[str, object]:
        """As plain values."""
        return {
            **asdict(self.way),
            "seconds": self.seconds,
            "memory_bytes": round(self.memory),
            "state_bytes": round(self.states),
            "bubble": round(self.bubble, 4),
            "bound_by": self.bound,
            "shares": {kind: round(share, 4) for kind, share in self.shares.items()},
        }


COMPUTE, TRAFFIC, TENSOR = "compute", "memory traffic", "tensor-parallel communication"
HOST = "the host"
BUBBLE, REPLICAS, SENDS, STEP = "bubble", "gradient all-reduce", "stage transfers", "optimizer"

ROWS = tuple(2**n for n in range(11))  # that a micro-batch may have


class _StagePart(NamedTuple):
    """What a stage of a pipeline runs."""

    runs: Runs  # pieces of the step
    sent: float  # bytes a row that go on to the next stage
    parameters: float  # how many it holds on a rank


class Predictor:
    """Predicts what ways of one rewrite on so many ranks take.

    Args:
        counted: What was counted without recomputation, and with all of it; the other way round,
            what was counted as it is, and None.
        precision: What is trained in.
        node: How many GPUs a node has.
        cut: For a number of stages, how many layers there are up to the end of each.
    """

    def __init__(
        self,
        counted: tuple[Counted, Counted | None],
        hardware: Hardware,
        precision: str,
        node: int,
        cut: Callable[[int], Sequence[int]],
    ) -> None:
        self.unfolded = Unfolded(*counted)
        self.plain = counted[0]
        self.hardware, self.precision, self.node = hardware, precision, node
        self.cut = cut
        self._pieces = cache(self.unfolded.pieces)
        self._parts = cache(self._stage_parts)
        self._unlike = cache(self._first_unlike)
        self._times = cache(self._stage_seconds)

    def memory(self, way: Way) -> tuple[float, float]:
        """Bytes that the fullest rank holds at most, and how many of these outlast a step."""
        stages = self._unlike(way.pipeline, way.recomputed)
        return max((self.stage_memory(way, number) for number in stages), key=itemgetter(0))

    def states(self, way: Way) -> float:
        """Bytes that outlast a step on the rank that has most of them: no way takes less."""
        kept = states(self.precision, way.zero, way.data)
        parts = self._parts(way.pipeline, way.recomputed)
        return self._lasting(kept, max(part.parameters for part in parts))

    def stage_memory(self, way: Way, number: int) -> tuple[float, float]:
        """Likewise of a rank of one stage."""
        part = self._parts(way.pipeline, way.recomputed)[number]
        kept = states(self.precision, way.zero, way.data)
        live = live_micro_batches(number, way.pipeline, way.micro_batches)
        held = self.plain.profile.buffers + self.plain.profile.inputs.of(way.rows) * live
        held += kept.layers * self._largest_layer * self._width
        held += kept.most(part.runs, part.parameters, way.rows, live, way.micro_batches)
        return held, self._lasting(kept, part.parameters)

    def _lasting(self, kept: States, parameters: float) -> float:
        gathered = kept.layers * self._largest_layer * self._width
        return parameters * kept.each + kept.fixed + gathered

    def stages(self, way: Way) -> list[Stage]:
        """What a micro-batch takes in each stage, and the optimizer's step."""
        alike = cache(partial(self._stage, way))
        return [alike(part) for part in self._parts(way.pipeline, way.recomputed)]

    def _stage(self, way: Way, part: _StagePart) -> Stage:
        forward, backward, _ = self._times(part.runs, way.rows, way.tensor)
        if way.zero == 3:  # parameters are gathered for both passes, layer by layer
            link_to_all = self._link(way.data, way.tensor * way.pipeline)
            layers = sum(times for piece, times in part.runs if piece.is_layer)
            gathered = link_to_all.all_gather(part.parameters * self._width, way.data)
            gathered += layers * link_to_all.latency
            forward, backward = max(forward, gathered), max(backward, gathered)
        optimizer = self._optimizer(way, part.parameters)
        return Stage(forward, backward, part.sent * way.rows, optimizer=optimizer)

    def predicted(self, way: Way) -> Predicted:
        """What a way takes."""
        parts, stages = self._parts(way.pipeline, way.recomputed), self.stages(way)
        memory, state_bytes = self.memory(way)
        pipe = self.between_stages(way)
        seconds = pipelined_seconds(stages, way.micro_batches, pipe)
        slowest = max(range(len(stages)), key=lambda n: stages[n].forward + stages[n].backward)
        work = self._times(parts[slowest].runs, way.rows, way.tensor)[2]
        reduced = self._replicas(way, max(p.parameters for p in parts), stages[slowest].backward)
        optimizer = max(stage.optimizer for stage in stages)
        total = seconds + reduced + optimizer
        shares = {k: v * way.micro_batches / total for k, v in work.items()}
        sends = 2 * pipe.send(stages[slowest].sent) if way.pipeline > 1 else 0.0
        shares[SENDS] = way.micro_batches * sends / total
        each = [(s.forward + s.backward) * way.micro_batches for s in stages]
        bubble, waiting = (
            max(0.0, (seconds - busy) / total - shares[SENDS])
            for busy in (sum(each) / way.pipeline, each[slowest])
        )
        shares |= {BUBBLE: waiting, REPLICAS: reduced / total, STEP: optimizer / total}
        if way.zero == 3:
            waits = stages[slowest].forward + stages[slowest].backward
            waits -= sum(work.values())
            shares[REPLICAS] += max(0.0, waits) * way.micro_batches / total
        return Predicted(way, total, memory, state_bytes, bubble, shares)

    @cached_property
    def layers(self) -> list[str]:
        """The paths of the layers that stages can be cut between, as they run."""
        return [
            f"{listed}.{number}"
            for listed in self.unfolded.lists
            for number in range(len(self.plain.stands_for[listed]))
        ]

    def between_stages(self, way: Way) -> Link:
        """What connects neighbouring stages."""
        return self._link(way.pipeline, way.tensor * way.data)

    @property
    def _width(self) -> int:
        return 4 if self.precision == "fp32" else 2

    @cached_property
    def _largest_layer(self) -> float:
        return max(self.layer_parameters.values(), default=0.0)

    @cached_property
    def layer_parameters(self) -> dict[str, float]:
        """How many parameters each layer has on a rank, by its path."""
        found = dict.fromkeys(self.layers, 0.0)
        for listed in self.unfolded.lists:
            for name, count in self.plain.names.items():
                if name.startswith(f"{listed}."):
                    found[f"{listed}.{name.removeprefix(f'{listed}.').partition('.')[0]}"] += count
        return found

    def _link(self, ranks: int, stride: int) -> Link:
        """What connects ranks that are so far apart; the model's are next to one another."""
        return self.hardware.inside if ranks * stride <= self.node else self.hardware.outside

    def _stage_seconds(
        self, runs: Runs, rows: int, ranks: int
    ) -> tuple[float, float, dict[str, float]]:
        """Seconds of a micro-batch on its way there and back, and of each kind of work."""
        link = self._link(ranks, 1)
        work = dict.fromkeys((COMPUTE, TRAFFIC, TENSOR), 0.0)
        both, waits = [], 0.0
        for is_forward in (True, False):
            both.append(0.0)
            operators = 0
            for piece, times in runs:
                part = piece.forward if is_forward else piece.backward
                took = self._part_seconds(part, rows, link, ranks)
                both[-1] += times * sum(took)
                operators += times * part.operators
                for kind, value in zip(work, took, strict=True):
                    work[kind] += times * value
            # The GPU waits for the host, where that takes longer.
            waited = max(0.0, operators * self.hardware.device.operator - both[-1])
            both[-1] += waited
            waits += waited
        return both[0], both[1], {**work, HOST: waits}

    def _part_seconds(
        self, part: Part, rows: int, link: Link, ranks: int
    ) -> tuple[float, float, float]:
        """Seconds of products, of other operators, and of collectives."""
        sent = sent_seconds(part, rows, link, ranks)
        return *part_seconds(part, rows, self.hardware.device), sent

    def _replicas(self, way: Way, parameters: float, backward: float) -> float:
        """Seconds in which replicas sum their gradients, and give one another new parameters.

        From stage 2 on that goes on beside the last micro-batch's way back.
        """
        if way.data == 1:
            return 0.0
        link = self._link(way.data, way.tensor)
        width = 4 if way.zero == 1 and self.precision == "bf16" else self._width
        if way.zero < 2:
            seconds = link.all_reduce(parameters * width, way.data)
        else:
            seconds = max(0.0, link.all_gather(parameters * width, way.data) - backward)
        if way.zero in (1, 2):
            seconds += link.all_gather(parameters * self._width, way.data)
        return seconds

    def _optimizer(self, way: Way, parameters: float) -> float:
        """Seconds of the optimizer's step: states are read and written once."""
        share = way.data if way.zero else 1
        return 2 * parameters * 16 / share / self.hardware.device.bandwidth

    def _stage_parts(self, count: int, ratio: float) -> list[_StagePart]:
        """What each of so many stages runs."""
        pieces = self._pieces(ratio)
        if count == 1:
            return [_StagePart(in_runs(pieces), 0.0, float(sum(self.plain.names.values())))]
        layers = [n for n, piece in enumerate(pieces) if piece.is_layer]
        ends = self.cut(count)
        bounds = [0, *(layers[end - 1] + 1 for end in ends[:-1]), len(pieces)]
        own = list(self.layer_parameters.values())
        sent = next(iter(self.plain.profile.between.values()), NOTHING).each
        outside = [*self.outside_parameters]
        outside[1:1] = [0.0] * (count - 2)
        return [
            _StagePart(
                in_runs(pieces[bounds[number] : bounds[number + 1]]),
                sent if number < count - 1 else 0.0,
                sum(own[start:end]) + outside[number],
            )
            for number, (start, end) in enumerate(pairwise([0, *ends]))
        ]

    def _first_unlike(self, count: int, ratio: float) -> list[int]:
        """The numbers of the stages without those that run what one before them does.

        That one has more micro-batches under way, and holds no less.
        """
        found: dict[tuple[Runs, float], int] = {}
        for number, part in enumerate(self._parts(count, ratio)):
            found.setdefault((part.runs, part.parameters), number)
        return list(found.values())

    @cached_property
    def outside_parameters(self) -> tuple[float, float]:
        """Parameters outside of lists that the first stage has, and the last; tied ones both do."""
        profile = self.plain.profile
        first = last = 0.0
        for name, count in self.plain.names.items():
            if any(name.startswith(f"{listed}.") for listed in self.unfolded.lists):
                continue
            users = profile.users.get(name, [])
            is_first = any(not place.listed for place in users)
            first += count if is_first else 0.0
            last += count if not is_first or any(place.listed for place in users) else 0.0
        return first, last


def ways(
    gpus: int, batch: int, tensors: Sequence[int], stages: Sequence[int], ratios: Sequence[float]
) -> Iterator[Way]:
    """All ways on so many GPUs, those of each split of the GPUs together."""
    for tensor in tensors:
        if gpus % tensor:
            continue
        for pipeline in stages:
            if (gpus // tensor) % pipeline:
                continue
            data = gpus // tensor // pipeline
            if batch % data:
                continue
            for each in ROWS:
                if (batch // data) % each:
                    continue
                for zero in (0, 1, 2, 3) if data > 1 and pipeline == 1 else (0, 1)[:data]:
                    for ratio in ratios:
                        yield Way(tensor, pipeline, data, each, batch // data // each, ratio, zero)
