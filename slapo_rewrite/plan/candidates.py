"""Enumerates ways to train a model on a number of GPUs, and predicts their time and memory."""

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

    tensor: int = 1  # tensor-parallel ranks
    pipeline: int = 1  # pipeline stages
    data: int = 1  # replicas
    rows: int = 1  # rows of a micro-batch
    micro_batches: int = 1  # micro-batches of a replica's step
    recomputed: float = 0.0  # the share of layers that are recomputed
    zero: int = 0  # the stage of ZeRO
    sequence_parallel: bool = False  # whether activations between sharded layers are sliced
    fused: bool = False  # whether kernels are fused


@dataclass(frozen=True)
class Predicted:
    """The predicted time and memory of a way."""

    way: Way
    seconds: float  # the time of a step
    memory: float  # the peak bytes of the fullest rank
    states: float  # the part for parameters, gradients and the optimizer
    # The average share of the step in which ranks wait for others of their pipeline.
    bubble: float
    # The shares of kinds of work in the step on the slowest stage, including its waiting; their sum
    # is 1.
    shares: Mapping[str, float] = field(default_factory=dict)

    @property
    def bound(self) -> str:
        """The kind of work with the largest share."""
        return max(self.shares, key=lambda kind: self.shares[kind])

    def as_json(self) -> dict[str, object]:
        """The prediction as JSON values."""
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

ROWS = tuple(2**n for n in range(11))  # the possible rows of a micro-batch


class _StagePart(NamedTuple):
    """The work of a pipeline stage."""

    runs: Runs  # pieces of the step
    sent: float  # bytes per row sent to the next stage
    parameters: float  # the number of parameters on a rank


class Predictor:
    """Predicts ways of one rewrite on one number of tensor-parallel ranks.

    Args:
        counted: The counts without recomputation, and with all layers recomputed; or the counts of
            the model as it is, and None.
        precision: The training precision.
        node: The number of GPUs of a node.
        cut: Returns, for a number of stages, the number of layers up to the end of each stage.
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
        """The peak bytes of the fullest rank, and how many of them persist between steps."""
        stages = self._unlike(way.pipeline, way.recomputed)
        return max((self.stage_memory(way, number) for number in stages), key=itemgetter(0))

    def states(self, way: Way) -> float:
        """The most bytes of a rank that persist between steps: a lower bound of its memory."""
        kept = states(self.precision, way.zero, way.data)
        parts = self._parts(way.pipeline, way.recomputed)
        return self._lasting(kept, max(part.parameters for part in parts))

    def stage_memory(self, way: Way, number: int) -> tuple[float, float]:
        """The same as `memory`, for a rank of one stage."""
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
        """The times of a micro-batch and of the optimizer's step in each stage."""
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
        """Predicts the time and memory of a way."""
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
        """The paths of the layers between which stages can be cut, in running order."""
        return [
            f"{listed}.{number}"
            for listed in self.unfolded.lists
            for number in range(len(self.plain.stands_for[listed]))
        ]

    def between_stages(self, way: Way) -> Link:
        """The link between neighbouring stages."""
        return self._link(way.pipeline, way.tensor * way.data)

    @property
    def _width(self) -> int:
        return 4 if self.precision == "fp32" else 2

    @cached_property
    def _largest_layer(self) -> float:
        return max(self.layer_parameters.values(), default=0.0)

    @cached_property
    def layer_parameters(self) -> dict[str, float]:
        """The number of parameters of each layer on a rank, by path."""
        found = dict.fromkeys(self.layers, 0.0)
        for listed in self.unfolded.lists:
            for name, count in self.plain.names.items():
                if name.startswith(f"{listed}."):
                    found[f"{listed}.{name.removeprefix(f'{listed}.').partition('.')[0]}"] += count
        return found

    def _link(self, ranks: int, stride: int) -> Link:
        """The link between ranks at this stride; tensor-parallel ranks are neighbours."""
        return self.hardware.inside if ranks * stride <= self.node else self.hardware.outside

    def _stage_seconds(
        self, runs: Runs, rows: int, ranks: int
    ) -> tuple[float, float, dict[str, float]]:
        """The seconds of a micro-batch's forward and backward pass, and of each kind of work."""
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
            # The GPU waits for the host if launching takes longer.
            waited = max(0.0, operators * self.hardware.device.operator - both[-1])
            both[-1] += waited
            waits += waited
        return both[0], both[1], {**work, HOST: waits}

    def _part_seconds(
        self, part: Part, rows: int, link: Link, ranks: int
    ) -> tuple[float, float, float]:
        """The seconds of products, of other operators, and of collectives."""
        sent = sent_seconds(part, rows, link, ranks)
        return *part_seconds(part, rows, self.hardware.device), sent

    def _replicas(self, way: Way, parameters: float, backward: float) -> float:
        """The seconds of replicas' all-reduce of gradients and all-gather of parameters.

        From ZeRO 2 on, this overlaps with the backward pass of the last micro-batch.
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
        """The seconds of the optimizer's step, which reads and writes its states once."""
        share = way.data if way.zero else 1
        return 2 * parameters * 16 / share / self.hardware.device.bandwidth

    def _stage_parts(self, count: int, ratio: float) -> list[_StagePart]:
        """The work of each stage, for a number of stages."""
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
        """The numbers of the stages, without those that do the same work as an earlier one.

        The earlier one has more micro-batches in flight, and needs at least as much memory.
        """
        found: dict[tuple[Runs, float], int] = {}
        for number, part in enumerate(self._parts(count, ratio)):
            found.setdefault((part.runs, part.parameters), number)
        return list(found.values())

    @cached_property
    def outside_parameters(self) -> tuple[float, float]:
        """The parameters outside of lists in the first and last stage; tied ones are in both."""
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
    """All ways on a number of GPUs, grouped by the layout of the GPUs."""
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
