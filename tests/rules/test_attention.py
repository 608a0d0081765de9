"""Attention that is close to torch's operation, but not the same."""

from __future__ import annotations

import pytest
import torch
from slapo_rewrite.rules.fusions import masked_softmax, sdpa

from tests.rewriting import refused, rewritten
from tests.rules.test_traps import compare

HIDDEN = """\
        scores = scores.masked_fill(self.seen[:, :, :T, :T] == 0, float("-inf"))
"""
GIVEN = sdpa.MODEL.replace("forward(self, x)", "forward(self, x, mask)")
INPUTS = '{"x": torch.randn(2, 6, 16)}'
BOOLEAN = "torch.arange(6)[None] % 3 > 0"


def hidden(line: str, mask: str) -> tuple[str, str]:
    """The example with another mask, which is given to it."""
    source = GIVEN.replace(HIDDEN, f"        {line}\n")
    assert source != GIVEN
    given = INPUTS.replace("16)}", f'16), "mask": {mask}}}')
    return source, sdpa.SCHEDULE.replace(INPUTS, given)


ADDED = {
    "boolean": ("scores = scores + mask", BOOLEAN, "attn_mask=mask.to(q.dtype)"),
    "integers": ("scores = mask + scores", "torch.arange(6)[None] % 3", "mask.to(q.dtype)"),
    "of another dtype": ("scores = scores + mask", "torch.rand(1, 6).half()", "mask.to(q.dtype)"),
    "made of flags": (
        "scores = scores + (1.0 - mask[:, None, None]) * -10000.0",
        "(torch.arange(12) % 5 > 0).view(2, 6).float()",
        "attn_mask=(1.0 - mask[:, None, None]) * -10000.0",
    ),
    "of halves": (
        "scores = scores + self.seen.half()[:, :, :T, :T]",
        "None",
        "self.seen.half()[:, :, :T, :T].to(q.dtype)",
    ),
    "a buffer": (
        "scores = scores + self.seen[:, :, :T, :T]",
        "None",
        "attn_mask=self.seen[:, :, :T, :T]",
    ),
}


@pytest.mark.parametrize(("line", "mask", "written"), ADDED.values(), ids=list(ADDED))
def test_what_is_added_is_added(line: str, mask: str, written: str, tmp_path):
    text = compare(tmp_path, *hidden(line, mask))
    assert written in text and "softmax" not in text


def test_a_boolean_mask_that_nothing_can_be_cast_like(tmp_path):
    source, schedule = hidden("scores = scores + mask", BOOLEAN)
    source = source.replace("q @ k.transpose", "(2 * q) @ (1 * k).transpose")
    source = source.replace("weights @ v", "weights @ (1 * v)")
    assert "may be boolean" in refused(tmp_path, source, schedule, "SR309")


def test_a_number_that_is_added(tmp_path):
    source, schedule = hidden("scores = scores + 1.0", "None")
    assert "what is added is a number" in refused(tmp_path, source, schedule, "SR309")


@pytest.mark.parametrize("mask", [BOOLEAN, "torch.randn(2, 1, 6, 6)", "None"])
def test_a_mask_that_the_softmax_adds(mask: str, tmp_path):
    schedule = masked_softmax.SCHEDULE.replace("torch.randn(2, 1, 6, 6)", mask)
    assert "masked_softmax(" in compare(tmp_path, masked_softmax.MODEL, schedule)


def test_a_mask_of_one_axis(tmp_path):
    source, schedule = hidden("scores = scores + self.bias", "None")
    bias = "self.heads = heads\n        self.bias = nn.Parameter(torch.randn(6))"
    source = source.replace("self.heads = heads", bias)
    assert "one axis" in refused(tmp_path, source, schedule, "SR309")


LEARNED = "self.bias = nn.Parameter(torch.randn(1, heads, 6, 6))"


def test_a_learned_bias_gets_its_gradient(tmp_path):
    source, schedule = hidden("scores = scores + self.bias", "None")
    source = source.replace("self.heads = heads", f"self.heads = heads\n        {LEARNED}")
    assert "attn_mask=self.bias" in compare(tmp_path, source, schedule)


CACHED = {
    "of an argument": "k, v = torch.cat([mask, k], dim=2), torch.cat([mask, v], dim=2)",
    "of a method": "k, v = self.all_of(k, v, mask)",
}
METHOD = """
    def all_of(self, k, v, past):
        return torch.cat([past, k], dim=2), torch.cat([past, v], dim=2)
"""


@pytest.mark.parametrize("line", CACHED.values(), ids=list(CACHED))
def test_the_mask_of_one_token_hides_no_key_of_a_cache(line: str, tmp_path):
    """`seen[:1, :1]` is spread over all keys, where `is_causal=True` leaves the first alone."""
    source = GIVEN.replace("        scores = (q @", f"        {line}\n        scores = (q @", 1)
    given = '{"x": torch.randn(2, 1, 16), "mask": torch.randn(2, 4, 3, 4)}'
    text = compare(tmp_path, source + METHOD, sdpa.SCHEDULE.replace(INPUTS, given))
    assert "is_causal=T > 1" in text


MORE_KEYS = {
    "the last query": ("q = q[:, :, -1:]\nT = q.size(2)", ""),
    "one query, doubled keys": (
        "q, T = q[:, :, :1], 1\nk, v = k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1)",
        "",
    ),
    "one query, padded keys": (
        "q, T = q[:, :, :1], 1\nk, v = F.pad(k, (0, 0, 3, 0)), F.pad(v, (0, 0, 3, 0))",
        "",
    ),
    "learned keys": (
        "q, T = q[:, :, :1], 1\nk = v = self.kept",
        "self.kept = nn.Parameter(torch.randn(2, 4, 3, 4))",
    ),
}


@pytest.mark.parametrize(("lines", "made"), MORE_KEYS.values(), ids=list(MORE_KEYS))
def test_keys_of_other_tokens(lines: str, made: str, tmp_path):
    lines = "".join(f"        {line}\n" for line in lines.splitlines())
    source = sdpa.MODEL.replace("        scores = (q @", f"{lines}        scores = (q @", 1)
    source = source.replace("y.transpose(1, 2).reshape(B, T, C)", "y")
    source = source.replace("self.heads = heads", f"self.heads = heads\n        {made}".rstrip())
    assert "is_causal=T > 1" in compare(tmp_path, source, sdpa.SCHEDULE)


@pytest.mark.parametrize("cut", [":, :, :T:2, :T", ":, :, 1 : T + 1, :T"])
def test_other_rows_of_a_triangle(cut: str, tmp_path):
    given = sdpa.SCHEDULE.replace("torch.randn(2, 6, 16)", "torch.randn(2, 2, 16)")
    source = sdpa.MODEL.replace(":, :, :T, :T", cut)
    assert "is_causal" not in compare(tmp_path, source, given)


def test_tokens_that_are_other_ones_by_then(tmp_path):
    cut = "seen = self.seen[:, :, :T, :T]\n        T = 1\n        scores = scores.masked_fill(seen"
    source = sdpa.MODEL.replace("scores = scores.masked_fill(self.seen[:, :, :T, :T]", cut)
    source = source.replace("reshape(B, T, C)", "reshape(B, -1, C)")
    assert "attn_mask=seen != 0" in compare(tmp_path, source, sdpa.SCHEDULE)


def test_a_triangle_that_is_boolean(tmp_path):
    source = sdpa.MODEL.replace("torch.ones(16, 16)", "torch.ones(16, 16, dtype=torch.bool)")
    source = source.replace("self.seen[:, :, :T, :T] == 0", "~self.seen[:, :, :T, :T]")
    text = compare(tmp_path, source, sdpa.SCHEDULE)
    assert "is_causal=T > 1" in text
    source = source.replace("torch.tril(", "torch.triu(").replace("16)))", "16)))")
    text = compare(tmp_path, source.replace("bool))", "bool)).mT.contiguous()"), sdpa.SCHEDULE)
    assert "attn_mask=self.seen[:, :, :T, :T]" in text


def test_fewer_tokens_than_the_mask_has(tmp_path):
    for tokens in (1, 16):
        given = sdpa.SCHEDULE.replace("torch.randn(2, 6, 16)", f"torch.randn(2, {tokens}, 16)")
        assert "is_causal=T > 1" in compare(tmp_path, sdpa.MODEL, given)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_nothing_is_dropped_in_evaluation(p: float, tmp_path):
    source = sdpa.MODEL.replace("nn.Dropout(0.0)", f"nn.Dropout({p})")
    schedule = sdpa.SCHEDULE.replace("m.Attention(16, 4)", "m.Attention(16, 4).eval()")
    assert "dropout_p=self.drop.p if self.drop.training else 0.0" in compare(
        tmp_path, source, schedule
    )


SCALES = {
    "* (1.0 / math.sqrt(k.size(-1)))": None,
    "/ math.sqrt(k.size(-1))": None,
    "* k.shape[-1] ** -0.5": None,
    "/ (q.size(-1) ** 0.5)": None,
    "* 0.3": "scale=0.3",
    "/ 4": "scale=1.0 / 4",
    "/ math.sqrt(self.heads)": "scale=1.0 / math.sqrt(self.heads)",
    "* self.heads ** -0.5": "scale=self.heads**-0.5",
}


@pytest.mark.parametrize("scale", SCALES)
def test_the_scale_as_it_is_written(scale: str, tmp_path):
    source = sdpa.MODEL.replace("* (1.0 / math.sqrt(k.size(-1)))", scale)
    text, written = compare(tmp_path, source, sdpa.SCHEDULE), SCALES[scale]
    assert (written in text) if written else ("scale=" not in text)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_of_float32_under_autocast(dtype, tmp_path):
    source, schedule = hidden("scores = scores + mask", "torch.randn(2, 1, 6, 6)")
    source = source.replace(
        "        B, T, C",
        f"        with torch.autocast('cpu', {dtype}, enabled={dtype != torch.float32}):\n"
        "            return self.attend(x, mask)\n\n    def attend(self, x, mask):\n"
        "        B, T, C",
    )
    close = {} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.01}
    assert "attn_mask=mask.to(q.dtype)" in compare(tmp_path, source, schedule, **close)


def test_a_scale_that_is_given_may_be_a_tensor(tmp_path):
    source = GIVEN.replace("(1.0 / math.sqrt(k.size(-1)))", "mask")
    schedule = sdpa.SCHEDULE.replace(INPUTS, INPUTS.replace("16)}", '16), "mask": 0.5}'))
    assert "may be a tensor" in refused(tmp_path, source, schedule, "SR309")
    told = source.replace("self, x, mask", "self, x, mask: float")
    assert "scale=mask" in compare(tmp_path, told, schedule)


WRITING = ("y.mul_(2)", "y.transpose(1, 2).mul_(2)", "y *= 2", "y[0] = 0", "y.mT[..., 0] += 1")


@pytest.mark.parametrize("line", WRITING)
def test_a_result_that_is_written_to(line: str, tmp_path):
    source = sdpa.MODEL.replace("        return y", f"        {line}\n        return y")
    assert "is written to" in refused(tmp_path, source, sdpa.SCHEDULE, "SR309")


LAYOUTS = {
    "view": "y = y.view(B * self.heads, T, -1).view(B, self.heads, T, -1)",
    "stride": "y = y * y.stride(1)",
    "is_contiguous": "y = y if y.is_contiguous() else 2 * y",
}


@pytest.mark.parametrize("reader", LAYOUTS)
def test_a_result_whose_layout_is_read(reader: str, tmp_path):
    source = sdpa.MODEL.replace("        return y", f"        {LAYOUTS[reader]}\n        return y")
    said = refused(tmp_path, source, sdpa.SCHEDULE, "SR309")
    assert f"`{reader}` reads how its result lies in memory" in said


DROPPING = """\
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(self.dense(x))
"""


def test_dropout_that_is_switched_by_itself(tmp_path):
    """As in Monte Carlo dropout: the model is in evaluation, and what drops is not."""
    schedule = """\
import torch


def model(m):
    block = m.Block().eval()
    block.drop.train()
    return block


def inputs(model):
    torch.manual_seed(1)
    return {"x": torch.randn(2, 8)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s.apply("dropout_residual")
"""
    assert "dropout=self.drop)" in compare(tmp_path, DROPPING, schedule)


def test_dropout_that_is_made_where_it_is_called(tmp_path):
    source = sdpa.MODEL.replace("self.drop(F", "nn.Dropout(0.5)(F")
    schedule = sdpa.SCHEDULE.replace("m.Attention(16, 4)", "m.Attention(16, 4).eval()")
    text = rewritten(tmp_path, source, schedule).files["source_0.py"]
    assert "dropout_p=0.5" in text and "training" not in text
