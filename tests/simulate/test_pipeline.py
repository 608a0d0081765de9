"""Simulated steps: the formula for equal stages, and properties of all stages."""

import math
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slapo_rewrite.simulate.hardware import Link
from slapo_rewrite.simulate.pipeline import Stage, simulate

SECONDS = st.floats(0.001, 10)
STAGES = st.lists(
    st.builds(
        Stage,
        forward=SECONDS,
        backward=SECONDS,
        sent=st.floats(0, 100),
        optimizer=st.floats(0, 1),
    ),
    min_size=1,
    max_size=6,
)
LINKS = st.builds(Link, latency=st.floats(0, 0.5), bandwidth=st.floats(10, 1000))
BATCHES = st.integers(1, 12)


@pytest.mark.parametrize("forward, backward", [(1.0, 2.0), (3.0, 1.0)])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 16, 40])
def test_equal_stages_have_the_bubble_of_the_formula(stages, micro_batches, forward, backward):
    step = simulate([Stage(forward, backward)] * stages, micro_batches)
    assert step.seconds == pytest.approx((micro_batches + stages - 1) * (forward + backward))
    assert step.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    live = [min(micro_batches, stages - number) for number in range(stages)]
    assert [timeline.live for timeline in step.stages] == live


@pytest.mark.long
def test_a_large_pipeline_takes_seconds():
    start = time.process_time()
    step = simulate([Stage(1, 2)] * 128, 512)
    assert time.process_time() - start < 6  # 1.5 where nothing else runs
    assert step.bubble == pytest.approx(127 / 639, abs=1e-4)


def test_transfers_are_waited_for():
    # One micro-batch through two stages: forward, over, forward and backward, back, backward.
    step = simulate([Stage(1, 2, sent=100), Stage(3, 4)], 1, pipeline=Link(0.5, 50))
    assert step.seconds == 1 + 2.5 + 3 + 4 + 2.5 + 2
    assert [e.what for e in step.stages[0].events] == [
        "forward", "activation", "gradient", "backward", "optimizer",
    ]  # fmt: skip
    assert step.bubble == pytest.approx((7 + 3 - 1) / (2 * 15) + (2 - 1) / (2 * 15))


@settings(deadline=None, max_examples=50)
@given(STAGES, BATCHES, LINKS)
def test_never_faster_than_the_work_of_a_stage(stages, micro_batches, link):
    step = simulate(stages, micro_batches, pipeline=link)
    rounding = 1 + 1e-9
    for stage in stages:
        work = micro_batches * (stage.forward + stage.backward) + stage.optimizer
        assert work <= step.seconds * rounding
    # The first micro-batch comes through all stages and back.
    there_and_back = sum(s.forward + s.backward for s in stages)
    there_and_back += sum(2 * link.send(s.sent) for s in stages[:-1])
    assert there_and_back <= step.seconds * rounding
    assert step.seconds <= sum(timeline.busy for timeline in step.stages) * rounding


@settings(deadline=None, max_examples=50)
@given(STAGES, BATCHES, LINKS, st.data())
def test_nothing_gets_faster_when_something_costs_more(stages, micro_batches, link, data):
    number = data.draw(st.integers(0, len(stages) - 1))
    what = data.draw(st.sampled_from(["forward", "backward", "sent", "optimizer"]))
    dearer = list(stages)
    dearer[number] = replace(stages[number], **{what: getattr(stages[number], what) + 1})
    before = simulate(stages, micro_batches, pipeline=link)
    assert before.seconds <= simulate(dearer, micro_batches, pipeline=link).seconds + 1e-9
    more = simulate(stages, micro_batches + 1, pipeline=link)
    assert before.seconds <= more.seconds + 1e-9


@settings(deadline=None, max_examples=50)
@given(STAGES, BATCHES, LINKS)
def test_a_stage_does_one_thing_after_the_other_and_each_once(stages, micro_batches, link):
    step = simulate(stages, micro_batches, pipeline=link)
    for timeline in step.stages:
        ends = [0.0, *(event.end for event in timeline.events)]
        assert all(end <= e.start for end, e in zip(ends, timeline.events, strict=False))
        for what in ("forward", "backward"):
            numbers = [event.number for event in timeline.events if event.what == what]
            assert numbers == list(range(micro_batches))
    for sender, receiver in zip(step.stages, step.stages[1:], strict=False):
        for what in ("activation", "gradient"):
            sent = [e for e in sender.events if e.what == what and e in receiver.events]
            assert {event.number for event in sent} == set(range(micro_batches))
    assert 0 <= step.bubble < 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: simulate([], 1),
        lambda: simulate([Stage(1, 1)], 0),
        lambda: Stage(-1, 1),
        lambda: Stage(1, math.nan),
        lambda: Link(0, 0),
        lambda: Link(-1),
    ],
)
def test_what_cannot_be_is_refused(make):
    with pytest.raises(ValueError):
        make()


def test_the_package_needs_neither_torch_nor_deepspeed_to_be_imported():
    script = (
        "import sys\n"
        "from slapo_rewrite.simulate import balance, hardware, pipeline\n"
        "print({'torch', 'deepspeed'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
