"""Writes the policy that says which results a checkpoint keeps."""

from __future__ import annotations

from slapo_rewrite.changes.imports import Function, Imports
from slapo_rewrite.code.text import listed
from slapo_rewrite.directive import Causes
from slapo_rewrite.model.operation_names import operations

# The results that a checkpoint keeps: those of these operations, or by the user's policy function.
SavePolicy = tuple[str, ...] | Function | None


def context(imports: Imports, kept: tuple[str, ...] | Function, causes: Causes) -> str:
    """The name of the `context_fn` that tells a checkpoint what to keep; defines it once."""
    if isinstance(kept, Function):
        policy = imports.function(kept, causes)
        name = f"follow_{kept.name}"
        contexts = imports.helper("recomputation", "policy_contexts", causes)
        doc = f"Tells checkpoints to keep what `{kept.name}` says."
        return imports.define(name, f'"""{doc}"""\nreturn {contexts}({policy})', causes)
    name = "keep_" + "_and_".join(kept if len(kept) < 3 else (kept[0], "others")).replace(".", "_")
    keep_results = imports.helper("recomputation", "keep_results", causes)
    operators = imports.operators(causes)
    shown = ", ".join(f"{operators}.{operation}" for operation in operations(kept))
    doc = f"Tells checkpoints to keep results of {listed(kept)}."
    return imports.define(name, f'"""{doc}"""\nreturn {keep_results}({shown})', causes)
