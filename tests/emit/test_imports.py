"""A rewrite removes imports that it made unused, and keeps those that were unused before."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from slapo_rewrite.changes.imports import Imports
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.splice import Edit, apply_edits
from slapo_rewrite.directive import Directive
from slapo_rewrite.emit.rewritten_text import idle_imports
from slapo_rewrite.emit.rewritten_text import rewritten as rewritten_text
from slapo_rewrite.fusion.spelled_names import Spelling
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


def test_imports_below_a_first_line_that_goes():
    """Nothing else of torch is used, and what stood there was above what is imported now."""
    text = "import torch.nn as nn\n\n\nclass Table(nn.Embedding): ...\n"
    file = SourceFile(Path("net.py"), "net", text, ast.parse(text))
    end, start = text.index("\n"), text.index("nn.Emb")
    edits = [
        Edit(end, end, "\n\nfrom .parts import Part"),
        Edit(end, end, "\n\ndef helper(): ..."),
        own := Edit(start, start + len("nn.Embedding"), "Part"),
    ]
    assert rewritten_text(file, edits, [own])[0] == (
        "from .parts import Part\n\ndef helper(): ...\n\n\nclass Table(Part): ...\n"
    )


GAPS = {
    "import a\n\nimport b\n\n\nx = b.f()\n": "import b\n\n\nx = b.f()\n",
    '"""Doc."""\n\nimport a\n\nimport b\n': '"""Doc."""\n\nimport b\n',
    "import b\n\nimport a\n\n\nclass C: ...\n": "import b\n\n\nclass C: ...\n",
    "import a\nimport c\n\nimport b\n": "import b\n",
    "import b\nimport a\n\nimport d\n": "import b\n\nimport d\n",
    "import b; import a\n": "import b; import a\n",
}


@pytest.mark.parametrize(("before", "after"), GAPS.items())
def test_lines_between_imports(before, after):
    """A blank line that parts nothing from anything goes with what was above it."""
    old = "\ny = a.f(), c\n"
    text = before + old
    file = SourceFile(Path("net.py"), "net", text, ast.parse(text))
    edits = [Edit(len(before), len(text), "", (), "gone")]
    idle = idle_imports(file, before, edits)
    assert apply_edits(text, [*edits, *idle])[0] == after


def test_what_a_rule_writes_is_imported_by_the_name_that_it_has_in_the_text(tmp_path):
    """Also where the file calls something else so."""
    path = tmp_path / "net.py"
    path.write_text("nn = 3\n")
    file, cause = SourceFile.read(path), Directive(0, "apply", None, "", ())
    spelling, imports = Spelling(file, cause), Imports(file)
    assert spelling("torch.nn.functional.gelu") == "torch_nn.functional.gelu"
    for reference in spelling.references.values():
        imports.refer(reference, (cause,))
    assert "from torch import nn as torch_nn\n" in apply_edits(file.text, imports.edits())[0]
