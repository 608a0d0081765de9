"""Finds the output layer of a loss, and the operations between its logits and the loss."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field

from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.text import accessor
from slapo_rewrite.fusion.rule import RuleMatch
from slapo_rewrite.patterns.value_graph import Value, described

# Index texts that shift logits by one position, and the matching ones of labels.
SHIFTS = {
    "..., :-1, :": ("..., 1:", ":, 1:"),
    ":, :-1, :": ("..., 1:", ":, 1:"),
    ":, :-1": ("..., 1:", ":, 1:"),
}


def is_linear(live: object) -> bool:
    """Whether a module is exactly torch's linear layer, not a subclass."""
    return (type(live).__module__, type(live).__name__) == ("torch.nn.modules.linear", "Linear")


class Declined(Exception):
    """A loss is not replaced; the message says why."""


@dataclass(frozen=True)
class Head:
    """The linear layer that computes logits."""

    path: str  # the layer's path, relative to the module of the match
    hidden: Value  # its input
    # The values from the loss's logits back to the call in the function itself, which is that of
    # the layer, or of a module that calls it.
    chain: tuple[Value, ...]
    shift: str = ""  # the index of the positions that the loss uses: `..., :-1, :`; empty for all
    softcap: Value | None = None  # the bound of the logits: `softcap * tanh(logits / softcap)`
    # The modules around the layer that are called, from the outside in.
    around: tuple[str, ...] = ()
    upcast: bool = False  # whether the loss takes the logits in float32

    def is_size(self, size: Value, found: RuleMatch) -> bool:
        """Whether a value is always the layer's number of classes."""
        return _is_size(size, found.attribute(self.path).out_features, found, self.call)

    @property
    def call(self) -> Value:
        """The call in the function itself."""
        return self.chain[-1]

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that are not called if no logits are computed."""
        return (*self.around, self.path)


@dataclass
class _Way:
    """The findings while tracing back from a loss."""

    chain: list[Value] = field(default_factory=list)
    around: list[str] = field(default_factory=list)
    sizes: list[Value | int] = field(default_factory=list)
    shift: str = ""
    softcap: Value | None = None
    upcast: bool = False


def head_of(found: RuleMatch, logits: Value, *, rows: bool) -> Head:
    """The head that computes a loss's logits; raises `Declined` if there is none.

    `rows` says whether the loss takes two-dimensional logits, so that they must be reshaped.
    """
    way = _Way()
    value = logits
    while not (value.operation == "linear" and value.called is not None):
        value = _before(value, way)
    if value.inside is None:
        way.chain.append(value)
    path = str(value.called)
    live = found.attribute(path)
    if not is_linear(live):
        raise Declined(f"`{path}` is a `{type(live).__name__}`, not a plain linear layer")
    if rows and not way.sizes:
        raise Declined("the logits are not reshaped to rows of classes for the loss")
    call = way.chain[-1]
    for size in way.sizes:
        if not _is_size(size, live.out_features, found, call):
            raise Declined(f"the loss takes rows of another size than `{path}` gives")
    given = dict(value.arguments)
    around, chain = tuple(way.around), tuple(way.chain)
    return Head(path, given["input"], chain, way.shift, way.softcap, around, way.upcast)


def _before(value: Value, way: _Way) -> Value:
    """The operand of a value, if the kernel supports the operation; raises `Declined` if not."""
    if value.inside is None:
        way.chain.append(value)
    given = dict(value.arguments)
    match value.operation:
        case "contiguous":
            return given["input"]
        case "to" if given.keys() == {"input", "dtype"} and _is(given["dtype"], "torch.float32"):
            way.upcast = True
            return given["input"]
        case "view" | "reshape" if not way.shift and (size := _row_size(given["shape"])):
            way.sizes.append(size)
            return given["input"]
        case "item" if not way.shift and (index := _index(value)) in SHIFTS:
            way.shift = index
            return given["input"]
        case "choice" | "mul" if way.softcap is None and (capped := _softcapped(value)):
            inner, way.softcap, between = capped
            way.chain += between
            return inner
    if value.called is not None and value.inner is not None:
        way.around.append(value.called)
        return value.inner
    if value.is_leaf or value.operation in ("choice", "merge", "loop"):
        raise Declined(f"the logits are {described(value)}: their computation is not found")
    raise Declined(f"{described(value)} is between the output layer and the loss")


def _is(value: Value, literal: str, operation: str = "name") -> bool:
    return value.operation == operation and value.literal == literal


def _index(value: Value) -> str:
    """The text of an index."""
    match value.node:
        case ast.Subscript(slice=ast.Tuple(elts=parts)):
            return ", ".join(map(ast.unparse, parts))
    return ""


def _row_size(shape: Value) -> Value | int | None:
    """The length of rows in the shape of a reshape to two axes, else None."""
    if isinstance(shape.literal, tuple) and len(shape.literal) == 2:
        return shape.literal[1] if isinstance(shape.literal[1], int) else None
    if shape.operation == "tuple" and len(shape.arguments) == 2:
        return shape.arguments[1][1]
    return None


def _is_size(size: Value | int, classes: int, found: RuleMatch, call: Value) -> bool:
    """Whether a size is always the number of classes."""
    if isinstance(size, int):
        return size == classes
    match size.operation:
        case "constant":
            return size.literal == classes
        case "attribute":
            return bool(found.attribute(str(size.literal)) == classes)
        case "item":
            given = dict(size.arguments)
            last = given["index"].literal in (-1, 2) and given["input"].operation == "shape"
            return last and any(v is call for v in given["input"].walk())
    return False


def _softcapped(value: Value) -> tuple[Value, Value, list[Value]] | None:
    """For `bound * tanh(x / bound)`: `x`, the bound, and the values in between; else None."""
    if value.operation == "choice":
        ways = dict(value.arguments)
        capped = _softcapped(ways["then"]) if ways["then"].operation == "mul" else None
        if capped is None or capped[0] is not ways["otherwise"]:
            return None
        given = dict(ways["test"].arguments)
        tested = ways["test"].operation == "is not" and [*given.values()]
        if not tested or not _alike(tested[0], capped[1]) or tested[1].literal is not None:
            return None
        return capped[0], capped[1], [ways["then"], *capped[2]]
    one, other = (v for _, v in value.arguments[:2])
    bent, bound = (one, other) if one.operation == "tanh" else (other, one)
    if bent.operation != "tanh" or not bound.is_leaf:
        return None
    quotient = bent.arguments[0][1]
    if quotient.operation != "div":
        return None
    inner, by, *rest = (v for _, v in quotient.arguments)
    plain = all(v.operation == "constant" and v.literal is None for v in rest)
    return (inner, bound, [bent, quotient]) if plain and _alike(by, bound) else None


def _alike(one: Value, other: Value) -> bool:
    return one.is_leaf and (one.operation, one.literal) == (other.operation, other.literal)


@dataclass(frozen=True)
class Labels:
    """The labels of a loss."""

    value: Value  # the labels, before they are flattened and moved to a device
    shift: str = ""  # the index of the positions that the loss uses


def labels_of(value: Value) -> Labels:
    """The labels before flattening, shifting and moving, which the kernel does itself."""
    shift = ""
    while True:
        given = [v for _, v in value.arguments]
        match value.operation:
            case "contiguous":
                pass
            case "view" | "reshape" if _is_row(given[1]):
                pass
            case "to" if len(given) == 2 and _is(given[1], "device", "member"):
                pass
            case "item" if not shift and any(_index(value) in ends for ends in SHIFTS.values()):
                shift = _index(value)
            case _:
                return Labels(value, shift)
        value = given[0]


def _is_row(shape: Value) -> bool:
    """Whether a shape has one axis."""
    if isinstance(shape.literal, tuple):
        return len(shape.literal) == 1
    if shape.operation == "tuple":
        return len(shape.arguments) == 1
    return shape.number and shape.operation in ("mul", "item")


def depending(value: Value, on: Value) -> list[Value]:
    """The values that `value` is computed from, itself included, that depend on another."""
    every = sorted(value.walk(), key=lambda v: v.order)
    found = {id(on)}
    before = 0
    while len(found) > before:  # one pass, unless a loop carries values back
        before = len(found)
        found |= {id(v) for v in every if any(id(a) in found for _, a in v.arguments)}
    return [v for v in every if id(v) in found]


def named(value: Value, held: Mapping[str, Value]) -> str | None:
    """The first local name of a value."""
    return next((n for n, v in held.items() if v is value and not n.startswith("self.")), None)


def written(value: Value, held: Mapping[str, Value], file: SourceFile) -> str:
    """The text of a head's input; raises `Declined` if it is computed inside another module."""
    if (name := named(value, held)) is not None:
        return name
    if value.called is None:
        return f"{_function(value, held, file)}({written(value.arguments[0][1], held, file)})"
    if any(key.startswith("*") for key, _ in value.given):
        raise _within(value)
    given = ((key, written(v, held, file)) for key, v in value.given)
    texts = [f"{key}={text}" if key else text for key, text in given]
    return f"{accessor(value.called)}({', '.join(texts)})"


def _function(value: Value, held: Mapping[str, Value], file: SourceFile) -> str:
    """The text of the one-argument function that a value calls, if the file can name it."""
    match value.node:
        case ast.Call(func=ast.Name() | ast.Attribute() as function, args=[_], keywords=[]):
            name = next(n.id for n in ast.walk(function) if isinstance(n, ast.Name))
            if value.file is file and file.qualified(function) and name not in held:
                return file.segment(function)
    raise _within(value)


def _within(value: Value) -> Declined:
    return Declined(f"{described(value)} is computed in the module that calls the output layer")


def loss_of(found: RuleMatch) -> str:
    """The dotted name of a transformers model's loss function."""
    loss = found.attribute("loss_function")
    return f"{getattr(loss, '__module__', '')}.{getattr(loss, '__qualname__', loss)}"
