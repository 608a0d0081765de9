"""A process that imports what every rank needs, and forks the ranks.

    python -P fork_server.py MODULE...

Each line of its standard input asks for one rank, as a JSON object: `run` is the script,
`arguments` are the script's, `log` is the file for its output, `state` the file that gets its
process id and later also its exit status. The server exits at the end of its input.
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
    """Imports the modules that can be imported, and forks the ranks that are asked for."""
    for name in modules:
        with contextlib.suppress(Exception):  # a rank that needs the module reports the error
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # otherwise garbage collection in a rank would copy all these pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin.buffer:
        if os.fork() == 0:
            attend(json.loads(line))


def attend(asked: dict[str, Any]) -> None:
    """Forks a rank, waits for its end and records both; never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        run(asked)
    state = Path(asked["state"])
    tell(state, str(pid))
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):  # the folder may be gone by now
        tell(state, f"{pid} {os.waitstatus_to_exitcode(status)}")
    os._exit(0)


def run(asked: dict[str, Any]) -> None:
    """Runs the rank's script in this process, and exits."""
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
    os._exit(0)  # must not return into the server's loop


def tell(path: Path, text: str) -> None:
    """Writes a file atomically, since another process may read it at any time."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


if __name__ == "__main__":
    main(sys.argv[1:])
