"""Changes the files of a folder atomically: all of them or none, whatever interrupts it.

A temporary folder inside it holds the new files and the old ones, and a journal lists the changes.
Once the journal exists, an interrupted run is completed by the next one, or rolled back if a file
was edited since. Before that, its temporary files are removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from slapo_rewrite import errors
from slapo_rewrite.emit import record

try:
    import fcntl
except ImportError:  # without such locks, users have to prevent concurrent runs
    fcntl = None  # type: ignore[assignment]

# The temporary folder in an output folder, and the names in it.
WORK, NEW, OLD, FORWARD, BACK = ".slapo-rewrite", "new", "old", "forward", "back"
PATIENCE_S = 10.0


@dataclass(frozen=True)
class Step:
    """The change of one file."""

    name: str  # the file's name
    old: str | None  # the hash of its old content; None if it did not exist
    new: str | None  # the hash of its new content; None if it is removed


class _EditedError(Exception):
    """A file was edited since the run began."""


def state(path: Path) -> str | None:
    """The hash of a file; None if it does not exist."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            kind = "a folder" if path.is_dir() else "not a file"
            raise errors.OutputUnwritable(
                f"`{path}` is {kind}, where a file is to be written", hint="move it elsewhere"
            )
        return record.digest(path.read_bytes())
    except FileNotFoundError:
        if path.is_symlink():
            raise errors.OutputUnwritable(
                f"`{path}` is a link to a file that is not there", hint="remove it"
            ) from None
        return None
    except OSError as error:
        raise errors.OutputUnwritable(f"cannot read `{path}`: {error.strerror or error}") from None


def put(out: Path, files: Mapping[str, bytes], known: Collection[str]) -> None:
    """Writes files, and removes other `known` ones: everything or nothing."""
    gone = sorted(set(known) - files.keys())
    steps = [Step(n, state(out / n), record.digest(data)) for n, data in sorted(files.items())]
    steps += [Step(name, state(out / name), None) for name in gone]
    steps = [step for step in steps if step.old != step.new]
    if not steps:
        return
    work = out / WORK
    try:
        os.mkdir(work)
        for name in (NEW, OLD):
            os.mkdir(work / name)
        for step in steps:
            if step.old is not None:
                _keep(out / step.name, work / OLD / step.name)
            if step.new is not None:
                _create(work / NEW / step.name, files[step.name])
                if step.old is not None:
                    shutil.copymode(out / step.name, work / NEW / step.name)
        _create(work / "journal", json.dumps([asdict(step) for step in steps]).encode())
        os.replace(work / "journal", work / FORWARD)
        _sync(work)
        _forward(out, steps)
        _clear(out)
    except BaseException as error:
        _take_back(out, steps)
        if isinstance(error, _EditedError):
            raise errors.OutputEdited(
                f"{error} was edited during the run: `{out}` is unchanged",
                hint="--merge carries the edit over, --force overwrites it",
            ) from None
        if isinstance(error, OSError):
            raise errors.unwritable(out, error) from None
        raise


def _take_back(out: Path, steps: Sequence[Step]) -> None:
    """Restores a folder; if even that fails, the next run does."""
    with contextlib.suppress(OSError):
        work = out / WORK
        if (work / FORWARD).exists():
            os.replace(work / FORWARD, work / BACK)
            _back(out, steps)
        _clear(out)


def _forward(out: Path, steps: Sequence[Step]) -> None:
    """Moves each new file to its place; raises `_EditedError` if the old one was edited."""
    for step in steps:
        path, new = out / step.name, out / WORK / NEW / step.name
        if (step.new is not None and not new.exists()) or state(path) == step.new:
            continue
        if state(path) != step.old:
            raise _EditedError(step.name)
        if step.new is None:
            os.unlink(path)
        else:
            os.replace(new, path)
        # Detects writes after the comparison: the kept file is a hard link to the same file.
        kept = out / WORK / OLD / step.name
        if kept.is_file() and not kept.is_symlink() and state(kept) != step.old:
            raise _EditedError(step.name)
    _sync(out)
    _forget_compiled(out, steps)


def _back(out: Path, steps: Sequence[Step]) -> None:
    """Restores each replaced file, unless it was edited since."""
    for step in steps:
        path, old = out / step.name, out / WORK / OLD / step.name
        if state(path) != step.new:
            continue
        if step.old is None:
            os.unlink(path)
        elif os.path.lexists(old):
            os.replace(old, path)
    _sync(out)
    _forget_compiled(out, steps)


def _clear(out: Path) -> None:
    """Removes the temporary folder, its journal first."""
    work = out / WORK
    for name in (FORWARD, BACK, "journal"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(work / name)
    _sync(work)
    for name in (NEW, OLD):
        with contextlib.suppress(FileNotFoundError):
            for each in os.listdir(work / name):
                os.unlink(work / name / each)
            os.rmdir(work / name)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(work)


def tidied(out: Path) -> str | None:
    """Completes or rolls back an interrupted run; returns a message about it, or None."""
    if not os.path.lexists(out / WORK):
        return None
    with locked(out) as done:
        return done()


@contextlib.contextmanager
def locked(out: Path) -> Iterator[Callable[[], str | None]]:
    """Locks a folder for one run at a time, after recovery from an interrupted one.

    Yields a function that returns the message about the recovery. The lock ends with its process.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = os.open(out, os.O_RDONLY)
            stack.callback(os.close, folder)
        except OSError as error:
            raise errors.unwritable(out, error) from None
        _wait(folder, out)
        try:
            words = _recovered(out)
        except OSError as error:
            raise errors.OutputUnwritable(
                f"an earlier run was interrupted while it wrote `{out}`, and cannot be undone or "
                f"completed: {error.strerror or error}",
                hint=f"make `{out}` writable and run this again",
            ) from None
        yield lambda: words


def lock(descriptor: int) -> bool:
    """Locks an open file or folder until it is closed; False if another process has locked it.

    On a file system without locks it always succeeds.
    """
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _wait(folder: int, out: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while not lock(folder):
        if time.monotonic() > until:
            raise errors.OutputUnwritable(
                f"another run is writing `{out}`", hint="run this again when it is done"
            )
        time.sleep(0.05)


def _recovered(out: Path) -> str | None:
    work = out / WORK
    if not os.path.lexists(work):
        return None
    strange = "it was not written by slapo-rewrite"
    if work.is_symlink() or not work.is_dir():
        raise OSError(f"{work}: {strange}")
    if set(os.listdir(work)) - {NEW, OLD, FORWARD, BACK, "journal"}:
        raise OSError(f"{work}: {strange}")
    journal = next((work / n for n in (BACK, FORWARD) if (work / n).exists()), None)
    if journal is None:
        _clear(out)
        return f"an interrupted run had not changed `{out}` yet; its temporary files were removed"
    try:
        steps = [Step(s["name"], s["old"], s["new"]) for s in json.loads(journal.read_bytes())]
    except (ValueError, TypeError, KeyError):
        raise OSError(f"{journal}: {strange}") from None
    if any(not record.is_plain_name(step.name) for step in steps):
        raise OSError(f"{journal}: {strange}")
    if journal.name == FORWARD:
        try:
            _forward(out, steps)
            _clear(out)
            return f"an earlier run was interrupted while it wrote `{out}`; it is now complete"
        except _EditedError:
            os.replace(work / FORWARD, work / BACK)
    _back(out, steps)
    _clear(out)
    return f"an earlier run was interrupted while it wrote `{out}`; it is now as before that run"


@contextlib.contextmanager
def made(out: Path) -> Iterator[None]:
    """Creates a folder in the context, and removes it afterwards if it is empty."""
    new = []
    try:
        if os.path.exists(out) and not out.is_dir():
            raise errors.OutputUnwritable(
                f"`{out}` is a file, not a folder",
                hint=f"give another name, such as `-o {out}_parallel`",
            )
        folder = out.absolute()
        missing = [folder, *folder.parents]
        missing = missing[: next(n for n, p in enumerate(missing) if os.path.lexists(p))]
        for each in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(each)
                new.append(each)
        if not out.is_dir():
            raise errors.OutputUnwritable(f"`{out}` is not a folder")
        yield
    except OSError as error:
        raise errors.unwritable(out, error) from None
    finally:
        for each in reversed(new):
            with contextlib.suppress(OSError):
                os.rmdir(each)  # fails if it is not empty


def _keep(path: Path, kept: Path) -> None:
    """Keeps a file under a second name, by a hard link or else a copy."""
    if path.is_symlink():
        os.symlink(os.readlink(path), kept)
        return
    try:
        os.link(path, kept)
    except OSError:
        _create(kept, path.read_bytes())
        shutil.copymode(path, kept)


def _create(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        while data:
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync(folder: Path) -> None:
    """Flushes the entries of a folder to disk."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _forget_compiled(out: Path, steps: Sequence[Step]) -> None:
    """Removes compiled files: Python compares sources by size and seconds only."""
    stems = {step.name.removesuffix(".py") for step in steps if step.name.endswith(".py")}
    with contextlib.suppress(OSError):
        for name in os.listdir(out / "__pycache__"):
            if name.endswith(".pyc") and name.rsplit(".", 2)[0] in stems:
                os.unlink(out / "__pycache__" / name)
