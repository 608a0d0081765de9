"""Construction sites that may have made a module: whose they are, and what speaks against each."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace

from slapo_rewrite.code.dataflow import stays_as_it_is
from slapo_rewrite.code.names import is_name
from slapo_rewrite.code.syntax import assignments, counter_of, position
from slapo_rewrite.model import construction_calls
from slapo_rewrite.model.construction_sites import Site
from slapo_rewrite.model.constructor_values import Loop
from slapo_rewrite.model.tree import Node

# Kinds of sites where a module is named that was made elsewhere.
REFERENCES = {"argument", "alias"}


@dataclass(frozen=True, eq=False)
class Candidate:
    """A site, with the module above whose class has it."""

    site: Site
    holder: Node  # that module
    numbers: tuple[str, ...]  # what stands for each `*` of the site's path
    certain: bool = False  # whether the tests around it are known to let it make the module


def holder_at(node: Node, site: Site) -> Node | None:
    """The module above a node whose class holds the site."""
    for holder in reversed([*node.owners()]):
        is_class = site.class_name in {c.__name__ for c in holder.cls.__mro__}
        if is_class and _matched(site, holder, node) is not None:
            return holder
    return None


def numbers_at(site: Site, holder: Node, node: Node) -> tuple[str, ...]:
    """What stands for each `*` of a site's path in that of a module."""
    match = _matched(site, holder, node)
    return match.groups() if match else ()


def _matched(site: Site, holder: Node, node: Node) -> re.Match[str] | None:
    return site.pattern.fullmatch(holder.below(node.path))


def at_assignment(site: Site) -> Site:
    """The site's value, where a local variable stands there followed to its last assignment."""
    if not isinstance(site.value, ast.Name):
        return site
    name = site.value.id
    for each in reversed(assignments(site.function, name)):
        statement = each.statement
        if isinstance(statement, ast.Assign) and position(statement) < position(site.value):
            if not any(is_name(target, name) for target in statement.targets):
                return site  # one of several that are given together
            return replace(site, statement=statement, value=statement.value)
    return site


def element_of(site: Site, number: str) -> Site | None:
    """An element of the list that a site makes, or is given; None where it cannot be told."""
    match site.value:
        case ast.Name() as name if stays_as_it_is(site.function, name):
            held = at_assignment(site)
            is_only_name = (
                isinstance(held.statement, ast.Assign) and len(held.statement.targets) == 1
            )
            return element_of(held, number) if held is not site and is_only_name else None
        case ast.List(elts=[ast.Starred(value=value)]) | ast.Tuple(elts=[ast.Starred(value=value)]):
            return element_of(replace(site, value=value), number)
        case ast.List(elts=elts) | ast.Tuple(elts=elts) if number.isdecimal():
            place = int(number)
            if any(isinstance(e, ast.Starred) for e in elts[: place + 1]) or place >= len(elts):
                return None
            return replace(site, value=elts[place], path=f"{site.path[:-1]}{number}")
        case (
            ast.ListComp(elt=elt, generators=[turn]) | ast.GeneratorExp(elt=elt, generators=[turn])
        ) if not turn.ifs:
            counter = counter_of(turn.target, turn.iter)
            loop = Loop(turn, site.frame, counter, first=0)
            return replace(site, value=elt, steps=(*site.steps, loop))
    return None


def is_elsewhere(site: Site, node: Node) -> bool:
    """Whether Python is known not to have made a module by a call at a site."""
    stack = construction_calls.stack_of(node.live)
    return (
        isinstance(site.value, ast.Call)
        and construction_calls.passes_through(site.file, stack)
        and construction_calls.depth(site.file, site.value, stack) is None
    )


def passed_through(candidates: list[Candidate], node: Node) -> Candidate | None:
    """The candidate that Python passed through when it made the module, if that was noted."""
    stack = construction_calls.stack_of(node.live)
    depths = [(construction_calls.depth(c.site.file, c.site.value, stack), c) for c in candidates]
    found = [(depth, c) for depth, c in depths if depth is not None]
    return min(found, key=lambda pair: pair[0])[1] if found else None


def is_missed(candidate: Candidate, node: Node) -> bool:
    """Whether Python is known not to have passed through a candidate."""
    site, stack = candidate.site, construction_calls.stack_of(node.live)
    return site.kind not in REFERENCES and construction_calls.passes_through(site.file, stack)


def can_be_numbered(candidate: Candidate) -> bool:
    """Whether the elements that a loop makes can have this number."""
    turning = [x for x in candidate.site.loops if x.value is None]
    numbers = [n for n in candidate.numbers if n.isdecimal()]
    if len(turning) != len(numbers):
        return True
    pairs = zip(turning, numbers, strict=True)
    return all(x.first is None or x.iteration(int(n)) is not None for x, n in pairs)


def last_certain(candidates: list[Candidate]) -> list[Candidate]:
    """Leaves out the sites whose module another site certainly replaces.

    Of the sites of one path the last certain one wins, and a known element wins over a list's `*`.
    """
    exact = [c for c in candidates if "*" not in c.site.path]
    certain = [c for c in exact if c.certain]
    if not certain:
        return candidates
    return exact[exact.index(certain[-1]) :]
