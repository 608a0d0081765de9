"""Tracks when the storages of a run's tensors are allocated and freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


class Storages:
    """Numbers storages as they are first seen, and calls `let_go` when one is freed.

    Tensors `outside` live all the time, and their storages do not count.
    """

    def __init__(self, outside: Iterable[Tensor], let_go: Callable[[int], None]) -> None:
        self._outside = [tensor.untyped_storage() for tensor in outside]
        self._ignored = {storage._cdata for storage in self._outside}
        self._known: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._count, self._let_go = 0, let_go

    def made(self, tensor: Tensor) -> int | None:
        """The number of a tensor's storage if it is new; else None."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._ignored or key in self._known:
            return None
        number, self._count = self._count, self._count + 1

        def gone(_: Any) -> None:
            del self._known[key]
            self._let_go(number)

        self._known[key] = number, weakref.ref(storage, gone)
        return number

    def number_of(self, tensor: Tensor) -> int | None:
        """The number of a tensor's storage; None if it does not count."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[0]
