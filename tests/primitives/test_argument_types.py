"""Argument types in signatures of primitives, including those that users add."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import pytest

from slapo_rewrite import errors
from slapo_rewrite.primitives.base import check_types


def plain(a, b=1): ...


def typed(
    size: float = 1.0,
    names: Sequence[str] = (),
    each: Sequence = (),
    of: Mapping[str, int] | None = None,
    how: Literal["a", "b"] = "a",
    make: type | Callable[..., Any] = int,
) -> None: ...


RIGHT = {"size": 2.0, "names": ["x"], "each": [1, "x"], "of": None, "how": 3, "make": print}


def test_what_is_not_annotated_may_be_anything():
    check_types("plain", plain, {"a": [], "b": "x"})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("size", "x", "must be a float"),
        ("names", [1], "must be a list of strings"),
        ("names", "xy", "must be a list of strings"),
        ("each", 1, "must be a list, not 1"),
        ("of", [], "must be a dictionary"),
        ("make", "int", "must be a class or a function"),
    ],
)
def test_other_types_are_refused_in_words(name, value, words):
    check_types("typed", typed, RIGHT)
    with pytest.raises(errors.BadArgument, match=words):
        check_types("typed", typed, {**RIGHT, name: value})
