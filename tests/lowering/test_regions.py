"""Regions of a `forward`: their statements, their extraction, and refusals."""

from __future__ import annotations

import textwrap

import pytest

from tests.rewriting import changed_lines, refused, rewritten

SOURCE = """\
import torch
from torch import nn
from torch.nn import functional as F


class Base(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)
        self.c = nn.Linear(width, width)
        self.layer = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.register_buffer("seen", torch.zeros(()))


class Block(Base):
    def forward(self, x, y=None, *args, flag=True, **kwargs):
BODY

    def helper(self, x):
        return self.layer[0](x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""

SCHEDULE = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(2, 4)}


def loss(outputs):
    return sum(each.square().mean() for each in outputs)


def policy(ctx, operation):
    return None


def schedule(s):
    b = s["blocks.*"]
"""


def source(body):
    return SOURCE.replace("BODY", textwrap.indent(textwrap.dedent(body).strip("\n"), " " * 8))


def schedule(*lines):
    return SCHEDULE + "".join(f"    {line}\n" for line in lines)


def methods(folder, body, *lines):
    """The text from `forward` to `helper`."""
    output = rewritten(folder, source(body), schedule(*lines))
    text = output.files["source_0.py"]
    text = text.partition("class Block(Base):\n")[2].partition("\n    def helper")[0]
    return (
        textwrap.dedent(text)
        .rstrip("\n")
        .removeprefix("def forward(self, x, y=None, *args, flag=True, **kwargs):\n")
    )


DOC = '    """The part of `forward` that is computed again in the backward pass."""\n'


@pytest.mark.parametrize(
    ("body", "part", "expected"),
    [
        (  # a call where it stands
            "return self.b(self.a(x))",
            '["a"]',
            "    return self.b(checkpoint(self.a, x, use_reentrant=False))",
        ),
        (  # keywords stay keywords, star arguments too
            "return self.a(x, *args, weight=y, **kwargs)",
            '["a"]',
            "    return checkpoint(self.a, x, *args, use_reentrant=False, weight=y, **kwargs)",
        ),
        ("return self.a()", '["a"]', "    return checkpoint(self.a, use_reentrant=False)"),
        (
            "return [self.layer[-1](t) for t in x]",
            '["layer.-1"]',
            "    return [checkpoint(self.layer[-1], t, use_reentrant=False) for t in x]",
        ),
        (  # a statement that returns
            "x = self.c(x)\nreturn self.b(F.gelu(self.a(x))) + y",
            'r"a|b"',
            "    x = self.c(x)\n"
            "    return checkpoint(self._b_and_a, x, y, use_reentrant=False)\n\n"
            "def _b_and_a(self, x, y):\n" + DOC + "    return self.b(F.gelu(self.a(x))) + y",
        ),
        (  # in a branch; what may stay as it was is handed in; comments go along
            """
            if flag:
                # First,
                h = self.a(x)  # (B, D)
                # second.
                x = self.b(h)
            return x + self.c(x)
            """,
            '["a", "b"]',
            "    if flag:\n"
            "        x = checkpoint(self._a_and_b, x, use_reentrant=False)\n"
            "    return x + self.c(x)\n\n"
            "def _a_and_b(self, x):\n" + DOC + "    # First,\n    h = self.a(x)  # (B, D)\n"
            "    # second.\n    x = self.b(h)\n    return x",
        ),
        (  # several results, star arguments
            """
            h, k = self.a(x, *args, **kwargs), y
            k = self.b(h)
            return h + k
            """,
            '["a", "b"]',
            "    h, k = checkpoint(self._a_and_b, x, y, *args, use_reentrant=False, **kwargs)\n"
            "    return h + k\n\n"
            "def _a_and_b(self, x, y, *args, **kwargs):\n" + DOC + "    h, k = self.a(x, *args, "
            "**kwargs), y\n    k = self.b(h)\n    return h, k",
        ),
        (  # across a branch
            """
            h = self.a(x)
            if flag:
                h = h + self.b(x)
            return h
            """,
            '["a", "b"]',
            "    h = checkpoint(self._a_and_b, x, flag, use_reentrant=False)\n    return h\n\n"
            "def _a_and_b(self, x, flag):\n" + DOC + "    h = self.a(x)\n    if flag:\n"
            "        h = h + self.b(x)\n    return h",
        ),
        (  # a local function, a function of a module, and a name of its own
            """
            for layer in (self.a, self.b):
                x = layer(x)
            return self.c(x)
            """,
            '["layer"], name="_loop"',
            "    for layer in (self.a, self.b):\n"
            "        x = checkpoint(layer, x, use_reentrant=False)\n    return self.c(x)",
        ),
    ],
)
def test_taken_out(body, part, expected, tmp_path):
    assert methods(tmp_path, body, f"b.checkpoint({part})") == expected


def test_two_parts_and_a_region_of_random_numbers(tmp_path):
    body = """
    h = self.a(x)
    h = F.dropout(h, 0.1)  # of parts
    h = self.b(h)
    return self.c(h)
    """
    lines = ['b.checkpoint(["a", "b"])', 'b.fork_rng(["F.dropout"])', 'b.checkpoint(["c"])']
    expected = (
        "    h = checkpoint(self._a_and_b, x, use_reentrant=False)\n"
        "    return checkpoint(self.c, h, use_reentrant=False)\n\n"
        "def _a_and_b(self, x):\n" + DOC + "    h = self.a(x)\n    with fork_rng():\n"
        "        h = F.dropout(h, 0.1)  # of parts\n    h = self.b(h)\n    return h"
    )
    assert methods(tmp_path, body, *lines) == expected
    assert methods(tmp_path / "..", body, *reversed(lines)) == expected


def test_some_instances_only(tmp_path):
    body = "x = self.a(x)\nx = self.b(x)\nreturn x"
    text = changed_lines(
        rewritten(tmp_path, source(body), schedule('s["blocks"][1].checkpoint(["a", "b"])'))
    )
    assert "+class CheckpointedBlock(Block):\n" in text and "+    def _a_and_b(self, x):\n" in text
    assert "CheckpointedBlock() if i == 1 else Block()" in text


def test_a_method_that_some_instances_have_anew_keeps_what_all_have(tmp_path):
    body = "x = self.a(x)\nx = self.b(x)\nx = self.c(x)\nreturn x"
    lines = ['b.fork_rng(["a"])', 'b.checkpoint(["c"])', 's["blocks"][1].fork_rng(["b"])']
    text = rewritten(tmp_path, source(body), schedule(*lines)).files["source_0.py"]
    variant = text.partition("class ForkedBlock(Block):")[2].partition("\nclass ")[0]
    assert variant.count("with fork_rng():") == 2 and "checkpoint(self.c, x" in variant


def test_heirs_stay_as_they_are(tmp_path):
    text = source("x = self.a(x)\nx = self.b(x)\nreturn x")
    text = text.replace("class Model", "class Heir(Block):\n    pass\n\n\nclass Model")
    text = text.replace("(2)])\n\n    def forward(self, x):\n        for", "(2)] + [Heir()])\n\n"
                        "    def forward(self, x):\n        for")  # fmt: skip
    lines = ['s["blocks"][:2].checkpoint(["a"])', 's["blocks"][:2]["b"].annotate("bias", "tag", 1)']
    lines = [line.replace('"][:2]["b"]', '.{0,1}.b"]') for line in lines]
    changed = changed_lines(rewritten(tmp_path, text, schedule(*lines)))
    assert "+class ScheduledBlock(Block):\n" in changed and "+ [Heir()])" in changed
    assert "-        x = self.a(x)\n" not in changed


def test_what_else_changes_goes_along(tmp_path):
    body = "x = F.relu(self.a(x))\nx = self.b(x)\nreturn x"
    lines = [
        'b["a"].shard(["weight", "bias"], axis=0)',
        'b["b"].shard("weight", axis=1)',
        'b["b"].sync("fwd_post", "all_reduce")',
        'b["a"].sync("bwd_post", "all_reduce")',
        'b.checkpoint(["a", "b"])',
    ]
    text = methods(tmp_path, body, *lines)
    assert "checkpoint(self._a_and_b, x, use_reentrant=False)" in text


def test_a_string_of_several_lines_stays_what_it_is(tmp_path):
    body = "h = self.a(x)\nif flag:\n    h = self.b(h, '''1\n  2''')\n    h = self.c(h)\nreturn h"
    text = methods(tmp_path, body, 'b.checkpoint(["b", "c"])')
    # The whole method stands four columns further to the right in its file.
    assert "    h = self.b(h, '''1\n      2''')\n    h = self.c(h)\n" in text


@pytest.mark.parametrize(
    ("body", "part", "code", "words"),
    [
        ("h = self.a(x)\nif flag:\n    return h\nreturn self.b(h)", '["a", "b"]', "SR305",
         "returns from the middle"),
        ("h = self.a(x)\nx += h\nreturn self.b(x)", '["a", "b"]', "SR305", "write `x = x + h`"),
        ("h = self.a(x)\nx[0] = h\nreturn self.b(x)", '["a", "b"]', "SR305", "changes `x[0]`"),
        ("h = self.a(x)\nx.add_(h)\nreturn self.b(x)", '["a", "b"]', "SR305", "call `add`"),
        ("h = F.relu(x, inplace=True)\nreturn self.b(self.a(h)) + F.relu(x)",
         r'r"F.relu|a"', "SR305", "remove `inplace`"),
        ("h = self.a(x)\nself.seen += 1\nreturn self.b(h)", '["a", "b"]', "SR305",
         "changes `self.seen` in place"),
        ("h = self.a(x)\nself.cache = h\nreturn self.b(h)", '["a", "b"]', "SR305",
         "changes `self.cache` in place"),
        ("h = self.a(x)\ny.update(h, 1)\nreturn self.b(h)", '["a", "b"]', "SR305",
         "changes `y` in place"),
        ("for i in y:\n    h = self.a(x)\n    if flag:\n        break\n    x = self.b(h)\nreturn x",
         '["a", "b"]', "SR305", "leaves a loop"),
        ("h = self.a(x)\nyield h\nreturn self.b(h)", '["a", "b"]', "SR305", "suspends"),
        ("h = self.a(x)\nif flag:\n    z = self.b(h)\nif flag:\n    x = z\nreturn x",
         '["a", "b"]', "SR305", "`z` is not bound on every path"),
        ("self.a(x)\nself.b(x)\nreturn x", '["a", "b"]', "SR305", "read later"),
        ("h = self.a(x)\nkwargs = {}\nh = self.b(h, **kwargs)\nreturn h", '["a", "b"]', "SR305",
         "binds `kwargs` anew"),
        ("return self.a(x)", '["aa"]', "SR202", "did you mean `a`"),
        ("return self.a(x)", '"z.*"', "SR202", "calls anything that matches `z.*`"),
        ("return self.a(x)", '["a", "layer.0"]', "SR305", "several methods of `Block`"),
        ("return self.a(x)", '"("', "SR206", "no regular expression"),
        ("return self.a(x)", "[1]", "SR206", "a list of strings"),
        ("return self.a(x)", '["a"], lambda x: [x]', "SR206", "remove `order_args_fn`"),
        ("return self.a(x)", 'name="_a"', "SR206", "needs a `subgraph`"),
        ("return self.a(self.b(x))", '["a", "b"], name="helper"', "SR105", "already has a"),
        ("return self.a(x)", 'save=["mmm"]', "SR202", "no operation `mmm`"),
        ("return self.a(x)", 'save=["addm"]', "SR202", "or `addmm`"),
        ("return self.a(x)", 'save=["dropout"]', "SR202", "draws random numbers"),
        ("return self.a(x)", 'save=["relu_"]', "SR202", "changes a tensor in place"),
        ("return self.a(x)", 'save=["einsum"]', "SR202", "runs as other operations"),
        ("return self.a(x)", 'save=["mm.default2"]', "SR202", "no overload `default2`"),
        ("return self.a(x)", "save=[]", "SR206", "names nothing"),
        ("return self.a(x)", "save=3", "SR206", "`save` must be a string, a list of"),
        ("return self.a(x)", "save=policy", "SR206", "must take a context"),
        ("return self.a(x)", "save=lambda *a, **k: None", "SR206", "at the top level"),
    ],
)  # fmt: skip
def test_refusals(body, part, code, words, tmp_path):
    text = refused(tmp_path, source(body), schedule(f"b.checkpoint({part})"), code)
    assert words in text and "s.py:22:" in text


@pytest.mark.parametrize(
    ("lines", "code", "words"),
    [
        (['b.checkpoint(["a", "b"])', 'b.checkpoint(["b", "c"])'], "SR306", "overlap"),
        (['b.checkpoint(["a", "b"])', 'b.checkpoint(["a", "b"])'], "SR305", "already"),
        (['b.checkpoint(["a", "b"])', 'b.checkpoint("a|b")'], "SR306", "overlap"),
        (['b.fork_rng(["a"])', 'b.fork_rng(["a"])'], "SR305", "already"),
        (['b.fork_rng(["a", "b"])', 'b.checkpoint(["b", "c"])'], "SR306", "overlap"),
        (['b.checkpoint(["a"])', "b.checkpoint()"], "SR305", "already checkpointed"),
        (["b.checkpoint()", 'b.checkpoint(["a"])'], "SR305", "already checkpointed"),
        (['b["a"].checkpoint(["a"])'], "SR305", "no `forward` that can be rewritten"),
        (['b.fork_rng(["d"])'], "SR202", "calls `d`"),
    ],
)
def test_parts_that_do_not_go_together(lines, code, words, tmp_path):
    body = "x = self.a(x)\nx = self.b(x)\nx = self.c(x)\nreturn x"
    assert words in refused(tmp_path, source(body), schedule(*lines), code)


def test_a_class_that_has_its_forward_in_two_ways_is_told_what_to_do(tmp_path):
    text = source("x = self.a(x)\nx = self.b(x)\nreturn x")
    lines = text.splitlines(keepends=True)
    first = next(n for n, line in enumerate(lines) if "self.a(x)" in line)
    head = max(n for n, line in enumerate(lines[:first]) if line.startswith("    def forward"))
    end = next(n for n, line in enumerate(lines) if n > first and "return x" in line) + 1
    method = ["    " + line for line in lines[head:end]]
    other = ["    else:\n", method[0], "            return x\n"]
    lines[head:end] = ["    if True:\n", *method, *other]
    said = refused(tmp_path, "".join(lines), schedule('b.checkpoint(["a"])'), "SR305")
    assert "define each of its methods once, unconditionally" in said
