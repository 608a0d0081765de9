"""Tells the user's own files from those of Python, installed packages and the tool."""

from __future__ import annotations

import functools
import os
import sysconfig
from pathlib import Path

from slapo_rewrite.bundle import rules_folder

INSTALLED = {"site-packages", "dist-packages"}


def is_own(path: str) -> bool:
    """Whether a file is the user's: not installed, not Python's and not the tool's."""
    return path.endswith(".py") and _is_own_folder(os.path.dirname(path))


@functools.lru_cache(maxsize=4096)
def _is_own_folder(folder: str) -> bool:
    parts = os.path.realpath(folder).split(os.sep)
    if INSTALLED.intersection(parts):
        return False
    return not any(parts[: len(other)] == other for other in _others())


@functools.cache
def _others() -> list[list[str]]:
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    paths += [str(Path(__file__).parents[1]), str(rules_folder())]
    return [os.path.realpath(path).split(os.sep) for path in paths]
