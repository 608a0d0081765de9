"""What the kernels load and store, element by element, under Triton's interpreter.

    TRITON_INTERPRET=1 python -m tests.benchmark.launches

Prints one JSON list: of every launch the kernel's name, and how many bytes it loads from and stores
to, each place in memory once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

from tests.runtime.kernels.compile import calls, public

LAUNCHES: list[tuple[str, int, int]] = []


class Places:
    """Addresses that were touched, and how many bytes lie at each."""

    def __init__(self) -> None:
        self.found: dict[int, list[Any]] = {}

    def add(self, pointers: Any, mask: Any) -> None:
        bytes_ = pointers.get_element_ty().primitive_bitwidth // 8
        where = np.broadcast_to(mask.data, pointers.data.shape)
        self.found.setdefault(max(bytes_, 1), []).append(np.unique(pointers.data[where]))

    def bytes(self) -> int:
        return sum(size * len(np.unique(np.concatenate(p))) for size, p in self.found.items())


def watch() -> None:
    """Writes down every launch from now on."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, launch = builder.create_masked_load, builder.create_masked_store, executor.__call__
    loaded, stored = Places(), Places()

    def watched_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        loaded.add(pointers, mask)
        return load(self, pointers, mask, *rest)

    def watched_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        stored.add(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def watched_launch(self: Any, *arguments: Any, **named: Any) -> Any:
        loaded.found, stored.found = {}, {}
        result = launch(self, *arguments, **named)
        LAUNCHES.append((self.fn.__name__, loaded.bytes(), stored.bytes()))
        return result

    builder.create_masked_load, builder.create_masked_store = watched_load, watched_store
    executor.__call__ = watched_launch


def run(name: str, call: Callable[[Any], Any]) -> None:
    """A public function, forwards and backwards."""
    outputs = call(public(name))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])


def small_calls() -> dict[str, Callable[[Any], Any]]:
    """Calls of every public function that an interpreter is quick about."""
    return calls(torch.bfloat16, d=96, v=500)


def main() -> None:
    watch()
    for name, call in small_calls().items():
        run(name, call)
    print(json.dumps(LAUNCHES))


if __name__ == "__main__":
    main()
