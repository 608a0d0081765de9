"""How operations of torch treat the axes of their operands: one row an operation.

A rank of a tensor-parallel group has of some values only a part along one axis. Whether an
operation is right on such a part depends on the axis alone: `exp` treats every element for itself,
`softmax(-1)` needs all of the last axis, `sum(-1)` of a part is a summand of the true sum. Each row
says so for one operation, by the name that `__torch_function__` is given; an operation without a
row is not known, and is refused on parts. `tests/model/test_operations.py` holds every row against
the operation itself, on parts and on the whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Axes = set[int]


@dataclass(frozen=True)
class Call:
    """A call of an operation.

    Attributes:
        args: Its positional arguments; a method's first is the tensor.
        kwargs: Its keyword arguments.
        shapes: The whole shapes of the tensors among the arguments, in their order.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    shapes: Sequence[tuple[int, ...]]

    @property
    def ranks(self) -> list[int]:
        """How many axes each tensor has."""
        return [len(shape) for shape in self.shapes]

    def get(self, name: str, position: int, default: Any = None) -> Any:
        """An argument by its name or position."""
        for spelled in (name, *_OTHER_NAMES.get(name, ())):
            if spelled in self.kwargs:
                return self.kwargs[spelled]
        return self.args[position] if len(self.args) > position else default

    def axes(self, given: Any, operand: int = 0) -> Axes:
        """Axes of an operand, counted from 0; all of them where none are given."""
        rank = self.ranks[operand]
        if given is None or (isinstance(given, (tuple, list)) and not given):
            return set(range(rank))
        listed = given if isinstance(given, (tuple, list)) else [given]
        return {int(axis) % rank for axis in listed if rank}


# Names that torch has for one argument.
_OTHER_NAMES = {"dim": ("axis", "dims"), "dims": ("dim", "axis")}


@dataclass(frozen=True)
class Treatment:
    """How a call treats the axes of its operands.

    Attributes:
        over: For each operand the axes that it needs whole.
        summed: For each operand the axes that it sums over: of a split one a rank has a summand.
        aligned: How many of the last axes are an operand's own. All before them are the result's,
            counted from there: what is split along one is split so in every operand that has it.
            None where axes are not aligned.
        paired: How many of the first operands have to be split along the same axes; -1 for the
            first and the third, with indices between them.
    """

    over: tuple[Axes, ...] = ()
    summed: tuple[Axes, ...] = ()
    aligned: int | None = None
    paired: int = 0


Row = Callable[[Call], Treatment]
ELEMENTWISE = Treatment(aligned=0)
FREE = Treatment()
LAST_TWO = (-2, -1)


def _elementwise(call: Call) -> Treatment:
    return ELEMENTWISE


def _free(call: Call) -> Treatment:
    return FREE


def _along(position: int, default: Any = None, name: str = "dim", aligned: int | None = 0) -> Row:
    """An operation that needs whole the axes that an argument names."""

    def row(call: Call) -> Treatment:
        given = call.get(name, position, default)
        if not isinstance(given, (int, tuple, list, type(None))) or isinstance(given, bool):
            given = None
        return Treatment((call.axes(given),), aligned=aligned)

    return row


def _reduces(position: int = 1, default: Any = None, adds_up: bool = False) -> Row:
    """An operation that makes one value of all those along some axes."""

    def row(call: Call) -> Treatment:
        given = call.get("dim", position, default)
        if not _is_axis(given) and not isinstance(given, (tuple, list, type(None))):
            given = None
        axes = call.axes(given)
        return Treatment(summed=(axes,)) if adds_up else Treatment((axes,))

    return row


def _is_axis(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _extreme(call: Call) -> Treatment:
    """`max` and `min`: of two tensors, along one axis, or of all."""
    if len(call.ranks) > 1:
        return ELEMENTWISE
    return Treatment((call.axes(call.get("dim", 1)),))


def _fixed(*axes: int, aligned: int | None = 0) -> Row:
    """An operation that needs the same axes whole wherever it is called."""

    def row(call: Call) -> Treatment:
        rank = call.ranks[0]
        return Treatment(({a % rank for a in axes if -rank <= a < rank},), aligned=aligned)

    return row


def _all_of_each(call: Call) -> Treatment:
    """An operation that needs every axis of every operand whole."""
    return Treatment(tuple(set(range(rank)) for rank in call.ranks))


def _diagonal(call: Call) -> Treatment:
    """`diagonal`: the two axes that its arguments `dim1` and `dim2` name."""
    return Treatment((call.axes((call.get("dim1", 2, 0), call.get("dim2", 3, 1))),))


def _sliding(spatial: int | None) -> Row:
    """A pooling: it takes neighbours along the last axes."""

    def row(call: Call) -> Treatment:
        rank = call.ranks[0]
        first = 2 if spatial is None else rank - spatial
        return Treatment((set(range(max(0, first), rank)),), aligned=0)

    return row


def _convolution(spatial: int, transposed: bool = False) -> Row:
    """A convolution: neighbours along the last axes, and a sum over the channels of a group."""
    place = 8 if transposed else 6
    place -= transposed  # conv_transpose has `groups` before `dilation`

    def row(call: Call) -> Treatment:
        rank = call.ranks[0]
        windows = set(range(rank - spatial, rank))
        kernel = set(range(2, 2 + spatial))
        channel = rank - spatial - 1
        if call.shapes[1][1] == 1 and call.shapes[1][0] == call.shapes[0][channel]:
            return Treatment((windows, kernel | {1}))  # depthwise: every channel for itself
        if call.get("groups", place, 1) != 1:
            # Each group has channels of its own; groups are not told from a rank's part of them.
            return Treatment((windows | {channel}, kernel | {0, 1}))
        contracted = 0 if transposed else 1
        return Treatment((windows, kernel), ({channel}, {contracted}))

    return row


def _normalised(call: Call) -> Treatment:
    """`layer_norm` and `rms_norm`: over the last axes, as many as `normalized_shape` has."""
    shape = call.get("normalized_shape", 1, ())
    count = len(shape) if isinstance(shape, (tuple, list)) else 1
    rank = call.ranks[0]
    return Treatment((set(range(rank - count, rank)),), aligned=0)


def _padding(call: Call) -> Treatment:
    """`pad`: the axes that it makes longer or shorter."""
    widths = list(call.get("pad", 1, ()))
    rank = call.ranks[0]
    return Treatment(({rank - 1 - i // 2 for i, width in enumerate(widths) if width},))


def _product(call: Call) -> Treatment:
    """`matmul` and its like: over the last axis of the first, the last but one of the second."""
    first, second = call.ranks[:2]
    return Treatment(summed=({first - 1}, {max(0, second - 2)}), aligned=2)


def _product_reversed(call: Call) -> Treatment:
    """`__rmatmul__`, which is given its operands in the other order."""
    second, first = call.ranks[:2]
    return Treatment(summed=({max(0, second - 2)}, {first - 1}), aligned=2)


def _linear(call: Call) -> Treatment:
    """`linear`: over the last axis of the input and of the weight; a bias is added to the sum."""
    axes = ({call.ranks[0] - 1}, {call.ranks[1] - 1})
    return Treatment(axes) if len(call.ranks) > 2 else Treatment(summed=axes)


def _added_product(call: Call) -> Treatment:
    """`addmm` and its like: what a product is added to is not split as the product is."""
    _, first, second = call.ranks[:3]
    return Treatment((set(), {first - 1}, {max(0, second - 2)}))


def _inner(call: Call) -> Treatment:
    """`inner`, `dot`: over the last axis of both."""
    return Treatment(summed=tuple({rank - 1} for rank in call.ranks[:2]))


def _matrices(call: Call) -> Treatment:
    """`linalg.inv` and its like: over the matrices in the last two axes."""
    return Treatment(tuple({rank - 2, rank - 1} for rank in call.ranks), aligned=2)


def _vecdot(call: Call) -> Treatment:
    """`linalg.vecdot`: over one axis of both."""
    axis = call.kwargs.get("dim", -1)
    return Treatment(summed=tuple({axis % rank} for rank in call.ranks[:2]))


def _tensordot(call: Call) -> Treatment:
    """`tensordot`: over the last axes of the first and the first of the second, or those named."""
    given = call.get("dims", 2, 2)
    first, second = call.ranks[:2]
    if isinstance(given, int):
        return Treatment(summed=(set(range(first - given, first)), set(range(given))))
    if not isinstance(given, (tuple, list)):
        return _all_of_each(call)
    ours, theirs = ([a] if isinstance(a, int) else list(a) for a in given)
    return Treatment(summed=({a % first for a in ours}, {a % second for a in theirs}))


def _einsum(call: Call) -> Treatment:
    """`einsum`: over the letters that the result has not, and no diagonals along split axes."""
    equation = call.args[0] if call.args else call.kwargs.get("equation")
    if not isinstance(equation, str):
        return _all_of_each(call)
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
    return Treatment(tuple(over), tuple(summed))


def _letters(term: str, rank: int) -> list[str]:
    """What each axis of an operand is called; those of an ellipsis have longer names."""
    ahead, dots, behind = term.partition("...")
    between = rank - len(ahead) - len(behind) if dots else 0
    return [*ahead, *(f"...{i - between}" for i in range(between)), *behind]


def _attention(call: Call) -> Treatment:
    """Attention: over the features of queries and keys, and over all keys and values.

    A causal one takes the first query for the first token's.
    """
    causal = call.get("is_causal", 5, False)
    backs = ((1, 2) if causal else (1,), (1, 2), (2,))
    over = [{rank - b for b in back} for rank, back in zip(call.ranks, backs, strict=False)]
    return Treatment((*over, *({rank - 1} for rank in call.ranks[3:4])), aligned=2)


def _embedding(call: Call) -> Treatment:
    """`embedding`: the rows of the table; `bucketize`: by whole bounds."""
    return Treatment((set(), {0}))


def _picks(position: int, paired: int = 2) -> Row:
    """`gather`, `scatter` and their like: one axis whole, split alike along all others."""

    def row(call: Call) -> Treatment:
        given = call.get("dim", position)
        over = tuple(call.axes(given, n) for n in range(min(paired, len(call.ranks))))
        return Treatment(over, paired=paired)

    return row


def _selects(source: bool) -> Row:
    """`index_select`, `index_add` and their like: one axis, by whole indices."""

    def row(call: Call) -> Treatment:
        axis = call.axes(call.get("dim", 1))
        if not source:
            return Treatment((axis, {0}))
        like = call.ranks[2] == call.ranks[0]
        return Treatment((axis, {0}, axis if like else set(range(call.ranks[2]))), paired=-1)

    return row


def _stacked(axis: int, least: int) -> Row:
    """`hstack` and its like: `cat` along a given axis."""

    def row(call: Call) -> Treatment:
        over = tuple(
            {min(axis, rank - 1)} if rank >= least else set(range(rank)) for rank in call.ranks
        )
        return Treatment(over)

    return row


def _repeat_interleave(call: Call) -> Treatment:
    """`repeat_interleave`: every element of an axis for itself; without an axis, of a flat one."""
    axis = call.get("dim", 2)
    repeats = call.get("repeats", 1)
    if axis is None and call.ranks[0] > 1:
        return _all_of_each(call)
    return FREE if isinstance(repeats, int) else Treatment((call.axes(axis),))


_UNARY = """
abs absolute acos acosh arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh
bitwise_not ceil conj_physical cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 fix floor
frac i0 lgamma log log10 log1p log2 logical_not logit nan_to_num neg negative rad2deg reciprocal
round rsqrt sgn sigmoid sign sin sinc sinh sqrt square tan tanh trunc polygamma mvlgamma relu selu
celu elu leaky_relu rrelu hardtanh clamp clip clamp_max clamp_min dropout alpha_dropout dropout1d
dropout2d dropout3d feature_dropout feature_alpha_dropout bernoulli normal uniform exponential
cauchy log_normal geometric random
"""
_BINARY = """
add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power
atan2 arctan2 copysign hypot heaviside xlogy gcd lcm ldexp nextafter igamma igammac eq ne lt le gt
ge greater greater_equal less less_equal not_equal logical_and logical_or logical_xor bitwise_and
bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift masked_fill lerp addcmul addcdiv
"""
_DUNDER = """
__rsub__ __rdiv__ __floordiv__ __rfloordiv__ __rmod__ __rpow__ __and__ __iand__ __or__ __ior__
__xor__ __ixor__ __lshift__ __rlshift__ __ilshift__ __rshift__ __rrshift__ __irshift__ __eq__
__invert__
"""
_PLAIN = """
clone contiguous detach to type type_as float half double bfloat16 long int short char byte bool
cfloat cdouble chalf cpu cuda requires_grad_ detach_ positive conj resolve_conj resolve_neg isnan
isinf isfinite isneginf isposinf isreal isclose signbit where frexp real imag polar complex zero_
fill_ copy_ .data .real .imag native_dropout rrelu_with_noise special_airy_ai special_bessel_j0
special_bessel_j1 special_bessel_y0 special_bessel_y1 special_digamma special_entr special_erf
special_erfc special_erfcx special_erfinv special_exp2 special_expit special_expm1 special_gammainc
special_gammaincc special_gammaln special_i0 special_i0e special_i1 special_i1e special_log1p
special_log_ndtr special_logit special_ndtr special_ndtri special_polygamma special_psi
special_round special_sinc special_xlog1py special_xlogy special_zeta special_multigammaln
special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
special_modified_bessel_k1 special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
special_spherical_bessel_j0 broadcast_tensors angle gelu mish silu relu6 softplus softsign
tanhshrink hardshrink softshrink hardsigmoid hardswish log_sigmoid maximum minimum fmax fmin
logaddexp logaddexp2 rsub _threshold
"""
# What only rearranges: which axis of the result is split is read off its shape, and operations that
# are told a size have rules of their own (`sharding`).
_VIEWS = """
view reshape flatten unflatten ravel expand transpose swapaxes swapdims t adjoint permute movedim
moveaxis unsqueeze squeeze transpose_ unsqueeze_ squeeze_ t_ swapaxes_ .T .mT .H .mH chunk split
split_with_sizes unsafe_chunk unsafe_split unsafe_split_with_sizes tensor_split hsplit vsplit dsplit
unbind select narrow repeat tile broadcast_to as_strided __getitem__ cat concat concatenate stack
atleast_1d atleast_2d atleast_3d one_hot view_as_real zeros_like ones_like empty_like full_like
new_zeros new_ones new_empty new_full new_tensor __reversed__
"""
_LOSSES = """
cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy
binary_cross_entropy_with_logits cosine_embedding_loss soft_margin_loss hinge_embedding_loss
poisson_nll_loss gaussian_nll_loss multilabel_soft_margin_loss multi_margin_loss margin_ranking_loss
triplet_margin_loss
"""
_WHOLE = """
dist trace linalg_det histc cov corrcoef take renorm nonzero unique masked_select cdist
kron block_diag chain_matmul linalg_multi_dot bilinear cartesian_prod meshgrid searchsorted
"""
_POOLS = "max_poolNd avg_poolNd lp_poolNd adaptive_avg_poolNd adaptive_max_poolNd"


@functools.cache
def rows() -> dict[str, Row]:
    """Every row by the operation's name."""
    in_place = " ".join(f"{name}_" for name in (_UNARY + _BINARY).split())
    table: tuple[tuple[str, Row], ...] = (
        (f"{_UNARY} {_BINARY} {in_place} {_DUNDER} {_PLAIN} expand_as", _elementwise),
        (f"{_VIEWS} outer ger", _free),  # of an outer product nothing is summed
        # One axis for itself.
        ("softmax log_softmax softmin special_softmax special_log_softmax", _along(1)),
        ("cumsum cumprod logcumsumexp cummax cummin cumsum_ cumprod_", _along(1)),
        ("fft_fftshift fft_ifftshift", _along(1)),
        ("glu multinomial", _along(1, -1)),
        ("roll fft_fftn fft_ifftn fft_rfftn fft_irfftn", _along(2)),
        ("topk diff fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft", _along(2, -1)),
        ("fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2", _along(2, LAST_TWO)),
        ("normalize", _along(2, 1)),
        ("gumbel_softmax", _along(4, -1)),
        ("unfold", _along(1, name="dimension", aligned=None)),
        ("flip", _flip),
        ("sort argsort", _sort),
        ("rms_norm layer_norm", _normalised),
        ("msort flipud", _fixed(0)),
        ("fliplr prelu", _fixed(1)),
        ("tril triu tril_ triu_", _fixed(*LAST_TWO)),
        ("view_as_complex", _fixed(-1, aligned=None)),
        ("diagonal", _diagonal),
        ("cosine_similarity", _distance(2, 1)),
        ("cross", _distance(2, None)),
        ("pairwise_distance linalg_cross", _distance(9, -1)),
        # One value of several.
        ("sum nansum", _reduces(adds_up=True)),
        ("mean nanmean var std var_mean std_mean amax amin prod any all argmax argmin", _reduces()),
        ("count_nonzero logsumexp special_logsumexp median nanmedian", _reduces()),
        ("linalg_matrix_rank", _reduces()),
        ("aminmax", _reduces(9)),
        ("norm linalg_norm linalg_vector_norm", _reduces(2)),
        ("linalg_matrix_norm", _reduces(2, LAST_TWO)),
        ("mode", _along(1, -1, aligned=None)),
        ("kthvalue", _along(2, -1, aligned=None)),
        ("quantile nanquantile", _along(2, aligned=None)),
        ("max min", _extreme),
        # Products.
        ("matmul mm bmm linalg_matmul mv", _product),
        ("grouped_mm _grouped_mm", _grouped),
        ("__rmatmul__", _product_reversed),
        ("dot vdot inner", _inner),
        ("addmm baddbmm addmv", _added_product),
        ("linalg_vecdot", _vecdot),
        ("tensordot", _tensordot),
        ("einsum", _einsum),
        ("linear", _linear),
        ("linalg_inv linalg_cholesky linalg_solve_triangular", _matrices),
        ("scaled_dot_product_attention", _attention),
        # Neighbours.
        *((f"conv{n}d", _convolution(n)) for n in (1, 2, 3)),
        *((f"conv_transpose{n}d", _convolution(n, transposed=True)) for n in (1, 2, 3)),
        *((_POOLS.replace("N", str(n)), _sliding(n)) for n in (1, 2, 3)),
        ("interpolate", _sliding(None)),
        ("pad", _padding),
        ("batch_norm", _batch_norm),
        ("group_norm instance_norm local_response_norm", _all_but_first),
        # By indices.
        ("view_as reshape_as", lambda call: Treatment(paired=2)),
        ("embedding bucketize", _embedding),
        ("gather", _picks(1)),
        ("take_along_dim", _picks(2)),
        ("scatter scatter_ scatter_add scatter_add_", _picks(1, paired=3)),
        ("scatter_reduce scatter_reduce_", _picks(1, paired=3)),
        ("index_select index_fill index_fill_", _selects(source=False)),
        ("index_add index_add_ index_copy index_copy_", _selects(source=True)),
        ("repeat_interleave", _repeat_interleave),
        ("hstack column_stack", _stacked(1, 2)),
        ("vstack row_stack", _stacked(0, 2)),
        ("dstack", _stacked(2, 3)),
        # All of everything.
        (f"{_LOSSES} {_WHOLE} diag_embed trapezoid addbmm", _all_of_each),
    )
    return {name: row for names, row in table for name in names.split()}


def _flip(call: Call) -> Treatment:
    dims = call.kwargs.get("dims", call.args[1:])
    listed = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    return Treatment((call.axes(tuple(listed)),), aligned=0)


def _sort(call: Call) -> Treatment:
    rest = [a for a in call.args[1:] if _is_axis(a)]
    given = call.kwargs.get("dim", rest[0] if rest else -1)
    return Treatment((call.axes(given),), aligned=0)


def _distance(position: int, default: int | None) -> Row:
    """Two operands, compared along one axis."""

    def row(call: Call) -> Treatment:
        axis = call.get("dim", position, default)
        return Treatment(tuple(call.axes(axis, n) for n in range(min(2, len(call.ranks)))))

    return row


def _grouped(call: Call) -> Treatment:
    """The product of groups: as `matmul`; which rows are a group's is told by whole offsets."""
    first, second = call.ranks[:2]
    return Treatment(
        (set(), set(), *({0} for _ in call.ranks[2:])), ({first - 1}, {max(0, second - 2)})
    )


def _batch_norm(call: Call) -> Treatment:
    """`batch_norm`: every channel for itself."""
    return Treatment((set(range(call.ranks[0])) - {1},))


def _all_but_first(call: Call) -> Treatment:
    return Treatment((set(range(1, call.ranks[0])),), aligned=0)


PRODUCT, FLOAT32, EITHER = "product", "float32", "either"
# What mixed precision computes in half precision: torch.autocast's list for CUDA, and what is made
# of such.
_PRODUCTS = """
inner tensordot linear matmul mm bmm mv linalg_matmul __rmatmul__ addmm addmv baddbmm addbmm einsum
linalg_vecdot chain_matmul linalg_multi_dot scaled_dot_product_attention conv1d conv2d conv3d
conv_transpose1d conv_transpose2d conv_transpose3d
"""
# And what it computes in float32, by the same list.
_IN_FLOAT32 = """
acos arccos asin arcsin cosh erfinv exp expm1 log log10 log1p log2 pow float_power reciprocal rsqrt
sinh tan __rpow__ softplus softmax log_softmax softmin gumbel_softmax layer_norm rms_norm group_norm
local_response_norm lp_pool1d lp_pool2d lp_pool3d norm linalg_norm linalg_vector_norm
linalg_matrix_norm normalize renorm cosine_similarity pairwise_distance dist cdist cumsum cumprod
sum prod trapezoid logsumexp interpolate special_erfinv special_expm1 special_log1p
special_logsumexp special_softmax special_log_softmax
"""
# What stands on no list of torch's, and is kept from losing digits as well: other sums and means,
# and what torch has in float32 and float64 alone.
_IN_FLOAT32_TOO = """
mean nansum nanmean var std var_mean std_mean logcumsumexp batch_norm instance_norm special_exp2
trace exp2 erfc cov corrcoef quantile nanquantile linalg_inv linalg_cholesky linalg_det
linalg_matrix_rank linalg_solve_triangular fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft
fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn view_as_complex
complex polar histc
"""


@functools.cache
def _precisions() -> dict[str, str]:
    known = dict.fromkeys(rows(), EITHER)
    in_float32 = f"{_IN_FLOAT32} {_IN_FLOAT32_TOO} {_LOSSES}".split()
    return known | dict.fromkeys(in_float32, FLOAT32) | dict.fromkeys(_PRODUCTS.split(), PRODUCT)


def precision_of(name: str) -> str | None:
    """How an operation is computed under mixed precision; None where it is not known.

    `PRODUCT` in half precision, `FLOAT32` in float32, `EITHER` in what its operands are in. What
    works in place keeps the precision of what it changes.
    """
    return _precisions().get(name)


def treatment(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], shapes: Sequence[tuple[int, ...]]
) -> Treatment | None:
    """How a call treats axes; None where the operation is not known.

    Args:
        name: The operation, as `name_of` gives it.
        args: The positional arguments.
        kwargs: The keyword arguments.
        shapes: The whole shapes of the tensors among them, in their order.
    """
    row = rows().get(name)
    return None if row is None else row(Call(args, kwargs, shapes))


def gives_one_tensor(name: str) -> bool:
    """Whether a function of torch, or a method of tensors, of this name gives a tensor always.

    Not None, and not several.
    """
    return name in _one_tensor()


@functools.cache
def _one_tensor() -> frozenset[str]:
    names = f"{_UNARY} {_BINARY} {_PLAIN} {_VIEWS} {_CREATED}".split()
    return frozenset(names).difference(_OTHERWISE.split())


# Functions that make a tensor of sizes and numbers.
_CREATED = "arange empty eye full linspace ones rand randint randn randperm tensor as_tensor zeros"
# Operations that give several tensors, or something else.
_OTHERWISE = """
type where frexp chunk split split_with_sizes unsafe_chunk unsafe_split unsafe_split_with_sizes
tensor_split hsplit vsplit dsplit unbind native_dropout __reversed__
"""


def name_of(function: Any) -> str:
    """The name of what `__torch_function__` is given; a property's begins with a dot.

    `torch.nn.functional.unfold` is not the method of that name.
    """
    name = str(getattr(function, "__name__", "")) or str(function)
    if name in ("__get__", "__set__"):
        return f"{'.' if name == '__get__' else '='}{getattr(function.__self__, '__name__', '?')}"
    if name in _NAMESAKES and getattr(function, "__module__", "") == "torch.nn.functional":
        return f"functional.{name}"
    return name


_NAMESAKES = {"unfold", "fold"}
