"""In-place changes of values that a function has passed to `take`."""

import ast
import textwrap

import pytest

from slapo_rewrite.code.handed import Handed
from slapo_rewrite.code.names import is_name

CHANGED = {
    "v = x[y]\ntake(x[0][1])\nv.add_(1)": "v",
    "out = self.give(x)\nhs = out[1]\ntake(hs)\nhs[0].add_(1)": "hs[0]",
    "out = self.give(x)\nhs = out[1]\ntake(hs[0])\nhs[0].add_(1)": "hs[0]",
    "out = self.give(x)\nhs = out[1]\ntake(hs[0])\nhs[0][1][2].add_(1)": "hs[0][1][2]",
    "take(x)\nx[0][1][2][3].add_(1)": "x[0][1][2][3]",
    "out = self.give(x)\nhs = out[1]\nv = hs[y]\ntake(hs[0])\nv.add_(1)": "v",
    "ctx = {}\ny = take(ctx)\nctx['k'] = y": "ctx['k']",
    "ctx = {}\ny = take(x, ctx=ctx)\nctx.update(k=y)": "ctx",
    "ctx = {}\nother = ctx\ny = take(ctx)\nother['k'] = y": "other['k']",
    "take(o)\no.k = 1": "o.k",
    "take(o)\ndel o['k']": "o['k']",
    "for i in range(2):\n    hs.append(x)\n    x = take(x, hs)": "hs",
    "hs = [x]\ntake(hs)\nx.add_(1)": "x",
    "hs = [x]\ntake(x)\nhs[0].add_(1)": "hs[0]",
    "take(self.hs)\nself.hs.append(1)": "self.hs",
    "take(x)\nx += 1": "x",
    "x += take(x)": "x",
    "x[0] = take(x)": "x[0]",
    "v = x.view(-1)\ntake(x)\nv[0] = 1": "v[0]",
    "take(x.transpose(0, 1))\nx.data.mul_(2)": "x.data",
    "take(x)\ntorch.add(x, 1, out=x)": "x",
    "take(x)\nx = F.relu(x, inplace=True)": "x",
    "take(x)\nx = torch.relu_(x)": "x",
    "take(x)\nif y:\n    x = x.clone()\nx += 1": "x",
    "if y:\n    take(x)\nx += 1": "x",
    "for n in y:\n    v = x\n    x = take(x)\nv += 1": "v",
    "hs = [x]\nif y:\n    take(x)\nhs[0].add_(1)": "hs[0]",
    "ctx = dict(k=y)\ntake(ctx)\ny.append(x)": "y",
    "ctx = {}\nctx['k'] = x\ntake(ctx)\nx.add_(1)": "x",
    "hs = []\nhs.append(x)\ntake(hs)\nx.add_(1)": "x",
    "hs = [x]\ntake(*hs)\nhs[0].add_(1)": "hs[0]",
    "f = lambda v: v * y[0]\ntake(x, f)\ny[0] = 1": "y[0]",
    "def f(v):\n    return v * y[0]\ntake(x, f)\ny[0] = 1": "y[0]",
    "o.k = 1\ntake(o)\no.k = 2": "o.k",
    "self.o.k = 1\ntake(self.o)\nself.o.k = 2": "self.o.k",
    "ys = [take(x, n) for n in y]\nx += 1": "x",
    "try:\n    take(x)\nfinally:\n    x += 1": "x",
    "take(x)\nfor v in [x, y]:\n    v.add_(1)": "v",
    "take(x)\nfor v in (y, x):\n    v.add_(1)": "v",
    "take(x)\nfor i, v in enumerate([x]):\n    v.add_(1)": "v",
    "take(x)\nfor v, w in zip([y], [x]):\n    w.add_(1)": "w",
    "take(x)\nfor k, v in {'k': x}.items():\n    v.add_(1)": "v",
    "hs.append(y)\ntake(hs)\nfor v in hs:\n    v.add_(1)": "v",
    "take(x)\nvs = [v for v in (x, y)]\nvs[0].add_(1)": "vs[0]",
    "take(x)\nv, w = [y, x]\nw += 1": "w",
    "take(x)\n(x if y else z).add_(1)": "x if y else z",
    "take(x)\nv = y or x\nv.add_(1)": "v",
    "take(x)\ntorch._foreach_add_([y, x], 1)": "x",
    "take(x)\ntorch.relu_(input=x)": "x",
    "take(x)\ntorch.Tensor.add_(x, 1)": "x",
    "v = torch.transpose(x, 0, 1)\ntake(x)\nv.add_(1)": "v",
    "take(self.k)\ngetattr(self, 'k').add_(1)": "getattr(self, 'k')",
    "take(x)\ngetattr(x, y)[0] = 1": "getattr(x, y)[0]",
    "h = x.add_(1)\ntake(h)\nx.mul_(2)": "x",
    "h = F.relu(x, inplace=True)\ntake(h)\nx.mul_(2)": "x",
    "take(x)\nx[0].add_(1)": "x[0]",
    "take(x)\nx[0][1] = 2": "x[0][1]",
    "take(*x)\nx[0].add_(1)": "x[0]",
    "take(y[0])\ny[i].add_(1)": "y[i]",
    "take(y[0])\nv = y.pop(0)\nv.add_(1)": "v",
    "take(y['k'])\nv = y.get('k')\nv.add_(1)": "v",
    "take(x)\nv = y.get('k', x)\nv.add_(1)": "v",
    "take(y[0])\nfor v in y:\n    v.add_(1)": "v",
    "take(**more)\nmore['k'].add_(1)": "more['k']",
    "take(**more)\nv = more.pop('k')\nv.add_(1)": "v",
    "if y:\n    take(**more)\nmore['k'].add_(1)": "more['k']",
    "take(**more)\nfor v in more.values():\n    v.add_(1)": "v",
    "take(more)\nmore.pop('k')": "more",
    "take(self.config)\nself.config.k = 1": "self.config.k",
    "take(self.config.k)\nself.config.k.append(1)": "self.config.k",
    "v = more\ntake(v)\nmore['k'] = x": "more['k']",
}
LEFT = [
    "ctx = {}\nctx['k'] = x\ntake(ctx)",
    "take(ctx)\nctx = {}\nctx['k'] = x",
    "hs = [x]\ny = take(x)\nhs.append(y)",
    "hs = ()\nfor _ in y:\n    x = take(x, hs)\n    hs += (x,)",
    "n = 0\nfor _ in y:\n    x = take(x, n)\n    n += 1",
    "n = x.shape[0]\ntake(x)\nn += 1",
    "for _ in y:\n    x = take(x)\n    x += 1",
    "for _ in y:\n    h = take(x)\n    x = x.clone()\n    x += h",
    "if y:\n    take(x)\nelse:\n    x += 1",
    "x = x * 2\nz = take(x)\nz += 1",
    "hs = [x]\ntake(*hs)\nhs.append(y)",
    "take(y[-2])\ny.append(x)",
    "out = self.give(x)\nhs = out[1]\ntake(hs[-2])\nhs.append(x)",
    "y, z = take(x.mul_(2)), 1",
    "for n in y:\n    x += n\n    x, n = take(x)",
    "for n in y:\n    x = take(x)\nx += 1",
    "if y:\n    x = take(x)\nx += 1",
    "self.n = []\ntake(self.m)\nself.n.append(1)",
    "take(**more)\nv = more.pop('k', None)\nmore['l'] = v",
    "take(x, y if y else self.config.k)\nself.config.l = 1",
    "if y:\n    take(x, **more)\nmore.update(k=x)",
]


def changed(body: str) -> str | None:
    text = f"def forward(self, x, y, **more):\n{textwrap.indent(body, '    ')}"
    (function,) = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef)

    def handed(node: ast.expr) -> list[ast.expr]:
        if not (isinstance(node, ast.Call) and is_name(node.func, "take")):
            return []
        named = (k.value if k.arg else ast.Starred(k.value) for k in node.keywords)
        return [*node.args, *named]

    found = Handed(handed).changed_later(function)
    return found.words if found else None


@pytest.mark.parametrize("body", CHANGED)
def test_what_is_changed_later(body):
    assert changed(body) == f"changes `{CHANGED[body]}` in place"


@pytest.mark.parametrize("body", LEFT)
def test_what_is_left_as_it_was(body):
    assert changed(body) is None


def test_arguments_that_count_as_handed():
    (function,) = ast.parse("def fill(t, u):\n    v = t.view(-1)\n    v[0] = u\n").body
    assert isinstance(function, ast.FunctionDef)
    assert Handed().changed_later(function, {"t"}) and not Handed().changed_later(function, {"u"})
