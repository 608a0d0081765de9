"""Classes from another file than the model's: that file is rewritten as well."""

from __future__ import annotations

import ast
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from slapo_rewrite import errors
from slapo_rewrite.cli import main
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.emit.rewrite import Output, rewrite
from slapo_rewrite.emit.source_diff import Original
from slapo_rewrite.emit.write import write
from slapo_rewrite.verify.run import verify

PARTS = '''"""What attention is made of."""

from torch import nn
from torch.nn import functional as F

INNER = 2


class Norm(nn.LayerNorm):
    """A norm."""


class Core(nn.Module):
    """No parameters, but sizes."""

    def __init__(self, heads, dim):
        super().__init__()
        self.heads, self.size = heads, dim // heads

    def split(self, x):
        return x.view(*x.shape[:2], self.heads, self.size).transpose(1, 2)

    def forward(self, q, k, v):
        o = F.scaled_dot_product_attention(self.split(q), self.split(k), self.split(v))
        return o.transpose(1, 2).reshape(*q.shape[:2], -1)  # as it came
'''

BLOCKS = '''"""Blocks."""

from torch import nn

from .parts import INNER, Core, Norm


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim)
        self.core = Core(heads, dim)
        self.o = nn.Linear(dim, dim)

    def forward(self, x):
        return self.o(self.core(self.q(x), self.k(x), self.v(x)))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm = Norm(dim)
        self.attention = Attention(dim, heads)
        self.up = nn.Linear(dim, INNER * dim)
        self.down = nn.Linear(INNER * dim, dim)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(self.up(x).relu())
'''

MODEL = '''"""A model."""

from torch import nn

from .blocks import Block
from .parts import Norm


class Model(nn.Module):
    def __init__(self, dim=32, heads=8, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList([Block(dim, heads) for _ in range(depth)])
        self.norm = Norm(dim)
        self.head = nn.Linear(dim, 3)
        self.norms = sum(isinstance(module, Norm) for module in self.modules())

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
'''

SCHEDULE = """import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(2, 6, 32)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s, first: int = 0, ckpt: int = 0, mlp: bool = False):
    for number in range(first, 3):
        attention = s[f"blocks.{number}.attention"]
        attention["{q,k,v}"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
        attention["{q,v}"].shard("bias", axis=0)
        attention["o"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    if mlp:
        s["blocks.*.up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        s["blocks.*.down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    if ckpt:
        s["blocks"][:ckpt].checkpoint()
"""


class Package:
    """A package of sources below a folder, whose name no other test has."""

    def __init__(self, folder: Path, **files: str) -> None:
        self.folder, self.name = folder, f"pack_{folder.name}"
        self.path = folder / self.name
        self.path.mkdir()
        for name, text in {"__init__": "", **files}.items():
            (self.path / f"{name}.py").write_text(text)
        self.model = str(self.path / "model.py")

    def rewritten(self, schedule: str = SCHEDULE, *settings: str) -> Output:
        (self.folder / "s.py").write_text(schedule)
        return rewrite(self.model, str(self.folder / "s.py"), settings)

    def written(self, output: Output, name: str = "out") -> Path:
        write(self.folder / f"{name}_{self.name}", output.files)
        return self.folder / f"{name}_{self.name}"

    def refused(self, schedule: str, code: str) -> str:
        with pytest.raises(errors.RewriteError) as caught:
            self.rewritten(schedule)
        assert caught.value.code == code, caught.value.render()
        return caught.value.render()


@pytest.fixture
def package(tmp_path) -> Package:
    return Package(tmp_path, model=MODEL, blocks=BLOCKS, parts=PARTS)


def imported(out: Path, name: str):
    sys.path.insert(0, str(out.parent))
    try:
        return importlib.import_module(f"{out.name}.{name}")
    finally:
        sys.path.pop(0)


def test_the_files_that_change_are_copied_and_imported(package):
    output = package.rewritten()
    assert [n for n in output.files if n in ("model.py", "blocks.py", "parts.py")] == [
        *("blocks.py", "model.py", "parts.py")
    ]
    assert output.files["model.py"] == MODEL  # relative imports mean the copies
    assert "self.q = ColumnParallelLinear(dim, dim)" in output.files["blocks.py"]
    assert "from .parts import INNER, Core, Norm\n" in output.files["blocks.py"]
    assert "self.heads = part_size(self.heads)" in output.files["parts.py"]
    assert "# as it came" in output.files["parts.py"]
    heads = [x for x in output.files["rewrite.diff"].splitlines() if x.startswith("+++ ")]
    assert heads == ["+++ rewritten/blocks.py", "+++ rewritten/parts.py"]


def test_there_is_one_class_of_each_name(package):
    out = package.written(package.rewritten())
    model, blocks = imported(out, "model"), imported(out, "blocks")
    parts = imported(out, "parts")
    assert model.Norm is blocks.Norm is parts.Norm
    assert model.Model().norms == imported(package.path, "model").Model().norms == 4


def test_only_what_is_reached_into_is_copied(package):
    output = package.rewritten(SCHEDULE, "first=3", "ckpt=2")
    assert "blocks.py" not in output.files and "parts.py" not in output.files
    name = package.name
    assert f"from {name}.blocks import Block\n" in output.files["model.py"]
    assert "class CheckpointedBlock(Block):" in output.files["model.py"]
    output = package.rewritten(SCHEDULE, "first=3", "mlp=true")
    assert "parts.py" not in output.files
    assert "from .blocks import Block\n" in output.files["model.py"]
    assert f"from {name}.parts import Norm\n" in output.files["model.py"]
    assert f"from {name}.parts import INNER, Core, Norm\n" in output.files["blocks.py"]
    diff = package.rewritten(SCHEDULE, "first=3").diff(0)
    assert diff.startswith("# model.py: 2 relative imports of the original made absolute")
    assert diff.count("\n-") == 0


def test_instances_that_differ_have_a_subclass_that_the_model_picks(package):
    output = package.rewritten(SCHEDULE, "first=1", "ckpt=2")
    assert "class TensorParallelCore(Core):" in output.files["parts.py"]
    assert "from .parts import INNER, Core, Norm, TensorParallelCore" in output.files["blocks.py"]
    text = output.files["model.py"]
    assert "from .blocks import Block, TensorParallelBlock\n" in text
    assert "class CheckpointedTensorParallelBlock(TensorParallelBlock):" in text


@pytest.mark.long
@pytest.mark.processes
def test_numbers_of_a_model_in_three_files(package):
    out = package.written(package.rewritten(SCHEDULE, "first=1", "ckpt=2", "mlp=true"))
    report = verify(out, [1, 2, 4], source=package.model, schedule=str(package.folder / "s.py"))
    assert report.ok, report.render()


DPR = """import torch
from transformers import DPRConfig

SMALL = dict(hidden_size=64, num_attention_heads=8, intermediate_size=128, num_hidden_layers=2)


def model(m):
    return m.DPRQuestionEncoder(DPRConfig(**SMALL))


def inputs(model):
    return {"input_ids": torch.randint(0, 11, (2, 7))}


def loss(outputs):
    return outputs.pooler_output[:, :9].square().mean()


def schedule(s):
    layers = s["question_encoder.bert_model.encoder.layer.*"]
    for name in ("query", "key", "value"):
        layers[f"attention.self.{name}"].shard(["weight", "bias"], axis=0)
        layers[f"attention.self.{name}"].sync("bwd_post", "all_reduce")
    layers["attention.output.dense"].shard("weight", axis=1)
    layers["attention.output.dense"].sync("fwd_post", "all_reduce")
"""


@pytest.mark.processes
def test_a_transformers_model_that_uses_another_one(tmp_path):
    (tmp_path / "s.py").write_text(DPR)
    source, schedule = "transformers.models.dpr.modeling_dpr", str(tmp_path / "s.py")
    output = rewrite(source, schedule)
    assert "from .modeling_bert import BertModel\n" in output.files["modeling_dpr.py"]
    assert "ColumnParallelLinear" not in output.files["modeling_dpr.py"]
    bert = output.files["modeling_bert.py"]
    assert "from transformers.activations import ACT2FN\n" in bert
    assert bert.count("ColumnParallelLinear(") == 3
    write(tmp_path / "out_dpr", output.files)
    report = verify(tmp_path / "out_dpr", [2], source=source, schedule=schedule)
    assert report.ok, report.render()


def test_a_change_of_the_other_file_is_noticed(package, capsys):
    package.written(package.rewritten(), "out")
    schedule, out = str(package.folder / "s.py"), str(package.folder / f"out_{package.name}")
    call = [package.model, "--schedule", schedule, "-o", out]
    assert main([*call, "--check"]) == 0
    record = json.loads((Path(out) / "rewrite.json").read_text())
    assert record["copies"].keys() == {"blocks.py", "parts.py"}
    assert record["copies"]["parts.py"]["module"] == f"{package.name}.parts"
    (package.path / "parts.py").write_text(PARTS.replace("# as it came", "# merged"))
    capsys.readouterr()
    assert main([*call, "--check"]) == 1
    shown = capsys.readouterr().out
    assert f"{package.name}.parts has changed" in shown and "parts.py" in shown
    hand = (Path(out) / "parts.py").read_text().replace("INNER = 2", "INNER = 3")
    (Path(out) / "parts.py").write_text(hand)
    assert main(call) == 2
    assert main([*call, "--merge"]) == 0
    merged = (Path(out) / "parts.py").read_text()
    assert "# merged" in merged and "INNER = 3" in merged


def test_lines_of_a_copy_are_explained(package, capsys):
    out = package.written(package.rewritten())
    lines = (out / "parts.py").read_text().splitlines()
    number = lines.index("        self.heads = part_size(self.heads)") + 1
    assert main(["explain", str(out), f"parts.py:{number}"]) == 0
    assert 'attention["{q,k,v}"].shard' in capsys.readouterr().out
    assert main(["explain", str(out), "parts.py:1"]) == 0
    assert "as in the original" in capsys.readouterr().out
    number = (out / "blocks.py").read_text().splitlines().index("class Block(nn.Module):") + 1
    assert main(["explain", str(out), f"blocks.py:{number}"]) == 0
    assert "as in the original" in capsys.readouterr().out


def test_a_single_file_cannot_hold_two(package):
    (package.folder / "s.py").write_text(SCHEDULE)
    with pytest.raises(errors.Unsupported, match=r"changes both blocks\.py and model.py") as caught:
        rewrite(package.model, str(package.folder / "s.py"), single_file=True)
    assert "leave out --single-file" in caught.value.render()


# How the model may import what changes, and what becomes of that.
IMPORTS = [
    ("from {p}.blocks import Block as Layer", "Layer", "from .blocks import Block as Layer"),
    ("from {p} import blocks", "blocks.Block", "from . import blocks"),
    ("import {p}.blocks as layers", "layers.Block", "from . import blocks as layers"),
    ("import {p}.blocks", "{p}.blocks.Block", "from . import blocks"),
    ("from . import Block", "Block", "from .blocks import Block"),
    ("from .middle import Block", "Block", "from .blocks import Block"),
    ("from .middle import Holder", "Holder().block", "from .middle import Holder"),
]
MIDDLE = """from .blocks import Block


class Holder:
    block = Block
"""


@pytest.mark.parametrize(("line", "use", "becomes"), IMPORTS)
def test_ways_to_import_what_changes(line, use, becomes, tmp_path):
    name = f"pack_{tmp_path.name}"
    text = MODEL.replace("from .blocks import Block", line.format(p=name))
    text = text.replace("[Block(dim, heads)", f"[{use.format(p=name)}(dim, heads)")
    package = Package(tmp_path, model=text, blocks=BLOCKS, parts=PARTS, middle=MIDDLE)
    (package.path / "__init__.py").write_text("from .blocks import Block\n")
    output = package.rewritten()
    assert becomes in output.files["model.py"].splitlines()
    assert ("middle.py" in output.files) is ("Holder" in use)
    out = package.written(output)
    model = imported(out, "model").Model()
    assert type(model.blocks[0]).__module__ == f"{out.name}.blocks"
    assert model.norms == 4
    x = torch.randn(2, 6, 32)
    other = imported(package.path, "model").Model()
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(model(x), other(x))


def test_what_changed_is_imported_by_name_after_a_star(tmp_path):
    text = MODEL.replace("import Block\n", "import *\n")
    package = Package(tmp_path, model=text, blocks=BLOCKS, parts=PARTS)
    output = package.rewritten()
    star = f"from {package.path.name}.blocks import *"
    assert f"{star}\nfrom .blocks import Block\n" in output.files["model.py"]
    out = package.written(output)
    model = imported(out, "model").Model()
    assert type(model.blocks[0]).__module__ == f"{out.name}.blocks"


REGISTRY = """from .blocks import Block


class Auto:
    known = {"block": Block}

    @classmethod
    def make(cls, *args):
        return cls.known["block"](*args)


class Late:
    @staticmethod
    def make(*args):
        import importlib

        return importlib.import_module("{p}.blocks").Block(*args)
"""


@pytest.mark.parametrize("name", ["Auto", "Late"])
def test_what_makes_a_class_that_changes(name, tmp_path):
    """A registry that names the class is copied with it; one that looks it up cannot know of it."""
    text = MODEL.replace("from .blocks import Block", f"from .registry import {name}")
    text = text.replace("[Block(dim", f"[{name}.make(dim")
    registry = REGISTRY.replace("{p}", f"pack_{tmp_path.name}")
    package = Package(tmp_path, model=text, blocks=BLOCKS, parts=PARTS, registry=registry)
    if name == "Auto":
        out = package.written(package.rewritten())
        assert (out / "registry.py").is_file()
        assert type(imported(out, "model").Model().blocks[0]).__module__ == f"{out.name}.blocks"
    else:
        shown = package.refused(SCHEDULE, "SR103")
        assert "only knows the original's class" in shown and "model.py:12" in shown


OWN = """from torch import nn

from .registry import Late


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.up = nn.Linear(dim, heads)

    def forward(self, x):
        return self.up(x).relu()


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.block = Block(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return self.down(self.block(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Late.make(32) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x
"""


KNOWS = "`layers.0` is a `Layer`, which changes, but the code that constructs it here only knows"


@pytest.mark.parametrize(
    "line, words",
    [
        ('layers.*.block"].checkpoint()', KNOWS),
        ("layers.*\"].inline('block')", KNOWS),
        ('layers.*"].checkpoint()', KNOWS),
    ],
)
def test_what_makes_a_class_of_the_models_own_file(line, words, tmp_path):
    """It would go on making the original's, and nothing of what was asked would be done."""
    registry = "class Late:" + REGISTRY.split("class Late:")[1]
    registry = registry.replace("{p}.blocks", f"pack_{tmp_path.name}.model")
    package = Package(tmp_path, model=OWN, registry=registry.replace("Block", "Layer"))
    schedule = f'{SCHEDULE.split("def sched")[0]}def schedule(s):\n    s["{line}\n'
    shown = package.refused(schedule, "SR103")
    assert words in shown and "imported by its name" not in shown


@pytest.mark.parametrize("where", ["source", "schedule"])
def test_the_originals_class_by_another_way(where, tmp_path):
    """Nobody sees it in the text, so the output's own model is looked at."""
    package = Package(tmp_path, model=OWN.replace("from .registry import Late", "import importlib"))
    module = f'importlib.import_module("{package.name}.model")'
    schedule = SCHEDULE.split("def sched")[0] + "def schedule(s):\n"
    schedule += '    s["layers.*.block"].checkpoint()\n'
    text = Path(package.model).read_text().replace("Late.make(32)", f"{module}.Layer(32)")
    if where == "schedule":
        text = text.replace(f"{module}.", "")
        schedule = schedule.replace("m.Model()", f"{module}.Model()")
        schedule = schedule.replace("import torch\n", "import importlib\n\nimport torch\n")
    Path(package.model).write_text(text)
    shown = package.refused(schedule, "SR103")
    assert (
        "in the output as well: the code that constructs it does not use the output's class"
        in shown
    )


def test_a_size_in_a_function_of_another_file(tmp_path):
    """All callers share the function, those with whole values too."""
    parts = PARTS.replace("self.split(", "split(").replace(
        "class Core",
        "def split(x):\n    return x.view(*x.shape[:2], 8, 4).transpose(1, 2)\n\n\nclass Core",
    )
    shown = Package(tmp_path, model=MODEL, blocks=BLOCKS, parts=parts).refused(SCHEDULE, "SR104")
    assert "in a function of no class" in shown and "parts.py:14" in shown


def test_names_that_clash(tmp_path):
    """A helper module has the name already."""
    package = Package(
        tmp_path, model=MODEL.replace(".parts", ".loading"),
        blocks=BLOCKS.replace(".parts", ".loading"), loading=PARTS,
    )  # fmt: skip
    output = package.rewritten()
    copy = f"{package.name}_loading"
    assert f"{copy}.py" in output.files
    assert f"from .{copy} import Norm\n" in output.files["model.py"]
    imported(package.written(output), "model").Model()


def test_lines_with_imports_that_became_absolute(tmp_path):
    """Not those that were absolute, nor a line of a docstring that reads as one."""
    text = 'from .a import b\n\nX = """\x0c\nfrom p.a import c\n"""\n'
    file = SourceFile(tmp_path / "p" / "m.py", "p.m", text, ast.parse(text))
    rewritten = f"from p.a import b\n{text.partition(chr(10))[2]}    from p.a import d\n"
    original = Original.of(file, rewritten)
    assert original.text == text
    assert original.absolute == "from p.a import b\n" + text.partition("\n")[2]
    assert original.lines == (1, 6)
    assert Original.of(file, text).lines == ()
