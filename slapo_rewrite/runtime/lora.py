"""LoRA adapters of layers that work on parts: the same at every world size.

Where a layer is split over its output features, so is its adapter's `lora_B`; where it
is split over its input features, so is `lora_A`.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from .guards import is_adapter, refuse_wrappers
from .loading import check_seeds
from .shards import Shard, are_alike, world_of, world_size
from .tensor_parallel import (
    Reduction,
    all_reduce_gradient,
    gather_if_sharded,
    record_shard,
    sum_now,
    unchanged,
)


def add_adapters(model: nn.Module, add: Callable[[Any], Any]) -> Any:
    """Adds adapters to the model as in one process, and keeps this rank's parts.

    They start bit for bit as in one process: with random weights, for which the ranks
    must be seeded alike, or with a stored adapter of the whole model.

    Args:
        model: The model, not yet wrapped for data parallelism.
        add: Adds adapters to it, for example by PEFT's `get_peft_model` or
            `PeftModel.from_pretrained`.

    Returns:
        What `add` returns.

    Raises:
        RuntimeError: An adapter of a split layer is not a plain LoRA of a linear layer.
        ValueError: The ranks start with different adapters.
    """
    if world_size() == 1:
        return add(model)
    before, known = set(model.modules()), set(model.parameters())
    layers = {layer for layer in before if hasattr(layer, "sharded_parameters")}
    layers = {layer for layer in layers if not isinstance(layer, AdapterLinear)}
    with world_of(1), looking_whole(layers):
        adapted = add(model)
    new = [parameter for parameter in model.parameters() if parameter not in known]
    if not new:
        return adapted
    sums = torch.stack([each.detach().double().sum() for each in new])
    for path, module in list(model.named_modules()):
        if getattr(module, "base_layer", None) in layers:
            keep_parts(path, module)
        elif module not in before:
            copied = hasattr(module, "sharded_parameters")
            if copied or any(is_adapter(module, each) for each in module.children()):
                refuse(path, "what was added to it is no LoRA adapter")
    if not are_alike(sums):
        raise ValueError(
            "the ranks have added different adapters: call torch.manual_seed with the same "
            "seed on all ranks before"
        )
    if isinstance(adapted, nn.Module):
        for name, child in adapted.named_children():
            refuse_wrappers(adapted, name, child)
    return adapted


@contextmanager
def looking_whole(layers: set[Any]) -> Iterator[None]:
    """A context in which split layers have whole sizes, and NaN as weights."""
    parts: dict[Tensor, Tensor] = {}
    sizes: dict[Any, tuple[int, int]] = {}
    for layer in layers:
        layer.takes_adapters = True
        for name, shard in layer.sharded_parameters.items():
            tensor = getattr(layer, name)
            if tensor not in parts:  # nor tied to one of them
                parts[tensor] = tensor.data
                shape = list(tensor.shape)
                shape[shard.axis] = shard.size
                tensor.data = tensor.data.new_full((), math.nan).expand(shape)
        if isinstance(layer, nn.Linear):
            sizes[layer] = layer.in_features, layer.out_features
            layer.out_features, layer.in_features = layer.weight.shape
    try:
        yield
    except Exception as error:
        error.add_note(
            "Inside, split layers hold NaN: adapters cannot begin with what is made of "
            "their weights, nor bring weights of theirs along (`save_embedding_layers`)"
        )
        raise
    finally:
        for tensor, part in parts.items():
            tensor.data = part
        for layer in layers:
            del layer.takes_adapters
        for layer, (in_features, out_features) in sizes.items():
            layer.in_features, layer.out_features = in_features, out_features


def refuse(path: str, why: str) -> None:
    """Refuses an adapter of a layer.

    Raises:
        RuntimeError: Always.
    """
    raise RuntimeError(
        f"`{path}` works on this rank's part, and {why}: several ranks support only LoRA "
        "adapters of linear layers, without bias, with random initial weights. Exclude "
        "the layer, or train in one process"
    )


def keep_parts(path: str, adapter: Any) -> None:
    """Cuts the adapters of one layer to this rank's part.

    Args:
        path: The layer's path.
        adapter: Holds it as `base_layer`; by name `lora_A`, `lora_B`, `lora_dropout`.

    Raises:
        RuntimeError: It holds more, or was made from the layer's weights.
    """
    base, names = adapter.base_layer, list(getattr(adapter, "lora_A", ()))
    pairs = [(adapter.lora_A[name], adapter.lora_B[name]) for name in names]
    known = {*base.parameters()} | {each.weight for pair in pairs for each in pair}
    kinds = "reduce", "enter"
    linear_layer = base.weight.dim() == 2 and any(hasattr(base, k) for k in kinds)
    plain = {*adapter.parameters()} <= known and not getattr(adapter, "lora_variant", 0)
    if not plain or not (linear_layer or isinstance(base, nn.Linear)):
        refuse(path, "its adapter is more than two weights")
    for name, (a, b) in zip(names, pairs, strict=True):
        if isinstance(a, AdapterLinear):
            continue
        if not (a.weight.isfinite().all() and b.weight.isfinite().all()):
            refuse(path, "its adapter was made from the layer's weights")
        drop = AdapterDropout(getattr(adapter.lora_dropout[name], "p", 0.0))
        shard = base.sharded_parameters.get("weight")
        if shard is None:  # a whole layer on this rank's tokens
            if drop.p:
                refuse(path, "its dropout differs from that of one process")
            a = AdapterLinear(a, used=all_reduce_gradient)
            b = AdapterLinear(b, used=all_reduce_gradient)
        elif hasattr(base, "reduce"):  # split over its input features
            drop.shard = replace(shard, axis=-1)
            a = AdapterLinear(
                a, replace(shard, axis=1), partial(summed, reduce=base.reduce)
            )
            sums = base.reduce is sum_now
            b = AdapterLinear(b, used=unchanged if sums else all_reduce_gradient)
        else:  # over its output features
            gather = partial(
                gather_if_sharded, shard=getattr(base, "output_shard", None)
            )
            shared = base.shared if getattr(base, "replicas", 1) > 1 else unchanged
            if base.enter is unchanged:  # that is done once for several layers
                a = AdapterLinear(a, used=all_reduce_gradient)
            else:
                a = AdapterLinear(a, result=all_reduce_gradient)
            b = AdapterLinear(b, replace(shard, axis=0), gather, shared)
        adapter.lora_A[name], adapter.lora_B[name] = a, b
        drop.train(adapter.lora_dropout[name].training)
        adapter.lora_dropout[name] = drop


def summed(y: Tensor, reduce: Reduction) -> Tensor:
    """The sum of the ranks' partial outputs, by the layer's own `reduce`."""
    return reduce(y, None)[0]


class AdapterLinear(nn.Linear):
    """One of an adapter's two layers.

    Args:
        whole: The same layer in one process.
        shard: How its weight is divided; None if it is whole.
        result: A function that is applied to its output.
        used: A function that is applied to its weight before use.
    """

    def __init__(
        self,
        whole: nn.Linear,
        shard: Shard | None = None,
        result: Callable[[Tensor], Tensor] = unchanged,
        used: Callable[[Tensor], Tensor] = unchanged,
    ) -> None:
        super().__init__(1, 1, bias=False, device="meta")
        self.weight, self.result, self.used = whole.weight, result, used
        if shard is not None:
            self.weight.data = shard.cut(self.weight.data)
            record_shard(self, "weight", shard)
        self.out_features, self.in_features = self.weight.shape

    def forward(self, input: Tensor) -> Tensor:
        """Maps the input, or this rank's part of it."""
        return self.result(linear(input, self.used(self.weight)))


class AdapterDropout(nn.Dropout):
    """Dropout of an adapter's input; every rank draws the mask of the whole input.

    Args:
        p: The dropout rate.

    Attributes:
        shard: How the input is divided; None if it is whole.
    """

    def __init__(self, p: float) -> None:
        super().__init__(p)
        self.shard: Shard | None = None
        self.draws_alike = False

    def forward(self, input: Tensor) -> Tensor:
        """Drops the same elements as one process.

        Raises:
            RuntimeError: The ranks draw different random numbers here.
        """
        if not self.training or not self.p:
            return input
        if not self.draws_alike and not torch.compiler.is_compiling():
            try:
                with input.device:
                    check_seeds()
            except ValueError:
                raise RuntimeError(
                    "an adapter's dropout needs the same random numbers on all ranks, but "
                    "the ranks draw different ones here, inside `fork_rng` or from different "
                    "seeds: set `lora_dropout=0`, or rewrite without `fork_rng`"
                ) from None
            self.draws_alike = True
        if self.shard is None:
            return super().forward(input)
        ones = input.new_ones((*input.shape[:-1], self.shard.size))
        return input * self.shard.cut(dropout(ones, self.p))
