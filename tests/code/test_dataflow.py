"""The names in some source text, and what binds them."""

import ast

import pytest

from slapo_rewrite.code.dataflow import body_of, bound_in, names_in, read_in
from slapo_rewrite.code.syntax import assignments


@pytest.mark.parametrize(
    ("text", "read", "bound"),
    [
        ("a = b", ["b"], ["a"]),
        ("(a, *b), c[d] = e.f", ["e", "c", "d"], ["a", "b"]),
        ("a += b", ["b"], ["a"]),
        ("for a in b:\n    if (c := a):\n        d = a", ["b", "a"], ["a", "c", "d"]),
        ("del a\nb", ["b"], []),
        ("def f(a=b):\n    return c", ["b", "c"], []),
    ],
)
def test_names_are_read_and_bound(text, read, bound):
    body = ast.parse(text).body
    assert set(read_in(*body)) == set(read) and set(bound_in(*body)) == set(bound)
    assert read_in(*body) | bound_in(*body) <= names_in(*body)


def test_a_body_begins_behind_its_docstring():
    (function,) = ast.parse('def f():\n    """Text."""\n    return 1').body
    assert isinstance(function, ast.FunctionDef)
    assert body_of(function) == function.body[1:]
    function.body.pop(0)
    assert body_of(function) == function.body


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a = 1\na += 2\nimport a", [2, 3, 4]),
        ("if b:\n    a = 1\nelse:\n    a = 2", [3, 5]),
        ("if a := b:\n    c = a\nreturn (a := c)", [2, 4]),
        ("match b:\n    case 1:\n        a = 1\n    case _:\n        a = 2", [4, 6]),
        ("with b as a:\n    for c in a:\n        a = c", [2, 4]),
        ("def inner():\n    a = 1\nb = a", []),
        ("def a():\n    pass\nb = a", [2]),
        ("match b:\n    case [a]:\n        c = a", [2]),
    ],
)
def test_what_binds_a_name_is_found(text, lines):
    body = "\n".join(f"    {line}" for line in text.split("\n"))
    (function,) = ast.parse(f"def f(b, c):\n{body}").body
    assert isinstance(function, ast.FunctionDef)
    found = assignments(function, "a")
    assert [each.lineno for each in found] == lines
