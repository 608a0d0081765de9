"""Cuts into stages: the best there is, and no worse than DeepSpeed's."""

import warnings
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slapo_rewrite.simulate.balance import stage_ends
from slapo_rewrite.simulate.hardware import hardware, step_seconds
from tests.simulate.shapes import SHAPES


def sums(costs, ends) -> list[float]:
    return [sum(costs[start:end]) for start, end in pairwise([0, *ends])]


def measure(costs, ends) -> tuple[float, float]:
    """The dearest stage, and how much they differ."""
    stages = sums(costs, ends)
    return max(stages), sum(stage**2 for stage in stages)


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.integers(1, 9))
def test_no_cut_is_better(costs, n):
    if n > len(costs):
        with pytest.raises(ValueError):
            stage_ends(costs, n)
        return
    ends = stage_ends(costs, n)
    assert len(ends) == n and ends[-1] == len(costs)
    assert all(start < end for start, end in pairwise([0, *ends]))
    cuts = combinations(range(1, len(costs)), n - 1)
    assert measure(costs, ends) == min(measure(costs, [*cut, len(costs)]) for cut in cuts)


@given(st.lists(st.floats(0, 1e-3), min_size=1, max_size=30), st.integers(1, 30))
def test_fractions_are_cut_too(costs, n):
    ends = stage_ends(costs, min(n, len(costs)))
    assert len(ends) == min(n, len(costs)) and ends[-1] == len(costs)
    assert sorted(set(ends)) == ends and ends[0] > 0


def test_the_dearest_stage_comes_first_and_evenness_second():
    # Cut as [2, 3, 4], the stages differ less, and the dearest is dearer.
    assert stage_ends([1, 8, 6, 2], 3) == [1, 2, 4]


def test_equal_elements_make_equal_stages():
    assert stage_ends([1] * 24, 4) == [6, 12, 18, 24]
    assert stage_ends([1] * 10, 4) in ([2, 4, 7, 10], [3, 6, 8, 10], [2, 5, 7, 10], [2, 5, 8, 10])
    # What the head leaves to the other stages is shared among them evenly.
    assert stage_ends([1] * 6 + [10], 3) == [3, 6, 7]


@pytest.mark.parametrize("costs", [[1, -1], [1, float("nan")], [float("inf")], []])
def test_what_is_not_a_cost_is_refused(costs):
    with pytest.raises(ValueError):
        stage_ends(costs, 1)


@pytest.mark.parametrize("name", SHAPES)
def test_no_worse_than_deepspeed(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its imports use what torch will take away
        from deepspeed.runtime.utils import partition_balanced, partition_uniform
    costs = SHAPES[name].costs()
    seconds = step_seconds(costs, hardware("h200").device)
    parameters = [sum(cost.parameters.values()) for cost in costs]
    for n in (2, 3, 4, 8):
        dearest = max(sums(seconds, stage_ends(seconds, n)))
        uniform = max(sums(seconds, partition_uniform(len(seconds), n)[1:]))
        by_parameters = max(sums(seconds, partition_balanced(parameters, n)[1:]))
        assert dearest <= min(uniform, by_parameters) * (1 + 1e-9)
        assert dearest < max(uniform, by_parameters)  # where one differs, the other may be as good
