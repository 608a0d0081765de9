"""Work grows linearly with the number of a schedule's statements."""

import gc
import time

import pytest

from tests.rewriting import rewritten

SOURCE = """\
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
"""
SCHEDULE = """\
import torch


def model(m):
    return m.Net()


def inputs(model):
    return {"x": torch.ones(2, 4)}


def schedule(s):
"""


@pytest.fixture
def few_objects():
    """Collections look at what a test makes, not at all that earlier tests have left."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.long
@pytest.mark.usefixtures("few_objects")
def test_ten_times_the_statements_take_at_most_ten_times_as_long(tmp_path):
    def seconds(count: int) -> float:
        lines = [
            f'    s["layers.{n % 12}"].annotate("weight", "k{n}", {n})\n' for n in range(count)
        ]
        started = time.process_time()
        output = rewritten(tmp_path, SOURCE, SCHEDULE + "".join(lines))
        assert f"k{count - 1}" in output.files[output.model_file]
        return time.process_time() - started

    seconds(1)
    hundred, thousand = (min(seconds(count) for _ in range(3)) for count in (100, 1000))
    assert thousand < 10 * hundred
