"""Slapo's `checkpoint`, on source: modules, parts of a `forward`, what is kept, random numbers."""

from __future__ import annotations

import contextlib
import importlib
import itertools
from pathlib import Path
from textwrap import indent

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slapo_rewrite import errors
from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.schedule.load import ScheduleFile
from tests.processes import run
from tests.rewriting import SPLITTING, changed_lines, imported, refused, rewritten, written

SOURCE = """\
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, p):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(p)

    def forward(self, x, scale, *, shift=None):
        y = self.norm(x)
        # Up ...
        y = torch.tanh(self.up(y))  # (B, 4 * D)
        y = self.dropout(y) * scale["by"]

        # ... and down.
        y = self.down(y)
        if shift is not None:
            y = y + shift
        return x + self.dropout(y)


class Model(nn.Module):
    def __init__(self, width=8, p=0.3):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width, p) for _ in range(3)])
        self.head = nn.Linear(width, width)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, {"by": x.mean()}, shift=x.amax(-1, keepdim=True))
        return self.head(x)
"""

SCHEDULE = """\
import torch
from torch.utils.checkpoint import CheckpointPolicy


def keep_products(ctx, operation, *args, **kwargs):
    if operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def keep_noise(ctx, operation, *args, **kwargs):
    if operation in (torch.ops.aten.rand_like.default, torch.ops.aten.tanh.default):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(5, 8)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
"""


class Counted(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def saved():
    """Fills a list with the sizes in bytes of what is saved for the backward pass."""
    seen, sizes = set(), []

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in seen:
            seen.add(tensor.untyped_storage().data_ptr())
            sizes.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def step(model, loss):
    """Gradients and loss of one step, bytes saved, operations of the backward pass."""
    model.train()
    torch.manual_seed(4)
    with saved() as sizes:
        value = loss(model)
    with Counted() as counted:
        value.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(bool(g.isfinite().all()) for g in gradients) and len(gradients) > 3
    return [value.detach(), *gradients, torch.rand(2)], sum(sizes), counted.counts


def loss_of(model):
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    return model(x).square().mean()


def compare(folder, *schedules):
    """The step of the original, and of what each schedule makes of it, all with equal numbers."""
    torch.manual_seed(0)
    outputs = [rewritten(folder, SOURCE, SCHEDULE + f"    {line}\n") for line in schedules]
    original = imported(folder / "source_0.py").Model()
    want = step(original, loss_of)
    found = []
    for output in outputs:
        model = imported(written(folder, output)).Model()
        model.load_state_dict(original.state_dict())
        have = step(model, loss_of)
        for one, other in zip(have[0], want[0], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        found.append(have)
    return want, found


def test_whole_modules_and_parts(tmp_path):
    """Loss and gradients are those of the original, with dropout, and less is saved."""
    want, found = compare(
        tmp_path,
        's["blocks.*"].checkpoint()',
        's["blocks.*"].checkpoint(["up", "down"])',
        's["blocks.*"].checkpoint(["up", "down"], None)',
        's["blocks"][:2].checkpoint(r"up|dropout|down")',
        's["blocks.*"].checkpoint(["norm"])',
        's["head"].checkpoint()',
    )
    tanh = want[2].get("tanh", 0)
    assert not tanh
    whole, part, same, some, norm, _ = found
    assert whole[2]["tanh"] == 3 and whole[2]["native_layer_norm"] == 3
    assert part[2]["tanh"] == 3 and "native_layer_norm" not in part[2]
    assert same[1:] == part[1:]
    assert some[2]["tanh"] == 2 and norm[2]["native_layer_norm"] == 3
    assert whole[1] < part[1] < some[1] < want[1]


def test_what_is_kept(tmp_path):
    """Results of the operations that are named are not computed again, those of others are."""
    want, found = compare(
        tmp_path,
        's["blocks.*"].checkpoint()',
        's["blocks.*"].checkpoint(save=["mm"])',
        's["blocks.*"].checkpoint(save=["aten.mm", "addmm.default"])',
        's["blocks.*"].checkpoint(save=keep_products)',
        's["blocks.*"].checkpoint(["up", "down"], save=("linear", "tanh"))',
    )
    nothing, mm, same, policy, part = (counts for _, _, counts in found)
    assert nothing["addmm"] == 6 and "addmm" not in want[2]
    assert "addmm" not in mm and mm["tanh"] == 3
    assert policy == mm == same
    assert "addmm" not in part and "tanh" not in part and part["bernoulli_"] == 3


def test_random_numbers_are_drawn_again_whatever_a_policy_says(tmp_path, monkeypatch):
    """Else those that follow would be others: dropout after noise here."""
    noisy = SOURCE.replace('* scale["by"]', "* torch.rand_like(y)", 1).replace(
        "self.norm(x)", "self.norm(x) + torch.rand_like(x)"
    )
    monkeypatch.setitem(compare.__globals__, "SOURCE", noisy)
    _, found = compare(tmp_path, 's["blocks.*"].checkpoint(save=keep_noise)')
    counts = found[0][2]
    assert "tanh" not in counts and counts["rand_like"] == 6


def test_what_is_written(tmp_path):
    schedule = '    s["blocks.*"].checkpoint(["up", "down"], save=["mm"], name="_feed_forward")\n'
    output = rewritten(tmp_path, SOURCE, SCHEDULE + schedule)
    expected = '''\
    def forward(self, x, scale, *, shift=None):
        y = self.norm(x)
        y = checkpoint(
            self._feed_forward, y, scale, use_reentrant=False, context_fn=keep_mm
        )
        if shift is not None:
            y = y + shift
        return x + self.dropout(y)

    def _feed_forward(self, y, scale):
        """The part of `forward` that is computed again in the backward pass."""
        # Up ...
        y = torch.tanh(self.up(y))  # (B, 4 * D)
        y = self.dropout(y) * scale["by"]

        # ... and down.
        y = self.down(y)
        return y
'''
    assert expected in output.files["source_0.py"]
    assert sorted(n for n in output.files if n.endswith(".py")) == [
        "__init__.py",
        "recomputation.py",
        "source_0.py",
    ]
    single = rewritten(tmp_path, SOURCE, SCHEDULE + '    s["blocks.*"].checkpoint(["down"])\n')
    assert changed_lines(single) == (
        "+from torch.utils.checkpoint import checkpoint\n"
        "-        y = self.down(y)\n"
        "+        y = checkpoint(self.down, y, use_reentrant=False)\n"
    )


def ranks(paths: list[Path]):
    """The step of each file on this rank, with numbers of its own in part of it."""
    found = []
    for path in paths:
        torch.manual_seed(0)
        found.append(step(imported(path).Model(), loss_of)[0])
    return found


@pytest.mark.processes
def test_random_numbers_of_each_rank(tmp_path):
    """Slapo's test of random states: dropout on parts and on whole values, recomputed."""
    fork = 's["blocks.*"].fork_rng(["up", "dropout"])'
    lines = [
        [fork],
        [fork, 's["blocks.*"].checkpoint()'],
        ['s["blocks.*"].checkpoint()', fork],
        [fork, 's["blocks.*"].checkpoint(["norm", "up", "down"])'],
        ['s["blocks.*"].checkpoint(["up"], save=["mm"])', fork],
        [fork, 's["blocks.*"].checkpoint(["norm", "up", "down"], save=["mm"])'],
    ]
    fork_inside = fork.replace('["up", "dropout"]', '["up"]')
    lines = [[line.replace(fork, fork_inside) for line in group] for group in lines]
    paths = []
    for group in lines:
        source = SOURCE.replace(
            "y = torch.tanh(self.up(y))  #", "y = self.dropout(torch.tanh(self.up(y)))  #"
        )
        schedule = SCHEDULE + "".join(f"    {line}\n" for line in group)
        paths.append(written(tmp_path, rewritten(tmp_path, source, schedule)))
    first, second = run(ranks, 2, paths)
    for here, there in zip(first, second, strict=True):
        assert not torch.equal(here[0], there[0])
        assert torch.equal(here[-1], there[-1])
    for found in (first, second):
        for one, other in itertools.pairwise(found):
            assert all(map(torch.equal, one, other))


REAL = {
    "bert": ('s["bert.encoder.layer.*"].checkpoint(["attention"])', "native_layer_norm"),
    "gpt2": ('s["transformer.h.*"].checkpoint(["ln_2", "mlp"], save=["mm"])', "tanh"),
    "llama": ('s["model.layers.*"].checkpoint(["input_layernorm", "self_attn"])', "rsqrt"),
    "t5": ('s["{encoder,decoder}.block.*"].checkpoint(["layer.-1"])', "relu"),
}


@pytest.mark.parametrize("name", REAL)
def test_real_models(name, tmp_path):
    line, operation = REAL[name]
    text = ScheduleFile.load(name).text
    path = tmp_path / "schedule.py"
    path.write_text(text[: text.index("\ndef schedule(")] + f"\ndef schedule(s):\n    {line}\n")
    module = f"transformers.models.{name}.modeling_{name}"
    output = rewrite(module, str(path))
    make = ScheduleFile.load(str(path)).module.verify_model

    def build(of):
        torch.manual_seed(0)
        model = make(of)
        for child in model.modules():
            if isinstance(child, torch.nn.Dropout):
                child.p = 0.1
        return model

    def loss(model):
        ids = torch.randint(3, 200, (4, 16), generator=torch.Generator().manual_seed(1))
        further = {"decoder_input_ids": ids} if name == "t5" else {}
        return model(input_ids=ids, labels=ids, **further).loss

    original = build(importlib.import_module(module))
    model = build(imported(written(tmp_path, output)))
    model.load_state_dict(original.state_dict())
    want, want_bytes, want_counts = step(original, loss)
    have, have_bytes, have_counts = step(model, loss)
    for one, other in zip(have, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert have_bytes < want_bytes
    assert have_counts.get(operation, 0) > want_counts.get(operation, 0)
    if "save" in line:
        assert have_counts.get("addmm", 0) == want_counts.get("addmm", 0)
    assert list(model.state_dict()) == list(original.state_dict())


FROM_A_FUNCTION = """
import torch
from torch import nn


def FeedForward(width):
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))


class Mix(nn.Module):
    def __init__(self, width, is_first):
        super().__init__()
        self.own = nn.Linear(width, width) if is_first else nn.Identity()

    def forward(self, x):
        return self.own(x)


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.blocks = nn.ModuleList()
        for i in range(3):
            self.blocks.append(nn.ModuleList([Mix(width, i == 0), FeedForward(width)]))

    def forward(self, x):
        for mix, feed_forward in self.blocks:
            x = x + feed_forward(mix(x))
        return x
"""


def test_what_a_function_makes_for_layers_of_several_kinds_is_wrapped_once(tmp_path):
    schedule = SCHEDULE + '    s["blocks.*.1"].checkpoint()\n'
    changed = changed_lines(rewritten(tmp_path, FROM_A_FUNCTION, schedule))
    made = "    return CheckpointedSequential(nn.LayerNorm(width), nn.Linear(width, width))"
    assert f"+{made}\n" in changed and changed.count("+class ") == 1


CACHED = """
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.own = nn.Linear(width, width)

    def forward(self, x, past_key_values=None):
        if past_key_values is not None:
            past_key_values.append(x)
            x = torch.stack(past_key_values).mean(0)
        return torch.tanh(self.own(x))


class Plain(nn.Module):
    def forward(self, x, **kwargs):
        return x


class Block(nn.Module):
    def __init__(self, width, number):
        super().__init__()
        self.attention = Attention(width) if number else Plain()
        self.out = nn.Linear(width, width)

    def forward(self, x, **kwargs):
        return x + self.out(self.attention(x, **kwargs))


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width, number) for number in range(4)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x, past_key_values=[])
        return x
"""


NAMED_CACHE = CACHED.replace("past_key_values", "cache")
OF_TRANSFORMERS = "from transformers.cache_utils import Cache\n"


@pytest.mark.parametrize(
    ("source", "name"),
    [(CACHED, "past_key_values"), (OF_TRANSFORMERS + NAMED_CACHE, "cache")],
    ids=["past_key_values", "cache"],
)
def test_a_cache_among_other_arguments_is_filled_once(tmp_path, monkeypatch, source, name):
    """A layer's `**kwargs` may hold what a module inside takes, were it in other layers alone."""
    monkeypatch.setitem(compare.__globals__, "SOURCE", source)
    ways = ('s["blocks.*"].checkpoint()', 's["blocks.*"].checkpoint(["attention"])')
    for way in ways:
        text = changed_lines(rewritten(tmp_path, source, SCHEDULE + f"    {way}\n"))
        assert text.count(f'kwargs.pop("{name}", None)') == 1 >= text.count("+class ")
    _, found = compare(tmp_path, *ways)
    assert all(counts["tanh"] == 3 for _, _, counts in found)


def test_what_is_called_a_cache_elsewhere_is_passed_on(tmp_path):
    """So that one that is filled twice is refused."""
    schedule = SCHEDULE + '    s["blocks.*"].checkpoint()\n'
    constant = NAMED_CACHE.replace("cache.append(x)", "pass").replace("=[]", "=[x]")
    assert "kwargs.pop" not in changed_lines(rewritten(tmp_path, constant, schedule))
    refused(tmp_path, NAMED_CACHE.replace("mean", "sum"), schedule, "SR106")


@pytest.mark.parametrize("name", ["mems", "past_key_value"])
def test_what_a_model_remembers_of_an_earlier_segment_is_passed_on(tmp_path, name):
    """Only where a layer fills it it would be filled twice, which a layer cannot do without."""
    schedule = SCHEDULE + '    s["blocks.*"].checkpoint()\n'
    given = CACHED.replace("past_key_values", name)
    read = given.replace(f"{name}.append(x)", "pass").replace("=[])", "=[x, x.detach()])")
    text = changed_lines(rewritten(tmp_path, read, schedule))
    assert "self.training" not in text and "kwargs.pop" not in text
    read = read.replace("(x, **kwargs)", f"(x, {name}=kwargs['{name}'])")
    assert "self.training" not in changed_lines(rewritten(tmp_path, read, schedule))
    needed = given.replace(f"{name}=None", name)
    schedule = SCHEDULE + '    s["blocks.*.attention"].checkpoint()\n'
    words = refused(tmp_path, needed.replace("Plain()", "Attention(width)"), schedule, "SR305")
    assert f"changes `{name}` in place, and would do so twice" in words


SUMMED = """import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, w=8):
        super().__init__()
        self.first, self.second = nn.Linear(w, w), nn.Linear(w, w)

    def attend(self, x):
        return self.first(x), x.mean()

    def forward(self, x):
        residual = x
        x, noted = self.attend(x)
        x += residual
        return x + self.second(x).relu() * noted


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""


COPIED_IF = """noted = x.mean()
        if noted is None:
            x = x.clone()
"""


@pytest.mark.parametrize(
    "bound",
    ["x, noted = self.attend(x)", f"{COPIED_IF}        else:\n            x = self.first(x)"],
)
def test_what_a_call_gives_beside_others_is_no_argument_any_more(bound, tmp_path):
    source = SUMMED.replace("x, noted = self.attend(x)", bound)
    schedule = SCHEDULE + '    s["blocks.*"].checkpoint()\n'
    assert "checkpoint" in changed_lines(rewritten(tmp_path, source, schedule))


@pytest.mark.parametrize(
    "bound",
    ["x, noted = x, x.mean()", "(x, noted), more = x, 1", "noted, x = x, residual", COPIED_IF],
)
def test_an_argument_that_is_bound_again_beside_others_is_one(bound, tmp_path):
    source = SUMMED.replace("x, noted = self.attend(x)", bound)
    schedule = SCHEDULE + '    s["blocks.*"].checkpoint()\n'
    assert "changes `x` in place" in refused(tmp_path, source, schedule, "SR305")


HOOKED = """\
import torch
from transformers import CLIPVisionConfig
from transformers.utils.output_capturing import maybe_install_capturing_hooks


def model(m):
    config = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2,
        image_size=16, patch_size=8,
    )
    model = m.CLIPVisionModel(config)
    if {collects}:
        maybe_install_capturing_hooks(model)
    else:
        for layer in model.encoder.layers:
            layer.self_attn.register_forward_hook(lambda module, args, output: None)
    return model


def inputs(model):
    return {{"pixel_values": torch.randn(2, 3, 16, 16), "output_attentions": {collects}}}


def loss(outputs):
    return outputs.last_hidden_state.square().mean()


def schedule(s):
    s["encoder.layers"][:].checkpoint()
"""


@pytest.mark.parametrize("collects", [True, False])
def test_hooks_that_collect_what_is_given_back(collects, tmp_path):
    """Backbones of transformers have them from the start, others once attentions are requested."""
    (tmp_path / "s.py").write_text(HOOKED.format(collects=collects))
    arguments = "transformers.models.clip.modeling_clip", str(tmp_path / "s.py")
    if collects:
        assert "class CheckpointedCLIPEncoderLayer(" in rewrite(*arguments).diff(0)
    else:
        with pytest.raises(errors.Unsupported, match="self_attn` has a hook"):
            rewrite(*arguments)


IN_PLACE = """\
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

    def forward(self, x):
        return self.down(F.silu(self.up(x), inplace=True))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return self.block(x.view(1, 5, 8).sin())
"""


def test_what_is_kept_and_changed_in_place_is_told(tmp_path):
    """Also behind the view that `matmul` gives of a product of three axes."""
    line = '    s["block"].checkpoint(save=["mm"])\n'
    words = refused(tmp_path, IN_PLACE, SCHEDULE + line, "SR106")
    assert "has been mutated" in words and "no `inplace=True`" in words
    assert 's["block"].checkpoint(save=["mm"])' in words
    apart = IN_PLACE.replace(", inplace=True", "")
    assert not rewritten(tmp_path, apart, SCHEDULE + line).warnings
    assert not rewritten(tmp_path, IN_PLACE, SCHEDULE + line.replace("mm", "bmm")).warnings


NAMED = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return self.block(x)
"""
_BLOCK = NAMED[NAMED.index("class Block") : NAMED.index("class Model")]
_OTHER = _BLOCK.replace("tanh", "relu")


@pytest.mark.parametrize(
    ("block", "made"),
    [
        pytest.param(
            _OTHER + "class Of:\n" + indent(_BLOCK, "    "), "Of.Block()", id="in a class"
        ),
        pytest.param(
            f"def make():\n{indent(_BLOCK, '    ')}    return Block()\n\n\n", "make()", id="local"
        ),
        pytest.param(
            f"if torch:\n{indent(_BLOCK, '    ')}\nelse:\n{indent(_OTHER, '    ')}",
            "Block()",
            id="one of two",
        ),
        pytest.param(_BLOCK, 'type("Other", (Block,), {})()', id="made by `type`"),
    ],
)
def test_a_class_that_its_name_does_not_give_gets_no_subclass(tmp_path, block, made):
    source = NAMED.replace(_BLOCK, block).replace("= Block()", f"= {made}")
    schedule = SPLITTING + '    split(s["block"])\n    s["block"].checkpoint()\n'
    words = refused(tmp_path, source, schedule, "SR103")
    assert "needs a subclass" in words
    assert "self.block = " in words or "return Block()" in words
