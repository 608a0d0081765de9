"""Chooses head, configuration, small model and made-up inputs for a Hugging Face model."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from slapo_rewrite.auto.step import Step
from slapo_rewrite.model.meta_build import on_meta
from slapo_rewrite.model.small_config import small_config
from slapo_rewrite.model.tree import Tree
from slapo_rewrite.sharding.stand_in import StandIn

# Suffixes of classes in order of preference: the heads for pretraining come first.
HEADS = (
    *("ForMaskedLM", "ForConditionalGeneration", "ForCausalLM", "LMHeadModel", "ForPreTraining"),
    *("ForSpeechSeq2Seq", "ForCTC", "ForImageClassification", "ForVideoClassification"),
    *("ForAudioClassification", "ForSequenceClassification", "ForSemanticSegmentation"),
    *("ForObjectDetection", "ForTokenClassification", "ForQuestionAnswering"),
)
# An argument of contrastive models of text and images; these are preferred to any head.
CONTRASTIVE = "return_loss"
# The most heads that are tried.
MOST_HEADS = 4
# Numbers of layers to try for a small model.
DEPTHS = (2, 3, 4, 5, 6, 8)
# Entries that may be None in a default configuration although the model needs them, with functions
# that compute a value from the configuration.
OPEN: dict[str, Callable[[Any], object]] = {
    "head_dim": lambda config: config.hidden_size // config.num_attention_heads,
    "num_key_value_heads": lambda config: config.num_attention_heads,
    "num_experts_per_tok": lambda config: 2,
    "vocab_size": lambda config: 1000,
    "layer_types": lambda config: ["full_attention"] * config.num_hidden_layers,
    "mlp_layer_types": lambda config: ["dense"] + ["sparse"] * (config.num_hidden_layers - 1),
    "num_experts": lambda config: 8,
    "n_routed_experts": lambda config: 8,
    "n_shared_experts": lambda config: 1,
    "top_k_experts": lambda config: 2,
    "moe_intermediate_size": lambda config: config.hidden_size,
    "prediction_length": lambda config: 8,
    "context_length": lambda config: max(config.lags_sequence),
    "default_language": lambda config: config.languages[0],
}
# The edge length of images, in pixels, if a configuration has no patch size.
SMALL_IMAGE = 64
# The edge length, in patches, of windows of attention in images.
SMALL_WINDOW = 2

# By the usual names of arguments of `forward`: expressions that may be passed. `$name` stands for
# a number of the configuration or of a part of it; `$name:3` for 3 if there is none.
TOKENS = "torch.randint(3, $vocab_size:100, (2, 16))"
# Each row ends in the token from whose position text encoders take the result.
ENDED = (
    "torch.cat((torch.randint(3, $vocab_size, (2, 15)), torch.full((2, 1), $eos_token_id:2)), 1)"
)
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "input_ids": (TOKENS, "torch.randint(3, $vocab_size:100, (2 * $num_codebooks, 16))"),
    "decoder_input_ids": (TOKENS,),
    "pixel_values": (
        "torch.randn(2, $num_channels:3, $image_size:64, $image_size:64)",
        "torch.randn(2, 2, $num_channels:3, $image_size:64, $image_size:64)",
        "torch.randn(2, $num_channels:3, $image_size:224, $image_size:224)",
        "torch.randn(2, $num_frames:8, $num_channels:3, $image_size:224, $image_size:224)",
    ),
    "pixel_values_videos": (
        "torch.randn(2, $frames_per_clip:8, $num_channels:3, $crop_size:64, $crop_size:64)",
        "torch.randn(2, $frames_per_clip:8, $num_channels:3, $image_size:224, $image_size:224)",
    ),
    "input_features": (
        "torch.randn(2, $num_mel_bins:80, 2 * $max_source_positions:32)",
        "torch.randn(2, 64, $input_feat_per_channel:80)",
        "torch.randn(2, 64, $feature_projection_input_dim:160)",
        "torch.randn(2, 64, $num_mel_bins:80)",
        "torch.randn(2, 1, $spec_size:64, $num_mel_bins:64)",
    ),
    "input_values": (
        "torch.randn(2, 4000)",
        "torch.randn(2, 1, 4000)",
        "torch.randn(2, $max_length:64, $num_mel_bins:80)",
    ),
    "past_values": (
        "torch.randn(2, $context_length:64, $num_input_channels:1)",
        "torch.randn(2, $seq_length:64, $num_input_channels:1)",
        "torch.randn(2, 2 * $context_length:32)",
    ),
    "past_time_features": ("torch.randn(2, 2 * $context_length:32, $num_time_features:1)",),
    "past_observed_mask": ("torch.ones(2, 2 * $context_length:32)",),
    "future_values": (
        "torch.randn(2, $prediction_length:8)",
        "torch.randn(2, $prediction_length:8, $num_input_channels:1)",
    ),
    "future_time_features": ("torch.randn(2, $prediction_length:8, $num_time_features:1)",),
    "flattened_patches": (
        "torch.cat((torch.randint(4, (2, 9, 2)), torch.randn(2, 9, $patch_embed_hidden_size)), 2)",
    ),
    "visual_feats": ("torch.randn(2, 8, $visual_feat_dim)",),
    "visual_pos": ("torch.rand(2, 8, 4)",),
    "states": ("torch.randn(2, 16, $state_dim)",),
    "actions": ("torch.randn(2, 16, $act_dim)",),
    "rewards": ("torch.randn(2, 16, 1)",),
    "returns_to_go": ("torch.randn(2, 16, 1)",),
    "timesteps": ("torch.randint(16, (2, 16))",),
    "spectrogram_labels": ("torch.randn(2, 16, $num_mel_bins:80)",),
    "duration_labels": ("torch.ones(2, 16, dtype=torch.long)",),
    "pitch_labels": ("torch.randn(2, 16, 1)",),
    "energy_labels": ("torch.randn(2, 16, 1)",),
    "bbox": ("torch.zeros(2, 16, 4, dtype=torch.long)",),
    "bool_masked_pos": (
        "torch.zeros(2, ($image_size:224 // $patch_size:16) ** 2, dtype=torch.bool)",
    ),
    "image_attention_mask": ("torch.ones(2, 16, 2, dtype=torch.long)",),
    "inputs": (TOKENS, "torch.randn(2, 4000)"),
    CONTRASTIVE: ("True",),
}
# Arguments other than labels from which a loss is computed.
TARGETS = ("future_values", "future_time_features")
IN_TEXT = "torch.randint(16, (2,))"
# Labels of heads whose labels are not their input tokens, by a part of the class's name.
LABELS: dict[str, dict[str, str]] = {
    "TokenClassification": {"labels": "torch.randint($num_labels, (2, 16))"},
    "Classification": {"labels": "torch.randint($num_labels, (2,))"},
    "QuestionAnswering": {"start_positions": IN_TEXT, "end_positions": IN_TEXT},
    "SemanticSegmentation": {
        "labels": "torch.randint($num_labels, (2, $image_size:64, $image_size:64))"
    },
    "CTC": {"labels": "torch.randint(3, $vocab_size, (2, 4))"},
    "SpeechSeq2Seq": {"labels": TOKENS},
    "ConditionalGeneration": {"labels": TOKENS},
}


def is_one(cls: type) -> bool:
    """Whether a class is a Hugging Face model that can be built from a configuration."""
    return getattr(cls, "config_class", None) is not None


def in_order(classes: list[Any]) -> list[Any]:
    """The models among these classes, in the order of preference of `HEADS`."""
    models = [cls for cls in classes if is_one(cls)]

    def rank(cls: Any) -> tuple[int, int]:
        suffix = next((i for i, s in enumerate(HEADS) if cls.__name__.endswith(s)), len(HEADS))
        if CONTRASTIVE in inspect.signature(cls.forward).parameters:
            suffix = -1
        return suffix, int("For" not in cls.__name__)

    built = [cls for cls in models if not cls.__name__.endswith("PreTrainedModel")]
    return sorted(built, key=rank)[:MOST_HEADS]


def steps_of(cls: Any) -> Iterator[Step]:
    """Training steps of a model of a class, in its default configuration; some may not run.

    Later steps fill in what the default configuration leaves open, or switch off caches.

    Raises:
        Exception: Anything that the constructor of the configuration raises.
    """
    config_class = cls.config_class
    config, imported = config_class(), {_imported(config_class)}
    words, text = f"{cls.__name__} in its default configuration", f"{config_class.__name__}()"
    closed = _close(filled := copy.deepcopy(config))
    try:
        yield from _steps(cls, config, words, text, imported)
    except Exception:  # no model can be built from it
        if not closed:
            raise
    ways = [(filled, f"with {', '.join(closed)}")] if closed else []
    caching = copy.deepcopy(filled)
    if users := [part for part in _parts(caching) if vars(part).get("use_cache")]:
        for part in users:  # training needs no cache
            part.use_cache = False
        ways.append((caching, f"with {', '.join([*closed, '`use_cache`'])}"))
    for way, said in ways:
        words = f"{cls.__name__} in its default configuration, {said}"
        yield from _steps(cls, way, words, _construction(way, imported), imported)


def _close(config: Any) -> list[str]:
    """Fills in what a configuration and its parts leave open; returns the entries' names."""
    found = []
    for part in _parts(config):
        for name, value in OPEN.items():
            if vars(part).get(name, 0) is None:
                with contextlib.suppress(AttributeError):
                    setattr(part, name, value(part))
                    found.append(f"`{name}`")
    return [*dict.fromkeys(found)]


def _steps(
    cls: Any, config: Any, title: str, text: str, imported: set[tuple[str, str]]
) -> Iterator[Step]:
    """The steps of a model in a configuration, which `text` builds with the imports."""
    step = Step(title, tuple(sorted(imported)), f"m.{cls.__name__}({text})")
    with on_meta():
        model = cls(copy.deepcopy(config))
    takes = inspect.signature(cls.forward).parameters
    main = getattr(cls, "main_input_name", "input_ids")
    mains = main if isinstance(main, list) else [main]
    small = _small(cls, config, model)
    smaller = [*_seeing_less(small), *_seeing_less(_following(small, config)), small]
    twins = dict.fromkeys([*(_twin(cls, config) for config in smaller), (None, ())])
    for twin, imports in twins:
        own = replace(step, twin=twin, imports=tuple(sorted({*step.imports, *imports})))
        # The tool's own inputs need `vocab_size` in the configuration itself.
        has_words = isinstance(getattr(config, "vocab_size", None), int)
        reads = "input_ids" in takes and main == "input_ids" and CONTRASTIVE not in takes
        # Labels that are no tokens have shapes that only written inputs say.
        answers = cls.__name__.endswith(("Classification", "QuestionAnswering"))
        if reads and has_words and not answers:
            yield own
        known: list[dict[str, str]] = []  # different templates may give the same inputs
        for made_up in _made_up(takes, mains, cls.__name__):
            if (inputs := _filled(made_up, model.config)) not in known:
                known.append(inputs)
                yield replace(own, inputs=inputs)
        if reads and has_words and answers:
            yield own


def _small(cls: Any, config: Any, model: nn.Module) -> Any:
    """A small configuration of a model, with enough layers to have each kind of them.

    For example, the first and last layers may be of another class than those between, or every
    fourth layer may be a mixture of experts.
    """
    tree, kinds, found = Tree(model), {*map(type, model.modules())}, None
    for depth in DEPTHS:
        small = small_config(config, depth)
        with on_meta(), contextlib.suppress(Exception):  # the trial run reports the error
            made = cls(_made_again(small))
            if kinds <= {*map(type, made.modules())}:
                found = small if found is None else found
                _check_alike(tree, made)
                return small
    return small_config(config, DEPTHS[0]) if found is None else found


def _check_alike(tree: Tree, small: nn.Module) -> None:
    """Raises `CannotStandIn` if a small model lacks a kind of layer."""
    StandIn(tree, {}, lambda: (small, {}))


def _made_again(config: Any) -> Any:
    """A configuration rebuilt from its text, since its constructor may derive other entries."""
    try:
        names = {type(part).__name__: type(part) for part in _parts(config)}
        return eval(_construction(config, set()), names)
    except Exception:  # it cannot be expressed by arguments
        return copy.deepcopy(config)


def _made_up(
    takes: Mapping[str, inspect.Parameter], mains: Sequence[str], name: str
) -> Iterator[dict[str, str]]:
    """Candidates for arguments of `forward`: the required ones first, then all known ones."""
    needed = [n for n, p in takes.items() if p.default is p.empty and p.kind in _NAMED]
    wanted = [n for n in dict.fromkeys([*mains, *needed[1:]]) if n in takes]
    arguments = ARGUMENTS | ({"input_ids": (ENDED,)} if CONTRASTIVE in takes else {})
    known = [n for n in arguments if n in takes]
    targets = [n for n in TARGETS if n in takes]
    for names in dict.fromkeys(
        tuple(dict.fromkeys([*wanted, *more])) for more in (targets, [], known)
    ):
        if not names or any(name not in arguments for name in names):
            continue
        for texts in itertools.product(*(arguments[name] for name in names)):
            given = dict(zip(names, texts, strict=True))
            labels = next((t for n, t in LABELS.items() if n in name), None)
            if labels is not None and labels.keys() <= takes.keys():
                yield {**given, **labels}
            yield given


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _imported(cls: type) -> tuple[str, str]:
    import transformers

    if getattr(transformers, cls.__name__, None) is cls:
        return "transformers", cls.__name__
    return cls.__module__, cls.__name__


def _filled(given: Mapping[str, str], config: Any) -> dict[str, str]:
    """The expressions by argument, with `$name` replaced by numbers of the configuration."""
    found = {}
    for name, text in given.items():
        words = text.split("$")
        for number, word in enumerate(words[1:], 1):
            end = next((i for i, c in enumerate(word) if not (c.isalnum() or c in "_:")), len(word))
            wanted, _, default = word[:end].partition(":")
            words[number] = (_place_of(config, wanted) or default or "1") + word[end:]
        found[name] = "".join(words)
    return found


def _place_of(config: Any, name: str, path: str = "model.config", depth: int = 2) -> str | None:
    """An expression for a number of a configuration or of a nested one; None if it has none."""
    value = getattr(config, name, None)
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
        return f"{path}.{name}[0]"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{path}.{name}"
    for inner, part in vars(config).items() if depth else ():
        if hasattr(part, "to_dict") and (
            found := _place_of(part, name, f"{path}.{inner}", depth - 1)
        ):
            return found
    return None


def _seeing_less(config: Any) -> Iterator[Any]:
    """Copies of a configuration for smaller images and fewer frames, the smallest first.

    Each level has at most two layers. If attention has windows, the first copy has images of a few
    patches, the second images reduced like the windows, and the last ones of full size.
    """
    for attempt in range(3):
        small = copy.deepcopy(config)
        for part in _parts(small):
            tubelet = _numbers(getattr(part, "tubelet_size", None))
            patch = _numbers(getattr(part, "patch_size", None)) or tubelet
            edge = 4 * patch[-1] if attempt < 2 and patch else SMALL_IMAGE
            if (window := getattr(part, "window_size", None)) is None:
                for name in ("image_size", "crop_size"):
                    _limit(part, name, edge)
            elif attempt < 2 and isinstance(window, int) and window > SMALL_WINDOW:
                for size in _numbers(getattr(part, "image_size", None))[:1]:
                    fitting = size * SMALL_WINDOW // window
                    _limit(part, "image_size", fitting if attempt else edge)
                    part.window_size = SMALL_WINDOW
            for name in ("num_frames", "frames_per_clip"):
                _limit(part, name, 2 * tubelet[0] if tubelet else 2)
            _limit(part, "depths", 2)
        yield small


def _following(small: Any, full: Any) -> Any:
    """A small configuration in which widths that equal a part's hidden size by default still do."""
    found = copy.deepcopy(small)
    pairs = [*zip(_parts(found), _parts(full), strict=True)]
    widths: dict[int, set[int]] = {}
    for part, before in pairs:
        if isinstance(width := getattr(before, "hidden_size", None), int):
            widths.setdefault(width, set()).add(part.hidden_size)
    for part, before in pairs:
        for name, value in vars(before).items():
            is_width = name.endswith(("_hidden_size", "_groups", "channels", "dim"))
            is_large = is_width and isinstance(value, int) and value == vars(part)[name]
            if is_large and len(new := widths.get(value, set())) == 1:
                setattr(part, name, *new)
    return found


def _numbers(value: Any) -> list[int]:
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values if all(isinstance(v, int) for v in values) else []


def _limit(config: Any, name: str, most: int) -> None:
    """Limits a number of a configuration, or each one of a list."""
    value = getattr(config, name, None)
    if isinstance(value, (list, tuple)) and _numbers(value):
        setattr(config, name, type(value)(min(v, most) for v in value))
    elif isinstance(value, int):
        setattr(config, name, min(value, most))


def _twin(cls: Any, small: Any) -> tuple[str | None, tuple[tuple[str, str], ...]]:
    """The expression for a small model with its imports; None if arguments cannot express it."""
    imports: set[tuple[str, str]] = set()
    try:
        text = _construction(small, imports)
        eval(text, {type(part).__name__: type(part) for part in _parts(small)})
    except Exception:
        return None, ()
    return f"m.{cls.__name__}({text})", tuple(sorted(imports))


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for part in vars(config).values():
        if hasattr(part, "to_dict"):
            yield from _parts(part)


def _construction(config: Any, imports: set[tuple[str, str]]) -> str:
    """A call that builds a configuration, with the arguments that differ from the defaults."""
    usual = type(config)()
    imports.add(_imported(type(config)))
    given = []
    for own, value in vars(config).items():
        name = own.removeprefix("_")  # `_out_features` of backbones has a property
        is_said = own == name or isinstance(getattr(type(config), name, None), property)
        if not is_said or name in ("transformers_version", "architectures"):
            continue
        if hasattr(value, "to_dict"):
            given.append(f"{name}={_construction(value, imports)}")
        elif not _same(value, vars(usual).get(own)):
            given.append(f"{name}={value!r}")
    return f"{type(config).__name__}({', '.join(given)})"


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other
