"""The tensors in the arguments and results of modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from slapo_rewrite.code.text import joined_path
from slapo_rewrite.hugging_face import is_cache


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and mappings, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            if isinstance(item, torch.Tensor):
                yield item
            elif item is not None and type(item) not in _PLAIN:
                yield from tensors(item)
    elif isinstance(value, (dict, Mapping)):  # checks for `dict` first, which is fast
        for item in value.values():
            yield from tensors(item)


def in_dtype(inputs: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of a step, with floating-point tensors in another dtype."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return dict(tree_map_only(torch.Tensor, cast, dict(inputs)))


# The types of most other arguments, which contain no tensors.
_PLAIN = frozenset({bool, int, float, str, torch.dtype, torch.device, torch.Size})


def result_pairs(want: Any, have: Any, name: str, depth: int = 8) -> Iterator[tuple[str, Any, Any]]:
    """Pairs the tensors and numbers of two results, each with its name.

    Caches of earlier tokens are skipped: each rank has its own.
    """
    if isinstance(want, (torch.Tensor, int, float)):
        yield name, want, have
        return
    inside: list[tuple[str, Any, Any]] = []
    if isinstance(want, Mapping) and isinstance(have, Mapping):
        inside = [(str(k), v, have.get(k)) for k, v in want.items()]
    elif isinstance(want, (list, tuple)) and isinstance(have, (list, tuple)):
        names = getattr(want, "_fields", range(len(want)))
        inside = [(str(n), *pair) for n, *pair in zip(names, want, have, strict=False)]
    # Classes are compared by name: the original's and the output's differ.
    elif hasattr(want, "__dict__") and type(want).__qualname__ == type(have).__qualname__:
        known = isinstance(want, nn.Module | type) or type(want).__name__.endswith("Cache")
        inside = [] if known else [(k, v, vars(have).get(k)) for k, v in vars(want).items()]
    for key, one, other in inside if depth else ():
        if not is_cache(key, one):
            yield from result_pairs(one, other, joined_path(name, key), depth - 1)
