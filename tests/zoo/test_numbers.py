"""Numbers of models whose text the neighbouring tests check, in one start of processes."""

from __future__ import annotations

import pytest

from tests.marks import long
from tests.numbers import Case, compare, prepare
from tests.processes import run
from tests.zoo import test_attention, test_norms, test_stand_in

SLID = Case(
    test_attention.slid("token"),
    test_attention.SCHEDULE + test_attention.THREE + test_attention.ROW,
)
CASES = test_norms.CASES | test_stand_in.CASES | {"slid": SLID}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("zoo")
    prepare(path, CASES)
    return path


@pytest.mark.processes
@pytest.mark.parametrize("world", [long(1), 2, long(4)])
def test_the_numbers_of_the_whole_model(folder, world):
    """Of the 22 features of a norm four ranks have 6, 6, 5 and 5."""
    run(compare, world, folder, CASES)
