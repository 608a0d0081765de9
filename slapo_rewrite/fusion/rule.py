"""Rules: computations to search for, and their replacements."""

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
    """One form of a computation, and its replacement."""

    pattern: Callable[..., Any]  # a function or module class, as for `find`
    # A function of one `return`, whose expression is written with the operands of the pattern's
    # parameters of the same names; None if the rule writes a call by `expression`.
    replacement: Callable[..., Any] | None = None


@dataclass(frozen=True)
class RuleMatch:
    """A match of a rule, with its live module."""

    match: Match
    node: Node  # the module whose function contains it
    alternative: Alternative  # the alternative that matched
    sources: Sources  # the files
    # The name of a linear layer that was added to the match.
    linear: str | None = None
    # The operand that was this layer's output, and is now its input.
    entered: str | None = None

    @property
    def operands(self) -> dict[str, str]:
        """The text of each operand at the place of the result, and of modules in the match.

        Linear, activation and dropout modules are passed to kernels, which call them if they have
        hooks or adapters later.
        """
        found = dict(self.match.operands)
        dropout = self._dropout() if "p" in found else None
        if "p" in found and dropout is None:
            found["dropout"] = share_dropped(found["p"], found["training"])
        modules = {"linear": self.linear, "activation": self._activation(), "dropout": dropout}
        return found | {name: accessor(path) for name, path in modules.items() if path is not None}

    def _dropout(self) -> str | None:
        """The `nn.Dropout` whose `p` and training flag the match reads, if any."""
        path = str(self.value("p").path).removesuffix(".p")
        flag = self.value("training").path
        plain = qualified(type(self.attribute(path))) == "torch.nn.modules.dropout.Dropout"
        return path if plain and flag == f"{path}.training" else None

    def _activation(self) -> str | None:
        """The module whose call matched the pattern's activation function, if any."""
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
        """The value of a parameter of the pattern."""
        return self.match.values[name]

    def live(self, name: str) -> Any:
        """The object of a parameter of the pattern in the live module.

        It is a number, a string, a parameter or a buffer (on the meta device, with the right dtype
        and shape). None for a computed value.
        """
        value = self.value(name)
        if value.operation == "constant":
            return value.literal
        return self.attribute(str(value.literal)) if value.operation == "attribute" else None

    def holds(self, name: ast.Name) -> bool:
        """Whether a name read in the match's function has the same value at the result's place."""
        judge = self.match.judge
        return judge is not None and judge.held.get(name.id) is self.graph.loads.get(name)

    def is_number(self, name: str) -> bool:
        """Whether the value of a parameter is a number, where it could be a tensor."""
        return name in self.match.values and self.value(name).number

    def attribute(self, path: str) -> Any:
        """The live attribute at a path such as `norm.weight`; None if there is none."""
        found: Any = self.node.live
        for name in path.split("."):
            found = getattr(found, name, None)
        return found

    def with_linear(self, name: str) -> RuleMatch:
        """The match extended by a linear layer whose output is an operand, and only that.

        The replacement can then add the layer's bias itself (`Rule.after_linear`). The match is
        unchanged without such a layer, or if it cannot be called at the result's place.
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
            return self  # as in `x + x`: it would be computed twice
        wider = None if self._is_moved_past(called, value) else self.match.with_call(name)
        return replace(self, match=wider, linear=called, entered=name) if wider else self

    def _is_moved_past(self, layer: str, product: Value) -> bool:
        """Whether a layer, or gradient mode, may change between its call and the match."""
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
        """The value graph of the match's function."""
        return graph_in(self.sources, self.node, self.match.function)

    def buffer(self, name: str) -> ast.expr | None:
        """The expression that a buffer of the module is registered with, if it never changes.

        None if that is not certain: it is registered twice, for example, or written to elsewhere.
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
    """The value graph of a function of a module that was searched."""
    scopes = sources.scopes[sources.fingerprints.of(node)]
    graphs: dict[str, Graph] = {scope.function: scope.graph for scope in scopes}
    return graphs[function]


# Operations that depend on a tensor's memory layout, or raise for some layouts.
LAYOUT = ("stride", "is_contiguous", "as_strided", "data_ptr", "view", "view_as")


def layout_reader(value: Value, names: Collection[str] = LAYOUT) -> str | None:
    """An operation on a value that depends on its memory layout; None if there is none."""
    made = (use.by.operation for use in value.site.uses if use.by is not None)
    return next((name for name in made if name in names), None)


def share_dropped(p: str, training: str) -> str:
    """The text of the probability that `F.dropout` applies with these arguments."""
    if training in ("True", "False"):
        return p if training == "True" else "0.0"
    return f"{parenthesised(p)} if {parenthesised(training)} else 0.0"


def _registered(node: ast.AST, name: str) -> ast.expr | None:
    """The expression that a call registers as the buffer of that name, if it does."""
    match node:
        case ast.Call(
            func=ast.Attribute(ast.Name("self"), "register_buffer"),
            args=[ast.Constant(value), made, *_],
        ) if value == name:
            return made
    return None


def _writes(node: ast.AST, name: str) -> bool:
    """Whether a node assigns an attribute of that name, or changes it in place."""
    match node:
        case ast.Attribute(attr=attribute, ctx=ast.Store() | ast.Del()):
            return attribute == name
        case ast.Subscript(value=inner, ctx=ast.Store()):
            return _is_part(inner, name)
        case ast.Call(func=ast.Attribute(value=inner, attr=method)) if method.endswith("_"):
            return _is_part(inner, name)
    return False


def _is_part(node: ast.expr, name: str) -> bool:
    """Whether an expression contains an attribute of that name."""
    return any(isinstance(n, ast.Attribute) and n.attr == name for n in ast.walk(node))


class Rule:
    """A rule that replaces a computation: one file of `rules/fusions`.

    A subclass has patterns with their replacements (`alternatives`). If these depend on more than
    the code, `refuses` checks the live module, and `replacement` and `operands` choose what is
    written.
    """

    name: ClassVar[str]  # its name in `s.apply(...)`
    numerics: ClassVar[Numerics]  # how the results compare with the original's
    conditions: ClassVar[Conditions]  # what works besides an ordinary step
    bound: ClassVar[float] = 0.0  # of an approximation: the largest error, relative or absolute
    # Why `apply_all` uses it; empty if it is only used on request.
    pays: ClassVar[str] = ""
    # If several rules claim one place, `apply_all` uses the one of the highest rank.
    rank: ClassVar[int] = 0
    # The patterns in order; the first match counts.
    alternatives: ClassVar[tuple[Alternative, ...]]
    # Further patterns that are predicates of calls, as for `find`.
    calls: ClassVar[tuple[Alternative, ...]] = ()
    functions: ClassVar[tuple[Callable[..., Any], ...]] = ()  # functions that `expression` calls
    examples: ClassVar[tuple[Example, ...]] = ()  # shown and run as tests
    refusals: ClassVar[tuple[Refusal, ...]] = ()  # likewise

    def refuses(self, found: RuleMatch) -> str | None:
        """Why the rule does not replace a match, in words; None if it does."""
        return None

    def replacement(self, found: RuleMatch) -> Callable[..., Any]:
        """The function whose expression replaces the match."""
        assert found.alternative.replacement is not None, f"{self.name} has no `expression`"
        return found.alternative.replacement

    def expression(self, found: RuleMatch) -> Calling | Renamed | None:
        """A call whose arguments depend on the match; None to use `replacement`."""
        return None

    def operands(self, found: RuleMatch) -> Mapping[str, str]:
        """The text of each parameter of the replacement, by name."""
        return found.operands

    def after_linear(self, found: RuleMatch) -> str | None:
        """The operand that may be a linear layer's output, whose bias the replacement then adds.

        If it is, the match is extended by that layer (`RuleMatch.with_linear`).
        """
        return None

    def width(self, found: RuleMatch) -> int | None:
        """The length of the rows that it works on, if `last_axis` cannot find it."""
        return None

    def spread(self, found: RuleMatch) -> MultiSiteRewrite | None:
        """The replacement, if it changes more than one place."""
        return None

    @functools.cached_property
    def kernels(self) -> tuple[str, ...]:
        """The functions of `runtime/kernels` that it uses, such as `gated.swiglu`."""
        written = [a.replacement for a in (*self.alternatives, *self.calls) if a.replacement]
        names = [name for function in written for name in template_of(function).names()]
        names += [name for function in self.functions if (name := dotted(function)) is not None]
        lead = "slapo_rewrite.runtime.kernels."
        return tuple(dict.fromkeys(n.removeprefix(lead) for n in names if n.startswith(lead)))
