"""A function's result, written out with the arguments of a call."""

import ast

import pytest

from slapo_rewrite.code.written_out import returned_by

CALLER = """\
def caller(self, width, stride):
    size = 3
    sizes = [n for n in range(size)]
    {call}
"""


def written(function: str, call: str) -> str | None:
    """What a call of `f` comes to in the constructor of `CALLER`."""
    helper, caller = ast.parse(f"{function}\n{CALLER.format(call=call)}").body
    assert isinstance(helper, ast.FunctionDef) and isinstance(caller, ast.FunctionDef)
    statement, returned = caller.body[-1], helper.body[-1]
    assert isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    made = returned.value if isinstance(returned, ast.Return) else None
    assert made is not None
    found = returned_by(helper, made, made, statement.value, caller)
    assert found is None or found.lineno == statement.lineno
    return found and ast.unparse(found)


@pytest.mark.parametrize(
    ("parameters", "made", "call", "want"),
    [
        ("a, b=2", "Conv(a, b, pad=b // 2)", "f(width)", "Conv(width, 2, pad=2 // 2)"),
        ("a, b=2", "Conv(a, b)", "f(b=-1, a=self.w + 1)", "Conv(self.w + 1, -1)"),
        ("a, *, b=(1, 1)", "Conv(a + 1)", "f(width)", "Conv(width + 1)"),
        ("a, b", "Conv(a * b)", "f(width + 1, 2)", "Conv((width + 1) * 2)"),
        ("a", "nn.Conv(a, K)", "f(sizes[0])", "nn.Conv(sizes[0], K)"),
        ("a, cls", "cls(a)", "f(width, nn.Linear)", "nn.Linear(width)"),
        # What may be another thing the second time, or in another order.
        ("a", "Conv(a, a)", "f(next(self.sizes))", None),
        ("a, b=[1]", "Conv(a, b)", "f(width)", None),
        # What the caller does not say, or says by a star.
        ("*a", "Conv(*a)", "f(width, width)", None),
        ("**a", "Conv(**a)", "f(width=width)", None),
        ("a, b", "Conv(a, b)", "f(*sizes)", None),
        ("a, b", "Conv(a, b)", "f(width)", None),
        # A name that is another thing in the caller.
        ("a", "Conv(a, size)", "f(width)", None),
        ("a", "Conv(a, stride)", "f(width)", None),
        ("a", "Conv(a, n)", "f(width)", None),
        # What makes other modules may change in the function itself.
        ("a", "Block(Conv(a))", "f(width)", None),
        ("a", "Block(lambda x: x + a)", "f(width)", None),
    ],
)
def test_a_call_that_a_function_returns(parameters, made, call, want):
    assert written(f"def f({parameters}): return {made}", call) == want


@pytest.mark.parametrize(
    "function",
    [
        "@cache\ndef f(a): return Conv(a)",
        "def f(a):\n    a = a + 1\n    return Conv(a)",
        "def f(a):\n    if a: return Conv(1)\n    return Conv(a)",
        "def f(a): return Conv(a)[0]",
    ],
)
def test_what_does_anything_else_is_not_written_out(function):
    assert written(function, "f(width)") is None
