"""`from_pretrained` and `save_pretrained` of models with modules that have other weights."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import BertConfig

from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.emit.write import write
from slapo_rewrite.schedule.load import ScheduleFile

FILES = ("load_pretrained", "save_pretrained")
BERT = '''\
import torch
from torch import nn
from transformers import BertConfig

from slapo_rewrite import concat, split, transpose


class PackedSelfAttention(nn.Module):
    """Self-attention whose query, key and value are one projection."""

    def __init__(self, config, is_causal=False, layer_idx=None):
        super().__init__()
        self.size = config.hidden_size // config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.register_buffer("scale", torch.tensor(self.size**-0.5), persistent=False)

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, **kwargs):
        B, T, _ = hidden_states.shape
        q, k, v = self.qkv(hidden_states).view(B, T, 3, -1, self.size).transpose(1, 3).unbind(2)
        y = nn.functional.scaled_dot_product_attention(
            q * self.scale, k, v, attention_mask, scale=1
        )
        return y.transpose(1, 2).reshape(B, T, -1), None


class TurnedLinear(nn.Module):
    """A square layer whose weight stands transposed."""

    def __init__(self, width, out):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, out))
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x):
        return x @ self.weight + self.bias


def model(m):
    return m.BertForMaskedLM(BertConfig())


def schedule(s):
    s["bert.encoder.layer.*.attention.self"].replace(
        PackedSelfAttention,
        weights={
            "qkv.weight": concat("query.weight", "key.weight", "value.weight"),
            "qkv.bias": concat("query.bias", "key.bias", "value.bias"),
        },
    )
    s["cls.predictions.transform.dense"].replace(
        TurnedLinear, weights={"weight": transpose("weight")}
    )
    s["bert.encoder.layer.0.output.LayerNorm"].annotate("weight", "decay", False)
    s["bert.encoder.layer.*.intermediate.dense"].shard(["weight", "bias"], axis=0)
    s["bert.encoder.layer.*.output.dense"].shard("weight", axis=1)
    s.infer_sync()
'''

ANNOTATED = """\
from transformers import BertConfig


def model(m):
    return m.BertForMaskedLM(BertConfig())


def schedule(s):
    s["bert.encoder.layer.1.output.LayerNorm"].annotate("weight", "decay", False)
"""

EXPERTS = """\
from transformers import MixtralConfig

CONFIG = MixtralConfig(
    vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=32, num_local_experts=4,
)


def model(m):
    return m.MixtralForCausalLM(CONFIG)


def schedule(s):
    s["model.layers.*.self_attn.{q_proj,k_proj,v_proj}"].shard("weight", axis=0)
    s["model.layers.*.self_attn.o_proj"].shard("weight", axis=1)
    s.infer_sync()
"""

CONFIG = BertConfig(
    vocab_size=64, hidden_size=16, num_hidden_layers=3, num_attention_heads=4,
    intermediate_size=32, max_position_embeddings=16, hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A rewritten BERT, and checkpoints of the original: in one file and in several."""
    folder = tmp_path_factory.mktemp("pretrained")
    (folder / "packed.py").write_text(BERT)
    output = rewrite(
        "transformers.models.bert.modeling_bert", str(folder / "packed.py"), further=FILES
    )
    write(folder / "packed_bert", output.files)
    torch.manual_seed(0)
    original = transformers.BertForMaskedLM(CONFIG)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.add_(torch.randn_like(parameter))
    original.save_pretrained(folder / "whole")
    original.save_pretrained(folder / "several", max_shard_size="4KB")
    torch.save(original.state_dict(), folder / "state.pt")
    return folder


def module(folder: Path, file: str = "modeling_bert", package: str = "packed_bert"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(f"{package}.{file}")


def logits(model) -> torch.Tensor:
    ids = torch.arange(12).view(2, 6)
    return model(ids, attention_mask=torch.tensor([[1] * 6, [1] * 4 + [0] * 2])).logits


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize(
    "how", [{}, {"dtype": torch.bfloat16}, {"low_cpu_mem_usage": True}], ids=str
)
@pytest.mark.parametrize("name", ["whole", "several"])
def test_the_originals_checkpoint_goes_in_and_out(folder, tmp_path, caplog, name, how):
    size = {} if name == "whole" else {"max_shard_size": "4KB"}
    expected = transformers.BertForMaskedLM.from_pretrained(folder / name, **how)
    transformers.utils.logging.get_logger("transformers").addHandler(caplog.handler)
    model, said = module(folder).BertForMaskedLM.from_pretrained(
        folder / name, output_loading_info=True, **how
    )
    assert not any(said.values()) and not caplog.records, (said, caplog.text)
    assert not model.training and not any(t.is_meta for t in model.state_dict().values())
    attention = expected.bert.encoder.layer[1].attention.self
    three = [attention.query.weight, attention.key.weight, attention.value.weight]
    packed = model.bert.encoder.layer[1].attention.self
    assert type(packed).__name__ == "PackedSelfAttention" and not packed.training
    assert torch.equal(packed.qkv.weight, torch.cat(three))
    assert model.bert.encoder.layer[0].output.LayerNorm.weight.decay is False
    assert packed.qkv.weight.requires_grad and packed.qkv.weight.is_leaf
    tied = model.cls.predictions.decoder.weight
    assert tied is model.bert.embeddings.word_embeddings.weight
    full = module(folder, "loading").full_state_dict(model)
    state = expected.state_dict()
    assert full.keys() == state.keys()
    assert all(torch.equal(full[n], t) and full[n].dtype == t.dtype for n, t in state.items())
    wanted = logits(expected)
    near = {"rtol": 0, "atol": (0.02 if "dtype" in how else 1e-6) * wanted.abs().max().item()}
    torch.testing.assert_close(logits(model), wanted, **near)

    model.save_pretrained(tmp_path / "out", **size)
    expected.save_pretrained(tmp_path / "expected", **size)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "expected")


def test_what_saves_a_state_dict_of_its_own(folder, tmp_path):
    made = module(folder)
    model = made.BertForMaskedLM.from_pretrained(folder / "whole")
    full = module(folder, "loading").full_state_dict(model)
    for number, state in enumerate((model.state_dict(), full)):
        model.save_pretrained(tmp_path / str(number), state_dict=state)
        assert bytes_of(tmp_path / str(number)) == bytes_of(folder / "whole")


def test_a_model_made_otherwise_is_saved_under_the_originals_names(folder, tmp_path):
    made = module(folder)
    model = made.BertForMaskedLM(CONFIG)
    model.load_state_dict(torch.load(folder / "state.pt"))
    model.save_pretrained(tmp_path)
    assert bytes_of(tmp_path) == bytes_of(folder / "whole")


def test_a_head_that_the_checkpoint_lacks_is_new(folder):
    model, said = module(folder).BertForSequenceClassification.from_pretrained(
        folder / "whole", output_loading_info=True
    )
    lacking = {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    assert said["missing_keys"] == lacking | {"classifier.weight", "classifier.bias"}
    packed = model.bert.encoder.layer[2].attention.self.qkv.bias
    expected = torch.load(folder / "state.pt")["bert.encoder.layer.2.attention.self.key.bias"]
    assert torch.equal(packed[16:32], expected)


def test_a_weight_that_the_checkpoint_lacks_has_the_originals_name(folder):
    state = torch.load(folder / "state.pt")
    name = "bert.encoder.layer.0.attention.self.key.weight"
    key = state.pop(name)
    model, said = module(folder).BertForMaskedLM.from_pretrained(
        None, config=CONFIG, state_dict=state, output_loading_info=True
    )
    assert said["missing_keys"] == {name}
    packed = model.bert.encoder.layer[0].attention.self.qkv.weight
    assert torch.equal(packed[:16], state[name.replace("key", "query")])
    assert packed[16:32].std() < 0.1 < key.std()  # initialised as the original's


def test_a_failed_load_leaves_nothing_behind(folder):
    made = module(folder)
    with pytest.raises(OSError, match="nowhere"):
        made.BertForMaskedLM.from_pretrained(folder / "nowhere")
    model = made.BertForMaskedLM(CONFIG)
    assert type(model.bert.encoder.layer[0].attention.self).__name__ == "PackedSelfAttention"


def test_a_model_over_several_devices_is_refused(folder):
    """Of these, `accelerate` moves what goes in and out of each module."""
    made = module(folder)

    class Spread(made.BertForMaskedLM):
        def eval(self):
            self._hf_hook = "as accelerate sets it"
            return super().eval()

    with pytest.raises(ValueError, match="cannot spread this model over several devices"):
        Spread.from_pretrained(folder / "whole")


def rewritten(folder: Path, name: str, model: str, schedule: str) -> Path:
    """The output folder `name`, which can be imported."""
    (folder / "schedule.py").write_text(schedule)
    source = f"transformers.models.{model}.modeling_{model}"
    output = rewrite(source, str(folder / "schedule.py"), further=FILES)
    write(folder / name, output.files)
    return folder / name


def test_annotations_outlive_loading(folder):
    output = rewritten(folder, "annotated_bert", "bert", ANNOTATED)
    text = (output / "modeling_bert.py").read_text()
    assert "class BertPreTrainedModel(OriginalCheckpoints, LibraryModel, PreTrainedModel):" in text
    made = module(folder, package="annotated_bert")
    model = made.BertForMaskedLM.from_pretrained(folder / "whole")
    assert model.bert.encoder.layer[1].output.LayerNorm.weight.decay is False
    assert not hasattr(model.bert.encoder.layer[0].output.LayerNorm.weight, "decay")


GPT2 = "GPT2LMHeadModel(GPT2Config(vocab_size=40, n_layer=2, n_embd=16, n_head=2))"
T5 = "T5Model(T5Config(vocab_size=40, num_layers=2, d_model=16, d_kv=4, num_heads=4, d_ff=24))"


@pytest.mark.parametrize(
    ("model", "built", "schedule"),
    [("gpt2", GPT2, "s.apply_all()"), ("t5", T5, 's["encoder"].checkpoint()')],
)
def test_initial_weights_are_the_originals(tmp_path, model, built, schedule):
    """T5 and GPT-2 initialise the submodules of modules that own no parameters."""
    text = (
        f"import transformers as t\n\n\ndef model(m):\n    return m.{built.replace('(', '(t.', 1)}"
    )
    rewritten(tmp_path, f"new_{model}", model, f"{text}\n\n\ndef schedule(s):\n    {schedule}\n")
    made = ScheduleFile.load(str(tmp_path / "schedule.py")).module.model
    torch.manual_seed(0)
    original = made(transformers).state_dict()
    torch.manual_seed(0)
    ours = made(module(tmp_path, f"modeling_{model}", f"new_{model}")).state_dict()
    assert [name for name, tensor in original.items() if not torch.equal(tensor, ours[name])] == []


def test_checkpoints_that_transformers_converts(folder, tmp_path):
    """Those of Mixtral have each expert's weights apart, and other names."""
    rewritten(folder, "mixtral_out", "mixtral", EXPERTS)
    made = module(folder, "modeling_mixtral", "mixtral_out")
    loading = module(folder, "loading", "mixtral_out")
    torch.manual_seed(0)
    original = ScheduleFile.load(str(folder / "schedule.py")).module.model(transformers)
    original.save_pretrained(tmp_path / "expected")
    model, said = made.MixtralForCausalLM.from_pretrained(
        tmp_path / "expected", output_loading_info=True
    )
    assert not any(said.values()), said
    state, expected = model.state_dict(), original.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)
    model.save_pretrained(tmp_path / "out")
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "expected")

    with pytest.raises(KeyError, match=r"save_original_format=False"):
        loading.load_pretrained(model, tmp_path / "expected")
    original.save_pretrained(tmp_path / "own", save_original_format=False)
    assert loading.load_pretrained(model, tmp_path / "own") == ([], [])
    loading.save_pretrained(model, tmp_path / "ranks")
    again = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "ranks").state_dict()
    assert all(torch.equal(again[name], expected[name]) for name in expected)


@pytest.fixture
def two_ranks():
    """The first of two ranks, whose group sends nothing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_parts_are_refused(folder, two_ranks):
    made, loading = module(folder), module(folder, "loading")
    with pytest.raises(RuntimeError, match=r"use `loading\.load_pretrained` of a model"):
        made.BertForMaskedLM.from_pretrained(folder / "whole", ignore_mismatched_sizes=True)
    model = made.BertForMaskedLM(CONFIG)
    loading.load_pretrained(model, folder / "whole")
    with pytest.raises(RuntimeError, match=r"use `loading\.save_pretrained` of a model"):
        model.save_pretrained(folder / "refused")
