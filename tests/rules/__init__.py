"""Tests of the rules, those that lie beside the package under test."""

from slapo_rewrite.fusion.registry import rules

rules()  # before any test imports one by name, which an installed package would answer
