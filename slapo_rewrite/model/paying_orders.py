"""Finds the order of independent statements with the lowest peak memory, by measuring each."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from slapo_rewrite.code.dead_values import deaths
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.statement_order import Callee, orders, reordered
from slapo_rewrite.model.held_memory import recorded
from slapo_rewrite.model.meta_device import gives_alone
from slapo_rewrite.model.paying_releases import LEAST_OF_CALL, LEAST_OF_MODEL, two_of_each
from slapo_rewrite.model.tree import Node, Tree
from slapo_rewrite.model.uncalled import beyond_forward
from slapo_rewrite.model.watched_functions import Live

# Layers that are not random and have no side effects.
_LAYERS = (
    *(nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.Conv1d, nn.Conv2d),
    *(nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softmax, nn.Identity),
)


@dataclass(frozen=True)
class Order:
    """A new order of statements of a function."""

    run: tuple[ast.stmt, ...]  # the statements, in the old order
    order: tuple[ast.stmt, ...]  # the statements, in the new order


def paying_order(
    tree: Tree,
    file: SourceFile,
    lives: Sequence[Live],
    users: Callable[[ast.FunctionDef], Iterable[Node]],
    given: Sequence[Mapping[str, Any]],
) -> Order | None:
    """An order of one run of statements that lowers the peak memory; None if there is none."""
    for live in lives:
        modules = [node.live for node in users(live.function)]
        known, apart = partial(_is_known, modules), partial(_are_apart, modules)
        for run, others in orders(file, live.function, gives_alone, known, apart):
            before = _peaks(tree, file, lives, live, given)
            best, least = None, [(peak, peak) for peak, _ in before]
            for order in others:
                made = replace(live, function=reordered(live.function, run, order))
                peaks = _peaks(tree, file, lives, made, given, instead_of=live)
                pairs = list(zip(before, peaks, least, strict=True))
                worse = any(new > old for (old, _), (new, _), _ in pairs)
                if not worse and any(new < low - slack for (_, slack), (new, _), (_, low) in pairs):
                    best, least = order, [(old, new) for (old, _), (new, _), _ in pairs]
            if best is not None:
                return Order(run, best)
    return None


def _peaks(
    tree: Tree,
    file: SourceFile,
    lives: Sequence[Live],
    live: Live,
    given: Sequence[Mapping[str, Any]],
    instead_of: Live | None = None,
) -> list[tuple[float, float]]:
    """The peak memory of calls with all dead variables deleted, and the least gain that matters.

    For each of the inputs there are two pairs: the whole model in training, and a call in eval.
    """
    watched = [live if each is (instead_of or live) else each for each in lives]
    names = [death for each in watched for death in deaths(file, each.function)]
    found: list[tuple[float, float]] = []
    for inputs in given:
        for training in (True, False):
            with two_of_each(tree):
                record = recorded(tree, inputs, file, watched, names, training=training)
            held = record.held()
            spans = [(0, len(held))]
            if not training:
                spans = [(f.first, f.last) for f in record.frames if f.function is live.function]
            spans = [(first, last) for first, last in spans if first < last]
            peak = max((max(held[first:last]) for first, last in spans), default=0)
            added = max((max(held[a:b]) - held[a] + record.sizes[a] for a, b in spans), default=0)
            found.append((peak, max(LEAST_OF_CALL * added, LEAST_OF_MODEL * max(held, default=0))))
    return found


def _is_known(modules: Sequence[nn.Module], callee: Callee) -> bool:
    """Whether an attribute of modules can be read or called without side effects."""
    found = [_at(module, callee.path) for module in modules]
    if callee.is_called:
        plain = (type(each) in _LAYERS and beyond_forward(each) is None for each in found)
    else:
        plain = (each is not None and not isinstance(each, nn.Module) for each in found)
    return bool(found) and all(plain)


def _are_apart(modules: Sequence[nn.Module], one: str, other: str) -> bool:
    """Whether the attributes at two paths of modules share no parameters."""
    return all(_parameters(m, one).isdisjoint(_parameters(m, other)) for m in modules)


def _at(module: nn.Module, path: str) -> Any:
    """The value at a path of a module, without running properties; None without one."""
    found: Any = module
    for name in path.split("."):
        spaces = [vars(found)] if hasattr(found, "__dict__") else []
        if isinstance(found, nn.Module):
            spaces += [found._modules, found._parameters, found._buffers]
        found = next((space[name] for space in spaces if name in space), None)
    return found


def _parameters(module: nn.Module, path: str) -> set[int]:
    found = _at(module, path)
    return set(map(id, found.parameters() if isinstance(found, nn.Module) else [found]))
