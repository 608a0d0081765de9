"""The output folder: all or nothing, hand edits never lost, and nothing else touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from slapo_rewrite import errors
from slapo_rewrite.emit import transaction as module
from slapo_rewrite.emit.record import digest
from slapo_rewrite.emit.transaction import state, tidied
from slapo_rewrite.emit.write import hand_edited, matches, note_verification, write
from tests.warm import context

# Every way in which the module changes what is on disk.
CALLS = ("mkdir", "link", "symlink", "open", "write", "fsync", "replace", "unlink", "rmdir")


def files(text: str = "a = 1\n", **others: str) -> dict[str, str]:
    made = {"net.py": text, **{f"{name}.py": t for name, t in (others or HELPER).items()}}
    record = {
        "source": {"name": "net.py", "file": "net.py", "sha256": ""},
        "schedule": {"name": "s.py", "sha256": ""},
        "files": {name: digest(t) for name, t in made.items()},
        "verification": None,
    }
    return {**made, "rewrite.json": json.dumps(record)}


HELPER = {"helper": "b = 2\n"}
OLD, NEW = files(), files("a = 2\n", more="c = 3\n")


def listing(folder) -> dict[str, str]:
    return {p.name: p.read_text() for p in folder.iterdir() if p.is_file()}


def test_writes_and_writes_again(tmp_path):
    out = tmp_path / "deep" / "out"
    write(out, files())
    assert listing(out) == files()
    write(out, files("a = 2\n"))
    assert listing(out) == files("a = 2\n")
    assert sorted(p.name for p in out.parent.iterdir()) == ["out"], "nothing is left beside it"
    assert all(p.is_file() for p in out.iterdir()), "nor in it"


def test_other_files_in_the_folder_are_not_touched(tmp_path):
    out = tmp_path / "out"
    write(out, files())
    (out / "data").mkdir()
    (out / "data" / "x").write_text("mine too")
    log = (out / "train.log").open("w")
    before = {p: p.stat() for p in (out, out / "data", out / "data" / "x", out / "train.log")}
    write(out, files("a = 2\n"))
    log.write("still here")
    log.close()
    assert (out / "train.log").read_text() == "still here"
    assert (out / "data" / "x").read_text() == "mine too"
    assert all(path.stat().st_ino == was.st_ino for path, was in before.items())


def test_files_that_are_no_longer_needed_go(tmp_path):
    out = tmp_path / "out"
    write(out, files())
    write(out, NEW)
    assert not (out / "helper.py").exists()


def test_what_python_compiled_goes_with_its_source(tmp_path):
    """Within one second, and with the same size, Python would go on with it."""
    write(tmp_path / "out", files("a = 1\n"))
    for number in (1, 2):
        write(tmp_path / "out", files(f"a = {number}\n"))
        code = "import net; print(net.a)"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path / "out", capture_output=True, text=True
        )
        assert done.stdout == f"{number}\n"


@pytest.mark.parametrize("name", ["net.py", "helper.py"])
def test_a_hand_edit_is_not_overwritten(tmp_path, name):
    out = tmp_path / "out"
    write(out, files())
    (out / name).write_text("mine\n")
    assert list(hand_edited(out)) == [name]
    with pytest.raises(errors.OutputEdited, match=name):
        write(out, files("a = 2\n"))
    assert (out / name).read_text() == "mine\n"
    write(out, files("a = 2\n"), force=True)
    assert listing(out) == files("a = 2\n")


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("text", ["mine\n", ""])
def test_a_folder_of_somebody_else_is_not_overwritten(tmp_path, force, text):
    out = tmp_path / "out"
    out.mkdir()
    (out / "net.py").write_text(text)
    with pytest.raises(
        errors.NotAnOutput, match=r"not written by slapo-rewrite, and already holds net\.py"
    ):
        write(out, files(), force=force)
    assert listing(out) == {"net.py": text}


def test_nor_one_that_holds_what_goes_into_it(tmp_path):
    (tmp_path / "s.py").write_text("mine\n")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(errors.NotAnOutput, match=r"holds s\.py"):
        write(tmp_path / "link", files(), force=True, inputs=[tmp_path / "s.py"])
    assert listing(tmp_path) == {"s.py": "mine\n"}


def test_a_folder_with_other_files_alone_is_written_to(tmp_path):
    (tmp_path / "notes.txt").write_text("mine\n")
    write(tmp_path, files())
    assert listing(tmp_path) == {**files(), "notes.txt": "mine\n"}


@pytest.mark.parametrize("what", ["folder", "fifo", "dangling", "loop"])
@pytest.mark.parametrize("name", ["net.py", "rewrite.json"])
def test_what_is_no_file_is_said(tmp_path, what, name):
    path = tmp_path / name
    if what == "folder":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(name if what == "loop" else "nowhere")
    with pytest.raises((errors.OutputUnwritable, errors.NotAnOutput), match=name):
        write(tmp_path, files(), force=True)
    assert os.path.lexists(path) and len(os.listdir(tmp_path)) == 1


class Crash(BaseException):
    """The process ends here."""


class Disk:
    """Calls that change what is on disk, of which one fails, or all from there on."""

    def __init__(self, monkeypatch) -> None:
        self.count, self.fails_at, self.error, self.forever = 0, -1, Crash(), True
        monkeypatch.setattr(module.os, "fsync", lambda descriptor: None)  # which takes its time
        for name in CALLS:
            monkeypatch.setattr(module.os, name, self.counted(getattr(os, name)))

    def counted(self, call):
        def counting(*args, **options):
            self.count += 1
            if self.count == self.fails_at or (self.forever and self.count > self.fails_at > 0):
                raise self.error
            return call(*args, **options)

        return counting

    def start(self, fails_at: int, error: BaseException | None = None) -> None:
        self.count, self.fails_at = 0, fails_at
        self.error, self.forever = error or Crash(), error is None


@pytest.fixture
def disk(monkeypatch) -> Disk:
    return Disk(monkeypatch)


def steps_of(disk: Disk, action) -> Iterator[int]:
    """Each call at which an action may be interrupted."""
    disk.start(-1)
    action()
    return iter(range(1, disk.count + 1))


def test_a_crash_at_any_moment_leaves_the_old_or_the_new(tmp_path, disk):
    """And so does one at any moment of tidying up after it."""
    first = tmp_path / "first"
    write(first, OLD)
    seen = set()
    for crash in steps_of(disk, lambda: write(first, NEW)):
        out = tmp_path / str(crash)
        disk.start(-1)
        write(out, OLD)
        disk.start(crash)
        with pytest.raises(Crash):
            write(out, NEW)
        disk.start(-1)
        again = 0
        while True:  # the next run crashes later and later
            again += 1
            disk.start(again)
            try:
                words = tidied(out)
                break
            except Crash:
                continue
        disk.start(-1)
        assert tidied(out) is None
        assert listing(out) in (OLD, NEW), crash
        assert sorted(os.listdir(out)) == sorted(listing(out)), "nothing else is left"
        seen.add((listing(out) == NEW, again > 1, words is not None))
        write(out, NEW)
        assert listing(out) == NEW
    assert {(False, True, True), (True, True, True)} <= seen


def test_a_crash_of_the_first_run(tmp_path, disk):
    for crash in steps_of(disk, lambda: write(tmp_path / "deep" / "first", OLD)):
        out = tmp_path / str(crash) / "out"
        disk.start(crash)
        with pytest.raises(Crash):
            write(out, OLD)
        disk.start(-1)
        tidied(out)
        assert not out.exists() or listing(out) in ({}, OLD)
        write(out, NEW)
        assert listing(out) == NEW and sorted(os.listdir(out)) == sorted(NEW)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_at_any_moment_leaves_the_folder_as_it_was(tmp_path, disk, error):
    first = tmp_path / "first"
    write(first, OLD)
    expected = errors.OutputUnwritable if isinstance(error, OSError) else KeyboardInterrupt
    for call in steps_of(disk, lambda: write(first, NEW)):
        out = tmp_path / str(call)
        disk.start(-1)
        write(out, OLD)
        disk.start(call, error)
        try:
            write(out, NEW)
            failed = False
        except expected:
            failed = True
        left = listing(out), sorted(os.listdir(out))
        disk.start(-1)
        # Only the last thing, to remove what lay beside, may be left to the next run.
        words = tidied(out)
        assert listing(out) == left[0] or words, call
        assert listing(out) in ((OLD, NEW) if failed else (NEW,)), call
        assert sorted(os.listdir(out)) == sorted(listing(out))


def test_an_edit_made_meanwhile_is_kept(tmp_path, disk):
    """Whenever it is made, in place or by another file in the place of it."""
    first = tmp_path / "first"
    write(first, OLD)
    refused = 0
    for call in steps_of(disk, lambda: write(first, NEW)):
        for in_place in (True, False):
            out = tmp_path / f"{call}{in_place}"
            disk.start(-1)
            write(out, OLD)

            text = "mine, and long\n"

            def edit(out=out, in_place=in_place, text=text):
                if in_place:
                    (out / "net.py").write_text(text)
                else:
                    (out / "other").write_text(text)
                    (out / "other").rename(out / "net.py")

            disk.start(-1)
            try:
                with Turn(disk, call, edit):
                    write(out, NEW)
            except errors.OutputEdited:
                refused += 1
                assert (out / "net.py").read_text() == text
                assert (out / "helper.py").read_text() == OLD["helper.py"]
                assert (out / "rewrite.json").read_text() == OLD["rewrite.json"]
                continue
            if (out / "net.py").read_text() != text:
                # The one moment that is left: another file put there between look and exchange.
                assert not in_place, call
    assert refused > 10


class Turn:
    """Another program's turn before one of the calls."""

    def __init__(self, disk: Disk, call: int, action) -> None:
        self.disk, self.call, self.action = disk, call, action

    def __enter__(self) -> None:
        self.plain = {name: getattr(module.os, name) for name in CALLS}
        for name, call in self.plain.items():
            setattr(module.os, name, self.watched(call))

    def watched(self, call):
        def watching(*args, **options):
            if self.disk.count + 1 == self.call:
                self.disk.count += 1
                for name, plain in self.plain.items():
                    setattr(module.os, name, plain)
                self.action()
            return call(*args, **options)

        return watching

    def __exit__(self, *args: object) -> None:
        for name, call in self.plain.items():
            setattr(module.os, name, call)


def test_matches(tmp_path):
    out = tmp_path / "out"
    write(out, files())
    assert matches(out, files()) == []
    assert matches(out, files("a = 2\n")) == ["net.py", "rewrite.json"]
    (out / "helper.py").unlink()
    assert matches(out, files()) == ["helper.py"]


def test_an_edit_made_while_a_run_was_interrupted(tmp_path, disk):
    """The files on disk decide whether the next run completes or undoes the interrupted one."""
    first = tmp_path / "first"
    write(first, OLD)
    for crash in steps_of(disk, lambda: write(first, NEW)):
        out = tmp_path / str(crash)
        disk.start(-1)
        write(out, OLD)
        disk.start(crash)
        with pytest.raises(Crash):
            write(out, NEW)
        disk.start(-1)
        (out / "net.py").write_text("mine\n")
        tidied(out)
        left = listing(out)
        assert left.pop("net.py") == "mine\n"
        assert left in [{n: t for n, t in s.items() if n != "net.py"} for s in (OLD, NEW)], crash


def write_often(ready: Connection, out: Path, count: int, *sets: dict[str, str]) -> None:
    ready.send("ready")
    for number in range(count):
        write(out, sets[number % 2])


def writing(out: Path, count: int, *sets: dict[str, str]) -> BaseProcess:
    """A process that writes so often."""
    here, there = context().Pipe()
    process = context().Process(target=write_often, args=(there, out, count, *sets))
    process.start()
    there.close()
    with here:
        assert here.recv() == "ready"
    return process


def test_a_run_that_is_killed(tmp_path):
    write(tmp_path / "out", OLD)
    for number in range(4):
        process = writing(tmp_path / "out", 10**6, OLD, NEW)
        time.sleep(0.02 + 0.013 * number)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        tidied(tmp_path / "out")
        assert listing(tmp_path / "out") in (OLD, NEW)
        assert sorted(os.listdir(tmp_path)) == ["out"]
        assert set(os.listdir(tmp_path / "out")) == listing(tmp_path / "out").keys()


def test_two_runs_at_once(tmp_path):
    both = [writing(tmp_path / "out", 60, one, one) for one in (OLD, NEW)]
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert listing(tmp_path / "out") in (OLD, NEW)


def test_a_run_waits_for_another_one_and_then_says_so(tmp_path, monkeypatch):
    write(tmp_path, OLD)
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    with module.locked(tmp_path):
        with pytest.raises(errors.OutputUnwritable, match="another run is writing"):
            write(tmp_path, NEW)
        monkeypatch.setattr(module, "PATIENCE_S", 10)
        waiting = threading.Thread(target=write, args=(tmp_path, NEW))
        waiting.start()
        time.sleep(0.1)
        assert listing(tmp_path) == OLD
    waiting.join()
    assert listing(tmp_path) == NEW


def test_a_strange_folder_in_the_place_of_the_tool_s_is_left_alone(tmp_path):
    write(tmp_path, OLD)
    (tmp_path / module.WORK).mkdir()
    (tmp_path / module.WORK / "mine").write_text("mine")
    for action in (lambda: write(tmp_path, NEW), lambda: tidied(tmp_path)):
        with pytest.raises(errors.OutputUnwritable, match="not written by slapo-rewrite"):
            action()
    assert (tmp_path / module.WORK / "mine").read_text() == "mine"
    assert listing(tmp_path) == OLD


def test_a_verification_is_noted_of_what_was_verified(tmp_path):
    write(tmp_path, OLD)
    verified = state(tmp_path / "rewrite.json")
    assert note_verification(tmp_path, {"ok": True}, verified)
    assert json.loads((tmp_path / "rewrite.json").read_text())["verification"] == {"ok": True}
    assert not note_verification(tmp_path, {"ok": False}, verified)
    assert sorted(os.listdir(tmp_path)) == sorted(OLD)
