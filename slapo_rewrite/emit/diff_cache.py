"""Caches printed diffs, for the next `--diff` of the same inputs.

They are in `$XDG_CACHE_HOME/slapo-rewrite` (`~/.cache/slapo-rewrite`), one file each, and only save
time: an entry that cannot be read or written is computed. `SLAPO_REWRITE_CACHE=0` disables them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from slapo_rewrite.emit import record
from slapo_rewrite.emit.current import Request, is_certain

MOST_FILES, MOST_BYTES = 64, 2 << 20
# Prefixes of environment variables that may affect torch, transformers and Python's imports.
VARIABLES = ("CUDA_", "HF_", "PYTHON", "PYTORCH_", "TORCH", "TRANSFORMERS_")
# The parts of a record that tell whether it is still valid; the rest is long.
KEPT = (
    *("tool", "source", "schedule", "set", "single_file", "support", "with"),
    *("packages", "copies", "depends", "files"),
)


def look_up(path: Path | None, request: Request) -> tuple[str, list[str]] | None:
    """The cached diff and warnings of a request; None if they have to be computed."""
    if path is None:
        return None
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        content, diff, warnings = entry["record"], entry["diff"], entry["warnings"]
        if record.misfit(content, record.SHAPE) or not isinstance(diff, str):
            return None
        if not is_certain(content, request):
            return None
        os.utime(path)  # marks it as used: the least recently used go first
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return diff, [str(warning) for warning in warnings]


def keep(path: Path, request: Request, text: str, diff: str, warnings: list[str]) -> None:
    """Caches a diff, if the next one is certain to be the same."""
    content: dict[str, Any] = json.loads(text)
    kept = {key: content[key] for key in KEPT if key in content}
    data = json.dumps({"record": kept, "diff": diff, "warnings": warnings}).encode()
    with contextlib.suppress(OSError):
        if len(data) > MOST_BYTES or not is_certain(content, request):
            return
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            part.write_bytes(data)
            part.replace(path)  # atomic, for concurrent readers and writers
        finally:
            part.unlink(missing_ok=True)
        _make_room(path.parent)


def _make_room(folder: Path) -> None:
    """Removes the least recently used entries."""
    found = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in found[MOST_FILES:]:
        path.unlink(missing_ok=True)


def folder() -> Path:
    """The tool's cache folder; raises `RuntimeError` if the user has no home."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "slapo-rewrite"


def place(request: Request) -> Path | None:
    """The file for the diff of a request; None if the cache is disabled or not accessible.

    Its name is a hash of everything that may matter and is cheap to read: the text of source and
    schedule, Python, the environment, and when a package was installed last. Call it before user
    code runs, which may change some of this.
    """
    if os.environ.get("SLAPO_REWRITE_CACHE") == "0":
        return None
    files = (request.source_file, request.schedule_file)
    try:
        where = folder()
        packages = sorted({sysconfig.get_path(name) for name in ("purelib", "platlib")})
        key = [
            record.tool_digest(),
            [record.digest(path.read_bytes()) for path in files],
            [str(path.absolute()) for path in (*files, Path())],
            [request.source, request.schedule, request.settings, request.single_file],
            [request.further, request.support],
            [sys.version, sys.prefix, sys.path],
            [[path, os.stat(path).st_mtime_ns] for path in packages],
            sorted(item for item in os.environ.items() if item[0].startswith(VARIABLES)),
        ]
    except (OSError, RuntimeError):
        return None
    return where / record.digest(json.dumps(key))
