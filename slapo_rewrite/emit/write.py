"""Writes the output folder: all of it or nothing, and never over a hand edit."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.emit import record


def hand_edited(out: Path) -> list[str]:
    """Files of an output folder that are no longer as they were written."""
    known = record.read(out)["files"]
    edited = []
    for name, written in known.items():
        path = out / name
        if path.is_file() and record.digest(path.read_bytes()) != written:
            edited.append(name)
    return edited


def in_the_way(out: Path, files: Mapping[str, str]) -> list[str]:
    """Files that writing would overwrite although the tool did not write them so."""
    if not out.is_dir():
        return []
    try:
        known: dict[str, Any] = record.read(out)["files"]
    except errors.NotAnOutput:
        known = {}
    found = []
    for name in files:
        path = out / name
        if not path.exists() or (name == record.NAME and known):
            continue
        now = record.digest(path.read_bytes())
        if now not in (known.get(name), record.digest(files[name])):
            found.append(name)
    gone = [n for n in known if n not in files and (out / n).is_file()]
    return found + [n for n in gone if record.digest((out / n).read_bytes()) != known[n]]


def write(
    out: Path, files: Mapping[str, str], *, force: bool = False, replacing: Iterable[str] = ()
) -> None:
    """Puts the files in the folder; what else lies there stays.

    Args:
        out: The folder.
        files: Their texts by name.
        force: Overwrite whatever lies there.
        replacing: Files edited by hand that may be overwritten, since `files` holds the edits.

    Raises:
        OutputEdited: A file there was edited by hand, or is not the tool's, and `force` is not
        given. OutputUnwritable: The folder cannot be written; it is as it was.
    """
    if out.exists() and not out.is_dir():
        raise errors.OutputUnwritable(f"`{out}` is a file, not a folder")
    conflicts = [name for name in in_the_way(out, files) if name not in replacing]
    if conflicts and not force:
        raise errors.OutputEdited(
            f"`{out}` holds changes that were not written by slapo-rewrite: "
            f"{', '.join(sorted(conflicts))}",
            hint="--merge carries them over, --force overwrites them",
        )
    target = out.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise errors.OutputUnwritable(
            f"cannot write beside `{out}`: {error.strerror or error}"
        ) from None
    try:
        _stage(staged, target, files)
        _swap(staged, target)
    except OSError as error:
        raise errors.OutputUnwritable(f"cannot write `{out}`: {error.strerror or error}") from None
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _stage(staged: Path, target: Path, files: Mapping[str, str]) -> None:
    """The folder as it will be: what lies there and is not the tool's, and the files."""
    if target.is_dir():
        old = _recorded(target)
        for path in target.iterdir():
            if path.name in files or path.name in old or path.name == "__pycache__":
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.copytree(path, staged / path.name, symlinks=True)
            else:
                shutil.copy2(path, staged / path.name, follow_symlinks=False)
        shutil.copymode(target, staged)
    else:
        mask = os.umask(0)
        os.umask(mask)
        staged.chmod(0o777 & ~mask)
    for name, text in files.items():
        with open(staged / name, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())


def _recorded(target: Path) -> Iterable[str]:
    try:
        return set(record.read(target)["files"])
    except errors.NotAnOutput:
        return ()


def _swap(staged: Path, target: Path) -> None:
    """Puts the staged folder in the target's place; one of the two is always there."""
    if not target.exists():
        staged.rename(target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent)) / target.name
    target.rename(aside)
    try:
        staged.rename(target)
    except BaseException:
        aside.rename(target)
        raise
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(aside.parent)


def matches(out: Path, files: Mapping[str, str]) -> list[str]:
    """Files of the folder that are not what `files` says."""
    wrong = []
    for name, text in files.items():
        path = out / name
        if not path.is_file():
            wrong.append(name)
        elif name == record.NAME:
            if record.comparable(path.read_text(encoding="utf-8")) != record.comparable(text):
                wrong.append(name)
        elif path.read_bytes() != text.encode():
            wrong.append(name)
    return wrong + sorted(set(_recorded(out)) - files.keys() if out.is_dir() else ())


def note_verification(out: Path, verification: Mapping[str, Any]) -> None:
    """Puts what verification found in the folder's record."""
    path = out / record.NAME
    text = record.with_verification(path.read_text(encoding="utf-8"), verification)
    beside = path.with_name(f".{path.name}")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
