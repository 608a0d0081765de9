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
