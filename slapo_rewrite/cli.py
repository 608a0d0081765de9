"""The command line: runs one command, and returns its exit code.

0 done; 1 the answer is "no" (`--check`, `verify`); 2 the user's input is wrong; 3 a defect of the
tool. Slow imports (torch, transformers) are left to the functions that need them.
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence

from slapo_rewrite import __version__, errors
from slapo_rewrite.commands.answers import DEFECT, DONE, tell
from slapo_rewrite.commands.plan_command import plan_command
from slapo_rewrite.commands.rewrite_command import rewrite_command, update_command
from slapo_rewrite.commands.show_commands import explain_command, primitives_command, tree_command
from slapo_rewrite.commands.tune_command import tune_command
from slapo_rewrite.commands.verify_command import verify_command
from slapo_rewrite.garbage import collector_paused
from slapo_rewrite.parsers import PARSERS, complete

COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "explain": explain_command,
    "tree": tree_command,
    "update": update_command,
    "verify": verify_command,
    "primitives": primitives_command,
    "plan": plan_command,
    "tune": tune_command,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code.

    Without `arguments` it runs the program's own, and ends the process.
    """
    with collector_paused():
        code = _code(list(sys.argv[1:] if arguments is None else arguments))
    if arguments is None:
        _end(code)
    return code


def _end(code: int) -> None:
    """Ends the process without freeing all imported modules, which takes half a second.

    It returns if threads are running or output cannot be flushed, and Python exits as usual.
    """
    if threading.active_count() > 1:
        return
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        return
    os._exit(code)


def _code(arguments: list[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:
        complete()
    for_programs = "--json" in arguments
    try:
        name = arguments[0] if arguments and arguments[0] in COMMANDS else ""
        options = _parsed(name, arguments)
        return COMMANDS.get(name, rewrite_command)(options)
    except errors.RewriteError as error:
        print(error.render(), file=sys.stderr)
        if for_programs:
            tell(error.exit_code, **error.record())
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader is gone; leaves nothing for the interpreter to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except Exception:
        traceback.print_exc()
        print(
            f"internal error: this is a defect of slapo-rewrite {__version__}, not of your input",
            file=sys.stderr,
        )
        if for_programs:
            tell(DEFECT, reason="defect")
        return DEFECT


def _parsed(name: str, arguments: list[str]) -> argparse.Namespace:
    """Parses the options; offers the nearest command for a misspelled one."""
    try:
        return PARSERS[name]().parse_args(arguments[bool(name) :])
    except errors.UsageError:
        meant = errors.nearest(arguments[0], COMMANDS, 0.6) if arguments and not name else []
        if not meant or os.path.exists(arguments[0]) or not arguments[0].isalpha():
            raise
        raise errors.UsageError(
            f"there is no command `{arguments[0]}`",
            hint=f"did you mean `slapo-rewrite {meant[0]}`?",
        ) from None
