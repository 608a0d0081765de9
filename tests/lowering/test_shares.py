"""Slices by fractions: written as a share of the constructor's count, right at every depth."""

from __future__ import annotations

import ast
import math
from fractions import Fraction

import pytest

from slapo_rewrite.changes.elements import Region, membership, spans
from slapo_rewrite.directive import Share, depth_of
from tests.numbers import Case, compare, prepare
from tests.processes import run
from tests.rewriting import changed_lines, imported, rewritten, written

HEAD = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Config:
    def __init__(self, depth):
        self.depth, self.kinds = depth, ["block"] * depth


class Stack(nn.Module):
    def __init__(self, config):
        super().__init__()
        {init}

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""

SCHEDULE = """\
import torch


def model(m):
    return m.Stack(m.Config(8))


def inputs(model):
    return {{"x": torch.randn(2, 8)}}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    blocks = s["blocks"]
    {lines}
"""
LIST = "self.blocks = nn.ModuleList([Block(8) for _ in range(config.depth)])"
FIRST_HALF = "blocks[:0.5].checkpoint()"


def said(output, lines):
    """What is warned of but for the forks, which have to be: the models here split nothing."""
    forks = [each for each in output.warnings if "no layer is split" in each]
    assert len(forks) == lines.count("fork_rng")
    return [each for each in output.warnings if each not in forks]


def outcome(folder, init, lines=FIRST_HALF):
    source = HEAD.replace("{init}", "\n        ".join(init.splitlines()))
    schedule = SCHEDULE.format(lines="\n    ".join(lines.splitlines()))
    return rewritten(folder, source, schedule)


def classes(folder, output, depth):
    """The blocks' classes, by one letter for each that another class is derived from."""
    module = imported(written(folder, output))
    made = module.Stack(module.Config(depth)).blocks
    return "".join(type(b).__name__.replace("Block", "")[:2] or "-" for b in made)


@pytest.mark.parametrize(
    ("init", "test"),
    [
        (LIST, "i < config.depth // 2"),
        (
            "depth = config.depth\nself.blocks = nn.ModuleList(Block(8) for i in range(depth))",
            "i < depth // 2",
        ),
        (
            "self.blocks = nn.ModuleList([Block(8) for kind in config.kinds])",
            "i < len(config.kinds) // 2",
        ),
        (
            "self.blocks = nn.ModuleList([Block(8) for i, _ in enumerate(config.kinds)])",
            "i < len(config.kinds) // 2",
        ),
        (
            "self.blocks = nn.ModuleList([Block(8) for i in range(0, config.depth - 1 + 1)])",
            "i < (config.depth - 1 + 1) // 2",
        ),
        (
            "self.blocks = nn.ModuleList()\n"
            "for n in range(len(config.kinds)):\n"
            "    self.blocks.append(Block(8))",
            "n < len(config.kinds) // 2",
        ),
    ],
)
def test_what_counts_the_elements(tmp_path, init, test):
    output = outcome(tmp_path, init)
    assert f"if {test} else" in " ".join(output.files[output.model_file].split())
    assert not output.warnings
    for depth in (1, 2, 5, 8, 13):
        assert classes(tmp_path, output, depth) == "".join(
            "Ch"[: 2 * (i < depth // 2)] or "-" for i in range(depth)
        )


@pytest.mark.parametrize(
    ("lines", "tests"),
    [
        ("blocks[0.5:].checkpoint()", ["i >= config.depth // 2"]),
        ("blocks[0.25:0.75].checkpoint()", ["config.depth // 4 <= i < 3 * config.depth // 4"]),
        ("blocks[:0.35].checkpoint()", ["i < 7 * config.depth // 20"]),
        (f"blocks[:{1 / 3!r}].checkpoint()", ["i < config.depth // 3"]),
        (
            "blocks[:0.25].checkpoint()\nblocks[0.75:].checkpoint()",
            ["i < config.depth // 4 or i >= 3 * config.depth // 4"],
        ),
        ("for block in blocks[:0.5]:\n    block.checkpoint()", ["i < config.depth // 2"]),
        ('blocks[:0.5]["linear"].checkpoint()', ["i < config.depth // 2"]),
        (
            "blocks[:0.5].checkpoint()\nblocks[:0.25].fork_rng()",
            ["i < config.depth // 4", "config.depth // 4 <= i < config.depth // 2"],
        ),
        ("blocks[:0.5].checkpoint()\ns['blocks.*'].fork_rng()", ["i < config.depth // 2"]),
    ],
)
def test_shares_of_several_kinds(tmp_path, lines, tests):
    output = outcome(tmp_path, LIST, lines)
    text = " ".join(output.files[output.model_file].split())
    for test in tests:
        assert f"if {test} else" in text
    assert not said(output, lines)


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 8, 13])
def test_two_primitives_with_other_shares_at_every_depth(tmp_path, depth):
    lines = "blocks[:0.5].checkpoint()\nblocks[0.25:].fork_rng()"
    module = imported(written(tmp_path, outcome(tmp_path, LIST, lines)))
    for i, block in enumerate(module.Stack(module.Config(depth)).blocks):
        names = " ".join(c.__name__ for c in type(block).__mro__)
        assert ("Checkpointed" in names) == (i < depth // 2)
        assert ("Forked" in names) == (i >= depth // 4)


@pytest.mark.parametrize("depth", [2, 3, 5, 8, 13])
@pytest.mark.parametrize(
    ("lines", "share"),
    [
        ("blocks[0].fork_rng()\nblocks[:0.5].checkpoint()", slice(0, 1)),
        ("blocks[0].fork_rng()\nblocks[0.5:].checkpoint()", slice(1, 2)),
    ],
)
def test_a_first_element_that_is_another(tmp_path, depth, lines, share):
    """Selected by number, as what comes in is divided there, beside a share that is recomputed."""
    output = outcome(tmp_path, LIST, lines)
    assert not said(output, lines)
    assert "if i == 0" in changed_lines(output) and "config.depth // 2" in changed_lines(output)
    module = imported(written(tmp_path, output))
    meant = [*range(depth)][slice(*(depth * n // 2 for n in (share.start, share.stop)))]
    for i, block in enumerate(module.Stack(module.Config(depth)).blocks):
        names = " ".join(c.__name__ for c in type(block).__mro__)
        assert ("Forked" in names) == (i == 0)
        assert ("Checkpointed" in names) == (i in meant)


SPLIT = """\
blocks[0.4:]["linear"].shard(["weight", "bias"], axis=0)
blocks[0.4:]["linear"].sync("fwd_post", "all_gather", axis=-1)
s.infer_sync()
blocks[:0.75].checkpoint()
"""


@pytest.mark.parametrize("world", [1, 2, 4])
def test_numbers_at_another_depth(tmp_path, world):
    """Rewritten for 8 blocks, run with 5: two whole, three split, and three checkpointed."""
    schedule = SCHEDULE.format(lines="\n    ".join(SPLIT.splitlines()))
    schedule += "\n\ndef verify_model(m):\n    return m.Stack(m.Config(5))\n"
    case = {"shares": Case(HEAD.replace("{init}", LIST), schedule)}
    prepare(tmp_path, case)
    text = (tmp_path / "shares_out" / "shares_original.py").read_text()
    assert "if i < 2 * config.depth // 5" in text
    assert "if i >= 3 * config.depth // 4" in text
    run(compare, world, tmp_path, case)


@pytest.mark.parametrize(
    ("init", "lines", "reason"),
    [
        (LIST, "blocks[:0.5].checkpoint()\nblocks[:3].fork_rng()", "by number or name as well"),
        (LIST, "blocks[:0.5].checkpoint()\nblocks[:4].fork_rng()", "by number or name as well"),
        (LIST, "blocks[:0.5].checkpoint()\nblocks['1'].fork_rng()", "by number or name as well"),
        (LIST, "blocks[:0.5].fork_rng()\nblocks[0].checkpoint()", "by number or name as well"),
        (
            LIST,
            "blocks[:0.125].checkpoint()\nblocks[0].fork_rng()",
            "a share holds only the first element",
        ),
        (
            LIST,
            "blocks[:0.5].checkpoint()\nblocks[0.51:].fork_rng()",
            "different shares select the same of 8 elements",
        ),
        (
            "blocks = [Block(8) for _ in range(config.depth)]\n"
            "self.blocks = nn.ModuleList(blocks + [Block(8)])",
            FIRST_HALF,
            "nothing here says how many elements there are",
        ),
        (
            "kinds = iter(config.kinds)\nself.blocks = nn.ModuleList([Block(8) for _ in kinds])",
            FIRST_HALF,
            "nothing here says how many elements there are",
        ),
    ],
)
def test_what_is_not_known_is_written_by_number_and_said(tmp_path, init, lines, reason):
    output = outcome(tmp_path, init, lines)
    assert "//" not in changed_lines(output)
    (warning,) = said(output, lines)
    assert "written as a fixed list of element numbers" in warning
    assert reason in warning and "source_0.py:" in warning


TWO = HEAD.replace(
    "class Config:",
    """class Wide(Block):
    pass


KINDS = {"block": Block, "wide": Wide}


class Config:""",
).replace('["block"] * depth', '["wide" if i % 4 == 1 else "block" for i in range(depth)]')
OF_TWO = """\
self.blocks = nn.ModuleList()
for i, kind in enumerate(config.kinds):
    chosen = KINDS[kind]
    self.blocks.append(chosen(8))"""


@pytest.mark.parametrize(
    ("init", "called"),
    [
        (OF_TWO, "chosen"),
        (
            OF_TWO.replace("    chosen = KINDS[kind]\n", "").replace("chosen", "KINDS[kind]"),
            "KINDS[kind]",
        ),
        (OF_TWO.replace("KINDS[kind]", "KINDS.get(kind)"), "chosen"),
    ],
)
@pytest.mark.parametrize(
    ("lines", "also", "which"),
    [
        (FIRST_HALF, " and i < 4", lambda i, n: i < 4),
        ("blocks[:].checkpoint()", "", lambda i, n: True),
        ("blocks[2].checkpoint()", " and i == 2", lambda i, n: i == 2),
    ],
)
def test_a_class_that_is_a_value_tells_which_it_is(tmp_path, init, called, lines, also, which):
    source = TWO.replace("{init}", "\n        ".join(init.splitlines()))
    output = rewritten(tmp_path, source, SCHEDULE.format(lines=lines))
    text = " ".join(output.files[output.model_file].split())
    assert f"if {called} is Block{also} else" in text
    assert ["as a fixed list of element numbers" in each for each in output.warnings] == [True] * (
        lines == FIRST_HALF
    )
    module = imported(written(tmp_path, output))
    for kinds in (["block"] * 4, ["wide"] * 5, ["wide", "block", "wide", "wide"]):
        config = module.Config(0)
        config.kinds = kinds
        made = [type(b).__name__ for b in module.Stack(config).blocks]
        # Of a class that is not scheduled at all, the output has no other.
        known = {"block"} if "[2]" in lines else {"block", "wide"}
        wanted = [k in known and which(i, len(kinds)) for i, k in enumerate(kinds)]
        assert [name.startswith("Checkpointed") for name in made] == wanted
        assert [name.removeprefix("Checkpointed").lower() for name in made] == kinds


MINE = """\
import torch
from torch import nn


class Mine(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))
"""


@pytest.mark.parametrize(
    ("lines", "tests", "wanted"),
    [
        ('s["blocks.{0,2}"].replace(Mine)', ["i % 2 == 0"], ["Mine", "Wide", "Wide", "Block"]),
        (  # several changes of one class
            "blocks[0].checkpoint()\n    blocks[2].fork_rng()",
            ["i == 0", "i == 2"],
            ["CheckpointedBlock", "Wide", "Wide", "Block"],
        ),
    ],
)
def test_what_replaces_a_class_that_is_a_value_goes_by_it(tmp_path, lines, tests, wanted):
    source = TWO.replace("{init}", "\n        ".join(OF_TWO.splitlines()))
    schedule = SCHEDULE.replace("import torch\n", MINE, 1).replace("Config(8)", "Config(4)")
    output = rewritten(tmp_path, source, schedule.format(lines=lines))
    text = " ".join(output.files[output.model_file].split())
    assert [f"if chosen is Block and {test} else" in text for test in tests] == [True] * len(tests)
    module = imported(written(tmp_path, output))
    config = module.Config(0)
    config.kinds = ["block", "wide", "wide", "block"]
    assert [type(b).__name__ for b in module.Stack(config).blocks] == wanted


def test_a_number_that_is_written_out_needs_no_share(tmp_path):
    output = outcome(tmp_path, "self.blocks = nn.ModuleList([Block(8) for _ in range(8)])")
    assert "if i < 4 else" in changed_lines(output)
    assert not output.warnings


def test_a_list_that_is_written_out_needs_no_share(tmp_path):
    init = "self.blocks = nn.ModuleList([Block(8), Block(8)])"
    output = outcome(tmp_path, init)
    assert "[CheckpointedBlock(8), Block(8)]" in changed_lines(output)
    assert not output.warnings


def test_a_share_that_takes_none_or_all_is_said(tmp_path):
    output = outcome(tmp_path, LIST, "blocks[:0.1].checkpoint()\nblocks[0.1:].fork_rng()")
    none, every = said(output, "fork_rng")
    assert "`blocks[:0.1]` takes none of 8 modules" in none and "s.py:18" in none
    assert "`blocks[0.1:]` takes all of 8 modules" in every
    assert not outcome(tmp_path, LIST, "blocks[:0.0].checkpoint()").warnings


def test_attributes_of_a_share(tmp_path):
    init = "self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(config.depth)])"
    output = outcome(tmp_path, init, 'blocks[0.25:0.5].annotate("weight", "kind", "hidden")')
    chosen = "self.blocks[len(self.blocks) // 4 : len(self.blocks) // 2]"
    assert f"for module in {chosen}:" in changed_lines(output)
    assert not output.warnings
    module = imported(written(tmp_path, output))
    made = module.Stack(module.Config(12)).blocks
    assert [hasattr(b.weight, "kind") for b in made] == [3 <= i < 6 for i in range(12)]


def test_a_small_model_of_the_schedules_own_that_is_too_small_is_said(tmp_path):
    schedule = SCHEDULE.format(lines="blocks[:0.25].checkpoint()")
    schedule += "\n\ndef verify_model(m):\n    return m.Stack(m.Config(2))\n"
    (warning,) = rewritten(tmp_path, HEAD.replace("{init}", LIST), schedule).warnings
    assert "`blocks[:0.25]` takes none of the 2 modules" in warning and "build 4 or more" in warning


@pytest.mark.parametrize("length", range(1, 41))
@pytest.mark.parametrize("share", ["1/2", "1/3", "3/4", "7/20", "29/100"])
def test_the_text_is_what_the_selection_takes(length, share):
    """The same numbers in the schedule and in the output, whatever the length."""
    end = Fraction(share)
    first, rest = Share("x", Fraction(0), end), Share("x", end, Fraction(1))
    assert [*first.elements(length), *rest.elements(length)] == list(range(length))
    regions = [Region(s.start, s.stop, frozenset(s.elements(100))) for s in (first, rest)]
    count = ast.parse("length", mode="eval").body
    for each in (first, rest):
        text = membership("i", set(each.elements(100)), range(100), regions, count)
        assert [i for i in range(length) if eval(text, {"i": i, "length": length})] == [
            *each.elements(length)
        ]
    assert math.floor(end * length) == len(first.elements(length))


@pytest.mark.parametrize(
    ("indices", "made", "text"),
    [
        ([0], range(4), "i == 0"),
        ([0, 1, 2], range(6), "i < 3"),
        ([4, 5], range(6), "i >= 4"),
        ([2, 3], range(6), "2 <= i < 4"),
        ([0, 2, 4], range(6), "i % 2 == 0"),
        ([1, 4, 7], range(9), "i % 3 == 1"),
        ([0, 2, 4], range(12), "i in (0, 2, 4)"),
        ([0, 1, 5], range(6), "i in (0, 1, 5)"),
        ([0, 1, 3, 4, 5], range(6), "i != 2"),
        ([0, 1, 3, 4, 5], range(9), "i < 6 and i != 2"),
        ([4, 5, 7, 8, 10, 11], range(12), "i >= 4 and i not in (6, 9)"),
        # Where another place in the source makes the other elements.
        ([4, 5, 6, 7], range(4, 12), "i < 8"),
        ([6, 7], range(4, 8), "i >= 6"),
        ([1, 3, 5], range(1, 14, 2), "i < 6"),
        ([1, 5, 9], range(1, 14, 2), "i in (1, 5, 9)"),
        ([1, 5, 9, 13], range(1, 14, 2), "i % 4 == 1"),
    ],
)
def test_by_number(indices, made, text):
    assert membership("i", set(indices), made, [], None) == text
    assert [i for i in made if eval(text)] == indices


def test_how_long_a_list_must_be():
    half, quarter = Share("x", Fraction(0), Fraction(1, 2)), Share("x", Fraction(3, 4), Fraction(1))
    assert depth_of([]) == depth_of([half]) == 2
    assert depth_of([half, quarter]) == 3
    assert depth_of([Share("x", Fraction(0), Fraction(1, 4))]) == 4


def test_elements_that_a_site_does_not_make_go_with_their_neighbours():
    ends = [Fraction(n, 4) for n in range(5)]
    numbers = [frozenset({0}), frozenset(), frozenset({2}), frozenset()]
    regions = [Region(a, b, n) for a, b, n in zip(ends, ends[1:], numbers, strict=False)]
    assert spans({0}, regions) == [(0, Fraction(1, 2))]
    assert spans({2}, regions) == [(Fraction(1, 2), 1)]
