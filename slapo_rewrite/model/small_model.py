"""The small model that verification runs, its inputs and its loss.

Also executed by its path in processes that may not import the rest of this package, so it imports
torch, the standard library and neighbouring files only.
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

LARGEST_TWIN = 200_000_000  # parameters; each process needs about ten times their bytes
LARGE = 20_000_000  # parameters; a larger model takes minutes, so a smaller one is built
BATCH, TOKENS = 2, 16
FIRST_PADDED = 12  # the second row is padding from here on
SMALL_BUILD = "_small_build"  # the attribute of a schedule that builds a small model


def seed_torch(seed: int) -> None:
    """Seeds torch's generator of the CPU only.

    `torch.manual_seed` seeds all other devices as well, which nothing would restore, and records
    the stack for each device that is not initialised yet.
    """
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Seeds torch, Python and NumPy in the context, and restores their random states."""
    with torch.random.fork_rng(devices=[]), drawing_beside_torch(seed):
        seed_torch(seed)
        yield


@contextlib.contextmanager
def drawing_beside_torch(seed: int) -> Iterator[None]:
    """Seeds Python and NumPy in the context, and restores their random states.

    Speech models of transformers draw their masks with NumPy. Constructors of hyper connections
    draw with Python which residual stream they begin with.
    """
    numpy: Any = sys.modules.get("numpy")
    before = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed)
        yield
    finally:
        random.setstate(before[0])
        if numpy:
            numpy.random.set_state(before[1])


def random_states() -> tuple[Any, ...]:
    """The random states of torch, Python and NumPy, to compare whether numbers were drawn."""
    numpy: Any = sys.modules.get("numpy")
    own = torch.get_rng_state().tolist(), random.getstate()
    if not numpy:
        return own
    other = numpy.random.get_state(legacy=False)["state"]
    return *own, other["key"].tolist(), other["pos"]


@contextlib.contextmanager
def casts_left_out() -> Iterator[None]:
    """Disables casts of floating-point tensors by their methods and by autocast, in the context.

    Computations in half precision run in the parameters' dtype, so that only rounding differs. The
    methods themselves are patched, for all threads.
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
            delattr(tensor, name)  # uncovers the method of torch's base class


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limits each operation to one thread: on small tensors, several only wait for each other.

    The limit also holds for other threads, and for the backward pass.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _packed_sizes(module: Any) -> list[Any]:
    """The `PackedSizes` classes of an output, whose sizes are those of one configuration."""
    inside = getattr(module, "__name__", "").rpartition(".")[0] + "."
    beside = [each for name, each in sys.modules.items() if name.startswith(inside)]
    names = [getattr(each, "__dict__", {}) for each in (module, *beside)]
    found: list[Any] = [each["PackedSizes"] for each in names if "PackedSizes" in each]
    return [blocks for blocks in found if hasattr(blocks, "may_scale")]


@contextlib.contextmanager
def _scaled(packed: Sequence[Any]) -> Iterator[None]:
    """Lets the packed sizes of an output scale with the model, in the context."""
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

    `schedule.verify_model(module)` if that is defined, or its class with its config and more
    layers, if it has too few and a config for them; else the same Hugging Face class with a smaller
    config; else the model that `small_arguments` found for the schedule; else
    `schedule.model(module)` itself. Raises `ValueError` if that is too large to be run.
    """
    return small_builder(schedule, module, depth)()


def small_builder(schedule: Any, module: Any, depth: int = 2) -> Callable[[], nn.Module]:
    """A function that builds the twin. The kind of twin is decided once, here."""
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
    """Builds a model of `verify_model`'s config with `depth` layers, if it has fewer."""
    # Errors show when the model itself is built. On the meta device, no random numbers are drawn
    # that initialisation needs.
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
    """The length of each module list."""
    named = model.named_modules()
    return {path: len(listed) for path, listed in named if isinstance(listed, nn.ModuleList)}


def build_deep(
    schedule: Any, module: Any, full: nn.Module, kept: Mapping[int, Sequence[int]] | None = None
) -> nn.Module:
    """A twin with all layers of the full model, so that each pipeline stage has layers as there.

    It is `verify_model`'s if that has all layers; else one of its config with more layers; else the
    full model with a smaller config; else `build_small`'s.
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
        # If this fails, the schedule may define a twin that fits better.
        with contextlib.suppress(Exception), _scaled(_packed_sizes(module)):
            return _not_too_large(lambda: shrunk(full, None, kept))
    if hasattr(schedule, SMALL_BUILD):
        return _module(getattr(schedule, SMALL_BUILD)(module, deep=True), "model")
    return build_small(schedule, module)


def _not_too_large(build: Callable[[], nn.Module]) -> nn.Module:
    """Builds a model; raises `ValueError` if it is too large with all layers."""
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
        small.pad_token_id = 0  # needed for batches of several rows
    return type(full)(small)


def _module(built: Any, by: str) -> nn.Module:
    if not isinstance(built, nn.Module):
        raise TypeError(f"`{by}` returns {type(built).__name__}, not a torch.nn.Module")
    return built


class NotGivenError(ValueError):
    """A function of the schedule, `function`, returns a wrong value."""

    def __init__(self, function: str, words: str) -> None:
        super().__init__(words)
        self.function = function


def step_inputs(schedule: Any, model: nn.Module, seed: int = 7) -> dict[str, Any]:
    """The keyword arguments of one training step: the schedule's `inputs(model)`, if defined.

    Else, for a Hugging Face model, token ids, a mask with padding at the end of the second row, and
    labels, as far as its `forward` takes them. Raises `ValueError` for other models or inputs.
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
            f"no inputs for {type(model).__name__} can be generated, because it has no config "
            "with a vocabulary: define inputs(model) in the schedule"
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

    With `whole`, inputs that the tool makes are those of ordinary training. Otherwise there is no
    padding mask, whose values cannot be read on the meta device, and no key-value cache, which
    costs time for each layer.
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
    """Labels in the shape that the model's head takes, by the name of its class."""
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
    """The arguments of a step without those that only the schedule's `loss` takes.

    These are the parameters of `loss` that the model's `forward` does not have.
    """
    alone = loss_parameters(schedule).keys() - inspect.signature(model.forward).parameters.keys()
    return {name: value for name, value in inputs.items() if name not in alone}


def loss_parameters(schedule: Any) -> dict[str, inspect.Parameter]:
    """The parameters of the schedule's `loss` beside the outputs, by name."""
    try:
        _, *more = inspect.signature(schedule.loss).parameters.items()
    except (AttributeError, TypeError, ValueError):  # there is no loss, or none with a signature
        return {}
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: parameter for name, parameter in more if parameter.kind not in several}


def loss_of(schedule: Any, outputs: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The loss of one step: the result of `schedule.loss` if defined, else `outputs.loss`.

    `schedule.loss` takes the outputs, and further inputs by name, for example targets.
    """
    choose: Callable[..., Any] | None = getattr(schedule, "loss", None)
    takes = loss_parameters(schedule)
    for name, parameter in takes.items():
        if name not in inputs and parameter.default is parameter.empty:
            raise NotGivenError(
                "loss",
                f"`loss` in the schedule takes `{name}`, which inputs(model) does not return",
            )
    more = {name: inputs[name] for name in takes if name in inputs}
    loss = choose(outputs, **more) if choose else _own_loss(outputs)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shown = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise NotGivenError(
            "loss",
            f"the step returns no loss but {shown}: pass labels in inputs(model) of the schedule, "
            "or define loss(outputs)",
        )
    return loss


def _own_loss(outputs: Any) -> Any:
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    return getattr(outputs, "loss", outputs if isinstance(outputs, torch.Tensor) else None)
