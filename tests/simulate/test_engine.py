"""Simulated steps against steps of DeepSpeed's own engine, on stages of known cost."""

import pytest

from tests.simulate.engine import MessageClock, compared


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("count", [2, 4])
def test_a_step_takes_as_long_as_it_is_said_to(count):
    rows = compared(count, micro_batches=4, steps=2, clock=MessageClock)
    for row in rows:
        assert row.predicted == pytest.approx(row.measured, rel=1e-9), row
    # The formula for equal stages would not do.
    assert any(row.formula > 1.1 * row.measured for row in rows)
