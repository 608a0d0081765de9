"""Values that cross to the next stage without being tensors of the backward pass."""

import pytest
import torch
from torch import nn

from slapo_rewrite.runtime.deepspeed_pipeline import with_all_tracked, with_gradients_of
from slapo_rewrite.runtime.stages import check_settings
from slapo_rewrite.runtime.torch_pipeline import SameSizes, UnshardedPipeline
from slapo_rewrite.stages.value_kinds import described
from tests.rewriting import refused, rewritten

SOURCE = """\
import torch
from torch import nn
from torch.nn import functional as F


class Patches(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.projection = nn.Conv2d(3, width, 2, stride=2)

    def forward(self, image):
        x = self.projection(image)
        return x.flatten(2).transpose(1, 2).contiguous(), {size}


class Angles(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0, 1, width))

    def forward(self, x):
        angles = (x * self.scale).detach()
        return {angles}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, size, angles):
        grid = x.unflatten(1, {grid})
        x = self.linear(grid.flip(1).flatten(1, 2))
        return x * angles[0] + angles[1]


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.patches = Patches(width)
        self.angles = Angles(width)
        self.layers = nn.ModuleList([Block(width) for _ in range(4)])
        self.last = nn.Linear(width, 1)

    def forward(self, image, y):
        x, size = self.patches(image)
        angles = self.angles(x)
        for layer in self.layers:
            x = layer(x, size, angles)
        return F.mse_loss(self.last(x).mean(1), y)
"""
SCHEDULE = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"image": torch.randn(2, 3, 6, 10), "y": torch.randn(2, 1)}


def schedule(s):
    s["layers"][0].cut_pipeline_stage(target="torch")
    s["layers"][2].cut_pipeline_stage(target="torch")
"""
PAIR = "angles.cos(), angles.sin()"
SIZES = "tuple(x.shape[2:])"


def source(size: str = SIZES, angles: str = PAIR, grid: str = "size") -> str:
    return SOURCE.format(size=size, angles=angles, grid=grid)


def pipeline(text: str) -> str:
    """The stages' `forward`, without what stands around them."""
    return text[text.index("class ModelStage0") : text.index("STAGES =")]


def test_numbers_go_as_a_shape_and_tuples_in_parts(tmp_path):
    text = pipeline(rewritten(tmp_path, source(), SCHEDULE).files["pipeline.py"])
    first, middle, last = text.split("class ModelStage")[1:]
    assert (
        """\
        angles_0, angles_1 = angles
        return x, x.new_zeros(size), angles_0, angles_1
"""
        in first
    )
    assert (
        """\
    def forward(self, x, size, angles_0, angles_1, **_):
        # Only tensors are sent, so numbers come as the shape of one.
        size = tuple(size.shape)
        angles = (angles_0, angles_1)
        for layer in self.layers[1:3]:
            x = layer(x, size, angles)
        return x, x.new_zeros(size), angles_0, angles_1
"""
        in middle
    )
    assert "size = tuple(size.shape)\n" in last and "= size\n" not in last


@pytest.mark.parametrize(
    ("size", "grid", "received"),
    [
        ("x.shape[2:]", "size", "size = size.shape\n"),
        ("list(x.shape[2:])", "size", "size = list(size.shape)\n"),
        ("x.shape[2]", "(size, -1)", "size = size.shape[0]\n"),
        ("(x.shape[2],)", "(*size, -1)", "size = tuple(size.shape)\n"),
        (
            "(1, *x.shape[2:])",
            "size[1:]",
            "size = (size_0, size_1, size_2)\n",
        ),
        (
            "((x.shape[2], x.shape[3]), [x.shape[3]])",
            "(size[0][0], *size[1])",
            "size = (size_0, size_1)\n",
        ),
        (
            "{'rows': x.shape[2], 'seen': None, 'more': ((), [])}",
            "(size['rows'], -1)",
            'size = {"rows": size_rows, "seen": None, "more": ((), [])}\n',
        ),
    ],
)
def test_each_kind_of_numbers_comes_as_what_it_was(size, grid, received, tmp_path):
    text = rewritten(tmp_path, source(size, grid=grid), SCHEDULE).files["pipeline.py"]
    assert received in pipeline(text)


@pytest.mark.parametrize(
    ("angles", "read", "received"),
    [
        (f"[{PAIR}]", "angles[1]", "angles = [angles_0, angles_1]\n"),
        ("[angles.cos()]", "angles[0]", "angles = [angles_0]\n"),
        ("(angles.cos(),)", "angles[0]", "angles = (angles_0,)\n"),
        (f"({PAIR}, 'rows')", "angles[1]", 'angles = (angles_0, angles_1, "rows")\n'),
        ("(angles.cos(), x.dim() == 3)", "angles[1]", "angles = (angles_0, True)\n"),
    ],
)
def test_tensors_come_as_what_they_were_in(angles, read, received, tmp_path):
    text = source(angles=angles).replace("+ angles[1]", f"+ {read}")
    assert received in pipeline(rewritten(tmp_path, text, SCHEDULE).files["pipeline.py"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": "(x.shape[2], int(1 + (x > 0.4).sum() % 3))", "grid": "(size[0], -1)"}, "data"),
        ({"size": "(x.shape[2], int(image.sum().abs()) + 1)", "grid": "(size[0], -1)"}, "data"),
        ({"size": "(x.shape[2], self.projection)", "grid": "(size[0], -1)"}, "no tensor"),
        ({"size": "(x.shape[2], -1)"}, "no tensor"),
        ({"size": "(x.shape[2], 10.0 / 2)", "grid": "(size[0], -1)"}, "no tensor"),
        ({"angles": "(angles.cos(), angles > 0)"}, "no tensor"),
        ({"angles": "(angles.cos(), bool((x > 0.4).sum() % 3))"}, "no tensor"),
    ],
)
def test_what_looks_like_it_and_cannot_be_sent(given, message, tmp_path):
    text = refused(tmp_path, source(**given), SCHEDULE, "SR310")
    assert "is needed after the cut and cannot get there" in text and message in text
    assert "= help: " in text


def test_one_list_by_two_names_is_not_sent_as_two(tmp_path):
    """What a later stage writes to one of them would not be in the other."""
    text = source(angles="[angles.cos(), angles.sin()]").replace(
        "        for layer in",
        "        angles, same = self.twice(angles)\n        for layer in",
    )
    text = text.replace("    def forward(self, image, y)", TWICE).replace(
        "        return F.mse", "        angles[0] = x\n        return F.mse"
    )
    text = text.replace("self.last(x)", "self.last(same[0])")
    assert "the stages do not" in refused(tmp_path, text, SCHEDULE, "SR310")


TWICE = """\
    def twice(self, angles):
        return angles, [angles, self.last][0]

    def forward(self, image, y)"""


def test_deepspeed_is_sent_the_same(tmp_path):
    """It runs backwards from all values in floating point, so that all take part in it there."""
    schedule = SCHEDULE.replace('target="torch"', "")
    files = rewritten(tmp_path, source(), schedule).files
    assert "return x, x.new_zeros(size), angles_0, angles_1\n" in files["pipeline.py"]
    plain, number, tracked = torch.ones(2), torch.ones(2, dtype=torch.int), torch.ones(2) * WEIGHT
    found = with_all_tracked(nn.Linear(2, 2), (), (plain, number, tracked))
    assert found[0].requires_grad and found[1] is number and found[2] is tracked
    with torch.no_grad():
        assert with_all_tracked(nn.Linear(2, 2), (), (plain, number)) is None
    assert with_all_tracked(nn.Linear(2, 2), (), plain).requires_grad  # of a frozen stage


def test_what_several_stages_hold_has_a_gradient_on_each():
    """Else DeepSpeed adds up those of the stages that come to use it, which wait for the others."""
    stage = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})
    stage["used"].weight.grad, stage["idle"].bias.requires_grad = torch.ones(2, 2), False
    names = [f"{name}.{kind}" for name in stage for kind in ("weight", "bias")]
    with torch.no_grad():
        with_gradients_of(names[2:], stage, ())
    assert stage["idle"].weight.grad is None
    with_gradients_of(names, stage, ())
    assert stage["idle"].weight.grad.sum() == 0 and stage["idle"].bias.grad is None
    assert stage["used"].weight.grad.sum() == 4


WEIGHT = nn.Parameter(torch.ones(2))


def test_what_a_stage_changed_is_sent_as_it_is_by_then(tmp_path):
    lines = """\
            x = layer(x, size, angles)
            size = (size[1], size[0])
            angles = (angles[1], angles[0])
"""
    text = source().replace("            x = layer(x, size, angles)\n", lines)
    found = pipeline(rewritten(tmp_path, text, SCHEDULE).files["pipeline.py"])
    assert found.count("angles_0, angles_1 = angles\n") == 2
    assert found.count("x.new_zeros(size)") == 2


def test_sizes_that_a_batch_changes_are_not_sent():
    linear = nn.Linear(2, 2)
    linear.register_forward_hook(SameSizes())
    linear(torch.ones(3, 2)), linear(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="`Linear` returns tensors of"):
        linear(torch.ones(4, 2))


RECORDS = """\
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class Found:
    maps: tuple
    scale: float = 1.0


class Backbone(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        first = self.a(x)
        return Found(maps=(first, self.b(first)))


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.backbone = Backbone(width)
        self.head = nn.Linear(width, width)
        self.last = nn.Linear(width, 1)

    def forward(self, x, y):
{body}
        return F.mse_loss(self.last(x), y)
"""
RECORDS_SCHEDULE = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(2, 8), "y": torch.randn(2, 1)}


def schedule(s):
    s["backbone"].cut_pipeline_stage(target="torch")
"""


def records(*lines: str) -> str:
    return RECORDS.format(body="\n".join(f"        {line}" for line in lines))


STATE = """
    x: torch.Tensor
    axis: str = "rows"


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, state):
        return State(self.linear(state.x), axis=state.axis)


"""


def states(kind: str) -> str:
    text = records("s = State(x)", "for layer in self.layers:", "    s = layer(s)", "x = s.x")
    text = text.replace("class Backbone", f"{kind}{STATE}class Backbone", 1)
    layers = "nn.ModuleList(Block(width) for _ in range(2))"
    return text.replace("self.head = nn.Linear(width, width)", f"self.layers = {layers}")


STATES_SCHEDULE = RECORDS_SCHEDULE.replace("backbone", "layers.0")


@pytest.mark.parametrize("kind", ["@dataclass\nclass State:", "class State(NamedTuple):"])
def test_a_record_that_layers_are_given_whole_is_made_again(kind, tmp_path):
    text = states(kind).replace(
        "import torch\n", "import torch\nfrom typing import NamedTuple\n", 1
    )
    found = pipeline(rewritten(tmp_path, text, STATES_SCHEDULE).files["pipeline.py"])
    assert "s_x, s_axis = s.x, s.axis\n" in found
    assert 'def forward(self, s_x, **_):\n        s = State(x=s_x, axis="rows")\n' in found


def test_a_record_that_its_class_would_make_otherwise_is_not_made_again(tmp_path):
    more = "@dataclass\nclass State:\n    def __post_init__(self):\n        self.x = self.x + 1\n"
    text = refused(tmp_path, states(more), STATES_SCHEDULE, "SR310")
    assert "`s` is needed after the cut and cannot get there: it is no tensor" in text


def test_a_stage_ends_later_where_a_value_gets_no_further(tmp_path):
    """What comes behind the cut and needs no parameters may belong to either stage."""
    text = records(
        "maps = {'last': self.backbone(x).maps[-1], 'sum': sum}",
        "x = maps['last'] * 2",
        "x = self.head(x)",
    )
    found = pipeline(rewritten(tmp_path, text, RECORDS_SCHEDULE).files["pipeline.py"])
    assert "        x = maps['last'] * 2\n        return x\n".replace("'", '"') in found
    assert "def forward(self, x, /, **_):\n        x = self.head(x)\n" in found


def test_of_a_record_what_is_read_is_sent(tmp_path):
    text = records("found = self.backbone(x)", "x = self.head(found.maps[-1]) + found.maps[0]")
    found = pipeline(rewritten(tmp_path, text, RECORDS_SCHEDULE).files["pipeline.py"])
    assert "found_maps = found.maps\n" in found
    assert "return found_maps_0, found_maps_1\n" in found
    assert "x = self.head(found_maps[-1]) + found_maps[0]\n" in found


def test_a_record_that_changes_where_it_is_made(tmp_path):
    made = "return Found(maps=(first, self.b(first)))"
    changed = (
        "found = Found(maps=(first,))\n        found.scale = self.b(first)\n        return found"
    )
    text = records("found = self.backbone(x)", "x = self.head(found.scale)")
    text = text.replace(made, changed)
    schedule = RECORDS_SCHEDULE.replace('"backbone"', '"backbone.a"')
    assert (
        "found_scale = self.backbone.b(" in rewritten(tmp_path, text, schedule).files["pipeline.py"]
    )


@pytest.mark.parametrize(
    "lines",
    [
        # a number that is no shape; what is written to it; the record itself
        ["found = self.backbone(x)", "x = self.head(found.maps[-1]) * found.scale"],
        ["found = self.backbone(x)", "x = self.head(x)", "found.maps = (x,)", "x = found.maps[0]"],
        ["found = self.backbone(x)", "x = self.head(x)", "x = sum(vars(found)['maps']) + x"],
        [
            "found = self.backbone(x)",
            "x = self.head(x)",
            "found = [found][0]",
            "x += found.maps[0]",
        ],
    ],
)
def test_a_record_of_which_more_is_needed(lines, tmp_path):
    text = refused(tmp_path, records(*lines), RECORDS_SCHEDULE, "SR310")
    assert "is needed after the cut and cannot get there" in text


@pytest.mark.parametrize(
    ("lines", "sent"),
    [
        # what layers fill, and what is taken out again
        (
            [
                "kept = {}",
                "for number, layer in enumerate(self.layers):",
                "    x = layer(x)",
                "    if number in self.marks:",
                "        kept[f'layer{number}'] = x",
                "x = x + kept.popitem()[1]",
            ],
            'assert [*kept] == ["layer1"]\n        kept_layer1 = kept["layer1"]\n',
        ),
        (
            [
                "kept = [x]",
                "for layer in self.layers:",
                "    x = layer(x)",
                "    kept.append(x)",
                "for layer in self.layers_back:",
                "    x = layer(x + kept.pop())",
            ],
            "kept_0, kept_1 = kept\n        return x, kept_1, kept_0\n",
        ),
        # what a module gives nothing for
        (
            [
                "x, seen = self.looking(x)",
                "for layer in self.layers:",
                "    x = layer(x)",
                "if seen is not None:",
                "    x = x * seen",
            ],
            "assert seen is None  # nothing of it is sent\n        return x\n",
        ),
        # a data class that is made by position
        (
            [
                "for layer in self.layers:",
                "    x = layer(x)",
                "found = Found(self.read(x), 1.0)",
                "x = found.maps",
            ],
            "            x = layer(x)\n        return x\n",
        ),
    ],
)
def test_what_is_filled_and_emptied_over_cuts(lines, sent, tmp_path):
    text = FILLED + records(*lines).replace("import torch\n", "", 1).replace(
        "        self.last =",
        """\
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(4)])
        self.layers_back = nn.ModuleList([nn.Linear(width, width) for _ in range(4)])
        self.looking, self.read, self.marks = Looking(width), nn.Linear(width, width), (1, 3)
        self.last =""",
    )
    schedule = RECORDS_SCHEDULE.rpartition("    s[")[0]
    for cut in ("layers.0", "layers.1", *(["layers_back.1"] if "back" in text[-300:] else [])):
        schedule += f'    s["{cut}"].cut_pipeline_stage()\n'
    assert sent in pipeline(rewritten(tmp_path, text, schedule).files["pipeline.py"])


FILLED = """\
import torch
from torch import nn


class Looking(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a = nn.Linear(width, width)

    def forward(self, x):
        return self.a(x), None


"""


def test_statements_that_go_over_a_mapping_need_no_more_than_a_shape(tmp_path):
    """The mapping holds the value itself, but the result uses none of its elements."""
    for factor, sent in (
        ("torch.full_like(same['like'], same['fill'])", ""),
        ("(same['like'] * same['fill']).detach()", ", factor"),
    ):
        text = records(
            "x = self.backbone(x).maps[0]",
            "options = {'like': x, 'fill': 2.0}",
            "same = options.copy()",
            f"factor = {factor}",
            "x = self.head(x)",
            "x = x * factor",
        )
        schedule = RECORDS_SCHEDULE.replace("backbone", "head")
        found = pipeline(rewritten(tmp_path, text, schedule).files["pipeline.py"])
        assert f"return x{sent}\n" in found
        assert ("options.copy()" in found.partition("Stage1")[2]) == (not sent)


def test_random_numbers_of_other_generators_are_not_drawn_again(tmp_path):
    lines = ("x = self.backbone(x).maps[0]", "x = self.head(x * torch.from_numpy(mask))")
    text = records("mask = np.random.rand(8)", *lines).replace("(mask)", "(mask).float()")
    assert "`mask` is needed after the cut" in refused(tmp_path, text, RECORDS_SCHEDULE, "SR310")
    text = text.replace("np.random.rand", "np.ones")
    assert rewritten(tmp_path, text, RECORDS_SCHEDULE)


def test_what_getattr_asks_of_a_setting_is_decided(tmp_path):
    """The stages refuse a model for which the attribute has another value."""
    lines = ["x = self.backbone(x).maps[0]", "if getattr(self, 'scaled', False):"]
    text = records(*lines, "    x = x * 2", "x = self.head(x)")
    files = rewritten(tmp_path, text, RECORDS_SCHEDULE).files
    assert 'SETTINGS = {"scaled": False}' in files["pipeline.py"]
    assert "* 2" not in pipeline(files["pipeline.py"])
    model = nn.Linear(2, 2)
    check_settings(model, {"scaled": False})
    model.scaled = True
    with pytest.raises(ValueError, match="`scaled` is True, but the stages were written for False"):
        check_settings(model, {"scaled": False})


def test_an_argument_that_is_never_read_may_be_given(tmp_path):
    text = records("x = self.backbone(x).maps[0]", "x = self.head(x)")
    text = text.replace("x, y)", "x, y, mask=None)", 1)
    more = RECORDS_SCHEDULE.replace('"y":', '"mask": torch.ones(2), "y":')
    for schedule in (more, more.replace('target="torch"', "")):
        files = rewritten(tmp_path, text, schedule).files
        assert 'unread=("mask",)' in files["pipeline.py"]
    given = UnshardedPipeline((), inputs={"x": "x"}, label="y", unread=("mask",))
    assert given.batch(x=1, y=2, mask=3) == given.batch(x=1, y=2) == {"x": 1, "target": 2}
    with pytest.raises(TypeError, match=r"take \['x', 'y'\], not \['other', 'x', 'y'\]"):
        given.batch(x=1, y=2, other=3)


ELSEWHERE = """\
class Tower(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(4)])

    def forward(self, x):
        kept = {"sum": sum}
        for number, layer in enumerate(self.layers):
            x = kept[number] = layer(x)
        return kept.pop("sum")(kept.values())


class Model(nn.Module):"""


def test_two_stages_meet_elsewhere_where_they_cannot_between_layers(tmp_path):
    text = records("x = self.tower(x)", "x = self.head(self.backbone(x).maps[0])")
    text = text.replace("class Model(nn.Module):", ELSEWHERE).replace(
        "        self.backbone =", "        self.tower = Tower(width)\n        self.backbone ="
    )
    cut, evenly = 's["tower.layers.1"].cut_pipeline_stage(', "s.cut_evenly(2, "
    schedule = RECORDS_SCHEDULE.replace('s["backbone"].cut_pipeline_stage(', evenly)
    output = rewritten(tmp_path, text, schedule)
    first, second = pipeline(output.files["pipeline.py"]).split("class ModelStage1")
    assert "self.tower(x)" in first and "self.backbone(x)" in second
    (warning,) = (w for w in output.warnings if "no stage can end" in w)
    assert "after `tower.layers.2`, so it ends after `tower`: the stages do not" in warning
    # Where one module is named, that is the place.
    assert "the stages do not" in refused(tmp_path, text, schedule.replace(evenly, cut), "SR310")
    three = schedule.replace("cut_evenly(2", "cut_evenly(3")
    assert "the stages do not" in refused(tmp_path, text, three, "SR310")


BY_METHODS = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(4)])
        self.last = nn.Linear(width, 1)

    def encode(self, x, mask=None):
        if mask is not None:
            return self.first(x) * mask
        return self.through(self.first(x))

    def through(self, h):
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h

    def read(self, x):
        return self.last(x)

    def forward(self, x, y):
        x = self.encode(x)
        return torch.nn.functional.mse_loss(self.read(x), y)
"""
BY_METHODS_SCHEDULE = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(4, 8), "y": torch.randn(4, 1)}


def loss(outputs):
    return outputs


def schedule(s):
    s["layers.1"].cut_pipeline_stage()
"""


def test_a_method_that_leads_to_a_cut_is_written_out(tmp_path):
    """As `forward_features` is in timm; others are called."""
    text = rewritten(tmp_path, BY_METHODS, BY_METHODS_SCHEDULE).files["pipeline.py"]
    assert "for layer in self.layers[:2]:" in text and "for layer in self.layers[2:]:" in text
    assert "self.read(" in text and "mask" not in text
    wrapped = BY_METHODS.replace("    def through", "    @torch.no_grad()\n    def through")
    said = refused(tmp_path, wrapped, BY_METHODS_SCHEDULE, "SR310")
    assert "its gradients differ" in said


@pytest.mark.parametrize("reader", ["self.last(x) / (1 + self.is_read)", "self.last(x)"])
def test_what_a_method_sets_for_another_stage_is_refused(reader, tmp_path):
    """Also where it makes no difference in a small model, or is a flag that training never has."""
    text = BY_METHODS.replace("return self.last(x)", f"return {reader}")
    text = text.replace(
        "        x = self.encode(x)\n", "        self.prepare()\n        x = self.encode(x)\n"
    )
    text = text.replace(
        "    def read(self",
        "    def prepare(self):\n        self.is_read = False\n\n    def read(self",
    ).replace("        self.first = nn", "        self.is_read = False\n        self.first = nn", 1)
    if "is_read" not in reader:
        rewritten(tmp_path, text, BY_METHODS_SCHEDULE)
        return
    said = refused(tmp_path, text, BY_METHODS_SCHEDULE, "SR310")
    assert "stage 1 reads `is_read`, which changes as the model runs, in another stage" in said


def test_what_forward_writes_into_parameters_is_refused_for_torch(tmp_path):
    """As RWKV scales its weights where it does not train."""
    text = BY_METHODS.replace(
        "        x = self.encode(x)\n",
        "        if not self.training:\n            self.first.weight.detach().mul_(1)\n"
        "        x = self.encode(x)\n",
    )
    schedule = BY_METHODS_SCHEDULE.replace("stage()", 'stage(target="torch")')
    assert "`forward` writes into `first.weight`" in refused(tmp_path, text, schedule, "SR310")
    rewritten(tmp_path, text, BY_METHODS_SCHEDULE)


def test_layers_of_which_forward_works_out_the_first(tmp_path):
    """A stage holds all of them, since which of them it needs is known as it runs."""
    text = BY_METHODS.replace(
        "        for layer in self.layers:\n            h = torch.tanh(layer(h))\n",
        "        first = len(self.layers) - 1\n"
        "        for layer in self.layers[:first]:\n            h = torch.tanh(layer(h))\n"
        "        for layer in self.layers[first:]:\n            h = torch.relu(layer(h))\n",
    )
    found = rewritten(tmp_path, text, BY_METHODS_SCHEDULE).files["pipeline.py"]
    assert "for layer in self.layers[first:]:" in found
    assert "return self.layers, self.last\n" in found


def test_what_is_as_long_as_values_say_cannot_be_joined(tmp_path):
    """As points that are found in images, filled up to the most of a micro-batch."""
    length = "1 + int(x.abs().sum() * 900) % 8"
    text = BY_METHODS.replace(
        "        return self.last(x)\n",
        f"        return self.last(x)[:, None] * x[:, : {length}]\n",
    ).replace("torch.nn.functional.mse_loss(self.read(x), y)", "self.read(x), y")
    schedule = BY_METHODS_SCHEDULE.replace("return outputs\n", "return outputs[0].mean()\n")
    schedule = schedule.replace("stage()", 'stage(target="torch")')
    said = refused(tmp_path, text, schedule, "SR310")
    assert "for one micro-batch and [2, " in said and "cannot be joined" in said
    rewritten(tmp_path, text.replace(length, "5"), schedule)


@pytest.mark.parametrize("target", ["torch", "deepspeed"])
def test_labels_that_are_worked_on_before_the_cut(target, tmp_path):
    """The loss has them as they were, though what the last layer gives is of their shape."""
    text = BY_METHODS.replace(
        "        x = self.encode(x)\n", "        y = y * 2\n        x = self.encode(x)\n"
    )
    schedule = BY_METHODS_SCHEDULE
    if target == "torch":
        schedule = schedule.replace("stage()", 'stage(target="torch")')
    loss = rewritten(tmp_path, text, schedule).files["pipeline.py"].partition("def step_loss")[2]
    assert "        y = y * 2\n" in loss


def test_a_method_of_a_base_class_that_leads_to_a_cut_is_written_out(tmp_path):
    text = BY_METHODS.replace("class Model(", "class Base(") + (
        "\n\nclass Between(Base):\n    def forward(self, x, y):\n"
        "        return super().forward(x + 1, y)\n"
        "\n\nclass Model(Between):\n    def forward(self, x, y):\n"
        "        return super().forward(x * 2, y) * 3\n"
    )
    found = rewritten(tmp_path, text, BY_METHODS_SCHEDULE).files["pipeline.py"]
    assert "x = x * 2 + 1\n" in found or "x = x + 1\n" in found
    assert "for layer in self.layers[2:]:" in found and "super" not in found


@pytest.mark.parametrize("target", ["torch", "deepspeed"])
def test_router_logits_that_are_collected_by_hand_cross_one_by_one(target, tmp_path):
    """As mixtures of experts wrote it before hooks did it for them."""
    text = (
        BY_METHODS.replace(
            "            h = torch.tanh(layer(h))\n        return h\n",
            "            logits = layer(h)\n            h = torch.tanh(logits)\n"
            "            if self.router:\n                found += (logits,)\n"
            "        return h, found\n",
        )
        .replace("    def through(self, h):\n", "    def through(self, h):\n        found = ()\n")
        .replace("        self.last =", "        self.router = True\n        self.last =")
        .replace("        x = self.encode(x)\n", "        x, found = self.encode(x)\n")
        .replace(
            "        return torch.nn.functional.mse_loss(self.read(x), y)\n",
            "        loss = torch.nn.functional.mse_loss(self.read(x), y)\n"
            "        if found is not None:\n"
            "            loss = loss + 0.01 * torch.cat(found, dim=0).logsumexp(-1).mean()\n"
            "        return loss\n",
        )
    )
    schedule = BY_METHODS_SCHEDULE
    if target == "torch":
        schedule = schedule.replace("stage()", 'stage(target="torch")')
    found = rewritten(tmp_path, text, schedule).files["pipeline.py"]
    assert "found_0, found_1 = found\n" in found and "found = (found_0, found_1)\n" in found
    assert "if self.router" not in found


def test_parameters_of_a_list_go_with_the_layers_of_the_same_rounds(tmp_path):
    text = BY_METHODS.replace(
        "for layer in self.layers", "for layer, gate in zip(self.layers, self.gates)"
    )
    text = text.replace("torch.tanh(layer(h))", "torch.tanh(layer(h)) * gate").replace(
        "        self.last =",
        "        gates = [nn.Parameter(torch.rand(width)) for _ in range(4)]\n"
        "        self.gates = nn.ParameterList(gates)\n        self.last =",
    )
    found = rewritten(tmp_path, text, BY_METHODS_SCHEDULE).files["pipeline.py"]
    assert "self.gates[:2]" in found and "self.gates[2:]" in found


def test_a_dictionary_without_tensors_crosses_as_its_text():
    kind = described({"mask": None, "window": [None], "kind": "rows"}, flags=True)
    assert kind.text == "{'mask': None, 'window': [None], 'kind': 'rows'}"
    assert [name for name, _ in kind.named("x")] == ["x"]
