"""`release`, on source: what it drops, that it frees memory, and that numbers are unchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.primitives.checkpoint import MODEL
from slapo_rewrite.primitives.release import BLOCK
from slapo_rewrite.verify.run import verify
from tests.rewriting import changed_lines, imported, refused, rewritten, written

RELEASING = MODEL + "def schedule(s):\n    s.release()\n"
ROOT = Path(__file__).resolve().parents[2]


def body(text: str, constructor: str = "", head: str = "") -> str:
    """A model of one class, with a `forward` of its own."""
    lines = "".join(f"        {line}\n" for line in text.splitlines())
    return f"""\
import torch
from torch import nn


{head}class Stack(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)
{constructor}
    def forward(self, x):
{lines}"""


def released(folder: Path, source: str) -> list[str]:
    """The lines that are new."""
    lines = changed_lines(rewritten(folder, source, RELEASING)).splitlines()
    return [line[1:].strip() for line in lines if line[0] == "+"]


def peak(model: nn.Module, *, training: bool) -> int:
    """The most bytes of activations in a forward pass, by torch's own count."""
    x = torch.randn(512, 8)
    tracker = MemTracker()
    tracker.track_external(model, x)
    held = tracker.get_tracker_snapshot("current")[torch.device("cpu")]["Total"]
    with tracker, torch.set_grad_enabled(training):
        model.train(training)(x)
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"] - held


def both(folder: Path, source: str, schedule: str = RELEASING) -> tuple[nn.Module, nn.Module]:
    """The original and the rewritten model, with the same weights."""
    path = written(folder, rewritten(folder, source, schedule))
    made: list[nn.Module] = []
    for each in (sorted(folder.glob("source_*.py"))[-1], path):
        torch.manual_seed(1)
        made.append(imported(each).Stack(8, depth=4))
    return made[0], made[1]


def same_numbers(original: nn.Module, model: nn.Module) -> None:
    """Bit for bit, in eval mode and in training."""
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert torch.equal(original.eval()(x), model.eval()(x))
    for each in (original, model):
        each.train()(x).square().mean().backward()
    for one, other in zip(original.parameters(), model.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        # Dropped: what is made meanwhile would add to it.
        ("a = torch.cat([x] * 8)\nb = a.exp()\nc = b.exp()\nreturn c", ["del a"]),
        (
            "a = torch.cat([x] * 8)\nb = a.view(-1)\nc = b.exp()\nd = torch.cat([c, c])\nreturn d",
            ["del a", "del b"],
        ),
        # A tensor that is made without naming a device.
        (
            "a = torch.cat([x * torch.arange(8)] * 8)\nb = a.exp()\nc = b.exp()\nreturn c",
            ["del a"],
        ),
        # Nothing is made afterwards, or nothing as large at once as before.
        ("a = torch.cat([x] * 8)\nb = a.exp()\nreturn b", []),
        ("a = torch.cat([x] * 8)\nb = a.exp()\nreturn b.sum()", []),
        ("a = torch.cat([x] * 64)\nb = a.exp()\nc = b[:2].exp()\nreturn c.exp()", []),
        # Something else holds it: the caller, another name, the module.
        ("b = x + 1\nreturn b.exp().exp()", []),
        ("y = x\nb = torch.cat([y] * 2)\nreturn b.exp().exp()", []),
        (
            "a = torch.cat([x] * 8)\nself.kept = a\nb = a * 2\nc = b.exp()\nreturn c.exp()",
            ["del b"],
        ),
    ],
)
def test_what_is_dropped(tmp_path, text: str, lines: list[str]):
    found = released(tmp_path, body(text))
    assert [line for line in found if line.startswith("del ")] == lines


def test_in_what_a_forward_calls(tmp_path):
    head = """\
def spread(x):
    wide = torch.cat([x] * 8)
    both = wide * 2
    return both.exp() + 1


"""
    method = """
    def narrow(self, y):
        high = torch.cat([y] * 2)
        # The log of it.
        low = high.exp()
        return low.log() + low
"""
    source = body("return self.narrow(self.a(spread(x)))", head=head, constructor=method)
    assert released(tmp_path, source) == ["del wide", "del y", "del high"]


def test_a_value_that_autograd_keeps_is_let_go_without_gradients(tmp_path):
    original, model = both(tmp_path, BLOCK)
    assert peak(model, training=False) <= 0.95 * peak(original, training=False)
    assert peak(model, training=True) <= peak(original, training=True)
    same_numbers(original, model)


def test_nothing_is_written_where_nothing_is_gained(tmp_path):
    output = rewritten(tmp_path, body("y = self.a(x)\nreturn self.b(y)"), RELEASING)
    assert not changed_lines(output)
    assert any("`release` drops nothing" in warning for warning in output.warnings)


def test_twice_is_once(tmp_path):
    again = rewritten(tmp_path, BLOCK, RELEASING + "    s.release()\n")
    assert changed_lines(again) == changed_lines(rewritten(tmp_path, BLOCK, RELEASING))


DECORATED = """\
import functools

import torch
from torch import nn


def traced(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


class Base(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a = nn.Linear(width, width)

    def forward(self, x):
        return self.a(x)


class Stack(Base):
    def __init__(self, width, depth):
        super().__init__(width)

    @traced
    def forward(self, x):
        wide = torch.cat([x] * 8)
        y = super().forward(wide)
        return y.exp() + y
"""


def test_below_a_decorator_and_with_super(tmp_path):
    assert released(tmp_path, DECORATED) == ["del wide"]
    same_numbers(*both(tmp_path, DECORATED))


ALL = """\
def schedule(s):
    s.apply_all()
    s.release()
    for block in s["blocks.*"]:
        block["up"].shard(["weight", "bias"], axis=0)
        block["up"].sync("bwd_post", "all_reduce")
        block["down"].shard("weight", axis=1)
        block["down"].sync("fwd_post", "all_reduce")
    s["blocks"][:2].checkpoint()
"""
CUT = '    s["blocks.1"].cut_pipeline_stage(target="torch")\n'


@pytest.mark.parametrize("order", [("apply_all", "release"), ("release", "apply_all")])
def test_with_what_else_changes(tmp_path, order: tuple[str, str]):
    """The rehearsal runs it on two ranks and more."""
    schedule = ALL.replace("apply_all", "first").replace("release", "second")
    schedule = schedule.replace("first", order[0]).replace("second", order[1])
    output = rewritten(tmp_path, BLOCK, MODEL + schedule)
    text = output.files[output.model_file]
    assert "del lifted" in text and "ColumnParallelLinear" in text and "checkpoint(" in text
    same_numbers(*both(tmp_path, BLOCK, MODEL + schedule))


@pytest.mark.processes
def test_verified_in_stages(tmp_path):
    schedule = MODEL + ALL + CUT
    path = written(tmp_path, rewritten(tmp_path, BLOCK, schedule))
    assert "del lifted" in (path.parent / "pipeline.py").read_text()
    report = verify(path.parent, [1, 2])
    assert report.ok, report.render()


def gained(name: str, model: str, config: str, attention: str) -> Callable[[Path], str]:
    """What `release` changes in a file of transformers."""
    schedule = f"""\
from transformers import {config}


def model(m):
    config = {config}()
    config._attn_implementation = "{attention}"
    return m.{model}(config)


def schedule(s):
    s.release()
"""

    def run(folder: Path) -> str:
        (folder / "s.py").write_text(schedule)
        source = f"transformers.models.{name}.modeling_{name}"
        output = rewrite(source, str(folder / "s.py"))
        lines = changed_lines(output).splitlines()
        return "\n".join(line[1:].strip() for line in lines if line.lstrip("+ ").startswith("del"))

    return run


@pytest.mark.parametrize(
    ("run", "lines"),
    [
        (gained("gpt2", "GPT2LMHeadModel", "GPT2Config", "eager"), "_ attn_output inputs_embeds"),
        (gained("bert", "BertForMaskedLM", "BertConfig", "eager"), "inputs_embeds _"),
    ],
)
def test_models_of_transformers(tmp_path, run: Callable[[Path], str], lines: str):
    """The scores that attention gives back, and what the first layer has taken in."""
    assert run(tmp_path) == "\n".join(f"del {name}" for name in lines.split())


def test_modules_that_share_the_text(tmp_path):
    part = MODEL + 'def schedule(s):\n    s["blocks"][:2].release()\n'
    text = refused(tmp_path, BLOCK, part, "SR305")
    assert "`blocks.2` also runs `forward`, where `mixed` would be dropped" in text
    whole = MODEL + 'def schedule(s):\n    s["blocks.*"].release()\n'
    assert "self.mix(x)" in changed_lines(rewritten(tmp_path, BLOCK, whole))


def test_a_model_that_needs_values(tmp_path):
    source = body("if float(x.sum()) > 0:\n    x = x + 1\nreturn self.a(x)")
    text = refused(tmp_path, source, RELEASING, "SR305")
    assert "the memory that names hold cannot be measured" in text


NORM = """\
import torch
from torch import nn


class Stack(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 8 * width)
        self.down = nn.Linear(8 * width, width)

    def forward(self, x):
        low = self.down(self.up(x) * 2)
        h = low + x
        y = self.norm(h)
        y = self.down(self.up(y).exp() * 2)
        return y + h
"""


def test_a_rule_does_not_go_behind_a_del(tmp_path):
    """A norm with the sum before it reads what stood before the `del`."""
    source = NORM.replace("        y = self.norm(h)", "        del low\n        y = self.norm(h)")
    output = rewritten(tmp_path, source, MODEL + "def schedule(s):\n    s.apply_all()\n")
    text = output.files[output.model_file]
    assert text.index("residual_layer_norm(\n") < text.index("del low")


APART = """\
import torch
from torch import nn


class Stack(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.a = nn.Linear(width, 16 * width)
        self.b = nn.Linear(width, 16 * width)
        self.c = nn.Linear(width, width)
        self.d = nn.Linear(width, width)

    def forward(self, x):
        left, right = self.c(x), self.d(x)
        wide = self.a(left)
        broad = self.b(right)
        low = torch.tanh(wide).sum(-1)
        high = broad.exp().sum(-1)
        return low + high
"""


def test_independent_statements_in_the_order_that_holds_least(tmp_path):
    output = rewritten(tmp_path, APART, RELEASING)
    assert """\
        wide = self.a(left)
        del left
        low = torch.tanh(wide).sum(-1)
        del wide
        broad = self.b(right)
        high = broad.exp().sum(-1)
""" in output.files[output.model_file]
    original, model = both(tmp_path, APART)
    assert peak(model, training=False) <= 0.7 * peak(original, training=False)
    same_numbers(original, model)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # Random numbers, a mutation, what is kept elsewhere.
        ("self.b(right)", "F.dropout(self.b(right), 0.5, self.training)"),
        ("self.b(right)", "self.b(right).mul_(2)"),
        ("broad = self.b(right)", "broad = self.b(right)\n        self.seen = broad.mean()"),
    ],
)
def test_what_keeps_its_order(tmp_path, before: str, after: str):
    source = APART.replace(before, after).replace(
        "from torch import nn\n", "from torch import nn\nfrom torch.nn import functional as F\n"
    )
    output = rewritten(tmp_path, source, RELEASING)
    text = output.files[output.model_file]
    assert text.index("wide = ") < text.index("broad = ") < text.index("low = ")
