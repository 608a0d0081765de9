"""The operations that a pattern names, read off its compiled code: its source is not needed."""

from __future__ import annotations

import builtins
import functools
import math
import types

from slapo_rewrite.patterns.canonical_ops import SYNONYMS, operations


@functools.cache
def named_operations(pattern: types.FunctionType) -> frozenset[str]:
    """Operations that stand wherever a pattern matches: those that it calls by their names.

    Functions of rules that it calls are followed. Names that mean something else too, of Python or
    of `math`, are left out, and so are operators.
    """
    certain = {name for name, known in operations().items() if not known.number} - _FOLDED
    found: set[str] = set()
    pending, seen = [pattern], set[types.FunctionType]()
    while pending:
        function = pending.pop()
        if function in seen:
            continue
        seen.add(function)
        code = function.__code__
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        closed = {name: cell.cell_contents for name, cell in cells}
        for name in (*code.co_names, *code.co_freevars):
            value = closed.get(name, function.__globals__.get(name))
            # A function does not call itself: `def silu(x): return F.silu(x)`.
            if isinstance(value, types.FunctionType) and value is not function:
                ours = value.__module__ == pattern.__module__
                pending += [value] if ours or value.__module__.startswith(_RULES) else []
            elif not (hasattr(builtins, name) or ("math" in code.co_names and hasattr(math, name))):
                found.add(SYNONYMS.get(name, name))
    return frozenset(found & certain)


# Where rules are.
_RULES = "slapo_rewrite.rules."
# What is worked out where the operands are constants.
_FOLDED = {"add", "sub", "mul", "div", "pow", "neg"}
