"""Computations and what is written in their place, one rule a file."""
