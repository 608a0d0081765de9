"""Rules that pack several linear layers with one operand into one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from slapo_rewrite.fusion.fused_module import Packed
from slapo_rewrite.fusion.lm_head import is_linear
from slapo_rewrite.fusion.match_rules import scopes_for
from slapo_rewrite.fusion.rule import Alternative, Rule, layout_reader
from slapo_rewrite.model.sources import Sources
from slapo_rewrite.model.tree import Node
from slapo_rewrite.model.uncalled import beyond_forward
from slapo_rewrite.patterns.search import Match, Scope, find_calls
from slapo_rewrite.patterns.value_graph import Graph


class Packing(Rule):
    """A rule that packs layers: `packed` decides which, and names the new one.

    The module gets a subclass with the new layer, and a weight map. The old names no longer exist,
    so `apply_all` does not use such rules: schedules shard by these names.
    """

    alternatives: ClassVar[tuple[Alternative, ...]] = ()

    def packed(self, group: Sequence[Match], graph: Graph) -> str | None:
        """The name of the packed layer for a group of calls; None to leave them alone.

        The group has calls of linear layers of one module on one operand, in the order of the text.
        """
        raise NotImplementedError


@dataclass
class Beside:
    """The layers that a rule packs."""

    # The groups of calls to replace, each with the packed layer.
    groups: list[tuple[Packed, Sequence[Match]]] = field(default_factory=list)
    # Calls that are not replaced, with the reason.
    left: list[tuple[Match, str]] = field(default_factory=list)


def beside(rule: Packing, nodes: Iterable[Node], sources: Sources) -> Beside:
    """Finds the layers of some modules that a rule packs."""
    found = Beside()
    for node in nodes:
        linear = {name for name, child in node.children.items() if is_linear(child.live)}
        scopes = scopes_for([node], sources) if len(linear) > 1 else []
        taken: str | None = None
        for scope in scopes:
            if scope.graph.file is not sources.main:
                continue
            for group, name in _groups(rule, scope, linear):
                reason = _reason(node, group, taken) or _between(scope.graph, group)
                if reason is None:
                    found.groups.append((Packed(name), group))
                    taken = name
                else:
                    found.left.append((group[0], reason))
    return found


def _groups(
    rule: Packing, scope: Scope, linear: set[str]
) -> Iterator[tuple[tuple[Match, ...], str]]:
    for group in find_calls([scope], lambda _, call: call.path in linear).groups:
        name = rule.packed(group, scope.graph)
        if name is not None:
            yield group, name


def _reason(node: Node, group: Sequence[Match], taken: str | None) -> str | None:
    """The reason why these layers cannot be packed, if any."""
    if taken is not None:
        return f"`{taken}` already replaces other layers in this module"
    layers = [node.children[str(match.root.called)].live for match in group]
    beyond = [reason for layer in layers if (reason := beyond_forward(layer)) is not None]
    if beyond:
        return f"one of the layers has to be called: {beyond[0]}"
    if len({layer.bias is None for layer in layers}) > 1:
        return "only some of the layers have a bias"
    parameters = [p for layer in layers for p in layer.parameters()]
    if len({(p.dtype, p.requires_grad) for p in parameters}) > 1:
        return "the weights or biases differ in dtype, or some are frozen"
    if len(set(map(id, parameters))) < len(parameters):
        return "some of the layers share a weight or bias"
    if any(p._backward_hooks for p in parameters):
        return "a weight or bias has a hook"
    if any(match.root.regions != group[0].root.regions for match in group):
        return "the layers are called in different branches"
    return None


def _between(graph: Graph, group: Sequence[Match]) -> str | None:
    """A change between the calls that the later ones would no longer see, in words."""
    first, last = group[0].root, group[-1].root
    operands = [value for match in group for value in match.values.values()]
    if graph.overwritten(operands, first.order, last.order) is not None:
        return "their input is written to between the calls"
    for match in group:
        own, moments = ("attribute", match.root.called), (first.order, last.order)
        written = [m.order for m in graph.mutations if own in m.target.bases]
        written += [b.order for b in graph.bound if b.name == f"self.{match.root.called}"]
        if any(moments[0] < moment < moments[1] for moment in written):
            return f"`{match.root.called}` changes between the calls"
    if any(way.total and first.order < way.order < last.order for way in graph.exits):
        return "the code between the calls may turn gradients off"
    for match in group:
        gives = f"what `{match.root.called}` gives"
        if graph.overwritten([match.root], match.root.order) is not None:
            return f"{gives} is written to, and would be a view"
        if (reader := layout_reader(match.root, ("stride", "is_contiguous"))) is not None:
            return f"`{reader}` depends on the memory layout of {gives}, which would change"
    return None
