"""Measurements of the tool: each is a command, `python -m benchmark.NAME`."""
