"""Changes of single elements of nested lists that one statement in two loops makes."""

from __future__ import annotations

import pytest
import torch

from tests.rewriting import changed_lines, imported, refused, rewritten, written

HEAD = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, stages=3, depth=2, width=6):
        super().__init__()
"""
LOOPS = {
    "statements": """\
        stages_made = []
        for i in range(stages):
            blocks = []
            for j in range(depth):
                blocks.append(Block(width))
            stages_made.append(nn.ModuleList(blocks))
        self.stages = nn.ModuleList(stages_made)
""",
    "comprehensions": """\
        self.stages = nn.ModuleList(
            [nn.ModuleList([Block(width) for j in range(depth)]) for i in range(stages)]
        )
""",
}
UNCOUNTED = """\
        self.stages = nn.ModuleList()
        for size in [width] * stages:
            self.stages.append(nn.ModuleList([Block(size) for j in range(depth)]))
"""
TAIL = """
    def forward(self, x):
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return x
"""
SCHEDULE = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(4, 6)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
"""


def lines(folder, loops: str, body: str) -> tuple[str, str]:
    output = rewritten(folder, HEAD + loops + TAIL, SCHEDULE + body)
    model = imported(written(folder, output)).Model()
    kinds = {p: type(m).__name__ for p, m in model.named_modules() if p.count(".") == 2}
    asked = {p for p, kind in kinds.items() if kind == "CheckpointedBlock"}
    return " ".join(sorted(asked)), changed_lines(output)


@pytest.mark.parametrize("loops", LOOPS)
@pytest.mark.parametrize(
    ("selected", "test", "changed"),
    [
        ("stages.1.*", "if i == 1", "stages.1.0 stages.1.1"),
        ("stages.{1,2}.*", "if i >= 1", "stages.1.0 stages.1.1 stages.2.0 stages.2.1"),
        ("stages.*.1", "if j == 1", "stages.0.1 stages.1.1 stages.2.1"),
    ],
)
def test_the_loop_that_tells_them_apart_is_asked(tmp_path, loops, selected, test, changed):
    asked, text = lines(tmp_path, LOOPS[loops], f'    s["{selected}"].checkpoint()\n')
    assert asked == changed
    assert test in text


@pytest.mark.parametrize("loops", LOOPS)
def test_what_no_loop_tells_apart_is_refused(tmp_path, loops):
    schedule = SCHEDULE + '    s["stages.1.0"].checkpoint()\n'
    text = refused(tmp_path, HEAD + LOOPS[loops] + TAIL, schedule, "SR103")
    assert "no single loop around this expresses" in text


def test_an_outer_loop_that_counts_nothing_is_refused(tmp_path):
    schedule = SCHEDULE + '    s["stages.1.*"].checkpoint()\n'
    text = refused(tmp_path, HEAD + UNCOUNTED + TAIL, schedule, "SR103")
    assert "nothing counts them" in text and "enumerate" in text


def test_an_outer_loop_that_counts_from_one_is_refused(tmp_path):
    loops = LOOPS["statements"].replace("range(stages)", "range(1, stages + 1)")
    schedule = SCHEDULE + '    s["stages.1.*"].checkpoint()\n'
    refused(tmp_path, HEAD + loops + TAIL, schedule, "SR103")


@pytest.mark.parametrize(
    "made",
    [
        "[Block(width) for n in range(6) if n % 2]",
        "[Block(width)] * stages + [Block(width) for n in range(1, stages)]",
    ],
)
def test_a_loop_whose_turns_are_not_the_elements_is_refused(tmp_path, made):
    source = f"{HEAD}        self.stages = nn.ModuleList({made})\n{TAIL}".replace(
        "            for block in stage:\n                x = block(x)", "            x = stage(x)"
    )
    schedule = SCHEDULE + '    s["stages"][::2].checkpoint()\n'
    assert "nothing counts them" in refused(tmp_path, source, schedule, "SR103")


@pytest.mark.parametrize(
    "made",
    [
        "blocks.insert(0, Block(width))",
        "blocks.pop(0)",
        "del blocks[1]",
        "blocks[0], blocks[1] = blocks[1], blocks[0]",
        "blocks = reversed(blocks)",
    ],
)
def test_elements_that_are_moved_after_they_are_counted_are_refused(tmp_path, made):
    asked = "replace(Other)" if "insert" in made else "checkpoint()"
    block = HEAD[HEAD.index("class Block") :].partition("class Model")[0]
    other = f"from torch import nn\n\n\n{block.replace('Block', 'Other')}"
    lines = ["blocks = [Block(width) for _ in range(4)]", made]
    lines += ["self.stages = nn.ModuleList(blocks)"]
    source = HEAD + "".join(f"        {line}\n" for line in lines) + TAIL
    source = source.replace(
        "            for block in stage:\n                x = block(x)", "            x = stage(x)"
    )
    schedule = f'{other}{SCHEDULE}    s["stages.0"].{asked}\n    s["stages.2"].{asked}\n'
    text = refused(tmp_path, source, schedule, "SR103")
    assert "nothing counts them" in text and "in the order of the list" in text


def test_elements_that_are_moved_among_many_alike_are_refused(tmp_path):
    # The first two of each kind are enough to build the output by: these are others.
    lines = ["blocks = [Block(width) for _ in range(8)]"]
    lines += ["blocks[3], blocks[6] = blocks[6], blocks[3]", "self.stages = nn.ModuleList(blocks)"]
    source = HEAD + "".join(f"        {line}\n" for line in lines) + TAIL
    source = source.replace(
        "            for block in stage:\n                x = block(x)", "            x = stage(x)"
    )
    schedule = SCHEDULE + '    s["stages"][:4].checkpoint()\n'
    assert "nothing counts them" in refused(tmp_path, source, schedule, "SR103")


def test_numbers_of_one_split_stage(tmp_path):
    body = (
        '    s["stages.2.*.up"].shard(["weight", "bias"], axis=0)\n'
        '    s["stages.2.*.down"].shard("weight", axis=1)\n    s.infer_sync()\n'
    )
    output = rewritten(tmp_path, HEAD + LOOPS["statements"] + TAIL, SCHEDULE + body)
    model = imported(written(tmp_path, output)).Model()
    split = [p for p, m in model.named_modules() if type(m).__name__ == "ColumnParallelLinear"]
    assert split == ["stages.2.0.up", "stages.2.1.up"]
    x = torch.randn(2, 6)
    original = imported(tmp_path / "source_0.py").Model()
    original.load_state_dict(model.state_dict())
    assert torch.equal(model(x), original(x))
