"""What a constructor may read of its tensors on the meta device."""

import pytest
import torch
from torch import nn

from slapo_rewrite.model.meta_build import on_meta
from tests.rewriting import changed_lines, rewritten


def changed():
    made = torch.zeros(3)
    made[1:].add_(2)
    return made


def drawn(fill):
    made = torch.zeros(3)
    part = made[1:]
    fill(made)
    return part


READ = {
    "iterated": (lambda: [x.item() for x in torch.linspace(0, 1, 3)], [0.0, 0.5, 1.0]),
    "computed": (lambda: (torch.arange(6).reshape(2, 3) * 2)[1].tolist(), [6, 8, 10]),
    "in place": (lambda: changed().tolist(), [0.0, 2.0, 2.0]),
    "as numbers": (lambda: (int(torch.tensor(4)), float(torch.ones(1)), bool(torch.eye(1))), None),
    "in numpy": (lambda: torch.arange(2).numpy().tolist(), [0, 1]),
}
UNKNOWN = {
    "drawn": lambda: torch.rand(2).tolist(),
    "drawn like a constant": lambda: torch.rand_like(torch.ones(2)).tolist(),
    "filled by the initialization": lambda: drawn(nn.init.normal_).tolist(),
    "filled by a method": lambda: drawn(torch.Tensor.random_).tolist(),
    "changed by what is drawn": lambda: drawn(lambda made: made.mul_(torch.rand(3))).tolist(),
    "a parameter": lambda: nn.Parameter(torch.ones(2)).tolist(),
    "large": lambda: torch.zeros(10_000).tolist(),
}


@pytest.mark.parametrize("case", READ)
def test_constants_can_be_read(case):
    read, want = READ[case]
    with on_meta():
        have = read()
        assert torch.linspace(0, 1, 3).is_meta
    assert have == (read() if want is None else want)


def test_what_torch_cannot_do_without_values_is_done_with_those_of_constants():
    with on_meta():
        mask = torch.zeros(2, 3, dtype=torch.bool)
        mask[1:] = True
        sparse = mask.to_sparse()
        assert sparse.is_meta and sparse.is_sparse and sparse.shape == (2, 3)
        with pytest.raises(NotImplementedError, match="Meta tensors"):
            torch.rand(2, 3).to_sparse()


@pytest.mark.parametrize(
    "moved",
    [
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x.to(device=torch.device("cpu")),
        lambda x: torch.linalg.qr(x.cpu())[0].to(None),
    ],
)
def test_what_is_drawn_and_moved_to_the_cpu_has_no_values_there_either(moved):
    with on_meta():
        found = moved(torch.randn(3, 3))
    assert found.is_meta and found.shape == (3, 3)


def test_what_is_moved_to_a_device_in_another_precision_has_that():
    with on_meta():
        assert torch.randn(3).to("cpu", torch.float64).dtype == torch.float64
        found = torch.randn(3).to("cpu", copy=True)
    assert found.is_meta


def test_a_module_that_moves_itself_to_a_device_is_built():
    class Moves(torch.nn.Linear):
        def __init__(self, device="cpu"):
            super().__init__(2, 3)
            self.register_buffer("drawn", torch.rand(2))
            self.to(device)

    with on_meta():
        for device in ("cpu", torch.device("cuda", 0)):
            made = Moves(device)
            assert made.weight.is_meta and made.bias.requires_grad and made.drawn.is_meta


@pytest.mark.parametrize("case", UNKNOWN)
def test_nothing_else_has_values(case):
    before = torch.get_rng_state()
    with on_meta(), pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        UNKNOWN[case]()
    assert torch.equal(torch.get_rng_state(), before)


def test_rates_of_stochastic_depth(tmp_path):
    source = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width, rate):
        super().__init__()
        self.rate = rate
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + (1 - self.rate) * self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        rates = [x.item() for x in torch.linspace(0, 0.1, depth)]
        self.blocks = nn.ModuleList([Block(8, rates[i]) for i in range(depth)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""
    schedule = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(2, 8)}


def schedule(s):
    s["blocks.*.up"].shard(["weight", "bias"], axis=0)
    s["blocks.*.down"].shard("weight", axis=1)
    s.infer_sync()
"""
    assert "ColumnParallelLinear(width, 4 * width)" in changed_lines(
        rewritten(tmp_path, source, schedule)
    )
