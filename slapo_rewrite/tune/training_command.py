"""Runs the user's command, and reads the throughput that it reports.

In the command, `{out}` is replaced by the folder of the rewritten model, `{NAME}` by the value of a
knob, `{{` and `}}` by braces. It is run by the shell. Its throughput is in the last printed line
that is a JSON object with `throughput`: `{"throughput": 123.4}`, in any unit, more being better. A
throughput of 0 means out of memory. So do messages of torch and CUDA about memory in the output of
a failed command, and a command that the system killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import string
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from slapo_rewrite import errors
from slapo_rewrite.tune.knob_space import TIMED_OUT, Kind

OUT = "out"
NO_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|can't allocate memory|cannot allocate memory|bad_alloc"
    r"|^MemoryError|alloc_?failed|exitcode\s*:\s*-9\b",
    re.I | re.M,
)
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
TAIL = 12  # the last lines of a failed command that are shown


def fields(command: str) -> list[str]:
    """The names in braces; raises `UsageError` for unbalanced braces."""
    try:
        return [name for _, name, _, _ in string.Formatter().parse(command) if name is not None]
    except ValueError as error:
        raise errors.UsageError(
            f"`--run {command}`: {error}", hint="write {{ and }} for braces of the command's own"
        ) from None


def check(command: str, of_schedule: tuple[str, ...], of_run: tuple[str, ...]) -> None:
    """Refuses a command with missing or unknown names."""
    if OUT in of_run:
        raise errors.UsageError(
            f"`{OUT}` is a knob of the run, and {{{OUT}}} is the folder of the rewritten model",
            hint="rename the knob",
        )
    known = {OUT, *of_schedule, *of_run}
    named = fields(command)
    for name in named:
        if name not in known:
            raise errors.UsageError(
                f"`{{{name}}}` in `--run` is no knob",
                hint=errors.did_you_mean(name, known)
                or "known are " + ", ".join(f"{{{each}}}" for each in sorted(known)),
            )
    for name in of_run:
        if name not in named:
            raise errors.UsageError(
                f"`{name}` is a knob of the run, but the command does not use it",
                hint=f"name it in `--run`: --{name.replace('_', '-')} {{{name}}}",
            )
    if of_schedule and OUT not in named:
        raise errors.UsageError(
            "the command does not name {out}, so the schedule's knobs change nothing that it runs",
            hint="give its folder to the command: --run 'python train.py {out}'",
        )


def filled(command: str, values: Mapping[str, str]) -> str:
    """The command with its names replaced by values, quoted for the shell."""
    return command.format_map({name: shlex.quote(value) for name, value in values.items()})


def run(command: str, timeout_s: float | None, log: Path) -> tuple[Kind, float]:
    """Runs a command, up to its timeout; returns how it ended, and its throughput."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as file, _ended_as_by_hand() as started:
        process = subprocess.Popen(
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            started()
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return TIMED_OUT, 0.0
        finally:
            _end(process)
    text = log.read_text(errors="replace")
    if code:
        if code in KILLED or NO_MEMORY.search(text):
            return "out of memory", 0.0
        raise _fails(f"the command ends with {code}", command, text, log)
    reported = throughput_in(text)
    if reported is None:
        raise _fails(
            "the command reports no throughput",
            command,
            text,
            log,
            'have it print a line of JSON: {"throughput": 123.4}',
        )
    return ("ok", reported) if reported else ("out of memory", 0.0)


def throughput_in(text: str) -> float | None:
    """The throughput in the last line of JSON that has one."""
    for line in reversed(text.splitlines()):
        # Launchers may prefix lines with the rank.
        start = line.find("{")
        with contextlib.suppress(ValueError, TypeError, KeyError):
            said = json.loads(line[start:])["throughput"] if start >= 0 else -1.0
            value = -1.0 if isinstance(said, bool) else float(said)
            if 0 <= value < float("inf"):
                return value
    return None


@contextlib.contextmanager
def _ended_as_by_hand() -> Iterator[Callable[[], None]]:
    """Makes `kill`, or closing the terminal, act like Ctrl-C, in the context.

    A command in its own session does not get these signals, and would continue to train. A signal
    while the command starts is delayed until `started` is called, when the command can be ended.
    """
    is_main = threading.current_thread() is threading.main_thread()  # only it gets signals
    asked = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP] if is_main else []
    before = {number: signal.getsignal(number) for number in asked}
    usual = (signal.SIG_DFL, signal.default_int_handler)
    ours = {number: handler for number, handler in before.items() if handler in usual}
    early: list[int] = []

    def started() -> None:
        for number in ours:
            signal.signal(number, signal.default_int_handler)
        if early:
            raise KeyboardInterrupt

    for number in ours:
        signal.signal(number, lambda number, _: early.append(number))
    try:
        yield started
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills a command and all its child processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _fails(
    what: str, command: str, text: str, log: Path, hint: str | None = None
) -> errors.RunFails:
    tail = "\n".join(f"  | {line}" for line in text.rstrip().splitlines()[-TAIL:])
    return errors.RunFails(
        f"{what}\n  $ {command}\n{tail}".rstrip(),
        hint=hint
        or f"all of it is in {log}; set the command right, or have `space(knobs)` return False for "
        "points that cannot run. The trials so far are kept",
    )
