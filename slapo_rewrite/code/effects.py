"""Side effects of functions, as far as their source shows them."""

from __future__ import annotations

import ast
import functools

from slapo_rewrite.code.names import is_name

# Decorators that leave the behaviour of a call unchanged.
_TRANSPARENT = {"staticmethod", "jit.script", "torch.jit.script", "torch.compile", "override"}
# Syntax that a function must not have if a call of it is to be equivalent to an expression.
_REFUSED = (
    *(ast.Yield, ast.YieldFrom, ast.Await, ast.Raise, ast.Assert, ast.Global, ast.Nonlocal),
    *(ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef),
)
_CACHED = functools.lru_cache(maxsize=4096)


def is_in_place(name: str) -> bool:
    """Whether a method or torch function works in place, by its name: `add_`."""
    return name.endswith("_") and not name.endswith("__")


@_CACHED
def is_expression(function: ast.FunctionDef) -> bool:
    """Whether a function only returns a value: one `return` at its end, no other effects."""
    names = (ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in function.decorator_list)
    if not all(name in _TRANSPARENT for name in names):
        return False
    if not (function.body and isinstance(function.body[-1], ast.Return)):
        return False
    inner = [node for statement in function.body for node in ast.walk(statement)]
    return sum(isinstance(node, ast.Return) for node in inner) == 1 and not any(
        isinstance(node, (*_REFUSED, ast.FunctionDef)) for node in inner
    )


@_CACHED
def writes(node: ast.AST) -> bool:
    """Whether code may write in place to memory of its inputs."""
    return any(_writes(inner) for inner in ast.walk(node))


def _writes(node: ast.AST) -> bool:
    match node:
        case ast.AugAssign() | ast.Subscript(ctx=ast.Store() | ast.Del()):
            return True
        case ast.Attribute(value=owner, ctx=ast.Store()):
            return not is_name(owner, "self")
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), keywords=keywords):
            return is_in_place(name) or any(k.arg in ("out", "inplace") for k in keywords)
    return False


@_CACHED
def stored(text: ast.AST) -> tuple[str, ...]:
    """The attributes of `self` that a method, or part of one, assigns."""
    nodes = (node for node in ast.walk(text) if isinstance(node, ast.Attribute))
    own = (
        node for node in nodes if isinstance(node.ctx, ast.Store) and is_name(node.value, "self")
    )
    return tuple(dict.fromkeys(node.attr for node in own))


@_CACHED
def plain_calls(function: ast.FunctionDef) -> tuple[str, ...]:
    """The functions that a function calls by a plain name, not as attributes."""
    calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    return tuple(dict.fromkeys(func.id for func in calls if isinstance(func, ast.Name)))


@_CACHED
def own_calls(function: ast.FunctionDef) -> tuple[str, ...]:
    """The methods of `self` that a method calls."""
    called = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    methods = (func for func in called if isinstance(func, ast.Attribute))
    return tuple(dict.fromkeys(each.attr for each in methods if is_name(each.value, "self")))


@_CACHED
def words_of(text: ast.AST) -> frozenset[str]:
    """The names of attributes and variables in code, and strings that may be such names."""
    found = set()
    for node in ast.walk(text):
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.Constant(value=str(name)):
                found.add(name)
    return frozenset(found)
