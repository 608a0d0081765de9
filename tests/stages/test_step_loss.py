"""A loss that the schedule computes, trained by both engines, against the original."""

import pytest

from slapo_rewrite.emit.write import write
from slapo_rewrite.verify.rank_layout import Layout
from slapo_rewrite.verify.run import verify
from tests.rewriting import rewritten
from tests.stages.cases import for_torch
from tests.stages.test_refusals import SCHEDULE, written

LOSS = """

def halves(difference):
    return difference.pow(2) / 2


def loss(outputs, y, *, scale):
    return (halves(outputs[0] - y) * scale).mean()
"""


@pytest.mark.processes
@pytest.mark.parametrize("engine", ["deepspeed", "torch"])
def test_the_loss_is_trained(engine, tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    source = written("x = self.first(x)", "x = self.inner(x)").replace("x, y)", "x)", 1)
    source = source.replace("F.mse_loss(self.last(x), y)", "self.last(x), x")
    schedule = SCHEDULE.format(cut='s["inner"]["a"]') + LOSS
    schedule = schedule.replace('"x": torch', '"scale": torch.rand(2, 1), "x": torch')
    output = rewritten(tmp_path, source, for_torch(schedule) if engine == "torch" else schedule)
    write(tmp_path / "out", output.files)
    report = verify(tmp_path / "out", [Layout(2)])
    assert report.ok, report.render()


@pytest.mark.parametrize(
    ("filled", "part"),
    [
        ("out = {}; out['loss'] = ", "['loss']"),
        ("out = Out(); out.loss = ", ".loss"),
        ("out = x, ", "[1]"),
    ],
)
def test_a_result_that_is_bound_to_a_name(filled, part, tmp_path):
    source = written("x = self.inner(x)").replace("return F", f"{filled}F") + "        return out\n"
    source = source.replace("class Inner", "class Out: ...\n\n\nclass Inner")
    schedule = (
        SCHEDULE.format(cut='s["inner"]["a"]') + f"\n\ndef loss(out):\n    return out{part}\n"
    )
    text = rewritten(tmp_path, source, schedule).files["pipeline.py"]
    assert f"        return out{part}\n".replace("'", '"') in text


@pytest.mark.parametrize("part", [".loss", "[0]", ".loss * 2"])
@pytest.mark.parametrize("given", ["{}, x", "x=x, loss={}", "{}, x=x"])
def test_a_named_tuple_has_the_loss_by_name(given, part, tmp_path):
    source = written("x = self.inner(x)").replace(
        "return F.mse_loss(self.last(x), y)",
        f"return Out({given.format('F.mse_loss(self.last(x), y)')})",
    )
    out = "class Out(NamedTuple):\n    loss: torch.Tensor\n    x: torch.Tensor = None\n\n\n"
    source = source.replace("class Inner", f"{out}class Inner")
    source = source.replace("import torch\n", "import torch\nfrom typing import NamedTuple\n", 1)
    schedule = (
        SCHEDULE.format(cut='s["inner"]["a"]') + f"\n\ndef loss(out):\n    return out{part}\n"
    )
    assert "mse_loss" in rewritten(tmp_path, source, schedule).files["pipeline.py"]
