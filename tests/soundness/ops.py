"""Single statements on values of which a rank has a part, a slice or a partial sum."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.soundness import api
from tests.soundness.pairs import Pair
from tests.soundness.statements import GATE, STATEMENTS

HEADER = """\
import functools
import math
import operator

import torch
import torch.nn.functional as F
from torch import nn
"""


@dataclass(frozen=True)
class Context:
    """Where a statement stands.

    Attributes:
        shape: Of `h`, in the whole model.
        init: Statements of `__init__`.
        before: Statements that make `h`, in `forward`.
        after: What is returned.
        other: How `y` is made, a value like `h`.
        schedule: Its lines.
        sharded: What is sharded for `y` as well.
        inner: Whether the module is inside of another, whose `before` and `after` these are.
    """

    shape: tuple[int, ...]
    init: str
    before: str
    after: str
    other: str
    schedule: str
    outer: tuple[str, str, str] = ("self.pre = nn.Linear(8, 8)", "x = self.pre(x)", "")
    ids: bool = False


PAIR_OF_LAYERS = """\
s["inner.{up,other}"].shard(["weight", "bias"], 0)
s["inner.down"].shard("weight", 1)
"""
LAYERS = """\
self.up, self.other = nn.Linear(8, 24), nn.Linear(8, 24)
self.down = nn.Linear(24, 8)
"""
CONTEXTS = {
    "part": Context(
        (3, 12, 24), LAYERS, "h = self.up(x)", "return self.down(h)", "self.other(x)",
        PAIR_OF_LAYERS + "s.infer_sync()\n",
    ),
    "explicit": Context(
        (3, 12, 24), LAYERS, "h = self.up(x)", "return self.down(h)", "self.other(x)",
        PAIR_OF_LAYERS + 's["inner"].sync("bwd_post", "all_reduce")\n'
        's["inner.down"].sync("fwd_post", "all_reduce")\n',
    ),
    "partial": Context(
        (3, 12, 8), LAYERS, "h = self.down(self.up(x).tanh())", "return h",
        "self.down(self.other(x).relu())",
        PAIR_OF_LAYERS + 's["inner"].sync("bwd_post", "all_reduce")\n'
        's["inner"].sync("fwd_post", "all_reduce")\n',
    ),
    "out": Context(
        (3, 12, 24), LAYERS, "h = self.up(x)", "return h", "self.other(x)",
        's["inner.{up,other}"].shard(["weight", "bias"], 0)\n'
        's["inner"].sync("bwd_post", "all_reduce")\n'
        's["inner"].sync("fwd_post", "all_gather", axis=-1)\n',
    ),
    "slice": Context(
        (3, 12, 8), "", "h = x.tanh()", "return h", "x.sigmoid()",
        's["pre"].sync("fwd_post", "scatter", axis=1)\n'
        's["inner"].sync("fwd_post", "all_gather", axis=1)\n',
        ("self.pre, self.post = nn.Linear(8, 8), nn.Linear(8, 8)", "x = self.pre(x)",
         "x = self.post(x)"),
    ),
    "scattered": Context(
        (3, 12, 8), LAYERS, "h = self.down(self.up(x))", "return h", "h.sigmoid()",
        's["inner.up"].shard(["weight", "bias"], 0)\ns["inner.down"].shard("weight", 1)\n'
        's["inner.up"].sync("bwd_post", "all_reduce")\n'
        's["inner.down"].sync("fwd_post", "reduce_scatter", axis=1)\n'
        's["inner"].sync("fwd_post", "all_gather", axis=1)\n',
    ),
    "bare": Context(
        (3, 12, 24),
        "self.a, self.o = nn.Parameter(torch.randn(8, 24)), nn.Parameter(torch.randn(8, 24))\n"
        "self.b = nn.Parameter(torch.randn(24, 8))\n",
        "h = x @ self.a", "return h @ self.b", "x @ self.o",
        's["inner"].shard(["a", "o"], 1)\ns["inner"].shard("b", 0)\ns.infer_sync()\n',
    ),
    "buffer": Context(
        (12, 24), 'self.register_buffer("a", torch.randn(12, 24))\n' + LAYERS,
        "h = self.a", "return self.down(self.up(x) * h)", "self.a.sin()",
        's["inner"].shard("a", 1)\n' + PAIR_OF_LAYERS + "s.infer_sync()\n",
    ),
    "embedded": Context(
        (3, 12, 8), "self.e = nn.Embedding(24, 8)\n", "h = self.e(ids)", "return h",
        "self.e(ids + 1)",
        's["inner.e"].shard("weight", 0)\ns["inner"].sync("fwd_post", "all_reduce")\n', outer=("", "", ""), ids=True,
    ),
    "columns": Context(
        (3, 12, 24), "self.e, self.down = nn.Embedding(12, 24), nn.Linear(24, 8)\n",
        "h = self.e(ids % 12)", "return self.down(h)", "self.e(ids // 2)",
        's["inner.e"].shard("weight", 1)\ns["inner.down"].shard("weight", 1)\ns.infer_sync()\n',
        outer=("", "", ""), ids=True,
    ),
    "channels": Context(
        (3, 24, 12),
        "self.up, self.other = nn.Conv1d(8, 24, 3, padding=1), nn.Conv1d(8, 24, 1)\n"
        "self.down = nn.Conv1d(24, 8, 1)\n",
        "h = self.up(x.mT)", "return self.down(h).mT", "self.other(x.mT)",
        PAIR_OF_LAYERS + "s.infer_sync()\n",
    ),
    "heads": Context(
        (3, 12, 24), LAYERS + "self.heads, self.size = 12, 2\n",
        "h = self.up(x).view(x.size(0), x.size(1), self.heads, -1).transpose(1, 2).flatten(2)",
        "return self.down(h.unflatten(2, (-1, self.size)).transpose(1, 2).flatten(2))",
        "self.other(x).unflatten(2, (-1, 2)).transpose(1, 2).flatten(2)",
        PAIR_OF_LAYERS + "s.infer_sync()\n",
    ),
    "packed": Context(
        (3, 12, 48),
        "self.up, self.other = nn.Linear(8, 48), nn.Linear(8, 48)\nself.down = nn.Linear(24, 8)\n",
        "h = self.up(x)", "return self.down(torch.mul(*h.chunk(2, -1)))", "self.other(x)",
        's["inner.{up,other}"].shard(["weight", "bias"], 0, parts=2)\n'
        's["inner.down"].shard("weight", 1)\ns.infer_sync()\n',
    ),
    "query": Context(
        (3, 12, 12, 2),
        "self.q, self.up, self.other = nn.Linear(8, 24), nn.Linear(8, 24), nn.Linear(8, 24)\n"
        "self.down = nn.Linear(24, 8)\nself.heads, self.size = 12, 2\n",
        "h = self.up(x).view(x.size(0), x.size(1), self.heads, self.size).transpose(1, 2)\n"
        "q = self.q(x).view(x.size(0), x.size(1), self.heads, self.size).transpose(1, 2)",
        "return self.down((q @ h.mT).softmax(-1).matmul(h).transpose(1, 2).flatten(2))",
        "self.other(x).view(x.size(0), x.size(1), self.heads, self.size).transpose(1, 2)",
        's["inner.{q,up,other}"].shard(["weight", "bias"], 0)\ns["inner.down"].shard("weight", 1)\n'
        "s.infer_sync()\n",
    ),
    "scores": Context(
        (3, 12, 12, 12),
        "self.q, self.up, self.value = nn.Linear(8, 24), nn.Linear(8, 24), nn.Linear(8, 24)\n"
        "self.down = nn.Linear(24, 8)\nself.heads, self.size = 12, 2\n",
        "q, u, o = (z.view(x.size(0), x.size(1), self.heads, self.size).transpose(1, 2)"
        " for z in (self.q(x), self.up(x), self.value(x)))\nh = q @ u.mT",
        "return self.down((h.softmax(-1) @ o).transpose(1, 2).flatten(2))", "o @ u.mT",
        's["inner.{q,up,value}"].shard(["weight", "bias"], 0)\ns["inner.down"].shard("weight", 1)\n'
        "s.infer_sync()\n",
    ),
    "logits": Context(
        (3, 12, 24), "self.up, self.other = nn.Linear(8, 24), nn.Linear(8, 24)\n", "h = self.up(x)",
        "return F.cross_entropy(h.flatten(0, 1), (x[..., 0] * 100).long().abs().flatten() % 24)",
        "self.other(x)",
        's["inner.{up,other}"].shard(["weight", "bias"], 0)\n'
        's["inner.{up,other}"].sync("bwd_post", "all_reduce")\n',
    ),
    "statistics": Context(
        (3, 12, 24), LAYERS + "self.scale = nn.Parameter(torch.rand(24))\n", "h = self.up(x)",
        "return self.down(h * self.scale)", "self.other(x)",
        's["inner"].shard("scale", 0)\n' + PAIR_OF_LAYERS + "s.infer_sync()\n",
    ),
    "images": Context(
        (3, 24, 12, 2),
        "self.up, self.other = nn.Conv2d(4, 24, 3, padding=1), nn.Conv2d(4, 24, 1)\n"
        "self.down = nn.Conv2d(24, 4, 1)\n",
        "h = self.up(x.unflatten(-1, (4, 2)).transpose(1, 2))",
        "return self.down(h).transpose(1, 2).flatten(2)",
        "self.other(x.unflatten(-1, (4, 2)).transpose(1, 2))",
        PAIR_OF_LAYERS + "s.infer_sync()\n",
    ),
}  # fmt: skip
WEIGHTS = dict.fromkeys(CONTEXTS, 1) | {"part": 4, "partial": 3, "slice": 2, "scattered": 2}

# How the names that statements use are made: for `__init__`, and for `forward`.
NAMES = {
    "c": ("", "c = x.mean(-1, keepdim=True)"),
    "m": ("", "m = x[..., :1] > 0"),
    "k": ("", "k = (x[..., 0] * 100).long().abs() % 5"),
    "v": ("self.v = nn.Parameter(torch.randn({w}))", "v = self.v"),
    "t": ("self.t = nn.Parameter(torch.randn(5, {w}))", "t = self.t"),
    "i": ('self.register_buffer("i", torch.tensor([0, 3, 1]))', "i = self.i"),
    "q": ('self.register_buffer("q", torch.tensor([0.2, 0.7]))', "q = self.q"),
    "g": ("", "g = (h * 100).long().abs() % 3"),
    "self.scalar": ("self.scalar = nn.Parameter(torch.tensor(0.7))", ""),
    "self.cls": ("self.cls = nn.Parameter(torch.randn(1, 1, {w}))", ""),
    "self.buffer": ('self.register_buffer("buffer", torch.linspace(0.5, 1.5, {w}))', ""),
    "self.count": ('self.register_buffer("count", torch.tensor(1))', ""),
    "self.norm": ("self.norm = nn.LayerNorm({w})", ""),
}


def pair(rng: random.Random) -> Pair:
    """A model with one or two statements, and what shards it."""
    name = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    count = rng.choices([1, 2], [4, 1])[0]
    chosen = [statement(rng, CONTEXTS[name]) for _ in range(count)]
    return assembled(name, sorted(chosen, key=lambda text: "return " in text), rng)


def statement(rng: random.Random, context: Context) -> str:
    """One of those that people wrote, or a call of one of torch's functions or layers."""
    shape = context.shape
    which = rng.random()
    if which < 0.45:
        d = rng.choice([-1, -1, -1, 1, 1, 0, 2, -2, *([-3, 3] if len(shape) == 4 else [])])
        fills = {"{d}": d, "{w}": shape[-1], "{n}": rng.choice([1, 2, 3, 4, 7]), "{gate}": GATE}
        while True:
            text = replaced(rng.choice(STATEMENTS), fills).replace("↵", "\n")
            if stands(text, context):
                return text
    if which < 0.52:
        text, value = api.layer(rng, shape)
        return f"{used(rng, 'self.layer(h)', value, shape)}\ninit:self.layer = {text}"
    text, value = api.expression(rng, shape)
    return used(rng, text, value, shape)


def stands(text: str, context: Context) -> bool:
    """Whether a statement can stand there: its layers are there, and take what they get."""
    if re.search(r"self.(inner.)?up", text) and "self.up" not in context.init:
        return False
    if "net:" in text and ("ids" in text or context.ids):
        return False
    if "return " in text and "self.down" in text:
        return "self.down" in context.after and "nn.Linear(24, 8)" in context.init
    return "self.down" not in text or "self.down" in context.init


def replaced(text: str, fills: dict[str, Any]) -> str:
    """A text with its gaps filled."""
    for gap, value in fills.items():
        text = text.replace(gap, str(value))
    return text


def used(rng: random.Random, text: str, value: Any, shape: tuple[int, ...]) -> str:
    """A statement that uses an expression, as its value can be used."""
    if re.search(r"\w_\(", text) and rng.random() < 0.4 and text.startswith("h"):
        return text  # in place
    if rng.random() < 0.1:
        return f"z = {text}\nreturns:z"
    if isinstance(value, (tuple, list)):
        if not value:
            return f"h = h * len({text})"
        number = rng.randrange(len(value))
        return used(rng, f"{text}[{number}]", value[number], shape)
    if isinstance(value, bool):
        return f"h = h.tanh() if {text} else h.relu()"
    if isinstance(value, (int, float)):
        return f"h = h * {text}"
    if not isinstance(value, torch.Tensor):
        return f"h = h * len(str({text}))"
    if value.is_complex():
        text = rng.choice([f"{text}.real", f"{text}.abs()", f"torch.view_as_real({text}).sum(-1)"])
    if value.dtype == torch.bool:
        if value.shape == shape:
            return rng.choice([f"h = torch.where({text}, h, y)", f"h = h.masked_fill({text}, 0.5)",
                               f"h = h * {text}", f"h[{text}] = 0.5"])  # fmt: skip
        return f"z = {text}\nreturns:z"
    if value.shape == shape:
        return rng.choice([f"h = {text}", f"h = {text}", f"h = {text}", f"h = h + {text}"])
    try:
        fits = torch.broadcast_shapes(tuple(value.shape), shape) == torch.Size(shape)
    except RuntimeError:
        fits = False
    if fits and value.dim():
        return rng.choice([f"h = h * {text}", f"h = h + {text}", f"h = {text} - h"])
    if value.dim() and value.shape[-1] == shape[-1] and rng.random() < 0.4:
        return f"h = {text}"
    return rng.choice([
        f"h = h * {text}.sum()", f"h = h + {text}.mean()", f"z = {text}\nreturns:z",
        f"h = h * {text}.max()", f"h = h * {text}.flatten()[0]",
    ])  # fmt: skip


def assembled(
    name: str, statements: Sequence[str], rng: random.Random, whole: bool = False
) -> Pair:
    """The model with these statements; `whole`: parameters that only they use are not split."""
    context = CONTEXTS[name]
    lines = [line for text in statements for line in split(text)]
    kept: dict[str, list[str]] = {"": []}
    for line in lines:
        kind, _, rest = line.partition(":")
        if kind in ("init", "top", "def", "arg", "shard", "own", "returns", "net"):
            kept.setdefault(kind, []).append(rest)
        else:
            kept[""].append(line)
    names = used_names(
        [*kept[""], *kept.get("init", ()), *kept.get("def", ()), *kept.get("net", ())]
    )
    width = str(context.shape[-1])
    init = [*context.init.splitlines(), *kept.get("init", ())]
    before = context.before.splitlines()
    schedule = context.schedule
    if "y" not in names:
        init = [line.replace("self.up, self.other = nn.Linear(8, 24), nn.Linear(8, 24)",
                             "self.up = nn.Linear(8, 24)") for line in init]  # fmt: skip
        if "self.other" not in "\n".join(init):
            schedule = schedule.replace("inner.{up,other}", "inner.up")
    else:
        before.append(f"y = {context.other}")
    for known, (made, bound) in NAMES.items():
        if known in names:
            if made and not any(f"{made.split('=')[0].strip()} =" in line for line in init):
                init.append(made.replace("{w}", width))
            if bound:
                before.append(bound)
    first = "s.infer_sync()"
    sharded = [f's["inner.{p}"].shard({ns.split(",")!r}, {axis})'
               for p, ns, axis in (line.split() for line in kept.get("shard", ()))]  # fmt: skip
    sharded += [f's["inner"].shard("{n}", {axis})'
                for n, axis in (line.split() for line in kept.get("own", ()))]  # fmt: skip
    for whole in ("v", "t", "self.cls", "self.buffer"):
        if whole in names and width == "24" and not whole and rng.random() < 0.4:
            axis = {"t": 1, "self.cls": 2}.get(whole, 0)
            sharded.append(f's["inner"].shard("{whole.removeprefix("self.")}", {axis})')
    body = [line for line in kept[""] if line]
    way = rng.choice(list(PLACES)) if not whole and rng.random() < 0.3 else ""
    if (
        way
        and body
        and not re.search(r"self|return|training|soft|mode|scale|extra|bias", "\n".join(body))
    ):
        free = sorted(names & {"y", "c", "m", "k", "v", "t", "i", "q", "g", "x"})
        body, further = PLACES[way](body, free)
        for kind, lines_of_kind in further.items():
            kept.setdefault(kind, []).extend(lines_of_kind)
        init += further.get("init", [])
    tested = indented(body, 8) + "\n" if body and "returns" not in kept else ""
    if not any(line.startswith("return ") for line in body):
        given = kept.get("returns", ()) if name != "logits" else ()  # they may stay split
        body.append(", ".join([context.after, *given]))
    arguments = ", ".join(["x", *(["ids"] if context.ids else []), *kept.get("arg", ())])
    passed = ", ".join(a.split("=")[0] for a in arguments.split(", "))
    outer_init, outer_before, outer_after = context.outer
    source = HEADER
    if top := kept.get("top"):
        source += "\n\n" + "\n".join(top) + "\n"
    source += f"""

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
{indented(init or ["pass"], 8)}

    def forward(self, {arguments}):
{indented([*before, *body], 8)}
"""
    if methods := kept.get("def"):
        source += "\n" + indented(methods, 4) + "\n"
    lines_of_net = [outer_before, f"x = self.inner({passed})", *kept.get("net", ()), outer_after]
    lines_of_net += [] if "return " in "".join(lines_of_net) else ["return x"]
    source += f"""

class Net(nn.Module):
    def __init__(self):
        super().__init__()
{indented([line for line in [outer_init, "self.inner = Inner()"] if line], 8)}

    def forward(self, {arguments}):
{indented([line for line in lines_of_net if line], 8)}
"""
    if outer_after and re.search(r"return .*,|return \{|return \[", source):
        source = source.replace(f"        {outer_after}\n", "")
    given = '"x": torch.randn(3, 12, 8)' + (
        ', "ids": torch.arange(36).view(3, 12) % 23' if context.ids else ""
    )
    flags = [flag_of(text) for text in kept.get("arg", ())]
    order = [*sharded, *schedule.splitlines()]
    if first in order:  # after all that is sharded
        order = [line for line in order if line != first] + [first]
    return Pair(
        source, schedule_text(given, order, flags), f"{name}: {'; '.join(statements)}", tested
    )


Placed = tuple[list[str], dict[str, list[str]]]


def _in_function(body: list[str], free: list[str]) -> Placed:
    arguments = ", ".join(["h", *free])
    lines = [f"def helper({arguments}):", *(f"    {line}" for line in body), "    return h"]
    return [f"h = helper({arguments})"], {"top": lines}


def _in_method(body: list[str], free: list[str]) -> Placed:
    arguments = ", ".join(["h", *free])
    lines = [f"def helper(self, {arguments}):", *(f"    {line}" for line in body), "    return h"]
    return [f"h = self.helper({arguments})"], {"def": lines}


def _in_module(body: list[str], free: list[str]) -> Placed:
    arguments = ", ".join(["h", *free])
    lines = ["class Helper(nn.Module):", f"    def forward(self, {arguments}):",
             *(f"        {line}" for line in body), "        return h"]  # fmt: skip
    return [f"h = self.helper({arguments})"], {"top": lines, "init": ["self.helper = Helper()"]}


def _in_sequence(body: list[str], free: list[str]) -> Placed:
    if free:
        return _in_module(body, free)
    _, further = _in_module(body, free)
    return ["h = self.helper(h)"], {
        **further,
        "init": ["self.helper = nn.Sequential(nn.Identity(), Helper())"],
    }


def _recomputed(body: list[str], free: list[str]) -> Placed:
    _, further = _in_function(body, free)
    arguments = ", ".join(["h", *free])
    lines = ["from torch.utils.checkpoint import checkpoint", "", ""]
    return [f"h = checkpoint(helper, {arguments}, use_reentrant=False)"], {
        "top": lines + further["top"]
    }


def _repeated(body: list[str], free: list[str]) -> Placed:
    return ["for _ in range(2):", *(f"    {line}" for line in body)], {}


def _in_closure(body: list[str], free: list[str]) -> Placed:
    lines = ["def helper(h):", *(f"    {line}" for line in body), "    return h"]
    return [*lines, "h = helper(h)"], {}


def _decorated(body: list[str], free: list[str]) -> Placed:
    _, further = _in_function(body, free)
    lines = ["def decorated(f):", "    @functools.wraps(f)", "    def inner(*args, **kwargs):",
             "        return f(*args, **kwargs)", "", "    return inner", "", "", "@decorated"]  # fmt: skip
    return [f"h = helper({', '.join(['h', *free])})"], {"top": lines + further["top"]}


PLACES = {
    "function": _in_function, "method": _in_method, "module": _in_module, "sequence": _in_sequence,
    "recomputed": _recomputed, "repeated": _repeated, "closure": _in_closure, "decorated": _decorated,
}  # fmt: skip


def split(text: str) -> list[str]:
    """The lines of a statement; a semicolon ends one."""
    found = []
    for line in text.split("\n"):
        tagged = re.match(r"(init|top|def|arg|shard|own|returns|net):", line)
        found += [line] if tagged or line.startswith(" ") else line.split("; ")
    return found


def used_names(lines: Sequence[str]) -> set[str]:
    """Names, and attributes of `self`, that are used in lines and bound by none of them."""
    used, bound = set[str](), set[str]()
    for node in ast.walk(ast.parse("\n".join(line.replace("return ", "") for line in lines))):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            used.add(f"self.{node.attr}")
    return used - bound


def indented(lines: Sequence[str], by: int) -> str:
    """Lines, moved to the right."""
    return "\n".join(" " * by + line if line else "" for line in lines)


def flag_of(argument: str) -> str:
    """Another value for an argument of `forward`."""
    name, _, default = argument.partition("=")
    others = {"False": "True", "0.0": "0.5", '"plain"': '"soft"', "None": "torch.randn(3, 12, 1)"}
    if name in ("extra", "bias"):
        return f'{{"{name}": torch.randn(3, 12, 8).repeat(1, 1, 3)}}'
    return f'{{"{name}": {others[default]}}}'


def schedule_text(given: str, lines: Sequence[str], flags: Sequence[str] = ()) -> str:
    """A schedule file for a model `Net`."""
    text = f"""\
import torch


def model(m):
    return m.Net()


def inputs(model):
    return {{{given}}}


def loss(outputs):
    return outputs[0].square().mean()


def schedule(s):
{indented(lines, 4)}
"""
    return text + (f"\n\nflags = [{', '.join(flags)}]\n" if flags else "")
