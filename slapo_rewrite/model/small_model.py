"""The small model that verification runs, its inputs and its loss.

Also executed by its path in processes that may not import the rest of this package, so it imports
torch and the standard library only.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

VOCABULARY = 203  # odd: no world size above 1 that people use divides it
HEAD_SIZE = 16  # rotary parts of a half, a quarter and 0.4 of it are even
LARGEST_TWIN = 200_000_000  # parameters; each process holds about ten times their bytes
BATCH, TOKENS = 2, 16
FIRST_PADDED = 12  # the second row is padding from here on

_WIDTHS = (
    "hidden_size",
    "d_model",
    "dim",
    "embed_dim",
    "embedding_size",
    "word_embed_proj_dim",
    "rnn_hidden_size",
    "attention_hidden_size",
    "lru_width",
)
_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "num_self_attends_per_block",
)
# Lists of the layers that are of some kind, by their numbers.
_NUMBERS_OF_LAYERS = ("mlp_only_layers", "moe_layers", "cross_attention_layers")
_HEADS = (
    "num_attention_heads",
    "n_heads",
    "num_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "num_encoder_attention_heads",
    "num_decoder_attention_heads",
)
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "multi_query_group_num")
_HEAD_SIZES = (
    "head_dim",
    "d_kv",
    "kv_channels",
    "attention_head_dim",
    "global_head_dim",
    "dim_head",
    "d_head",
)
_INNER = (
    "intermediate_size",
    "ffn_dim",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "d_ff",
    "n_inner",
    "ffn_hidden_size",
    "inner_dim",
    "dense_ffn_hidden_size",
    "dim_ff",
    "d_inner",
    "intermediate_size_mlp",
    "dense_intermediate_size",
    "shared_intermediate_size",
)
POSITIONS = (
    "max_position_embeddings",
    "original_max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_sequence_length",
    "max_seq_len",
    "max_source_positions",
    "max_target_positions",
    "seq_length",
)
_AT_MOST = {  # sizes that stand alone
    "sliding_window": 8,
    "window_size": 8,
    "attention_window": 8,
    "attention_chunk_size": 8,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "num_hidden_groups": 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 0,
    "num_queries": 16,
    "mamba_num_heads": 8,
    "mamba_chunk_size": 8,
    "ssm_state_size": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


@contextlib.contextmanager
def drawing(seed: int) -> Iterator[None]:
    """The same random numbers every time, of torch, of Python and of NumPy.

    Speech models of transformers draw what they mask with NumPy.
    """
    numpy: Any = sys.modules.get("numpy")
    before = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            random.seed(seed)
            if numpy:
                numpy.random.seed(seed)
            yield
    finally:
        random.setstate(before[0])
        if numpy:
            numpy.random.set_state(before[1])


def random_states() -> tuple[Any, ...]:
    """What tells whether random numbers were drawn, of torch, of Python or of NumPy."""
    numpy: Any = sys.modules.get("numpy")
    own = torch.get_rng_state().tolist(), random.getstate()
    if not numpy:
        return own
    other = numpy.random.get_state(legacy=False)["state"]
    return *own, other["key"].tolist(), other["pos"]


@contextlib.contextmanager
def casts_left_out() -> Iterator[None]:
    """Values in floating point stay what they are where a method of theirs casts them.

    What is computed in half precision is computed in what the parameters are in, so that nothing
    but a difference in rounding is left out. The methods themselves are exchanged, for all threads.
    """
    tensor: Any = torch.Tensor

    def kept(cast: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return self if self.is_floating_point() else cast(self, *args, **kwargs)

        return method

    names = ("bfloat16", "half", "float")
    for name in names:
        setattr(tensor, name, kept(getattr(tensor, name)))
    try:
        yield
    finally:
        for name in names:
            delattr(tensor, name)  # what torch's own base class has stands behind it


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread for each operation: on small tensors, several do nothing but wait for each other.

    What runs on another thread meanwhile, and backwards, takes the number that is set here.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _scaled(module: Any) -> Iterator[None]:
    """Sizes that an output has of one configuration are taken for a ratio meanwhile."""
    package = getattr(module, "__name__", "").rpartition(".")[0]
    beside = [each for name, each in sys.modules.items() if name.startswith(f"{package}.")]
    names = [getattr(each, "__dict__", {}) for each in (module, *(beside if package else ()))]
    found: list[Any] = [each["PackedSizes"] for each in names if "PackedSizes" in each]
    fixed = {blocks: blocks.may_scale for blocks in found if hasattr(blocks, "may_scale")}
    for blocks in fixed:
        blocks.may_scale = True
    try:
        yield
    finally:
        for blocks, before in fixed.items():
            blocks.may_scale = before


def build_small(schedule: Any, module: Any, depth: int = 2) -> nn.Module:
    """The twin of the model that `schedule` describes, built from `module`.

    Args:
        schedule: The schedule's module.
        module: The module being rewritten, or what it was rewritten to.
        depth: How many layers a smaller config has, at least, if its model has as many.

    Returns:
        `schedule.verify_model(module)` where that is defined, or its class with its config and more
        layers, if it has too few and the config says how many; else the same Hugging Face class
        with a smaller config; else `schedule.model(module)` itself.

    Raises:
        ValueError: The model is too large to be run as it is, and has no config to make smaller.
    """
    with _scaled(module):
        return _small(schedule, module, depth)


def _small(schedule: Any, module: Any, depth: int) -> nn.Module:
    if hasattr(schedule, "verify_model"):
        deep = _deep_enough(schedule, module, depth) if depth > 2 else None
        return deep or _module(schedule.verify_model(module), "verify_model")
    with torch.device("meta"):
        full = _module(schedule.model(module), "model")
    config = getattr(full, "config", None)
    if hasattr(config, "to_dict"):
        return _module(shrunk(full, depth), "the model's class")
    num_parameters = sum(p.numel() for p in full.parameters())
    if num_parameters > LARGEST_TWIN:
        raise ValueError(
            f"the model has {num_parameters:,} parameters, too many to run it here: "
            "define verify_model(m) in the schedule, which builds a smaller one"
        )
    return _module(schedule.model(module), "model")


def _deep_enough(schedule: Any, module: Any, depth: int) -> nn.Module | None:
    """A model of `verify_model`'s config with so many layers, where that has fewer, and says so."""
    with contextlib.suppress(Exception):  # who builds the model itself is told what is wrong
        with torch.device("meta"):  # no random numbers are drawn of those that it starts with
            small, full = schedule.verify_model(module), schedule.model(module)
        lengths, own = _lengths(full), _lengths(small)
        configs = (getattr(small, "config", None), getattr(full, "config", None))
        has_few = any(own.get(path, size) < min(depth, size) for path, size in lengths.items())
        if has_few and all(hasattr(config, "to_dict") for config in configs):
            kept = {size: range(min(size, depth)) for size in lengths.values()}
            deep: nn.Module = type(small)(_deepened(*configs, kept))
            return deep
    return None


def _lengths(model: nn.Module) -> dict[str, int]:
    """How many modules each list has."""
    named = model.named_modules()
    return {path: len(listed) for path, listed in named if isinstance(listed, nn.ModuleList)}


def build_deep(
    schedule: Any,
    module: Any,
    full: nn.Module,
    kept: Mapping[int, Sequence[int]] | None = None,
) -> nn.Module:
    """A twin with all layers of the full model: `verify_model`'s if it has them, else a made one.

    Every pipeline stage has layers then, as it has in the full model. What is made has the config
    of `verify_model`'s but for the layers, or is made smaller by itself. Else `build_small`'s.

    Args:
        schedule: The schedule's module.
        module: The module being rewritten, or what it was rewritten to.
        full: The full model, built from that module.
        kept: Of lists with so many layers, which of them one that is made has.
    """
    if hasattr(schedule, "verify_model"):
        small = build_small(schedule, module)
        if _paths(small) == _paths(full):
            return small
        if hasattr(getattr(small, "config", None), "to_dict"):
            with contextlib.suppress(Exception), _scaled(module):
                deep: nn.Module = type(small)(_deepened(small.config, full.config, kept or {}))
                if kept or _paths(deep) == _paths(full):
                    return deep
    config: Any = getattr(full, "config", None)
    if hasattr(config, "to_dict"):
        # What the schedule says may fit it better.
        with contextlib.suppress(Exception), _scaled(module):
            return shrunk(full, None, kept)
    return build_small(schedule, module)


def _deepened(small: Any, full: Any, kept: Mapping[int, Sequence[int]]) -> Any:
    """A copy of a config with as many layers as another one, of the same kinds.

    Args:
        small: The config.
        full: The other one.
        kept: Of lists with so many layers, which of them it is to have.
    """
    found = copy.deepcopy(small)
    mapped = getattr(full, "attribute_map", {}).get("num_hidden_layers")
    counts = {n: v for n, v in vars(full).items() if (n in _LAYERS or n == mapped) and v}
    for name, value in vars(full).items():
        own = getattr(found, name, None)
        if hasattr(value, "to_dict") and hasattr(own, "to_dict"):
            setattr(found, name, _deepened(own, value, kept))
        elif name in counts:
            setattr(found, name, len(kept.get(value, range(value))))
        elif name in _NUMBERS_OF_LAYERS and value:
            count = next(iter(counts.values()), 0)
            setattr(found, name, _renumbered(value, kept.get(count, range(count))))
        elif isinstance(value, (list, tuple)) and len(value) > 2 and len(value) in counts.values():
            picked = (value[i] for i in kept.get(len(value), range(len(value))))
            setattr(found, name, type(value)(picked))
    return found


def _renumbered(numbers: Any, kept: Sequence[int]) -> Any:
    """The numbers that layers of some kind have where only some layers are there."""
    return type(numbers)(new for new, old in enumerate(kept) if old in numbers)


def _paths(model: nn.Module) -> set[str]:
    return {path for path, _ in model.named_modules()}


def shrunk(
    full: nn.Module, depth: int | None = 2, kept: Mapping[int, Sequence[int]] | None = None
) -> nn.Module:
    """A small model of the same Hugging Face class.

    Args:
        full: The model, also on the meta device.
        depth: How many layers it has, at least; None for as many.
        kept: Of lists with so many layers, which of them it has.
    """
    small = small_config(full.config, depth, kept)
    if type(full).__name__.endswith("ForSequenceClassification") and small.pad_token_id is None:
        small.pad_token_id = 0  # without one they refuse more than one row
    return type(full)(small)


def _module(built: Any, by: str) -> nn.Module:
    if not isinstance(built, nn.Module):
        raise TypeError(f"`{by}` returns {type(built).__name__}, not a torch.nn.Module")
    return built


def small_config(
    config: Any, depth: int | None = 2, kept: Mapping[int, Sequence[int]] | None = None
) -> Any:
    """A copy of a Hugging Face config, small but consistent, without dropout.

    Args:
        config: The config.
        depth: How many layers it has, at least; None for as many.
        kept: Of lists with so many layers, which of them it has; then `depth` says nothing.
    """
    small = copy.deepcopy(config)
    _shrink(small, depth, kept or {})
    return small


def _shrink(config: Any, depth: int | None, layers: Mapping[int, Sequence[int]]) -> None:
    # By the standard names; GPT-2's `n_embd` is known as `hidden_size`.
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
        if hasattr(value, "to_dict") and hasattr(value, "attribute_map"):
            _shrink(value, depth, layers)
        elif name in per_layer and name in sizes:
            setattr(config, own, type(value)([sizes[name]] * len(value)))
        elif name in sizes:
            setattr(config, own, sizes[name])
        elif name in POSITIONS and name in numbers:
            setattr(config, own, min(value, 64))
        elif name in _AT_MOST and name in numbers:
            setattr(config, own, min(value, _AT_MOST[name]))
        elif "drop" in name and isinstance(value, (int, float)) and not isinstance(value, bool):
            setattr(config, own, type(value)(0))
    if layers or depth is not None:
        _shrink_layers(config, depth, layers)
    _shrink_rotary(config)
    _shrink_vocabulary(config)


def _is_uniform(value: Any) -> bool:
    """Whether a value is a list of one number for every layer."""
    return isinstance(value, (list, tuple)) and len({*map(repr, value)}) == 1 == len(
        {type(v) for v in value} & {int}
    )


def _head_sizes(numbers: Mapping[str, int]) -> dict[str, int]:
    """New values for everything that hangs together with heads and hidden size."""

    def first(names: tuple[str, ...]) -> int:
        return next((numbers[n] for n in names if numbers.get(n)), 0)

    hidden = first(_WIDTHS)
    # Layers without heads, of a state space say, are as wide as some would be.
    heads = first(_HEADS) or (first(_INNER) and hidden // HEAD_SIZE)
    if not hidden or not heads:
        return {}
    kv_heads = first(_KV_HEADS) or heads
    size = first(_HEAD_SIZES) or hidden // heads
    small_kv = min(kv_heads, 4)
    ratio = min(max(1, heads // kv_heads), 4)
    if heads >= 4 and small_kv * ratio % 4:  # four ranks divide the queries
        ratio *= 4 // math.gcd(4, small_kv * ratio)
    small_heads = small_kv * ratio
    # Where the heads together are not as wide as the model, they stay so.
    small_hidden = small_heads * (HEAD_SIZE if size * heads == hidden else HEAD_SIZE + 8)
    new = {}
    for name, value in numbers.items():
        if name in _HEADS and value:
            new[name] = small_heads if value >= 4 else value
        elif name in _KV_HEADS and value:
            new[name] = small_kv if value == kv_heads else min(value, small_kv)
        elif name in _HEAD_SIZES and value:
            latent = {numbers.get(n): _AT_MOST[n] for n in ("qk_head_dim", "qk_rope_head_dim")}
            new[name] = latent.get(value, HEAD_SIZE)
        elif name == "rotary_dim" and value:
            new[name] = max(2, HEAD_SIZE * value // size // 2 * 2)
        elif name in _WIDTHS and value:
            new[name] = small_hidden if value == hidden else small_hidden // 2
        elif name in _INNER and value:
            new[name] = max(8, round(min(value / hidden, 4.0) * small_hidden / 8) * 8)
    return new


def _shrink_layers(config: Any, depth: int | None, layers: Mapping[int, Sequence[int]]) -> None:
    """So many layers, or as many as there are kinds; lists with an entry a layer are cut alike."""
    mapped = getattr(config, "attribute_map", {}).get("num_hidden_layers")
    counts = {
        name: value
        for name, value in vars(config).items()
        if (name in _LAYERS or name == mapped) and isinstance(value, int) and value
    }
    if not counts:
        return
    per_layer = {
        name: list(value)
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) > 2 and len(value) in counts.values()
    }
    count = next(iter(counts.values()))
    numbered = {n: getattr(config, n) for n in _NUMBERS_OF_LAYERS if getattr(config, n, None)}
    if depth is None or layers:
        for name, numbers in numbered.items():
            setattr(config, name, _renumbered(numbers, layers.get(count, range(count))))
        for name, values in per_layer.items():
            picked = (values[i] for i in layers.get(len(values), range(len(values))))
            setattr(config, name, type(getattr(config, name))(picked))
        for name, value in counts.items():
            setattr(config, name, len(layers.get(value, range(value))))
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
    pattern = getattr(config, "attention_types", None)  # GPT-Neo: [[["global", "local"], 12]]
    if isinstance(pattern, list) and all(isinstance(p, list) and len(p) == 2 for p in pattern):
        config.attention_types = [[list(config.attention_layers), 1]]


def _shrink_rotary(config: Any) -> None:
    """Lists with an entry for each rotary frequency follow the head size."""
    rotary = getattr(config, "rope_parameters", None)
    if not isinstance(rotary, dict):
        return
    takes_sections = "mrope_section" in getattr(config, "ignore_keys_at_rope_validation", ())
    for parameters in (rotary, *(v for v in rotary.values() if isinstance(v, dict))):
        frequencies = int(HEAD_SIZE * float(parameters.get("partial_rotary_factor") or 1.0)) // 2
        if takes_sections and "rope_type" in parameters:  # without them it takes a large head's
            parameters.setdefault("mrope_section", [1, 1, 1])
        for name, value in parameters.items():
            if name in ("short_factor", "long_factor") and isinstance(value, list):
                parameters[name] = value[:frequencies]
            elif name == "mrope_section" and isinstance(value, list):
                part = frequencies // len(value)
                parameters[name] = [frequencies - part * (len(value) - 1)] + [part] * (
                    len(value) - 1
                )
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
        if name.endswith("_vocab_size") and value == size:
            setattr(config, name, small)
        elif name.endswith(("_token_id", "_token_ids", "_token_index")):
            setattr(config, name, clamp(value))


def step_inputs(schedule: Any, model: nn.Module, seed: int = 7) -> dict[str, Any]:
    """The keyword arguments of one training step.

    Args:
        schedule: The schedule's module; its `inputs(model)` is called where it is defined.
        model: The model that they are for.
        seed: What random numbers start from.

    Returns:
        For a Hugging Face model token ids, a mask with padding at the end of the second row, and
        labels, as far as its `forward` takes them.

    Raises:
        ValueError: There is neither `inputs` nor a config to make inputs from.
    """
    if hasattr(schedule, "inputs"):
        torch.manual_seed(seed)
        return dict(schedule.inputs(model))
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    else:
        vocabulary = getattr(config, "vocab_size", None)
    if not isinstance(vocabulary, int):
        raise ValueError(
            f"no inputs for {type(model).__name__} can be made up, because it has no config with "
            "a vocabulary: define inputs(model) in the schedule"
        )
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocabulary, (BATCH, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, FIRST_PADDED:] = 0
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    given.update(_labels(model, config, ids, generator))
    if getattr(config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = ids.clone()
    taken = inspect.signature(model.forward).parameters
    return {name: value for name, value in given.items() if name in taken}


def training_inputs(schedule: Any, model: nn.Module, padded: bool = False) -> dict[str, Any]:
    """The keyword arguments of one training step, without those of the loss.

    Where the tool makes the inputs, a cache of keys and values is left out, which costs by the
    layer.

    Args:
        schedule: The schedule's module.
        model: The model that they are for.
        padded: Whether inputs that the tool makes have a padding mask: what it holds cannot be
            looked at on the meta device.
    """
    inputs = model_inputs(schedule, model, step_inputs(schedule, model))
    if not hasattr(schedule, "inputs"):
        if not padded:
            inputs.pop("attention_mask", None)
        if "use_cache" in inspect.signature(model.forward).parameters:
            inputs["use_cache"] = False
    return inputs


def _labels(
    model: nn.Module, config: Any, ids: torch.Tensor, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Labels in the shape that the kind of head takes, which its class's name tells."""
    head = type(model).__name__

    def choose(count: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, count, shape, generator=generator)

    if head.endswith("ForSequenceClassification"):
        return {"labels": choose(config.num_labels, BATCH)}
    if head.endswith("ForQuestionAnswering"):
        return {
            "start_positions": choose(FIRST_PADDED, BATCH),
            "end_positions": choose(FIRST_PADDED, BATCH),
        }
    if head.endswith("ForNextSentencePrediction"):
        return {"labels": choose(2, BATCH)}
    tokens = choose(config.num_labels, BATCH, TOKENS) if "ForTokenClass" in head else ids.clone()
    tokens[1, FIRST_PADDED:] = -100
    given = {"labels": tokens}
    if head.endswith("ForPreTraining"):
        given["next_sentence_label"] = choose(2, BATCH)
        given["sentence_order_label"] = choose(2, BATCH)
    return given


def model_inputs(schedule: Any, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a step without those that are for the schedule's `loss` alone.

    They are what that takes beside the outputs and the model's `forward` does not name.
    """
    alone = loss_parameters(schedule).keys() - inspect.signature(model.forward).parameters.keys()
    return {name: value for name, value in inputs.items() if name not in alone}


def loss_parameters(schedule: Any) -> dict[str, inspect.Parameter]:
    """What the schedule's `loss` takes beside the outputs, by name."""
    try:
        _, *more = inspect.signature(schedule.loss).parameters.items()
    except (AttributeError, TypeError, ValueError):  # there is none, or none written in Python
        return {}
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: parameter for name, parameter in more if parameter.kind not in several}


def loss_of(schedule: Any, outputs: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The loss of one step: what `schedule.loss` makes of it, else `outputs.loss`.

    Args:
        schedule: The schedule's module; its `loss` takes the outputs, and by name what else it
            needs of the inputs, targets say.
        outputs: What the model returns.
        inputs: The arguments of the step.

    Raises:
        ValueError: There is no loss.
    """
    choose: Callable[..., Any] | None = getattr(schedule, "loss", None)
    takes = loss_parameters(schedule)
    for name, parameter in takes.items():
        if name not in inputs and parameter.default is parameter.empty:
            raise ValueError(
                f"`loss` in the schedule takes `{name}`, which inputs(model) does not give"
            )
    more = {name: inputs[name] for name in takes if name in inputs}
    loss = choose(outputs, **more) if choose else _own_loss(outputs)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shown = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(
            f"the step gives no loss but {shown}: let inputs(model) in the schedule ask for one "
            "(labels), or define loss(outputs)"
        )
    return loss


def _own_loss(outputs: Any) -> Any:
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    return getattr(outputs, "loss", outputs if isinstance(outputs, torch.Tensor) else None)
