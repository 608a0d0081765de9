"""Every row of `slapo_rewrite.operations`, held against the operation itself.

Each example is carried out on whole tensors, and for every way to split its operands over two ranks
on the parts, or on summands of them. Where the check takes this for right, the ranks' results put
together (or added up, where it says that they are summands) must be the whole result.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from slapo_rewrite.model.results import tensors
from slapo_rewrite.operations import name_of, rows, treatment
from slapo_rewrite.sharding.placements import PARTIAL, REPLICATE, SHARD, Flow, PlacementError, State
from slapo_rewrite.sharding.rank_checks import RULES

# Several calls of what has arguments that matter; everything else is called in the first way that
# works. `x` and `y` are alike, `i` are indices, `b` a mask, `m` and `n` matrices that fit.
EXAMPLES = """
x.softmax(-1) | x.softmax(1) | F.softmax(x, 0) | F.log_softmax(x, -1) | F.softmin(x, 1)
torch.special.softmax(x, -1) | torch.special.log_softmax(x, 1) | x.cumsum(1) | x.cumsum(-1)
x.cumprod(0) | x.logcumsumexp(1) | x.cummax(2).values | x.cummin(0).values | x.flip(1)
x.flip(0, 2) | x.flip([1]) | x.sort().values | x.sort(dim=0).values | x.sort(1).values
x.argsort(1) | x.topk(2).values | x.topk(2, 1).values | x.roll(1, -1) | x.roll(1)
x.roll((1, 1), (0, 1)) | F.normalize(x) | F.normalize(x, dim=-1) | F.normalize(x, 2, 0)
F.glu(x) | F.glu(x, 1) | x.diff() | x.diff(dim=1) | x.unfold(1, 2, 2) | x.unfold(-1, 2, 1)
F.rms_norm(x, (8,)) | F.layer_norm(x, (8,)) | F.layer_norm(x, (6, 8)) | x.tril() | x.triu(1)
torch.fliplr(x) | torch.flipud(x) | torch.view_as_complex(x.view(4, 6, 4, 2))
torch.view_as_real(x.to(torch.complex128)) | x.diagonal() | x.diagonal(0, 1, 2)
torch.diag_embed(x) | F.cosine_similarity(x, y) | F.cosine_similarity(x, y, dim=-1)
F.pairwise_distance(x, y) | torch.linalg.cross(c, c + 1) | torch.cross(c, c + 1, dim=-1)
torch.fft.fft(x) | torch.fft.fft(x, dim=1) | torch.fft.rfft(x) | torch.fft.fft2(x)
torch.fft.fftn(x) | torch.fft.fftn(x, dim=(0, 1)) | torch.fft.fftshift(x, 1)
torch.trapezoid(x) | x.sum() | x.sum(-1) | x.sum(0, True) | x.sum((0, 2)) | torch.sum(x, dim=1)
x.sum(dim=1, keepdim=True) | x.nansum(1) | x.mean() | x.mean(-1) | x.mean((0, 1)) | x.var(1)
x.std(-1, keepdim=True) | torch.var_mean(x, 1)[0] | torch.std_mean(x)[0] | x.amax(1)
x.amin((0, 1)) | x.aminmax(dim=1).max | x.aminmax().min | x.prod(1) | x.prod() | x.any(1)
x.all() | x.argmax(-1) | x.argmin() | x.count_nonzero(1) | x.count_nonzero() | x.logsumexp(-1)
x.logsumexp((0, 1)) | torch.special.logsumexp(x, 1) | x.median() | x.median(1).values
x.nanmedian(0).values | x.mode(1).values | x.mode().values | x.kthvalue(2, 1).values
x.kthvalue(1).values | x.quantile(0.3, 1) | x.quantile(0.3) | x.nanquantile(0.3, -1) | x.norm()
x.norm(dim=-1) | x.norm(2, 1) | torch.linalg.norm(x, dim=1)
torch.linalg.vector_norm(x, dim=-1) | torch.linalg.vector_norm(x) | torch.linalg.matrix_norm(x)
torch.linalg.norm(m) | x.max() | x.max(1).values | x.max(dim=-1).values | torch.max(x, y)
x.min(0).values | x.nanmean(1) | x @ m | torch.matmul(x, m) | torch.mm(m, n)
torch.bmm(x, x.mT) | torch.linalg.matmul(x, m) | torch.mv(m.mT, v) | m.__rmatmul__(x)
x.__rmatmul__(x.mT.contiguous()) | x @ v | torch.dot(v, v) | torch.vdot(v, v)
torch.inner(x, x) | torch.addmm(a, m, n) | torch.baddbmm(x @ x.mT, x, x.mT)
torch.addmv(w, m.mT, v) | torch.outer(v, w) | torch.linalg.vecdot(x, y)
torch.linalg.vecdot(x, y, dim=1) | torch.tensordot(x, m, 1)
torch.tensordot(x, y.permute(1, 2, 0), 2) | torch.tensordot(x, y, dims=([1, 2], [1, 2]))
torch.linalg.cholesky(g @ g.mT) | torch.linalg.solve_triangular(g.tril(), x, upper=False)
torch.tensordot(x, m, ([2], [0])) | torch.einsum("abc,cd->abd", x, m)
torch.einsum("abc,abc->ab", x, y) | torch.einsum("abc,abd", x, y)
torch.einsum("...c,cd->...d", x, m)
torch.einsum("aab->ab", torch.cat([x, x[:, :2]], 1)[:, :4]) | torch.einsum("abc->c", x)
torch.einsum("abc->cab", x) | F.linear(x, m.mT.contiguous()) | F.linear(x, m.mT.contiguous(), w)
F.scaled_dot_product_attention(q, q + 1, q - 1)
F.scaled_dot_product_attention(q, q, q, is_causal=True)
F.scaled_dot_product_attention(q, q, q, q @ q.mT)
F.conv1d(x, torch.ones(4, 6, 3, dtype=x.dtype)) | F.conv1d(x, k, padding=1, groups=6)
F.conv1d(x, torch.ones(4, 3, 3, dtype=x.dtype), groups=2)
F.conv2d(q, torch.ones(2, 4, 1, 1, dtype=x.dtype))
F.conv_transpose1d(x, torch.ones(6, 4, 3, dtype=x.dtype)) | F.max_pool1d(x, 2)
F.conv_transpose1d(x, torch.ones(6, 2, 3, dtype=x.dtype), None, 1, 0, 0, 2)
F.avg_pool1d(x, 2) | F.avg_pool2d(q, 2) | F.adaptive_avg_pool1d(x, 2) | F.lp_pool1d(x, 2.0, 2)
F.interpolate(x, 4) | F.interpolate(x, scale_factor=2, mode="linear") | F.pad(x, (0, 1))
F.pad(x, (0, 0, 1, 1)) | F.pad(x, (0, 0), value=1) | F.batch_norm(x, None, None, training=True)
F.group_norm(x, 2) | F.instance_norm(x) | F.local_response_norm(x, 2) | F.embedding(i, m)
x.gather(1, i) | x.gather(2, i) | x.gather(0, i % 4) | torch.take_along_dim(x, i, 1)
x.scatter(1, i, y) | x.scatter(2, i, 1.0) | x.scatter_add(2, i, y)
x.scatter_add(1, i, y) | x.scatter_reduce(1, i, y, "sum") | x.index_select(1, j)
x.index_select(-1, j) | x.index_fill(1, j, 0.0) | x.index_add(1, j, y[:, :3])
x.index_copy(0, j, y[:3]) | x.repeat_interleave(2, 1) | x.repeat_interleave(2, dim=-1)
x.repeat_interleave(2) | v.repeat_interleave(2) | torch.hstack([x, y]) | torch.vstack([x, y])
torch.row_stack([x, y]) | torch.column_stack([x, y]) | torch.dstack([x, y])
torch.hstack([v, v]) | torch.stack([x, y]) | torch.stack([x, y], -1) | torch.cat([x, y], 1)
x.transpose(0, 1) | x.permute(2, 0, 1) | x.flatten(1, 2) | x.mT | m.T | x.unsqueeze(1)
x[:, None] | x[..., None] | x.unbind(1)[0] | x.select(1, 0) | x.narrow(1, 1, 2)
x.movedim(0, -1) | x.chunk(2, 1)[0] | x.split(3, 1)[1] | x.expand(2, 4, 6, 8)
x.masked_fill(b, 0.0) | torch.where(b, x, y) | torch.where(b, x, 0.0) | x + y | x + 1 | 1 - x
x / y | x ** 2 | 2 ** x | x % 2 | -x | abs(x) | x > y | ~b | x + x[:, :1] | x * x[:1, :, :1]
x + v | x.lerp(y, 0.3) | torch.addcmul(x, y, y) | torch.addcdiv(x, y, y) | x.clamp(min=0)
x.clamp(y, y + 1) | x.type_as(y) | x.to(torch.float32) | x.long()
F.prelu(x, torch.rand(6).double()) | F.one_hot(i, 8) | torch.broadcast_tensors(x, x[:1])[1]
x.clone().copy_(y) | x.clone().add_(y) | F.mse_loss(x, y) | F.l1_loss(x, y) | F.kl_div(x, y)
F.cross_entropy(x, i[:, 0]) | torch.dist(x, y) | torch.polygamma(1, x) | x.mvlgamma(1)
F.threshold(x, 0.1, 0.2) | F.gelu(x) | F.gelu(x, approximate="tanh") | torch.frexp(x)[0]
torch.bucketize(x, v) | x.clone().masked_fill_(b, 1.0) | x.clone().scatter_(2, i, 1.0)
x.clone().scatter_add_(1, i, y) | x.clone().index_add_(1, j, y[:, :3])
x.clone().index_fill_(1, j, 0.0) | x.clone().index_copy_(0, j, y[:3]) | x.clone().tril_()
x.clone().cumsum_(1) | torch.trace(x[0] @ x[0].mT) | F.logsigmoid(x)
F.nll_loss(x.log_softmax(1), i[:, 0]) | torch.meshgrid(v, w)[0]
torch.linalg.multi_dot([a, n.mT, n]) | torch.linalg.inv(g) | torch.linalg.det(g)
torch.linalg.matrix_rank(g) | F.bilinear(x, y, torch.ones(2, 8, 8, dtype=x.dtype))
torch.cov(m) | torch.corrcoef(m) | F.binary_cross_entropy(x.sigmoid(), y.sigmoid())
F.cosine_embedding_loss(m, m + 1, w.new_ones(8)) | torch.cartesian_prod(v, w)
torch.addbmm(x[0] @ x[0].mT, x, x.mT) | x.renorm(2, 0, 1.0)
F.multi_margin_loss(m, i[0, :, 0][[0, 1, 2, 3, 4, 5, 0, 1]]) | torch.ger(v, w)
x.type(torch.float32) | x.clone().lerp_(y, 0.3) | x.clone().addcmul_(x, y)
x.clone().addcdiv_(x, y) | x.broadcast_to(2, 4, 6, 8) | x.view_as(y) | x.reshape_as(y)
x.swapaxes(0, 1) | x.swapdims(1, 2) | x.moveaxis(0, 2) | x.clone().transpose_(0, 1)
x.clone().swapaxes_(0, 1) | m.clone().t_() | m.t() | m.H | x.to(torch.complex64).imag
torch.imag(x.to(torch.complex64)) | x.clone().scatter_reduce_(1, i, y, 'sum')
F.conv1d(x, torch.ones(4, 6, 3, dtype=x.dtype), w) | F.embedding(i, m, max_norm=0.5)
F.conv_transpose1d(x, torch.ones(6, 4, 3, dtype=x.dtype), w) | torch.div(2.0, x) | 2 / x
torch.div(x, 2.0) | torch.div(x, 2, rounding_mode="floor") | torch.where(x > 0.5) | x.where(b, y)
torch.einsum("abcd,abcd->bcd", q, q + 1) | torch.einsum("abcd,abcd->abc", q, q[:, :1] + 1)
torch.tensordot(q, q + 1, ([0], [0])) | torch.tensordot(q, q.mT, ([0, -2], [0, 3]))
torch.linalg.vecdot(q, q + 1, dim=0) | torch.linalg.vecdot(q, q[:, :, :1] + 1)
F.cosine_similarity(q, q[:, :, :1] + 1, dim=-1) | torch.cat([x, i], -1) | torch.stack([x, i])
torch.hstack([x, i]) | torch.cat([x, y]) | x.ravel() * 2 | x.masked_fill(b, 1.0) | 0 * x
F.pad(x, (0, 1), value=1.0) | x + 0 | torch.add(x, y, alpha=2) | x.sub(y, alpha=0.5)
x.new_zeros(4, 6, 8) | x.new_ones(4, 6, 8) | x.new_tensor(1.0) | x.new_full((4, 6, 8), 2.0)
torch.full_like(x, 2.0) | F.threshold(x, 0.1, 0.2)
"""
# What rules of the run as a rank judge besides: `test_zoo` and its like hold these.
RULED = {*RULES, "cat", "concat", "concatenate", "unsafe_chunk", "unsafe_split", "tile", "ravel"}
RULED |= {"new_empty", "empty_like", "unsafe_split_with_sizes", "set_", "__reversed__"}
RANDOM = {
    "alpha_dropout", "alpha_dropout_", "bernoulli", "bernoulli_", "cauchy", "cauchy_", "dropout",
    "dropout1d", "dropout1d_", "dropout2d", "dropout2d_", "dropout3d", "dropout3d_", "dropout_",
    "exponential", "exponential_", "feature_alpha_dropout", "feature_alpha_dropout_",
    "feature_dropout", "feature_dropout_", "geometric", "geometric_", "gumbel_softmax",
    "log_normal", "log_normal_", "multinomial", "native_dropout", "normal", "normal_", "rand_like",
    "randint_like", "randn_like", "random", "random_", "rrelu", "rrelu_", "rrelu_with_noise",
    "uniform", "uniform_",
}  # fmt: skip


def operands():
    torch.manual_seed(0)
    x = torch.rand(4, 6, 8, dtype=torch.float64) + 0.1
    v = torch.rand(8, dtype=torch.float64)
    return {
        "torch": torch,
        "F": F,
        "x": x,
        "y": torch.rand(4, 6, 8, dtype=torch.float64) + 0.2,
        "c": torch.rand(4, 6, 3, dtype=torch.float64),
        "m": torch.rand(8, 4, dtype=torch.float64).mT.contiguous().mT.contiguous(),
        "n": torch.rand(4, 6, dtype=torch.float64),
        "a": torch.rand(8, 6, dtype=torch.float64),
        "q": torch.rand(2, 4, 6, 8, dtype=torch.float64),
        "k": torch.rand(6, 1, 3, dtype=torch.float64),
        "v": v.sort().values,
        "w": torch.rand(4, dtype=torch.float64),
        "i": torch.randint(0, 4, (4, 6, 8)),
        "j": torch.tensor([2, 0, 1]),
        "b": torch.rand(4, 6, 8) > 0.5,
        "g": torch.rand(4, 6, 6, dtype=torch.float64) + torch.eye(6, dtype=torch.float64),
        "z": torch.rand(2, 4, 4, 4, 4, dtype=torch.float64),
    }


class Last(TorchFunctionMode):
    """Keeps the last call that gave a tensor."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = [t.clone() for t in tensors((args, kwargs or {}))]
        output = func(*args, **(kwargs or {}))
        if list(tensors(output)):
            self.calls.append((func, args, kwargs or {}, given))
        return output


def last_call(text, namespace):
    with Last() as seen, torch.no_grad():
        eval(text, namespace)
    return seen.calls


def with_tensors(value, new):
    """A value with its tensors exchanged for new ones, in their order."""
    if isinstance(value, torch.Tensor):
        return next(new)
    if isinstance(value, dict):
        return {k: with_tensors(v, new) for k, v in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(with_tensors(v, new) for v in value)
    return value


def put_together(parts, whole):
    """The ranks' results as one; None where they are not parts along one axis."""
    axes = [a for a, (p, w) in enumerate(zip(parts[0].shape, whole.shape, strict=True)) if p != w]
    if len(axes) != 1 or parts[0].shape != parts[1].shape:
        return None
    joined = torch.cat(parts, axes[0])
    return joined if joined.shape == whole.shape else None


def splits(given):
    """Every way to split some of the operands, each along one axis, in summands or not at all."""
    choices = [
        [None, *[SUM] * t.is_floating_point(), *(a for a, n in enumerate(t.shape) if n % 2 == 0)]
        for t in given
    ]
    return [split for split in itertools.product(*choices) if any(a is not None for a in split)]


SUM = "sum"


def local(tensor, axis, rank):
    """What a rank has of a tensor."""
    if axis == SUM:
        one = torch.linspace(-1, 1, tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
        return tensor - one if rank else one
    return tensor.clone() if axis is None else tensor.chunk(2, axis)[rank].clone()


def check(func, args, kwargs, given):
    """How many splits are taken for right; fails where one of them is not."""
    name, accepted = name_of(func), 0
    whole = list(tensors(func(*with_tensors(args, iter([t.clone() for t in given])), **kwargs)))
    shapes = [tuple(t.shape) for t in given]
    for split in splits(given):
        ranks = []
        for rank in range(2):
            here = [local(t, a, rank) for t, a in zip(given, split, strict=True)]
            new = iter(here)
            local_args = with_tensors(args, new)
            local_kwargs = with_tensors(kwargs, new)
            try:
                output = list(tensors(func(*local_args, **local_kwargs)))
            except (RuntimeError, IndexError, ValueError):
                break
            ranks.append((here, local_args, local_kwargs, output))
        if len(ranks) < 2:
            continue
        here, local_args, local_kwargs, output = ranks[0]
        if len(output) != len(whole) or any(
            a.dim() != b.dim() for a, b in zip(output, whole, strict=False)
        ):
            continue
        flow = Flow()
        for tensor, axis in zip(here, split, strict=True):
            if axis is not None:
                flow.set(tensor, State(PARTIAL if axis == SUM else SHARD, "layer"))
        try:
            flow.operate(
                *(name, here, shapes, local_args, local_kwargs, output),
                [tuple(t.shape) for t in whole],
            )
        except PlacementError:
            continue
        accepted += 1
        for n, want in enumerate(whole):
            one, two = ranks[0][3][n], ranks[1][3][n]
            state = flow.of(output[n])
            got: torch.Tensor | None = one
            if state.kind != REPLICATE:
                got = one + two if state.kind == PARTIAL else put_together([one, two], want)
            rounded = 0.02 if want.dtype in (torch.half, torch.bfloat16) else 1e-8
            assert got is not None and torch.allclose(
                *(t.to(torch.complex128) for t in (got, want)), atol=rounded, equal_nan=True
            ), f"`{name}` of operands split along {split} is taken for right, and is not"
    return accepted


CASES = [text.strip() for line in EXAMPLES.splitlines() for text in line.split("|") if text.strip()]


@pytest.fixture(scope="module")
def held():
    """The calls of rows that each example holds: whichever tests are asked for, in any order."""
    calls = {text: last_call(text, operands())[-2:] for text in CASES}
    named = {text: [(name_of(call[0]), call) for call in found] for text, found in calls.items()}
    return {
        text: [(name, call) for name, call in found if name in rows() and name not in RULED]
        for text, found in named.items()
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", CASES)
def test_what_is_taken_for_right_is(text, held):
    for _, call in held[text]:
        check(*call)


def spelled(name):
    """Ways to call an operation, the likelier first."""
    if name.startswith("."):
        return [f"x{name}"]
    stem = name.removeprefix("special_")
    own = "x.clone()" if name.endswith("_") else "x"
    return [
        *(f"{own}.{name}({more})" for more in ("", "y", "1.0", "2", "0.5, 0.6", "i")),
        *(f"torch.{name}({more})" for more in ("x", "x, y", "i, i", "m, n", "x, y, y")),
        *(f"F.{name}({more})" for more in ("x", "x, y", "x, 2", "x, 0.1, 0.2", "x, 1")),
        *(f"torch.special.{stem}({more})" for more in ("x", "x, y", "x, 1", "1, x")),
        *(f"i.{name}({more})" for more in ("i", "1", "")),
        *(f"i.clone().{name}({more})" for more in ("i", "1", "")),
        *(f"b.{name}({more})" for more in ("b", "")),
        *(f"torch.fft.{name.removeprefix('fft_')}(x)", f"torch.{name}([x, y])"),
        f"torch.{name}(x, x)",
        *(f"torch.Tensor.{name}({more})" for more in ("x.clone(), y", "x.clone(), 2")),
        *(f"torch.Tensor.{name}({more})" for more in ("i.clone(), i", "b.clone(), b", "x")),
        *(f"torch._C.TensorBase.{name}({more})" for more in ("x.clone(), y", "x", "i.clone(), i")),
        *(f"F.{name}({more})" for more in ("q, 2", "q, 2.0, 2", "z, 2", "z, 2.0, 2")),
        f"F.{name}(z, torch.ones(4, 4, 1, 1, 1, dtype=x.dtype))",
        f"F.{name}(q, torch.ones(4, 4, 1, 1, dtype=x.dtype))",
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(set(rows()) - RANDOM - RULED))
def test_every_row_is_right(name, held):
    if any(name == other for calls in held.values() for other, _ in calls):
        return
    for text in spelled(name):
        try:
            calls = last_call(text, operands())
        except Exception:
            continue
        found = [call for call in calls if name_of(call[0]) == name]
        if found:
            check(*found[-1])
            return
    assert name in UNCALLED, f"no example calls `{name}`"


# On a GPU alone, or in one type.
UNCALLED = {"cuda", "grouped_mm", "_grouped_mm"}


def test_softmax_along_the_split_axis_is_refused():
    """The prover itself: it finds what a wrong row lets through."""
    x = torch.rand(4, 8)
    wrong = Flow()
    part = x.chunk(2, -1)[0]
    wrong.set(part, State(SHARD, "layer"))
    with pytest.raises(PlacementError, match="needs the whole axis"):
        wrong.operate("softmax", [part], [(4, 8)], (part, -1), {}, [part.softmax(-1)], [(4, 8)])


@pytest.mark.parametrize("count", [1, 2])
def test_a_draw_needs_all_that_it_draws_from(count):
    """The argument behind the input says how often, not along which axis."""
    found = treatment("multinomial", [torch.rand(4, 8), count], {}, [(4, 8)])
    assert found is not None and found.over == ({1},)
