"""`--with NAME`: helpers that an output has only on request."""

import json

import pytest

from slapo_rewrite import errors
from slapo_rewrite.cli import main
from slapo_rewrite.emit.helpers import OPTIONAL
from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.primitives.shard import MLP, MODEL

SCHEDULE = (
    MODEL
    + """

def schedule(s):
    s["up"].shard(["weight", "bias"], axis=0)
    s["up"].sync("bwd_post", "all_reduce")
    s["down"].shard("weight", axis=1)
    s["down"].sync("fwd_post", "all_reduce")
"""
)


@pytest.fixture
def given(tmp_path):
    (tmp_path / "net.py").write_text(MLP)
    (tmp_path / "s.py").write_text(SCHEDULE)
    return str(tmp_path / "net.py"), str(tmp_path / "s.py")


def functions(files):
    return {
        line.removeprefix("def ").partition("(")[0]
        for name, text in files.items()
        if name.endswith(".py")
        for line in text.splitlines()
        if line.startswith("def ")
    }


def test_nothing_is_there_unasked(given):
    found = functions(rewrite(*given).files)
    assert "build" in found and "full_state_dict" in found
    assert not found & OPTIONAL.keys()


@pytest.mark.parametrize("name", OPTIONAL)
def test_what_is_asked_for_is_there(given, name):
    files = rewrite(*given, further=[name]).files
    assert OPTIONAL.keys() & functions({f"{OPTIONAL[name]}.py": files[f"{OPTIONAL[name]}.py"]}) == {
        name
    }
    assert json.loads(files["rewrite.json"])["with"] == [name]


def test_a_name_that_is_none(given):
    with pytest.raises(errors.UsageError, match="no helper `load_pretraned`") as caught:
        rewrite(*given, further=["load_pretraned"])
    assert "load_pretrained" in (caught.value.hint or "")


def test_an_output_is_current_with_the_same_helpers_only(given, tmp_path, capsys):
    source, schedule = given
    command = [source, "--schedule", schedule, "-o", str(tmp_path / "out")]
    further = ["--with", "save_pretrained", "--with", "load_pretrained"]
    assert main([*command, *further]) == 0
    assert main([*command, *further[2:], *further[:2], "--check"]) == 0
    capsys.readouterr()
    assert main([*command, "--check"]) == 1
    assert "further helpers were load_pretrained, save_pretrained, and are now none" in (
        capsys.readouterr().out
    )
