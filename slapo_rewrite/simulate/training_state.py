"""What outlasts a step on a rank: parameters, gradients and the optimizer's states."""

from __future__ import annotations

from dataclasses import dataclass

from slapo_rewrite.simulate.step_memory import Runs, most_held

# Elements of a bucket of gradients, as the configuration says that is written.
BUCKET = 50_000_000


@dataclass(frozen=True)
class States:
    """Bytes for each parameter that a rank holds, as DeepSpeed has them with an Adam.

    Attributes:
        weight: The parameter itself, in the dtype of the activations.
        gradient: The sums of gradients.
        optimizer: Adam's two moments, and a float32 copy of the parameter.
        is_lasting: Whether there is room for the gradients all the time; else, with one
            micro-batch, they come into being on its way back.
        update: What the optimizer's step takes beside these.
        fixed: Bytes whatever the parameters: buckets.
        layers: How many layers' parameters are there as a whole beside a rank's parts.
    """

    weight: float
    gradient: float
    optimizer: float
    is_lasting: bool = True
    update: float = 0.0
    fixed: float = 0.0
    layers: float = 0.0

    @property
    def each(self) -> float:
        """Bytes for each parameter, all together."""
        return self.weight + self.gradient + self.optimizer

    def most(
        self, runs: Runs, parameters: float, rows: int, live: int, micro_batches: int
    ) -> float:
        """The most bytes that a rank holds for parameters and activations.

        Args:
            runs: The parts of the step that it runs.
            parameters: How many it holds.
            rows: Rows of a micro-batch.
            live: How many micro-batches have gone there and not yet back, at most.
            micro_batches: How many make up a step.
        """
        come = self.come(micro_batches)
        step = self.own(parameters, micro_batches)
        step += most_held(runs, rows, live, gradients_stay=come)
        return self.fixed + max(step, parameters * (self.each + self.update))

    def come(self, micro_batches: int) -> bool:
        """Whether gradients come into being on the way back, and there is no room before."""
        return micro_batches == 1 and not self.is_lasting

    def own(self, parameters: float, micro_batches: int) -> float:
        """Bytes that a step finds there, buckets apart."""
        return parameters * (self.each - (self.gradient if self.come(micro_batches) else 0.0))


def states(precision: str, stage: int, replicas: int, bucket: int = BUCKET) -> States:
    """What a parameter takes by the stage of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054).

    In bfloat16 stage 1 sums gradients in float32. Other sums are of the parameters' dtype, from
    stage 1 on by buckets, and are copied to float32 where the optimizer takes them.

    Args:
        precision: `bf16`, `fp16` or `fp32`.
        stage: 0 to 3: nothing, the optimizer's states, gradients too, parameters too are divided.
        replicas: By how many ranks.
        bucket: Elements of a bucket of gradients.
    """
    width = 4 if precision == "fp32" else 2
    # In float32 the parameter needs no copy, but stages 1 and 2 make one of each rank's part.
    optimizer = 8.0 if precision == "fp32" and stage in (0, 3) else 12.0
    if precision == "bf16" and stage == 1:
        return States(width, 4, optimizer / replicas)
    buckets = {0: 0.0, 1: 1.0}.get(stage, 2.0)  # two where they are summed beside the way back
    return States(
        width / (replicas if stage == 3 else 1),
        width / (replicas if stage > 1 else 1),
        optimizer / (replicas if stage else 1),
        is_lasting=stage > 1,
        # Each rank's part goes over into a copy, while the others' parts are let go.
        update=max(0.0, 4 / replicas - width * (1 - 1 / replicas)) if stage == 1 else 0.0,
        fixed=buckets * width * bucket,
        layers=2.0 if stage == 3 else 0.0,
    )
