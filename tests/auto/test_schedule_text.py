"""The text of schedules that `--schedule auto` writes."""

import pytest

from slapo_rewrite.auto.schedule_text import schedule_text
from slapo_rewrite.auto.shard_groups import Found, Group, Shard, rows_of


def written(*groups: Group) -> list[str]:
    """The lines of `schedule` that split, and what is said of them."""
    text = schedule_text("A model", "", Found(groups, {}), {"layers": ""}, (), False, "")
    body = text.partition("if tensor_parallel:\n")[2].partition("s.infer_sync()")[0]
    return [line.strip() for line in body.splitlines()]


def test_what_is_split_alike_stands_in_one_line_wherever_it_is():
    stacks = ("down.*.0", "down.*.1", "mid1", "mid2", "up.*.0", "up.*.1", "last")
    group = Group(
        (
            *(Shard(f"{stack}.{name}", ("weight",), 0) for stack in stacks for name in ("a", "b")),
            *(Shard(f"{stack}.c", ("weight",), 1) for stack in stacks),
        ),
        summed=stacks,
    )
    assert [line for line in written(group) if line.startswith("s[")] == [
        's["{down,up}.*.{0,1}.{a,b}"].shard("weight", axis=0)',
        's["{mid1,mid2,last}.{a,b}"].shard("weight", axis=0)',
        's["{down,up}.*.{0,1}.c"].shard("weight", axis=1)',
        's["{mid1,mid2,last}.c"].shard("weight", axis=1)',
        's["{down,up}.*.{0,1}"].sync("bwd_post", "all_reduce")',
        's["{mid1,mid2,last}"].sync("bwd_post", "all_reduce")',
    ]


@pytest.mark.parametrize(
    ("split", "rows"),
    [
        (["words", "head"], "words of the vocabulary"),
        (["words", "places", "head"], "words of the vocabulary, and as many rows of other tables"),
        (["head"], "outputs"),  # of classes, say
        (["labels", "head"], "outputs, and as many rows of other tables"),
        (["labels"], "rows of the table"),
        (["words", "labels"], "rows of each table"),
    ],
)
def test_words_are_spoken_of_where_a_head_gives_a_number_for_each(split, rows):
    assert rows_of(split, ["words", "places", "labels"], ["words"]) == rows


def test_a_pair_in_a_sequence_is_no_lone_layer():
    pair = Group((Shard("net.0", ("weight",), 0), Shard("net.2", ("weight",), 1)))
    assert "split by outputs, then by inputs" in written(pair)[0]
    lone = Group((Shard("net.0", ("weight",), 0), Shard("net.2", ("weight",), 0)))
    assert "their results are joined" in written(lone)[0]


def test_groups_that_are_alike_but_for_numbers_are_said_once():
    stages = [
        Group(
            (
                Shard(f"stages.{n}.*.up", ("weight", "bias"), 0),
                Shard(f"stages.{n}.*.down", ("weight",), 1),
            ),
            summed=(f"stages.{n}.*.up",),
            parameters=10 * n,
        )
        for n in (11, 3, 2)
    ]
    other = Group((Shard("stages.2.*.gate", ("weight",), 0),), parameters=5)
    again = Group((Shard("stages.3.*.gate", ("weight",), 0),), parameters=4)
    said, *lines = filter(None, written(*stages, other, again))
    assert said.startswith("# 160 parameters: split by outputs")
    assert lines == [
        's["stages.{2,3,11}.*.up"].shard(["weight", "bias"], axis=0)',
        's["stages.{2,3,11}.*.down"].shard("weight", axis=1)',
        's["stages.{2,3,11}.*.up"].sync("bwd_post", "all_reduce")',
        "# 9 parameters: their results are joined.",
        's["stages.{2,3}.*.gate"].shard("weight", axis=0)',
    ]
