"""Counts of a training step's memory traffic."""

import json
import os
import subprocess
import sys
import warnings
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmark import report, traffic
from benchmark.compiled import caught, kernel_modules
from benchmark.counted import Call, Counter, count, launch_bytes
from benchmark.steps import STEPS
from tests.benchmark.launches import run, small_calls
from tests.golden import ROOT

B, D, F = 6, 16, 48


class Block(nn.Module):
    """Two layers, dropout and an addition, in float32."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, F), nn.Linear(F, D, bias=False)

    def forward(self, x):
        y = self.down(torch.relu(self.up(x)))
        loss = (x + nn.functional.dropout(y, 0.5)).sum()
        return type("Output", (), {"loss": loss})


def named(found: list[Call]) -> list[tuple[str, bool, int]]:
    return [(call.operator, call.backward, call.bytes) for call in found]


def test_bytes_are_those_counted_by_hand():
    found = count(Block, lambda: {"x": torch.ones(B, D)})
    x, wide, up, down, mask = 4 * B * D, 4 * B * F, 4 * D * F, 4 * D * F, B * D
    assert named(found) == [
        ("addmm", False, 4 * F + x + up + wide),
        ("relu", False, 2 * wide),
        ("mm", False, wide + down + x),
        ("native_dropout", False, 2 * x + mask),
        ("add", False, 3 * x),
        ("sum", False, x + 4),
        ("ones_like", False, 4),
        ("native_dropout_backward", True, 4 + mask + x),  # ones that are repeated are one
        ("mm", True, x + wide + down),
        ("mm", True, x + down + wide),
        ("threshold_backward", True, 3 * wide),
        ("mm", True, wide + x + up),
        ("sum", True, wide + 4 * F),
    ]


def test_a_product_that_adds_to_its_result_is_one():
    total, x = torch.ones(B, B), torch.ones(B, B)
    with Counter() as counter:
        total.addmm_(x, x)
        total.add_(x)
    assert [call.is_product for call in counter.calls] == [True, False]
    assert [call.addend for call in counter.calls] == [4 * B * B, 0]


def test_calls_belong_to_the_module_that_makes_them():
    found = count(Block, lambda: {"x": torch.ones(B, D)})
    where = {(call.operator, call.backward): call.module for call in found}
    assert where["addmm", False] == "Linear"
    assert where["relu", False] == where["threshold_backward", True] == "Block"
    assert where["native_dropout_backward", True] == "Block"


class Bytes(Counter):
    """Keeps the bytes of each operator."""

    def __init__(self):
        super().__init__()
        self.found = []

    def add(self, operator, bytes_, addend=0):
        self.found.append(bytes_)


@pytest.mark.parametrize(
    ("function", "shapes", "wanted"),
    [
        (lambda x: x.view(-1).t(), [(4, 8)], []),
        (lambda x: x.add_(1), [(4, 8)], [256]),
        (lambda x: x.zero_(), [(4, 8)], [128]),
        (lambda x, y: x.copy_(y), [(4, 8), (4, 8)], [256]),
        (lambda x, y: x + y, [(4, 8), (8,)], [128 + 32 + 128]),
        (lambda x: x * x, [(4, 8)], [256]),  # the same tensor twice is read once
        (lambda x: x.expand(4, 8).clone(), [(1, 8)], [32 + 128]),
        (lambda x, y: torch.mul(x, 2, out=y), [(4, 8), (4, 8)], [256]),
        (lambda x: torch.empty_like(x), [(4, 8)], []),
        (lambda x: torch.zeros_like(x), [(4, 8)], [128]),
        (lambda x, i: nn.functional.embedding(i, x), [(99, 8), None], [16 + 128]),
    ],
)
def test_operators(function, shapes, wanted):
    with FakeTensorMode():
        arguments = [torch.empty(s) if s else torch.zeros(2).long() for s in shapes]
        with Bytes() as counter:
            function(*arguments)
    assert counter.found == wanted


@pytest.fixture(scope="module")
def interpreted():
    """What kernels load and store when they are really run."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmark.launches"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [tuple(row) for row in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.release
def test_kernels_move_what_is_counted_for_them(interpreted):
    found = []

    def launched(launch):
        found.append((launch.name, *launch_bytes(launch)))

    with ExitStack() as stack:
        stack.enter_context(caught(kernel_modules(), launched))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(FakeTensorMode())
        for name, call in small_calls().items():
            run(name, call)
    assert [row[0] for row in found] == [row[0] for row in interpreted]
    for declared, real in zip(found, interpreted, strict=True):
        assert declared[1] == pytest.approx(real[1], rel=0.02), (declared, real)
        assert declared[2] == pytest.approx(real[2], rel=0.02), (declared, real)


class Attention(nn.Module):
    """Attention of a tensor to itself."""

    def forward(self, q, mask):
        attend = nn.functional.scaled_dot_product_attention
        found = attend(q, q, q, attn_mask=mask, dropout_p=0.1)
        return type("Output", (), {"loss": found.sum()})


@pytest.mark.parametrize("masked", [False, True])
def test_attention_counts_as_flash_attention(masked):
    batch, heads, tokens, width = 2, 4, 32, 16
    rows = batch * heads * tokens

    def inputs():
        q = torch.ones(batch, heads, tokens, width, requires_grad=True)
        return {"q": q, "mask": torch.ones(batch, 1, tokens, tokens) if masked else None}

    found = count(Attention, inputs)
    forward = next(call for call in found if call.operator.startswith("_scaled"))
    # Queries, keys and values are one tensor here. The result, one number a row, and the mask.
    wanted = 4 * (2 * rows * width + rows + masked * batch * tokens * tokens)
    assert forward.bytes == pytest.approx(wanted, abs=64)


def test_steps_are_counted_alike_at_every_run():
    first = STEPS[0].tiny()
    one, other = (traffic.summed(first, traffic.calls_of(first, traffic.SDPA)) for _ in range(2))
    assert one == other
    eager = traffic.summed(first, traffic.calls_of(first, traffic.EAGER))
    assert eager["bytes_per_token"] > one["bytes_per_token"] > traffic.floor_bytes(first)


def test_floors_are_those_of_the_kernels_tables():
    floors = {step.name: traffic.floor_bytes(step) / 1e6 for step in STEPS}
    assert floors == pytest.approx(
        {"BERT-large": 2.10, "GPT-2 medium": 2.22, "Llama-3.2-1B": 4.24, "T5-base": 0.73}, abs=0.01
    )


def test_a_variant_that_there_is_not_is_named(monkeypatch):
    monkeypatch.setattr(traffic, "STEPS", (STEPS[0].tiny(),))
    with pytest.raises(
        SystemExit, match="BERT-large has no variant 'other'; its variants are eager"
    ):
        traffic.main(["--only", "BERT", "--breakdown", "other"])


def test_figures_are_those_of_the_result_file():
    text = traffic.table(report.read(traffic.NAME))
    assert report.marked(traffic.NAME, text) in report.README.read_text()
