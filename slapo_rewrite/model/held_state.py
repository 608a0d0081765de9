"""What a model holds beside parameters and buffers: which of it a step of training changes."""

from __future__ import annotations

import contextlib
import io
import pickle
import types
from typing import Any

import torch
from torch import nn

# What torch keeps of every module, and what stands for its `forward` while that is watched.
_OF_TORCH = {*vars(nn.Module()), "forward"}


def held(module: nn.Module, file: types.ModuleType) -> dict[tuple[str, str], bytes]:
    """What a module, those inside and the model's file hold: by where that is, and its name."""
    named = dict(module.named_modules())
    classes = (each for each in vars(file).values() if isinstance(each, type))
    by_name = {cls.__name__: cls for cls in classes if cls.__module__ == file.__name__}
    return {
        (place, name): _worth(value)
        for place, holder in {file.__name__: file, **by_name, **named}.items()
        for name, value in vars(holder).items()
        if name not in _OF_TORCH
        and not name.startswith("__")
        # What is worked out of parameters as it runs, as by weight norm.
        and not any(own.startswith(f"{name}_") for own in getattr(holder, "_parameters", ()))
    }


def _worth(value: object) -> bytes:
    """Bytes that tell whether something has changed, as far as it can be written down."""
    buffer = io.BytesIO()
    with contextlib.suppress(Exception):  # of objects of other people's
        _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Writes down what is in an object; what has no state of its own by its identity."""

    def persistent_id(self, given: Any) -> Any:
        if isinstance(given, torch.Tensor) and not given.is_meta:
            return bytes(given.detach().cpu().flatten().contiguous().view(torch.uint8).numpy())
        if isinstance(given, types.FunctionType):
            cells = [cell.cell_contents for cell in given.__closure__ or ()]
            return id(given), vars(given), cells
        return id(given) if isinstance(given, type | nn.Module | types.ModuleType) else None

    def reducer_override(self, given: Any) -> Any:
        try:
            made = given.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        except Exception:  # a lock, say
            made = ""
        return made if isinstance(made, tuple) else (str, (str(id(given)),))
