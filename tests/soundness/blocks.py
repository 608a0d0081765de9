"""Networks of ordinary blocks, each spelled in many ways, with schedules that are plausible."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.soundness.ops import HEADER, indented, schedule_text
from tests.soundness.pairs import Pair

DIM, INNER, HEADS, TOKENS = 8, 24, 12, 12
ACTIVATIONS = (
    "torch.relu({})", "F.gelu({})", "F.silu({})", "{}.tanh()", "self.act({})", "F.gelu({}, approximate='tanh')",
    "F.relu({}).square()", "{0} * torch.sigmoid(1.702 * {0})",
    "0.5 * {0} * (1.0 + torch.erf({0} / math.sqrt(2.0)))", "F.leaky_relu({}, 0.1)",
)  # fmt: skip


@dataclass
class Block:
    """A module's class, and what splits it.

    Attributes:
        name: Of the class.
        init: Statements of its `__init__`.
        body: Statements of its `forward`, of `x`.
        shards: Lines of the schedule, with `{s}` for the selection.
        inputs: Layers whose input gradients are added up, where that is said.
        outputs: Layers that give partial sums.
        methods: Further methods.
        top: What stands before it.
        buffers: Buffers and parameters of its own that may be split: name and axis.
    """

    name: str
    init: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    shards: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)
    top: list[str] = field(default_factory=list)
    channels: bool = False

    def text(self) -> str:
        """The class."""
        parts = [*self.top, f"class {self.name}(nn.Module):", "    def __init__(self):"]
        parts += ["        super().__init__()", indented(self.init, 8), ""]
        parts += ["    def forward(self, x):", indented(self.body, 8)]
        for method in self.methods:
            parts += ["", indented(method.split("\n"), 4)]
        return "\n".join(parts) + "\n"


def mlp(rng: random.Random, name: str) -> Block:
    """Two linear layers, or three, or one of them packed."""
    made = Block(name)
    bias = rng.choice(["", "", ", bias=False"])
    act = rng.choice(ACTIVATIONS)
    if "self.act" in act:
        made.init.append(
            f"self.act = {rng.choice(['nn.GELU()', 'nn.SiLU()', 'F.silu', 'nn.ReLU(inplace=True)'])}"
        )
    names = "weight" if bias else ["weight", "bias"]
    kind = rng.choice(["plain", "plain", "gated", "packed", "packed", "sequential", "functional"])
    width = rng.choice([str(INNER), "self.width", f"3 * {DIM}"])
    if width == "self.width":
        made.init.append(f"self.width = {INNER}")
    down = f"self.down = nn.Linear({width}, {DIM}{rng.choice([bias, bias, ', bias=False'])})"
    if kind == "sequential":
        made.init.append(
            f"self.net = nn.Sequential(nn.Linear({DIM}, {width}{bias}), nn.GELU(), "
            f"nn.Dropout(0.0), nn.Linear({width}, {DIM}{bias}))"
        )
        made.body = ["return self.net(x)"]
        made.shards = [f'{{s}}["net.0"].shard({names!r}, 0)', '{s}["net.3"].shard("weight", 1)']
        made.inputs, made.outputs = ["net.0"], ["net.3"]
        return made
    made.outputs = ["down"]
    if kind in ("plain", "functional"):
        made.init += [f"self.up = nn.Linear({DIM}, {width}{bias})", down]
        made.shards = [f'{{s}}["up"].shard({names!r}, 0)']
        made.inputs = ["up"]
        if kind == "functional":
            made.body = ["h = F.linear(x, self.up.weight, self.up.bias)", f"h = {act.format('h')}",
                         "return F.linear(h, self.down.weight, self.down.bias)"]  # fmt: skip
        else:
            made.body = rng.choice([
                [f"return self.down({act.format('self.up(x)')})"],
                ["h = self.up(x)", f"h = {act.format('h')}", "h = F.dropout(h, 0.0, self.training)",
                 "return self.down(h)"],
                ["shape = x.shape", "x = x.view(-1, shape[-1])", "h = self.up(x)",
                 f"h = {act.format('h')}", "return self.down(h).view(*shape)"],
                ["h = self.up(x)", f"h = {act.format('h')}", "out = self.down(h)", "return x + out"],
            ])  # fmt: skip
    elif kind == "gated":
        made.init += [f"self.gate = nn.Linear({DIM}, {width}{bias})",
                      f"self.up = nn.Linear({DIM}, {width}{bias})", down]  # fmt: skip
        made.shards = [f'{{s}}["{{gate,up}}"].shard({names!r}, 0)']
        made.inputs = ["gate", "up"]
        made.body = rng.choice([
            [f"return self.down({act.format('self.gate(x)')} * self.up(x))"],
            ["g, u = self.gate(x), self.up(x)", f"h = {act.format('g')}", "h = h * u",
             "return self.down(h)"],
            ["g, u = (layer(x) for layer in (self.gate, self.up))", f"return self.down({act.format('g')} * u)"],
        ])  # fmt: skip
    else:
        made.init += [f"self.up = nn.Linear({DIM}, 2 * {width}{bias})", down]
        made.shards = [f'{{s}}["up"].shard({names!r}, 0, parts=2)']
        made.inputs = ["up"]
        ways = [
            "g, u = self.up(x).chunk(2, -1)",
            "g, u = self.up(x).chunk(2, dim=-1)",
            f"g, u = self.up(x).split({width}, -1)",
            f"g, u = self.up(x).split([{width}, {width}], dim=-1)",
            "h = self.up(x)\ng, u = h[..., : h.size(-1) // 2], h[..., h.size(-1) // 2 :]",
            f"h = self.up(x)\ng, u = h[..., :{width}], h[..., {width}:]",
            "g, u = self.up(x).unflatten(-1, (2, -1)).unbind(-2)",
            f"g, u = self.up(x).view(*x.shape[:-1], 2, {width}).unbind(-2)",
            "g, u = torch.tensor_split(self.up(x), 2, dim=-1)",
            "h = self.up(x).reshape(x.size(0), x.size(1), 2, -1)\ng, u = h[:, :, 0], h[:, :, 1]",
        ]
        if rng.random() < 0.15:  # interleaved: not packed
            made.shards = [f'{{s}}["up"].shard({names!r}, 0)']
            ways = ["h = self.up(x)\ng, u = h[..., ::2], h[..., 1::2]",
                    "g, u = self.up(x).unflatten(-1, (-1, 2)).unbind(-1)"]  # fmt: skip
        made.body = [*rng.choice(ways).split("\n"), f"return self.down({act.format('g')} * u)"]
        if rng.random() < 0.1:
            made.body = ["return self.down(F.glu(self.up(x), -1))"]
    made.shards.append('{s}["down"].shard("weight", 1)')
    return made


def attention(rng: random.Random, name: str) -> Block:
    """Attention: of one packed projection or three, with fewer heads of keys, masks, biases."""
    made = Block(name)
    all_heads, one = rng.choice([(12, 2), (12, 2), (12, 2), (6, 4), (8, 3), (4, 6), (24, 1)])
    fewer = [n for n in (12, 6, 4, 2, 1) if n < all_heads and all_heads % n == 0]
    kv = rng.choice([all_heads] * 3 + fewer)
    packed = rng.random() < 0.4
    bias = rng.choice(["", ", bias=False"])
    names = "weight" if bias else ["weight", "bias"]
    sizes = rng.choice([
        [f"self.heads, self.kv, self.size = {all_heads}, {kv}, {one}"],
        [f"self.heads = {all_heads}", f"self.kv = {kv}", f"self.size = {INNER} // self.heads"],
        [f"self.heads = {all_heads}", f"self.kv = {kv}", f"self.size = {one}",
         "self.scale = self.size ** -0.5"],
        [f"self.size = {one}", f"self.heads = {INNER} // self.size", f"self.kv = {kv}"],
    ])  # fmt: skip
    heads, few, size = "self.heads", "self.kv", "self.size"
    if rng.random() < 0.15:  # read from a configuration
        made.top = ["class Config:", f"    heads, kv, size = {all_heads}, {kv}, {one}", "", ""]
        sizes = rng.choice([
            ["self.config = Config()"],
            ["self.config = Config()", "self.heads = self.config.heads", "self.kv = self.config.kv",
             "self.size = self.config.size"],
        ])  # fmt: skip
        if len(sizes) == 1:
            heads, few, size = "self.config.heads", "self.config.kv", "self.config.size"
    layers = []
    if packed:
        layers.append(f"self.qkv = nn.Linear({DIM}, {INNER + 2 * kv * one}{bias})")
        parts = 3 if kv == all_heads else [INNER, kv * one, kv * one]
        made.shards.append(f'{{s}}["qkv"].shard({names!r}, 0, parts={parts!r})')
        made.inputs = ["qkv"]
    else:
        layers += [
            f"self.{n} = nn.Linear({DIM}, {INNER if n == 'q' else kv * one}{bias})" for n in "qkv"
        ]
        made.shards.append(f'{{s}}["{{q,k,v}}"].shard({names!r}, 0)')
        made.inputs = list("qkv")
    layers.append(f"self.o = nn.Linear({INNER}, {DIM}{rng.choice(['', bias])})")
    made.outputs = ["o"]
    made.shards.append('{s}["o"].shard("weight", 1)')
    made.init = [*layers, *sizes] if rng.random() < 0.3 else [*sizes, *layers]
    body = rng.choice([["b, t, _ = x.shape"], ["b, t = x.shape[:2]"], ["b, t, d = x.size()"],
                       ["b, t = x.size(0), x.size(1)"]])[:]  # fmt: skip
    if packed and kv == all_heads:
        body += rng.choice([
            ["q, k, v = self.qkv(x).chunk(3, -1)", "SEPARATE"],
            [f"q, k, v = self.qkv(x).split({heads} * {size}, dim=-1)", "SEPARATE"],
            [f"q, k, v = self.qkv(x).split({INNER}, dim=2)", "SEPARATE"],
            [f"q, k, v = self.qkv(x).view(b, t, 3, {heads}, {size}).unbind(2)",
             "q, k, v = (z.transpose(1, 2) for z in (q, k, v))"],
            [f"qkv = self.qkv(x).reshape(b, t, 3, {heads}, {size}).permute(2, 0, 3, 1, 4)",
             "q, k, v = qkv[0], qkv[1], qkv[2]"],
            [f"qkv = self.qkv(x).view(b, t, 3, {heads}, -1).permute(2, 0, 3, 1, 4)",
             "q, k, v = qkv.unbind(0)"],
            [f"q, k, v = self.qkv(x).unflatten(-1, (3, {heads}, {size})).permute(2, 0, 3, 1, 4)"],
            [f"q, k, v = self.qkv(x).unflatten(-1, (3, -1, {size})).permute(2, 0, 3, 1, 4).unbind()"],
        ])  # fmt: skip
    elif packed:
        body += rng.choice([
            [f"q, k, v = self.qkv(x).split([{heads} * {size}, {few} * {size}, {few} * {size}], -1)", "SEPARATE"],
            [f"q, k, v = self.qkv(x).split(({INNER}, {kv * one}, {kv * one}), dim=-1)", "SEPARATE"],
            ["qkv = self.qkv(x)", f"q = qkv[..., : {heads} * {size}]",
             f"k, v = qkv[..., {heads} * {size} :].chunk(2, -1)", "SEPARATE"],
        ])  # fmt: skip
    else:
        body += rng.choice([
            ["q, k, v = self.q(x), self.k(x), self.v(x)", "SEPARATE"],
            ["q, k, v = [layer(x) for layer in (self.q, self.k, self.v)]", "SEPARATE"],
            [f"q = self.q(x).view(b, t, {heads}, {size}).transpose(1, 2)",
             f"k = self.k(x).view(b, t, {few}, {size}).transpose(1, 2)",
             f"v = self.v(x).view(b, t, {few}, {size}).transpose(1, 2)"],
            ["q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))"],
        ])  # fmt: skip
        if "self.split" in body[-1]:
            made.methods.append(
                f"def split(self, z):\n    return z.view(z.shape[0], -1, z.shape[-1] // {size}, {size}).transpose(1, 2)"
            )
    if body[-1] == "SEPARATE":
        body.pop()
        way = rng.choice([
            ".view(b, t, {}, {}).transpose(1, 2)", ".view(b, t, {}, -1).transpose(1, 2)",
            ".view(b, t, -1, {1}).transpose(1, 2)", ".unflatten(-1, ({}, -1)).transpose(1, 2)",
            ".unflatten(2, (-1, {1})).transpose(1, 2)", ".reshape(b, t, {}, {}).permute(0, 2, 1, 3)",
            ".view(*x.shape[:-1], {}, {}).movedim(2, 1)", ".view(b, -1, {}, {}).transpose(1, 2)",
        ])  # fmt: skip
        body += [f"{n} = {n}{way.format(heads if n == 'q' else few, size)}" for n in "qkv"]
    extra = rng.random()
    if extra < 0.12:
        made.init += [f"self.q_norm, self.k_norm = nn.LayerNorm({one}), nn.LayerNorm({one})"]
        body += ["q, k = self.q_norm(q), self.k_norm(k)"]
    elif extra < 0.24 and one % 2 == 0:
        made.init.append(f'self.register_buffer("angles", torch.arange({TOKENS}.0)[:, None] * 0.3)')
        made.top += [
            "def turned(z):",
            "    a, b = z.chunk(2, -1)",
            "    return torch.cat([-b, a], -1)",
            "",
            "",
        ]
        body += ["cos, sin = self.angles[:t].cos(), self.angles[:t].sin()",
                 "q, k = q * cos + turned(q) * sin, k * cos + turned(k) * sin"]  # fmt: skip
    if kv != all_heads:
        body += rng.choice([
            [f"n = {heads} // {few}", "k, v = k.repeat_interleave(n, 1), v.repeat_interleave(n, 1)"],
            [f"n = {heads} // {few}", "k, v = k.repeat_interleave(n, dim=1), v.repeat_interleave(n, dim=1)"],
            [f"k, v = (z.repeat_interleave({all_heads // kv}, 1) for z in (k, v))"],
            [f"n = {heads} // {few}",
             f"k = k[:, :, None].expand(b, {few}, n, t, {size}).reshape(b, {heads}, t, {size})",
             f"v = v[:, :, None].expand(b, {few}, n, t, {size}).reshape(b, {heads}, t, {size})"],
            [f"n = {heads} // {few}", "k = k.unsqueeze(2).expand(-1, -1, n, -1, -1).flatten(1, 2)",
             "v = v.unsqueeze(2).expand(-1, -1, n, -1, -1).flatten(1, 2)"],
            [f"n = {heads} // {few}", "k, v = k.repeat(1, n, 1, 1), v.repeat(1, n, 1, 1)"],
            [f"q = q.unflatten(1, ({few}, -1)).flatten(1, 2)",
             f"k, v = (torch.repeat_interleave(z, {heads} // z.size(1), dim=1) for z in (k, v))"],
            ["GQA"],
        ])  # fmt: skip
    gqa = body[-1] == "GQA"
    if gqa:
        body.pop()
    mask = rng.choice(["", "", "causal", "buffer", "made", "alibi", "bias"])
    scale = rng.choice(["{} ** -0.5", "1 / math.sqrt({})"]).format(size)
    if "self.scale" in str(sizes):
        scale = "self.scale"
    elif rng.random() < 0.2:
        scale = rng.choice(["q.size(-1) ** -0.5", "1 / math.sqrt(k.shape[-1])"])
    added = ""
    if mask == "buffer":
        made.init.append(
            f'self.register_buffer("mask", torch.tril(torch.ones({TOKENS}, {TOKENS})).view(1, 1, {TOKENS}, {TOKENS}))'
        )
    elif mask == "alibi":
        made.init.append(
            f'self.register_buffer("slopes", torch.linspace(0.1, 1, {all_heads}).view({all_heads}, 1, 1))'
        )
        made.shards.append('{s}.shard("slopes", 0)')
        body += ["alibi = self.slopes * torch.arange(t)"]
        added = "alibi"
    elif mask == "bias":
        made.init.append(f"self.table = nn.Parameter(torch.randn({all_heads}, {TOKENS}, {TOKENS}))")
        made.shards.append('{s}.shard("table", 0)')
        added = "self.table[:, :t, :t]"
    if gqa or rng.random() < 0.4:
        given = {"causal": ", is_causal=True", "buffer": ", attn_mask=self.mask[:, :, :t, :t] > 0",
                 "made": ", attn_mask=torch.ones(t, t).tril().bool()"}.get(mask, "")  # fmt: skip
        given = f", attn_mask={added}" if added else given
        body.append(
            f"y = F.scaled_dot_product_attention(q, k, v{given}{', enable_gqa=True' if gqa else ''})"
        )
    else:
        scores = rng.choice([
            f"(q @ k.transpose(-2, -1)) * ({scale})", f"torch.matmul(q, k.mT) * ({scale})",
            f'torch.einsum("bhid,bhjd->bhij", q, k) * ({scale})', f"(q * ({scale})) @ k.transpose(2, 3)",
        ])  # fmt: skip
        body.append(f"a = {scores}")
        if added:
            body.append(f"a = a + {added}")
        if mask == "buffer":
            body.append('a = a.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))')
        if mask in ("causal", "made"):
            body.append(rng.choice([
                'a = a + torch.full((t, t), float("-inf")).triu(1)',
                "a = a.masked_fill(torch.ones(t, t).triu(1).bool(), -1e9)",
                "a = torch.where(torch.arange(t)[:, None] >= torch.arange(t), a, torch.tensor(-1e9))",
            ]))  # fmt: skip
        body.append(
            rng.choice(
                ["a = a.softmax(-1)", "a = F.softmax(a, dim=-1)", "a = torch.softmax(a, dim=-1)"]
            )
        )
        body.append(
            rng.choice(
                ["y = a @ v", "y = torch.matmul(a, v)", 'y = torch.einsum("bhij,bhjd->bhid", a, v)']
            )
        )
    body.append(rng.choice([
        "return self.o(y.transpose(1, 2).flatten(2))",
        "return self.o(y.transpose(1, 2).reshape(b, t, -1))",
        f"return self.o(y.transpose(1, 2).contiguous().view(b, t, {heads} * {size}))",
        f"return self.o(y.transpose(1, 2).reshape(b, t, {INNER}))",
        "y = y.permute(0, 2, 1, 3)\ny = y.reshape(*y.shape[:2], -1)\nreturn self.o(y)",
        f'return self.o(torch.einsum("bhtd->bthd", y).reshape(b, t, {heads} * {size}))',
        "return self.o(y.transpose(1, 2).reshape(b, t, self.o.in_features))",
    ]))  # fmt: skip
    made.body = [line for text in body for line in text.split("\n")]
    return made


def experts(rng: random.Random, name: str) -> Block:
    """Experts, mixed by a router."""
    made = Block(name)
    made.top = [
        f"class {name}Expert(nn.Module):", "    def __init__(self):", "        super().__init__()",
        f"        self.up, self.down = nn.Linear({DIM}, {INNER}), nn.Linear({INNER}, {DIM})", "",
        "    def forward(self, x):", "        return self.down(F.silu(self.up(x)))", "", "",
    ]  # fmt: skip
    made.init = [f"self.router = nn.Linear({DIM}, 4)",
                 f"self.experts = nn.ModuleList({name}Expert() for _ in range(4))"]  # fmt: skip
    made.body = rng.choice([
        ["w = self.router(x).softmax(-1)",
         "return sum(w[..., j : j + 1] * e(x) for j, e in enumerate(self.experts))"],
        ["w = self.router(x).softmax(-1)", "out = torch.zeros_like(x)",
         "for j, expert in enumerate(self.experts):", "    out = out + w[..., j, None] * expert(x)",
         "return out"],
        ["w = self.router(x).softmax(-1)",
         "out = torch.stack([e(x) for e in self.experts], -2)",
         "return (out * w.unsqueeze(-1)).sum(-2)"],
        ["flat = x.reshape(-1, x.size(-1))", "w, chosen = self.router(flat).softmax(-1).topk(2, -1)",
         "out = torch.zeros_like(flat)", "for j, expert in enumerate(self.experts):",
         "    rows, k = torch.where(chosen == j)",
         "    out.index_add_(0, rows, expert(flat[rows]) * w[rows, k, None])",
         "return out.view_as(x)"],
        ["w = self.router(x).softmax(-1)", "best = w.argmax(-1)", "out = torch.zeros_like(x)",
         "for j, expert in enumerate(self.experts):", "    out = torch.where((best == j)[..., None], expert(x), out)",
         "return out * w.amax(-1, keepdim=True)"],
    ])[:]  # fmt: skip
    made.shards = ['{s}["experts.*.up"].shard(["weight", "bias"], 0)',
                   '{s}["experts.*.down"].shard("weight", 1)']  # fmt: skip
    made.inputs, made.outputs = ["experts.*.up"], ["experts.*.down"]
    return made


def convolution(rng: random.Random, name: str) -> Block:
    """Convolutions, with a norm or one in groups between them."""
    made = Block(name)
    made.init = [f"self.up = nn.Conv1d({DIM}, {INNER}, 3, padding=1)"]
    made.shards = ['{s}["up"].shard(["weight", "bias"], 0)']
    made.inputs, made.outputs = ["up"], ["down"]
    body = ["h = self.up(x.transpose(1, 2))"]
    for step in rng.sample(["norm", "mid", "act", "gate"], rng.randint(0, 3)):
        if step == "norm":
            kind, names = rng.choice([
                (f"nn.BatchNorm1d({INNER})", ["weight", "bias", "running_mean", "running_var"]),
                (f"nn.GroupNorm({HEADS}, {INNER})", ["weight", "bias"]),
                (f"nn.GroupNorm(1, {INNER})", ["weight", "bias"]),
                (f"nn.InstanceNorm1d({INNER}, affine=True)", ["weight", "bias"]),
            ])  # fmt: skip
            made.init.append(f"self.norm = {kind}")
            made.shards.append(f'{{s}}["norm"].shard({names!r}, 0)')
            body.append("h = self.norm(h)")
        elif step == "mid":
            groups = rng.choice([INNER, HEADS, 4, 2])
            made.init.append(
                f"self.mid = nn.Conv1d({INNER}, {INNER}, 3, padding=1, groups={groups})"
            )
            made.shards.append('{s}["mid"].shard(["weight", "bias"], 0)')
            body.append("h = self.mid(h)")
        elif step == "act":
            body.append(f"h = {rng.choice(ACTIVATIONS[:4]).format('h')}")
        else:
            made.init.append(f"self.gate = nn.Parameter(torch.randn({INNER}, 1))")
            made.shards.append('{s}.shard("gate", 0)')
            body.append(
                rng.choice(
                    ["h = h * self.gate", "h = h * self.gate.sigmoid()", "h = h + self.gate"]
                )
            )
    made.init.append(f"self.down = nn.Conv1d({INNER}, {DIM}, 1{rng.choice(['', ', bias=False'])})")
    made.shards.append('{s}["down"].shard("weight", 1)')
    made.body = [*body, "return self.down(h).transpose(1, 2)"]
    return made


def normed(rng: random.Random, name: str) -> Block:
    """A feed-forward block with a norm of the split features."""
    made = Block(name)
    kind = rng.choice(["layer", "rms", "own"])
    made.init = [f"self.up = nn.Linear({DIM}, {INNER})"]
    if kind == "own":
        made.init.append(f"self.norm = {name}Norm({INNER})")
        mean = rng.choice(["x.pow(2).mean(-1, keepdim=True)", "(x * x).mean(dim=-1, keepdim=True)",
                           "torch.mean(x**2, -1, True)"])  # fmt: skip
        end = rng.choice(["self.weight * x * torch.rsqrt(v + 1e-6)", "x / torch.sqrt(v + 1e-6) * self.weight",
                          "(x * (v + 1e-6).rsqrt()) * self.weight"])  # fmt: skip
        made.top = [
            f"class {name}Norm(nn.Module):", "    def __init__(self, width):",
            "        super().__init__()", "        self.weight = nn.Parameter(torch.ones(width))", "",
            "    def forward(self, x):", f"        v = {mean}", f"        return {end}", "", "",
        ]  # fmt: skip
        if rng.random() < 0.5:  # as a rule knows it: its call, and not the mean, is of parts then
            made.top[-4:-2] = [
                "        d, x = x.dtype, x.to(torch.float32)",
                "        v = x.pow(2).mean(-1, keepdim=True)",
                "        x = x * torch.rsqrt(v + 1e-6)",
                f"        return {rng.choice(['self.weight * x.to(d)', '(self.weight * x).to(d)'])}",
            ]
    else:
        made.init.append(f"self.norm = nn.{'LayerNorm' if kind == 'layer' else 'RMSNorm'}({INNER})")
    made.init.append(f"self.down = nn.Linear({INNER}, {DIM})")
    made.shards = ['{s}["up"].shard(["weight", "bias"], 0)', '{s}["down"].shard("weight", 1)',
                   f'{{s}}["norm"].shard({["weight", "bias"] if kind == "layer" else "weight"!r}, 0)']  # fmt: skip
    made.inputs, made.outputs = ["up"], ["down"]
    made.body = ["return self.down(self.norm(self.up(x)).relu())"]
    return made


def crossed(rng: random.Random, name: str) -> Block:
    """Attention of slices of the input to the rest of it: queries of one value, keys of another."""
    made = Block(name)
    made.init = ["self.heads, self.size = 12, 2", f"self.norm = nn.LayerNorm({DIM})",
                 f"self.q, self.k = nn.Linear({DIM}, {INNER}), nn.Linear({DIM}, {INNER})",
                 f"self.v, self.o = nn.Linear({DIM}, {INNER}), nn.Linear({INNER}, {DIM})"]  # fmt: skip
    other = rng.choice(
        [
            "self.norm(x)",
            "x.flip(1)",
            "x[:, :6]",
            "torch.cat([x, x.tanh()], 1)",
            "x.mean(1, keepdim=True)",
        ]
    )
    inner = rng.choice(["x", "x", "x.tanh()", "self.norm(x)"])
    view = rng.choice([".view(b, -1, self.heads, self.size).transpose(1, 2)",
                       ".unflatten(-1, (self.heads, -1)).transpose(1, 2)"])  # fmt: skip
    made.body = [f"b, z = x.size(0), {other}", f"q = self.q({inner}){view}", f"k = self.k(z){view}",
                 f"v = self.v(z){view}", "y = F.scaled_dot_product_attention(q, k, v)",
                 "return self.o(y.transpose(1, 2).flatten(2))"]  # fmt: skip
    made.shards = ['{s}["{q,k,v}"].shard(["weight", "bias"], 0)', '{s}["o"].shard("weight", 1)']
    made.inputs, made.outputs = ["q", "k", "v"], ["o"]
    return made


KINDS = {crossed: 1, mlp: 3, attention: 4, experts: 1, convolution: 1, normed: 1}


@dataclass
class Net:
    """A network with its schedule, before it is written down.

    Attributes:
        blocks: The classes of its blocks.
        init: Statements of its `__init__`.
        body: Statements of its `forward`.
        paths: Where blocks are, each with its class.
        lines: Lines of the schedule.
        arguments: Of `forward`, each with its default if it has one.
        flags: Further arguments to run it with.
    """

    blocks: list[Block]
    init: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    paths: list[tuple[str, Block]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=lambda: ["x"])
    flags: list[str] = field(default_factory=list)

    def pair(self, name: str) -> Pair:
        """As a pair."""
        ids = f"torch.arange(36).view(3, {TOKENS}) * 7 % {INNER}"
        made = {"ids": ids, "x": f"torch.randn(3, {TOKENS}, {DIM})", "labels": f"({ids}).roll(1, 1)",
                "scale": "0.5"}  # fmt: skip
        names = [a.split("=")[0] for a in self.arguments]
        given = ", ".join(f'"{n}": {made[n]}' for n in names if n in made)
        source = HEADER.replace("import functools\n", "").replace("import operator\n", "")
        for block in self.blocks:
            source += "\n\n" + block.text()
        source += f"""

class Net(nn.Module):
    def __init__(self):
        super().__init__()
{indented(self.init, 8)}

    def forward(self, {", ".join(self.arguments)}):
{indented(self.body, 8)}
"""
        return Pair(source, schedule_text(given, self.lines, self.flags), name)


def network(rng: random.Random) -> Net:
    """A network and a schedule of it."""
    net = Net([
        rng.choices(list(KINDS), list(KINDS.values()))[0](rng, f"Block{n}")
        for n in range(rng.choice([1, 1, 1, 2]))
    ])  # fmt: skip
    ids = rng.random() < 0.3
    mode = rng.choice(["infer", "infer", "explicit", "sequence"])
    if ids:
        net.arguments = ["ids"]
        net.init.append(f"self.emb = nn.Embedding({INNER}, {DIM})")
        net.body.append("x = self.emb(ids)")
        if rng.random() < 0.5 and mode != "sequence":
            net.init.append(f"self.pos = nn.Parameter(torch.randn({TOKENS}, {DIM}))")
            net.body.append("x = x + self.pos[: x.size(1)]")
    elif mode == "sequence" or rng.random() < 0.3:
        net.init.append(f"self.pre = nn.Linear({DIM}, {DIM})")
        net.body.append("x = self.pre(x)")
    placed(rng, net)
    net.init.append(f"self.final = nn.LayerNorm({DIM})")
    net.body.append("x = self.final(x)")
    head = rng.choice(["", "split", "split", "tied"]) if ids else ""
    stays = finished(rng, net, head)
    if ids and (rng.random() < 0.5 or head == "tied"):
        axis = 0 if head == "tied" else rng.choice([0, 0, 1])
        net.lines.append(f's["emb"].shard("weight", {axis})')
    if head == "split":
        net.lines.append('s["head"].shard("weight", 0)')
    for path, block in net.paths:
        net.lines += [line.replace("{s}", f's["{path}"]').replace("{{", "{").replace("}}", "}")
                      for line in block.shards]  # fmt: skip
    if mode == "infer":
        net.lines.append("s.infer_sync()")
    else:
        stated(rng, net, mode == "sequence", head, stays)
    if rng.random() < 0.15 and net.paths:
        net.lines.append(f's["{rng.choice(net.paths)[0]}"].checkpoint()')
    if rng.random() < 0.25:
        net.lines.insert(rng.choice([0, len(net.lines)]), "s.apply_all()")
    return net


def placed(rng: random.Random, net: Net) -> None:
    """Puts the blocks into the network: by name, in a list, twice, or one of them not split."""
    way = rng.choice(["named", "named", "list", "loop", "alike", "again", "sequential"])
    first = net.blocks[0]
    if way == "alike":  # two instances of one class, of which perhaps one is split
        net.blocks = [first]
        net.init += [f"self.one, self.other = {first.name}(), {first.name}()"]
        net.body += ["x = x + self.one(x)", "x = x + self.other(x)"]
        net.paths = rng.choice(
            [[("one", first), ("other", first)], [("one", first)], [("other", first)]]
        )
    elif way == "again":  # one instance, called twice
        net.blocks = [first]
        net.init.append(f"self.block = {first.name}()")
        net.body += ["x = x + self.block(x)", "x = x + self.block(x.tanh())"]
        net.paths = [("block", first)]
    elif way in ("list", "loop", "sequential"):
        names = ", ".join(f"{b.name}()" for b in net.blocks)
        net.paths = [(f"layers.{n}", b) for n, b in enumerate(net.blocks)]
        if way == "sequential":
            net.init.append(f"self.layers = nn.Sequential({names})")
            net.body.append("x = x + self.layers(x)")
        else:
            net.init.append(f"self.layers = nn.ModuleList([{names}])")
            if way == "loop":
                net.body += rng.choice([
                    ["for layer in self.layers:", "    x = x + layer(x)"],
                    ["for n, layer in enumerate(self.layers):", "    x = layer(x) + (x if n else 0)"],
                    ["for n in range(len(self.layers)):", "    x = x + self.layers[n](x)"],
                ])  # fmt: skip
            else:
                net.body += [f"x = x + self.layers[{n}](x)" for n in range(len(net.blocks))]
    else:
        net.paths = [(f"block{n}", b) for n, b in enumerate(net.blocks)]
        normed_first = rng.random() < 0.6
        for path, block in net.paths:
            net.init.append(f"self.{path} = {block.name}()")
            if normed_first:
                net.init.append(f"self.{path}_norm = nn.LayerNorm({DIM})")
            inner = f"self.{path}_norm(x)" if normed_first else "x"
            inner = f"x={inner}" if rng.random() < 0.15 else inner
            choices = [f"x = x + self.{path}({inner})"] * 3 + [f"x = self.{path}({inner})"]
            if rng.random() < 0.1 and "scale=1.0" not in net.arguments:
                net.arguments.append("scale=1.0")
                net.flags.append('{"scale": 0.0}')
                choices = [f"x = x + self.{path}({inner}) * scale"]
            elif rng.random() < 0.1:
                net.arguments.append(f"use_{path}={rng.random() < 0.5}")
                net.flags += [f'{{"use_{path}": True}}', f'{{"use_{path}": False}}']
                choices = [f"if use_{path}:\n    x = x + self.{path}({inner})"]
            net.body += rng.choice(choices).split("\n")


def finished(rng: random.Random, net: Net, head: str) -> bool:
    """Ends `forward`, by an output layer and a loss perhaps.

    Returns:
        Whether the logits may stay split where there is a loss.
    """
    if head:
        net.init.append(f"self.head = nn.Linear({DIM}, {INNER}, bias=False)")
        if head == "tied":
            net.init.append("self.head.weight = self.emb.weight")
        net.body.append("x = self.head(x)")
        if rng.random() < 0.5:
            net.arguments.append("labels=None")
            net.flags.append('{"labels": None}')
            net.body += ["loss = None", "if labels is not None:"]
            net.body += rng.choice([
                ["    loss = F.cross_entropy(x.flatten(0, 1), labels.flatten())"],
                ["    loss = F.cross_entropy(x.view(-1, x.size(-1)), labels.view(-1), ignore_index=3)"],
                [f"    loss = F.cross_entropy(x.reshape(-1, {INNER}), labels.reshape(-1), label_smoothing=0.1)"],
                ["    loss = F.cross_entropy(x[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction='sum')"],
                ["    loss = nn.CrossEntropyLoss()(x.flatten(0, 1), labels.flatten())"],
                ["    shifted = x[..., :-1, :].contiguous()", "    targets = labels[..., 1:].contiguous()",
                 "    loss = F.cross_entropy(shifted.view(-1, shifted.size(-1)), targets.view(-1))"],
                ["    loss = -x.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).mean()"],
            ])  # fmt: skip
            whole = ["return x, loss", "return loss, x", 'return {"loss": loss, "logits": x}']
            split = [
                "return x if loss is None else loss",
                "return (x,) if loss is None else (loss,)",
            ]
            stays = rng.random() < 0.5
            net.body.append(rng.choice(split if stays else whole))
            return stays
    net.body.append(
        rng.choice(["return x", "return x", "return x, x.square().mean()", 'return {"y": x}'])
    )
    return False


def stated(rng: random.Random, net: Net, sequence: bool, head: str, stays: bool) -> None:
    """The syncs one by one."""
    lines = net.lines
    for path, block in net.paths:
        whole = sequence and rng.random() < 0.6
        if whole:
            lines.append(f's["{path}"].sync("fwd_pre", "all_gather", axis=1)')
        for layer in [] if whole else block.inputs:
            selected = f's["{path}.{layer}"]'
            lines.append(f'{selected}.sync("fwd_pre", "all_gather", axis=1)' if sequence
                         else f'{selected}.sync("bwd_post", "all_reduce")')  # fmt: skip
        for layer in block.outputs:
            lines.append(f's["{path}.{layer}"].sync("fwd_post", "reduce_scatter", axis=1)' if sequence
                         else f's["{path}.{layer}"].sync("fwd_post", "all_reduce")')  # fmt: skip
    rows = 's["emb"].shard("weight", 0)' in lines
    if sequence:
        first = "pre" if "self.pre" in net.init[0] else "emb"
        lines.append(
            f's["{first}"].sync("fwd_post", "{"reduce_scatter" if rows else "scatter"}", axis=1)'
        )
        lines.append('s["final"].sync("fwd_post", "all_gather", axis=1)')
    elif rows:
        lines.append('s["emb"].sync("fwd_post", "all_reduce")')
    elif 's["emb"].shard("weight", 1)' in lines:
        lines.append('s["emb"].sync("fwd_post", "all_gather", axis=-1)')
    if head:
        if not sequence:
            lines.append('s["head"].sync("bwd_post", "all_reduce")')
        if not stays or rng.random() < 0.3:
            lines.append('s["head"].sync("fwd_post", "all_gather", axis=-1)')


def pair(rng: random.Random) -> Pair:
    """A network with a plausible schedule."""
    net = network(rng)
    return net.pair("; ".join(described(net.blocks)))


def described(blocks: Sequence[Block]) -> list[str]:
    """The lines of each block's `forward`."""
    return [" | ".join(block.body) for block in blocks]
