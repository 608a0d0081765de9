"""Makes modules of another class than the one that a value holds or looks up."""

from collections.abc import Callable
from functools import partial
from typing import Any


def with_class(
    maker: Callable[..., Any],
    original: type,
    other: type,
    otherwise: Callable[[Any], Any] = partial,
) -> Callable[..., Any]:
    """Makes `other` with the arguments of `maker` if that makes `original`.

    Else returns `otherwise(maker)`.
    """
    made = partial(maker)
    if made.func is not original:
        return otherwise(maker)  # type: ignore[no-any-return]
    return partial(other, *made.args, **made.keywords)


def as_subclass(made: Any, original: type, other: type) -> Any:
    """Turns a module of class `original` into one of `other`, a subclass with the same state.

    Modules of other classes are returned unchanged.
    """
    if type(made) is original:
        made.__class__ = other
    return made
