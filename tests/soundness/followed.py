"""Cases for the static check alone to refuse or to accept: no model is run before.

What is run may by chance say nothing: a gradient too small to be clamped, a branch not taken.
"""

from __future__ import annotations

from tests.soundness.cases import X, net
from tests.soundness.ops import schedule_text
from tests.soundness.pairs import REFUSED, RIGHT, Pair


def block(init: str, body: str, lines: list[str], top: str = "") -> Pair:
    """A layer norm, then a module `mlp` of layers `up` and `down` of which a rank has its part."""
    source = f"""
{top}class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)
        {init or "pass"}

    def forward(self, x):
        {body}


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), MLP()

    def forward(self, x):
        y = self.mlp(self.norm(x))
        return (x + y[0], y[1]) if isinstance(y, tuple) else x + y
"""
    shards = [
        's["inner.mlp.up"].shard(["weight", "bias"], 0)',
        's["inner.mlp.down"].shard("weight", 1)',
    ]
    return Pair(net(source), schedule_text(X, [*shards, *lines]))


SUM = 's["inner.mlp.down"].sync("fwd_post", "all_reduce")'
AROUND = ['s["inner.mlp"].sync("bwd_post", "all_reduce")', SUM]
INFERRED = ["s.infer_sync()"]
CLIP = """\
class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-0.1, 0.1)


"""
AGAIN = """\
class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, f):
        ctx.f = f
        ctx.save_for_backward(x)
        return f(x)

    @staticmethod
    def backward(ctx, g):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.f(x).backward(g)
        return x.grad, None


"""
CLIPPED = "return self.down(F.gelu(self.up(Clip.apply(x))))"
HOOKED = """x = x * 1.0
        x.register_hook(lambda g: g.clamp(-0.1, 0.1)) if x.requires_grad else None
        return self.down(F.gelu(self.up(x)))"""
PRE = "self.pre = nn.LayerNorm(8)"
GATE = "self.gate = nn.Linear(8, 1)"
REENTRANT = "return checkpoint(lambda z: {}, x, use_reentrant=True)"
IMPORT = "from torch.utils.checkpoint import checkpoint\n\n\n"
GATED = REENTRANT.format("self.down(F.gelu(self.up(z)) * self.gate(z))")
PREPARED = REENTRANT.format("self.down(F.gelu(self.up(self.pre(z))))")
SUMMED = """\
y = self.down(self.up(x).tanh())
        z = sum(p.sum() for p in self.parameters())
        return {}"""
FOLLOWED = {
    "summands clamped by a function": (block("", CLIPPED, AROUND, CLIP), REFUSED),
    "a sum clamped by a function": (block("", CLIPPED, INFERRED, CLIP), RIGHT),
    "summands clamped by a hook": (block("", HOOKED, AROUND), REFUSED),
    "a sum clamped by a hook": (block("", HOOKED, INFERRED), RIGHT),
    "a reentrant checkpoint around a norm, nothing summed": (
        block(PRE, PREPARED, [SUM], IMPORT),
        REFUSED,
    ),
    "a reentrant checkpoint around a norm": (block(PRE, PREPARED, AROUND, IMPORT), RIGHT),
    "a reentrant checkpoint around a gate": (block(GATE, GATED, INFERRED, IMPORT), RIGHT),
    "a function that computes again, nothing summed": (
        block(
            PRE,
            "return Again.apply(x, lambda z: self.down(F.gelu(self.up(self.pre(z)))))",
            [SUM],
            AGAIN,
        ),
        REFUSED,
    ),
    "zero times a sum of split and whole parameters": (
        block("", SUMMED.format("y + 0 * z"), INFERRED),
        RIGHT,
    ),
    "a sum of split and whole parameters": (
        block("", SUMMED.format("y + 0 * z + z"), INFERRED),
        REFUSED,
    ),
    "elements counted in a tensor": (
        block(
            "", "h = self.up(x)\n        return self.down(h * torch.tensor(h.shape)[-1])", INFERRED
        ),
        REFUSED,
    ),
    "one element picked by a rank's size": (
        block(
            "",
            """h = self.up(x)
        return self.down(h * x.select(1, h.size(-1) // 12)[:, None, :1])""",
            INFERRED,
        ),
        REFUSED,
    ),
    "a bound named before its value": (
        block(
            'self.register_buffer("f", torch.linspace(-1, 1, 24))',
            """h = self.up(x)
        return self.down(h * torch.bucketize(boundaries=self.f, input=h))""",
            ['s["inner.mlp"].shard("f", 0)', *INFERRED],
        ),
        REFUSED,
    ),
    "a factor named before its value": (
        block(
            "self.w = nn.Parameter(torch.randn(8, 24))",
            """h = self.up(x).flatten(0, 1)
        return torch.mm(mat2=self.w.T, input=h).view(x.shape)""",
            ['s["inner.mlp"].shard("w", 1)', *INFERRED],
        ),
        RIGHT,
    ),
    "all elements in a row": (
        block(
            "",
            """h = self.up(x)
        a, b = h.ravel().chunk(2)
        return self.down(torch.cat([b, a]).view(h.shape))""",
            INFERRED,
        ),
        RIGHT,
    ),
    "gradients scaled by how often a row is asked for": (
        block(
            "self.t = nn.Parameter(torch.randn(5, 1))",
            """h = self.up(x)
        rows = (h * 10).long().abs() % 5
        return self.down(h + F.embedding(rows, self.t, scale_grad_by_freq=True).squeeze(-1))""",
            INFERRED,
        ),
        REFUSED,
    ),
    "such a sum given out": (block("", SUMMED.format("y + 0 * z, z"), INFERRED), REFUSED),
}
