"""What `slapo-rewrite primitives` prints: the primitives, and the rules that `apply` takes."""

from __future__ import annotations

import inspect
import textwrap

from slapo_rewrite import errors, primitives
from slapo_rewrite.examples import Example
from slapo_rewrite.fusion.registry import rules
from slapo_rewrite.fusion.rule import Rule


def listing() -> str:
    """Every primitive and every rule with its first line."""
    found, known = primitives.registry(), rules()
    width = max(map(len, (*found, *known)))
    lines = [f"{name:<{width}}  {_first_line(found[name])}" for name in found]
    lines += ["", 'rules, for .apply("NAME"); .apply_all() takes those with a star:']
    lines += [
        f"{name:<{width}}  {'*' if rule.pays else ' '} {_first_line(rule)}"
        for name, rule in sorted(known.items())
    ]
    return "\n".join(lines)


def page(name: str) -> str:
    """One primitive or rule: its documentation, a worked example.

    Raises:
        UnknownPrimitive: There is none of this name.
    """
    found, known = primitives.registry(), rules()
    if name in known:
        return _rule_page(known[name])
    if name not in found:
        raise errors.UnknownPrimitive(
            f"there is no primitive `{name}`", hint=errors.did_you_mean(name, (*found, *known))
        )
    primitive = found[name]
    parts = [f"{name}{_plain(primitive.signature())}", inspect.getdoc(type(primitive)) or ""]
    return _joined(parts, primitive.examples)


def _rule_page(rule: Rule) -> str:
    facts = [f"numerics: {rule.numerics.value}", *rule.conditions.lines()]
    facts += [f"kernels: {', '.join(rule.kernels)}"] if rule.kernels else []
    facts.append(
        f"apply_all: takes it: {rule.pays}" if rule.pays else "apply_all: leaves it: ask for it"
    )
    parts = [f'apply("{rule.name}")', inspect.getdoc(type(rule)) or "", "\n".join(facts)]
    return _joined(parts, rule.examples)


def _joined(parts: list[str], examples: tuple[Example, ...]) -> str:
    source = None
    for example in examples:
        shown = f"Example, {example.about}" if example.about else "Example"
        if example.source != source:
            parts += [f"{shown}: this source", textwrap.indent(example.source, "    ")]
            shown = ""
        source = example.source
        parts += [
            f"{shown}: the same source with this schedule" if shown else "with this schedule",
            textwrap.indent(example.schedule, "    "),
        ]
        for what, text in (("changes these lines", example.diff), ("prints", example.printed)):
            if text:
                parts += [what, textwrap.indent(text, "    ")]
    return "\n\n".join(part.rstrip("\n") for part in parts)


def _plain(signature: inspect.Signature) -> inspect.Signature:
    """A signature without its annotations: what the arguments are, the text says."""
    own = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return signature.replace(parameters=own, return_annotation=signature.empty)


def _first_line(value: object) -> str:
    return (inspect.getdoc(type(value)) or "").partition("\n")[0]
