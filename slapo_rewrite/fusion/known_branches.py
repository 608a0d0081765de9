"""Matches across a branch with a known condition: statements around it sink into its arms first.

The known condition only says where this is worthwhile; the written code is right for both values.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from slapo_rewrite import errors
from slapo_rewrite.code.arguments import parameters
from slapo_rewrite.code.sinking import Sunk
from slapo_rewrite.code.splice import apply_edits
from slapo_rewrite.model.node_facts import NodeFacts
from slapo_rewrite.model.sources import Sources
from slapo_rewrite.model.tree import Node
from slapo_rewrite.patterns.code_sinking import drawn
from slapo_rewrite.patterns.graph_of_function import graph_of
from slapo_rewrite.patterns.matching import Mismatch, Note
from slapo_rewrite.patterns.pattern import Pattern
from slapo_rewrite.patterns.search import Match, Matches, Miss, Scope, find_pattern

_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class ConcreteArgs:
    """Arguments of `forward` that count as constants during the search."""

    values: Mapping[str, object]  # their values, by name

    @property
    def key(self) -> tuple[tuple[str, str], ...]:
        """A key for caching."""
        return tuple(sorted((name, repr(value)) for name, value in self.values.items()))


NOTHING = ConcreteArgs({})


def given_for(values: Mapping[str, object] | None, nodes: Iterable[Node]) -> ConcreteArgs:
    """The `concrete_args` of a schedule line; raises for names that no `forward` takes."""
    if values is None:
        return NOTHING
    known: dict[str, None] = {}
    for cls in dict.fromkeys(node.cls for node in nodes):
        _, *own = inspect.signature(inspect.unwrap(cls.forward)).parameters.values()
        known |= dict.fromkeys(p.name for p in own if p.kind not in _STARRED)
    for name in values:
        if name not in known:
            raise errors.BadArgument(
                f"no selected module takes an argument `{name}`",
                hint=errors.did_you_mean(str(name), known) or f"they take {', '.join(known)}",
            )
    return ConcreteArgs(dict(values))


def find(
    pattern: Pattern,
    scopes: Sequence[Scope],
    nodes: Mapping[str, Node],
    sources: Sources,
    given: ConcreteArgs,
) -> Matches:
    """All matches of a pattern in some functions, also across branches with known conditions."""
    found = find_pattern(pattern, scopes)
    more: dict[str, list[Match]] = {}
    misses: dict[str, list[Miss]] = {}
    for scope in found.branched:
        if not (scope.graph.decided or _takes(scope, given)) or _owner(scope) is None:
            continue  # no condition is known, or it is no method
        node = nodes[scope.path]
        taken = {id(s) for m in found if m.path == scope.path for s in m.statements}
        for match in find_pattern(pattern, [_followed(scope, node, sources, given)]):
            if taken.isdisjoint(map(id, match.statements)):
                opened = _opened(match, pattern, scope, node, sources, given)
                if isinstance(opened, Match):
                    more.setdefault(scope.path, []).append(opened)
                elif opened is not None:
                    miss = Miss(scope.path, scope.function, pattern.name, pattern.size, opened)
                    misses.setdefault(scope.path, []).append(miss)
    if not more and not misses:
        return found
    paths = dict.fromkeys(scope.path for scope in scopes)
    every = [m for p in paths for m in (*(m for m in found if m.path == p), *more.get(p, ()))]
    near = [m for own in misses.values() for m in own]
    near = [*near, *(m for m in found.misses if m.path not in misses)]
    return Matches(tuple(every), tuple(m for m in near if m.path not in more), found.first)


def _takes(scope: Scope, given: ConcreteArgs) -> bool:
    """Whether a function is a `forward` with one of the constant arguments."""
    function = scope.graph.function
    if not given.values or scope.function != "forward" or function is None:
        return False
    return any(name in given.values for name in parameters(function))


def _followed(scope: Scope, node: Node, sources: Sources, given: ConcreteArgs) -> Scope:
    """The scope of a method with only the taken arm of each branch with a known condition."""
    values = given.values if _takes(scope, given) else {}
    key = (sources.fingerprints.of(node), scope.function, given.key if values else ())
    if key not in sources.followed:
        file, function = scope.graph.file, scope.graph.function
        assert function is not None
        facts = NodeFacts(node, sources)
        sources.followed[key] = graph_of(file, function, facts, method=True, given=values)
    return replace(scope, graph=sources.followed[key])


def _owner(scope: Scope) -> str | None:
    """The class of a method; None for a plain function."""
    file, function = scope.graph.file, scope.graph.function
    return next((c for c in file.classes if function in file.methods(c)), None)


def _opened(
    match: Match, pattern: Pattern, scope: Scope, node: Node, sources: Sources, given: ConcreteArgs
) -> Match | Mismatch | None:
    """A match across a branch with the statements to sink, or the obstacle."""
    file, function = scope.graph.file, scope.graph.function
    assert function is not None
    stop: Mismatch | None = None
    for branch in _followed(scope, node, sources, given).graph.decided:
        way = drawn(file, function, branch, match.statements)
        if isinstance(way, Sunk) and _is_found(way, pattern, scope, node, sources):
            return replace(match, drawn=way)
        if isinstance(way, str) and stop is None:
            reason = f"a branch is in between that cannot take in the code around it: {way}"
            result = Note(file, match.root.site.node, "the result")
            spots = (Note(file, branch, "this branch"), result)
            stop = Mismatch(reason, spots, matched=pattern.size, complete=True, between=True)
    return stop


def _is_found(way: Sunk, pattern: Pattern, scope: Scope, node: Node, sources: Sources) -> bool:
    """Whether a pattern has more matches after statements sink into a branch."""
    file = way.file.edited(apply_edits(way.file.text, way.edits())[0])
    owner = _owner(scope)
    function = file.method(owner, scope.function) if owner is not None else None
    assert function is not None
    graph = graph_of(file, function, NodeFacts(node, sources), method=True)
    before = find_pattern(pattern, [scope])
    return len(find_pattern(pattern, [replace(scope, graph=graph)])) > len(before)
