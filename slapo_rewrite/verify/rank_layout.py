"""How many ranks run what: the whole model, or the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """The ranks of a pipeline."""

    pipe: int  # its stages
    tensor: int = 1  # ranks that share each stage's layers
    data: int = 1  # replicas, each with data of its own

    @property
    def ranks(self) -> int:
        """All ranks together."""
        return self.pipe * self.tensor * self.data

    def __str__(self) -> str:
        sizes = [f"pp{self.pipe}"]
        sizes += [f"{n}{size}" for n, size in (("tp", self.tensor), ("dp", self.data)) if size > 1]
        return " ".join(sizes)


World = int | Layout  # ranks that run the whole model, or its stages


@dataclass(frozen=True)
class Training:
    """How DeepSpeed is told to train."""

    zero: int = 0  # the stage of ZeRO: 0, or 1 for optimizer states that replicas share out
    clipping: float = 0.0  # the norm that gradients are clipped to; 0 for none
    bf16: bool = False  # whether the model computes in bfloat16


def ranks_of(world: World) -> int:
    """How many processes run it."""
    return world if isinstance(world, int) else world.ranks


def named(world: World) -> str:
    """A world in words."""
    return f"world size {world}" if isinstance(world, int) else f"pipeline {world}"


def listed(worlds: Sequence[World]) -> str:
    """Several worlds in words."""
    sizes = [str(world) for world in worlds if isinstance(world, int)]
    words = [f"world size{'s' if len(sizes) > 1 else ''} {', '.join(sizes)}"] if sizes else []
    words += [named(world) for world in worlds if not isinstance(world, int)]
    return " and ".join(words)


def recorded(world: World) -> int | str:
    """A world as the record of an output holds it."""
    return world if isinstance(world, int) else str(world)
