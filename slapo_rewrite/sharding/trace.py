"""The record of the whole model's run, that a rank's run is held against.

Every operation outside of the layers that will be sharded is noted with the shapes and the numbers
that it was given; a call of such a layer counts as one operation. Questions that need values, which
the meta device has not, are answered here for both runs alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from slapo_rewrite.model.calls import around_layer, calls_watched
from slapo_rewrite.model.layers import Layer, layer_below
from slapo_rewrite.model.meta_device import KnownResults, answer_to, with_values
from slapo_rewrite.model.results import tensors
from slapo_rewrite.model.tree import Tree
from slapo_rewrite.sharding.functional_layers import is_linear, spelled_call
from slapo_rewrite.sharding.tracked_sizes import Shape, numbers, shapes

# Functions that make tensors from sizes or numbers.


@dataclass
class Entry:
    """One recorded operation of the whole model."""

    function: Callable[..., Any]  # what was called
    inputs: list[Shape]  # the shapes of the tensors that it was given
    outputs: list[Shape]  # the shapes of those that it returned
    numbers: list[float]  # the numbers that it was given
    key: tuple[Any, ...] = ()  # what stood between the brackets of an index
    # What it returned, where that has values and they are no floating-point numbers.
    chosen: list[torch.Tensor | None] = field(default_factory=list)

    def choose(self, outputs: Iterable[torch.Tensor]) -> None:
        """Lets what a rank has chosen, indices and masks, be what the whole model chose.

        A rank's values are not the model's, and `forward` may go another way by them. Views have
        what they are views of.
        """
        for chosen, output in zip(self.chosen, outputs, strict=False):
            if chosen is not None and chosen.shape == output.shape and not output._is_view():
                output.copy_(chosen)


class Trace(TorchFunctionMode):
    """Records the operations of the whole model, outside of the layers that will be sharded.

    Attributes:
        entries: The operations.
        result: What the model returned.
        buffers: What its buffers were then, by the path of their module and their name.
        ran: The code of wrapped `forward`s that ran.
        editable: The text of a file that may be changed; None of another.
        says: What questions of values that are not there are answered with.
        results: What operations gave before.
    """

    def __init__(
        self,
        tree: Tree,
        layers: Mapping[str, Layer],
        results: KnownResults,
        editable: Callable[[str], str | None],
        says: bool = False,
    ) -> None:
        super().__init__()
        self.tree, self.layers, self.editable, self.says = tree, layers, editable, says
        self.results = results
        self.linear = [n.live for path in layers if is_linear((n := tree.nodes[path]).live)]
        self.entries: list[Entry] = []
        self.result: Any = None
        self.buffers: dict[tuple[str, str], torch.Tensor] = {}
        self.ran: set[CodeType] = set()
        self.depth = 0
        self.has_values = device_of(tree.root.live).type != "meta"

    def same_calls(self, other: Trace) -> bool:
        """Whether another run called the same operations, with the same shapes and numbers."""
        return len(self.entries) == len(other.entries) and all(
            (a.function, a.inputs, a.outputs, a.numbers)
            == (b.function, b.inputs, b.outputs, b.numbers)
            for a, b in zip(self.entries, other.entries, strict=True)
        )

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Skips what happens inside the layers."""
        layers = [self.tree.nodes[path].live for path in self.layers]
        around = {m: (type(m), base) for m in layers if (base := layer_below(type(m))) is not None}
        plain = (layer for layer in layers if layer not in around)
        try:
            for module, (cls, base) in around.items():
                module.__class__ = around_layer(cls, base, self._enter, self._leave)
            with calls_watched((layer, self._enter, self._leave) for layer in plain):
                yield
        finally:
            for module, (cls, _) in around.items():
                module.__class__ = cls

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.depth += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.entries.append(Entry(layer_call, shapes(args), shapes(output), []))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = with_values(func, args, kwargs or {})
        if (answer := answer_to(func, args, self.says)) is not None:
            return answer
        if self.depth:
            return self.results.carry_out(func, args, kwargs)
        if (spelled := spelled_call(self.linear, func, args, kwargs, self.editable)) is not None:
            return spelled[0](args[0])
        inputs, given = shapes((args, kwargs)), list(numbers((args, kwargs), not self.has_values))
        output = self.results.carry_out(func, args, kwargs)
        outputs, name = shapes(output), getattr(func, "__name__", "")
        if outputs or name == "__setitem__":
            key = key_of(args[1]) if name in ("__getitem__", "__setitem__") else ()
            self.entries.append(
                Entry(func, inputs, outputs, given, key, _chosen(output) if self.has_values else [])
            )
        return output


def device_of(model: nn.Module) -> torch.device:
    """Where a model's tensors are."""
    found = (t.device for t in (*model.parameters(), *model.buffers()))
    return next(found, torch.device("meta"))


def _chosen(output: Any) -> list[torch.Tensor | None]:
    """Copies of indices and masks."""
    return [None if t.is_floating_point() else t.detach().clone() for t in tensors(output)]


def layer_call() -> None:
    """Stands for the call of a sharded layer in the record."""


def key_of(key: Any) -> tuple[Any, ...]:
    """What stands between the brackets of an index, item by item."""
    return key if isinstance(key, tuple) else (key,)
