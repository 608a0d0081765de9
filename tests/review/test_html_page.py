"""The contents of the page for review, not its appearance."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from slapo_rewrite import cli
from slapo_rewrite.emit import record
from slapo_rewrite.plan.planning import Wanted, plan
from slapo_rewrite.review.gathered import gathered
from slapo_rewrite.review.step_prediction import GPU, NODE, PRECISION
from tests.golden import ROOT
from tests.review.pages import Element, parsed

NET = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(6)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
"""
SCHEDULE = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(2, 32)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s, ratio: float = 0.5):
    if 0 < ratio <= 1:  # some & not <all>
        s["layers"][:ratio].checkpoint()
    s["layers.*.up"].shard(["weight", "bias"], axis=0)
    s["layers.*.down"].shard("weight", axis=1)
    s.infer_sync()
"""
MODELS = ROOT / "tests" / "models"


@pytest.fixture(scope="module")
def gpt(tmp_path_factory) -> Path:
    """A GPT with kernels, checkpoints and stages, and the page on it."""
    folder = tmp_path_factory.mktemp("gpt")
    shutil.copy(MODELS / "gpt.py", folder)
    shutil.copy(MODELS / "gpt_schedule.py", folder / "s.py")
    knobs = [f"--set={k}" for k in ("fuse=true", "ckpt_ratio=0.5", "pipeline_stages=2")]
    with contextlib.chdir(folder):
        assert cli.main(["gpt.py", "--schedule", "s.py", *knobs, "-o", "out"]) == 0
        assert cli.main(["explain", "out", "--html", "report.html"]) == 0
    return folder


@pytest.fixture(scope="module")
def page(gpt) -> Element:
    return parsed((gpt / "report.html").read_text())


@pytest.fixture
def net(tmp_path, monkeypatch) -> Path:
    """A small output in the folder that is worked in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "s.py").write_text(SCHEDULE)
    assert cli.main(["net.py", "--schedule", "s.py", "-o", "out"]) == 0
    return tmp_path


def reported(*options: str) -> Element:
    assert cli.main(["explain", "out", "--html", "report.html", *options]) == 0
    return parsed(Path("report.html").read_text())


def refused(capsys, *options: str) -> str:
    capsys.readouterr()
    assert cli.main(["explain", "out", *options, "--html", "report.html"]) == 2
    return capsys.readouterr().err


def modules(page: Element) -> dict[str, Element]:
    return {
        str(each.attributes["data-path"]): each for each in page.one(id="modules").all(cls="module")
    }


@pytest.mark.long
def test_nothing_is_fetched(gpt, page):
    text = (gpt / "report.html").read_text()
    assert not re.search(r"url\((?!#)|@import|<script|<link|<iframe|<object|<embed", text)
    for element in page.walk():
        for name in ("href", "src", "xlink:href", "srcset", "data", "action", "poster"):
            assert (element.attributes.get(name) or "#").startswith("#"), element


def test_every_link_leads_somewhere_and_every_name_is_one(page):
    names = [each.attributes["id"] for each in page.walk() if "id" in each.attributes]
    assert len(set(names)) == len(names)
    links = {str(a.attributes["href"])[1:] for a in page.all("a")}
    assert links and links <= set(names)


def test_the_five_lines_are_printed_too(net, capsys):
    page = reported()
    shown = capsys.readouterr().out.splitlines()
    assert shown[-6:] == [
        *(li.text for li in page.one(id="summary").all("li")),
        "wrote report.html",
    ]


def test_five_lines_say_what_was_asked_and_what_came_of_it(page):
    asked, came, sizes, predicted, verified = [li.text for li in page.one(id="summary").all("li")]
    assert "gpt.py by the schedule s.py" in asked and "fuse=true" in asked
    assert "1 apply_all, 3 shard" not in asked and "4 shard" in asked and "1 cut_evenly" in asked
    assert re.search(r"gpt.py has \d+ new lines in \d+ places, \d+\.\d% of .* lines stand", came)
    assert sizes == "Sizes: each of 2 ranks holds 62.6M of 124.4M parameters (50%)."
    assert re.search(r"memory of [\d.]+ GB becomes [\d.]+ GB", predicted)
    assert verified == "Not verified: run slapo-rewrite verify out."


def test_every_changed_line_is_there_and_linked_to_the_schedule(gpt, page):
    changed = page.one(id="changes")
    diff = (gpt / "out" / "rewrite.diff").read_text().splitlines()
    for side, mark, kinds in (
        ("old", "-", ("changed", "removed")),
        ("new", "+", ("changed", "added")),
    ):
        shown = [
            row.all("code", side)[0].raw
            for part in changed.all("article", "part")
            for row in part.all(cls="row")
            if set(kinds) & set(row.classes)
        ]
        assert shown == [n[1:] for n in diff if n[:1] == mark and n[:3] not in ("---", "+++")]
    for part in changed.all("article", "part"):
        links = [str(a.attributes["href"]) for a in part.all("a")]
        assert links and all(link.startswith("#schedule-") for link in links), part.text
    swiglu = next(p for p in changed.all("article", "part") if "becomes a ColumnParallel" in p.text)
    assert "Split one or several parameters of a module" in swiglu.text
    (loss,) = [r.text for r in changed.all("li") if r.text.startswith("cross_entropy")]
    assert loss.startswith("cross_entropy Compute the cross entropy of a vocabulary in one kernel")


def test_lines_of_the_schedule_lead_to_what_they_caused(page):
    schedule = page.one(id="schedule")
    text = (MODELS / "gpt_schedule.py").read_text().splitlines()
    rows = schedule.all(cls="row")
    assert [row.all("code")[0].raw for row in rows] == text
    number = next(n for n, line in enumerate(text, 1) if "c_attn" in line)
    row = page.one(id=f"schedule-{number}")
    targets = [page.one(id=str(a.attributes["href"])[1:]) for a in row.all("a")]
    assert targets and all("c_attn" in t.text or "n_embd" in t.text for t in targets)


def test_the_tree_says_what_was_applied_where(page):
    found = modules(page)
    attention = found["transformer.h.[0-4].attn.c_attn"].text
    assert "c_attn ColumnParallelLinear was Linear" in attention
    assert 'shard(["weight", "bias"], axis=0, parts=3)' in attention
    assert "weight [2304, 768] Shard(0) bias [2304] Shard(0)" in attention
    projection = found["transformer.h.[0-4].mlp.c_proj"].text
    assert "weight [768, 3072] Shard(1) bias [768] Replicate" in projection
    assert 'sync("fwd_post", "all_reduce")' in projection
    assert found["transformer.h.[0-4]"].one(cls="count").text.endswith(" 5")
    assert "checkpoint()" in found["transformer.h.[0-4]"].text
    assert "a stage ends here" in found["transformer.h.5"].text
    assert "checkpoint()" in found["transformer.h.5"].text
    assert "checkpoint()" not in found["transformer.h.[6-11]"].text
    assert "weight [768] Replicate" in found["transformer.ln_f"].text
    colours = {chip.text: chip.classes[1] for chip in page.one(cls="tree").all(cls="placement")}
    assert colours == {"Replicate": "replicate", "Shard(0)": "shard-0", "Shard(1)": "shard-1"}


def test_the_tree_folds_what_repeats(page):
    folds = {
        fold.all(cls="module")[0].attributes["data-path"]: "open" in fold.attributes
        for fold in page.one(cls="tree").all("details")
    }
    assert folds["GPT"] and folds["transformer.h"] and folds["transformer.h.[0-4]"]
    assert not folds["transformer.h.5"] and not folds["transformer.h.[6-11]"]


def test_rules_say_where_they_fired_or_why_they_did_not(page):
    rows = {row.all("code")[0].text: row for row in page.one(id="rules").all("tr")[1:]}
    fired = {name for name, row in rows.items() if "fired" in row.classes}
    assert "cross_entropy" in fired and "swiglu" not in fired
    assert "applied in" in rows["cross_entropy"].text
    assert "matches nothing" in rows["swiglu"].text and "did not fire" in rows["swiglu"].text


def test_the_prediction_is_told_with_and_without(page):
    section = page.one(id="prediction")
    table = section.all("table")[0]
    heads = [th.text for th in table.all("th")]
    assert heads[1:] == ["the original", "rewritten, in one process", "rewritten, a rank of 2"]
    rows = {r.all("td")[0].text: [td.text for td in r.all("td")[1:]] for r in table.all("tr")[1:]}
    assert rows["weights"] == ["248.9 MB", "248.9 MB", "125.3 MB"]
    assert rows["tensor-parallel communication"][1] == "0"
    assert rows["tensor-parallel communication"][2] != "0"
    assert "bubble" not in rows and "gradient all-reduce" not in rows, "there is none"
    assert len(section.all("svg")) == 3
    drawn = {text.text for text in section.all("figure")[1].all("text")}
    assert set(rows) & {"compute", "memory traffic", "optimizer"} <= drawn
    assert {f"{float(step.split()[0]):.3g} ms" for step in rows["step"]} <= drawn
    assert {"weights", "rewritten, a rank of 2", "stage 1"} <= {t.text for t in section.all("text")}


def test_stages_are_a_timeline(page):
    section = page.one(id="prediction")
    assert "2 stages, 4 micro-batches" in section.text
    stages = [[td.text for td in row.all("td")] for row in section.all("table")[1].all("tr")[1:]]
    assert [row[0] for row in stages] == ["0", "1"]
    assert [row[3] for row in stages] == ["2", "1"], "the first stage runs ahead"


def test_the_prediction_is_that_of_plan(gpt):
    with contextlib.chdir(gpt):
        stages = gathered(Path("out")).prediction.stages
        way = stages.predicted.way
        fixed = ["fuse=true", "ckpt_ratio=0.5", "sequence_parallel=false"]
        wanted = Wanted(
            "gpt.py", "s.py", fixed, 4, GPU, GPU.memory, way.rows * way.micro_batches, None, NODE,
            PRECISION,
        )  # fmt: skip
        found = {replace(each.way, recomputed=0.0): each for each in plan(wanted).best}
    same = found[replace(way, fused=True)]
    assert same.way.recomputed == 0.5
    assert replace(same, way=way) == stages.predicted


def test_code_stays_code(net):
    page = reported()
    assert "    if 0 < ratio <= 1:  # some & not <all>" in [
        code.raw for code in page.one(id="schedule").all("code")
    ]
    titles = {a.attributes.get("title") for a in page.all("a")}
    assert 's["layers.*.up"].shard(["weight", "bias"], axis=0)' in titles


def test_a_verification_is_told(net):
    checks = [
        {"world": 1, "check": "loss", "ok": True, "error": 0.0, "limit": 1e-5},
        {"world": 2, "check": "loss", "ok": False, "error": "inf", "limit": 1e-5},
        {"world": 2, "check": "keeps tied parameters tied", "ok": True},
        {"world": "pp2 tp2", "check": "loss", "ok": True, "error": 0.0, "limit": 1e-5},
    ]
    found = {"verdict": "not equal", "worlds": [1, 2, "pp2 tp2"], "changed": [], "checks": checks}
    path = net / "out" / record.NAME
    path.write_text(record.with_verification(path.read_text(), {**found, "failures": []}))
    page = reported()
    section = page.one(id="verification")
    assert [th.text for th in section.all("th")] == [
        "Check",
        "world 1",
        "world 2",
        "pipeline pp2 tp2",
    ]
    rows = [[td.text for td in row.all("td")] for row in section.all("tr")[1:]]
    assert rows == [
        ["loss", "ok 0.0 of 1e-05", "WRONG inf of 1e-05", "ok 0.0 of 1e-05"],
        ["keeps tied parameters tied", "", "ok", ""],
    ]
    last = page.one(id="summary").all("li")[-1].text
    worlds = "world 1, world 2, pipeline pp2 tp2"
    assert last == f"Verified at {worlds}: NOT EQUAL in 1 of 4 comparisons."


def test_hand_edits_are_told_apart(net):
    path = net / "out" / "net.py"
    path.write_text(path.read_text().replace("return x\n", "return x  # by hand\n"))
    page = reported()
    assert "net.py was edited by hand" in page.one(id="summary").text
    (part,) = [p for p in page.all("article") if str(p.attributes["id"]).startswith("edit-")]
    assert "return x # by hand" in part.text
    assert "by hand" not in " ".join(
        p.text for p in page.all("article") if str(p.attributes["id"]).startswith("change-")
    )


def test_what_is_not_of_this_source_is_left_out(net):
    (net / "net.py").write_text(NET.replace("range(6)", "range(8)"))
    page = reported()
    assert "the source net.py has changed" in page.one(id="summary").text
    assert "slapo-rewrite update out" in page.one(id="modules").text
    assert not page.all(cls="tree") and not page.all("svg")
    assert page.one(id="changes").all("article"), "what the record knows is there"
    (net / "net.py").unlink()
    assert "give --source and --schedule" in reported().one(id="modules").text
    (net / "elsewhere.py").write_text(NET)
    assert reported("--source", "elsewhere.py").all(cls="tree")


def test_a_schedule_that_changed_is_told_by_the_record(net):
    (net / "s.py").write_text(SCHEDULE.replace("ratio: float = 0.5", "ratio: float = 0.25"))
    page = reported()
    assert "the schedule s.py has changed" in page.one(id="summary").text
    assert "these are the lines of it that the record keeps" in page.one(id="schedule").text
    assert len(page.one(id="schedule").all(cls="row")) == 4


def test_sizes_are_those_of_the_world_that_is_asked_for(net):
    found = modules(reported("--world", "4"))
    tree = parsed(Path("report.html").read_text())
    assert "On each of 4 ranks" in tree.text
    assert "weight [64, 32] Shard(0)" in found["layers.[0-2].up"].text
    sizes = [each.text for each in tree.one(cls="tree").all(cls="sizes")]
    assert sizes[0].startswith("25.2K → 6.4K 25.7 KB")
    assert "its sizes do not fit 100 ranks" in reported("--world", "100").one(id="modules").text


def test_a_model_that_is_not_split_is_told_as_one(net):
    (net / "s.py").write_text(SCHEDULE.partition('    s["layers.*.up"]')[0])
    assert cli.main(["net.py", "--schedule", "s.py", "-o", "out"]) == 0
    page = reported()
    assert "nothing is split over ranks" in page.one(id="summary").text
    assert not page.one(cls="tree").all(cls="placement")


def test_what_cannot_be_told_is_refused_in_words(net, capsys):
    assert cli.main(["explain", "out", "--world", "2"]) == 2
    assert "`--world` needs `--html`" in capsys.readouterr().err
    assert "use it without FILE:LINE" in refused(capsys, "net.py:3")
    assert "at least 1" in refused(capsys, "--world", "0")
    diff = net / "out" / "rewrite.diff"
    kept = diff.read_text()
    diff.write_text(
        kept.replace("-        self.up", "-        self.app").replace(
            "+        self.up", "+   self.up"
        )
    )
    assert "is not the diff of net.py" in refused(capsys)
    diff.unlink()
    error = refused(capsys)
    assert "lacks rewrite.diff" in error and "slapo-rewrite update out" in error
    diff.write_text(kept)
    path = net / "out" / record.NAME
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "directives": [{"text": "s.shard()"}]}))
    assert "is not a record of slapo-rewrite: its `directives`" in refused(capsys)
    path.unlink()
    assert "holds no rewrite.json" in refused(capsys)


def test_a_page_that_cannot_be_written_is_told(net, capsys):
    capsys.readouterr()
    assert cli.main(["explain", "out", "--html", "nowhere/report.html"]) == 2
    assert "cannot write `nowhere/report.html`" in capsys.readouterr().err


def test_what_is_missing_is_named(net, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    error = refused(capsys)
    assert "matplotlib" in error and "pip install matplotlib\n" in error
