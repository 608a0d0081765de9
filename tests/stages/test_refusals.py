"""Where no stage can end: refused with the model's line, the schedule's, and advice."""

import dataclasses

import pytest

from slapo_rewrite import errors
from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.stages.dry_run import is_same
from tests.rewriting import refused, rewritten
from tests.stages.cases import for_torch

SOURCE = """\
import torch
from torch import nn
from torch.nn import functional as F


class Inner(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)

    def forward(self, x):
        x = self.a(x)
        return self.b(x)


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.inner = Inner(width)
        self.layers = nn.ModuleList([Inner(width) for _ in range(4)])
        self.sequence = nn.Sequential(nn.Linear(width, width), nn.ReLU())
        self.last = nn.Linear(width, 1)

    def forward(self, x, y):
{body}
        return F.mse_loss(self.last(x), y)
"""
SCHEDULE = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {{"x": torch.randn(2, 8), "y": torch.randn(2, 1)}}


def schedule(s):
    {cut}.cut_pipeline_stage()
"""


def written(*lines: str) -> str:
    return SOURCE.format(body="\n".join(f"        {line}" for line in lines))


@pytest.mark.parametrize(
    ("lines", "cut", "message", "shown"),
    [
        (
            ["if x.sum() > 0:", "    x = self.first(x)", "x = self.inner(x)"],
            's["first"]',
            "`first` is called inside a branch",
            "if x.sum() > 0:",
        ),
        (
            ["for _ in range(2):", "    x = self.first(x)", "x = self.inner(x)"],
            's["first"]',
            "`first` is called inside a loop that is not over layers",
            "for _ in range(2):",
        ),
        (
            [
                "for layer in self.layers:",
                "    x = layer(x)",
                "    if x.sum() > 9:",
                "        break",
            ],
            's["layers"][1]',
            "a loop with `break` cannot be divided",
            "for layer in self.layers:",
        ),
        (
            ["for layer in self.layers:", "    x = layer(x)"] * 2,
            's["layers"][1]',
            "`layers.1` is called in 2 loops",
            "for layer in self.layers:",
        ),
        (
            ["for a, b in zip(self.layers, self.sequence):", "    x = b(a(x))"],
            's["layers"][0]',
            "the lists of this loop differ in length",
            "for a, b in zip(self.layers, self.sequence):",
        ),
        (
            ["for a, b in zip(self.layers, self.first.bias):", "    x = a(x) * b"],
            's["layers"][0]',
            "the lists of this loop are not all of modules",
            "for a, b in zip(self.layers, self.first.bias):",
        ),
        (
            ["x = self.first(x)", "F.kept = x", "x = self.inner(x)"],
            's["first"]',
            "`F` is no local name",
            "F.kept = x",
        ),
        (
            [
                "x = self.first(x)",
                "z = x.sum().item()",
                "x = self.inner(x)",
                "x = self.sequence(x) * z",
            ],
            's["inner"]',
            "`x` is needed after the cut for its elements",
            "z = x.sum().item()",
        ),
        (
            ["z = {'x': x, 'sum': sum}", "x = self.inner(self.first(x))", "x = x * z['x']"],
            's["inner"]["a"]',
            "`x` is needed after the cut for its elements",
            "z = {'x': x, 'sum': sum}",
        ),
        (
            ["for i in range(int(x.shape[0])):", "    x = self.layers[i](x)"],
            's["layers"][1]',
            "`layers.1` is not called in a loop over `layers`",
            "for i in range(int(x.shape[0])):",
        ),
        (
            ["with torch.no_grad():", "    for layer in self.layers:", "        x = layer(x)"],
            's["layers"][1]',
            "`layers.1` is called inside a `with` block",
            "with torch.no_grad():",
        ),
        (
            ["def double(z):", "    return z * 2", "x = double(self.first(x))"],
            's["first"]',
            "`def` cannot be written out",
            "def double(z):",
        ),
        (
            ["self.n = 2", "x = self.inner(self.first(x))", "x = self.sequence(x) * self.n"],
            's["inner"]',
            "the stages fail where the model does not: AttributeError",
            "x = self.sequence(x) * self.n",
        ),
        (
            [
                "z = 2 * self.first(x)",
                "w = z[:, :2]",
                "x = self.inner(x)",
                "w.add_(1)",
                "x = x + z",
            ],
            's["inner"]',
            "stage 1 would have another `last_output`, since it does not see",
            "x = x + z",
        ),
        (
            ["x = self.first(x)", "x = self.inner(self.first(x))"],
            's["first"]',
            "`first` is called 2 times",
            "x = self.inner(self.first(x))",
        ),
        (
            ["x = self.inner(self.first(x))"],
            's["first"]',
            "the result of `first` goes directly into `self.inner(...)`",
            "x = self.inner(self.first(x))",
        ),
        (
            ["x = self.first(x)", "z = self.inner(x).sum().item()", "x = self.sequence(x) * z"],
            's["inner"]',
            "`z` is needed after the cut and cannot get there",
            "z = self.inner(x).sum().item()",
        ),
        (
            ["x = self.first(x)", "if x.sum() > 9:", "    return x.sum()", "x = self.inner(x)"],
            's["first"]',
            "a `return` inside a branch",
            "return x.sum()",
        ),
        (["x = self.first(x)"], 's["inner"]', "training does not call it", ""),
        (
            [
                "for layer in self.layers:",
                "    x = layer(x)",
                "    if x.sum() > 9:",
                "        break",
            ],
            's["layers"][1]["a"]',
            "a stage cannot end in `layers.1`: this loop may end or go on early",
            "for layer in self.layers:",
        ),
        (
            ["if x.sum() < 9:", "    for layer in self.layers:", "        x = layer(x)"],
            's["layers"][1]["a"]',
            "a stage cannot end in `layers.1`: this loop is in a branch or loop",
            "for layer in self.layers:",
        ),
        (["x = self.first(x)"], 's["last"]', "nothing with parameters comes after", ""),
    ],
)
def test_refused(lines, cut, message, shown, tmp_path):
    text = refused(tmp_path, written(*lines), SCHEDULE.format(cut=cut), "SR310")
    assert message in text
    assert f"{cut}.cut_pipeline_stage()" in text
    assert f"{shown}\n" in text
    assert "= help: " in text


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("KEPT = torch.ones(2, 1)\ndef loss(z, y):\n    return ((z - y) * KEPT).sum()", "Tensor"),
        ("KEPT = torch.nn.Linear(1, 1)\ndef loss(z, y):\n    return KEPT(z - y).sum()", "Linear"),
        ("KEPT = []\ndef loss(z, y):\n    return (z - y).sum() * len(KEPT)", "list"),
        (
            "KEPT = [2]\ndef part(z):\n    return z * KEPT[0]\n"
            "def loss(z, y):\n    return sum(part(v) for v in z - y)",
            "list",
        ),
    ],
)
def test_a_loss_of_the_schedule_that_reads_what_the_output_would_make_anew(loss, words, tmp_path):
    source = written("x = self.inner(self.first(x))").replace("x, y)", "x)", 1)
    source = source.replace("F.mse_loss(self.last(x), y)", "self.last(x)")
    schedule = SCHEDULE.format(cut='s["inner"]["a"]')
    text = refused(tmp_path, source, f"{schedule}\n{loss}\n", "SR310")
    assert f"`loss` in the schedule reads `KEPT`, a {words} created outside of it" in text


def test_a_loss_of_the_schedule_that_needs_what_no_inputs_give(tmp_path):
    source = written("x = self.inner(self.first(x))").replace("x, y)", "x)", 1)
    source = source.replace("F.mse_loss(self.last(x), y)", "self.last(x)")
    schedule = SCHEDULE.format(cut='s["inner"]["a"]').replace(', "y": torch.randn(2, 1)', "")
    text = refused(tmp_path, source, f"{schedule}\ndef loss(z, y):\n    return z.sum()\n", "SR310")
    assert "`loss` in the schedule takes `y`, which inputs(model) does not return" in text


def test_a_loss_of_the_schedule_and_a_forward_that_alters_its_target(tmp_path):
    source = written("x = self.inner(self.first(x))", "y = y + 1")
    source = source.replace("F.mse_loss(self.last(x), y)", "self.last(x) - y")
    schedule = SCHEDULE.format(cut='s["inner"]["a"]')
    text = refused(
        tmp_path, source, f"{schedule}\ndef loss(z, y):\n    return (z - y).sum()\n", "SR310"
    )
    assert "`y` gets another value here, but the loss in the schedule takes the value" in text


def test_a_forward_that_writes_into_what_it_is_given(tmp_path):
    source = written("x = self.inner(self.first(x))", "y.clamp_(0, 3)")
    source = source.replace("F.mse_loss(self.last(x), y)", "F.cross_entropy(x, y)")
    schedule = SCHEDULE.format(cut='s["inner"]["a"]').replace(
        "torch.randn(2, 1)", "torch.randint(8, (2,))"
    )
    output = rewritten(tmp_path, source, schedule)
    assert "y.clamp_(0, 3)" in output.files["pipeline.py"]


@pytest.mark.filterwarnings("ignore:not for long")
@pytest.mark.parametrize(
    ("said", "stopped"),
    [
        ("log.warning('%s rows', x.shape[0])", None),
        ("log.warning_once('once')", None),
        ("warnings.warn('not for long', stacklevel=2)", None),
        ("torch._assert(x.shape[1] == 8, 'of torchvision')", None),
        ("log.setLevel(10)", "log"),
        ("notes.warning('kept')", "notes"),
        ("warnings.simplefilter('ignore')", "warnings"),
    ],
)
def test_messages_stop_no_cut_and_what_only_looks_like_one_does(said, stopped, tmp_path):
    source = written("x = self.first(x)", said, "x = self.inner(x)").replace(
        "class Inner(",
        """\
import logging
import warnings

import transformers  # it gives loggers `warning_once`


class Notes(logging.Logger):
    def warning(self, text):
        self.manager.kept = text


log, notes = logging.getLogger(__name__), Notes("kept")


class Inner(""",
    )
    schedule = SCHEDULE.format(cut='s["inner"]["a"]')
    if stopped is None:
        assert said in rewritten(tmp_path, source, schedule).files["pipeline.py"].replace('"', "'")
    else:
        text = refused(tmp_path, source, schedule, "SR310")
        assert f"`{stopped}` is no local name, and writes to it" in text


def test_what_a_stage_leaves_on_the_model_does_not_reach_another_one(tmp_path):
    lines = ["x = self.first(x)", "self.kept = x.sum()", "x = self.inner(x) * self.kept"]
    text = refused(tmp_path, written(*lines), SCHEDULE.format(cut='s["inner"]["a"]'), "SR310")
    assert "the stages fail where the model does not: AttributeError" in text


@pytest.mark.parametrize("line", ["z = {torch.rand(2, 8)}", "z = [{torch.rand(2, 8)}][0]"])
def test_what_is_drawn_is_not_drawn_again(line, tmp_path):
    source = written("x = self.first(x)", line, "x = self.inner(x) * len(z)", "x = x * len(z)")
    text = refused(tmp_path, source, SCHEDULE.format(cut='s["inner"]["a"]'), "SR310")
    assert "`z` is needed after the cut and cannot get there" in text
    assert f"{line}\n" in text


def test_two_cuts_after_one_layer(tmp_path):
    lines = ["for layer in self.layers:", "    x = layer(x)", "x = self.inner(x)"]
    schedule = SCHEDULE.format(cut='s["layers"][1]') + '    s["layers"][1].cut_pipeline_stage()\n'
    text = refused(tmp_path, written(*lines), schedule, "SR306")
    assert text.count('s["layers"][1].cut_pipeline_stage()') == 2


def test_the_order_of_cuts_in_the_schedule_is_no_matter(tmp_path):
    lines = ["x = self.first(x)", "for layer in self.layers:", "    x = layer(x)"]
    cuts = ['s["layers"][1]', 's["first"]', 's["layers"][0]']
    outputs = []
    for order in (cuts, cuts[::-1]):
        more = "".join(f"    {cut}.cut_pipeline_stage()\n" for cut in order[1:])
        schedule = SCHEDULE.format(cut=order[0]) + more
        outputs.append(rewritten(tmp_path, written(*lines), schedule).files["pipeline.py"])
    one, other = (text.partition("class ")[2] for text in outputs)
    assert one == other and "class ModelStage3" in one


@pytest.mark.parametrize("earlier", [True, False])
def test_no_stage_ends_inside_of_what_is_recomputed(earlier, tmp_path):
    schedule = SCHEDULE.format(cut='s["inner"]["a"]')
    head, line, cut = schedule.rpartition('    s["inner"]["a"]')
    wrapped = '    s["inner"].checkpoint()\n'
    schedule = head + wrapped + line + cut if earlier else schedule + wrapped
    source = written("x = self.inner(self.first(x))", "x = self.sequence(x)")
    text = refused(tmp_path, source, schedule, "SR306")
    assert "no stage can end at `inner.a`, inside of `inner`" in text
    assert 's["inner"].checkpoint()\n' in text and 's["inner"]["a"].cut_pipeline_stage()\n' in text


def test_a_stage_that_shares_with_several_others(tmp_path):
    source = written("x = self.inner(self.first(x))", "x = self.sequence(x)").replace(
        "(width, 1)\n",
        """(width, 1)
        self.sequence[0].weight = self.first.weight
        self.inner.b.weight = self.inner.a.weight
""",
        1,
    )
    schedule = SCHEDULE.format(cut='s["inner"]["a"]') + '    s["inner"].cut_pipeline_stage()\n'
    text = refused(tmp_path, source, schedule, "SR310")
    assert "DeepSpeed ties a stage to only one group of others" in text
    assert 'or use target="torch"' in text
    assert (
        "class ModelStage2" in rewritten(tmp_path, source, for_torch(schedule)).files["pipeline.py"]
    )


def test_stages_that_take_elements_of_one_container(tmp_path):
    """DeepSpeed would take all of it for tied, and each stage has gradients for its own only."""
    lines = ("for i, layer in enumerate(self.layers):", "    x = self.more[str(i)](layer(x))")
    more = "self.more = nn.ModuleDict({str(i): nn.Linear(width, width) for i in range(4)})"
    source = written("x = self.first(x)", *lines).replace(
        "        self.last =", f"        {more}\n        self.last =", 1
    )
    schedule = SCHEDULE.format(cut='s["layers.1"]')
    text = refused(tmp_path, source, schedule, "SR310")
    assert "stages 0 and 1 both take elements of `more` by a computed key" in text
    assert 'use target="torch"' in text
    assert (
        "class ModelStage1" in rewritten(tmp_path, source, for_torch(schedule)).files["pipeline.py"]
    )


def test_a_float_that_is_given_crosses_by_another_name(tmp_path):
    lines = written("z = x", "x = self.inner(self.first(x))", "x = self.sequence(x) * z")
    output = rewritten(tmp_path, lines, SCHEDULE.format(cut='s["inner"]'))
    assert "return x, z\n" in output.files["pipeline.py"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["z = None", "if x.sum() > 1e9:", "    z = x"], "a branch after the cut depends on"),
        (["z = 2.0 if bool((x > 1e9).any()) else None"], "for its elements"),
    ],
)
def test_what_depends_on_values_that_stay_behind(lines, message, tmp_path):
    source = written(
        "x = self.first(x)", *lines, "x = self.inner(x)", "if z is not None:", "    x = x * z"
    )
    text = refused(tmp_path, source, SCHEDULE.format(cut='s["inner"]["a"]'), "SR310")
    assert f"`x`{',' if 'branch' in message else ''} " in text and message in text


def test_a_forward_that_is_more_than_its_statements_is_not_cut(tmp_path):
    source = written("x = self.first(x)", "x = self.inner(x)")
    decorator = """\
def doubled(forward):
    return lambda self, x: 2 * forward(self, x)


class Inner("""
    source = source.replace("class Inner(", decorator)
    source = source.replace("    def forward(self, x):", "    @doubled\n    def forward(self, x):")
    text = refused(tmp_path, source, SCHEDULE.format(cut='s["inner"]["a"]'), "SR310")
    assert "the stages do not compute what the model computes" in text


def test_a_statement_that_needs_what_a_decorator_gives(tmp_path):
    source = written("x = self.first(x)", "x = self.inner(x)")
    decorator = """\
def scaled(forward):
    return lambda self, x: forward(self, x, 2.0)


class Inner("""
    source = source.replace("class Inner(", decorator).replace("self.b(x)", "self.b(x) * scale")
    source = source.replace(
        "    def forward(self, x):", "    @scaled\n    def forward(self, x, scale=None):"
    )
    text = refused(tmp_path, source, SCHEDULE.format(cut='s["inner"]["a"]'), "SR310")
    assert "this works in the model, but fails when only the statements of `forward` run" in text
    assert "x = self.inner(x)\n" in text


def test_a_file_that_was_changed_before_is_told_with_its_own_lines(tmp_path):
    """What a split needs is imported above; a line that was changed itself is shown as it is."""
    source = written("x = self.inner(x)", "try:", "    x = x", "finally:", "    x = self.first(x)")
    split = """\
    s["inner.a"].shard(["weight", "bias"], axis=0)
    s["inner.b"].shard("weight", axis=1)
    s.infer_sync()
"""
    schedule = SCHEDULE.format(cut='s["inner"]') + split
    place = f"source_0.py:{source.splitlines().index('        try:') + 1}:9"
    assert place in refused(tmp_path, source, schedule, "SR310")
    source = written("for _ in range(2): x = self.first(self.inner(x))")
    schedule = SCHEDULE.format(cut='s["inner"]') + '    s["first"].decompose()\n'
    text = refused(tmp_path, source, schedule, "SR310")
    assert "--> rewritten/source_1.py:29:9\n" in text


SLICED_SCHEDULE = (
    SCHEDULE.format(cut='s["inner"]')
    + """\
    s["first"].shard("weight", axis=0)
    s["first"].shard("bias", axis=0)
    s["first"].sync("fwd_post", "all_gather", axis=-1)
    s["inner"].sync("fwd_pre", "scatter", axis=0)
    s["sequence"].sync("fwd_post", "all_gather", axis=0)
"""
)


def test_the_shape_of_a_slice_is_not_the_shape_of_the_whole(tmp_path):
    lines = ["x = self.first(x)", "ones = torch.ones_like(x)", "x = self.inner(x)"]
    source = written(*lines, "x = self.sequence(x) + ones")
    text = refused(tmp_path, source, SLICED_SCHEDULE, "SR310")
    assert "each rank may only have a slice" in text


def test_for_torch_only_what_is_trained_goes_from_stage_to_stage(tmp_path):
    source = written("x = self.first(x)", "z = self.inner(x) > 0", "x = self.sequence(x) * z")
    schedule = SCHEDULE.format(cut='s["inner"]')
    assert rewritten(tmp_path, source, schedule)
    text = refused(tmp_path, source, for_torch(schedule), "SR310")
    assert "`z` is needed after the cut and cannot get there: it is a tensor without grad" in text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ('"x": torch.randn(3, 8), ', "`x`, of shape (3, 8), but torch's schedules divide"),
        ('"x": torch.randn(2, 8), "scale": torch.tensor(2.0), ', "`scale`, of shape (), but"),
    ],
)
def test_for_torch_arguments_have_rows(given, words, tmp_path):
    source = written("x = self.inner(self.first(x * scale))[:2]").replace(
        "x, y)", "x, y, scale=1)", 1
    )
    schedule = for_torch(SCHEDULE.format(cut='s["inner"]["a"]'))
    schedule = schedule.replace('"x": torch.randn(2, 8), ', given)
    assert words in refused(tmp_path, source, schedule, "SR310")


def test_one_pipeline_is_for_one_engine(tmp_path):
    source = written("x = self.inner(self.first(x))", "x = self.sequence(x)")
    schedule = SCHEDULE.format(cut='s["inner"]["a"]')
    schedule += '    s["inner"]["b"].cut_pipeline_stage(target="torch")\n'
    text = refused(tmp_path, source, schedule, "SR306")
    assert 'for target="torch", and another one for "deepspeed"' in text
    assert text.count(".cut_pipeline_stage(") == 2


def test_single_file_has_no_room_for_stages(tmp_path):
    (tmp_path / "m.py").write_text(written("x = self.first(x)"))
    (tmp_path / "s.py").write_text(SCHEDULE.format(cut='s["first"]'))
    with pytest.raises(errors.CannotCut, match="--single-file"):
        rewrite(str(tmp_path / "m.py"), str(tmp_path / "s.py"), single_file=True)


def test_a_name_that_pipeline_py_has_for_something_else(tmp_path):
    source = written("x = self.first(x)", "x = batch(self.inner(x))")
    source = source.replace("class Inner(", "def batch(x):\n    return 2 * x\n\n\nclass Inner(")
    text = refused(tmp_path, source, SCHEDULE.format(cut='s["first"]'), "SR105")
    assert "`batch` of" in text and "means something else in pipeline.py" in text


def test_what_a_script_binds_may_be_called_as_arguments_of_stages(tmp_path):
    """As in a file that trains its model where it is run."""
    source = written("x = self.first(x)", "x = self.inner(x)")
    source += '\n\nif __name__ == "__main__":\n    x = y = last_output = None\n'
    schedule = for_torch(SCHEDULE.format(cut='s["first"]'))
    files = rewritten(tmp_path, source, schedule).files
    assert "pipeline.py" in files


@pytest.mark.parametrize("name", ["held", "step_loss"])
def test_an_attribute_that_stages_have_for_something_else(tmp_path, name):
    source = written("x = self.first(x)", "x = self.inner(x)").replace(
        "        self.inner =", f"        self.{name} = 1\n        self.inner ="
    )
    text = refused(tmp_path, source, SCHEDULE.format(cut='s["first"]'), "SR105")
    assert f"has an attribute `{name}`, a name that its stages need" in text


def test_a_file_that_is_called_as_one_of_the_output(tmp_path):
    """It steps aside for it."""
    (tmp_path / "stages.py").write_text(written("x = self.first(x)", "x = self.inner(x)"))
    (tmp_path / "s.py").write_text(SCHEDULE.format(cut='s["first"]'))
    output = rewrite(str(tmp_path / "stages.py"), str(tmp_path / "s.py"))
    assert "class Inner" in output.files["stages_model.py"] and "stages.py" in output.files


MASKED = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, masked=True, width=8):
        super().__init__()
        self.is_masked = masked
        if masked:
            self.mask = nn.Parameter(torch.ones(width))
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(4)])

    def hidden(self, x, mask=None):
        return x if mask is None else x + mask * self.mask

    def forward(self, x):
        x = self.hidden(x)
        for layer in self.layers:
            x = layer(x)
        return x
"""


def test_a_small_model_without_what_a_stage_holds(tmp_path):
    schedule = SCHEDULE.format(cut='s["layers"][1]').replace(', "y": torch.randn(2, 1)', "")
    schedule += """

def verify_model(m):
    return m.Model(masked=False)


def loss(outputs):
    return outputs.square().mean()
"""
    text = refused(tmp_path, MASKED, schedule, "SR310")
    assert "the small model has no `mask`, which a stage would hold" in text
    whole = schedule.replace("masked=False", "")
    assert "self.mask" in rewritten(tmp_path, MASKED, whole).files["pipeline.py"]


def test_a_value_of_which_not_all_may_be_read_is_itself():
    """A configuration of transformers whose layers differ refuses to give what differs."""

    @dataclasses.dataclass
    class Config:
        width: int = 8

        def __getattribute__(self, name):
            if name == "width":
                raise ValueError("it differs between layers")
            return super().__getattribute__(name)

    config = Config()
    assert is_same({"config": config}, {"config": config})


def test_a_forward_that_is_one_expression(tmp_path):
    source = written().replace("self.last(x), y", "self.last(self.first(x)), y")
    said = refused(tmp_path, source, SCHEDULE.format(cut='s["first"]'), "SR310")
    assert "the result of `first` goes directly into `self.last(...)`" in said
