"""Which values are whole, parts or partial sums on a rank, and whether gradients come out right.

A sharded model computes on three kinds of values. A *whole* one is the same on every rank. A
*part* is a rank's share along some axis. A *partial sum* has the whole shape, but only the sum
over the ranks has the value. A partial sum may only go through linear operations until it is added
up. A whole value that meets parts gets a gradient from each rank that is a summand of the true
one; it is *covered* where a `bwd_post` sync adds them up, or an all-gather that sums gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slapo_rewrite.model.follow.sizes import Shape
from slapo_rewrite.model.follow.vocabulary import Remedy

WHOLE, PART, PARTIAL = "whole", "part", "partial sum"


@dataclass(frozen=True)
class State:
    """What is known of a tensor.

    Attributes:
        kind: `whole`, `part` or `partial sum`.
        source: The module that made it a part or a partial sum.
        copies: Whether several ranks have the same part. What each makes of it in the end has to be
            its own, or it would count several times.
        axis: The axis of that module's output that is split.
        covered: The module whose sync adds up this value's gradient.
        parameters: The parameters, by module path and name, that it was computed from and from
            nothing else.
        gathers: The all-gathers, by module path and number, that it was computed from.
    """

    kind: str = WHOLE
    source: str | None = None
    copies: bool = False
    axis: int = -1
    covered: str | None = None
    parameters: frozenset[tuple[str, str]] | None = None
    gathers: frozenset[tuple[str, int]] = frozenset()


class Misuse(Exception):
    """An operation that is wrong on what a rank has.

    Attributes:
        hint: What the user can do.
        path: The module it concerns, where known.
        sync: The collective that it concerns, by module path and number.
        remedy: The collective that is missing, where that is what is wrong.
    """

    def __init__(
        self,
        message: str,
        hint: str | None = None,
        path: str | None = None,
        sync: tuple[str, int] | None = None,
        remedy: Remedy | None = None,
    ) -> None:
        super().__init__(message)
        self.hint, self.path, self.sync, self.remedy = hint, path, sync, remedy


# Operations that read no values: their results depend on shapes alone.
_SHAPE_ONLY = {
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
    "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor",
}  # fmt: skip

# Operations that only rearrange or cast, and so keep a partial sum a partial sum.
_KEEPING = {
    "view", "reshape", "view_as", "reshape_as", "transpose", "permute", "swapaxes", "movedim",
    "contiguous", "flatten", "unflatten", "squeeze", "unsqueeze", "to", "type", "type_as",
    "float", "half", "bfloat16", "double", "chunk", "split", "split_with_sizes", "unbind",
    "__getitem__", "__get__", "narrow", "select", "expand", "expand_as", "clone", "dropout",
    "dropout1d", "dropout2d", "neg", "cat", "concat", "stack", "sum", "mean", "index_select",
    "pad", "repeat_interleave", "t", "detach", "requires_grad_", "identity",
}  # fmt: skip

_ADDING = {"add", "add_", "sub", "sub_", "__iadd__", "__isub__", "subtract", "rsub", "__rsub__"}
_MULTIPLYING = {
    "mul", "mul_", "__imul__", "multiply", "matmul", "bmm", "mm", "linear", "einsum",
    "__matmul__", "__rmatmul__", "__rmul__", "grouped_mm", "_grouped_mm",
}  # fmt: skip
_DIVIDING = {"div", "div_", "true_divide", "__truediv__", "__itruediv__", "divide"}

# Operations that need every element along the axes that they run over.
_REDUCING = {
    "mean", "var", "std", "var_mean", "std_mean", "softmax", "log_softmax", "softmin",
    "logsumexp", "norm", "vector_norm", "amax", "amin", "max", "min", "argmax", "argmin",
    "sort", "argsort", "topk", "cumsum", "cumprod", "prod", "any", "all", "normalize", "flip",
    "roll", "median", "gumbel_softmax", "glu", "logcumsumexp", "count_nonzero", "sum", "nansum",
    "nanmean",
}  # fmt: skip
_SUMMING = {"sum", "nansum"}
_LOSSES = {
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss",
}  # fmt: skip
_PICKING = {
    "gather",
    "index_select",
    "scatter",
    "scatter_",
    "scatter_add",
    "take_along_dim",
    "index_add",
}
# Operations that take neighbours along every axis from the third on.
_SLIDING = {
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d",
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "interpolate",
}  # fmt: skip

REDUCE = 'add it up: .sync("fwd_post", "all_reduce")'
COVER = 'add it up: .sync("bwd_post", "all_reduce")'


class Flow:
    """Follows the states of tensors through the operations of a rank's run.

    Args:
        undecided: The all-gathers that may yet turn out to sum gradients.

    Attributes:
        shared: Whole parameters found to meet parts, with the module that makes what they meet.
        summed: All-gathers found to need summed gradients.
    """

    def __init__(self, undecided: Iterable[tuple[str, int]] = ()) -> None:
        self._states: dict[int, State] = {}
        self._undecided = frozenset(undecided)
        self.shared: dict[tuple[str, str], str | None] = {}
        self.summed: set[tuple[str, int]] = set()

    def of(self, tensor: torch.Tensor) -> State:
        """What is known of a tensor; what nothing is known of is whole."""
        return self._states.get(id(tensor), State())

    def set(self, tensor: torch.Tensor, state: State) -> None:
        """Notes what a tensor is."""
        self._states[id(tensor)] = state

    def check_own(self, state: State, path: str) -> None:
        """Raises `Misuse` where what is added up or joined at `path` is held by several ranks."""
        if state.copies:
            raise Misuse(
                f"several ranks would have the same part of `{state.source}` at `{path}`",
                path=state.source,
            )

    def cover(self, tensor: torch.Tensor, path: str) -> State:
        """The state of a value inside `path`, whose sync adds up the gradient.

        Raises:
            Misuse: That is done already.
        """
        state = self.of(tensor)
        if not tensor.requires_grad:
            return state
        if state.covered is not None:
            raise Misuse(
                f"the gradient of this value is summed over the ranks twice, for `{path}` and for "
                f"`{state.covered}`",
                'keep one of the two .sync("bwd_post", "all_reduce")',
                path,
            )
        if state.kind != WHOLE:
            raise Misuse(
                f"`{path}` is given a {state.kind}, whose gradient each rank has for itself",
                "take the `bwd_post` sync out" if state.kind == PART else REDUCE,
                path if state.kind == PART else state.source,
                remedy=None if state.kind == PART else Remedy.sum_of(state.source),
            )
        return State(covered=path)

    def meet_parts(self, tensors: Sequence[torch.Tensor], what: str, source: str | None) -> None:
        """Covers whole values where they meet parts, as far as that can be done.

        Args:
            tensors: What an operation is given.
            what: The operation, in words.
            source: The module that makes the parts, or is split itself.

        Raises:
            Misuse: The gradient of one would be only this rank's summand.
        """
        for tensor in tensors:
            state = self.of(tensor)
            if state.kind == WHOLE and tensor.requires_grad and state.covered is None:
                self._sum_gradient(tensor, state, what, source)

    def _sum_gradient(
        self, tensor: torch.Tensor, state: State, what: str, source: str | None
    ) -> None:
        """Has the gradient of a value summed where it comes from.

        Raises:
            Misuse: There is nothing that could do it.
        """
        if state.parameters:
            for key in state.parameters:
                self.shared.setdefault(key, source)
            self.set(tensor, State(covered=min(state.parameters)[0]))
        elif state.gathers and state.gathers <= self._undecided:
            self.summed |= state.gathers
            self.set(tensor, State(covered=min(state.gathers)[0], gathers=state.gathers))
        else:
            gather = min(state.gathers, default=None)
            raise Misuse(
                f"{what} takes a whole value to a rank's part: the value's gradient is a summand "
                "on each rank, and nothing adds it up",
                f"let the all-gather on `{gather[0]}` add it up: leave out "
                "`tensor_parallel_output_grad`, or put it right before the sharded layers"
                if gather
                else COVER,
                source,
                gather,
                Remedy.gradient_of(source),
            )

    def operate(
        self,
        name: str,
        inputs: Sequence[torch.Tensor],
        whole: Sequence[Shape],
        args: Any,
        kwargs: Any,
        outputs: Sequence[torch.Tensor],
    ) -> None:
        """Takes an operation's result in.

        Args:
            name: The function's.
            inputs: The tensors it was given.
            whole: The shapes that they have in the whole model.
            args: Its arguments.
            kwargs: Its keyword arguments.
            outputs: The tensors it returned.

        Raises:
            Misuse: The operation is wrong on what a rank has.
        """
        if name in _SHAPE_ONLY:
            for output in outputs:
                self.set(output, State())
            return
        states = [self.of(t) for t in inputs]
        partial = next((s for s in states if s.kind == PARTIAL), None)
        if partial is not None:
            self._check_linear(name, states, inputs, args, kwargs, partial)
        sharded = [
            [axis for axis, (w, h) in enumerate(zip(shape, t.shape, strict=False)) if w != h]
            for t, shape in zip(inputs, whole, strict=False)
        ]
        part = next((s for s in states if s.kind == PART), None)
        summed = part is not None and self._runs_over(name, inputs, sharded, args, kwargs, part)
        if partial is not None or part is not None:
            source, axis = next((s.source, s.axis) for s in (partial, part) if s is not None)
            copies = all(s.copies for s in states if s.kind != WHOLE)
            result = State(PARTIAL if partial or summed else PART, source, copies, axis)
            if any(output.requires_grad for output in outputs):
                self.meet_parts(inputs, f"`{name}`", source)
        else:
            result = self._whole(name, inputs, states)
        for output in outputs:
            self.set(output, result)

    def _whole(self, name: str, inputs: Sequence[torch.Tensor], states: Sequence[State]) -> State:
        trained = [(t, s) for t, s in zip(inputs, states, strict=True) if t.requires_grad]
        covers = sorted({s.covered for _, s in trained if s.covered is not None})
        if covers:
            for tensor, state in trained:
                if state.covered is None:
                    self._join(name, tensor, state, covers[0], trained)
        made_of: set[tuple[str, str]] = set()
        gathers: set[tuple[str, int]] = set()
        alone = bool(trained) and all(s.parameters is not None for _, s in trained)
        for _, state in trained:
            made_of |= state.parameters or set()
            gathers |= state.gathers
        alone = alone and len(trained) == len(inputs)
        return State(
            WHOLE,
            covered=covers[0] if covers else None,
            parameters=frozenset(made_of) if alone else None,
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
        """Takes a value in whose gradient every rank has whole, beside one that is covered.

        Raises:
            Misuse: Its gradient cannot be summed as well.
        """
        if state.parameters or (state.gathers and state.gathers <= self._undecided):
            self._sum_gradient(tensor, state, f"`{name}`", cover)
            return
        if any(isinstance(t, torch.nn.Parameter) for t, s in trained if s.covered):
            raise Misuse(
                f"a parameter of `{cover}` is used on a whole value here and on parts elsewhere: "
                "its gradient would be summed over the ranks for both",
                "use it on parts here as well, or gather them where it is used on them",
                cover,
            )
        gather = min((g for _, s in trained if s.covered for g in s.gathers), default=None)
        raise Misuse(
            f"this joins a value {'gathered by' if gather else 'inside'} `{cover}`, whose gradient "
            "is summed over the ranks, with one whose gradient every rank has whole: the sum would "
            "count it once for each rank",
            "gather it for each use: with `tensor_parallel_output_grad=True` right before sharded "
            "layers, with False elsewhere"
            if gather
            else "put the `bwd_post` sync where the value goes into sharded layers and nowhere "
            "else",
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
        partial: State,
    ) -> None:
        kinds = [s.kind for s, t in zip(states, inputs, strict=True) if t.is_floating_point()]
        count = kinds.count(PARTIAL)
        given = (*args, *(kwargs or {}).values())
        plain = any(isinstance(a, (int, float)) and not isinstance(a, bool) for a in given)
        fine = (
            name in _KEEPING
            or (name in _ADDING and count == len(kinds) and not plain)
            or (name in _MULTIPLYING and count == 1 and (name != "linear" or len(kinds) == 2))
            or (name in _DIVIDING and count == 1 and kinds and kinds[0] == PARTIAL)
        )
        if not fine:
            raise Misuse(
                f"`{name}` needs the value, but `{partial.source}` gives a partial sum of it on "
                "each rank",
                REDUCE,
                partial.source,
                remedy=Remedy.sum_of(partial.source),
            )

    def _runs_over(
        self,
        name: str,
        inputs: Sequence[torch.Tensor],
        sharded: Sequence[list[int]],
        args: Any,
        kwargs: Any,
        part: State,
    ) -> bool:
        """Whether the result is a partial sum, because the operation contracts a split axis."""
        kwargs = kwargs or {}
        over: set[int] = set()
        if name in _REDUCING and not (name in ("max", "min") and len(inputs) > 1):
            over = _axes(inputs[0].dim(), args, kwargs) & set(sharded[0])
        elif name in ("layer_norm", "rms_norm"):
            count = len(kwargs.get("normalized_shape", args[1] if len(args) > 1 else ()))
            over = {a for a in sharded[0] if a >= inputs[0].dim() - count}
        elif name in ("group_norm", "instance_norm", "local_response_norm"):
            over = set(sharded[0]) - {0}
        elif name == "batch_norm":
            over = set(sharded[0]) - {1}
        elif name in _SLIDING:
            over = {a for a in sharded[0] if a > 1}
        elif name == "pad":
            over = _padded(inputs[0].dim(), args, kwargs) & set(sharded[0])
        elif name in _LOSSES:
            over = set(sharded[0])
        elif name in _PICKING and len(args) > 1 and isinstance(args[1], int):
            over = {args[1] % inputs[0].dim()} & set(sharded[0])
        elif name == "embedding" and len(sharded) > 1:
            over = {0} & set(sharded[1])
        elif (
            name in ("matmul", "mm", "bmm", "__matmul__", "__rmatmul__") and len(inputs) == 2
        ) or name in ("linear", "grouped_mm", "_grouped_mm"):
            return inputs[0].dim() - 1 in sharded[0]
        elif name in ("baddbmm", "addmm", "addbmm") and len(inputs) == 3:
            if inputs[1].dim() - 1 in sharded[1]:
                raise self._needs_all(name, part)
        elif name == "scaled_dot_product_attention":
            self._check_attention(name, inputs, sharded, args, kwargs, part)
        elif name == "einsum":
            return _contracts(args, inputs, sharded)
        if over and name not in _SUMMING:
            raise self._needs_all(name, part)
        return bool(over)

    def _check_attention(
        self,
        name: str,
        inputs: Sequence[torch.Tensor],
        sharded: Sequence[list[int]],
        args: Any,
        kwargs: Any,
        part: State,
    ) -> None:
        """Attention runs over the features of queries and keys, and over all keys and values.

        A causal one takes the first query for the first token's.
        """
        causal = kwargs.get("is_causal", args[5] if len(args) > 5 else False)
        backs = ((1, 2) if causal else (1,), (1, 2), (2,))
        for tensor, axes, over in zip(inputs, sharded, backs, strict=False):
            for back in over:
                if tensor.dim() - back in axes:
                    raise self._needs_all(name, part)

    def _needs_all(self, name: str, part: State) -> Misuse:
        line = f'"all_gather", axis={part.axis})'
        hint = f'gather it before: .sync("fwd_post", {line} on `{part.source}`'
        if part.axis != -1:
            hint = f'gather it before, at the module around this: .sync("fwd_pre", {line}'
        return Misuse(
            f"`{name}` runs over an axis of which a rank has only its part",
            hint,
            part.source,
            remedy=Remedy.whole_of(part.source, part.axis),
        )


def gather_line(axis: int, rank: int, mode: str = "fwd_post") -> str:
    """The line of a schedule that makes an axis whole, the last one counted from the right."""
    return f'.sync("{mode}", "all_gather", axis={-1 if axis == rank - 1 else axis})'


def _padded(rank: int, args: Any, kwargs: Any) -> set[int]:
    """The axes that `pad` makes longer or shorter."""
    widths = list(kwargs.get("pad", args[1] if len(args) > 1 else ()))
    return {rank - 1 - i // 2 for i, width in enumerate(widths) if width}


def _axes(rank: int, args: Any, kwargs: Any) -> set[int]:
    """The axes that a reduction runs over: its argument `dim`, or all."""
    given = kwargs.get("dim", kwargs.get("axis", kwargs.get("dims")))
    if given is None:
        rest = [a for a in args[1:] if not isinstance(a, (bool, torch.dtype))]
        given = next((a for a in rest if isinstance(a, (int, tuple, list))), None)
    if given is None:
        return set(range(rank))
    return {a % rank for a in (given if isinstance(given, (tuple, list)) else [given]) if rank}


def _contracts(args: Any, inputs: Sequence[torch.Tensor], sharded: Sequence[list[int]]) -> bool:
    """Whether an `einsum` sums over a split axis."""
    if not args or not isinstance(args[0], str):
        return False
    before, _, after = args[0].replace(" ", "").partition("->")
    for letters, tensor, axes in zip(before.split(","), inputs, sharded, strict=False):
        ahead, dots, behind = letters.partition("...")
        for axis in axes:
            back = axis - tensor.dim()
            name = (
                ahead[axis]
                if axis < len(ahead)
                else behind[back]
                if dots and -back <= len(behind)
                else ""
            )
            if name and name not in after:
                return True
    return False
