"""What a rule is: computations to look for, and what is written in their place."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from slapo_rewrite.code.build import parenthesised
from slapo_rewrite.code.facts import dotted
from slapo_rewrite.code.text import accessor
from slapo_rewrite.examples import Conditions, Example, Numerics, Refusal
from slapo_rewrite.fusion.claims import Calling, MultiSiteRewrite, Renamed, template_of
from slapo_rewrite.model.layers import MULTIPLIED, qualified
from slapo_rewrite.model.node_facts import method_of
from slapo_rewrite.model.sources import Sources
from slapo_rewrite.model.tree import Node
from slapo_rewrite.model.uncalled import beyond_forward
from slapo_rewrite.patterns.legality import given_by
from slapo_rewrite.patterns.search import Match
from slapo_rewrite.patterns.value_graph import Graph, Value


@dataclass(frozen=True)
class Alternative:
    """One way in which a computation may be written, and what takes its place."""

    pattern: Callable[..., Any]  # a function or module class, as for `find`
    # A function of one `return`, whose expression is written with the operands that the pattern's
    # parameters of the same names stand for; None where the rule writes a call by `expression`.
    replacement: Callable[..., Any] | None = None


@dataclass(frozen=True)
class RuleMatch:
    """A match of a rule, and the live module that it is in."""

    match: Match
    node: Node  # the module whose function it stands in
    alternative: Alternative  # the pattern that was found
    sources: Sources  # the files
    # The linear layer that is called in the match, by its name in the module.
    linear: str | None = None
    # The operand that was what this layer gives, and is now what it is given.
    entered: str | None = None

    @property
    def operands(self) -> dict[str, str]:
        """The text of each operand at the place of the result, and of modules of the match.

        What is linear, activates or drops is handed to kernels: where more is put on such a module
        later, they call it.
        """
        found = dict(self.match.operands)
        dropout = self._dropout() if "p" in found else None
        if "p" in found and dropout is None:
            found["dropout"] = share_dropped(found["p"], found["training"])
        modules = {"linear": self.linear, "activation": self._activation(), "dropout": dropout}
        return found | {name: accessor(path) for name, path in modules.items() if path is not None}

    def _dropout(self) -> str | None:
        """The `nn.Dropout` whose share and flag the match reads."""
        path = str(self.value("p").path).removesuffix(".p")
        flag = self.value("training").path
        plain = qualified(type(self.attribute(path))) == "torch.nn.modules.dropout.Dropout"
        return path if plain and flag == f"{path}.training" else None

    def _activation(self) -> str | None:
        """The module whose call is that of the function which the pattern calls, its activation."""
        judge = self.match.judge
        called = [v for v in judge.pattern.graph.values if v.inner is not None] if judge else []
        if judge is None or not called:
            return None
        value = judge.pairing.held.get(given_by(called[0])[-1])
        if value is None or value not in given_by(value.site) or len(value.site.given) != 1:
            return None
        path = value.site.called
        return path if path is not None and not self.attribute(path)._modules else None

    def value(self, name: str) -> Value:
        """What stands for a parameter of the pattern."""
        return self.match.values[name]

    def live(self, name: str) -> Any:
        """What a parameter of the pattern is on the live module.

        A number, a string, a parameter or buffer (on the meta device: dtype and shape are right);
        None where it is computed.
        """
        value = self.value(name)
        if value.operation == "constant":
            return value.literal
        return self.attribute(str(value.literal)) if value.operation == "attribute" else None

    def holds(self, name: ast.Name) -> bool:
        """Whether a name that the match's function reads holds the same where the result stands."""
        judge = self.match.judge
        return judge is not None and judge.held.get(name.id) is self.graph.loads.get(name)

    def is_number(self, name: str) -> bool:
        """Whether what stands for a parameter is a number, where a tensor might."""
        return name in self.match.values and self.value(name).number

    def attribute(self, path: str) -> Any:
        """The live attribute at a path, `norm.weight`; None where there is none."""
        found: Any = self.node.live
        for name in path.split("."):
            found = getattr(found, name, None)
        return found

    def with_linear(self, name: str) -> RuleMatch:
        """The match with the linear layer in it whose output an operand is and nothing else.

        A replacement may add the layer's bias by itself then (`Rule.after_linear`). The match as it
        is where there is no such layer, or it cannot be called where the match's result stands.
        """
        value = self.value(name)
        match value.node:
            case ast.Call(func=ast.Attribute(ast.Name("self"), called), args=[given], keywords=[]):
                layer = self.node.children.get(called)
            case _:
                return self
        if layer is None or isinstance(given, ast.Starred):
            return self
        if qualified(layer.cls) not in MULTIPLIED or "bias" not in layer.parameters:
            return self
        if beyond_forward(layer.live) is not None:
            return self
        if any(other is value for key, other in self.match.values.items() if key != name):
            return self  # the sum of it and itself, say: it would be computed twice
        wider = None if self._is_moved_past(called, value) else self.match.with_call(name)
        return replace(self, match=wider, linear=called, entered=name) if wider else self

    def _is_moved_past(self, layer: str, product: Value) -> bool:
        """Whether something may change a layer, or gradients, between its call and the match."""
        root, graph = self.match.root, self.graph
        if product.regions != root.site.regions:
            return True
        own = {("attribute", layer + name) for name in ("", ".weight", ".bias")}
        written = [m.order for m in graph.mutations if m.target.bases & own]
        written += [b.order for b in graph.bound if f"{b.name}.".startswith(f"self.{layer}.")]
        written += [way.order for way in graph.exits if way.total]
        return any(product.order < moment < root.order for moment in written)

    @property
    def graph(self) -> Graph:
        """The values of the function that the match stands in."""
        return graph_in(self.sources, self.node, self.match.function)

    def buffer(self, name: str) -> ast.expr | None:
        """The expression that a buffer of the module is registered with, and that it stays.

        None where that is not certain: it is registered twice, say, or written to elsewhere.
        """
        found = method_of(self.sources, type(self.node.live), "__init__")
        if found is None:
            return None
        file, function = found
        made = [m for call in ast.walk(function) if (m := _registered(call, name)) is not None]
        owners = [file.classes.get(c.__name__) for c in type(self.node.live).__mro__]
        nodes = [n for owner in owners if owner is not None for n in ast.walk(owner)]
        registered = sum(_registered(node, name) is not None for node in nodes)
        written = any(_writes(node, name) for node in nodes)
        return made[0] if len(made) == registered == 1 and not written else None


def graph_in(sources: Sources, node: Node, function: str) -> Graph:
    """The values of a function of a module in which matches were looked for."""
    scopes = sources.scopes[sources.fingerprints.of(node)]
    graphs: dict[str, Graph] = {scope.function: scope.graph for scope in scopes}
    return graphs[function]


# What answers otherwise of a tensor that lies otherwise in memory, or is refused of it.
LAYOUT = ("stride", "is_contiguous", "as_strided", "data_ptr", "view", "view_as")


def layout_reader(value: Value, names: Collection[str] = LAYOUT) -> str | None:
    """What reads a value and depends on how it lies in memory; None where nothing does."""
    made = (use.by.operation for use in value.site.uses if use.by is not None)
    return next((name for name in made if name in names), None)


def share_dropped(p: str, training: str) -> str:
    """The text of the share that `F.dropout` drops with these arguments."""
    if training in ("True", "False"):
        return p if training == "True" else "0.0"
    return f"{parenthesised(p)} if {parenthesised(training)} else 0.0"


def _registered(node: ast.AST, name: str) -> ast.expr | None:
    """What a call registers as a buffer of that name."""
    match node:
        case ast.Call(
            func=ast.Attribute(ast.Name("self"), "register_buffer"),
            args=[ast.Constant(value), made, *_],
        ) if value == name:
            return made
    return None


def _writes(node: ast.AST, name: str) -> bool:
    """Whether an attribute of that name, or elements of it, are given other values."""
    match node:
        case ast.Attribute(attr=attribute, ctx=ast.Store() | ast.Del()):
            return attribute == name
        case ast.Subscript(value=inner, ctx=ast.Store()):
            return _is_part(inner, name)
        case ast.Call(func=ast.Attribute(value=inner, attr=method)) if method.endswith("_"):
            return _is_part(inner, name)
    return False


def _is_part(node: ast.expr, name: str) -> bool:
    """Whether an expression is an attribute of that name, or made of one."""
    return any(isinstance(n, ast.Attribute) and n.attr == name for n in ast.walk(node))


class Rule:
    """A computation that can be written better: one file of `rules/fusions`.

    A subclass says what is looked for and what is written instead (`alternatives`); where that
    depends on more than the text, `refuses` looks at the live module, and `replacement` and
    `operands` choose what is written.
    """

    name: ClassVar[str]  # what `s.apply(...)` calls it
    numerics: ClassVar[Numerics]  # how the numbers compare
    conditions: ClassVar[Conditions]  # what holds besides an ordinary step
    bound: ClassVar[float] = 0.0  # of an approximation: the largest error, relative or absolute
    # Why `apply_all` takes it; empty where it is only taken when asked for.
    pays: ClassVar[str] = ""
    # Of several rules that claim one place, `apply_all` takes the one of the highest rank.
    rank: ClassVar[int] = 0
    # What is looked for, the first that matches counts.
    alternatives: ClassVar[tuple[Alternative, ...]]
    # Calls that are looked for as well: their patterns are predicates, as for `find`.
    calls: ClassVar[tuple[Alternative, ...]] = ()
    functions: ClassVar[tuple[Callable[..., Any], ...]] = ()  # what `expression` writes calls of
    examples: ClassVar[tuple[Example, ...]] = ()  # shown and run as tests
    refusals: ClassVar[tuple[Refusal, ...]] = ()  # likewise

    def refuses(self, found: RuleMatch) -> str | None:
        """Why a match is left alone, in words; None where the rule takes it."""
        return None

    def replacement(self, found: RuleMatch) -> Callable[..., Any]:
        """The function whose expression is written."""
        assert found.alternative.replacement is not None, f"{self.name} has no `expression`"
        return found.alternative.replacement

    def expression(self, found: RuleMatch) -> Calling | Renamed | None:
        """A call whose arguments depend on the match; None where `replacement` says it all."""
        return None

    def operands(self, found: RuleMatch) -> Mapping[str, str]:
        """The text of each parameter of the replacement, by name."""
        return found.operands

    def after_linear(self, found: RuleMatch) -> str | None:
        """The operand that a linear layer may give whose bias the replacement adds.

        Where one gives it, `found` has that layer in it from then on (`RuleMatch.with_linear`).
        """
        return None

    def width(self, found: RuleMatch) -> int | None:
        """How long the rows are that it works on, where `last_axis` does not see it by itself."""
        return None

    def spread(self, found: RuleMatch) -> MultiSiteRewrite | None:
        """How it is written where one place is not enough."""
        return None

    @functools.cached_property
    def kernels(self) -> tuple[str, ...]:
        """What it takes of `runtime/kernels`, `gated.swiglu` say."""
        written = [a.replacement for a in (*self.alternatives, *self.calls) if a.replacement]
        names = [name for function in written for name in template_of(function).names()]
        names += [name for function in self.functions if (name := dotted(function)) is not None]
        lead = "slapo_rewrite.runtime.kernels."
        return tuple(dict.fromkeys(n.removeprefix(lead) for n in names if n.startswith(lead)))
