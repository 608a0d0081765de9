"""The values of expressions, from the values of their names."""

import ast

import pytest

from slapo_rewrite.code.evaluate import (
    UNKNOWN,
    Constant,
    KnownKwargs,
    KnownObject,
    Unknown,
    Worth,
    attribute_of,
    computed,
    truth,
)


class Output:
    """What a model gives."""


class Broken:
    """An object of the user's that answers nothing."""

    def __bool__(self) -> bool:
        raise ValueError

    def __eq__(self, other: object) -> bool:
        raise ValueError

    __hash__ = None  # type: ignore[assignment]


NAMES: dict[str, Worth] = {
    "none": Constant(None),
    "two": Constant(2),
    "yes": Constant(True),
    "no": Constant(False),
    "sizes": Constant((3, 4)),
    "broken": Constant(Broken()),
    "tensor": Unknown(True),
    "layer": Unknown(True, is_module=True),
    "output": KnownObject(
        Output, {"a": "x", "b": "y"}, {"a": Constant(1), "n": Constant(None), "b": UNKNOWN}
    ),
    "known": Unknown(True, Output, {"a": Constant(1)}),
    "more": KnownKwargs({}, {}),
}


def of(expr: ast.expr) -> Worth:
    if isinstance(expr, ast.Name):
        return NAMES.get(expr.id, UNKNOWN)
    if isinstance(expr, ast.Attribute):
        return attribute_of(of(expr.value), expr.attr)
    return computed(expr, of) or UNKNOWN


def worth(text: str) -> Worth:
    return of(ast.parse(text, mode="eval").body)


@pytest.mark.parametrize(
    "text",
    [
        "1 + two * 3 - 4 // 3 % 2",
        "two ** 3 / 4",
        "two << 1 | 1 & 3 ^ 2",
        "-two, +two, ~0 if no else 1",
        "1 < two <= 2 != 3",
        "1 < 0 < 1",
        "two in sizes, two not in (1, *sizes)",
        "none is None, two is not None",
        "[1, *sizes], {two}, {'a': 1, **{'b': two}}",
        "f'{two} of {sizes}'",
        "sizes[0], sizes[-1], sizes[:1], 'abc'[1:3]",
        "(x := two) + 1",
        "0 or two, two or 3, 0 and two, two and 3, no or none",
        "not two, not none",
        "3 if yes else 4",
        "3 if none else 4",
    ],
)
def test_known_operands_give_what_python_gives(text):
    scope = {n: w.value for n, w in NAMES.items() if isinstance(w, Constant)}
    assert worth(text) == Constant(eval(text, scope))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("what + 1", UNKNOWN),
        ("1 / 0", UNKNOWN),
        ("two + 'a'", UNKNOWN),
        ("sizes[5]", UNKNOWN),
        ("two @ two", UNKNOWN),
        ("~what", UNKNOWN),
        ("what is None", UNKNOWN),
        ("tensor is None", Constant(False)),
        ("None is not tensor", Constant(True)),
        ("output is None", Constant(False)),
        ("more is not None", Constant(True)),
        ("tensor == None", UNKNOWN),
        ("(what, 1)", Unknown(True)),
        ("[what]", Unknown(True)),
        ("{'a': what}", UNKNOWN),
        ("f'{two!r}'", UNKNOWN),
        ("(*what, 1)", Unknown(True)),
        ("1 < what < 3", UNKNOWN),
        ("2 < 1 < what", Constant(False)),
        ("what or two", UNKNOWN),
        ("two or what", Constant(2)),
        ("what and no", UNKNOWN),
        ("not (what and no)", Constant(True)),
        ("3 if what else 4", UNKNOWN),
        ("3 if what else 3", Constant(3)),
        ("tensor if yes else none", Unknown(True)),
        ("broken == 1", UNKNOWN),
        ("not broken", UNKNOWN),
        ("broken if what else two", UNKNOWN),
        ("output.a", Constant(1)),
        ("output.c", Constant(None)),
        ("output[0]", Constant(1)),
        ("output[1]", UNKNOWN),
        ("output[2]", UNKNOWN),
        ("known[0]", Constant(1)),
        ("tensor.a", UNKNOWN),
        ("tensor[0]", UNKNOWN),
        ("lambda: 1", UNKNOWN),
        ("[i for i in sizes]", UNKNOWN),
    ],
)
def test_what_is_not_known_stays_so(text, expected):
    assert worth(text) == expected


@pytest.mark.parametrize(
    ("text", "calls", "way"),
    [
        ("two", True, True),
        ("none", True, False),
        ("output", True, True),
        ("tensor", True, None),
        ("broken", True, None),
        ("what and no", True, False),
        ("no and what", True, False),
        ("what or yes", True, True),
        ("what or no", True, None),
        ("yes and two", True, True),
        ("no or none", True, False),
        ("(what and no) or (what or yes)", True, True),
        ("f() and no", True, False),
        ("f() and no", False, None),
        ("no and f()", False, False),
        ("what and no and f()", False, False),
        ("not (f() and no)", True, True),
    ],
)
def test_one_operand_may_decide_a_test(text, calls, way):
    assert truth(ast.parse(text, mode="eval").body, of, calls) is way
