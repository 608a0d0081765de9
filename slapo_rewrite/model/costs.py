"""Counts, on the meta device, the cost of a model's modules that are called in sequence."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from slapo_rewrite.code.text import joined_path
from slapo_rewrite.model.calls import calls_noted
from slapo_rewrite.model.meta_device import Answers, carry_out, with_values
from slapo_rewrite.model.results import tensors
from slapo_rewrite.model.tree import is_container

# Operators that return a view without being marked so, or uninitialised memory.
FREE = {"aten::_unsafe_view", "aten::empty", "aten::empty_like"}
_OF_ALL = (torch.all, Tensor.all)
# Operators that read only as much as they write.
PICKING = {"aten::embedding", "aten::gather", "aten::index_select"}


@dataclass
class Cost:
    """The cost of a module in one forward pass."""

    flops: float = 0  # of matrix products and attention
    moved: float = 0  # bytes that all other operators read and write


def elements_of(model: nn.Module, inputs: Mapping[str, Any]) -> list[str]:
    """The paths of the modules that a model calls in sequence, between which it can be cut.

    These are the elements of its lists and the modules beside the lists, if they have parameters
    and are called once.
    """
    pieces = {path: module for path, module in _pieces(model) if list(module.parameters())}
    called = calls_of(model, inputs, pieces)
    counts = Counter(called)
    return [path for path in called if counts[path] == 1]


def calls_of(
    model: nn.Module, inputs: Mapping[str, Any], modules: Mapping[str, nn.Module]
) -> list[str]:
    """The keys of the modules that a forward pass calls, in order."""
    with calls_noted(modules) as called:
        _run(model, inputs)
    return called


def _pieces(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The descendants of a module without lists of their own, and the elements of lists."""
    for name, child in module.named_children():
        inner = joined_path(path, name)
        is_item = is_container(type(module)) and not is_container(type(child))
        if is_item or not any(is_container(type(below)) for below in child.modules()):
            yield inner, child
        else:
            yield from _pieces(child, inner)


def costs_of(model: nn.Module, inputs: Mapping[str, Any], paths: Sequence[str]) -> list[Cost]:
    """The costs of modules of a model, which include everything else that the model computes.

    The model is on the meta device, in the dtype and with the batch that it is to be trained with.
    Operators that run before the second module is called count for the first, and so on: the head
    counts for the last. Raises `ValueError` unless each is called once, in this order.
    """
    elements = {number: model.get_submodule(path) for number, path in enumerate(paths)}
    with calls_noted(elements) as called:
        counter = _Counter(len(paths), called)
        with counter:
            _run(model, inputs)
    check_order(paths, called)
    return counter.costs


def check_order(paths: Sequence[str], called: Sequence[int]) -> None:
    """Raises `ValueError` unless each module is called once, in this order."""
    if [*called] != [*range(len(paths))]:
        found = [paths[number] for number in called]
        raise ValueError(f"`forward` calls {found}, not each of {list(paths)} once")


def _run(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    on_meta = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), dict(inputs))
    with OnMeta():
        model(**on_meta)


class _Counter(TorchDispatchMode):
    """Counts operators, each for the module that was called last."""

    def __init__(self, count: int, called: Sequence[int]) -> None:
        super().__init__()
        self.called = called
        self.costs = [Cost() for _ in range(count)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        cost = self.costs[self.called[-1] if self.called else 0]
        flops = flops_of(func, args, kwargs or {}, results)
        if flops is not None:
            cost.flops += flops
        elif not func.is_view and func._schema.name not in FREE:
            written = list(tensors(results))
            read = written if func._schema.name in PICKING else tensors((args, kwargs))
            cost.moved += sum(tensor.nbytes for tensor in (*written, *read))
        return results


def flops_of(func: Any, args: Any, kwargs: Any, results: Any) -> float | None:
    """The FLOPs of a matrix product or of attention; None for other operators."""
    name = func._schema.name
    if "scaled_dot_product" in name:
        is_backward = name.endswith("_backward")
        query, key, value = args[1:4] if is_backward else args[:3]
        scores = query.shape[:-1].numel() * key.shape[-2]  # with fewer key heads as well
        # Backward: recomputes the scores, then two products for each of the two in forward.
        width, again = query.shape[-1], value.shape[-1]
        names = (argument.name for argument in func._schema.arguments)
        if {**dict(zip(names, args, strict=False)), **kwargs}.get("is_causal"):
            scores /= 2  # future positions are skipped
        return float(2 * scores * ((3 * width + 2 * again) if is_backward else width + again))
    if name == "aten::_grouped_mm":  # groups divide the rows or the contracted axis
        one, other = args[:2]
        groups = len(one) if one.dim() == other.dim() == 3 else 1
        return float(2 * groups * one.shape[-2] * one.shape[-1] * other.shape[-1])
    # `addmm_` and others count like their out-of-place variants.
    product = getattr(torch.ops.aten, func._overloadpacket.__name__.rstrip("_"), None)
    count = flop_registry.get(func._overloadpacket) or flop_registry.get(product)
    return None if count is None else float(count(*args, **kwargs, out_val=results))


class Product(NamedTuple):
    """The properties of a matrix product that determine a GPU's speed."""

    # "plain"; "attention" by one kernel; "masked" if that takes a mask, a bias or values of another
    # width; "unaligned" if rows do not begin at multiples of 16 bytes, which makes loads short.
    kind: str
    width: int  # bytes of an element

    @classmethod
    def of(cls, func: Any, matrices: Sequence[Tensor]) -> Product:
        """The product of an operator that reads and writes these tensors."""
        name, width = func._schema.name, min((m.element_size() for m in matrices), default=0)
        if "scaled_dot_product" in name:
            return cls("masked" if "efficient" in name else "attention", width)
        unaligned = any(
            size > 1 < stride and stride * matrix.element_size() % 16
            for matrix in matrices
            if matrix.dim() > 1
            for size, stride in zip(matrix.shape[-2:], matrix.stride()[-2:], strict=True)
        )
        return cls("unaligned" if unaligned else "plain", width)


class OnMeta(TorchFunctionMode):
    """Answers reads of values, and calls the fused operators that torch uses on a GPU.

    Tensors that a model makes without naming a device (`torch.arange(n)`) are meta tensors as well.
    `is_gpu` says whether the step is to run on a GPU; a CPU has other operators.
    """

    def __init__(self, is_gpu: bool = True) -> None:
        super().__init__()
        self.instead = ON_GPU if is_gpu else ON_CPU
        self.device, self.answers = torch.device("meta"), Answers()

    def __enter__(self) -> OnMeta:
        self.device.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.device.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = with_values(func, args, kwargs or {})
        says = bool(args) and getattr(args[0], "is_of_all", False)
        if (answer := self.answers.to(func, args, says)) is not None:
            return answer
        if func in self.instead:
            return self.instead[func](*args, **kwargs)
        result = carry_out(func, args, kwargs)
        if func in _OF_ALL:  # assumes no padding and no packed rows
            result.is_of_all = True
        return result


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, training)[0] if training and p else x


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    is_gpu: bool = True,
) -> Tensor:
    """Calls the fused attention operator for these arguments, if there is one."""
    needs_gradient = attn_mask is not None and attn_mask.requires_grad
    is_even = query.shape[-1] == value.shape[-1]  # as flash attention takes them
    # The CPU kernel supports none of these.
    if not is_gpu and (dropout_p or needs_gradient or not is_even):
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    results: tuple[Tensor, ...]
    if not is_gpu:
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask, 1)
        results = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
        )
    elif attn_mask is None and is_even:
        results = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )
    else:
        if enable_gqa:  # only flash attention reads a key for several queries; it takes no mask
            repeats = query.shape[-3] // key.shape[-3]
            key, value = (x.repeat_interleave(repeats, -3) for x in (key, value))
        results = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
        )
    return results[0]


ON_GPU: dict[Any, Callable[..., Any]] = {
    functional.dropout: _dropout,
    functional.scaled_dot_product_attention: _attention,
}
ON_CPU: dict[Any, Callable[..., Any]] = {
    functional.scaled_dot_product_attention: functools.partial(_attention, is_gpu=False)
}
