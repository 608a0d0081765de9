"""Makes a replacement at a module's construction site, and checks the map of its weights."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slapo_rewrite.model import construction_calls
from slapo_rewrite.model.join import Sources, find_site
from slapo_rewrite.model.meta_build import on_meta
from slapo_rewrite.model.tree import Node
from slapo_rewrite.runtime.weights import Original, Weight

_NEW = "_new_module"


class CannotBuild(Exception):
    """The new module cannot be made at the original's construction site."""


class WrongArguments(CannotBuild):
    """The new module does not take these arguments, or they use undefined names."""


def built_in_place(
    sources: Sources, node: Node, make: Callable[..., Any], arguments: str | None
) -> nn.Module:
    """Makes the new module on the meta device, in the scope of the original's construction site.

    `arguments` is source text; None stands for the original's arguments.

    Raises:
        WrongArguments: The arguments do not fit.
        CannotBuild: The module cannot be made for another reason.
        UnfollowableConstruction: The original's construction site cannot be found.
    """
    site = find_site(sources, node)
    scope = construction_calls.scope_at(site.file, site.value, node.live)
    if scope is None:
        raise CannotBuild("the arguments of its constructor are not known")
    if arguments is not None:
        expression = ast.parse(f"{_NEW}({arguments})", mode="eval")
    elif isinstance(site.call, ast.Call) and site.kind != "factory":
        new = ast.Name(_NEW, ast.Load())
        call = ast.Call(new, *site.arguments)
        expression = ast.fix_missing_locations(ast.Expression(ast.copy_location(call, site.value)))
    else:
        raise CannotBuild("the original is not constructed by a call that names its class")

    def bound(*args: Any, **kwargs: Any) -> Any:
        try:
            inspect.signature(make).bind(*args, **kwargs)
        except TypeError as error:
            raise WrongArguments(str(error)) from error
        except ValueError:  # a class without a signature
            pass
        return make(*args, **kwargs)

    code = compile(expression, "<replace>", "eval")
    try:
        with on_meta(), torch.no_grad(), construction_calls.recorded():
            module = eval(code, {**scope, _NEW: bound})
    except CannotBuild:
        raise
    except NameError as error:
        raise WrongArguments(str(error)) from error
    except Exception as error:
        words = f"{type(error).__name__}: {error}".rstrip(": ")
        # torch's own errors may come from the meta device, where tensors have no values.
        if isinstance(error, RuntimeError) or "meta" in words:
            raise CannotBuild(words) from error
        raise WrongArguments(words) from error
    if not isinstance(module, nn.Module):
        raise CannotBuild(f"it returns a {type(module).__name__}, not a torch.nn.Module")
    return module


class Misfit(Exception):
    """The new module's tensors cannot be made from the original's, or the reverse.

    Attributes:
        names: The existing names that the wrong one may have meant.
    """

    def __init__(self, message: str, wrong: str = "", names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.wrong, self.names = wrong, names


def check_weights(original: nn.Module, new: nn.Module, weights: Mapping[str, Weight]) -> None:
    """Raises `Misfit` for a map that loses or invents weights, or gives them another shape.

    Both modules are on the meta device. Tensors of the new one that `weights` does not name keep
    their names.
    """
    before, after = original.state_dict(keep_vars=True), new.state_dict(keep_vars=True)
    for name, weight in weights.items():
        if name not in after:
            raise Misfit(f"the new module has no `{name}`", name, list(after))
        for source in weight.names():
            if source not in before:
                raise Misfit(f"the original has no `{source}`", source, list(before))
    taken = {source for weight in weights.values() for source in weight.names()}
    left = [n for n in after if n not in weights and (n not in before or n in taken)]
    if left:
        raise Misfit(f"nothing says what the new module's {_listed(left)} made of")
    lost = [n for n in before if n not in taken and (n not in after or n in weights)]
    if lost:
        raise Misfit(f"the original's {_listed(lost)} not taken over")
    kept: dict[str, Weight] = {n: Original(n) for n in after if n not in weights}
    whole = {**weights, **kept}
    shapes = {name: tuple(tensor.shape) for name, tensor in before.items()}
    used: dict[str, list[tuple[slice, ...]]] = {name: [] for name in before}
    seen: set[int] = set()
    for name, weight in whole.items():
        _check_shape(name, weight, tuple(after[name].shape), shapes)
        if id(after[name]) not in seen:
            full = [(0, size) for size in after[name].shape]
            weight.read(lambda source: _Recorder(used[source], before[source]), shapes, full)
        seen.add(id(after[name]))
    for name, boxes in used.items():
        _check_covered(name, shapes[name], boxes)


def _check_shape(
    name: str, weight: Weight, wanted: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    sources = ", ".join(f"`{n}` {list(shapes[n])}" for n in dict.fromkeys(weight.names()))
    try:
        shape = weight.shape(shapes)
        if shape != wanted:
            raise Misfit(f"`{name}` has shape {list(wanted)}, but {sources} gives {list(shape)}")
        full = [(0, size) for size in shape]
        weight.read(lambda n: torch.empty(shapes[n], device="meta"), shapes, full)
    except (ValueError, IndexError, RuntimeError) as error:
        raise Misfit(f"`{name}` cannot be made from {sources}: {error}") from None


class _Recorder:
    """Records which parts of a tensor are read."""

    def __init__(self, boxes: list[tuple[slice, ...]], tensor: Tensor) -> None:
        self.boxes, self.tensor = boxes, tensor

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        self.boxes.append(box)
        return self.tensor[box]


def _check_covered(name: str, shape: tuple[int, ...], boxes: list[tuple[slice, ...]]) -> None:
    """Checks that each element of an original tensor is used exactly once."""
    for number, box in enumerate(boxes):
        if any(_overlap(box, other) for other in boxes[:number]):
            raise Misfit(f"a part of the original's `{name}` goes to two places")
    if sum(math.prod(s.stop - s.start for s in box) for box in boxes) < math.prod(shape):
        raise Misfit(f"a part of the original's `{name}` is not taken over")


def _overlap(one: tuple[slice, ...], other: tuple[slice, ...]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(max(a.start, b.start) < min(a.stop, b.stop) for a, b in pairs)


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"`{n}`" for n in names[:4]) + (", ..." if len(names) > 4 else "")
    return f"{shown} {'is' if len(names) == 1 else 'are'}"
