"""Ranks that stay alive: processes of one gloo group that run one call after another.

A pair of models is compared in a fraction of a second this way, where starting a process and
importing torch would take several. This module imports torch and nothing of the tool, as every
rank does: the ranks are forked from a server that has imported it once.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from tests.warm import context

LARGEST = 4
_groups: dict[int, Any] = {}


class RankError(Exception):
    """A call that failed on a rank.

    Attributes:
        kind: The name of the exception's class, "Timeout" or "Died".
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Ranks:
    """Four processes, of which a call uses the first two, three or four.

    Args:
        timeout_s: How long one call may take.
    """

    def __init__(self, timeout_s: float = 20) -> None:
        self.timeout_s = timeout_s
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = ""

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def call(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(*args)` on each rank of a group of `world`; what the ranks return, by rank.

        Raises:
            RankError: A rank failed; where others wait for it, all are started anew.
        """
        if not self._processes:
            self._start()
        request = pickle.dumps((world, function, args))
        for pipe in self._pipes[:world]:
            pipe.send_bytes(request)
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout_s
        while len(answers) < world:
            waiting = {self._pipes[r]: r for r in range(world) if r not in answers}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                try:
                    answers[waiting[pipe]] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    answers[waiting[pipe]] = ("Died", "the process ended")  # type: ignore[index]
                if answers[waiting[pipe]][0]:  # type: ignore[index]
                    deadline = min(deadline, time.monotonic() + 0.5)  # the others, if they fail too
            if not ready:
                break
        failed = [answers[r] for r in sorted(answers) if answers[r][0]]
        if len(answers) < world or any(kind == "Died" for kind, _ in failed):
            self.stop()
        if failed:
            raise RankError(*failed[0])
        if len(answers) < world:
            raise RankError("Timeout", f"no answer within {self.timeout_s} s")
        return [answers[r][1] for r in range(world)]

    def stop(self) -> None:
        """Ends the processes; the next call starts others."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._pipes, self._folder = [], [], ""

    def _start(self) -> None:
        server = context()
        self._folder = tempfile.mkdtemp()
        for rank in range(LARGEST):
            here, there = server.Pipe()
            process = server.Process(
                target=_main, args=(rank, self._folder, there, self.timeout_s), daemon=True
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)


def group(world: int) -> Any:
    """The process group of the first so many ranks; called on one of them."""
    return _groups[world]


def _main(rank: int, folder: str, pipe: Connection, timeout_s: float) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=LARGEST,
        timeout=timedelta(seconds=timeout_s),
    )
    for world in range(2, LARGEST):
        _groups[world] = dist.new_group(list(range(world)))
    _groups[LARGEST] = dist.group.WORLD
    while True:
        try:
            world, function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        try:
            answer = (None, function(rank, world, *args))
        except Exception as error:
            answer = (type(error).__name__, f"{error}\n{traceback.format_exc()}")
        pipe.send_bytes(pickle.dumps(answer))
