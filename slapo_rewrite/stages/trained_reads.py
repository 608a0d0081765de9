"""Finds statements that use parameters."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from slapo_rewrite.code.names import is_name
from slapo_rewrite.code.syntax import tree_of
from slapo_rewrite.stages.written_text import module_reads

LOSSES_OF_PARTS = ("vocab_parallel_cross_entropy", "vocab_parallel_criterion")


def trains(model: Any, text: str) -> bool:
    """Whether a text calls a module with parameters, or reads a parameter."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and any(is_name(node.func, n) for n in LOSSES_OF_PARTS):
            # They only read the number of classes of their `head`.
            node.keywords = [k for k in node.keywords if k.arg != "head"]
    return any(has_parameters(model, steps) for steps in reads_of(model, ast.unparse(tree)))


def reads_of(model: Any, text: str) -> Iterator[list[str]]:
    """The attribute chains of the model that a text reads, also in methods that it calls."""
    waiting = list(module_reads(text))
    looked_into: set[Any] = set()
    while waiting:
        steps = waiting.pop(0)
        yield steps
        path, owner, rest = reached(model, steps)
        method = getattr(type(owner), rest[0], None) if rest else None
        if (body := source_of(method)) and (method, *path) not in looked_into:
            looked_into.add((method, *path))
            waiting += [[*path, *more] for more in module_reads(body)]


def reached(model: Any, steps: Sequence[str]) -> tuple[Sequence[str], Any, Sequence[str]]:
    """The last module in a chain of attributes, after its path, and the attributes after it."""
    owner = model
    for number, step in enumerate(steps):
        inner = getattr(owner, "_modules", {}).get(step)
        if inner is None:
            return steps[:number], owner, steps[number:]
        owner = inner
    return steps, owner, ()


def source_of(method: Any) -> str | None:
    """The source of a method or property, unless it is torch's or not available."""
    method = method.fget if isinstance(method, property) else method
    if not inspect.isfunction(method) or method.__module__.startswith("torch."):
        return None
    return ast.unparse(tree_of(method))


def has_parameters(model: Any, steps: Sequence[str]) -> bool:
    """Whether a chain of attributes leads to a parameter, or to a module with parameters."""
    _, owner, rest = reached(model, steps)
    if rest:
        return owner._parameters.get(rest[0]) is not None
    return any(True for _ in owner.parameters())
