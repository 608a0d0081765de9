"""Biases of linear layers that a kernel behind them adds: where that is, and where it is not."""

from __future__ import annotations

import pytest

from slapo_rewrite.emit.write import write
from slapo_rewrite.fusion.registry import rules
from slapo_rewrite.verify.run import verify
from tests.rewriting import changed_lines, refused, rewritten

(POST, _) = rules()["residual_layer_norm"].examples
DENSE = "self.dense(hidden_states)"


def test_a_layer_that_is_read_once(tmp_path):
    text = changed_lines(rewritten(tmp_path, POST.source, POST.schedule))
    assert "linear_product(hidden_states, self.dense)" in text
    assert "input_bias=self.dense.bias" in text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (DENSE, f"{DENSE}\n        other = self.dense(input_tensor)"),
        (DENSE, f"{DENSE}\n        self.seen = hidden_states"),
        (DENSE, f"{DENSE}\n        hidden_states.mul_(2)"),
        (DENSE, f"-{DENSE}"),
        (DENSE, "self.dense(input=hidden_states)"),
        ("nn.Linear(width, width)", "nn.Linear(width, width, bias=False)"),
        ("nn.Linear(width, width)", "nn.Sequential(nn.Linear(width, width))"),
        ("nn.Linear(width, width)", "nn.Bilinear(width, width, width)"),
    ],
)
def test_others(tmp_path, old, new):
    source = POST.source.replace(old, new)
    if "Bilinear" in new:
        source = source.replace(DENSE, "self.dense(hidden_states, hidden_states)")
    text = changed_lines(rewritten(tmp_path, source, POST.schedule))
    assert "add_layer_norm(" in text
    assert "input_bias" not in text
    assert "linear_product" not in text


def test_what_needs_the_layer_to_be_called(tmp_path):
    schedule = POST.schedule + '    s["dense"].checkpoint()\n'
    assert "needs the layer to be called" in refused(tmp_path, POST.source, schedule, "SR305")
    schedule = POST.schedule + '    s["dense"].decompose()\n'
    assert "is decomposed already" in refused(tmp_path, POST.source, schedule, "SR306")


@pytest.mark.processes
def test_a_whole_layer_on_parts(tmp_path):
    """Its weight and its bias are read where it was called: their gradients are added up there."""
    source = (
        POST.source.replace("self.dense(", "self.dense(2 * ")
        + """

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.output = Output(width)

    def forward(self, x):
        return self.output(x, x)
"""
    )
    schedule = POST.schedule.replace("m.Output(8)", "m.Block(8)").replace(
        '{"hidden_states": torch.randn(2, 3, 8), "input_tensor": torch.randn(2, 3, 8)}',
        '{"x": torch.randn(2, 4, 8)}',
    )
    schedule += """\
    s.sync("fwd_pre", "scatter", axis=1)
    s.sync("fwd_post", "all_gather", axis=1)
"""
    output = rewritten(tmp_path, source.replace("0.1", "0.0"), schedule)
    assert "all_reduce_gradient(self.dense.weight)" in changed_lines(output)
    write(tmp_path / "out", output.files)
    assert verify(tmp_path / "out", (1, 2)).ok
