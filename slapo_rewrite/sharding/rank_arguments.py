"""Numbers in a call that must be this rank's own: by an attribute, or changed where they stand.

A number that is made of attributes is left to the search, which takes one of them for the rank's
share; any other is noted as an argument to be written differently, if its file may be changed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from slapo_rewrite.sharding import losses
from slapo_rewrite.sharding.rank_state import Run
from slapo_rewrite.sharding.types import ArgumentChange, CannotFollow, MissingCollective

# How an argument is written that must be this rank's share.
INFERRED = "-1"
SHARE = "{part_size}({argument})"
OWN = "{own}[%d]"  # the size that the tensor itself has along an axis


def change(
    run: Run,
    tensor: torch.Tensor,
    size: int,
    want: int,
    index: tuple[int | str, ...],
    template: str,
    does: str,
) -> None:
    """Makes a number the rank's own: by its attributes, or else where it stands."""
    if losses.replaced(run, tensor):
        return
    attributes = run.undecided(size)
    place, state = run.editable_place(), run.flow.of(tensor)
    fits = template != SHARE or want * dist.get_world_size() == size
    if attributes or place is None or not fits:
        raise CannotFollow(
            f"{does} {int(size)} where a rank has {want}",
            run.origins.get(id(tensor)),
            "keep the size in an integer attribute of the module: attributes follow by themselves",
            attributes=attributes,
            changeable=place is not None and fits,
            # What no one can change there means the whole.
            remedy=MissingCollective.whole_of(state.border, state.axis) if place is None else None,
        )
    if template == SHARE:
        run.followed.even.add(int(size))
    run.followed.arguments.add(ArgumentChange(place, index, template, state.source))
