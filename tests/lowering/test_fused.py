"""The replacement of a match: surrounding text, shared classes, leftover definitions."""

from __future__ import annotations

import re

import torch

from tests.rewriting import changed_lines, imported, refused, rewritten, written

HEAD = """\
import torch
from torch import nn
from torch.nn import functional as F


class Gated(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, width)
        self.up = nn.Linear(width, width)
        self.act = nn.SiLU()
        self.scale = 2.0

    def forward(self, x):
"""
REST = """

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList([Gated(width) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
"""
SCHEDULE = """\
import torch


def model(m):
    return m.Net(8)


def inputs(model):
    return {"x": torch.randn(2, 8)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
"""


def source(body: str) -> str:
    lines = "".join(f"        {line}\n" if line else "\n" for line in body.strip().splitlines())
    return HEAD + lines + REST


def schedule(*lines: str) -> str:
    return SCHEDULE + "".join(f"    {line}\n" for line in lines)


PLAIN = source("return self.act(self.gate(x)) * self.up(x)")


def changed(tmp_path, body: str, *lines: str) -> str:
    output = rewritten(tmp_path, source(body), schedule(*(lines or ('s.apply("swiglu")',))))
    return changed_lines(output)


def test_comments_on_lines_that_go_stay(tmp_path):
    body = """
# The gate opens first.
gate = self.act(self.gate(x))  # in (0, 1)
up = self.up(x)  # not a part of the match

return gate * up  # both
"""
    diff = changed(tmp_path, body)
    assert "-        gate = self.act(self.gate(x))  # in (0, 1)\n" in diff
    assert "+        # in (0, 1)\n" in diff
    assert "+        return swiglu(self.gate(x), up, activation=self.act)  # both\n" in diff
    assert "The gate opens" not in diff and "not a part" not in diff


def test_comments_inside_of_what_is_replaced_stay(tmp_path):
    body = """
return self.scale * (
    # both halves
    self.act(self.gate(x))  # the gate
    * self.up(x)
)
"""
    diff = changed(tmp_path, body)
    assert "+        # both halves\n+        # the gate\n" in diff
    assert (
        "+        return self.scale * swiglu(self.gate(x), self.up(x), activation=self.act)\n"
        in diff
    )


def test_parentheses_stay_where_they_are_needed_alone(tmp_path):
    body = "return (-(self.act(self.gate(x)) * self.up(x))).sum(-1, keepdim=True) + x"
    diff = changed(tmp_path, body)
    assert "return (-swiglu(self.gate(x), self.up(x), activation=self.act)).sum(" in diff


def test_an_assignment_in_place_becomes_a_plain_one(tmp_path):
    diff = changed(tmp_path, "y = self.act(self.gate(x))\ny *= self.up(x)\nreturn y")
    assert "+        y = swiglu(self.gate(x), self.up(x), activation=self.act)\n" in diff


def test_statements_of_several_lines_are_laid_out_again(tmp_path):
    body = """
return torch.cat(
    [self.act(self.gate(x)) * self.up(x)],
    dim=-1,
)
"""
    diff = changed(tmp_path, body)
    assert "+            [swiglu(self.gate(x), self.up(x), activation=self.act)],\n" in diff


def test_some_modules_get_a_class_of_their_own(tmp_path):
    output = rewritten(tmp_path, PLAIN, schedule('s["layers"][:2].apply("swiglu")'))
    assert changed_lines(output) == (
        "-from torch.nn import functional as F\n"
        "+from torch.nn import functional as F\n"
        "+from .kernels import swiglu\n"
        "+class FusedGated(Gated):\n"
        '+    """A `Gated` with `swiglu` applied."""\n'
        "+    def forward(self, x):\n"
        "+        return swiglu(self.gate(x), self.up(x), activation=self.act)\n"
        "-        self.layers = nn.ModuleList([Gated(width) for _ in range(4)])\n"
        "+        self.layers = nn.ModuleList(\n"
        "+            [FusedGated(width) if i < 2 else Gated(width) for i in range(4)]\n"
        "+        )\n"
    ).replace("-from torch.nn import functional as F\n+from torch.nn import functional as F\n", "")


def test_a_module_that_is_no_longer_called_is_not_scheduled(tmp_path):
    for line in ('s["layers.*.act"].checkpoint()', 's["layers.*.act"].fork_rng()'):
        text = refused(tmp_path, PLAIN, schedule('s.apply("swiglu")', line), "SR306")
        assert "`layers.0.act` is no longer called since `apply(...)` of line 17" in text
        assert re.search(r"s\.py:18:\d+", text) and re.search(r"s\.py:17:\d+", text)


def test_fuse_first_then_shard(tmp_path):
    lines = ('s["layers.*.act"].checkpoint()', 's.apply("swiglu")')
    text = refused(tmp_path, PLAIN, schedule(*lines), "SR309")
    assert "`layers.0.act`, which it calls, is scheduled before" in text
    assert "fuse first, then schedule the rest" in text


def test_what_is_left_can_be_sharded(tmp_path):
    lines = (
        's.apply("swiglu")',
        's["layers.*.gate"].shard(["weight", "bias"], axis=0)',
        's["layers.*.up"].shard(["weight", "bias"], axis=0)',
        's["layers.*"].sync("fwd_post", "all_gather", axis=-1)',
        's["layers.*"].sync("bwd_post", "all_reduce")',
    )
    output = rewritten(tmp_path, PLAIN, schedule(*lines))
    assert not output.warnings
    assert "all_gather(swiglu(self.gate(" in changed_lines(output)


def test_a_function_of_the_file_is_changed_for_all_who_call_it(tmp_path):
    helper = "\n\ndef gated(gate, up):\n    return F.silu(gate) * up\n\n\nclass Gated("
    text = source("return gated(self.gate(x), self.up(x))").replace("\n\nclass Gated(", helper)
    diff = changed_lines(rewritten(tmp_path, text, schedule('s["layers.*"].apply("swiglu")')))
    assert "+        return swiglu(self.gate(x), self.up(x))\n" in diff


HALF = """\
class Half(nn.Module):
    def __init__(self, factor=0.5):
        super().__init__()
        self.factor = factor

    def forward(self, x, y):
        return x * self.factor + y


class Gain(nn.Module):
    def __init__(self, factor=0.5):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x, y):
        return x * self.gain + y


def half(x, y):
    return x * 0.5 + y


"""


def replaced(*lines: str) -> str:
    text = schedule(*lines).replace("import torch\n", "import torch\nfrom torch import nn\n", 1)
    return text.replace("def schedule", HALF + "def schedule")


HALVES = source("y = self.act(x)\ny = y * 0.5\nreturn y + self.up(x)")


def test_a_module_takes_the_place_of_a_computation(tmp_path):
    line = 's["layers.*"].replace(Half, half, name="sum", args="0.25 * 2")'
    diff = changed_lines(rewritten(tmp_path, HALVES, replaced(line)))
    assert "+        self.sum = Half(0.25 * 2)\n" in diff
    assert "+        return self.sum(y, self.up(x))\n" in diff


def test_some_modules_hold_a_module_of_their_own(tmp_path):
    line = 's["layers"][1:].replace(Half, half, name="sum")'
    diff = changed_lines(rewritten(tmp_path, HALVES, replaced(line)))
    assert "+class FusedGated(Gated):\n" in diff
    assert "+        super().__init__(width)\n+        self.sum = Half()\n" in diff


def test_a_module_with_parameters_is_refused(tmp_path):
    text = refused(tmp_path, HALVES, replaced('s["layers.*"].replace(Gain, half)'), "SR308")
    assert "`layers.0.gain` would hold `gain`" in text


def test_a_call_by_position_is_fused_by_its_path(tmp_path):
    diff = changed_lines(rewritten(tmp_path, PLAIN, schedule('s.fuse("layers.*.up", name="rise")')))
    assert "+        return self.act(self.gate(x)) * self.rise(x)\n" in diff
    assert "+        return self.up(x)\n" in diff


NORMED = """\
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table = nn.Embedding(16, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 16)

    def forward(self, x):
        y = self.table(x)
        return self.head(self.norm(y + 1.0))
"""
NORMED_SCHEDULE = """\
import torch
from torch.nn import functional as F


def model(m):
    return m.Net(8)


def inputs(model):
    return {"x": torch.zeros(2, 4).long()}


def loss(outputs):
    return outputs.square().mean()


def norm(x, weight, bias):
    return F.layer_norm(x + 1.0, (8,), weight, bias)


def shifted_norm(x, weight, bias):
    return F.layer_norm(torch.add(x, 1.0), (8,), weight, bias)


def schedule(s):
    s.replace(shifted_norm, norm)
    s["table"].shard("weight", axis=0)
    s["table"].sync("fwd_post", "reduce_scatter", axis=1)
    s["head"].sync("fwd_pre", "all_gather", axis=1)
    s["head"].shard(["weight", "bias"], axis=0)
    s["head"].sync("fwd_post", "all_gather", axis=-1)
"""


def test_gradients_are_summed_where_a_parameter_is_read(tmp_path):
    diff = changed_lines(rewritten(tmp_path, NORMED, NORMED_SCHEDULE))
    assert "all_reduce_gradient(self.norm.weight)" in diff
    assert "all_reduce_gradient(self.norm.bias)" in diff


def test_the_name_of_a_kernel_may_be_taken(tmp_path):
    text = PLAIN.replace("from torch import nn\n", "from torch import nn\n\nswiglu = 3\n")
    output = rewritten(tmp_path, text, schedule('s.apply("swiglu")'))
    diff = changed_lines(output)
    assert "+from . import kernels\n" in diff and "kernels.swiglu(self.gate(x)" in diff


def test_two_rules_in_one_statement(tmp_path):
    body = "return self.act(self.gate(x)) * self.up(x) + self.act(self.up(x)) * self.gate(x)"
    diff = changed(tmp_path, body)
    assert "return swiglu(self.gate(x), self.up(x), activation=self.act) + swiglu(" in diff
    assert "+            self.up(x), self.gate(x), activation=self.act\n" in diff


def test_packed_weights_are_in_the_order_of_the_calls(tmp_path):
    text = source("up = self.up(x)\nreturn self.act(self.gate(x)) * up")
    line = 's["layers.*"].replace(nn.Linear, "gate|up", name="both")'
    output = rewritten(tmp_path, text, replaced(line))
    diff = changed_lines(output)
    assert "+        up, gate = self.both(x).chunk(2, dim=-1)\n" in diff
    assert 'concat("up.weight", "gate.weight")' in diff
    original, packed = (
        imported(path).Net(8)
        for path in (next(tmp_path.glob("source_*.py")), written(tmp_path, output))
    )
    packed.load_state_dict(original.state_dict())
    x = torch.randn(2, 8)
    torch.testing.assert_close(packed(x), original(x))
