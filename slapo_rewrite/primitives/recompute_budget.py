"""Chooses what `checkpoint(budget=...)` recomputes: the least that makes a step fit."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from types import ModuleType
from typing import TYPE_CHECKING, Any

from slapo_rewrite import errors
from slapo_rewrite.changes.mixed_precision import HalfPrecision
from slapo_rewrite.code.text import listed
from slapo_rewrite.directive import Directive
from slapo_rewrite.model.tree import Node, Tree
from slapo_rewrite.primitives.base import Call, Chosen, DoesNotFit
from slapo_rewrite.simulate.byte_sizes import byte_size, shown_size
from slapo_rewrite.simulate.hardware import Hardware, hardware, part_seconds, sent_seconds
from slapo_rewrite.simulate.step_memory import States, states

if TYPE_CHECKING:
    from slapo_rewrite.model.recomputed_step import CountedWays, Recomputed
    from slapo_rewrite.model.step_profile import Part
    from slapo_rewrite.simulate.recompute_search import Found, RecomputeSearch

PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@functools.cache
def _gpu(products: str) -> Hardware:
    """The GPU for timing a step, with all products in one precision.

    A step is counted before casts are written, in the precision of its weights.
    """
    gpu = hardware("h200", products)
    return replace(gpu, device=replace(gpu.device, half=None, single=None))


@dataclass(frozen=True)
class Step:
    """The training step that has to fit."""

    budget: float  # the bytes that it may hold
    rows: int  # rows of a micro-batch
    sequence: int | None  # tokens of a row; None for those of the schedule's `inputs`
    precision: str  # the training precision
    micro_batches: int  # the number of micro-batches
    zero: int  # the stage of ZeRO
    replicas: int  # the number of replicas among which ZeRO divides
    ranks: int = 1  # the number of tensor-parallel ranks
    products: str = "bf16"  # the precision of matrix products

    @property
    def kept(self) -> States:
        """The bytes of training state for each parameter."""
        return states(self.precision, self.zero, self.replicas)

    def seconds(self, part: Part) -> float:
        """The seconds of a part, on one GPU of the tensor-parallel group."""
        gpu = _gpu(self.products)
        sent = sent_seconds(part, self.rows, gpu.inside, self.ranks)
        return sum(part_seconds(part, self.rows, gpu.device)) + sent

    def __str__(self) -> str:
        rows = f"{self.rows} rows"
        rows += f" of {self.sequence} tokens" if self.sequence else " of `inputs`"
        rows += f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        zero = f", ZeRO {self.zero} over {self.replicas} replicas" if self.zero else ""
        shared = f"layers shared by {self.ranks} ranks" if self.ranks > 1 else "whole layers"
        return f"{rows}, {self.precision} with DeepSpeed's Adam{zero}, {shared}"


def fitted(call: Call, nodes: Sequence[Node]) -> Chosen:
    """Chooses the modules to recompute among the selected layers.

    Raises:
        BadArgument: The arguments describe no step.
        ConflictingEdits: The step is in half precision, beside `autocast`.
        Unsupported: The selected modules are not layers of lists, or the model's step cannot be
            counted.
        NothingFits: Whatever is recomputed, the step needs more memory.
    """
    step = _step(call)
    _check_layers(call, nodes)
    step = _check_precision(call, step)
    if step.ranks > 1 and call.on_ranks is None:
        return Chosen((), f"nothing is recomputed yet: the tool is counting the memory of {step}")
    from slapo_rewrite.model.folded_step import DoesNotRun

    try:
        chosen = {node.path for node in nodes}
        if step.ranks > 1 and call.on_ranks is not None:
            count = functools.partial(counted, call.schedule, chosen, step)
            ways = call.on_ranks(step.ranks, count)
        else:
            ways = counted(call.schedule, chosen, step, call.tree)
        search = search_of(ways, chosen, step)
    except (DoesNotRun, DoesNotFit) as error:
        raise _uncounted(error) from error
    found = search.least(step.budget)
    if found is None:
        least = shown_size(search.smallest())
        raise errors.NothingFits(
            f"a step needs at least {least}, even if all selected layers are recomputed, but the "
            f"budget is {shown_size(step.budget)} ({step})",
            hint="select more layers, use smaller micro-batches, share layers over more ranks "
            "(ranks=), or divide parameters and optimizer (zero=, replicas=)",
        )
    root = call.tree.nodes
    modules = [
        root[f"{path}.{part}" if part else path]
        for path, way in _by_layer(found, ways).items()
        for part in way
        if not part or f"{path}.{part}" in root
    ]
    return Chosen(modules, _said(step, ways, search, found))


def _step(call: Call) -> Step:
    given = call.arguments
    text = given["budget"]
    budget = byte_size(text) if isinstance(text, str) else None
    if budget is None:
        raise errors.BadArgument(f"{text!r} is not a size of memory", hint='budget="40GiB"')
    for name in ("batch", "sequence", "micro_batches", "zero", "replicas", "ranks"):
        least = 0 if name == "zero" else 1
        value = given[name]
        if value is not None and (type(value) is not int or value < least):
            raise errors.BadArgument(f"`{name}` is at least {least}, not {value!r}")
    if given["precision"] not in PRECISIONS or given["zero"] > 3:
        raise errors.BadArgument(
            f"there is no precision {given['precision']!r} with ZeRO {given['zero']}",
            hint=f"use {', '.join(PRECISIONS)}, and ZeRO 0 to 3",
        )
    if not hasattr(call.schedule, "inputs") and None in (given["batch"], given["sequence"]):
        raise errors.BadArgument(
            "the step is not known: the schedule has no `inputs`",
            hint=f'checkpoint(budget="{text}", batch=8, sequence=2048), or write inputs(model)',
        )
    rows = given["batch"] or _rows(call)
    return Step(budget, rows, *(given[field.name] for field in fields(Step)[2:-1]))


def _rows(call: Call) -> int:
    """The number of rows of the schedule's own inputs."""
    from slapo_rewrite.model.sized_inputs import rows_of

    try:
        return rows_of(call.schedule, call.tree.root.live)
    except Exception as error:  # the schedule's own code
        raise _uncounted(error) from error


def _check_layers(call: Call, nodes: Sequence[Node]) -> None:
    from slapo_rewrite.model.layer_kinds import lists_of

    lists = {node.path for node in lists_of(call.tree)}
    for node in nodes:
        if node.path.rpartition(".")[0] not in lists or not node.path:
            raise errors.Unsupported(
                f"{node.shown} is not in an nn.ModuleList of several layers: a budget chooses how "
                "many of these are recomputed",
                hint=f'select layers: s["{min(lists)}.*"]' if lists else None,
            )


def _casts(call: Call) -> Iterator[tuple[HalfPrecision, Directive]]:
    for state in call.states.values():
        yield from state.asks(HalfPrecision)


def check_casts_known(call: Call) -> None:
    """Refuses `autocast` after a budget, which was chosen for a step without it."""
    late = [cause for _, cause in _casts(call) if cause.number > call.directive.number]
    if late:
        raise errors.ConflictingEdits(
            "the layers were chosen for a step whose products are not in half precision",
            at=late[0].at,
            cause=call.directive,
            hint='call `autocast` first, then checkpoint(budget=..., precision="fp32"), since '
            "weights stay in float32",
        )


def _check_precision(call: Call, step: Step) -> Step:
    """Checks the precision beside `autocast`: weights and many activations stay in float32."""
    casts = [*_casts(call)]
    if not casts:
        return replace(step, products=step.precision)
    if step.precision != "fp32":
        raise errors.ConflictingEdits(
            f"the budget is for a step in {step.precision}, but `autocast` leaves the weights, "
            "and all that it does not cast, in float32",
            cause=casts[0][1],
            hint='count it in float32: checkpoint(budget=..., precision="fp32")',
        )
    return step  # products are in half precision


def counted(
    schedule: Any,
    chosen: Collection[str],
    step: Step,
    tree: Tree,
    kernels: Iterable[ModuleType] = (),
) -> CountedWays:
    """Counts a step in each way of recomputing layers."""
    import torch

    from slapo_rewrite.model import folded_step, recomputed_step

    dtype = getattr(torch, PRECISIONS[step.precision])
    shape = folded_step.StepShape(step.sequence, dtype, is_gpu=True)
    return recomputed_step.counted_ways(schedule, tree, chosen, shape, step.seconds, kernels)


def search_of(ways: CountedWays, chosen: Collection[str], step: Step) -> RecomputeSearch:
    """The search among the counted ways."""
    from slapo_rewrite.simulate.recompute_search import RecomputeSearch
    from slapo_rewrite.simulate.step_memory import Unfolded

    unfolded = Unfolded(*ways.counted)
    may_be = {
        layers: [f"{layers}.{n}" in chosen for n in range(len(ways.folds[layers].stands_for))]
        for layers in unfolded.lists
    }
    parameters = sum(ways.counted[0].names.values())
    kept, many = step.kept, step.micro_batches
    return RecomputeSearch(unfolded, may_be, step.seconds, kept, parameters, step.rows, many)


def _uncounted(error: Exception) -> errors.Unsupported:
    return errors.Unsupported(
        f"a step of this model cannot be counted: {errors.first_line(error)}",
        hint="select a share of the layers without a budget: [:0.5].checkpoint()",
    )


def _by_layer(found: Found, ways: CountedWays) -> dict[str, Recomputed]:
    """The recomputed modules of each layer that has any."""
    return {
        f"{layers}.{number}": ways.ways[way]
        for layers, own in found.ways.items()
        for number, way in enumerate(own)
        if way
    }


def _said(step: Step, ways: CountedWays, search: RecomputeSearch, found: Found) -> str:
    """A message about the choice."""
    none = search.judged(search.same(0))
    words = [*_runs(found.ways, ways)]
    took = f"predicted for {step}: {shown_size(found.peak)} of {shown_size(step.budget)}"
    if not words:
        return f"nothing is recomputed: {took}"
    longer = found.seconds / none.seconds - 1
    without = f"{longer:.1%} longer than without, which takes {shown_size(none.peak)}"
    return f"{'; '.join(words)}: {took}; {without}"


def _runs(chosen: Mapping[str, Sequence[int]], ways: CountedWays) -> Iterator[str]:
    """Messages about the recomputed layers: `model.layers 0 to 6`."""
    for layers, own in chosen.items():
        for way, group in groupby(enumerate(own), key=lambda pair: pair[1]):
            numbers = [number for number, _ in group]
            if not way:
                continue
            ends = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
            parts = [part for part in ways.ways[way] if part]
            yield f"{listed(parts)} of {layers} {ends}" if parts else f"{layers} {ends}"
