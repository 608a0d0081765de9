"""How operations of torch treat the axes of their operands: one row for each operation.

A rank of a tensor-parallel group has only shards of some values, along one axis. Whether an
operation is right on a shard depends on that axis only: `exp` is elementwise, `softmax(-1)` needs
all of the last axis, `sum(-1)` of a shard is a partial sum. Each row says so for one operation, by
the name that `__torch_function__` receives. An operation without a row is not known, and is refused
on shards. `tests/model/test_operations.py` tests every row against the operation itself, on shards
and on full values.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from slapo_rewrite import treatments as of
from slapo_rewrite.treatments import Call, Row, Treatment

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
"""
_PLAIN = """
clone contiguous detach to type type_as float half double bfloat16 long int short char byte bool
cfloat cdouble chalf cpu cuda requires_grad_ detach_ positive conj resolve_conj resolve_neg isnan
isinf isfinite isneginf isposinf isreal isclose signbit frexp real imag polar complex zero_ fill_
copy_ .data .real .imag native_dropout rrelu_with_noise special_airy_ai special_bessel_j0
special_bessel_j1 special_bessel_y0 special_bessel_y1 special_digamma special_entr special_erf
special_erfc special_erfcx special_erfinv special_exp2 special_expit special_expm1 special_gammainc
special_gammaincc special_gammaln special_i0 special_i0e special_i1 special_i1e special_log1p
special_log_ndtr special_logit special_ndtr special_ndtri special_polygamma special_psi
special_round special_sinc special_xlog1py special_xlogy special_zeta special_multigammaln
special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
special_modified_bessel_k1 special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
special_spherical_bessel_j0 broadcast_tensors angle gelu mish silu relu6 softplus softsign
tanhshrink hardshrink softshrink hardsigmoid hardswish log_sigmoid maximum minimum fmax fmin
logaddexp logaddexp2 rsub _threshold __invert__
"""
# Operations that only rearrange elements: the sharded axis of the result is inferred from its
# shape, and operations that take a size have rules of their own (`sharding`).
_VIEWS = """
view reshape flatten unflatten ravel expand transpose swapaxes swapdims t adjoint permute movedim
moveaxis unsqueeze squeeze transpose_ unsqueeze_ squeeze_ t_ swapaxes_ .T .mT .H .mH chunk split
split_with_sizes unsafe_chunk unsafe_split unsafe_split_with_sizes tensor_split unbind repeat tile
broadcast_to as_strided __getitem__ cat concat concatenate stack atleast_1d atleast_2d atleast_3d
one_hot view_as_real zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full
new_tensor __reversed__ view_as reshape_as
"""
_LOSSES = """
cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy
binary_cross_entropy_with_logits cosine_embedding_loss soft_margin_loss hinge_embedding_loss
poisson_nll_loss gaussian_nll_loss multilabel_soft_margin_loss multi_margin_loss margin_ranking_loss
triplet_margin_loss
"""
_WHOLE = """
dist trace linalg_det histc cov corrcoef take renorm nonzero unique masked_select cdist kron
block_diag chain_matmul linalg_multi_dot bilinear cartesian_prod meshgrid searchsorted hsplit vsplit
dsplit linalg_matrix_rank
"""
_POOLS = "max_poolNd avg_poolNd lp_poolNd adaptive_avg_poolNd adaptive_max_poolNd"


@functools.cache
def rows() -> dict[str, Row]:
    """All rows, by the operation's name."""
    in_place = " ".join(f"{name}_" for name in (_UNARY + _BINARY).split())
    table: tuple[tuple[str, Row], ...] = (
        (f"{_UNARY} {_BINARY} {in_place} {_DUNDER} {_PLAIN} expand_as", of.elementwise),
        (f"{_VIEWS} outer ger", of.free),  # an outer product sums nothing
        ("where", of.where),
        # Along one axis.
        ("softmax log_softmax softmin special_softmax special_log_softmax", of.along(1)),
        ("cumsum cumprod logcumsumexp cummax cummin cumsum_ cumprod_", of.along(1)),
        ("fft_fftshift fft_ifftshift", of.along(1)),
        ("glu", of.along(1, -1)),
        ("multinomial", of.fixed(-1)),
        ("roll fft_fftn fft_ifftn fft_rfftn fft_irfftn", of.along(2)),
        ("topk diff fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft", of.along(2, -1)),
        ("fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2", of.along(2, of.LAST_TWO)),
        ("normalize", of.along(2, 1)),
        ("gumbel_softmax", of.along(4, -1)),
        ("unfold", of.along(1, name="dimension", aligned=None)),
        ("narrow select", of.along(1, aligned=None)),
        ("flip", of.flip),
        ("sort argsort", of.sort),
        ("rms_norm layer_norm", of.normalised),
        ("msort flipud", of.fixed(0)),
        ("fliplr prelu", of.fixed(1)),
        ("tril triu tril_ triu_", of.fixed(*of.LAST_TWO)),
        ("view_as_complex", of.fixed(-1, aligned=None)),
        ("diagonal", of.diagonal),
        ("cosine_similarity", of.distance(2, 1)),
        ("cross", of.distance(2, None)),
        ("pairwise_distance linalg_cross", of.distance(9, -1)),
        # Reductions.
        ("sum nansum", of.reduces(adds_up=True)),
        ("mean nanmean var std var_mean std_mean amax amin prod any all argmax", of.reduces()),
        ("argmin count_nonzero logsumexp special_logsumexp median nanmedian", of.reduces()),
        ("aminmax", of.reduces(9)),
        ("norm linalg_norm linalg_vector_norm", of.reduces(2)),
        ("linalg_matrix_norm", of.reduces(2, of.LAST_TWO)),
        ("mode", of.along(1, -1, aligned=None)),
        ("kthvalue", of.along(2, -1, aligned=None)),
        ("quantile nanquantile", of.along(2, aligned=None)),
        ("max min", of.extreme),
        # Products.
        ("matmul mm bmm linalg_matmul mv", of.product),
        ("grouped_mm _grouped_mm", of.grouped),
        ("__rmatmul__", of.product_reversed),
        ("dot vdot inner", of.inner),
        ("addmm baddbmm addmv", of.added_product),
        ("linalg_vecdot", of.vecdot),
        ("tensordot", of.tensordot),
        ("einsum", of.einsum),
        ("linear", of.linear),
        ("linalg_inv linalg_cholesky linalg_solve_triangular", of.matrices),
        ("scaled_dot_product_attention", of.attention),
        # Windows.
        *((f"conv{n}d", of.convolution(n)) for n in (1, 2, 3)),
        *((f"conv_transpose{n}d", of.convolution(n, transposed=True)) for n in (1, 2, 3)),
        *((_POOLS.replace("N", str(n)), of.sliding(n)) for n in (1, 2, 3)),
        ("interpolate", of.sliding(None)),
        ("pad", of.padding),
        ("batch_norm", of.batch_norm),
        ("group_norm instance_norm local_response_norm", of.all_but_first),
        # Indexing.
        ("embedding bucketize", of.embedding),
        ("gather", of.picks(1)),
        ("take_along_dim", of.picks(2)),
        ("scatter scatter_ scatter_add scatter_add_", of.picks(1, paired=3)),
        ("scatter_reduce scatter_reduce_", of.picks(1, paired=3)),
        ("index_select index_fill index_fill_", of.selects(source=False)),
        ("index_add index_add_ index_copy index_copy_", of.selects(source=True)),
        ("repeat_interleave", of.repeat_interleave),
        ("hstack column_stack", of.stacked(1, 2)),
        ("vstack row_stack", of.stacked(0, 2)),
        ("dstack", of.stacked(2, 3)),
        # Over all axes.
        (f"{_LOSSES} {_WHOLE} diag_embed trapezoid addbmm", of.all_of_each),
    )
    return {name: row for names, row in table for name in names.split()}


PRODUCT, FLOAT32, EITHER = "product", "float32", "either"
# Operations that mixed precision computes in half precision: torch.autocast's list for CUDA, and
# operations composed of these.
_PRODUCTS = """
inner tensordot linear matmul mm bmm mv linalg_matmul __rmatmul__ addmm addmv baddbmm addbmm einsum
linalg_vecdot chain_matmul linalg_multi_dot scaled_dot_product_attention conv1d conv2d conv3d
conv_transpose1d conv_transpose2d conv_transpose3d
"""
# Operations that it computes in float32, by the same list.
_IN_FLOAT32 = """
acos arccos asin arcsin cosh erfinv exp expm1 log log10 log1p log2 pow float_power reciprocal rsqrt
sinh tan __rpow__ softplus softmax log_softmax softmin gumbel_softmax layer_norm rms_norm group_norm
local_response_norm lp_pool1d lp_pool2d lp_pool3d norm linalg_norm linalg_vector_norm
linalg_matrix_norm normalize renorm cosine_similarity pairwise_distance dist cdist cumsum cumprod
sum prod trapezoid logsumexp interpolate special_erfinv special_expm1 special_log1p
special_logsumexp special_softmax special_log_softmax __rdiv__
"""
# Operations on no list of torch's that need the precision as well: other sums and means, and
# operations that torch supports in float32 and float64 only.
_IN_FLOAT32_TOO = """
mean nansum nanmean var std var_mean std_mean logcumsumexp batch_norm instance_norm special_exp2
trace exp2 erfc cov corrcoef quantile nanquantile linalg_inv linalg_cholesky linalg_det
linalg_matrix_rank linalg_solve_triangular fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft
fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn view_as_complex
complex polar histc grid_sample ctc_loss
"""
# Operations that it computes in the dtype of their inputs, and that are not known on shards.
_AS_GIVEN = """
functional.unfold functional.fold pad_sequence pixel_shuffle pixel_unshuffle channel_shuffle rot90
masked_scatter masked_scatter_ index_put index_put_ threshold
"""


@functools.cache
def _precisions() -> dict[str, str]:
    known = dict.fromkeys((*rows(), *_AS_GIVEN.split()), EITHER)
    in_float32 = f"{_IN_FLOAT32} {_IN_FLOAT32_TOO} {_LOSSES}".split()
    return known | dict.fromkeys(in_float32, FLOAT32) | dict.fromkeys(_PRODUCTS.split(), PRODUCT)


def precision_of(name: str) -> str | None:
    """The precision of an operation under mixed precision; None if it is not known.

    `PRODUCT` is half precision, `FLOAT32` is float32, `EITHER` is the precision of its operands.
    In-place operations keep the precision of the tensor that they change.
    """
    return _precisions().get(name)


def treatment(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], shapes: Sequence[tuple[int, ...]]
) -> Treatment | None:
    """How a call treats axes; None if the operation is not known."""
    row = rows().get(name)
    return None if row is None else row(Call(args, kwargs, shapes))


def gives_one_tensor(name: str) -> bool:
    """Whether a function or tensor method of torch with this name always returns one tensor.

    That is, never None, and never several tensors.
    """
    return name in _one_tensor()


@functools.cache
def _one_tensor() -> frozenset[str]:
    names = f"{_UNARY} {_BINARY} {_PLAIN} {_VIEWS} {_CREATED} narrow select".split()
    return frozenset(names).difference(_OTHERWISE.split())


# Functions that make a tensor from sizes and numbers.
_CREATED = "arange empty eye full linspace ones rand randint randn randperm tensor as_tensor zeros"
# Operations that return several tensors, or something else.
_OTHERWISE = """
type where frexp chunk split split_with_sizes unsafe_chunk unsafe_split unsafe_split_with_sizes
tensor_split hsplit vsplit dsplit unbind native_dropout __reversed__
"""


def name_of(function: Any) -> str:
    """The name of a function that `__torch_function__` receives; a property's begins with a dot.

    `torch.nn.functional.unfold` is distinguished from the method of that name.
    """
    name = str(getattr(function, "__name__", "")) or str(function)
    if name in ("__get__", "__set__"):
        return f"{'.' if name == '__get__' else '='}{getattr(function.__self__, '__name__', '?')}"
    if name in _NAMESAKES and getattr(function, "__module__", "") == "torch.nn.functional":
        return f"functional.{name}"
    return name


_NAMESAKES = {"unfold", "fold"}
