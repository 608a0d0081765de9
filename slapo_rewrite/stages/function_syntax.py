"""Syntactic properties of functions and calls, for flattening."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from slapo_rewrite.code.dataflow import read_in, uses_of
from slapo_rewrite.code.evaluate import NONE, Constant, Worth
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.syntax import position
from slapo_rewrite.stages.environment import is_module


def methods_in(file: SourceFile) -> list[ast.FunctionDef]:
    """The methods of a file's classes that may run after a module's construction."""
    classes = (node for node in ast.walk(file.tree) if isinstance(node, ast.ClassDef))
    methods = (node for cls in classes for node in cls.body if isinstance(node, ast.FunctionDef))
    return [method for method in methods if method.name != "__init__"]


def run_in_forward(methods: Iterable[ast.FunctionDef]) -> list[ast.FunctionDef]:
    """The methods that a `forward` may call, by name; special methods are included."""
    names, left, found = {"forward"}, list(methods), list[ast.FunctionDef]()
    while come_to := [m for m in left if m.name in names or m.name.startswith("__")]:
        found += come_to
        left = [method for method in left if method not in come_to]
        for node in (node for method in come_to for node in ast.walk(method)):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
    return found


def attributes_set(methods: Iterable[ast.FunctionDef]) -> frozenset[str]:
    """The attributes that methods assign."""
    nodes = (node for method in methods for node in ast.walk(method))
    return frozenset(
        n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
    )


def always_named(node: ast.AST) -> Iterator[ast.NamedExpr]:
    """The `:=` in an expression that are always evaluated, inner ones first."""
    match node:
        case ast.BoolOp(values=[first, *_]) | ast.IfExp(test=first):
            yield from always_named(first)
        case ast.Compare(left=left, comparators=[right, *_]):
            yield from always_named(left)
            yield from always_named(right)
        case ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            pass
        case _:
            for child in ast.iter_child_nodes(node):
                yield from always_named(child)
            if isinstance(node, ast.NamedExpr):
                yield node


def is_read_before(expression: ast.expr, named: ast.NamedExpr) -> bool:
    """Whether an expression reads the name of a `:=` to the left of it."""
    return any(position(n) < position(named) for n in uses_of(expression, named.target.id))


def is_made_for(function: ast.FunctionDef, name: str, number: str) -> bool:
    """Whether an `__init__` makes a list of layers by a comprehension over `range(number)`."""
    uses = [n for n in ast.walk(function) if isinstance(n, ast.Attribute) and n.attr == name]
    for node in ast.walk(function):
        match node:
            case ast.Assign(
                targets=[ast.Attribute(attr=attr)],
                value=ast.Call(
                    args=[
                        ast.ListComp(
                            generators=[
                                ast.comprehension(
                                    iter=ast.Call(func=ast.Name(id="range"), args=[end]), ifs=[]
                                )
                            ]
                        )
                    ]
                ),
            ) if attr == name and len(uses) == 1:
                return ast.unparse(end).removeprefix("self.") == number
    return False


def is_handed_on(function: ast.FunctionDef, name: str) -> bool:
    """Whether a name is bound once, and only read as `**name` in calls."""
    uses = uses_of(function, name)
    spread = {
        keyword.value
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg is None
    }
    bound = [n for n in uses if isinstance(n.ctx, ast.Store)]
    return len(bound) == 1 and all(n in spread for n in uses if n not in bound)


def is_read_by_key(function: ast.FunctionDef, name: str) -> bool:
    """Whether a name is a dictionary that is only used by constant keys.

    Uses are `name["key"]`, set or read, `name.get("key")`, and comparison with None.
    """
    uses = uses_of(function, name)
    found: set[ast.AST] = {n for n in uses if isinstance(n.ctx, ast.Store)}
    if len(found) != 1:
        return False
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Attribute(value=use, attr="get"), args=[ast.Constant(), *_]):
                found.add(use)
            case ast.Subscript(value=use, slice=ast.Constant(value=str())) if not isinstance(
                node.ctx, ast.Del
            ):
                found.add(use)
            case ast.Compare(left=use, ops=[ast.Is() | ast.IsNot()]):
                found.add(use)
            case ast.Assign(targets=[target], value=ast.IfExp(body=use)) if target in uses:
                found.add(use)  # `name = name if ... else {...}`
    return found.issuperset(uses)


def is_plain_read(node: ast.expr) -> bool:
    """Whether an expression is a constant, or a name or attribute."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name | ast.Constant)


def reads_in(node: ast.AST, name: str) -> bool:
    """Whether a name is read in a statement."""
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        return node.target.id == name or reads_in(node.value, name)
    return name in read_in(node)


def signature_of(called: Any) -> inspect.Signature | None:
    """The signature of a function, or of a module's `forward`."""
    if called is None:
        return None
    if is_module(called):
        called = called.forward
    try:
        return inspect.signature(called)
    except (TypeError, ValueError):
        return None


def is_default(name: str, value: Worth, taken: inspect.Signature | None) -> bool:
    """Whether a keyword argument equals the callee's default."""
    if taken is None or not isinstance(value, Constant) or value.is_setting:
        return False
    if name in taken.parameters:
        default = taken.parameters[name].default
        return type(default) is type(value.value) and bool(default == value.value)
    return value == NONE and any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.parameters.values()
    )


def fields_given(call: ast.Call, cls: object) -> dict[str, ast.expr] | None:
    """The argument of each field in a call of a record's class; None for other calls."""
    if fields_of(cls) is None:
        return None
    by_name = {str(k.arg): k.value for k in call.keywords if k.arg is not None}
    taken = signature_of(cls)
    names = [taken and positional_name(taken, number) for number in range(len(call.args))]
    is_plain = len(by_name) == len(call.keywords) and all(names)
    if not is_plain or any(isinstance(value, ast.Starred) for value in call.args):
        return None
    return dict(zip(map(str, names), call.args, strict=True)) | by_name


def fields_of(cls: object) -> dict[str, bool] | None:
    """The fields of a data class or named tuple, with whether each has a default; else None."""
    if not isinstance(cls, type):
        return None
    if dataclasses.is_dataclass(cls):
        defaults = ((f.name, {f.default, f.default_factory}) for f in dataclasses.fields(cls))
        return {name: each != {dataclasses.MISSING} for name, each in defaults}
    if issubclass(cls, tuple) and hasattr(cls, "_field_defaults"):
        return {name: name in cls._field_defaults for name in cls._fields}  # type: ignore[attr-defined]
    return None


def keyword_name(taken: inspect.Signature, number: int) -> str | None:
    """The parameter of a positional argument, if it can be passed by name as well."""
    name = positional_name(taken, number)
    by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return name if name is not None and taken.parameters[name].kind == by_name else None


def positional_name(taken: inspect.Signature, number: int) -> str | None:
    """The parameter of a positional argument."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [n for n, p in taken.parameters.items() if p.kind in kinds]
    return names[number] if number < len(names) else None
