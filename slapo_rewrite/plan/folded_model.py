"""The rewritten model with two layers of each kind: what is counted, and how deep the real one is.

The layers of a list are called one after the other, and those that are made alike do alike. So the
rewritten model is built at its full depth, where the schedule's shares of its layers mean what they
say, and all but two layers of each kind are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slapo_rewrite import errors
from slapo_rewrite.emit.rewrite import Output, rewrite
from slapo_rewrite.model import small_model
from slapo_rewrite.model.emitted import Emitted, imported
from slapo_rewrite.model.meta_device import pretend_world, without_dynamo
from slapo_rewrite.model.tree import Tree, build_model
from slapo_rewrite.plan.step_profile import ROWS, NotLaunched, Profile, counted_step
from slapo_rewrite.primitives.cut_evenly import ends_of_rounds, layers_in, sizes_of
from slapo_rewrite.stages.fewer_layers import kinds_of


@dataclass(frozen=True)
class Counted:
    """What was counted of a model of two layers of each kind, and how deep the real one is.

    Attributes:
        profile: What a step takes.
        stands_for: By the path of each list, for each of its layers which of those that were kept
            stands for it.
        names: All parameters of the full model: how many numbers each is.
        cut_sizes: What `cut_evenly` makes stages even by: a size for each layer.
    """

    profile: Profile
    stands_for: Mapping[str, tuple[int, ...]]
    names: Mapping[str, int]
    cut_sizes: Sequence[float]


class DoesNotRun(Exception):
    """A model cannot be built on so many ranks, or its step does not run, in words."""


@dataclass(frozen=True)
class Rewritten:
    """One rewrite of the model, from which it is built for any number of ranks.

    Attributes:
        schedule: The schedule's module.
        emitted: The rewrite, imported.
        files: The names of its files.
    """

    schedule: Any
    emitted: Emitted
    files: Sequence[str]

    def counted(
        self, ranks: int, sequence: int | None, dtype: torch.dtype, is_gpu: bool
    ) -> tuple[Counted, Counted]:
        """Counts a step on one of several ranks that share each layer.

        Args:
            ranks: How many.
            sequence: How many tokens a row has.
            dtype: Of parameters and activations.
            is_gpu: Whether it is to be counted as on a GPU.

        Returns:
            Without the recomputation that the rewrite has, and with it.

        Raises:
            DoesNotRun: The model cannot be built so, or does not run.
        """
        group = pretend_world(ranks) if ranks > 1 else nullcontext()
        with group, without_dynamo():
            try:
                model = build_model(self.schedule.model, self.emitted.module)
            except errors.ModelError as error:
                raise DoesNotRun(_first_line(error.__cause__ or error)) from error
            check_positions(model, sequence)
            sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
            tree = Tree(model)
            listed = layers_in(tree.root, "ModuleList")
            cut_sizes = sizes_of(tree.root, ends_of_rounds(listed), []) if listed else []
            stands_for, layers = folded(model, tree)
            try:
                given = step_inputs(self.schedule, model, sequence)
                model = model.to(dtype).train()
                inputs = {name: _typed(value, dtype) for name, value in given.items()}

                def loss(outputs: Any) -> Tensor:
                    return small_model.loss_of(self.schedule, outputs, given)

                with self._launching_nothing() if is_gpu else nullcontext():
                    with self._keeping_all():
                        plain = counted_step(model, inputs, loss, layers, is_gpu=is_gpu)
                    again = counted_step(model, inputs, loss, layers, is_gpu=is_gpu)
            except Exception as error:  # the model's own code
                raise DoesNotRun(_first_line(error)) from error
        return (
            Counted(plain, stands_for, sizes, cut_sizes),
            Counted(again, stands_for, sizes, cut_sizes),
        )

    @contextmanager
    def _keeping_all(self) -> Iterator[None]:
        """Nothing of the rewrite is recomputed meanwhile."""

        def kept(function: Any, *args: Any, **kwargs: Any) -> Any:
            own = {k: v for k, v in kwargs.items() if k not in _OF_CHECKPOINT}
            return function(*args, **own)

        with ExitStack() as stack:
            for module in self.emitted.modules():
                for name, value in vars(module).items():
                    if value is checkpoint:
                        stack.enter_context(patch.object(module, name, kept))
            yield

    @contextmanager
    def _launching_nothing(self) -> Iterator[None]:
        """Fused kernels are taken, as on a GPU, and count what they are given and give."""
        with ExitStack() as stack:
            # Autocast knows no meta device, and is off.
            stack.enter_context(patch.object(torch, "is_autocast_enabled", lambda *_: False))
            for module in self.emitted.modules():
                for name, value in vars(module).items():
                    if name == "runs_triton" and getattr(module, "triton", True) is not None:
                        stack.enter_context(patch.object(module, name, lambda *_: True))
                    elif type(value).__name__ == "JITFunction":
                        stack.enter_context(patch.object(module, name, NotLaunched()))
            yield


# Arguments of `checkpoint` itself.
_OF_CHECKPOINT = {"use_reentrant", "context_fn", "preserve_rng_state", "determinism_check", "debug"}


@contextmanager
def rewritten(
    source: str, schedule: str, module: Any, settings: Sequence[str]
) -> Iterator[Rewritten]:
    """Carries a schedule out, and imports what comes of it for as long as it lasts."""
    output: Output = rewrite(source, schedule, settings, rehearses=False)
    with imported(output.files, output.model_file) as emitted:
        yield Rewritten(module, emitted, list(output.files))


def folded(
    model: nn.Module, tree: Tree
) -> tuple[dict[str, tuple[int, ...]], dict[str, list[nn.Module]]]:
    """Leaves two layers of each kind in each list, the first ones.

    Args:
        model: The model.
        tree: Its tree.

    Returns:
        By the path of each list, for each layer which of those that are left stands for it; and
        the layers that are left.
    """
    lists = [
        node
        for node in tree.nodes.values()
        if isinstance(node.live, nn.ModuleList)
        and len(node.children) > 1
        and not any(segment.isdigit() for segment in node.path.split("."))
    ]
    stands_for, layers = {}, {}
    for node in lists:
        alike = [other for other in lists if len(other.children) == len(node.children)]
        kinds = list(zip(*map(kinds_of, alike), strict=True))  # what one number says of them
        kept: dict[Any, list[int]] = {}
        for number, kind in enumerate(kinds):
            if len(kept.setdefault(kind, [])) < 2:
                kept[kind].append(number)
        left = sorted(n for numbers in kept.values() for n in numbers)
        places = {number: place for place, number in enumerate(left)}
        stands_for[node.path] = tuple(
            places[number if number in places else kept[kind][-1]]
            for number, kind in enumerate(kinds)
        )
        modules = [node.children[str(number)].live for number in left]
        layers[node.path] = modules
    for path, modules in layers.items():
        listed = model.get_submodule(path)
        listed._modules.clear()
        listed._modules.update({str(n): module for n, module in enumerate(modules)})
    return stands_for, layers


def step_inputs(schedule: Any, model: nn.Module, sequence: int | None) -> dict[str, Any]:
    """The arguments of a step, with `ROWS` rows of so many tokens, on the meta device.

    The first axis of a tensor is the batch's. Those further axes that are as long as the second
    one of the first tensor of whole numbers are the tokens'.
    """
    made = small_model.training_inputs(schedule, model)
    found = [value for value in made.values() if isinstance(value, Tensor) and value.dim()]
    rows = found[0].shape[0] if found else 0
    tokens = next((t.shape[1] for t in found if t.dim() > 1 and not t.is_floating_point()), None)

    def resized(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape = list(value.shape)
        for axis, size in enumerate(shape):
            if axis == 0 and size == rows:
                shape[0] = ROWS
            elif axis and sequence is not None and size == tokens:
                shape[axis] = sequence
        return torch.empty(shape, dtype=value.dtype, device="meta")

    return {name: resized(value) for name, value in made.items()}


def check_positions(model: nn.Module, sequence: int | None) -> None:
    """Without values, nothing tells that a table of positions is too short.

    Raises:
        DoesNotRun: The configuration says how many positions there are, and a table has as many.
    """
    config: Any = getattr(model, "config", None)
    numbers = [getattr(config, name, None) for name in small_model.POSITIONS]
    tables = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    for number in numbers:
        # Some tables have two rows before the first position.
        if isinstance(number, int) and number < (sequence or 0) and tables & {number, number + 2}:
            raise DoesNotRun(f"the model has {number} positions")


def _typed(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
