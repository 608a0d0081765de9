"""A process that has imported what ranks need, and from which they are forked."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from slapo_rewrite.verify import launch

MODULES = ["torch", "deepspeed.pipe", "deepspeed.runtime.pipe.engine"]
MODULES += [f"transformers.models.{n}.modeling_{n}" for n in ("bert", "gpt2", "llama", "t5")]
# What an engine's ranks import where they are asked to train, with ZeRO half of the time they take.
MODULES += ["deepspeed.ops.op_builder.all_ops", "deepspeed.module_inject.auto_ep_layer"]
MODULES += ["deepspeed.runtime.zero.muon.muon_optimizer", "torch.profiler._cupti_monitor"]
MODULES += ["peft"]  # some seconds on each rank
# What the modules import that hold the functions which ranks call.
MODULES += ["hypothesis", "pytest", "tests.numbers", "tests.rewriting"]
MODULES += ["tests.frozen"]  # after all others


def context() -> ForkServerContext:
    """Starts processes that are forked from it."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(MODULES)
    return server


class Forked:
    """Stands in for `subprocess.Popen`, and for what verification starts.

    What it starts has nothing of the tool or the tests, as a new interpreter, but spares the
    seconds in which each process imports torch, transformers and deepspeed.
    """

    def __init__(self, command: list[str], *, stdout: Any, env: dict[str, str], **others: Any):
        path, *arguments = command[2:]  # after the interpreter and -P
        self._process = context().Process(target=_main, args=(path, arguments, stdout.name, env))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode


class Shared:
    """Stands in for the `ForkServer` of one verification: all have the same one."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = modules

    def start(self, script: Path, arguments: Sequence[str], log: Path) -> Forked:
        command = [sys.executable, "-P", str(script), *arguments]
        with open(log, "wb") as printed:
            return Forked(command, stdout=printed, env=launch.environment())

    def __enter__(self) -> Shared:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _main(path: str, arguments: list[str], log: str, env: dict[str, str]) -> None:
    os.setsid()
    for name in list(sys.modules):
        if name.partition(".")[0] in ("slapo_rewrite", "tests"):
            del sys.modules[name]
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
