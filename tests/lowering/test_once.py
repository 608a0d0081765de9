"""Side effects of a checkpointed module: buffers change once, others are refused."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
import torch

from tests.rewriting import changed_lines, imported, refused, rewritten, written

NET = """\
import torch
from torch import nn


class Track(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("scale", torch.ones(dim))

    def forward(self, x):
        y = (x - self.mean) * self.scale
        if self.training:
            {update}
        return y


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.norm = nn.{norm}(2 * dim)
        self.track = Track(2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x, *args):
        h = self.track(self.norm(self.up(x)).relu()).tanh()
        return x + self.down(h)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(8) for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""
SCHEDULE = """\
import torch


def model(m):
    return m.Net()


def inputs(model):
    return {{"x": torch.randn(6, 8)}}


def schedule(s):
    s["blocks.*"].checkpoint({arguments})
"""
UPDATES = {
    "in place": "self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))",
    "anew": "self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)",
    "by element": "self.mean[:] = 0.9 * self.mean + 0.1 * x.detach().mean(0)",
    "by out": "torch.add(0.9 * self.mean, 0.1 * x.detach().mean(0), out=self.mean)",
    "in a loop": "for each in [self.mean]: each.mul_(0.9).add_(x.detach().mean(0))",
    "in a list": "torch._foreach_add_([self.mean], x.detach().mean())",
    "all of them": "next(self.buffers()).mul_(0.9).add_(x.detach().mean(0))",
    "by a name": "getattr(self, 'me' + 'an').add_(x.detach().mean(0))",
    "a view": "torch.flatten(self.mean).add_(x.detach().mean(0))",
    "one of two": "(self.mean if x is not y else y).add_(x.detach().mean(0))",
    "by what is called": "list(map(lambda each: each.mul_(0.9), (self.mean,)))",
}


def trained(module):
    torch.manual_seed(0)
    model = module.Net().double()
    x = torch.randn(6, 8, dtype=torch.float64)
    for _ in range(2):
        model(x).square().sum().backward()
    return model


@pytest.mark.parametrize("arguments", ["", '["norm", "track"]'])
@pytest.mark.parametrize(
    ("norm", "update"), [("BatchNorm1d", "pass"), *(("LayerNorm", each) for each in UPDATES)]
)
def test_buffers_are_updated_once(tmp_path, arguments, norm, update):
    """Batch norms', and those of a module whose result depends on what they were."""
    source = NET.format(norm=norm, update=UPDATES.get(update, update))
    output = rewritten(tmp_path, source, SCHEDULE.format(arguments=arguments))
    assert "context_fn=update_buffers_once(self)" in changed_lines(output)
    ours = trained(imported(written(tmp_path, output)))
    wanted = trained(imported(tmp_path / "source_0.py"))
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
    for name, parameter in wanted.named_parameters():
        assert torch.equal(ours.get_parameter(name).grad, parameter.grad), name


@pytest.mark.parametrize(
    "reading",
    [
        "y = torch.where(self.scale > 0, y, -y)",
        "y = y + torch.stack([self.mean, self.scale]).sum(0)",
        "mean = self.mean.to(y.dtype); y = y + mean.view(1, -1)",
        "for each in (self.mean, self.scale): y = y + each",
        "mean = getattr(self, 'me' + 'an'); y = y + mean",
    ],
)
def test_buffers_that_are_read_are_left_alone(tmp_path, reading):
    source = NET.format(norm="LayerNorm", update=reading)
    output = rewritten(tmp_path, source, SCHEDULE.format(arguments=""))
    assert "update_buffers_once" not in changed_lines(output)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ("nn.BatchNorm1d(2 * dim)", "updates buffers as it runs"),
        ("nn.GRU(2 * dim, 2 * dim)", "`blocks.0.norm` overwrites results that `save` would keep"),
    ],
)
def test_buffers_and_results_that_are_kept(tmp_path, layer, words):
    source = NET.format(norm="LayerNorm", update="pass").replace("nn.LayerNorm(2 * dim)", layer)
    if "GRU" in layer:
        source = source.replace("self.norm(self.up(x))", "self.norm(self.up(x))[0]")
    assert words in refused(tmp_path, source, SCHEDULE.format(arguments='save="mm"'), "SR305")


@pytest.mark.parametrize(
    ("call", "is_reached"),
    [
        ("", False),
        ("self.track.note(x)", True),
        ("getattr(self.track, 'note')(x)", True),
        ("note(self.track, x)", True),
    ],
)
def test_a_method_that_never_runs_updates_no_buffer(tmp_path, call, is_reached):
    source = NET.format(norm="LayerNorm", update="pass")
    source = source.replace(
        "class Block",
        "    def note(self, x):\n        self.mean = 0.9 * self.mean + x.mean()\n\n\n"
        "def note(track, x):\n    track.note(x)\n\n\nclass Block",
    ).replace("        h = self", f"        {call}\n        h = self")
    schedule = SCHEDULE.format(arguments='save="mm"')
    if is_reached:
        assert "updates buffers as it runs" in refused(tmp_path, source, schedule, "SR305")
    else:
        assert "keep_mm" in changed_lines(rewritten(tmp_path, source, schedule))


HOOKED = {
    "self.up = nn.utils.spectral_norm(self.up)": None,
    "self.register_forward_hook(print)": None,
    "self.up.register_forward_hook(lambda *of: None)": "`blocks.0.up` has a hook",
    "self.up.register_forward_pre_hook(lambda *of: None)": "`blocks.0.up` has a hook",
}


@pytest.mark.parametrize("statement", HOOKED)
def test_hooks_inside_run_twice(tmp_path, statement):
    """Those of torch change buffers alone, and those of the module itself are outside."""
    source = NET.format(norm="LayerNorm", update="pass")
    source = source.replace("        self.norm =", f"        {statement}\n        self.norm =")
    schedule = SCHEDULE.format(arguments="")
    if (words := HOOKED[statement]) is not None:
        assert words in refused(tmp_path, source, schedule, "SR305")
        return
    output = rewritten(tmp_path, source, schedule)
    assert ("update_buffers_once" in changed_lines(output)) == ("spectral" in statement)


@pytest.mark.parametrize(
    ("statement", "changed"),
    [
        ("x += 1", "`x`"),
        ("x.mul_(2)", "`x`"),
        ("x[:, 0] = 0", "`x[:, 0]`"),
        ("kept = args[0]; kept.update(h)", "`kept`"),
        ("self.calls += 1", "`self.calls`"),
        ("kept = x[:1]; kept.zero_()", "`kept`"),
        ("size = x.shape[0]; size += 1", None),
        ("x = x * 1; x += 1", None),
        ("self.steps += 1", None),  # a buffer, which is set back
    ],
)
def test_what_would_be_changed_twice_is_refused(tmp_path, statement, changed):
    source = NET.format(norm="LayerNorm", update="pass").replace(
        "        return x + self.down(h)",
        "".join(f"        {s}\n" for s in statement.split("; "))
        + "        return x + self.down(h)",
    )
    made = '        self.calls = 0\n        self.register_buffer("steps", torch.zeros(()))\n'
    source = source.replace("        self.up =", f"{made}        self.up =")
    if changed is None:
        rewritten(tmp_path, source, SCHEDULE.format(arguments=""))
    else:
        words = refused(tmp_path, source, SCHEDULE.format(arguments=""), "SR305")
        assert f"`forward` changes {changed} in place, and would do so twice" in words


@pytest.mark.parametrize("switched", ["self", "self.down"])
@pytest.mark.parametrize("helper", [False, True])
def test_what_switches_a_mode_is_refused(tmp_path, switched, helper):
    source = NET.format(norm="LayerNorm", update="pass")
    statement = f"{switched}.train(not {switched}.training)"
    if helper:
        method = f"    def turn(self):\n        {statement}\n\n    def forward(self, x, *args)"
        source = source.replace("    def forward(self, x, *args)", method)
    called = "self.turn()" if helper else statement
    source = source.replace(
        "        return x + self.down(h)", f"        {called}\n        return x + self.down(h)"
    )
    words = refused(tmp_path, source, SCHEDULE.format(arguments=""), "SR305")
    turned = "turn" if helper else "forward"
    assert f"`{turned}` switches the mode of `{switched}` and of its submodules: " in words
    assert "checkpoint modules inside this one" in words


VARYING = {
    "np.random.seed(); y = y * np.random.rand()": "`np.random.seed()`",
    "y = y * random.Random(None).random()": "`random.Random(None)`",
    "y = y * np.random.default_rng().random()": "`np.random.default_rng()`",
    "y = y * np.random.default_rng(3).random()": None,
    "y = y + torch.rand(16, generator=self.generator)": "generator=self.generator",
    "y = y * next(self.turns)": "`next(self.turns)`",
    "y = y * self.dice.random()": "`blocks.0` reads `track.dice`",
    "y = y * float(RNG.random())": "reads `source_0.RNG`",
    "y = y * drawn()": "`random.SystemRandom()`",
    "torch.seed(); y = y * torch.rand(1)": "`torch.seed()`",
    "y = y * (time.perf_counter() % 1)": "`time.perf_counter()`",
    "count.calls = y.mean() + count.calls": "reads `source_0.count`",
    "y = swish(y)": "calls `swish`, which TorchScript compiles",
    "self.calls += 1": "changes `self.calls` in place",
    "type(self).calls += 1": "changes `type(self).calls` in place",
    "self.__class__.calls = self.calls + 1": "changes `self.__class__.calls` in place",
    "self.mean = 0.5 * self.mean + y.detach().mean(0)": None,  # a buffer, which is set back
    "Track.calls += 1": "reads `source_0.Track.calls`",
    "SEEN['n'] = SEEN['n'] + 1": "reads `source_0.SEEN`",
    "SEEN.update(n=SEEN['n'] + 1)": "reads `source_0.SEEN`",
    "count()": "reads `source_0.SEEN`",
    "global STEP; STEP = STEP + 1": "reads `source_0.STEP`",
    "y = y * grown()": "reads `source_0.grown`",
    "SEEN[len(y)] = y.shape": None,
    "y = y * next(iter([1, 2]))": None,
    "y = y + torch.rand(16, generator=None)": None,
    "own = itertools.cycle([3, 4]); y = y * next(own)": None,
}


@pytest.mark.parametrize("arguments", ["", '["norm", "track"]'])
@pytest.mark.parametrize("statement", VARYING)
def test_what_gives_something_else_the_second_time_is_refused(tmp_path, arguments, statement):
    """In a module inside of what is checkpointed, and in a function that it calls."""
    source = NET.format(norm="LayerNorm", update=statement)
    source = source.replace(
        "import torch\n",
        "import itertools\nimport random\nimport time\n\nimport numpy as np\nimport torch\n",
        1,
    )
    source = source.replace(
        "class Track",
        "RNG = np.random.default_rng(0)\n\n\n"
        "def drawn():\n    return random.SystemRandom().random()\n\n\n"
        "@torch.jit.script\ndef swish(y):\n    return y * y.sigmoid()\n\n\n"
        "SEEN, STEP = {'n': 0}, 0\n\n\ndef count():\n    SEEN['n'] += 1\n\n\n"
        "count.calls = 0\n\n\n"
        "def grown(kept=[]):\n    kept.append(1)\n    return len(kept)\n\n\nclass Track",
    ).replace("class Track(nn.Module):\n", "class Track(nn.Module):\n    calls = 0\n\n")
    source = source.replace(
        '        self.register_buffer("mean"',
        "        self.calls, self.generator = 0, torch.Generator()\n"
        "        self.turns, self.dice = itertools.cycle([1, 2]), random.Random(0)\n"
        '        self.register_buffer("mean"',
    )
    schedule = SCHEDULE.format(arguments=arguments)
    if (words := VARYING[statement]) is None:
        rewritten(tmp_path, source, schedule)
    else:
        assert words in refused(tmp_path, source, schedule, "SR305")


BESIDE = """\
import counted_further

N = 0
SEEN = {}


def tick():
    global N
    N += 1
    return N


class Box:
    n = 0

    @classmethod
    def more(cls):
        cls.n += 1
        return cls.n


def further():
    counted_further.SEEN.append(1)
    return len(counted_further.SEEN)


def known(size):
    return SEEN.setdefault(size, 2)
"""


@pytest.mark.parametrize(
    ("imported", "value", "shown"),
    [
        ("import counted", "counted.tick()", "counted.N"),
        ("from counted import tick as tock", "tock()", "counted.N"),
        ("from counted import Box", "Box.more()", "counted.Box.n"),
        ("import counted", "counted.further()", "counted.counted_further.SEEN"),
        ("import counted", "counted.known(len(y))", None),
        ("from counted import tick", "1", None),
    ],
)
def test_what_other_files_hold_is_looked_at(tmp_path, monkeypatch, imported, value, shown):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "counted.py").write_text(BESIDE)
    (tmp_path / "counted_further.py").write_text("SEEN = []\n")
    source = NET.format(norm="LayerNorm", update=f"y = y * {value}")
    source = source.replace("import torch\n", f"import torch\n\n{imported}\n", 1)
    try:
        if shown is None:
            rewritten(tmp_path, source, SCHEDULE.format(arguments=""))
        else:
            words = refused(tmp_path, source, SCHEDULE.format(arguments=""), "SR305")
            assert f"reads `{shown}`, which changes as the model runs" in words
    finally:
        for name in ("counted", "counted_further"):
            sys.modules.pop(name, None)


SET = {
    "self.drop.p = 0.1; y = self.drop(y); self.drop.p = 0.5": None,  # set before anything reads it
    "y = self.drop(y); self.drop.p = 0.1": "sets `self.drop.p`",
    "if len(y) > 2: self.drop.p = 0.1": "sets `self.drop.p`",
    "for each in [self.drop]: each.p = each.p / 2": "changes `each.p` in place",
    "drop = self.drop; y = drop(y); drop.p = 0.1": "sets `drop.p`",
    "y = y * self.step; self.step += self.by": "changes `self.step` in place",
    "n = self.step + 1; self.step = n": "sets `self.step`",
    "self.count()": "`count` changes `self.step` in place",
    "self.on = not self.on": "changes `self.on` in place",
    "y = y + (0 if self.last is None else self.last); self.last = y.mean()": "sets `self.last`",
    "if self.last is None: self.last = y.detach().mean()": None,  # kept: there the next time
    "if self.step == 1: self.step = self.by\n            else: self.step = 1": "sets `self.step`",
    "if self.last is None: self.last = y.mean(); y = 2 * y": "sets `self.last`",
    "if self.length < len(y): self.lengthen(len(y))": None,
    "y = y * self.length; self.lengthen(len(y))": "`lengthen` sets `self.length`",
    "self.seen['y'] = y.mean()": None,  # nothing reads it
    "y = y + self.seen.get('y', 0); self.seen['y'] = y.mean()": "sets `self.seen`",
    "self.other = y; y = self.other * 2": None,
    "self.table.add_(1)": "changes `self.table` in place",
    "self.table = self.table.to(y.dtype)": None,
    "self.table = self.table.to(dtype=y.dtype, device=y.device) "
    "if self.table is not None else None": None,
    "self.table = self.table.to(y.dtype) * 2 if self.table is not None else None": (
        "changes `self.table` in place"
    ),
    "y = y * self.table; self.table = self.table.to(y.dtype) if self.last is not None else None": (
        "changes `self.table` in place"
    ),
    "self.last = y.mean() if self.last is None else self.last": None,
    "if not self.training and len(y) > 2: self.step = 5": None,
    "setattr(self.drop, 'p', self.drop.p / 2)": "reads `track.drop.p`",
    "y = y + (self.last or 0); setattr(self, 'last', y.mean())": "reads `track.last`",
    "setattr(self, 'la' + 'st', y.mean())": "`blocks.0` reads `track.last`",
    "slower(self)": "`blocks.0` reads `track.drop.p`",
    "self.drop.requires_grad_(False)": "changes `self.drop` in place",
}


@pytest.mark.parametrize("statement", SET)
def test_what_is_set_and_may_be_another_the_second_time(tmp_path, statement):
    source = NET.format(norm="LayerNorm", update=statement)
    source = source.replace(
        '        self.register_buffer("mean"',
        "        self.drop, self.step, self.by, self.on = nn.Dropout(0.5), 1, 2, True\n"
        "        self.last, self.length, self.seen, self.table = None, 0, {}, torch.ones(1)\n"
        '        self.register_buffer("mean"',
        1,
    ).replace(
        "    def forward(self, x):\n        y = (x",
        "    def count(self):\n        self.step += 1\n\n"
        "    def lengthen(self, to):\n        self.length = to\n        self.other = to\n\n"
        "    def forward(self, x):\n        y = (x",
    )
    source = source.replace(
        "class Track", "def slower(m):\n    m.drop.p = m.drop.p / 2\n\n\nclass Track", 1
    )
    source = source.replace("        if self.training:\n            ", "        ").replace(
        "\n            else", "\n        else"
    )
    if (words := SET[statement]) is None:
        rewritten(tmp_path, source, SCHEDULE.format(arguments=""))
    else:
        assert words in refused(tmp_path, source, SCHEDULE.format(arguments=""), "SR305")


@pytest.mark.parametrize("arguments", ["", '["norm", "track"]', 'save="mm"'])
@pytest.mark.parametrize("norm", ["LayerNorm", "BatchNorm1d"])
def test_numbers_of_python_and_numpy_are_drawn_again(tmp_path, arguments, norm):
    """In a module inside, in a function, from a seed; what comes after is the original's."""
    if "save" in arguments and norm == "BatchNorm1d":
        return
    drawn = "y = y * random.random() * float(np.random.rand()) * drawn()"
    source = NET.format(norm=norm, update=drawn)
    source = source.replace(
        "import torch\n", "import random\n\nimport numpy as np\nimport torch\n", 1
    )
    source += (
        "\n\ndef drawn():\n    np.random.seed(3)\n    return 1 + np.random.permutation(5)[0]\n"
    )
    output = rewritten(tmp_path, source, SCHEDULE.format(arguments=arguments))
    updates = "update_buffers_once(self)" if norm == "BatchNorm1d" else ""
    kept = "keep_mm" if "save" in arguments else updates
    assert f"context_fn=draw_again({kept})" in changed_lines(output)

    def run(path):
        random.seed(1)
        np.random.seed(1)
        model = trained(imported(path))
        named = {n: p.grad for n, p in model.named_parameters()} | model.state_dict()
        return named, random.random(), np.random.rand()

    (ours, *later), (wanted, *originals) = (
        run(written(tmp_path, output)),
        run(tmp_path / "source_0.py"),
    )
    assert later == originals
    assert all(torch.equal(ours[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("torch.func.functional_call(block, self.doubled(block), (x,))", "functional_call"),
        ("torch.func.grad(lambda z: block(z).sum())(x)", "grad"),
        ("torch.func.functional_call(self.head, self.doubled(self.head), (x,))", None),
    ],
)
def test_what_is_over_in_the_backward_pass_is_refused(tmp_path, call, name):
    """Weights that stand in for a module's own, unless they are another module's."""
    doubled = (
        "\n    def doubled(self, of):\n        return {n: 2 * p for n, p in of.named_parameters()}"
    )
    source = NET.format(norm="LayerNorm", update="pass") + doubled + "\n"
    source = source.replace("x = block(x)", f"x = block(x) + {call}")
    source = source.replace(
        "        self.blocks =", "        self.head = nn.Linear(8, 8)\n        self.blocks ="
    )
    if name is None:
        rewritten(tmp_path, source, SCHEDULE.format(arguments=""))
    else:
        words = refused(tmp_path, source, SCHEDULE.format(arguments=""), "SR305")
        assert f"`torch.func.{name}` may call `blocks.0`" in words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            "torch.func.functional_call(self, {'up.bias': 2 * self.up.bias}, (h[..., :8], 1))",
            "`torch.func.functional_call` may call `blocks.0`",
        ),
        ("torch.func.functional_call(self.down, {'bias': 2 * self.down.bias}, (h,))", None),
        ("torch.vmap(lambda row: self.down(row))(h)", None),
        ("torch.vmap(lambda row: self(row, 1))(h[..., :8])", "`torch.vmap` may call `blocks.0`"),
        ("torch.func.grad(lambda z: self.down(z).sum())(h)[..., :8]", "calls `torch.func.grad`"),
    ],
)
def test_a_module_that_calls_itself_otherwise_is_not_checkpointed(tmp_path, value, words):
    source = NET.format(norm="LayerNorm", update="pass").replace(
        "return x + self.down(h)", f"return x if args else x + {value}"
    )
    schedule = SCHEDULE.format(arguments="")
    if words is None:
        rewritten(tmp_path, source, schedule)
    else:
        assert words in refused(tmp_path, source, schedule, "SR305")


@pytest.mark.parametrize(
    ("owner", "read", "made", "shown"),
    [
        ("type(block)", "self.shift", "None", "source_0.Block.shift"),
        ("Block", "self.shift", "None", "source_0.Block.shift"),
        ("self.config", "self.config.shift", "type('Config', (), {})()", "config"),
        ("self.config", "self.config.shift", "nn.Identity()", "config.shift"),
        ("CONFIG", "self.config.shift", "type('Config', (), {})()", "config"),
        ("type(block)", None, "None", ""),
    ],
)
def test_what_modules_share_is_not_set_around_a_checkpoint(tmp_path, owner, read, made, shown):
    """Attributes of a class, or of a configuration, that what is computed again reads."""
    source = NET.format(norm="LayerNorm", update="pass")
    source = source.replace("x = block(x)", f"{owner}.shift = x.mean()\n            x = block(x)")
    source = source.replace(
        "        self.blocks =", "        self.config = CONFIG\n        self.blocks ="
    )
    source = source.replace("        self.up =", "        self.config = CONFIG\n        self.up =")
    source = source.replace("class Track", f"CONFIG = {made}\n\n\nclass Track")
    schedule = SCHEDULE.format(arguments="")
    if read is None:
        rewritten(tmp_path, source, schedule)
        return
    words = refused(
        tmp_path, source.replace("return x + self", f"return {read} + x + self"), schedule, "SR305"
    )
    assert f"`blocks.0` reads `{shown}`, which changes as the model runs" in words


@pytest.mark.parametrize("modules", ["self.modules()", "self.blocks.children()"])
def test_what_is_set_on_all_modules_is_not_checkpointed(tmp_path, modules):
    source = NET.format(norm="LayerNorm", update="pass").replace(
        "x = block(x)",
        f"for each in {modules}:\n                each.shift = x\n            x = block(x)",
    )
    words = refused(tmp_path, source, SCHEDULE.format(arguments=""), "SR305")
    assert "shift`" in words
    before = source.replace(modules, "block.children()")  # and never after it was called
    rewritten(tmp_path, before, SCHEDULE.format(arguments=""))


@pytest.mark.parametrize("where", ["block", "self.blocks[1].track", "self.blocks[0].norm"])
def test_what_a_module_around_sets_is_not_checkpointed(tmp_path, where):
    source = NET.format(norm="LayerNorm", update="pass").replace(
        "x = block(x)", f"{where}.shift = x.mean()\n            x = block(x)"
    )
    words = refused(tmp_path, source, SCHEDULE.format(arguments=""), "SR305")
    assert f"`{where}.shift` is set while the model runs" in words
    rewritten(tmp_path, source.replace(f"{where}.s", "self.s"), SCHEDULE.format(arguments=""))


@pytest.mark.parametrize(
    "change",
    [
        "block.up.weight.requires_grad_(False)",
        "block.up.load_state_dict({})",
        "block.up.weight.data.mul_(2)",
        'setattr(block, "scale", 2)',
        "block.set_scale(2)",
    ],
)
def test_what_a_module_around_changes_of_it_is_not_checkpointed(tmp_path, change):
    source = NET.format(norm="LayerNorm", update="pass").replace(
        "x = block(x)", f"{change}\n            x = block(x)"
    )
    source = source.replace(
        "    def forward(self, x, *args)",
        "    def set_scale(self, scale):\n        self.scale = scale\n\n"
        "    def forward(self, x, *args)",
    )
    words = refused(tmp_path, source, SCHEDULE.format(arguments=""), "SR305")
    shown = change.replace('"', "'")
    assert f"`{shown}` changes state that may differ when the backward" in words


def test_what_does_not_run_with_the_model_may_change_it(tmp_path):
    """A method that `forward` leads to by no name; not one that is put on as a hook."""
    source = NET.format(norm="LayerNorm", update="pass").replace(
        "    def forward(self, x):\n        for",
        "    def freeze(self, *_):\n        self.blocks[0].up.requires_grad_(False)\n\n"
        "    def forward(self, x):\n        for",
    )
    rewritten(tmp_path, source, SCHEDULE.format(arguments=""))
    listed = "self.blocks = nn.ModuleList([Block(8) for _ in range(3)])\n"
    rewritten(
        tmp_path,
        source.replace(listed, f"{listed}        self.freeze()\n"),
        SCHEDULE.format(arguments=""),
    )
    hook = "        self.blocks[1].register_forward_pre_hook(self.freeze)\n"
    later = f"        self.watch()\n\n    def watch(self):\n{hook}"
    for put_on in (hook, later):
        hooked = source.replace(listed, f"{listed}{put_on}")
        words = refused(tmp_path, hooked, SCHEDULE.format(arguments=""), "SR305")
        assert "`self.blocks[0].up.requires_grad_(False)` changes state that may differ" in words


@pytest.mark.parametrize("change", ["SCALE[0] += 2", "scale(2)"])
def test_what_the_file_holds_stays_as_it_is(tmp_path, change):
    source = NET.format(norm="LayerNorm", update="pass")
    source = source.replace("self.down(h)", "self.down(h) * SCALE[0]")
    source += "\n\nSCALE = [1]\n\n\ndef scale(by):\n    SCALE[0] += by\n"
    rewritten(tmp_path, source, SCHEDULE.format(arguments=""))
    source = source.replace("x = block(x)", f"x = block(x)\n            {change}")
    words = refused(tmp_path, source, SCHEDULE.format(arguments=""), "SR305")
    assert "`blocks.0` reads `source_1.SCALE`" in words


@pytest.mark.parametrize("call", ["block.forward(", "run(block, ", "(lambda *a: block(*a))("])
def test_however_it_is_called(tmp_path, call):
    source = NET.format(norm="LayerNorm", update="pass").replace(
        "x = block(x)", f"held = [x]\n            x = {call}x, held)\n            held[0] = x"
    )
    source += "\n\ndef run(module, *given):\n    return module(*given)\n"
    words = refused(tmp_path, source, SCHEDULE.format(arguments=""), "SR305")
    assert "`forward` changes `held[0]` in place after passing it to `blocks.0`" in words


TAKEN = {
    "given.append(x)": "`forward` changes `given` in place after passing it to `blocks.0`",
    "self.note(given, x)": "`forward` changes `given` in place after passing it to `blocks.0`",
    "note(x, given)": "`forward` changes `given` in place after passing it to `blocks.0`",
    "self.last(given[0])": "`forward` changes `given[0]` in place after passing it to `blocks.0`",
}


@pytest.mark.parametrize("change", TAKEN)
@pytest.mark.parametrize("arguments", ["", '"down"'], ids=["whole", "part"])
def test_what_it_is_given_stays_as_it_is(tmp_path, change, arguments):
    source = NET.format(norm="LayerNorm", update="pass").replace(
        "        for block in self.blocks:\n            x = block(x)\n",
        "        given = [x]\n        for block in self.blocks:\n            x = block(x, given)\n"
        f"            {change}\n",
    )
    source = source.replace(
        "    def forward(self, x):\n        given",
        "        self.last = nn.Sequential(nn.ReLU(True))\n\n    def note(self, held, x):\n"
        "        held.append(x)\n\n    def forward(self, x):\n        given",
    )
    source += "\n\ndef note(x, held):\n    held[0] = x\n"
    words = refused(tmp_path, source, SCHEDULE.format(arguments=arguments), "SR305")
    assert TAKEN[change] in words
    fresh = source.replace("block(x, given)", "block(x, [*given])")
    if "last" not in change:  # which changes what the list holds
        rewritten(tmp_path, fresh, SCHEDULE.format(arguments=arguments))


def test_what_a_part_of_a_method_is_given_stays_as_it_is(tmp_path):
    source = NET.format(norm="LayerNorm", update="pass").replace(
        "return x + self.down(h)",
        "y = self.down(h)\n        h += 1\n        return x + y + h.mean()",
    )
    words = refused(tmp_path, source, SCHEDULE.format(arguments='"down"'), "SR305")
    assert "`forward` changes `h` in place after passing it to a part of `Block.forward`" in words


def test_an_activation_in_place_is_not_checkpointed(tmp_path):
    source = NET.format(norm="SiLU", update="pass").replace("nn.SiLU(2 * dim)", "nn.SiLU(True)")
    schedule = SCHEDULE.format(arguments="").replace("blocks.*", "blocks.*.norm")
    words = refused(tmp_path, source, schedule, "SR305")
    assert "`blocks.0.norm` changes its input in place" in words


GIVEN = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up = nn.Linear(dim, dim)

    def forward(self, x, more=None, held=None):
        y = self.up(x).tanh()
        return x + (y if held is None else y * held[0])


class Stack(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.blocks = nn.ModuleList([Block(dim) for _ in range(3)])

    def forward(self, x, parts=None):
        for number, block in enumerate(self.blocks):
            x = block(x, held=parts[number] if parts is not None else None)
            if parts is not None:
                parts[number][0].mul_(2)
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stack = Stack(8)

    def encoded(self, x, given):
        return self.stack(x, given)

    def forward(self, x, given=None):
        x = self.encoded(x, given)
        if given is not None:
            given.clear()
        return x
"""


def test_what_is_changed_later_is_not_given_in_training(tmp_path):
    """It gets to the module by an argument that may be left out, on all ways there."""
    schedule = SCHEDULE.format(arguments="").replace("blocks.*", "stack.blocks.*")
    output = rewritten(tmp_path, GIVEN, schedule)
    assert "check_left_out(held=held)" in changed_lines(output)
    ours = trained(imported(written(tmp_path, output)))
    wanted = trained(imported(tmp_path / "source_0.py"))
    for name, parameter in wanted.named_parameters():
        assert torch.equal(ours.get_parameter(name).grad, parameter.grad), name
    x, parts = torch.ones(6, 8).double(), [[torch.ones(()).double()] for _ in range(3)]
    with pytest.raises(ValueError, match="`held` changes before the backward pass"):
        ours(x, parts)
    with torch.no_grad():
        ours(x, parts)
    both = GIVEN.replace("block(x, held", "block(x, parts, held")
    changed = changed_lines(rewritten(tmp_path, both, schedule))
    assert "check_left_out(more=more, held=held)" in changed


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("more=None, held=None", "held, more=None"),  # it may not be left out
        ("block(x, held", "block(x if parts is None else parts[0][0], held"),  # nor what is of it
        ("self.stack(x, given)", "self.stack(x, *given)"),  # nor what nobody can tell
    ],
)
def test_what_has_to_be_given_may_not_change_later(tmp_path, old, new):
    source = GIVEN.replace(old, new)
    schedule = SCHEDULE.format(arguments="").replace("blocks.*", "stack.blocks.*")
    words = refused(tmp_path, source, schedule, "SR305")
    assert "after passing it to `stack.blocks.0`, which the backward pass" in words


HELD = {
    "self.clock.tick(); y = y * self.clock.time": "`track.clock`",
    "self.clock.tick(); y = y * (2 if self.clock.time == 99 else 1)": "`track.clock`",
    "y = F.dropout(y, 0.1 * self.clock.time); self.clock.tick()": "`track.clock`",
    "self.clock(); y = y * self.clock.time": "`track.clock`",
    "self.seen.add(len(self.seen)); y = y * len(self.seen)": "`track.seen`",
    "torch.add(self.table, 1, out=self.table); y = y * self.table": "`track.table`",
    "table = self.table; table += 1; y = y * self.table": "`track.table`",
    "self.clock.turn(); y = y * (1 + self.clock.on)": "`track.clock`",  # and back, by a second call
    "y = self.counted(y)": "`track.counted`",
    "y = y * next_of(self)": "`track.turns`",
    "CLOCK.tick(); y = y * CLOCK.time": "`source_0.CLOCK`",
    "self.clock.once(); y = y * self.clock.first": None,  # no other the next time
    "note = OTHER; note.tick()": None,  # the file's own, which another module changes
}


@pytest.mark.parametrize("statement", HELD)
def test_what_no_text_shows_to_change_is_seen_as_it_runs(tmp_path, statement):
    """Objects that change by their own methods, by another name or in a function."""
    source = (
        NET.format(norm="LayerNorm", update=statement)
        .replace(
            "class Track",
            "class Clock:\n    time = 1\n\n    def tick(self):\n        self.time += 1\n\n"
            "    __call__ = tick\n    on = False\n\n"
            "    def turn(self):\n        self.on = not self.on\n\n"
            "    def once(self):\n        self.first = 3\n\n\n"
            "CLOCK, OTHER = Clock(), Clock()\n\n\n"
            "def counting():\n    count = [0]\n\n    def counted(y):\n        count[0] += 1\n"
            "        return y * count[0]\n\n    return counted\n\n\n"
            "def next_of(m):\n    return m.turn()\n\n\nclass Track",
            1,
        )
        .replace(
            '        self.register_buffer("mean"',
            "        self.clock, self.seen, self.table = Clock(), set(), torch.ones(1)\n"
            "        self.counted, self.turns = counting(), itertools.count()\n"
            "        self.turn = lambda: next(self.turns)\n"
            '        self.register_buffer("mean"',
            1,
        )
    )
    imports = "import itertools\n\nimport torch\nfrom torch.nn import functional as F\n"
    source = source.replace("import torch\n", imports, 1)
    if "turn" in statement:
        source = source.replace("x = block(x)", "x = block(block(x))")
    if "OTHER" in statement:
        source = source.replace(statement, "pass").replace(
            "x = block(x)", f"x = block(x); {statement}"
        )
    schedule = SCHEDULE.format(arguments="")
    if (words := HELD[statement]) is None:
        rewritten(tmp_path, source, schedule)
    else:
        found = refused(tmp_path, source, schedule, "SR305")
        assert f"`blocks.0` reads {words}, which changes as the model runs" in found


def test_what_changes_is_seen_where_nothing_is_compared(tmp_path):
    """The schedule replaces a module by a class of its file, so outputs are not compared."""
    clock = "class Clock:\n    seen = (1,)\n\n    def __call__(self):\n        self.seen += (1,)\n"
    source = NET.format(norm="LayerNorm", update="self.clock(); y = y * len(self.clock.seen)")
    made = "        self.clock = Clock()\n        self.register_buffer"
    source = source.replace("class Track", f"{clock}\n\nclass Track")
    source = source.replace("        self.register_buffer", made, 1)
    own = "from torch import nn\n\n\nclass Norm(nn.LayerNorm):\n    pass\n\n\n" + SCHEDULE
    own += '    s["blocks.*.norm"].replace(Norm)\n'
    words = refused(tmp_path, source, own.format(arguments=""), "SR305")
    assert "`blocks.0` reads `track.clock`" in words


STATEFUL = """\
import torch
from torch import nn


class Cell(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up = nn.Linear(dim, dim)
        self.state = None

    def forward(self, x, use_cache=True):
        if not use_cache:
            self.state = None
        y = self.up(x if self.state is None else x + self.state).tanh()
        self.state = y.detach() if use_cache else None
        return y


if True:
    class Block(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.cell = Cell(dim)

        def forward(
            self, x, use_cache=True
        ):
            return x + self.cell(x, use_cache=use_cache)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(8) for _ in range(3)])

    def forget(self):
        blocks = getattr(self, "blocks")
        for block in blocks:
            block.cell.state = None

    def forward(self, x, use_cache=True):
        self.forget()
        for block in self.blocks:
            x = block(x, use_cache=use_cache)
        return x
"""


def test_a_module_that_holds_its_cache_itself_fills_none_in_training(tmp_path):
    """As with layers of transformers, where that checkpoints them; the class is in a branch."""
    output = rewritten(tmp_path, STATEFUL, SCHEDULE.format(arguments=""))
    assert "use_cache = False" in changed_lines(output)
    ours = trained(imported(written(tmp_path, output)))
    wanted = trained(imported(tmp_path / "source_0.py"))
    for name, parameter in wanted.named_parameters():
        assert torch.equal(ours.get_parameter(name).grad, parameter.grad), name
    kept = STATEFUL.replace("        self.forget()\n", "")
    words = refused(tmp_path, kept, SCHEDULE.format(arguments=""), "SR106")
    assert "gives another model" in words
