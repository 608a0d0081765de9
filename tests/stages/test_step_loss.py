"""A loss that the schedule works out, trained by both engines, against the original."""

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
