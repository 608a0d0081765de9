"""Schedule files: knobs, their types, and errors in a file."""

from __future__ import annotations

import functools
import json
from typing import Literal

import pytest

from slapo_rewrite import errors
from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.fusion.match_rules import below
from slapo_rewrite.schedule.load import ScheduleFile, bundled, convert, locate


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (float, "0.25", 0.25),
        (int, "3", 3),
        (bool, "true", True),
        (bool, "0", False),
        (str, "a=b", "a=b"),
        (int | None, "none", None),
        (int | None, "4", 4),
        (Literal["uniform", "head"], "head", "head"),
        (list[int], "1,2,3", [1, 2, 3]),
    ],
)
def test_convert(annotation, text, value):
    assert convert(annotation, text) == value


@pytest.mark.parametrize(
    ("annotation", "text"),
    [(int, "0.5"), (bool, "maybe"), (Literal["a"], "b"), (int | None, "x"), (dict, "{}")],
)
def test_convert_refuses(annotation, text):
    with pytest.raises(ValueError):
        convert(annotation, text)


def write(folder, text):
    path = folder / "s.py"
    path.write_text(text)
    return ScheduleFile.load(str(path))


def test_settings(tmp_path):
    schedule = write(
        tmp_path,
        "def model(m): ...\ndef schedule(s, *, ratio: float = 0.5, n=2, on: bool = True): ...\n",
    )
    assert schedule.settings(["ratio=1", "on=no"]) == {"ratio": 1.0, "n": 2, "on": False}
    assert schedule.settings(["n=7"])["n"] == 7, "without an annotation the default's type counts"
    unsaid = write(tmp_path, "def model(m): ...\ndef schedule(s, n=None): ...\n")
    with pytest.raises(errors.BadKnob, match=r"annotate it, for example as `int | None`"):
        unsaid.settings(["n=7"])


def test_annotations_as_text(tmp_path):
    text = (
        "from __future__ import annotations\ndef model(m): ...\ndef schedule(s, n: int = 1): ...\n"
    )
    assert write(tmp_path, text).settings(["n=2"]) == {"n": 2}


def test_a_knob_needs_a_default(tmp_path):
    schedule = write(tmp_path, "def model(m): ...\ndef schedule(s, n: int): ...\n")
    with pytest.raises(errors.ScheduleError, match="no default"):
        schedule.settings([])


def test_a_schedule_imports_what_lies_beside_it(tmp_path):
    (tmp_path / "beside_the_schedule.py").write_text("RATIO = 0.5\n")
    schedule = write(
        tmp_path, "from beside_the_schedule import RATIO\ndef model(m): ...\ndef schedule(s): ...\n"
    )
    assert schedule.module.RATIO == 0.5


def test_bundled_schedules_are_found_by_name():
    assert {"bert", "gpt2", "llama", "t5"} <= set(bundled())
    assert locate("bert").name == "bert.py"


class Broken:
    def walk(self) -> None:
        raise ZeroDivisionError


def test_what_the_tool_raises_is_not_the_schedule_s(tmp_path):
    """Of the tool's code and the user's, that which ran last is to blame; libraries never are."""
    schedule = write(tmp_path, "def model(m): ...\ndef schedule(f, *args): f(*args)\n")
    run = schedule.module.schedule
    with pytest.raises(AttributeError):
        schedule.guarded(lambda: run(below, [None]), "`schedule`")
    for function, argument in ((below, [Broken()]), (json.loads, "{")):
        with pytest.raises(errors.ScheduleError, match="`schedule` raises"):
            schedule.guarded(functools.partial(run, function, argument), "`schedule`")


def test_a_whole_number_as_a_default_of_a_fraction_is_one(tmp_path):
    path = tmp_path / "s.py"
    path.write_text("def model(m): ...\ndef schedule(s, ratio: float = 1): ...\n")
    ratio = ScheduleFile.load(str(path)).settings([])["ratio"]
    assert type(ratio) is float and ratio == 1.0


def test_a_schedule_that_another_one_takes_the_place_of_is_told(tmp_path):
    file = tmp_path / "s.py"
    lines = ["def model(m): ...", "def schedule(s): ...", "def schedule(s): ..."]
    file.write_text("\n".join(lines))
    (said,) = ScheduleFile.load(str(file)).shadowed()
    assert said == "line 2: this `schedule` is not run: line 3 defines another one"


def test_the_source_may_lie_above_the_folder_that_the_tool_is_run_in(monkeypatch):
    """Code is known by the name of its file, which is another one with `..` in it."""
    monkeypatch.chdir("tests/outputs")
    text = rewrite("../models/gpt.py", "../models/gpt_schedule.py").files["gpt.py"]
    assert "RowParallelLinear(config.n_embd, config.n_embd)" in text
