"""What inside `forward` depends on a sharded size, found by running it on the meta device.

The model runs twice, without memory or weights: whole, and as rank 0 of a group would run it, with
the sharded layers in place. Both runs call the same operations in the same order, so comparing the
shapes at each call tells which axes are partitions, and an operation that was told a size (`view`,
`split`, `expand`, an index) tells which of its arguments must shrink with them. An argument that
is made of attributes of a module (`self.num_heads`) makes one of them this rank's share; any other
is changed where it stands, to -1 or to its `part_size`; what can be neither is refused with its
line. On the way `Flow` judges whether each operation is right on parts and partial sums. In the
place of a model that does not run without values, its small twin is followed.
"""

from slapo_rewrite.sharding.propagate import Records, propagate
from slapo_rewrite.sharding.random_ops import out_of_step
from slapo_rewrite.sharding.stand_in import CannotStandIn, StandIn
from slapo_rewrite.sharding.tied_heads import head_of
from slapo_rewrite.sharding.tracked_sizes import Attribute
from slapo_rewrite.sharding.types import (
    CALL,
    SPOKEN,
    ArgumentChange,
    CannotFollow,
    CannotRun,
    Draw,
    LocalValue,
    MissingCollective,
    ModuleBoundary,
    NeverRuns,
    ParallelLoss,
    Place,
    Reading,
    ShardedParameter,
    ShardingRequest,
    ShardingResult,
    Statistic,
    TiedHead,
    layer_key,
)

__all__ = [
    "CALL",
    "SPOKEN",
    "ArgumentChange",
    "Attribute",
    "CannotFollow",
    "CannotRun",
    "CannotStandIn",
    "Draw",
    "LocalValue",
    "MissingCollective",
    "ModuleBoundary",
    "NeverRuns",
    "ParallelLoss",
    "Place",
    "Reading",
    "Records",
    "ShardedParameter",
    "ShardingRequest",
    "ShardingResult",
    "StandIn",
    "Statistic",
    "TiedHead",
    "head_of",
    "layer_key",
    "out_of_step",
    "propagate",
]
