"""Imports cost most of a command's time: which ones a command avoids."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from slapo_rewrite.model.meta_build import on_meta
from slapo_rewrite.model.meta_device import without_dynamo

ROOT = Path(__file__).parents[1]
GPT = ["tests/models/gpt.py", "--schedule", "tests/models/gpt_schedule.py"]
COMMAND = """\
import json, sys
from slapo_rewrite.cli import main
code = main(sys.argv[1:])
print()
print(json.dumps([code, sorted(sys.modules)]))
"""


def imported_by(*arguments: str) -> set[str]:
    """The modules that a command imports, which has to end well."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    code, modules = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, done.stderr
    return set(modules)


def test_a_command_imports_what_it_needs_and_no_torch_where_nothing_has_changed(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("SLAPO_REWRITE_CACHE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    out = ("-o", str(tmp_path / "gpt_out"))
    modules = imported_by(*GPT, *out)
    # A model of torch alone needs no tracer, and a schedule the primitives that it calls.
    assert {"torch", "slapo_rewrite.primitives.shard"} <= modules
    assert not modules & {"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "triton"}
    unused = ("primitives.fuse", "fusion", "patterns", "stages", "simulate", "model.costs")
    assert not modules & {f"slapo_rewrite.{name}" for name in unused}
    imported_by(*GPT, "--diff")
    for options in (out, (*out, "--check"), ("--diff",)):
        assert not imported_by(*GPT, *options) & {"torch", "libcst", "black"}


TOLD = """\
import os, sys
from slapo_rewrite.commands import answers
answers.working = lambda what: os._exit("torch" in sys.modules)
from slapo_rewrite.cli import main
main(sys.argv[1:])
os._exit(2)
"""


@pytest.mark.parametrize(
    "arguments",
    [[*GPT, "--diff"], ["plan", *GPT, "--gpus", "8", "--batch", "8"]],
    ids=["rewriting", "planning"],
)
def test_a_command_says_that_it_works_before_it_imports_torch(arguments, tmp_path):
    """Which takes seconds, in which a terminal would show nothing."""
    kept = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    assert (
        subprocess.run([sys.executable, "-c", TOLD, *arguments], cwd=ROOT, env=kept).returncode == 0
    )


@pytest.mark.long
def test_torch_is_left_as_it_was():
    """Functions that tell the tracer to leave them alone still do, where it is used later."""
    code = (
        "import sys, torch\n"
        "from slapo_rewrite.model.meta_device import without_dynamo\n"
        "x = torch.ones(2, device='meta')\n"
        "with without_dynamo():\n"
        "    with without_dynamo():\n"
        "        torch.rsqrt(x)\n"
        "    torch.nn.functional.gelu(x / 2)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "torch.rsqrt(x)\n"
        "assert 'torch._dynamo' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_numbers_are_not_drawn_on_the_meta_device():
    filled = []
    with without_dynamo(), on_meta(), torch.no_grad():
        table = nn.Embedding(4, 8)
        filled.append(table.weight._version)
        nn.init.normal_(table.weight)
        nn.init.normal_(tensor=table.weight)
        filled.append(table.weight._version)
    assert filled[0] == filled[1] == 0


@pytest.mark.parametrize("command", [(), ("shard",), ("swiglu",)], ids=" ".join)
def test_what_primitives_are_is_read_from_their_text(command):
    modules = imported_by("primitives", *command)
    assert "slapo_rewrite.primitives.page" in modules
    assert not modules & {"torch", "libcst", "slapo_rewrite.primitives.shard"}


@pytest.mark.long
def test_the_program_ends_in_silence():
    """Nothing that it imported complains of not being taken apart; what it printed is all there."""
    source = "transformers.models.bert.modeling_bert"
    command = [sys.executable, "-m", "slapo_rewrite", source, "--schedule", "bert", "--diff"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("# modeling_bert.py: ") and done.stdout.endswith("\n")
    wrong = subprocess.run([*command, "--check"], capture_output=True, cwd=ROOT, check=False)
    assert wrong.returncode == 2 and wrong.stderr.startswith(b"error")
