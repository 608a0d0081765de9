"""The small model that verification runs, its inputs and its loss.

Also executed by its path in processes that may not import the rest of this package, so it imports
torch, the standard library and what lies beside it only.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .meta_build import on_meta
from .small_config import FIRST_DRAWN, deepened, small_config

LARGEST_TWIN = 200_000_000  # parameters; each process holds about ten times their bytes
LARGE = 20_000_000  # with more, a run takes minutes, and a smaller model is looked for
BATCH, TOKENS = 2, 16
FIRST_PADDED = 12  # the second row is padding from here on
SMALL_BUILD = "_small_build"  # of a schedule's module: what builds a small model of any module


def seed_torch(seed: int) -> None:
    """Has torch draw the same on the CPU from here on.

    `torch.manual_seed` seeds every other device as well, which nothing would put back, and takes
    down the stack for each of them that nobody has used so far.
    """
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def drawing(seed: int) -> Iterator[None]:
    """The same random numbers every time, of torch, of Python and of NumPy.

    Speech models of transformers draw what they mask with NumPy.
    """
    numpy: Any = sys.modules.get("numpy")
    before = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=[]):
            seed_torch(seed)
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
    """Values in floating point stay what they are where a method of theirs or autocast casts them.

    What is computed in half precision is computed in what the parameters are in, so that nothing
    but a difference in rounding is left out. The methods themselves are exchanged, for all threads.
    """
    tensor: Any = torch.Tensor
    autocast: Any = torch.autocast
    entering = autocast.__enter__, autocast.__exit__

    def kept(cast: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return self if self.is_floating_point() else cast(self, *args, **kwargs)

        return method

    names = ("bfloat16", "half", "float")
    for name in names:
        setattr(tensor, name, kept(getattr(tensor, name)))
    autocast.__enter__, autocast.__exit__ = lambda self: self, lambda *_: None
    try:
        yield
    finally:
        autocast.__enter__, autocast.__exit__ = entering
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


def _packed_sizes(module: Any) -> list[Any]:
    """The classes of an output that have sizes of one configuration."""
    inside = getattr(module, "__name__", "").rpartition(".")[0] + "."
    beside = [each for name, each in sys.modules.items() if name.startswith(inside)]
    names = [getattr(each, "__dict__", {}) for each in (module, *beside)]
    found: list[Any] = [each["PackedSizes"] for each in names if "PackedSizes" in each]
    return [blocks for blocks in found if hasattr(blocks, "may_scale")]


@contextlib.contextmanager
def _scaled(packed: Sequence[Any]) -> Iterator[None]:
    """Sizes that an output has of one configuration are taken for a ratio meanwhile."""
    fixed = {blocks: blocks.may_scale for blocks in packed}
    for blocks in fixed:
        blocks.may_scale = True
    try:
        yield
    finally:
        for blocks, before in fixed.items():
            blocks.may_scale = before


def build_small(schedule: Any, module: Any, depth: int = 2) -> nn.Module:
    """The twin of the model that `schedule` describes, built from `module`.

    `schedule.verify_model(module)` where that is defined, or its class with its config and more
    layers, if it has too few and the config says how many; else the same Hugging Face class with a
    smaller config; else what `small_arguments` found for the schedule; else
    `schedule.model(module)` itself, unless it is too large to be run (`ValueError`).
    """
    return small_builder(schedule, module, depth)()


def small_builder(schedule: Any, module: Any, depth: int = 2) -> Callable[[], nn.Module]:
    """What builds the twin, as often as it is called: which one that is, is found out once."""
    packed = _packed_sizes(module)
    with _scaled(packed):
        build = _small(schedule, module, depth)

    def built() -> nn.Module:
        with _scaled(packed):
            return build()

    return built


def _small(schedule: Any, module: Any, depth: int) -> Callable[[], nn.Module]:
    if hasattr(schedule, "verify_model"):
        deep = _deep_enough(schedule, module, depth) if depth > 2 else None
        return deep or (lambda: _module(schedule.verify_model(module), "verify_model"))
    with on_meta():
        full = _module(schedule.model(module), "model")
    config = getattr(full, "config", None)
    if hasattr(config, "to_dict"):
        return lambda: _module(shrunk(full, depth), "the model's class")
    if hasattr(schedule, SMALL_BUILD):
        return lambda: _module(getattr(schedule, SMALL_BUILD)(module), "model")
    num_parameters = sum(p.numel() for p in full.parameters())
    if num_parameters > LARGEST_TWIN:
        raise ValueError(
            f"the model has {num_parameters:,} parameters, too many to run it here: "
            "define verify_model(m) in the schedule, which builds a smaller one"
        )
    return lambda: _module(schedule.model(module), "model")


def _deep_enough(schedule: Any, module: Any, depth: int) -> Callable[[], nn.Module] | None:
    """A model of `verify_model`'s config with so many layers, where that has fewer, and says so."""
    # Who builds the model itself is told what is wrong. No random numbers are drawn here of those
    # that it starts with.
    with contextlib.suppress(Exception), on_meta():
        small, full = schedule.verify_model(module), schedule.model(module)
        lengths, own = _lengths(full), _lengths(small)
        configs = (getattr(small, "config", None), getattr(full, "config", None))
        has_few = any(own.get(path, size) < min(depth, size) for path, size in lengths.items())
        if has_few and all(hasattr(config, "to_dict") for config in configs):
            kept = {size: range(min(size, depth)) for size in lengths.values()}
            cls: Callable[[Any], nn.Module] = type(small)
            cls(deepened(*configs, kept))
            return lambda: cls(deepened(*configs, kept))
    return None


def _lengths(model: nn.Module) -> dict[str, int]:
    """How many modules each list has."""
    named = model.named_modules()
    return {path: len(listed) for path, listed in named if isinstance(listed, nn.ModuleList)}


def build_deep(
    schedule: Any, module: Any, full: nn.Module, kept: Mapping[int, Sequence[int]] | None = None
) -> nn.Module:
    """A twin with all layers of the full model: `verify_model`'s if it has them, else a made one.

    Every pipeline stage has layers then, as it has in the full model. What is made has the config
    of `verify_model`'s but for the layers, or is made smaller by itself. Else `build_small`'s.
    """
    if hasattr(schedule, "verify_model"):
        small = build_small(schedule, module)
        if _paths(small) == _paths(full):
            return small
        if hasattr(getattr(small, "config", None), "to_dict"):
            with contextlib.suppress(Exception), _scaled(_packed_sizes(module)):
                config = deepened(small.config, full.config, kept or {})
                deep = _not_too_large(lambda: type(small)(copy.deepcopy(config)))
                if kept or _paths(deep) == _paths(full):
                    return deep
    if hasattr(getattr(full, "config", None), "to_dict"):
        # What the schedule says may fit it better.
        with contextlib.suppress(Exception), _scaled(_packed_sizes(module)):
            return _not_too_large(lambda: shrunk(full, None, kept))
    if hasattr(schedule, SMALL_BUILD):
        return _module(getattr(schedule, SMALL_BUILD)(module, deep=True), "model")
    return build_small(schedule, module)


def _not_too_large(build: Callable[[], nn.Module]) -> nn.Module:
    """What a function builds, unless it is huge with all layers of a model (`ValueError`)."""
    with on_meta():
        count = sum(p.numel() for p in build().parameters())
    if count > LARGEST_TWIN:
        raise ValueError(f"{count:,} parameters are too many to run it here")
    return build()


def _paths(model: nn.Module) -> set[str]:
    return {path for path, _ in model.named_modules()}


def shrunk(
    full: nn.Module, depth: int | None = 2, kept: Mapping[int, Sequence[int]] | None = None
) -> nn.Module:
    """A small model of the same Hugging Face class.

    `depth` and `kept` are as for `small_config`.
    """
    small = small_config(full.config, depth, kept)
    if type(full).__name__.endswith("ForSequenceClassification") and small.pad_token_id is None:
        small.pad_token_id = 0  # without one they refuse more than one row
    return type(full)(small)


def _module(built: Any, by: str) -> nn.Module:
    if not isinstance(built, nn.Module):
        raise TypeError(f"`{by}` returns {type(built).__name__}, not a torch.nn.Module")
    return built


class NotGivenError(ValueError):
    """A function of the schedule, which it names, gives something else than it should."""

    def __init__(self, function: str, words: str) -> None:
        super().__init__(words)
        self.function = function


def step_inputs(schedule: Any, model: nn.Module, seed: int = 7) -> dict[str, Any]:
    """The keyword arguments of one training step, by the schedule's `inputs(model)` if it has that.

    Else for a Hugging Face model token ids, a mask with padding at the end of the second row, and
    labels, as far as its `forward` takes them; for any other, or other inputs, a `ValueError`.
    """
    if hasattr(schedule, "inputs"):
        seed_torch(seed)
        inputs = schedule.inputs(model)
        if not isinstance(inputs, Mapping):
            made = type(inputs).__name__
            raise NotGivenError(
                "inputs", f"`inputs` returns {made}, not a dictionary of keyword arguments"
            )
        return dict(inputs)
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(text, "vocab_size", None)
    if not isinstance(vocabulary, int):
        raise ValueError(
            f"no inputs for {type(model).__name__} can be made up, because it has no config with "
            "a vocabulary: define inputs(model) in the schedule"
        )
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(FIRST_DRAWN, vocabulary, (BATCH, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, FIRST_PADDED:] = 0
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    given.update(_labels(model, config, ids, generator))
    if getattr(config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = ids.clone()
    taken = inspect.signature(model.forward).parameters
    return {name: value for name, value in given.items() if name in taken}


def training_inputs(schedule: Any, model: nn.Module, whole: bool = False) -> dict[str, Any]:
    """The keyword arguments of one training step, without those of the loss.

    With `whole` inputs that the tool makes are those of ordinary training. Otherwise there is no
    padding mask, as what it holds cannot be looked at on the meta device, and no cache of keys and
    values, which costs by the layer.
    """
    inputs = model_inputs(schedule, model, step_inputs(schedule, model))
    if not hasattr(schedule, "inputs") and not whole:
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

    That takes the outputs, and by name what else it needs of the inputs, targets say.
    """
    choose: Callable[..., Any] | None = getattr(schedule, "loss", None)
    takes = loss_parameters(schedule)
    for name, parameter in takes.items():
        if name not in inputs and parameter.default is parameter.empty:
            raise NotGivenError(
                "loss",
                f"`loss` in the schedule takes `{name}`, which inputs(model) does not give",
            )
    more = {name: inputs[name] for name in takes if name in inputs}
    loss = choose(outputs, **more) if choose else _own_loss(outputs)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shown = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise NotGivenError(
            "loss",
            f"the step gives no loss but {shown}: let inputs(model) in the schedule ask for one "
            "(labels), or define loss(outputs)",
        )
    return loss


def _own_loss(outputs: Any) -> Any:
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    return getattr(outputs, "loss", outputs if isinstance(outputs, torch.Tensor) else None)
