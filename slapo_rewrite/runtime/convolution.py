"""Tensor-parallel convolutions: each rank holds some of the channels.

Shapes: B batch, C channels in, F channels out, S any number of spatial axes. A prime
(F') marks the part that this rank holds.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from .guards import check_parts
from .shards import Parts, Shard, world_size
from .tensor_parallel import (
    Reduction,
    all_reduce_gradient,
    gather_if_sharded,
    record_shard,
    sum_now,
    unchanged,
)


def refuse_groups(convolution: Any) -> None:
    """Raises `ValueError` for a convolution that has groups in this configuration only."""
    if convolution.groups > 1 and world_size() > 1:
        raise ValueError(
            f"this convolution has {convolution.groups} groups, but this file was written "
            "for one group: run slapo-rewrite again for this model"
        )


class ColumnParallelConvolution(nn.Module):
    """Base class of convolutions split over their output channels.

    Args:
        in_channels: C.
        out_channels: F; the attribute of that name is F'.
        args: The further arguments of the torch class.
        parts: Divides the output: one block, or several packed along it.
        multiple_of: Shares are equal multiples of it; 0: their sizes may differ.
        reduce_input_gradient: Sum the input's gradient over the ranks. False where it
            is summed once for several layers.
        gather_output: Return (B, F, *S) on every rank.
        kwargs: The further keyword arguments of the torch class.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *args: Any,
        parts: Parts = Shard,
        multiple_of: int = 0,
        reduce_input_gradient: bool = True,
        gather_output: bool = False,
        **kwargs: Any,
    ) -> None:
        shard = parts(0, out_channels, multiple_of)
        super().__init__(in_channels, shard.local_size(), *args, **kwargs)
        refuse_groups(self)
        self.enter = all_reduce_gradient if reduce_input_gradient else unchanged
        self.output_shard = replace(shard, axis=1) if gather_output else None
        record_shard(self, "weight", shard)
        if self.bias is not None:
            record_shard(self, "bias", shard)

    def forward(self, input: Tensor) -> Tensor:
        """Maps (B, C, *S) to (B, F', *S), or to (B, F, *S) with `gather_output`."""
        check_parts(self)
        return gather_if_sharded(super().forward(self.enter(input)), self.output_shard)


class ColumnParallelConv1d(ColumnParallelConvolution, nn.Conv1d):
    """A Conv1d split over its output channels: (B, C, T) -> (B, F', T)."""


class ColumnParallelConv2d(ColumnParallelConvolution, nn.Conv2d):
    """A Conv2d split over its output channels: (B, C, H, W) -> (B, F', H, W)."""


class RowParallelConvolution(nn.Module):
    """Base class of convolutions split over their input channels.

    Args:
        in_channels: C, of the whole layer; the attribute of that name is C'.
        out_channels: F.
        args: The further arguments of the torch class.
        parts: Divides the input: one block, or several packed along it.
        reduce: How the ranks' partial outputs are summed.
        kwargs: The further keyword arguments of the torch class.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *args: Any,
        parts: Parts = Shard,
        reduce: Reduction = sum_now,
        **kwargs: Any,
    ) -> None:
        shard = parts(1, in_channels, 0)
        super().__init__(shard.local_size(), out_channels, *args, **kwargs)
        refuse_groups(self)
        self.reduce = reduce
        record_shard(self, "weight", shard)

    def forward(self, input: Tensor) -> Tensor:
        """Maps (B, C', *S) to (B, F, *S), summed as `reduce` does it."""
        check_parts(self)
        if world_size() == 1:
            whole: Tensor = super().forward(input)
            return whole
        convolve: Any = self._conv_forward
        y: Tensor = convolve(input, self.weight, None)
        bias = self.bias
        if bias is not None:
            bias = bias.view(-1, *(1,) * (self.weight.dim() - 2))
        y, bias = self.reduce(y, bias)
        return y if bias is None else y + bias.to(y.dtype)


class RowParallelConv1d(RowParallelConvolution, nn.Conv1d):
    """A Conv1d split over its input channels: (B, C', T) -> (B, F, T)."""


class RowParallelConv2d(RowParallelConvolution, nn.Conv2d):
    """A Conv2d split over its input channels: (B, C', H, W) -> (B, F, H, W)."""


class GroupParallelConvolution(nn.Module):
    """Base class of grouped convolutions whose groups are split over the ranks.

    A group maps its own channels of the input, so a rank needs no others.

    Args:
        in_channels: C, of the whole layer; the attribute of that name is C'.
        out_channels: F; the attribute of that name is F'.
        kernel_size: As in the torch class, and so are the arguments after it.
        stride: See there.
        padding: See there.
        dilation: See there.
        groups: How many groups, of the whole layer; the attribute is this rank's.
        bias: Whether a bias is added.
        parts: Divides the groups: one block, or several packed along the channels.
        gather_output: Return (B, F, *S) on every rank.
        kwargs: The further keyword arguments of the torch class.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: str | int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        parts: Parts = Shard,
        gather_output: bool = False,
        **kwargs: Any,
    ) -> None:
        width = out_channels // groups
        # One channel in and out of each group: these may be shared unevenly.
        single = in_channels == out_channels == groups
        shard = parts(0, out_channels, 0 if single else width)
        share = shard.local_size() // width
        super().__init__(
            in_channels // groups * share,
            width * share,
            kernel_size,
            stride,
            padding,
            dilation,
            share,
            bias,
            **kwargs,
        )
        self.output_shard = replace(shard, axis=1) if gather_output else None
        record_shard(self, "weight", shard)
        if bias:
            record_shard(self, "bias", shard)

    def forward(self, input: Tensor) -> Tensor:
        """Maps (B, C', *S) to (B, F', *S), or to (B, F, *S) with `gather_output`."""
        return gather_if_sharded(super().forward(input), self.output_shard)


class GroupParallelConv1d(GroupParallelConvolution, nn.Conv1d):
    """A Conv1d split over its groups: (B, C', T) -> (B, F', T)."""


class GroupParallelConv2d(GroupParallelConvolution, nn.Conv2d):
    """A Conv2d split over its groups: (B, C', H, W) -> (B, F', H, W)."""
