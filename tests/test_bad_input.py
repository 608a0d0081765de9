"""Every row of the table of bad input: the message, and that nothing is written."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from slapo_rewrite import errors
from slapo_rewrite.cli import main

SOURCE = """\
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


def make(width):
    return nn.Linear(width, width) if width % 2 else nn.Identity()


class Model(nn.Module):
    def __init__(self, width=12, heads=2):
        super().__init__()
        self.embed = nn.Embedding(30, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList([Attention(width, heads) for _ in range(4)])
        self.head = nn.Linear(width, 30, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return self.head(x)
"""

MODEL = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"ids": torch.randint(30, (2, 5))}


def loss(outputs):
    return outputs.square().mean()


def schedule(s, ratio: float = 0.5, style: str = "a"):
"""


class Run:
    """The command, run on small files in a folder of its own."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys
        (folder / "net.py").write_text(SOURCE)

    def __call__(self, body: str, *options: str, schedule: str | None = None) -> str:
        """The error text for a schedule whose `schedule` function has this body."""
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        (self.folder / "s.py").write_text(MODEL + lines if schedule is None else schedule)
        code = main(["net.py", "--schedule", "s.py", "-o", "out", *options])
        captured = self.capsys.readouterr()
        assert code == 2, captured.err
        assert captured.out == ""
        assert not (self.folder / "out").exists(), "nothing is written"
        assert "Traceback" not in captured.err
        return captured.err


@pytest.fixture
def run(tmp_path, capsys, monkeypatch) -> Run:
    monkeypatch.chdir(tmp_path)
    return Run(tmp_path, capsys)


def line_of(text: str, part: str = MODEL) -> int:
    """The line of the schedule's body that follows the common part."""
    return part.count("\n") + 1


FIRST = line_of("")


def test_source_does_not_parse(run: Run):
    (run.folder / "net.py").write_text("class A:\n    def f(self)\n        pass\n")
    text = run("pass")
    assert "net.py:2:16" in text
    assert "2 |     def f(self)" in text
    assert "error[SR101]: the source does not parse: expected ':'" in text


def test_schedule_does_not_parse(run: Run):
    text = run("", schedule="def model(m):\n    return m.Model(\n")
    assert "s.py:2" in text and "'(' was never closed" in text


def test_a_command_that_there_is_not(run: Run, capsys):
    assert main(["tre", "net.py", "--schedule", "s.py"]) == 2
    assert "did you mean `slapo-rewrite tree`?" in capsys.readouterr().err
    assert main(["net.py", "--diff"]) == 2
    assert "or auto: slapo-rewrite --help" in capsys.readouterr().err
    assert main(["rewrite", "net.py", "--schedule", "s.py"]) == 2
    assert "did you mean" not in capsys.readouterr().err
    assert main(["net.py", "--schedule", "auto:Modl", "--diff"]) == 2
    assert "did you mean `Model`?" in capsys.readouterr().err
    assert main(["net.py", "--schedule", "auto:Other", "--diff"]) == 2
    assert "it defines Attention, Model" in capsys.readouterr().err
    assert main(["net.py", "--schedule", "auto:nte.py", "--diff"]) == 2
    assert "No such file or directory\n  = help: did you mean `net.py`?" in capsys.readouterr().err


def test_an_output_that_is_a_file(run: Run, capsys):
    run.folder.joinpath("taken").write_text("mine")
    run.folder.joinpath("s.py").write_text(MODEL + "    s['layers.*'].checkpoint()\n")
    assert main(["net.py", "--schedule", "s.py", "-o", "taken"]) == 2
    assert "such as `-o taken_parallel`" in capsys.readouterr().err


def test_no_such_source_or_schedule(run: Run, capsys):
    (run.folder / "s.py").write_text("")
    assert main(["nte.py", "--schedule", "s.py", "-o", "out"]) == 2
    assert "did you mean `net.py`?" in capsys.readouterr().err
    assert main(["net.py", "--schedule", "./schedul.py", "-o", "out"]) == 2
    assert "there is no schedule file `./schedul.py`\n" in capsys.readouterr().err
    (run.folder / "schedule.py").write_text("")
    assert main(["net.py", "--schedule", "shedule.py", "-o", "out"]) == 2
    assert "did you mean `schedule.py`?" in capsys.readouterr().err
    assert main(["net.py", "--schedule", "brt", "-o", "out"]) == 2
    assert "did you mean `bert`?" in capsys.readouterr().err
    assert main(["transformers.models.bert.modeling_brt", "--schedule", "bert", "-o", "out"]) == 2
    assert "transformers.models.bert.modeling_bert" in capsys.readouterr().err


def test_a_module_of_a_folder_that_is_not_searched(run: Run, capsys, monkeypatch):
    monkeypatch.setattr("sys.path", [p for p in sys.path if p not in ("", str(run.folder))])
    (run.folder / "parts").mkdir()
    (run.folder / "parts" / "made_here.py").write_text(SOURCE)
    (run.folder / "s.py").write_text(MODEL + "    s['layers.*'].checkpoint()\n")
    assert main(["parts.made_here", "--schedule", "s.py", "--diff"]) == 2
    assert "= help: give its file: parts/made_here.py" in capsys.readouterr().err
    assert main(["parts/made_here.py", "--schedule", "s.py", "--diff"]) == 0


def test_unknown_path(run: Run):
    text = run('s["layers.*.qvk"].shard("weight", axis=0)')
    assert "error[SR202]: no module `layers.*.qvk`" in text
    assert "did you mean `layers.*.qkv`" in text
    assert f"s.py:{FIRST}:5" in text
    assert "| " + '    s["layers.*.qvk"]' in text and "^" * 10 in text
    assert ".qkv`" in text


def test_unknown_index(run: Run):
    assert "`layers` has 4 modules: there is no [7]" in run('s["layers"][7].checkpoint()')
    assert "`layers` has 4 modules: there is no [-5]" in run('s["layers"][-5].checkpoint()')
    assert "`layers` has 4 modules: there is no [5:9]" in run('s["layers"][5:9].checkpoint()')
    for path, right in (
        ("layers.[0-3].qkv", 's["layers"][0:4]["qkv"]'),
        ("layers[2].qkv", 's["layers"][2]["qkv"]'),
        ("layers[0-1]", 's["layers"][0:2]'),
        ("layers[0:1]", 's["layers"][0:1]'),
    ):
        hint = f"elements are selected by an index: {right}\n"
        assert hint in run(f's["{path}"].shard("weight", axis=0)')
    assert "is a Linear, not a module list" in run('s["head"][0].checkpoint()')
    for index in ("::0", '"a":'):
        assert "integers, or fractions" in run(f's["layers"][{index}].checkpoint()')


def test_empty_match(run: Run):
    assert "matches `layers.x`" in run('s.match("layers.x").checkpoint()')
    assert "is not a regular expression" in run('s.match("(").checkpoint()')
    assert "is not a regular expression" in run("s.match(3).checkpoint()")


def test_unknown_parameter(run: Run):
    text = run('s["head"].shard("wieght", axis=0)')
    assert "`head` (Linear) has no parameter `wieght`" in text and "did you mean `weight`?" in text
    assert 's[...]["head"], and name `weight`' in run('s.shard("head.weight", axis=0)')
    assert "is constructed without its optional `bias`" in run('s["head"].shard("bias", axis=0)')


def test_unknown_knob(run: Run):
    text = run("pass", "--set", "ration=1")
    assert "no knob `ration`" in text and "did you mean `ratio`?" in text and "s.py:" in text


def test_knob_of_another_type(run: Run):
    assert "s.py:16:17\n" in run("pass", "--set", "ratio=much")
    assert "`much` is not a value for knob `ratio`: it must be a number" in run(
        "pass", "--set", "ratio=much"
    )
    assert "has no value" in run("pass", "--set", "ratio")


def test_unknown_primitive_and_argument(run: Run):
    assert "did you mean `shard`?" in run('s["head"].shrad("weight", axis=0)')
    assert 'a module is selected by its path: s["layers"]\n' in run("s.layers.checkpoint()")
    text = run('s["head"].shard("weight", axes=0)')
    assert "`shard` takes no argument `axes`" in text and "did you mean `axis`" in text
    assert "missing a required argument: 'axis'" in run('s["head"].shard("weight")')


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ('s["layers.*"].apply(["sdpa"])', "`rule` must be a string, not ['sdpa']"),
        ('s["head"].annotate({}, "key", 1)', "`param_name` must be a string, not {}"),
        ('s["head"].autocast(dtype=[])', "`dtype` must be a string, not []"),
        ('s["head"].shard("weight", axis=True)', "`axis` must be a whole number, not True"),
        ('s["head"].shard("weight", axis=0, parts="12")', "a list of whole numbers, not '12'"),
        ('s["head"].shard(["weight", 1], axis=0)', "a string or a list of strings"),
        ('s.find(where="head")', "`where` must be a function, not 'head'"),
        ('s.replace_all("Linear", "Linear")', "`make` must be a class or a function"),
        ('s["head"].inline(None)', "= help: inline(child)"),
        (
            's["layers.*"].checkpoint(["qkv"], name="class")',
            "'class' is not a valid name of a method",
        ),
        ('s["layers.*"].fuse(torch.nn.Linear, name="class")', "'class' is no name"),
        (
            's["head"].replace(torch.nn.Linear, args="8, 8, 1, 2, 3")',
            "`Linear` cannot be constructed instead of `head` with `8, 8, 1, 2, 3`: TypeError",
        ),
    ],
)
def test_an_argument_of_another_type(run: Run, call: str, words: str):
    assert words in run(call)


def test_axis_out_of_range(run: Run):
    text = run('s["head"].shard("weight", axis=2)')
    assert "`head.weight` has shape [30, 12]: there is no axis 2" in text
    assert "its axes are 0 to 1" in text
    text = run('s["norm"].shard("weight", axis=1)')
    assert "its only axis is 0" in text


def test_parts_that_do_not_divide(run: Run):
    text = run('s["head"].shard("weight", axis=0, parts=4)')
    assert "`head.weight` has size 30 there: it cannot be cut into 4 equal parts" in text
    assert "add up to 29" in run('s["head"].shard("weight", axis=0, parts=[10, 19])')


def test_sharded_twice_shows_both_lines(run: Run):
    text = run('s["head"].shard("weight", axis=0)\ns["head"].shard("weight", axis=1)')
    assert "already sharded, along axis 0" in text
    assert f"s.py:{FIRST + 1}:5" in text and f"s.py:{FIRST}:5" in text


def test_all_gather_of_a_partial_sum_shows_both_lines(run: Run):
    text = run(
        's["head"].shard("weight", axis=1)\ns["head"].sync("fwd_post", "all_gather", axis=-1)'
    )
    assert "is a partial sum: an all-gather would concatenate the summands" in text
    assert f"s.py:{FIRST + 1}:5" in text and f"s.py:{FIRST}:5" in text


def test_all_reduce_of_a_partition_shows_both_lines(run: Run):
    text = run('s["head"].shard("weight", axis=0)\ns["head"].sync("fwd_post", "all_reduce")')
    assert "is a partition: an all-reduce would add up different features" in text
    assert f"s.py:{FIRST + 1}:5" in text and f"s.py:{FIRST}:5" in text


def test_bias_left_out(run: Run):
    text = run('s["layers.*.out"].shard("weight", axis=0)')
    assert "bias` is not sharded, but `weight` is" in text


def test_output_left_in_parts(run: Run):
    text = run('s["head"].shard("weight", axis=0)\ns["head"].sync("bwd_post", "all_reduce")')
    assert "has shape [2, 5, 15] on a rank instead of [2, 5, 30]" in text
    assert "all_gather" in text


def test_packed_projection_without_parts(run: Run):
    text = run(
        's["layers.*.qkv"].shard(["weight", "bias"], axis=0)\n'
        's["layers.*.qkv"].sync("bwd_post", "all_reduce")\n'
        's["layers.*.out"].shard("weight", axis=1)\n'
        's["layers.*.out"].sync("fwd_post", "all_reduce")'
    )
    assert "shard it with parts=3" in text
    assert "net.py:14:" in text and ".chunk(3, dim=-1)" in text
    assert f"s.py:{FIRST}:5" in text


def test_row_without_a_partitioned_input(run: Run):
    text = run(
        's["layers.*.out"].shard("weight", axis=1)\n'
        's["layers.*.out"].sync("fwd_post", "all_reduce")'
    )
    assert "error[SR104]" in text and "net.py:17:" in text


def test_construction_that_cannot_be_followed(run: Run):
    source = SOURCE.replace("self.head = nn.Linear(", "self.head = vars(nn)['Linear'](")
    assert source != SOURCE
    (run.folder / "net.py").write_text(source)
    text = run(
        's["head"].shard("weight", axis=0)\ns["head"].sync("bwd_post", "all_reduce")\n'
        's["head"].sync("fwd_post", "all_gather", axis=-1)'
    )
    assert "error[SR103]" in text and "net.py:" in text and "help:" in text


def test_a_layer_that_cannot_be_sharded(run: Run):
    source = SOURCE.replace("nn.LayerNorm(width)", "nn.PReLU(width)")
    (run.folder / "net.py").write_text(source)
    text = run('s["norm"].shard("weight", axis=0)')
    assert "`norm` is a torch.nn.modules.activation.PReLU: it cannot be sharded" in text


def test_user_code_that_fails(run: Run):
    text = run('s["head"].shard("weight", axis=1 // 0)')
    assert "raises ZeroDivisionError" in text and f"s.py:{FIRST}:" in text
    text = run("", schedule="def model(m):\n    return m.Modle()\n\ndef schedule(s):\n    pass\n")
    assert "Modle" in text and "s.py:2" in text
    text = run("", schedule="def model(m):\n    return m.Model()\n")
    assert "defines no function `schedule`" in text
    text = run("", schedule="loss = 0\ndef model(m):\n    return m\ndef schedule(s):\n    pass\n")
    assert "`loss` in `" in text and "is not a function, but of type int" in text
    text = run('yield s["head"]')
    assert "`schedule` is a generator" in text and "def schedule(s" in text


def test_a_source_that_cannot_be_imported(run: Run):
    (run.folder / "net.py").write_text("import no_such_package_here\n")
    text = run("pass")
    assert "cannot be imported: ModuleNotFoundError" in text and "net.py:1" in text
    (run.folder / "net.py").write_text("import torch\n\n\ndef twice(a, a):\n    pass\n")
    text = run("pass")
    assert "SyntaxError: duplicate argument 'a'" in text and "net.py:4" in text


def test_a_name_that_is_taken(run: Run):
    """It is imported by another one, unless that is taken, too."""
    source = SOURCE.replace("def make(width)", "def checkpoint(width)")
    (run.folder / "net.py").write_text(f"{source}\ntorch_checkpoint = None\n")
    assert "both `checkpoint` and `torch_checkpoint` mean" in run('s["layers.*"].checkpoint()')
    (run.folder / "net.py").write_text(source)
    assert main(["net.py", "--schedule", "s.py", "-o", "out"]) == 0
    text = (run.folder / "out" / "net.py").read_text()
    assert "import checkpoint as torch_checkpoint" in text and "return torch_checkpoint(" in text


def test_output_is_a_file(run: Run, capsys):
    (run.folder / "out").write_text("mine")
    (run.folder / "s.py").write_text(MODEL + "    pass\n")
    assert main(["net.py", "--schedule", "s.py", "-o", "out"]) == 2
    assert "is a file, not a folder" in capsys.readouterr().err
    assert (run.folder / "out").read_text() == "mine"


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a folder nobody can write")
def test_output_that_cannot_be_written(run: Run, capsys):
    (run.folder / "s.py").write_text(MODEL + "    pass\n")
    assert main(["net.py", "--schedule", "s.py", "-o", "/proc/out"]) == 2
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["net.py", "--schedule", "s.py"], "the output folder is missing"),
        (["net.py", "-o", "out"], "--schedule"),
        (["net.py", "--schedule", "s.py", "-o", "out", "--world", "2"], "needs `--verify`"),
        (["net.py", "--schedule", "s.py", "-o", "out", "--diff", "--check"], "exclude"),
        (["explain", "nothing"], "rewrite.json"),
        (["verify", "nothing"], "rewrite.json"),
    ],
)
def test_usage(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_a_defect_is_called_one(run: Run, capsys, monkeypatch):
    import slapo_rewrite.emit.rewrite as module

    def broken(*args: object) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(module, "rewrite", broken)
    (run.folder / "s.py").write_text(MODEL + "    pass\n")
    assert main(["net.py", "--schedule", "s.py", "-o", "out"]) == 3
    assert "this is a defect of slapo-rewrite" in capsys.readouterr().err
    assert not os.path.exists("out")


def test_an_argument_that_a_sharded_layer_does_not_take(run: Run):
    source = SOURCE.replace("nn.Embedding(30, width)", "nn.Embedding(30, width, max_norm=1.0)")
    (run.folder / "net.py").write_text(source)
    text = run('s["embed"].shard("weight", axis=0)\ns["embed"].sync("fwd_post", "all_reduce")')
    assert "does not take the argument `max_norm`" in text and "net.py:27:" in text


def test_what_the_user_s_files_print_is_no_output(run: Run, capsys):
    (run.folder / "net.py").write_text("print('loud source')\n" + SOURCE)
    (run.folder / "s.py").write_text("print('loud schedule')\n" + MODEL + "    print('knobs')\n")
    assert main(["net.py", "--schedule", "s.py", "--diff"]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.split("\n")[:3] == ["loud schedule", "loud source", "knobs"]
    assert main(["tree", "net.py", "--schedule", "s.py"]) == 0
    assert "loud" not in capsys.readouterr().out


def test_the_meta_device_is_blamed_for_what_it_does_alone(run: Run):
    text = run("", schedule="def model(m):\n    return m.Modle()\ndef schedule(s): pass\n")
    assert "meta device" not in text
    assert "its classes: Attention, Model" in text
    source = SOURCE.replace("self.embed = ", "float(torch.rand(1))\n        self.embed = ")
    (run.folder / "net.py").write_text(source)
    assert "must not read the values of tensors" in run("pass")


def test_a_model_that_runs_nowhere(run: Run):
    source = SOURCE.replace("return self.head(x)", "return self.head(x.missing)")
    (run.folder / "net.py").write_text(source)
    text = run('s["layers.*.out"].shard("weight", axis=1)\ns.infer_sync()')
    assert "the model does not run: " in text and "meta device" not in text
    assert "has no attribute 'missing'; nor does a small one\n" in text
    assert f"net.py:{line_of('', SOURCE) - 1}:9" in text and "it stops here" in text


def test_inputs_that_the_model_does_not_take(run: Run):
    schedule = (
        MODEL.replace('"ids"', '"tokens"') + "    s['layers.*.out'].shard('weight', axis=1)\n"
    )
    text = run("", schedule=schedule + "    s.infer_sync()\n")
    assert "unexpected keyword argument 'tokens'" in text
    assert "let `inputs(model)` in the schedule return" in text and "net.py" not in text


@pytest.mark.parametrize(
    "body", ["s['layers.*'].checkpoint()", "s['head'].shard('weight', axis=0); s.infer_sync()"]
)
@pytest.mark.parametrize(
    ("old", "new", "words", "place"),
    [
        ("inputs(model)", "inputs()", "`inputs` is called with one argument, the model", 8),
        ("def inputs", "async def inputs", "`inputs` is a generator or a coroutine", 8),
        ('return {"ids"', "yield {'ids'", "`inputs` is a generator or a coroutine", 8),
        ('{"ids": torch.randint(30, (2, 5))}', "[2, 5]", "`inputs` returns list, not a dict", 8),
        ("(2, 5))", "(2, -5))", "`inputs` raises RuntimeError: ", 9),
        ("loss(outputs)", "loss()", "`loss` is called with one argument, the outputs", 12),
        ("outputs.square", "outputs.loss.square", "`loss` raises AttributeError: ", 13),
        (".mean()", "", "the step returns no loss but [2, 5, 30]", 12),
    ],
)
def test_inputs_and_a_loss_that_are_none(run: Run, old, new, words, place, body):
    schedule = MODEL.replace(old, new)
    assert schedule != MODEL
    text = run("", schedule=f"{schedule}    {body}\n")
    assert f"error[SR201]: {words}" in text and f"s.py:{place}:" in text


def test_a_package_that_the_source_imports_and_that_is_not_there(run: Run):
    (run.folder / "net.py").write_text("import nothere.at_all\n" + SOURCE)
    text = run("pass")
    assert "1 | import nothere.at_all\n  | ^^^^^^^^^^^^^^^^^^^^^" in text
    assert "install `nothere` for slapo-rewrite's Python" in text


LIBRARY = """\
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.one = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.many = nn.TransformerEncoder(layer, 2)

    def forward(self, ids):
        return self.many(self.one(ids))
"""


def test_a_copy_is_advised_where_one_helps(run: Run):
    (run.folder / "net.py").write_text(LIBRARY)
    text = run('s["one.linear1"].checkpoint()')
    assert "copy class `TransformerEncoderLayer` into net.py, and use the copy" in text
    text = run('s["many.layers"][:1].checkpoint()')
    assert "copy class" not in text and "in net.py by an nn.ModuleList" in text


@pytest.mark.parametrize(
    ("message", "line"),
    [("nothing fits", FIRST - 1), ("`layers.0.out.weight` is wrong", FIRST + 1)],
)
def test_every_refusal_has_a_place(run: Run, monkeypatch, message, line):
    def refusing(*args: object, **options: object) -> None:
        raise errors.Unsupported(message)

    monkeypatch.setattr("slapo_rewrite.emit.rewrite.lower", refusing)
    text = run('s["head"].checkpoint()\ns["layers.*"].checkpoint()')
    assert f"--> s.py:{line}:" in text
    monkeypatch.setattr("slapo_rewrite.schedule.plan.Plan.call", refusing)
    assert f"--> s.py:{FIRST}:5" in run('s["head"].checkpoint()')
    monkeypatch.setattr("slapo_rewrite.project.Tree", refusing)
    assert "s.py:4:1" in run("pass")


@pytest.mark.parametrize("name", ["net.py", "s.py"])
def test_files_that_go_elsewhere(run: Run, name):
    """What is given by a relative path is found all the same."""
    (run.folder / "s.py").write_text(MODEL + "    pass\n")
    text = (run.folder / name).read_text()
    (run.folder / name).write_text(f"import os\nos.chdir('/')\n{text}")
    assert main(["net.py", "--schedule", "s.py", "-o", "out"]) == 0
    assert main(["net.py", "--schedule", "s.py", "-o", "out", "--check"]) == 0
    assert (run.folder / "out" / "net.py").is_file()
