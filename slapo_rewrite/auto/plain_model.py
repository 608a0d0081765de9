"""Chooses class, arguments and made-up inputs for a model that is not from a library."""

from __future__ import annotations

import inspect
import itertools
import math
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from slapo_rewrite.auto.step import Step
from slapo_rewrite.code.dataflow import names_in
from slapo_rewrite.code.syntax import tree_of
from slapo_rewrite.model.meta_build import on_meta
from slapo_rewrite.model.small_arguments import FEW, small_heads, small_number

# Arguments with which a `forward` computes a loss.
TARGETS = ("labels", "targets", "target", "label", "y")
# For a model with more parameters than this, a small one is run instead.
LARGE = 2_000_000
MOST_STEPS = 60
# A small model keeps up to this many layers.
MOST_LAYERS = 48


def in_order(classes: list[type], module: types.ModuleType) -> list[type]:
    """The classes that no other class of the file uses, the last one first."""
    used: set[str] = set()
    for name, value in vars(module).items():
        if isinstance(value, type) and value.__module__ == module.__name__:
            used |= names_in(tree_of(value)) - {name}
    plain = [cls for cls in classes if getattr(cls, "config_class", None) is None]
    return [cls for cls in reversed(plain) if cls.__name__ not in used]


def steps_of(cls: Any, module: types.ModuleType) -> Iterator[Step]:
    """Training steps of a model of a class; some may not run.

    Raises:
        Exception: Anything that its constructor raises.
    """
    built = _arguments(cls, module, small=False)
    small = _arguments(cls, module, small=True)
    with on_meta():
        model = eval(f"m.{cls.__name__}({built})", {"m": module})
    large = sum(p.numel() for p in model.parameters()) > LARGE
    own = f"m.{cls.__name__}({built})"
    twins = [f"m.{cls.__name__}({small})", None] if large and small != built else [None]
    for twin in twins:
        try:
            live = eval(twin or own, {"m": module})
        except Exception:
            continue
        for inputs in itertools.islice(_inputs(live), MOST_STEPS):
            yield Step(f"{cls.__name__} with its default arguments", (), own, twin, inputs)


def _arguments(cls: Any, module: types.ModuleType, small: bool) -> str:
    """Arguments for a constructor: those without a default, and small numbers if `small`."""
    given = []
    named = list(inspect.signature(cls.__init__).parameters.values())[1:]
    heads = _heads(named) if small else {}
    for parameter in named:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        text = heads.get(parameter.name) or _argument(parameter, module, small)
        if text is not None:
            given.append(f"{parameter.name}={text}")
    return ", ".join(given)


def _heads(named: Iterable[inspect.Parameter]) -> dict[str, str]:
    counts = {each.name: each.default for each in named if type(each.default) is int}
    return {name: str(number) for name, number in small_heads(counts).items()}


def _argument(parameter: inspect.Parameter, module: types.ModuleType, small: bool) -> str | None:
    wanted = parameter.annotation
    known = vars(module)
    config = known.get(wanted) if isinstance(wanted, str) else wanted
    if not (isinstance(config, type) and config.__module__ == module.__name__):
        config = None
        if parameter.default is parameter.empty and parameter.name in ("config", "cfg", "args"):
            named = [v for n, v in known.items() if n.lower().endswith(("config", "args"))]
            config = next((v for v in named if isinstance(v, type)), None)
    if config is not None and parameter.default is parameter.empty:
        inner = []
        fields = inspect.signature(config).parameters.values()
        heads = _heads(fields) if small else {}
        for field in fields:
            value = heads.get(field.name) or _smaller(field.name, field.default)
            if value is not None and (small or field.default is field.empty):
                inner.append(f"{field.name}={value}")
        return f"m.{config.__name__}({', '.join(inner)})"
    if parameter.default is parameter.empty:
        return _smaller(parameter.name, parameter.empty) or "64"
    return _smaller(parameter.name, parameter.default) if small else None


def _smaller(name: str, default: Any) -> str | None:
    """A small number for an argument; None if its default stays."""
    is_number = isinstance(default, (int, float)) and not isinstance(default, bool)
    if not is_number and default is not inspect.Parameter.empty:
        return None
    if isinstance(default, float):
        return "0.0" if "drop" in name.lower() and default > 0 else None
    if is_number and default <= MOST_LAYERS and any(part in name.lower() for part in FEW):
        return None  # pipeline stages are verified with the same number of layers
    value = small_number(name, default if is_number else math.inf)
    return None if value is None else str(value)


def _inputs(model: nn.Module) -> Iterator[dict[str, str]]:
    """Candidates for the arguments of `forward`, with a target if it takes one."""
    signature = inspect.signature(model.forward).parameters
    needed = [
        n
        for n, p in signature.items()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    targets = [n for n in signature if n in TARGETS and n not in needed]
    options = list(_tensors(model))
    firsts = [n for n in needed if n not in TARGETS]
    for first in options:
        for rest in itertools.product(options[:4], repeat=max(0, len(firsts) - 1)):
            given = dict(zip(firsts, [first, *rest], strict=False))
            asked = [n for n in needed if n in TARGETS] + targets[:1]
            if asked:
                for target in dict.fromkeys([first, "torch.randint(0, 10, (2,))"]):
                    if "randint" in target:
                        yield {**given, **dict.fromkeys(asked, target)}
            if not any(n in needed for n in asked):
                yield given


def _tensors(model: nn.Module) -> Iterator[str]:
    """Candidates for input tensors, derived from the model's layers in order."""
    found: dict[str, None] = {}
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            found[f"torch.randint(0, {module.num_embeddings}, (2, 16))"] = None
        elif isinstance(module, nn.Linear):
            found[f"torch.randn(2, 16, {module.in_features})"] = None
            found[f"torch.randn(2, {module.in_features})"] = None
        elif isinstance(module, nn.Conv2d):
            for side in (32, 64, 224):
                found[f"torch.randn(2, {module.in_channels}, {side}, {side})"] = None
        elif isinstance(module, nn.Conv1d):
            found[f"torch.randn(2, {module.in_channels}, 64)"] = None
        elif isinstance(module, nn.LayerNorm):
            found[f"torch.randn(2, 16, {module.normalized_shape[-1]})"] = None
    yield from itertools.islice(found, 12)
