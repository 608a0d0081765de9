"""Shrinks configurations of Hugging Face models, and keeps related sizes consistent.

Also executed by its path, as `small_model`, so it imports the standard library only.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

VOCABULARY = 203  # odd: not divisible by any world size above 1 that people use
FIRST_DRAWN = 3  # smaller tokens do not occur in generated texts
HEAD_SIZE = 16  # a half, a quarter and 0.4 of it are even, for partial rotary embeddings

_WIDTHS = (
    "hidden_size", "d_model", "dim", "embed_dim", "embedding_size", "word_embed_proj_dim",
    "rnn_hidden_size", "attention_hidden_size", "lru_width",
)  # fmt: skip
_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
    "num_encoder_layers", "num_decoder_layers", "num_self_attends_per_block", "num_blocks",
)  # fmt: skip
# Lists of the numbers of layers of some kind.
_NUMBERS_OF_LAYERS = ("mlp_only_layers", "moe_layers", "cross_attention_layers")
_HEADS = (
    "num_attention_heads", "n_heads", "num_heads", "encoder_attention_heads",
    "decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads",
)  # fmt: skip
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "multi_query_group_num")
_HEAD_SIZES = (
    "head_dim", "d_kv", "kv_channels", "attention_head_dim", "global_head_dim", "dim_head",
    "d_head",
)  # fmt: skip
_INNER = (
    "intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner",
    "ffn_hidden_size", "inner_dim", "dense_ffn_hidden_size", "dim_ff", "d_inner",
    "intermediate_size_mlp", "dense_intermediate_size", "shared_intermediate_size",
)  # fmt: skip
# State space layers: the number of heads, and the width of each.
_STATE_HEADS = (
    ("mamba_n_heads", "mamba_d_head"), ("n_mamba_heads", "mamba_headdim"),
    ("mamba_num_heads", "mamba_head_dim"),
)  # fmt: skip
POSITIONS = (
    "max_position_embeddings", "original_max_position_embeddings", "n_positions", "n_ctx",
    "max_sequence_length", "max_seq_len", "max_source_positions", "max_target_positions",
    "seq_length",
)  # fmt: skip
_AT_MOST = {  # upper limits of independent sizes
    "sliding_window": 8, "window_size": 8, "attention_window": 8, "attention_chunk_size": 8,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 24, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "qk_head_dim": 24, "v_head_dim": 16, "num_hidden_groups": 2,
    "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 0, "num_queries": 16, "mamba_num_heads": 8, "mamba_chunk_size": 8,
    "n_groups": 2, "ssm_state_size": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "zero_expert_num": 2, "context_length": 64, "num_filters": 8,
}  # fmt: skip


def small_config(
    config: Any, depth: int | None = 2, kept: Mapping[int, Sequence[int]] | None = None
) -> Any:
    """A copy of a Hugging Face config, small but consistent, without dropout.

    It has at least `depth` layers, or all of them with None. `kept` maps the length of a list to
    the numbers of the layers that stay; it overrides `depth`.
    """
    small = copy.deepcopy(config)
    _shrink(small, depth, kept or {})
    return small


def deepened(small: Any, full: Any, kept: Mapping[int, Sequence[int]]) -> Any:
    """A copy of a small config with the number and kinds of layers of a full one."""
    found = copy.deepcopy(small)
    for name, value in vars(full).items():
        own = getattr(found, name, None)
        if hasattr(value, "to_dict") and hasattr(own, "to_dict"):
            setattr(found, name, deepened(own, value, kept))
    _take_layers(found, full, kept)
    return found


def _take_layers(config: Any, full: Any, kept: Mapping[int, Sequence[int]]) -> None:
    """Copies the layers of a full config of the same class, or those of them that are kept."""
    counts = _counts(full)
    count = next(iter(counts.values()), 0)
    for name, value in [*vars(full).items()]:
        if name in counts:
            setattr(config, name, len(kept.get(value, range(value))))
        elif name in _NUMBERS_OF_LAYERS and value:
            setattr(config, name, _renumbered(value, kept.get(count, range(count))))
        elif _is_per_layer(value, counts):
            picked = (value[i] for i in kept.get(len(value), range(len(value))))
            setattr(config, name, type(value)(picked))


def _counts(config: Any) -> dict[str, int]:
    """The attributes of a config that are numbers of layers."""
    mapped = getattr(config, "attribute_map", {}).get("num_hidden_layers")
    said = ((n, v) for n, v in vars(config).items() if n in _LAYERS or n == mapped)
    return {name: value for name, value in said if isinstance(value, int) and value}


def _is_per_layer(value: Any, counts: Mapping[str, int]) -> bool:
    """Whether a value of a config is a list with an entry for each layer."""
    return isinstance(value, (list, tuple)) and len(value) > 2 and len(value) in counts.values()


def _renumbered(numbers: Any, kept: Sequence[int]) -> Any:
    """Renumbers a list of layers, of which only some are kept."""
    return type(numbers)(new for new, old in enumerate(kept) if old in numbers)


def _shrink(config: Any, depth: int | None, layers: Mapping[int, Sequence[int]]) -> None:
    full = copy.copy(config)
    vars(full).update({n: copy.copy(part) for n, part in vars(config).items() if _is_config(part)})
    # Translates to standard names: GPT-2's `n_embd` is `hidden_size`.
    standard = {own: name for name, own in getattr(config, "attribute_map", {}).items()}
    numbers = {
        standard.get(name, name): value
        for name, value in vars(config).items()
        if not name.startswith("_") and isinstance(value, int) and not isinstance(value, bool)
    }
    per_layer = {name: v for name, v in vars(config).items() if name in _INNER and _is_uniform(v)}
    sizes = _head_sizes(numbers | {name: values[0] for name, values in per_layer.items()})
    for own, value in list(vars(config).items()):
        name = standard.get(own, own)
        if _is_config(value):
            _shrink(value, depth, layers)
        elif name in per_layer and name in sizes:
            setattr(config, own, type(value)([sizes[name]] * len(value)))
        elif name in sizes:
            setattr(config, own, sizes[name])
        elif name in POSITIONS and name in numbers:
            setattr(config, own, min(value, 64))
        elif name in _AT_MOST and name in numbers:
            setattr(config, own, min(value, _AT_MOST[name]))
        elif name in _AT_MOST and _is_uniform(value):
            setattr(config, own, type(value)(min(v, _AT_MOST[name]) for v in value))
        elif _is_mask(name) and hasattr(config, "mask_time_prob"):  # of SpecAugment
            config.apply_spec_augment = False  # the probabilities stay, and the mask's parameter
        elif _is_drawn(name) and isinstance(value, (int, float)) and not isinstance(value, bool):
            setattr(config, own, type(value)(0))
    if layers or depth is not None:
        _shrink_layers(config, depth, layers)
    _shrink_rotary(config)
    _shrink_vocabulary(config)
    _move_placeholders(config, full)


def _is_config(value: Any) -> bool:
    return hasattr(value, "to_dict") and hasattr(value, "attribute_map")


def _is_drawn(name: str) -> bool:
    """Whether a number is the rate of something random in a step."""
    return _is_mask(name) or "drop" in name or "jitter" in name


def _is_mask(name: str) -> bool:
    """Whether a number is the rate of a speech model's masks, which NumPy draws."""
    return name.startswith("mask_") and name.endswith("_prob")


def _is_uniform(value: Any) -> bool:
    """Whether a value is a list of equal integers."""
    return isinstance(value, (list, tuple)) and len({*map(repr, value)}) == 1 == len(
        {type(v) for v in value} & {int}
    )


def _head_sizes(numbers: Mapping[str, int]) -> dict[str, int]:
    """New values for all sizes that depend on heads and hidden size."""

    def first(names: tuple[str, ...]) -> int:
        return next((numbers[n] for n in names if numbers.get(n)), 0)

    hidden = first(_WIDTHS)
    # Layers without heads, as of a state space, get the width of heads of the usual size.
    heads = first(_HEADS) or (first(_INNER) and hidden // HEAD_SIZE)
    if not hidden or not heads:
        return {}
    kv_heads = first(_KV_HEADS) or heads
    size = first(_HEAD_SIZES) or hidden // heads
    small_kv = min(kv_heads, 4)
    ratio = min(max(1, heads // kv_heads), 4)
    if heads >= 4 and small_kv * ratio % 4:  # query heads are divisible by four ranks
        ratio *= 4 // math.gcd(4, small_kv * ratio)
    small_heads = small_kv * ratio
    # If the heads together are not as wide as the model, that stays so. With 2D positions, six
    # embeddings share the width.
    is_wide = size * heads != hidden or "max_2d_position_embeddings" in numbers
    small_hidden = small_heads * (HEAD_SIZE + 8 if is_wide else HEAD_SIZE)
    expand = numbers.get("expand") or numbers.get("mamba_expand") or 1
    if expand > 1 and size * heads == expand * hidden:
        small_hidden = small_heads * HEAD_SIZE // expand
    new: dict[str, int] = {}
    for count, width in _STATE_HEADS:
        if numbers.get(count, 0) * numbers.get(width, 0) == expand * hidden:
            new |= {count: expand * small_hidden // HEAD_SIZE, width: HEAD_SIZE}
    if (rotated := numbers.get("qk_rope_head_dim")) and (rest := numbers.get("qk_nope_head_dim")):
        small = min(rotated, _AT_MOST["qk_rope_head_dim"])  # its share gives the frequencies
        new |= {"qk_rope_head_dim": small, "qk_nope_head_dim": small * rest // rotated or 1}
        new["qk_head_dim"] = sum(new[name] for name in ("qk_rope_head_dim", "qk_nope_head_dim"))
    for name, value in numbers.items():
        if name in _HEADS and value:
            new[name] = small_heads if value >= 4 else value
        elif name in _KV_HEADS and value:
            new[name] = small_kv if value == kv_heads else min(value, small_kv)
        elif name in _HEAD_SIZES and value:
            latent = {numbers.get(n): new.get(n) for n in ("qk_head_dim", "qk_rope_head_dim")}
            new[name] = latent.get(value) or HEAD_SIZE
        elif name == "rotary_dim" and value:
            new[name] = max(2, HEAD_SIZE * value // size // 2 * 2)
        elif name in _WIDTHS and value:
            new[name] = small_hidden * (value // hidden) if value >= hidden else small_hidden // 2
        elif name in ("coordinate_size", "shape_size"):
            new[name] = value * small_hidden // hidden
        elif name in _INNER and value:
            new[name] = max(8, round(min(value / hidden, 4.0) * small_hidden / 8) * 8)
    return new


def _shrink_layers(config: Any, depth: int | None, layers: Mapping[int, Sequence[int]]) -> None:
    """Reduces a config to `depth` layers or one of each kind, with its lists for each layer."""
    counts = _counts(config)
    if not counts:
        return
    per_layer = {n: list(v) for n, v in vars(config).items() if _is_per_layer(v, counts)}
    count = next(iter(counts.values()))
    given = _given_out(config, count)
    if depth is not None:
        depth = max(depth, len(given))
    numbered = {n: getattr(config, n) for n in _NUMBERS_OF_LAYERS if getattr(config, n, None)}
    if depth is None or layers:
        _take_layers(config, config, layers)
        _renumber_out(config, given, len(layers.get(count, range(count))))
        return
    kept = list(range(depth))
    of_kind = [[number in numbers for number in range(count)] for numbers in numbered.values()]
    if per_layer or of_kind:
        kinds = list(zip(*per_layer.values(), *of_kind, strict=False))
        first_of_kind = {repr(kind): index for index, kind in reversed(list(enumerate(kinds)))}
        kept = sorted(first_of_kind.values())[:4]
        depth = min(depth, len(kinds))
        kept = sorted([*kept, *(i for i in range(depth) if i not in kept)][: max(depth, len(kept))])
    for name, values in per_layer.items():
        setattr(config, name, type(getattr(config, name))(values[i] for i in kept))
    for name, numbers in numbered.items():
        setattr(config, name, _renumbered(numbers, kept))
    for name, value in counts.items():
        setattr(config, name, min(value, len(kept)))
    _renumber_out(config, given, min(count, len(kept)))
    pattern = getattr(config, "attention_types", None)  # GPT-Neo: [[["global", "local"], 12]]
    if isinstance(pattern, list) and all(isinstance(p, list) and len(p) == 2 for p in pattern):
        config.attention_types = [[list(config.attention_layers), 1]]


def _given_out(config: Any, count: int) -> Sequence[int]:
    """The output indices of a backbone whose stages are its layers."""
    stages = getattr(config, "stage_names", None)
    has_one_each = isinstance(stages, list) and len(stages) == count + 1
    return getattr(config, "_out_indices", None) or () if has_one_each else ()


def _renumber_out(config: Any, given: Sequence[int], count: int) -> None:
    """Makes a backbone of `count` layers return the results of its last layers."""
    if given and len(given) <= count:
        config.stage_names = config.stage_names[: count + 1]
        last = range(count + 1 - len(given), count + 1)
        config.set_output_features_output_indices(None, [*last])


def _shrink_rotary(config: Any) -> None:
    """Shortens lists with an entry for each rotary frequency to the head size."""
    rotary = getattr(config, "rope_parameters", None)
    if not isinstance(rotary, dict):
        return
    said = vars(config)
    hidden, heads = said.get("hidden_size"), said.get("num_attention_heads")
    own = hidden // heads if hidden and heads and "head_dim" not in said else HEAD_SIZE
    takes_sections = "mrope_section" in getattr(config, "ignore_keys_at_rope_validation", ())
    for parameters in (rotary, *(v for v in rotary.values() if isinstance(v, dict))):
        frequencies = int(own * float(parameters.get("partial_rotary_factor") or 1.0)) // 2
        if takes_sections and "rope_type" in parameters:  # its default fits large heads only
            parameters.setdefault("mrope_section", [1, 1, 1])
        for name, value in parameters.items():
            if name in ("short_factor", "long_factor") and isinstance(value, list):
                parameters[name] = value[:frequencies]
            elif name == "mrope_section" and isinstance(value, list):
                part = frequencies // len(value)
                rest = frequencies - part * (len(value) - 1)
                others = [part] * (len(value) - 1)  # height and width have equal parts
                is_last = value[:1] == value[1:2]
                parameters[name] = [*others, rest] if is_last else [rest, *others]
            elif name == "original_max_position_embeddings" and isinstance(value, int):
                parameters[name] = min(value, 64)


def _shrink_vocabulary(config: Any) -> None:
    size = getattr(config, "vocab_size", None)
    if not isinstance(size, int):
        return
    small = min(size, VOCABULARY)
    config.vocab_size = small
    moved: dict[int, int] = {}

    def clamp(token: Any) -> Any:
        if isinstance(token, list):
            return [clamp(t) for t in token]
        if not isinstance(token, int) or token < small:
            return token
        return moved.setdefault(token, max(0, small - 1 - len(moved)))

    for name, value in list(vars(config).items()):
        if name.endswith("_vocab_size") and type(value) is int and 0.9 * size <= value <= size:
            setattr(config, name, small)  # the same, or without padding
        elif name.endswith(("_token_id", "_token_ids", "_token_index")):
            setattr(config, name, clamp(value))


def _move_placeholders(config: Any, full: Any) -> None:
    """Keeps placeholder tokens, for images for example, inside the vocabulary of the text part.

    They become tokens below `FIRST_DRAWN`, which generated texts do not use.
    """
    texts = [name for name, part in vars(full).items() if isinstance(_words(part), int)]
    if hasattr(full, "vocab_size") or len(texts) != 1:
        return
    before, after = (_words(vars(each)[texts[0]]) for each in (full, config))
    moved = 0
    for name, value in vars(config).items():
        is_token = name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
        if is_token and after <= value < before:
            setattr(config, name, FIRST_DRAWN - 1 - moved % 2)
            moved += 1


def _words(part: Any) -> Any:
    return getattr(part, "vocab_size", None) if _is_config(part) else None
