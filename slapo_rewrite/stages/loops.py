"""Loops over layers, and loops over a part of their iterations."""

from __future__ import annotations

import ast
from collections.abc import Collection
from dataclasses import dataclass

from slapo_rewrite.code.names import is_name, self_path
from slapo_rewrite.stages.written_text import rewritten


@dataclass(frozen=True)
class Loop:
    """The lists and variables of a loop over layers."""

    lists: tuple[str, ...]  # the texts of the lists of layers; several for `zip`
    first: int  # the first layer
    stop: str  # the text of the slice's end; empty without one
    target: str  # the loop variables for layers
    counter: str | None = None  # the variable that counts iterations
    start: int = 0  # its first value
    # The reads of layers by index, for `range(len(self.layers))`.
    read: tuple[ast.expr, ...] = ()

    def ends_before(self, layer: int) -> bool:
        """Whether the slice ends before a layer."""
        return self.stop.isdigit() and int(self.stop) <= layer

    def is_last(self, layer: int, total: int) -> bool:
        """Whether a layer is the last one of the loop."""
        return layer + 1 == (min(int(self.stop), total) if self.stop.isdigit() else total)

    def head(self, first: int, stop: int | None, counted: bool) -> tuple[str, str]:
        """The variables and the iterable for some iterations; up to the end if `stop` is None.

        `counted` if the body reads the number of the iteration.
        """
        first = max(first, self.first)
        upper = self.stop if stop is None else str(stop)
        part = f"[{first or ''}:{upper}]" if first or upper else ""
        chosen = [f"{listed}{part}" for listed in self.lists]
        over = chosen[0] if len(chosen) == 1 else f"zip({', '.join(chosen)})"
        if not counted:
            return self.target, over
        start = self.start + first - self.first
        return (
            f"{self.counter}, {self.target}",
            f"enumerate({over}{f', start={start}' * bool(start)})",
        )


def loop_over(statement: ast.stmt) -> Loop | None:
    """The loop over layers that a statement is; None for other statements."""
    if not isinstance(statement, ast.For):
        return None
    match statement.target, statement.iter:
        case (
            ast.Tuple(elts=[ast.Name(id=counter), target]),
            ast.Call(func=ast.Name(id="enumerate"), args=[listed, *more], keywords=keywords),
        ):
            starts = [*more, *(k.value for k in keywords)]
            if len(starts) > 1 or not all(_is_number(s) for s in starts):
                return None
            (start,) = [ast.literal_eval(s) for s in starts] or [0]
            part = _lists(listed)
            return Loop(*part, ast.unparse(target), counter, start) if part else None
        case (
            ast.Name(id=counter),
            ast.Call(
                func=ast.Name(id="range"),
                args=[ast.Call(func=ast.Name(id="len"), args=[ast.expr() as listed])],
            ),
        ):
            return _by_number(statement, counter, listed)
    part = _lists(statement.iter)
    targets = statement.target.elts if isinstance(statement.target, ast.Tuple) else []
    names = ", ".join(map(ast.unparse, targets or [statement.target]))
    return Loop(*part, names) if part else None


def _lists(listed: ast.expr) -> tuple[tuple[str, ...], int, str] | None:
    """The lists of layers that a loop runs over in parallel, with the bounds of their slices."""
    match listed:
        case ast.Call(func=ast.Name(id="zip"), args=[_, *_] as several, keywords=[]):
            parts = [_slice(each) for each in several]
        case _:
            parts = [_slice(listed)]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts) or len({part[1:] for part in found}) > 1:
        return None
    return tuple(part[0] for part in found), *found[0][1:]


def _by_number(loop: ast.For, counter: str, layers: ast.expr) -> Loop | None:
    """A loop over the indices of layers that only reads each as `self.layers[index]`."""
    nodes = [n for statement in loop.body for n in ast.walk(statement)]
    path = self_path(layers)
    named = [n.attr for n in ast.walk(layers) if isinstance(n, ast.Attribute)]
    if not path:
        return None
    name, *_ = named
    all_reads = [
        n for n in nodes if isinstance(n, ast.Attribute | ast.Subscript) and self_path(n) == path
    ]
    read = [
        n
        for n in nodes
        if isinstance(n, ast.Subscript) and is_name(n.slice, counter) and n.value in all_reads
    ]
    singular = name.removesuffix("s") if name.endswith("s") else f"{name}_layer"
    taken = {n.id for n in nodes if isinstance(n, ast.Name)}
    if len(read) != len(all_reads) or singular in taken:
        return None
    return Loop((ast.unparse(layers),), 0, "", singular, counter, read=tuple(read))


def _slice(listed: ast.expr) -> tuple[str, int, str] | None:
    """A list of layers, with the bounds of a slice of it."""
    first, stop = 0, ""
    match listed:
        case ast.Subscript(value=inner, slice=ast.Slice(lower=lower, upper=upper, step=None)):
            if lower is not None and not _is_number(lower):
                return None
            first = ast.literal_eval(lower) if lower is not None else 0
            stop = ast.unparse(upper) if upper is not None else ""
            listed = inner
    return (ast.unparse(listed), first, stop) if self_path(listed) else None


def path_of(listed: str) -> str:
    """The path of a list in the module tree."""
    return self_path(ast.parse(listed, mode="eval").body) or ""


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


def sliced(text: str, first: int, stop: int | None, bound: Collection[str] = ()) -> str:
    """The text of a loop over some of its layers; `bound` are the names that are read after it."""
    statement = ast.parse(text).body[0]
    loop = loop_over(statement)
    assert isinstance(statement, ast.For) and loop is not None
    is_read = loop.counter in bound or is_counted(statement, loop)
    target, over = loop.head(first, stop, is_read)
    edits: dict[ast.expr, str] = {statement.target: target, statement.iter: over}
    return rewritten(text, edits | dict.fromkeys(loop.read, loop.target))


def is_counted(statement: ast.For, loop: Loop) -> bool:
    """Whether the body uses the number of the iteration other than to index the layers."""
    inner = {n for node in loop.read for n in ast.walk(node)}
    return any(
        is_name(n, loop.counter) and n not in inner for s in statement.body for n in ast.walk(s)
    )
