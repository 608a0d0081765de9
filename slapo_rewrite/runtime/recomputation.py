"""What activation checkpoints keep and restore when they recompute a forward pass."""

import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)


def keep_results(*operations: Any) -> Any:
    """The `context_fn` of a checkpoint that keeps the results of these operations."""

    def policy(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in operations:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy_contexts(policy)


def policy_contexts(policy: Callable[..., CheckpointPolicy]) -> Any:
    """The `context_fn` of a checkpoint that asks `policy(ctx, operation, *args)`.

    Operations that draw random numbers are always recomputed: if one were skipped, all
    later ones would draw other numbers. The `_unsafe_view` that `matmul` makes of its
    product is treated like the product: it does not share its version counter, by which
    torch notices that a kept tensor has been changed in place.
    """
    before: dict[bool, CheckpointPolicy] = {}

    def careful(
        ctx: Any, operation: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        if draws_numbers(operation, args, kwargs):
            said = CheckpointPolicy.MUST_RECOMPUTE
        elif operation is not torch.ops.aten._unsafe_view.default:
            said = policy(ctx, operation, *args, **kwargs)
        else:
            said = before.get(ctx.is_recompute, CheckpointPolicy.PREFER_RECOMPUTE)
        before[ctx.is_recompute] = said
        return said

    contexts: Callable[..., Any] = create_selective_checkpoint_contexts
    return contexts(careful)


def draws_numbers(
    operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether an operation draws random numbers; attention does with dropout only."""
    if torch.Tag.nondeterministic_seeded not in getattr(operation, "tags", ()):
        return False
    names = [argument.name for argument in operation._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" not in names or bool(given.get("dropout_p", 0.0))


def update_buffers_once(module: nn.Module) -> Callable[[], tuple[Any, Any]]:
    """The `context_fn` of a checkpoint that recomputes with the buffers as they were.

    What the second run writes to them is discarded: running statistics, such as those
    of batch norms, would count a batch twice.
    """
    return lambda: (nullcontext(), EarlierBuffers(module))


class EarlierBuffers:
    """A context in which a module has the buffers that it had when this was made.

    Args:
        module: The module, with its submodules.
    """

    def __init__(self, module: nn.Module) -> None:
        self.places = [
            (each, name, buffer.clone())
            for each in module.modules()
            for name, buffer in each.named_buffers(recurse=False)
        ]
        self.later: list[Any] = []

    def __enter__(self) -> None:
        """Puts copies of the earlier buffers in."""
        self.later = [getattr(module, name) for module, name, _ in self.places]
        for module, name, buffer in self.places:
            setattr(module, name, buffer.clone())

    def __exit__(self, *error: object) -> None:
        """Puts the later buffers back."""
        for (module, name, _), buffer in zip(self.places, self.later, strict=True):
            setattr(module, name, buffer)


def check_left_out(**given: Any) -> None:
    """Refuses arguments that will have changed when the backward pass recomputes.

    Raises:
        ValueError: One is given while gradients are recorded.
    """
    for name, value in given.items():
        if value is not None and torch.is_grad_enabled():
            raise ValueError(
                f"`{name}` changes before the backward pass recomputes this module: train "
                f"without `{name}`, or do not checkpoint the module"
            )


def draw_again(contexts: Callable[[], Any] | None = None) -> Callable[[], Any]:
    """The `context_fn` of a checkpoint that restores Python's and NumPy's random state.

    Args:
        contexts: Another `context_fn` to use with it.
    """

    def both() -> tuple[Any, Any]:
        first, second = contexts() if contexts else (nullcontext(), nullcontext())
        return first, EarlierDraws(second)

    return both


class EarlierDraws:
    """A context with the random state of Python and NumPy from when this was made.

    Args:
        inner: A context to enter with it.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.earlier = self.later = drawing_states()

    def __enter__(self) -> None:
        """Restores the earlier state."""
        self.later = drawing_states()
        set_drawing(self.earlier)
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        """Restores the later state."""
        self.inner.__exit__(*error)
        set_drawing(self.later)


def drawing_states() -> tuple[Any, Any]:
    """The random state of Python, and of NumPy if it is imported."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy else None


def set_drawing(states: tuple[Any, Any]) -> None:
    """Sets the random state of Python and NumPy."""
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])
