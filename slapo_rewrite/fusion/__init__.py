"""Fusion: rules that replace computations, and the engine that writes the replacements."""

from slapo_rewrite.examples import (
    BY_KERNEL,
    BY_OPERATIONS,
    Conditions,
    Example,
    Numerics,
    Refusal,
    Twice,
)
from slapo_rewrite.fusion.claims import Calling, MultiSiteRewrite, Renamed
from slapo_rewrite.fusion.horizontal_fusion import Packing
from slapo_rewrite.fusion.last_axis import last_axis
from slapo_rewrite.fusion.lm_head import SHIFTS, Declined, head_of, labels_of, loss_of
from slapo_rewrite.fusion.logits_free_loss import fork_of
from slapo_rewrite.fusion.loss_fork import Fork
from slapo_rewrite.fusion.rule import Alternative, Rule, RuleMatch, layout_reader, share_dropped

__all__ = [
    "BY_KERNEL", "BY_OPERATIONS", "SHIFTS", "Alternative", "Calling", "Conditions", "Declined",
    "Example", "Fork", "MultiSiteRewrite", "Numerics", "Packing", "Refusal", "Renamed", "Rule",
    "RuleMatch", "Twice", "fork_of", "head_of", "labels_of", "last_axis", "layout_reader",
    "loss_of", "share_dropped",
]  # fmt: skip
