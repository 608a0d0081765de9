"""`--schedule auto`: what is split, what is written, and that the file is an ordinary schedule."""

import re
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import transformers
from torch import nn

from slapo_rewrite import errors
from slapo_rewrite.auto import derive as derive_module
from slapo_rewrite.auto import oracle as oracle_module
from slapo_rewrite.auto.derive import Derived, derive
from slapo_rewrite.auto.hugging_face_model import steps_of
from slapo_rewrite.auto.oracle import Oracle
from slapo_rewrite.auto.placement_search import Search
from slapo_rewrite.auto.schedule_text import NONE_PAYS
from slapo_rewrite.auto.shard_groups import Group, Shard, lines_of
from slapo_rewrite.auto.step import Step, tried
from slapo_rewrite.cli import main
from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.emit.write import write
from slapo_rewrite.model import small_model
from slapo_rewrite.model.tree import Tree
from slapo_rewrite.sharding.propagate import _Propagation
from slapo_rewrite.sharding.stand_in import CannotStandIn
from slapo_rewrite.sharding.types import CannotRun
from slapo_rewrite.verify.run import chosen, verify
from tests import golden
from tests.marks import long

GPT = str(Path(__file__).parents[1] / "models" / "gpt.py")
STAGES = ["pipeline_stages=2", "pipeline_engine=torch"]
SHARDED = re.compile(r'(\w+)\["([^"]+)"\]\.shard\((.*)\)')

MLP = """\
import torch
from torch import nn


class MLP(nn.Module):
    def __init__(self, width=1024):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))
"""


def shards(text: str) -> set[str]:
    """The modules that a schedule splits, with the arguments."""
    return {f"{path} {arguments}" for _, path, arguments in SHARDED.findall(text)}


@pytest.mark.parametrize(
    ("name", "split"),
    [
        (
            "bert",
            {
                '*.attention.self.{query,key,value} ["weight", "bias"], axis=0',
                '*.attention.output.dense "weight", axis=1',
                '*.intermediate.dense ["weight", "bias"], axis=0',
                '*.output.dense "weight", axis=1',
                'bert.embeddings.word_embeddings "weight", axis=0',
                'cls.predictions.decoder ["weight", "bias"], axis=0',
            },
        ),
        (
            "llama",
            {
                '*.self_attn.{q_proj,k_proj,v_proj} "weight", axis=0',
                '*.self_attn.o_proj "weight", axis=1',
                '*.mlp.{gate_proj,up_proj} "weight", axis=0',
                '*.mlp.down_proj "weight", axis=1',
                'model.embed_tokens "weight", axis=0',
                'lm_head "weight", axis=0',
            },
        ),
        long(
            "mixtral",
            {
                '*.self_attn.{q_proj,k_proj,v_proj} "weight", axis=0',
                '*.self_attn.o_proj "weight", axis=1',
                '*.mlp.experts "gate_up_proj", axis=1, parts=2',
                '*.mlp.experts "down_proj", axis=2',
            },
        ),
        long(
            "qwen2_moe",
            {
                '*.mlp.shared_expert.{gate_proj,up_proj} "weight", axis=0',
                '*.mlp.shared_expert.down_proj "weight", axis=1',
                '*.mlp.experts "gate_up_proj", axis=1, parts=2',
                '*.mlp.experts "down_proj", axis=2',
            },
        ),
        long(
            "jetmoe",
            {
                '*.mlp.input_linear "weight", axis=1, parts=2',
                '*.mlp.output_linear "weight", axis=2',
            },
        ),
    ],
)
def test_blocks_are_split_as_by_hand(name, split):
    derived = derive(f"transformers.models.{name}.modeling_{name}")
    assert split <= shards(derived.text)
    assert derived.share > (0.75 if name == "jetmoe" else 0.8)  # keys and values stay whole
    if name in ("bert", "llama"):
        assert 'layers["' not in "".join(re.findall(r".*sync\(.*", derived.text)), "all is inferred"


@pytest.mark.long
@pytest.mark.parametrize("name", golden.WORKED_OUT)
def test_the_schedules_that_are_kept_are_worked_out_today(name):
    """Made again by `--schedule auto --write-schedule generated/NAME/schedule.py`."""
    kept = (golden.ROOT / golden.kept_schedule(name)).read_text()
    assert kept.rpartition("\n# slapo-rewrite")[0] == derive(_modeling(name)).text


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, ["fuse=true"]) for name in golden.WORKED_OUT),
        *((name, [*STAGES, "ckpt_ratio=0.5"]) for name in ("gpt_neo", "opt", "roberta")),
    ],
)
def test_what_the_kept_schedules_give_equals_the_original(name, settings, tmp_path):
    source, file = _modeling(name), str(golden.ROOT / golden.kept_schedule(name))
    write(tmp_path / "out", rewrite(source, file, settings).files)
    layout = chosen(tmp_path / "out", None, 2, 2) if settings[1:] else chosen(tmp_path / "out", [2])
    found = verify(tmp_path / "out", layout, source=source, schedule=file)
    assert found.ok, found.render()


def _modeling(name: str) -> str:
    return f"transformers.models.{name}.modeling_{name}"


def test_a_model_of_images_gets_inputs_of_its_own(tmp_path):
    derived = derive("transformers.models.vit.modeling_vit")
    assert "pixel_values" in derived.text and "def inputs(model)" in derived.text
    assert "from transformers import ViTConfig\n" in derived.text
    assert derived.share > 0.9
    assert "budget=memory" in derived.text
    assert "sequence=" not in derived.text  # as long as the inputs are
    (tmp_path / "s.py").write_text(derived.text)
    settings = ["memory=1TiB", "autocast=bfloat16"]
    output = rewrite("transformers.models.vit.modeling_vit", str(tmp_path / "s.py"), settings)
    assert "BFloat16" in output.files["modeling_vit.py"]
    assert "predicted for 8 rows of `inputs`" in output.files["rewrite.json"]


def test_both_towers_of_a_contrastive_model_are_trained_and_split():
    derived = derive("transformers.models.clip.modeling_clip")
    assert "return m.CLIPModel(CLIPConfig())" in derived.text
    assert '"return_loss": True' in derived.text
    # A text that does not end gives queries and keys no gradient: its first token stands for it.
    assert "torch.full((2, 1), model.config.text_config.eos_token_id)" in derived.text
    # The table of words is split, whatever becomes of what else the model returns.
    split = shards(derived.text)
    assert 'text_model.embeddings.token_embedding "weight", axis=0' in split
    assert not any("patch_embedding" in each for each in split)


def test_inputs_are_written_where_only_a_part_of_the_configuration_has_words():
    step = next(steps_of(transformers.Gemma3ForConditionalGeneration))
    assert "model.config.text_config.vocab_size" in (step.inputs or {})["labels"]
    assert next(steps_of(transformers.Gemma3ForCausalLM)).inputs is None


def test_a_twin_has_what_its_backbone_gives_out():
    step = next(steps_of(transformers.RTDetrV2ForObjectDetection))
    assert "out_features=['stage2', 'stage3', 'stage4']" in step.twin
    assert "num_queries=16" in step.twin
    # Whose first and last layers are of another class than those between.
    step = next(steps_of(transformers.Sam3LiteTextTextModel))
    assert "num_hidden_layers=3" in step.twin


@pytest.mark.long
def test_a_packed_axis_is_found_and_the_loss_of_a_tuple(tmp_path):
    text = derive(GPT).text
    assert '*.attn.c_attn ["weight", "bias"], axis=0, parts=3' in shards(text)
    assert "return outputs[1]" in text
    (tmp_path / "s.py").write_text(text)
    for settings in ([], ["ckpt_ratio=0.5"], ["parallel_loss=false"], ["tensor_parallel=false"]):
        assert rewrite(GPT, str(tmp_path / "s.py"), settings).files


def test_the_file_gives_the_same_bytes_and_is_verified(tmp_path, capsys):
    out, kept = tmp_path / "out", tmp_path / "out_schedule.py"
    assert main([GPT, "--schedule", "auto", "-o", str(out)]) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    assert main([GPT, "--schedule", str(kept), "-o", str(tmp_path / "again")]) == 0
    again = {path.name: path.read_bytes() for path in (tmp_path / "again").glob("*.*")}
    assert {n: t for n, t in before.items() if n != "rewrite.json"} == {
        n: t for n, t in again.items() if n != "rewrite.json"
    }
    capsys.readouterr()
    assert main([GPT, "--schedule", "auto", "-o", str(out), "--check"]) == 0
    assert "is unchanged" in capsys.readouterr().err
    assert verify(out, chosen(out, [2])).ok


def test_a_file_that_was_edited_is_not_written_over(tmp_path, capsys):
    out, kept, other = tmp_path / "out", tmp_path / "out_schedule.py", tmp_path / "other.py"
    net = tmp_path / "net.py"
    net.write_text(MLP)

    def asked(schedule, *more):
        return main([str(net), "--schedule", schedule, *more, "-o", str(out)])

    assert asked("auto") == 0
    kept.write_text(kept.read_text().replace("axis=0", "axis=0 "))
    assert asked("auto") == 2
    said = capsys.readouterr().err
    assert "already exists, with other contents" in said and "--write-schedule" in said
    assert asked(str(kept)) == 0
    assert asked("auto", "--write-schedule", str(other)) == 0 and other.is_file()


def test_a_name_that_no_output_can_have_is_refused_before_the_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("slapo_rewrite.auto.schedule_file.worked_out", None)
    (tmp_path / "net.py").write_text(MLP)
    out = tmp_path / "net.out"
    assert main([str(tmp_path / "net.py"), "--schedule", "auto", "-o", str(out)]) == 2
    assert "`net.out` cannot be imported" in capsys.readouterr().err


def test_a_lone_component_without_a_loss_gets_a_stand_in(tmp_path):
    source = tmp_path / "mlp.py"
    source.write_text(MLP)
    text = derive(str(source)).text
    assert shards(text) == {'up ["weight", "bias"], axis=0', 'down "weight", axis=1'}
    assert "A stand-in" in text


def test_a_stand_in_says_something_of_what_is_normalised():
    step = Step("", (), "m.LayerNorm(8)", inputs={"input": "3 * torch.randn(2, 8) + 1"})
    schedule = tried(step, nn).namespace()
    (x,) = schedule.inputs(None).values()
    schedule.loss(nn.LayerNorm(8)(x.requires_grad_())).backward()
    assert x.grad.abs().max() > 1e-3


def test_a_stand_in_is_of_what_most_parameters_make():
    class Quantizer(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes, self.encoder = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return {"perplexity": self.codes(x).sum(), "states": self.encoder(self.codes(x))}

    module = SimpleNamespace(Quantizer=Quantizer)
    step = tried(Step("", (), "m.Quantizer()", inputs={"x": "torch.randn(2, 4)"}), module)
    assert step.loss == 'outputs["states"].float().square().add(1).sqrt().mean()'.replace('"', "'")
    assert not step.has_loss


def test_a_head_that_computes_a_loss_comes_first(tmp_path):
    text = derive("transformers.models.wav2vec2.modeling_wav2vec2").text
    assert "m.Wav2Vec2ForCTC(" in text and "def loss(" not in text
    assert '"labels": torch.randint(' in text
    # What it hears is masked by what NumPy draws; it keeps the parameter that the mask is made of.
    assert "apply_spec_augment=False" in text and "mask_time_prob" not in text


def test_the_class_may_be_named(tmp_path):
    named = derive("transformers.models.bert.modeling_bert", "BertForSequenceClassification")
    assert "m.BertForSequenceClassification(" in named.text
    with pytest.raises(errors.ScheduleError, match="defines no module class `BertForSequence`"):
        derive("transformers.models.bert.modeling_bert", "BertForSequence")


def test_what_cannot_be_made_up_is_asked_for_and_the_advice_works(tmp_path):
    source = tmp_path / "mlp.py"
    sized = MLP.replace("width=1024", "sizes").replace(
        "super()", 'width = sizes["w"]\n        super()', 1
    )
    source.write_text(sized)
    with pytest.raises(errors.ScheduleError) as refused:
        derive(str(source))
    assert "auto:FILE.py" in (refused.value.hint or "")
    said = tmp_path / "said.py"
    said.write_text(
        "import torch\n\n\ndef model(m):\n    return m.MLP({'w': 1024})\n\n\n"
        'def inputs(model):\n    return {"x": torch.randn(2, 1024)}\n'
    )
    text = derive(str(source), str(said)).text
    assert "return m.MLP({" in text
    assert len(shards(text)) == 2


@pytest.mark.parametrize(
    ("text", "said", "advice"),
    [
        (
            "def model(m):\n    return m.MLP()\n\n\ndef schedule(s):\n    pass\n",
            "already",
            "directly",
        ),
        ("def inputs(model):\n    return {}\n", "no function `model`", "def model(m)"),
        ("def model(m:\n", "does not parse", ""),
        ("def model(m):\n    return m.MLP()\n", "does not run", ""),
    ],
)
def test_a_file_that_does_not_say_a_step_is_refused(text, said, advice, tmp_path):
    source, file = tmp_path / "mlp.py", tmp_path / "said.py"
    source.write_text(MLP)
    file.write_text(text)
    with pytest.raises(errors.ScheduleError, match=said) as refused:
        derive(str(source), str(file))
    assert advice in (refused.value.hint or "")


GATED = """\
import torch
from torch import nn
from torch.nn import functional as F


class Scales(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(2, size))

    def forward(self, x):
        return torch.einsum("btd,hd->bthd", x, self.gamma).unbind(-2)


class Unit(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.hidden = nn.Linear(width, 4 * width)
        self.base = nn.Linear(width, 16)
        self.scales = Scales(16)
        self.out = nn.Linear(2 * width, width)

    def forward(self, x):
        value, gate = F.silu(self.hidden(x)).chunk(2, -1)
        query, key = self.scales(self.base(x))
        weights = torch.relu(query @ key.transpose(1, 2)).square()
        return x + self.out(weights @ value * gate)


class Model(nn.Module):
    def __init__(self, vocab_size=VOCABULARY, width=WIDTH, depth=4):
        super().__init__()
        self.words = nn.Embedding(vocab_size, width)
        self.units = nn.ModuleList([Unit(width) for _ in range(depth)])
        self.head = nn.Linear(width, vocab_size)

    def forward(self, ids, targets):
        x = self.words(ids)
        for unit in self.units:
            x = unit(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
"""


@pytest.mark.parametrize(
    ("vocabulary", "width", "pays"),
    [("203", "1024", True), ("50000", "64", False)],  # what is small stands for a larger model
)
def test_a_producer_that_all_ranks_need_stays_whole(vocabulary, width, pays, tmp_path):
    source = tmp_path / "net.py"
    source.write_text(GATED.replace("VOCABULARY", vocabulary).replace("WIDTH", width))
    text = derive(str(source)).text
    assert {
        '*.hidden ["weight", "bias"], axis=0, parts=2',
        '*.out "weight", axis=1',
    } <= shards(text)
    assert "units.*.base" not in str(shards(text))
    assert ("takes longer than it saves: only for memory" in text) != pays
    assert ('s["words"]' in text) != pays


LANES = """\
import torch
from torch import nn
from torch.nn import functional as F


class Mixer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.narrow = nn.Linear(width, 2 * width, bias=False)
        for name in "abcdef":
            setattr(self, name, nn.Linear(width, 2 * width))
        self.out = nn.Linear(2 * width, width)

    def forward(self, x):
        hidden = self.a(x) * self.b(x) * self.c(x) + self.d(x) * self.e(x) * self.f(x)
        return x + self.out(hidden * torch.sort(self.narrow(x), -1).values)


class Model(nn.Module):
    def __init__(self, vocab_size=203, width=256, depth=2):
        super().__init__()
        self.words = nn.Embedding(vocab_size, width)
        self.mixers = nn.ModuleList([Mixer(width) for _ in range(depth)])
        self.head = nn.Linear(width, vocab_size)

    def forward(self, ids, targets):
        x = self.words(ids)
        for mixer in self.mixers:
            x = mixer(x)
        FOLLOWED
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
"""


def test_only_a_producer_that_is_blamed_is_left_out_of_the_others(tmp_path, monkeypatch):
    source = tmp_path / "net.py"
    source.write_text(LANES.replace("FOLLOWED", ""))
    asked = []
    refusal = Oracle._found
    monkeypatch.setattr(
        Oracle, "_found", lambda oracle, lines: asked.append(lines) or refusal(oracle, lines)
    )
    text = derive(str(source)).text
    assert "`mixers.*.{a,b,c,d,e,f,narrow,out}`: `mul` combines a part" in text
    assert sum("mixers.*.out" in str(lines) for lines in asked) == 2  # of all, and without `a`
    assert len({*map(tuple, asked)}) == len(asked)


def test_what_needs_values_is_tried_without_them_once_and_has_one_small_model(
    tmp_path, monkeypatch
):
    source = tmp_path / "net.py"
    source.write_text(LANES.replace("FOLLOWED", "x = x * float(x.abs().mean() > 0)"))
    made, blocked = [], []
    build, recorded = small_model.build_small, _Propagation._recorded

    def noted(self, *args):
        try:
            return recorded(self, *args)
        except CannotRun:
            blocked.append(self.device.type)
            raise

    monkeypatch.setattr(small_model, "build_small", lambda *a: made.append(a) or build(*a))
    monkeypatch.setattr(_Propagation, "_recorded", noted)
    monkeypatch.setattr(derive_module, "rewrite", lambda *_, **__: SimpleNamespace(warnings=[]))
    derive(str(source))
    assert len(made) == 2  # for the step that is tried, and for all questions
    # One layer for all, and every layer; the lines of checkpoints alone are not followed.
    assert blocked == ["meta"] * 2


@pytest.mark.parametrize(
    ("values", "devices"),
    [("", {"meta"}), ("x = x * float(x.abs().mean() > 0)", {"meta", "cpu"})],
)
def test_the_whole_model_runs_once_for_all_questions(values, devices, tmp_path, monkeypatch):
    source = tmp_path / "net.py"
    source.write_text(LANES.replace("FOLLOWED", values))
    ran, asked, recorded = [], [], _Propagation._recorded
    refusal = Oracle._found

    def noted(self, codes, watched, way):
        ran.append((self.device.type, way, tuple(map(id, self.model.modules()))))
        return recorded(self, codes, watched, way)

    monkeypatch.setattr(_Propagation, "_recorded", noted)
    monkeypatch.setattr(Oracle, "_found", lambda self, q: asked.append(q) or refusal(self, q))
    monkeypatch.setattr(derive_module, "rewrite", lambda *_, **__: SimpleNamespace(warnings=[]))
    derive(str(source))
    assert {device for device, *_ in ran} == devices
    assert len({*ran}) == len(ran) < len(asked)


@pytest.mark.parametrize("stands", [True, False])
def test_of_a_step_of_many_operations_the_small_model_is_followed(stands, tmp_path, monkeypatch):
    """Where it can be followed in the model's place."""
    source = tmp_path / "net.py"
    source.write_text(LANES.replace("FOLLOWED", ""))
    found = shards(derive(str(source)).text)
    ran, recorded = [], _Propagation._recorded

    def noted(self, *given):
        whole = recorded(self, *given)
        ran.append(self.device.type)
        return whole

    def never(*_):
        raise CannotStandIn("it is another")

    monkeypatch.setattr(_Propagation, "_recorded", noted)
    monkeypatch.setattr(derive_module, "rewrite", lambda *_, **__: SimpleNamespace(warnings=[]))
    monkeypatch.setattr(oracle_module, "MOST_OPERATIONS", 10)
    if not stands:
        monkeypatch.setattr(oracle_module, "StandIn", never)
    assert shards(derive(str(source)).text) == found
    assert ("meta" in ran) is not stands


def test_a_table_of_few_rows_is_left_whole(tmp_path):
    """Also where nothing pays: no more ranks than it has rows could share the model."""
    source = tmp_path / "net.py"
    words = "        self.words = nn.Embedding(vocab_size, width)\n"
    kinds = "        self.kinds = nn.Embedding(2, width)\n"
    assert words in LANES
    text = LANES.replace("FOLLOWED", "x = x + self.kinds((ids > 3).long())")
    source.write_text(text.replace(words, words + kinds))
    assert not any("kinds" in split for split in shards(derive(str(source)).text))


def test_an_element_is_asked_of_whatever_stands_for_the_others(tmp_path):
    source = tmp_path / "net.py"
    source.write_text(
        "import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.ways = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))\n\n"
        "    def forward(self, x):\n"
        "        first = self.ways[0](x)\n"
        "        return torch.stack([first, *(way(first).relu() for way in self.ways[1:])])\n"
    )
    step = Step("Net", (), "m.Net()", inputs={"x": "torch.randn(2, 8)"}, loss="outputs.sum()")
    oracle = Oracle(str(source), step)
    for number in range(3):
        split = f's["ways.{number}"].shard(["weight", "bias"], axis=0)'
        gathered = f's["ways.{number}"].sync("fwd_post", "all_gather", axis=-1)'
        summed = f's["ways.{number}"].sync("bwd_post", "all_reduce")'
        assert oracle.refusal([split, gathered, summed]) is None


def test_which_models_there_are_is_said(tmp_path, capsys):
    source, step = tmp_path / "net.py", ["--schedule", "auto", "-o", str(tmp_path / "out")]
    source.write_text("import torch\n")
    assert main([str(source), *step]) == 2
    assert "defines no model" in capsys.readouterr().err
    pair = "class Pair(nn.Module):\n    def __init__(self, first, second):\n        "
    pair += "super().__init__()\n        self.first = first\n\n    def forward(self, x):\n"
    other = MLP.partition("class")[2].replace("MLP", "Other")
    source.write_text(f"{MLP}\n\nclass{other}\n\n{pair}        return self.first(x)\n")
    assert main([str(source), *step]) == 0
    said = capsys.readouterr().err
    assert "Other with its default arguments; 100%" in said
    assert "not `Pair`: its inputs are not known" in said
    assert "other models there: MLP (--schedule auto:NAME)" in said


BAGS = """\
import torch
from torch import nn


class Clicks(nn.Module):
    def __init__(self, sizes=(5000, 3000), dim=16, mode="sum"):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, dim, mode=mode) for n in sizes)
        self.top = nn.Sequential(nn.Linear(2 * dim, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids, offsets):
        looked_up = [table(i, o) for table, i, o in zip(self.tables, ids, offsets)]
        return self.top(torch.cat(looked_up, 1))
"""
CLICKS = """\
import torch


def model(m):
    return m.Clicks()


def inputs(model):
    ids = [torch.randint(table.num_embeddings, (9,)) for table in model.tables]
    return {"ids": ids, "offsets": [torch.tensor([0, 3, 3, 8])] * 2}
"""


def test_rows_of_bags_are_split(tmp_path):
    source, file = tmp_path / "clicks.py", tmp_path / "step.py"
    source.write_text(BAGS)
    file.write_text(CLICKS)
    derived = derive(str(source), str(file))
    assert 'tables.{0,1} "weight", axis=0' in shards(derived.text)
    (tmp_path / "s.py").write_text(derived.text)  # a small model is compared before it is written
    output = rewrite(str(source), str(tmp_path / "s.py"))
    assert "VocabParallelEmbeddingBag(n, dim, mode=mode)" in output.files["clicks.py"]
    source.write_text(BAGS.replace('"sum"', '"max"'))
    assert "tables" not in str(shards(derive(str(source), str(file)).text))


NUMBERED = """\
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Stack(nn.Module):
    def __init__(self, dim=16, depth=4, names="0123"):
        super().__init__()
        self.layers = nn.ModuleDict()
        for i in range(depth):
            self.layers[names[i]] = Layer(dim)

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x
"""
NUMBERED_STEP = """\
import torch


def model(m):
    return m.Stack()


def inputs(model):
    return {"x": torch.randn(3, 16)}
"""


def test_layers_that_a_dictionary_numbers_are_checkpointed(tmp_path):
    source, file = tmp_path / "stack.py", tmp_path / "step.py"
    source.write_text(NUMBERED)
    file.write_text(NUMBERED_STEP)
    (tmp_path / "s.py").write_text(derive(str(source), str(file)).text)
    made = rewrite(str(source), str(tmp_path / "s.py"), ["ckpt_ratio=0.5"]).files["stack.py"]
    assert "CheckpointedLayer(dim) if i < depth // 2 else Layer(dim)" in made
    source.write_text(NUMBERED.replace("0123", "abcd"))
    assert "ckpt_ratio" not in derive(str(source), str(file)).text
    source.write_text(NUMBERED.replace("names[i]", 'f"layer_{i}"'))  # nothing counts these
    (tmp_path / "s.py").write_text(derive(str(source), str(file)).text)
    made = rewrite(str(source), str(tmp_path / "s.py"), ["ckpt_ratio=1.0"]).files["stack.py"]
    assert "] = CheckpointedLayer(dim)\n" in made


TABLES = """\
import torch
from torch import nn


class Scores(nn.Module):
    def __init__(self, sizes=(5000, 3000), dim=16, sparse=False):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, dim, sparse=sparse) for n in sizes)
        self.bag = nn.EmbeddingBag(5000, dim, mode="sum", sparse=sparse)
        self.top = nn.Sequential(nn.Linear(3 * dim, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids):
        looked_up = [table(ids[:, 0]) for table in self.tables]
        return self.top(torch.cat([*looked_up, self.bag(ids)], 1))
"""
SCORES = """\
import torch


def model(m):
    return m.Scores()


def inputs(model):
    return {"ids": torch.randint(3000, (9, 2))}
"""


@pytest.mark.parametrize("sparse", [False, True])
def test_tables_are_split_whose_gradients_are_not_sparse(tmp_path, sparse):
    """Sparse ones are compared, too."""
    source, file = tmp_path / "scores.py", tmp_path / "step.py"
    source.write_text(TABLES.replace("sparse=False", f"sparse={sparse}"))
    file.write_text(SCORES)
    derived = derive(str(source), str(file))
    assert ("tables" in str(shards(derived.text))) is not sparse
    (tmp_path / "s.py").write_text(derived.text)
    output = rewrite(str(source), str(tmp_path / "s.py"))
    made = output.files["scores.py"]
    assert ("VocabParallelEmbedding(n, dim, sparse=sparse)" in made) is not sparse
    assert ('VocabParallelEmbeddingBag(5000, dim, mode="sum", sparse=sparse)' in made) is not sparse
    assert not output.warnings
    by_hand = f"{SCORES}\n\ndef schedule(s):\n    s['bag'].shard('weight', axis=0)\n"
    (tmp_path / "s.py").write_text(by_hand)
    if sparse:
        with pytest.raises(errors.BadAxis) as caught:
            rewrite(str(source), str(tmp_path / "s.py"))
        assert "sparse=True" in caught.value.render()


def test_inputs_may_hold_others_and_have_to_be_named(tmp_path):
    source, file = tmp_path / "mlp.py", tmp_path / "said.py"
    source.write_text(MLP.replace("self, x):", "self, batch):\n        x = batch['x']"))
    step = "import torch\n\n\ndef model(m):\n    return m.MLP()\n\n\ndef inputs(model):\n    "
    file.write_text(f"{step}return {{'batch': {{'x': torch.randn(2, 1024)}}}}\n")
    derived = derive(str(source), str(file))
    assert derived.share > 0.9
    assert derived.text.startswith('"""MLP as said.py builds it.')
    file.write_text(f"{step}return torch.randn(2, 1024)\n")
    with pytest.raises(errors.ScheduleError, match="`inputs` returns Tensor, not a dictionary"):
        derive(str(source), str(file))


def test_other_commands_say_how_to_have_the_file_first(capsys):
    assert main(["tree", GPT, "--schedule", "auto"]) == 2
    assert "--write-schedule s.py" in capsys.readouterr().err
    assert main([GPT, "--schedule", "bert", "--write-schedule", "s.py", "--diff"]) == 2
    assert "needs `--schedule auto`" in capsys.readouterr().err


SINKS = """\
import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.sinks = nn.Parameter(torch.zeros(heads))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (
            each(x).view(b, t, self.heads, self.size).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        sinks = self.sinks.view(1, -1, 1, 1).expand(b, -1, t, 1)
        weights = F.softmax(torch.cat([q @ k.transpose(2, 3), sinks], -1), -1)[..., :-1]
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, self.heads * self.size))


class Model(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention = Attention(width, heads)

    def forward(self, x):
        return x + self.attention(x)
"""
STEP = """import torch


def model(m):
    return m.Model(WIDTH, 8)


def verify_model(m):
    return m.Model(32, 4)


def inputs(model):
    return {"x": torch.randn(2, 5, model.attention.query.in_features)}


def loss(outputs):
    return outputs.square().mean()
"""


def derived(folder: Path, source: str, step: str) -> Derived:
    for name, text in (("source.py", source), ("step.py", step)):
        (folder / name).write_text(text)
    return derive(str(folder / "source.py"), str(folder / "step.py"))


def test_what_each_head_has_is_split_with_the_heads(tmp_path):
    found = derived(tmp_path, SINKS, STEP.replace("WIDTH", "1024"))
    assert 'attention "sinks", axis=0' in shards(found.text)
    assert found.share > 0.9


def test_what_heads_have_along_the_second_axis_is_split_with_them(tmp_path):
    memory = (
        SINKS.replace("torch.zeros(heads)", "torch.zeros(2, heads, 3, width // heads)")
        .replace("sinks = self.sinks.view(1, -1, 1, 1).expand(b, -1, t, 1)\n", "SINKS\n")
        .replace("SINKS\n", "k, v = (torch.cat([m.expand(b, -1, -1, -1), x], 2) for m, x in MET)\n")
        .replace("MET", "zip(self.sinks, (k, v), strict=True)")
        .replace("torch.cat([q @ k.transpose(2, 3), sinks], -1), -1)[..., :-1]", "q @ k.mT, -1)")
    )
    found = derived(tmp_path, memory, STEP.replace("WIDTH", "1024"))
    assert 'attention "sinks", axis=1' in shards(found.text)
    assert found.share > 0.9


SPELLED = """
import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(width))
        self.v_bias = nn.Parameter(torch.zeros(width))
        self.out = nn.Linear(width, width)

    def forward(self, x):
        b, t, _ = x.shape
        bias = torch.cat((self.q_bias, torch.zeros_like(self.v_bias), self.v_bias))
        qkv = F.linear(input=x, weight=self.qkv.weight, bias=bias)
        q, k, v = qkv.reshape(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(2, 3)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, -1))


class Model(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention = Attention(width, heads)

    def forward(self, x):
        return x + self.attention(x)
"""


def test_a_layer_whose_call_is_spelled_out_is_split_with_its_biases(tmp_path):
    """`F.linear` with the layer's weight, and a bias that is put together of others."""
    step = STEP.replace("WIDTH", "1024").replace("attention.query", "attention.qkv")
    assert {
        'attention.qkv "weight", axis=0, parts=3',
        'attention ["q_bias", "v_bias"], axis=0',
        'attention.out "weight", axis=1',
    } <= shards(derived(tmp_path, SPELLED, step).text)


SCAN = """
import torch
from torch import nn
from torch.nn import functional as F


class Scan(nn.Module):
    def __init__(self, width, state):
        super().__init__()
        self.enter, self.leave = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)
        self.select, self.step = nn.Linear(2 * width, 2 * state), nn.Linear(state, 2 * width)
        self.decay = nn.Parameter(torch.rand(2 * width, state))
        with torch.no_grad():
            self.step.bias.copy_(torch.rand(2 * width))

    def forward(self, x):
        x, gate = self.enter(x).chunk(2, dim=-1)
        small, write = self.select(x).chunk(2, dim=-1)
        step = F.softplus(small @ self.step.weight.T + self.step.bias).unsqueeze(-1)
        states = (step * self.decay.exp() * write.unsqueeze(-2)).cumsum(1)
        return self.leave(states.sum(-1) * x * gate.sigmoid())


class Model(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.scan = Scan(width, 8)

    def forward(self, x):
        return x + self.scan(x)
"""


def test_a_layer_whose_weight_is_read_past_its_call_is_split_with_what_it_meets(tmp_path):
    """So are what a state-space block has for each feature of one half of what comes in."""
    step = STEP.replace("WIDTH", "1024").replace("attention.query", "scan.enter")
    assert {
        'scan.enter ["weight", "bias"], axis=0, parts=2',
        'scan.step ["weight", "bias"], axis=0',
        'scan "decay", axis=0',
        'scan.{select,leave} "weight", axis=1',
    } <= shards(derived(tmp_path, SCAN, step).text)


BY_DISTANCE = """
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads, most=9):
        super().__init__()
        self.heads = heads
        self.by_distance = nn.Parameter(torch.zeros(most, heads))
        self.temperature = nn.Parameter(torch.ones(heads, 1, 1))
        self.query = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        b, t, width = x.shape
        packed = self.query(x).reshape(b, t, 3, self.heads, width // self.heads)
        packed = packed.permute(2, 0, 3, 1, 4)
        q, k, v = packed[0], packed[1], packed[2]
        places = torch.arange(t, device=x.device)
        bias = self.by_distance[(places[:, None] - places).abs()].permute(2, 0, 1)
        weights = (q @ k.transpose(2, 3) * self.temperature + bias).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, width))


class Model(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention = Attention(width, heads)

    def forward(self, x):
        return x + self.attention(x)
"""


def test_the_columns_of_a_table_are_split_with_the_heads_that_they_count(tmp_path):
    found = derived(tmp_path, BY_DISTANCE, STEP.replace("WIDTH", "1024"))
    assert {
        'attention.query ["weight", "bias"], axis=0, parts=3',
        'attention "temperature", axis=0',
        'attention "by_distance", axis=1',
    } < shards(found.text)


def test_a_table_beside_attention_is_split_with_its_heads(tmp_path):
    source = BY_DISTANCE.replace(
        "        self.by_distance = nn.Parameter(torch.zeros(most, heads))\n", ""
    )
    source = source.replace("def forward(self, x):", "def forward(self, x, table):", 1)
    source = source.replace("self.by_distance[(", "table[(")
    head, _, _ = source.partition("class Model")
    source = f"""{head}class Distances(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.by_distance = nn.Parameter(torch.zeros(9, heads))

    def forward(self):
        return self.by_distance * 2


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention, self.distances = Attention(width, heads), Distances(heads)

    def forward(self, x):
        return x + self.attention(x, self.distances())


class Model(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.layer = Layer(width, heads)

    def forward(self, x):
        return self.layer(x)
"""
    step = STEP.replace("WIDTH", "1024").replace("attention.query", "layer.attention.query")
    found = shards(derived(tmp_path, source, step).text)
    assert {
        'layer.distances "by_distance", axis=1',
        'layer.attention "temperature", axis=0',
    } <= found


def test_what_each_of_several_instances_has_for_a_head_is_split_in_all_of_them(tmp_path):
    """They are split as one where a loop makes the layers of each."""
    stack = """class Stack(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(2):
            self.layers.append(Attention(width, heads))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Model"""
    source = BY_DISTANCE.replace("class Model", stack)
    source = source.replace(
        "self.attention = Attention(width, heads)",
        "self.first, self.second = Stack(width, heads), Stack(width, heads)",
    ).replace("x + self.attention(x)", "self.second(self.first(x))")
    step = STEP.replace("WIDTH", "1024").replace("attention.query", "first.layers[0].query")
    found = derived(tmp_path, source, step)
    assert {
        '{first,second}.layers.* "temperature", axis=0',
        '{first,second}.layers.* "by_distance", axis=1',
    } < shards(found.text)


BY_BLOCKS = """
import torch
from torch import nn


class Blocks(nn.Linear):
    def __init__(self, given, made, blocks):
        super().__init__(given, made, bias=False)
        self.blocks = blocks

    def forward(self, x):
        own = self.weight.view(self.blocks, -1, x.shape[-1]).transpose(1, 2)
        x = x.reshape(-1, self.blocks, x.shape[-1]).transpose(0, 1)
        return torch.bmm(x, own).transpose(0, 1)


def repeated(x, times):
    b, heads, t, size = x.shape
    x = x[:, :, None].expand(b, heads, times, t, size)
    return x.reshape(b, heads * times, t, size)


class Attention(nn.Module):
    def __init__(self, width, heads, blocks=4):
        super().__init__()
        self.heads, self.times, self.size, self.blocks = heads, heads, 16, blocks
        self.query = nn.Linear(width, heads * self.size)
        self.value = nn.Linear(width, self.size)
        self.mixed = Blocks(heads * self.size // blocks, width, blocks)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.query(x).view(b, t, -1, self.size).transpose(1, 2)
        v = self.value(x).view(b, t, -1, self.size).transpose(1, 2)
        v = repeated(v, self.times)
        found = ((q @ v.transpose(2, 3)).softmax(-1) @ v).transpose(1, 2)
        return self.out(self.mixed(found.reshape(b, t, self.blocks, -1)).reshape(b, t, -1))


class Model(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention = Attention(width, heads)

    def forward(self, x):
        return x + self.attention(x)
"""


@pytest.mark.processes
def test_a_layer_between_that_multiplies_block_by_block_is_split_by_blocks(tmp_path):
    """The single head of values is whole, and repeated for a rank's own queries."""
    found = derived(tmp_path, BY_BLOCKS, STEP.replace("WIDTH", "1024"))
    assert {
        'attention.query ["weight", "bias"], axis=0',
        'attention.mixed "weight", axis=0',
        'attention.out "weight", axis=1',
    } == shards(found.text)
    source, file, out = str(tmp_path / "source.py"), tmp_path / "s.py", tmp_path / "out"
    file.write_text(found.text)
    write(out, rewrite(source, str(file)).files)
    verified = verify(out, chosen(out, [2, 4]), source=source, schedule=str(file))
    assert verified.ok, verified.render()


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("reshape(b, t, self.blocks, -1)", "reshape(b, t, -1, self.blocks).mT"),  # of each head
        (
            "view(self.blocks, -1, x.shape[-1])",
            "view(-1, self.blocks, x.shape[-1]).transpose(0, 1)",
        ),
    ],
)
def test_a_layer_whose_blocks_are_no_heads_of_a_rank_stays_whole(text, other, tmp_path):
    source = BY_BLOCKS.replace(text, other)
    found = derived(tmp_path, source, STEP.replace("WIDTH", "1024"))
    assert 'attention.mixed "weight", axis=0' not in shards(found.text)


def test_of_what_cannot_be_split_the_refusal_of_the_likeliest_way_is_said(tmp_path):
    source = BY_DISTANCE.replace("zeros(most, heads)", "zeros(most, 1)")
    source = source.replace("* self.temperature", "* self.temperature.softmax(0)")
    found = derived(tmp_path, source, STEP.replace("WIDTH", "1024"))
    said = " ".join(found.text.replace("#", " ").split())
    assert "`attention.out`: `mul` combines a part" in said


GIVEN = """
from torch import nn


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Stack(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.layers = nn.ModuleList([Residual(MLP(width)) for _ in range(depth)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.query = nn.Identity()
        self.query.in_features = width
        self.first, self.second = Stack(width, 2), Stack(width, 1)

    def forward(self, x):
        return self.second(self.first(x))
"""


@pytest.mark.parametrize(("width", "second"), [("1024", "width"), ("64", "width"), ("4096", "32")])
def test_what_other_instances_have_too_is_split_in_all_of_them(width, second, tmp_path):
    """Also those that by themselves would not pay."""
    step = STEP.replace("WIDTH", width).replace("attention.query", "query")
    source = GIVEN.replace("Stack(width, 1)", f"Stack({second}, 1)")
    source = source.replace("self.first(x)", f"self.first(x)[..., :{second.replace('width', '')}]")
    found = derived(tmp_path, source, step)
    assert found.share == 1


def test_what_makes_other_numbers_is_found_by_leaving_out_one_after_the_other(
    tmp_path, monkeypatch
):
    """Such a refusal says all lines of the schedule, the smallest group is not to blame."""
    source = GIVEN.replace(
        "self.first, self.second = Stack(width, 2), Stack(width, 1)\n",
        "self.first, self.second = Residual(MLP(width)), Stack(width, 2)\n",
    )
    step = STEP.replace("WIDTH", "1024").replace("attention.query", "query")
    asked = []

    def refused(source, text, *_):
        asked.append(text)
        is_wrong = '*.inner.up"].shard' in text
        return errors.OtherNumbers("what comes of `first.inner` is not") if is_wrong else None

    monkeypatch.setattr(derive_module, "_refused", refused)
    found = derived(tmp_path, source, step)
    assert [group.patterns for group in found.groups] == [("first.inner.up", "first.inner.down")]
    assert len(asked) > 2


def test_a_list_without_parameters_is_not_checkpointed():
    """Of the model: a small one's may have some, so that it is called there as a layer is."""
    model = nn.Module()
    model.same = nn.ModuleList([nn.Identity(), nn.Identity()])
    model.projected = nn.ModuleList([nn.Linear(4, 4), nn.Identity()])
    nodes = Tree(model).nodes
    assert derive_module._checkpointed(nodes["same"]) is None
    assert derive_module._checkpointed(nodes["projected"]) == ""


def test_what_is_called_of_a_layer_that_is_a_list_is_checkpointed():
    """By its name: what a list holds may be None, or a list itself."""

    def layer():
        inner = nn.ModuleList([nn.LayerNorm(4), nn.Linear(4, 4), nn.Identity()])
        return nn.ModuleList([None, nn.ReLU(), nn.Linear(4, 8), inner])

    model = nn.Module()
    model.layers = nn.ModuleList([layer(), layer()])
    found = derive_module._checkpointed(Tree(model).nodes["layers"])
    assert found == '["{2,3.0,3.1}"]'


def test_what_is_tied_counts_once_in_the_share(tmp_path):
    source = GIVEN.replace(
        "self.first, self.second = Stack(width, 2), Stack(width, 1)\n",
        "self.first = Residual(MLP(width))\n        self.second = Residual(MLP(width))\n"
        "        self.second.inner.up.weight = self.first.inner.up.weight\n",
    )
    step = STEP.replace("WIDTH", "1024").replace("attention.query", "query")
    assert derived(tmp_path, source, step).share == 1


def test_where_nothing_pays_everything_is_split_and_says_so_once(tmp_path):
    made = "self.attention = Attention(width, heads)\n"
    words = "        self.words, self.head = nn.Embedding(99, width), nn.Linear(width, 99)\n"
    source = SINKS.replace(made, made + words).replace(
        "return x + self.attention(x)",
        "x = self.words(x)\n        return self.head(self.attention(x))",
    )
    step = STEP.replace("WIDTH", "64").replace(
        "randn(2, 5, model.attention.query.in_features", "randint(99, (2, 5)"
    )
    found = derived(tmp_path, source, step)
    assert found.share > 0.9
    said = " ".join(found.text.replace("#", " ").split())
    assert said.count(NONE_PAYS) == 1 and "It takes longer" not in said


OF_TORCH = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.query = nn.Embedding(width, width)
        self.layer = nn.TransformerEncoderLayer(width, heads, batch_first=True)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(2)])

    def forward(self, ids):
        return self.blocks(self.layer(self.query(ids)))
"""


STEP_OF_TORCH = """\
import torch


def model(m):
    return m.Model(64, 4)


def inputs(model):
    return {"ids": torch.randint(64, (2, 5))}


def loss(outputs):
    return outputs.square().mean()
"""


def test_attention_of_torch_is_split_with_what_it_holds(tmp_path):
    found = derived(tmp_path, OF_TORCH, STEP_OF_TORCH)
    assert found.share > 0.8
    text = shards(found.text)
    assert 'layer.linear1 ["weight", "bias"], axis=0' in text
    assert '*.attention ["in_proj_weight", "in_proj_bias"], axis=0, parts=3' in text


def test_a_small_stand_in_is_split_beside_attention_of_torch(tmp_path):
    """Whether splitting it pays is not estimated, so this decides nothing for the other layers."""
    further = "self.more = nn.Sequential(*[Block(width, 2 * heads) for _ in range(3)])"
    source = OF_TORCH.replace("self.layer = nn.T", f"{further}\n        nn.T")
    source = source.replace("self.layer(self.query(ids))", "self.more(self.query(ids))")
    text = shards(derived(tmp_path, source, STEP_OF_TORCH).text)
    assert 'more.*.up ["weight", "bias"], axis=0' in text
    assert 'blocks.*.up ["weight", "bias"], axis=0' in text


def test_a_repeated_layer_is_no_head(tmp_path):
    """Also where it gives as many features as there are words."""
    source = OF_TORCH.replace("self.attention = nn.M", "nn.M").replace("self.layer = nn.T", "nn.T")
    source = source.replace("x = x + self.attention(x, x, x, need_weights=False)[0]\n", "")
    source = source.replace("self.layer(self.query(ids))", "self.query(ids)")
    step = STEP_OF_TORCH.replace("Model(64, 4)", "Model(512, 4)").replace("64,", "512,")
    assert '*.up ["weight", "bias"], axis=0' in shards(derived(tmp_path, source, step).text)


NESTED = (
    MLP
    + """

class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.blocks = nn.ModuleList()
        self.last = nn.ModuleList()
        for _ in range(2):
            for _ in range(2):
                self.blocks.append(MLP(width))
        for _ in range(4):
            self.last.append(MLP(width))

    def forward(self, x):
        for block in (*self.blocks, *self.last):
            x = x + block(x)
        return x
"""
)


def test_what_is_not_counted_is_checkpointed_as_a_whole(tmp_path):
    step = STEP.replace("m.Model(WIDTH, 8)", "m.Model(32)").replace("m.Model(32, 4)", "m.Model(16)")
    step = step.replace("model.attention.query.in_features", "model.blocks[0].up.in_features")
    found = derived(tmp_path, NESTED, step)
    assert 's["last"][:ckpt_ratio].checkpoint()\n    if ckpt_ratio >= 0.5:' in found.text
    assert '        s["blocks"][:].checkpoint()\n' in found.text
    (tmp_path / "s.py").write_text(found.text)
    rewrite(str(tmp_path / "source.py"), str(tmp_path / "s.py"), ["ckpt_ratio=0.5"])


STACKED = (
    MLP
    + """

class Stack(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.block = nn.ModuleList()
        for i in range(2):
            self.block.append(MLP(width + 0 * i))

    def forward(self, x):
        for block in self.block:
            x = x + block(x)
        return x


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.encoder, self.decoder = Stack(width), Stack(width)

    def forward(self, x):
        return self.decoder(self.encoder(x))
"""
)


def test_what_one_class_makes_in_a_loop_is_checkpointed_in_all_its_instances(tmp_path):
    step = STEP.replace("m.Model(WIDTH, 8)", "m.Model(32)").replace("m.Model(32, 4)", "m.Model(16)")
    step = step.replace(
        "model.attention.query.in_features", "model.encoder.block[0].up.in_features"
    )
    found = derived(tmp_path, STACKED, step)
    for path in ("encoder", "decoder"):
        assert f's["{path}.block"][:ckpt_ratio].checkpoint()\n' in found.text


def test_heads_are_split_on_two_ranks_or_not_at_all(tmp_path):
    """With what the module has for each head in a module beside the layers."""
    source, file = tmp_path / "net.py", tmp_path / "step.py"
    apart = "class Sinks(nn.Module):\n    def __init__(self, heads):\n        super().__init__()\n"
    apart += "        self.sinks = nn.Parameter(torch.zeros(heads))\n\n    def forward(self):\n"
    apart += "        return self.sinks.view(1, -1, 1, 1)\n\n\nclass Attention"
    source.write_text(
        SINKS.replace("class Attention", apart, 1)
        .replace("self.sinks = nn.Parameter(torch.zeros(heads))\n\n    def forward(self, x)", "SET")
        .replace("SET", "self.apart = Sinks(heads)\n\n    def forward(self, x)")
        .replace("self.sinks.view(1, -1, 1, 1).expand", "self.apart().expand")
    )
    file.write_text(STEP.replace("WIDTH", "1024"))
    split = shards(derive(str(source), str(file)).text)
    assert 'attention.apart "sinks", axis=0' in split
    assert 'attention.{query,key,value} ["weight", "bias"], axis=0' in split
    file.write_text(STEP.replace("WIDTH, 8", "1008, 9"))
    text = derive(str(source), str(file)).text
    assert not shards(text) and "of which 2 ranks cannot have the same number" in " ".join(
        text.replace("#", "").split()
    )


def test_stages_whose_heads_divide_are_split_beside_those_whose_heads_do_not(tmp_path):
    """As Swin's: three heads in the first stage, and six in the next one."""
    source = SINKS.partition("class Model")[0]
    source += """class Stage(nn.Module):
    def __init__(self, width, heads, end):
        super().__init__()
        self.blocks = nn.ModuleList(Attention(width, heads) for _ in range(2))
        self.end = nn.Linear(width, 2 * width) if end else nn.Identity()

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.end(x)


class Model(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        made = ((width * 2**i, heads * 2**i, i == 0) for i in range(2))
        self.stages = nn.ModuleList(Stage(*each) for each in made)

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return x
"""
    step = STEP.replace("WIDTH, 8", "384, 3").replace("32, 4", "48, 3")
    step = step.replace("model.attention.query.in", "model.stages[0].blocks[0].query.in")
    found = derived(tmp_path, source, step)
    assert {path.split()[0] for path in shards(found.text)} == {
        "1.blocks.*.{query,key,value}",
        "1.blocks.*",
        "1.blocks.*.out",
    }
    assert 0.7 < found.share < 0.8 and "Left whole: `stages.0.blocks.*.{" in found.text


TAKEN_OUT = """
import torch
from torch import nn
from transformers import AutoModel, LlamaConfig

SMALL = dict(vocab_size=32, hidden_size=32, intermediate_size=64, num_attention_heads=2)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x):
        return x + self.up(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        base = AutoModel.from_config(LlamaConfig(num_hidden_layers=4, **SMALL))
        self.parts, self.rotary = base.layers, base.rotary_emb
        self.own = nn.ModuleList([Own() for _ in range(4)])

    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device)[None]
        for part in self.parts:
            x = part(x, position_embeddings=self.rotary(x, places))
        for own in self.own:
            x = own(x)
        return x
"""


def test_layers_of_what_is_taken_apart_are_not_checkpointed(tmp_path):
    """Those of the file's own are: what makes the others would not see another class."""
    step = "import torch\n\n\ndef model(m):\n    return m.Model()\n\n\n"
    step += 'def inputs(model):\n    return {"x": torch.randn(2, 8, 32)}\n\n\n'
    step += "def loss(outputs):\n    return outputs.square().mean()\n"
    text = derived(tmp_path, TAKEN_OUT, step).text
    assert 'layers = s["own"]' in text
    assert '"parts"' not in text


PARTS = """\
import copy

from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        block = Block()
        self.blocks = nn.ModuleList([copy.deepcopy(block) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""
AROUND_PARTS = """\
import copy

from torch import nn

from {parts} import Body


class Net(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body, self.head = body, nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body(x))
"""
PARTS_STEP = """\
import torch
from {parts} import Body


def model(m):
    return m.Net(Body())


def inputs(model):
    return {{"x": torch.randn(2, 8)}}


def loss(outputs):
    return outputs.square().mean()
"""


def test_a_list_that_the_schedule_makes_of_originals_is_not_checkpointed(tmp_path, monkeypatch):
    """It makes the list of what it imports, not of the output's classes."""
    parts = f"parts_{tmp_path.name}"
    (tmp_path / f"{parts}.py").write_text(PARTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    around, step = (text.format(parts=parts) for text in (AROUND_PARTS, PARTS_STEP))
    rewritten, is_run = derive_module.rewrite, []

    def noted(*given, tries=None):
        is_run.append(tries is None)
        return rewritten(*given, tries=tries)

    monkeypatch.setattr(derive_module, "rewrite", noted)
    found = derived(tmp_path, around, step)
    assert is_run.count(False) == 1  # that layers are of another file shows when it is built
    assert "checkpoint(" not in found.text
    assert "is not checkpointed: " in " ".join(found.text.split())
    assert "cut_evenly(" in found.text  # stages recompute nothing


@pytest.mark.parametrize("seed", range(20))
def test_what_does_not_go_together_is_what_asking_one_by_one_would_leave_out(seed):
    random = Random(seed)
    groups = [Group((Shard(f"m{n}", ("weight",), 0),), parameters=n) for n in range(9)]
    random.shuffle(groups)
    apart = [set(random.sample(range(9), random.choice([1, 2, 2, 3]))) for _ in range(seed % 5)]
    asked = []

    def refusal(lines):
        asked.append(lines)
        numbers = {int(number) for number in re.findall(r"m([0-9]+)", "".join(lines))}
        return errors.RewriteError("no") if any(each <= numbers for each in apart) else None

    search = object.__new__(Search)
    search.oracle = SimpleNamespace(refusal=refusal)
    search._refuse = lambda groups, why: None
    kept = []
    for group in sorted(groups, key=lambda g: -g.parameters):
        if refusal(lines_of([*kept, group])) is None:
            kept.append(group)
    asked.clear()
    assert search._together(groups) == [group for group in groups if group in kept]
    assert apart or len(asked) == 1


MODULATED = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 3 * width))

    def forward(self, x, c):
        shift, scale, gate = self.modulation(c)[:, None].chunk(3, dim=-1)
        return x + gate * self.down(self.up(self.norm(x) * (1 + scale) + shift).relu())


class Net(nn.Module):
    def __init__(self, width=1024):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])

    def forward(self, x, c):
        for block in self.blocks:
            x = block(x, c)
        return x
"""


def test_what_is_taken_apart_whole_is_gathered(tmp_path):
    """Shift, scale and gate of a block, as DiT has them: a third of its parameters."""
    step = STEP_OF_TORCH.replace("m.Model(64, 4)", "m.Net()").replace(
        "randint(64, (2, 5))", 'randn(2, 9, 1024), "c": torch.randn(2, 1024)'
    )
    found = derived(tmp_path, MODULATED, step.replace('"ids"', '"x"'))
    assert found.share > 0.99
    gathered = '"fwd_post", "all_gather", axis=-1, tensor_parallel_output_grad=False'
    assert f'["*.modulation.1"].sync(\n            {gathered}\n' in found.text


KEEPS_ITS_LOSS = """\
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self, words=512, width=64):
        super().__init__()
        self.table, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.last_loss = None

    def forward(self, ids, targets):
        logits = self.head(self.table(ids))
        self.last_loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, self.last_loss
"""
IDS = """\
import torch
from torch.nn import functional as F


def model(m):
    return m.Model()


def inputs(model):
    return {"ids": torch.randint(0, 512, (2, 5)), "targets": torch.randint(0, 512, (2, 5))}


def loss(outputs, targets):
    return LOSS
"""


@pytest.mark.parametrize(
    ("loss", "is_worked_out"),
    [
        ("outputs[1]", False),
        ("outputs[1] + 0.5 * outputs[1]", False),
        ("F.cross_entropy(outputs[0].flatten(0, 1), targets.flatten())", True),
    ],
)
def test_logits_of_which_the_users_own_loss_is_worked_out_are_whole(loss, is_worked_out, tmp_path):
    text = derived(tmp_path, KEEPS_ITS_LOSS, IDS.replace("LOSS", loss)).text
    assert ("parallel_loss" in text) is not is_worked_out


LIBRARY = """\
import functools


@functools.lru_cache
def sizes_of(shape, heads):
    return (*shape[:-1], heads, shape[-1] // heads)


def by_head(x, heads):
    return x.reshape(sizes_of(tuple(x.shape), heads)).transpose(1, 2)
"""
OF_A_LIBRARY = """\
import torch
from slapo_rewrite_test_library import by_head
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (by_head(each(x), self.heads) for each in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention = Attention(width, heads)

    def forward(self, x):
        return x + self.attention(x)
"""


def test_a_library_that_remembers_sizes_is_not_asked_of_another_run(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "slapo_rewrite_test_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(folder)
    found = derived(tmp_path, OF_A_LIBRARY, STEP.replace("WIDTH", "1024"))
    assert found.share > 0.9


def test_the_loss_of_a_file_takes_targets_that_the_model_is_not_given(tmp_path):
    step = STEP_OF_TORCH.replace("(2, 5))}", '(2, 5)), "y": torch.randn(2, 5, 64)}')
    step = step.replace("loss(outputs)", "loss(outputs, y)").replace(
        "outputs.sq", "(outputs - y).sq"
    )
    assert ".shard(" in derived(tmp_path, OF_TORCH, step).text
