"""Layers that compute in half precision, of parameters and values in float32.

Parameters stay in float32, and so do their gradients. A layer's output is in half
precision; its sum with a value in float32 is in float32 again.

Shapes: B batch, C channels in, D features in, F features or channels out, S any number of spatial
axes.
"""

from typing import Any

from torch import Tensor, nn


def bfloat16_mask(mask: Tensor | None) -> Tensor | None:
    """Casts an attention mask to bfloat16; a boolean one, or None, is unchanged."""
    if mask is None or not mask.is_floating_point():
        return mask
    return mask.bfloat16()


class BFloat16Linear(nn.Linear):
    """A linear layer that computes in bfloat16: (..., D) -> (..., F)."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps (..., D) to (..., F), which is in bfloat16."""
        bias = None if self.bias is None else self.bias.bfloat16()
        return nn.functional.linear(input.bfloat16(), self.weight.bfloat16(), bias)


class BFloat16Convolution(nn.Module):
    """Base class of convolutions that compute in bfloat16."""

    def _conv_forward(
        self, input: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Maps (B, C, *S) to (B, F, *S), which is in bfloat16."""
        bias = None if bias is None else bias.bfloat16()
        convolve: Any = super()
        y: Tensor = convolve._conv_forward(input.bfloat16(), weight.bfloat16(), bias)
        return y


class BFloat16Conv1d(BFloat16Convolution, nn.Conv1d):
    """A Conv1d that computes in bfloat16: (B, C, T) -> (B, F, T)."""


class BFloat16Conv2d(BFloat16Convolution, nn.Conv2d):
    """A Conv2d that computes in bfloat16: (B, C, H, W) -> (B, F, H, W)."""


class BFloat16Conv3d(BFloat16Convolution, nn.Conv3d):
    """A Conv3d that computes in bfloat16: (B, C, *S) -> (B, F, *S)."""


def half_mask(mask: Tensor | None) -> Tensor | None:
    """Casts an attention mask to float16; a boolean one, or None, is unchanged."""
    if mask is None or not mask.is_floating_point():
        return mask
    return mask.half()


class Float16Linear(nn.Linear):
    """A linear layer that computes in float16: (..., D) -> (..., F)."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps (..., D) to (..., F), which is in float16."""
        bias = None if self.bias is None else self.bias.half()
        return nn.functional.linear(input.half(), self.weight.half(), bias)


class Float16Convolution(nn.Module):
    """Base class of convolutions that compute in float16."""

    def _conv_forward(
        self, input: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Maps (B, C, *S) to (B, F, *S), which is in float16."""
        bias = None if bias is None else bias.half()
        convolve: Any = super()
        y: Tensor = convolve._conv_forward(input.half(), weight.half(), bias)
        return y


class Float16Conv1d(Float16Convolution, nn.Conv1d):
    """A Conv1d that computes in float16: (B, C, T) -> (B, F, T)."""


class Float16Conv2d(Float16Convolution, nn.Conv2d):
    """A Conv2d that computes in float16: (B, C, H, W) -> (B, F, H, W)."""


class Float16Conv3d(Float16Convolution, nn.Conv3d):
    """A Conv3d that computes in float16: (B, C, *S) -> (B, F, *S)."""
