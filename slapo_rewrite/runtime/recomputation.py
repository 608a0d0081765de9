"""What a checkpoint keeps, where it computes everything else again."""

from collections.abc import Callable
from typing import Any

import torch
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
    is kept draws none the second time, and all that follow would be others.
    """

    def careful(
        ctx: Any, operation: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        if draws_numbers(operation, args, kwargs):
            return CheckpointPolicy.MUST_RECOMPUTE
        return policy(ctx, operation, *args, **kwargs)

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
