"""Alternative ends of stages, if these cannot end between layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

from slapo_rewrite.model.calls import calls_noted
from slapo_rewrite.model.tree import is_container

MOST = 6  # each is tested, which takes a training step of a small model


def other_ends(model: nn.Module, small: nn.Module, step: Callable[[], Any]) -> list[str]:
    """The modules after which the first of two stages may end, the most even divisions first.

    A training step calls them exactly once, they are not layers of a list, and parameters are used
    before and after their end.

    Returns:
        At most `MOST` paths. Of several with the same division, the one nearest the root.
    """
    inside = {path: module for path, module in small.named_modules() if path}
    with calls_noted(inside, leaving=True) as returned:
        step()
    counts = Counter(returned)
    modules = dict(model.named_modules())
    total = sum(parameter.numel() for parameter in model.parameters())
    used: dict[int, int] = {}
    found: dict[int, str] = {}
    for path in (path for path in returned if path in modules):
        own = modules[path].parameters(recurse=False)
        used |= {id(parameter): parameter.numel() for parameter in own}
        before = sum(used.values())
        is_layer = any(step.isdigit() for step in path.split("."))
        if counts[path] > 1 or is_layer or is_container(type(modules[path])):
            continue
        nearest = found.get(before)
        if nearest is None or path.count(".") < nearest.count("."):
            found[before] = path
    even = sorted(found.keys() - {0, total}, key=lambda before: abs(2 * before - total))
    return [found[before] for before in even[:MOST]]
