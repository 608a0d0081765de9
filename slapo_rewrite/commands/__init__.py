"""The commands: each runs its options, and returns an exit code."""
