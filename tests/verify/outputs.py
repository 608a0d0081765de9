"""A small model with a correct handwritten output, which tests break in one place each."""

import hashlib
import json
from pathlib import Path

MODEL = '''\
"""Two residual blocks between an embedding and a head that is tied to it."""

import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}
'''

SCHEDULE = """\
import torch

import slapo_rewrite.errors  # a schedule may, an output may not


def model(m):
    return m.Net()


def schedule(s):
    s["blocks.*.up"].shard(["weight", "bias"], axis=0)
    s["blocks.*.up"].sync("bwd_post", "all_reduce")
    s["blocks.*.down"].shard("weight", axis=1)
    s["blocks.*.down"].sync("fwd_post", "all_reduce")


def inputs(model):
    ids = torch.randint(0, 13, (2, 5))
    return {"ids": ids, "labels": ids.roll(1, 1)}
"""

DIRECTIVES = [
    {
        "primitive": "shard",
        "line": 11,
        "text": 's["blocks.*.up"].shard(["weight", "bias"], axis=0)',
        "paths": ["blocks.*.up"],
    },
    {
        "primitive": "sync",
        "line": 14,
        "text": 's["blocks.*.down"].sync("fwd_post", "all_reduce")',
        "paths": ["blocks.*.down"],
    },
]

REWRITTEN = MODEL.replace(
    "from torch import nn\n", "from torch import nn\n\nfrom .tensor_parallel import Column, Row\n"
)
REWRITTEN = REWRITTEN.replace("nn.Linear(8, 12)", "Column(8, 12)").replace(
    "nn.Linear(12, 8)", "Row(12, 8)"
)

TENSOR_PARALLEL = """\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def total(x):
    x = x.clone()
    if world() > 1:
        dist.all_reduce(x)
    return x


class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return total(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return total(grad)


class Column(nn.Linear):
    axes = {"weight": 0, "bias": 0}

    def __init__(self, features, outputs):
        super().__init__(features, outputs // world())

    def forward(self, x):
        return super().forward(SumBackward.apply(x))


class Row(nn.Linear):
    axes = {"weight": 1}

    def __init__(self, features, outputs):
        super().__init__(features // world(), outputs)

    def forward(self, x):
        return SumForward.apply(F.linear(x, self.weight)) + self.bias
"""

LOADING = """\
import torch
import torch.distributed as dist

from .tensor_parallel import rank, world


def axes(model):
    return {
        f"{path}.{name}": axis
        for path, module in model.named_modules()
        for name, axis in getattr(module, "axes", {}).items()
    }


def to_local(model, named):
    cut = axes(model)
    return {n: t.chunk(world(), cut[n])[rank()] if n in cut else t for n, t in named.items()}


def to_full(model, named):
    cut, full = axes(model), dict(named)
    for name in cut:
        if name in full and world() > 1:
            part = full[name].contiguous()
            parts = [torch.empty_like(part) for _ in range(world())]
            dist.all_gather(parts, part)
            full[name] = torch.cat(parts, cut[name])
    return full


def full_state_dict(model):
    return to_full(model, model.state_dict())
"""

LOAD = """
    def load_state_dict(self, state, strict=True, assign=False):
        return super().load_state_dict(loading.to_local(self, state), strict, assign)
"""
REWRITTEN = REWRITTEN.replace("from .tensor", "from . import loading\nfrom .tensor") + LOAD


def write(folder: Path, name: str, changes: dict[str, tuple[str, str]] | None = None) -> Path:
    """Writes original, schedule and output; `changes` replaces text in files of the output.

    Args:
        folder: Where to.
        name: The output folder's.
        changes: By file name, what is replaced and by what.
    """
    source, schedule, out = folder / "net.py", folder / "plan.py", folder / name
    source.write_text(MODEL)
    schedule.write_text(SCHEDULE)
    out.mkdir()
    files = {"net.py": REWRITTEN, "tensor_parallel.py": TENSOR_PARALLEL, "loading.py": LOADING}
    files["__init__.py"] = ""
    for file, (old, new) in (changes or {}).items():
        assert old in files[file]
        files[file] = files[file].replace(old, new)
    for file, text in files.items():
        (out / file).write_text(text)
    record = {
        "source": {"name": str(source), "file": "net.py", "sha256": digest(source)},
        "schedule": {"name": str(schedule), "sha256": digest(schedule)},
        "directives": DIRECTIVES,
    }
    (out / "rewrite.json").write_text(json.dumps(record))
    return out


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
