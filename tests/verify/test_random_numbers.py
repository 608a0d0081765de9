"""Models that draw random numbers of their own are compared on the same ones."""

from __future__ import annotations

import pytest

from slapo_rewrite.primitives.checkpoint import MODEL, STACK
from slapo_rewrite.verify.run import verify
from tests.rewriting import rewritten, written

SCHEDULE = MODEL + 'def schedule(s):\n    s["blocks"][:2].checkpoint()\n'
DRAWS = {
    "torch": ("", "torch.rand(8)"),
    "numpy": ("import numpy\n", "torch.tensor(numpy.random.rand(8), dtype=torch.float32)"),
    "python": ("import random\n", "random.random()"),
}


@pytest.mark.processes
@pytest.mark.parametrize("drawn", DRAWS)
def test_what_forward_draws_is_the_same(tmp_path, drawn):
    imports, noise = DRAWS[drawn]
    head, _, tail = STACK.rpartition("        for block")
    source = f"{imports}{head}        x = x + {noise}\n        for block{tail}"
    report = verify(written(tmp_path, rewritten(tmp_path, source, SCHEDULE)).parent, [1])
    assert report.ok, report.render()
