"""A refusal's positions: where it is, what is related, and which statement caused it."""

from __future__ import annotations

import pytest

from slapo_rewrite.directive import Directive
from slapo_rewrite.errors import Span, Unsupported

HERE, THERE = Span("model.py", 3), Span("s.py", 7)


def directive(at: Span | None) -> Directive:
    return Directive(0, "shard", at, "s.shard()", ())


@pytest.mark.parametrize(
    ("cause", "also"),
    [
        (None, ()),
        (directive(THERE), (THERE,)),
        (directive(None), ()),
        ([], ()),
        ([directive(THERE), directive(HERE)], (THERE,)),
    ],
)
def test_who_asked_is_shown(cause, also):
    assert Unsupported("no", at=HERE, cause=cause).also == also


def test_what_is_not_known_is_left_out():
    error = Unsupported("no", also=[None, HERE], cause=directive(THERE))
    assert error.also == (HERE, THERE)
    assert "model.py:3" in error.render() and "s.py:7" in error.render()


def test_a_place_is_shown_once():
    assert Unsupported("no", at=HERE, also=[HERE, THERE], cause=directive(THERE)).also == (THERE,)


def test_a_caret_is_as_wide_as_what_stands_at_a_place_in_bytes():
    text = "é = f(ü, 1)"
    span = Span.of_bytes("net.py", (3, 5, 3, 13), text)
    assert text[span.column - 1 : span.column - 1 + span.width] == "f(ü, 1)"
    assert Span.of_bytes("net.py", (3, 5, 4, 1), text).width == 7  # it goes on below
