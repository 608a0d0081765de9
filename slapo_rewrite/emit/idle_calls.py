"""Calls of the schedule to which nothing in the output goes back."""

from __future__ import annotations

from collections.abc import Sequence

from slapo_rewrite import errors
from slapo_rewrite.directive import Directive
from slapo_rewrite.emit.draft import Draft
from slapo_rewrite.schedule.plan import Plan


def idle_calls(plan: Plan, draft: Draft, inferred: Sequence[Directive]) -> list[str]:
    """Warns of the calls that selected modules, and changed nothing.

    Not of those that have said what they chose or left out, and why, nor of those that only check.

    Args:
        plan: The calls.
        draft: The output.
        inferred: The collectives that were inferred.
    """
    changes = (change for own in draft.changes.values() for change in own)
    causes = [*(change.causes for change in changes), *draft.helper_causes().values()]
    busy = {directive.number for each in causes for directive in each}
    told = {d.number for d in plan.directives if d.outcome is not None} | plan.notes.keys()
    # Splits and collectives are held against each other: some say what follows from the others.
    states = plan.states.values()
    is_split = bool(inferred) or any(s.shards or s.shares or s.syncs for s in states)
    checked = {"shard", "sync", "infer_sync"} if is_split else set()
    return [
        errors.warning(f"`{directive.text}` changes nothing", directive.at)
        for directive in plan.directives
        if directive.paths
        and directive.number not in busy | told
        and directive.primitive not in checked
    ]
