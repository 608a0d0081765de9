"""Schedules with wrong results are refused, with the line that is missing."""

from __future__ import annotations

import pytest

from tests.numbers import Case, compare, prepare
from tests.processes import run
from tests.rewriting import SPLITTING, changed_lines, refused, rewritten

SOURCE = """\
import torch
from torch import nn


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mlp = MLP(width)

    def forward(self, x):
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.block = Residual(width)

    def forward(self, x):
        return self.block(self.first(x))
"""

SCHEDULE = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(2, 8)}


def loss(outputs):
    return outputs.square().mean()


def added_up(module, inputs, output):
    return output


def schedule(s):
    mlp, up, down = s["block.mlp"], s["block.mlp.up"], s["block.mlp.down"]
    up.shard(["weight", "bias"], axis=0)
    down.shard("weight", axis=1)
"""
BACKWARD, FORWARD = '.sync("bwd_post", "all_reduce")\n', '.sync("fwd_post", "all_reduce")\n'


@pytest.mark.parametrize(
    "syncs",
    [
        "    up" + BACKWARD + "    down" + FORWARD,
        "    mlp" + BACKWARD + "    down" + FORWARD,
        "    mlp" + BACKWARD + "    mlp" + FORWARD,
        "    up" + BACKWARD + '    down.sync("fwd_post", added_up)\n',
    ],
)
def test_syncs_that_add_everything_up_once(syncs, tmp_path):
    assert rewritten(tmp_path, SOURCE, SCHEDULE + syncs).warnings == []


@pytest.mark.parametrize(
    ("syncs", "words"),
    [
        ("    down" + FORWARD, "nothing adds it up"),
        ("    up" + BACKWARD, "`block.mlp.down` gives a partial sum"),
        ("    up" + BACKWARD + "    mlp" + BACKWARD + "    down" + FORWARD, "ranks twice"),
        ('    s["block"]' + BACKWARD + "    down" + FORWARD, "count that once for each rank"),
        ("    up" + BACKWARD + '    s["block"]' + FORWARD, "gives a partial sum"),
        (
            "    up" + BACKWARD + "    down" + FORWARD + "    mlp" + FORWARD,
            "equal values of the ranks",
        ),
    ],
)
def test_syncs_that_do_not(syncs, words, tmp_path):
    assert words in refused(tmp_path, SOURCE, SCHEDULE + syncs, "SR104")


def test_what_is_missing_is_said_to_be_inferred_where_nothing_is(tmp_path):
    advice = "`s.infer_sync()` after the shards adds missing collectives. By hand: add it up"
    assert advice in refused(tmp_path, SOURCE, SCHEDULE + "    down" + FORWARD, "SR104")
    syncs = "    up" + BACKWARD + "    mlp" + BACKWARD + "    down" + FORWARD
    assert "infer_sync" not in refused(tmp_path, SOURCE, SCHEDULE + syncs, "SR104")
    assert rewritten(tmp_path, SOURCE, SCHEDULE + "    s.infer_sync()\n").warnings == []


def test_the_input_of_a_layer_split_over_its_inputs_must_be_a_part(tmp_path):
    schedule = SCHEDULE.replace('    up.shard(["weight", "bias"], axis=0)\n', "")
    text = refused(tmp_path, SOURCE, schedule + "    down" + FORWARD, "SR104")
    assert "its input is whole on every rank" in text


@pytest.mark.parametrize(
    "operation",
    ["h.softmax(-1)", "h / h.norm(dim=-1, keepdim=True)", "h - h.mean(-1, keepdim=True)"],
)
def test_an_operation_over_the_split_axis_is_refused(operation, tmp_path):
    source = SOURCE.replace(
        "return self.down(torch.relu(self.up(x)))",
        f"h = self.up(x)\n        return self.down({operation})",
    )
    syncs = "    up" + BACKWARD + "    down" + FORWARD
    text = refused(tmp_path, source, SCHEDULE + syncs, "SR104")
    assert "needs the whole axis, but each rank has only a part" in text


@pytest.mark.parametrize(
    ("held", "read"),
    [
        ("self.held = [self.up.weight]", "self.held[0].norm()"),
        ("self.held = [self.up.weight.view(-1)]", "self.held[0].norm()"),
        ("self.held = {'up': self.up}", "self.held['up'].weight.norm()"),
        ("self.held = list(self.parameters())", "sum(p.norm() for p in self.held)"),
        ("up = self.up\n        self.held = lambda: up.bias.sum()", "self.held()"),
        ("self.held = [self.up.weight]", "self.held[0].shape[0]"),
    ],
)
def test_what_is_split_is_read_where_it_is_now(held, read, tmp_path):
    """What a list or a function got of a layer when it was made is a part on a rank, not whole."""
    source = SOURCE.replace(
        "4 * width, width)\n", f"4 * width, width)\n        {held}\n", 1
    ).replace("torch.relu(self.up(x)))", f"torch.relu(self.up(x))) * {read}")
    text = refused(tmp_path, source, SCHEDULE + "    up" + BACKWARD + "    down" + FORWARD, "SR104")
    assert "this reads `block.mlp.up." in text and "read it as an attribute" in text


SCALED = SOURCE.replace(
    "4 * width, width)\n", "4 * width, width)\n        self.g = nn.Parameter(torch.ones(1))\n", 1
)


@pytest.mark.parametrize(
    ("held", "read"),
    [
        ("held = 0", "getattr(self, 'g')"),
        ("held = 0", "self._parameters['g']"),
        ("held = 0", "dict(self.named_parameters())['g']"),
        ("held = 0", "(lambda m: m.g)(self)"),
        ("self.held = [self.g]", "self.held[0]"),
    ],
)
def test_the_gradient_of_a_parameter_is_summed_wherever_it_is_read(held, read, tmp_path):
    """It is where the text says `self.g`; read in any other way it would be a summand."""
    source = SCALED.replace("torch.ones(1))\n", f"torch.ones(1))\n        {held}\n").replace(
        "torch.relu(self.up(x))", f"torch.relu(self.up(x)) * self.g + {read}"
    )
    text = refused(tmp_path, source, SCHEDULE + "    up" + BACKWARD + "    down" + FORWARD, "SR104")
    assert "`block.mlp.g` is used on parts" in text and "cannot be changed" in text


def test_the_gradient_of_a_parameter_that_a_property_reads_is_summed_once(tmp_path):
    source = SCALED.replace(
        "    def forward(self, x):\n        return self.down",
        "    @property\n    def scale(self):\n        return self.g\n\n"
        "    def forward(self, x):\n        return self.g * self.down",
        1,
    )
    source = source.replace("self.g * self.down(torch.relu", "self.down(self.scale * torch.relu")
    lines = changed_lines(
        rewritten(tmp_path, source, SCHEDULE + "    up" + BACKWARD + "    down" + FORWARD)
    )
    assert "+        return all_reduce_gradient(self.g)\n" in lines


def test_a_parameter_of_the_model_itself_is_used_on_parts_or_on_whole_values(tmp_path):
    source = SOURCE.replace(
        "self.block = ", "self.g = nn.Parameter(torch.ones(1))\n        self.block = "
    ).replace(
        "return self.block(self.first(x))",
        "mlp = self.block.mlp\n"
        "        return mlp.down(mlp.up(self.first(x)) * self.g), self.g.square().sum()",
    )
    schedule = SCHEDULE.replace("outputs.square", "outputs[0].square")
    text = refused(tmp_path, source, schedule + "    up" + BACKWARD + "    down" + FORWARD, "SR104")
    assert "is computed from a parameter of `s` that is used on parts elsewhere" in text
    assert 'up.shard(["weight", "bias"], axis=0)' in text, "where it becomes parts"


@pytest.mark.parametrize("repeated", ["repeat(1, 2)", "repeat(repeats=(1, 2))", "tile(2)"])
def test_a_split_axis_is_not_repeated(repeated, tmp_path):
    source = SOURCE.replace(
        "torch.relu(self.up(x))", f"torch.relu(self.up(x)).{repeated}[:, : 4 * x.size(-1)]"
    )
    text = refused(tmp_path, source, SCHEDULE + "    up" + BACKWARD + "    down" + FORWARD, "SR104")
    assert "this repeats a rank's part instead of the whole value" in text


def test_a_buffer_of_the_state_is_not_left_a_part(tmp_path):
    source = SOURCE.replace(
        "        self.down =",
        '        self.register_buffer("mean", torch.zeros(32))\n        self.down =',
    ).replace(
        "return self.down(torch.relu(self.up(x)))",
        "h = self.up(x)\n        self.mean = h.detach().mean(0)\n        return self.down(h)",
    )
    text = refused(tmp_path, source, SCHEDULE + "    up" + BACKWARD + "    down" + FORWARD, "SR104")
    assert (
        "writes a part of shape [16] into the buffer `block.mlp.mean`, which has shape [32]" in text
    )


PLAIN = SCHEDULE[: SCHEDULE.index("    mlp, up")]


@pytest.mark.parametrize("operation", ['"all_reduce"', '"all_gather", axis=-1'])
def test_a_sync_of_what_is_whole_is_refused(operation, tmp_path):
    line = f'    s["first"].sync("fwd_post", {operation})\n'
    assert "whole" in refused(tmp_path, SOURCE, PLAIN + line, "SR104")


@pytest.mark.parametrize(
    "call", ["shard(3, axis=0)", "shard([], axis=0)", 'sync("fwd_post", "all_gather", axis="x")']
)
def test_arguments_of_the_wrong_type(call, tmp_path):
    refused(tmp_path, SOURCE, PLAIN + f'    s["first"].{call}\n', "SR206")


def test_a_sync_around_a_call_of_a_layer_that_is_not_split(tmp_path):
    source = SOURCE.replace("torch.relu(self.up(x))", "self.act(self.up(x))").replace(
        "        self.down =", "        self.act = nn.Identity()\n        self.down ="
    )
    lines = '    mlp["act"].sync("fwd_post", "all_gather", axis=-1)\n'
    schedule = SCHEDULE.replace('    down.shard("weight", axis=1)\n', "    up" + BACKWARD + lines)
    text = changed_lines(rewritten(tmp_path, source, schedule))
    assert "+        return self.down(all_gather(self.act(self.up(x))))\n" in text


TWO = SOURCE.replace(
    "        self.up = nn.Linear(width, 4 * width)\n",
    "        self.up = nn.Linear(width, 2 * width)\n"
    "        self.gate = nn.Linear(width, 2 * width)\n",
).replace("torch.relu(self.up(x))", "torch.cat([self.up(x), self.gate(x)], dim=-1)FLAT")
BOTH = PLAIN + "    mlp = s['block.mlp']\n    up, down = mlp['{up,gate}'], mlp['down']\n"
BOTH += "    up.shard(['weight', 'bias'], axis=0)\n    up" + BACKWARD + "    down" + FORWARD


@pytest.mark.parametrize("flat", ["", ".unflatten(-1, (-1, 4)).flatten(1)"])
def test_parts_that_are_joined_lie_packed(flat, tmp_path):
    source = TWO.replace("FLAT", flat)
    text = refused(tmp_path, source, BOTH + '    down.shard("weight", axis=1)\n', "SR104")
    assert "has 2 equal parts along its split axis" in text
    schedule = BOTH + '    down.shard("weight", axis=1, parts=2)\n'
    assert "RowParallelLinear(4 * width, width, parts=Packed(2))" in changed_lines(
        rewritten(tmp_path, source, schedule)
    )


def test_a_part_is_not_joined_with_a_whole_value(tmp_path):
    source = TWO.replace("self.gate(x)]", "self.gate(x.detach())]").replace("FLAT", "")
    schedule = BOTH.replace("{up,gate}", "up") + '    down.shard("weight", axis=1)\n'
    text = refused(tmp_path, source, schedule, "SR104")
    assert "concatenates a rank's part with a whole value" in text


@pytest.mark.parametrize("kept", ["self.mask = mask", "self.masks[t] = mask"])
def test_what_forward_keeps_in_the_module_is_made_anew(kept, tmp_path):
    """A run that finds what another one left takes another way."""
    source = f"""import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.mask, self.masks = None, {{}}

    def forward(self, x):
        t = x.shape[1]
        if self.mask is None and t not in self.masks:
            mask = torch.ones(t, t).tril()
            {kept}
        mask = self.mask if self.mask is not None else self.masks[t]
        return self.down(mask @ self.up(x))
"""
    schedule = """import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(2, 3, 16)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s["up"].shard(["weight", "bias"], axis=0)
    s["down"].shard("weight", axis=1)
    s.infer_sync()
"""
    assert "RowParallelLinear" in changed_lines(rewritten(tmp_path, source, schedule))


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ("", "define inputs(model) in the schedule"),
        ("def inputs(model):\n    return {'x': 1 / 0}\n\n\n", "`inputs` raises ZeroDivisionError"),
    ],
)
def test_inputs_that_nobody_can_make_up(inputs, words, tmp_path):
    schedule = f"def model(m):\n    return m.Model()\n\n\n{inputs}def schedule(s):\n"
    schedule += '    s["first"].shard("weight", axis=1)\n    s.infer_sync()\n'
    assert words in refused(tmp_path, SOURCE, schedule, "SR201")


CASTING = SOURCE.replace(
    "class MLP",
    """class Linear(nn.Linear):
    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class MLP""",
).replace("= nn.Linear", "= Linear")


@pytest.mark.parametrize("replaced", [True, False])
def test_a_layer_of_its_own_kind_is_split_as_it_is_or_replaced(replaced, tmp_path):
    schedule = """import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(2, 3, 8)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s["block.mlp.up"].shard(["weight", "bias"], axis=0)
    s["block.mlp.down"].shard("weight", axis=1)
"""
    if replaced:
        line = 's.replace_all("Linear", torch.nn.Linear)'
        schedule = schedule.replace("def schedule(s):\n", f"def schedule(s):\n    {line}\n")
    text = changed_lines(rewritten(tmp_path, CASTING, f"{schedule}    s.infer_sync()\n"))
    assert ("RowParallelLinear" if replaced else 'shard_parameter(self.down, "weight"') in text


TOGETHER = """import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self, w=16, heads=4, mlp=32):
        super().__init__()
        self.heads, self.w, self.mlp = heads, w, mlp
        self.inp = nn.Linear(w, 3 * w + mlp)
        self.o, self.down = nn.Linear(w, w), nn.Linear(mlp, w)

    def forward(self, x):
        b, t, _ = x.shape
        qkv, h = self.inp(x).split([3 * self.w, self.mlp], -1)
        q, k, v = qkv.view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1)
        return x + self.o(a) + self.down(F.gelu(h))
"""


@pytest.mark.parametrize("parts", [[16, 16, 16, 32], [48, 32]])
def test_a_piece_of_what_lies_packed_is_packed(parts, tmp_path):
    schedule = f"""import torch


def model(m):
    return m.Model()


def inputs(model):
    return {{"x": torch.randn(2, 3, 16)}}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s["inp"].shard(["weight", "bias"], axis=0, parts={parts})
    s["{{o,down}}"].shard("weight", axis=1)
    s.infer_sync()
"""
    if len(parts) == 2:
        assert "this regroups 48 features" in refused(tmp_path, TOGETHER, schedule, "SR104")
        return
    case = {"together": Case(TOGETHER, schedule)}
    prepare(tmp_path, case)
    run(compare, 2, tmp_path, case)


REMEMBERED = """\
@functools.lru_cache
def places(count):
    return torch.arange(count) / count
"""
WRAPPED = f"""\
def remembering(function):
    cached = functools.lru_cache(function)

    @functools.wraps(function)
    def wrapper(*args):
        return cached(*args)

    return wrapper


{REMEMBERED.replace("functools.lru_cache", "remembering")}"""


STATIC = """\
class Places:
    @staticmethod
    @functools.lru_cache
    def of(count):
        return torch.arange(count) / count


def places(count):
    return Places.of(count)
"""


@pytest.mark.parametrize("function", [REMEMBERED, WRAPPED, STATIC])
def test_a_function_that_remembers_its_results_is_run_again(function, tmp_path):
    head = f"import functools\n\nimport torch\nfrom torch import nn\n\n\n{function}"
    source = SOURCE.replace("import torch\nfrom torch import nn\n", head)
    source = source.replace("self.block(self.first(x))", "self.block(self.first(x) + places(8))")
    # It may have been called before the model is run for the first time.
    called = "with model.first.weight.device:\n        model(torch.randn(2, 8))\n    return {"
    schedule = SCHEDULE.replace("return {", called) + "    s.infer_sync()\n"
    assert rewritten(tmp_path, source, schedule).warnings == []


STACK = (
    SOURCE.replace("self, width):", "self, width, number=0):", 1)
    .replace("4 * width)\n", "4 * width)\n        self.adds = number in OWN\n", 1)
    .replace("def forward(self, x):", "def forward(self, x, added=None):", 1)
    .replace("self.down(torch.relu(self.up(x)))", "self.down(torch.relu(ADDED))")
    .replace(
        "self.block = Residual(width)",
        "self.blocks = nn.ModuleList(MLP(width, n) for n in range(9))",
    )
    .replace(
        "return self.block(self.first(x))",
        "for n, block in enumerate(self.blocks):\n            x = CALL\n        return x",
    )
)
GIVEN = "self.up(x) if added is None else self.up(x) + added"


@pytest.mark.parametrize(
    ("own", "added", "call"),
    [
        ("()", GIVEN, "block(x, torch.ones(32) if n == 5 else None)"),
        ("()", GIVEN, "block(x, added=[None, torch.ones(32)][n // 7])"),
        ("(5,)", "self.up(x) + torch.ones(32) if self.adds else self.up(x)", "block(x)"),
    ],
)
def test_a_layer_that_does_what_the_others_do_not_is_followed(own, added, call, tmp_path):
    source = STACK.replace("ADDED", added).replace("CALL", call).replace("OWN", own)
    schedule = SCHEDULE.replace("block.mlp", "blocks.*") + "    s.infer_sync()\n"
    text = refused(tmp_path, source, schedule, "SR104")
    assert "combines a part of shape" in text


DEEP = """\
class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = 4 * width
        self.up = nn.Linear(width, self.inner)
        self.down = nn.Linear(self.inner, width)

    def forward(self, x):
        x = self.up(x) + torch.ones(self.inner)
        for _ in range(40):
            x = x + torch.tanh(x)
        return self.down(x)


class Residual"""


def test_what_values_are_made_of_is_not_counted_twice(tmp_path):
    between = SOURCE[SOURCE.index("class MLP") : SOURCE.index("class Residual")]
    source = SOURCE.replace(f"{between}class Residual", DEEP)
    schedule = SCHEDULE.partition("def schedule")[0] + (
        "def schedule(s):\n"
        '    s["block.mlp.up"].shard(["weight", "bias"], axis=0)\n'
        '    s["block.mlp.down"].shard("weight", axis=1)\n    s.infer_sync()\n'
    )
    assert "RowParallelLinear" in changed_lines(rewritten(tmp_path, source, schedule))
    assert "part_size(self.inner)" in changed_lines(rewritten(tmp_path, source, schedule))


COUNTING = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.steps = 0

    def forward(self, x):
        h = self.up(x)
        if self.steps > 100 and self.training:
            h = h.flip(-1)
        self.steps += 1
        return self.down(h if self.down.bias is not None else -h)
"""


def test_a_way_that_only_later_steps_take_is_told(tmp_path):
    (warning,) = rewritten(tmp_path, COUNTING, SPLITTING + "    split(s)\n").warnings
    assert "`self.steps > 100 and self.training` decides which branch" in warning


@pytest.mark.parametrize(
    ("before", "test", "why"),
    [
        ("", "x.is_cuda", "device or dtype, and only float32 on the CPU"),
        ("", "x.device.type == 'mps'", "device or dtype"),
        ("", "torch.cuda.is_available() and x.device.type == 'cuda'", "device or dtype"),
        ("fast = h.dtype == torch.bfloat16\n        ", "fast", "device or dtype"),
        ("", "torch.compiler.is_compiling()", "device or dtype"),
        ("b, t = x.shape\n        ", "t > 512", "sizes, and only the sizes of inputs(model)"),
    ],
)
def test_a_way_that_is_taken_elsewhere_is_told(before, test, why, tmp_path):
    source = COUNTING.replace("self.steps > 100 and self.training", test)
    (warning,) = rewritten(
        tmp_path, source.replace("if ", f"{before}if ", 1), SPLITTING + "    split(s)\n"
    ).warnings
    assert f"`{test}` decides which branch `forward` takes, by {why}" in warning


def test_other_numbers_are_told_with_what_was_not_followed(tmp_path):
    """On the meta device, where the model is followed, it goes another way than anywhere else."""
    source = COUNTING.replace("self.steps > 100 and self.training", "not h.is_meta")
    text = refused(tmp_path, source, SPLITTING + "    split(s)\n", "SR106")
    assert "not followed: `not h.is_meta` decides which branch `forward` takes" in text


def test_what_only_raises_decides_nothing(tmp_path):
    source = COUNTING.replace("h = h.flip(-1)", "raise ValueError").replace(
        "self.steps > 100 and self.training", "h.dtype == torch.bfloat16 and h.is_cuda"
    )
    assert not rewritten(tmp_path, source, SPLITTING + "    split(s)\n").warnings
