"""Modules made by a `functools.partial` that came in as a value, of another class."""

from collections.abc import Callable
from functools import partial
from typing import Any


def with_class(
    maker: Callable[..., Any], original: type, other: type
) -> Callable[..., Any]:
    """What makes `other` with all that `maker` gives, if that makes `original`; else `maker`."""
    made = partial(maker)
    if made.func is not original:
        return maker
    return partial(other, *made.args, **made.keywords)
