"""What a model of transformers does to initialise its modules."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


def initialises_inside(model: Any, module: nn.Module) -> bool:
    """Whether a model, asked to initialise a module without tensors, writes to what it holds."""
    own = itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))
    if next(own, None) is not None:
        return False
    writes = _Writes()
    try:
        with torch.no_grad(), writes:
            model._init_weights(module)
    except Exception:  # as it may without memory: taken for something that matters
        return True
    return writes.found


class _Writes(TorchDispatchMode):
    """Notices whether any operation inside changes a tensor.

    Attributes:
        found: Whether one did.
    """

    found: bool = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or bool(func._schema.is_mutable)
        return func(*args, **(kwargs or {}))
