"""Numbers and layouts of ranks, for the whole model or for the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """The layout of a pipeline's ranks."""

    pipe: int  # number of stages
    tensor: int = 1  # number of ranks among which each stage's layers are sharded
    data: int = 1  # number of replicas, each with its own data

    @property
    def ranks(self) -> int:
        """The total number of ranks."""
        return self.pipe * self.tensor * self.data

    def __str__(self) -> str:
        sizes = [f"pp{self.pipe}"]
        sizes += [f"{n}{size}" for n, size in (("tp", self.tensor), ("dp", self.data)) if size > 1]
        return " ".join(sizes)


World = int | Layout  # number of ranks for the whole model, or the layout of its stages


@dataclass(frozen=True)
class Training:
    """Settings of DeepSpeed's training."""

    zero: int = 0  # the stage of ZeRO: 0, or 1, which shards optimizer states among replicas
    clipping: float = 0.0  # the norm to which gradients are clipped; 0: no clipping
    bf16: bool = False  # whether the model computes in bfloat16


def ranks_of(world: World) -> int:
    """The number of processes of a world."""
    return world if isinstance(world, int) else world.ranks


def named(world: World) -> str:
    """A world as text for output."""
    return f"world size {world}" if isinstance(world, int) else f"pipeline {world}"


def listed(worlds: Sequence[World]) -> str:
    """Several worlds as text for output."""
    sizes = [str(world) for world in worlds if isinstance(world, int)]
    words = [f"world size{'s' if len(sizes) > 1 else ''} {', '.join(sizes)}"] if sizes else []
    words += [named(world) for world in worlds if not isinstance(world, int)]
    return " and ".join(words)


def recorded(world: World) -> int | str:
    """A world in the form that an output's record has."""
    return world if isinstance(world, int) else str(world)
