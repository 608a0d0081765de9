"""Nodes from templates: calls with other callees and keywords, operands with parentheses."""

from __future__ import annotations

import libcst as cst
import pytest

from slapo_rewrite.code import build
from slapo_rewrite.code.layout import fitted, formatted


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("nn.Linear(a, b)", "New(a, b, k=1)"),
        ("nn.Linear( a,b )", "New( a,b, k=1 )"),
        ("nn.Linear(a, bias=False,)", "New(a, bias=False, k=1,)"),
        ("nn.Linear()", "New(k=1)"),
        ("nn.Linear(*a, **b)", "New(*a, **b, k=1)"),
        ("nn.Linear(\n    a,  # in\n    b,  # out\n)", "New(\n    a,  # in\n    b, k=1,  # out\n)"),
    ],
)
def test_another_callee_and_a_further_keyword(before, after):
    call = build.parsed(before)
    assert isinstance(call, cst.Call)
    assert build.code(build.with_keywords(build.with_callee(call, "New"), [("k", "1")])) == after


@pytest.mark.parametrize(
    ("value", "called", "added"),
    [
        ("x", "f(x)", "x + 1"),
        ("a + b", "f(a + b)", "(a + b) + 1"),
        ("a @ b", "f(a @ b)", "a @ b + 1"),
        ("(a + b)", "f(a + b)", "(a + b) + 1"),
        ("a, b", "f((a, b))", "(a, b) + 1"),
        ("(a, b)", "f((a, b))", "(a, b) + 1"),
        ("a if b else c", "f(a if b else c)", "(a if b else c) + 1"),
        ("lambda: 0", "f(lambda: 0)", "(lambda: 0) + 1"),
        ("(x for x in y)", "f((x for x in y))", "(x for x in y) + 1"),
        ("(a  # why\n)", "f((a  # why\n))", "(a  # why\n) + 1"),
        ("f'{x}'", "f(f'{x}')", "f'{x}' + 1"),
    ],
)
def test_operands_get_the_parentheses_that_they_need(value, called, added):
    node = build.parsed(value)
    assert build.code(build.call("f", node)) == called
    assert build.code(build.expression("f({x})", x=node)) == called
    assert build.code(build.expression("{x} + 1", x=node)) == added


def test_what_takes_turns_goes_on_at_its_end():
    first = build.conditional(build.parsed("a"), "i < 2", build.parsed("b"))
    both = build.conditional(build.parsed("c or d"), "i == 5", first)
    assert build.code(both) == "(c or d) if i == 5 else a if i < 2 else b"


@pytest.mark.parametrize(
    ("text", "result"),
    [("a + b", "(a + b)"), ("f(a)", "f(a)"), ("a if b else c", "(a if b else c)"), ("(a)", "(a)")],
)
def test_parenthesised(text, result):
    assert build.parenthesised(text) == result


def test_formatted_keeps_quotes_and_indents_what_follows():
    text = "self.x = f('a', aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa, bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb)"
    assert formatted(text, 8, 88) == (
        "self.x = f(\n"
        "            'a', aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa, bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb\n"
        "        )"
    )


BLOCK = """\
# above
    x = f(
        1,
        '''a
  b''',
    )  # behind

    # between
    if x:
        y = 1
    # below"""


def test_statements_move_and_strings_stay():
    moved = build.reindented(BLOCK, 4, 0)
    lines = BLOCK.split("\n")
    assert moved.split("\n") == [s if s == "  b'''," else s.removeprefix("    ") for s in lines]
    assert build.reindented(moved, 0, 4) == BLOCK
    assert build.reindented(build.reindented(BLOCK, 4, 10), 10, 4) == BLOCK


CALL = """\
self.o = nn.Linear(
            width,  # in
            width,
            bias=True
        )"""


def test_lines_of_a_call_that_did_not_change_stay():
    renamed = CALL.replace("nn.Linear", "RowParallelLinear").replace("bias=True", "bias=False")
    assert fitted(renamed, 8, 88, before=CALL) == renamed
    assert fitted(renamed, 8, 88) != renamed
    wrapped = f"f({CALL.removeprefix('self.o = ')})"
    assert fitted(wrapped, 8, 88, before=CALL) == fitted(wrapped, 8, 88)
    under = "x = f(a,\n              b)"
    longer = under.replace("f(", "longer(")
    assert fitted(longer, 8, 88, before=under) == "x = longer(a, b)"
    blacks = "return (\n            first\n            + self.second(a)\n        )"
    assert formatted(blacks.replace("first", "f" * 70), 8, 88) == blacks.replace("first", "f" * 70)
    shorter = blacks.replace("first", "f")
    assert fitted(shorter, 8, 88, before=blacks.replace("first", "f" * 70)) == formatted(
        shorter, 8, 88
    )
    assert fitted(shorter, 8, 88, before=blacks) == shorter
    long = renamed.replace("RowParallelLinear", "R" * 88)
    assert fitted(long, 8, 88, before=CALL) != long
