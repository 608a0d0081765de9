"""How verification starts its ranks in tests."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from slapo_rewrite.verify import launch
from tests.warm import FORKING


@pytest.fixture(scope="session", autouse=True)
def _ranks_are_forked() -> Iterator[None]:
    """Forks the ranks from a process that has torch imported, instead of starting interpreters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "subprocess", FORKING)
        yield


@pytest.fixture
def new_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts ranks as verification does outside of tests."""
    monkeypatch.setattr(launch, "subprocess", subprocess)
