"""Models that draw random numbers of their own are compared on the same ones."""

from __future__ import annotations

import pytest
import torch

from slapo_rewrite.primitives.checkpoint import MODEL, STACK
from slapo_rewrite.verify.probes import in_float64
from slapo_rewrite.verify.rank_layout import Layout
from slapo_rewrite.verify.run import verify
from tests.rewriting import rewritten, written

SCHEDULE = MODEL + 'def schedule(s):\n    s["blocks"][:2].checkpoint()\n'
DRAWS = {
    "torch": ("", "torch.rand(8)"),
    "numpy": ("import numpy\n", "torch.tensor(numpy.random.rand(8), dtype=torch.float32)"),
    "python": ("import random\n", "random.random()"),
}
CUT = MODEL + 'def schedule(s):\n    s["blocks.0"].cut_pipeline_stage(target="torch")\n'


def test_float64_draws_what_float32_draws():
    def drawn():
        torch.manual_seed(0)
        like = torch.ones(2)
        noise = torch.rand(3), torch.randn(2, 2, dtype=torch.float32), torch.rand_like(like)
        return *noise, like.uniform_(-1, 1).exp(), torch.empty(3).normal_()

    narrow = drawn()
    with in_float64():
        wide = drawn()
    assert all(tensor.dtype is torch.float64 for tensor in wide)
    torch.testing.assert_close([tensor.float() for tensor in wide], [*narrow])


@pytest.mark.processes
def test_what_each_stage_draws_is_the_same(tmp_path):
    head, _, tail = STACK.rpartition("        for block")
    source = f"{head}        x = x + torch.rand(8)\n        for block{tail}"
    source = source.replace("return x", "return x + torch.randn(8)", 1)
    report = verify(written(tmp_path, rewritten(tmp_path, source, CUT)).parent, [Layout(2)])
    assert report.ok, report.render()


@pytest.mark.processes
@pytest.mark.parametrize("drawn", DRAWS)
def test_what_forward_draws_is_the_same(tmp_path, drawn):
    imports, noise = DRAWS[drawn]
    head, _, tail = STACK.rpartition("        for block")
    source = f"{imports}{head}        x = x + {noise}\n        for block{tail}"
    report = verify(written(tmp_path, rewritten(tmp_path, source, SCHEDULE)).parent, [1])
    assert report.ok, report.render()


@pytest.mark.processes
@pytest.mark.parametrize("schedule", [SCHEDULE, CUT], ids=["whole", "stages"])
def test_what_a_constructor_draws_is_the_same(tmp_path, schedule):
    """Beside torch too, in a parameter."""
    made = "super().__init__()\n        self.gain = nn.Parameter(torch.tensor(random.random()))\n"
    head, _, tail = f"import random\n{STACK}".rpartition("        super().__init__()\n")
    source = f"{head}        {made}{tail}".replace("return x\n", "return x * self.gain\n")
    world = Layout(2) if schedule is CUT else 1
    report = verify(written(tmp_path, rewritten(tmp_path, source, schedule)).parent, [world])
    assert report.ok, report.render()


@pytest.mark.processes
def test_what_a_class_leaves_as_memory_has_it_has_no_value_to_start_with(tmp_path):
    """The clock stands for memory that nothing sets: each process has something else in it."""
    scale = "nn.Parameter(torch.full((width,), 1 + time.monotonic_ns() % 997 / 997))"
    source = STACK.replace(
        "nn.Linear(width, width)\n", f"nn.Linear(width, width)\n{8 * ' '}self.scale = {scale}\n"
    )
    source = f"import time\n{source.replace('self.linear(x)', 'self.linear(x) * self.scale')}"
    sets = (
        "def verify_model(m):\n    made = model(m)\n    for parameter in made.parameters():\n"
        "        torch.nn.init.normal_(parameter)\n    return made\n\n\ndef schedule"
    )
    plan = CUT.replace("def schedule", sets)
    report = verify(written(tmp_path, rewritten(tmp_path, source, plan)).parent, [Layout(2)])
    assert report.ok, report.render()
