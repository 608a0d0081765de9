"""Simulates ranks by threads of this process, one of which runs at a time."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from slapo_rewrite.model.step_results import OtherNumbersError, Step

PATIENCE_S = 60
_ALONE: list[None] = []  # not empty while a rank does not wait for the others


class UnfitError(Exception):
    """The model does not fit so many ranks; its cause has the message."""


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Lets a rank run before the others do: collectives assume that all ranks pass the same.

    So constructors may run layers to learn their output sizes, although ranks are built one after
    the other.
    """
    _ALONE.append(None)
    try:
        yield
    finally:
        _ALONE.pop()


def on_ranks(world: int, run: Callable[[threading.Lock], Step]) -> list[Step]:
    """Runs every rank and returns their results.

    One rank computes at a time, until it waits for the others. Several threads would compete for
    the interpreter at each operation, which takes longer than one after the other.
    """
    # torch's own tests simulate ranks by it; it has no annotations.
    from torch.testing._internal.distributed import multi_threaded_pg

    threaded: Any = multi_threaded_pg
    group: Any = threaded.ProcessLocalGroup
    c10d: Any = torch._C._distributed_c10d
    isolate = c10d._set_thread_isolation_mode
    install, uninstall = threaded._install_threaded_pg, threaded._uninstall_threaded_pg
    results: list[Step | None] = [None] * world
    failures: list[BaseException] = []
    turn = threading.Lock()

    class InTurn(threaded.Collective):  # type: ignore[misc]
        def join(self, rank: int, data: Any) -> Any:
            if _ALONE:
                self._collective.work([data] * world)
                return threaded.ret_work(data)
            turn.release()
            try:
                return super().join(rank, data)
            finally:
                turn.acquire()

    def rank_main(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
            results[rank] = run(turn)
        except BaseException as error:
            failures.append(error)
            group.exception_handle(error)
        finally:
            # In torch 2.11 these groups cannot be destroyed, and end with their thread.
            with contextlib.suppress(AttributeError):
                if dist.is_initialized():
                    dist.destroy_process_group()

    if world == 1:
        try:
            return [run(turn)]
        except Exception as error:
            cause = error.__cause__ if isinstance(error, UnfitError) else error
            words = f"{type(cause).__name__}: {cause}".splitlines()[0]
            raise OtherNumbersError(1, "", 1.0, f"it fails: {words}") from error
    shown = sys.excepthook  # each rank adds its number to error messages, once more
    install()
    isolate(True)
    try:
        store = c10d.HashStore()
        threads = [threading.Thread(target=rank_main, args=(r,), daemon=True) for r in range(world)]
        with mock.patch.object(threaded, "Collective", InTurn):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(PATIENCE_S)
        stuck = any(thread.is_alive() for thread in threads)
        if stuck:
            group.exception_handle(TimeoutError())
    finally:
        group.reset()
        isolate(False)
        uninstall()
        sys.excepthook = shown
    for unfit in (error for error in failures if isinstance(error, UnfitError)):
        raise unfit
    failures = [e for e in failures if not isinstance(e, threading.BrokenBarrierError)]
    first = next((e for e in failures if isinstance(e, Exception)), None)
    if stuck or first is not None:
        what = f"{type(first).__name__}: {first}" if first else "the ranks wait for each other"
        raise OtherNumbersError(world, "", 1.0, f"it fails: {what.splitlines()[0]}") from first
    return [step for step in results if step is not None]
