"""One folder of helpers for several outputs: all that they need together, and no more."""

from __future__ import annotations

import ast
import importlib
import json
import sys
from pathlib import Path

import pytest

from slapo_rewrite.cli import main
from slapo_rewrite.emit import record, support_folder
from tests.test_cli import SCHEDULE, SOURCE

UP = SCHEDULE.partition("    s[")[0] + '    s["up"].shard(["weight", "bias"], axis=0)\n'
UP += '    s["up"].sync("fwd_post", "all_gather", axis=-1)\n'


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(SOURCE)
    (tmp_path / "s.py").write_text(SCHEDULE)
    (tmp_path / "up.py").write_text(UP)


def write(out: str, schedule: str = "s.py", *more: str, support: str = "support") -> int:
    beside = ["--support", f"models/{support}"] if support else []
    return main(["net.py", "--schedule", schedule, "-o", f"models/{out}", *beside, *more])


def defined(module: str = "tensor_parallel", folder: str = "support") -> set[str]:
    tree = ast.parse(Path("models", folder, f"{module}.py").read_text())
    return {n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}


def held(folder: str) -> dict[str, str]:
    path = Path("models", folder)
    return {p.name: p.read_text() for p in path.iterdir() if p.is_file()} if path.exists() else {}


def outputs(folder: str = "support") -> list[str]:
    return list(record.read(Path("models", folder), record.SUPPORT)["outputs"])


def test_holds_what_its_outputs_use_and_no_more(capsys):
    assert write("both") == 0
    assert sorted(held("both")) == ["__init__.py", "net.py", "rewrite.diff", "rewrite.json"]
    assert "from ..support.tensor_parallel import" in held("both")["net.py"]
    assert "its helpers are in models/support" in capsys.readouterr().out
    assert "load_pretrained" not in defined("loading")
    assert write("reads", "up.py", "--with", "load_pretrained") == 0
    assert {"RowParallelLinear", "ColumnParallelLinear"} <= defined()
    assert "load_pretrained" in defined("loading")
    assert outputs() == ["both", "reads"]
    # What only the first one used goes when it is written anew.
    Path("s.py").write_text(UP)
    assert write("both") == 0
    assert "RowParallelLinear" not in defined()
    assert {"ColumnParallelLinear"} <= defined()
    assert "load_pretrained" in defined("loading")


def test_of_a_second_run_nothing_changes(capsys):
    assert write("one") == write("other", "up.py") == 0
    before = held("one"), held("support")
    assert write("one") == 0
    assert (held("one"), held("support")) == before
    for name, schedule in (("one", "s.py"), ("other", "up.py")):
        assert write(name, schedule, "--check") == 0
    assert "models/one is current" in capsys.readouterr().out


@pytest.mark.processes
def test_is_imported_and_verified(tmp_path, monkeypatch, capsys):
    assert write("one", "s.py", "--verify", "--world", "2") == 0
    assert write("other", "up.py") == 0
    assert main(["verify", "models/one", "--world", "1", "2"]) == 0
    # A package of that name in another test's folder would come first, this one having no __init__.
    others = [path for path in sys.path if not Path(path, "models").is_dir()]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *others])
    forget_models()
    try:
        one, other = (importlib.import_module(f"models.{name}.net") for name in ("one", "other"))
        assert one.ColumnParallelLinear is other.ColumnParallelLinear
        assert one.ColumnParallelLinear.__module__ == "models.support.tensor_parallel"
    finally:
        forget_models()


def forget_models() -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "models"]:
        del sys.modules[name]


def spoil_a_helper() -> None:
    with Path("models/support/tensor_parallel.py").open("a") as file:
        file.write("# mine\n")


def lose_a_helper() -> None:
    Path("models/support/tensor_parallel.py").unlink()


def lose_the_folder() -> None:
    for path in Path("models/support").iterdir():
        path.unlink()


def forget_the_output() -> None:
    """As where a branch without this output is merged."""
    path = Path("models/support/support.json")
    content = json.loads(path.read_text())
    del content["outputs"]["one"]
    path.write_text(json.dumps(content))


def write_it_by_itself() -> None:
    assert write("one", support="") == 0


def test_check_says_no(capsys):
    assert write("one") == 0
    for spoil in (
        *(spoil_a_helper, lose_a_helper, lose_the_folder, forget_the_output),
        write_it_by_itself,
    ):
        spoil()
        assert write("one", "s.py", "--check") == 1, spoil.__name__
        assert "not current: " in capsys.readouterr().out
        assert write("one", "s.py", "--force") == 0
        assert write("one", "s.py", "--check") == 0, spoil.__name__


def test_check_says_no_where_helpers_are_beside_the_model(capsys):
    assert write("one") == 0
    assert write("one", "s.py", "--check", support="") == 1
    assert write("one", "s.py", "--check", support="other") == 1


def test_an_edited_helper_is_not_overwritten(capsys):
    assert write("one") == 0
    spoil_a_helper()
    before = held("support")
    assert write("two", "up.py") == 2
    assert held("support") == before and held("two") == {}
    shown = capsys.readouterr().err
    assert "`models/support` holds changes that were not written by slapo-rewrite" in shown
    assert "--force overwrites them" in shown
    assert write("two", "up.py", "--force") == 0
    assert "# mine" not in held("support")["tensor_parallel.py"]


def test_where_the_output_is_refused_its_helpers_stay(capsys):
    assert write("one") == 0
    path = Path("models/one/net.py")
    path.write_text(path.read_text() + "# mine\n")
    before = held("support")
    Path("s.py").write_text(UP)
    assert write("one", "s.py", "--with", "load_pretrained") == 2
    assert held("support") == before
    assert write("one", "s.py", "--merge") == 0
    assert path.read_text().endswith("# mine\n")
    assert "RowParallelLinear" not in defined()


def test_at_every_moment_it_holds_what_the_output_imports(monkeypatch):
    """Whenever the run is cut off."""
    assert write("one") == 0
    seen: list[set[str]] = []

    def cut_off(*given: object, **how: object) -> None:
        seen.append(defined() | defined("loading"))
        raise KeyboardInterrupt

    monkeypatch.setattr(support_folder, "write", cut_off)
    before = held("support")
    assert write("one", "up.py", "--with", "load_pretrained") == 130
    assert {"RowParallelLinear", "load_pretrained"} <= seen[0]
    assert held("support") == before


def test_an_output_that_is_gone_or_written_otherwise_is_not_counted():
    assert write("one") == write("two", "up.py") == write("three", "up.py") == 0
    Path("models/one").rename("models/moved")
    assert write("two", "up.py", support="another") == 0
    assert write("three", "up.py", "--check") == 1
    assert write("three", "up.py") == 0
    assert outputs() == ["moved", "three"]
    assert outputs("another") == ["two"]


def test_one_that_cannot_be_read_any_more_is_not_taken_for_gone(capsys):
    assert write("one") == write("two", "up.py") == 0
    Path("models/one/rewrite.json").write_text("<<<<<<< ours\n")
    assert write("two", "up.py") == 2
    assert "models/one/rewrite.json` cannot be read" in capsys.readouterr().err
    assert write("one", "s.py") == 2, "an output of mine no more"


def by_another_tool() -> None:
    """As another version of the tool would have left it, which has other helpers."""
    path = Path("models/support")
    content = json.loads((path / "support.json").read_text())
    text = (path / "tensor_parallel.py").read_text() + "# as it was then\n"
    (path / "tensor_parallel.py").write_text(text)
    content["files"]["tensor_parallel.py"] = record.digest(text)
    content["tool"]["digest"] = "0" * 64
    (path / "support.json").write_text(json.dumps(content))


def test_what_others_import_is_not_changed_under_them(capsys):
    assert write("one") == write("two", "up.py") == 0
    by_another_tool()
    before = held("support"), held("two")
    assert write("two", "up.py") == 2
    assert (held("support"), held("two")) == before
    shown = capsys.readouterr().err
    assert "error[SR406]" in shown and "the helpers that one import" in shown
    # As it advises: another folder, for the others as well.
    assert write("two", "up.py", support="newer") == 0
    assert write("one", support="newer") == 0
    assert write("one", "s.py", "--check", support="newer") == 0
    # Or by force, and the others again.
    by_another_tool()
    assert write("two", "up.py") == 0, "nobody else is left there"
    assert write("one") == 0
    by_another_tool()
    assert write("two", "up.py", "--force") == 0
    assert write("one") == 0
    assert write("one", "s.py", "--check") == write("two", "up.py", "--check") == 0


def test_nor_is_anything_said_where_another_tool_has_the_same_helpers():
    assert write("one") == write("two", "up.py") == 0
    path = Path("models/support/support.json")
    path.write_text(path.read_text().replace(record.tool_digest(), "0" * 64))
    assert write("two", "up.py", "--check") == 0
    assert write("two", "up.py") == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["-o", "models/out", "--support", "support"], "give `--support models/support`"),
        (["-o", "models/out", "--support", "models/out"], "give `--support models/support`"),
        (["-o", "models/out", "--support", "models/my-own"], "`my-own` cannot be imported"),
        (
            ["-o", "my-own/out", "--support", "my-own/it"],
            "`-o models/out --support models/support`",
        ),
        (["-o", "torch/out", "--support", "torch/it"], "hide the module `torch`"),
        (["-o", "models/out", "--support", "models/it", "--single-file"], "give one"),
    ],
)
def test_a_folder_that_could_not_be_imported_from(given, words, capsys):
    assert main(["net.py", "--schedule", "s.py", *given]) == 2
    assert words in capsys.readouterr().err
    assert not Path("models/out").exists()


def test_a_folder_of_somebody_else(capsys):
    Path("models/support").mkdir()
    Path("models/support/tensor_parallel.py").write_text("mine\n")
    assert write("one", "s.py", "--force") == 2
    assert (
        "not written by slapo-rewrite, and already holds tensor_parallel.py"
        in capsys.readouterr().err
    )
    assert held("support") == {"tensor_parallel.py": "mine\n"}
    assert write("one", support="") == 0
    assert write("two", support="one") == 2, "an output is none"


def test_explain_and_diff(capsys):
    assert write("one", "s.py", "--diff") == 0
    assert "+from ..support.tensor_parallel import" in capsys.readouterr().out
    assert write("one") == 0
    capsys.readouterr()
    assert main(["explain", "models/one"]) == 0
    shown = capsys.readouterr().out
    names = ("guards", "loading", "shards", "tensor_parallel")
    files = ", ".join(f"../support/{name}.py" for name in names)
    assert f"{files}  what the model file calls\n" in shown
    lines = held("one")["net.py"].splitlines()
    number = next(n for n, line in enumerate(lines, 1) if "self.down = " in line)
    assert main(["explain", "models/one", f"net.py:{number}"]) == 0
    assert 's["down"].shard' in capsys.readouterr().out
    for name in ("tensor_parallel.py", "models/support/tensor_parallel.py"):
        assert main(["explain", "models/one", f"{name}:9"]) == 0
        assert 's["up"].shard' in capsys.readouterr().out


def test_what_the_schedule_defines_stays_with_the_output():
    """And imports from the folder as well."""
    own = """\
import torch
from torch import nn

from slapo_rewrite.runtime.rng import mixed


class Numbered(nn.Linear):
    number = mixed(1, 2)
"""
    text = SCHEDULE.replace("import torch\n", own)
    Path("s.py").write_text(text.partition("    s[")[0] + '    s["down"].replace(Numbered)\n')
    assert write("one") == 0
    assert "\nfrom .modules import Numbered\n" in held("one")["net.py"]
    assert "\nfrom ..support.rng import mixed\n" in held("one")["modules.py"]
    assert defined("rng") == {"mixed"}
    assert write("one", "s.py", "--check") == 0


@pytest.mark.long
@pytest.mark.processes
def test_outputs_of_two_models(capsys):
    """One of which has stages, and the other kernels."""
    stages = ["--set", "pipeline_stages=2", "--set", "pipeline_engine=torch"]
    given = {}
    for name, settings in (("bert", stages), ("llama", ["--set", "fuse=true"])):
        given[name] = [f"transformers.models.{name}.modeling_{name}", "--schedule", name]
        given[name] += ["-o", f"models/{name}", "--support", "models/support"]
        assert main([*given[name], *settings]) == 0
    shown = held("bert")["pipeline.py"]
    assert shown.index("from ..support.torch_pipeline ") < shown.index("from .modeling_bert ")
    assert main(["verify", "models/bert", "--world", "2", "--pp", "2"]) == 0, capsys.readouterr()
    assert main(["verify", "models/llama", "--world", "2"]) == 0, capsys.readouterr()
    assert main([*given["bert"], *stages, "--check"]) == 0
    assert "shard_parameter" in defined()  # which only BERT needs
    assert main([*given["bert"], "--set", "tensor_parallel=false"]) == 0
    assert "shard_parameter" not in defined()
    assert "swiglu" in defined("kernels")
    assert main([*given["llama"], "--set", "fuse=true", "--check"]) == 0
