"""Kernels copied from their files into an output work, and read well."""

import ast
import os
import re
import subprocess
import sys
import textwrap

import black
import pytest

from slapo_rewrite.emit import kernels
from slapo_rewrite.emit.helpers import RUNTIME
from slapo_rewrite.emit.used_definitions import Definitions
from tests.runtime.kernels.picked import ORDER, PUBLIC, one_file

FILES = sorted((RUNTIME / "kernels").glob("*.py"))


def test_every_file_is_known():
    assert {path.stem for path in FILES} - {"__init__"} == set(ORDER)


@pytest.mark.long
@pytest.mark.parametrize("name", PUBLIC)
def test_a_kernel_stands_alone(name, tmp_path):
    text = one_file(name)
    mode = black.Mode()
    assert black.format_str(text, mode=mode) == text
    names = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
    defined = {
        n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef | ast.ClassDef)
    }
    assert name in defined
    assert defined - {name} <= names, "something is defined that nothing uses"
    path = tmp_path / "kernels.py"
    path.write_text(text)
    rules = ["--select", "E,F,I,B,UP", "--ignore", "E501,I001", "--isolated", str(path)]
    done = subprocess.run(["ruff", "check", *rules], capture_output=True, text=True, env=path_env())
    assert done.returncode == 0, done.stdout


def path_env() -> dict[str, str]:
    return {**os.environ, "PATH": os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]}


def test_the_guarded_import_is_picked_with_what_it_binds():
    library = Definitions((RUNTIME / "kernels" / "launch.py").read_text())
    assert "except ImportError:" in library.pick({"tl"}).body
    assert "def jit" not in library.pick({"triton"}).body
    assert "import triton\n" in library.pick({"jit"}).body
    assert "@jit\ndef tanh_tile(x):" in one_file("cross_entropy")


SCRIPT = """
    import sys
    if not {triton}:
        sys.modules["triton"] = None  # importing it fails
    import torch
    import kernels as k
    x, w = torch.ones(2, 3, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    q, labels = torch.ones(1, 2, 3, 8, requires_grad=True), torch.zeros(2, 3).long()
    outputs = (
        k.rms_norm(x, w), *k.residual_rms_norm(x, x, w), k.layer_norm(x, w, w),
        *k.residual_layer_norm(x, x, w, w, dropout=0.5), k.swiglu(x, x), k.geglu(x, x, "tanh"),
        k.dropout_residual(x, x, dropout=0.5), k.reglu(x, x), k.gated(x, x, "relu", dropout=0.5),
        k.bias_activation(x, w, "quick_gelu", dropout=0.5),
        k.bias_gelu(x, w), *k.rotary(q, q, x[:1].detach(), x[:1].detach()),
        k.cross_entropy(x, labels), k.linear_cross_entropy(x, torch.ones(20, 8), labels),
        k.masked_softmax(x, None, 0.5, labels[..., None] == 0),
    )
    sum(o.sum() for o in outputs).backward()
    assert x.grad is not None and w.grad is not None and q.grad is not None
    print(k.runs_triton(x), "slapo_rewrite" in sys.modules)
"""


@pytest.mark.long
@pytest.mark.parametrize("triton", [False, True], ids=["without_triton", "interpreted"])
def test_all_of_them_run_from_one_file(triton, tmp_path):
    (tmp_path / "kernels.py").write_text(one_file(*PUBLIC))
    environment = {"TRITON_INTERPRET": "1"} if triton else {}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT.format(triton=triton))],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.stdout == f"{triton} False\n", done.stdout + done.stderr


def test_a_letter_means_the_same_in_every_file():
    known: dict[str, str] = {}
    for library in kernels.libraries().values():
        for letter, meaning in kernels.legend_of(ast.get_docstring(library.tree) or "").items():
            assert known.setdefault(letter, meaning) == meaning


def test_the_head_says_each_letter_once_and_each_part_what_it_is():
    picked = kernels.picked(["masked_softmax", "rotary", "rms_norm", "cross_entropy"])
    assert picked.docstring is not None and "Shapes: M rows, " in picked.docstring
    letters = re.findall(r"(?<=[ \n])[A-Z](?= )", picked.docstring.partition("Shapes:")[2])
    assert len(letters) == len(set(letters)) > 5
    assert max(map(len, picked.docstring.splitlines())) <= 88
    assert "\n\n\n# Rotary position embedding of queries and keys" in picked.body
