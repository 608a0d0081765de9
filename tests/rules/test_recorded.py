"""Rules in an output: its files, its record, and its `explain`."""

from __future__ import annotations

import ast
import json

import torch

from slapo_rewrite.cli import main
from slapo_rewrite.emit.explanation import explain
from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.emit.write import write
from tests.lowering.test_fused import PLAIN, schedule, source
from tests.rewriting import imported, rewritten


def test_the_record_says_what_became_of_each_rule(tmp_path):
    lines = ('s["layers.0.act"].checkpoint()', "s.apply_all()")
    output = rewritten(tmp_path, PLAIN, schedule(*lines))
    notes = {n["rule"]: n for n in json.loads(output.files["rewrite.json"])["rules"]}
    assert "SiLU" not in notes["swiglu"].get("applied", ())
    assert "is scheduled before" in notes["swiglu"]["left"]["layers.*"]
    assert notes["gelu_tanh"]["lacking"] == ["tanh"]
    write(tmp_path / "out", output.files)
    shown = explain(tmp_path / "out", None)
    assert "rule `swiglu` of" in shown and "left layers.*: `layers.0.act`, which it calls" in shown
    assert "matches nothing; at the nearest miss there is no `tanh`" in shown


def test_the_record_says_what_came_near(tmp_path):
    text = source("gate = F.silu(self.gate(x))\nreturn gate * gate.sum() + self.up(x) * x")
    output = rewritten(tmp_path, text, schedule("s.apply_all()"))
    rules = json.loads(output.files["rewrite.json"])["rules"]
    assert "(2 of 2 operations found)" in next(n for n in rules if n["rule"] == "swiglu")["nearest"]
    write(tmp_path / "out", output.files)
    assert "(2 of 2 operations found)" in explain(tmp_path / "out", None)


def test_lines_are_traced_to_the_line_that_applied_a_rule(tmp_path):
    output = rewritten(tmp_path, PLAIN, schedule('s["layers"][:2].apply("swiglu")'))
    write(tmp_path / "out", output.files)
    number = output.files["source_0.py"].splitlines().index("class FusedGated(Gated):") + 1
    assert 'apply("swiglu")' in explain(tmp_path / "out", f"source_0.py:{number}")
    assert 'apply("swiglu")' in explain(tmp_path / "out", "kernels.py:40")


def test_one_file_holds_the_kernels(tmp_path):
    (tmp_path / "net.py").write_text(PLAIN)
    (tmp_path / "s.py").write_text(schedule('s.apply("swiglu")'))
    output = rewrite(str(tmp_path / "net.py"), str(tmp_path / "s.py"), single_file=True)
    assert sorted(output.files) == ["net.py", "rewrite.diff", "rewrite.json"]
    text = output.files["net.py"]
    assert "class GatedFunction(" in text and "from .kernels" not in text
    ast.parse(text)
    (tmp_path / "one_net.py").write_text(text)
    net = imported(tmp_path / "one_net.py").Net(8)
    assert net(torch.ones(2, 8)).shape == (2, 8)


def test_rules_are_listed_and_shown(capsys):
    assert main(["primitives"]) == 0
    assert "swiglu" in capsys.readouterr().out
    assert main(["primitives", "gelu_tanh"]) == 0
    shown = capsys.readouterr().out
    assert "numerics: reassociated" in shown and 'approximate="tanh"' in shown
