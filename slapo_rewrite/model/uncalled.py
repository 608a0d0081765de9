"""What a call of a module does beside its class's `forward`, and is lost without the call."""

from __future__ import annotations

from torch import nn

from slapo_rewrite import errors
from slapo_rewrite.hugging_face import COLLECTING

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def beyond_forward(live: nn.Module) -> str | None:
    """Why a call of a module does more than the `forward` of its class; None if it does not.

    Code that does not call the module would lose that.
    """
    if type(live).__call__ is not nn.Module.__call__:
        return "its class defines `__call__`"
    if "forward" in vars(live):
        return "its `forward` is an attribute of the instance"
    if parametrized := live._modules.get("parametrizations"):
        return f"a parametrization computes its `{'` and `'.join(parametrized._modules)}`"
    if any(getattr(live, name) for name in HOOKS):
        return "it has hooks, for example of `spectral_norm` or pruning"
    return None


def hooks_on(live: nn.Module, table: str) -> int:
    """The number of a module's hooks of a kind, without those of transformers for outputs."""
    homes = (str(getattr(hook, "__module__", "")) for hook in getattr(live, table).values())
    return sum(not home.startswith(COLLECTING) for home in homes)


def check_uncalled(path: str, live: nn.Module) -> None:
    """Refuses to remove the call of a module that does more than its class's `forward`."""
    if (reason := beyond_forward(live)) is not None:
        raise errors.Unsupported(
            f"`{path}` has to be called: {reason}",
            hint="leave it out of the selection, or move that code into its `forward`",
        )
