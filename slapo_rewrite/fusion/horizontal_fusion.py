"""Rules that have one linear layer take the place of several on one operand."""

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
    """A rule that packs: `packed` says which layers, and what the new one is called.

    The module gets a subclass of its own that holds the new layer, and a weight map. The old names
    are gone then, so that `apply_all` takes no such rule: a schedule shards by these names.
    """

    alternatives: ClassVar[tuple[Alternative, ...]] = ()

    def packed(self, group: Sequence[Match], graph: Graph) -> str | None:
        """What the layer is called that takes the place of some; None where the rule packs none.

        The group has calls of linear layers of one module on one operand, in the order of the text.
        """
        raise NotImplementedError


@dataclass
class Beside:
    """What a rule packs."""

    # The calls, those of a module together, and what takes their place.
    groups: list[tuple[Packed, Sequence[Match]]] = field(default_factory=list)
    # Calls that are left as they are, with the reason.
    left: list[tuple[Match, str]] = field(default_factory=list)


def beside(rule: Packing, nodes: Iterable[Node], sources: Sources) -> Beside:
    """The layers of some modules that a rule packs."""
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
    """Why these layers cannot be packed, in words."""
    if taken is not None:
        return f"`{taken}` takes the place of others in this module already"
    layers = [node.children[str(match.root.called)].live for match in group]
    beyond = [reason for layer in layers if (reason := beyond_forward(layer)) is not None]
    if beyond:
        return f"one of the layers has to be called: {beyond[0]}"
    if len({layer.bias is None for layer in layers}) > 1:
        return "some of the layers have a bias, others have none"
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
    """What happens between the calls that the later ones would no longer see."""
    first, last = group[0].root, group[-1].root
    operands = [value for match in group for value in match.values.values()]
    if graph.overwritten(operands, first.order, last.order) is not None:
        return "what they are given is written to between the calls"
    for match in group:
        own, moments = ("attribute", match.root.called), (first.order, last.order)
        written = [m.order for m in graph.mutations if own in m.target.bases]
        written += [b.order for b in graph.bound if b.name == f"self.{match.root.called}"]
        if any(moments[0] < moment < moments[1] for moment in written):
            return f"`{match.root.called}` changes between the calls"
    if any(way.total and first.order < way.order < last.order for way in graph.exits):
        return "what lies between the calls may turn gradients off"
    for match in group:
        gives = f"what `{match.root.called}` gives"
        if graph.overwritten([match.root], match.root.order) is not None:
            return f"{gives} is written to, and would be a view"
        if (reader := layout_reader(match.root, ("stride", "is_contiguous"))) is not None:
            return f"`{reader}` reads how {gives} lies in memory, which is another way then"
    return None
