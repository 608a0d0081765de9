"""Norms that compute in float32 from inputs in half precision.

They follow a half-precision layer in a `Sequential`, where nothing else could cast.

Shapes: B batch, C channels, D features, S any number of spatial axes.
"""

from typing import Any

from torch import Tensor, nn


class Float32Norm(nn.Module):
    """Base class of norms that compute in float32."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps a tensor to one of its shape, in float32."""
        norm: Any = super()
        y: Tensor = norm.forward(input.float())
        return y


class Float32LayerNorm(Float32Norm, nn.LayerNorm):
    """A LayerNorm that computes in float32: (..., D) to the same."""


class Float32RMSNorm(Float32Norm, nn.RMSNorm):
    """An RMSNorm that computes in float32: (..., D) to the same."""


class Float32GroupNorm(Float32Norm, nn.GroupNorm):
    """A GroupNorm that computes in float32: (B, C, *S) to the same."""


class Float32BatchNorm1d(Float32Norm, nn.BatchNorm1d):
    """A BatchNorm1d that computes in float32: (B, C) or (B, C, T) to the same."""


class Float32BatchNorm2d(Float32Norm, nn.BatchNorm2d):
    """A BatchNorm2d that computes in float32: (B, C, H, W) to the same."""


class Float32BatchNorm3d(Float32Norm, nn.BatchNorm3d):
    """A BatchNorm3d that computes in float32: (B, C, *S) to the same."""
