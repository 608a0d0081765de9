# Written by slapo-rewrite 0.2.0 for modeling_bert.py; rewrite.json says from what.
"""The tensor-parallel group, and how tensors are divided over its ranks."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn


class World(NamedTuple):
    """The ranks that share a model's layers.

    Attributes:
        group: Their process group; None: the default one, if any is initialised.
        ranks: The group's global ranks; empty where it has all of them.
        supposed: A (world size, rank) to build layers for without such processes.
    """

    group: dist.ProcessGroup | None = None
    ranks: tuple[int, ...] = ()
    supposed: tuple[int, int] | None = None


_world = World()


def set_group(group: dist.ProcessGroup | None) -> None:
    """Sets the tensor-parallel process group. Call it before the model is built.

    Without it the group is the default one where `torch.distributed` is initialised,
    and a world of one where it is not. A model runs in the group that was named when
    it was built, and in no other.
    """
    global _world
    ranks: tuple[int, ...] = ()
    if group is not None and dist.get_world_size(group) < dist.get_world_size():
        ranks = tuple(dist.get_process_group_ranks(group))
    _world = World(group, ranks, _world.supposed)


def named_world() -> World:
    """The tensor-parallel world that is set now."""
    return _world


@contextmanager
def in_world(world: World) -> Iterator[None]:
    """A context in which this world is set."""
    global _world
    before, _world = _world, world
    try:
        yield
    finally:
        _world = before


def world_of(size: int, rank: int = 0) -> AbstractContextManager[None]:
    """A context in which layers are built as on this rank of `size`, in one process."""
    return in_world(_world._replace(supposed=(size, rank)))


def world_size() -> int:
    """How many ranks share the model's layers."""
    if _world.supposed is not None:
        return _world.supposed[0]
    return dist.get_world_size(_world.group) if dist.is_initialized() else 1


def rank() -> int:
    """This process's place in the tensor-parallel group."""
    if _world.supposed is not None:
        return _world.supposed[1]
    return dist.get_rank(_world.group) if dist.is_initialized() else 0


def part_sizes(size: int, multiple_of: int = 0) -> list[int]:
    """Every rank's share of `size`: as even as possible, the larger shares first.

    Shares in units of `multiple_of` must be even.
    """

    def fits(ranks: int) -> bool:
        return size % (ranks * multiple_of) == 0 if multiple_of else size >= ranks

    world = world_size()
    if world > 1 and not fits(world):
        largest = max(filter(fits, range(1, world)), default=1)
        units = size / max(1, multiple_of)
        heads = f" = {units:g} heads of {multiple_of}" if multiple_of > 1 else ""
        raise ValueError(
            f"{size}{heads} does not divide over {world} ranks; the largest "
            f"tensor-parallel size below {world} that fits is {largest}"
        )
    share, rest = divmod(size, world)
    return [share + (r < rest) for r in range(world)]


@dataclass(frozen=True)
class Shard:
    """How a tensor is divided over the ranks.

    Attributes:
        axis: The axis that is divided.
        size: Its size in the full tensor.
        multiple_of: Parts are equal multiples of it (a head, say); 0: they may differ.
        world: The world size and the group's ranks when this was made.
    """

    axis: int
    size: int
    multiple_of: int = 0
    world: tuple[int, tuple[int, ...]] = field(
        default_factory=lambda: (world_size(), _world.ranks),
        compare=False,
        kw_only=True,
    )

    def check_group(self) -> None:
        """Refuses another group than the one that the tensor is divided over."""
        if _world.supposed is None and self.world != (world_size(), _world.ranks):
            raise RuntimeError(
                f"this model was built in a tensor-parallel group of {self.world[0]}, but "
                f"the current group is another one, of {world_size()}: call `set_group` with "
                "its group before it runs, and `init_process_group` before it is built"
            )

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """The pieces of the full axis, (start, stop), that a rank holds."""
        sizes = part_sizes(self.size, self.multiple_of)
        start = sum(sizes[:rank])
        return [(start, start + sizes[rank])]

    def sizes(self) -> list[int]:
        """The axis's size in every rank's part."""
        self.check_group()
        return part_sizes(self.size, self.multiple_of)

    def local_size(self) -> int:
        """The axis's size in this rank's part."""
        return self.sizes()[rank()]

    def sizes_with(self, part: Tensor) -> list[int]:
        """The sizes of all ranks' parts; refuses a `part` that has not this rank's."""
        sizes = self.sizes()
        if part.shape[self.axis] != sizes[rank()]:
            raise RuntimeError(
                f"a tensor of shape {list(part.shape)} has replaced this rank's part, whose "
                f"axis {self.axis} has {sizes[rank()]} of {self.size}: replace, resize or tie "
                "embeddings in the original, in one process, save it, and load that checkpoint"
            )
        return sizes

    def looked_up(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Row numbers within this rank's part, and a mask of rows that others hold.

        Numbers out of range are not masked: they fail as in one process.
        """
        first, end = self.ranges(rank())[0]
        elsewhere = (numbers >= 0) & (numbers < first)
        elsewhere |= (numbers >= end) & (numbers < self.size)
        return (numbers - first).masked_fill(elsewhere, 0), elsewhere

    def is_full(self, tensor: Tensor) -> bool:
        """Whether `tensor` has the full tensor's size along the axis."""
        return tensor.dim() > self.axis and tensor.shape[self.axis] == self.size

    def cut(self, full: Tensor) -> Tensor:
        """This rank's part of a full tensor."""
        self.check_group()
        if world_size() == 1:
            return full
        ranges = self.ranges(rank())
        pieces = [full.narrow(self.axis, start, end - start) for start, end in ranges]
        return torch.cat(pieces, self.axis)

    def gather(self, part: Tensor) -> Tensor:
        """The full tensor, on every rank, from the parts that the ranks hold."""
        self.check_group()
        if world_size() == 1:
            return part
        return self.joined(gather_parts(part, self.axis, self.sizes_with(part)))

    def joined(self, parts: list[Tensor]) -> Tensor:
        """The full tensor, from the parts of all ranks."""
        return torch.cat(parts, self.axis)


def gather_parts(part: Tensor, axis: int, sizes: list[int]) -> list[Tensor]:
    """Every rank's part, given the ranks' sizes along `axis`."""
    part = part.detach()
    missing = max(sizes) - part.shape[axis]
    if missing:  # gloo gathers parts of one size only
        behind = part.dim() - 1 - axis % part.dim()
        part = nn.functional.pad(part, [0, 0] * behind + [0, missing])
    part = part.contiguous()
    parts = list(part.new_empty(len(sizes), *part.shape).unbind())
    dist.all_gather(parts, part, group=_world.group)
    return [p.narrow(axis, 0, size) for p, size in zip(parts, sizes, strict=True)]


def are_alike(x: Tensor) -> bool:
    """Whether `x`, (N,), is the same on every rank."""
    size = torch.tensor([len(x)], device=x.device)
    sizes = [int(n) for n in gather_parts(size, 0, [1] * world_size())]
    return all(torch.equal(each, x) for each in gather_parts(x, 0, sizes))


def sum_parts(x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """All-reduces `x` into a new tensor: the sum over the ranks, or another `op`."""
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op, group=_world.group)
    return x


def parts_in(model: nn.Module) -> dict[int, Shard]:
    """The shards of the model's parameters and buffers, by `id` of the tensor."""
    return {
        id(getattr(module, name)): shard
        for module in model.modules()
        for name, shard in getattr(module, "sharded_parameters", {}).items()
    }
