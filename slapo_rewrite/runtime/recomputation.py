"""What a checkpoint keeps, where it computes everything else again."""

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
    """Contexts for `checkpoint` in which the results of these operations are kept."""

    def policy(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in operations:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy_contexts(policy)


def policy_contexts(policy: Callable[..., CheckpointPolicy]) -> Any:
    """Contexts for `checkpoint` in which `policy(ctx, operation, *args)` is asked.

    What draws random numbers is computed again whatever the policy says: a result that
    is kept draws none the second time, and all that follow would be others. A view that
    does not share its version, as `matmul` gives of its product, is kept with that: torch
    tells by the version that what is kept was changed in place, and fails then.
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
    """Contexts for `checkpoint` that compute again with the buffers as they were.

    What is written to them the second time is thrown away: statistics that `forward`
    updates, as batch norms do, would count a batch twice.
    """
    return lambda: (nullcontext(), EarlierBuffers(module))


class EarlierBuffers:
    """Inside, a module has the buffers that it had when this was made.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.places = [
            (each, name, buffer.clone())
            for each in module.modules()
            for name, buffer in each.named_buffers(recurse=False)
        ]
        self.later: list[Any] = []

    def __enter__(self) -> None:
        """Puts them in."""
        self.later = [getattr(module, name) for module, name, _ in self.places]
        for module, name, buffer in self.places:
            setattr(module, name, buffer.clone())

    def __exit__(self, *error: object) -> None:
        """Puts back those that there were before."""
        for (module, name, _), buffer in zip(self.places, self.later, strict=True):
            setattr(module, name, buffer)


def check_left_out(**given: Any) -> None:
    """Refuses arguments that change before the backward pass computes with them again.

    Raises:
        ValueError: One is given, and a backward pass may follow.
    """
    for name, value in given.items():
        if value is not None and torch.is_grad_enabled():
            raise ValueError(
                f"`{name}` changes before the backward pass, where this module is computed "
                f"again: train without `{name}`, or do not checkpoint the module"
            )


def draw_again(contexts: Callable[[], Any] | None = None) -> Callable[[], Any]:
    """Contexts for `checkpoint` in which Python and NumPy draw the same numbers again.

    Args:
        contexts: Gives those in which it runs besides.
    """

    def both() -> tuple[Any, Any]:
        first, second = contexts() if contexts else (nullcontext(), nullcontext())
        return first, EarlierDraws(second)

    return both


class EarlierDraws:
    """Inside, Python and NumPy draw what they would have drawn when this was made.

    Args:
        inner: A context that is entered with it.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.earlier = self.later = drawing_states()

    def __enter__(self) -> None:
        """Sets the numbers back."""
        self.later = drawing_states()
        set_drawing(self.earlier)
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        """Goes on with those that came next."""
        self.inner.__exit__(*error)
        set_drawing(self.later)


def drawing_states() -> tuple[Any, Any]:
    """Where Python's random numbers stand, and NumPy's, if anybody imported it."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy else None


def set_drawing(states: tuple[Any, Any]) -> None:
    """Has random numbers go on from where they stood."""
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])
