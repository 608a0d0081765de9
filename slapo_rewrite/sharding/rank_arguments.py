"""Numbers in a call that must be this rank's: through an attribute, or by changing the call.

A number computed from attributes is left to the search, which makes one of them the rank's share;
for any other an `ArgumentChange` is recorded, if its file is editable.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from slapo_rewrite.sharding import losses
from slapo_rewrite.sharding.rank_state import Run
from slapo_rewrite.sharding.types import ArgumentChange, CannotFollow, MissingCollective

# Templates of arguments that must be this rank's share.
INFERRED = "-1"
SHARE = "{part_size}({argument})"
OWN = "{own}[%d]"  # the tensor's own size along an axis


def change(
    run: Run,
    tensor: torch.Tensor,
    size: int,
    want: int,
    index: tuple[int | str, ...],
    template: str,
    does: str,
) -> None:
    """Records that the call must pass `want` in place of `size`; raises if attributes may do it."""
    if losses.replaced(run, tensor):
        return
    attributes = run.undecided(size)
    place, state = run.editable_place(), run.flow.of(tensor)
    fits = template != SHARE or want * dist.get_world_size() == size
    if attributes or place is None or not fits:
        raise CannotFollow(
            f"{does} {int(size)} where a rank has {want}",
            run.origins.get(id(tensor)),
            "keep the size in an integer attribute of the module, which the tool adapts",
            attributes=attributes,
            changeable=place is not None and fits,
            # A size in a file that is not editable needs the whole value.
            remedy=MissingCollective.whole_of(state.border, state.axis) if place is None else None,
        )
    if template == SHARE:
        run.followed.even.add(int(size))
    run.followed.arguments.add(ArgumentChange(place, index, template, state.source))
