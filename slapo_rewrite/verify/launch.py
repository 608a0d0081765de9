"""Starts one process per rank, watches the processes, and reports how they ended.

The ranks are forked from a process that has already imported the slow modules: importing torch and
transformers takes longer than most comparisons.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slapo_rewrite.verify.rank_layout import World, named, ranks_of
from slapo_rewrite.verify.report import Failure

WORKER = Path(__file__).resolve().with_name("worker.py")
SERVER = WORKER.with_name("fork_server.py")
GRACE_S = 3.0  # for the other ranks to write their results after one has failed
LATE_S = 10.0  # so long after the deadline, a rank that still runs is killed
POLL_S = 0.05
MOST_FRAMES = 4  # frames of a traceback that are reported
PEER_LOST = re.compile(r"connection (closed|reset|refused)|broken pipe|timed out wait", re.I)
# If a launcher started this process, these variables are about the launcher's ranks, not ours.
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ForkServer:
    """Starts processes in which the given modules are imported, if they can be.

    Processes forked from its creator may share it. It ends with the last of them, or at the end of
    a `with` block.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(SERVER), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment(),
            start_new_session=True,  # an interrupt reaches this process only, which ends the ranks
        )
        assert self.process.stdin is not None
        self.input = self.process.stdin

    def start(self, script: Path, arguments: Sequence[str], log: Path) -> ForkedProcess:
        """Runs a script in a new process with a process group of its own.

        Its output goes to `log`; a file beside that gets its process id and exit status.
        """
        process = ForkedProcess(self, log.with_suffix(".process"))
        log.touch()
        asked = {"run": str(script), "arguments": list(arguments), "log": str(log)}
        line = json.dumps({**asked, "state": str(process.state)}) + "\n"
        with contextlib.suppress(BrokenPipeError):  # the server died: `poll` reports it
            # One write, so that the lines of several processes do not mix.
            os.write(self.input.fileno(), line.encode())
        return process

    def lives(self) -> bool:
        """Whether the server still runs; any process that shares it may call this."""
        poll = select.poll()
        poll.register(self.input, 0)
        return not poll.poll(0)

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the server, but not the processes that it started."""
        self.input.close()
        self.process.wait()


class ForkedProcess:
    """A process of a `ForkServer`, with methods like those of `subprocess.Popen`."""

    def __init__(self, server: ForkServer, state: Path) -> None:
        self.server, self.state = server, state
        self.told: list[str] = []

    @property
    def pid(self) -> int | None:
        """The process id; None before the process runs."""
        words = self._words()
        return int(words[0]) if words else None

    def poll(self) -> int | None:
        """The exit status, or minus the signal that ended the process; None while it runs."""
        words = self._words()
        if len(words) == 2:
            return int(words[1])
        return None if words or self.server.lives() else -signal.SIGKILL

    def kill(self) -> None:
        """Waits until the process runs, and kills its process group."""
        while self.pid is None and self.poll() is None:
            time.sleep(POLL_S)
        if self.pid is not None and self.poll() is None:
            for end in (os.killpg, os.kill):  # it may not have its own process group yet
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    end(self.pid, signal.SIGKILL)
                    return

    def wait(self) -> int:
        """Waits for the end of the process; returns its exit status."""
        while (status := self.poll()) is None:
            time.sleep(POLL_S)
        return status

    def _words(self) -> list[str]:
        if self.state.exists():
            self.told = self.state.read_text().split()
        return self.told


class Ranks:
    """The processes of one world.

    Args:
        server: Starts the processes.
        job: The settings for every rank.
        world: The number of ranks, or their layout in a pipeline.
        folder: A new folder for the files of the ranks.
        timeout_s: The time limit for all ranks together.
        progress: Called with what rank 0 is doing.
        checked: Called with each check that is done and its result so far.
    """

    def __init__(
        self,
        server: ForkServer,
        job: dict[str, Any],
        world: World,
        folder: Path,
        timeout_s: float,
        progress: Callable[[str], None],
        checked: Callable[[str], None],
    ) -> None:
        self.server, self.job, self.folder = server, job, folder
        self.world, self.count = world, ranks_of(world)
        self.timeout_s, self.progress, self.checked = timeout_s, progress, checked
        self.told: dict[str, str] = {}
        self.processes: list[ForkedProcess] = []
        self.killed: set[int] = set()

    def run(self) -> None:
        """Runs the processes to their end; none is left running, whatever happens."""
        deadline = time.time() + self.timeout_s
        job = {**self.job, "world": self.count, "folder": str(self.folder), "deadline": deadline}
        file = self.folder / "job.json"
        file.write_text(json.dumps(job))
        try:
            for rank in range(self.count):
                log = self.folder / f"{rank}.log"
                self.processes.append(self.server.start(WORKER, [str(file), str(rank)], log))
            self._watch(deadline)
        finally:
            self._end()
        self._tell()

    def _watch(self, deadline: float) -> None:
        shown = ""
        failed_at: float | None = None
        while any(process.poll() is None for process in self.processes):
            now = time.time()
            if failed_at is None and any(process.poll() for process in self.processes):
                failed_at = now
            if now > deadline + LATE_S or (failed_at is not None and now > failed_at + GRACE_S):
                return
            stage = f"{named(self.world)}: {self._stage(0)}"
            if stage != shown:
                shown = stage
                self.progress(stage)
                self._tell()  # finished checks are written when the next stage begins
            time.sleep(POLL_S)

    def _tell(self) -> None:
        """Reports the checks that rank 0 has done, again if the result of one has changed.

        A slower rank may change it, and so may float64, which decides what may be rounding.
        """
        texts = (self._read(rank, "checks") for rank in range(self.count))
        done: list[dict[str, bool | None]] = [json.loads(text or "{}") for text in texts]
        for name in done[0]:
            found = {checks.get(name, True) for checks in done}
            words = "WRONG" if False in found else "beyond its limit" if None in found else "ok"
            if self.told.get(name) != words:
                self.told[name] = words
                self.checked(f"{named(self.world)}: {name}: {words}")

    def _end(self) -> None:
        for rank, process in enumerate(self.processes):
            if process.poll() is None:
                self.killed.add(rank)
                process.kill()
        for process in self.processes:
            process.wait()

    def _stage(self, rank: int) -> str:
        return self._read(rank, "stage") or "starting"

    def _read(self, rank: int, what: str) -> str:
        path = self.folder / f"{rank}.{what}"
        return path.read_text(errors="replace") if path.exists() else ""

    def results(self) -> dict[int, dict[str, Any]]:
        """The results of the ranks that wrote any."""
        texts = {rank: self._read(rank, "json") for rank in range(self.count)}
        return {rank: json.loads(text) for rank, text in texts.items() if text}

    def failure(self, out: Path) -> Failure | None:
        """Why not everything was compared: the first cause, not what followed from it; or None."""
        results = self.results()
        hung = [rank for rank in range(self.count) if self._read(rank, "hang")]
        if hung or (len(self.killed) == self.count):
            return self._hang(hung or sorted(self.killed), out)
        for rank, process in enumerate(self.processes):
            if rank not in results and rank not in self.killed:
                return self._death(rank, process.wait())
        if any(result["stopped"] for result in results.values() if "stopped" in result):
            return None  # a failed check says why
        errors = {rank: r["error"] for rank, r in results.items() if "error" in r}
        if not errors:
            return None
        first = min(
            errors,
            key=lambda rank: (
                bool(PEER_LOST.search(errors[rank]["message"])),
                errors[rank]["time"],
            ),
        )
        return self._error(first, errors[first], out)

    def _who(self, rank: int) -> str:
        one = "the process" if self.count == 1 else f"rank {rank}"
        return f"{one} at {named(self.world)}"

    def _error(self, rank: int, error: dict[str, str], out: Path) -> Failure:
        headline = f"{self._who(rank)} fails during: {error['stage']}"
        words = f"{error['type']}: {error['message']}".rstrip(": ")
        frames = _frames(error["traceback"], out)
        return Failure(self.world, headline, "\n".join([words, *frames]), error["stage"])

    def _death(self, rank: int, status: int) -> Failure:
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        stage = self._stage(rank)
        headline = f"{self._who(rank)} dies with {how} during: {stage}"
        log = "\n".join(self._printed(rank, 12))
        return Failure(self.world, headline, log or "it printed nothing", stage)

    def _printed(self, rank: int, most: int) -> list[str]:
        """The last lines of a rank's output."""
        return self._read(rank, "log").splitlines()[-most:]

    def _hang(self, ranks: list[int], out: Path) -> Failure:
        lines = []
        for rank in range(self.count):
            lines.append(f"rank {rank}: {self._stage(rank)}")
            if rank in ranks:
                lines += [f"  {frame}" for frame in _hang_frames(self._read(rank, "hang"), out)]
                lines += [f"  it printed: {line}" for line in self._printed(rank, 3)]
        if self.count > 1:
            lines.append("a collective hangs if not every rank calls it, or if the order differs")
        headline = f"{named(self.world)} hangs: not done after {self.timeout_s:g} s"
        return Failure(self.world, headline, "\n".join(lines), self._stage(ranks[0]))


def environment() -> dict[str, str]:
    """The environment variables of a rank."""
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER}
    environment.update(
        OBJC_DISABLE_INITIALIZE_FORK_SAFETY="YES",  # else macOS kills forks made after imports
        OMP_NUM_THREADS="1",
        MKL_NUM_THREADS="1",
        TOKENIZERS_PARALLELISM="false",
        PYTHONDONTWRITEBYTECODE="1",  # leaves the output folder unchanged
    )
    # By default gloo takes the address of the host's name, which may be unreachable.
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    return environment


def _frames(text: str, out: Path) -> list[str]:
    """The innermost frames of a traceback that lie in the output, or of all if none does."""
    lines = text.splitlines()
    places = [
        (line.strip(), lines[number + 1].strip() if number + 1 < len(lines) else "")
        for number, line in enumerate(lines)
        if line.startswith('  File "')
    ]
    own = [place for place in places if f'"{out}{os.sep}' in place[0]]
    return [f"{file}: {code}" for file, code in (own or places)[-MOST_FRAMES:]]


def _hang_frames(text: str, out: Path) -> list[str]:
    """The frames in which a rank hangs: faulthandler writes the innermost first."""
    places = [line.strip() for line in text.splitlines() if line.startswith('  File "')]
    own = [place for place in places if f'"{out}{os.sep}' in place]
    return (own or places)[:MOST_FRAMES]
