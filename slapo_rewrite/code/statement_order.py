"""Reordering of statements: runs of plain statements in a block, and their valid orders."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from slapo_rewrite.code.blocks import blocks, with_statements
from slapo_rewrite.code.dataflow import bound_in, read_in
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.liveness import local_names
from slapo_rewrite.code.names import self_path
from slapo_rewrite.code.sinking import are_next, is_alone

# The greatest number of statements in a run, and of orders of a run.
LONGEST, MOST_ORDERS = 6, 60
_PLAIN = (
    *(ast.Name, ast.Constant, ast.BinOp, ast.UnaryOp, ast.keyword, ast.Tuple, ast.List),
    *(ast.Subscript, ast.Slice, ast.operator, ast.unaryop, ast.expr_context),
)
# Compound statements whose blocks are searched: nothing else observes the order in them.
_ENTERED = (ast.If, ast.For, ast.While, ast.With)


@dataclass(frozen=True)
class Callee:
    """A submodule or attribute that a statement uses: its path below `self`, and whether called."""

    path: str
    is_called: bool


def orders(
    file: SourceFile,
    function: ast.FunctionDef,
    is_pure: Callable[[str], bool],
    is_known: Callable[[Callee], bool],
    are_apart: Callable[[str, str], bool],
) -> Iterator[tuple[tuple[ast.stmt, ...], list[tuple[ast.stmt, ...]]]]:
    """Runs of statements that can be reordered, each with its other orders.

    Two statements that read the same value keep their order, since the backward pass sums their
    contributions to its gradient in that order. `is_pure` says whether an operation has no side
    effects, `is_known` whether a use of `self` has none, and `are_apart` whether two paths below
    `self` share no parameters.
    """
    names = local_names(function)
    is_value = functools.partial(_is_value, file, names, is_pure, is_known)
    for run in _runs(file, function.body, is_value):
        ordered = {
            (one, other)
            for n, one in enumerate(run)
            for other in run[n + 1 :]
            if _depend(one, other, names, are_apart)
        }
        found: list[tuple[ast.stmt, ...]] = []
        for order in _sorted((), run, ordered):
            found.append(order)
            if len(found) > MOST_ORDERS:
                break
        if 1 < len(found) <= MOST_ORDERS:
            yield run, [order for order in found if order != run]


def reordered(
    function: ast.FunctionDef, run: Sequence[ast.stmt], order: Sequence[ast.stmt]
) -> ast.FunctionDef:
    """A copy of a function with a run in another order; the statements are the same objects."""
    places = dict(zip(run, order, strict=True))
    return with_statements(function, lambda each, made: [places.get(each, made)])


def _runs(
    file: SourceFile, body: Sequence[ast.stmt], is_value: Callable[[ast.AST], bool]
) -> Iterator[tuple[ast.stmt, ...]]:
    """Maximal runs of consecutive assignments of pure expressions to names."""
    run: list[ast.stmt] = []
    for statement in [*body, None]:
        match statement:
            case ast.Assign(targets=[ast.Name()], value=value) if is_alone(file, statement):
                follows = is_value(value)
            case _:
                follows = False
        if follows and statement is not None and (not run or are_next(file, run[-1], statement)):
            run.append(statement)
            continue
        if 1 < len(run) <= LONGEST:
            yield tuple(run)
        run = [statement] if follows and statement is not None else []
        for block in blocks(statement) if isinstance(statement, _ENTERED) else ():
            yield from _runs(file, block, is_value)


def _is_value(
    file: SourceFile,
    names: frozenset[str],
    is_pure: Callable[[str], bool],
    is_known: Callable[[Callee], bool],
    node: ast.AST,
) -> bool:
    is_value = functools.partial(_is_value, file, names, is_pure, is_known)
    match node:
        case ast.Call(func=func, args=args, keywords=keywords):
            if not all(map(is_value, [*args, *keywords])):
                return False
            if path := self_path(func):
                return is_known(Callee(path, True))
            qualified = file.qualified(func)
            if qualified is not None and not names & read_in(func):
                return qualified.startswith("torch.") and is_pure(qualified.rpartition(".")[2])
            if not isinstance(func, ast.Attribute) or self_path(func.value) is not None:
                return False
            return is_pure(func.attr) and is_value(func.value)
        case ast.Attribute() if path := self_path(node):
            return is_known(Callee(path, False))
        case ast.Name(id=name):
            return name in names
        case _ if isinstance(node, _PLAIN):
            return all(map(is_value, ast.iter_child_nodes(node)))
    return False


def _depend(
    one: ast.stmt, other: ast.stmt, names: frozenset[str], are_apart: Callable[[str, str], bool]
) -> bool:
    """Whether two statements must stay in this order."""
    reads, bound = (
        [set(f(s)) & names - {"self"} for s in (one, other)] for f in (read_in, bound_in)
    )
    if bound[0] & (reads[1] | bound[1]) or reads[0] & (bound[1] | reads[1]):
        return True
    return not all(are_apart(a, b) for a in _paths(one) for b in _paths(other))


def _paths(statement: ast.stmt) -> list[str]:
    """The paths below `self` that a statement mentions, including prefixes of others."""
    parts = (node for node in ast.walk(statement) if isinstance(node, ast.expr))
    return [path for part in parts if (path := self_path(part))]


def _sorted(
    done: tuple[ast.stmt, ...], left: Sequence[ast.stmt], ordered: set[tuple[ast.stmt, ast.stmt]]
) -> Iterator[tuple[ast.stmt, ...]]:
    """The orders that respect the dependencies, the given one first."""
    if not left:
        yield done
    for each in left:
        if not any((other, each) in ordered for other in left):
            rest = [other for other in left if other is not each]
            yield from _sorted((*done, each), rest, ordered)
