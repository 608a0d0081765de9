"""The rehearsal that runs before an output is written."""

import random
import threading
import time
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module

from slapo_rewrite import errors
from slapo_rewrite.changes import recomputation
from slapo_rewrite.emit import construct
from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.model import rehearsal
from slapo_rewrite.model.rehearsal import DoesNotRunError, _references, _Small
from slapo_rewrite.model.simulated_ranks import on_ranks
from slapo_rewrite.model.step_results import Step, worst
from slapo_rewrite.runtime import guards
from tests.rewriting import SPLITTING, refused, rewritten

DRAWING = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        gain = {nn.Linear: 3.0}
        for m in self.modules():
            if ASKED:
                nn.init.constant_(m.weight, 0.5)

    def forward(self, x):
        return self.down(self.up(x).relu())
"""
SPLIT = f"{SPLITTING}    split(s)\n"


@pytest.mark.parametrize(
    "asked",
    [
        "type(m) is nn.Linear",
        "m.__class__ == nn.Linear",
        "m.__class__.__name__.startswith('Lin')",
        "type(m) in gain",
        "str(m).startswith('Linear(')",
    ],
)
def test_a_constructor_that_asks_for_a_very_class_is_refused_and_the_advice_works(asked, tmp_path):
    words = refused(tmp_path, DRAWING.replace("ASKED", asked), SPLIT, "SR106")
    assert "in one process it starts otherwise: `up.weight` is off by" in words
    assert "use `isinstance(m, nn.Linear)`" in words
    rewritten(tmp_path, DRAWING.replace("ASKED", "isinstance(m, nn.Linear)"), SPLIT)
    rewritten(tmp_path, DRAWING.replace("ASKED", "'Linear' in type(m).__name__"), SPLIT)


@pytest.mark.parametrize("line", ["split(s)", "s['up'].annotate('weight', 'decays', False)"])
def test_random_numbers_in_a_buffer_that_no_state_dict_holds_are_the_originals(line, tmp_path):
    noise = "self.register_buffer('noise', torch.rand(8), persistent=False)"
    source = DRAWING.replace("        gain =", f"        {noise}\n        gain =")
    source = source.replace("ASKED", "False").replace("self.up(x)", "self.up(x + self.noise)")
    warnings = rewritten(tmp_path, source, f"{SPLITTING}    {line}\n").warnings
    says = [each.startswith("no state dict holds `noise`") for each in warnings]
    assert says == ([True] if line == "split(s)" else [])  # as ranks draw fewer numbers before
    kept = source.replace(", persistent=False", "")
    assert not rewritten(tmp_path, kept, f"{SPLITTING}    {line}\n").warnings


def test_a_constructor_may_run_split_layers(tmp_path):
    """Ranks are built one after the other here, and would wait for one another."""
    run = "        width = self.down(self.up(torch.zeros(1, 8))).shape[-1]\n        gain ="
    source = DRAWING.replace("        gain =", run).replace("ASKED", "False and width")
    rewritten(tmp_path, source, SPLIT)


def test_what_an_object_of_a_class_of_the_file_holds_is_compared():
    """The class is another one in the output."""
    one, other = (type("Outputs", (), {})() for _ in range(2))
    one.hidden, other.hidden = torch.ones(3), torch.zeros(3)
    steps = [Step(each, None, None, {}, {}, False) for each in (one, other)]
    assert worst(*steps)[1:] == ("hidden", "the output (in eval mode)")


def test_a_module_that_the_schedule_brings_along_draws_its_own_weights(tmp_path):
    lines = "    s['up'].replace(Other)\n"
    brought = "class Other(nn.Linear):\n    def __init__(self, *sizes):\n"
    brought += "        super().__init__(*sizes)\n        nn.init.ones_(self.weight)\n"
    brought += "        torch.rand(5)\n\n\n"
    schedule = SPLITTING.replace("def schedule(s):", f"{brought}def schedule(s):")
    rewritten(tmp_path, DRAWING.replace("ASKED", "False"), schedule + lines)


def test_a_schedules_loss_that_fails_on_the_original_is_no_step():
    schedule = types.SimpleNamespace(
        model=lambda m: m.Linear(4, 3),
        inputs=lambda model: {"input": torch.randn(2, 4)},
        loss=lambda outputs: outputs["loss"],
    )
    with pytest.raises(DoesNotRunError) as raised:
        _references(_Small(schedule, nn))  # type: ignore[arg-type]
    assert isinstance(raised.value.__cause__, IndexError)
    schedule.loss = lambda outputs, y: (outputs - y).square().mean()
    given = {"input": torch.randn(2, 4), "y": torch.randn(2, 3)}  # the target is not the model's
    schedule.inputs = lambda model: given
    (reference,) = _references(_Small(schedule, nn))  # type: ignore[arg-type]
    assert reference.want.loss is None
    assert all(gradient.any() for gradient in reference.want.gradients.values())


def test_a_parameter_without_elements_is_compared():
    """Vision models hold one if they are configured without register tokens."""

    def made():
        model = nn.Linear(4, 3)
        model.tokens = nn.Parameter(torch.zeros(0, 3))
        model.register_forward_hook(lambda module, _, y: y + module.tokens.sum(0))
        return model

    schedule = types.SimpleNamespace(
        model=lambda m: made(),
        inputs=lambda model: {"input": torch.randn(2, 4)},
        loss=lambda outputs: outputs.square().sum(),
    )
    (reference,) = _references(_Small(schedule, nn))  # type: ignore[arg-type]
    assert reference is not None and reference.want.gradients["tokens"].shape == (0, 3)
    assert worst(reference.want, reference.want)[0] == 0


def test_one_rank_computes_at_a_time():
    """Two at once fight for the interpreter, and take more time together."""
    computing = threading.Semaphore(1)

    def run(turn):
        with turn:
            total = torch.ones(1)
            for _ in range(5):
                assert computing.acquire(blocking=False)
                time.sleep(0.002)  # others would begin now
                computing.release()
                dist.all_reduce(total)
        return total

    assert on_ranks(3, run) == [torch.tensor([243.0])] * 3


def test_a_class_that_transformers_initialises_by_its_package_is_given_back(tmp_path):
    """Where nothing is called for: it is of no package of transformers', and draws other weights.

    A share that comes to no layer is called for.
    """
    schedule = tmp_path / "s.py"
    schedule.write_text(
        "import torch\nfrom transformers import Wav2Vec2BertConfig\n\n\ndef model(m):\n"
        "    return m.Wav2Vec2BertModel(Wav2Vec2BertConfig(num_hidden_layers=2))\n\n\n"
        "def inputs(model):\n    return {'input_features': torch.randn(2, 16, 160)}\n\n\n"
        "def schedule(s, again=-1.0):\n    if again >= 0:\n"
        "        s['encoder.layers'][:again].checkpoint()\n"
    )
    source = "transformers.models.wav2vec2_bert.modeling_wav2vec2_bert"
    assert "LibraryModel" not in rewrite(source, str(schedule)).diff(0)
    for share in ("0.0", "1.0"):
        assert "(LibraryModel, PreTrainedModel)" in rewrite(
            source, str(schedule), [f"again={share}"]
        ).diff(0)


TURNING = """\
import torch
from torch import nn


class Turns:
    runs = 0

    def __call__(self, x):
        self.runs += 1
        return x * self.runs


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.turned = Turns()

    def forward(self, x):
        return self.turned(self.a(NOISY)).tanh()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""


@pytest.mark.parametrize("noisy", ["x", "x + torch.rand(8)"])
def test_a_model_that_computes_something_else_each_time_is_compared_from_the_start(
    noisy, monkeypatch, tmp_path
):
    """One that draws random numbers is run in one process, with the same ones."""
    monkeypatch.setattr(construct, "check_held", lambda *_: None)
    schedule = SPLITTING + "    s['blocks.*'].checkpoint()\n"
    words = refused(tmp_path, TURNING.replace("NOISY", noisy), schedule, "SR106")
    assert "in one process the gradient of" in words


PADDED = """\
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


class Config(PretrainedConfig):
    model_type = "padded"
    vocab_size, heads = 31, 4


class Model(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.heads = config.heads
        self.embed = nn.Embedding(config.vocab_size, 16)
        self.up = nn.Linear(16, 16)
        self.down = nn.Linear(16, 16)
        self.post_init()

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        q = self.up(x).view(*x.shape[:2], self.heads, 4).transpose(1, 2)
        scores = q @ q.transpose(2, 3)
        if attention_mask is not None:
            mask = attention_mask[:, None, None, :].repeat(1, HEADS, 1, 1)
            if mask.shape != (*scores.shape[:2], 1, scores.shape[3]):
                raise ValueError("a mask of another size")
            scores = scores.masked_fill(mask == 0, -1e9)
        y = (scores.softmax(-1) @ q).transpose(1, 2)
        return self.down(y.flatten(2))
"""


LAYERS_OF_LLAMA = """\
from transformers import LlamaConfig


def model(m):
    return m.LlamaForCausalLM(LlamaConfig())


def schedule(s):
    s["model.layers.*"].checkpoint()
"""


def test_a_cache_is_filled_as_in_ordinary_training(monkeypatch, tmp_path):
    """The comparison detects a cache with an unknown name that a checkpointed layer fills twice."""
    monkeypatch.setattr(recomputation, "names_of_caches", lambda module: ())
    monkeypatch.setattr(recomputation, "carried_over", lambda *_: None)
    monkeypatch.setattr(recomputation, "change_of_given", lambda *_: None)
    file = tmp_path / "all.py"
    file.write_text(LAYERS_OF_LLAMA)
    with pytest.raises(errors.RewriteError, match="in one process it fails"):
        rewrite("transformers.models.llama.modeling_llama", str(file))


def test_what_a_mask_asks_of_the_ranks_is_tried(tmp_path):
    """A padding mask is not followed; an error that is no helper's is none of a size."""
    schedule = SPLIT.replace("m.Model()", "m.Model(m.Config())")
    schedule = schedule.replace('def inputs(model):\n    return {"x": torch.randn(2, 8)}\n\n\n', "")
    assert "inputs" not in schedule
    words = refused(tmp_path, PADDED.replace("HEADS", "self.config.heads"), schedule, "SR106")
    assert "on 2 ranks it fails: ValueError: a mask of another size" in words
    rewritten(
        tmp_path,
        PADDED.replace("HEADS", "1").replace("(*scores.shape[:2], 1", "(len(x), 1, 1"),
        schedule,
    )


@pytest.mark.parametrize(
    "in_single, compared",
    [
        ("x / attention_mask[..., None]", [(torch.float64, False)]),
        ("x * attention_mask[..., None]", [(torch.float32, True), (torch.float64, False)]),
    ],
)
def test_where_a_mask_makes_no_numbers_it_is_left_out(in_single, compared):
    """Where it makes some in single precision alone, both are compared."""

    class Model(nn.Module):
        config = types.SimpleNamespace(vocab_size=31)

        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(31, 4)

        def forward(self, input_ids, attention_mask=None):
            x = self.embed(input_ids)
            if attention_mask is None:
                return x
            if x.dtype == torch.float64:
                return x / attention_mask[..., None]
            return eval(in_single)

    made = types.SimpleNamespace(
        model=lambda m: Model(), loss=lambda outputs: outputs.square().sum()
    )
    found = _references(_Small(made, nn))  # type: ignore[arg-type]
    assert [(r.dtype, "attention_mask" in r.inputs) for r in found] == compared


CHECKED = """import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.check(sum(p.numel() for p in self.parameters()))

    def check(self, count):
        if count != 280:
            raise ValueError("parameters are missing")

    def forward(self, x):
        return self.down(self.up(x).relu())
"""


def test_an_error_of_the_models_own_on_a_rank_is_none_of_a_size(tmp_path):
    words = refused(tmp_path, CHECKED, SPLIT, "SR106")
    assert "on 2 ranks it fails: ValueError: parameters are missing" in words


def test_a_model_that_is_too_large_to_be_run_is_warned_of(monkeypatch, tmp_path):
    monkeypatch.setattr(rehearsal, "MOST_PARAMETERS", 10)
    source = DRAWING.replace("ASKED", "False")
    (warning,) = rewritten(tmp_path, source, SPLIT).warnings
    assert "the last check, a run against the original, was left out" in warning
    assert not rewritten(tmp_path, source, f"{SPLITTING}    pass\n").warnings


@pytest.mark.parametrize(("width", "is_run"), [(256_000, True), (448_000, False)])
def test_a_small_model_is_run_as_far_as_it_is_one(tmp_path, width, is_run):
    """Of 4 million parameters and of 7."""
    source = DRAWING.replace("ASKED", "False").replace("16", str(width))
    schedule = f"{SPLIT}\n\ndef verify_model(m):\n    return m.Model()\n"
    warnings = rewritten(tmp_path, source, schedule).warnings
    assert any("against the original, was left out" in w for w in warnings) is not is_run


DOES_NOT_RUN = "nothing was compared with the original, whose small model does not run: "


def test_a_model_that_does_not_run_is_warned_of_and_its_start_compared(tmp_path):
    schedule = SPLIT.replace("randn(2, 8)", "randn(2, 7)")
    output = rewritten(tmp_path, DRAWING.replace("ASKED", "False"), schedule)
    assert any(f"{DOES_NOT_RUN}mat1 and mat2" in warning for warning in output.warnings)
    words = refused(tmp_path, DRAWING.replace("ASKED", "type(m) is nn.Linear"), schedule, "SR106")
    assert "in one process it starts otherwise: `up.weight` is off by" in words


def test_a_constructor_may_draw_with_python():
    """It draws the same each time, as of torch: hyper connections begin with any of the streams."""

    def made(m: types.ModuleType) -> nn.Module:
        model = m.Linear(2, 2)
        nn.init.constant_(model.weight, random.random())
        return model

    small = _Small(types.SimpleNamespace(model=made), nn)  # type: ignore[arg-type]
    before = random.getstate()
    (_, one), (_, other) = small.drawn(), small.drawn()
    assert torch.equal(one["weight"], other["weight"]) and random.getstate() == before


def test_so_is_one_without_inputs(tmp_path):
    schedule = f"{SPLITTING}    s['up'].checkpoint()\n".replace("def inputs", "def others")
    (warning,) = rewritten(tmp_path, DRAWING.replace("ASKED", "False"), schedule).warnings
    assert f"{DOES_NOT_RUN}no inputs for Model can be generated" in warning
    assert "define inputs(model) in the schedule" in warning


@pytest.mark.parametrize("most", ["MOST_OF_SMALL", "MOST_ELEMENTS"])
def test_a_small_model_that_is_too_large_to_be_run_is_warned_of(most, monkeypatch, tmp_path):
    source = DRAWING.replace("ASKED", "False")
    smaller = SPLIT + "\n\ndef verify_model(m):\n    return m.Model()\n"
    monkeypatch.setattr(rehearsal, most, 10)
    (warning,) = rewritten(tmp_path, source, smaller).warnings
    assert "the small model has" in warning and "was left out" in warning


HEADS = """import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = {0}
        self.up = nn.Linear(8, 2 * {0})
        self.down = nn.Linear(2 * {0}, 8)

    def forward(self, x):
        heads = self.up(x).view(len(x), self.heads, 2).softmax(-1)
        return self.down(heads.flatten(1))
"""


def test_a_small_model_that_fits_no_ranks_is_warned_of(tmp_path):
    """Five heads fit five ranks, which are not tried."""
    (warning,) = rewritten(tmp_path, HEADS.format(5), SPLIT).warnings
    assert "does not fit 2 or 3 or 4 ranks (10 = 5 heads of 2 " in warning
    assert not rewritten(tmp_path, HEADS.format(6), SPLIT).warnings


def test_nothing_is_left_behind_that_looks_at_modules(tmp_path):
    """Layers that hold parts look at what is put into modules; a program's own go on without."""
    rewritten(tmp_path, DRAWING.replace("ASKED", "False"), SPLIT)
    assert guards.refuse_wrappers not in module._global_module_registration_hooks.values()
    assert guards.refuse_reworked not in module._global_parameter_registration_hooks.values()


def test_rounding_of_a_gradient_that_is_zero_is_no_other_number():
    """Such as that of a key's bias where the softmax is in single precision."""
    want, have, rounded = (
        Step(None, None, None, {"key": torch.zeros(3), "weight": torch.ones(3)}, {}, False)
        for _ in range(3)
    )
    have.gradients["key"] += 3e-9
    rounded.gradients["key"] -= 1e-9
    assert worst(want, have)[0] > rehearsal.LIMIT[torch.float64]
    assert worst(want, have, rounded)[0] == 0
    have.gradients["weight"] *= 1.01
    assert worst(want, have, rounded)[1:] == ("weight", "the gradient of")


ATTENTION = """\
import math

from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        q, k, v = (each(x).view(2, 6, 4, 4).transpose(1, 2) for each in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        weights = F.softmax(scores.float(), dim=-1).type_as(q)
        return self.o((weights @ v).transpose(1, 2).reshape(2, 6, 16))
"""


def test_a_softmax_in_single_precision_is_fused(tmp_path):
    schedule = SPLITTING.replace("(2, 8)", "(2, 6, 16)") + "    s.apply_all()\n"
    text = rewritten(tmp_path, ATTENTION, schedule).files["source_0.py"]
    assert "scaled_dot_product_attention" in text


TURNS = """\
from torch import nn


class Turns:
    taken = 0

    def take(self):
        self.taken += 1
        return self.taken


TURNS = Turns()


class Up(nn.Linear):
    def forward(self, x):
        return (super().forward(x) * TURNS.take()).sin()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = Up(8, 8)

    def forward(self, x):
        return self.up(x)
"""


def test_a_model_that_is_not_the_same_twice_is_said_not_to_be_compared(monkeypatch, tmp_path):
    monkeypatch.setattr(construct, "check_held", lambda *_: None)
    (warning,) = rewritten(tmp_path, TURNS, f"{SPLITTING}    s['up'].checkpoint()\n").warnings
    assert "computes something else each time that it is built" in warning


SLOWER = """\
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.rate, self.drop = nn.Linear(8, 8), torch.tensor(0.2), nn.Dropout(0.3)

    def forward(self, x):
        x = self.a(x)
        x = self.drop(DROPPED).sin()
        rate = self.rate
        rate += 0.1
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return self.block(x)
"""


@pytest.mark.parametrize(
    "dropped",
    [
        "F.dropout(x, self.rate.item(), self.training)",
        "F.dropout(x, self.rate.item(), self.training, inplace=True)",
        "F.alpha_dropout(x, p=self.rate.item(), training=self.training)",
        "F.scaled_dot_product_attention(x[None], x[None], x[None], None, self.rate.item())[0]",
        "F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=self.rate.item())[0]",
    ],
)
def test_the_rate_of_a_dropout_is_compared(dropped, monkeypatch, tmp_path):
    """Nothing is dropped, and yet another rate gives other numbers."""
    monkeypatch.setattr(construct, "check_held", lambda *_: None)
    source, schedule = (
        SLOWER.replace("DROPPED", dropped),
        f"{SPLITTING}    s['block'].checkpoint()\n",
    )
    assert "the gradient of `block.a." in refused(tmp_path, source, schedule, "SR106")
    rewritten(tmp_path, source.replace("rate += 0.1", "pass"), schedule)


IDLE = """\
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = Block(), Block(), Block(), Block(), Block()

    def forward(self, x):
        if not self.training:
            x = self.b(x) + self.e(x)
        x = self.a(x) + self.b.down(self.b.up(x).relu())
        return self.c.forward(x) + Block.forward(self.d, x)
"""


@pytest.mark.parametrize("wrap", ["checkpoint", "fork_rng"])
def test_what_is_asked_of_modules_that_training_does_not_call_is_told(wrap, tmp_path):
    schedule = SPLITTING + f'    s["{{a,b,c,d,e}}"].{wrap}()\n'
    said = "\n".join(rewritten(tmp_path, IDLE, schedule).warnings)
    assert f".{wrap}()` does nothing for `b` and 1 more: training calls modules inside, and" in said
    assert "s.py:25: " in said
    schedule = schedule.replace("{a,b,c,d,e}", "{a,b.*,c,e}")
    assert "does nothing" not in "".join(rewritten(tmp_path, IDLE, schedule).warnings)
