"""Carries hand edits of an output over into a new one, by `git merge-file`."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from slapo_rewrite import errors
from slapo_rewrite.emit import record
from slapo_rewrite.emit.write import hand_edited


def merged(out: Path, files: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The files with the hand edits of `out` in them.

    Args:
        out: An output folder, whose record holds its files as they were written.
        files: The files that are to be written.

    Returns:
        The files to write, and the names of those in which both sides changed the same lines; such
        a file holds both versions between git's conflict markers.

    Raises:
        NotAnOutput: The folder has no record.
        OutputEdited: A file was edited whose written form is not known, or which is no longer made.
        UsageError: git is not installed.
    """
    written = record.written_files(out)
    result, conflicts = dict(files), []
    for name in hand_edited(out):
        if name not in files or name not in written:
            raise errors.OutputEdited(
                f"the hand edits in `{out / name}` cannot be merged: "
                + ("its written form is not kept" if name in files else "it is no longer written"),
                hint="move them elsewhere and give --force",
            )
        by_hand = (out / name).read_text(encoding="utf-8")
        result[name], clean = three_way(written[name], by_hand, files[name])
        if not clean:
            conflicts.append(name)
    return result, conflicts


def three_way(base: str, mine: str, theirs: str) -> tuple[str, bool]:
    """Merges two descendants of `base`; False where they changed the same lines.

    Raises:
        UsageError: git is not installed.
    """
    git = shutil.which("git")
    if git is None:
        raise errors.UsageError("`--merge` needs git, which is not installed")
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("mine", "base", "theirs")]
        for path, text in zip(paths, (mine, base, theirs), strict=True):
            path.write_text(text, encoding="utf-8", newline="")
        labels = ["-L", "edited by hand", "-L", "as written", "-L", "slapo-rewrite"]
        done = subprocess.run(
            [git, "merge-file", "-p", *labels, *map(str, paths)], capture_output=True, check=False
        )
    if done.returncode < 0 or done.returncode > 127:
        raise errors.UsageError(f"git merge-file failed: {done.stderr.decode().strip()}")
    return done.stdout.decode(), done.returncode == 0
