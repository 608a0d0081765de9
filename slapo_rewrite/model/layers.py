"""Which tensor-parallel layer takes the place of which torch layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn


@dataclass(frozen=True)
class Layer:
    """A layer of `slapo_rewrite.runtime` in the place of a torch one.

    Attributes:
        module: The runtime module that defines it.
        name: The class.
        keywords: Keyword arguments beside the original's, as values.
        arguments: What its constructor takes of the original's arguments; empty where it takes all.
        unit: The attribute of the owner whose value the split must be a multiple of (a head's size,
            say).
    """

    module: str
    name: str
    keywords: tuple[tuple[str, object], ...] = ()
    arguments: tuple[str, ...] = ()
    unit: str | None = None


@dataclass(frozen=True)
class Split:
    """One way to split a layer: which class does it, and what its output is on a rank.

    Attributes:
        module: The runtime module that defines the class.
        name: The class.
        output: `partition` or `partial sum`.
        whole: The parameters that stay whole; a parameter that is neither sharded nor here must be
        sharded as well. has_input_gradient: Whether the input has a gradient that is a partial sum
        on each rank.
    """

    module: str
    name: str
    output: str
    whole: frozenset[str] = frozenset()
    has_input_gradient: bool = True
    arguments: tuple[str, ...] = ("in_features", "out_features", "bias", "device", "dtype")


# The layer that lets several ranks hold the same heads, by the layer that does not.
_REPLICATED = {"ColumnParallelLinear": ("grouped_query", "KeyValueParallelLinear")}


def replicated(layer: Layer, unit: str) -> Layer | None:
    """The layer of which several ranks may hold the same units; None where there is none."""
    if layer.name not in _REPLICATED or {"parts", "gather_output"} & dict(layer.keywords).keys():
        return None
    module, name = _REPLICATED[layer.name]
    return replace(layer, module=module, name=name, unit=unit)


# The attribute that is this rank's share on a layer, and the one that has the whole size, if any.
SHARES: dict[str, tuple[str, str | None]] = {
    "ColumnParallelLinear": ("out_features", None),
    "KeyValueParallelLinear": ("out_features", None),
    "RowParallelLinear": ("in_features", None),
    "ColumnParallelConv1D": ("nf", None),
    "RowParallelConv1D": ("nx", None),
    "VocabParallelEmbedding": ("num_embeddings", "full_num_embeddings"),
    "ColumnParallelEmbedding": ("embedding_dim", None),
}

_TABLE = ("num_embeddings", "embedding_dim", "padding_idx", "device", "dtype")
_COLUMN = Split("tensor_parallel", "ColumnParallelLinear", "partition")
_ROW = Split("tensor_parallel", "RowParallelLinear", "partial sum", frozenset({"bias"}), False)
_COLUMN_CONV1D = Split("conv1d", "ColumnParallelConv1D", "partition", arguments=("nf", "nx"))
_ROW_CONV1D = Split(
    "conv1d",
    "RowParallelConv1D",
    "partial sum",
    frozenset({"bias"}),
    False,
    arguments=("nf", "nx"),
)
_VOCABULARY = Split(
    "tensor_parallel",
    "VocabParallelEmbedding",
    "partial sum",
    has_input_gradient=False,
    arguments=_TABLE,
)
_EMBEDDING = Split(
    "tensor_parallel",
    "ColumnParallelEmbedding",
    "partition",
    has_input_gradient=False,
    arguments=_TABLE,
)

# By qualified class: parameter and axis -> how that splits the layer.
SPLITS: dict[str, dict[tuple[str, int], Split]] = {
    "torch.nn.modules.linear.Linear": {
        ("weight", 0): _COLUMN,
        ("bias", 0): _COLUMN,
        ("weight", 1): _ROW,
    },
    "torch.nn.modules.sparse.Embedding": {
        ("weight", 0): _VOCABULARY,
        ("weight", 1): _EMBEDDING,
    },
    # The weight of transformers' Conv1D is that of a linear layer, transposed.
    "transformers.pytorch_utils.Conv1D": {
        ("weight", 1): _COLUMN_CONV1D,
        ("bias", 0): _COLUMN_CONV1D,
        ("weight", 0): _ROW_CONV1D,
    },
}


def splits_of(cls: type) -> dict[tuple[str, int], Split] | None:
    """How a class, or the one that it is derived from, can be split; None where none can."""
    base = base_of(cls)
    return SPLITS[_qualified(base)] if base else None


def split_of(cls: type, layer: Layer) -> Split:
    """How a layer splits the module of a class whose place it takes."""
    return next(split for split in (splits_of(cls) or {}).values() if split.name == layer.name)


def base_of(cls: type) -> type | None:
    """The class with a tensor-parallel counterpart that a class is or is derived from."""
    return next((c for c in cls.__mro__ if _qualified(c) in SPLITS), None)


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


# Layers that every rank has whole and runs on a part, so that their gradients are summed.
SUMMING: dict[type, Layer] = {
    cls: Layer("replicated", f"Replicated{cls.__name__}")
    for cls in (nn.LayerNorm, nn.RMSNorm, nn.Linear, nn.Embedding)
}


def summing_base(cls: type) -> type | None:
    """The class with a counterpart in `SUMMING` that a class is or is derived from."""
    return next((c for c in cls.__mro__ if c in SUMMING), None)
