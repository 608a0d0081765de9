"""What is known of a value before the model runs: that it is constant, or never None."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slapo_rewrite.model.evaluate import OPERATORS

# Attributes of any module that are not what they were when it was made.
CHANGING = frozenset({"training"})


@dataclass(frozen=True)
class Something:
    """A value that is known when the model runs.

    Attributes:
        is_given: Whether it is never None: a tensor that the step is given, a module's result.
        kind: Its class, where it is known.
        parts: What is known of its attributes; None where nothing is known of them.
        is_module: Whether it is a module of the model.
    """

    is_given: bool = False
    kind: type | None = None
    parts: Mapping[str, Value] | None = None
    is_module: bool = False


@dataclass(frozen=True)
class Constant:
    """The same value in every training step.

    Attributes:
        value: None, a boolean, a number, a text, or a tuple of these.
        is_setting: Whether the model's settings say it, not its text.
    """

    value: Any
    is_setting: bool = False


@dataclass(frozen=True)
class Fields:
    """An object that a call with keywords makes, of which only attributes are read.

    Attributes:
        cls: Its class.
        texts: The expression that each attribute is.
        values: What is known of each.
    """

    cls: type
    texts: Mapping[str, str]
    values: Mapping[str, Value]


@dataclass(frozen=True)
class Extra:
    """Keyword arguments that are handed on (`**kwargs`), all of them known by name."""

    texts: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Value] = field(default_factory=dict)


Value = Something | Constant | Fields | Extra
NONE = Constant(None)
# What is relied on of a setting of which it is asked only whether it is None.
NOT_NONE = ...


def is_module(value: object) -> bool:
    """Whether a value is a module of the model."""
    return hasattr(type(value), "named_parameters")


def is_literal(value: object) -> bool:
    """Whether a value can be written out."""
    if isinstance(value, tuple):
        return all(is_literal(v) for v in value)
    return value is None or isinstance(value, bool | int | float | str)


@dataclass
class Names:
    """What the names of a function stand for.

    Attributes:
        me: What the function calls its module.
        live: The module, as it is built.
        path: Of the module in the model.
        values: What is known of local names.
        world: The names of the file.
        settings: What decisions rest on so far: attributes of the model, by path.
        changing: Attributes that some `forward` sets, so that they are not known beforehand.
    """

    me: str | None
    live: Any
    path: str
    values: dict[str, Value]
    world: Mapping[str, Any]
    settings: dict[str, Any]
    changing: frozenset[str] = CHANGING

    def chain(self, node: ast.expr) -> list[str] | None:
        """The attributes that an expression reads one after the other, from the module on."""
        steps: list[str] = []
        while isinstance(node, ast.Attribute):
            steps.append(node.attr)
            node = node.value
        is_me = isinstance(node, ast.Name) and node.id == self.me and self.me is not None
        return steps[::-1] if is_me else None

    def object_at(self, steps: list[str]) -> Any:
        """What attributes of the module lead to.

        Raises:
            AttributeError: There is none.
        """
        found = self.live
        for step in steps:
            if isinstance(getattr(type(found), step, None), property) and is_module(found):
                raise AttributeError(step)  # whatever it does is done when the model runs
            found = getattr(found, step)
        return found

    def global_at(self, node: ast.expr) -> Any:
        """What a name of the file, or an attribute of one, stands for; None where it is local."""
        if isinstance(node, ast.Attribute):
            return getattr(self.global_at(node.value), node.attr, None)
        if isinstance(node, ast.Name) and node.id not in self.values:
            return self.world.get(node.id, getattr(builtins, node.id, None))
        return None

    def decided(self, test: ast.expr) -> bool | None:
        """How a test comes out in every training step; None where that is not known."""
        read: dict[str, Any] = {}
        truth = self._truth(test, read)
        if truth is not None:
            self.rely_on(read)
        return truth

    def rely_on(self, read: Mapping[str, Any]) -> None:
        """Settings that something was decided by."""
        for path, value in read.items():
            if value is not NOT_NONE or path not in self.settings:
                self.settings[path] = value

    def _truth(self, test: ast.expr, read: dict[str, Any]) -> bool | None:
        """Whether an expression counts as true; what is known of an operand may be enough."""
        if isinstance(test, ast.BoolOp):
            stops = isinstance(test.op, ast.Or)
            truths = [self._truth(operand, read) for operand in test.values]
            unknown = [v for v, t in zip(test.values, truths, strict=True) if t is None]
            called = any(isinstance(n, ast.Call) for v in unknown for n in ast.walk(v))
            if stops in truths and not called:
                return stops
        return truth_of(self.value(test, read))

    def settled(self, node: ast.expr) -> Value:
        """What is known of an expression from here on, whatever becomes of its parts.

        Of the model's settings those that decide something are relied on; numbers are not.
        """
        read: dict[str, Any] = {}
        value = self.value(node, read)
        if not isinstance(value, Constant) or not (value.is_setting or read):
            return value
        if value.value is None or isinstance(value.value, bool):
            self.rely_on(read)
            return Constant(value.value)
        return Something()

    def value(self, node: ast.expr, read: dict[str, Any] | None = None) -> Value:
        """What is known of an expression.

        Args:
            node: The expression.
            read: Takes up the settings that it reads.
        """
        read = {} if read is None else read
        match node:
            case ast.Constant(value=value):
                return Constant(value) if is_literal(value) else Something(True)
            case ast.Name(id=name):
                return self.values.get(name, Something())
            case ast.NamedExpr(value=named):
                return self.value(named, read)
            case ast.Attribute():
                return self._attribute(node, read)
            case ast.Subscript(value=base, slice=ast.Constant(value=int(index))):
                return self._item(self.value(base, read), index)
            case ast.Tuple(elts=elts):
                parts = [self.value(e, read) for e in elts]
                if all(isinstance(p, Constant) for p in parts):
                    return Constant(tuple(p.value for p in parts if isinstance(p, Constant)))
                return Something(True)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self.value(operand, read)
                return Constant(not inner.value) if isinstance(inner, Constant) else Something()
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._choice(test, body, orelse, read)
            case ast.BoolOp():
                return self._all_or_any(node, read)
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot()], comparators=[right]) if (
                is_none(right)
            ):
                return self._compared_to_none(left, node.ops[0], read)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._compared(self.value(left, read), op, self.value(right, read))
            case ast.BinOp(left=left, op=op, right=right):
                return self._compared(self.value(left, read), op, self.value(right, read))
            case ast.Call():
                return self._call(node, read)
        return Something()

    def _attribute(self, node: ast.Attribute, read: dict[str, Any]) -> Value:
        steps = self.chain(node)
        if steps is None:
            base = self.value(node.value, read)
            if isinstance(base, Fields):
                return base.values.get(node.attr, NONE)
            if isinstance(base, Something) and base.parts is not None:
                return base.parts.get(node.attr, NONE)
            return Something()
        try:
            found = self.object_at(steps)
        except AttributeError:
            return Something()
        if found is not None and not isinstance(found, bool | int | str):  # rates are tuned
            return Something(True, is_module=is_module(found))
        if steps[-1] in self.changing:
            return Something()
        read[".".join([self.path, *steps] if self.path else steps)] = found
        return Constant(found, is_setting=True)

    def _item(self, base: Value, index: int) -> Value:
        if isinstance(base, Fields):
            name = field_at(base.cls, base.values, index)
            return base.values[name] if name else Something()
        if isinstance(base, Something) and base.kind is not None and base.parts is not None:
            name = field_at(base.kind, base.parts, index)
            return base.parts[name] if name else Something()
        if isinstance(base, Constant) and isinstance(base.value, tuple):
            return Constant(base.value[index]) if index < len(base.value) else Something()
        return Something()

    def _choice(
        self, test: ast.expr, body: ast.expr, orelse: ast.expr, read: dict[str, Any]
    ) -> Value:
        one, other = self.value(body, read), self.value(orelse, read)
        if one == other:
            return one
        known = self.value(test, read)
        if isinstance(known, Constant):
            return one if known.value else other
        return Something()

    def _all_or_any(self, node: ast.BoolOp, read: dict[str, Any]) -> Value:
        stops = isinstance(node.op, ast.Or)
        unsure = False
        value: Value = Something()
        for operand in node.values:
            value = self.value(operand, read)
            truth = truth_of(value)
            if truth is stops:
                # What stands before it may end the evaluation with another value, as true or false.
                return value if not unsure else Something()
            unsure |= truth is None
        return Something() if unsure else value

    def _compared_to_none(self, left: ast.expr, op: ast.cmpop, read: dict[str, Any]) -> Value:
        value = self.value(left, read)
        steps = self.chain(left)
        known = value.value is not None if isinstance(value, Constant) else is_given(value)
        if steps and known:
            read[".".join([self.path, *steps] if self.path else steps)] = NOT_NONE
        return self._compared(value, op, NONE)

    def _compared(self, left: Value, op: ast.operator | ast.cmpop, right: Value) -> Value:
        if isinstance(left, Constant) and isinstance(right, Constant):
            function = OPERATORS.get(type(op))
            try:
                result = function(left.value, right.value) if function else None
            except (TypeError, ArithmeticError, ValueError):
                return Something()
            return Constant(result) if function and is_literal(result) else Something()
        if isinstance(op, ast.Is | ast.IsNot) and NONE in (left, right):
            other = right if left == NONE else left
            if is_given(other):
                return Constant(isinstance(op, ast.IsNot))
        return Something()

    def _call(self, node: ast.Call, read: dict[str, Any]) -> Value:
        match node:
            case ast.Call(func=ast.Name(id="isinstance"), args=[of, classes]):
                return self._is_instance(self.value(of, read), self.global_at(classes))
            case ast.Call(func=ast.Name(id="hasattr"), args=[of, ast.Constant(value=str(name))]):
                steps = self.chain(of)
                if steps is not None and hasattr(type(self.object_at(steps)), name):
                    return Constant(True)  # its class says so
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=name), attr="get" | "pop"),
                args=[ast.Constant(value=str(key)), *default],
            ):
                extra = self.values.get(name)
                if isinstance(extra, Extra):
                    otherwise = self.value(default[0], read) if default else NONE
                    return extra.values.get(key, otherwise)
        if isinstance(node.func, ast.Name):
            called = self.values.get(node.func.id)
            return Something(isinstance(called, Something) and called.is_module)
        steps = self.chain(node.func)
        if steps:
            try:
                return Something(is_module(self.object_at(steps)))
            except AttributeError:
                pass
        return Something()

    def _is_instance(self, value: Value, classes: Any) -> Value:
        try:
            match value:
                case Constant(value=constant):
                    return Constant(isinstance(constant, classes))
                case Fields(cls=kind) | Something(kind=type() as kind):
                    return Constant(issubclass(kind, classes))
        except TypeError:
            pass
        return Something()


def field_at(cls: type, values: Mapping[str, Value], index: int) -> str | None:
    """The attribute that a number means: those that are None are not counted."""
    order = list(getattr(cls, "__dataclass_fields__", values))
    there = [n for n in order if values.get(n, NONE) != NONE]
    return there[index] if 0 <= index < len(there) else None


def is_given(value: Value) -> bool:
    """Whether a value that is no constant is never None."""
    return isinstance(value, Fields | Extra) or (isinstance(value, Something) and value.is_given)


def is_none(node: ast.expr) -> bool:
    """Whether an expression is `None`."""
    return isinstance(node, ast.Constant) and node.value is None


def truth_of(value: Value) -> bool | None:
    """Whether a value counts as true, where that is known."""
    if isinstance(value, Constant):
        return bool(value.value)
    return True if isinstance(value, Fields) else None
