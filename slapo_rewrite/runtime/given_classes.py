"""Makes modules of another class than the one in a given `functools.partial`."""

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
