"""Ordinary computations in the ways that Python allows to write them.

Where `blocks` varies what is computed, this varies how it is held, called and returned: layers in
dictionaries and lists, by another name, in loops, closures and properties; sizes from configurations,
constants and properties; outputs in tuples, dataclasses and mappings; buffers that `forward` writes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.soundness.ops import HEADER, indented, schedule_text
from tests.soundness.pairs import Pair

IMPORTS = HEADER.replace("import functools\n", "import dataclasses\nimport functools\n").replace(
    "import operator\n",
    "import operator\nimport types\nimport typing\nfrom collections import OrderedDict\n",
)


@dataclass
class Part:
    """A class of the model, and what splits it.

    Attributes:
        name: Of the class.
        init: Statements of its `__init__`.
        body: Statements of its `forward`.
        shards: Lines of the schedule, with `{s}` for the path, and a dot where it is followed.
        outputs: Layers that give partial sums, for what is said of syncs.
        inputs: Layers whose input gradients are added up.
        top: What stands before the class.
        methods: Further methods and class attributes.
        base: What it inherits from.
        arguments: Of `forward`.
        aux: Whether it returns a second value.
    """

    name: str
    init: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    shards: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    top: list[str] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)
    base: str = "nn.Module"
    arguments: str = "x"
    fields: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The class."""
        lines = [*self.top, f"class {self.name}({self.base}):"]
        lines += [indented(m.split("\n"), 4) + "\n" for m in self.fields]
        lines += [
            "    def __init__(self):",
            "        super().__init__()",
            indented(self.init, 8),
            "",
        ]
        lines += [f"    def forward(self, {self.arguments}):", indented(self.body, 8)]
        for method in self.methods:
            lines += ["", indented(method.split("\n"), 4)]
        return "\n".join(lines) + "\n"


def shard(path: str, names: str, axis: int, parts: str = "") -> str:
    """A line of the schedule."""
    given = repr(names.split(",")) if "," in names else repr(names)
    return f's["{{s}}{path}"].shard({given}, {axis}{f", parts={parts}" if parts else ""})'


@dataclass(frozen=True)
class Held:
    """A linear layer as it is held: statements that make it, its expression, its path."""

    init: list[str]
    read: str
    path: str
    top: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()


def held(rng: random.Random, name: str, sizes: str, bias: bool) -> Held:
    """A linear layer, held in one of many ways."""
    more = "" if bias else ", bias=False"
    made = f"nn.Linear({sizes}{more})"
    return rng.choice([
        Held([f"self.{name} = {made}"], f"self.{name}", name),
        Held([f"self.{name} = {made}"], f"self.{name}", name),
        Held([f'self.add_module("{name}", {made})'], f"self.{name}", name),
        Held([f'setattr(self, "{name}", {made})'], f"self.{name}", name),
        Held([f"self.{name}: nn.Linear = {made}"], f"self.{name}", name),
        Held([f'self.{name}s = nn.ModuleDict({{"one": {made}}})'], f'self.{name}s["one"]', f"{name}s.one"),
        Held([f"self.{name}s = nn.ModuleList([{made}])"], f"self.{name}s[0]", f"{name}s.0"),
        Held([f"self.{name}s = nn.ModuleList()", f"self.{name}s.append({made})"], f"self.{name}s[-1]", f"{name}s.0"),
        Held([f'self.{name}s = nn.Sequential(OrderedDict([("one", {made})]))'], f"self.{name}s", f"{name}s.one"),
        Held([f"self.{name} = linear_{name}({sizes})"], f"self.{name}", name,
             (f"def linear_{name}(a, b):", f"    return nn.Linear(a, b{more})", "", "")),
        Held([f"self.{name} = linear_{name}({sizes})"], f"self.{name}", name,
             (f"linear_{name} = functools.partial(nn.Linear, bias={bias})", "", "")),
        Held([f"self.{name} = self.kind_{name}({sizes}{more})"], f"self.{name}", name,
             fields=(f"kind_{name} = nn.Linear",)),
        Held([f"made = {made}", f"self.{name} = made"], f"self.{name}", name),
        Held([f"self.{name} = nn.Linear(*({sizes}){more})"], f"self.{name}", name),
        Held([f'self.{name} = nn.Linear(**dict(in_features={sizes.split(", ")[0]}, out_features={sizes.split(", ")[1]}){more})'],
             f"self.{name}", name),
    ])  # fmt: skip


def called(rng: random.Random, layer: Held, given: str, into: str, bias: bool) -> list[str]:
    """Statements that call a layer."""
    read = layer.read
    b = f"{read}.bias" if bias else "None"
    plain = [f"{into} = {read}({given})"]
    if layer.path.endswith(".one") and not read.endswith("]"):
        return plain
    return rng.choice([
        plain, plain, plain,
        [f"layer = {read}", f"{into} = layer({given})"],
        [f"for layer in ({read},):", f"    {into} = layer({given})"],
        [f"{into} = F.linear({given}, {read}.weight, {b})"],
        [f"{into} = F.linear({given}, weight={read}.weight, bias={b})"],
        [f"{into} = {given} @ {read}.weight.T" + (f" + {b}" if bias else "")],
        [f"w = {read}.weight", f"{into} = torch.matmul({given}, w.t())" + (f" + {b}" if bias else "")],
        [f'{into} = torch.einsum("...i,oi->...o", {given}, {read}.weight)' + (f" + {b}" if bias else "")],
        ["def call(z):", f"    return {read}(z)", "", f"{into} = call({given})"],
        [f"{into} = (lambda z: {read}(z))({given})"],
        [f"call = functools.partial(F.linear, weight={read}.weight, bias={b})", f"{into} = call({given})"],
        [f"{into} = {read}.forward({given})"],
        [f"{into} = {read}(input={given})"],
        [f"({into},) = [f({given}) for f in [{read}]]"],
        [f"{into} = functools.reduce(lambda z, f: f(z), [{read}], {given})"],
        [f"{into}, = map({read}, [{given}])"],
        [f"if ({into} := {read}({given})) is None:", "    return None"],
        ["try:", f"    {into} = {read}({given})", "finally:", "    pass"],
        ["with torch.enable_grad():", f"    {into} = {read}({given})"] if rng.random() < 0.3 else plain,
        [f"{into} = checkpoint({read}, {given}, use_reentrant=False)"],
        [f"{into} = torch.func.functional_call({read}, dict({read}.named_parameters()), ({given},))"],
        [f"{into} = {read}(*[{given}])"],
        [f"{into} = torch.utils.checkpoint.checkpoint(lambda z: {read}(z), {given}, use_reentrant=False)"],
    ])  # fmt: skip


def activated(rng: random.Random, part: Part) -> str:
    """An activation, with a hole for its argument."""
    kinds: list[tuple[str, list[str], list[str], list[str]]] = [
        ("F.relu({})", [], [], []),
        ("F.gelu({})", [], [], []),
        ("ACTS['silu']({})", [], ['ACTS = {"silu": F.silu, "gelu": nn.GELU()}', "", ""], []),
        ("self.act({})", ["self.act = functools.partial(F.gelu, approximate='tanh')"], [], []),
        ("self.act({})", ["self.act = ACTS['gelu']"], ['ACTS = {"silu": F.silu, "gelu": nn.GELU()}', "", ""], []),
        ("self.act({})", ["self.act = getattr(F, 'silu')"], [], []),
        ("self.act({})", ["self.act = lambda z: z * torch.sigmoid(1.702 * z)"], [], []),
        ("self.acts['a']({})", ["self.acts = nn.ModuleDict({'a': nn.SiLU(), 'b': nn.ReLU()})"], [], []),
        ("self.act({})", ["self.act = nn.Sequential(nn.Tanh(), nn.Dropout(0.0))"], [], []),
        ("self.act({})", ["self.act = nn.Softplus(beta=2.0)"], [], []),
        ("self.act({})", [], [], ["@property\ndef act(self):\n    return F.silu"]),
        ("self.act({})", [], [], ["@staticmethod\ndef act(z):\n    return z.clamp(min=0).square()"]),
        ("act_of({})", [], ["def act_of(z, limit=7.0):", "    return z.clamp(-limit, limit) * z.sigmoid()", "", ""], []),
        ("self.act({})", ["self.act = Act()"],
         ["class Act(nn.Module):", "    def __init__(self):", "        super().__init__()",
          "        self.beta = nn.Parameter(torch.tensor(1.3))", "", "    def forward(self, z):",
          "        return z * torch.sigmoid(self.beta * z)", "", ""], []),
        ("Act.apply({})", [],
         ["class Act(torch.autograd.Function):", "    @staticmethod", "    def forward(ctx, z):",
          "        ctx.save_for_backward(z)", "        return z * z.sigmoid()", "",
          "    @staticmethod", "    def backward(ctx, g):", "        (z,) = ctx.saved_tensors",
          "        s = z.sigmoid()", "        return g * (s + z * s * (1 - s))", "", ""], []),
    ]  # fmt: skip
    text, init, top, methods = rng.choice(kinds)
    part.init += init
    part.top = [*top, *part.top]
    part.methods += methods
    return text


MIDDLES = (
    "h = h * {n}", "h = F.dropout(h, 0.0, self.training)", "h = h + 0.1 * h.sin()", "h = h.contiguous()",
    "h = h.to(x.dtype)", "h = h if h.size(1) > 1 else h", "assert h.dim() == 3", "h = h.clone(); h *= 0.5",
    "h = h.transpose(0, 1).transpose(0, 1)", "b, t, e = h.shape; h = h.view(b * t, e).view(b, t, e)",
    "h = h + h.mean(1, keepdim=True)", "h = h - h.amax(1, keepdim=True)", "h = h.cumsum(1) * 0.1",
    "h = torch.where(h > 3, torch.full_like(h, 3.0), h)", "h = h.flip(1)", "h = torch.cat([h[:, :1], h[:, :-1]], 1)",
    "h = torch.stack([h, h * 2]).mean(0)", "h = h.softmax(1) * h", "h = h * (x.mean(-1, keepdim=True) > 0)",
    "h = h * x.square().mean(-1, keepdim=True)", "h = h.float().to(x.dtype)", "h = sum((h, h)) * 0.5",
    "h = torch.utils.checkpoint.checkpoint(torch.tanh, h, use_reentrant=False)",
    "for k in range(2):\n    h = h + 0.1 * h.roll(k, 1)",
    "s = torch.zeros_like(h[:, 0])\nout = []\nfor k in range(h.size(1)):\n    s = 0.5 * s + h[:, k]\n    out.append(s)\nh = torch.stack(out, 1)",
    "s = h.new_zeros(h.size(0), h.size(-1))\nfor k in range(h.shape[1]):\n    s = 0.9 * s + h[:, k]\nh = h + s[:, None]",
    "h = F.avg_pool1d(h.mT, 3, 1, 1).mT", "h = torch.einsum('bsd,bs->bsd', h, x.mean(-1))",
    "h = torch.baddbmm(h, torch.ones(h.size(0), h.size(1), h.size(1)).tril(), h, alpha=0.1)",
    "h = h.masked_fill(mask[..., None], 0.0)\nbefore:mask = x[..., 0] > 0.5",
    "match h.dim():\n    case 3:\n        h = h * 1.5\n    case _:\n        h = h * 2.5",
    "h = h / max(h.size(0), 1)", "h = torch.vmap(torch.tanh)(h)", "h = h * math.log(h.size(1))",
    "h = F.pad(h, (0, 0, 1, 0))[:, :-1]", "h = h.unsqueeze(2).expand(-1, -1, 2, -1).mean(2)",
    "h, *_ = (h, x)", "h = {'a': h, 'b': x}['a']", "h = [h, x][0]", "h = h.unbind(1)\nh = torch.stack(h, 1)",
)  # fmt: skip
STATEFUL = (
    ("self.register_buffer('seen', torch.zeros(()))", "self.seen += 1"),
    ("self.register_buffer('seen', torch.tensor(1.0))", "self.seen.mul_(1.5); h = h * self.seen"),
    ("self.register_buffer('ema', torch.zeros(8))", "if self.training:\n    self.ema.lerp_(x.detach().mean((0, 1)), 0.1)"),
    ("self.register_buffer('ema', torch.zeros(24))", "if self.training:\n    self.ema.lerp_(h.detach().mean((0, 1)), 0.1)"),
    ("self.register_buffer('ema', torch.zeros(24))", "with torch.no_grad():\n    self.ema.mul_(0.9).add_(0.1 * h.mean((0, 1)))\nh = h - self.ema"),
    ("self.register_buffer('ema', torch.zeros(24))\nshards:. ema 0",
     "with torch.no_grad():\n    self.ema.mul_(0.9).add_(0.1 * h.mean((0, 1)))\nh = h - self.ema"),
    ("self.register_buffer('scale', torch.tensor(0.7), persistent=False)", "h = h * self.scale"),
    ("self.cache = None", "if self.cache is None or self.cache.shape != x.shape[:2]:\n    self.cache = torch.linspace(0, 1, x.size(1)).expand(x.shape[:2])\nh = h * self.cache[..., None]"),
    ("self.calls = 0", "self.calls += 1"),
    ("self.norms = []", "self.norms = [x.detach().norm()]"),
    ("self.register_buffer('peak', torch.tensor(0.0))", "self.peak = torch.maximum(self.peak, h.detach().abs().max())"),
    ("self.register_buffer('peak', torch.tensor(0.0))", "self.peak.copy_(x.detach().abs().max())"),
    ("self.gains = nn.ParameterList([nn.Parameter(torch.randn(24)), nn.Parameter(torch.randn(24))])\nshards:gains 0 0\nshards:gains 1 0",
     "for g in self.gains:\n    h = h * g"),
    ("self.gains = nn.ParameterDict({'a': nn.Parameter(torch.randn(24))})\nshards:gains a 0", "h = h * self.gains['a']"),
    ("self.gain = nn.Parameter(torch.randn(24))\nshards:. gain 0", "h = h * self.gain"),
    ("self.gain = nn.Parameter(torch.randn(1, 1, 24))\nshards:. gain 2", "h = h * self.gain.exp()"),
    ("self.gain = nn.Parameter(torch.randn(24))", "h = h * self.gain"),
    ("self.temperature = nn.Parameter(torch.tensor(0.5))", "h = h / (1 + self.temperature.exp())"),
    ("self.gate = nn.Linear(8, 1)", "h = h * self.gate(x).sigmoid()"),
    ("self.gate = nn.Linear(8, 24)\nshards:gate weight,bias 0", "h = h * self.gate(x).sigmoid()"),
    ("self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 24, bias=False)\nshards:b weight 0", "h = h + self.b(self.a(x))"),
    ("self.squeeze, self.excite = nn.Linear(24, 6), nn.Linear(6, 24)\nshards:squeeze weight 1\nshards:excite weight,bias 0",
     "h = h * self.excite(F.relu(self.squeeze(h.mean(1, keepdim=True)))).sigmoid()"),
    ("self.decay = nn.Parameter(torch.rand(24))\nshards:. decay 0",
     "s = torch.zeros_like(h[:, 0])\nout = []\nfor row in h.unbind(1):\n    s = self.decay * s + row\n    out.append(s)\nh = torch.stack(out, 1)"),
    ("self.norm = nn.RMSNorm(24)\nshards:norm weight 0", "h = self.norm(h)"),
    ("self.norm = nn.LayerNorm(24, bias=False)\nshards:norm weight 0", "h = self.norm(h)"),
    ("self.norm = nn.LayerNorm(24, elementwise_affine=False)", "h = self.norm(h)"),
    ("self.conv = nn.Conv1d(24, 24, 3, padding=2, groups=24)\nshards:conv weight,bias 0", "h = self.conv(h.mT)[..., :-2].mT"),
    ("self.conv = nn.Conv1d(24, 24, 3, padding=1, groups=24, padding_mode='circular')\nshards:conv weight,bias 0", "h = self.conv(h.mT).mT"),
    ("self.norm = nn.BatchNorm1d(24, momentum=None)\nshards:norm weight,bias,running_mean,running_var 0", "h = self.norm(h.mT).mT"),
    ("self.norm = nn.BatchNorm1d(24, track_running_stats=False)\nshards:norm weight,bias 0", "h = self.norm(h.mT).mT"),
    ("self.norm = nn.BatchNorm1d(24, affine=False)\nshards:norm running_mean,running_var 0", "h = self.norm(h.mT).mT"),
)  # fmt: skip


def middle(rng: random.Random, part: Part) -> list[str]:
    """Statements about `h`, which has 24 features that are split."""
    lines: list[str] = []
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        for line in rng.choice(MIDDLES).replace("{n}", rng.choice(["2", "0.5"])).split("\n"):
            if line.startswith("before:"):
                lines.insert(0, line.removeprefix("before:"))
            else:
                lines += line.split("; ")
    if rng.random() < 0.4:
        init, body = rng.choice(STATEFUL)
        if re_made(init) & {n for line in part.init for n in re_made(line)}:
            return lines
        for line in init.split("\n"):
            if line.startswith("shards:"):
                path, names, axis = line.removeprefix("shards:").split(" ")
                part.shards.append(shard("" if path == "." else f".{path}", names, int(axis)))
            else:
                part.init.append(line)
        lines += [part_line for line in body.split("\n") for part_line in line.split("; ")]
        if "gate(x)" in body and "shards" in init:
            part.inputs.append("gate")
        if "squeeze" in init:
            part.inputs, part.outputs = [*part.inputs, "excite"], [*part.outputs, "squeeze"]
        if "self.b(" in body:
            part.inputs.append("b")
    return lines


def re_made(line: str) -> set[str]:
    """Attributes that a statement makes."""
    return {n.strip().removeprefix("self.") for n in line.partition("=")[0].split(",")}


RETURNS: tuple[tuple[str, str, list[str]], ...] = (
    ("return {}", "{}", []), ("return {}", "{}", []), ("return {}", "{}", []),
    ("return {}, None", "{}[0]", []),
    ("return ({},)", "{}[0]", []),
    ("return [{}, x]", "{}[0]", []),
    ("return {{'y': {}}}", "{}['y']", []),
    ("return {{'y': {}, 'x': x}}", "{}['y']", []),
    ("return Out({}, 1)", "{}.y", ["@dataclasses.dataclass", "class Out:", "    y: torch.Tensor", "    n: int = 0", "", ""]),
    ("return Out({}, 1)", "{}.y", ["class Out(typing.NamedTuple):", "    y: torch.Tensor", "    n: int", "", ""]),
    ("return types.SimpleNamespace(y={})", "{}.y", []),
    ("return {}, x.square().mean()", "{}[0]", []),
)  # fmt: skip


def mlp(rng: random.Random, name: str) -> Part:
    """Two layers around an activation."""
    part = Part(name)
    bias, out_bias = rng.random() < 0.7, rng.random() < 0.7
    packed = rng.random() < 0.2
    width = rng.choice(
        ["24", "24", "WIDTH", "3 * 8", "self.width", "self.config.width", "self.inner"]
    )
    if width == "WIDTH":
        part.top += ["WIDTH = 24", "", ""]
    elif width == "self.width":
        part.init.append("self.width = 24")
    elif width == "self.config.width":
        part.top += rng.choice([
            ["@dataclasses.dataclass", "class Config:", "    width: int = 24", "", ""],
            ["class Config:", "    width = 24", "", ""],
        ])  # fmt: skip
        part.init.append("self.config = Config()")
    elif width == "self.inner":
        part.methods.append("@property\ndef inner(self):\n    return 24")
    first = f"8, 2 * {width}" if packed else f"8, {width}"
    up, down = held(rng, "up", first, bias), held(rng, "down", f"{width}, 8", out_bias)
    part.init += [*up.init, *down.init]
    part.top += [*up.top, *down.top]
    part.fields += [*up.fields, *down.fields]
    part.shards += [shard(f".{up.path}", "weight,bias" if bias else "weight", 0, "2" if packed else ""),
                    shard(f".{down.path}", "weight", 1)]  # fmt: skip
    part.inputs.append(up.path)
    part.outputs.append(down.path)
    act = activated(rng, part)
    part.body += called(rng, up, "x", "h", bias)
    if packed:
        part.body.append(rng.choice(["g, h = h.chunk(2, dim=-1)", f"g, h = torch.split(h, {width}, -1)",
                                     "g, h = h.chunk(2, -1)", f"g, h = h[..., :{width}], h[..., {width}:]"]))  # fmt: skip
        part.body.append(f"h = {act.format('g')} * h")
    else:
        part.body.append(f"h = {act.format('h')}")
    part.body += middle(rng, part)
    part.body += called(rng, down, "h", "y", out_bias)
    return part


def attention(rng: random.Random, name: str) -> Part:
    """Attention of 12 heads, or fewer heads of keys and values."""
    part = Part(name)
    heads, one = rng.choice([(12, 2), (12, 2), (4, 6), (24, 1), (6, 4)])
    kv = rng.choice(
        [heads, heads, heads, *(n for n in (12, 6, 4, 2) if n < heads and heads % n == 0)]
    )
    shared = rng.random() < 0.12  # one head of keys and values, on every rank
    kv = 1 if shared else kv
    n, k, d = rng.choice([
        ("self.heads", "self.kv", "self.size"), ("self.heads", "self.kv", "self.size"),
        (str(heads), str(kv), str(one)), ("HEADS", "KV", "SIZE"),
        ("self.config.heads", "self.config.kv", "self.config.size"),
        ("self.config['heads']", "self.config['kv']", "self.config['size']"),
        ("self.n", "self.k_n", "self.d"),
    ])  # fmt: skip
    if n == "self.heads":
        part.init += rng.choice([
            [f"self.heads, self.kv, self.size = {heads}, {kv}, {one}"],
            [f"self.size = {one}", "self.heads = 24 // self.size", f"self.kv = {kv}"],
            [f"self.heads = {heads}", f"self.kv = max(1, self.heads // {heads // kv})", "self.size = int(24 / self.heads)"],
        ])  # fmt: skip
    elif n == "HEADS":
        part.top += [f"HEADS, KV, SIZE = {heads}, {kv}, {one}", "", ""]
    elif n == "self.config.heads":
        part.top += ["@dataclasses.dataclass", "class Conf:", f"    heads: int = {heads}", f"    kv: int = {kv}",
                     f"    size: int = {one}", "", ""]  # fmt: skip
        part.init.append("self.config = Conf()")
    elif n == "self.config['heads']":
        part.init.append(f"self.config = dict(heads={heads}, kv={kv}, size={one})")
    elif n == "self.n":
        part.init.append(f"self.total = {heads}")
        part.methods += ["@property\ndef n(self):\n    return self.total", f"@property\ndef k_n(self):\n    return {kv}",
                         f"@property\ndef d(self):\n    return {one}"]  # fmt: skip
    bias = rng.random() < 0.6
    layers = [held(rng, c, f"8, {24 if c == 'q' else kv * one}", bias) for c in "qkv"]
    o = held(rng, "o", "24, 8", True)
    for layer in [*layers, o]:
        part.init += layer.init
        part.top += layer.top
        part.fields += layer.fields
    names = "weight,bias" if bias else "weight"
    split = layers[:1] if shared else layers
    part.shards += [shard(f".{layer.path}", names, 0) for layer in split]
    part.shards.append(shard(f".{o.path}", "weight", 1))
    part.inputs += [layer.path for layer in split]
    part.outputs.append(o.path)
    part.body.append(rng.choice(["b, t, _ = x.shape", "b, t = x.shape[:-1]", "b, t, c = x.size()"]))
    if rng.random() < 0.3:
        part.body.append(f"q, k, v = ({', '.join(f'{layer.read}(x)' for layer in layers)})")
    elif rng.random() < 0.3:
        part.body.append(f"q, k, v = (f(x) for f in ({', '.join(layer.read for layer in layers)}))")
    else:
        for c, layer in zip("qkv", layers, strict=True):
            part.body += called(rng, layer, "x", c, bias)
    way = rng.choice([
        ".view(b, t, {n}, {d}).transpose(1, 2)", ".view(b, t, -1, {d}).transpose(1, 2)", "SHAPE",
        ".view(x.shape[:-1] + ({n}, {d})).permute(0, 2, 1, 3)", ".unflatten(-1, ({n}, {d})).transpose(1, 2)",
        "METHOD", "FUNCTION", ".reshape(b, t, {n}, -1).swapaxes(1, 2)",
    ])  # fmt: skip
    if way == "SHAPE":
        part.body.append(f"shape = (*x.shape[:-1], -1, {d})")
        way = ".view(shape).transpose(1, 2)"
    elif way == "METHOD":
        part.methods.append("def shaped(self, z, n):\n    new = z.size()[:-1] + (n, "
                            + d + ")\n    return z.view(new).permute(0, 2, 1, 3)")  # fmt: skip
    elif way == "FUNCTION":
        part.top += ["def shaped(z, n):", "    b, t, e = z.shape",
                     "    return z.view(b, t, n, e // n).transpose(1, 2)", "", ""]  # fmt: skip
    for c in "qkv":
        count = n if c == "q" else k
        if way == "METHOD":
            part.body.append(f"{c} = self.shaped({c}, {count})")
        elif way == "FUNCTION":
            part.body.append(f"{c} = shaped({c}, {count})")
        else:
            part.body.append(f"{c} = {c}{way.format(n=count, d=d)}")
    extra = rng.random()
    if extra < 0.1:
        part.init.append(f"self.q_norm = nn.RMSNorm({one})")
        part.body.append("q, k = self.q_norm(q), self.q_norm(k)")
    elif extra < 0.2 and one % 2 == 0:
        part.init.append(
            f"self.register_buffer('freq', 1.0 / 10 ** torch.arange(0, {one}, 2), persistent=False)"
        )
        part.body += ["pos = torch.arange(t)[:, None] * self.freq", "pos = torch.cat([pos, pos], -1)",
                      "turn = lambda z: torch.cat([-z[..., z.shape[-1] // 2 :], z[..., : z.shape[-1] // 2]], -1)",
                      "q, k = (z * pos.cos() + turn(z) * pos.sin() for z in (q, k))"]  # fmt: skip
    elif extra < 0.3:
        part.init.append(f"self.sharp = nn.Parameter(torch.randn({heads}, 1, 1))")
        part.shards.append(shard("", "sharp", 0))
        part.body.append("q = q * self.sharp.exp()")
    if kv not in (heads, 1):
        part.body += rng.choice([
            [f"k, v = k.repeat_interleave({n} // {k}, 1), v.repeat_interleave({n} // {k}, 1)"],
            [f"k, v = (z.repeat_interleave({heads // kv}, dim=1) for z in (k, v))"],
            ["k, v = repeated(k, q.size(1) // k.size(1)), repeated(v, q.size(1) // v.size(1))"],
            [f"k, v = repeated(k, {n} // {k}), repeated(v, {n} // {k})"],
        ])  # fmt: skip
        if "repeated" in part.body[-1]:
            part.top += ["def repeated(z, n):", "    if n == 1:", "        return z", "    b, k, t, d = z.shape",
                         "    return z[:, :, None].expand(b, k, n, t, d).reshape(b, k * n, t, d)", "", ""]  # fmt: skip
    scale = rng.choice([f"{d} ** -0.5", f"(1 / math.sqrt({d}))", "k.size(-1) ** -0.5", "0.7"])
    mask = rng.choice(["", "", "given", "causal", "window"])
    if mask == "given":
        part.arguments = "x, mask=None"
    if rng.random() < 0.4:
        given = {"given": ", attn_mask=mask", "causal": ", is_causal=True",
                 "window": ", attn_mask=(torch.arange(t)[:, None] - torch.arange(t)).abs() < 4"}.get(mask, "")  # fmt: skip
        part.body.append(f"y = F.scaled_dot_product_attention(q, k, v{given}, scale={scale})")
    else:
        part.body.append(rng.choice([f"a = q @ k.mT * {scale}", f"a = torch.matmul(q, k.transpose(-1, -2)) * {scale}"]
                                    + ([] if shared else [f'a = torch.einsum("bhqd,bhkd->bhqk", q, k) * {scale}'])))  # fmt: skip
        if rng.random() < 0.15:
            part.body.append("a = torch.tanh(a / 5) * 5")
        if mask == "given":
            part.body += ["if mask is not None:", "    a = a.masked_fill(~mask, -1e9)"]
        elif mask == "causal":
            part.body.append("a = a + torch.triu(torch.full((t, t), -1e9), 1)")
        elif mask == "window":
            part.body.append(
                "a = a.where((torch.arange(t)[:, None] - torch.arange(t)).abs() < 4, -1e9)"
            )
        part.body.append(
            "a = "
            + rng.choice(["a.softmax(-1)", "F.softmax(a, -1)", "(a - a.amax(-1, True)).exp()"])
        )
        if ".exp()" in part.body[-1]:
            part.body.append("a = a / a.sum(-1, keepdim=True)")
        part.body.append("y = a @ v")
    part.body.append(rng.choice([
        "y = y.transpose(1, 2).flatten(2)", "y = y.transpose(1, 2).reshape(b, t, -1)",
        f"y = y.transpose(1, 2).contiguous().view(b, t, {n} * {d})",
        f"y = y.transpose(1, 2).reshape(b, t, {o.read}.in_features)" if "Sequential" not in o.init[0]
        else "y = y.transpose(1, 2).flatten(2)",
        "y = y.permute(0, 2, 1, 3).reshape(x.shape[0], x.shape[1], 24)",
        "y = torch.cat(y.unbind(1), -1)" if rng.random() < 0.2 else "y = y.transpose(1, 2).flatten(-2)",
        "y = y.transpose(1, 2).reshape(*x.shape[:-1], -1).contiguous()",
        "y = y.movedim(1, 2).reshape(y.size(0), y.size(2), -1)",
    ]))  # fmt: skip
    part.body += called(rng, o, "y", "y", True)
    return part


def images(rng: random.Random, name: str) -> Part:
    """A small convolutional network, pooled."""
    part = Part(name)
    options = rng.choice(
        [
            "padding=1",
            "padding='same'",
            "padding=2, dilation=2",
            "padding=1, padding_mode='reflect'",
        ]
    )
    part.init += [f"self.up = nn.Conv2d(2, 24, 3, {options})"]
    part.shards = [shard(".up", "weight,bias", 0)]
    part.body = ["h = self.up(x.unflatten(1, (3, 4)).movedim(1, 2)[:, :2] + 0 * x.sum())"]
    part.body = ["h = self.up(x.unflatten(-1, (2, 4)).transpose(1, 2))"]
    for step in rng.sample(["norm", "act", "pool", "mid", "drop", "scale"], rng.randint(1, 3)):
        if step == "norm":
            kind, names = rng.choice([
                ("nn.BatchNorm2d(24)", "weight,bias,running_mean,running_var"), ("nn.GroupNorm(12, 24)", "weight,bias"),
                ("nn.InstanceNorm2d(24, affine=True, track_running_stats=True)", "weight,bias,running_mean,running_var"),
                ("nn.GroupNorm(24, 24, eps=1e-3)", "weight,bias"),
            ])  # fmt: skip
            part.init.append(f"self.norm = {kind}")
            part.shards.append(shard(".norm", names, 0))
            part.body.append("h = self.norm(h)")
        elif step == "act":
            part.body.append(f"h = {activated(rng, part).format('h')}")
        elif step == "pool":
            part.body.append(rng.choice(["h = F.max_pool2d(h, 3, 1, 1)", "h = h - F.adaptive_avg_pool2d(h, 1)",
                                         "h = h * h.mean((2, 3), keepdim=True)", "h = F.avg_pool2d(h, 3, stride=1, padding=1)"]))  # fmt: skip
        elif step == "mid":
            part.init.append("self.mid = nn.Conv2d(24, 24, 3, padding=1, groups=24, bias=False)")
            part.shards.append(shard(".mid", "weight", 0))
            part.body.append("h = self.mid(h)")
        elif step == "drop":
            part.init.append("self.drop = nn.Dropout2d(0.0)")
            part.body.append("h = self.drop(h)")
        else:
            part.init.append("self.scale = nn.Parameter(torch.rand(24, 1, 1))")
            part.shards.append(shard("", "scale", 0))
            part.body.append("h = h * self.scale")
    end = rng.choice(["conv", "transposed", "pooled"])
    if end == "conv":
        part.init.append("self.down = nn.Conv2d(24, 2, 1)")
        part.body.append("y = self.down(h).transpose(1, 2).flatten(2)")
        part.shards.append(shard(".down", "weight", 1))
    elif end == "transposed":
        part.init.append("self.down = nn.ConvTranspose2d(24, 2, 3, padding=1)")
        part.body.append("y = self.down(h).transpose(1, 2).flatten(2)")
        part.shards.append(shard(".down", "weight", 0))
    else:
        part.init.append("self.down = nn.Linear(24, 8)")
        part.body += ["h = h.mean((-2, -1))", "y = self.down(h)[:, None].expand(-1, x.size(1), -1)"]
        part.shards.append(shard(".down", "weight", 1))
    part.inputs, part.outputs = ["up"], ["down"]
    return part


def mixer(rng: random.Random, name: str) -> Part:
    """Linear attention, or a mixing of tokens."""
    part = Part(name)
    part.init = [
        "self.q, self.k, self.v = nn.Linear(8, 24), nn.Linear(8, 24), nn.Linear(8, 24)",
        "self.o = nn.Linear(24, 8)",
    ]
    part.shards = [shard(".{{q,k,v}}", "weight,bias", 0), shard(".o", "weight", 1)]
    part.inputs, part.outputs = ["q", "k", "v"], ["o"]
    part.body = rng.choice([
        ["q, k, v = self.q(x).sigmoid(), self.k(x), self.v(x)", "w = k.softmax(1)", "y = self.o(q * (w * v).sum(1, keepdim=True))"],
        ["q, k, v = self.q(x), self.k(x).exp(), self.v(x)", "y = self.o(q.sigmoid() * (k * v).cumsum(1) / k.cumsum(1))"],
        ["q, k, v = (f(x).unflatten(-1, (12, 2)) for f in (self.q, self.k, self.v))",
         "kv = torch.einsum('bthd,bthe->bhde', k.softmax(1), v)", "y = torch.einsum('bthd,bhde->bthe', q, kv)", "y = self.o(y.flatten(2))"],
        ["q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))",
         "y = (q @ (k.mT @ v)) / x.size(1)", "y = self.o(y.transpose(1, 2).flatten(2))"],
        ["q, k, v = self.q(x), self.k(x), self.v(x)", "s = x.new_zeros(x.size(0), q.size(-1))", "out = []",
         "for j in range(x.size(1)):", "    z = q[:, j].sigmoid()", "    s = z * s + (1 - z) * torch.tanh(k[:, j] * v[:, j])",
         "    out.append(s)", "y = self.o(torch.stack(out, dim=1))"],
        ["q, k, v = self.q(x), self.k(x), self.v(x)", "y = self.o(F.conv1d(F.pad((q * k).mT, (2, 0)), torch.ones(k.size(-1), 1, 3), groups=k.size(-1)).mT * v)"],
        ["q, k, v = self.q(x), self.k(x), self.v(x)", "f = torch.fft.irfft(torch.fft.rfft(q, dim=1) * torch.fft.rfft(k, dim=1), n=x.size(1), dim=1)", "y = self.o(f * v)"],
        ["y = self.o(sum(f(x) for f in (self.q, self.k, self.v)))"],
        ["y = self.o(torch.stack([f(x) for f in (self.q, self.k, self.v)]).prod(0))"],
        ["y = self.o(self.q(x)) + self.o(self.k(x).tanh() * self.v(x))"],
        ["y = x", "for f in (self.q, self.k, self.v):", "    y = y + self.o(f(y).tanh())"],
        ["h = torch.maximum(self.q(x), self.k(x))", "h = torch.where(h > 0, h, self.v(x))", "y = self.o(h)"],
    ])  # fmt: skip
    return part


def table(rng: random.Random, name: str) -> Part:
    """An embedding of ids that are made of the input, by rows or columns."""
    part = Part(name)
    options = rng.choice(
        [
            "",
            "",
            ", padding_idx=3",
            ", max_norm=1.0",
            ", scale_grad_by_freq=True",
            ", padding_idx=-1",
        ]
    )
    ids = "ids = (x[..., 0] * 100).long().abs() % 24"
    if rng.random() < 0.5:
        part.init = [f"self.e = nn.Embedding(24, 8{options})"]
        part.shards, part.outputs = [shard(".e", "weight", 0)], ["e"]
        part.body = [ids, rng.choice(["y = self.e(ids)", "y = F.embedding(ids, self.e.weight)", "y = self.e.weight[ids]",
                                      "y = self.e(ids.flatten()).view(*ids.shape, -1)", "y = self.e(ids) * 8 ** 0.5",
                                      "y = F.one_hot(ids, 24).double() @ self.e.weight", "y = self.e(ids) + self.e(ids.flip(1))",
                                      "y = self.e(ids) @ self.e.weight.T @ self.e.weight"])]  # fmt: skip
    else:
        part.init = [f"self.e = nn.Embedding(24, 24{options})", "self.down = nn.Linear(24, 8)"]
        part.shards, part.outputs = (
            [shard(".e", "weight", 1), shard(".down", "weight", 1)],
            ["down"],
        )
        part.body = [ids, rng.choice(["h = self.e(ids)", "h = self.e(ids).tanh()", "h = self.e.weight[ids]", "h = F.embedding(ids, self.e.weight)",
                                      "h = self.e(ids).sum(1, keepdim=True).expand(-1, x.size(1), -1)"])]  # fmt: skip
        part.body += middle(rng, part)
        part.body.append("y = self.down(h)")
    return part


KINDS: dict[Callable[[random.Random, str], Part], int] = {
    mlp: 5,
    attention: 5,
    images: 1,
    mixer: 1,
    table: 1,
}


def wrapped(rng: random.Random, part: Part) -> None:
    """Moves the body of `forward` elsewhere: a method, a base class, a closure."""
    way = rng.choice(
        ["", "", "", "method", "base", "closure", "kwargs", "static", "checkpointed", "early"]
    )
    names = [a.split("=")[0].strip() for a in part.arguments.split(",")]
    given = ", ".join(names)
    if way == "method":
        part.methods.append(
            f"def run(self, {part.arguments}):\n" + indented([*part.body, "return y"], 4)
        )
        part.body = [f"y = self.run({given})"]
    elif way == "checkpointed":
        part.methods.append(
            f"def run(self, {part.arguments}):\n" + indented([*part.body, "return y"], 4)
        )
        part.body = ["if self.training:", f"    y = checkpoint(self.run, {given}, use_reentrant=False)", "else:",
                     f"    y = self.run({given})"]  # fmt: skip
    elif way == "base":
        base = Part(f"{part.name}Base", part.init, [*part.body, "return y"], [], [], [], part.top, part.methods, "nn.Module",
                    part.arguments, part.fields)  # fmt: skip
        part.top, part.init, part.methods, part.fields = [*base.text().split("\n"), ""], [], [], []
        part.base = base.name
        part.body = [f"y = super().forward({given})"]
    elif way == "closure":
        part.body = [
            f"def run({given}):",
            *indented([*part.body, "return y"], 4).split("\n"),
            "",
            f"y = run({given})",
        ]
    elif way == "kwargs" and len(names) == 1:
        part.arguments = rng.choice(["*args, **kwargs", "x, *args, **kwargs", "x, **kwargs"])
        if part.arguments.startswith("*"):
            part.body = ["x = args[0] if args else kwargs['x']", *part.body]
    elif way == "early":
        part.body = ["if x is None:", "    return None", *part.body]


def pair(rng: random.Random) -> Pair:
    """A network with a schedule that is right, or nearly."""
    count = rng.choice([1, 1, 2])
    parts = [
        rng.choices(list(KINDS), list(KINDS.values()))[0](rng, f"Part{n}") for n in range(count)
    ]
    init: list[str] = []
    body: list[str] = []
    lines: list[str] = []
    paths: list[str] = []
    arguments, flags = ["x"], []
    if rng.random() < 0.3:
        init.append("self.pre = nn.Linear(8, 8)")
        body.append("x = self.pre(x)")
    mode = rng.choice(["infer", "infer", "infer", "explicit"])
    for n, part in enumerate(parts):
        wrapped(rng, part)
        back, taken, top = rng.choice(RETURNS)
        part.body.append(back.format("y"))
        part.top = [*top, *part.top]
        where = rng.choice(
            ["name", "name", "name", "list", "list", "dict", "sequential", "nested", "twice"]
        )
        made = f"{part.name}()"
        if where == "sequential" and taken != "{}":
            where = "list"
        path, read = f"p{n}", f"self.p{n}"
        if where == "list":
            init.append(f"self.p{n} = nn.ModuleList([{made} for _ in range({rng.choice([1, 2])})])")
            path, read = f"p{n}.*", f"self.p{n}"
        elif where == "dict":
            init.append(f"self.p{n} = nn.ModuleDict(dict(a={made}))")
            path, read = f"p{n}.a", f"self.p{n}['a']"
        elif where == "sequential":
            init.append(f"self.p{n} = nn.Sequential(nn.LayerNorm(8), {made})")
            path = f"p{n}.1"
        elif where == "nested":
            init += [f"self.p{n} = nn.Module()", f"self.p{n}.inner = {made}"]
            path, read = f"p{n}.inner", f"self.p{n}.inner"
        elif where == "alias":
            init += [f"self.p{n} = {made}", f"self.alias{n} = self.p{n}"]
            read = f"self.alias{n}"
        else:
            init.append(f"self.p{n} = {made}")
        passed = "x"
        if "mask" in part.arguments:
            if "mask=None" not in arguments:
                arguments.append("mask=None")
                flags.append('{"mask": torch.ones(12, 12).tril().bool()}')
            passed = rng.choice(["x, mask", "x, mask=mask"])
        value = taken.format(f"{read}({passed})")
        if where == "list":
            inner = taken.format(f"layer({passed})")
            body += rng.choice([
                [f"for layer in self.p{n}:", f"    x = x + {inner}"],
                [f"for j, layer in enumerate(self.p{n}):", f"    x = {inner} + (x if j else 0)"],
                [f"for layer in self.p{n}[:1]:", f"    x = x + {inner}"] if rng.random() < 0.2 else
                [f"for layer in self.p{n}:", f"    x = {inner} + x"],
            ])  # fmt: skip
        elif where == "twice":
            body += [f"x = x + {value}", f"x = x + {value}"]
        else:
            body.append(
                rng.choice(
                    [
                        f"x = x + {value}",
                        f"x = {value}",
                        f"x = torch.add(x, {value})",
                        f"x = x.add({value}, alpha=0.5)",
                    ]
                )
            )
        paths.append(path)
        lines += [line.format(s=path) for line in part.shards]
        if mode == "explicit":
            lines += [
                f's["{path}.{i}"].sync("bwd_post", "all_reduce")'
                for i in dict.fromkeys(part.inputs)
            ]
            lines += [f's["{path}.{o}"].sync("fwd_post", "all_reduce")' for o in part.outputs]
    if mode == "infer":
        lines.append("s.infer_sync()")
    if rng.random() < 0.2:
        lines.insert(rng.choice([0, len(lines)]), rng.choice([
            f's["{paths[0]}"].checkpoint()', "s.apply_all()", f's["{paths[-1]}"].fork_rng()',
            f's["{paths[0]}.{parts[0].outputs[0]}"].decompose()',
            f's["{paths[0]}.{parts[0].inputs[0] if parts[0].inputs else parts[0].outputs[0]}"].decompose()',
            f's[""].inline("{paths[0]}")' if "*" not in paths[0] else "s.apply_all()",
        ]))  # fmt: skip
    if rng.random() < 0.3:
        init.append("self.final = nn.LayerNorm(8)")
        body.append("x = self.final(x)")
    body.append(
        rng.choice(["return x", "return x", "return x, x.mean()", "return {'y': x}", "return (x,)"])
    )
    source = IMPORTS
    if "checkpoint(" in "".join(
        line for part in parts for line in [*part.body, *part.methods, *part.top]
    ):
        source += "from torch.utils.checkpoint import checkpoint\n"
    for part in parts:
        source += "\n\n" + part.text()
    source += f"""

class Net(nn.Module):
    def __init__(self):
        super().__init__()
{indented(init, 8)}

    def forward(self, {", ".join(arguments)}):
{indented(body, 8)}
"""
    text = schedule_text('"x": torch.randn(3, 12, 8)', lines, flags)
    text = (
        text.replace("outputs[0].square()", "next(iter(outputs.values())).square()")
        if "{'y': x}" in body[-1]
        else text
    )
    return Pair(source, text, "; ".join(" | ".join(part.body) for part in parts))
