"""How a model of transformers initialises its modules."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


def initialises_inside(model: Any, module: nn.Module) -> bool:
    """Whether a model's `_init_weights` of a module without tensors writes to its submodules."""
    own = itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))
    if next(own, None) is not None:
        return False
    try:
        with torch.no_grad(), _NoWrites(), _AsIfStored():
            model._init_weights(module)
    except Exception:  # a write, or a failure on meta, which counts as one
        return True
    return False


class _NoWrites(TorchDispatchMode):
    """Raises at the first operation that changes a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            raise RuntimeError("it writes")
        return func(*args, **(kwargs or {}))


class _AsIfStored(TorchFunctionMode):
    """Hides that tensors are on the meta device, where `trunc_normal_` does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        return func(*args, **(kwargs or {}))
