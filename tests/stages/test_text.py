"""The text of stages."""

import ast
from pathlib import Path

import black
import pytest

from slapo_rewrite import errors
from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.stages.flat import Flat, Line
from slapo_rewrite.stages.set_apart import with_loss_apart
from tests.rewriting import refused, rewritten
from tests.stages.cases import CASES, for_torch
from tests.stages.test_refusals import SCHEDULE, written

GPT = Path(__file__).parents[1] / "models"


def pipeline_of(folder: Path, source: str, schedule: str) -> str:
    (folder / "s.py").write_text(schedule)
    return rewrite(source, str(folder / "s.py")).files["pipeline.py"]


def method(text: str, stage: int, name: str) -> str:
    """A method of a stage's class."""
    classes = {n.name: n for n in ast.parse(text).body if isinstance(n, ast.ClassDef)}
    body = next(node.body for own, node in classes.items() if own.endswith(f"Stage{stage}"))
    found = next(n for n in body if isinstance(n, ast.FunctionDef) and n.name == name)
    return "\n".join(
        line[4:] for line in ast.get_source_segment(text, found, padded=True).split("\n")
    )


def test_a_loop_over_layers_is_divided(tmp_path):
    text = pipeline_of(tmp_path, CASES["gpt"].source, CASES["gpt"].schedule)
    assert (
        method(text, 0, "forward")
        == """\
def forward(self, idx):
    T = idx.size(1)
    assert (
        T <= self.config.block_size
    ), f"{T} tokens are more than the model has positions"
    positions = torch.arange(T, device=idx.device)
    x = self.transformer.drop(
        self.transformer.wte(idx) + self.transformer.wpe(positions)
    )
    for block in self.transformer.h[:2]:
        x = block(x)
    return x"""
    )
    assert (
        method(text, 1, "forward")
        == """\
def forward(self, x):
    for block in self.transformer.h[2:]:
        x = block(x)
    logits = self.lm_head(self.transformer.ln_f(x))
    return logits"""
    )
    assert (
        method(text, 1, "step_loss")
        == """\
def step_loss(self, logits, targets):
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))"""
    )
    assert black.format_str(text, mode=black.Mode()) == text


def test_a_model_may_call_its_criterion_loss(tmp_path):
    source = """\
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.loss = nn.MSELoss()

    def forward(self, x, y):
        x = self.first(x)
        return self.loss(self.last(x), y)
"""
    given = '{"x": torch.randn(2, 4), "y": torch.randn(2, 4)}'
    schedule = (
        "import torch\ndef model(m):\n    return m.Net()\n"
        f"def inputs(model):\n    return {given}\ndef loss(outputs):\n    return outputs\n"
        "def schedule(s):\n    s['first'].cut_pipeline_stage()\n"
    )
    text = rewritten(tmp_path, source, schedule).files["pipeline.py"]
    assert "return self.loss(" in method(text, 1, "step_loss")


def test_masks_and_rotary_tables_are_worked_out_again(tmp_path):
    text = pipeline_of(tmp_path, CASES["llama"].source, CASES["llama"].schedule)
    assert (
        method(text, 2, "forward")
        == """\
def forward(self, inputs):
    hidden_states, attention_mask = inputs
    position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    position_ids = position_ids.unsqueeze(0)
    causal_mask = create_causal_mask(
        config=self.model.config,
        inputs_embeds=hidden_states,
        attention_mask=attention_mask,
        past_key_values=None,
        position_ids=position_ids,
    )
    position_embeddings = self.model.rotary_emb(
        hidden_states, position_ids=position_ids
    )
    for decoder_layer in self.model.layers[2:3]:
        hidden_states = decoder_layer(
            hidden_states,
            attention_mask=causal_mask,
            position_embeddings=position_embeddings,
            position_ids=position_ids,
        )
    return hidden_states, attention_mask"""
    )


def test_a_value_that_only_one_branch_binds_has_its_other_value(tmp_path):
    lines = ["x = self.first(x)", "z = None", "if x.sum() > 1e9:", "    z = x", "# Both."]
    lines += ["x = self.sequence(x)", "if z is not None:", "    x = x + z", "x = self.inner(x)"]
    text = rewritten(tmp_path, written(*lines), SCHEDULE.format(cut='s["inner"]["a"]'))
    assert (
        method(text.files["pipeline.py"], 0, "forward")
        == """\
def forward(self, x):
    x = self.first(x)
    z = None
    if x.sum() > 1e9:
        z = x
    # Both.
    x = self.sequence(x)
    if z is not None:
        x = x + z
    x = self.inner.a(x)
    return x"""
    )


def test_a_stage_holds_what_its_methods_read(tmp_path):
    source = written("x = self.first(x)", "x = self.mixed(x)")
    source += """
    def mixed(self, x):
        return self.inner(x) + self.sequence(x)
"""
    text = rewritten(tmp_path, source, SCHEDULE.format(cut='s["first"]')).files["pipeline.py"]
    assert (
        method(text, 1, "held")
        == """\
def held(self):
    return self.inner, self.sequence, self.last, self.layers"""
    )


def test_a_table_of_which_a_part_is_read_is_held_whole(tmp_path):
    """As layers of a list are not: Whisper reads its places from `0` on."""
    source = written("x = self.first(x)", "x = self.inner(x + self.places[0 : 0 + len(x)])")
    made = "        self.last = nn.Linear(width, 1)\n"
    source = source.replace(made, f"        self.places = nn.Parameter(torch.ones(3, 8))\n{made}")
    text = rewritten(tmp_path, source, SCHEDULE.format(cut='s["first"]')).files["pipeline.py"]
    assert "return self.inner, self.last, self.places, " in method(text, 1, "held")


@pytest.mark.parametrize(
    ("line", "method_body", "sizes"),
    [
        ("x = x / self.first.in_features", "return x", "first"),
        ("x = self.mixed(x)", "return x / self.sequence[0].in_features", None),
        ("x = self.mixed(x)", "return x / self.seen.inner.width", "seen.inner"),
        ("x = self.mixed(x)", "return x / self.seen.rounds", None),
        ("x = self.mixed(x) / self.inner.a.in_features", "return x", None),
    ],
)
def test_sizes_of_a_module_that_another_stage_holds(line, method_body, sizes, tmp_path):
    """What is counted there as the model runs is no size; what is held needs no mention."""
    source = written("x = self.first(self.seen(x))", "x = self.inner(x)", line)
    source += f"\n    def mixed(self, x):\n        {method_body}\n"
    source = source.replace(
        "        self.inner =", "        self.seen = Seen(width)\n        self.inner ="
    )
    source += """

class Size(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width

    def resize(self, width):  # which no step calls
        self.width = width


class Seen(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner, self.rounds = Size(width), 8

    def forward(self, x):
        self.rounds += {step}
        return x
""".replace("{step}", "0" if "rounds" in method_body else "1")
    schedule = SCHEDULE.format(cut='s["first"]')
    if "rounds" in method_body:
        words = refused(tmp_path, source, schedule, "SR310")
        assert "`seen.rounds`, which changes as the model runs, in another stage" in words
        return
    text = rewritten(tmp_path, source, schedule).files["pipeline.py"]
    assert f'SIZES = ("{sizes}",)' in text if sizes else "SIZES" not in text


def test_settings_that_decide_are_checked_when_stages_are_built(tmp_path):
    lines = ("x = self.first(x)", "if self.deep:", "    x = self.inner(x)", "x = self.inner(x)")
    source = written(*lines).replace(
        "        self.inner =", "        self.deep = False\n        self.inner ="
    )
    text = rewritten(tmp_path, source, SCHEDULE.format(cut='s["first"]')).files["pipeline.py"]
    assert 'SETTINGS = {"deep": False}' in text


FOR_TORCH = for_torch(SCHEDULE)


def test_for_torch_stages_take_the_arguments_by_name(tmp_path):
    text = pipeline_of(tmp_path, CASES["llama"].source, for_torch(CASES["llama"].schedule))
    assert method(text, 0, "forward").startswith("def forward(self, *, input_ids, **_):")
    assert method(text, 2, "forward").startswith(
        "def forward(self, hidden_states, *, attention_mask, **_):"
    )
    assert method(text, 2, "forward").endswith("\n    return hidden_states")
    assert 'inputs={"input_ids": "input_ids", "attention_mask": "attention_mask"}' in text
    assert 'label="labels"' in text
    assert "deepspeed" not in text.lower()
    assert black.format_str(text, mode=black.Mode()) == text


def test_for_torch_what_is_handed_on_and_an_argument_of_its_name_are_apart(tmp_path):
    lines = ("z = x", "x = self.first(x)", "x = self.inner(x) * z.sign()")
    cut = FOR_TORCH.format(cut='s["first"]')
    text = rewritten(tmp_path, written(*lines[1:2], "x = self.inner(x)"), cut)
    assert method(text.files["pipeline.py"], 1, "forward").startswith(
        "def forward(self, x, /, **_):"
    )
    text = rewritten(tmp_path, written(*lines), cut).files["pipeline.py"]
    assert method(text, 1, "forward").startswith("def forward(self, x, *, given_x, **_):")
    assert 'inputs={"given_x": "x"}' in text


def test_for_torch_the_last_stage_hands_the_loss_all_labels_but_one(tmp_path):
    source = written("x = self.inner(self.first(x))").replace("x, y)", "x, y, weight)", 1)
    source = source.replace("F.mse_loss(self.last(x), y)", "(weight * (self.last(x) - y)).mean()")
    schedule = FOR_TORCH.replace('"y": torch', '"weight": torch.rand(2, 1), "y": torch')
    text = rewritten(tmp_path, source, schedule.format(cut='s["inner"]["a"]')).files["pipeline.py"]
    assert (
        method(text, 1, "forward")
        == """\
def forward(self, x, /, *, weight, **_):
    x = self.inner.b(x)
    last_output = self.last(x)
    return last_output, weight"""
    )
    assert (
        method(text, 1, "step_loss")
        == """\
def step_loss(self, outputs, y):
    last_output, weight = outputs
    return (weight * (last_output - y)).mean()"""
    )
    assert 'inputs={"x": "x", "weight": "weight"}, label="y"' in text


SCORED = """\
class Scored(nn.Linear):
    def forward(self, x, y):
        x = super().forward(x)
        return F.mse_loss(x, y), x


class Inner("""


def test_for_torch_a_single_number_is_handed_to_the_loss_in_a_row(tmp_path):
    source = written("x = self.first(x)").replace("class Inner(", SCORED, 1)
    source = source.replace("F.mse_loss(self.last(x), y)", "self.last(x, y)[0]")
    source = source.replace("self.last = nn.Linear", "self.last = Scored")
    text = rewritten(tmp_path, source, FOR_TORCH.format(cut='s["first"]')).files["pipeline.py"]
    assert method(text, 1, "forward").endswith("return last_output_0[None], last_output_1")
    assert "    (last_output_0,) = last_output_0\n" in method(text, 1, "step_loss")


def test_for_torch_what_an_argument_says_of_the_loss_is_done_in_the_last_stage(tmp_path):
    """Torch divides what the loss is given by rows, a plain `True` not."""
    source = written("x = self.inner(self.first(x))").replace("x, y)", "x, y, halved)", 1)
    source = source.replace("F.mse_loss(self.last(x), y)", "F.mse_loss(self.last(x), y)\n").replace(
        "        return F.mse", "        x = F.mse"
    )
    source += "        if halved:\n            x = x / 2\n        return x\n"
    schedule = FOR_TORCH.replace('"y": torch', '"halved": True, "y": torch')
    text = rewritten(tmp_path, source, schedule.format(cut='s["inner"]["a"]')).files["pipeline.py"]
    assert method(text, 1, "forward").endswith("x = x / 2\n    return x[None]")
    assert "halved" not in method(text, 1, "step_loss")


COST = """\
def cost(x, y, count=None):
    return F.mse_loss(x, y) if count is None else F.mse_loss(x, y, reduction="sum") / count


class Inner("""


def test_what_forward_hands_on_by_kwargs_reaches_the_loss(tmp_path):
    source = written("x = self.first(x)", "x = self.inner(x)").replace("class Inner(", COST)
    source = source.replace("forward(self, x, y)", "forward(self, x, y, **kwargs)")
    source = source.replace("F.mse_loss(self.last(x), y)", "cost(self.last(x), y, **kwargs)")
    schedule = SCHEDULE.format(cut='s["first"]')
    schedule = schedule.replace("(2, 1)}", '(2, 1), "count": torch.tensor(3)}')
    text = rewritten(tmp_path, source, schedule).files["pipeline.py"]
    assert "return cost(last_output, y, count=count)" in method(text, 1, "step_loss")
    assert 'inputs=("x",), labels=("y", "count"))' in text
    schedule = schedule.replace("torch.tensor(3)", "3")
    said = refused(tmp_path, source, schedule, "SR310")
    assert "the step gets `count`, 3, but the engine takes only tensors" in said


LOSS = """

WEIGHT = 0.5


def loss(outputs, y):
    return WEIGHT * (outputs["z"] - y).pow(2).mean()
"""


def test_a_loss_that_the_schedule_works_out_is_the_last_stages(tmp_path):
    lines = ["x = self.first(x)", "x = self.inner(x)", "loss = x.sum()", "y = self.sequence(x)"]
    source = written(*lines)
    source = source.replace("x, y)", "x)", 1)
    source = source.replace("F.mse_loss(self.last(x), y)", "{'early': loss, 'z': self.last(y)}")
    output = rewritten(tmp_path, source, SCHEDULE.format(cut='s["first"]') + LOSS)
    text = output.files["pipeline.py"]
    assert (
        method(text, 1, "forward")
        == """\
def forward(self, x):
    x = self.inner(x)
    model_y = self.sequence(x)
    last_output = self.last(model_y)
    return last_output"""
    )
    assert (
        method(text, 1, "step_loss")
        == """\
def step_loss(self, last_output, y):
    return loss({"z": last_output}, y)"""
    )
    assert "from .modules import loss\n" in text and 'labels=("y",)' in text
    assert output.files["modules.py"].endswith(f"{LOSS.strip()}\n")


def test_a_loss_that_needs_no_labels_has_some(tmp_path):
    source = written("x = self.first(x)", "x = self.inner(x)").replace("x, y)", "x)", 1)
    source = source.replace("F.mse_loss(self.last(x), y)", "self.last(x).sum()")
    schedule = FOR_TORCH.format(cut='s["first"]').replace(', "y": torch.randn(2, 1)', "")
    text = rewritten(tmp_path, source, schedule).files["pipeline.py"]
    assert "def step_loss(self, last_output, _x):" in text
    assert 'inputs={"x": "x"}, label="x")' in text


def test_for_torch_a_loss_of_an_argument_that_is_called_as_the_result(tmp_path):
    source = written("z = x", "x = self.first(x)", "x = self.inner(x)").replace(
        "return F.mse_loss(self.last(x), y)",
        "x = self.last(x)\n        return F.l1_loss(x, z[:, :1])",
    )
    text = rewritten(tmp_path, source, FOR_TORCH.format(cut='s["first"]')).files["pipeline.py"]
    assert method(text, 1, "step_loss").startswith("def step_loss(self, x, given_x):")


def test_what_is_called_for_each_element_is_not_called_before():
    line = Line("rows = [self.last(row) for row in x]", errors.Span("model.py", 1))
    flat = with_loss_apart(Flat(("x",), [line], "loss(rows)", {}), lambda text: "last" in text)
    assert flat.lines == [line]


def test_a_line_of_several_statements_gathers_no_logits():
    at = errors.Span("model.py", 1)
    gather = Line("logits = whole_logits(h, self.head)", at)
    both = Line("h = self.body(x)\nh = h * 2", at)
    flat = with_loss_apart(Flat(("x",), [both, gather], "loss(logits)", {}), lambda t: "body" in t)
    *before, last = flat.lines
    assert [line.text for line in before][-1:] == [both.text]
    assert last.text == f"if not self.training:\n    {gather.text}"
