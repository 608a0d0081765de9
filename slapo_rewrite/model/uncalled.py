"""What a call of a module does besides its class's `forward`: what leaves the call out loses it."""

from __future__ import annotations

from torch import nn

from slapo_rewrite import errors
from slapo_rewrite.hugging_face import COLLECTING

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def beyond_forward(live: nn.Module) -> str | None:
    """What a call of a module does besides the `forward` of its class, in words; None for nothing.

    What no longer calls the module would lose it.
    """
    if type(live).__call__ is not nn.Module.__call__:
        return "its class has a `__call__` of its own"
    if "forward" in vars(live):
        return "it has a `forward` of its own in the place of its class's"
    if parametrized := live._modules.get("parametrizations"):
        return f"a parametrization computes its `{'` and `'.join(parametrized._modules)}`"
    if any(getattr(live, name) for name in HOOKS):
        return "it has hooks, of which `spectral_norm` or pruning may be one"
    return None


def hooks_on(live: nn.Module, table: str) -> int:
    """How many hooks of a kind were put on a module, but for those that come as the model runs."""
    homes = (str(getattr(hook, "__module__", "")) for hook in getattr(live, table).values())
    return sum(not home.startswith(COLLECTING) for home in homes)


def check_uncalled(path: str, live: nn.Module) -> None:
    """Refuses to leave out the call of a module that does more than its class's `forward`."""
    if (reason := beyond_forward(live)) is not None:
        raise errors.Unsupported(
            f"`{path}` has to be called: {reason}",
            hint="leave it out of the selection, or put into its `forward` what it does besides",
        )
