"""The record of the whole model's run, which a rank's run is compared with.

It has every operation with the shapes and numbers among its arguments, and each call of a layer
that can be sharded: the call of a sharded layer counts as one operation. Branches on tensors'
values, which the meta device does not have, get the same answer here as in the rank's run.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, get_testing_overrides

from slapo_rewrite.groups import grouped
from slapo_rewrite.model.calls import around_layer, calls_watched
from slapo_rewrite.model.layers import base_of, layer_below
from slapo_rewrite.model.meta_device import Answers, KnownResults, unwatched, with_values
from slapo_rewrite.model.results import tensors
from slapo_rewrite.model.tree import Tree
from slapo_rewrite.sharding.functional_layers import is_linear, spelled_call
from slapo_rewrite.sharding.tracked_sizes import Shape, numbers, shapes


@dataclass
class Entry:
    """One recorded operation of the whole model."""

    function: Callable[..., Any]  # what was called
    inputs: list[Shape]  # the shapes of its tensor arguments
    outputs: list[Shape]  # the shapes of the tensors that it returned
    numbers: list[float]  # the numbers among its arguments
    key: tuple[Any, ...] = ()  # the items of the index, for an indexing operation
    # Copies of what it returned, if that has values: indices and masks, not floating-point tensors.
    chosen: list[torch.Tensor | None] = field(default_factory=list)
    is_unread: bool = False  # whether the model dropped its result unread

    def choose(self, outputs: Iterable[torch.Tensor]) -> None:
        """Overwrites a rank's indices and masks with those of the whole model.

        A rank's values differ from the model's, so `forward` might take another path by them. Views
        change with their base.
        """
        for chosen, output in zip(self.chosen, outputs, strict=False):
            if chosen is not None and chosen.shape == output.shape and not output._is_view():
                output.copy_(chosen)


@dataclass
class Span:
    """A call of a layer that can be sharded."""

    layer: nn.Module
    entered: int  # the time of entry, on a clock that ticks at each entry and exit
    start: int  # the index of the first recorded operation inside
    call: Entry  # the call as one operation
    end: int = 0  # the index of the first recorded operation after it
    left: int = 0  # the time of exit


@dataclass(frozen=True)
class Whole:
    """The whole model's run, with the calls of some layers as one operation each."""

    entries: list[Entry]  # the operations
    result: Any  # what the model returned
    buffers: dict[tuple[str, str], torch.Tensor]  # its buffers afterwards, by module path and name

    def same_calls(self, other: Whole) -> bool:
        """Whether another run called the same operations, with the same shapes and numbers."""
        return len(self.entries) == len(other.entries) and all(
            (a.function, a.inputs, a.outputs, a.numbers)
            == (b.function, b.inputs, b.outputs, b.numbers)
            for a, b in zip(self.entries, other.entries, strict=True)
        )


class Trace(TorchFunctionMode):
    """Records the operations of the whole model, and the calls of layers that can be sharded.

    Attributes:
        result: What the model returned.
        buffers: Its buffers afterwards, by module path and name.
        noted: The code of decorated `forward`s for which it is recorded whether they ran.
        ran: Those of them that ran.
        watched: The paths of layers whose calls are recorded; None for all that can be sharded.
        editable: Returns the text of a file that may be changed; None for other files.
        says: The truth value of tensors on the meta device, where `forward` asks.
        most: The greatest number of operations to record; None for no limit.
        results: Cached results of operations.
    """

    def __init__(
        self,
        tree: Tree,
        results: KnownResults,
        editable: Callable[[str], str | None],
        noted: Collection[CodeType],
        watched: Collection[str] | None = None,
        says: bool = False,
        most: int | None = None,
    ) -> None:
        super().__init__()
        self.tree, self.editable, self.says, self.most = tree, editable, says, most
        self.results, self.answers = results, Answers()
        self.watched = None if watched is None else frozenset(watched)
        modules = {
            node.live: None
            for path, node in tree.nodes.items()
            if base_of(node.cls) is not None and (watched is None or path in watched)
        }
        self._layers = list(modules)
        linear = filter(is_linear, self._layers)
        self._linear = grouped((id(layer._parameters.get("weight")), layer) for layer in linear)
        self._entries: list[Entry] = []
        self._spans: list[Span] = []  # in order of entry
        self._open: list[Span] = []  # calls in progress
        self._now = 0
        # Results that no operation has read yet, with the operations that made them.
        self._fresh: dict[int, tuple[weakref.ref[torch.Tensor], Entry]] = {}
        self.result: Any = None
        self.buffers: dict[tuple[str, str], torch.Tensor] = {}
        self.noted, self.ran = frozenset(noted), set[CodeType]()
        self.has_values = device_of(tree.root.live).type != "meta"

    def tells(self, codes: Collection[CodeType], layers: Collection[str]) -> bool:
        """Whether the trace covers these decorated `forward`s and the calls of these layers."""
        return self.noted >= set(codes) and (self.watched is None or self.watched >= set(layers))

    def end(self) -> None:
        """Marks unread results, after the run and while the model still holds what it keeps."""
        for made, entry in self._fresh.values():
            entry.is_unread |= made() is None
        self._fresh.clear()

    def around(self, layers: Iterable[str]) -> Whole:
        """The record with each call of these layers as one operation."""
        sharded = {id(self.tree.nodes[path].live) for path in layers}
        entries: list[Entry] = []
        end = left = 0
        for span in self._spans:
            if id(span.layer) in sharded and span.left > left:
                entries += [*self._entries[end : span.start], span.call]
                end, left = span.end, span.left
        return Whole([*entries, *self._entries[end:]], self.result, self.buffers)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Records the calls of the layers meanwhile."""
        around = {
            m: (type(m), base) for m in self._layers if (base := layer_below(type(m))) is not None
        }
        plain = (layer for layer in self._layers if layer not in around)
        try:
            for module, (cls, base) in around.items():
                module.__class__ = around_layer(cls, base, self._enter, self._leave)
            with calls_watched((layer, self._enter, self._leave) for layer in plain):
                yield
        finally:
            for module, (cls, _) in around.items():
                module.__class__ = cls

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._now += 1
        call = Entry(layer_call, [], [], [])
        self._open.append(Span(module, self._now, len(self._entries), call))
        self._spans.append(self._open[-1])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._now += 1
        while (span := self._open.pop()).layer is not module:
            pass  # a call that raised an exception, which its caller caught
        span.end, span.left = len(self._entries), self._now
        span.call.inputs, span.call.outputs = shapes(args), shapes(output)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = in_order(func, args, with_values(func, args, kwargs or {}))
        if (answer := self.answers.to(func, args, self.says)) is not None:
            return answer
        spelled = self._spelled(func, args, kwargs)
        for layer in spelled:
            self._enter(layer, args[:1], {})
        with unwatched():  # hides our own use of tensors from the modes below
            inputs = shapes((args, kwargs))
            given = list(numbers((args, kwargs), not self.has_values))
            given_tensors = [*tensors((args, kwargs))]
            for tensor in given_tensors:
                self._fresh.pop(id(tensor), None)
        output = self.results.carry_out(func, args, kwargs)
        with unwatched():
            outputs, name = shapes(output), getattr(func, "__name__", "")
            chosen = _chosen(output) if self.has_values else []
        if outputs or name == "__setitem__":
            key = key_of(args[1]) if name in ("__getitem__", "__setitem__") else ()
            self._entries.append(entry := Entry(func, inputs, outputs, given, key, chosen))
            if isinstance(output, torch.Tensor) and all(output is not t for t in given_tensors):
                before = self._fresh.get(id(output))  # a freed tensor that had the same id
                if before is not None:
                    before[1].is_unread = True
                self._fresh[id(output)] = weakref.ref(output), entry
            if len(self._entries) == self.most:
                raise RuntimeError(f"a step takes more than {self.most:,} operations")
        for layer in reversed(spelled):
            self._leave(layer, args[:1], output)
        return output

    def _spelled(self, func: Any, args: Any, kwargs: Any) -> list[nn.Module]:
        """The layers for which an operation, `F.linear` with their weight, is the layer's call."""
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        layers = self._linear.get(id(weight), []) if func is functional.linear else []
        if not layers or (self._open and self._open[-1].layer in layers):
            return []
        one_by_one = ([layer] for layer in layers)
        found = (spelled_call(own, func, args, kwargs, self.editable) for own in one_by_one)
        return [spelled[0] for spelled in found if spelled is not None]


def in_order(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of a call in its signature's order, the first one without its name."""
    if not kwargs or (args and len(kwargs) == 1) or func not in get_testing_overrides():
        return args, kwargs
    told = inspect.signature(get_testing_overrides()[func]).parameters
    order = ["input" if name == "self" else name for name in told]
    kwargs = {n: kwargs[n] for n in dict.fromkeys([*order, *kwargs]) if n in kwargs}
    return args or (kwargs.pop(next(iter(kwargs))),), kwargs


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's tensors."""
    found = (t.device for t in itertools.chain(model.parameters(), model.buffers()))
    return next(found, torch.device("meta"))


def _chosen(output: Any) -> list[torch.Tensor | None]:
    """Copies of indices and masks; None in place of floating-point tensors."""
    return [None if t.is_floating_point() else t.detach().clone() for t in tensors(output)]


def layer_call() -> None:
    """Stands for the call of a sharded layer in the record."""


def key_of(key: Any) -> tuple[Any, ...]:
    """The items of an index."""
    return key if isinstance(key, tuple) else (key,)
