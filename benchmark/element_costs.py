"""Costs of a model's elements, with their memory and communication, counted on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from slapo_rewrite.model.calls import calls_watched
from slapo_rewrite.model.costs import FREE, PICKING, OnMeta, check_order, flops_of
from slapo_rewrite.model.results import tensors


@dataclass
class Cost:
    """The costs of a model's element in one forward pass.

    Of the bytes, those are whole that belong to tensors shaped like what goes from one element to
    the next: with tensor parallelism every rank has these, and a part of everything else.

    Attributes:
        parameters: Those that it reads, by name: how many numbers each is.
        flops: Of matrix products and attention.
        moved: Bytes that all other operators read and write.
        moved_whole: Those of them that are whole.
        held: Bytes kept for the backward pass.
        held_whole: Those of them that are whole.
        given: Bytes of the result of the element before it.
        sent: Bytes of its result; of several, of the first.
    """

    parameters: dict[str, int] = field(default_factory=dict)
    flops: float = 0
    moved: float = 0
    moved_whole: float = 0
    held: float = 0
    held_whole: float = 0
    given: float = 0
    sent: float = 0


def costs_of(model: nn.Module, inputs: Mapping[str, Any], paths: Sequence[str]) -> list[Cost]:
    """The costs of each element of a model, as by `model.costs.costs_of`, and more.

    Args:
        model: On the meta device; in the dtype, and with the batch, that it is to be trained with.
        inputs: Keyword arguments of one training step.
        paths: The elements, in the order in which `model.forward` calls them.

    Raises:
        ValueError: The elements are not called in this order, each of them once.
    """
    elements = [model.get_submodule(path) for path in paths]
    counter = _Counter(model, len(paths))
    with counter.follows(elements), counter:
        on_meta = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), dict(inputs))
        with OnMeta():
            model(**on_meta)
    check_order(paths, counter.called)
    return counter.costs()


class _Counter(TorchDispatchMode):
    """Counts operators and what they hold, each for the element that was called last."""

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()
        self.called: list[int] = []
        self._costs = [Cost() for _ in range(count)]
        self._results: list[list[Tensor]] = [[] for _ in range(count)]
        self._moved: list[list[Tensor]] = [[] for _ in range(count)]
        self._held: list[list[Tensor]] = [[] for _ in range(count)]
        self._parameters = {_storage(p): (n, p.numel()) for n, p in model.named_parameters()}
        self._known = set(self._parameters)

    @property
    def _now(self) -> int:
        return self.called[-1] if self.called else 0

    @contextmanager
    def follows(self, elements: Sequence[nn.Module]) -> Iterator[None]:
        """Inside, it is seen which element is called, and what autograd keeps."""

        def enter(number: int) -> Callable[..., None]:
            return lambda *_: self.called.append(number)

        def leave(number: int) -> Callable[..., None]:
            return lambda *told: self._results[number].extend(list(tensors(told[-1]))[:1])

        watched = calls_watched((e, enter(i), leave(i)) for i, e in enumerate(elements))
        with watched, saved_tensors_hooks(self._hold, lambda tensor: tensor):
            yield

    def _hold(self, tensor: Tensor) -> Tensor:
        if _storage(tensor) not in self._known:
            self._known.add(_storage(tensor))
            self._held[self._now].append(tensor)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        cost, name = self._costs[self._now], func._schema.name
        read = list(tensors((args, kwargs)))
        cost.parameters |= dict(
            self._parameters[_storage(x)] for x in read if _storage(x) in self._parameters
        )
        flops = flops_of(func, args, kwargs or {}, results)
        if flops is not None:
            cost.flops += flops
        elif not func.is_view and name not in FREE:
            written = list(tensors(results))
            self._moved[self._now] += written + (written if name in PICKING else read)
        return results

    def costs(self) -> list[Cost]:
        """The counted costs."""
        between = {_rows(x) for results in self._results[:-1] for x in results}

        def whole(tensors: list[Tensor]) -> list[Tensor]:
            return [x for x in tensors if _rows(x) in between]

        for number, cost in enumerate(self._costs):
            cost.moved, cost.held, cost.sent, cost.given = (
                _size(tensors[number])
                for tensors in (self._moved, self._held, self._results, [[], *self._results])
            )
            cost.moved_whole = _size(whole(self._moved[number]))
            cost.held_whole = _size(whole(self._held[number]))
        return self._costs


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _rows(tensor: Tensor) -> tuple[int, ...]:
    """How many rows a tensor has, whatever axes they are on, and how long they are."""
    width = tensor.shape[-1] if tensor.dim() else 1
    return (tensor.numel() // max(width, 1), width)


def _size(tensors: list[Tensor]) -> int:
    return sum(x.nbytes for x in tensors)
