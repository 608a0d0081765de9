"""Our step and other ways to split a model: the figures that do not depend on the machine."""

import pytest

from benchmark import report, tensor_parallel
from benchmark.tensor_parallel import OURS, PEERS, Size
from tests.marks import long

RESULTS = report.read(tensor_parallel.NAME)


@pytest.mark.release
@pytest.mark.processes
@pytest.mark.parametrize("size", [long(Size(2, 64, 2, 16))], ids=lambda size: size.name)
def test_all_compute_the_same_and_ours_sends_least(size):
    """The ranks themselves check that the losses are equal and all models are split."""
    found = tensor_parallel.measure(size, rounds=1)
    ours = found[OURS]
    assert {*found} >= {OURS, *PEERS}
    for name in PEERS:
        assert ours["collectives"] < found[name]["collectives"], name
        assert ours["collective bytes"] < found[name]["collective bytes"], name
        assert ours["share of the parameters"] <= found[name]["share of the parameters"], name


@pytest.mark.parametrize("size", tensor_parallel.SIZES, ids=lambda size: size.name)
def test_ours_is_ahead_in_the_result_file(size):
    found = RESULTS["sizes"][size.name]
    assert all(found[name]["cpu seconds over ours"] > 1 for name in PEERS)
    assert all(found[name]["seconds over ours"] > 1 for name in PEERS)


def test_what_the_readme_says_of_small_layers():
    """It takes less than half of the host's time of the two that it names."""
    small, _ = tensor_parallel.SIZES
    found = RESULTS["sizes"][small.name]
    dtensors = [name for name in PEERS if "tp_plan" in name or "parallelize_module" in name]
    assert len(dtensors) == 2
    assert all(found[name]["cpu seconds over ours"] > 2 for name in dtensors)


def test_the_table_is_that_of_the_result_file():
    text = tensor_parallel.table(RESULTS)
    assert report.marked(tensor_parallel.NAME, text) in report.README.read_text()
