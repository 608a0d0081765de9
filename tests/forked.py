"""Runs a script in several forked processes, without `torchrun`."""

import os
import sys
from pathlib import Path

from tests.processes import free_port
from tests.warm import Forked


def printed(script: Path, world: int, *arguments: str) -> str:
    """What the first of `world` processes prints that run a script."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    logs = [script.parent / f"{rank}.log" for rank in range(world)]
    started = []
    for rank, path in enumerate(logs):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        with open(path, "w") as log:
            command = [sys.executable, "-P", str(script), *arguments]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **meeting, **own}
            started.append(Forked(command, stdout=log, env=environment))
    codes = [process.wait() for process in started]
    assert not any(codes), "".join(path.read_text()[-2000:] for path in logs)
    return logs[0].read_text()
