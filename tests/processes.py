"""Run a function on several real processes that share a gloo group."""

import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.warm import context

LOOPBACK = "127.0.0.1"


def run(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    timeout_s: float = 120,
    start: str = "",
) -> list[Any]:
    """Call `function(*args)` on every rank of a group of `world` processes.

    `function` must be importable (at the top level of its module): the processes come from a fork
    server that has torch and a few modules of the tests imported. In a world of one it is called
    right here, without a group.

    Args:
        function: What every rank calls.
        world: How many ranks there are.
        args: What it is called with.
        timeout_s: After how many seconds the ranks are ended.
        start: How they are started instead: "spawn" for new interpreters (what is forked shares
            memory with the server for a while), "fork" to go on from this process.

    Returns:
        What the ranks returned, by rank: anything that `torch.save` can write.

    Raises:
        AssertionError: With the traceback of the first rank that failed, or without one where
            the processes ran out of time.
    """
    if world == 1:
        return [function(*args)]
    with tempfile.TemporaryDirectory() as folder:
        job = (world, folder, timeout_s, dict(os.environ), function, args)
        starter: Any = multiprocessing.get_context(start) if start else context()
        ranks = [starter.Process(target=_rank_main, args=(rank, *job)) for rank in range(world)]
        for process in ranks:
            process.start()
        finished = _wait(ranks, time.monotonic() + timeout_s)
        failures = sorted(Path(folder).glob("*.failed"), key=_when_failed)
        if failures:
            raise AssertionError(f"rank {failures[0].stem} failed:\n{failures[0].read_text()}")
        codes = [process.exitcode for process in ranks]
        # A rank that has handed in its result may still fall over a peer that is gone already.
        returned = [Path(folder, f"{rank}.result").exists() for rank in range(world)]
        assert all(returned) or finished, f"{world} processes did not end within {timeout_s} s"
        assert all(returned), f"processes ended with exit codes {codes} and without a result"
        return [
            torch.load(Path(folder, f"{rank}.result"), weights_only=False) for rank in range(world)
        ]


def _rank_main(
    rank: int,
    world: int,
    folder: str,
    timeout_s: float,
    environment: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # The fork server has the environment that it was started with, which may be another test's.
    os.environ.clear()
    os.environ |= environment
    torch.set_num_threads(1)
    try:
        store = _meeting(rank, world, Path(folder, "port"), timeout_s)
        os.environ |= {
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(store.port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
        }
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        draft = Path(folder, f"{rank}.unfinished")
        torch.save(function(*args), draft)
        draft.rename(draft.with_suffix(".result"))
        dist.barrier()
    except BaseException:
        # Its name appears only with its text; the rest of the group is stopped then.
        draft = Path(folder, f"{rank}.draft")
        draft.write_text(traceback.format_exc())
        draft.rename(draft.with_suffix(".failed"))
        os._exit(1)
    dist.destroy_process_group()


def _meeting(rank: int, world: int, place: Path, timeout_s: float) -> dist.TCPStore:
    """Where the ranks find each other, at a port that rank 0 takes and writes to a file.

    A port that is looked for first may be another's by the time that it is used.
    """
    timeout, deadline = timedelta(seconds=timeout_s), time.monotonic() + timeout_s
    if rank == 0:
        store = dist.TCPStore(LOOPBACK, 0, world, True, timeout, wait_for_workers=False)
        draft = place.with_suffix(".draft")
        draft.write_text(str(store.port))
        draft.rename(place)
        return store
    while not place.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    return dist.TCPStore(LOOPBACK, int(place.read_text()), world, False, timeout)


def _wait(processes: list[multiprocessing.process.BaseProcess], deadline: float) -> bool:
    """Whether all ended well in time; what has not is ended."""
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode for process in processes):
            break
        time.sleep(0.02)
    finished = not any(process.is_alive() for process in processes)
    for process in processes:
        process.kill()
        process.join()
    return finished


def _when_failed(path: Path) -> int:
    return path.stat().st_mtime_ns


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
