"""Modules with equal fingerprints are read once, however many layers there are."""

from types import ModuleType

import pytest
from torch import nn

from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.fusion import match_rules
from slapo_rewrite.model.sources import Fingerprints
from slapo_rewrite.model.tree import Tree, build_model

SCHEDULE = """\
from transformers import LlamaConfig


def model(m):
    sizes = dict(vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers={depth})
    return m.LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=2))


def schedule(s):
    s.apply_all()
"""


class Layer(nn.Module):
    def __init__(self, number, width):
        super().__init__()
        self.number, self.groups = number, 4
        self.inner = nn.Linear(width, width)


def numbers(*widths: int) -> list[int]:
    def make(_: ModuleType) -> nn.Module:
        model = nn.Module()
        model.layers = nn.ModuleList(Layer(n, width) for n, width in enumerate(widths))
        return model

    tree, known = Tree(build_model(make, ModuleType("m"))), Fingerprints()
    return [known.of(node) for node in tree.nodes["layers"].children.values()]


def test_the_number_of_a_layer_tells_it_from_no_other():
    """Nor does what equals it by chance, as `groups` in one layer."""
    assert len(set(numbers(*[8] * 9))) == 1
    assert len(set(numbers(*[8] * 4, 16, *[8] * 4))) == 2


@pytest.mark.long
def test_functions_are_read_once_for_all_layers(tmp_path, monkeypatch):
    read = []
    scopes_of = match_rules.scopes_of
    monkeypatch.setattr(match_rules, "scopes_of", lambda *a: read.append(a[0]) or scopes_of(*a))
    schedule, counts = tmp_path / "s.py", []
    for depth in (3, 9):
        schedule.write_text(SCHEDULE.format(depth=depth))
        read.clear()
        rewrite("transformers.models.llama.modeling_llama", str(schedule))
        counts.append(len(read))
    assert counts[0] == counts[1] > 5
