"""Host time of tensor parallelism: the recorded figures, and that a measurement works."""

import pytest
from torch import nn

from benchmark import host_time, report


def test_figures_are_those_of_the_result_file():
    text = host_time.table(report.read(host_time.NAME))
    assert report.marked(host_time.NAME, text) in report.README.read_text()


def test_a_step_costs_the_host_little_more_than_the_originals():
    for name, row in report.read(host_time.NAME)["models"].items():
        most = 2.1 if "sequence" in name else 1.4
        assert all(row[f"at {world}"] < most for world in host_time.WORLDS), name


@pytest.mark.parametrize("is_sliced", [False, True])
def test_what_is_timed_is_split_and_computes_the_same(tmp_path, is_sliced):
    """Else `measure` stops."""
    found = host_time.measure("llama", is_sliced, tmp_path, rounds=1, steps=1)
    assert found.keys() == {"original ms", *(f"at {world}" for world in host_time.WORLDS)}


def test_something_else_is_not_timed():
    whole, other = (nn.Linear(8, 8) for _ in range(2))
    with pytest.raises(RuntimeError, match="one of 2 ranks holds"):
        host_time.check_is_split(other, whole, 2)
