"""A submodule's `forward` written into its caller: names, arguments, numbers, what is refused."""

from __future__ import annotations

import json

import pytest

from slapo_rewrite.emit.write import write
from slapo_rewrite.verify.run import verify
from tests.rewriting import changed_lines, refused, rewritten

HEAD = """\
import torch
from torch import nn


class Act(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x, scale=2.0):
        return self.norm(x * scale).relu()


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.act = Act(4 * width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, residual, *, times=1, **kwargs):
        \"\"\"Not written in.\"\"\"
        y = self.up(x)
        y = self.act(y, scale=times)  # a comment of its own
        if times > 1:
            # seldom
            y = y / times
        y = self.dropout(self.down(y))
        return y + residual


"""
BLOCK = """\
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x, **kwargs):
        y = x + 1
        CALL
        return x * y


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""
SCHEDULE = """\
import torch


def model(m):
    return m.Net()


def inputs(model):
    return {"x": torch.randn(2, 8)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    blocks = s["blocks.*"]
"""
INLINE = '    blocks.inline("mlp")\n'


def source(call: str) -> str:
    return HEAD + BLOCK.replace("CALL", call)


def test_names_arguments_and_comments(tmp_path):
    text = changed_lines(
        rewritten(tmp_path, source("x = self.mlp(self.norm(x), x, times=3)"), SCHEDULE + INLINE)
    )
    assert text == (
        "-        x = self.mlp(self.norm(x), x, times=3)\n"
        "+        mlp_y = self.mlp.up(self.norm(x))\n"
        "+        mlp_y = self.mlp.act(mlp_y, scale=3)  # a comment of its own\n"
        "+        if 3 > 1:\n"
        "+            # seldom\n"
        "+            mlp_y = mlp_y / 3\n"
        "+        mlp_y = self.mlp.dropout(self.mlp.down(mlp_y))\n"
        "+        x = mlp_y + x\n"
    )


@pytest.mark.parametrize(
    ("call", "line"),
    [
        ("return y, self.mlp(x, residual=y)", "return y, mlp_y + y"),
        ("x = torch.tanh(self.mlp(x, y, **kwargs))", "x = torch.tanh(mlp_y + y)"),
        ("x = self.mlp(x, y.abs()) * 2", "residual = y.abs()"),
        ("x = self.mlp(x, y)", "mlp_y = self.mlp.act(mlp_y, scale=1)  # a comment of its own"),
    ],
)
def test_ways_to_call(tmp_path, call, line):
    schedule = SCHEDULE + INLINE
    if "**" in call:
        text = refused(tmp_path, source(call), schedule, "SR305")
        assert "`**` may lack `times`" in text
        call = call.replace("y, **", "y, times=1, **")
    assert f"+        {line}" in changed_lines(rewritten(tmp_path, source(call), schedule))


def test_arguments_are_computed_in_the_order_of_the_call(tmp_path):
    """They may draw random numbers."""
    call = "x = self.mlp(torch.rand_like(x), torch.rand_like(y))"
    text = changed_lines(rewritten(tmp_path, source(call), SCHEDULE + INLINE))
    assert text.splitlines()[1:4] == [
        "+        mlp_x = torch.rand_like(x)",
        "+        residual = torch.rand_like(y)",
        "+        mlp_y = self.mlp.up(mlp_x)",
    ]


def test_it_goes_on_inside_and_says_why(tmp_path):
    lines = INLINE + '    blocks.inline("mlp.act")\n'
    output = rewritten(tmp_path, source("x = self.mlp(x, x)"), SCHEDULE + lines)
    text = output.files["source_0.py"]
    assert "mlp_y = self.mlp.act.norm(mlp_y * 1).relu()" in text
    changes = json.loads(output.files["rewrite.json"])["changes"]
    lines = text.splitlines()
    shown = {
        line: change["directives"]
        for change in changes
        for line in lines[change["lines"][0] - 1 : change["lines"][1]]
    }
    assert shown["        mlp_y = self.mlp.up(x)"] == [0]
    assert [1] in shown.values()
    assert output.diff().startswith("--- original/")


@pytest.mark.processes
def test_numbers_with_what_else_is_asked(tmp_path):
    lines = """\
    blocks.inline("mlp")
    blocks["mlp.up"].shard(["weight", "bias"], axis=0)
    blocks["mlp.up"].sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather", axis=-1)
    blocks["mlp.down"].decompose()
    s["blocks"][:1].checkpoint()
"""
    output = rewritten(tmp_path, source("x = self.mlp(self.norm(x), x)"), SCHEDULE + lines)
    text = output.files["source_0.py"]
    assert "linear_product(mlp_y, self.mlp.down)" in text
    write(tmp_path / "out", output.files)
    assert verify(tmp_path / "out", (1, 2)).ok


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("y = self.up(x)", "if x is None:\n            return x\n        y = self.up(x)"),
         "it returns before its end"),
        (("y = self.up(x)", "y = super().forward(x)"), "it uses `super`"),
        (("y = self.up(x)", "y = (lambda z: self.up(z))(x)"), "it defines a function"),
        (("y = self.up(x)", "y = self.up(x) + kwargs['z']"), "the contents of `kwargs`"),
        (("    def forward(self, x, res", "    @torch.no_grad()\n    def forward(self, x, res"),
         "its `forward` is decorated"),
        (("x = self.mlp(x, x)", "x = x if y is None else self.mlp(x, x)"), "whether it is called"),
        (("x = self.mlp(x, x)", "x = torch.tanh(y) + self.mlp(x, x)"), "something else is called"),
        (("x = self.mlp(x, x)", "x = self.mlp(*[x, x])"), "it is called with `*`"),
        (("class Block", "MLP.forward = lambda self, x, res: x\n\n\nclass Block"),
         "or a call does more than `forward`"),
        (("x = self.mlp(x, x)", "for _ in (1, 2):\n            x = [self.mlp(x, x)][0]"), None),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, change, words):
    before, after = change
    text = source("x = self.mlp(x, x)").replace(before, after)
    if words is None:
        assert "mlp_y" in changed_lines(rewritten(tmp_path, text, SCHEDULE + INLINE))
        return
    shown = refused(tmp_path, text, SCHEDULE + INLINE, "SR305")
    assert words in shown and "source_0.py:" in shown and "s.py:" in shown


def test_all_that_share_the_text_are_selected(tmp_path):
    text = refused(
        tmp_path,
        source("x = self.mlp(x, x)"),
        SCHEDULE + '    s["blocks.0"].inline("mlp")\n',
        "SR305",
    )
    assert "`blocks.1` is a Block" in text


def test_what_is_not_called_any_more_is_not_scheduled(tmp_path):
    lines = INLINE + '    blocks["mlp"].sync("fwd_post", "all_reduce")\n'
    text = refused(tmp_path, source("x = self.mlp(x, x)"), SCHEDULE + lines, "SR306")
    assert "is inlined, so it is no longer called" in text
