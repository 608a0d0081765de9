"""Tests of the rules in the folder `rules/`."""

from slapo_rewrite.fusion.registry import rules

rules()  # before any test imports one by name, which an installed package would answer
