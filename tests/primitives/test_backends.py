"""Implementations of the functions that rules call: `apply` and `apply_all` with a backend."""

from __future__ import annotations

import importlib
import json
import sys
import textwrap

import pytest
import torch
import torch._inductor.config

from slapo_rewrite import errors
from slapo_rewrite.changes.source_rewrite import Rewrite
from slapo_rewrite.cli import main
from slapo_rewrite.emit.explanation import explain
from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.emit.write import write
from slapo_rewrite.fusion import backends
from slapo_rewrite.fusion.backends import Row, Table
from slapo_rewrite.fusion.registry import rules
from slapo_rewrite.model.kernel_samples import SAMPLES
from tests.marks import release
from tests.rewriting import changed_lines, refused, rewritten
from tests.rules.test_rules import compare

CALLING = [name for name, rule in rules().items() if rule.kernels]
NET = """\
import torch
from torch import nn
from torch.nn import functional as F


class Norm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x.float() * torch.rsqrt(variance + self.eps)).to(x.dtype)


class Net(nn.Module):
    def __init__(self, narrow, wide):
        super().__init__()
        self.first, self.last = Norm(narrow), Norm(wide)
        self.gate, self.up = nn.Linear(narrow, wide), nn.Linear(narrow, wide)

    def forward(self, x):
        x = self.first(x)
        return self.last(F.silu(self.gate(x)) * self.up(x))
"""
SCHEDULE = """\
import torch


def model(m):
    return m.Net(16, 64)


def inputs(model):
    return {"x": torch.randn(2, 3, 16)}


def loss(outputs):
    return outputs.pow(3).mean()


def schedule(s):
"""


def scheduled(*lines: str) -> str:
    return SCHEDULE + textwrap.indent("\n".join(lines), "    ") + "\n"


def helpers(output) -> str:
    return output.files["kernels.py"]


# Backends that stand in the output ----------------------------------------------------------------


def by(backend: str, rule, number: int = 0):
    """An example's source and its schedule, with a backend."""
    example = rule.examples[number]
    named = f'"{rule.name}"'
    return example.source, example.schedule.replace(named, f'{named}, backend="{backend}"')


@pytest.mark.parametrize("name", CALLING)
def test_the_reference_alone_has_the_originals_numbers(name, tmp_path):
    rule = rules()[name]
    output = rewritten(tmp_path, *by("eager", rule))
    assert changed_lines(output) == rule.examples[0].diff, "the call is written alike"
    assert "triton" not in helpers(output)
    compare(rule, tmp_path, output)


FOUR = ("rms_norm", "swiglu", "bias_gelu", "cross_entropy")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", FOUR)
def test_torch_compile_traces_it_as_one_graph(name, tmp_path, monkeypatch):
    """With `torch.compile`'s own tracer, without a compiler behind it, which takes seconds."""
    rule, graphs = rules()[name], []
    output = rewritten(tmp_path, *by("inductor", rule))
    assert changed_lines(output) == rule.examples[0].diff
    compiles = torch.compile

    def traced(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda f: compiles(f, backend=traced, fullgraph=True))
    compare(rule, tmp_path, output)
    assert len(graphs) == 1


@pytest.mark.long
@pytest.mark.parametrize("name", [n if n in ("rotary", "swiglu") else release(n) for n in CALLING])
@pytest.mark.filterwarnings("ignore")
def test_compiled_it_has_the_originals_numbers(name, tmp_path):
    """Dropout too, if `torch.compile` is configured to draw PyTorch's random numbers."""
    rule = rules()[name]
    output = rewritten(tmp_path, *by("inductor", rule))
    assert "@torch.compile\n" in helpers(output)
    with torch._inductor.config.patch(fallback_random=True):
        compare(rule, tmp_path, output)


def test_the_model_file_is_the_same_whatever_carries_it_out(tmp_path):
    outputs = [
        rewritten(tmp_path, NET, scheduled(f's.apply_all(backend="{backend}")'))
        for backend in ("triton", "inductor", "eager")
    ]
    assert len({changed_lines(output) for output in outputs}) == 1
    assert len({helpers(output) for output in outputs}) == 3
    plain = rewritten(tmp_path, NET, scheduled("s.apply_all()"))
    assert helpers(plain) == helpers(outputs[0]).replace("source_0", "source_3")


def test_each_rule_may_have_its_own(tmp_path):
    lines = ('s.apply("swiglu")', 's.apply("rms_norm", backend="eager")')
    output = rewritten(tmp_path, NET, scheduled(*lines))
    assert sorted(output.files) == [
        *("__init__.py", "kernels.py", "rewrite.diff", "rewrite.json", "source_0.py")
    ]
    assert "class GatedFunction(" in helpers(output)
    assert "class RMSNormFunction(" not in helpers(output)
    compare(rules()["rms_norm"], tmp_path, output)


def test_one_function_by_two_backends_stands_in_two_files(tmp_path):
    lines = ('s["first"].apply("rms_norm")', 's["last"].apply("rms_norm", backend="eager")')
    output = rewritten(tmp_path, NET, scheduled(*lines))
    text = output.files["source_0.py"]
    assert "from . import kernels_eager\n" in text and "from .kernels import rms_norm\n" in text
    assert "return kernels_eager.rms_norm(x, self.weight, self.eps)" in text
    assert "return rms_norm(x, self.weight, self.eps)" in text
    assert "class RMSNormFunction(" in helpers(output)
    assert "triton" not in output.files["kernels_eager.py"]
    compare(rules()["rms_norm"], tmp_path, output)
    (tmp_path / "net.py").write_text(NET)
    with pytest.raises(errors.Unsupported, match="two backends implement one function") as caught:
        rewrite(str(tmp_path / "net.py"), str(tmp_path / "s.py"), single_file=True)
    assert "leave out --single-file" in str(caught.value.hint)


NORMED = """\
from torch import nn


class Opening(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        x = x + self.one(x)
        return x + self.two(self.norm(x))


class Closing(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(self.one(x) + x)


class Net(nn.Module):
    def __init__(self, narrow, wide):
        super().__init__()
        self.one, self.two = Opening(narrow), Closing(narrow)

    def forward(self, x):
        return self.two(self.one(x))
"""


def test_what_a_function_calls_is_of_its_own_backend(tmp_path):
    """The kernel `add_layer_norm` calls `residual_layer_norm`, which is another one here."""
    lines = (
        's["one"].apply("residual_layer_norm", backend="eager")',
        's["two"].apply("residual_layer_norm")',
    )
    output = rewritten(tmp_path, NORMED, scheduled(*lines))
    assert "triton" not in helpers(output) and "def add_layer_norm(" not in helpers(output)
    assert "def layer_norm_forward_kernel(" in output.files["kernels_triton.py"]
    assert "return kernels_triton.add_layer_norm(" in output.files["source_0.py"]
    compare(rules()["residual_layer_norm"], tmp_path, output)


def test_one_file_holds_the_references(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "s.py").write_text(scheduled('s.apply_all(backend="inductor")'))
    output = rewrite(str(tmp_path / "net.py"), str(tmp_path / "s.py"), single_file=True)
    assert "@torch.compile\ndef swiglu(" in output.files["net.py"]
    assert "from .kernels" not in output.files["net.py"]


def test_outputs_that_share_helpers_have_one_backend_for_a_function(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "models").mkdir()

    def wrote(name: str, *lines: str) -> int:
        (tmp_path / f"{name}.py").write_text(scheduled(*lines))
        where = ["-o", f"models/{name}", "--support", "models/support"]
        return main(["net.py", "--schedule", f"{name}.py", *where])

    assert wrote("one", 's.apply("swiglu")') == 0
    assert wrote("two", 's.apply("rms_norm", backend="eager")') == 0
    text = (tmp_path / "models/support/kernels.py").read_text()
    assert "class GatedFunction(" in text and "class RMSNormFunction(" not in text
    capsys.readouterr()
    assert wrote("three", 's.apply("swiglu", backend="eager")') == 2
    shown = capsys.readouterr().err
    assert "`swiglu` would be in one file both with and without a Triton kernel" in shown
    assert "leave out --support" in shown
    assert not (tmp_path / "models/three").exists()
    assert (tmp_path / "models/support/kernels.py").read_text() == text
    # An output that shares a function with no other may have it by another backend.
    assert wrote("one", 's.apply("swiglu", backend="inductor")') == 0
    text = (tmp_path / "models/support/kernels.py").read_text()
    assert "@torch.compile\ndef swiglu(" in text and "triton" not in text


# What was measured --------------------------------------------------------------------------------


def measurement(kernel: str, width: int, dtype: str = "float32", **microseconds: float) -> dict:
    figures = {"kernel": kernel, "width": width, "rows": 16384, "dtype": dtype}
    return {**figures, "microseconds": microseconds}


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Writes a table as `benchmark.kernels --choose` does, in a folder of its own."""
    folder = tmp_path / "rules" / "measured"
    folder.mkdir(parents=True)
    monkeypatch.setattr(backends, "rules_folder", lambda: folder.parent)

    def wrote(*rows: dict, name: str = "h100", device: str = "NVIDIA H100 80GB HBM3") -> None:
        head = {"device": device, "measured": "2026-01-31", "versions": {"torch": "2.13.0"}}
        (folder / f"{name}.json").write_text(json.dumps({**head, "measurements": rows}))

    return wrote


MEASURED = 's.apply_all(backend="measured", device="h100")'


def chosen(output, rule: str) -> dict[str, str]:
    notes = json.loads(output.files["rewrite.json"])["rules"]
    found: dict[str, str] = next(note for note in notes if note["rule"] == rule)["chosen"]
    return found


def test_two_sizes_have_two_winners(tmp_path, table):
    table(
        measurement("rms_norm", 16, triton=3, eager=2.5),
        measurement("rms_norm", 64, triton=5, inductor=7, eager=9),
        measurement("swiglu", 64, triton=8, eager=6),
    )
    output = rewritten(tmp_path, NET, scheduled(MEASURED))
    assert chosen(output, "rms_norm") == {
        "first": "eager: of triton 3, eager 2.5 us measured on h100 (2026-01-31) at 16 wide, for "
        "16 wide in float32",
        "last": "triton: of triton 5, inductor 7, eager 9 us measured on h100 (2026-01-31) at 64 "
        "wide, for 64 wide in float32",
    }
    assert chosen(output, "swiglu")[""].startswith("eager: of triton 8, eager 6 us")
    assert "def rms_norm(" in helpers(output) and "def swiglu(" in helpers(output)
    assert "triton" not in helpers(output)
    assert "class RMSNormFunction(" in output.files["kernels_triton.py"]
    compare(rules()["rms_norm"], tmp_path, output)


def test_what_was_chosen_is_explained(tmp_path, table):
    table(measurement("rms_norm", 16, triton=3, eager=4))
    output = rewritten(tmp_path, NET, scheduled(MEASURED))
    write(tmp_path / "out", output.files)
    shown = explain(tmp_path / "out", None)
    assert "s.py:17: in first by triton: of triton 3, eager 4 us measured on h100" in shown
    lacking = "by eager: no measurement of `swiglu` for h100 at 64 wide in float32"
    assert f"in the model itself {lacking}" in shown


def test_of_a_rule_that_is_applied_in_several_turns_all_choices_are_kept():
    turns = [
        Rewrite([], notes=({"rule": "swiglu", "applied": [path], "chosen": {path: why}},))
        for path, why in (("first", "eager: slow"), ("last", "triton: fast"))
    ]
    (note,) = turns[1].after(turns[0]).notes
    assert note["chosen"] == {"first": "eager: slow", "last": "triton: fast"}


def test_the_reference_is_taken_where_nothing_was_measured(tmp_path, table):
    eager = rewritten(tmp_path, NET, scheduled('s.apply_all(backend="eager")'))
    for rows in ([], [measurement("rms_norm", 16, "bfloat16", triton=3, eager=4)]):
        table(*rows)
        output = rewritten(tmp_path, NET, scheduled(MEASURED))
        assert changed_lines(output) == changed_lines(eager)
        text, other = (f.partition("\n")[2] for f in (helpers(output), helpers(eager)))
        assert text == other
    # A device that the tool knows, of which there is no table.
    output = rewritten(tmp_path, NET, scheduled(MEASURED.replace("h100", "a100")))
    assert "no measurement of `rms_norm` for a100" in chosen(output, "rms_norm")["first"]


def test_it_is_looked_up_in_what_is_trained_in(tmp_path, table):
    table(measurement("rms_norm", 16, "bfloat16", triton=3, eager=4))
    line = 's.apply("rms_norm", backend="measured", device="h100", dtype="bfloat16")'
    output = rewritten(tmp_path, NET, scheduled(line))
    assert chosen(output, "rms_norm")["first"].startswith("triton: ")
    cast = scheduled(MEASURED).replace("m.Net(16, 64)", "m.Net(16, 64).to(torch.bfloat16)")
    output = rewritten(tmp_path, NET, cast)
    assert chosen(output, "rms_norm")["first"].startswith("triton: ")


TURNED = (
    rules()["rotary"].examples[0].source
    + """\


class Net(nn.Module):
    def __init__(self, narrow, wide):
        super().__init__()
        self.one, self.two = Scores(narrow, 2), Scores(narrow, 8)

    def forward(self, x):
        small, large = x[:, :1, :2].detach(), x[:1, :, :8].detach()
        return self.one(x, large, large).sum() + self.two(x, small, small).sum()
"""
)


def test_a_function_that_modules_share_has_one_backend(tmp_path, table):
    """Heads of 8 are turned fastest by another backend than heads of 2, in one function."""
    table(
        measurement("rotary", 8, triton=3, eager=4),
        measurement("rotary", 2, triton=4, eager=3),
    )
    schedule = scheduled(MEASURED.replace("_all(", '("rotary", '))
    text = refused(tmp_path, TURNED, schedule, "SR309")
    assert "calls `apply_rotary_pos_emb` too, and would use another backend" in text
    assert 'use one backend for both: backend="triton"' in text
    output = rewritten(tmp_path, TURNED, scheduled(MEASURED))
    (note,) = (
        n for n in json.loads(output.files["rewrite.json"])["rules"] if n["rule"] == "rotary"
    )
    assert "applied" not in note and len(note["left"]) == 2


WIDTHS = {
    **dict.fromkeys(("rms_norm", "residual_rms_norm", "residual_layer_norm"), 8),
    **dict.fromkeys(("rotary", "dropout_residual", "linear_each"), 8),
    **dict.fromkeys(("cross_entropy", "linear_cross_entropy"), 11),
    **dict.fromkeys(("swiglu", "geglu", "reglu", "bias_gelu", "activation_dropout"), 32),
    "quick_gelu": 32,
    "masked_softmax": None,
}


@pytest.mark.parametrize("name", CALLING)
def test_how_wide_a_match_is(name, tmp_path, table):
    table()
    output = rewritten(tmp_path, *by('measured", device="a100', rules()[name]))
    width = WIDTHS[name]
    words = "is not known here" if width is None else f"for a100 at {width} wide in float32"
    assert any(why.endswith(words) for why in chosen(output, name).values()), chosen(output, name)


def test_no_table_ships_that_was_not_measured():
    for name, table in backends.tables().items():
        assert table.device and table.measured and table.rows, name


def test_what_ships_says_something_of_each_function_that_rules_call():
    table = backends.tables()["h200"]
    for kernel in SAMPLES:
        for dtype in ("bfloat16", "float32"):
            assert any((r.kernel, r.dtype) == (kernel, dtype) for r in table.rows), kernel
    assert {row.fastest for row in table.rows} == {"eager", "triton", "inductor"}


@pytest.mark.parametrize(
    ("times", "taken"),
    [
        ({"eager": 103, "triton": 102, "inductor": 100}, "eager"),
        ({"eager": 104, "triton": 102, "inductor": 100}, "triton"),
        ({"eager": 104, "triton": 104, "inductor": 100}, "inductor"),
        ({"triton": 104}, "triton"),
    ],
)
def test_of_times_alike_the_simplest_backend_is_taken(times, taken):
    assert Row("rms_norm", 8, 1, "float32", times).fastest == taken


@pytest.mark.parametrize(
    ("width", "nearest"),
    [(1, None), (7, None), (8, 16), (20, 16), (22, 16), (23, 32), (32, 32), (64, 32), (65, None)],
)
def test_the_nearest_size_is_at_most_twice_as_large_or_small(width, nearest):
    rows = tuple(Row("rms_norm", w, 1, "float32", {"eager": 1}) for w in (32, 16))
    table = Table("h100", rows=(*rows, Row("swiglu", width, 1, "float32", {"eager": 1})))
    found = table.nearest("rms_norm", width, "float32")
    assert (found and found.width) == nearest
    assert table.nearest("rms_norm", width, "bfloat16") is None


def test_of_two_sizes_equally_near_the_smaller_counts():
    rows = tuple(Row("rms_norm", w, 1, "float32", {"eager": 1}) for w in (40, 10))
    found = Table("h100", rows=rows).nearest("rms_norm", 20, "float32")
    assert found is not None and found.width == 10


def test_the_gpu_at_hand_is_known_by_its_name(tmp_path, table, monkeypatch):
    table(measurement("rms_norm", 16, triton=3, eager=4))
    schedule = scheduled('s.apply("rms_norm", backend="measured")')
    text = refused(tmp_path, NET, schedule, "SR206")
    assert "there is no GPU here to choose kernels for" in text
    assert 'backend="measured", device="h100"' in text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, backend in (("NVIDIA H100 80GB HBM3", "triton: "), ("NVIDIA X", "eager: no measure")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        output = rewritten(tmp_path, NET, schedule)
        assert chosen(output, "rms_norm")["first"].startswith(backend)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('s.apply_all(backend="trition")', ("no backend 'trition'", "`triton`")),
        ('s.apply_all(backend="")', ("no backend ''", "triton, inductor, eager, measured")),
        ("s.apply_all(backend=None)", ("`backend` must be a string, not None",)),
        (MEASURED.replace("h100", "h10"), ("no device 'h10'", "`h100`")),
        (MEASURED.replace("h100", "tpu"), ("no device 'tpu'", "v100, a100")),
        ('s.apply_all(device="h100")', ('`device` is for backend="measured"',)),
        ('s.apply_all(backend="eager", dtype="float16")', ("`dtype` is for",)),
        ('s.apply("swiglu", backend="measured", dtype="bf16")', ("`dtype` must be one of",)),
        ('s.apply("gelu_tanh", backend="eager")', ("operations of torch", "leave out `backend`")),
        ('s.apply("pack_qkv", backend="inductor")', ("operations of torch",)),
    ],
)
def test_what_there_is_not_is_refused(line, words, tmp_path):
    text = refused(tmp_path, NET, scheduled(line), "SR206")
    assert all(each in text for each in words), text
    assert "s.py:17:" in text


# A module of one's own ----------------------------------------------------------------------------

RIGHT = '''\
import torch
from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor | None, eps=1e-6, *, offset: float = 0.0, cast: str = "input"
) -> Tensor:
    """As fast as nobody else."""
    wide = x.float()
    hat = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    if weight is None:
        return hat.to(x.dtype)
    if cast == "output":
        return ((offset + weight.float()) * hat).to(x.dtype)
    return (offset + weight) * hat.to(x.dtype if cast == "input" else weight.dtype)
'''
PLUGGED = 's.apply("rms_norm", backend="my_kernels.norms")'


@pytest.fixture
def plugged(tmp_path, monkeypatch):
    """Makes the module `my_kernels.norms`."""
    folder = tmp_path / "installed" / "my_kernels"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(folder.parent))

    def wrote(text: str) -> None:
        (folder / "norms.py").write_text(text)
        for name in ("my_kernels", "my_kernels.norms"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()

    yield wrote
    for name in ("my_kernels", "my_kernels.norms"):
        sys.modules.pop(name, None)


def test_a_module_takes_the_place_of_the_tools_own(tmp_path, plugged):
    plugged(RIGHT)
    output = rewritten(tmp_path, NET, scheduled(PLUGGED, 's.apply("swiglu", backend="eager")'))
    text = output.files["source_0.py"]
    assert "from my_kernels.norms import rms_norm\n" in text
    assert "return rms_norm(x, self.weight, self.eps)" in text
    assert "rms_norm" not in helpers(output)
    compare(rules()["rms_norm"], tmp_path, output)


WRONG = {
    "no function": (RIGHT.replace("def rms_norm", "def rms_norms"), "SR206", "has no function"),
    "near": (RIGHT.replace("def rms_norm", "def rms_norms"), "SR206", "`rms_norms`"),
    "a parameter less": (
        RIGHT.replace(", *, offset: float = 0.0", ""),
        "SR206",
        "takes other arguments",
    ),
    "another default": (RIGHT.replace("eps=1e-6", "eps=1e-5"), "SR206", "rms_norm(x, weight, eps"),
    "another order": (
        RIGHT.replace("x: Tensor, weight: Tensor | None", "weight, x"),
        "SR206",
        "it is called as",
    ),
    "a keyword": (RIGHT.replace(" *,", ""), "SR206", "cast='input')"),
    "numbers": (RIGHT.replace("+ eps)", "+ 10 * eps + 1e-3)"), "SR106", "differs by 2.7e-03"),
    "an option": (RIGHT.replace("(offset + weight.float())", "weight"), "SR106", "offset, cast"),
    "gradients": (
        RIGHT.replace("hat = wide /", "hat = wide.detach() /"),
        "SR106",
        "argument 1 differs",
    ),
    "a dtype": (RIGHT.replace("return hat.to(x.dtype)", "return hat.half()"), "SR106", "inf"),
    "a failure": (
        RIGHT.replace("wide = x.float()", "raise RuntimeError('no GPU')"),
        "SR106",
        "fails on a CPU: RuntimeError: no GPU",
    ),
    "an import": ("import nothing_of_this_name\n", "SR206", "cannot be imported"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_module_is_compared_with_the_reference_first(name, tmp_path, plugged):
    text, code, words = WRONG[name]
    plugged(text)
    shown = refused(tmp_path, NET, scheduled(PLUGGED), code)
    assert words in shown, shown
    assert "s.py:17:" in shown


def test_a_module_that_has_not_all_that_rules_call_is_for_apply(tmp_path, plugged):
    plugged(RIGHT)
    shown = refused(tmp_path, NET, scheduled(PLUGGED.replace('("rms_norm", ', "_all(")), "SR206")
    assert "`my_kernels.norms` has no function `swiglu`" in shown
    assert 's.apply(..., backend="my_kernels.norms")' in shown


@pytest.mark.parametrize("turned", [False, True])
def test_one_function_is_not_imported_from_two_places(turned, tmp_path, plugged):
    plugged(RIGHT)
    lines = [PLUGGED.replace("s.", 's["first"].', 1), 's["last"].apply("rms_norm")']
    shown = refused(tmp_path, NET, scheduled(*(lines[::-1] if turned else lines)), "SR105")
    homes = ("kernels", "my_kernels.norms") if turned else ("my_kernels.norms", "kernels")
    words = "`rms_norm` is imported from `{}`, and would be from `{}`, too"
    assert words.format(*homes) in shown and "use one backend for it" in shown
