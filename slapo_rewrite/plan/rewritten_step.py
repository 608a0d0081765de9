"""Counts a step of a rewritten model, on each possible number of tensor-parallel ranks.

The schedule is applied to the model at full depth, so that shares of its layers are right. For each
number of ranks the output is built with two layers of each kind, and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

from torch.utils.checkpoint import checkpoint

from slapo_rewrite import errors
from slapo_rewrite.emit.rewrite import try_out
from slapo_rewrite.errors import first_line
from slapo_rewrite.model.emitted import Emitted
from slapo_rewrite.model.folded_step import Counted, DoesNotRun, FoldedStep, StepFails, StepShape
from slapo_rewrite.model.layer_kinds import shortened
from slapo_rewrite.model.meta_device import pretend_world, without_dynamo
from slapo_rewrite.model.short_build import Shortening, filled, full_names
from slapo_rewrite.model.sized_inputs import tokens_of
from slapo_rewrite.model.small_model import training_inputs
from slapo_rewrite.model.tree import Tree, build_model
from slapo_rewrite.primitives.cut_evenly import ends_of_rounds, layers_in, sizes_of
from slapo_rewrite.project import Project

# By number of tensor-parallel ranks: the counts without and with recomputation; or an error.
Found = dict[int, "tuple[Counted, Counted] | str"]


def counted_rewrite(
    project: Project, settings: Sequence[str], sizes: Sequence[int], shape: StepShape
) -> Found:
    """Rewrites once, and counts a step on each number of ranks; only on one without shards."""
    found: Found = {}
    if shape.sequence is not None:
        _check_tokens(project, shape.sequence)

    def count(emitted: Emitted, short: Shortening) -> None:
        is_split = emitted.helper("tensor_parallel") is not None
        rewritten = Countable(project.schedule.module, emitted.module, emitted.modules(), short)
        for ranks in sizes if is_split else sizes[:1]:
            try:
                plain, again = rewritten.counted(
                    ranks, shape, partial(_keeping_all, emitted.modules()), nullcontext
                )
                found[ranks] = plain, again
            except DoesNotRun as error:
                found[ranks] = str(error)

    try_out(project, settings, count)
    return found


def _check_tokens(project: Project, sequence: int) -> None:
    try:
        given = training_inputs(project.schedule.module, project.tree.root.live)
    except Exception:  # the schedule's own code; the count reports the error
        return
    if tokens_of(given) is None:
        raise errors.UsageError(
            "no input of the model holds integers of shape [rows, tokens], so `--sequence "
            f"{sequence}` cannot be used",
            hint="leave it out: rows are then as in the schedule's `inputs`",
        )


@dataclass(frozen=True)
class Countable:
    """A model whose step can be counted."""

    schedule: Any  # the schedule's module
    module: ModuleType  # the module with its classes
    helpers: Sequence[ModuleType]  # the modules whose kernels count as run on a GPU
    short: Shortening  # the layers that are made

    def counted(
        self, ranks: int, shape: StepShape, *ways: Callable[[], AbstractContextManager[None]]
    ) -> list[Counted]:
        """Counts a step on one of several ranks, in each way; may raise `DoesNotRun`."""
        try:
            return self._counted(self.short, ranks, shape, ways)
        except StepFails:
            return self._counted(self.short.undone(), ranks, shape, ways)

    def _counted(
        self,
        short: Shortening,
        ranks: int,
        shape: StepShape,
        ways: Sequence[Callable[[], AbstractContextManager[None]]],
    ) -> list[Counted]:
        folds = short.folds
        with pretend_world(ranks) if ranks > 1 else nullcontext(), without_dynamo():
            try:
                model = short.built(lambda: build_model(self.schedule.model, self.module))
            except errors.ModelError as error:
                raise DoesNotRun(first_line(error.__cause__ or error)) from error
            sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
            filled(model, folds)
            cut_sizes = _cut_sizes(Tree(model)) if ranks == 1 else []
            layers = shortened(model, folds)
            step = FoldedStep(self.schedule, model, layers, shape, self.helpers)
            profiles = []
            for way in ways:
                with way():
                    profiles.append(step.count())
        stands_for = {path: fold.stands_for for path, fold in folds.items()}
        names = full_names(sizes, folds)
        return [Counted(profile, stands_for, names, cut_sizes) for profile in profiles]


def _cut_sizes(tree: Tree) -> list[float]:
    """The sizes of layers by which `cut_evenly` balances stages."""
    listed = layers_in(tree.root, "ModuleList")
    return sizes_of(tree.root, ends_of_rounds(listed), []) if listed else []


@contextmanager
def _keeping_all(modules: Iterable[ModuleType]) -> Iterator[None]:
    """Disables recomputation in the modules of a rewrite, in the context."""

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
