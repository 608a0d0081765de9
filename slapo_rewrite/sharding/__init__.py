"""Finds what inside `forward` depends on a sharded size, by running it on the meta device.

The model runs twice, without memory or weights: whole, and as rank 0 of a group would run it, with
the sharded layers in place. Both runs call the same operations in the same order, so comparing the
shapes at each call shows which axes are split, and which arguments of an operation that takes a
size (`view`, `split`, `expand`, an index) must shrink with them. If such an argument is computed
from attributes of a module (`self.num_heads`), one of these becomes this rank's share. Any other
is changed at the call, to -1 or to its `part_size`; if neither can be done, it is refused with its
line. Meanwhile `Flow` checks whether each operation is right on parts and partial sums. A model
that does not run without values is replaced by its small twin for this analysis.
"""
