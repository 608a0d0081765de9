"""What a step of a rewritten model takes, on each number of ranks that can share its layers.

The rewritten model is built once at its full depth, where the schedule's shares of its layers mean
what they say. For each number of ranks it is built again with two layers of each kind, and counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.checkpoint import checkpoint

from slapo_rewrite import errors
from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.model.emitted import Emitted
from slapo_rewrite.model.folded_step import Counted, DoesNotRun, FoldedStep, first_line
from slapo_rewrite.model.layer_kinds import Fold, folds_of, lists_of, shortened
from slapo_rewrite.model.meta_device import pretend_world, without_dynamo
from slapo_rewrite.model.short_build import built_short, filled, full_names
from slapo_rewrite.model.tree import Tree, build_model
from slapo_rewrite.primitives.cut_evenly import ends_of_rounds, layers_in, sizes_of

# By how many ranks share a layer, what was counted without recomputation and with it; or why not.
Found = dict[int, "tuple[Counted, Counted] | str"]


@dataclass(frozen=True)
class StepShape:
    """What a step is counted of.

    Attributes:
        sequence: How many tokens a row has; None for what the schedule's `inputs` give.
        dtype: Of parameters and activations.
        is_gpu: Whether it is to be counted as on a GPU.
    """

    sequence: int | None
    dtype: torch.dtype
    is_gpu: bool


def counted_rewrite(
    source: str,
    schedule: str,
    module: Any,
    settings: Sequence[str],
    sizes: Sequence[int],
    shape: StepShape,
) -> Found:
    """Rewrites once, and counts a step on each number of ranks; on the first, if nothing is split.

    Args:
        source: A file or an importable module.
        schedule: A file, or the name of a schedule that ships with the tool.
        module: The schedule's module.
        settings: Knobs, as `name=value`.
        sizes: The numbers of ranks.
        shape: What a step is.
    """
    found: Found = {}

    def count(emitted: Emitted, tree: Tree) -> None:
        is_split = emitted.helper("tensor_parallel") is not None
        folds = folds_of(lists_of(tree))
        for ranks in sizes if is_split else sizes[:1]:
            try:
                found[ranks] = _counted(module, emitted, tree, folds, ranks, shape)
            except DoesNotRun as error:
                found[ranks] = str(error)

    rewrite(source, schedule, settings, tries=count)
    return found


def _counted(
    schedule: Any,
    emitted: Emitted,
    tree: Tree,
    folds: Mapping[str, Fold],
    ranks: int,
    shape: StepShape,
) -> tuple[Counted, Counted]:
    """Counts a step on one of several ranks that share each layer.

    Returns:
        Without the recomputation that the rewrite has, and with it.

    Raises:
        DoesNotRun: The model cannot be built so, or does not run.
    """
    with pretend_world(ranks) if ranks > 1 else nullcontext(), without_dynamo():
        try:
            model = built_short(lambda: build_model(schedule.model, emitted.module), tree, folds)
        except errors.ModelError as error:
            raise DoesNotRun(first_line(error.__cause__ or error)) from error
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        filled(model, folds)
        cut_sizes = _cut_sizes(Tree(model)) if ranks == 1 else []
        layers = shortened(model, folds)
        kernels = emitted.modules() if shape.is_gpu else None
        step = FoldedStep(schedule, model, layers, shape.sequence, shape.dtype, kernels)
        with _keeping_all(emitted.modules()):
            plain = step.count()
        again = step.count()
    stands_for = {path: fold.stands_for for path, fold in folds.items()}
    names = full_names(sizes, folds)
    return (
        Counted(plain, stands_for, names, cut_sizes),
        Counted(again, stands_for, names, cut_sizes),
    )


def _cut_sizes(tree: Tree) -> list[float]:
    """What `cut_evenly` makes stages even by."""
    listed = layers_in(tree.root, "ModuleList")
    return sizes_of(tree.root, ends_of_rounds(listed), []) if listed else []


@contextmanager
def _keeping_all(modules: Iterable[ModuleType]) -> Iterator[None]:
    """Nothing of a rewrite is recomputed meanwhile."""

    def kept(function: Any, *args: Any, **kwargs: Any) -> Any:
        own = {k: v for k, v in kwargs.items() if k not in _OF_CHECKPOINT}
        return function(*args, **own)

    with ExitStack() as stack:
        for module in modules:
            for name, value in vars(module).items():
                if value is checkpoint:
                    stack.enter_context(patch.object(module, name, kept))
        yield


# Arguments of `checkpoint` itself.
_OF_CHECKPOINT = {"use_reentrant", "context_fn", "preserve_rng_state", "determinism_check", "debug"}
