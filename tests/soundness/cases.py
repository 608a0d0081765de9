"""Cases that were once accepted and wrong: each is refused, or right.

A case is a context and a statement of `ops`, or a model and a schedule of its own.
"""

from __future__ import annotations

import random

from tests.soundness.ops import HEADER, assembled, schedule_text
from tests.soundness.pairs import Pair

X = '"x": torch.randn(3, 12, 8)'


def net(inner: str) -> str:
    """The source of a module `Inner`, with a `Net` that holds it."""
    return f"""\
{HEADER}

{inner.strip()}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(x)
"""


def sharded(*names: str, more: tuple[str, ...] = ()) -> str:
    """A schedule that splits the first layers by their outputs, and the last one by its inputs."""
    *first, last = names
    lines = [f's["inner.{name}"].shard(["weight", "bias"], 0)' for name in first]
    lines += [f's["inner.{last}"].shard("weight", 1)', *more, "s.infer_sync()"]
    return schedule_text(X, lines)


HEADS_OF_A_SUBCLASS = Pair(
    net(
        """
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = 12
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)
        self.register_buffer("gain", torch.arange(24.0))

    def forward(self, x):
        h = (self.up(x) * self.gain).view(*x.shape[:-1], self.heads, -1).softmax(-1)
        return self.down(h.flatten(-2))
"""
    ),
    sharded("up", "down", more=('s["inner"].shard("gain", 0)',)),
)
TILED_QUERIES = """
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.kv, self.size = 4, 2, 4
        self.q, self.k, self.v = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)
        self.o = nn.Linear(16, 8)

    def forward(self, x):
        q = self.q(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
        k = self.k(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        v = self.v(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        n = self.heads // self.kv
        k, v = k.repeat(1, n, 1, 1), v.repeat(1, n, 1, 1)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).flatten(2))
"""
LATE_SIZES = """
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 24), nn.Linear(8, 12), nn.Linear(8, 12)
        self.o = nn.Linear(24, 8)
        self.heads, self.kv, self.size = 12, 6, 2

    def forward(self, x):
        q = self.q(x).view(*x.shape[:2], self.heads, self.size).transpose(1, 2)
        k = self.k(x).view(*x.shape[:2], self.kv, self.size).transpose(1, 2)
        v = self.v(x).view(*x.shape[:2], self.kv, self.size).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))
"""
GROUPED_CONVOLUTION = """
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Conv1d(8, 24, 3, padding=1)
        self.mid = nn.Conv1d(24, 24, 3, padding=1, groups=2)
        self.down = nn.Conv1d(24, 8, 1)

    def forward(self, x):
        return self.down(self.mid(self.up(x.mT)).relu()).mT
"""
PARTS_OF_A_PRODUCT = """
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, 24)), nn.Parameter(torch.randn(24, 8))

    def forward(self, x):
        h = torch.relu(x @ self.a)
        return {}
"""
TIED_ROWS = """
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.down = nn.Embedding(24, 8), nn.Linear(8, 8)

    def forward(self, x):
        ids = (x[..., 0] * 100).long().abs() % 24
        return self.e(ids), self.e.weight.square().mean()
"""
GATHERED_FEATURES = """
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(24, 8)
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x):
        h = self.emb((x[..., 0] * 100).long().abs() % 24)
        return self.down(self.up(h).relu())
"""
HEADS_OF_ONE_FEATURE = """
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.size = 24 // 24
        self.q, self.k, self.v = (nn.Linear(8, 24, bias=False) for _ in range(3))
        self.o = nn.Linear(24, 8)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        q = q.unflatten(2, (-1, self.size)).transpose(1, 2)
        k = k.unflatten(2, (-1, self.size)).transpose(1, 2)
        v = v.unflatten(2, (-1, self.size)).transpose(1, 2)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
"""
WHOLE_MODELS = {
    "gathered features": Pair(
        net(GATHERED_FEATURES),
        sharded(
            "up",
            "down",
            more=(
                's["inner.emb"].shard("weight", 1)',
                's["inner.emb"].sync("fwd_post", "all_gather", axis=2)',
            ),
        ),
    ),
    "heads of one feature": Pair(
        net(HEADS_OF_ONE_FEATURE).replace("for _ in range(3)", "for _ in 'qkv'"),
        sharded("q", "k", "v", "o").replace('["weight", "bias"]', '"weight"'),
    ),
    "A1 heads of a subclass": HEADS_OF_A_SUBCLASS,
    "A2 tiled queries": Pair(net(TILED_QUERIES), sharded("q", "k", "v", "o")),
    "A3 an embedding's weight": Pair(
        net(TIED_ROWS), schedule_text(X, ['s["inner.e"].shard("weight", 0)', "s.infer_sync()"])
    ),
    **{
        f"A10 {product}": Pair(
            net(PARTS_OF_A_PRODUCT.format(product)),
            schedule_text(
                X,
                ['s["inner"].shard("a", 1)', 's["inner"].shard("b", 0, parts=2)', "s.infer_sync()"],
            ),
        )
        for product in (
            "h @ self.b",
            "F.linear(h, self.b.T)",
            'torch.einsum("bsd,de->bse", h, self.b)',
        )
    },
    "B1 a name that is spelled like a class": Pair(
        net(
            """
Linear = lambda *sizes: nn.Linear(*sizes, bias=False)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = Linear(8, 24), Linear(24, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())
"""
        ),
        sharded("up", "down").replace('["weight", "bias"]', '"weight"'),
    ),
    "C1 a grouped convolution": Pair(
        net(GROUPED_CONVOLUTION),
        schedule_text(
            X,
            ['s["inner.{up,mid}"].shard(["weight", "bias"], 0)',
             's["inner.down"].shard("weight", 1)', "s.infer_sync()"],
        ),
    ),
    "C2 sizes after the layers": Pair(net(LATE_SIZES), sharded("q", "k", "v", "o")),
}  # fmt: skip

GATE = """top:class Gate(torch.autograd.Function):
top:    @staticmethod
top:    def forward(ctx, h, gate):
top:        ctx.save_for_backward(h, gate)
top:        return h * gate
top:
top:    @staticmethod
top:    def backward(ctx, g):
top:        h, gate = ctx.saved_tensors
top:        return g * gate, (g * h).sum_to_size(gate.shape)"""
BOX = """top:class Box:
top:    def __init__(self, value):
top:        self.value = value"""
W = "↵init:self.w = nn.Parameter(torch.randn(24))↵own:w 0"
STATEMENTS = {
    "A3": ("part", """\
return self.down(torch.relu(h)), self.up.weight.square().sum()
return self.down(h), sum(p.square().sum() for p in self.parameters())
return self.down(h) * self.up.weight.norm()
return F.linear(F.linear(x, self.up.weight, self.up.bias).tanh(), self.down.weight, self.down.bias)"""),
    "A4": ("part", f"""\
h = h / torch.linalg.vector_norm(h, dim=-1, keepdim=True)
h = h / torch.linalg.norm(h, dim=-1, keepdim=True)
h = h / torch.linalg.matrix_norm(h, keepdim=True)
h = h * torch.linalg.svdvals(h).sum()
h = h * torch.linalg.vecdot(h, y).unsqueeze(-1)
h = h * torch.linalg.multi_dot([h[0], y[0].T, c[0]]).sum()
h = torch.special.softmax(h, -1)
h = torch.special.log_softmax(h, -1)
h = h - torch.special.logsumexp(h, -1, keepdim=True)
h = h * F.cosine_similarity(h, h + 1, dim=-1).unsqueeze(-1)
h = h * F.pairwise_distance(h, y).unsqueeze(-1)
h = h * torch.cdist(h, y).sum()
h = h * torch.dist(h, y)
h = h * torch.cov(h[0]).sum()
h = h * torch.trace(h[0])
h = h - h.quantile(.3, -1, keepdim=True)
h = h - h.nanquantile(.3, -1, keepdim=True)
h = h - h.kthvalue(2, -1, keepdim=True).values
h = h - h.nanmedian(-1, keepdim=True).values
h = h - h.mode(-1, keepdim=True).values
h = h - torch.aminmax(h, dim=-1, keepdim=True).min
h = h * torch.histc(h, 5)[0]
h = torch.cummax(h, -1).values
h = torch.cummin(h, -1).values
h = h * torch.trapezoid(h, dim=-1).unsqueeze(-1)
h = torch.gradient(h, dim=-1)[0]
h = torch.diff(h, dim=-1, append=h[..., :1])
h = torch.fft.fft(h).real
h = torch.msort(h.permute(2, 0, 1)).permute(1, 2, 0)
h = torch.renorm(h, 2, 0, 1.0)
h = torch.tril(h)
h = torch.triu(h)
h = torch.fliplr(h.mT).mT
h = torch.flipud(h.permute(2, 0, 1)).permute(1, 2, 0)
h = torch.rot90(h, 2, (1, 2))
h = F.channel_shuffle(h.mT, 2).mT
h = h.roll(1, -1)
h = h.index_fill(-1, i, 0.)
h = h.index_copy(-1, i, h[..., i.flip(0)])
h = torch.index_put(h, (i % 3, i, i), v[:3])
h = h.scatter_reduce(-1, g, y, "sum")
h = h * torch.take(h, i).sum()
h = h.take_along_dim(g, -1)
h = h * torch.mv(h[0], self.w).sum(){W}
h = h * torch.dot(h[0, 0], self.w){W}
h = h * torch.vdot(h[0, 0], self.w){W}
h = h * torch.inner(h, self.w).unsqueeze(-1){W}
h = h * torch.tensordot(h, self.w, 1).unsqueeze(-1){W}
h = h * F.conv1d(h.mT, self.w.view(1, -1, 1)).mT{W}
h = h * F.soft_margin_loss(h, y.sign().detach())
h = h * F.hinge_embedding_loss(h, y.sign())
h = h * F.poisson_nll_loss(h, y)
h = h * F.gaussian_nll_loss(h, y, y.square())
h = h * F.multilabel_soft_margin_loss(h[0], y[0].sigmoid())
h = h * F.multi_margin_loss(h[0], k[0])"""),
    "A5": ("part", """\
h = h * torch.ones_like(h).sum()
h = h + torch.ones_like(h).cumsum(-1)
h = h + torch.vmap(lambda z: z.softmax(-1))(h)
h = h + scripted(h)↵top:@torch.jit.script↵top:def scripted(h):↵top:    return h.softmax(-1)"""),
    "A6": ("part", """\
h[..., :4] = 0
h[..., 0] = 1.0
h[:, :, [0, 3]] = 0"""),
    "A7": ("partial", """\
h = torch.cat([self.cls.expand(h.size(0), 1, 8), h], 1)
h = torch.stack([h, x.tanh()])
h = F.pad(h, (1, 1), value=1.0)
h[:, 0] = 1.0
b = x.clone(); b[:, 0] = h[:, 0]; h = b
h = h + torch.arange(8)
h = torch.div(h, 3.0, rounding_mode="floor")
h = (h * 10).to(torch.long)
h = (h * 10).type(torch.int32)
h = h.round().bool()"""),
    "A8": ("part", """\
if x.abs().max() > 0:↵    h = h.softmax(-1)
h = h if self.training else h.flip(-1)
if soft:↵    h = h.softmax(-1)↵arg:soft=False
h = h.softmax(-1) if mode == "soft" else h↵arg:mode="plain"
h = h if extra is None else h * extra.softmax(-1)↵arg:extra=None
h = h if scale == 0.0 else h.softmax(-1)↵arg:scale=0.0
h = h.softmax(-1) if x.size(0) > 3 else h
b, s, _ = x.shape↵if b * s > 36:↵    h = h.softmax(-1)
h = h.relu() if h.size(-1) >= 8 else h.tanh()"""),
    "A9": ("part", """\
h = h * h.new_tensor(h.size(-1))
h = h * torch.full((1,), h.size(-1))
h = h * torch.full_like(h, h.size(-1))
h = h.subtract(h.size(-1))
h = h * (h.size(-1) > 7)
h = h.multiply(h.size(-1))
h = torch.divide(h, h.size(-1))
h = F.elu(h, h.size(-1))
h = F.softplus(h, beta=h.size(-1))
h = F.hardtanh(h, -1, h.size(-1))
h = torch.lerp(h, y, h.size(-1))
h = torch.addcmul(h, h, y, value=h.size(-1))
return self.down(h), h.shape[-1]"""),
    "A11": ("part", f"""\
h = Gate.apply(h, c)↵{GATE.replace(chr(10), "↵")}
h = Gate.apply(h, self.scalar)↵{GATE.replace(chr(10), "↵")}"""),
    "A12": ("part", """\
init:self.up.register_forward_hook(lambda m, a, o: o.softmax(-1))
h.register_hook(lambda g: g.softmax(-1)) if h.requires_grad else None
init:self.up.weight.register_hook(lambda g: g / g.norm())"""),
    "A13": ("part", f"""\
return {{"y": self.down(h), "inner": {{"h": h}}}}
return {{"y": self.down(h), "a": [h]}}
return {{"y": self.down(h), "a": (h,)}}
return {{"y": self.down(h), "b": Box(h)}}↵{BOX.replace(chr(10), "↵")}"""),
}  # fmt: skip


def cases() -> dict[str, Pair]:
    """Every case, by name."""
    found = dict(WHOLE_MODELS)
    for number, (context, texts) in STATEMENTS.items():
        for text in texts.split("\n"):
            pair = assembled(context, [text.replace("↵", "\n")], random.Random(0), whole=True)
            found[f"{number} {text.partition('↵')[0]}"] = pair
    return found
