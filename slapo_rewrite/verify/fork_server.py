"""A process that has imported what every rank needs, and from which ranks are forked.

    python -P fork_server.py MODULE...

Each line of its input asks for one rank, as a JSON object: `run` is the script, `arguments` are
its own, `log` is the file it prints to, `state` the file that says what became of it: its process
number, and its exit status once it has ended. It ends with its input.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any


def main(modules: list[str]) -> None:
    """Imports the modules, those that there are, and forks what is asked for."""
    for name in modules:
        with contextlib.suppress(Exception):  # the rank says why, where it needs it
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a rank that looked for garbage here would copy all of it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin.buffer:
        if os.fork() == 0:
            attend(json.loads(line))


def attend(asked: dict[str, Any]) -> None:
    """Forks a rank, waits for its end and tells of both; never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        run(asked)
    state = Path(asked["state"])
    tell(state, str(pid))
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):  # nobody waits for it any more
        tell(state, f"{pid} {os.waitstatus_to_exitcode(status)}")
    os._exit(0)


def run(asked: dict[str, Any]) -> None:
    """Is a rank, and ends with it."""
    os.setsid()
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for file, number in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(file, number)
    sys.argv = [asked["run"], *asked["arguments"]]
    try:
        runpy.run_path(asked["run"], run_name="__main__")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)  # not back into the server's own loop


def tell(path: Path, text: str) -> None:
    """Writes a file that another process reads at any time."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


if __name__ == "__main__":
    main(sys.argv[1:])
