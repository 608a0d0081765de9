"""GPT-2's Conv1D, a linear layer with its weight transposed, in half precision.

Shapes: D features in, F features out.
"""

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D


class BFloat16Conv1D(Conv1D):
    """A Conv1D that computes in bfloat16: (..., D) -> (..., F)."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., D) to (..., F), which is in bfloat16."""
        flat = x.bfloat16().view(-1, x.shape[-1])
        y = torch.addmm(self.bias.bfloat16(), flat, self.weight.bfloat16())
        return y.view(*x.shape[:-1], self.weight.shape[1])


class Float16Conv1D(Conv1D):
    """A Conv1D that computes in float16: (..., D) -> (..., F)."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., D) to (..., F), which is in float16."""
        flat = x.half().view(-1, x.shape[-1])
        y = torch.addmm(self.bias.half(), flat, self.weight.half())
        return y.view(*x.shape[:-1], self.weight.shape[1])
