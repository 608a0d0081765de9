"""Runs schedule files: knobs, selections, and primitive calls in order."""
