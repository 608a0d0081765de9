"""Slapo's `fork_rng`, on source: equal masks on all ranks by default, different ones inside."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.processes import run
from tests.rewriting import changed_lines, imported, refused, rewritten, written

SOURCE = """\
import torch
from torch import nn
from torch.nn import functional as F


class Drop(nn.Module):
    # What an author would say here.
    def forward(self, x):
        return F.dropout(x, p=0.5, training=self.training)


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.inner = Drop()
        self.down = nn.Linear(2 * width, width)
        self.outer = Drop()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        x = self.inner(torch.tanh(self.up(x)))
        return self.drop(self.outer(self.down(x)))


class Model(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.layers = nn.ModuleList([MLP(width) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x
"""

SCHEDULE = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(5, 6)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
"""


def step(path: Path, seed: int = 2):
    """Output, gradients and the random numbers after a step."""
    torch.manual_seed(seed)
    model = imported(path).Model()
    torch.manual_seed(3)
    x = torch.randn(5, 6, requires_grad=True)
    model(x).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters()), torch.rand(3)]


def steps(*paths: Path):
    return [step(path) for path in paths]


def steps_of_other_weights(*paths: Path):
    return [step(path, dist.get_rank()) for path in paths]


def path_of(folder: Path, schedule: str) -> Path:
    return written(folder, rewritten(folder, SOURCE, SCHEDULE + schedule))


@pytest.mark.processes
def test_masks_are_equal_by_default_and_differ_inside(tmp_path):
    fork = '    s["layers.*.inner"].fork_rng()\n'
    ckpt = '    s["layers"][:2].checkpoint()\n    s["layers.2.inner"].checkpoint()\n'
    paths = [
        path_of(tmp_path, "    pass\n"),
        path_of(tmp_path, fork),
        path_of(tmp_path, fork + ckpt),
        path_of(tmp_path, ckpt + fork),  # the order does not matter
        path_of(tmp_path, '    s["layers.*"].fork_rng()\n' + fork + ckpt),
        path_of(tmp_path, '    s["layers.*"].fork_rng()\n' + fork),
    ]
    first, second = run(steps, 2, *paths)
    plain, forked, *checkpointed, both, outer = zip(first, second, strict=True)

    def equal(one, other):
        return all(map(torch.equal, one, other))

    assert equal(*plain)
    for here, there in (forked, *checkpointed, both, outer):
        assert not any(map(torch.equal, here[:-1], there[:-1]))
        assert torch.equal(here[-1], there[-1])  # in step again
    for one, other in itertools.combinations((forked, *checkpointed), 2):
        assert equal(one[0], other[0]) and equal(one[1], other[1])
    assert equal(both[0], outer[0]) and equal(both[1], outer[1])
    # In a world of one it is as if nothing had been asked.
    original = step(tmp_path / "source_0.py")
    assert all(equal(step(path), original) for path in paths)


def test_a_class_that_wants_it_everywhere_is_decorated(tmp_path):
    output = rewritten(tmp_path, SOURCE, SCHEDULE + '    s["**.{inner,outer}"].fork_rng()\n')
    assert changed_lines(output) == "+from .rng import fork_rng\n+    @fork_rng()\n"
    assert (
        "    # What an author would say here.\n    @fork_rng()\n    def forward(self, x):\n"
        in output.files["source_0.py"]
    )
    assert set(output.files) >= {"rng.py", "tensor_parallel.py"}
    assert "loading.py" not in output.files
    assert "Shard" not in output.files["tensor_parallel.py"]


def test_some_instances_get_a_subclass(tmp_path):
    schedule = '    s["layers.*.inner"].fork_rng()\n    s["layers.*.drop"].fork_rng()\n'
    text = changed_lines(rewritten(tmp_path, SOURCE, SCHEDULE + schedule))
    assert "+class ForkedDrop(Drop):\n" in text and "+        self.inner = ForkedDrop()\n" in text
    assert "+class ForkedDropout(nn.Dropout):\n" in text
    assert "+        self.drop = ForkedDropout(0.5)\n" in text
    assert "self.outer" not in text


def test_with_a_checkpoint_it_is_inside(tmp_path):
    for lines in itertools.permutations(
        ('    s["layers.*.inner"].fork_rng()\n', '    s["layers.*.inner"].checkpoint()\n')
    ):
        text = changed_lines(rewritten(tmp_path, SOURCE, SCHEDULE + "".join(lines)))
        assert "+class CheckpointedForkedDrop(ForkedDrop):\n" in text
        assert "+        self.inner = CheckpointedForkedDrop()\n" in text


def test_subclasses_that_inherit_forward_stay_as_they_are(tmp_path):
    source = SOURCE.replace("class MLP", "class Other(Drop):\n    pass\n\n\nclass MLP").replace(
        "self.outer = Drop()", "self.outer = Other()"
    )
    schedule = SCHEDULE + '    s["layers.*.inner"].fork_rng()\n'
    text = changed_lines(rewritten(tmp_path, source, schedule))
    assert "+class ForkedDrop(Drop):\n" in text
    text = changed_lines(rewritten(tmp_path, source, schedule.replace("inner", "outer")))
    assert "+class ForkedOther(Other):\n" in text


def test_together_with_shards_of_some_instances(tmp_path):
    """A subclass that writes `forward` anew keeps the decorator."""
    schedule = """\
    s["layers.*"].fork_rng()
    s["layers.*.up"].shard(["weight", "bias"], axis=0)
    s["layers.*.down"].shard("weight", axis=1)
    s["layers.*.down"].sync("fwd_post", "all_reduce")
    s["layers.*.up"].sync("bwd_post", "all_reduce")
    s["layers"][0]["down"].decompose()
"""
    source = SOURCE.replace("self.drop(self.outer(self.down(x)))", "self.down(x)")
    text = rewritten(tmp_path, source, SCHEDULE + schedule).files["source_0.py"]
    variant = text.partition("class DecomposedMLP(MLP):")[2].partition("class Model")[0]
    assert "    @fork_rng()\n    def forward(self, x):\n" in variant


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ('s["layers"].fork_rng()', "SR305", 'select its elements: s["layers.*"].fork_rng()'),
        ('s["layers.*.{drop,*}"].fork_rng(1)', "SR206", "or a list of strings"),
        ('[s["layers.0.drop"].fork_rng() for _ in "ab"]', "SR305", "already"),
    ],
)
def test_refusals(line, code, words, tmp_path):
    assert words in refused(tmp_path, SOURCE, SCHEDULE + f"    {line}\n", code)


# Parts of seven features: of different sizes at every number of ranks.
UNEVEN = SOURCE.replace("2 * width", "width + 1")
SPLIT = """\
    s["layers.*.up"].shard(["weight", "bias"], axis=0)
    s["layers.*.up"].sync("bwd_post", "all_reduce")
    s["layers.*.down"].shard("weight", axis=1)
    s["layers.*.down"].sync("fwd_post", "all_reduce")
"""
# Four is what all world sizes divide that this allows: they divide twelve features as well.
EVEN_HEADS = '    s["layers.*"].shard("heads", axis=0)\n'
FORK_INNER = '    s["layers.*.inner"].fork_rng()\n'


def test_parts_of_different_sizes_are_warned_of(tmp_path):
    (warning,) = rewritten(tmp_path, UNEVEN, SCHEDULE + SPLIT).warnings
    assert "source_0.py:9: random numbers are drawn for a rank's part of `layers.*.up`" in warning
    assert "on 2 ranks these parts differ in size" in warning
    assert 's["layers.*.inner"].fork_rng(subgraph=...) of this line' in warning
    of_torch = UNEVEN.replace("self.inner = Drop()", "self.inner = nn.Dropout(0.5)")
    (warning,) = rewritten(tmp_path, of_torch, SCHEDULE + SPLIT).warnings
    assert warning.endswith('s["layers.*.inner"].fork_rng()')


@pytest.mark.parametrize(
    "drawn",
    [
        "torch.rand(x.shape)",
        "torch.randn(*x.size())",
        "torch.rand(x.shape[-1])",
        "x.new_empty(x.shape).bernoulli_(0.5)",
        "torch.empty_like(x).log_normal_()",
        "torch.empty_like(x).geometric_(0.5)",
        "F.gumbel_softmax(x, dim=0)",
        "torch.distributions.Normal(0, 1).sample(x.shape)",  # the small model alone is followed
    ],
)
def test_whatever_draws_for_a_part_is_noticed(drawn, tmp_path):
    """Of its sizes alone as well, and by names that are no operation's of torch."""
    text = UNEVEN.replace("F.dropout(x, p=0.5, training=self.training)", f"x * {drawn}")
    assert text.count(drawn) == 1
    (warning,) = rewritten(tmp_path, text, SCHEDULE + SPLIT).warnings
    assert "source_0.py:9: random numbers are drawn for a rank's part of `layers." in warning


@pytest.mark.parametrize("drawn", ["random.random()", "np.random.rand()"])
@pytest.mark.parametrize("use", ["if {} < 0.1:\n            return x", "x = {} * x"])
def test_what_torch_does_not_seed_is_warned_of(tmp_path, drawn, use):
    text = "import random\nimport numpy as np\n" + SOURCE
    text = text.replace(
        "        x = self.inner", f"        {use.format(drawn)}\n        x = self.inner"
    )
    assert drawn in text and not rewritten(tmp_path, text, SCHEDULE + "    pass\n").warnings
    warnings = rewritten(tmp_path, text, SCHEDULE + SPLIT).warnings
    words = f"`{drawn[:-2]}` draws random numbers, not from torch, that have to be"
    assert any(words in warning for warning in warnings)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        (UNEVEN, FORK_INNER),
        (UNEVEN, '    s["layers.*"].fork_rng(["inner"])\n'),
        (UNEVEN, '    s["layers.*.inner"].fork_rng(["F.dropout"])\n'),
        (UNEVEN.replace("p=0.5", "p=0.0"), ""),
        (SOURCE.replace("self.up =", "self.heads = 4\n        self.up ="), EVEN_HEADS),
    ],
)
def test_without_need_nothing_is_warned_of(source, lines, tmp_path):
    assert rewritten(tmp_path, source, SCHEDULE + SPLIT + lines).warnings == []


@pytest.mark.parametrize("fork", ["fork_rng()", 'fork_rng(["F.dropout"])'])
def test_where_nothing_is_split_a_fork_is_warned_of(fork, tmp_path):
    lines = f'    s["layers.*.inner"].{fork}\n'
    (warning,) = rewritten(tmp_path, SOURCE, SCHEDULE + lines).warnings
    assert "s.py:17: no layer is split, but each rank" in warning


@pytest.mark.parametrize(
    "fork",
    ['["layers.*"].fork_rng(["drop"])', '["layers.*.outer"].fork_rng()', '["layers.*"].fork_rng()'],
)
def test_numbers_for_whole_values_are_not_forked(fork, tmp_path):
    """Each rank would have another copy of the value, and of all gradients behind it."""
    text = refused(tmp_path, SOURCE, SCHEDULE + SPLIT + f"    s{fork}\n", "SR305")
    assert "for a value that is whole on every rank" in text


@pytest.mark.processes
def test_parts_of_different_sizes_need_it(tmp_path):
    paths = [
        written(tmp_path, rewritten(tmp_path, UNEVEN, SCHEDULE + SPLIT + lines))
        for lines in ("", FORK_INNER)
    ]
    (plain, forked), (other_plain, other_forked) = run(steps_of_other_weights, 2, *paths)
    assert not torch.equal(plain[-1], other_plain[-1])
    assert torch.equal(forked[-1], other_forked[-1])
