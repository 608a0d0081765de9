"""What outlasts a step on a rank: parameters, gradients and the optimizer's states."""

from __future__ import annotations

from dataclasses import dataclass

# Elements of a bucket of gradients, as the configuration says that is written.
BUCKET = 50_000_000


@dataclass(frozen=True)
class States:
    """Bytes for each parameter that a rank holds, as DeepSpeed has them with an Adam.

    Attributes:
        weight: The parameter itself, in the dtype of the activations.
        gradient: The sums of gradients.
        optimizer: Adam's two moments, and a float32 copy of the parameter.
        fixed: Bytes whatever the parameters: buckets.
        layers: How many layers' parameters are there as a whole beside a rank's parts.
    """

    weight: float
    gradient: float
    optimizer: float
    fixed: float = 0.0
    layers: float = 0.0

    @property
    def each(self) -> float:
        """Bytes for each parameter."""
        return self.weight + self.gradient + self.optimizer


def states(precision: str, stage: int, replicas: int) -> States:
    """What a parameter takes by the stage of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054).

    In half precision stage 1 sums gradients in float32, stages 2 and 3 in halves, by buckets.

    Args:
        precision: `bf16`, `fp16` or `fp32`.
        stage: 0 to 3: nothing, the optimizer's states, gradients too, parameters too are divided.
        replicas: By how many ranks.
    """
    width = 4 if precision == "fp32" else 2
    # In float32 the parameter needs no copy, but stages 1 and 2 make one of each rank's part.
    optimizer = 8.0 if precision == "fp32" and stage in (0, 3) else 12.0
    gradient = {0: width, 1: 4 if precision == "bf16" else width}.get(stage, width / replicas)
    return States(
        width / (replicas if stage == 3 else 1),
        gradient,
        optimizer / (replicas if stage else 1),
        fixed=2.0 * width * BUCKET if stage > 1 else 0.0,
        layers=2.0 if stage == 3 else 0.0,
    )
