"""Multi-head attention in half precision, of parameters and values in float32.

Shapes are those of `nn.MultiheadAttention`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class BFloat16MultiheadAttention(nn.MultiheadAttention):
    """A `MultiheadAttention` that computes its products in bfloat16."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Returns the output in bfloat16, and the attention weights in float32."""
        attend: Callable[..., tuple[Tensor, Tensor | None]] = super().forward
        with torch.autocast(self.out_proj.weight.device.type, torch.bfloat16):
            y, weights = attend(*args, **kwargs)
        return y, None if weights is None else weights.float()


class Float16MultiheadAttention(nn.MultiheadAttention):
    """A `MultiheadAttention` that computes its products in float16."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Returns the output in float16, and the attention weights in float32."""
        attend: Callable[..., tuple[Tensor, Tensor | None]] = super().forward
        with torch.autocast(self.out_proj.weight.device.type, torch.float16):
            y, weights = attend(*args, **kwargs)
        return y, None if weights is None else weights.float()
