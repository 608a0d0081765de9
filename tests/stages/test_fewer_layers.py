"""The small model in which stages are tried: its size does not grow with the model's depth."""

import pytest
from torch import nn

from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.errors import Span
from slapo_rewrite.model.tree import Tree
from slapo_rewrite.stages.dry_run import Trial
from slapo_rewrite.stages.fewer_layers import is_uniform, kept_layers
from slapo_rewrite.stages.program import Cut, Layers, Piece, Program
from tests.marks import long
from tests.stages.cases import of_transformers

LLAMA = "hidden_size=32, num_attention_heads=4, intermediate_size=48, vocab_size=203"


def kept(*layers: nn.Module, cuts=()):
    model = nn.Module()
    model.layers = nn.ModuleList(layers)
    return kept_layers(Tree(model), [Cut(f"layers.{n}", None, "torch") for n in cuts])


def counted(number: int, **attributes):
    made = nn.Linear(2, 2)
    vars(made).update(number=number, **attributes)
    return made


def test_the_first_and_the_last_layer_of_each_stage_are_kept():
    assert kept(*map(counted, range(20)), cuts=[4, 11]) == {"layers": (0, 4, 5, 11, 12, 19)}


def test_one_of_each_kind_is_kept_in_each_stage():
    layers = [*map(counted, range(3)), nn.LayerNorm(2), *map(counted, range(4, 10))]
    assert kept(*layers, cuts=[4]) == {"layers": (0, 3, 4, 5, 9)}
    layers = [counted(n, window=8 if n == 7 else 4) for n in range(10)]
    assert kept(*layers, cuts=[4]) == {"layers": (0, 4, 5, 7, 9)}


@pytest.mark.parametrize(
    ("loop", "uniform"),
    [
        ("for x in self.layers:\n    h = x(h)", True),
        ("for i, x in enumerate(self.layers):\n    h = x(h, mask)", True),
        ("for i, x in enumerate(self.layers):\n    h = x(h) * i", False),
        ("for x in self.layers:\n    h = x(h) if x.number != 3 else h", False),
        ("for x in self.layers[:9]:\n    h = x(h)", False),
        ("for x in self.layers[1:]:\n    h = x(h)", False),
        ("for x, y in zip(self.layers, self.norms):\n    h = x(y(h))", False),
        ("for i in range(len(self.layers)):\n    h = self.layers[i](h)", False),
    ],
)
def test_rounds_that_look_at_their_layer_are_tried_with_all(loop, uniform):
    piece = Piece(loop, Span("m.py", 1, 1, 1, loop), 0, Layers("self.layers", 0, 2))
    assert is_uniform(Program((), (piece,), "h", (), 2)) is uniform


@pytest.mark.parametrize("family", ["llama", long("bert")])
def test_work_does_not_grow_with_depth(family, tmp_path, monkeypatch):
    calls: dict[int, list[int]] = {}
    deep = Trial._deep

    def counting(self, *given):
        model = deep(self, *given)
        layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
        calls[depth].append(len(layers))
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: calls[depth].append(0))
        return model

    monkeypatch.setattr(Trial, "_deep", counting)
    name = {"llama": "LlamaForCausalLM", "bert": "BertForMaskedLM"}[family]
    for depth in (8, 20):
        calls[depth] = []
        config = f"{family.title()}Config({LLAMA}, num_hidden_layers={depth})"
        case = of_transformers(family, name, config, "s.cut_evenly(2)")
        schedule = tmp_path / "s.py"
        schedule.write_text(case.schedule)
        rewrite(case.source, str(schedule))
    assert calls[8] == calls[20]
    assert calls[20][0] == 4


def test_each_stage_is_tried_with_its_own_layers_alone(tmp_path, monkeypatch):
    """As in a separate process, where the other layers have no memory."""
    tried: list[list[str]] = []
    apart = Trial.apart_in_stages

    def noting(self, *given):
        models = apart(self, *given)
        tried.append([name for model in models for name, _ in model.named_parameters()])
        assert sorted(tried[0]) == sorted(name for name, _ in self.pristine.named_parameters())
        return models

    monkeypatch.setattr(Trial, "apart_in_stages", noting)
    config = f"LlamaConfig({LLAMA}, num_hidden_layers=8)"
    case = of_transformers("llama", "LlamaForCausalLM", config, "s.cut_evenly(2)")
    (tmp_path / "s.py").write_text(case.schedule)
    rewrite(case.source, str(tmp_path / "s.py"))
    assert tried


def test_a_small_model_may_have_none_of_a_stages_layers():
    """It has three, and one layer of twelve is in the first stage: the list was gone with it."""
    settings = ("pipeline_stages=4", "tensor_parallel=false", "pipeline_engine=torch")
    output = rewrite("tests/models/gpt.py", "tests/models/gpt_schedule.py", settings)
    assert "self.transformer.h[:1]" in output.files["pipeline.py"]
