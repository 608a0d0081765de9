"""Every primitive's worked examples and refusals are run exactly as in its file."""

from __future__ import annotations

import ast
import inspect
import re

import pytest

from slapo_rewrite import errors, primitives
from slapo_rewrite.cli import main
from slapo_rewrite.primitives.base import Primitive
from tests.rewriting import changed_lines, refused, rewritten

ALL = primitives.registry()


def test_slapos_names_are_kept():
    assert {"shard", "sync", "replace", "replace_all", "checkpoint"} <= set(ALL)


@pytest.mark.parametrize("primitive", ALL.values(), ids=ALL)
def test_documented(primitive: Primitive):
    doc = inspect.getdoc(type(primitive)) or ""
    for section in ("Rewrite:", "Shapes:", "Numerics:", "State:", "Raises:", "Source:"):
        assert section in doc, section
    assert primitive.examples and primitive.refusals


@pytest.mark.parametrize(
    ("primitive", "number"),
    [(p, n) for p in ALL.values() for n in range(len(p.examples))],
    ids=lambda v: v if isinstance(v, int) else v.name,
)
def test_example(primitive: Primitive, number: int, tmp_path, capsys):
    example = primitive.examples[number]
    output = rewritten(tmp_path, example.source, example.schedule)
    assert changed_lines(output) == example.diff
    assert capsys.readouterr().out.replace(f"{tmp_path}/", "") == example.printed
    for name, text in output.files.items():
        if name.endswith(".py"):
            ast.parse(text)


@pytest.mark.parametrize(
    ("primitive", "number"),
    [(p, n) for p in ALL.values() for n in range(len(p.refusals))],
    ids=lambda v: v if isinstance(v, int) else v.name,
)
def test_refusal(primitive: Primitive, number: int, tmp_path):
    refusal = primitive.refusals[number]
    text = refused(tmp_path, refusal.source, refusal.schedule, refusal.code)
    assert re.search(r"s\.py:\d+:\d+", text), "the schedule's line is shown"


def test_codes_in_docs_exist():
    known = {c.code for c in vars(errors).values() if isinstance(c, type) and hasattr(c, "code")}
    for primitive in ALL.values():
        assert set(re.findall(r"SR\d{3}", inspect.getdoc(type(primitive)) or "")) <= known


def test_codes_are_used_once():
    codes = [
        c.code
        for c in vars(errors).values()
        if isinstance(c, type) and issubclass(c, errors.RewriteError)
    ]
    assert len(codes) == len(set(codes))


def test_command_lists_and_shows(capsys):
    assert main(["primitives"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ALL)
    assert main(["primitives", "shard"]) == 0
    shown = capsys.readouterr().out
    assert "ColumnParallelLinear(width, 4 * width)" in shown and "shard(names" in shown
    assert main(["primitives", "shrad"]) == 2
    assert "did you mean `shard`" in capsys.readouterr().err
