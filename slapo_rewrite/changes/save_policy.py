"""What a checkpoint keeps, as it is said in the model file."""

from __future__ import annotations

from slapo_rewrite.changes.imports import Function, Imports
from slapo_rewrite.code.text import listed
from slapo_rewrite.directive import Causes
from slapo_rewrite.model.operation_names import operations

# What recomputation keeps: results of these operations, or what a policy says.
SavePolicy = tuple[str, ...] | Function | None


def context(imports: Imports, kept: tuple[str, ...] | Function, causes: Causes) -> str:
    """The name of the function that tells a checkpoint what to keep; defines it where it is new."""
    if isinstance(kept, Function):
        policy = imports.function(kept, causes)
        name = f"follow_{kept.name}"
        contexts = imports.helper("recomputation", "policy_contexts", causes)
        doc = f"Tells checkpoints to keep what `{kept.name}` says."
        return imports.define(name, f'"""{doc}"""\nreturn {contexts}({policy})', causes)
    name = "keep_" + "_and_".join(kept if len(kept) < 3 else (kept[0], "others"))
    keep_results = imports.helper("recomputation", "keep_results", causes)
    operators = imports.operators(causes)
    shown = ", ".join(f"{operators}.{operation}" for operation in operations(kept))
    doc = f"Tells checkpoints to keep results of {listed(kept)}."
    return imports.define(name, f'"""{doc}"""\nreturn {keep_results}({shown})', causes)
