"""A rewrite leaves no import behind that it made idle, and takes none that was idle before."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.splice import Edit, apply_edits
from slapo_rewrite.emit.rewritten_text import idle_imports
from slapo_rewrite.primitives.shard import MLP, MODEL
from tests.rewriting import changed_lines, rewritten

SCHEDULE = (
    MODEL
    + """\
def schedule(s):
    s["up"].shard(["weight", "bias"], axis=0)
    s["up"].sync("bwd_post", "all_reduce")
    s["down"].shard("weight", axis=1)
    s["down"].sync("fwd_post", "all_reduce")
"""
)
PLAIN = MLP.replace("nn.Linear", "Linear")
LINEAR = "from torch.nn import Linear\n"
BOTH = "from torch.nn import GELU, Linear\n"


@pytest.mark.parametrize(
    ("imports", "changed"),
    [
        (LINEAR, f"-{LINEAR}"),
        (BOTH, f"-{BOTH}+from torch.nn import GELU\n"),
        ("from torch.nn import Linear  # a reason\n", ""),
        (f'{LINEAR}\n__all__ = ["Linear"]\n', ""),
    ],
)
def test_idle_imports(tmp_path, imports, changed):
    source = PLAIN.replace("from torch import nn\n", f"from torch import nn\n{imports}")
    output = rewritten(tmp_path, source, SCHEDULE)
    compile(output.files[output.model_file], "net.py", "exec")
    lines = changed_lines(output).splitlines(keepends=True)
    about_torch = [x for x in lines if "from torch" in x]
    assert "".join(about_torch) == changed
    assert "+from .tensor_parallel import ColumnParallelLinear, RowParallelLinear\n" in lines


def test_a_relative_import_that_becomes_idle():
    text = "from .layers import Conv1D, Norm\n\nx = Conv1D()\ny = Norm()\n"
    file = SourceFile(Path("pkg/net.py"), "pkg.net", text, ast.parse(text))
    start = text.index("Conv1D()")
    edits = [Edit(start, start + 8, "Other()", (), "replaced")]
    idle = idle_imports(file, apply_edits(text, edits)[0], edits)
    assert [e.text for e in idle] == ["from pkg.layers import Norm"]
