"""Searches the modules of a tree for matches of rules."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from slapo_rewrite import errors
from slapo_rewrite.examples import BY_KERNEL
from slapo_rewrite.fusion.backends import Always, Backends, Choice
from slapo_rewrite.fusion.claims import Calling, Claim, Renamed, Skipped, Template, template_of
from slapo_rewrite.fusion.kernel_forms import in_torch
from slapo_rewrite.fusion.known_branches import NOTHING, ConcreteArgs, find
from slapo_rewrite.fusion.rule import Alternative, Rule, RuleMatch
from slapo_rewrite.model.node_facts import NodeFacts
from slapo_rewrite.model.pattern_classes import as_module, facts_of_pattern
from slapo_rewrite.model.sources import Sources
from slapo_rewrite.model.tree import Node
from slapo_rewrite.patterns.pattern import Pattern, named_operations, pattern_of
from slapo_rewrite.patterns.search import Match, Matches, Miss, Scope, find_calls, scopes_of

KERNELS = Always()


def pattern_for(wanted: object, sources: Sources) -> Pattern:
    """The pattern of a function or module class; raises `BadArgument` for anything else."""
    module = as_module(wanted)
    if module is not None:
        return pattern_of(module, facts_of_pattern(module, sources.main))
    if isinstance(wanted, types.FunctionType):
        return pattern_of(wanted)
    raise errors.BadArgument(
        f"a pattern is a function, a module class or a regular expression, not {wanted!r}"
    )


def scopes_for(nodes: Iterable[Node], sources: Sources) -> list[Scope]:
    """The functions of some modules; modules with the same code share their graphs."""
    known = sources.scopes
    found: list[Scope] = []
    for node in nodes:
        number = sources.fingerprints.of(node)
        if number not in known:
            known[number] = scopes_of(node.path, NodeFacts(node, sources))
        found += [replace(scope, path=node.path) for scope in known[number]]
    return found


@dataclass
class Looked:
    """The results of searching for a rule."""

    claims: list[Claim] = field(default_factory=list)  # matches that it replaces
    # Matches that it does not replace, with the reason.
    left: list[Skipped] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)  # the nearest misses
    # The smallest set of a pattern's operations that some function lacks.
    lacking: frozenset[str] = frozenset()

    @property
    def nearest(self) -> Miss | None:
        """The miss that came furthest."""
        return max(self.misses, key=lambda miss: miss.stop.matched, default=None)

    def able(self, scopes: Iterable[Scope], needs: frozenset[str]) -> list[Scope]:
        """The functions that have all of some operations; records what others lack."""
        found = []
        for scope in scopes:
            lacking = needs - scope.graph.operations
            if not lacking:
                found.append(scope)
            elif not self.lacking or len(lacking) < len(self.lacking):
                self.lacking = lacking
        return found


def below(nodes: Iterable[Node]) -> list[Node]:
    """Some modules and all modules below them, each once."""
    return list({inner.path: inner for node in nodes for inner in node.walk()}.values())


def look(
    rule: Rule,
    nodes: Iterable[Node],
    sources: Sources,
    given: ConcreteArgs = NOTHING,
    backends: Backends = KERNELS,
) -> Looked:
    """Finds where a rule can be applied, and with which backend."""
    looked = Looked()
    known: dict[int, list[tuple[Match, Alternative]]] = {}
    for node in nodes:
        number = sources.fingerprints.of(node)
        if number not in known:
            known[number] = list(_matches(rule, node, sources, looked, given))
        for match, alternative in known[number]:
            here = match if match.path == node.path else replace(match, path=node.path)
            _take(rule, RuleMatch(here, node, alternative, sources), looked, backends)
    return looked


def nearest_miss(
    rule: Rule, nodes: Sequence[Node], sources: Sources, given: ConcreteArgs = NOTHING
) -> Miss | None:
    """The nearest miss of a rule without matches, in all functions."""
    scopes, by_path = _editable(nodes, sources), {node.path: node for node in nodes}
    found = [find(compiled(a), scopes, by_path, sources, given) for a in rule.alternatives]
    return Looked(misses=[miss for each in found for miss in each.misses]).nearest


def _editable(nodes: Iterable[Node], sources: Sources) -> list[Scope]:
    return [s for s in scopes_for(nodes, sources) if s.graph.file is sources.main]


def _matches(
    rule: Rule, node: Node, sources: Sources, looked: Looked, given: ConcreteArgs
) -> Iterator[tuple[Match, Alternative]]:
    """The matches of a rule's alternatives in a module, each place once."""
    scopes = _editable([node], sources)
    taken: set[int] = set()
    for alternative in (*rule.alternatives, *rule.calls) if scopes else ():
        if alternative in rule.calls:
            found = find_calls(scopes, alternative.pattern)
        else:
            found = _find(alternative, scopes, node, sources, looked, given)
        looked.misses += found.misses
        for match in found:
            if taken.isdisjoint(map(id, match.nodes)):
                taken.update(map(id, match.nodes))
                yield match, alternative


def _find(
    alternative: Alternative,
    scopes: Sequence[Scope],
    node: Node,
    sources: Sources,
    looked: Looked,
    given: ConcreteArgs,
) -> Matches:
    """Searches for a pattern in the functions of a module that have all of its operations."""
    assert isinstance(alternative.pattern, types.FunctionType)
    able = looked.able(scopes, named_operations(alternative.pattern))
    if not able:  # the usual case: the pattern need not be parsed
        return Matches(())
    pattern = compiled(alternative)
    return find(pattern, looked.able(able, pattern.needs), {node.path: node}, sources, given)


def _take(rule: Rule, found: RuleMatch, looked: Looked, backends: Backends) -> None:
    if (name := rule.after_linear(found)) is not None:
        found = found.with_linear(name)
    reason = rule.refuses(found) or _written_later(rule, found)
    if reason is not None:
        nothing = Calling(rule.name, rule.name, ())
        looked.left.append(Skipped(Claim(found.match, found.node, nothing, {}, rule.name), reason))
        return
    expression = rule.expression(found) or read(rule.replacement(found))
    kernel = kernel_of(expression)
    choice = backends.choose(rule, kernel, found) if kernel is not None else Choice()
    claim = Claim(
        found.match,
        found.node,
        expression,
        rule.operands(found),
        rule.name,
        values={} if isinstance(expression, Renamed) else None,
        linear=found.linear,
        spread=rule.spread(found),
        backend=choice.backend,
        why=choice.why,
    )
    looked.claims.append(claim)


def _written_later(rule: Rule, found: RuleMatch) -> str | None:
    """The reason why a kernel's backward would fail: an operand that it saves is changed later."""
    inside, root = {id(node.node) for node in found.match.nodes}, found.match.root.site
    later = [m for m in found.graph.mutations if m.order > root.order and id(m.node) not in inside]
    if rule.conditions is not BY_KERNEL:
        return None
    for name, value in found.match.values.items():
        own = value.bases
        if value.operation != "parameter":
            # A call may return its argument, but usually does not.
            own = frozenset(base for base in own if isinstance(base, tuple) and base[0] == "made")
        if any(m.target.bases & own for m in later):
            operand = found.operands.get(name, name)
            return f"`{operand}` is written to later, but the kernel keeps it for the backward pass"
    return None


def kernel_of(expression: Calling | Renamed | Template) -> str | None:
    """The dotted name of the function with several backends that an expression calls, if any."""
    names = expression.names() if isinstance(expression, Template) else [expression.origin]
    return next((name for name in names if in_torch(name) is not None), None)


@functools.cache
def compiled(alternative: Alternative) -> Pattern:
    """An alternative's pattern, cached."""
    module = as_module(alternative.pattern)
    if module is not None:
        raise errors.BadPattern(
            f"`{type(module).__name__}`: the pattern of a rule is a function",
            hint="make the module's tensors parameters of the function",
        )
    assert isinstance(alternative.pattern, types.FunctionType)
    return pattern_of(alternative.pattern)


read = functools.cache(template_of)
