"""Which linear layers are passed to a kernel that adds their biases, and which are not."""

from __future__ import annotations

import pytest

from slapo_rewrite.emit.write import write
from slapo_rewrite.fusion.registry import rules
from slapo_rewrite.verify.run import verify
from tests.rewriting import changed_lines, refused, rewritten
from tests.rules.alike import same

(POST, _) = rules()["residual_layer_norm"].examples
DENSE = "self.dense(hidden_states)"
# As the numbers are held against one another.
TAKEN = POST.schedule.replace("outputs.pow", "outputs[0].pow")


def test_a_layer_that_is_read_once(tmp_path):
    text = changed_lines(rewritten(tmp_path, POST.source, POST.schedule))
    assert "linear=self.dense" in text


def test_a_layer_that_is_called_twice(tmp_path):
    source = POST.source.replace(DENSE, f"{DENSE}\n        other = self.dense(input_tensor)")
    source = source.replace("hidden_states + input_tensor", "hidden_states + other")
    assert "linear=self.dense" in same(tmp_path, source, TAKEN)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (DENSE, f"{DENSE}\n        input_tensor = hidden_states + input_tensor"),
        (DENSE, f"{DENSE}\n        self.dense.weight.data.mul_(2)"),
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
    assert "linear=" not in text


def test_the_layer_is_still_called(tmp_path):
    schedule = TAKEN + '    s["dense"].checkpoint()\n'
    assert "self.dense = CheckpointedLinear(" in same(tmp_path, POST.source, schedule)
    schedule = POST.schedule + '    s["dense"].decompose()\n'
    assert "no method of `Output` calls" in refused(tmp_path, POST.source, schedule, "SR305")


@pytest.mark.processes
def test_a_whole_layer_on_parts(tmp_path):
    """The gradients of its weight and its bias are added up."""
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
    assert "self.dense = ReplicatedLinear(" in changed_lines(output)
    write(tmp_path / "out", output.files)
    assert verify(tmp_path / "out", (1, 2)).ok
