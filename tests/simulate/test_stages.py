"""Stages made from a model's costs."""

from dataclasses import replace

import pytest

from benchmark.element_costs import Cost
from benchmark.split_stages import Share, Split, Tie, made_of, step_of
from slapo_rewrite.simulate.hardware import Device, Link
from slapo_rewrite.simulate.pipeline import Stage

DEVICE = Device(flops=100, bandwidth=10)
LINK = Link()
COSTS = [
    Cost({"table": 40}, flops=0, moved=20, moved_whole=20, held=2, held_whole=2, sent=8),
    Cost({"a": 100}, 200, moved=30, moved_whole=10, held=50, held_whole=10, given=8, sent=8),
    Cost({"b": 100}, 200, moved=30, moved_whole=10, held=50, held_whole=10, given=8, sent=8),
    Cost({"table": 40}, 400, moved=60, moved_whole=20, held=30, held_whole=10, given=8, sent=99),
]


def test_a_stage_is_the_sum_of_its_elements():
    (first, last), ties = made_of(COSTS, [2, 4], DEVICE)
    assert first.stage == Stage(2 + 2 + 3, 2 * (2 + 2 + 3), sent=8)
    assert last.stage == Stage(2 + 3 + 4 + 6, 2 * (2 + 3 + 4 + 6), sent=0)
    assert (first.held, last.held) == (52, 80)
    assert (first.parameters, last.parameters) == (140, 140)
    assert ties == [Tie(40, (0, 1))]
    assert made_of(COSTS, [4], DEVICE)[0][0].parameters == 240
    assert not made_of(COSTS, [4], DEVICE)[1]


def test_ranks_share_everything_but_what_is_whole():
    split = Split(4, Link(latency=0.25, bandwidth=8), reductions=[1, 2, 2, 0])
    (share,), _ = made_of(COSTS, [4], DEVICE, split=split)
    reduction = 0.25 + 8 * 2 * 3 / 4 / 8
    work = 800 / 4 / 100 + (60 + 80 / 4) / 10
    assert share.stage.forward == pytest.approx(work + 5 * reduction)
    assert share.stage.backward == pytest.approx(2 * work + 5 * reduction)
    assert share.held == 32 + 100 / 4
    assert share.parameters == 60
    _, (tie,) = made_of(COSTS, [1, 4], DEVICE, split=split)
    assert tie == Tie(10, (0, 1))


def test_what_is_recomputed_is_not_held():
    (held,), _ = made_of(COSTS, [4], DEVICE)
    (again,), _ = made_of(COSTS, [4], DEVICE, recomputes=True)
    assert again.stage.forward == held.stage.forward
    assert again.stage.backward == held.stage.backward + held.stage.forward
    assert again.held == 3 * 8
    assert (held.working, again.working) == (0, 50)  # one element at a time
    bare = replace(again, parameters=0)
    step = step_of([bare, bare], [], 4, DEVICE, pipeline=LINK, data=LINK)
    assert step.memory == [2 * 24 + 50, 24 + 50]


def test_ties_are_summed_by_the_stages_that_hold_them_once_all_have_come():
    stages = [Share(Stage(1, 1)), Share(Stage(1, 1)), Share(Stage(1, 1), parameters=50)]
    alone, tied = (
        step_of(stages, ties, 2, Device(1, 360), pipeline=Link(0, 10), data=LINK)
        for ties in ([], [Tie(100, (0, 2))])
    )
    optimizer, summed, way_back = 2 * 50 * 18 / 360, 100 * 4 * 2 * (2 - 1) / 2 / 10, 2
    assert alone.seconds == (2 + 3 - 1) * 2 - way_back + optimizer  # the last stage's
    assert tied.seconds == (2 + 3 - 1) * 2 + summed + optimizer
    assert tied.bubble == pytest.approx(1 - (3 * 4 + 2 * 40 + 5) / (3 * tied.seconds))


def test_replicas_sum_the_gradients_and_share_the_states():
    share = Share(Stage(1, 1), parameters=10, held=7)
    alone, four = (
        step_of([share], [], 1, DEVICE, pipeline=LINK, data=Link(0.5, 20), replicas=replicas)
        for replicas in (1, 4)
    )
    assert alone.seconds == 2 + 2 * 10 * 18 / 10
    summed, gathered = 0.5 + 10 * 4 * 2 * 3 / 4 / 20, 0.5 + 10 * 2 * 3 / 4 / 20
    assert four.seconds == pytest.approx(2 + summed + 2 * 10 * 9 / 10 + gathered)
    assert [step.memory for step in (alone, four)] == [[10 * 18 + 7], [10 * 9 + 7]]


def test_each_element_has_its_number_of_reductions():
    with pytest.raises(ValueError):
        made_of(COSTS, [4], DEVICE, split=Split(2, Link(), [2]))
