"""Runs an example's script in several processes, forked and not started by `torchrun`."""

import os
import sys
from pathlib import Path

from tests.processes import free_port
from tests.warm import Forked


def printed(folder: Path, world: int, *arguments: str) -> str:
    """What the first of `world` processes prints that run `train.py` of a folder."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = []
    for rank in range(world):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        with open(folder / f"{rank}.log", "w") as log:
            command = [sys.executable, "-P", str(folder / "train.py"), *arguments]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **meeting, **own}
            started.append(Forked(command, stdout=log, env=environment))
    codes = [process.wait() for process in started]
    assert not any(codes), "".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
    return (folder / "0.log").read_text()
