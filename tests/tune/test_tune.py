"""Searches that run a command: declared knobs, trials, kept results, and refusals."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from benchmark import report, tune_example
from slapo_rewrite import cli
from slapo_rewrite.tune.knob_space import Axis, KnobSpace, Trial
from slapo_rewrite.tune.surface_plot import draw
from slapo_rewrite.tune.training_command import run as run_command
from slapo_rewrite.tune.training_command import throughput_in
from slapo_rewrite.tune.trial_record import recording
from slapo_rewrite.tune.tuned_schedule import read

MODEL = """\
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
"""
SCHEDULE = """\
from typing import Annotated

import torch

from slapo_rewrite import Choices, Range

SOURCE = "net.py"


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(2, 4)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s, ratio: Annotated[float, Choices(0.0, 0.5, 1.0)] = 0.5, other: int = 1):
    if ratio:
        s["layers"][:ratio].checkpoint()


def space(knobs, batch: Annotated[int, Range(1, 4)] = 1):
    return knobs.batch * knobs.other != 3
"""
# Larger batches are faster, checkpoints slower; what is not recomputed has to fit.
TRAIN = """\
import json, pathlib, sys
out, batch = pathlib.Path(sys.argv[1]), int(sys.argv[2])
ratio = json.loads((out / "rewrite.json").read_text())["knobs"]["ratio"]
assert ("checkpoint" in (out / "net.py").read_text()) == (ratio > 0)
with open("tried.txt", "a") as file:
    file.write(f"{ratio} {batch}\\n")
if batch * (1 - ratio) > 1.5:
    sys.exit("torch.OutOfMemoryError: CUDA out of memory.")
print(json.dumps({"throughput": batch / (1 + batch * (1 + ratio / 3))}))
print("done")
"""
RUN = f"{sys.executable} train.py {{out}} {{batch}}"
SEARCH = ["tune", "net.py", "--schedule", "s.py", "-o", "tuned", "--run", RUN]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "s.py").write_text(SCHEDULE)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def refused(capsys, *arguments):
    assert cli.main(list(arguments)) == 2
    return capsys.readouterr().err


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.long
def test_all_points_are_tried_but_those_that_are_excluded(folder, capsys):
    assert cli.main([*SEARCH, "--strategy", "exhaustive", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["exit"], said["reason"]) == (0, "done")
    assert said["best"]["knobs"] == {"ratio": 1.0, "batch": 4}
    assert said["best"]["throughput"] == pytest.approx(4 / (1 + 16 / 3))
    outcomes = {tuple(t["knobs"].values()): t["outcome"] for t in said["trials"]}
    batches, ratios = (1, 2, 4), (0.0, 0.5, 1.0)
    assert outcomes == {
        (r, b): "ok" if b * (1 - r) <= 1.5 else "out of memory" for r in ratios for b in batches
    }
    tried = sorted(line.split() for line in (folder / "tried.txt").read_text().splitlines())
    wanted = sorted([str(r), str(b)] for r in ratios for b in batches)
    assert tried == wanted
    assert (folder / "tuned/surface.png").read_bytes().startswith(b"\x89PNG")


def test_a_search_goes_on_where_it_ended(folder, capsys):
    assert cli.main([*SEARCH, "--strategy", "random", "--trials", "3"]) == 0
    record = folder / "tuned/trials.jsonl"
    with open(record, "a") as file:
        file.write('{"trial": 4, "kno')  # it was ended here
    assert "trials of another run" in refused(capsys, *SEARCH[:-1], f"nice {RUN}")
    assert cli.main([*SEARCH, "--strategy", "random", "--trials", "5"]) == 0
    head, *trials = map(json.loads, record.read_text().splitlines())
    assert [trial["trial"] for trial in trials] == [1, 2, 3, 4, 5]
    assert len({json.dumps(trial["knobs"]) for trial in trials}) == 5
    assert len((folder / "tried.txt").read_text().splitlines()) == 5
    assert head["knobs"] == {"ratio": [0.0, 0.5, 1.0], "batch": [1, 2, 3, 4]}
    assert {"torch", "transformers"} <= head["packages"].keys() and head["machine"]["cores"]
    edit(folder / "s.py", "knobs.other != 3", "knobs.other != 9")
    assert "trials of another schedule" in refused(capsys, *SEARCH)


def test_a_command_that_never_ran_may_be_set_right(folder, capsys):
    """The folder was then said to hold trials of another run, of which there were none."""
    assert "not found" in refused(capsys, *SEARCH[:-1], f"no{RUN}")
    assert cli.main([*SEARCH, "--strategy", "random", "--trials", "1"]) == 0
    assert "trials of another run" in refused(capsys, *SEARCH[:-1], f"no{RUN}")


def test_two_searches_in_one_folder(folder, capsys):
    path = folder / "tuned/trials.jsonl"
    with recording(path, {}, KnobSpace([Axis("ratio", (0.0,))])):
        said = refused(capsys, *SEARCH)
    assert "another `tune` is running in `tuned`" in said and f"process {os.getpid()} on" in said
    (folder / "file").write_text("")
    assert "cannot write `file`" in refused(capsys, *SEARCH[:4], "-o", "file", "--run", RUN)


@pytest.mark.long
def test_the_model_says_when_it_ends(capsys):
    assert cli.main(SEARCH) == 0
    said = capsys.readouterr().out
    assert re.search(r"best: ratio=1.0 batch=4, throughput 0.63", said)
    assert re.search(
        r"\d of 9 points tried: (all of them|the probability that another point)", said
    )


@pytest.mark.long
def test_a_schedule_may_name_its_source(folder, capsys):
    literal = ["tune", "s.py", "-o", "tuned", "--run", RUN, "--trials", "1"]
    assert cli.main(literal) == 0
    edit(folder / "s.py", 'SOURCE = "net.py"\n', "")
    assert "the model of `s.py` is not known" in refused(capsys, *literal)


@pytest.mark.long
def test_a_run_that_takes_too_long_counts_as_such(folder, capsys):
    edit(folder / "train.py", "print(json", "import time; time.sleep(60 * (batch > 1))\nprint(json")
    options = ["--set", "ratio=1.0", "--timeout", "3", "--json", "--strategy", "exhaustive"]
    assert cli.main([*SEARCH, *options]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [trial["outcome"] for trial in said["trials"]] == ["ok", "timed out", "timed out"]


@pytest.mark.long
def test_where_nothing_runs_the_answer_is_no(folder, capsys):
    edit(folder / "train.py", "> 1.5", "> -1")
    assert cli.main([*SEARCH, "--strategy", "exhaustive"]) == 1
    assert "no point ran" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "print(json",
            "raise ValueError('mine')\nprint(json",
            r"ends with 1(.|\n)*ValueError: mine",
        ),
        ("print(json", "(json", r'reports no throughput(.|\n)*"throughput": 123.4'),
    ],
)
def test_what_fails_otherwise_ends_the_search(old, new, words, folder, capsys):
    edit(folder / "train.py", old, new)
    assert re.search(words, refused(capsys, *SEARCH, "--set", "ratio=1.0"))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("knobs.batch * knobs.other != 3", "False", "`space` allows none of the 12"),
        ("knobs.batch * knobs.other != 3", "None", "returns None"),
        ("knobs.batch * knobs", "knobs.wrong * knobs", r"s.py:28:12\n(.|\n)*knobs.wrong"),
        ("batch: Annotated", "ratio: Annotated", "both the schedule's and the run's"),
        ("Range(1, 4)", "Range(4, 1)", "holds no number"),
        ("Choices(0.0, 0.5, 1.0)", "Choices()", "at least one value"),
        ("Range(1, 4)", "Range(1, 9000)", "at most 20,000"),
        ("Range(1, 4)", "Range(0.0, 1.0, 0.5)", "takes whole numbers"),
        ("0.0, 0.5, 1.0", "0.0, 1.0, 'half'", "`half` is not a value for knob `ratio`"),
    ],
)
def test_spaces_that_are_none(old, new, words, folder, capsys):
    edit(folder / "s.py", old, new)
    error = refused(capsys, *SEARCH, "--strategy", "exhaustive")
    assert re.search(words, error) and "trial 1" not in error


def test_a_knob_that_is_called_as_the_folder(folder, capsys):
    edit(folder / "s.py", "space(knobs, ", "space(knobs, out: Annotated[int, Choices(1)] = 1, ")
    assert "`out` is a knob of the run, and {out}" in refused(capsys, *SEARCH)


def test_what_no_rewrite_can_be_made_of_says_where_it_was(folder, capsys):
    edit(folder / "s.py", "    if ratio:", "    s['layers'][int(8 * ratio)]\n    if ratio:")
    error = refused(capsys, *SEARCH, "--strategy", "exhaustive")
    assert "at ratio=0.5 batch=1: `layers` has 4 modules" in error
    assert "have `space(knobs)` return False" in error


def test_texts_are_drawn_as_they_are_and_as_wide_as_there_is_room(folder, monkeypatch):
    texts = ["$HOME", "$x_1$", "a long text of a knob that nobody shortens"]
    space = KnobSpace([Axis("text", tuple(texts)), Axis("n", (1,))])
    trials = [Trial(number, "ok", 1.0 + number) for number in range(3)]
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda f, *_, **__: drawn.append(f))
    draw(space, trials, folder / "surface.png")
    (figure,) = drawn
    figure.draw_without_rendering()
    title, room = figure._suptitle.get_window_extent(), figure.bbox
    assert room.x0 <= title.x0 and title.x1 <= room.x1
    labels = figure.axes[0].get_xticklabels()
    assert [label.get_text() for label in labels] == texts
    assert not any(label.get_parse_math() for label in labels)


def test_the_committed_search_is_of_the_space_that_the_benchmark_declares(folder):
    (folder / "example.py").write_text(tune_example.SCHEDULE)
    points = read("example.py", ()).space.points
    found = report.read(tune_example.NAME)
    assert [trial["knobs"] for trial in found["all"]] == [dict(point) for point in points]
    assert found["points"] == 24 and found["trials"] <= tune_example.MOST_TRIALS
    assert found["part_of_best"] >= 1 - tune_example.WITHIN
    judged = {json.dumps(trial["knobs"]): trial["throughput"] for trial in found["all"]}
    chosen = max(found["tried"], key=lambda trial: trial["throughput"])
    assert judged[json.dumps(chosen["knobs"])] == found["found_rows_a_second"]


def test_knobs_without_choices(folder, capsys):
    edit(folder / "s.py", "Annotated[float, Choices(0.0, 0.5, 1.0)]", "float")
    edit(folder / "s.py", ", batch: Annotated[int, Range(1, 4)] = 1", "")
    error = refused(capsys, *SEARCH)
    assert "no knob of `s.py` has choices" in error and "Annotated[float, Choices(" in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--strategy", "modle"], "no strategy `modle`(.|\n)*did you mean `model`"),
        (["--run", "train {out} {bach}"], "`{bach}` in `--run`(.|\n)*did you mean `batch`"),
        (["--run", "train {out}"], "the command does not use it(.|\n)*--batch {batch}"),
        (["--run", "train {batch}"], "does not name {out}"),
        (["--run", "train {"], "braces of the command's own"),
        (["--confidence", "1"], "between 0 and 1"),
        (["--trials", "0"], "at least 1"),
        (["--timeout", "0"], "above 0"),
        (["--seeds", "2"], "needs `--replay`"),
        (["--replay", "g.json"], "`--replay` runs nothing"),
        (["--set", "batch=2"], "no knob `batch`"),
    ],
)
def test_command_lines_that_make_no_sense(arguments, words, capsys):
    assert re.search(words, refused(capsys, *SEARCH, *arguments))


def test_what_is_missing_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    error = refused(capsys, *SEARCH)
    assert "sklearn" in error and "pip install matplotlib scikit-learn\n" in error


def test_the_last_line_of_json_counts():
    text = 'x\n{"throughput": 1}\n[rank0]: {"throughput": 2.5, "unit": "t/s"}\n{"loss": 3}\n{oops'
    assert throughput_in(text) == 2.5
    assert throughput_in("throughput 3\n{}") is None
    assert throughput_in('{"throughput": NaN}') is None
    assert throughput_in('{"throughput": true}') is None


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGHUP])
def test_who_ends_the_search_ends_what_it_runs(asked, folder):
    """A command in a separate session gets neither signal by itself."""
    code = "from pathlib import Path; from slapo_rewrite.tune.training_command import run; "
    code += "run('echo $$; exec sleep 60', None, Path('log.txt'))"
    search = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    log = folder / "log.txt"
    while not (log.is_file() and log.read_text().endswith("\n")):
        time.sleep(0.02)
    started = int(log.read_text())
    search.send_signal(asked)
    search.wait()
    try:
        with pytest.raises(ProcessLookupError):
            os.kill(started, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(started, signal.SIGKILL)


@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_also_while_it_is_started(asked, folder, monkeypatch):
    begun = []

    class Asked(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            begun.append(self)
            signal.raise_signal(asked)  # before anybody has what could be ended

    monkeypatch.setattr(subprocess, "Popen", Asked)
    # Who started the tests may have had them ignore it, as `nohup` does.
    before = signal.signal(asked, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_command("exec sleep 60", None, folder / "log.txt")
        assert signal.getsignal(asked) is signal.default_int_handler
    finally:
        signal.signal(asked, before)
    assert begun[0].returncode == -signal.SIGKILL
