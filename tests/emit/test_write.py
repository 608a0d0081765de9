"""The output folder: all or nothing, hand edits never lost."""

from __future__ import annotations

import json
import os

import pytest

from slapo_rewrite import errors
from slapo_rewrite.emit import write as module
from slapo_rewrite.emit.write import hand_edited, matches, write


def files(text: str = "a = 1\n") -> dict[str, str]:
    from slapo_rewrite.emit.record import digest

    made = {"net.py": text, "helper.py": "b = 2\n"}
    known = {name: digest(t) for name, t in made.items()}
    record = {"source": {}, "schedule": {}, "files": known, "verification": None}
    return {**made, "rewrite.json": json.dumps(record)}


def listing(folder) -> dict[str, str]:
    return {p.name: p.read_text() for p in folder.iterdir() if p.is_file()}


def test_writes_and_writes_again(tmp_path):
    out = tmp_path / "deep" / "out"
    write(out, files())
    assert listing(out) == files()
    write(out, files("a = 2\n"))
    assert listing(out) == files("a = 2\n")
    assert sorted(p.name for p in out.parent.iterdir()) == ["out"], "nothing is left beside it"


def test_other_files_in_the_folder_stay(tmp_path):
    out = tmp_path / "out"
    write(out, files())
    (out / "notes.txt").write_text("mine")
    (out / "data").mkdir()
    (out / "data" / "x").write_text("mine too")
    write(out, files("a = 2\n"))
    assert (out / "notes.txt").read_text() == "mine"
    assert (out / "data" / "x").read_text() == "mine too"


def test_files_that_are_no_longer_needed_go(tmp_path):
    out = tmp_path / "out"
    write(out, files())
    fewer = files()
    del fewer["helper.py"]
    write(out, fewer)
    assert not (out / "helper.py").exists()


@pytest.mark.parametrize("name", ["net.py", "helper.py"])
def test_a_hand_edit_is_not_overwritten(tmp_path, name):
    out = tmp_path / "out"
    write(out, files())
    (out / name).write_text("mine\n")
    assert hand_edited(out) == [name]
    with pytest.raises(errors.OutputEdited, match=name):
        write(out, files("a = 2\n"))
    assert (out / name).read_text() == "mine\n"
    write(out, files("a = 2\n"), force=True)
    assert listing(out) == files("a = 2\n")


def test_a_folder_of_somebody_else_is_not_overwritten(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "net.py").write_text("mine\n")
    with pytest.raises(errors.OutputEdited):
        write(out, files())
    assert listing(out) == {"net.py": "mine\n"}


@pytest.mark.parametrize("step", ["_stage", "_swap"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_the_folder_as_it_was(tmp_path, monkeypatch, step, error):
    out = tmp_path / "out"
    write(out, files())

    def failing(*args: object) -> None:
        raise error

    monkeypatch.setattr(module, step, failing)
    expected = errors.OutputUnwritable if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        write(out, files("a = 2\n"))
    assert listing(out) == files()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_a_failed_exchange_puts_the_old_folder_back(tmp_path, monkeypatch):
    out = tmp_path / "out"
    write(out, files())
    rename, calls = os.rename, []

    def failing(self, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        rename(self, target)
        return target

    monkeypatch.setattr(module.Path, "rename", failing)
    with pytest.raises(errors.OutputUnwritable):
        write(out, files("a = 2\n"))
    assert listing(out) == files()


def test_matches(tmp_path):
    out = tmp_path / "out"
    write(out, files())
    assert matches(out, files()) == []
    assert matches(out, files("a = 2\n")) == ["net.py", "rewrite.json"]
    (out / "helper.py").unlink()
    assert matches(out, files()) == ["helper.py"]
