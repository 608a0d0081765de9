"""Which names stand in some text."""

import ast

import pytest

from slapo_rewrite.code.dataflow import body_of, bound_in, names_in, read_in


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
