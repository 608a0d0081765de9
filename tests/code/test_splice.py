"""The one pass that applies edits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slapo_rewrite import errors
from slapo_rewrite.code.splice import Edit, apply_edits
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
