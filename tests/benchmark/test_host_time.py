"""What tensor parallelism costs the host: the figures, and that a measurement works."""

import pytest

from benchmark import host_time, report


def test_figures_are_those_of_the_result_file():
    text = host_time.table(report.read(host_time.NAME))
    assert report.marked(host_time.NAME, text) in report.README.read_text()


def test_a_step_costs_the_host_little_more_than_the_originals():
    for name, row in report.read(host_time.NAME)["models"].items():
        most = 2.1 if "sequence" in name else 1.4
        assert all(row[f"at {world}"] < most for world in host_time.WORLDS), name


@pytest.mark.parametrize("is_sliced", [False, True])
def test_a_measurement_works(tmp_path, is_sliced):
    found = host_time.measure("llama", is_sliced, tmp_path, rounds=1, steps=1)
    assert all(found[f"at {world}"] > 0 for world in host_time.WORLDS)
