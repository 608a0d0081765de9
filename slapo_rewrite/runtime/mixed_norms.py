"""Norms that compute in float32 of what they are given in half precision.

They stand behind a layer that computes so in a `Sequential`, where nothing else could cast.

Shapes: B batch, C channels, D features, S any number of spatial axes.
"""

from torch import Tensor, nn


class Float32LayerNorm(nn.LayerNorm):
    """A LayerNorm that computes in float32: (..., D) to the same."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps (..., D) to the same, in float32."""
        return super().forward(input.float())


class Float32RMSNorm(nn.RMSNorm):
    """An RMSNorm that computes in float32: (..., D) to the same."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., D) to the same, in float32."""
        return super().forward(x.float())


class Float32GroupNorm(nn.GroupNorm):
    """A GroupNorm that computes in float32: (B, C, *S) to the same."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps (B, C, *S) to the same, in float32."""
        return super().forward(input.float())


class Float32BatchNorm1d(nn.BatchNorm1d):
    """A BatchNorm1d that computes in float32: (B, C) or (B, C, T) to the same."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps (B, C) or (B, C, T) to the same, in float32."""
        return super().forward(input.float())


class Float32BatchNorm2d(nn.BatchNorm2d):
    """A BatchNorm2d that computes in float32: (B, C, H, W) to the same."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps (B, C, H, W) to the same, in float32."""
        return super().forward(input.float())


class Float32BatchNorm3d(nn.BatchNorm3d):
    """A BatchNorm3d that computes in float32: (B, C, *S) to the same."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps (B, C, *S) to the same, in float32."""
        return super().forward(input.float())
