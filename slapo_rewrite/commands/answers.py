"""The output of commands: for people or for programs, and the progress display."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from slapo_rewrite import errors

DONE, NO, DEFECT = 0, 1, 3  # 2 is the exit code of errors


def tell(code: int, **facts: Any) -> int:
    """Prints the answer as JSON, and returns the exit code."""
    import json

    print(json.dumps({"exit": code, **facts}, indent=1))
    return code


def answered(options: argparse.Namespace, code: int, words: str, **facts: Any) -> int:
    """Prints the answer as text or JSON, and returns the exit code."""
    if options.json:
        return tell(code, **facts)
    print(words)
    return code


def warn(warnings: Iterable[str]) -> None:
    """Prints warnings, one line each."""
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def say(line: str) -> None:
    """Prints a line to stderr, for logs as well; on a terminal above the progress display."""
    print(line, file=sys.stderr, flush=True)


def shows_colours() -> bool:
    """Whether ordinary output goes to a terminal whose user wants colours (no-color.org)."""
    unwanted = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not unwanted


def tidy(out: Path) -> None:
    """Recovers an output folder from an interrupted run, and prints a note about it."""
    from slapo_rewrite.emit.transaction import tidied

    if words := tidied(out):
        print(f"note: {words}", file=sys.stderr)


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Shows progress on a terminal, in the context; in a pipe nothing is shown.

    Prints of the user's own code are no output of the command, and go to stderr.
    """
    with redirect_stdout(sys.stderr):
        if not sys.stderr.isatty():
            yield lambda text: None
            return
        from rich.console import Console

        with Console(stderr=True).status(what) as status:
            yield lambda text: status.update(f"{what}: {text}")


def check_installed(command: str, extra: str, *packages: str) -> None:
    """Refuses a command whose packages are not installed."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError:
            raise errors.MissingPackage(
                f"`slapo-rewrite {command}` needs `{package}`, which is not installed",
                hint=f"pip install {' '.join(_packages_of(extra))}",
            ) from None


def _packages_of(extra: str) -> list[str]:
    """The names of the packages that one of this package's extras installs."""
    from importlib.metadata import requires

    wanted = [line for line in requires("slapo-rewrite") or () if f'extra == "{extra}"' in line]
    return [re.split(r"[^\w-]", line, maxsplit=1)[0] for line in wanted]
