"""Cuts inside layers that hold further layers: the iterations of an outer loop one by one."""

import pytest
from torch import nn

from slapo_rewrite.emit.write import write
from slapo_rewrite.runtime.stages import Count, check_settings
from slapo_rewrite.verify.rank_layout import Layout
from slapo_rewrite.verify.run import verify
from tests.rewriting import rewritten
from tests.stages.cases import for_torch
from tests.stages.test_text import method

SOURCE = """\
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return x + torch.tanh(self.norm(self.linear(x)))


class Stage(nn.Module):
    def __init__(self, width, depth, last):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.down = None if last else nn.Linear(width, width)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        before = x
        if self.down is not None:
            x = self.down(x)
        return x, before


class Model(nn.Module):
    def __init__(self, width=8, depths=(2, 3, 2)):
        super().__init__()
        self.count = len(depths)
        self.first = nn.Linear(width, width)
        {init}
        self.last = nn.Linear(width, 1)

    def blocks(self, depth, width=8):
        return [Block(width) for _ in range(depth)]

    def forward(self, x, y):
        x = self.first(x)
{body}
        return F.mse_loss(self.last(x), y)
"""
LISTS = "self.s = nn.ModuleList([nn.ModuleList(self.blocks(n)) for n in depths])"
SEQUENCES = "self.s = nn.ModuleList([nn.Sequential(*self.blocks(n)) for n in depths])"
SEQUENCE = "self.s = nn.Sequential(*[nn.Sequential(*self.blocks(n)) for n in depths])"
STAGES = "self.s = nn.ModuleList([Stage(width, n, n == depths[-1]) for n in depths])"
OTHERS = "; self.t = nn.ModuleList([nn.Linear(width, width) for _ in depths])"
DICTS = "self.s = nn.ModuleList([nn.ModuleDict({'a': Block(width)}) for _ in range(4)])"
UP = "; self.up = nn.ModuleList([nn.ModuleList(self.blocks(n)) for n in depths])"
IN_LISTS = ("for stage in self.s:", "    for block in stage:", "        x = block(x)")
# A U-Net, of which the way up has `{skip}`.
THERE_AND_BACK = (
    "skips = []",
    *IN_LISTS,
    "    skips.append(x)",
    "for stage, skip in zip(self.up, {skips}):",
    "    x = x + skip",
    "    for block in stage:",
    "        x = block(x)",
)


def model(init: str, *lines: str) -> str:
    body = "\n".join(f"        {line}" for line in lines)
    return SOURCE.replace("{init}", init).replace("{body}", body)


def scheduled(*cuts: str) -> str:
    lines = [cut if cut.startswith("s.cut") else f's["{cut}"].cut_pipeline_stage()' for cut in cuts]
    return (
        "import torch\n\n\ndef model(m):\n    return m.Model()\n\n\ndef inputs(model):\n"
        '    return {"x": torch.randn(4, 8), "y": torch.randn(4, 1)}\n\n\ndef schedule(s):\n'
        + "".join(f"    {line}\n" for line in lines)
    )


@pytest.mark.parametrize(
    ("init", "lines", "cuts", "held"),
    [
        (LISTS, IN_LISTS, ["s.1.0"], "self.first, self.s[0], self.s[1][:1]"),
        (LISTS, IN_LISTS, ["s.1.2"], "self.first, self.s[0], self.s[1]"),
        (LISTS, IN_LISTS, ["s.0.0", "s.1", "s.2.0"], "self.first, self.s[0][:1]"),
        (SEQUENCES, ["for stage in self.s:", "    x = stage(x)"], ["s.1.0"], "self.s[1][:1]"),
        (SEQUENCE, ["x = self.s(x)"], ["s.1.0"], "self.first, self.s[0], self.s[1][:1]"),
        (STAGES, ["for stage in self.s:", "    x, _ = stage(x)"], ["s.1.blocks.1"], ".blocks[:2]"),
        (STAGES, ["for stage in self.s:", "    x = 2 * stage(x)[0]"], ["s.1.blocks.1"], ".blocks"),
        (LISTS, [*IN_LISTS[:2], "        x = block(x) * 2"], ["s.0.1.norm"], "s[0][1].norm"),
        (STAGES, ["for stage in self.s:", "    x, _ = stage(x)"], ["s.1.blocks.2"], ".blocks"),
        (STAGES, ["for stage in self.s:", "    x, _ = stage(x)"], ["s.1.down"], "self.s[1].down"),
        (
            STAGES,  # a tuple that grows over the cuts
            [
                "seen = ()",
                "for stage in self.s:",
                "    x, before = stage(x)",
                "    seen += (before,)",
                "x = x + sum(seen)",
            ],
            ["s.1.blocks.1", "s.2.blocks.0"],
            ".blocks[:2]",
        ),
        (
            LISTS + OTHERS,  # PoolFormer
            [
                "for number, both in enumerate(zip(self.t, self.s)):",
                "    other, stage = both",
                "    x = other(x)",
                "    for _, block in enumerate(stage):",
                "        x = block(x)",
                "    if number != len(self.s) - 1:",
                "        x = x * 2",
            ],
            ["s.1.1"],
            "self.first, self.s[0], self.s[1][:2], self.t[0], self.t[1]",
        ),
        (
            LISTS + OTHERS,  # by number, as Mask2Former's backbones
            [
                "for i in range(self.count):",
                "    x = self.t[i](x)",
                "    for j in range(len(self.s[i])):",
                "        x = self.s[i][j](x)",
            ],
            ["s.1.1"],
            "self.first, self.s[0], self.s[1][0], self.s[1][1], self.t[0], self.t[1]",
        ),
        (
            LISTS,
            ["for i in range(3):", "    for block in self.s[i]:", "        x = block(x) * (i + 1)"],
            ["s.1"],
            "self.first, self.s[0], self.s[1]",
        ),
        (DICTS, ["for each in self.s:", "    x = each['a'](x) * 2"], ["s.1.a"], "self.s[1].a"),
        (
            LISTS,
            [*IN_LISTS[:1], "    pass", "two = self.s[1]", "for each in two:", "    x = each(x)"],
            ["s.1.0"],
            "self.first, self.s[1][:1]",
        ),
        (
            LISTS,
            ["for a, _ in self.s[::-2]:", "    x = a(x)"],
            ["s.2.0"],
            "self.first, self.s[2][0]",
        ),
        (
            LISTS + UP,
            [line.format(skips="skips[::-1]") for line in THERE_AND_BACK],
            ["s.1.0", "up.1.0"],
            "self.first, self.s[0], self.s[1][:1]",
        ),
        (
            LISTS + UP,
            [
                *THERE_AND_BACK[:5],
                "for stage in self.up:",
                "    x = x + skips.pop()",
                *THERE_AND_BACK[-2:],
            ],
            ["s.1.0", "up.1.0"],
            "self.first, self.s[0], self.s[1][:1]",
        ),
        (
            LISTS + UP,
            [line.format(skips="reversed(skips)") for line in THERE_AND_BACK],
            ["s.1.0", "up.1.0"],
            "self.first, self.s[0], self.s[1][:1]",
        ),
    ],
)
@pytest.mark.parametrize("target", ["torch", "deepspeed"])
def test_a_stage_ends_inside_a_layer(init, lines, cuts, held, target, tmp_path):
    schedule = scheduled(*cuts)
    schedule = for_torch(schedule) if target == "torch" else schedule
    text = rewritten(tmp_path, model(init, *lines), schedule).files["pipeline.py"]
    assert held in " ".join(method(text, 0, "held").split())


EVENLY = {
    "the stages of a Swin, which are unlike": (STAGES, "(2, 6, 2)", 2, "self.s[1].blocks[:3]"),
    "fewer stages than asked for": (STAGES, "(2, 2)", 3, "self.first, self.s[0].blocks[:1]"),
    "layers that are alike are not divided": (STAGES, "(2, 2)", 2, "self.first, self.s[:1]"),
}


@pytest.mark.parametrize("case", EVENLY)
def test_layers_are_divided_where_they_are_unlike_or_too_few(case, tmp_path):
    init, depths, stages, held = EVENLY[case]
    source = model(init, "for stage in self.s:", "    x, _ = stage(x)")
    source = source.replace("depths=(2, 3, 2)", f"depths={depths}")
    output = rewritten(tmp_path, source, scheduled(f"s.cut_evenly({stages})"))
    assert held in " ".join(method(output.files["pipeline.py"], 0, "held").split())


def test_layers_stay_whole_where_what_is_in_them_cannot_be_cut(tmp_path):
    source = model(STAGES, "for stage in self.s:", "    x, _ = stage(x)")
    source = source.replace("(2, 3, 2)", "(2, 6, 2)")
    early = "    x = block(x)\n            if x.sum() > 1e9:\n                break\n"
    cannot = source.replace("    x = block(x)\n", early)
    output = rewritten(tmp_path, cannot, scheduled("s.cut_evenly(2)"))
    assert "self.first, self.s[:1]" in output.files["pipeline.py"]
    (warning,) = (w for w in output.warnings if "no stage can end" in w)
    assert "after `s.1.blocks.2`, so it ends after `s.0`: a loop with `break`" in warning


def test_stages_say_how_many_layers_they_are_written_for():
    whole = nn.Module()
    whole.s = nn.ModuleList([nn.Linear(2, 2)] * 3)
    check_settings(whole, {"s": Count(3)})
    with pytest.raises(ValueError, match=r"`s` is ModuleList, but .* for 4 of its layers"):
        check_settings(whole, {"s": Count(4)})


@pytest.mark.processes
def test_ranks_compute_the_same(tmp_path):
    """Running means are updated where each layer is; unsaved random numbers are the original's."""
    init = STAGES + "; self.register_buffer('noise', torch.rand(width), persistent=False)"
    init += "; self.register_buffer('calls', torch.zeros(()))"  # in eval mode, too
    lines = "self.calls.add_(1)", "for stage in self.s:", "    x = stage(x)[0] * self.noise"
    source = model(init, *lines)
    output = rewritten(tmp_path, source, scheduled("s.1.blocks.1", "s.2.blocks.0"))
    write(tmp_path / "out", output.files)
    report = verify(tmp_path / "out", [Layout(3)])
    assert report.ok, report.render()
