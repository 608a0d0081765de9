"""Writes the output folder without overwriting hand edits.

Only the tool's own files are touched.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.emit import record
from slapo_rewrite.emit.transaction import locked, made, put, state


def hand_edited(out: Path) -> dict[str, str]:
    """The files of an output folder that were edited by hand, with their hashes."""
    known = record.read(out)["files"]
    now = {name: state(out / name) for name in known}
    return {name: was for name, was in now.items() if was is not None and was != known[name]}


def in_the_way(out: Path, files: Mapping[str, str], own: str = record.NAME) -> list[str]:
    """The files that writing would overwrite although they are not as the tool left them."""
    try:
        known: dict[str, Any] = record.read(out, own)["files"]
    except errors.NotAnOutput as error:
        mine = [n for n, text in files.items() if state(out / n) not in (None, record.digest(text))]
        if mine:
            raise errors.NotAnOutput(
                f"`{out}` was not written by slapo-rewrite, and already holds "
                f"{', '.join(sorted(mine))}" + ("" if own not in mine else f": {error.message}"),
                hint="give another folder, or move these files elsewhere",
            ) from None
        return []
    found = []
    for name in sorted({*files, *known} - {own}):
        text = files.get(name)
        wanted = record.digest(text) if text is not None else None
        if state(out / name) not in (None, known.get(name), wanted):
            found.append(name)
    return found


def write(
    out: Path,
    files: Mapping[str, str],
    *,
    force: bool = False,
    replacing: Mapping[str, str] | None = None,
    inputs: Collection[Path] = (),
) -> None:
    """Writes the files, texts by name, to the folder; other files there stay as they are.

    Hand-edited files of an earlier output are overwritten with `force`, or if `replacing` has their
    hashes, since `files` contains the edits. `inputs` are files that the output is made from, which
    must not be in the folder.
    """
    check_apart(out, inputs)
    with made(out), locked(out):
        merged = replacing or {}
        wrong = [n for n in in_the_way(out, files) if state(out / n) != merged.get(n)]
        if wrong and not force:
            raise edited(out, wrong, "--merge carries them over, --force overwrites them")
        put(out, {name: text.encode() for name, text in files.items()}, recorded(out))


def edited(folder: Path, names: Collection[str], hint: str) -> errors.OutputEdited:
    """The error for files that were edited by hand."""
    return errors.OutputEdited(
        f"`{folder}` holds changes that were not written by slapo-rewrite: "
        f"{', '.join(sorted(names))}",
        hint=hint,
    )


def check_apart(out: Path, inputs: Collection[Path]) -> None:
    """Raises `NotAnOutput` for a folder that contains an input of the output."""
    for path in inputs:
        if os.path.realpath(path.parent) == os.path.realpath(out):
            raise errors.NotAnOutput(
                f"`{out}` was not written by slapo-rewrite, and already holds {path.name}",
                hint="give a separate folder, such as `-o out`",
            )


def recorded(out: Path, own: str = record.NAME) -> Collection[str]:
    """The tool's files in a folder, by its record."""
    content = record.found(out, own)
    return set(content["files"]) if content else ()


def matches(out: Path, files: Mapping[str, str], own: str = record.NAME) -> list[str]:
    """The files of the folder that differ from `files`, except by merged hand edits."""
    content: dict[str, Any] = record.found(out, own) or {"files": {}}
    wrong = []
    for name, text in files.items():
        path = out / name
        if not path.is_file():
            wrong.append(name)
        elif name == own:
            now = path.read_text(encoding="utf-8", errors="replace")
            if record.comparable(now) != record.comparable(text):
                wrong.append(name)
        elif not record.holds(path, wanted := record.digest(text)):
            same = content["files"].get(name) == wanted
            if not same or not record.holds(path, record.as_left(content, name)):
                wrong.append(name)
    return wrong + sorted(content["files"].keys() - files.keys())


def note_verification(out: Path, verification: Mapping[str, Any], of: str) -> bool:
    """Adds a verification's result to the folder's record; False if that has changed."""
    with locked(out):
        if state(out / record.NAME) != of:
            return False
        text = (out / record.NAME).read_text(encoding="utf-8")
        noted = record.with_verification(text, verification)
        put(out, {record.NAME: noted.encode()}, ())
        return True
