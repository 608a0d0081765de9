"""Norms of which each rank holds some of the channels or features.

Shapes: B batch, C channels, S any number of spatial axes, D features. A prime (C')
marks the part that this rank holds.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .shards import Parts, Shard, part_size, sum_parts
from .tensor_parallel import collective, gather_if_sharded, record_shard


class ParallelBatchNorm(nn.Module):
    """Base class of batch norms split over their channels.

    Every channel has statistics of its own, so nothing is communicated.

    Args:
        num_features: C, of the whole layer; the attribute of that name is C'.
        args: The further arguments of the torch class.
        parts: Divides the channels: one block, or several packed along it.
        gather_output: Return (B, C, *S) on every rank.
        kwargs: The further keyword arguments of the torch class.
    """

    def __init__(
        self,
        num_features: int,
        *args: Any,
        parts: Parts = Shard,
        gather_output: bool = False,
        **kwargs: Any,
    ) -> None:
        shard = parts(0, num_features, 0)
        super().__init__(shard.local_size(), *args, **kwargs)
        self.output_shard = replace(shard, axis=1) if gather_output else None
        for name in ("weight", "bias", "running_mean", "running_var"):
            if getattr(self, name) is not None:
                record_shard(self, name, shard)

    def forward(self, input: Tensor) -> Tensor:
        """Maps (B, C', *S) to the same, or to (B, C, *S) with `gather_output`."""
        return gather_if_sharded(super().forward(input), self.output_shard)


class ParallelBatchNorm1d(ParallelBatchNorm, nn.BatchNorm1d):
    """A BatchNorm1d split over its channels: (B, C') or (B, C', T) to the same."""


class ParallelBatchNorm2d(ParallelBatchNorm, nn.BatchNorm2d):
    """A BatchNorm2d split over its channels: (B, C', H, W) to the same."""


class ParallelGroupNorm(nn.GroupNorm):
    """A GroupNorm split over its groups: (B, C', *S) to the same.

    Args:
        num_groups: How many groups, of the whole layer; the attribute is this rank's.
        num_channels: C, of the whole layer; the attribute of that name is C'.
        args: The further arguments of the torch class.
        gather_output: Return (B, C, *S) on every rank.
        kwargs: The further keyword arguments of the torch class.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        *args: Any,
        gather_output: bool = False,
        **kwargs: Any,
    ) -> None:
        shard = Shard(0, num_channels, num_channels // num_groups)
        super().__init__(part_size(num_groups), shard.local_size(), *args, **kwargs)
        self.output_shard = replace(shard, axis=1) if gather_output else None
        if self.affine:
            record_shard(self, "weight", shard)
            record_shard(self, "bias", shard)

    def forward(self, input: Tensor) -> Tensor:
        """Maps (B, C', *S) to the same, or to (B, C, *S) with `gather_output`."""
        return gather_if_sharded(super().forward(input), self.output_shard)


def full_size(module: Any, name: str) -> int:
    """The full size of the sharded parameter `module.<name>`."""
    shard: Shard = module.sharded_parameters[name]
    return shard.size


def mean_of_parts(
    x: Tensor,
    size: int,
    dim: int,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The mean over an axis of which each rank has a part, of any size.

    Every rank uses it for its own part, so its gradient is summed over the ranks.

    Args:
        x: This rank's part.
        size: The axis's size on all ranks together.
        dim: The axis.
        keepdim: Keep it, with size one.
        dtype: Compute in this type.
    """
    share = x.shape[dim] / size
    return collective(x.mean(dim, keepdim, dtype=dtype) * share, sum_parts, sum_parts)


def rms_norm_of_parts(
    x: Tensor,
    size: int,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    cast: str = "input",
) -> Tensor:
    """`rms_norm` of features of which each rank has a part, in PyTorch's operations.

    Args:
        x: This rank's part of the rows.
        size: How many features all ranks have together.
        weight: This rank's part of the scale, or None for none.
        eps: Added to the mean of the squares.
        offset: Added to the weight.
        cast: When the normalised rows leave float32, as for `rms_norm`.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    r = torch.rsqrt(mean_of_parts(wide.pow(2), size, -1, keepdim=True) + eps)
    hat = (x if cast == "weight" else wide) * r
    if weight is None:
        return hat.to(x.dtype)
    if cast == "output":
        return ((offset + weight.to(hat.dtype)) * hat).to(x.dtype)
    return (offset + weight) * hat.to(x.dtype if cast == "input" else weight.dtype)


def var_of_parts(
    x: Tensor,
    size: int,
    dim: int,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Tensor:
    """The variance over an axis of which each rank has a part, of any size.

    Args:
        x: This rank's part.
        size: The axis's size on all ranks together.
        dim: The axis.
        unbiased: Divide by one less than the size.
        keepdim: Keep the axis, with size one.
        correction: Divide by the size minus this number instead.
    """
    less = int(unbiased) if correction is None else correction
    away = x - mean_of_parts(x, size, dim, keepdim=True)
    variance = mean_of_parts(away * away, size, dim, keepdim)
    return variance * (size / (size - less))


def std_of_parts(x: Tensor, size: int, dim: int, *args: Any, **kwargs: Any) -> Tensor:
    """The standard deviation; the arguments are those of `var_of_parts`."""
    return var_of_parts(x, size, dim, *args, **kwargs).sqrt()


def single_size(normalized_shape: int | Sequence[int]) -> int:
    """The size of the one axis that is normalised.

    Raises:
        ValueError: There are several.
    """
    if isinstance(normalized_shape, int):
        return normalized_shape
    if len(normalized_shape) != 1:
        raise ValueError(f"only one axis can be split: {list(normalized_shape)}")
    return normalized_shape[0]


class ParallelLayerNorm(nn.LayerNorm):
    """A LayerNorm split over its features, normalised over all: (..., D') to the same.

    Args:
        normalized_shape: D; the attribute of that name is D'.
        args: The further arguments of `nn.LayerNorm`.
        parts: Divides the features: one block, or several packed along it.
        gather_output: Return (..., D) on every rank.
        kwargs: The further keyword arguments of `nn.LayerNorm`.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        *args: Any,
        parts: Parts = Shard,
        gather_output: bool = False,
        **kwargs: Any,
    ) -> None:
        shard = parts(0, single_size(normalized_shape), 0)
        super().__init__(shard.local_size(), *args, **kwargs)
        self.full_size = shard.size
        self.output_shard = replace(shard, axis=-1) if gather_output else None
        for name in ("weight", "bias"):
            if getattr(self, name) is not None:
                record_shard(self, name, shard)

    def forward(self, input: Tensor) -> Tensor:
        """Normalises (..., D') by all ranks' features."""
        x = input.float() if input.dtype.itemsize < 4 else input
        x = x - mean_of_parts(x, self.full_size, -1, keepdim=True)
        variance = mean_of_parts(x * x, self.full_size, -1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        x = x.to(input.dtype)
        if self.weight is not None:
            x = x * self.weight
        if self.bias is not None:
            x = x + self.bias
        return gather_if_sharded(x, self.output_shard)


class ParallelRMSNorm(nn.RMSNorm):
    """An RMSNorm split over its features, normalised over all: (..., D') to the same.

    Args:
        normalized_shape: D; the attribute of that name is D'.
        args: The further arguments of `nn.RMSNorm`.
        parts: Divides the features: one block, or several packed along it.
        gather_output: Return (..., D) on every rank.
        kwargs: The further keyword arguments of `nn.RMSNorm`.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        *args: Any,
        parts: Parts = Shard,
        gather_output: bool = False,
        **kwargs: Any,
    ) -> None:
        shard = parts(0, single_size(normalized_shape), 0)
        super().__init__(shard.local_size(), *args, **kwargs)
        self.full_size = shard.size
        self.output_shard = replace(shard, axis=-1) if gather_output else None
        if self.weight is not None:
            record_shard(self, "weight", shard)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises (..., D') by all ranks' features."""
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        y = x.float() if x.dtype.itemsize < 4 else x
        variance = mean_of_parts(y * y, self.full_size, -1, keepdim=True)
        y = (y * torch.rsqrt(variance + eps)).to(x.dtype)
        if self.weight is not None:
            y = y * self.weight
        return gather_if_sharded(y, self.output_shard)
