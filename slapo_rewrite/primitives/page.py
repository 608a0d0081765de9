"""The pages of `slapo-rewrite primitives`: the primitives, and the rules for `apply`."""

from __future__ import annotations

import ast
import textwrap
from dataclasses import dataclass

from slapo_rewrite import errors
from slapo_rewrite.bundle import rules_folder
from slapo_rewrite.code.constants import Class, constants
from slapo_rewrite.examples import Example
from slapo_rewrite.primitives import registry

RULES, KERNELS = "slapo_rewrite.rules.fusions", "slapo_rewrite.runtime.kernels"


def listing() -> str:
    """Every primitive and every rule with its first line."""
    known = rules()
    width = max(map(len, (*registry(), *known)))
    lines = [f"{name:<{width}}  {first_line(name)}" for name in registry()]
    lines += ["", 'rules, for .apply("NAME"); .apply_all() takes those with a star:']
    lines += [
        f"{name:<{width}}  {'*' if _rule(name).get('pays') else ' '} {first_line(name)}"
        for name in known
    ]
    return "\n".join(lines)


def first_line(name: str) -> str:
    """The first line of a primitive's or a rule's documentation; '' for an unknown one."""
    if name in registry():
        return _primitive(name).doc.partition("\n")[0]
    return _rule(name).doc.partition("\n")[0] if name in rules() else ""


def rules() -> list[str]:
    """The names of all rules, which are those of the files in `rules/fusions`."""
    files = (rules_folder() / "fusions").glob("*.py")
    return sorted(path.stem for path in files if path.stem != "__init__")


@dataclass(frozen=True)
class Page:
    """The documentation of a primitive or a rule."""

    call: str  # how a schedule calls it
    doc: str  # its docstring
    facts: tuple[str, ...]  # further facts about a rule, one line each
    examples: tuple[Example, ...]  # worked examples


def described(name: str) -> Page:
    """The page of a primitive or rule; raises `UnknownPrimitive` for another name."""
    found, known = registry(), rules()
    if name in known:
        rule = _rule(name)
        examples = rule.get("examples", ())
        return Page(f'apply("{name}")', rule.doc, tuple(_facts(name, rule)), examples)
    if name not in found:
        raise errors.UnknownPrimitive(
            f"there is no primitive `{name}`", hint=errors.did_you_mean(name, (*found, *known))
        )
    primitive = _primitive(name)
    call = f"{name}{primitive.stub('takes')}"
    return Page(call, primitive.doc, (), primitive.get("examples", ()))


def page(name: str) -> str:
    """The page as text: documentation and worked examples."""
    found = described(name)
    facts = ["\n".join(found.facts)] if found.facts else []
    return _joined([found.call, found.doc, *facts], found.examples)


def _facts(name: str, rule: Class) -> list[str]:
    facts = [f"numerics: {rule.get('numerics').value}", *rule.get("conditions").lines()]
    if kernels := kernels_of(name):
        facts.append(f"kernels: {', '.join(kernels)}")
    pays = rule.get("pays")
    return [*facts, f"apply_all: takes it: {pays}" if pays else "apply_all: leaves it: ask for it"]


def kernels_of(name: str) -> list[str]:
    """The functions of `runtime/kernels` that a rule's file imports, such as `gated.swiglu`."""
    return [
        f"{node.module}.{alias.name}".removeprefix(f"{KERNELS}.")
        for node in constants(f"{RULES}.{name}").tree.body
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{KERNELS}.")
        for alias in node.names
    ]


def _primitive(name: str) -> Class:
    return Class.named(f"slapo_rewrite.primitives.{name}", name)


def _rule(name: str) -> Class:
    return Class.named(f"{RULES}.{name}", name)


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
