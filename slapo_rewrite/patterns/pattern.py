"""Patterns: functions or module classes whose body is the computation to search for."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import math
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.code.arguments import all_arguments
from slapo_rewrite.code.blocks import first_line
from slapo_rewrite.code.facts import Facts, NoFacts, live_names
from slapo_rewrite.code.file import SourceFile, read_once
from slapo_rewrite.patterns.canonical_ops import SYNONYMS, operations
from slapo_rewrite.patterns.graph_of_function import RULES, graph_of
from slapo_rewrite.patterns.value_graph import Graph, Value, described, walk

_REFUSED = {
    ast.Lambda: "a lambda", ast.ListComp: "a comprehension", ast.SetComp: "a comprehension",
    ast.DictComp: "a comprehension", ast.GeneratorExp: "a generator", ast.Await: "an `await`",
    ast.Yield: "a `yield`", ast.YieldFrom: "a `yield`",
    ast.NamedExpr: "an assignment inside an expression", ast.Starred: "a star-argument",
    ast.JoinedStr: "a string with values in it",
}  # fmt: skip


def call_module(path: str, *operands: Any) -> Any:
    """In a pattern: the call of a submodule whose path matches a regular expression."""
    raise NotImplementedError("`call_module` can only be used inside a pattern")


@dataclass(frozen=True, eq=False)
class Pattern:
    """A computation to search for."""

    name: str  # the name of the function or class
    parameters: tuple[str, ...]  # its parameters, which match anything
    graph: Graph  # its value graph
    roots: tuple[Value, ...]  # the values that it returns: one, or those of a tuple
    results: tuple[str, ...]  # the local names of these values; '' without a name

    @property
    def wildcards(self) -> dict[str, Value]:
        """All values that match anything: parameters, and tensors and sizes of a class."""
        found = {str(v.literal): v for v in walk(self.roots) if v.operation == "parameter"}
        first = {name: found[name] for name in self.parameters if name in found}
        return first | dict(sorted((found.items() - first.items()), key=lambda item: item[0]))

    @functools.cached_property
    def size(self) -> int:
        """The number of its operations, including those of functions that it calls."""
        every = walk(self.roots, through=True)
        return sum(not value.is_leaf and value.inner is None for value in every)

    @functools.cached_property
    def needs(self) -> frozenset[str]:
        """The operations that every match contains."""
        every = walk(self.roots, through=True)
        own = (v for v in every if not v.is_leaf and v.inner is None)
        return frozenset(v.operation for v in own) - {"call_module"}

    @functools.cached_property
    def first(self) -> frozenset[str]:
        """The possible operations of the first result: its own, or a call that returns it."""
        found: set[str] = set()
        value: Value | None = self.roots[0]
        while value is not None:
            found.add(value.operation)
            value = value.inner
        return frozenset(found)


def pattern_of(value: Any, facts: Facts | None = None) -> Pattern:
    """Reads a pattern from its source; raises `BadPattern` if it is not a pure computation."""
    function = value if isinstance(value, types.FunctionType) else type(value).forward
    file, node, name = located(inspect.unwrap(function))
    if not isinstance(value, types.FunctionType):
        name = type(value).__name__
    _check(file, node)
    known = names_around(function)
    _check_names(file, node, known)
    graph = graph_of(
        file,
        node,
        facts or NoFacts(),
        method=facts is not None,
        resolve=live_names(known),
        pattern=True,
    )
    return _checked(name, file, node, graph, facts is not None)


def names_around(function: types.FunctionType) -> dict[str, Any]:
    """The global and nonlocal names of a function, with their values."""
    closed = inspect.getclosurevars(function)
    return {**function.__globals__, **closed.nonlocals}


def located(function: types.FunctionType) -> tuple[SourceFile, ast.FunctionDef, str]:
    """The file and definition of a live function, and its name for messages."""
    code = function.__code__
    path = Path(code.co_filename)
    if not path.is_file():
        raise errors.BadPattern(f"the source of `{function.__qualname__}` is not a file")
    file = read_once(path, function.__module__)
    if code.co_name == "<lambda>":
        found = _lambdas(file, code.co_firstlineno)
    else:
        found = _functions(file).get((code.co_name, code.co_firstlineno), [])
    if len(found) != 1:
        raise errors.BadPattern(
            "this line has several functions, and the pattern could be any of them",
            hint="write the pattern as a separate `def`",
        )
    name = "the lambda" if function.__name__ == "<lambda>" else function.__name__
    return file, found[0], name


@functools.lru_cache(maxsize=64)
def _functions(file: SourceFile) -> dict[tuple[str, int], list[ast.FunctionDef]]:
    """The functions of a file, by name and first line as in code objects."""
    found: dict[tuple[str, int], list[ast.FunctionDef]] = {}
    pending: list[ast.AST] = [file.tree]
    while pending:
        for node in ast.iter_child_nodes(pending.pop()):
            if isinstance(node, ast.FunctionDef):
                found.setdefault((node.name, first_line(node)), []).append(node)
            if isinstance(node, (ast.stmt, ast.excepthandler, ast.match_case)):
                pending.append(node)
    return found


def _lambdas(file: SourceFile, line: int) -> list[ast.FunctionDef]:
    """The lambdas of a line, converted to function definitions."""
    found = []
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Lambda) and node.lineno == line:
            body = ast.copy_location(ast.Return(node.body), node.body)
            function = ast.FunctionDef("the lambda", node.args, [body], [])
            found.append(ast.copy_location(function, node))
    return found


def _check(file: SourceFile, function: ast.FunctionDef) -> None:
    """Raises for syntax that is not a pure computation."""

    def refuse(node: ast.AST, what: str, hint: str | None = None) -> errors.BadPattern:
        return errors.BadPattern(
            f"a pattern is a pure computation, and this is {what}",
            at=file.at(node),
            hint=hint or "write assignments to local names, and one `return`",
        )

    for star in (function.args.vararg, function.args.kwarg):
        if star is not None:
            raise refuse(star, "a parameter for any number of arguments", "name each operand")
    for number, statement in enumerate(function.body):
        match statement:
            case ast.Return(value=ast.expr()) if statement is function.body[-1]:
                pass
            case ast.Expr(value=ast.Constant()) if number == 0:
                pass
            case ast.Assign(targets=targets) if all(map(_is_local, targets)):
                pass
            case ast.AnnAssign(target=ast.Name(), value=ast.expr()):
                pass
            case ast.AugAssign():
                raise refuse(statement, "an assignment in place", "write `x = x + y`")
            case _:
                raise refuse(statement, _said(statement))
    if not isinstance(function.body[-1], ast.Return):
        raise refuse(function.body[-1], "no `return`")
    for inner in (node for statement in function.body for node in ast.walk(statement)):
        if type(inner) in _REFUSED:
            raise refuse(inner, _REFUSED[type(inner)])


def _check_names(file: SourceFile, function: ast.FunctionDef, known: dict[str, Any]) -> None:
    """Raises for undefined names."""
    names = [n for part in function.body for n in ast.walk(part) if isinstance(n, ast.Name)]
    own = {n.id for n in names if isinstance(n.ctx, ast.Store)}
    own |= {argument.arg for argument in all_arguments(function)}
    for name in names:
        if name.id not in own and name.id not in known and not hasattr(builtins, name.id):
            raise errors.BadPattern(
                f"`{name.id}` is not defined where the pattern is written",
                at=file.at(name),
                hint="import it in the schedule",
            )


def _is_local(target: ast.expr) -> bool:
    match target:
        case ast.Tuple(elts=elts):
            return all(map(_is_local, elts))
        case ast.Name():
            return True
    return False


def _said(statement: ast.stmt) -> str:
    names: dict[type[ast.stmt], str] = {ast.If: "a branch", ast.For: "a loop", ast.While: "a loop"}
    names |= {ast.Expr: "a statement without a result", ast.Assign: "a store"}
    names |= {ast.Return: "a `return` in the middle", ast.With: "a `with`"}
    return names.get(type(statement), f"`{type(statement).__name__.lower()}`")


def _checked(
    name: str, file: SourceFile, function: ast.FunctionDef, graph: Graph, method: bool
) -> Pattern:
    """Raises for value graphs that are not a pure computation, or not connected."""
    returned = graph.returned[0]
    roots = (
        tuple(v for _, v in returned.arguments) if returned.operation == "tuple" else (returned,)
    )

    def refuse(node: ast.AST, message: str, hint: str | None = None) -> errors.BadPattern:
        return errors.BadPattern(message, at=file.at(node), hint=hint)

    last = function.body[-1]
    assert isinstance(last, ast.Return) and last.value is not None
    if returned.is_leaf:
        raise refuse(last, f"`{name}` computes nothing")
    for root in roots:
        if root.is_leaf:
            raise refuse(last, f"`{name}` returns {described(root)}, which it does not compute")
    if len(set(roots)) < len(roots) or (len(roots) == 1 and roots[0] is not returned):
        raise refuse(last, f"`{name}` returns one value as a tuple", "return only this value, once")
    if not _connected(roots):
        hint = "search for each of them separately"
        raise refuse(last, f"the values that `{name}` returns have nothing in common", hint)
    if graph.mutations:
        raise refuse(graph.mutations[0].node, "a pattern is a pure computation, without writes")
    used = {id(value) for value in returned.walk()}
    for value in graph.values:
        if id(value) not in used and not value.number:
            raise refuse(value.node, f"{name} computes this, but does not return it")
    arguments = all_arguments(function)[method:]
    read = {value.literal for value in returned.walk() if value.operation == "parameter"}
    for argument in arguments:
        if argument.arg not in read:
            raise refuse(argument, f"`{argument.arg}` is not used in the pattern")
    results = last.value.elts if isinstance(last.value, ast.Tuple | ast.List) else [last.value]
    names = tuple(node.id if isinstance(node, ast.Name) else "" for node in results)
    if len(names) < len(roots):  # a name of a tuple
        names = ("",) * len(roots)
    return Pattern(name, tuple(a.arg for a in arguments), graph, roots, names)


def _connected(roots: tuple[Value, ...]) -> bool:
    """Whether each of several results shares an operand with an earlier one."""
    seen = {id(value) for value in roots[0].walk()}
    for root in roots[1:]:
        own = {id(value) for value in root.walk() if value.operation != "constant"}
        if seen.isdisjoint(own):
            return False
        seen |= own
    return True


@functools.cache
def named_operations(pattern: types.FunctionType) -> frozenset[str]:
    """Operations that every match of a pattern contains, from the names in its code object.

    Functions of rules that it calls are included. Operators are left out, and so are names with
    another meaning in Python or `math`.
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
            # Not a recursive call: `def silu(x): return F.silu(x)`.
            if isinstance(value, types.FunctionType) and value is not function:
                ours = value.__module__ == pattern.__module__
                pending += [value] if ours or value.__module__.startswith(RULES) else []
            elif not (hasattr(builtins, name) or ("math" in code.co_names and hasattr(math, name))):
                found.add(SYNONYMS.get(name, name))
    return frozenset(found & certain)


# Operations that are folded if their operands are constants.
_FOLDED = {"add", "sub", "mul", "div", "pow", "neg"}
