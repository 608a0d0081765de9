"""Runs a model with each operation in its precision, and records the needed casts."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from slapo_rewrite.hugging_face import KEEPS_PRECISION
from slapo_rewrite.model.layers import qualified
from slapo_rewrite.model.meta_device import Answers, carry_out, with_values
from slapo_rewrite.model.results import tensors
from slapo_rewrite.operations import FLOAT32, PRODUCT, name_of, precision_of
from slapo_rewrite.precision.call_stack import Call, CallStack, parameters_of, reading_frame
from slapo_rewrite.precision.casts import (
    HALF,
    HALVES,
    CannotCast,
    Cast,
    Operand,
    Precisions,
    Wanted,
    is_float,
    keeping,
)
from slapo_rewrite.precision.dtype_reads import is_harmless, without_autocast
from slapo_rewrite.precision.half_layers import FLOAT32_LAYERS, computes_product
from slapo_rewrite.runtime import kernels
from slapo_rewrite.sharding.operation_places import first_argument, place_of

# Kernels accept operands in half precision and float32, also mixed.
KERNELS = os.path.join(os.path.dirname(kernels.__file__), "")
MULTIHEAD = "multi_head_attention_forward"
ATTENTION, MASK = "scaled_dot_product_attention", ((3,), ("attn_mask",))


class PrecisionRun(TorchFunctionMode):
    """Runs each operation in its precision, and records the needed casts."""

    def __init__(self, stack: CallStack, wanted: Wanted, found: Precisions) -> None:
        super().__init__()
        self.stack, self.wanted, self.found = stack, wanted, found
        self.given, self.answers = dict(found.given), Answers()
        self.entered: dict[FrameType, _Entered] = {}
        # Functions for whose calls this run found new casts.
        self.renewed: set[FrameType] = set()
        self.makers: dict[int, list[torch.Tensor]] = {}
        self.alive: list[torch.Tensor] = []
        # The first value of this run that no call can cast.
        self.out_of_reach: CannotCast | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = with_values(func, args, kwargs or {})
        if (answer := self.answers.to(func, args)) is not None:
            return answer
        call, name = self.stack.call(), name_of(func)
        if call is not None and call.callee is not None:
            args, kwargs = self._as_entered(call, call.callee, args, kwargs)
        if name == MULTIHEAD and call is not None and self._attends(call):
            return self._attended(call, func, args, kwargs)
        if name == ".dtype" and args[0].dtype in HALVES:
            self._check_read()
        args, kwargs = self._fitted(call, func, name, args, kwargs)
        try:
            output = carry_out(func, args, kwargs)
        except RuntimeError:
            # Torch supports this operation for operands of one precision only.
            args, kwargs = self._in_one(call, func, name, args, kwargs)
            output = carry_out(func, args, kwargs)
        made = list(tensors(output))
        self._check_known(call, name, args, kwargs, made)
        for tensor in made:
            self.makers.setdefault(id(tensor), list(tensors((args, kwargs))))
        self.alive += made
        return output

    def _attends(self, call: Call) -> bool:
        """Whether the operation is a multi-head attention layer's own, in half precision."""
        return computes_product(type(call.module), call.code) and self._is_half(call, MULTIHEAD)

    def _attended(self, call: Call, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a multi-head attention layer whose products are in half precision."""
        self.found.layers.add(call.owner)
        args, kwargs = self._mapped(lambda tensor, _: self._cast(tensor, FLOAT32), args, kwargs)
        y, weights = carry_out(func, args, kwargs)
        return self._cast(y, HALF), weights

    def _fitted(
        self, call: Call | None, func: Any, name: str, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """The operands, cast to the precision of the operation."""
        kind = precision_of(name)
        # An operation with a dtype argument begins with a cast to it.
        is_told = any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
        if kind not in (PRODUCT, FLOAT32) or call is None or (kind == FLOAT32 and is_told):
            return args, kwargs
        to = FLOAT32
        if kind == PRODUCT and self._is_half(call, name):
            to = HALF
            if computes_product(type(call.module), call.code):  # it is the layer's own
                self.found.layers.add(call.owner)
                return self._mapped(lambda tensor, _: self._cast(tensor, to), args, kwargs)
            if call.callee is not None and is_kernels(call.callee):
                raise CannotCast(
                    f"the kernel `{call.callee.f_code.co_name}` multiplies by itself, in the "
                    "precision of the parameters",
                    call.place,
                    "leave its rule out, or have the modules before it alone compute in half "
                    "precision: s[...].autocast()",
                )
        return self._all_recorded(call, func, name, args, kwargs, to)

    def _in_one(
        self, call: Call | None, func: Any, name: str, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """Operands of mixed precision, cast to one precision.

        It is that of a tensor changed in place, else float32.
        """
        given = [t for t in tensors((args, kwargs)) if is_float(t)]
        if call is None or len({t.dtype for t in given}) < 2:
            raise
        in_place = name.endswith("_") or name == "__setitem__"
        to = HALF if in_place and args[0].dtype in HALVES else FLOAT32
        return self._all_recorded(call, func, name, args, kwargs, to)

    def _is_half(self, call: Call, name: str) -> bool:
        """Whether a product is computed in half precision; not if the source disables autocast."""
        owner = call.owner
        if not self.wanted.is_half(owner) or self.wanted.keeps(owner, name):
            return False
        tree = self._tree(call.place.filename)
        return tree is None or not without_autocast(tree, call.place)

    def _check_known(
        self, call: Call | None, name: str, args: Any, kwargs: Any, made: list[torch.Tensor]
    ) -> None:
        """Refuses an operation on floats whose precision is not known."""
        given = [t for t in tensors((args, kwargs)) if is_float(t)]
        if precision_of(name) is not None or name.startswith(".") or not given:
            return
        in_half = any(t.dtype in HALVES for t in given)
        asked = call is not None and self.wanted.is_half(call.owner)
        if any(map(is_float, made)) and (in_half or asked):
            raise CannotCast(
                f"it is not known in which precision `{name}` is to be computed",
                call.place if call else None,
                f"keep it in float32, or a module around it: {keeping(call.owner if call else '')}",
            )

    def _check_read(self) -> None:
        """Refuses a read of a dtype that changes, unless it is only used for casts."""
        frame = reading_frame()
        name = frame.f_code.co_filename if frame is not None else KERNELS
        if frame is None or name.startswith(KERNELS) or name.endswith(KEEPS_PRECISION):
            return
        place = place_of(frame)
        tree = self._tree(frame.f_code.co_filename)
        if place is None or tree is None or not is_harmless(tree, place):
            raise CannotCast(
                "this asks for the dtype of a value that would be in half precision, and does more "
                "with it than cast others",
                place,
                "keep the module in float32 by `keep=[...]`, or ask for the dtype of a parameter",
            )

    def _tree(self, filename: str) -> ast.Module | None:
        text = self.stack.editable(filename) or "".join(linecache.getlines(filename))
        return _parsed(text) if text else None

    # Casts ------------------------------------------------------------------------------------

    def _cast(self, tensor: torch.Tensor, to: str) -> torch.Tensor:
        """Casts a value to a precision; returns the value itself if it has it."""
        if not is_float(tensor) or (tensor.dtype in HALVES) == (to == HALF):
            return tensor
        new = tensor.to(getattr(torch, self.wanted.dtype if to == HALF else "float32"))
        self.makers[id(new)] = [tensor]
        self.alive.append(new)
        return new

    def _all_recorded(
        self, call: Call, func: Any, name: str, args: Any, kwargs: Any, to: str
    ) -> tuple[Any, Any]:
        """Operands cast to a precision, with the casts recorded that the source needs for that.

        Once a new cast at the call of a function is found, its later operations are not recorded
        until the next run, in which they may have another precision.
        """
        if call.callee in self.renewed:
            return self._mapped(lambda tensor, _: self._cast(tensor, to), args, kwargs)
        known = len(self.found.given)
        fitted = self._mapped(
            lambda tensor, at: self._recorded(call, func, name, at, tensor, to), args, kwargs
        )
        if call.callee is not None and len(self.found.given) > known:
            self.renewed.add(call.callee)
        return fitted

    def _recorded(
        self, call: Call, func: Any, name: str, at: tuple[Any, ...], tensor: torch.Tensor, to: str
    ) -> torch.Tensor:
        """Casts one operand and records the cast."""
        new = self._cast(tensor, to)
        is_mask = name == ATTENTION and at in MASK
        if call.callee is None:
            operand = _operand(func, name, at)
            self.found.see(call.path, call.place, operand, tensor)
            if new is not tensor:
                self.found.casts.add(Cast(call.path, call.place, operand, to, is_mask))
        elif new is not tensor and not (to == FLOAT32 and is_kernels(call.callee)):
            if to == FLOAT32 and _is_norm_inside(call, call.callee):
                self.found.layers.add(call.owner)
                return new
            try:
                sources = self._sources(call, call.callee, name, tensor, to)
            except CannotCast as error:
                # It may depend on another operand, which the call casts in the next run.
                self.out_of_reach = self.out_of_reach or error
                return new
            for position, parameter in sources:
                key = (call.path, call.place, parameter)
                if self.found.given.setdefault(key, to) != to or key in self.given:
                    raise self._out_of_reach(call, call.callee, name, to)
                operand = Operand(position, parameter)
                self.found.casts.add(Cast(call.path, call.place, operand, to, is_mask))
        return new

    def _sources(
        self, call: Call, callee: FrameType, name: str, tensor: torch.Tensor, to: str
    ) -> list[tuple[int, str]]:
        """The parameters of the called function, in the old precision, that a value depends on."""
        entered, names = self.entered[callee], parameters_of(callee)
        waiting, seen = [tensor], {id(tensor)}
        found = []
        for each in waiting:
            if own := entered.parameters.get(id(each)):
                found += [(names.index(name), name) for name in own]
            elif id(each) not in entered.before:
                makers = [m for m in self.makers.get(id(each), ()) if id(m) not in seen]
                makers = [m for m in makers if m.dtype == tensor.dtype]
                seen |= {id(m) for m in makers}
                waiting += makers
        if not found:
            raise self._out_of_reach(call, callee, name, to)
        return found

    def _out_of_reach(self, call: Call, callee: FrameType, name: str, to: str) -> CannotCast:
        code = callee.f_code
        return CannotCast(
            f"`{name}` in `{code.co_name}` ({os.path.basename(code.co_filename)}:{callee.f_lineno})"
            f" is to be computed in {to}, and what it is given is made there: no method of the "
            "model could cast it",
            call.place,
            f"keep what is called in float32, or write it in `forward`: {keeping(call.owner)}",
        )

    def _as_entered(self, call: Call, callee: FrameType, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Operands inside a called function, with the casts of its call applied."""
        if callee not in self.entered:
            self.entered[callee] = self._enter(call, callee)
        casts = self.entered[callee].casts
        if not casts:
            return args, kwargs
        return self._mapped(lambda tensor, _: casts.get(id(tensor), tensor), args, kwargs)

    def _enter(self, call: Call, callee: FrameType) -> _Entered:
        entered = _Entered(before={id(tensor) for tensor in self.alive})
        for position, name in enumerate(parameters_of(callee)):
            value = callee.f_locals.get(name)
            operand = Operand(position, name)
            self.found.see(call.path, call.place, operand, value)
            if isinstance(value, torch.Tensor):
                if value.dtype in HALVES and (keeps_given(callee) or self._stays(callee)):
                    self.given[call.path, call.place, name] = FLOAT32
                    self.found.casts.add(Cast(call.path, call.place, operand, FLOAT32))
                self.alive.append(value)
                entered.parameters.setdefault(id(value), []).append(name)
                to = self.given.get((call.path, call.place, name))
                if to is not None:
                    entered.casts[id(value)] = self._cast(value, to)
        return entered

    def _stays(self, callee: FrameType) -> bool:
        """Whether a function is a method of a layer with parameters that stays in float32."""
        module = first_argument(callee)
        path = self.stack.paths.get(id(module))
        has_weights = isinstance(module, nn.Module) and any(True for _ in module.parameters())
        return has_weights and path is not None and not self.wanted.is_half(path)

    def _mapped(
        self,
        change: Callable[[torch.Tensor, tuple[Any, ...]], torch.Tensor],
        args: Any,
        kwargs: Any,
    ) -> tuple[Any, Any]:
        """Applies a function to all tensors of the operands, with their places."""

        def mapped(value: Any, at: tuple[Any, ...]) -> Any:
            if isinstance(value, torch.Tensor):
                return change(value, at)
            if type(value) in (list, tuple):
                return type(value)(mapped(item, (*at, n)) for n, item in enumerate(value))
            return value

        return (
            tuple(mapped(value, (n,)) for n, value in enumerate(args)),
            {name: mapped(value, (name,)) for name, value in kwargs.items()},
        )


@dataclass
class _Entered:
    """The state at the entry of a function that a method calls."""

    before: set[int]  # the `id`s of the values that existed
    # The tensors among its arguments by `id`, with the names of their parameters.
    parameters: dict[int, list[str]] = field(default_factory=dict)
    # The cast values, by `id` of the original.
    casts: dict[int, torch.Tensor] = field(default_factory=dict)


def _is_norm_inside(call: Call, callee: FrameType) -> bool:
    """Whether the operation is that of torch's norm inside another module: a `Sequential`."""
    return (
        qualified(type(call.module)) in FLOAT32_LAYERS and first_argument(callee) is not call.module
    )


def is_kernels(frame: FrameType) -> bool:
    """Whether a function is one of the kernels, which compute in float32 inside."""
    return frame.f_code.co_filename.startswith(KERNELS)


def keeps_given(frame: FrameType) -> bool:
    """Whether a function is a loss or softmax kernel: their results keep the input's precision."""
    name = frame.f_code.co_name
    return is_kernels(frame) and ("cross_entropy" in name or "softmax" in name)


def _operand(func: Any, name: str, at: tuple[Any, ...]) -> Operand:
    """The operand of the calling expression for an argument of an operation."""
    first, *rest = at
    element = rest[0] if rest else None
    names = _parameters(func)
    if isinstance(first, str):
        return Operand(names.index(first) if first in names else sys.maxsize, first, element)
    if any(getattr(torch.Tensor, each, None) is func for each in (name, f"__{name}__")):
        swapped = name.startswith("__r") and name.endswith("__") and name != "__rshift__"
        return Operand(-first if swapped else first - 1, "", element)
    return Operand(first, names[first] if first < len(names) else "", element)


@functools.cache
def _parameters(func: Any) -> tuple[str, ...]:
    """The names of a function's parameters; empty if it is not written in Python."""
    try:
        return tuple(inspect.signature(func).parameters) if inspect.isfunction(func) else ()
    except ValueError:
        return ()


@functools.lru_cache(maxsize=16)
def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except SyntaxError:
        return None
