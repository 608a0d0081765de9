"""Ordinary models and schedules, which have to be accepted, and right."""

from __future__ import annotations

from tests.soundness.cases import X, net
from tests.soundness.ops import schedule_text
from tests.soundness.pairs import Pair


def block(init: str, body: str, shards: str, more: str = "", top: str = "") -> Pair:
    """A module `Inner` and what is sharded of it, a line each: a path, names, an axis."""
    lines = []
    for shard in shards.split("; "):
        path, names, axis, *parts = shard.split(" ")
        selected = f's["inner.{path}"]' if path != "." else 's["inner"]'
        lines.append(
            f"{selected}.shard({names.split(',')!r}, {axis}{', parts=' + parts[0] if parts else ''})"
        )
    lines += more.split("\n") if more else ["s.infer_sync()"]
    source = f"""{top}
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
{_indented(init)}

    def forward(self, x):
{_indented(body)}
"""
    return Pair(net(source), schedule_text(X, lines))


def _indented(text: str) -> str:
    return "\n".join(" " * 8 + line for line in text.strip().split("\n"))


UP_DOWN = "self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)"
FEED_FORWARD = "up weight,bias 0; down weight 1"
EXPLICIT = """\
s["inner.up"].sync("bwd_post", "all_reduce")
s["inner.down"].sync("fwd_post", "all_reduce")"""
PACKED = "self.up, self.down = nn.Linear(8, 48), nn.Linear(24, 8)"
PACKED_SHARDS = "up weight,bias 0 2; down weight 1"
QKV = """\
self.heads, self.size = 12, 2
self.q, self.k, self.v = nn.Linear(8, 24), nn.Linear(8, 24), nn.Linear(8, 24)
self.o = nn.Linear(24, 8)"""
ATTENTION = "{q,k,v} weight,bias 0; o weight 1"
HEADS = """\
b, t, _ = x.shape
q = self.q(x).view(b, t, self.heads, self.size).transpose(1, 2)
k = self.k(x).view(b, t, self.heads, self.size).transpose(1, 2)
v = self.v(x).view(b, t, self.heads, self.size).transpose(1, 2)
"""
SCORES = "a = (q @ k.transpose(-2, -1)) * self.size**-0.5\n"
MERGE = "return self.o(y.transpose(1, 2).reshape(b, t, -1))"
SDPA = "y = F.scaled_dot_product_attention(q, k, v)\n"
ONE = """\
self.heads, self.size = 12, 2
self.qkv, self.o = nn.Linear(8, 72), nn.Linear(24, 8)"""
ONE_SHARDS = "qkv weight,bias 0 3; o weight 1"
FEW = """\
self.heads, self.kv, self.size = 12, 4, 2
self.q, self.k, self.v = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 8)
self.o = nn.Linear(24, 8)"""
FEW_HEADS = HEADS.replace(
    "self.k(x).view(b, t, self.heads", "self.k(x).view(b, t, self.kv"
).replace("self.v(x).view(b, t, self.heads", "self.v(x).view(b, t, self.kv")
ORDINARY = {
    "mlp": block(UP_DOWN, "return self.down(F.gelu(self.up(x)))", FEED_FORWARD),
    "mlp, stated": block(UP_DOWN, "return self.down(torch.relu(self.up(x)))", FEED_FORWARD, EXPLICIT),
    "mlp, dropped": block(
        UP_DOWN + "\nself.drop = nn.Dropout(0.0)",
        "h = F.silu(self.up(x))\nh = F.dropout(h, 0.0, self.training)\nreturn self.drop(self.down(h))",
        FEED_FORWARD,
    ),
    "mlp, rows": block(
        UP_DOWN, "h = self.up(x.view(-1, x.size(-1))).tanh()\nreturn self.down(h).view_as(x)", FEED_FORWARD
    ),
    "mlp, own gelu": block(
        UP_DOWN,
        "h = self.up(x)\nh = 0.5 * h * (1.0 + torch.erf(h / math.sqrt(2.0)))\nreturn x + self.down(h)",
        FEED_FORWARD,
    ),
    "mlp, in place": block(
        UP_DOWN, "h = self.up(x)\nh.mul_(0.5)\nh = F.relu(h, inplace=True)\nreturn self.down(h)", FEED_FORWARD
    ),
    "mlp, of a partial": block(
        "Rows = partial(nn.Linear, 24)\nself.up, self.down = Linear(8, 24), Rows(8, bias=False)",
        "return self.down(F.gelu(self.up(x)))",
        "up weight 0; down weight 1",
        top="from functools import partial\n\nLinear = partial(nn.Linear, bias=False)\n\n",
    ),
    "one layer by two names": block(
        UP_DOWN + "\nself.again = self.up",
        "return self.down(F.gelu(self.up(x)) * self.again(x + 1))",
        "again weight,bias 0; down weight 1",
    ),
    "a block of a list by another name": block(
        "self.blocks = nn.ModuleList(Block() for _ in range(3))\nself.last = self.blocks[2]",
        "return self.last(self.blocks[0](x))",
        "{last,blocks.*}.up weight,bias 0; blocks.*.down weight 1",
        top=f"class Block(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        {UP_DOWN}\n\n    def forward(self, x):\n        return self.down(F.silu(self.up(x)))\n\n",
    ),
    "layers that functions make": block(
        "self.up, self.down = wide(8), nn.Linear(24, 8)\nself.net = net(8)",
        "return self.down(F.gelu(self.up(x))) + self.net(x)",
        "{up,net.0} weight,bias 0; {down,net.2} weight 1",
        top="def wide(n):\n    layer = nn.Linear(n, 3 * n)\n    return layer\n\n\n"
        "def net(n):\n    return nn.Sequential(nn.Linear(n, 2 * n), nn.ReLU(), nn.Linear(2 * n, n))\n\n",
    ),
    "mlp, checkpointed": block(
        UP_DOWN,
        "return self.down(F.gelu(self.up(x)))",
        FEED_FORWARD,
        's["inner"].checkpoint()\n' + EXPLICIT,
    ),
    "sequential": block(
        "self.net = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Dropout(0.0), nn.Linear(24, 8))",
        "return self.net(x)",
        "net.0 weight,bias 0; net.3 weight 1",
    ),
    "gated": block(
        UP_DOWN + "\nself.gate = nn.Linear(8, 24)",
        "return self.down(F.silu(self.gate(x)) * self.up(x))",
        "{gate,up} weight,bias 0; down weight 1",
    ),
    "chunked": block(PACKED, "g, u = self.up(x).chunk(2, -1)\nreturn self.down(F.silu(g) * u)", PACKED_SHARDS),
    "split": block(PACKED, "g, u = self.up(x).split(24, -1)\nreturn self.down(F.silu(g) * u)", PACKED_SHARDS),
    "halves": block(
        PACKED,
        "h = self.up(x)\ng, u = h[..., :24], h[..., 24:]\nreturn self.down(F.silu(g) * u)",
        PACKED_SHARDS,
    ),
    "unbound": block(
        PACKED,
        "g, u = self.up(x).unflatten(-1, (2, -1)).unbind(-2)\nreturn self.down(F.silu(g) * u)",
        PACKED_SHARDS,
    ),
    "interleaved": block(
        PACKED,
        "g, u = self.up(x).unflatten(-1, (-1, 2)).unbind(-1)\nreturn self.down(F.silu(g) * u)",
        "up weight,bias 0; down weight 1",
    ),
    "attention": block(QKV, HEADS + SDPA + MERGE, ATTENTION),
    "attention, literal sizes behind a star": block(
        QKV,
        HEADS.replace("b, t, _ = x.shape", "shape = x.shape[:-1]").replace(
            "b, t, self.heads, self.size", "*shape, 12, 2"
        ) + SDPA + "return self.o(y.transpose(1, 2).reshape((*shape, 24)))",
        ATTENTION,
    ),
    "attention, sizes in tuples": block(
        QKV + "\nself.shape = (3, 12, 12, 2)",
        "b, t, _ = x.shape\nparts, wide = (12, 2), [b, t, 24]\n"
        "q = self.q(x).view(self.shape).transpose(1, 2)\n"
        "k = self.k(x).unflatten(-1, parts).transpose(1, 2)\n"
        "v = self.v(x).view(x.shape[:-1] + (12, 2)).transpose(1, 2)\n"
        + SDPA + "y = y.transpose(1, 2).reshape(wide)\nreturn self.o(torch.reshape(y, x.shape[:2] + (24,)))",
        ATTENTION,
    ),
    "attention, softmax": block(QKV, HEADS + SCORES + "y = a.softmax(-1) @ v\n" + MERGE, ATTENTION),
    "attention, causal": block(
        QKV,
        HEADS + SCORES + "mask = torch.ones(t, t).triu(1).bool()\n"
        'a = a.masked_fill(mask, float("-inf"))\ny = F.softmax(a, dim=-1) @ v\n' + MERGE,
        ATTENTION,
    ),
    "attention, tril": block(
        QKV + '\nself.register_buffer("mask", torch.ones(12, 12).tril().view(1, 1, 12, 12))',
        HEADS + SCORES + 'a = a.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))\n'
        "y = a.softmax(-1) @ v\n" + MERGE,
        ATTENTION,
    ),
    "attention, turned": block(
        QKV + '\nself.register_buffer("angles", torch.arange(12.0)[:, None] * 0.3)',
        HEADS + "cos, sin = self.angles[:t].cos(), self.angles[:t].sin()\n"
        "q, k = q * cos + turned(q) * sin, k * cos + turned(k) * sin\n" + SDPA + MERGE,
        ATTENTION,
        top="def turned(z):\n    a, b = z.chunk(2, -1)\n    return torch.cat([-b, a], -1)\n\n",
    ),
    "attention, normed heads": block(
        QKV + "\nself.norm = nn.LayerNorm(2)",
        HEADS + "q, k = self.norm(q), self.norm(k)\n" + SDPA + MERGE,
        ATTENTION,
    ),
    "attention, alibi": block(
        QKV + '\nself.register_buffer("slopes", torch.linspace(0.1, 1, 12).view(12, 1, 1))',
        HEADS + SCORES + "a = a + self.slopes * torch.arange(t)\ny = a.softmax(-1) @ v\n" + MERGE,
        ATTENTION + "; . slopes 0",
    ),
    "attention, a bias of each head": block(
        QKV + "\nself.table = nn.Parameter(torch.randn(12, 12, 12))",
        HEADS + SCORES + "a = a + self.table[:, :t, :t]\ny = a.softmax(-1) @ v\n" + MERGE,
        ATTENTION + "; . table 0",
    ),
    "attention, einsum": block(
        QKV,
        HEADS + 'a = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(self.size)\n'
        'y = torch.einsum("bhij,bhjd->bhid", a.softmax(-1), v)\n'
        "return self.o(y.permute(0, 2, 1, 3).contiguous().view(b, t, self.heads * self.size))",
        ATTENTION,
    ),
    "attention, heads by size": block(
        QKV.replace("12, 2", "6, 4"),
        "b, t, _ = x.shape\nq, k, v = (heads_of(f(x), self.size) for f in (self.q, self.k, self.v))\n"
        + SDPA + MERGE,
        ATTENTION,
        top="def heads_of(z, size):\n"
        "    return z.view(*z.shape[:2], z.shape[-1] // size, size).transpose(1, 2)\n\n",
    ),
    "merged by in_features": block(
        QKV,
        HEADS + SDPA + "return self.o(y.transpose(1, 2).reshape(b, t, self.o.in_features))",
        ATTENTION,
    ),
    "glu": block(PACKED, "return self.down(F.glu(self.up(x), -1))", PACKED_SHARDS),
    "a slice, then chunks": block(
        "self.qkv, self.o = nn.Linear(8, 72), nn.Linear(24, 8)",
        "h = self.qkv(x)\nq, (k, v) = h[..., :24], h[..., 24:].chunk(2, -1)\n"
        "return self.o(q * k.tanh() * v)",
        ONE_SHARDS,
    ),
    "one head of keys for all": block(
        "self.pre, self.attend = nn.Linear(8, 8), Attend()",
        "return self.attend(self.pre(x))",
        "attend.q weight,bias 0; attend.o weight 1",
        top="class Attend(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.q, self.k, self.v = nn.Linear(8, 24), nn.Linear(8, 2), nn.Linear(8, 2)\n"
        "        self.o = nn.Linear(24, 8)\n\n    def forward(self, x):\n"
        "        q = self.q(x).unflatten(-1, (-1, 2)).transpose(1, 2)\n"
        "        a = (q @ self.k(x).unsqueeze(1).mT).softmax(-1)\n"
        "        return self.o((a @ self.v(x).unsqueeze(1)).transpose(1, 2).flatten(2))\n\n",
    ),
    "parameters of layers": block(
        UP_DOWN + "\nself.pre = nn.Linear(8, 8)",
        "h = F.linear(self.pre(x), self.up.weight, self.up.bias)\n"
        "return F.linear(h.relu(), self.down.weight, bias=self.down.bias)",
        FEED_FORWARD,
    ),
    "forward called by name": block(
        UP_DOWN, "return self.down.forward(self.up.forward(x).relu())", FEED_FORWARD
    ),
    "module called by forward": block(
        "self.pre, self.ff = nn.Linear(8, 8), FeedForward()",
        "return x + self.ff.forward(self.pre(x))",
        "ff.{gate,up} weight 0; ff.down weight 1",
        's["inner.ff"].sync("bwd_post", "all_reduce")\ns.infer_sync()',
        top="class FeedForward(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.gate, self.up = nn.Linear(8, 24, bias=False), nn.Linear(8, 24, bias=False)\n"
        "        self.down = nn.Linear(24, 8)\n\n    def forward(self, x):\n"
        "        return self.down(F.silu(self.gate(x)) * self.up(x))\n\n",
    ),
    "sizes by name": block(
        PACKED,
        "h, g = self.up(x).split(split_size=[24, 24], dim=-1)\n"
        "return self.down((h.sigmoid() * g).reshape(shape=(*x.shape[:-1], 24)))",
        PACKED_SHARDS,
    ),
    "one of two of a class": block(
        "self.e, self.one, self.other = nn.Embedding(24, 8), Twin(), Twin()",
        "ids = (x[..., 0] * 100).long().abs() % 24\nx = x + self.e(ids)\n"
        "return self.other(x + self.one(x))",
        "e weight 0; other.up weight,bias 0 2; other.down weight 1",
        top=f"class Twin(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        {PACKED}\n\n    def forward(self, x):\n        g, u = self.up(x).split(24, -1)\n"
        "        return self.down(F.silu(g) * u)\n\n",
    ),
    "packed attention": block(
        ONE,
        "b, t, _ = x.shape\nq, k, v = self.qkv(x).chunk(3, -1)\n"
        "q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in (q, k, v))\n" + SDPA + MERGE,
        ONE_SHARDS,
    ),
    "packed attention, split": block(
        ONE,
        "b, t, _ = x.shape\nq, k, v = self.qkv(x).split(self.heads * self.size, dim=2)\n"
        "q, k, v = (z.unflatten(-1, (-1, self.size)).transpose(1, 2) for z in (q, k, v))\n" + SDPA + MERGE,
        ONE_SHARDS,
    ),
    "packed attention, permuted": block(
        ONE,
        "b, t, _ = x.shape\nqkv = self.qkv(x).reshape(b, t, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)\n"
        "q, k, v = qkv[0], qkv[1], qkv[2]\n" + SDPA + MERGE,
        ONE_SHARDS,
    ),
    "few heads, repeat_interleave": block(
        FEW,
        FEW_HEADS + "n = self.heads // self.kv\n"
        "k, v = k.repeat_interleave(n, 1), v.repeat_interleave(n, 1)\n" + SDPA + MERGE,
        ATTENTION,
    ),
    "few heads, expanded": block(
        FEW,
        FEW_HEADS + "n = self.heads // self.kv\n"
        "k = k[:, :, None].expand(b, self.kv, n, t, self.size).reshape(b, self.heads, t, self.size)\n"
        "v = v[:, :, None].expand(b, self.kv, n, t, self.size).reshape(b, self.heads, t, self.size)\n"
        + SDPA + MERGE,
        ATTENTION,
    ),
    "few heads, by sdpa": block(
        FEW, FEW_HEADS + "y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)\n" + MERGE, ATTENTION
    ),
    "experts": block(
        "self.router = nn.Linear(8, 4)\nself.experts = nn.ModuleList(Expert() for _ in range(4))",
        "w = self.router(x).softmax(-1)\n"
        "return sum(w[..., j : j + 1] * e(x) for j, e in enumerate(self.experts))",
        "experts.*.up weight,bias 0; experts.*.down weight 1",
        top=f"class Expert(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        {UP_DOWN}\n\n    def forward(self, x):\n        return self.down(F.silu(self.up(x)))\n\n",
    ),
    "convolutions": block(
        "self.up, self.down = nn.Conv1d(8, 24, 3, padding=1), nn.Conv1d(24, 8, 1)\n"
        "self.norm = nn.BatchNorm1d(24)\nself.mid = nn.Conv1d(24, 24, 3, padding=1, groups=24)",
        "return self.down(self.mid(self.norm(self.up(x.mT)).relu())).mT",
        "up weight,bias 0; norm weight,bias,running_mean,running_var 0; mid weight,bias 0; down weight 1",
    ),
    "a norm of what is split": block(
        UP_DOWN + "\nself.norm = nn.LayerNorm(24)",
        "return self.down(self.norm(self.up(x)).relu())",
        FEED_FORWARD + "; norm weight,bias 0",
    ),
    "bare parameters": block(
        "self.a, self.b = nn.Parameter(torch.randn(8, 24)), nn.Parameter(torch.randn(24, 8))",
        "return torch.relu(x @ self.a) @ self.b",
        ". a 1; . b 0",
    ),
    "relative positions, picked out of a table that is interpolated": block(
        QKV + "\nself.table = nn.Parameter(torch.randn(5, 2))",
        HEADS + SCORES + "y = at(self.table, q, a, t).softmax(-1) @ v\n" + MERGE,
        ATTENTION,
        top="def at(table, q, a, t):\n"
        "    places = torch.arange(t)[:, None] - torch.arange(t)[None] + t - 1\n"
        "    table = F.interpolate(table.T[None], size=2 * t - 1, mode='linear')[0].T\n"
        "    return a + torch.einsum('bhqd,qkd->bhqk', q, table[places])\n\n\n",
    ),
    "a teacher that starts as the student": block(
        "self.student, self.teacher = Part(), Part()\n"
        "self.teacher.load_state_dict(self.student.state_dict())",
        "return self.student(x) - self.teacher(x).detach()",
        "{student,teacher}.up weight,bias 0; {student,teacher}.down weight 1",
        top=f"class Part(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        {UP_DOWN}\n\n    def forward(self, x):\n        return self.down(F.silu(self.up(x)))\n\n",
    ),
    "an embedding by columns": block(
        "self.e, self.down = nn.Embedding(24, 24), nn.Linear(24, 8)",
        "ids = (x[..., 0] * 100).long().abs() % 24\nreturn self.down(self.e(ids).tanh())",
        "e weight 1; down weight 1",
    ),
    "an embedding by rows": block(
        "self.e, self.down = nn.Embedding(24, 8), nn.Linear(8, 8)",
        "ids = (x[..., 0] * 100).long().abs() % 24\nreturn self.down(self.e(ids).tanh())",
        "e weight 0",
    ),
    "a queue of keys": block(
        f"{UP_DOWN}\nself.register_buffer('queue', torch.randn(8, 5))\n"
        "self.register_buffer('place', torch.zeros(1, dtype=torch.long))",
        "y = self.down(self.up(x).tanh())\nk = F.normalize(y.mean(1), dim=-1)\n"
        "with torch.no_grad():\n    place = int(self.place)\n    self.queue[:, place] = k[0]\n"
        "    self.place[0] = (place + 1) % 5\n"
        "return y + (k @ self.queue.clone()).logsumexp(-1)[:, None, None]",
        FEED_FORWARD,
    ),
    "slices of the sequence": block(
        UP_DOWN + "\nself.pre, self.norm, self.post = nn.Linear(8, 8), nn.LayerNorm(8), nn.LayerNorm(8)",
        "x = self.pre(x)\nx = x + self.down(F.gelu(self.up(self.norm(x))))\nreturn self.post(x)",
        FEED_FORWARD,
        's["inner.pre"].sync("fwd_post", "scatter", axis=1)\n'
        's["inner.up"].sync("fwd_pre", "all_gather", axis=1)\n'
        's["inner.down"].sync("fwd_post", "reduce_scatter", axis=1)\n'
        's["inner.post"].sync("fwd_post", "all_gather", axis=1)',
    ),
    "sizes and axes by keyword": block(
        UP_DOWN,
        "h = self.up(x).permute(dims=(0, 2, 1)).mT.unflatten(dim=-1, sizes=(12, 2)).flatten(2)\n"
        "h = h.unsqueeze(0).expand(size=(2, 3, 12, 24)).sum(0)\n"
        "return self.down(torch.broadcast_to(h[:, :1], (3, 12, 24)) + h)",
        FEED_FORWARD,
    ),
    "packed rows of two equal axes": block(
        PACKED,
        "h = self.up(x.repeat(1, 4, 1)).transpose(dim0=1, dim1=2)\n"
        "a, b = h.chunk(2, dim=1)\nreturn self.down((a * b).mT[:, :12])",
        PACKED_SHARDS,
    ),
    "the whole output": block(
        UP_DOWN,
        "return self.up(x)",
        "up weight,bias 0",
        's["inner.up"].sync("bwd_post", "all_reduce")\ns["inner.up"].sync("fwd_post", "all_gather", axis=-1)',
    ),
}  # fmt: skip
