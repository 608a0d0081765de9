"""Random numbers inside and outside of `fork_rng`, on the ranks of real gloo groups."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from slapo_rewrite.runtime.rng import fork_rng
from slapo_rewrite.runtime.tensor_parallel import rank
from tests.processes import run


def draw():
    return torch.rand(4)


def check_where_numbers_differ():
    """What the ranks draw before, inside (nested too) and after, in the order of the list."""
    torch.manual_seed(5)
    drawn = [draw()]
    with fork_rng():
        drawn.append(draw())
        torch.rand(3 + rank())  # a part of uneven size
        with fork_rng():
            drawn.append(draw())
        drawn.append(draw())
    drawn.append(draw())
    with fork_rng():
        drawn.append(draw())
    try:
        with fork_rng():
            raise KeyError
    except KeyError:
        drawn.append(draw())
    return drawn


@pytest.mark.processes
@pytest.mark.parametrize("world", [2, 4])
def test_numbers_differ_inside_and_nowhere_else(world):
    by_rank = run(check_where_numbers_differ, world)
    inside = [False, True, True, True, False, True, False]
    for number, differs in enumerate(inside):
        distinct = {tuple(drawn[number].tolist()) for drawn in by_rank}
        assert len(distinct) == (world if differs else 1), number
    for drawn in by_rank:  # no region repeats another
        assert len({tuple(numbers.tolist()) for numbers in drawn}) == len(inside)


def test_a_world_of_one_goes_on_as_without_it():
    torch.manual_seed(5)
    with fork_rng():
        forked = draw(), draw()
    torch.manual_seed(5)
    assert torch.equal(torch.stack(forked), torch.stack([draw(), draw()]))


class Inner(nn.Module):
    """Dropout on this rank's numbers between dropouts on everyone's."""

    def __init__(self, checkpoint_part):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.dropout = nn.Dropout(0.5)
        self.checkpoint_part = checkpoint_part

    @fork_rng()
    def forked(self, x):
        if self.checkpoint_part:
            return checkpoint(self.part, x, use_reentrant=False)
        return self.part(x)

    def part(self, x):
        with fork_rng():
            x = self.dropout(torch.tanh(x))
        return self.dropout(torch.sin(x))

    def forward(self, x):
        x = self.dropout(self.up(x))
        return self.dropout(self.down(self.forked(x)))


def gradients(checkpoint_part, checkpoint_whole):
    torch.manual_seed(3)
    model, x = Inner(checkpoint_part), torch.randn(5, 6, requires_grad=True)
    torch.manual_seed(7)
    y = checkpoint(model, x, use_reentrant=False) if checkpoint_whole else model(x)
    y = model.dropout(y)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters()), draw()]


def check_recomputation():
    want = gradients(False, False)
    for case in [(True, False), (False, True), (True, True)]:
        for have, expected in zip(gradients(*case), want, strict=True):
            assert torch.equal(have, expected), case
    return want


@pytest.mark.processes
def test_recomputation_draws_the_same_numbers():
    check_recomputation()
    first, second = run(check_recomputation, 2)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[-1], second[-1])
