"""Evaluates names and attributes of a `forward` before the model runs."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from slapo_rewrite.code.dataflow import body_of
from slapo_rewrite.code.evaluate import (
    NONE,
    UNKNOWN,
    Constant,
    KnownKwargs,
    KnownObject,
    Unknown,
    Worth,
    attribute_of,
    computed,
    is_given,
    is_plain,
    truth,
)
from slapo_rewrite.code.names import self_path
from slapo_rewrite.code.syntax import tree_of
from slapo_rewrite.operations import gives_one_tensor

# A tensor of which nothing else is known.
TENSOR = Unknown(True, Tensor)
# Attributes of all modules that change after construction.
CHANGING = frozenset({"training"})
# The condition on a setting that only a test for None depends on.
NOT_NONE = ...


@dataclass(frozen=True)
class Unlike:
    """The condition on a setting that only a comparison for equality depends on."""

    other: object  # the value that it must differ from
    was: object  # its own value


@dataclass(frozen=True)
class Compared:
    """The condition on a size that only an order comparison depends on."""

    sign: str  # the comparison that must hold
    other: int | str  # a number, or the path of a setting
    was: object  # its own value


@dataclass(frozen=True)
class Count:
    """The condition on a list of layers that are unrolled."""

    number: int  # the number of layers


_SIGNS: dict[type[ast.cmpop], tuple[str, str]] = {  # if the test holds, and if it does not
    ast.Lt: ("<", ">="),
    ast.LtE: ("<=", ">"),
    ast.Gt: (">", "<="),
    ast.GtE: (">=", "<"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
}


def steps_of(worth: Worth) -> list[str] | None:
    """The attributes that lead to a module, if it is known which module a value is."""
    return [*worth.steps] or None if isinstance(worth, Unknown) else None


def is_module(value: object) -> bool:
    """Whether a value is a module of the model."""
    return hasattr(type(value), "named_parameters")


def rounds_of(module: Any) -> list[str]:
    """The names of the layers that a loop over an `nn.ModuleList` or `nn.Sequential` visits."""
    return [*module._modules] if isinstance(module, nn.ModuleList | nn.Sequential) else []


@dataclass
class Environment:
    """The meaning of the names of a function."""

    me: str | None  # the function's name for its module: `self`
    live: Any  # the module
    path: str  # the module's path in the model
    values: dict[str, Worth]  # the known values of local names
    world: Mapping[str, Any]  # the global names of the file
    settings: dict[str, Any]  # attributes of the model that decided branches so far, by path
    # Attributes that some `forward` sets, so that they are not constant.
    changing: frozenset[str] = CHANGING

    def chain(self, node: ast.expr) -> list[str] | None:
        """The chain of attributes that an expression reads, starting from the module."""
        match node:
            case ast.Attribute(value=owner, attr=step):
                before = self.chain(owner)
                return None if before is None else [*before, step]
            case ast.Subscript(value=owner, slice=index):
                return self._layer(owner, index)
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Attribute() as named]) if (
                self.global_at(node.func) is getattr
            ):
                before, said = self.chain(owner), self._of_class(named)
                return None if before is None or said is None else [*before, said]
            case ast.Name(id=name) if name == self.me:
                return []
            case ast.Name(id=name):
                return steps_of(self.values.get(name, UNKNOWN))
        return None

    def _of_class(self, node: ast.Attribute) -> str | None:
        """The string value of a class attribute of a module, unless the instance has its own."""
        if not (steps := self.chain(node)) or (owner := self.found_at(steps[:-1])) is None:
            return None
        value = None if steps[-1] in vars(owner) else getattr(type(owner), steps[-1], None)
        return value if isinstance(value, str) else None

    def _layer(self, owner: ast.expr, index: ast.expr) -> list[str] | None:
        """The chain of attributes to a layer of a list by a known index."""
        listed = self.chain(owner)
        key = self.value(index)
        if not isinstance(key, Constant) or key.is_setting:
            return None
        if listed is None:
            several = self.values.get(owner.id) if isinstance(owner, ast.Name) else None
            parts = several.values if isinstance(several, KnownObject) else {}
            return steps_of(parts.get(str(key.value), UNKNOWN))
        module = self.found_at(listed)
        names: dict[Any, str] = dict(enumerate(rounds_of(module)))
        if isinstance(module, nn.ModuleDict):
            names = {name: name for name in module}
        return [*listed, names[key.value]] if key.value in names else None

    def object_at(self, steps: list[str]) -> Any:
        """The object at a chain of attributes of the module; raises `AttributeError` if none."""
        found = self.live
        for step in steps:
            if isinstance(getattr(type(found), step, None), property) and is_module(found):
                raise AttributeError(step)  # a property must not run before the model does
            found = getattr(found, step)
        return found

    def found_at(self, steps: list[str] | None) -> Any:
        """The same; None if there is no object, or the chain is not known."""
        try:
            return None if steps is None else self.object_at(steps)
        except AttributeError:
            return None

    def global_at(self, node: ast.expr) -> Any:
        """The value of a global name, or of an attribute of one; None for local names."""
        if isinstance(node, ast.Attribute):
            return getattr(self.global_at(node.value), node.attr, None)
        if isinstance(node, ast.Name) and node.id not in self.values:
            return self.world.get(node.id, getattr(builtins, node.id, None))
        return None

    def decided(self, test: ast.expr) -> bool | None:
        """The truth value of a test in every training step; None if it is not known."""
        read: dict[str, Any] = {}
        way = truth(test, lambda operand: self._tested(operand, read), calls=False)
        if way is not None:
            self.rely_on(read)
        return way

    def _tested(self, operand: ast.expr, read: dict[str, Any]) -> Worth:
        own: dict[str, Any] = {}
        value = self.value(operand, own)
        if isinstance(value, Constant):
            own = _less_exact(operand, own, bool(value.value)) or own
        for path, found in own.items():
            read[path] = _stronger(read.get(path, found), found)
        return value

    def rely_on(self, read: Mapping[str, Any]) -> None:
        """Records settings that a decision depended on."""
        for path, value in read.items():
            self.settings[path] = _stronger(self.settings.get(path, value), value)

    def settled(self, node: ast.expr) -> Worth:
        """The value of an expression, valid from here on even if its variables change.

        Settings with a value of None or bool are recorded as relied on; numbers count as unknown.
        """
        read: dict[str, Any] = {}
        value = self.value(node, read)
        if not isinstance(value, Constant) or not (value.is_setting or read):
            return value
        if value.value is None or isinstance(value.value, bool):
            self.rely_on(read)
            return Constant(value.value)
        return UNKNOWN

    def value(self, node: ast.expr, read: dict[str, Any] | None = None) -> Worth:
        """The value of an expression; `read` collects the settings that it reads."""
        read = {} if read is None else read

        def of(operand: ast.expr) -> Worth:
            return self.value(operand, read)

        match node:
            case ast.Name(id=name):
                return self.values.get(name, UNKNOWN)
            case ast.Attribute():
                return self._attribute(node, read)
            case ast.Subscript() if steps := self.chain(node):
                return Unknown(True, is_module=True, steps=(*steps,))
            case ast.Call():
                return self._call(node, read)
            case ast.Compare(
                left=ast.Constant(value=key),
                ops=[ast.In() | ast.NotIn() as sign],
                comparators=[ast.Name(id=name)],
            ) if isinstance(given := self.values.get(name), KnownKwargs):
                return Constant((key in given.values) is isinstance(sign, ast.In))
        found = computed(node, of, calls=False) or UNKNOWN
        match node:
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot()], comparators=[right]):
                steps, value = self.chain(left), of(left)
                known = isinstance(value, Constant) and value.value is not None
                if steps and (known or is_given(value)) and of(right) == NONE:
                    read[self.path_of(steps)] = NOT_NONE
        if isinstance(found, Constant) and not (found.is_setting or _is_written(found.value)):
            return Unknown(True)
        if isinstance(node, ast.BinOp) and found == UNKNOWN:
            return TENSOR if TENSOR in map(of, (node.left, node.right)) else UNKNOWN
        return found

    def path_of(self, steps: list[str]) -> str:
        """The path in the model at a chain of attributes of the module."""
        return ".".join([self.path, *steps] if self.path else steps)

    def _attribute(self, node: ast.Attribute, read: dict[str, Any]) -> Worth:
        steps = self.chain(node)
        if steps is None:
            return attribute_of(self.value(node.value, read), node.attr)
        try:
            found = self.object_at(steps)
        except AttributeError:
            return UNKNOWN
        if found is not None and not isinstance(found, bool | int | str):  # floats may be tuned
            known = (*steps,) if is_module(found) and steps[-1] not in self.changing else ()
            return Unknown(True, is_module=is_module(found), steps=known)
        if steps[-1] in self.changing:
            return UNKNOWN
        read[self.path_of(steps)] = found
        return Constant(found, is_setting=True)

    def _call(self, node: ast.Call, read: dict[str, Any]) -> Worth:
        match node:
            case ast.Call(
                func=ast.Name(id="getattr"), args=[of, ast.Constant(value=str(name)), default]
            ) if self.global_at(node.func) is getattr and (steps := self.chain(of)) is not None:
                if hasattr(self.found_at(steps), name):
                    return self._attribute(ast.Attribute(of, name, ast.Load()), read)
                if isinstance(found := self.value(default, read), Constant):
                    read[self.path_of([*steps, name])] = found.value
                    return Constant(found.value, is_setting=True)
            case ast.Call(func=ast.Name(id="len"), args=[of]):
                count = self.settings.get(self.path_of(self.chain(of) or []))
                if isinstance(count, Count):  # its layers are unrolled
                    return Constant(count.number)
            case ast.Call(func=ast.Name(id="isinstance"), args=[of, classes]):
                return self._is_instance(self.value(of, read), self.global_at(classes))
            case ast.Call(func=ast.Name(id="hasattr"), args=[of, ast.Constant(value=str(name))]):
                steps = self.chain(of)
                if steps is not None and hasattr(type(self.object_at(steps)), name):
                    return Constant(True)  # a class attribute
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=name), attr="get" | "pop"),
                args=[ast.Constant(value=str(key)), *default],
            ):
                extra = self.values.get(name)
                if isinstance(extra, KnownKwargs):
                    otherwise = self.value(default[0], read) if default else NONE
                    return extra.values.get(key, otherwise)
        if self._gives_tensor(node.func, read):
            return TENSOR
        if isinstance(node.func, ast.Name):
            called = self.values.get(node.func.id)
            return Unknown(isinstance(called, Unknown) and called.is_module)
        if steps := self.chain(node.func):
            return Unknown(is_module(self.found_at(steps)))
        is_got = isinstance(node.func, ast.Call) and self.module_got(node.func) is not None
        return Unknown(is_got)

    def _gives_tensor(self, function: ast.expr, read: dict[str, Any]) -> bool:
        """Whether a call of a function always returns one tensor."""
        known = self.global_at(function)
        name = getattr(known, "__name__", "")
        if any(known is getattr(home, name, known is None) for home in (torch, functional)):
            return gives_one_tensor(name)
        if not isinstance(function, ast.Attribute) or not gives_one_tensor(function.attr):
            return False
        return self.value(function.value, read) == TENSOR

    def module_got(self, call: ast.Call) -> Any:
        """The submodule that a call like `self.get_input_embeddings()` returns, or None."""
        steps = self.chain(call.func)
        if not steps or not steps[-1].startswith("get_") or call.args or call.keywords:
            return None
        try:
            method = self.object_at(steps)
            got = method() if is_accessor(method) else None
        except Exception:  # the model's own code
            return None
        return got if any(module is got for module in self.live.modules()) else None

    def _is_instance(self, value: Worth, classes: Any) -> Worth:
        try:
            match value:
                case Constant(value=constant):
                    return Constant(isinstance(constant, classes))
                case KnownObject(cls=kind) | Unknown(cls=type() as kind):
                    return Constant(issubclass(kind, classes))
        except TypeError:
            pass
        return UNKNOWN


def _less_exact(test: ast.expr, read: Mapping[str, Any], way: bool) -> dict[str, Any] | None:
    """The weaker conditions for a test that only compares settings.

    None if the test depends on their exact values.
    """
    sizes = [(path, was) for path, was in read.items() if type(was) is int]
    if len(sizes) < len(read):  # the conditions would miss the other settings
        sizes = []
    match test:
        case ast.Attribute() if way and len(sizes) == 1 and sizes[0][1] > 0:
            (path, was), *_ = sizes
            return {path: Compared(">", 0, was)}
        case ast.Compare(left=ast.Attribute(), ops=[op], comparators=[ast.Attribute()]) if (
            type(op) in _SIGNS and len(sizes) == 2
        ):
            (path, was), (other, _) = sizes
            return {path: Compared(_SIGNS[type(op)][not way], other, was)}
        case ast.Compare(
            left=ast.Attribute(),
            ops=[ast.Eq() | ast.NotEq() as op],
            comparators=[ast.Constant(value=one)],
        ):
            is_other = way == isinstance(op, ast.NotEq)
            if is_other and len(read) == 1 and type(one) in (int, str):
                return {path: Unlike(one, was) for path, was in read.items()}
    return None


def _stronger(one: object, other: object) -> object:
    """The condition on a setting that covers the conditions of two tests."""
    if one == other:
        return one
    inexact = Unlike | Compared
    exact = [v for v in (one, other) if v is not NOT_NONE and not isinstance(v, inexact)]
    return exact[0] if exact else next(v.was for v in (one, other) if isinstance(v, inexact))


def is_accessor(method: Any) -> bool:
    """Whether a method returns a submodule independently of the settings.

    It returns an attribute, or it is transformers' own, which looks for one of a few names.
    """
    if getattr(method, "__module__", "") == "transformers.modeling_utils":
        return True
    match tree_of(method).body:
        case [ast.FunctionDef(body=[*_, ast.Return(value=ast.Attribute() as value)]) as function]:
            return len(body_of(function)) == 1 and self_path(value) is not None
    return False


def _is_written(value: object) -> bool:
    """Whether the literal of a value can replace its name."""
    return is_plain(value) and not (isinstance(value, int | float) and value < 0)
