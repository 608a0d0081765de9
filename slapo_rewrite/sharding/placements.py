"""The placement of every value on a rank (whole, part or partial sum), and of its gradient.

A sharded model computes on three kinds of values. A *whole* one is the same on every rank. A
*part* is a rank's shard along some axis. A *partial sum* has the whole shape, but only the sum
over the ranks is the value; until an all-reduce it may only go through linear operations. A whole
value used together with parts gets a partial sum of its gradient on each rank. It is *covered* if
a `bwd_post` sync, or an all-gather that sums gradients, adds these up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slapo_rewrite.code.text import with_wildcards
from slapo_rewrite.operations import treatment
from slapo_rewrite.sharding.tracked_sizes import Shape
from slapo_rewrite.sharding.types import CannotFollow, MissingCollective
from slapo_rewrite.treatments import Treatment

REPLICATE, SHARD, PARTIAL = "whole", "part", "partial sum"
_WORDS = {SHARD: "a part", PARTIAL: "a partial sum"}


@dataclass(frozen=True)
class State:
    """The placement of a tensor, and what it was computed from."""

    kind: str = REPLICATE  # `whole`, `part` or `partial sum`
    source: str | None = None  # the module that made it a part or a partial sum
    # Whether several ranks have the same part. Before a collective each must have made something
    # of its own of it, or the part would count several times.
    replicated_shard: bool = False
    axis: int = -1  # the axis of that module's output that is split
    grad_reduced: str | None = None  # the module whose sync sums this value's gradient
    # The parameters, by module path and name, that it was computed from, if from nothing else but
    # constants.
    parameters: frozenset[tuple[str, str]] | None = None
    is_input: bool = False  # whether it depends on the model's inputs
    # The all-gathers, by module path and number, that it depends on.
    gathers: frozenset[tuple[str, int]] = frozenset()
    # The parameter of a sharded layer, read outside of the layer's call, that alone it depends on.
    read: str | None = None
    # The error that using it raises: the model reads it nowhere, or multiplies it by zero.
    wrong: CannotFollow | None = None

    @property
    def border(self) -> str | None:
        """The module whose output a collective would make whole; None if it was only read."""
        return None if self.read else self.source


_WHOLE = State()


class PlacementError(Exception):
    """An operation gives wrong results for the placements of its operands.

    Attributes:
        hint: What the user can do.
        path: The module it concerns, where known.
        sync: The collective that it concerns, by module path and number.
        remedy: The missing collective, where that is the cause.
        tensor: The value that `remedy` would apply to, where known.
        twice: The modules that both sum a gradient, where that is the cause.
    """

    twice: tuple[str, ...] = ()

    def __init__(
        self,
        message: str,
        hint: str | None = None,
        path: str | None = None,
        sync: tuple[str, int] | None = None,
        remedy: MissingCollective | None = None,
        tensor: torch.Tensor | None = None,
    ) -> None:
        super().__init__(message)
        self.hint, self.path, self.sync, self.remedy = hint, path, sync, remedy
        self.tensor = tensor


class MeetsWhole(PlacementError):
    """An operation joins a part with a whole value that would have to be split as well."""

    # The whole value, if a rank's slice of it would fit, and the slice's axis.
    to_scatter: tuple[torch.Tensor, int] | None = None


# Operations whose results depend on their operands' shapes alone.
_SHAPE_ONLY = {
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
    "randint_like", "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor",
}  # fmt: skip

# Operations whose second operand only gives a dtype or sizes.
_TYPED = {"to", "type_as", "view_as", "reshape_as"}

# Operations that line up or stack their operands, of which integers are no indices.
_JOINING = {"cat", "concat", "concatenate", "stack", "hstack", "vstack"}
# Operations that only rearrange, cast or sum their operand: of a partial sum they give a partial
# sum.
_KEEPING = _JOINING | {
    "view", "reshape", "view_as", "reshape_as", "transpose", "permute", "swapaxes", "swapdims",
    "movedim", "moveaxis", "contiguous", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze",
    "to", "type", "type_as", "float", "half", "bfloat16", "double", "chunk", "split",
    "split_with_sizes", "tensor_split", "unbind", "__getitem__", "narrow", "select", "expand",
    "expand_as", "broadcast_to", "clone", "dropout", "dropout1d", "dropout2d", "neg", "negative",
    "__neg__", "sum", "mean", "index_select", "gather", "repeat_interleave", "repeat", "tile",
    "roll", "flip", "tril", "triu", "t", "adjoint", ".T", ".mT", ".H", ".mH", ".data", "detach",
    "requires_grad_", "identity", "pad", "masked_fill", "cumsum", "diagonal", "unfold",
    "atleast_2d", "atleast_3d",
}  # fmt: skip
# Operations that add to some elements of their first operand.
ADDED_INTO = {"index_add", "index_add_", "scatter_add", "scatter_add_"}
# Those of `_KEEPING` that write a constant: only zero stays the same in a sum over the ranks.
_WRITING = {"pad": ("value", 3, 0), "masked_fill": ("value", 2, None)}

ADDING = {
    "add", "add_", "sub", "sub_", "__iadd__", "__isub__", "__add__", "__radd__", "__sub__",
    "subtract", "rsub", "__rsub__",
}  # fmt: skip
MULTIPLYING = {
    "mul", "mul_", "__imul__", "__mul__", "multiply", "matmul", "bmm", "mm", "linear", "einsum",
    "__matmul__", "__rmatmul__", "__rmul__", "grouped_mm", "_grouped_mm",
}  # fmt: skip
_DIVIDING = {"div", "div_", "true_divide", "__truediv__", "__itruediv__", "divide"}

# Operations that return a Python value, which branches and sizes may depend on.
_TELLING = {
    "item", "tolist", "numpy", "__array__", "__bool__", "__nonzero__", "__int__", "__float__",
    "__index__", "__complex__", "__contains__", "is_nonzero", "equal", "allclose", "__dlpack__",
    "register_hook", "data_ptr", "storage", "untyped_storage", "register_post_accumulate_grad_hook",
}  # fmt: skip

REDUCE = 'add it up: .sync("fwd_post", "all_reduce")'
COVER = (
    'add it up: .sync("bwd_post", "all_reduce") on a module that takes the value. If there is '
    "none, write one that computes this (for `x @ self.embedding.weight.T` a linear layer without "
    "bias, followed by `self.head.weight = self.embedding.weight`)"
)


class Flow:
    """Propagates the placements of tensors through the operations of a rank's run.

    The `undecided` all-gathers may turn out to need summed gradients.
    """

    def __init__(self, undecided: Iterable[tuple[str, int]] = ()) -> None:
        self._states: dict[int, State] = {}
        self._undecided = frozenset(undecided)
        # Whole parameters found to be used with parts, with the module that makes the parts.
        self.shared: dict[tuple[str, str], str | None] = {}
        self.summed: set[tuple[str, int]] = set()  # all-gathers found to need summed gradients

    def of(self, tensor: torch.Tensor) -> State:
        """The state of a tensor; whole if nothing was recorded."""
        state = self._states.get(id(tensor), _WHOLE)
        if state.wrong is not None:
            raise state.wrong
        return state

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether a state was recorded for a tensor."""
        return id(tensor) in self._states

    def set(self, tensor: torch.Tensor, state: State) -> None:
        """Records the state of a tensor."""
        self._states[id(tensor)] = state

    def check_own(self, state: State, path: str) -> None:
        """Raises if a value that a collective at `path` takes is the same part on several ranks."""
        if state.replicated_shard:
            raise PlacementError(
                f"several ranks would have the same part of `{state.source or 's'}` at "
                f"`{path or 's'}`",
                path=state.source,
            )

    def cover(self, tensor: torch.Tensor, path: str, is_asked: bool = False) -> State:
        """The state of a value inside `path`, whose sync all-reduces its gradient.

        `is_asked` if the schedule asks for the sync, even if the value has no gradient here.
        """
        state = self.of(tensor)
        if not tensor.requires_grad and not is_asked:
            return state
        if state.grad_reduced is not None:
            error = PlacementError(
                f"the gradient of this value is summed over the ranks twice, for `{path}` and for "
                f"`{state.grad_reduced}`",
                'keep one of the two .sync("bwd_post", "all_reduce")',
                path,
            )
            error.twice = (path, state.grad_reduced)
            raise error
        if state.kind != REPLICATE:
            raise PlacementError(
                f"`{path}` gets a {state.kind}, whose gradient must not be summed over the ranks",
                "remove the `bwd_post` sync" if state.kind == SHARD else REDUCE,
                path if state.kind == SHARD else state.source,
                remedy=None if state.kind == SHARD else MissingCollective.sum_of(state.border),
            )
        return State(grad_reduced=path)

    def meet_shards(
        self,
        tensors: Sequence[torch.Tensor],
        what: str,
        source: str | None,
        partial: State | None = None,
    ) -> None:
        """Covers whole values that the operation `what` uses together with parts; or raises.

        `source` makes the parts, or is sharded itself; `partial` is the partial sum among the
        operands of `what`, if there is one.
        """
        for tensor in tensors:
            state = self.of(tensor)
            if state.kind == REPLICATE and tensor.requires_grad and state.grad_reduced is None:
                self._sum_gradient(tensor, state, what, source, partial)

    def _sum_gradient(
        self,
        tensor: torch.Tensor,
        state: State,
        what: str,
        source: str | None,
        partial: State | None = None,
    ) -> None:
        """Has a value's gradient summed at its parameters or all-gathers; raises if it has none."""
        if state.parameters:
            for key in state.parameters:
                self.shared.setdefault(key, source)
            self.set(tensor, State(grad_reduced=min(state.parameters)[0]))
        elif state.gathers and state.gathers <= self._undecided:
            self.summed |= state.gathers
            self.set(tensor, State(grad_reduced=min(state.gathers)[0], gathers=state.gathers))
        elif partial and source and not state.gathers:
            raise PlacementError(
                f"{what} combines a whole value with the partial sum of `{source}`: the value's "
                "gradient is a partial sum on each rank, and nothing adds it up",
                _leave_whole(partial)
                if partial.read
                else f'add up the partial sum: s["{source}"].sync("fwd_post", "all_reduce")',
                source,
                remedy=MissingCollective.sum_of(partial.border and source),
                tensor=tensor,
            )
        else:
            gather = min(state.gathers, default=None)
            line = f's["{with_wildcards(source or "")}"].sync("bwd_post", "all_reduce")'
            raise PlacementError(
                f"{what} combines a whole value with a rank's part: the value's gradient is a "
                "partial sum on each rank, and nothing adds it up",
                f"let the all-gather on `{gather[0]}` add it up: leave out "
                "`tensor_parallel_output_grad`, or put the gather right before the sharded layers"
                if gather
                else f"add it up: {line}"
                if what == f"`{source}`"  # which takes it
                else COVER,
                source,
                gather,
                MissingCollective.gradient_of(source),
                tensor,
            )

    def operate(
        self,
        name: str,
        inputs: Sequence[torch.Tensor],
        whole: Sequence[Shape],
        args: Any,
        kwargs: Any,
        outputs: Sequence[torch.Tensor],
        results: Sequence[Shape],
        replicated: bool = False,
    ) -> None:
        """Records the states of an operation's results; raises `PlacementError` if they are wrong.

        `whole` and `results` are the shapes of the tensors in the whole model. If heads are
        `replicated` on several ranks, sizes tell less about axes, and less is checked.
        """
        if name in _TYPED:
            inputs, whole = inputs[:1], whole[:1]
        split = [_split(t, shape) for t, shape in zip(outputs, results, strict=True)]
        if name in _SHAPE_ONLY or not inputs:
            source = next((s.source for t in inputs if (s := self.of(t)).source), None)
            for output, axes in zip(outputs, split, strict=True):
                self.set(output, State(SHARD, source) if axes else State())
            return
        states = [self.of(t) for t in inputs]
        if name == "linear" and [s.kind for s in states] == [SHARD, SHARD, PARTIAL]:
            features = [t.dim() - 1 in _split(t, w) for t, w in zip(inputs, whole, strict=True)]
            if features[:2] == [True, True]:  # the product is a partial sum, as the bias is
                inputs, whole, states = inputs[:2], whole[:2], states[:2]
        self._check_known(name, inputs, whole, states, replicated)
        partial = next((s for s in states if s.kind == PARTIAL), None)
        part = next((s for s in states if s.kind == SHARD), None)
        if partial is None and part is None:
            result = self.joined(name, inputs, states)
            for output, axes in zip(outputs, split, strict=True):
                self.set(output, self._repeated(name, inputs) if axes else result)
            return
        if partial is not None:
            self._check_linear(name, states, inputs, args, kwargs, outputs, partial)
        # A size given as a tensor is no longer among the operands; it would be the last.
        sharded = [_split(t, shape) for t, shape in zip(inputs, whole, strict=False)]
        summed = False
        how = treatment(name, args, kwargs, whole)
        if part is not None:
            summed = self._runs_over(name, how, sharded, whole, part)
        # The last factor of a product is the weight: a sync goes to the weight's module.
        made = [s for s in states if s.kind == SHARD][-1] if summed and partial is None else None
        source, axis = next((s.source, s.axis) for s in (partial, made, part) if s is not None)
        replicated_shard = all(s.replicated_shard for s in states if s.kind != REPLICATE)
        adds_up = partial is not None or summed
        if part is not None and how is not None and not replicated:
            self._check_split(name, adds_up, how, whole, sharded, split, part)
        read = states[0].read if all(s.read for s in states) else None
        result = State(PARTIAL if adds_up else SHARD, source, replicated_shard, axis, read=read)
        if any(output.requires_grad for output in outputs):
            self.meet_shards(inputs, f"`{name}`", source, partial)
        for output in outputs:
            self.set(output, result)

    def leave_out(
        self, name: str, inputs: Sequence[torch.Tensor], given: Any, outputs: Sequence[torch.Tensor]
    ) -> bool:
        """Accepts zero times a partial sum or a wrong value, and sums of wrong values before that.

        Models give unused parameters a gradient in this way: `0 * sum(p.sum() for p in ...)`.
        """
        states = [self._states.get(id(t), _WHOLE) for t in inputs]
        wrong = next((s.wrong for s in states if s.wrong is not None), None)
        is_zero = name in MULTIPLYING and len(inputs) == 1 and 0 in _numbers(*given)
        is_partial = any(s.kind == PARTIAL for s in states)
        if not ((wrong and name in ADDING) or (is_zero and (wrong or is_partial))):
            return False
        for output in outputs:
            self.set(output, State(wrong=None if is_zero else wrong))
        return True

    def tell(self, name: str, inputs: Sequence[torch.Tensor]) -> None:
        """Checks an operation that returns no tensor: it must not read values of a part."""
        if name not in _TELLING:
            return
        if name == "register_hook":
            self.check_backward(f"`{name}`", inputs)
        state = next((s for t in inputs if (s := self.of(t)).kind != REPLICATE), None)
        if state is not None:
            raise PlacementError(
                f"`{name}` reads values, but each rank has only {_WORDS[state.kind]}",
                REDUCE if state.kind == PARTIAL else None,
                state.source,
                remedy=MissingCollective.sum_of(state.border) if state.kind == PARTIAL else None,
            )

    def check_backward(self, what: str, inputs: Sequence[torch.Tensor]) -> None:
        """Refuses a custom backward computation whose incoming gradient is a partial sum.

        Torch's own backward formulas are linear in the gradient, so a later all-reduce is right.
        """
        for tensor in inputs:
            path = self.of(tensor).grad_reduced
            if path is not None and tensor.requires_grad:
                raise PlacementError(
                    f"{what} gets the gradient of this value while it is still a partial sum on "
                    f"each rank: it is added up later in the backward pass, for `{path or 's'}`",
                    "add it up closer to the sharded layers: infer_sync() finds the place",
                    path,
                )

    def _check_known(
        self,
        name: str,
        inputs: Sequence[torch.Tensor],
        whole: Sequence[Shape],
        states: Sequence[State],
        replicated: bool,
    ) -> None:
        """Raises `PlacementError` if an operand's shape does not match its recorded state.

        Something made it that was not observed: compiled code, another library.
        """
        for tensor, shape, state in zip(inputs, whole, states, strict=False):
            axes = _split(tensor, shape)
            if len(axes) == (state.kind == SHARD) or replicated or state.replicated_shard:
                continue
            raise PlacementError(
                f"`{name}` gets a value of shape {list(tensor.shape)} on a rank, and of shape "
                f"{list(shape)} without sharding. Which part this is is not known, since the code "
                "that computed it cannot be followed",
                "gather the values that it is computed from",
                state.source,
            )

    def _repeated(self, name: str, inputs: Sequence[torch.Tensor]) -> State:
        """The state of a whole value that is repeated as often as a rank has elements."""
        self.meet_shards(inputs, f"`{name}`", None)
        return State(SHARD)

    def _check_split(
        self,
        name: str,
        adds_up: bool,
        how: Treatment,
        whole: Sequence[Shape],
        sharded: Sequence[list[int]],
        split: Sequence[list[int]],
        part: State,
    ) -> None:
        """Raises `PlacementError` if the result is not split as the operands imply.

        A part with one element on a rank, for example, would broadcast against a whole value.
        """
        fine = all(len(axes) == (not adds_up) for axes in split)
        if how.aligned is not None:
            ends = [len(shape) - how.aligned for shape in whole]
            back = {a - e for axes, e in zip(sharded, ends, strict=False) for a in axes if a < e}
            for shape, axes, end in zip(whole, sharded, ends, strict=False):
                fine &= all(b + end < 0 or shape[b + end] == 1 or b + end in axes for b in back)
        alike: dict[str, bool] = {}
        for names, shape, axes in zip(how.names, whole, sharded, strict=False):
            for axis, size in enumerate(shape):
                fine &= size == 1 or alike.setdefault(names[axis], axis in axes) == (axis in axes)
        if not fine:
            axes = next((a for a in split if a), [])
            raise MeetsWhole(
                f"`{name}` combines a part with whole values, and the shape of its result is "
                f"{f'split along axis {axes[0]}' if axes else 'not split'}",
                path=part.source,
            )

    def joined(self, name: str, inputs: Sequence[torch.Tensor], states: Sequence[State]) -> State:
        """The state of a result whose operands are all whole."""
        trained = [(t, s) for t, s in zip(inputs, states, strict=True) if t.requires_grad]
        covers = sorted({s.grad_reduced for _, s in trained if s.grad_reduced is not None})
        if covers:
            for tensor, state in trained:
                if state.grad_reduced is None:
                    self._join(name, tensor, state, covers[0], trained)
        made_of: set[tuple[str, str]] = set()
        gathers: set[tuple[str, int]] = set()
        alone = bool(trained) and all(s.parameters is not None for _, s in trained)
        for _, state in trained:
            made_of |= state.parameters or set()
            gathers |= state.gathers
        is_input = any(s.is_input for s in states)
        return State(
            REPLICATE,
            grad_reduced=covers[0] if covers else None,
            parameters=frozenset(made_of) if alone and not is_input else None,
            is_input=is_input,
            gathers=frozenset(gathers),
        )

    def _join(
        self,
        name: str,
        tensor: torch.Tensor,
        state: State,
        cover: str,
        trained: Sequence[tuple[torch.Tensor, State]],
    ) -> None:
        """Handles an operand that is not covered, in an operation with one that is."""
        if state.parameters or (state.gathers and state.gathers <= self._undecided):
            self._sum_gradient(tensor, state, f"`{name}`", cover)
            return
        if any(isinstance(t, torch.nn.Parameter) for t, s in trained if s.grad_reduced is not None):
            raise PlacementError(
                f"a parameter of `{cover or 's'}` is used on a whole value here and on parts "
                "elsewhere: its gradient would be summed over the ranks for both uses",
                "use it on parts here as well, or gather the parts elsewhere",
                cover,
            )
        gather = min(
            (g for _, s in trained if s.grad_reduced is not None for g in s.gathers), default=None
        )
        raise PlacementError(
            f"this combines a value {'gathered by' if gather else 'inside'} `{cover}`, whose "
            "gradient is summed over the ranks, with one whose gradient is whole on every rank: "
            "the sum would count that once for each rank",
            "gather it for each use: with `tensor_parallel_output_grad=True` right before sharded "
            "layers, with False elsewhere"
            if gather
            else "put the `bwd_post` sync on a module whose input goes only into sharded layers",
            cover,
            gather,
        )

    def _check_linear(
        self,
        name: str,
        states: Sequence[State],
        inputs: Sequence[torch.Tensor],
        args: Any,
        kwargs: Any,
        outputs: Sequence[torch.Tensor],
        partial: State,
    ) -> None:
        """Raises if an operation on a partial sum does not give a partial sum of its result."""
        count = sum(s.kind == PARTIAL for s in states)
        floating = sum(t.is_floating_point() or t.is_complex() or name in _JOINING for t in inputs)
        plain = any(_numbers(args, kwargs))  # adding 0 is harmless: Python's `sum` starts with it
        beside = [s.kind for s in states if s.kind != PARTIAL]
        written = _WRITING.get(name)
        if written is not None:
            value = kwargs.get(
                written[0], args[written[1]] if len(args) > written[1] else written[2]
            )
            plain = value not in (0, None) if isinstance(value, (int, float, type(None))) else True
        fine = (
            (name in _KEEPING | ADDED_INTO and count == floating and not (written and plain))
            or (name in ADDING and count == len(inputs) and not plain)
            or (
                name in MULTIPLYING
                and count == 1
                and SHARD not in beside
                and (name != "linear" or floating == 2)
            )
            or (
                name in _DIVIDING
                and count == 1
                and states[0].kind == PARTIAL
                and args[0] is inputs[0]  # not a number
                and kwargs.get("rounding_mode") is None
            )
        ) and all(t.is_floating_point() or t.is_complex() for t in outputs)
        if not fine:
            raise PlacementError(
                f"`{name}` needs the whole value, but `{partial.source}` gives a partial sum of "
                "it on each rank",
                REDUCE,
                partial.source,
                remedy=MissingCollective.sum_of(partial.border),
            )

    def _runs_over(
        self,
        name: str,
        how: Treatment | None,
        sharded: Sequence[list[int]],
        whole: Sequence[Shape],
        part: State,
    ) -> bool:
        """Whether the result is a partial sum; raises if the operation may be wrong on a part."""
        if how is None:
            raise PlacementError(
                f"`{name}` is not known to be right on a part, and `{part.source}` gives each "
                "rank only its part",
                self._gather_hint(part),
                part.source,
                remedy=MissingCollective.whole_of(part.border, part.axis),
            )
        for axes, over in zip(sharded, how.over, strict=False):
            if over & set(axes):
                raise self._needs_all(name, part)
        pick = slice(how.paired) if how.paired >= 0 else slice(None, None, 2)
        alike = [[(a, shape[a]) for a in axes] for axes, shape in zip(sharded, whole, strict=False)]
        if any(axes != alike[0] for axes in alike[pick]):
            raise self._needs_all(name, part)
        return any(s & set(axes) for axes, s in zip(sharded, how.summed, strict=False))

    def _needs_all(self, name: str, part: State) -> PlacementError:
        return PlacementError(
            f"`{name}` needs the whole axis, but each rank has only a part of it",
            self._gather_hint(part),
            part.source,
            remedy=MissingCollective.whole_of(part.border, part.axis),
        )

    def _gather_hint(self, part: State) -> str:
        if part.read:
            return _leave_whole(part)
        line = f'"all_gather", axis={part.axis})'
        if part.axis != -1:
            return f'gather it first, at the module around this: .sync("fwd_pre", {line}'
        return f'gather it first: .sync("fwd_post", {line} on `{part.source}`'


def _leave_whole(read: State) -> str:
    """The hint for a parameter's shard that is read where no collective can make it whole."""
    return (
        f"`{read.read}` is read outside of its layer's call, and each rank has only a part of it: "
        f"leave `{read.source}` whole"
    )


def gather_line(axis: int, rank: int, mode: str = "fwd_post") -> str:
    """The schedule line that gathers an axis; the last axis is written as -1."""
    return f'.sync("{mode}", "all_gather", axis={-1 if axis == rank - 1 else axis})'


def _numbers(args: Any, kwargs: Any) -> list[float]:
    """The Python numbers among an operation's arguments."""
    given = (*args, *kwargs.values())
    return [a for a in given if isinstance(a, (int, float)) and not isinstance(a, bool)]


def _split(tensor: torch.Tensor, whole: Shape) -> list[int]:
    """The axes along which a rank has less than the whole model."""
    return [a for a, (w, h) in enumerate(zip(whole, tensor.shape, strict=False)) if w != h]
