"""What gets to the next stage without being a tensor of the backward pass."""

import pytest
import torch
from torch import nn

from slapo_rewrite.runtime.torch_pipeline import SameSizes
from tests.rewriting import refused, rewritten

SOURCE = """\
import torch
from torch import nn
from torch.nn import functional as F


class Patches(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.projection = nn.Conv2d(3, width, 2, stride=2)

    def forward(self, image):
        x = self.projection(image)
        return x.flatten(2).transpose(1, 2).contiguous(), {size}


class Angles(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0, 1, width))

    def forward(self, x):
        angles = (x * self.scale).detach()
        return {angles}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, size, angles):
        grid = x.unflatten(1, {grid})
        x = self.linear(grid.flip(1).flatten(1, 2))
        return x * angles[0] + angles[1]


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.patches = Patches(width)
        self.angles = Angles(width)
        self.layers = nn.ModuleList([Block(width) for _ in range(4)])
        self.last = nn.Linear(width, 1)

    def forward(self, image, y):
        x, size = self.patches(image)
        angles = self.angles(x)
        for layer in self.layers:
            x = layer(x, size, angles)
        return F.mse_loss(self.last(x).mean(1), y)
"""
SCHEDULE = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"image": torch.randn(2, 3, 6, 10), "y": torch.randn(2, 1)}


def schedule(s):
    s["layers"][0].cut_pipeline_stage(target="torch")
    s["layers"][2].cut_pipeline_stage(target="torch")
"""
PAIR = "angles.cos(), angles.sin()"
SIZES = "tuple(x.shape[2:])"


def source(size: str = SIZES, angles: str = PAIR, grid: str = "size") -> str:
    return SOURCE.format(size=size, angles=angles, grid=grid)


def pipeline(text: str) -> str:
    """The stages' `forward`, without what stands around them."""
    return text[text.index("class ModelStage0") : text.index("STAGES =")]


def test_numbers_go_as_a_shape_and_tuples_in_parts(tmp_path):
    text = pipeline(rewritten(tmp_path, source(), SCHEDULE).files["pipeline.py"])
    first, middle, last = text.split("class ModelStage")[1:]
    assert (
        """\
        angles_0, angles_1 = angles
        return x, x.new_zeros(size), angles_0, angles_1
"""
        in first
    )
    assert (
        """\
    def forward(self, x, size, angles_0, angles_1, **_):
        # Only tensors are sent, so numbers come as the shape of one.
        size = tuple(size.shape)
        angles = (angles_0, angles_1)
        for layer in self.layers[1:3]:
            x = layer(x, size, angles)
        return x, x.new_zeros(size), angles_0, angles_1
"""
        in middle
    )
    assert "size = tuple(size.shape)\n" in last and "= size\n" not in last


@pytest.mark.parametrize(
    ("size", "grid", "received"),
    [
        ("x.shape[2:]", "size", "size = size.shape\n"),
        ("list(x.shape[2:])", "size", "size = list(size.shape)\n"),
        ("x.shape[2]", "(size, -1)", "size = size.shape[0]\n"),
        ("(x.shape[2],)", "(*size, -1)", "size = tuple(size.shape)\n"),
        (
            "(1, *x.shape[2:])",
            "size[1:]",
            "size = (size_0, size_1, size_2)\n",
        ),
        (
            "((x.shape[2], x.shape[3]), [x.shape[3]])",
            "(size[0][0], *size[1])",
            "size = (size_0, size_1)\n",
        ),
    ],
)
def test_each_kind_of_numbers_comes_as_what_it_was(size, grid, received, tmp_path):
    text = rewritten(tmp_path, source(size, grid=grid), SCHEDULE).files["pipeline.py"]
    assert received in pipeline(text)


@pytest.mark.parametrize(
    ("angles", "read", "received"),
    [
        (f"[{PAIR}]", "angles[1]", "angles = [angles_0, angles_1]\n"),
        ("[angles.cos()]", "angles[0]", "angles = [angles_0]\n"),
        ("(angles.cos(),)", "angles[0]", "angles = (angles_0,)\n"),
    ],
)
def test_tensors_come_as_what_they_were_in(angles, read, received, tmp_path):
    text = source(angles=angles).replace("+ angles[1]", f"+ {read}")
    assert received in pipeline(rewritten(tmp_path, text, SCHEDULE).files["pipeline.py"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": "(x.shape[2], int(1 + (x > 0.4).sum() % 3))", "grid": "(size[0], -1)"}, "data"),
        ({"size": "(x.shape[2], int(image.sum().abs()) + 1)", "grid": "(size[0], -1)"}, "data"),
        ({"size": "(x.shape[2], 'rows')", "grid": "(size[0], -1)"}, "no tensor"),
        ({"size": "(x.shape[2], self.projection)", "grid": "(size[0], -1)"}, "no tensor"),
        ({"size": "(x.shape[2], -1)"}, "no tensor"),
        ({"size": "(x.shape[2], 10.0 / 2)", "grid": "(size[0], -1)"}, "no tensor"),
        ({"size": "{'rows': x.shape[2]}", "grid": "(size['rows'], -1)"}, "no tensor"),
        ({"angles": "(angles.cos(), angles > 0)"}, "no tensor"),
    ],
)
def test_what_looks_like_it_and_cannot_be_sent(given, message, tmp_path):
    text = refused(tmp_path, source(**given), SCHEDULE, "SR310")
    assert "is needed after the cut and cannot get there" in text and message in text
    assert "= help: " in text


def test_one_list_by_two_names_is_not_sent_as_two(tmp_path):
    """What a later stage writes to one of them would not be in the other."""
    text = source(angles="[angles.cos(), angles.sin()]").replace(
        "        for layer in",
        "        angles, same = self.twice(angles)\n        for layer in",
    )
    text = text.replace("    def forward(self, image, y)", TWICE).replace(
        "        return F.mse", "        angles[0] = x\n        return F.mse"
    )
    text = text.replace("self.last(x)", "self.last(same[0])")
    assert "the stages do not compute" in refused(tmp_path, text, SCHEDULE, "SR310")


TWICE = """\
    def twice(self, angles):
        return angles, [angles, self.last][0]

    def forward(self, image, y)"""


def test_deepspeed_sends_neither_numbers_nor_floats_without_gradient(tmp_path):
    schedule = SCHEDULE.replace('target="torch"', "")
    text = refused(tmp_path, source(), schedule, "SR310")
    assert "`size` is needed after the cut and cannot get there" in text
    assert rewritten(tmp_path, source(), SCHEDULE)


def test_what_a_stage_changed_is_sent_as_it_is_by_then(tmp_path):
    lines = """\
            x = layer(x, size, angles)
            size = (size[1], size[0])
            angles = (angles[1], angles[0])
"""
    text = source().replace("            x = layer(x, size, angles)\n", lines)
    found = pipeline(rewritten(tmp_path, text, SCHEDULE).files["pipeline.py"])
    assert found.count("angles_0, angles_1 = angles\n") == 2
    assert found.count("x.new_zeros(size)") == 2


def test_sizes_that_a_batch_changes_are_not_sent():
    linear = nn.Linear(2, 2)
    linear.register_forward_hook(SameSizes())
    linear(torch.ones(3, 2)), linear(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="`Linear` hands on tensors of"):
        linear(torch.ones(4, 2))
