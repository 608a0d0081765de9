"""Replaces matches for `apply`, `fuse` and `replace`, by new modules for `replace` only."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.changes.imports import SCHEDULE, Function
from slapo_rewrite.changes.source_rewrite import Rewrite
from slapo_rewrite.code.text import may_be_bound, with_wildcards
from slapo_rewrite.fusion.claims import Calling, Claim, Skipped
from slapo_rewrite.fusion.engine import Engine
from slapo_rewrite.fusion.fused_module import Packed, packed
from slapo_rewrite.fusion.match_rules import Looked
from slapo_rewrite.groups import grouped
from slapo_rewrite.model.tree import Node
from slapo_rewrite.patterns.search import Match, Matches, Miss
from slapo_rewrite.primitives.base import Call, function_of
from slapo_rewrite.primitives.find import found
from slapo_rewrite.runtime.weights import weight_of

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def engine_of(call: Call) -> Engine:
    """The engine that turns the claims of a call into edits."""
    return Engine(call.tree, call.sources, call.states, call.directive, call.references)


def carried_out(
    engine: Engine,
    claims: Sequence[Claim],
    left: Sequence[Skipped],
    rules: Sequence[tuple[str, Looked]] = (),
) -> Rewrite:
    """The edits of one schedule line's claims; raises `NoMatch` if none can be applied."""
    kept, stopped = engine.sorted_out(claims)
    hard = [each for each in stopped if not each.harmless]
    if hard or not kept:
        raise engine.refused([*hard, *stopped, *left][0])
    return rewritten(engine, kept, stopped, left, rules)


def rewritten(
    engine: Engine,
    kept: Sequence[Claim],
    stopped: Sequence[Skipped],
    left: Sequence[Skipped],
    rules: Sequence[tuple[str, Looked]],
) -> Rewrite:
    """The edits of claims; edits of branches in between come first, as a rewrite of their own."""
    if (opened := engine.opened(kept)) is not None:
        return opened
    again = bool(kept and rules) and any(each.waits for each in stopped)
    return replace(engine.rewrite(kept, _noted(rules, kept, [*left, *stopped])), again=again)


def opening(engine: Engine, match: Match, name: str) -> Claim:
    """A temporary claim: branches are opened for other matches, then the search is repeated."""
    return Claim(match, engine.tree.nodes[match.path], Calling(name, name, ()), {}, name, values={})


def _noted(
    rules: Sequence[tuple[str, Looked]], kept: Sequence[Claim], left: Sequence[Skipped]
) -> tuple[Mapping[str, object], ...]:
    """The outcome of each rule, for the record: where it was applied, and why not elsewhere."""
    notes = []
    for name, looked in rules:
        own = [(with_wildcards(c.node.path), c) for c in kept if c.what == name]
        note: dict[str, object] = {
            "rule": name,
            "applied": list(dict.fromkeys(path for path, _ in own)),
            "chosen": {path: claim.why for path, claim in own if claim.why},
            "none in training": list(
                dict.fromkeys(n for _, c in own if c.spread for n in c.spread.absent)
            ),
            "left": {
                with_wildcards(each.claim.node.path): each.reason
                for each in left
                if each.claim.what == name
            },
        }
        note = {key: found for key, found in note.items() if found}
        if "applied" not in note and "left" not in note:
            if (miss := looked.nearest) is not None:
                where = f"{with_wildcards(miss.path) or 'the model'}, {miss.function}"
                found = f"{miss.stop.matched} of {miss.size} operations found"
                note["nearest"] = f"{where}: {miss.stop.reason} ({found})"
            elif looked.lacking:
                note["lacking"] = sorted(looked.lacking)
        notes.append(note)
    return tuple(notes)


def nothing_found(name: str, nearest: Miss | None) -> errors.NoMatch:
    """The error for a computation that is not found."""
    if nearest is None:
        return errors.NoMatch(f"`{name}` matches nothing here, and there is no near miss")
    places = nearest.places
    return errors.NoMatch(
        f"`{name}` matches nothing; nearest is `{nearest.path or 'the model'}`, "
        f"{nearest.function}: {nearest.stop.reason}",
        at=places[0],
        also=places[1:],
        hint=nearest.stop.hint,
    )


def replaced(call: Call, nodes: list[Node]) -> Rewrite:
    """Replaces each match by a call of the new function or module."""
    new = call.arguments["new_mod"]
    function = function_of(call, new, "what takes the place of a pattern")
    matches = found(call, nodes)
    if not matches:
        said = getattr(call.arguments["pattern"], "__name__", str(call.arguments["pattern"]))
        raise nothing_found(said, matches.nearest)
    engine, is_module = engine_of(call), isinstance(new, type)
    if is_module and isinstance(call.arguments["pattern"], str):
        return in_place_of(engine, call, matches, function)
    if is_module and call.arguments["weights"] is not None:
        raise errors.Unsupported(
            "`weights` is only for replacing a whole module, or several calls on one operand"
        )
    for name in ("args", "weights", "name"):
        if call.arguments[name] is not None and not is_module:
            raise errors.BadArgument(
                f"`{name}` is only for a module, but `{function.name}` is a function"
            )
    origin = dotted(function)
    if not is_module:
        return carried_out(engine, [_claim(call, m, new, origin) for m in matches], [])
    name, main = module_name(call), call.sources.main
    made = f"self.{name} = {engine.speller(origin)}({call.arguments['args'] or ''})"
    claims = []
    for match in matches:
        if hasattr(call.tree.nodes[match.path].live, name):
            where = type(call.tree.nodes[match.path].live).__name__
            raise errors.NameTaken(f"`{where}` already has a `{name}`")
        claim = _claim(call, match, new, f"{main.name}.self.{name}")
        claims.append(replace(claim, constructor=made))
    return carried_out(engine, claims, [])


def _claim(call: Call, match: Match, new: Callable[..., Any], origin: str) -> Claim:
    """A call with the match's operands: by name, or by position if the names differ."""
    name = origin.rpartition(".")[2]
    called: Callable[..., Any] = getattr(new, "forward", new)
    parameters = list(inspect.signature(called).parameters.values())
    parameters = parameters[1:] if isinstance(new, type) else parameters
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        raise errors.BadArgument(f"`{name}` must name each of its parameters")
    needed = [p for p in parameters if p.default is p.empty]
    taken = [p for p in parameters if p.name in match.operands]
    operands = dict(match.operands)
    lost = [n for n in operands if n not in {p.name for p in taken}]
    by_name = {p.name for p in needed} <= operands.keys()
    if not by_name or any(match.values[n].operation not in ("constant", "training") for n in lost):
        taken = [p for p in parameters if p.kind in _BY_POSITION][: len(operands)]
        if len(taken) < len(operands) or len(needed) > len(operands):
            raise errors.BadArgument(
                f"`{name}` takes {_listed(p.name for p in parameters)}, but the pattern has "
                f"{_listed(operands)}",
                hint="give both the same parameters",
            )
        operands = dict(zip((p.name for p in taken), operands.values(), strict=True))
    # Arguments after a parameter that is left out are passed by keyword.
    plain = [
        p for p, q in zip(taken, parameters, strict=False) if p is q and p.kind in _BY_POSITION
    ]
    others = [p.name for p in taken if p not in plain]
    expression = Calling(name, origin, tuple(p.name for p in plain), tuple(others))
    node = call.tree.nodes[match.path]
    values = dict(zip(operands, match.values.values(), strict=True))
    return Claim(match, node, expression, operands, name, values=values)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "nothing"


def in_place_of(engine: Engine, call: Call, matches: Matches, target: Function) -> Rewrite:
    """Replaces several calls on one operand by one module, in subclasses."""
    name = module_name(call)
    groups = grouped((group[0].path, group) for group in matches.groups)
    alone = [m for m in matches if not any(m in g for g in groups.get(m.path, ()))]
    if alone or any(len(g) > 1 for g in groups.values()):
        wrong = alone[0] if alone else next(g for g in groups.values() if len(g) > 1)[1][0]
        raise errors.NoMatch(
            "there is no other call on the same operand"
            if alone
            else "several groups of calls on one operand match",
            at=wrong.place,
            hint="let the expression match only the calls that one module replaces",
        )
    given = call.arguments["weights"]
    weights = {f"{name}.{n}": weight_of(w) for n, w in given.items()} if given else None
    new = Packed(name, dotted(target), call.arguments["args"], weights)
    return packed(engine, [(new, group) for (group,) in groups.values()])


def class_of(call: Call, node: Node) -> Any:
    """The new class, from the rewritten source."""
    assert call.done is not None
    return inspect.unwrap(node.cls.__init__).__globals__[call.done.classes[node.path].name]


def module_name(call: Call) -> str:
    """The attribute name of the new module: as given, or its class's name in snake case."""
    given: str | None = call.arguments["name"]
    if given is None:
        given = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", call.arguments["new_mod"].__name__).lower()
    if not may_be_bound(given):
        raise errors.BadArgument(f"{given!r} is not a valid name of a module")
    return given


def dotted(target: Function) -> str:
    """The name by which the model file may refer to a class or function."""
    module = target.module or SCHEDULE
    module = "torch.nn" if module.startswith("torch.nn.modules.") else module
    return f"{module}.{target.name}"


def check_stateless(call: Call, node: Node) -> None:
    """Raises `WeightsMisfit` for a new module with tensors, whose values are not known."""
    name = module_name(call) if isinstance(call.arguments["new_mod"], type) else ""
    held = node.children.get(name)
    if held is not None and (tensors := list(held.live.state_dict())):
        raise errors.WeightsMisfit(
            f"{held.shown} would hold `{tensors[0]}`, and its values are not known",
            hint="pass the pattern's parameters to the function, or replace the whole module, with "
            "weights=...",
        )
