"""Cuts inside a module whose class is in another file than the model's."""

import pytest

from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.emit.write import write
from slapo_rewrite.verify.rank_layout import Layout
from slapo_rewrite.verify.run import verify
from tests.rewriting import refused, rewritten
from tests.stages.cases import for_torch
from tests.stages.test_refusals import SCHEDULE, written
from tests.stages.test_text import method

TOWER = """\
from math import tanh

import torch.nn.functional as functional
from torch import nn

FACTOR = tanh(0.5)


def scaled(x):
    return x * FACTOR


def shifted(x):
    return x + 3


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + functional.relu(self.linear(x))


class Tower(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList([Block(width) for _ in range(4)])
        self.turned = False

    def turn(self):
        self.turned = True

    def forward(self, x, scale=tanh(0.25), shift=shifted):
        for layer in self.layers:
            x = layer(x)
        if self.turned:
            x = -x
        return scaled(shift(functional.silu(x))) * scale
"""


def of_tower(folder, name: str, *lines: str):
    """A schedule that cuts in the middle of the tower, and the model's file."""
    (folder / f"{name}.py").write_text(TOWER)
    own = "def scaled(x):\n    return x * 2\n\n\nclass Inner("
    source = written("x = scaled(self.first(x))", *lines, "x = self.tower(x)", "x = scaled(x)")
    source = source.replace("class Inner(", own).replace(
        "from torch import nn\n", f"from torch import nn\nfrom {name} import Tower\n", 1
    )
    source = source.replace(
        "        self.inner =", "        self.tower = Tower(8)\n        self.inner ="
    )
    path = folder / f"of_{name}.py"
    path.write_text(source)
    schedule = folder / "s.py"
    schedule.write_text(for_torch(SCHEDULE.format(cut='s["tower.layers"][1]')))
    return path, schedule


@pytest.mark.processes
def test_stages_take_its_names_from_its_file(tmp_path, monkeypatch):
    path, schedule = of_tower(tmp_path, "stage_tower_right")
    output = rewrite(str(path), str(schedule))
    text = output.files["pipeline.py"]
    assert "from stage_tower_right import scaled as tower_scaled, shifted" in text
    assert (
        method(text, 1, "forward")
        == """\
def forward(self, x, /, **_):
    scale = tanh(0.25)
    for layer in self.tower.layers[2:]:
        x = layer(x)
    if self.tower.turned:
        x = -x
    x = tower_scaled(shifted(functional.silu(x))) * scale
    x = scaled(x)
    last_output = self.last(x)
    return last_output"""
    )
    write(tmp_path / "out", output.files)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    report = verify(tmp_path / "out", [Layout(2)])
    assert report.ok, report.render()


def test_a_local_name_that_hides_one_of_its_file(tmp_path):
    path, schedule = of_tower(tmp_path, "stage_tower_hidden", "shifted = x", "x = x + shifted")
    text = refused(tmp_path, path.read_text(), schedule.read_text(), "SR310")
    assert "`shifted` of stage_tower_hidden is also a local name" in text
    assert "rename the local one" in text


CLASSIFIER = """\
import torch
from transformers import LlamaConfig


def model(m):
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_attention_heads=4,
        num_hidden_layers=4, num_labels=3, pad_token_id=0, max_position_embeddings=32,
    )
    return m.LlamaForSequenceClassification(config)


def inputs(model):
    return {"input_ids": torch.randint(1, 96, (4, 8)), "labels": torch.tensor([0, 2, 1, 1])}


def schedule(s):
    s["model.layers"][1].cut_pipeline_stage(target="torch")
"""


def test_a_module_whose_name_the_class_says(tmp_path):
    """`getattr(self, self.base_model_prefix)(...)`, as classifiers of transformers call theirs."""
    (tmp_path / "s.py").write_text(CLASSIFIER)
    output = rewrite("transformers.models.llama.modeling_llama", str(tmp_path / "s.py"))
    assert "    for decoder_layer in self.model.layers[2:]:" in output.files["pipeline.py"]


@pytest.mark.parametrize("is_own", [False, True])
def test_a_module_whose_name_may_be_another(is_own, tmp_path):
    """What an instance has set may be set again; what its class says is the same for all."""
    source = written("x = self.first(x)", "x = getattr(self, self.named)(x)")
    of_class = 'class Model(nn.Module):\n    named = "inner"\n\n'
    source = source.replace("class Model(nn.Module):\n", of_class)
    if is_own:
        line = '        self.named = "inner"\n        self.first ='
        source = source.replace("        self.first =", line)
    schedule = for_torch(SCHEDULE.format(cut='s["inner"]["a"]'))
    if is_own:
        text = refused(tmp_path, source, schedule, "SR310")
        assert "training does not call it by this name" in text
    else:
        output = rewritten(tmp_path, source, schedule)
        assert "self.inner.a(" in output.files["pipeline.py"]
