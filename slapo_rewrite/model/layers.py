"""The tensor-parallel layers that replace layers of torch, by sharded parameter and axis."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

from torch import nn

from slapo_rewrite.code.arguments import Signature, given_by
from slapo_rewrite.code.text import joined_path
from slapo_rewrite.runtime.tensor_parallel import ReduceScatter


@dataclass(frozen=True)
class Written:
    """The value of an argument, as source text."""

    text: str  # an expression in names that are defined where the layer is made

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Unit:
    """The unit of a split: each rank's size must be a multiple of it, as of a head's size."""

    text: str  # an expression for it, in the variables of the owner's constructor
    size: int = 0  # its value; 0 if that is not known
    # Whether it must be passed to the layer: ranks that share a unit hold a copy each.
    required: bool = False


@dataclass(frozen=True)
class Layer:
    """A layer of `slapo_rewrite.runtime` that replaces one of torch."""

    module: str  # the runtime module that defines it
    name: str  # the class
    # Further keyword arguments, as values: literals, objects of a runtime module, and expressions.
    keywords: tuple[tuple[str, object], ...] = ()
    # The original's arguments that its constructor takes; empty if it takes all.
    arguments: tuple[str, ...] = ()
    unit: Unit | None = None  # the unit of the split


@dataclass(frozen=True)
class Split:
    """One way to shard a layer: the class that does it, and its output on a rank."""

    module: str  # the runtime module that defines the class
    name: str  # the class
    output: str  # `partition`, `partial sum`, or `whole` for a layer that reduces inside
    # The parameters that stay whole; all others must be sharded.
    whole: frozenset[str] = frozenset()
    # Whether the gradient of the input is a partial sum on each rank.
    has_input_gradient: bool = True
    # What its constructor takes of the original's arguments.
    arguments: tuple[str, ...] = ("in_features", "out_features", "bias", "device", "dtype")
    takes_part: bool = False  # whether the input is sharded
    # The sharded axis of input or output, in each way to write it.
    axes: tuple[int, ...] = (-1,)


# Layers whose heads several ranks may share, by the layer that does not allow it.
_REPLICATED = {"ColumnParallelLinear": ("grouped_query", "KeyValueParallelLinear")}


def scatters(layer: Layer) -> bool:
    """Whether a layer reduce-scatters its output."""
    return isinstance(dict(layer.keywords).get("reduce"), ReduceScatter)


def replicated(layer: Layer, unit: Unit) -> Layer | None:
    """The variant of a layer whose units several ranks may share; None if there is none."""
    if layer.name not in _REPLICATED or {"parts", "gather_output"} & dict(layer.keywords).keys():
        return None
    module, name = _REPLICATED[layer.name]
    return replace(layer, module=module, name=name, unit=replace(unit, required=True))


# Layers that multiply by a matrix and add a bias, with the name of the product.
MULTIPLIED = {
    "torch.nn.modules.linear.Linear": "linear",
    "transformers.pytorch_utils.Conv1D": "matmul",
}

# Layers that can be split in units.
IN_UNITS = {
    *("ColumnParallelLinear", "ColumnParallelConv1D"),
    *("ColumnParallelConv1d", "ColumnParallelConv2d"),
    "ColumnParallelEmbedding",
}

# The attribute for this rank's share of a layer's size, and the one for the full size, if any.
SHARES: dict[str, tuple[str, str | None]] = {
    "ColumnParallelLinear": ("out_features", None),
    "KeyValueParallelLinear": ("out_features", None),
    "RowParallelLinear": ("in_features", None),
    "ColumnParallelConv1D": ("nf", None),
    "RowParallelConv1D": ("nx", None),
    "VocabParallelEmbedding": ("num_embeddings", "full_num_embeddings"),
    "VocabParallelEmbeddingBag": ("num_embeddings", "full_num_embeddings"),
    "ColumnParallelEmbedding": ("embedding_dim", None),
    "ParallelMultiheadAttention": ("num_heads", "num_heads"),
    "ParallelTransformerEncoderLayer": ("nhead", "nhead"),
    "ParallelTransformerDecoderLayer": ("nhead", "nhead"),
    "ParallelTransformer": ("nhead", "nhead"),
    "ParallelGroupNorm": ("num_groups", None),
    "ParallelLayerNorm": ("normalized_shape", None),
    "ParallelRMSNorm": ("normalized_shape", None),
}
for _n in "12":
    SHARES[f"ColumnParallelConv{_n}d"] = ("out_channels", None)
    SHARES[f"RowParallelConv{_n}d"] = ("in_channels", None)
    SHARES[f"GroupParallelConv{_n}d"] = ("out_channels", None)
    SHARES[f"ParallelBatchNorm{_n}d"] = ("num_features", None)

_TABLE = ("num_embeddings", "embedding_dim", "padding_idx", "sparse", "device", "dtype")
_COLUMN = Split("tensor_parallel", "ColumnParallelLinear", "partition")
_ROW = Split(
    "tensor_parallel",
    "RowParallelLinear",
    "partial sum",
    frozenset({"bias"}),
    False,
    takes_part=True,
)
_COLUMN_CONV1D, _ROW_CONV1D = (
    replace(split, module="conv1d", name=name, arguments=("nf", "nx"))
    for split, name in ((_COLUMN, "ColumnParallelConv1D"), (_ROW, "RowParallelConv1D"))
)
_EMBEDDING = Split(
    "tensor_parallel",
    "ColumnParallelEmbedding",
    "partition",
    has_input_gradient=False,
    arguments=_TABLE,
)
_BAG = Split(
    "embedding_bag",
    "VocabParallelEmbeddingBag",
    "partial sum",
    has_input_gradient=False,
    arguments=(*_TABLE[:2], "mode", "include_last_offset", *_TABLE[3:]),
)
_VOCABULARY = replace(_EMBEDDING, name="VocabParallelEmbedding", output="partial sum")

_CONVOLUTION = (
    "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "bias",
    "padding_mode", "device", "dtype",
)  # fmt: skip
_CHANNELS = ("num_features", "eps", "momentum", "affine", "track_running_stats", "device", "dtype")
_FEATURES = ("normalized_shape", "eps", "elementwise_affine")
_GROUPS = ("num_groups", "num_channels", "eps", "affine", "device", "dtype")


def _convolution(name: str, axes: tuple[int, ...]) -> dict[tuple[str, int], Split]:
    column, row = (
        replace(split, module="convolution", name=made, arguments=_CONVOLUTION, axes=axes)
        for split, made in ((_COLUMN, f"ColumnParallel{name}"), (_ROW, f"RowParallel{name}"))
    )
    return {("weight", 0): column, ("bias", 0): column, ("weight", 1): row}


def _of_channels(
    module: str, name: str, arguments: tuple[str, ...], axes: tuple[int, ...], *tensors: str
) -> dict[tuple[str, int], Split]:
    """The splits of a layer that computes each channel, or group of channels, independently."""
    split = Split(
        module,
        name,
        "partition",
        has_input_gradient=False,
        arguments=arguments,
        takes_part=True,
        axes=axes,
    )
    return {(tensor, 0): split for tensor in ("weight", "bias", *tensors)}


# The parameters that are split inside a composite layer of torch: path and name -> axis, and the
# number of blocks packed along it.
Inner = dict[tuple[str, str], tuple[int, int]]
_PROJECTED: Inner = {("out_proj", "weight"): (1, 1)}
_PACKED: Inner = {("", "in_proj_weight"): (0, 3), ("", "in_proj_bias"): (0, 3)}
_FEEDING: Inner = {
    ("linear1", "weight"): (0, 1),
    ("linear1", "bias"): (0, 1),
    ("linear2", "weight"): (1, 1),
}


def _attending(*names: str) -> Inner:
    """The split parameters of a transformer layer with attentions of these names."""
    inner = _PACKED | _PROJECTED
    return _FEEDING | {
        (f"{name}.{path}".rstrip("."), tensor): how
        for name in names
        for (path, tensor), how in inner.items()
    }


INNER: dict[str, Inner] = {
    "torch.nn.modules.activation.MultiheadAttention": _PACKED | _PROJECTED,
    "torch.nn.modules.transformer.TransformerEncoderLayer": _attending("self_attn"),
    "torch.nn.modules.transformer.TransformerDecoderLayer": _attending(
        "self_attn", "multihead_attn"
    ),
}
_ATTENTION = Split(
    "multihead_attention",
    "ParallelMultiheadAttention",
    "partial sum",
    arguments=(
        "embed_dim", "num_heads", "dropout", "bias", "add_bias_kv", "add_zero_attn", "kdim", "vdim",
        "batch_first", "device", "dtype",
    ),
)  # fmt: skip

# By qualified class: parameter and axis -> how sharding it splits the layer.
SPLITS: dict[str, dict[tuple[str, int], Split]] = {
    "torch.nn.modules.linear.Linear": {
        ("weight", 0): _COLUMN,
        ("bias", 0): _COLUMN,
        ("weight", 1): _ROW,
    },
    "torch.nn.modules.sparse.Embedding": {("weight", 0): _VOCABULARY, ("weight", 1): _EMBEDDING},
    "torch.nn.modules.sparse.EmbeddingBag": {("weight", 0): _BAG},
    # The weight of transformers' Conv1D is that of a linear layer, transposed.
    "transformers.pytorch_utils.Conv1D": {
        ("weight", 1): _COLUMN_CONV1D,
        ("bias", 0): _COLUMN_CONV1D,
        ("weight", 0): _ROW_CONV1D,
    },
    "torch.nn.modules.normalization.GroupNorm": _of_channels(
        "normalization", "ParallelGroupNorm", _GROUPS, (1,)
    ),
    "torch.nn.modules.normalization.LayerNorm": _of_channels(
        "normalization", "ParallelLayerNorm", (*_FEATURES, "bias", "device", "dtype"), (-1,)
    ),
    "torch.nn.modules.normalization.RMSNorm": _of_channels(
        "normalization", "ParallelRMSNorm", (*_FEATURES, "device", "dtype"), (-1,)
    ),
}
_TRANSFORMER = Split(
    "transformer_layers",
    "",
    "whole",
    has_input_gradient=False,
    arguments=(
        "d_model", "nhead", "dim_feedforward", "dropout", "activation", "layer_norm_eps",
        "batch_first", "norm_first", "bias", "device", "dtype",
    ),
)  # fmt: skip
_STACKS_OF_LAYERS = replace(
    _TRANSFORMER,
    name="ParallelTransformer",
    arguments=(
        *_TRANSFORMER.arguments[:2], "num_encoder_layers", "num_decoder_layers",
        *_TRANSFORMER.arguments[2:],
    ),
)  # fmt: skip
# How composite layers of torch are split, with all their submodules.
_AS_ONE: dict[str, Split] = {
    name: _ATTENTION
    if name.endswith("MultiheadAttention")
    else replace(_TRANSFORMER, name=f"Parallel{name.rpartition('.')[2]}")
    for name in INNER
}
_AS_ONE["torch.nn.modules.transformer.Transformer"] = _STACKS_OF_LAYERS
SPLITS.update((name, {}) for name in _AS_ONE)  # parameters: see `inner_of`

# The same for grouped convolutions.
_GROUPED: dict[str, dict[tuple[str, int], Split]] = {}

for _n, _axes in (("1", (1, -2)), ("2", (1, -3))):
    SPLITS[f"torch.nn.modules.conv.Conv{_n}d"] = _convolution(f"Conv{_n}d", _axes)
    _GROUPED[f"torch.nn.modules.conv.Conv{_n}d"] = _of_channels(
        "convolution", f"GroupParallelConv{_n}d", _CONVOLUTION, _axes
    )
    SPLITS[f"torch.nn.modules.batchnorm.BatchNorm{_n}d"] = _of_channels(
        "normalization",
        f"ParallelBatchNorm{_n}d",
        _CHANNELS,
        (1,) if _n == "1" else _axes,
        "running_mean",
        "running_var",
    )


def size_of(layer: Layer, call: ast.Call) -> ast.expr | None:
    """The argument of a call that is the size which a layer splits; None if it is missing."""
    name = SHARES[layer.name][0]
    return Signature(layer.arguments, (name,)).bind(given_by(call)).given.get(name)


def splits_of(module: object) -> dict[tuple[str, int], Split] | None:
    """How a module can be split, by its class or a base class; None if it cannot."""
    base = base_of(type(module))
    if base is None or (isinstance(module, nn.EmbeddingBag) and module.mode == "max"):
        return None  # the maxima of shards do not add up
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
        return None  # the gradients of shards are dense
    if (split := _AS_ONE.get(qualified(base))) is not None:
        inner = inner_of(module).items()
        return {(joined_path(path, name), axis): split for (path, name), (axis, _) in inner}
    return (_GROUPED if is_grouped(module) else SPLITS)[qualified(base)]


def inner_of(module: object) -> Inner:
    """The split parameters inside a composite layer; empty for other modules.

    For an `nn.Transformer` they are those of all its layers, if torch has made them.
    """
    base = base_of(type(module))
    if base is None or not isinstance(module, nn.Transformer):
        return {} if base is None else INNER.get(qualified(base), {})
    stacks = {"encoder": nn.TransformerEncoder, "decoder": nn.TransformerDecoder}
    found: Inner = {}
    for stack, cls in stacks.items():
        if type(module.get_submodule(stack)) is not cls:
            return {}
        layers = module.get_submodule(f"{stack}.layers")
        assert isinstance(layers, nn.ModuleList)
        for number, layer in enumerate(layers):  # one layer may occur several times
            below = INNER.get(qualified(type(layer)))
            if below is None:
                return {}
            at = f"{stack}.layers.{number}."
            found |= {(f"{at}{path}", name): how for (path, name), how in below.items()}
    return found


def is_grouped(module: object) -> bool:
    """Whether a module is a grouped convolution."""
    return getattr(module, "groups", 1) != 1


def split_of(module: object, layer: Layer) -> Split:
    """How a layer splits the module that it replaces."""
    return next(split for split in (splits_of(module) or {}).values() if split.name == layer.name)


def base_of(cls: type) -> type | None:
    """The class with a tensor-parallel counterpart among a class and its bases."""
    return next((c for c in cls.__mro__ if qualified(c) in SPLITS), None)


def layer_below(cls: type) -> type | None:
    """The layer of torch whose `forward` a class overrides; None if it does not."""
    base = base_of(cls)
    if base is None or getattr(cls, "forward") is getattr(base, "forward"):  # noqa: B009
        return None
    return base


def qualified(cls: type) -> str:
    """The full name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


# Replicated layers that each rank runs on a shard, so that their gradients are summed.
SUMMING: dict[type, Layer] = {
    cls: Layer("replicated", f"Replicated{cls.__name__}")
    for cls in (nn.LayerNorm, nn.RMSNorm, nn.Linear, nn.Embedding)
}


def summing_base(cls: type) -> type | None:
    """The class with a counterpart in `SUMMING` among a class and its bases."""
    return next((c for c in cls.__mro__ if c in SUMMING), None)
