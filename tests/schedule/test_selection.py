"""Selections: paths, stars, braces, indices, slices, regular expressions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slapo_rewrite import errors
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.model.sources import Sources
from slapo_rewrite.model.tree import Tree
from slapo_rewrite.schedule.load import ScheduleFile
from slapo_rewrite.schedule.plan import Plan
from slapo_rewrite.schedule.selection import Selection


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.ModuleDict({"q": nn.Linear(4, 4), "k": nn.Linear(4, 4)})
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.head = nn.Linear(4, 2)


@pytest.fixture
def s(tmp_path) -> Selection:
    path = tmp_path / "s.py"
    path.write_text("def model(m): ...\ndef schedule(s): ...\n")
    with torch.device("meta"):
        tree = Tree(Net())
    sources = Sources(SourceFile.read(path))
    return Selection(Plan(tree, ScheduleFile.load(str(path)), sources), [tree.root])


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("head", ["head"]),
        ("layers.1.attn.q", ["layers.1.attn.q"]),
        ("layers.*.attn.k", [f"layers.{i}.attn.k" for i in range(4)]),
        ("layers.*.attn.{q,k}", [f"layers.{i}.attn.{n}" for i in range(4) for n in "qk"]),
        ("layers.0.{attn.q,mlp.0}", ["layers.0.attn.q", "layers.0.mlp.0"]),
        ("**.q", [f"layers.{i}.attn.q" for i in range(4)]),
        ("layers.3.**.2", ["layers.3.mlp.2"]),
        ("h*", ["head"]),
        ("*.2.mlp", ["layers.2.mlp"]),
    ],
)
def test_paths(s, pattern, paths):
    assert s[pattern].paths == paths
    assert pattern in s


def test_relative_to_what_is_selected(s):
    assert s["layers.*"]["attn.q"].paths == s["layers.*.attn.q"].paths
    assert s["layers"]["0"]["mlp.0"].paths == ["layers.0.mlp.0"]


def test_indices_and_slices(s):
    layers = s["layers"]
    assert layers[0].paths == ["layers.0"]
    assert layers[-1].paths == ["layers.3"]
    assert layers[1:3].paths == ["layers.1", "layers.2"]
    assert layers[::2].paths == ["layers.0", "layers.2"]
    assert layers[:0].paths == [], "a slice may be empty, as a list's may"
    assert s["layers.*.mlp"][0].paths == [f"layers.{i}.mlp.0" for i in range(4)]


def test_slices_by_fractions_are_rounded_down(s):
    layers = s["layers"]
    assert layers[:0.5].paths == ["layers.0", "layers.1"]
    assert layers[0.5:].paths == ["layers.2", "layers.3"]
    assert layers[0.25:0.75].paths == ["layers.1", "layers.2"]
    assert layers[:0.74].paths == ["layers.0", "layers.1"]
    assert layers[: 3 * 0.25]["attn.q"].paths == [f"layers.{i}.attn.q" for i in range(3)]
    assert layers[:0].paths == layers[4:].paths == layers[-9:0].paths == []
    assert layers[9::-3].paths == ["layers.3", "layers.0"]
    assert layers[:0.0].paths == [] and layers[:1.0].paths == s["layers.*"].paths
    assert s["layers.*.mlp"][: 2 / 3].paths == [
        f"layers.{i}.mlp.{n}" for i in range(4) for n in "01"
    ]
    assert repr(layers[:0.5]) == '<s["layers"][:0.5]: 2 modules>'


@pytest.mark.parametrize(
    ("key", "why"),
    [
        (slice(-0.5, None), "from 0.0 to 1.0"),
        (slice(None, 1.5), "from 0.0 to 1.0"),
        (slice(0.75, 0.25), "must increase"),
        (slice(None, float("nan")), "from 0.0 to 1.0"),
        (slice(2, 0.5), "not both"),
        (slice(0.5, 4), "not both"),
        (slice(None, 0.5, 2), "has no step"),
        (slice(None, 4, 0.5), "has no step"),
    ],
)
def test_fractions_that_are_no_share(s, key, why):
    with pytest.raises(errors.BadArgument) as caught:
        s["layers"][key]
    assert why in str(caught.value) and "[:0.5]" in str(caught.value.hint)


def test_an_empty_slice_takes_primitives(s):
    s["layers"][:0].checkpoint()
    assert s["layers"][:0]["mlp"].paths == []


def test_match_is_on_the_whole_relative_path(s):
    assert s.match(r"layers\.\d\.attn\.[qk]").paths == s["layers.*.attn.{q,k}"].paths
    assert s["layers.0"].match("attn.q").paths == ["layers.0.attn.q"]
    with pytest.raises(errors.UnknownPath):
        s.match("attn.q")


def test_membership_iteration_length(s):
    assert "layers.9" not in s and "head.weight" not in s
    assert len(s["layers.*"]) == 4
    assert [one.paths for one in s["layers"][:2]] == [["layers.0"], ["layers.1"]]


def test_each_alternative_must_exist(s):
    with pytest.raises(errors.UnknownPath) as caught:
        s["layers.*.attn.{q,v}"]
    assert "`layers.*.attn.v`" in str(caught.value)


def test_selection_by_another_type(s):
    for key in (1.5, True, slice(True), slice(False, 2)):  # a condition, or a knob, by mistake
        with pytest.raises(errors.BadArgument):
            s["layers"][key]
