"""torch's own functions, methods and layers, each with arguments that it takes.

What is public in the namespaces below is called as it stands, with the arguments of a list that
is tried until something comes of it, so that functions nobody thought of are called as well.
"""

from __future__ import annotations

import math
import random
import re
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

NAMESPACES: Mapping[str, Any] = {
    "torch": torch,
    "F": F,
    "torch.linalg": torch.linalg,
    "torch.special": torch.special,
    "torch.fft": torch.fft,
    "Tensor": torch.Tensor,
}
# Random, not initialised, or about something else than numbers.
_LEFT_OUT = re.compile(
    r"_|set_|get_|is_[^nfips]|rand|seed|manual|bernoulli|multinomial|poisson$|normal|binomial|"
    r".*dropout|.*empty|save$|load$|compile|cudnn|miopen|mkldnn|fbgemm|q_|quantize|fake_|fused_|"
    r"sym_|import_|parse|prepare|profiler|use_det|init_num|thread|share|storage|cuda|ipu|xpu|hpu|"
    r"mtia|register_|requires|backward|retain|numpy|data_ptr|from_|frombuffer|to_mkldnn|to_dlpack|"
    r"pin_|record_stream|module_load|uniform|exponential|cauchy|geometric|log_normal|random|rrelu|"
    r"gumbel|fractional|new_empty|resize|typename|.*Error|wait|fork|vitals|"
    r"handle_torch|has_torch|assert|boolean|.*lowrank|lobpcg|dlpack|unify|"
    r"merge|autocast|inference_mode|no_grad|enable_grad|Generator|Stream|Event|.*Storage$|"
    r"align|rename|names|refine|has_names|untyped|apply_$|map_|map2_|coalesce|sparse|.*sparse|"
    r"cross_entropy$|hash_tensor|nonzero_static|as_subclass|sspaddmm|hspmm|dsmm|hsmm|smm|spmm|"
    r"segment_reduce|while_loop|cond|ctc_loss|multi_head|wrapped|scaled_mm|scaled_grouped|grouped_mm|range$"
)

# Arguments after the namespace's function; a method leaves out the first. `{d}` is an axis.
ARGUMENTS = (
    "h", "h, {d}", "h, dim={d}", "h, {d}, keepdim=True", "h, dim={d}, keepdim=True", "h, y",
    "h, 2", "h, 0.5", "h, h", "y, h", "h, h, h", "h, y, y", "h, (0, 1)", "h, (0, 2)", "h, {d}, {e}",
    "h, [1, 2, 0]", "h, i, {d}", "h, {d}, i", "h, {d}, i, 0.5", "h, {d}, i, h.index_select({d}, i)",
    "h, m, 0.5", "h, h > 0", "h, h > 0, 0.5", "h > 0, h, y", "h > 0, h, 0.0", "[h, y]", "[h, y], {d}",
    "[h, y], dim={d}", "h, 3, {d}", "h, 2, {d}", "h, 3, dim={d}", "h, 1, 2", "h, y, {d}", "h, y, dim={d}",
    "h, 1, {d}", "h, y, 1", "h, v", "h, v, v", "h, c", "c, h", "h, c, c", "h, t", "h, t, 1",
    "h, h.size(-1)", "h, h.shape[-1], 2", "h, value=h.size(-1)", "h, [h.size(-1)]", "h, v.shape",
    "h, (h.size(-1),), v, v", "h, (h.size(-1),), v", "h, t.mT @ t, v", "h, h.mT", "h.mT, h",
    "h @ h.mT", "h @ h.mT + 9 * torch.eye(h.size(1))", "h.flatten()", "h.flatten(1)", "h.flatten(0, 1)",
    "h[0]", "h[0], y[0]", "h[0, 0]", "h[0, 0], y[0, 0]", "h[0, 0], v", "h[0], v", "h.flatten(), y.flatten()",
    "h[None]", "h[None], 2", "h.mT", "h.mT, 2", "h.mT, 3", "h.unsqueeze(1), 2", "h, (1, 1)",
    "h, (1, 1), value=1.0", "h, (0, 0, 1, 0)", "h, (1, -1)", "h, (1, 0), 'reflect'",
    "'bsd,bsd->bs', h, y", "'bsd,btd->bst', h, y", "'bsd->sd', h", "'bsd,ed->bse', h, t",
    "'bsd,d->bs', h, v", "'...d->...', h", "h, y, ([2], [2])", "h, t, ([2], [1])", "h, t, dims=([-1], [-1])",
    "h, torch.arange(h.size({d}))", "h.sort(-1).values, y", "h.sigmoid(), y.sigmoid()", "h.abs(), 2.0",
    "h, y.sign()", "h.flatten(0, 1), k.flatten()", "h.flatten(0, 1), (k % 2).flatten()", "h.mT, k",
    "h, y, 2 * y, margin=0.3", "h, y, k.unsqueeze(-1).sign()", "h.softmax(-1), y.softmax(-1)",
    "h, 0.3, {d}", "h, 0.3, dim={d}, keepdim=True", "h, q, {d}", "h.long()", "h > 0", "h > 0, {d}", "h > 0, y > 0",
    "h.long(), y.long()", "h.long(), 2", "h, (2, 3)", "h, (2, 1, 2)", "h, 2, 1", "h, dims=({d},)",
    "h, (1,), ({d},)", "h, 1, ({d},)", "h, size=7", "h, {d}, (2, -1)", "h, {d}, -2, 1", "h, s={n}",
    "h, n=8", "h, n=8, dim={d}", "h, {d}, unbiased=False", "h, correction=0", "h, bins=5", "h, 2, {d}, 1.0",
    "h, 2.0, {d}", "h, 'fro', ({d}, {e})", "h, p=1, dim={d}", "h, ord=1, dim={d}", "h, descending=True",
    "h, {d}, descending=True", "h, 0, 1, {d}", "h, y, h.size(-1)", "h, y, {d}, 1", "h, {d}, 2, 3",
    "h, dtype=torch.double", "h, {d}, dtype=torch.double", "h, g, {d}", "h, {d}, g", "h, {d}, g, y", "h, {d}, g, 2.0",
    "h, {d}, g, y, 'sum'", "h, {d}, g, y, reduce='amax'", "h, (g, ), y", "h, (k % 3,), y", "h, {d}, i, y.index_select({d}, i), 'amax'",
    "h, y[:, 0], {d}, 0", "h, y.select({d}, 1), {d}, 1", "h, h.stride(), (1, 1)", "h.size()", "h.shape, h.shape", "h, offset=1",
    "v, h", "t, h.mT", "v, t, h[0, 0]", "h, t, v", "h, t.unsqueeze(0).expand(3, -1, -1)", "h.mean((0, 1)), v", "h[0], t, v",
    "h, h.flatten()[:5].detach().sort().values", "(h.size(-1),), 2.0", "h.size(-1)", "h.size(-1), 2", "h, h.size()", "h, -1, 3", "h, 3, 3",
)  # fmt: skip
LAYERS = (
    "", "{w}", "{w}, {w}", "({w},)", "-1", "2", "1, {w}", "2, {w}", "4, {w}", "{w}, {w}, 1", "{w}, {w}, 3, padding=1",
    "{w}, {w}, 3, padding=1, groups={w}", "2, 2", "dim={d}", "{d}", "0.0", "{d}, 2", "1, (2, -1)", "0.1, 2.0", "{w}, 4",
    "{w}, 2, batch_first=True", "{w}, affine=False", "{w}, elementwise_affine=False", "({w},), elementwise_affine=False",
    "3, stride=1, padding=1", "7", "(1, 1)", "(1, 1), 0.5", "{w}, 1, bias=False", "2, padding=0, stride=2", "3, 2",
    "{w}, 2, 8, batch_first=True, dropout=0.0", "scale_factor=2", "{w}, track_running_stats=False",
)  # fmt: skip
_NO_LAYERS = re.compile(
    r"Module|Sequential|Parameter|.*Loss2d|Lazy|.*Dropout|RReLU|Fractional|Quant|DataP|Buffer|Linear$|"
    r"Embedding|Container|NonDynamically|CTC|AdaptiveLog|Transformer$|factory|DeQuant|CrossMap|"
    r".*Loss$|Cosine|Pairwise|.*Shuffle2|MultiheadAttention|Bilinear"
)


def scope(shape: tuple[int, ...]) -> dict[str, Any]:
    """The names that arguments use, with tensors of the shapes that they have in a model."""
    generator = torch.Generator().manual_seed(3)

    def numbers(*sizes: int) -> torch.Tensor:
        made = torch.randn(*sizes, generator=generator, dtype=torch.float64)
        return made.requires_grad_()

    return {
        "torch": torch, "F": F, "nn": nn, "h": numbers(*shape) * 1, "y": numbers(*shape) * 1,
        "x": numbers(*shape[:-1], 8), "c": numbers(*shape[:-1], 1), "v": numbers(shape[-1]),
        "t": numbers(5, shape[-1]), "i": torch.tensor([0, 3, 1]), "q": torch.tensor([0.2, 0.7]),
        "k": torch.arange(36).view(3, 12) % 5, "m": numbers(*shape[:-1], 1) > 0,
        "g": torch.arange(math.prod(shape)).view(shape) % 3,
    }  # fmt: skip


def names() -> list[tuple[str, str]]:
    """Every function and method, with its namespace."""
    return [
        (where, name)
        for where, namespace in NAMESPACES.items()
        for name in sorted(dir(namespace))
        if name[0].islower()
        and not _LEFT_OUT.match(name)
        and callable(getattr(namespace, name))
        and not isinstance(getattr(namespace, name), type)
    ]


NAMES = names()
_LAYER_NAMES = [
    name
    for name in sorted(dir(nn))
    if name[0].isupper() and not _NO_LAYERS.match(name) and isinstance(getattr(nn, name), type)
]


def filled(rng: random.Random, text: str, shape: tuple[int, ...]) -> str:
    """Arguments with their axes."""
    d, e = rng.sample([0, 1, 2, -1, -1, -2], 2)
    return text.format(d=d, e=e, n=f"({shape[-1]},)", w=shape[-1])


def expression(rng: random.Random, shape: tuple[int, ...]) -> tuple[str, Any]:
    """A call of one of torch's functions on `h`, and what it gives for numbers."""
    known = scope(shape)
    while True:
        where, name = rng.choice(NAMES)
        for arguments in rng.sample(ARGUMENTS, len(ARGUMENTS)):
            text = call(where, name, filled(rng, arguments, shape))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    # In place, it would change what the next one gets.
                    value = eval(text, scope(shape) if name.endswith("_") else known)
            except Exception:
                continue
            if isinstance(value, (torch.Tensor, tuple, list, int, float)):
                return text, value
            break


def call(where: str, name: str, arguments: str) -> str:
    """The text of a call."""
    if where != "Tensor":
        return f"{where}.{name}({arguments})"
    first, _, others = arguments.partition(", ")
    if not re.fullmatch(r"h[\w.()-]*(\[[^\]]*\])?[\w.()-]*", first):
        first, others = "h", arguments
    return f"{first}.{name}({others})"


def layer(rng: random.Random, shape: tuple[int, ...]) -> tuple[str, Any]:
    """The construction of one of torch's layers, and what it gives for numbers."""
    while True:
        name = rng.choice(_LAYER_NAMES)
        for arguments in rng.sample(LAYERS, len(LAYERS)):
            text = f"nn.{name}({filled(rng, arguments, shape)})"
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    value = eval(text, {"nn": nn}).double()(scope(shape)["h"])
            except Exception:
                continue
            if isinstance(value, (torch.Tensor, tuple)):
                return text, value
            break
