"""Stages made of a model's costs."""

import pytest

from benchmark.element_costs import Cost
from benchmark.split_stages import Split, made_of
from slapo_rewrite.simulate.hardware import Device
from slapo_rewrite.simulate.links import Link
from slapo_rewrite.simulate.pipeline import Bytes, Tie, simulate

DEVICE = Device(flops=100, bandwidth=10)
COSTS = [
    Cost({"table": 40}, flops=0, moved=20, moved_whole=20, held=2, held_whole=2, sent=8),
    Cost({"a": 100}, 200, moved=30, moved_whole=10, held=50, held_whole=10, given=8, sent=8),
    Cost({"b": 100}, 200, moved=30, moved_whole=10, held=50, held_whole=10, given=8, sent=8),
    Cost({"table": 40}, 400, moved=60, moved_whole=20, held=30, held_whole=10, given=8, sent=99),
]


def test_a_stage_is_the_sum_of_its_elements():
    (first, last), ties = made_of(COSTS, [2, 4], DEVICE, memory=Bytes(2, 4, 12))
    assert (first.forward, first.backward) == (2 + 2 + 3, 2 * (2 + 2 + 3))
    assert (last.forward, last.backward) == (2 + 3 + 4 + 6, 2 * (2 + 3 + 4 + 6))
    assert (first.sent, last.sent) == (8, 0)
    assert (first.held, last.held) == (52, 80)
    assert (first.parameters, last.parameters) == (140, 140)
    assert ties == [Tie(40, (0, 1))]
    assert first.optimizer == pytest.approx(2 * 140 * 18 / 10)
    assert made_of(COSTS, [4], DEVICE)[0][0].parameters == 240
    assert not made_of(COSTS, [4], DEVICE)[1]


def test_ranks_share_everything_but_what_is_whole():
    split = Split(4, Link(latency=0.25, bandwidth=8), reductions=[1, 2, 2, 0])
    (stage,), _ = made_of(COSTS, [4], DEVICE, split=split)
    reduction = 0.25 + 8 * 2 * 3 / 4 / 8
    work = 800 / 4 / 100 + (60 + 80 / 4) / 10
    assert stage.forward == pytest.approx(work + 5 * reduction)
    assert stage.backward == pytest.approx(2 * work + 5 * reduction)
    assert stage.held == 32 + 100 / 4
    assert stage.parameters == 60
    _, (tie,) = made_of(COSTS, [1, 4], DEVICE, split=split)
    assert tie == Tie(10, (0, 1))


def test_what_is_recomputed_is_not_held():
    (held,), _ = made_of(COSTS, [4], DEVICE)
    (again,), _ = made_of(COSTS, [4], DEVICE, recomputes=True)
    assert again.forward == held.forward
    assert again.backward == held.backward + held.forward
    assert again.held == 3 * 8
    assert (held.working, again.working) == (0, 50)  # one element at a time
    step = simulate([again, again], 4, memory=Bytes(0, 0, 0))
    assert [timeline.memory for timeline in step.stages] == [2 * 24 + 50, 24 + 50]


def test_stages_can_be_run():
    stages, ties = made_of(COSTS, [2, 3, 4], DEVICE, replicas=2)
    link = Link(0.1, 50)
    step = simulate(stages, 8, pipeline=link, data=link, replicas=2, ties=ties)
    assert step.stages[0].seconds("ties") == pytest.approx(link.all_reduce(40 * 4, 2))
    assert [timeline.live for timeline in step.stages] == [3, 2, 1]


def test_each_element_has_its_number_of_reductions():
    with pytest.raises(ValueError):
        made_of(COSTS, [4], DEVICE, split=Split(2, Link(), [2]))
