"""Computations that take the place of others: rules, and how what they say becomes source."""

from slapo_rewrite.edit.examples import Example, Refusal
from slapo_rewrite.fusion.engine import Calling, Renamed
from slapo_rewrite.fusion.packing import Packing
from slapo_rewrite.fusion.rule import Alternative, Found, Numerics, Rule

__all__ = [
    "Alternative",
    "Calling",
    "Example",
    "Found",
    "Numerics",
    "Packing",
    "Refusal",
    "Renamed",
    "Rule",
]
