"""Schedules PyTorch models by rewriting their source.

The command is `slapo-rewrite`; from Python, `slapo_rewrite.emit.rewrite.rewrite` gives the same
files in memory.
"""

__version__ = "0.1.0"
