"""The one pass that applies edits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slapo_rewrite import errors
from slapo_rewrite.code.splice import Change, Edit, apply_edits
from slapo_rewrite.directive import Directive

CAUSE = (Directive(0, "shard", None, "s.shard()", ()),)


def test_lines_are_those_of_the_result():
    text = "a\nb\nc\n"
    edits = [Edit(2, 3, "B1\nB2", CAUSE, "two"), Edit(5, 5, "\nd", CAUSE, "one")]
    after, changes = apply_edits(text, edits)
    assert after == "a\nB1\nB2\nc\nd\n"
    assert [(c.first, c.last) for c in changes] == [(2, 3), (5, 5)]


def test_two_edits_of_one_place_conflict():
    edits = [Edit(0, 3, "x", CAUSE, "one"), Edit(2, 4, "y", CAUSE, "other")]
    with pytest.raises(errors.ConflictingEdits):
        apply_edits("abcdef", edits)


@given(st.text(alphabet="ab\n", max_size=40), st.data())
def test_what_is_between_edits_stays(text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    edits = [
        Edit(a, b, data.draw(st.text(alphabet="xy\n", max_size=4)), (), "")
        for a, b in zip(cuts[::2], cuts[1::2], strict=False)
    ]
    after, _ = apply_edits(text, edits)
    kept = "".join(
        text[a:b]
        for a, b in zip(
            [0, *(e.end for e in edits)], [*(e.start for e in edits), len(text)], strict=True
        )
    )
    assert "".join(c for c in after if c in "ab") == "".join(c for c in kept if c in "ab")
    assert len(after) == len(kept) + sum(len(e.text) for e in edits)


@pytest.mark.parametrize(
    ("text", "earlier", "edits", "lines"),
    [
        ("a\nb\nc\n", (2, 2), [(0, 0, "x\ny\n")], (4, 4)),  # lines above it
        ("a\nb\nc\n", (2, 2), [(3, 3, "\nx")], (2, 2)),  # behind its end
        ("a\n  b\nc\n", (2, 2), [(4, 4, "x\n  ")], (3, 3)),  # before it, at its column
        ("a\nb\nc\nd\n", (2, 3), [(3, 3, "\nx")], (2, 4)),  # inside
        ("a\nb\nc\nd\n", (2, 3), [(4, 5, "x\ny")], (2, 4)),  # in the place of its last line
        ("a\nb\nc\nd\n", (2, 3), [(0, 7, "x\ny\nz\nu")], (1, 4)),  # all of it
        ("a\nb\nc\n", (3, 3), [(0, 2, "")], (2, 2)),
        ("a\nb", (2, 2), [(0, 1, "x\ny")], (3, 3)),  # without a line break at the end
    ],
)
def test_lines_of_earlier_edits_move(text, earlier, edits, lines):
    before = [Change(*earlier, CAUSE, "before")]
    _, changes = apply_edits(text, [Edit(*edit, CAUSE, "now") for edit in edits], before)
    assert (changes[0].first, changes[0].last) == lines and changes[0].why == "before"


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_earlier_edits_are_followed_through_any_others(written, data):
    """Lines that are left alone stay theirs; `w` marks those that an edit wrote."""
    text = "".join(f"{'w' if mine else 'o'}{n}\n" for n, mine in enumerate(written))
    before = [Change(n + 1, n + 1, CAUSE, "") for n, mine in enumerate(written) if mine]
    edits = [
        Edit(3 * n, 3 * n + 2, "x\n" * data.draw(st.integers(0, 2)) + "x", (), "")
        for n, mine in enumerate(written)
        if not mine and data.draw(st.booleans())
    ]
    after, changes = apply_edits(text, edits, before)
    lines = after.split("\n")
    assert [lines[c.first - 1 : c.last] for c in changes] == [
        [f"w{n}"] for n, mine in enumerate(written) if mine
    ]
