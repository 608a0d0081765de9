"""Modules whose class transformers looks up by configuration: the output uses its own class."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaModel

from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.emit.write import write
from slapo_rewrite.model import construction_calls
from slapo_rewrite.model.auto_classes import Lookup, lookup_of
from slapo_rewrite.model.join import Sources, find_site
from slapo_rewrite.model.tree import Tree
from slapo_rewrite.verify.run import verify

LLAVA = "transformers.models.llava.modeling_llava"
AUDIO = "transformers.models.qwen2_audio.modeling_qwen2_audio"
SMALL = "hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2"
TEXT = f"vocab_size=96, max_position_embeddings=64, {SMALL}"
VISION = f"CLIPVisionConfig(image_size=16, patch_size=8, {SMALL})"
SCHEDULE = f"""\
import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig


def model(m):
    text = LlamaConfig({TEXT})
    return m.LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config={VISION}))


def inputs(model):
    ids = torch.randint(96, (2, 8))
    return {{"input_ids": ids, "labels": ids, "use_cache": False}}


def split(mlp, up, down):
    mlp[up].shard("weight", axis=0)
    mlp[down].shard("weight", axis=1)
    mlp.infer_sync()


def schedule(s):
"""
MLPS = '    split(s["model.language_model.layers.*.mlp"], "{gate_proj,up_proj}", "down_proj")\n'


def written(folder: Path, source: str, schedule: str) -> tuple[Path, str]:
    """The output folder, and the text of the model file."""
    (folder / "s.py").write_text(schedule)
    output = rewrite(source, str(folder / "s.py"))
    out = folder / f"out_{folder.name}"
    write(out, output.files)
    return out, output.files[output.model_file]


def imported(out: Path, name: str):
    sys.path.insert(0, str(out.parent))
    try:
        return importlib.import_module(f"{out.name}.{name}")
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def llava(tmp_path_factory) -> tuple[Path, str]:
    return written(tmp_path_factory.mktemp("llava"), LLAVA, SCHEDULE + MLPS)


def test_the_class_of_another_file(llava):
    """It is made where the configuration asks for it; what does not change is looked up still."""
    out, text = llava
    assert (
        """\
        self.language_model = (
            LlamaModel._from_config(config.text_config)
            if type(config.text_config) is LlamaConfig
            else AutoModel.from_config(config.text_config)
        )
"""
        in text
    )
    assert "        self.vision_tower = AutoModel.from_config(config.vision_config)\n" in text
    assert "from .modeling_llama import LlamaModel\n" in text
    assert (out / "modeling_llama.py").is_file() and not (out / "modeling_clip.py").exists()


@pytest.mark.parametrize("language", ["Llama", "Mistral", "LlamaOfOurs"])
def test_whatever_the_configuration_asks_for(language, llava, tmp_path):
    """Its own class for the one configuration, the original's for others; equal in all numbers."""

    class LlamaOfOursConfig(transformers.LlamaConfig):
        model_type = "llama_of_ours"

    class LlamaOfOurs(transformers.LlamaModel):
        config_class = LlamaOfOursConfig

    if language == "LlamaOfOurs":  # of a class derived from the one that is asked for
        transformers.AutoConfig.register("llama_of_ours", LlamaOfOursConfig)
        transformers.AutoModel.register(LlamaOfOursConfig, LlamaOfOurs)
        text_class = LlamaOfOursConfig
    else:
        text_class = getattr(transformers, f"{language}Config")
    vision = eval(VISION, {"CLIPVisionConfig": transformers.CLIPVisionConfig})
    sizes = eval(f"dict({TEXT})")
    models = []
    for module in (importlib.import_module(LLAVA), imported(llava[0], "modeling_llava")):
        torch.manual_seed(0)
        text = text_class(dtype="float32", num_key_value_heads=4, **sizes)
        config = transformers.LlavaConfig(text_config=text, vision_config=vision)
        models.append(module.LlavaForConditionalGeneration(config))
    original, ours = models
    part = ours.model.language_model
    own = language == "Llama"
    assert type(part).__module__.startswith(llava[0].name) is own
    assert own or type(part) is type(original.model.language_model)
    assert type(part).__name__ == type(original.model.language_model).__name__
    state = original.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in ours.state_dict().items())
    same = original.model.language_model.config
    assert part.config._attn_implementation == same._attn_implementation
    assert part.supports_gradient_checkpointing
    ids = torch.randint(96, (2, 8), generator=torch.Generator().manual_seed(0))
    losses = []
    for model in models:
        enable = "activation_checkpointing_enable"
        getattr(model, enable, model.gradient_checkpointing_enable)()
        model.train()
        losses.append(model(input_ids=ids, labels=ids).loss)
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=0, atol=0)
    for one, other in zip(original.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    original.save_pretrained(tmp_path)
    again = type(ours).from_pretrained(tmp_path)
    assert type(again.model.language_model) is type(part)
    assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())


@pytest.mark.processes
def test_a_tower_that_is_checkpointed(tmp_path):
    """A subclass of the installed class, which starts as that does; its file is not copied."""
    out, text = written(tmp_path, LLAVA, SCHEDULE + '    s["model.vision_tower"].checkpoint()\n')
    assert "class CheckpointedCLIPVisionModel(LibraryModel, CLIPVisionModel):\n" in text
    assert "CheckpointedCLIPVisionModel._from_config(config.vision_config)\n" in text
    assert "is CLIPVisionConfig\n" in text and not (out / "modeling_clip.py").exists()
    report = verify(out, [1], source=LLAVA, schedule=str(tmp_path / "s.py"))
    assert report.ok, report.render()


AUDIO_SCHEDULE = f"""\
import torch
from transformers import Qwen2AudioConfig, Qwen2AudioEncoderConfig, Qwen2Config


def model(m):
    audio = Qwen2AudioEncoderConfig(
        d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=64,
        num_mel_bins=8, max_source_positions=16, dropout=0.0,
    )
    text = Qwen2Config(num_key_value_heads=4, {TEXT})
    config = Qwen2AudioConfig(audio_config=audio, text_config=text, audio_token_index=95)
    return m.Qwen2AudioForConditionalGeneration(config)


def verify_model(m):
    return model(m)


def inputs(model):
    ids = torch.randint(90, (1, 16))
    ids[:, :8] = 95
    return {{
        "input_ids": ids, "labels": ids, "use_cache": False,
        "attention_mask": torch.ones(1, 16, dtype=torch.long),
        "input_features": torch.randn(1, 8, 32),
        "feature_attention_mask": torch.ones(1, 32, dtype=torch.long),
    }}


def split(mlp, up, down):
    mlp[up].shard("weight", axis=0)
    mlp[down].shard("weight", axis=1)


def schedule(s):
    split(s["**.language_model.**.mlp"], "{{gate_proj,up_proj}}", "down_proj")
    split(s["**.audio_tower.layers.*"], "fc1", "fc2")
    s["**.audio_tower.layers.*.fc1"].shard("bias", axis=0)
    s.infer_sync()
    s["**.audio_tower.layers"][:1].checkpoint()
"""


@pytest.mark.long
@pytest.mark.processes
def test_a_tower_of_the_models_own_file_beside_a_language_model(tmp_path):
    """Both train in two processes as the original does."""
    out, text = written(tmp_path, AUDIO, AUDIO_SCHEDULE)
    assert "            Qwen2AudioEncoder._from_config(config.audio_config)\n" in text
    assert "            Qwen2Model._from_config(config.text_config)\n" in text
    report = verify(out, [1, 2], source=AUDIO, schedule=str(tmp_path / "s.py"))
    assert report.ok, report.render()


SOURCE = f"""\
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaModel

small, more = dict({TEXT}), {{{{}}}}


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        if id(self):
            from transformers import AutoModel as Auto
        self.part = {{made}}
"""
LLAMA = ("LlamaConfig", "transformers.models.llama.configuration_llama")


@pytest.mark.parametrize(
    "made, found",
    [
        ("AutoModel.from_config(config)", Lookup("config", *LLAMA)),
        ("AutoModel.from_config(config=config, dtype=None)", Lookup("config", *LLAMA)),
        ("Auto.from_config(config)", Lookup("config", *LLAMA)),
        ("AutoModel.from_config(config, trust_remote_code=True)", None),
        ("AutoModel.from_config(config, **more)", None),
        ("AutoModelForCausalLM.from_config(config)", None),
        ("LlamaModel._from_config(config)", None),
        ("AutoModel.from_config(LlamaConfig(**small))", None),
    ],
)
def test_which_constructions_are_lookups(made, found, tmp_path):
    """Only where the class of the configuration alone decides, and can be read once more."""
    name = f"looked_up_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(SOURCE.format(made=made))
    sys.path.insert(0, str(tmp_path))
    try:
        module = importlib.import_module(name)
    finally:
        sys.path.pop(0)
    with construction_calls.recorded():
        tree = Tree(module.Model(LlamaConfig(**eval(f"dict({TEXT})"))))
    sources = Sources(SourceFile.read(tmp_path / f"{name}.py", name))
    node = tree.nodes["part"]
    if "CausalLM" in made:  # as if it were another class than the mapping has
        node.cls = LlamaModel
    assert lookup_of(find_site(sources, node), node) == found


VOXTRAL = "transformers.models.voxtral.modeling_voxtral"
VOXTRAL_SCHEDULE = f"""\
from transformers import LlamaConfig, VoxtralConfig, VoxtralEncoderConfig


def model(m):
    audio = VoxtralEncoderConfig(max_source_positions=16, {SMALL})
    return m.VoxtralForConditionalGeneration(
        VoxtralConfig(audio_config=audio, text_config=LlamaConfig({TEXT}))
    )


def schedule(s):
    s["model.language_model.layers"][0].cut_pipeline_stage(target="torch")
"""


def test_a_tower_whose_base_class_changes(tmp_path):
    """The base has transformers treat the output's classes as its own, of which the tower is one.

    The language model, in which a stage ends, is of another file, and stays as it is.
    """
    out, text = written(tmp_path, VOXTRAL, VOXTRAL_SCHEDULE)
    assert "class VoxtralPreTrainedModel(LibraryModel, PreTrainedModel):\n" in text
    assert "VoxtralEncoder._from_config(config.audio_config)\n" in text
    assert "self.language_model = AutoModel.from_config(config.text_config)\n" in text
    assert not (out / "modeling_llama.py").exists()
    assert "self.model.language_model.layers[1:]" in (out / "pipeline.py").read_text()


CLASSIFIER = f"""\
import torch
from transformers import LlamaConfig


def model(m):
    config = LlamaConfig(num_labels=3, pad_token_id=0, {TEXT})
    return m.LlamaForSequenceClassification(config)


def inputs(model):
    return {{"input_ids": torch.randint(1, 96, (2, 8)), "labels": torch.tensor([0, 2])}}


def schedule(s):
    s["model.layers"][:].checkpoint()
"""


def test_a_base_class_that_makes_what_is_derived_beside_it(tmp_path):
    """The two files import one another, so that one is named before it is read to its end."""
    out, _ = written(tmp_path, "transformers.models.llama.modeling_llama", CLASSIFIER)
    text = (out / "modeling_layers.py").read_text()
    assert "\nfrom . import modeling_llama\n" in text
    assert "modeling_llama.LlamaModel._from_config(config)" in text
    module = imported(out, "modeling_llama")
    model = module.LlamaForSequenceClassification(
        LlamaConfig(num_labels=3, pad_token_id=0, **eval(f"dict({TEXT})"))
    )
    assert type(model.model) is module.LlamaModel
    assert type(model.model.layers[1]) is module.CheckpointedLlamaDecoderLayer


INSIDE = f"""\
import torch
from transformers import ColModernVBertConfig, ModernBertConfig, ModernVBertConfig
from transformers import SiglipVisionConfig


def model(m):
    text = ModernBertConfig(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1,
                            sep_token_id=2, {TEXT})
    vision = SiglipVisionConfig(image_size=64, {SMALL})
    config = ModernVBertConfig(
        text_config=text, vision_config=vision, image_token_id=95, vocab_size=96
    )
    return m.ColModernVBertForRetrieval(ColModernVBertConfig(vlm_config=config))


def inputs(model):
    return {{"input_ids": torch.randint(3, 95, (2, 8))}}


def loss(outputs):
    return outputs.embeddings.float().square().add(1).sqrt().mean()


def schedule(s):
    s["vlm.text_model.layers"][:].checkpoint()
"""


def test_a_file_that_only_makes_what_changes(tmp_path):
    """It is of the output then, and its models start as transformers has its own start.

    So does the small model, or this would be refused.
    """
    source = "transformers.models.colmodernvbert.modeling_colmodernvbert"
    out, text = written(tmp_path, source, INSIDE)
    assert "class ColModernVBertPreTrainedModel(LibraryModel, PreTrainedModel):\n" in text
    for name, base in {"modernvbert": "ModernVBert", "modernbert": "ModernBert"}.items():
        text = (out / f"modeling_{name}.py").read_text()
        assert f"class {base}PreTrainedModel(LibraryModel, PreTrainedModel):\n" in text


TOLD = """\
from dataclasses import dataclass


@dataclass
class Config:
    mlp_class_name: str = "MLP"
    width: int = 12
    head_size: int = 3

    @property
    def mlp_class(self):
        import {net}

        return getattr({net}, self.mlp_class_name)
"""
NET = """\
from torch import nn

from {told} import Config


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.width, 24)
        self.down = nn.Linear(24, config.width)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Gated(MLP):
    def forward(self, x):
        return self.down(self.up(x).sigmoid())


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.config = config

    def forward(self, x):
        size = self.config.head_size
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, -1, size).unbind(2)
        return self.out((q * k.tanh() + v).flatten(2))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = Attention(config)
        self.mlp = config.mlp_class(config)

    def forward(self, x):
        return self.mlp(self.attention(x))


class Model(nn.Module):
    def __init__(self, config=None):
        super().__init__()
        self.layers = nn.Sequential(*(Block(config or Config()) for _ in range(2)))

    def forward(self, x):
        return self.layers(x)
"""
TOLD_SCHEDULE = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(2, 5, 12)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s["layers.*.attention.qkv"].shard(["weight", "bias"], axis=0, parts=3)
    s["layers.*.attention.out"].shard("weight", axis=1)
    s["layers.*.mlp.up"].shard(["weight", "bias"], axis=0)
    s["layers.*.mlp.down"].shard("weight", axis=1)
    s.infer_sync()
"""


def told(folder: Path, monkeypatch, net: str = NET, config: str = TOLD) -> Path:
    """A model of two files, of which the configuration tells the other's classes."""
    names = {"net": f"net_{folder.name}", "told": f"told_{folder.name}"}
    monkeypatch.syspath_prepend(str(folder))
    (folder / f"{names['told']}.py").write_text(config.replace("{net}", names["net"]))
    (folder / f"{names['net']}.py").write_text(net.replace("{told}", names["told"]))
    return folder / f"{names['net']}.py"


MADE = """\
            MLP(config)
            if config.mlp_class.__name__ == "MLP"
            else config.mlp_class(config)
"""


def test_a_class_that_a_property_of_the_configuration_gives(tmp_path, monkeypatch):
    """A property in another file returns the original's class; the output compares its name."""
    source = told(tmp_path, monkeypatch)
    _, text = written(tmp_path, str(source), TOLD_SCHEDULE)
    assert f"self.mlp = (\n{MADE}" in text
    assert "multiple_of=config.head_size" in text, "not what it happens to be"


def test_a_property_beside_the_classes_gives_the_outputs_own(tmp_path, monkeypatch):
    own = TOLD.replace("        import {net}\n\n", "").replace(
        "getattr({net}, self.mlp_class_name)", "globals()[self.mlp_class_name]"
    )
    source = told(tmp_path, monkeypatch, NET.replace("from {told} import Config\n", own))
    _, text = written(tmp_path, str(source), TOLD_SCHEDULE)
    assert "self.mlp = config.mlp_class(config)\n" in text


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("name", ["MLP", "Gated"])
def test_classes_that_a_configuration_gives_train_alike(name, tmp_path, monkeypatch):
    """One that is derived from another is changed by its base's constructor."""
    source = told(tmp_path, monkeypatch, config=TOLD.replace('"MLP"', f'"{name}"'))
    out, _ = written(tmp_path, str(source), TOLD_SCHEDULE)
    report = verify(out, [1, 2], source=str(source), schedule=str(tmp_path / "s.py"))
    assert report.ok, report.render()
