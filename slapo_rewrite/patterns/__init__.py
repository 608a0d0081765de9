"""Finds a computation in a model's `forward`: patterns, and what they match. Needs no torch."""
