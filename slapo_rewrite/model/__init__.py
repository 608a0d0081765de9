"""The module tree on the meta device, joined to the source that constructs it."""
