"""Which statements of a stage ran, if one value stands in for another."""

from __future__ import annotations

import pytest

from slapo_rewrite.stages.dry_run import all_ran, lines_run

BRANCH = "if first:\n    y = x + 1\nelse:\n    y = 0"
LOOP = "y = 0\nfor n in range(count):\n    if n:\n        y = x"


@pytest.mark.parametrize(
    ("text", "given", "ran"),
    [
        (BRANCH, {"first": True, "x": 1}, True),
        (BRANCH, {"first": False, "x": 1}, False),
        (LOOP, {"count": 2, "x": 3}, True),
        (LOOP, {"count": 1, "x": 3}, False),
    ],
)
def test_a_read_counts_where_the_run_came_to_it(text, given, ran):
    scene = dict(given)
    assert all_ran(text, "x", lines_run(text, scene)) is ran
    expected = dict(given)
    exec(text, expected)
    assert scene["y"] == expected["y"]
