"""`--check` knows every file of the user's that an output depends on."""

from __future__ import annotations

import json
import os
import py_compile
import sys

import pytest

from slapo_rewrite.cli import main
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.own_files import is_own
from slapo_rewrite.emit import inputs
from slapo_rewrite.primitives.shard import MLP, MODEL
from slapo_rewrite.schedule.source_module import import_source

SCHEDULE = """\
def schedule(s):
    if SHARD:
        s["down"].shard("weight", axis=1)
        s["down"].sync("fwd_post", "all_reduce")
        s["up"].shard(["weight", "bias"], axis=0)
        s["up"].sync("bwd_post", "all_reduce")
"""


@pytest.fixture
def command(tmp_path, monkeypatch, request) -> list[str]:
    """A source and a schedule that take constants from elsewhere, in several ways."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    known = set(sys.modules)
    for folder in ("package", "package/inner"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("")
    texts = {
        "helper.py": "from deeper import SHARD\n",
        "deeper.py": "import importlib\nSHARD = importlib.import_module('by_name').SHARD\n",
        "by_name.py": "SHARD = True\n",
        "package/net.py": "from .sizes import SCALE\nfrom . import inner\n" + MLP,
        "package/sizes.py": "from .inner.most import SCALE\n",
        "package/inner/most.py": "SCALE = 1\n",
        "s.py": "from helper import SHARD\n" + MODEL + SCHEDULE,
        "unused.py": "",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    command = ["package/net.py", "--schedule", "s.py", "-o", "out"]
    yield command
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


def test_every_module_of_the_user_s_is_an_input(command, tmp_path, monkeypatch, capsys):
    assert main(command) == 0
    content = json.loads((tmp_path / "out" / "rewrite.json").read_text())
    names = {"helper", "deeper", "by_name", "package", "package.sizes", "package.inner"}
    assert content["depends"].keys() == names | {"package.inner.most"}
    assert set(content["packages"]) == {"torch"}
    capsys.readouterr()
    for line, why in ((1, "an import made absolute"), (3, "as in the original")):
        assert main(["explain", "out", f"net.py:{line}"]) == 0
        assert why in capsys.readouterr().out
    assert main([*command, "--check"]) == 0
    with monkeypatch.context() as patch:  # from hashes alone
        patch.setattr("slapo_rewrite.emit.rewrite.rewrite", None)
        assert main([*command, "--check"]) == 0
    (tmp_path / "unused.py").write_text("SHARD = 1\n")
    assert main([*command, "--check"]) == 0
    for path in ("helper.py", "by_name.py", "package/inner/most.py", "package/__init__.py"):
        text = (tmp_path / path).read_text()
        (tmp_path / path).write_text(text + "\n")
        capsys.readouterr()
        assert main([*command, "--check"]) == 1, path
        name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        assert f"{name} has changed" in capsys.readouterr().out
        (tmp_path / path).write_text(text)
    assert main([*command, "--check"]) == 0


def test_an_input_is_never_written_over(command, tmp_path, capsys):
    for out in (".", "package"):
        assert main([*command[:-1], out, "--force"]) == 2
        assert f"`{out}` was not written by slapo-rewrite" in capsys.readouterr().err
    assert not (tmp_path / "rewrite.json").exists()
    assert (tmp_path / "package" / "__init__.py").read_text() == ""


REGISTRY = """\
KNOWN = {}


def register(cls):
    assert cls.__name__ not in KNOWN, "twice"
    return KNOWN.setdefault(cls.__name__, cls)
"""


def test_a_registry_that_takes_each_name_once(command, tmp_path):
    (tmp_path / "package" / "known.py").write_text(REGISTRY)
    path = tmp_path / "package" / "net.py"
    text = path.read_text().replace("class MLP", "@register\nclass MLP")
    path.write_text("from package.known import register\n" + text)
    assert main(command) == 0
    known = sys.modules["package.known"]
    assert known.KNOWN["MLP"] is sys.modules["package.net"].MLP, "and is as it was"


def test_a_record_that_was_tampered_with_imports_nothing(command, tmp_path, capsys):
    assert main(command) == 0
    path = tmp_path / "out" / "rewrite.json"
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "__init__.py").write_text("raise SystemExit('imported')\n")
    content = json.loads(path.read_text())
    for name in ("evil.inside", "evil", "../secret", "/etc/passwd", "a..b", "", "evil.__init__"):
        path.write_text(json.dumps({**content, "depends": {name: "x"}}))
        assert main([*command, "--check"]) == 1
        assert "imported" not in capsys.readouterr().err
        assert "evil" not in sys.modules
    assert inputs.find("../secret", tmp_path / "x.py", tmp_path / "s.py") is None


@pytest.mark.parametrize("path", ["json", "torch", "slapo_rewrite.cli", "slapo_rewrite"])
def test_what_is_installed_is_not_the_user_s(path):
    __import__(path)
    assert not is_own(str(sys.modules[path].__file__))


def test_the_source_is_run_as_it_was_read(tmp_path, monkeypatch):
    """Bytecode beside it may be of another text, of the same length and second."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "of_one_second.py"
    for value in ("1", "2"):
        path.write_text(f"VALUE = {value}\n")
        os.utime(path, (1_700_000_000, 1_700_000_000))
        assert str(import_source(SourceFile.read(path)).VALUE) == value
        py_compile.compile(str(path))
