"""What a model notes in itself while it runs, a mask say, is forgotten after the run."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Gives every module the attributes and buffers back that it had, so that runs are alike."""
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    held = [_copied(own) for _, own in before]
    try:
        yield
    finally:
        for (now, own), containers in zip(before, held, strict=True):
            now.clear()
            now.update(own)
            for container, content in containers:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(content)


def _copied(own: dict[str, Any]) -> list[tuple[Any, Any]]:
    kinds = (dict, OrderedDict, list, set)  # hooks are in ordered ones
    return [(value, copy.copy(value)) for value in own.values() if type(value) in kinds]
