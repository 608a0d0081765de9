"""How operations treat the axes of their operands, as functions of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec

Axes = set[int]


@dataclass(frozen=True)
class Call:
    """A call of an operation."""

    args: Sequence[Any]  # the positional arguments; a method's first is the tensor
    kwargs: Mapping[str, Any]  # the keyword arguments
    # The full shapes of the tensors among the arguments, in order.
    shapes: Sequence[tuple[int, ...]]

    @property
    def ranks(self) -> list[int]:
        """The number of axes of each tensor."""
        return [len(shape) for shape in self.shapes]

    def get(self, name: str, position: int, default: Any = None) -> Any:
        """An argument, by name or position."""
        for spelled in (name, *_OTHER_NAMES.get(name, ())):
            if spelled in self.kwargs:
                return self.kwargs[spelled]
        return self.args[position] if len(self.args) > position else default

    def axes(self, given: Any, operand: int = 0) -> Axes:
        """The axes of an operand, counted from 0; all of them if `given` names none."""
        rank = self.ranks[operand]
        if given is None or (isinstance(given, (tuple, list)) and not given):
            return set(range(rank))
        listed = given if isinstance(given, (tuple, list)) else [given]
        return {int(axis) % rank for axis in listed if rank}


# Other names of arguments in torch.
_OTHER_NAMES = {"dim": ("axis", "dims"), "dims": ("dim", "axis")}


@dataclass(frozen=True)
class Treatment:
    """How a call treats the axes of its operands."""

    over: tuple[Axes, ...] = ()  # the axes of each operand that must not be sharded
    # The axes of each operand that are summed: if one is sharded, the result is a partial sum.
    summed: tuple[Axes, ...] = ()
    # The number of last axes that are an operand's own. All axes before them are aligned with the
    # result's, counted from there: all operands with such an axis must be sharded alike. None if
    # axes are not aligned.
    aligned: int | None = None
    # The number of first operands that must be sharded along the same axes; -1 for the first and
    # the third, with indices between them.
    paired: int = 0
    # The names of each operand's axes: axes of one name must be sharded alike.
    names: tuple[Sequence[str], ...] = ()


Row = Callable[[Call], Treatment]
P = ParamSpec("P")
ELEMENTWISE = Treatment(aligned=0)
FREE = Treatment()
LAST_TWO = (-2, -1)


def _row(treats: Callable[Concatenate[Call, P], Treatment]) -> Callable[P, Row]:
    """Turns a treatment with parameters into a function that returns rows."""

    def of(*args: P.args, **kwargs: P.kwargs) -> Row:
        return lambda call: treats(call, *args, **kwargs)

    return of


def elementwise(call: Call) -> Treatment:
    """An elementwise operation."""
    return ELEMENTWISE


def free(call: Call) -> Treatment:
    """An operation that works along any sharded axis."""
    return FREE


@_row
def along(
    call: Call, position: int, default: Any = None, name: str = "dim", aligned: int | None = 0
) -> Treatment:
    """An operation that needs the full axes which an argument names."""
    return Treatment((_named(call, name, position, default),), aligned=aligned)


@_row
def reduces(call: Call, position: int = 1, default: Any = None, adds_up: bool = False) -> Treatment:
    """A reduction over some axes."""
    axes = _named(call, "dim", position, default)
    return Treatment(summed=(axes,)) if adds_up else Treatment((axes,))


def _named(call: Call, name: str, position: int, default: Any) -> Axes:
    """The axes that an argument names; all if it names none, as in `sum(torch.float64)`."""
    given = call.get(name, position, default)
    return call.axes(given if isinstance(given, (tuple, list)) or _is_axis(given) else None)


def _is_axis(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def extreme(call: Call) -> Treatment:
    """`max` and `min`: of two tensors, along one axis, or of all elements."""
    if len(call.ranks) > 1:
        return ELEMENTWISE
    return Treatment((call.axes(call.get("dim", 1)),))


@_row
def fixed(call: Call, *axes: int, aligned: int | None = 0) -> Treatment:
    """An operation that always needs the same full axes."""
    rank = call.ranks[0]
    return Treatment(({a % rank for a in axes if -rank <= a < rank},), aligned=aligned)


def where(call: Call) -> Treatment:
    """`where`: elementwise; with a condition alone it returns the places."""
    return ELEMENTWISE if len(call.args) + len(call.kwargs) > 1 else all_of_each(call)


def all_of_each(call: Call) -> Treatment:
    """An operation that needs all axes of all operands in full."""
    return Treatment(tuple(set(range(rank)) for rank in call.ranks))


def diagonal(call: Call) -> Treatment:
    """`diagonal`: needs the two axes `dim1` and `dim2` in full."""
    return Treatment((call.axes((call.get("dim1", 2, 0), call.get("dim2", 3, 1))),))


@_row
def sliding(call: Call, spatial: int | None) -> Treatment:
    """A pooling: windows along the last axes."""
    rank = call.ranks[0]
    first = 2 if spatial is None else rank - spatial
    return Treatment((set(range(max(0, first), rank)),), aligned=0)


@_row
def convolution(call: Call, spatial: int, transposed: bool = False) -> Treatment:
    """A convolution: windows along the last axes, and a sum over the channels of a group."""
    rank = call.ranks[0]
    windows = set(range(rank - spatial, rank))
    kernel = set(range(2, 2 + spatial))
    channel = rank - spatial - 1
    if call.shapes[1][1] == 1 and call.shapes[1][0] == call.shapes[0][channel]:
        return Treatment((windows, kernel | {1}))  # depthwise: channels are independent
    if call.get("groups", 6, 1) != 1:
        # Each group has channels of its own; a shard's groups cannot be distinguished.
        return Treatment((windows | {channel}, kernel | {0, 1}))
    contracted = 0 if transposed else 1
    if len(call.ranks) > 2:  # a bias is added to the sum
        return Treatment((windows | {channel}, kernel | {contracted}))
    return Treatment((windows, kernel), ({channel}, {contracted}))


def normalised(call: Call) -> Treatment:
    """`layer_norm` and `rms_norm`: over the last axes, as many as `normalized_shape` has."""
    shape = call.get("normalized_shape", 1, ())
    count = len(shape) if isinstance(shape, (tuple, list)) else 1
    rank = call.ranks[0]
    return Treatment((set(range(rank - count, rank)),), aligned=0)


def padding(call: Call) -> Treatment:
    """`pad`: needs the axes that it changes in full."""
    widths = list(call.get("pad", 1, ()))
    rank = call.ranks[0]
    return Treatment(({rank - 1 - i // 2 for i, width in enumerate(widths) if width},))


def product(call: Call) -> Treatment:
    """`matmul`: sums over the last axis of the first operand, the second last of the second."""
    first, second = call.ranks[:2]
    return Treatment(summed=({first - 1}, {max(0, second - 2)}), aligned=2)


def product_reversed(call: Call) -> Treatment:
    """`__rmatmul__`, whose operands are in reverse order."""
    second, first = call.ranks[:2]
    return Treatment(summed=({max(0, second - 2)}, {first - 1}), aligned=2)


def linear(call: Call) -> Treatment:
    """`linear`: sums over the last axis of input and weight; a bias needs the full sum."""
    axes = ({call.ranks[0] - 1}, {call.ranks[1] - 1})
    return Treatment(axes) if len(call.ranks) > 2 else Treatment(summed=axes)


def added_product(call: Call) -> Treatment:
    """`addmm` and others: need the contracted axes in full, since something is added to the sum."""
    _, first, second = call.ranks[:3]
    return Treatment((set(), {first - 1}, {max(0, second - 2)}))


def inner(call: Call) -> Treatment:
    """`inner`, `dot`: sum over the last axis of both."""
    return Treatment(summed=tuple({rank - 1} for rank in call.ranks[:2]))


def matrices(call: Call) -> Treatment:
    """`linalg.inv` and others: need the matrices in the last two axes in full."""
    return Treatment(tuple({rank - 2, rank - 1} for rank in call.ranks), aligned=2)


def vecdot(call: Call) -> Treatment:
    """`linalg.vecdot`: sums over one axis of both."""
    axis = call.kwargs.get("dim", -1)
    return Treatment(summed=tuple({axis % rank} for rank in call.ranks[:2]), aligned=0)


def tensordot(call: Call) -> Treatment:
    """`tensordot`: sums over the last axes of the first and first of the second, or named ones."""
    given = call.get("dims", 2, 2)
    first, second = call.ranks[:2]
    if isinstance(given, int):
        given = range(first - given, first), range(given)
    if not isinstance(given, (tuple, list)):
        return all_of_each(call)
    ours, theirs = ([a] if isinstance(a, int) else [*a] for a in given)
    names = [f"{a}" for a in range(first)], [f"other {a}" for a in range(second)]
    for mine, other in zip(ours, theirs, strict=True):
        names[1][other] = names[0][mine]
    return Treatment(summed=({a % first for a in ours}, {a % second for a in theirs}), names=names)


def einsum(call: Call) -> Treatment:
    """`einsum`: sums over letters that the result lacks; diagonals need full axes."""
    equation = call.args[0] if call.args else call.kwargs.get("equation")
    if not isinstance(equation, str):
        return all_of_each(call)
    before, arrow, after = equation.replace(" ", "").partition("->")
    named = [_letters(term, rank) for term, rank in zip(before.split(","), call.ranks, strict=True)]
    if not arrow:
        every = [n for letters in named for n in letters]
        after = "".join(n for n in every if len(n) == 1 and every.count(n) == 1) + "..."
    over, summed = [], []
    for letters in named:
        twice = {axis for axis, letter in enumerate(letters) if letters.count(letter) > 1}
        over.append(twice)
        gone = {axis for axis, n in enumerate(letters) if len(n) == 1 and n not in after}
        summed.append(gone - twice)
    return Treatment(tuple(over), tuple(summed), names=tuple(named))


def _letters(term: str, rank: int) -> list[str]:
    """The name of each axis of an operand; axes of an ellipsis have longer names."""
    ahead, dots, behind = term.partition("...")
    between = rank - len(ahead) - len(behind) if dots else 0
    return [*ahead, *(f"...{i - between}" for i in range(between)), *behind]


def attention(call: Call) -> Treatment:
    """Attention: needs all features of queries and keys, and all keys and values.

    Causal attention also needs all queries, since their positions count from the first one.
    """
    causal = call.get("is_causal", 5, False)
    backs = ((1, 2) if causal else (1,), (1, 2), (2,))
    over = [{rank - b for b in back} for rank, back in zip(call.ranks, backs, strict=False)]
    return Treatment((*over, *({rank - 1} for rank in call.ranks[3:4])), aligned=2)


def embedding(call: Call) -> Treatment:
    """`embedding`: needs all rows of the table; `bucketize`: needs all bounds.

    All of each operand where `embedding` renorms rows or counts them.
    """
    plain = call.get("max_norm", 3) is None and not call.get("scale_grad_by_freq", 5)
    return Treatment((set(), {0})) if plain else all_of_each(call)


@_row
def picks(call: Call, position: int, paired: int = 2) -> Treatment:
    """`gather`, `scatter`: need one full axis, and equal sharding along all others."""
    given = call.get("dim", position)
    over = tuple(call.axes(given, n) for n in range(min(paired, len(call.ranks))))
    return Treatment(over, paired=paired)


@_row
def selects(call: Call, source: bool) -> Treatment:
    """`index_select`, `index_add`: need one full axis, and all indices."""
    axis = call.axes(call.get("dim", 1))
    if not source:
        return Treatment((axis, {0}))
    like = call.ranks[2] == call.ranks[0]
    return Treatment((axis, {0}, axis if like else set(range(call.ranks[2]))), paired=-1)


@_row
def stacked(call: Call, axis: int, least: int) -> Treatment:
    """`hstack` and others: `cat` along a given axis."""
    over = tuple(
        {min(axis, rank - 1)} if rank >= least else set(range(rank)) for rank in call.ranks
    )
    return Treatment(over)


def repeat_interleave(call: Call) -> Treatment:
    """`repeat_interleave`: repeats elements of an axis, or of the flat tensor without one."""
    axis = call.get("dim", 2)
    repeats = call.get("repeats", 1)
    if axis is None and call.ranks[0] > 1:
        return all_of_each(call)
    return FREE if isinstance(repeats, int) else Treatment((call.axes(axis),))


def flip(call: Call) -> Treatment:
    """`flip`: needs the given axes in full, as one argument or as several."""
    dims = call.kwargs.get("dims", call.args[1:])
    listed = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    return Treatment((call.axes(tuple(listed)),), aligned=0)


def sort(call: Call) -> Treatment:
    """`sort`: needs one full axis, which may follow other arguments."""
    rest = [a for a in call.args[1:] if _is_axis(a)]
    given = call.kwargs.get("dim", rest[0] if rest else -1)
    return Treatment((call.axes(given),), aligned=0)


@_row
def distance(call: Call, position: int, default: int | None) -> Treatment:
    """A comparison of two operands along one axis, which it needs in full."""
    axis = call.get("dim", position, default)
    return Treatment(tuple(call.axes(axis, n) for n in range(min(2, len(call.ranks)))), aligned=0)


def grouped(call: Call) -> Treatment:
    """The grouped matrix product: like `matmul`; needs all offsets of groups."""
    first, second = call.ranks[:2]
    return Treatment(
        (set(), set(), *({0} for _ in call.ranks[2:])), ({first - 1}, {max(0, second - 2)})
    )


def batch_norm(call: Call) -> Treatment:
    """`batch_norm`: channels are independent."""
    return Treatment((set(range(call.ranks[0])) - {1},))


def all_but_first(call: Call) -> Treatment:
    """`group_norm` and others: rows are independent."""
    return Treatment((set(range(1, call.ranks[0])),), aligned=0)
