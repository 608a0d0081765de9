"""`autocast`, on source: casts where values change their precision, and refusals elsewhere."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from slapo_rewrite.model.results import tensors
from slapo_rewrite.model.small_model import casts_left_out
from slapo_rewrite.operations import FLOAT32, PRODUCT, name_of, precision_of
from slapo_rewrite.primitives.autocast import BLOCK, MODEL
from slapo_rewrite.verify.run import verify
from tests.rewriting import changed_lines, imported, refused, rewritten, written

HEAD = """\
import torch
from torch import nn
from torch.nn import functional as F


"""
ONE = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(2, 4, 8)}


def loss(outputs):
    return outputs.pow(2).mean()


def schedule(s):
    s.autocast(%s)
"""


def source(forward: str, made: str = "", before: str = "") -> str:
    """A model of a linear layer `a`, a norm, and what else is made, with a `forward`."""
    lines = "".join(f"        {line}\n" for line in made.splitlines())
    body = "".join(f"        {line}\n" for line in forward.splitlines())
    return (
        f"{HEAD}{before}class Model(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.a = nn.Linear(8, 8)\n"
        f"        self.norm = nn.LayerNorm(8)\n{lines}\n    def forward(self, x):\n{body}"
    )


def forward_of(output) -> str:
    """The lines that are written anew inside of `forward`s."""
    lines = changed_lines(output).splitlines()
    return "\n".join(
        line[1:].strip() for line in lines if line[0] == "+" and "BFloat16" not in line
    )


TABLE = [
    # Torch itself promotes the sum; a norm is given float32 already.
    ("x = x + self.a(x)\nreturn self.norm(x)", ""),
    ("return self.norm(self.a(x))", "return self.norm(self.a(x).float())"),
    ("return self.norm(self.a(x) + 1.0)", "return self.norm((self.a(x) + 1.0).float())"),
    ("return self.a(x).softmax(-1)", "return self.a(x).float().softmax(-1)"),
    ("return torch.softmax(self.a(x), -1)", "return torch.softmax(self.a(x).float(), -1)"),
    (
        "return F.softmax(dim=-1, input=self.a(x))",
        "return F.softmax(dim=-1, input=self.a(x).float())",
    ),
    # Told a dtype, it begins with that cast itself.
    ("return self.a(x).softmax(-1, dtype=torch.float32)", ""),
    ("return F.log_softmax(self.a(x), -1, 3, torch.float32)", ""),
    ("return self.a(x).mean(-1)", "return self.a(x).float().mean(-1)"),
    ("return self.a(x) ** 2", "return self.a(x).float() ** 2"),
    ("return F.gelu(self.a(x))", ""),
    # What is in float32 stays there until a product.
    (
        "y = self.a(x).softmax(-1).log()\nreturn y @ x.mT",
        "y = self.a(x).float().softmax(-1).log()\nreturn y.bfloat16() @ x.mT.bfloat16()",
    ),
    ("return torch.matmul(x, self.a(x).mT)", "return torch.matmul(x.bfloat16(), self.a(x).mT)"),
    (
        'return torch.einsum("bij,bkj->bik", x, self.a(x))',
        'return torch.einsum("bij,bkj->bik", x.bfloat16(), self.a(x))',
    ),
    (
        'return torch.einsum("bij,bkj->bik", [x, self.a(x)])',
        'return torch.einsum("bij,bkj->bik", [x.bfloat16(), self.a(x)])',
    ),
    (
        "return torch.baddbmm(x @ x.mT, x, self.a(x).mT)",
        "return torch.baddbmm(x.bfloat16() @ x.mT.bfloat16(), x.bfloat16(), self.a(x).mT)",
    ),
    # Torch computes these of one precision alone.
    (
        "y = x.clone()\ny[x > 0] = self.a(x)[x > 0]\nreturn y",
        "y[x > 0] = self.a(x)[x > 0].float()",
    ),
    ("return 2 ** self.a(x)", "return 2 ** self.a(x).float()"),
    # What casts to the dtype of another value, or takes its least number, does so still.
    ("y = self.a(x)\nreturn x.to(y.dtype) + y", ""),
    ("y = self.a(x)\nkind = y.dtype\nreturn x.to(kind) + y", ""),
    ("y = self.a(x)\none, other = x.dtype, y.dtype\nreturn x.to(other) + y.to(one)", ""),
    ("y = self.a(x)\nif y.dtype != x.dtype:\n    y = y.to(x.dtype)\nreturn y", ""),
    ("y = self.a(x)\nreturn y.masked_fill(x > 0, torch.finfo(y.dtype).min).tanh()", ""),
]


@pytest.mark.parametrize(("forward", "changed"), TABLE, ids=[forward for forward, _ in TABLE])
def test_casts_stand_where_values_cross(tmp_path, forward, changed):
    output = rewritten(tmp_path, source(forward), ONE % "")
    found = forward_of(output).replace("from .mixed_precision import", "").strip()
    assert found == changed or (not changed and not found)
    check_numbers(tmp_path, output)


def test_what_the_author_keeps_from_autocasting_stays_in_float32(tmp_path):
    block = "with torch.autocast('cpu', enabled=False):\n    y = x @ x.mT\nreturn y @ self.a(x)"
    output = rewritten(tmp_path, source(block), ONE % "")
    assert forward_of(output).splitlines()[-1] == "return y.bfloat16() @ self.a(x)"


LAYERS = [
    ("nn.Conv1d(4, 4, 3)", "BFloat16Conv1d(4, 4, 3)"),
    ("nn.Conv1d(4, 4, 3, padding=1, padding_mode='circular')", "BFloat16Conv1d(4, 4, 3"),
    ("Mine(8, 8)", "class Mine(BFloat16Linear):"),
    ("Attention(8, 2)", "class Attention(BFloat16MultiheadAttention):"),
]
MINE = """\
class Mine(nn.Linear):
    def forward(self, input):
        return super().forward(input).relu()


class Attention(nn.MultiheadAttention):
    def forward(self, x):
        y, weights = super().forward(x, x.tanh(), x, need_weights=self.training)
        return y + weights.sum() if self.training else y


"""


@pytest.mark.parametrize(("made", "becomes"), LAYERS)
def test_layers_are_exchanged_where_they_are_made(tmp_path, made, becomes):
    text = source("return self.b(x).tanh()", f"self.b = {made}", MINE)
    output = rewritten(tmp_path, text, ONE % "")
    assert f"+{'' if 'class' in becomes else '        self.b = '}{becomes}" in changed_lines(output)
    check_numbers(tmp_path, output)


def check_numbers(folder: Path, output: Any) -> None:
    """An output is the original with its casts left out, and as right as under torch.autocast.

    In it no product is computed in float32, and nothing that is to be in float32 in less.
    """
    torch.manual_seed(0)
    original = imported(sorted(folder.glob("source_*.py"))[-1]).Model()
    model = imported(written(folder, output)).Model()
    model.load_state_dict(original.state_dict())
    exact, ours, theirs = copy.deepcopy(original).double(), 0.0, 0.0
    for _ in range(8):
        x = torch.randn(2, 4, 8)
        with casts_left_out():
            assert all(map(torch.equal, step(model, x), step(original, x)))
        want = step(exact, x.double())
        with Precise():
            y = model(x)
        assert y.isfinite().all()
        ours += error(step(model, x), want)
        # It does not put a value of one precision into elements of the other.
        with torch.autocast("cpu", torch.bfloat16), contextlib.suppress(RuntimeError):
            theirs += error(step(original, x), want)
    assert ours <= 1.2 * (theirs or 0.1) + 1e-6


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of a step."""
    model.zero_grad()
    y = model(x)
    torch.autograd.backward((y * y).mean())
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def error(got: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    return float(
        sum((g.double() - e).square().sum() for g, e in zip(got, exact, strict=True)) ** 0.5
    )


class Precise(TorchFunctionMode):
    """Fails where an operation is not computed in the precision that it is to have."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kind = precision_of(name_of(func))
        dtypes = {t.dtype for t in tensors((args, kwargs or {})) if t.is_floating_point()}
        is_told = torch.float32 in (*args, *(kwargs or {}).values())
        if kind == PRODUCT:
            assert dtypes == {torch.bfloat16}, name_of(func)
        elif kind == FLOAT32 and name_of(func) != "mean" and not is_told:
            assert dtypes <= {torch.float32}, name_of(func)
        return func(*args, **(kwargs or {}))


CALLED = """\
def attend(q, k, v, mask=None):
    q = q * 2.0
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


"""


def test_what_a_function_computes_is_cast_where_it_is_called(tmp_path):
    forward = "y = self.a(x)\nreturn attend(x, y, v=x + y)"
    output = rewritten(tmp_path, source(forward, before=CALLED), ONE % "")
    assert (
        forward_of(output).splitlines()[-1]
        == "return attend(x.bfloat16(), y, v=(x + y).bfloat16())"
    )
    check_numbers(tmp_path, output)


FOLLOWING = """\
def mapped(x, weight):
    return F.linear(x.to(weight.dtype), weight).to(x.dtype)


def weighted(q, k, v, mask):
    weights = (q @ k.mT + mask).softmax(-1, dtype=torch.float32).to(q.dtype)
    return weights @ v


"""


@pytest.mark.parametrize(
    ("call", "becomes"),
    [
        ("mapped(self.a(x), self.b)", "mapped(self.a(x), self.b.bfloat16())"),
        (
            "weighted(x, x, self.a(x), x.new_zeros(4, 4))",
            "weighted(x.bfloat16(), x.bfloat16(), self.a(x), x.new_zeros(4, 4))",
        ),
    ],
)
def test_what_follows_the_dtype_of_what_a_call_casts_is_not_cast_as_well(call, becomes, tmp_path):
    """What is cast to the precision of another value has that of the cast one."""
    text = source(f"return {call}", "self.b = nn.Parameter(torch.randn(8, 8))", FOLLOWING)
    output = rewritten(tmp_path, text, ONE % "")
    assert forward_of(output).splitlines()[-1] == f"return {becomes}"
    check_numbers(tmp_path, output)


MASKED = """\
from transformers import BertConfig
from transformers.masking_utils import create_causal_mask

CONFIG = BertConfig()
CONFIG._attn_implementation = "eager"


"""


def test_a_mask_of_transformers_is_made_in_the_precision_of_what_it_is_for(tmp_path):
    forward = (
        "y = self.a(x)\nmask = create_causal_mask(CONFIG, y, None, None)[:, 0]\n"
        "return (y @ y.mT + mask).softmax(-1, dtype=torch.float32)"
    )
    output = rewritten(tmp_path, source(forward, before=MASKED), ONE % "")
    assert "BFloat16Linear(8, 8)" in changed_lines(output)
    check_numbers(tmp_path, output)


CACHED = """\
class Part(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number
        self.a = nn.Linear(8, 8)

    def forward(self, x, mask, cache):
        y = self.a(x)
        if cache is not None:
            y = cache[self.number] = torch.cat([cache.get(self.number, x[:, :0]), y], 1)
        return x + F.scaled_dot_product_attention(x, x, y, mask)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Part(i) for i in range(3)])

    def forward(self, x, use_cache=False):
        cache = {} if use_cache else None
        mask = torch.ones(4, 4, dtype=torch.bool, device=x.device)
        for part in self.parts:
            x = part(x, mask, cache)
        return x
"""


def test_what_a_cache_gives_back_is_cast(tmp_path):
    """Each layer fills its own part of the cache, by its number."""
    output = rewritten(tmp_path, HEAD + CACHED, ONE % "")
    assert "x.bfloat16(), x.bfloat16(), y.bfloat16(), mask" in " ".join(
        changed_lines(output).replace("+", "").split()
    )
    model = imported(written(tmp_path, output)).Model()
    x = torch.randn(2, 4, 8)
    assert torch.equal(model(x, use_cache=True), model(x))


def test_a_mask_may_be_of_booleans_and_none(tmp_path):
    forward = (
        "y = self.a(x)\nmask = x @ x.mT * 0.5 + x.new_zeros(4, 4)\nreturn attend(y, y, y, mask)"
    )
    output = rewritten(tmp_path, source(forward, before=CALLED), ONE % "")
    assert "return attend(y, y, y, bfloat16_mask(mask))" in forward_of(output)
    check_numbers(tmp_path, output)
    helpers = imported(written(tmp_path, output).parent / "mixed_precision.py")
    mask = torch.ones(2, dtype=torch.bool)
    assert helpers.bfloat16_mask(None) is None and helpers.bfloat16_mask(mask) is mask
    assert helpers.bfloat16_mask(torch.ones(2)).dtype == torch.bfloat16


def test_what_is_kept_and_not_selected_computes_in_float32(tmp_path):
    for line in ('s.autocast(keep=["head"])', 's["block"].autocast()'):
        output = rewritten(tmp_path, BLOCK, MODEL + f"def schedule(s):\n    {line}\n")
        lines = changed_lines(output)
        assert "self.head" not in lines and "cross_entropy" not in lines and "BFloat16" in lines
    output = rewritten(tmp_path, BLOCK, MODEL + 'def schedule(s):\n    s.autocast(keep="matmul")\n')
    lines = changed_lines(output)
    assert "+        scores = self.query(y).float() @ self.key(y).mT.float()" in lines
    assert "+        return x + self.out(F.softmax(scores, -1) @ y)" not in lines


STACKED = """\
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.a(x).softmax(-1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Part() for _ in range(4)])

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x
"""


def test_some_layers_of_a_list_stay_in_float32(tmp_path):
    output = rewritten(tmp_path, HEAD + STACKED, ONE % 'keep=["parts.{0,3}"]')
    lines = changed_lines(output)
    assert "HalfPart() if 1 <= i < 3 else Part() for i in range(4)" in lines
    assert lines.count("BFloat16Linear(8, 8)") == lines.count(".float().softmax(-1)") == 1


def test_a_later_layer_is_given_what_the_one_before_it_computes(tmp_path):
    stacked = STACKED.replace("x + self.a(x).softmax(-1)", "self.a(x.softmax(-1))")
    output = rewritten(tmp_path, HEAD + stacked, ONE % "")
    assert "return self.a(x.float().softmax(-1))" in changed_lines(output)
    check_numbers(tmp_path, output)


def test_a_small_model_is_followed_where_values_are_asked_for(tmp_path):
    forward = "n = int(x.abs().max().item() * 0) + 1\nreturn self.b(self.a(x).softmax(-1) * n)"
    made = "self.b = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))"
    output = rewritten(tmp_path, source(forward, made), ONE % "")
    assert "return self.b(self.a(x).float().softmax(-1) * n)" in changed_lines(output)
    check_numbers(tmp_path, output)


TWICE = """\
class Part(nn.Module):
    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.one = Part()
        self.two = Part()

    def forward(self, x):
        return self.one(x) + self.two(self.a(x))
"""


def test_a_class_is_one_where_casts_change_nothing(tmp_path):
    """`two` is given half precision as it is, and needs fewer casts than `one`."""
    lines = changed_lines(rewritten(tmp_path, HEAD + TWICE, ONE % ""))
    assert lines.count("return (x.bfloat16() @ x.mT.bfloat16()).float().softmax(") == 1
    assert "class Half" not in lines
    lines = changed_lines(rewritten(tmp_path, HEAD + TWICE, ONE % 'keep=["one"]'))
    assert "class HalfPart(Part)" in lines and "self.two = HalfPart()" in lines
    assert lines.count("return (x @ x.mT).float().softmax(-1).bfloat16() @ x") == 1


@pytest.mark.parametrize(
    ("norm", "forward"),
    [
        ("LayerNorm(8)", "return self.b(x)"),
        ("RMSNorm(8)", "return self.b(x)"),
        ("GroupNorm(2, 8)", "return self.b(x.flatten(0, 1))"),
        ("BatchNorm1d(8)", "return self.b(x.flatten(0, 1))"),
        ("LayerNorm(8)", "return self.b(self.b(x))"),
    ],
)
@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # of torch.autocast, beside it
def test_norms_in_a_sequence_cast_by_themselves(norm, forward, tmp_path):
    made = f"self.b = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.{norm}, nn.Linear(8, 8))"
    output = rewritten(tmp_path, source(forward, made), ONE % "")
    lines = changed_lines(output)
    assert f"Float32{norm}" in lines.replace("\n", "")
    assert ".float()" not in lines, "not where it is called"
    check_numbers(tmp_path, output)


def test_a_norm_that_a_method_calls_is_given_float32(tmp_path):
    output = rewritten(tmp_path, source("return self.b(self.a(x))", "self.b = nn.LayerNorm(8)"),
                       ONE % "")  # fmt: skip
    assert "return self.b(self.a(x).float())" in changed_lines(output)


SPLIT = """\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.GELU(),
            nn.Conv2d(8, 8, 3, padding=1, groups=4),
            nn.Conv2d(8, 6, 1),
            nn.GroupNorm(2, 6),
            nn.Conv2d(6, 4, 1),
        )

    def forward(self, x):
        return self.net(x)
"""
SPLIT_SCHEDULE = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(2, 3, 6, 6)}


def loss(outputs):
    return outputs.float().square().mean()


def schedule(s):
    s["net.0"].shard(["weight", "bias"], axis=0)
    s["net.1"].shard(["weight", "bias", "running_mean", "running_var"], axis=0)
    s["net.3"].shard(["weight", "bias"], axis=0)
    s["net.4"].shard("weight", axis=1)
    s.infer_sync()
    s.autocast()
"""


@pytest.mark.long
@pytest.mark.processes
def test_split_convolutions_and_norms_in_half_precision(tmp_path):
    output = rewritten(tmp_path, HEAD + SPLIT, SPLIT_SCHEDULE)
    lines = changed_lines(output)
    for name in ("BFloat16ColumnParallel", "BFloat16GroupParallel", "BFloat16RowParallel"):
        assert f"{name}Conv2d(" in lines
    assert "Float32ParallelBatchNorm2d(8)" in lines and "Float32GroupNorm(2, 6)" in lines
    folder = written(tmp_path, output).parent
    report = verify(folder, [1, 2, 4])
    assert report.ok, report.render()


REFUSALS = [
    # It asks for the dtype of a value that would be in half precision.
    ("y = self.a(x)\nreturn y * 2 if y.dtype == torch.float32 else y", "asks for the dtype"),
    ("y = self.a(x)\nreturn y.div(torch.finfo(y.dtype).eps)", "asks for the dtype"),
    ("y = self.a(x)\nkinds = [y.dtype]\nreturn y.to(kinds[0])", "asks for the dtype"),
    # No cast could be written.
    ("return helped(self.a(x))", "no method of the model could cast it"),
    ("return self.d(x)", "no method of the model could cast it"),
    # It is not known how it is to be computed, or half precision already.
    ("return self.c(x)[0]", "in which precision `gru`"),
    ("return self.a(x).bfloat16().float()", "half precision itself"),
]
HELPED = """\
def helped(x):
    x = x + torch.ones_like(x)
    return (x * x).tanh().softmax(-1) + torch.relu(x @ x.mT).softmax(-1).sum()


"""


@pytest.mark.parametrize(("forward", "words"), REFUSALS, ids=[words for _, words in REFUSALS])
def test_what_is_not_known_to_be_right_is_refused(tmp_path, forward, words):
    made = "self.d = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))\nself.c = nn.GRU(8, 8)"
    text = refused(tmp_path, source(forward, made, HELPED), ONE % "", "SR305")
    assert words in text and re.search(r"source_0\.py:\d+:\d+", text)


CTC = """\
def aligned(x):
    steps = x.log_softmax(-1, torch.float32).transpose(0, 1)
    return F.ctc_loss(steps, torch.ones(2, 2).long(), torch.tensor([4, 4]), torch.tensor([2, 2]))


"""


def test_a_loss_of_alignments_is_in_float32(tmp_path):
    output = rewritten(tmp_path, source("return aligned(self.a(x))", before=CTC), ONE % "")
    assert "BFloat16Linear(8, 8)" in changed_lines(output) and "aligned(" not in forward_of(output)
    check_numbers(tmp_path, output)


@pytest.mark.parametrize(
    "forward",
    ["return torch.pdist(self.a(x)[0])", "return (lambda f: f(x, self.a.weight))(torch.matmul)"],
)
def test_the_model_itself_is_no_module_to_be_kept(tmp_path, forward):
    text = refused(tmp_path, source(forward), ONE % "", "SR305")
    assert "float32" in text and 'keep=[""]' not in text
    assert 's["..."].autocast() of modules inside' in text


def test_what_works_out_a_weight_is_kept_with_the_layer(tmp_path):
    """Alone it would give a weight in float32 to a product in half precision."""
    made = "self.c = nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 8, 3, padding=1))"
    text = source("return self.c(self.a(x).mT).mT", made)
    assert 'keep=["c"]' in refused(tmp_path, text, ONE % "", "SR305")
    assert rewritten(tmp_path, text, ONE % 'keep=["c"]').files


def test_the_advice_of_a_refusal_works(tmp_path):
    made = "self.c = nn.GRU(8, 8)"
    text = refused(tmp_path, source("return self.c(self.a(x))[0]", made), ONE % "", "SR305")
    keep = re.search(r'keep=\["c"\]', text)
    assert keep is not None
    output = rewritten(tmp_path, source("return self.c(self.a(x))[0]", made), ONE % keep[0])
    assert "return self.c(self.a(x).float())[0]" in forward_of(output)


def test_the_record_says_which_dtype_was_asked_for(tmp_path):
    """It does not depend on words in the output's text."""
    schedule = MODEL + 'def schedule(s):\n    s.autocast("float16")\n'
    output = rewritten(tmp_path, f"# Not .bfloat16().\n{BLOCK}", schedule)
    assert json.loads(output.files["rewrite.json"])["half"] == ["float16"]


def test_verification_says_what_it_left_out_and_what_rounding_does(tmp_path):
    schedule = MODEL + "def schedule(s):\n    s.autocast()\n"
    path = written(tmp_path, rewritten(tmp_path, BLOCK, schedule))
    report = verify(path.parent, [1])
    text = report.render()
    assert report.ok and "with the casts to bfloat16 left out" in text
    assert {"loss in bfloat16", "rounding in bfloat16"} <= {row.name for row in report.rows}
    # A layer that rounds to fewer digits is found out.
    helper = path.parent / "mixed_precision.py"
    rounded = "((self.weight.bfloat16() - 1.0).bfloat16() + 1.0)"
    helper.write_text(helper.read_text().replace("self.weight.bfloat16()", rounded))
    text = verify(path.parent, [1]).render()
    assert "NOT equal" in text and "rounding in bfloat16" in text.splitlines()[-1]


SPLIT_PAIR = """\
    s["a"].shard(["weight", "bias"], axis=0)
    s["b"].shard("weight", axis=1)
    s.infer_sync()
"""


SPLIT_PARTS = SPLIT_PAIR.replace('s["', 's["parts.*.')
NOTED = """\
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.b = nn.Linear(16, 8)

    def forward(self, x, seen):
        seen[self] = x
        return x + self.b(self.a(x).relu())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Part() for _ in range(3)])

    def forward(self, x):
        seen = {}
        for part in self.parts:
            x = part(x, seen)
        if len(seen) != 3:
            raise ValueError("a part was left out")
        return x
"""


def test_split_layers_of_which_none_stands_for_others_compute_alike(tmp_path):
    """Such as are looked up themselves."""
    output = rewritten(tmp_path, HEAD + NOTED, ONE % "" + SPLIT_PARTS)
    lines = changed_lines(output)
    assert "BFloat16ColumnParallelLinear(8, 16)" in lines and "HalfPart" not in lines
    assert "i == 0" not in lines
    report = verify(written(tmp_path, output).parent, [1, 2])
    assert report.ok, report.render()


def test_a_small_model_is_not_followed_for_layers_of_which_none_stands_for_others(tmp_path):
    """The others would have no casts."""
    in_eval = "        if not self.training:\n            x = x * x.max().item()\n"
    valued = NOTED.replace("        if len", f"{in_eval}        if len")
    text = refused(tmp_path, HEAD + valued, ONE % "" + SPLIT_PARTS, "SR305")
    assert (
        "a small one does not have all layers" in text
        and "each is followed without the other" in text
    )
    for schedule in (ONE % "", (ONE % "").replace("s.autocast()", "pass") + SPLIT_PARTS):
        assert changed_lines(rewritten(tmp_path, HEAD + valued, schedule))


@pytest.mark.parametrize("lines", ["", SPLIT_PAIR])
@pytest.mark.parametrize("paths", ["b", "{a,b}"])
def test_a_layer_that_is_decomposed_is_kept_or_refused_and_the_advice_works(lines, paths, tmp_path):
    text = source("return self.b(self.a(x).tanh())", "self.b = nn.Linear(8, 8)")
    decomposed = f'{lines}    s["{paths}"].decompose()\n'
    words = refused(tmp_path, text, ONE % "" + decomposed, "SR306")
    assert "is already replaced" in words and "keep=[" in words
    kept = ONE % f"keep={['b'] if paths == 'b' else ['a', 'b']}"
    rewritten(tmp_path, text, kept + decomposed)


def test_split_layers_in_half_precision_are_something_that_changes(tmp_path):
    text = source("return self.b(self.a(x).tanh())", "self.b = nn.Linear(8, 8)")
    output = rewritten(tmp_path, text, ONE % "" + SPLIT_PAIR)
    assert not output.warnings
    assert "BFloat16ColumnParallelLinear(8, 8)" in output.diff()


EXPERTS = """\
class Router(nn.Linear):
    pass


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = MADE(8, 4)
        self.w1 = nn.Parameter(torch.randn(4, 8, 12))
        self.w2 = nn.Parameter(torch.randn(4, 12, 8))

    def forward(self, x):
        gates = self.router(x).softmax(-1)
        h = torch.einsum("btd,edf->btef", x, self.w1).tanh()
        y = torch.einsum("btef,efd->bted", h, self.w2)
        return (y * gates.unsqueeze(-1)).sum(-2)
"""


@pytest.mark.parametrize("made", ["nn.Linear", "Router"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_whole_layer_that_works_on_parts_adds_up_its_gradients(made, dtype, tmp_path):
    split = '    s.shard("w1", axis=2)\n    s.shard("w2", axis=1)\n    s.infer_sync()\n'
    text = HEAD + EXPERTS.replace("MADE", made)
    output = rewritten(tmp_path, text, ONE % f'"{dtype}"' + split)
    name = {"bfloat16": "BFloat16", "float16": "Float16"}[dtype] + "ReplicatedLinear"
    assert f"class {name}(ReplicatedLinear" in output.files["mixed_parallel.py"]
    assert f"({name}):" in output.diff() or f"{name}(8, 4)" in output.diff()


KEPT_FOR = {
    "SR106": ("h = torch.zeros(2, 4, 8).index_copy(1, torch.tensor([0]), self.a(x)[:, :1])", ""),
    "SR305": ("h = self.b(x)", "self.b = nn.utils.spectral_norm(nn.Linear(8, 8))"),
}


@pytest.mark.parametrize("code", KEPT_FOR)
def test_what_is_to_be_kept_is_said_and_helps(tmp_path, code):
    """What `torch.autocast` does not run either, and what a hook computes."""
    line, made = KEPT_FOR[code]
    text = source(f"{line}\nreturn self.norm(h)", made)
    words = refused(tmp_path, text, ONE % "", code)
    assert "`keep`" in words or '.autocast(keep=["PATH", "matmul"])' in words
    kept = "b" if made else "a"
    text = text.replace("self.norm(h)", "self.norm(h) + self.c(x)").replace(
        "self.norm =", "self.c = nn.Linear(8, 8)\n        self.norm ="
    )
    assert "self.c = BFloat16" in changed_lines(rewritten(tmp_path, text, ONE % f'keep=["{kept}"]'))
