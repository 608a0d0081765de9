"""Kernels as one file, as an output would hold them: only the definitions in use."""

from __future__ import annotations

from slapo_rewrite.emit.helpers import RUNTIME
from slapo_rewrite.emit.pick import Library

# Each after those that it needs.
ORDER = (
    "launch",
    "activations",
    "dropout",
    "rms_norm",
    "layer_norm",
    "gated",
    "bias_gelu",
    "rotary",
    "cross_entropy",
    "linear_cross_entropy",
    "softmax",
)
PUBLIC = {
    "rms_norm": "rms_norm",
    "residual_rms_norm": "rms_norm",
    "layer_norm": "layer_norm",
    "residual_layer_norm": "layer_norm",
    "swiglu": "gated",
    "geglu": "gated",
    "bias_gelu": "bias_gelu",
    "rotary": "rotary",
    "cross_entropy": "cross_entropy",
    "linear_cross_entropy": "linear_cross_entropy",
    "masked_softmax": "softmax",
}


def one_file(*names: str) -> str:
    """The public functions of these names, and all that they need."""
    wanted: dict[str, set[str]] = {}
    for name in names:
        wanted.setdefault(PUBLIC[name], set()).add(name)
    imports: set[str] = set()
    bodies: list[str] = []
    for module in reversed(ORDER):
        if module in wanted:
            text = (RUNTIME / "kernels" / f"{module}.py").read_text()
            picked = Library(text).pick(wanted[module])
            for other, used in picked.helpers.items():
                wanted.setdefault(other, set()).update(used)
            lines = {line for group in picked.imports for line in group}
            imports |= {line for line in lines if not line.startswith("from .")}
            bodies.insert(0, picked.body.strip("\n"))
    merged: dict[str, set[str]] = {}
    for line in imports:
        if line.startswith("from "):
            module, _, taken = line.removeprefix("from ").partition(" import ")
            merged.setdefault(module, set()).update(taken.split(", "))
    head = [line for line in sorted(imports) if line.startswith("import ")]
    head += [f"from {m} import {', '.join(sorted(names))}" for m, names in sorted(merged.items())]
    return "\n".join(head) + "\n\n" + "\n\n\n".join(bodies) + "\n"
