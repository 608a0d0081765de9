"""Merges hand edits of an output into a new one, by `git merge-file`."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slapo_rewrite import errors
from slapo_rewrite.code.file import line_end
from slapo_rewrite.emit import record
from slapo_rewrite.emit.write import hand_edited

_MARKERS = (re.compile(rb"^<{7} ", re.M), re.compile(rb"^>{7} ", re.M))


@dataclass(frozen=True)
class Merged:
    """The files to be written, with merged hand edits."""

    files: dict[str, str]  # all files, by name
    # Files in which both sides changed the same lines; they hold both versions between git's
    # conflict markers.
    conflicts: list[str]
    replacing: dict[str, str]  # the merged hand-edited files, with the hashes of their old content


def merged(out: Path, files: Mapping[str, str]) -> Merged:
    """Merges the hand edits of `out` into the files; raises `OutputEdited` if that fails."""
    written = record.written_files(out)
    result, conflicts, replacing = dict(files), list[str](), dict[str, str]()
    for name in hand_edited(out):
        path = out / name
        if name not in files or name not in written:
            raise errors.OutputEdited(
                f"the hand edits in `{path}` cannot be merged: "
                + ("its written form is not kept" if name in files else "it is no longer written"),
                hint="move them elsewhere and give --force",
            )
        data = path.read_bytes()
        if marked := _markers(data):
            raise errors.OutputEdited(
                f"`{path}` holds conflicts that are not resolved",
                at=errors.Span(
                    str(path), marked, 1, 7, data.decode(errors="replace").splitlines()[marked - 1]
                ),
                hint="choose one of both versions, remove git's markers, and merge again",
            )
        try:
            by_hand = data.decode()
        except UnicodeDecodeError as error:
            raise errors.OutputEdited(
                f"the hand edits in `{path}` cannot be merged: byte 0x{data[error.start]:02x} is "
                "not UTF-8",
                hint="save the file as UTF-8, or move it elsewhere and give --force",
            ) from None
        result[name], clean = three_way(written[name], by_hand, files[name])
        replacing[name] = record.digest(data)
        if not clean:
            conflicts.append(name)
    resolved = {n: result[n] for n in replacing if n not in conflicts and result[n] != files[n]}
    result[record.NAME] = record.with_merged(files[record.NAME], resolved)
    return Merged(result, conflicts, replacing)


def _markers(data: bytes) -> int | None:
    """The line at which a conflict marked by git begins; None without one."""
    found = [marker.search(data) for marker in _MARKERS]
    if not all(found) or found[0] is None:
        return None
    return data.count(b"\n", 0, found[0].start()) + 1


def three_way(base: str, mine: str, theirs: str) -> tuple[str, bool]:
    """Merges two descendants of `base`; False if both changed the same lines.

    Line ends are those of `mine`.
    """
    git = shutil.which("git")
    if git is None:
        raise errors.UsageError("`--merge` needs git, which is not installed")
    if (end := line_end(mine)) != line_end(base):
        base, theirs = (re.sub(r"\r\n|\r|\n", end or r"\g<0>", text) for text in (base, theirs))
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
