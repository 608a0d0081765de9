"""Counts a training step with different layers recomputed, without a rewrite.

It copies a model with two layers of each kind, and counts its step as it is, and with the chosen
layers recomputed: as a whole, or modules inside them.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from slapo_rewrite.code.text import joined_path
from slapo_rewrite.errors import first_line
from slapo_rewrite.hugging_face import is_cache
from slapo_rewrite.model.calls import calls_noted, forwards_instead
from slapo_rewrite.model.folded_step import Counted, DoesNotRun, FoldedStep, StepFails, StepShape
from slapo_rewrite.model.layer_kinds import Fold, all_left, folds_of, kinds_of, left_alone, lists_of
from slapo_rewrite.model.meta_device import without_dynamo
from slapo_rewrite.model.step_profile import Part, Profile
from slapo_rewrite.model.tree import Node, Tree

# The recomputed modules of a layer, by their path from the layer; '' is the whole layer.
Recomputed = tuple[str, ...]
NOTHING: Recomputed = ()
WHOLE: Recomputed = ("",)
# The most modules of a layer for which recomputation is tried.
MOST_PARTS = 6
KERNELS = "slapo_rewrite.runtime.kernels"


@dataclass(frozen=True)
class CountedWays:
    """The counts of a step for each way of recomputing layers."""

    # The recomputed modules of the chosen layers in each way; none in the first way.
    ways: Sequence[Recomputed]
    counted: Sequence[Counted]  # the counts of each way
    # How each list was reduced, with chosen layers as kinds of their own.
    folds: Mapping[str, Fold]


def counted_ways(
    schedule: Any,
    tree: Tree,
    chosen: Collection[str],
    shape: StepShape,
    seconds: Callable[[Part], float],
    kernels: Iterable[ModuleType],
) -> CountedWays:
    """Counts a step, with the chosen layers recomputed in every way that may pay.

    `chosen` are paths of list elements, `kernels` are modules of kernels beside the tool's own.
    """
    folds = folds_of(
        lists_of(tree),
        lambda node: [
            (kind, child.path in chosen)
            for kind, child in zip(kinds_of(node), node.children.values(), strict=True)
        ],
    )
    own_kernels = (m for n, m in sys.modules.items() if n.startswith(KERNELS))
    counted = functools.partial(
        _counted_ways, schedule, tree, chosen, shape, seconds, [*own_kernels, *kernels]
    )
    try:
        return counted(folds)
    except StepFails:
        return counted(all_left(folds))


def _counted_ways(
    schedule: Any,
    tree: Tree,
    chosen: Collection[str],
    shape: StepShape,
    seconds: Callable[[Part], float],
    kernels: Iterable[ModuleType],
    folds: Mapping[str, Fold],
) -> CountedWays:
    with without_dynamo():
        model, layers = _short_copy(tree, folds)
        own = {
            layer: tree.nodes[f"{path}.{number}"]
            for path, fold in folds.items()
            for number, layer in zip(fold.left, layers[path], strict=True)
            if f"{path}.{number}" in chosen
        }
        step = FoldedStep(schedule, model, layers, shape, kernels)
        count = functools.partial(_count, step, list(own))
        with _called_once(own):
            found: dict[Recomputed, Profile] = {NOTHING: count(NOTHING)}
        for part in _parts(own.values()):
            found[part,] = count((part,))
        found |= {way: count(way) for way in _together(found, seconds)}
        found[WHOLE] = count(WHOLE)
    names = {name: parameter.numel() for name, parameter in tree.root.live.named_parameters()}
    stands_for = {path: fold.stands_for for path, fold in folds.items()}
    counted = [Counted(profile, stands_for, names) for profile in found.values()]
    return CountedWays(list(found), counted, folds)


@contextmanager
def _called_once(layers: Mapping[nn.Module, Node]) -> Iterator[None]:
    """Raises `DoesNotRun` if a layer is called several times: each call keeps activations."""
    with calls_noted({node.path: layer for layer, node in layers.items()}) as called:
        yield
    for path, times in Counter(called).items():
        if times > 1:
            raise DoesNotRun(f"`{path}` is called {times} times")


def _short_copy(
    tree: Tree, folds: Mapping[str, Fold]
) -> tuple[nn.Module, dict[str, list[nn.Module]]]:
    """A copy of a model with reduced lists, and the layers in these."""
    try:
        with left_alone(
            (listed, [listed.get_submodule(str(number)) for number in fold.left])
            for path, fold in folds.items()
            for listed in [tree.nodes[path].live]
        ):
            model = copy.deepcopy(tree.root.live)
    except Exception as error:  # an attribute that cannot be copied
        raise DoesNotRun(f"the model cannot be copied: {first_line(error)}") from error
    return model, {path: list(model.get_submodule(path).children()) for path in folds}


def _parts(layers: Collection[Node]) -> list[str]:
    """The submodules of layers that may be recomputed by themselves.

    Modules of torch are left out: they are called in a `forward` that all layers share.
    """
    found: dict[str, None] = {}

    def look(node: Node, path: str) -> None:
        for name, child in node.children.items():
            inner = joined_path(path, name)
            if child.is_container:
                look(child, inner)
            elif not child.cls.__module__.startswith("torch."):
                found.setdefault(inner)

    for layer in layers:
        look(layer, "")
    return list(found)[:MOST_PARTS]


def _count(step: FoldedStep, layers: Sequence[nn.Module], way: Recomputed) -> Profile:
    """Counts a step in which these modules of the layers are recomputed."""
    inside = (module for layer in layers for path, module in layer.named_modules() if path in way)
    with forwards_instead({module: functools.partial(_again, module.forward) for module in inside}):
        return step.count()


def _again(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a `forward` with recomputation, without a cache that it would fill twice."""
    own: dict[str, Any] = {
        name: None if is_cache(name, value) else value for name, value in kwargs.items()
    }
    return checkpoint(forward, *args, use_reentrant=False, **own)


def _together(
    found: Mapping[Recomputed, Profile], seconds: Callable[[Part], float]
) -> list[Recomputed]:
    """Combines the parts that save most memory per second: the best two, three, and so on."""

    def of(way: Recomputed) -> tuple[float, float]:
        """The bytes that a row keeps from forward to backward, and the seconds of a step."""
        parts = found[way].forward
        kept = sum(part.net.each for place, part in parts.items() if place.is_layer)
        both = [*parts.values(), *found[way].backward.values()]
        return kept, sum(map(seconds, both))

    most, least = of(NOTHING)
    saved = {way: (most - kept, took - least) for way in found for kept, took in [of(way)]}
    paying = [way for way, (bytes_, _) in saved.items() if way and bytes_ > 0]
    paying.sort(key=lambda way: saved[way][0] / max(saved[way][1], 1e-12), reverse=True)
    names = [name for way in paying for name in way]
    return [tuple(sorted(names[:count])) for count in range(2, len(names) + 1)]
