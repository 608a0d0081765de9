"""Schedules PyTorch models by rewriting their source.

The command is `slapo-rewrite`; from Python, `slapo_rewrite.rewrite` does the same.
"""

__version__ = "0.1.0"
