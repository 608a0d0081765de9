"""Calls that change nothing in their selection cause a warning with their position."""

from __future__ import annotations

import pytest

from slapo_rewrite.primitives.shard import MLP, MODEL
from tests.rewriting import rewritten

SPLIT = """\
def schedule(s):
    s["up"].shard(["weight", "bias"], axis=0)
    s["up"].sync("bwd_post", "all_reduce")
    s["down"].shard("weight", axis=1)
    s["down"].sync("fwd_post", "all_reduce")
"""


def warnings_of(folder, calls):
    """What a schedule with some calls is warned of, behind the line that each is about."""
    schedule = MODEL + calls
    lines = schedule.splitlines()
    for each in rewritten(folder, MLP, schedule).warnings:
        where, _, words = each.partition(": ")
        yield lines[int(where.rpartition(":")[2]) - 1].strip(), words


@pytest.mark.parametrize("call", ["s.infer_sync()", 's["up"].infer_sync()'])
def test_a_call_without_effect_is_warned_of(call, tmp_path):
    [(line, words)] = warnings_of(tmp_path, f"def schedule(s):\n    {call}\n")
    assert line == call
    assert words == f"`{call}` changes nothing"


@pytest.mark.parametrize(
    "calls",
    [
        SPLIT,
        SPLIT + "    s.infer_sync()\n",  # all stand there, which it checks
        SPLIT.replace('s["up"].sync("bwd_post", "all_reduce")', "s.infer_sync()"),
        'def schedule(s):\n    s["up"].sync("fwd_post", "RR->RR")\n',  # says that it is whole
        'def schedule(s):\n    s["up"].annotate("weight", "tag", 1)\n',
        'def schedule(s):\n    s["up"].checkpoint()\n',
    ],
)
def test_other_calls_are_not(calls, tmp_path):
    assert not [*warnings_of(tmp_path, calls)]
