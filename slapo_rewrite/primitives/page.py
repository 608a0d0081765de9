"""What `slapo-rewrite primitives` prints."""

from __future__ import annotations

import inspect
import textwrap

from slapo_rewrite import errors, primitives


def listing() -> str:
    """Every primitive with its first line."""
    found = primitives.registry()
    width = max(map(len, found))
    return "\n".join(
        f"{name:<{width}}  {(inspect.getdoc(type(primitive)) or '').splitlines()[0]}"
        for name, primitive in found.items()
    )


def page(name: str) -> str:
    """One primitive: signature, documentation, a worked example.

    Raises:
        UnknownPrimitive: There is none of this name.
    """
    found = primitives.registry()
    if name not in found:
        raise errors.UnknownPrimitive(
            f"there is no primitive `{name}`", hint=errors.did_you_mean(name, found)
        )
    primitive = found[name]
    parts = [f"{name}{primitive.signature()}", inspect.getdoc(type(primitive)) or ""]
    for example in primitive.examples:
        parts += [
            "Example: this source",
            textwrap.indent(example.source, "    "),
            "with this schedule",
            textwrap.indent(example.schedule, "    "),
        ]
        for what, text in (("changes these lines", example.diff), ("prints", example.printed)):
            if text:
                parts += [what, textwrap.indent(text, "    ")]
    return "\n\n".join(part.rstrip("\n") for part in parts)
