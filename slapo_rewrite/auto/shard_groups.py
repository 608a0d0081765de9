"""Groups of layers that are split together, and the schedule lines for them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from slapo_rewrite.code.text import joined_path, with_wildcards
from slapo_rewrite.model.layers import inner_of

# Arguments of the `sync` that gathers results whose gradients are full on every rank.
GATHER = '"fwd_post", "all_gather", axis=-1, tensor_parallel_output_grad=False'


@dataclass(frozen=True)
class Shard:
    """A call of `shard` on the modules that a pattern selects."""

    pattern: str  # the modules' path
    names: tuple[str, ...]  # parameters to shard
    axis: int
    parts: tuple[int, ...] = ()  # sizes of the parts packed along the axis; empty: not packed

    def arguments(self) -> str:
        """The text of the call's arguments."""
        names = repr(self.names[0]) if len(self.names) == 1 else repr(list(self.names))
        parts = ""
        if self.parts:
            equal = len(set(self.parts)) == 1
            parts = f", parts={len(self.parts) if equal else list(self.parts)}"
        return f"{names}, axis={self.axis}{parts}"


@dataclass(frozen=True)
class Group:
    """Layers that are split together."""

    shards: tuple[Shard, ...]
    # Modules at whose input the gradient is summed, once for all layers in them.
    summed: tuple[str, ...] = ()
    results: tuple[str, ...] = ()  # modules whose result is summed
    head: str | None = None  # the head whose sharded logits go into the loss, if any
    parameters: int = 0  # number of parameters
    # What the rows are if the weights are split by rows, for output: words, for example.
    rows: str = ""
    is_experts: bool = False  # whether the layers are experts of a mixture
    gathered: bool = False  # whether explicit lines gather their results
    pays: bool = True  # whether the split saves more time than its collectives take

    @property
    def patterns(self) -> tuple[str, ...]:
        """The modules that are split."""
        return tuple(shard.pattern for shard in self.shards)

    def lines(self) -> list[str]:
        """The lines of a schedule for the group, without `infer_sync`."""
        found = [f's["{shard.pattern}"].shard({shard.arguments()})' for shard in self.shards]
        found += [f's["{path}"].sync("fwd_post", "all_reduce")' for path in self.results]
        found += [f's["{path}"].sync("bwd_post", "all_reduce")' for path in self.summed]
        found += [f's["{path}"].sync({GATHER})' for path in self.patterns if self.gathered]
        if self.head is not None:
            found.append(f's["{self.head}"].sync("bwd_post", "all_reduce")')
        return found


@dataclass(frozen=True)
class Found:
    """The result of the search."""

    groups: tuple[Group, ...]  # the layers that are split
    # Layers with a notable share of the parameters that are not split, each with the reason.
    whole: dict[str, str]

    def lines(self) -> list[str]:
        """The lines of a schedule for all groups."""
        return lines_of(self.groups)


@dataclass(frozen=True)
class Cube:
    """A parameter with one matrix for each expert."""

    pattern: str  # the module that holds it
    name: str
    beside: dict[str, nn.Parameter]  # all parameters of that module

    @property
    def shape(self) -> torch.Size:
        """The number of experts and the size of each one's matrix."""
        return self.beside[self.name].shape


INFER = "s.infer_sync()"


def lines_of(groups: Iterable[Group]) -> list[str]:
    """The lines of a schedule for groups, with `infer_sync` at the end."""
    lines = [line for group in groups for line in group.lines()]
    return [*lines, INFER] if lines else []


def with_parts(column: tuple[Shard, ...], parts: tuple[int, ...]) -> tuple[Shard, ...]:
    """The same shards, each with its axis packed of these parts."""
    return tuple(replace(shard, parts=parts) for shard in column)


def shape_of(producers: Iterable[str], consumers: Iterable[str]) -> tuple[str, ...]:
    """A key that is equal for components that differ only in numbers in their paths."""
    names = (*sorted(producers), ">", *sorted(consumers))
    return tuple(re.sub(r"\d+", "0", name) for name in names)


def rows_of(split: Iterable[str], tables: Iterable[str], words: Iterable[str]) -> str:
    """Words for the rows that are split evenly over the ranks.

    Args:
        split: The tables and heads that are split.
        tables: All tables of the model.
        words: Those tables that have one row for each output of a head.
    """
    own = {*split}
    if own <= {*tables}:
        return "rows of the table" if len(own) == 1 else "rows of each table"
    of_words = own & {*words}
    first = "words of the vocabulary" if of_words else "outputs"
    return first if own & {*tables} == of_words else f"{first}, and as many rows of other tables"


def common_pattern(patterns: Iterable[str]) -> str:
    """The longest path that contains all of them."""
    segments = [pattern.split(".")[:-1] for pattern in patterns]
    shared = itertools.takewhile(lambda s: len(set(s)) == 1, zip(*segments, strict=False))
    return ".".join(s[0] for s in shared)


def shards_as_one(pattern: str, module: nn.Module) -> tuple[Shard, ...]:
    """Shards for a torch layer that is split together with the layers in it; () for others."""
    found: dict[tuple[str, int, int], list[str]] = {}
    for (path, name), (axis, blocks) in inner_of(module).items():
        held = module.get_submodule(path)
        if not isinstance(getattr(held, name, None), torch.Tensor):
            if name in ("in_proj_weight", "weight"):
                return ()  # it has separate projections instead of a packed one
            continue
        key = joined_path(pattern, with_wildcards(path)), axis, blocks
        found.setdefault(key, []).append(name)
    return tuple(
        Shard(path, tuple(dict.fromkeys(names)), axis, (1,) * blocks if blocks > 1 else ())
        for (path, axis, blocks), names in found.items()
    )


def shards_of_experts(cubes: Sequence[Cube]) -> Iterator[tuple[Shard, ...]]:
    """Ways to split experts' inner features: outputs of all cubes but the last, its inputs."""
    *ups, down = cubes
    for up_axis, down_axis in ((1, 2), (2, 1)):
        inner = down.shape[down_axis]
        times = {up.shape[up_axis] / inner for up in ups}
        if not times <= {1.0, 2.0}:
            continue
        for packed in (True, False) if 2.0 in times else (False,):
            shards = []
            for up in ups:
                size, bias = up.shape[up_axis], f"{up.name}_bias"
                parts = (size // 2, size // 2) if packed and size == 2 * inner else ()
                shards.append(Shard(up.pattern, (up.name,), up_axis, parts))
                if bias in up.beside and up.beside[bias].dim() == 2:
                    shards.append(Shard(up.pattern, (bias,), 1, parts))
            yield (*shards, Shard(down.pattern, (down.name,), down_axis))
