"""A model file may be called, and stored, as it likes."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from slapo_rewrite import errors
from slapo_rewrite.changes.imports import KERNEL_FILES, MODULES
from slapo_rewrite.changes.output_files import _RESERVED
from slapo_rewrite.cli import main
from slapo_rewrite.code.locate import free_name
from slapo_rewrite.emit.helpers import RUNTIME_ORDER
from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.primitives.shard import MLP, MODEL
from tests.rewriting import refused, rewritten, written

SHARDED = """\
def schedule(s):
    s["down"].shard("weight", axis=1)
    s["down"].sync("fwd_post", "all_reduce")
    s["up"].shard(["weight", "bias"], axis=0)
    s["up"].sync("bwd_post", "all_reduce")
"""
NAMES = {
    "net.py": "net.py",
    "loading.py": "loading_model.py",
    "tensor_parallel.py": "tensor_parallel_model.py",
    "modules.py": "modules_model.py",
    "kernels.py": "kernels_model.py",
    "kernels_eager.py": "kernels_eager_model.py",
    "eager.py": "eager.py",
    "pipeline.py": "pipeline_model.py",
    "typing.py": "typing.py",
    "torch.py": "torch.py",
    "transformers.py": "transformers.py",
    "queue.py": "queue.py",
    "schedule_file.py": "schedule_file.py",
    "slapo_rewrite.py": "slapo_rewrite.py",
    "slapo_rewrite_output.py": "slapo_rewrite_output.py",
    "my-model.py": "my_model.py",
    "2net.py": "model_2net.py",
    "a b.py": "a_b.py",
    "class.py": "class_model.py",
    "net.v2.py": "net_v2.py",
    "größe.py": "größe.py",
    "\ufb01le.py": "file.py",  # which Python would look for by letters, not by their ligature
    "__main__.py": "main.py",
    "pkg/__init__.py": "pkg.py",
    "pkg/loading.py": "pkg_loading.py",
    "weights/__init__.py": "weights_model.py",
    "setup.py": "setup.py",
    "conftest.py": "conftest.py",
}


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Writes a source of this name, and gives the command that rewrites it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = dict(sys.modules)
    (tmp_path / "s.py").write_text(MODEL + SHARDED)

    def command(name: str, source: str | bytes = MLP) -> list[str]:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if path.parent != tmp_path:
            (path.parent / "__init__.py").touch()
        path.write_bytes(source.encode() if isinstance(source, str) else source)
        return [name, "--schedule", "s.py", "-o", "out"]

    yield command
    for name in set(sys.modules) - set(before):
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]
    for name in ("__main__", "typing", "torch", "transformers", "queue", "slapo_rewrite"):
        assert sys.modules.get(name) is before.get(name)


@pytest.mark.parametrize(("name", "written"), NAMES.items())
def test_a_model_file_of_any_name(command, tmp_path, name, written, capsys):
    command = command(name)
    assert main(command) == 0, capsys.readouterr().err
    out = tmp_path / "out"
    assert {p.name for p in out.iterdir()} >= {written, "tensor_parallel.py", "loading.py"}
    assert "ColumnParallelLinear" in (out / written).read_text()
    assert json.loads((out / "rewrite.json").read_text())["source"]["file"] == written
    assert main([*command, "--check"]) == 0
    assert main(["explain", "out"]) == 0
    capsys.readouterr()
    assert main(["explain", "out", f"{written}:1"]) == 0
    sys.path.insert(0, str(tmp_path))
    try:
        model = importlib.import_module(f"out.{Path(written).stem}").MLP(8)
        assert type(model.up).__name__ == "ColumnParallelLinear"
    finally:
        for each in [n for n in sys.modules if n.split(".")[0] == "out"]:
            del sys.modules[each]


def test_every_helper_has_a_name_of_its_own():
    assert {*RUNTIME_ORDER, *KERNEL_FILES, MODULES, "pipeline"} <= _RESERVED
    assert free_name("net") == "net"
    assert free_name("typing") == "typing_"


@pytest.mark.parametrize("single", [[], ["--single-file"]])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
def test_a_file_keeps_its_mark_and_its_line_ends(command, tmp_path, bom, end, single, capsys):
    source = MLP.replace('"""', "'''") + 'TEXT = """one\ntwo"""\n'
    command = command("net.py", (bom + source.replace("\n", end)).encode())
    assert main([*command, *single]) == 0, capsys.readouterr().err
    data = (tmp_path / "out" / "net.py").read_bytes()
    assert data.startswith(bom.encode())
    text = data.decode().removeprefix(bom)
    assert "ColumnParallelLinear" in text
    assert set("\r\n") & set(text) == set(end)
    assert text.count("\r") == text.count("\n") or len(end) == 1
    assert main([*command, *single, "--check"]) == 0
    for line in (tmp_path / "net.py").read_bytes().decode().split(end):
        assert "nn.Linear" in line or line in data.decode().split(end)
    (tmp_path / "s.py").write_text(MODEL + "def schedule(s):\n    pass\n")
    assert main([*command, *single, "--force"]) == 0
    assert (tmp_path / "out" / "net.py").read_bytes() == (tmp_path / "net.py").read_bytes()


def test_a_schedule_with_a_mark_and_other_line_ends(command, tmp_path, capsys, monkeypatch):
    (tmp_path / "s.py").write_bytes(("\ufeff" + MODEL + SHARDED).replace("\n", "\r\n").encode())
    command = command("net.py")
    assert main(command) == 0, capsys.readouterr().err
    monkeypatch.setattr("slapo_rewrite.emit.rewrite.rewrite", None)
    assert main([*command, "--check"]) == 0, "from hashes alone"


@pytest.mark.parametrize(
    ("name", "source", "words"),
    [
        ("net.ipynb", '{"cells": []}', "is not a Python file"),
        ("net", MLP, "is not a Python file"),
        ("net.py", b"", "has no attribute 'MLP'"),
        ("net.py", b"\x7fELF\x00\x01", "null bytes"),
        ("net.py", b"\x80abc", "is not UTF-8"),
        ("net.py", b"# -*- coding: latin-1 -*-\n# gr\xf6\xdfer\n" + MLP.encode(), "latin-1"),
        ("net.py", f"import sys\nsys.exit(3)\n{MLP}", "SystemExit: 3"),
        ("net.py", f"from .other import x\n{MLP}", "cannot be imported"),
        (
            "net.py",
            MLP.replace("nn.Linear(width", "nn.LazyLinear(width").replace(
                "LazyLinear(width, ", "LazyLinear("
            ),
            "LazyLinear",
        ),
    ],
)
def test_a_source_that_is_none(command, tmp_path, name, source, words, capsys):
    assert main(command(name, source)) == 2
    shown = capsys.readouterr().err
    assert words in shown and "Traceback" not in shown
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [".", "folder", "folder/", "folder.py", "nothing.py"])
def test_a_source_that_is_a_folder_or_nothing(command, tmp_path, name, capsys):
    command = command("net.py")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.py").mkdir()
    assert main([name, *command[1:]]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["os", "torch", "torch.nn", "this", "sys", "json.decoder"])
def test_a_module_that_is_imported_already_stays_what_it_is(command, name, capsys):
    before = sys.modules.get(name)
    assert main([name, *command("net.py")[1:]]) == 2
    assert "no attribute 'MLP'" in capsys.readouterr().err or name == "sys"
    assert before in (None, sys.modules.get(name))


@pytest.mark.parametrize("change", ["tabs", "form feed", "separators"])
def test_other_white_space(command, tmp_path, change, capsys):
    source = MLP
    if change == "tabs":
        source = source.replace("    ", "\t")
    elif change == "form feed":
        source = source.replace("class ", "\x0cclass ", 1)
    else:
        source = source.replace("import torch\n", "X = 'a\x0c\x1c\u2028b'\nimport torch\n", 1)
    code = main(command("net.py", source))
    shown = capsys.readouterr().err
    assert code in (0, 2) and "Traceback" not in shown, shown
    if code == 0:
        assert main(["explain", "out"]) == 0


def test_tabs_where_lines_are_put_in(command, tmp_path, capsys):
    source = MLP.replace("    ", "\t").replace(
        "\t\tself.up", "\t\tself.n = 4 * width\n\t\tself.up", 1
    )
    source = source.replace("torch.relu(self.up(x))", "torch.relu(self.up(x)).view(-1, self.n)")
    assert main(command("net.py", source)) == 2
    assert "net.py is indented with tabs" in capsys.readouterr().err


def test_tabs_where_a_rule_is_applied(tmp_path):
    source = Path("tests/models/gpt.py").read_text().replace("    ", "\t")
    schedule = Path("tests/models/gpt_schedule.py").read_text()
    text = refused(tmp_path, source, schedule, "SR305", ("fuse=true",))
    assert "is indented with tabs" in text and "indent the file with spaces" in text


@pytest.mark.parametrize("call", ['["up"].checkpoint()', '.apply("bias_gelu")', ".infer_sync()"])
def test_methods_that_call_their_object_otherwise(call, tmp_path):
    schedule = MODEL + f"def schedule(s):\n    s{call}\n"
    text = refused(tmp_path, MLP.replace("self", "this"), schedule, "SR305")
    assert (
        "`MLP.__init__` names its first parameter `this`" in text and "rename it to `self`" in text
    )
    only = MLP.replace("def forward(self, x)", "def forward(me, x)").replace("(self.", "(me.")
    assert "`MLP.forward` names its first parameter `me`" in refused(
        tmp_path, only, schedule, "SR305"
    )


@pytest.mark.parametrize("call", ['["up"].checkpoint()', '["up"].shard("weight", axis=0)'])
def test_an_output_that_is_split_is_no_source(call, tmp_path):
    """Its helpers are of one folder, and what runs and loads it would be of another."""
    model = written(tmp_path, rewritten(tmp_path, MLP, MODEL + SHARDED))
    (tmp_path / "again.py").write_text(MODEL + f"def schedule(s):\n    s{call}\n")
    with pytest.raises(errors.Unsupported) as caught:
        rewrite(str(model), str(tmp_path / "again.py"))
    text = caught.value.render()
    assert "`up` is a ColumnParallelLinear" in text and "rewrite the original" in text


@pytest.mark.parametrize("folder", ["match", "_", "__x__", "größe", "模型", "type"])
def test_an_output_of_any_name_that_python_allows(command, tmp_path, folder):
    assert main([*command("net.py")[:-1], f"a b-c/{folder}"]) == 0
    sys.path.insert(0, str(tmp_path / "a b-c"))
    assert importlib.import_module(f"{folder}.net").MLP is not None
    exec(f"from {folder} import net", {})
