"""How a weight is written in an output."""

from __future__ import annotations

from collections.abc import Callable

from slapo_rewrite.runtime.weights import Concat, Original, Split, Transpose, Weight


def written(weight: Weight, reference: Callable[[str], str]) -> str:
    """The expression that makes a weight.

    Args:
        weight: Of the original's tensors.
        reference: What the output calls a function of the weights' module.
    """
    match weight:
        case Original(name):
            return f'"{name}"'
        case Concat(sources, axis):
            shown = ", ".join(written(source, reference) for source in sources)
            return f"{reference('concat')}({shown}{f', axis={axis}' if axis else ''})"
        case Split(source, parts, index, axis):
            place = f"parts={parts!r}, index={index}{f', axis={axis}' if axis else ''}"
            return f"{reference('split')}({written(source, reference)}, {place})"
        case Transpose(source):
            return f"{reference('transpose')}({written(source, reference)})"
    raise TypeError(f"not a weight: {weight!r}")
