"""Counts the memory, FLOPs and communication of a training step by parts, on the meta device.

A model whose lists have two layers runs forward and backward on tensors without memory. Each
allocation and release of a storage is an event of one part of the step: a layer, or the code
between two layers, in the forward or backward pass. The step of a deep model is composed of these
parts (`unfolded_step`).

The number of rows of the batch is a prime that occurs nowhere else, so that sizes which grow with
the batch are multiples of it: one run gives the costs of micro-batches of any size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode

from slapo_rewrite.model.calls import calls_watched
from slapo_rewrite.model.costs import FREE, PICKING, OnMeta, Product, flops_of
from slapo_rewrite.model.meta_device import KnownOperators, unwatched
from slapo_rewrite.model.results import tensors
from slapo_rewrite.model.storages import Storages

# Cached, since equal layers, and other rewrites of a model, run the same operators.
_OPERATORS = KnownOperators()
# The number of rows of the counted batch: prime, and not a size of any model.
ROWS = 1009


class Amount(NamedTuple):
    """An amount with a fixed part, and a part for each row of a micro-batch."""

    fixed: float = 0.0
    each: float = 0.0

    def of(self, rows: float) -> float:
        """The amount for a number of rows."""
        return self.fixed + rows * self.each

    def plus(self, other: Amount, times: float = 1.0) -> Amount:
        """The sum with a multiple of another amount."""
        return Amount(self.fixed + times * other.fixed, self.each + times * other.each)

    @classmethod
    def counted(cls, size: float) -> Amount:
        """The amount of a size that was counted with `ROWS` rows."""
        return cls(0.0, size / ROWS) if size % ROWS == 0 else cls(size, 0.0)


NOTHING = Amount()


class Place(NamedTuple):
    """A part of a step."""

    listed: str  # the path of the list whose layer it is or follows; '' before the first
    number: int  # the layer's number in the list
    is_layer: bool  # whether it is the layer, or else the code between it and the next one


BEFORE = Place("", 0, False)


# The host time of launching a fused operator, Python code included, as a number of ordinary
# operators: chosen to fit the steps of `benchmark.plan_time`.
LAUNCH = 8


@dataclass(eq=False)
class Part:
    """The costs of a part of a step."""

    # Bytes held at its end less those at its beginning, without gradients of parameters.
    net: Amount = NOTHING
    # Bytes held meanwhile beyond those at its beginning: the peak is the largest of these, for any
    # batch. Each gradient of a parameter counts until it is accumulated.
    peaks: list[Amount] = field(default_factory=list)
    gradients: float = 0.0  # bytes of the parameters' gradients that it computes
    # The peaks if gradients stay, as in the first backward pass.
    kept_peaks: list[Amount] = field(default_factory=list)
    # FLOPs of matrix products and attention, by kind and dtype.
    products: dict[Product, Amount] = field(default_factory=dict)
    moved: Amount = NOTHING  # bytes that all other operators read and write
    # Bytes of collectives of the tensor-parallel group, by kind.
    sent: dict[str, Amount] = field(default_factory=dict)
    calls: int = 0  # the number of collectives
    operators: int = 0  # the number of operators, weighted by the host's launch time


@dataclass
class Profile:
    """The costs of a step."""

    forward: dict[Place, Part] = field(default_factory=dict)  # parts of the forward pass
    backward: dict[Place, Part] = field(default_factory=dict)  # parts of the backward pass
    # By place of a layer: the bytes of its output.
    between: dict[Place, Amount] = field(default_factory=dict)
    users: dict[str, list[Place]] = field(default_factory=dict)  # where each parameter is used
    sizes: dict[str, int] = field(default_factory=dict)  # bytes of each parameter
    counts: dict[str, int] = field(default_factory=dict)  # elements of each parameter
    buffers: int = 0  # bytes of buffers
    inputs: Amount = NOTHING  # bytes of the step's inputs


def counted_step(
    model: nn.Module,
    inputs: Mapping[str, Any],
    loss: Callable[[Any], Tensor],
    layers: Mapping[str, Sequence[nn.Module]],
    *,
    is_gpu: bool = True,
) -> Profile:
    """Counts one training step.

    The model and the inputs, which have `ROWS` rows, are on the meta device, in the dtype of
    training.
    """
    counter = _Counter(model, inputs)
    with counter.follows(model, layers), OnMeta(is_gpu), counter:
        _Counter.active = counter
        try:
            found = loss(model(**inputs))
            counter.turn()
            _go_back(found)
            del found
        finally:
            _Counter.active = None
        counter.end()
    model.zero_grad()
    return counter.profile()


def _go_back(loss: Tensor) -> None:
    """Runs the backward pass of a loss under the active dispatch modes.

    `loss.backward()` leaves the modes, so that recomputation would differ from the forward pass.
    """
    _engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (),
        allow_unreachable=True, accumulate_grad=True,
    )  # fmt: skip


class _Event(NamedTuple):
    """An allocation (size above zero), a release, or the accumulation of a gradient (zero)."""

    place: Place
    is_forward: bool
    storage: int
    size: float


class NotLaunched:
    """Replaces a Triton kernel: a launch counts the memory that it would read or write."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            if _Counter.active is not None:
                # Other arguments serve as placeholders for missing ones, so each counts once.
                given = {id(tensor): tensor for tensor in tensors((args, options))}
                _Counter.active.touches([*given.values()])

        return launch


class _Counter(TorchDispatchMode):
    active: ClassVar[_Counter | None] = None

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        super().__init__()
        self._events: list[_Event] = []
        self._place, self._is_forward, self._is_over = BEFORE, True, False
        self._gradients: set[int] = set()
        self._sizes: dict[int, float] = {}
        self._profile = Profile()
        self._parameters: dict[int, str] = {}
        self._last: Tensor | None = None
        for name, parameter in model.named_parameters():
            self._parameters[_key(parameter)] = name
            self._profile.sizes[name] = parameter.nbytes
            self._profile.counts[name] = parameter.numel()
        outside = [*model.parameters(), *model.buffers(), *tensors(inputs)]
        self._storages = Storages(outside, self._let_go)
        self._profile.buffers = sum(buffer.nbytes for buffer in model.buffers())
        for given in tensors(inputs):
            self._profile.inputs = self._profile.inputs.plus(Amount.counted(given.nbytes))

    @property
    def _part(self) -> Part:
        parts = self._profile.forward if self._is_forward else self._profile.backward
        if (part := parts.get(self._place)) is None:
            part = parts[self._place] = Part()
        return part

    def turn(self) -> None:
        """Begins the backward pass."""
        self._is_forward, self._last = False, None

    def end(self) -> None:
        """Ends the step."""
        self._is_over = True

    @contextlib.contextmanager
    def follows(
        self, model: nn.Module, layers: Mapping[str, Sequence[nn.Module]]
    ) -> Iterator[None]:
        """Follows which layer runs, in the forward and backward pass, in the context."""
        hooks = [p.register_post_accumulate_grad_hook(self._add) for p in model.parameters()
                 if p.requires_grad]  # fmt: skip
        places = [
            (module, Place(listed, number, True))
            for listed, modules in layers.items()
            for number, module in enumerate(modules)
        ]
        try:
            with calls_watched((m, self._enters(p), self._leaves(p)) for m, p in places):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enters(self, place: Place) -> Callable[..., None]:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._is_forward:
                return  # recomputation
            given = next(_trained((args, kwargs)), None)
            if given is not None and given is not self._last:
                given.register_hook(self._goes_back(self._place))
            self._place = place

        return enter

    def _leaves(self, place: Place) -> Callable[..., None]:
        def leave(_: nn.Module, args: Any, output: Any) -> None:
            if not self._is_forward:
                return
            self._last = next(_trained(output), None)
            if self._last is not None:
                self._last.register_hook(self._goes_back(place))
                self._profile.between[place] = Amount.counted(self._last.nbytes)
            self._place = place._replace(is_layer=False)

        return leave

    def _goes_back(self, place: Place) -> Callable[[Tensor], None]:
        def go(_: Tensor) -> None:
            self._place = place

        return go

    def _add(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        number = self._storages.number_of(parameter.grad)
        assert number is not None
        self._gradients.add(number)
        self._note(number, 0.0)

    def _note(self, storage: int, size: float) -> None:
        if not self._is_over:
            self._events.append(_Event(self._place, self._is_forward, storage, size))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = _OPERATORS.carry_out(func, args, kwargs)
        with unwatched():
            self._happened(func, args, kwargs, results)
        return results

    def _happened(self, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        part, name = self._part, func._schema.name
        part.operators += 1
        read, written = [*tensors(args), *tensors(kwargs)], list(tensors(results))
        if name.startswith("c10d::"):
            self._communicates(part, name, args)
            return
        for tensor in read if self._is_forward else ():
            if (parameter := self._parameters.get(_key(tensor))) is not None:
                users = self._profile.users.setdefault(parameter, [])
                if self._place not in users:
                    users.append(self._place)
        for tensor in written:
            self._made(tensor)
        flops = flops_of(func, args, kwargs, results)
        if flops is not None:
            product = Product.of(func, (*read, *written))
            before = part.products.get(product, NOTHING)
            part.products[product] = before.plus(Amount.counted(flops))
        elif not func.is_view and name not in FREE:
            part.moved = part.moved.plus(_of_all(written + (written if name in PICKING else read)))

    def touches(self, given: Sequence[Tensor]) -> None:
        """Counts an operator that reads or writes each of these tensors once."""
        part = self._part
        part.operators += LAUNCH
        part.moved = part.moved.plus(_of_all(given))

    def _made(self, tensor: Tensor) -> None:
        if (number := self._storages.made(tensor)) is not None:
            self._sizes[number] = float(tensor.untyped_storage().nbytes())
            self._note(number, self._sizes[number])

    def _let_go(self, number: int) -> None:
        self._note(number, -self._sizes[number])

    def _communicates(self, part: Part, name: str, args: Any) -> None:
        kind = name.removeprefix("c10d::").strip("_")
        size = max(sum(t.nbytes for t in tensors([value])) for value in args[:2])
        part.sent[kind] = part.sent.get(kind, NOTHING).plus(Amount.counted(size))
        part.calls += 1

    def profile(self) -> Profile:
        """The costs of the step."""
        self._replay(keeps=False)
        self._replay(keeps=True)
        return self._profile

    def _replay(self, keeps: bool) -> None:
        """Computes the memory of each part by its events. Gradients stay, or are freed at once."""
        held = NOTHING
        now: tuple[Place, bool] | None = None
        part, peaks = Part(), list[Amount]()
        sizes: dict[int, float] = {}
        for place, is_forward, storage, size in self._events:
            if (place, is_forward) != now:
                now, held = (place, is_forward), NOTHING
                parts = self._profile.forward if is_forward else self._profile.backward
                part = parts.setdefault(place, Part())
                peaks = part.kept_peaks if keeps else part.peaks
            if storage in self._gradients:
                if size == 0.0:  # it is accumulated
                    if keeps:
                        continue
                    size = -sizes[storage]
                elif size > 0:
                    sizes[storage] = size
                    part.gradients += size if keeps else 0.0
            sign, change = (1.0 if size > 0 else -1.0), Amount.counted(abs(size))
            held = held.plus(change, sign)
            if not keeps:
                part.net = part.net.plus(change, sign)
            if size > 0:
                _add_peak(peaks, held)


def _add_peak(peaks: list[Amount], new: Amount) -> None:
    """Adds a peak if it is the largest for some batch, and removes those that are not."""
    if any(new.fixed <= p.fixed and new.each <= p.each for p in peaks):
        return
    peaks[:] = [p for p in peaks if not (p.fixed <= new.fixed and p.each <= new.each)]
    peaks.append(new)


def _of_all(given: Sequence[Tensor]) -> Amount:
    """The bytes of some tensors."""
    fixed = each = 0.0
    for size in [tensor.nbytes for tensor in given]:
        if size % ROWS:
            fixed += size
        else:
            each += size / ROWS
    return Amount(fixed, each)


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _trained(value: Any) -> Iterator[Tensor]:
    return (tensor for tensor in tensors(value) if tensor.requires_grad)
