"""Listed operations: arguments by the names of their parameters, arithmetic on constants."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Sequence

from slapo_rewrite.code.arguments import Signature
from slapo_rewrite.patterns.canonical_ops import (
    CASTS,
    MIRRORED,
    PARAMETERS,
    SIGNATURES,
    SYNONYMS,
    Operation,
    Required,
    operations,
    parse,
)
from slapo_rewrite.patterns.graph_builder import Maker
from slapo_rewrite.patterns.value_graph import Value, equal

# Arguments as they stand in a call: keyword, '' for a position, and value.
Given = Sequence[tuple[str, Value]]

_FOLDED: dict[str, Callable[..., float]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "pow", "neg")},
    **{"div": operator.truediv, "math.sqrt": math.sqrt},
}


class Listed(Maker):
    """Makes values of the operations that are listed."""

    def named_operation(self, name: str, given: Given, node: ast.AST) -> Value | None:
        """A listed operation called as a function; None where it is none, or called oddly."""
        home, _, last = name.rpartition(".")
        if home not in ("torch", "torch.nn.functional", "operator", "torch.Tensor"):
            return None
        signature = SIGNATURES.get(name)
        return self._operation(last, given, node, signature)

    def _operation(
        self,
        name: str,
        given: Given,
        node: ast.AST,
        signature: str | None = None,
        overwrites: Value | None = None,
    ) -> Value | None:
        name = SYNONYMS.get(name, name)
        if name in CASTS and len(given) == 1:
            dtype = self.leaf("name", f"torch.{CASTS[name]}", node)
            name, given = "to", [*given, ("", dtype)]
        elif name == "to" and any(map(_is_device, given)):
            return None
        elif name == "type" and len(given) == 2 and given[1][1].operation != "constant":
            name = "to"
        elif name == "square" and len(given) == 1:
            name, given = "pow", [*given, ("", self.constant(2, node))]
        elif name in MIRRORED and len(given) == 2:
            name, given = MIRRORED[name], list(reversed(given))
        known = operations().get(name)
        arguments = None if known is None else self.bound(known, given, node, signature)
        if known is None or arguments is None:
            return None
        return self.operation(known, arguments, node, overwrites)

    def bound(
        self, known: Operation, given: Given, node: ast.AST, signature: str | None = None
    ) -> dict[str, Value] | None:
        """Arguments by the names of an operation's parameters; None where they do not fit."""
        parameters, positional = (
            parse(signature) if signature else (known.parameters, known.positional)
        )
        names = [name for name, _ in parameters]
        star = next((name[1:] for name in names if name.startswith("*")), None)
        takes = Signature(
            tuple(name for name in names[:positional] if not name.startswith("*")),
            tuple(name.lstrip("*") for name in names),
            star,
        )
        bound = takes.bind((PARAMETERS.get((known.name, key), key), value) for key, value in given)
        found = bound.given
        if bound.stars or bound.spread or bound.extra or bound.repeated:
            return None
        if bound.rest:
            if star is None or star in found:
                return None
            found[star] = self._packed(bound.rest, node)
        for name, default in (*parameters, *known.parameters):
            if name.lstrip("*") not in found:
                if default is Required:
                    return None
                found[name] = self.constant(default, node)
        return {name: found[name] for name in known.names}

    def _packed(self, values: list[Value], node: ast.AST) -> Value:
        """`view(2, 3)` takes the same as `view((2, 3))`."""
        if len(values) == 1 and not isinstance(values[0].literal, int):
            return values[0]
        return self.tuple_of(values, node)

    def tuple_of(self, values: list[Value], node: ast.AST) -> Value:
        """A tuple, or a list, which torch takes as well; a constant where all of it is."""
        if all(value.operation == "constant" for value in values):
            return self.constant(tuple(value.literal for value in values), node)
        number = all(value.number for value in values)
        return self.make("tuple", numbered([("", v) for v in values]), node, number=number)

    def operation(
        self,
        known: Operation,
        arguments: dict[str, Value],
        node: ast.AST,
        overwrites: Value | None = None,
        called: str | None = None,
        given: Given = (),
    ) -> Value:
        """The value of a listed operation."""
        inplace = arguments.pop("inplace", None)
        if inplace is not None and inplace.literal is not False:
            overwrites = arguments["input"]
        values = list(arguments.values())
        if known.name == "size":
            return self._size(values, node)
        folded = self.folded(known.name, values, node)
        if folded is not None:
            return folded
        if known.name == "transpose":
            self._sort_dims(arguments)
        scale = arguments.get("alpha")
        training = arguments.get("training")
        draws = known.draws and not (training is not None and training.literal is False)
        value = self.make(
            known.name,
            arguments.items(),
            node,
            overwrites=overwrites,
            random=draws,
            pure=not draws,
            number=known.number or all(v.number for v in values),
            called=called,
            given=tuple(given),
            commutes=known.commutes and (scale is None or equal(scale.literal, 1)),
        )
        if not (known.view or known.draws or known.name == "to" or overwrites is not None):
            value.bases = frozenset([("made", value.order)])
        if overwrites is not None:
            self.overwrite(overwrites, node)
        return value

    def _size(self, values: list[Value], node: ast.AST) -> Value:
        """`x.size(1)` is `x.shape[1]`."""
        shape = self.member(values[0], "shape", node)
        if values[1].operation == "constant" and values[1].literal is None:
            return shape
        return self.make("item", [("input", shape), ("index", values[1])], node, number=True)

    @staticmethod
    def _sort_dims(arguments: dict[str, Value]) -> None:
        one, other = arguments["dim0"], arguments["dim1"]
        match one.literal, other.literal:
            case int(first), int(second) if first > second:
                arguments |= {"dim0": other, "dim1": one}

    def folded(self, name: str, values: list[Value], node: ast.AST) -> Value | None:
        """Arithmetic on constants, carried out."""
        function = _FOLDED.get(name)
        numbers = [v.literal for v in values if v.operation == "constant"]
        # `alpha` and `rounding_mode`, where an operation has them
        operands = numbers[:1] if name in ("neg", "math.sqrt") else numbers[:2]
        if function is None or len(numbers) < len(values):
            return None
        if not all(isinstance(n, int | float) and not isinstance(n, bool) for n in operands):
            return None
        try:
            return self.constant(function(*operands), node)
        except (ArithmeticError, ValueError):
            return None


def _is_device(given: tuple[str, Value]) -> bool:
    """Whether an argument of `to` says where, and not as what."""
    key, value = given
    text = value.operation == "constant" and isinstance(value.literal, str)
    return key == "device" or text or (value.operation == "member" and value.literal == "device")


def numbered(given: Given) -> list[tuple[str, Value]]:
    """Arguments as they stand: positions by number, keywords by name."""
    return [(key if key.isidentifier() else f"{key}{n}", v) for n, (key, v) in enumerate(given)]
