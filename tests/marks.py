"""Which cases of a test `make test` leaves to `make test-all`, and that to `make test-release`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def long(*values: Any) -> Any:
    """Further cases of what others hold already."""
    return pytest.param(*values, marks=pytest.mark.long)


def release(*values: Any) -> Any:
    """Further cases that take long, and are seldom the first that break."""
    return pytest.param(*values, marks=pytest.mark.release)


def all_but(short: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Cases, of which those that are not among `short` are long."""
    cases = list(cases)
    assert all(case in cases for case in short), short
    return [case if case in short else long(case) for case in cases]
