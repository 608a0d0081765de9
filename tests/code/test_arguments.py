"""Arguments by parameter, against what Python itself binds."""

import ast
import itertools
from collections.abc import Callable

import pytest

from slapo_rewrite.code.arguments import (
    Signature,
    argument_of,
    arguments_by,
    given_by,
    parameters,
    passed_on,
)

SIGNATURES = [
    ", ".join(part for part in parts if part)
    for parts in itertools.product(
        ("", "a, /", "a, b=8, /"), ("", "c=9"), ("", "*rest", "*, k"), ("", "j=7"), ("", "**more")
    )
    if parts[2] or not parts[3]
] + ["a, b", "a, b=5", "a, *, k", "a, b, *rest, k=1, **more"]
CALLS = [
    ", ".join([*map(str, range(positions)), *(f"{name}={name!r}" for name in names)])
    for positions in range(4)
    for names in ((), ("a",), ("k",), ("b", "k"), ("c", "z"), ("j", "k", "a"))
]


def function_of(text: str) -> ast.FunctionDef:
    found = ast.parse(f"def f({text}): pass").body[0]
    assert isinstance(found, ast.FunctionDef)
    return found


def call_of(text: str) -> ast.Call:
    found = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(found, ast.Call)
    return found


@pytest.mark.parametrize("text", SIGNATURES)
def test_arguments_are_bound_as_python_binds_them(text):
    scope: dict[str, Callable[..., object]] = {}
    exec(f"def f({text}): return locals()", scope)
    signature = Signature.of(function_of(text))
    assert parameters(function_of(text)) == list(scope["f"].__code__.co_varnames)
    for call in CALLS:
        bound = signature.bind(given_by(call_of(call)))
        given = {name: ast.literal_eval(value) for name, value in bound.given.items()}
        given |= {
            n: ast.literal_eval(signature.defaults[n])
            for n in bound.missing
            if n in signature.defaults
        }
        rest = tuple(ast.literal_eval(value) for value in bound.rest)
        extra = {name: ast.literal_eval(value) for name, value in bound.extra}
        fits = not bound.repeated and given.keys() == set(signature.names)
        fits = fits and bool(signature.rest or not rest) and bool(signature.options or not extra)
        given |= {n: v for n, v in ((signature.rest, rest), (signature.options, extra)) if n}
        if fits:
            assert eval(f"f({call})", scope) == given, call
        else:
            with pytest.raises(TypeError):
                eval(f"f({call})", scope)


@pytest.mark.parametrize(
    ("takes", "gives", "name", "found"),
    [
        ("self, x, y=2", "a, b", "y", "b"),
        ("self, x, y=2", "a", "y", "2"),
        ("cls, x, y=2", "y=b, x=a", "x", "a"),
        ("x, y=2", "*a, y=b", "y", "b"),
        ("x, y=2", "a, *b", "x", "a"),
        ("x, y=2", "a, *b", "y", None),
        ("x, y=2", "*a, b", "y", None),
        ("x, *, y=2", "*a", "y", "2"),
        ("x, y=2", "a, **b", "y", None),
        ("x, y=2", "a, **b", "x", "a"),
        ("x, y", "a", "y", None),
        ("x", "a", "y", None),
    ],
)
def test_what_a_parameter_gets(takes, gives, name, found):
    given = argument_of(function_of(takes), call_of(gives), name)
    assert (given and ast.unparse(given)) == found


@pytest.mark.parametrize(
    ("takes", "by_name", "passed"),
    [
        ("self, x, y=2", True, "x, y=y"),
        ("self, x, y=2", False, "x, y"),
        ("self, x, y=2, /, z=3", True, "x, y, z=z"),
        ("self, x, y=2, *rest, k, j=3, **more", True, "x, y, *rest, k=k, j=j, **more"),
    ],
)
def test_a_method_hands_on_what_it_is_given(takes, by_name, passed):
    assert ", ".join(passed_on(function_of(takes), by_name)) == passed
    assert not Signature.of(function_of(takes), bound=True).names.count("self")


def test_what_a_star_may_give_is_given_to_nobody():
    found = arguments_by(call_of("a, *b, c, k=d, **e"), "x", "y", "z", "k")
    assert {name: ast.unparse(value) for name, value in found.items()} == {"x": "a", "k": "d"}
