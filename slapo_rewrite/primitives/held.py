"""`replace` with a pattern and a module class: the module is made, and called in its place."""

from __future__ import annotations

import inspect
import re
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.changes.imports import Function
from slapo_rewrite.changes.source_rewrite import Rewrite
from slapo_rewrite.fusion.engine import Engine
from slapo_rewrite.fusion.fused_module import Packed, packed
from slapo_rewrite.fusion.spelled_names import SCHEDULE
from slapo_rewrite.model.tree import Node
from slapo_rewrite.patterns.search import Match, Matches
from slapo_rewrite.primitives.base import Call
from slapo_rewrite.runtime.weights import weight_of


def in_place_of(engine: Engine, call: Call, matches: Matches, target: Function) -> Rewrite:
    """Subclasses that hold one module in the place of several calls on one operand.

    Raises:
        NoMatch: The calls do not stand side by side.
        BadArgument: What the module is made with is not known.
    """
    name = module_name(call)
    groups: dict[str, list[tuple[Match, ...]]] = {}
    for group in matches.groups:
        groups.setdefault(group[0].path, []).append(group)
    alone = [m for m in matches if not any(m in g for g in groups.get(m.path, ()))]
    if alone or any(len(g) > 1 for g in groups.values()):
        wrong = alone[0] if alone else next(g for g in groups.values() if len(g) > 1)[1][0]
        raise errors.NoMatch(
            "this call stands beside no other on the same operand"
            if alone
            else "there are calls side by side in several places",
            at=wrong.place,
            hint="let the expression match the calls that one module is to take the place of",
        )
    given = call.arguments["weights"]
    weights = {f"{name}.{n}": weight_of(w) for n, w in given.items()} if given else None
    new = Packed(name, dotted(target), call.arguments["args"], weights)
    return packed(engine, [(new, group) for (group,) in groups.values()])


def class_of(call: Call, node: Node) -> Any:
    """The new class, as the rewritten source defines it."""
    assert call.done is not None
    return inspect.unwrap(node.cls.__init__).__globals__[call.done.classes[node.path].name]


def module_name(call: Call) -> str:
    """What the new module is called: as given, or its class's name in small letters."""
    given: str | None = call.arguments["name"]
    if given is None:
        given = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", call.arguments["new_mod"].__name__).lower()
    if not given.isidentifier():
        raise errors.BadArgument(f"{given!r} is no name for a module")
    return given


def dotted(target: Function) -> str:
    """The name by which the model file may refer to a class or function."""
    module = target.module or SCHEDULE
    module = "torch.nn" if module.startswith("torch.nn.modules.") else module
    return f"{module}.{target.name}"


def check_stateless(call: Call, node: Node) -> None:
    """Refuses a new module whose parameters nothing says the values of.

    Raises:
        WeightsMisfit: It holds some.
    """
    name = module_name(call) if isinstance(call.arguments["new_mod"], type) else ""
    held = node.children.get(name)
    if held is not None and (tensors := list(held.live.state_dict())):
        raise errors.WeightsMisfit(
            f"{held.shown} would hold `{tensors[0]}`, and nothing says what that is made of",
            hint="give the function what the pattern's own parameters stand for, or replace the "
            "whole module, with weights=...",
        )
