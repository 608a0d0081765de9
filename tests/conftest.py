"""Fixtures of all tests."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from slapo_rewrite.verify import launch, run
from tests.made import Made
from tests.warm import Shared

# What a user printed before is not for tests, nor theirs for the user.
os.environ["SLAPO_REWRITE_CACHE"] = "0"
# How long an example takes depends on what else the machine does.
settings.register_profile("any load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any load")
# Seeding takes down the stack for each kind of device that is not there: some ms in a test.
if not torch.accelerator.is_available():
    torch.manual_seed = torch.default_generator.manual_seed
# With a million objects of torch and transformers in memory, looking for garbage is dear.
gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keeps what pytest makes of the tests, for the next run, also where no bytecode is kept.

    To have each assertion say what it compared takes seconds, in each of several processes.
    """
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = before


@pytest.fixture(scope="session", autouse=True)
def _ranks_are_forked() -> Iterator[None]:
    """Forks the ranks of all verifications from one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "ForkServer", Shared)
        yield


@pytest.fixture
def own_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts ranks as verification does outside of tests."""
    monkeypatch.setattr(run, "ForkServer", launch.ForkServer)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """What gives outputs that other tests may have asked for already."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    (folder / "made").mkdir(exist_ok=True)
    return Made(folder / "made")
