"""Lines that give parameters attributes, behind the construction of their modules."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from slapo_rewrite import errors
from slapo_rewrite.edit.definition import Annotate, Key, united
from slapo_rewrite.edit.expressions import literal
from slapo_rewrite.edit.imports import Imports
from slapo_rewrite.edit.lineages import Lineages
from slapo_rewrite.edit.lines import At
from slapo_rewrite.edit.sites import IndexSets
from slapo_rewrite.edit.state import Directive
from slapo_rewrite.edit.text import accessor
from slapo_rewrite.source.sites import Site


@dataclass
class _Wanted:
    """The attributes of one parameter, as keyword arguments, and who asked for them."""

    arguments: list[str] = field(default_factory=list)
    causes: tuple[Directive, ...] = ()


class Annotations:
    """Collects the annotations of one class, and writes one line for each parameter.

    Args:
        lineages: The classes of the model file.
        imports: Takes the helper's name.
        at: Takes the lines, by the statement that they follow.
    """

    def __init__(self, lineages: Lineages, imports: Imports, at: At) -> None:
        self.lineages, self.imports, self.at = lineages, imports, at
        self.file = lineages.file
        # By site, parameter and whether the class makes it itself; then by index.
        self.found: dict[tuple[int, str, bool], dict[str, _Wanted]] = {}

    def add(self, key: Key, change: Annotate, causes: tuple[Directive, ...]) -> None:
        """Takes one attribute."""
        by_index = self.found.setdefault((key[1], change.name, key[0] == "parameter"), {})
        wanted = by_index.setdefault(key[2], _Wanted())
        wanted.arguments.append(f"{change.key}={literal(change.value)}")
        wanted.causes = united(wanted.causes, causes)

    def write(self, indices: IndexSets) -> None:
        """Adds the lines."""
        for (start, name, own), by_index in self.found.items():
            site = self.lineages.sites[start]
            if own:
                self._check_own(site, by_index[""])
                self._line(site.statement, "self", name, by_index[""])
            elif not site.loops:
                self._line(site.statement, accessor(site.path), name, by_index[""])
            else:
                self._elements(site, name, by_index, indices)

    def _line(self, statement: ast.stmt, module: str, name: str, wanted: _Wanted) -> None:
        text = self._call(module, name, wanted)
        self.at(statement).after.append((text, wanted.causes, f"attributes of `{name}`"))

    def _call(self, module: str, name: str, wanted: _Wanted) -> str:
        function = self.imports.helper("annotations", "annotate", wanted.causes)
        return f'{function}({module}, "{name}", {", ".join(wanted.arguments)})'

    def _check_own(self, site: Site, wanted: _Wanted) -> None:
        if site.loops or not isinstance(site.statement, (ast.Assign, ast.AnnAssign, ast.Expr)):
            raise errors.UnfollowableConstruction(
                f"`{site.path}` is not made by a statement of its own",
                at=self.file.at(site.value),
                also=[c.at for c in wanted.causes[:1] if c.at],
                hint="make it in `__init__`: `self.name = nn.Parameter(...)`",
            )

    def _elements(
        self, site: Site, name: str, by_index: dict[str, _Wanted], indices: IndexSets
    ) -> None:
        """A loop over the elements, behind the outermost loop that makes them."""
        before, _, after = site.path.partition(".*")
        if "*" in before + after:
            raise self._refused(site, by_index)
        groups: dict[str, tuple[_Wanted, list[int]]] = {}
        for index, wanted in by_index.items():
            if not index.isdecimal():
                raise self._refused(site, by_index)
            text = ", ".join(wanted.arguments)  # elements with the same attributes share a loop
            known = groups.setdefault(text, (_Wanted(wanted.arguments), []))
            known[0].causes = united(known[0].causes, wanted.causes)
            known[1].append(int(index))
        loop = site.loops[0].node
        statement = loop if isinstance(loop, ast.For) else site.statement
        variable = self._variable(site)
        for wanted, numbers in groups.values():
            whole = {str(n) for n in numbers} >= indices.of(site) and self._alone(site, before)
            elements = _chosen(accessor(before), sorted(numbers), whole)
            module = accessor(after.removeprefix(".")) if after else "self"
            module = variable + module.removeprefix("self")
            text = f"for {variable} in {elements}:\n    {self._call(module, name, wanted)}"
            self.at(statement).after.append((text, wanted.causes, f"attributes of `{name}`"))

    def _alone(self, site: Site, container: str) -> bool:
        """Whether a site makes all elements of its list."""
        return not any(
            other is not site and other.path.startswith(f"{container}.")
            for other in self.lineages.sites.values()
            if other.class_name == site.class_name
        )

    def _variable(self, site: Site) -> str:
        used = {n.id for n in ast.walk(site.function) if isinstance(n, ast.Name)}
        return next(n for n in ("module", "element", "each", "annotated") if n not in used)

    def _refused(self, site: Site, by_index: dict[str, _Wanted]) -> errors.RewriteError:
        causes = united(*(wanted.causes for wanted in by_index.values()))
        return errors.UnfollowableConstruction(
            f"`{site.path}` is made in loops: a single element cannot be named there",
            at=self.file.at(site.value),
            also=[c.at for c in causes[:1] if c.at],
            hint="make it in a class of its own, or in a single list",
        )


def _chosen(container: str, numbers: list[int], whole: bool) -> str:
    """An expression for some elements of a list."""
    first, last = numbers[0], numbers[-1]
    if whole:
        return container
    step = numbers[1] - first if len(numbers) > 1 else 1
    if numbers != list(range(first, last + 1, step)):
        return f"({container}[i] for i in {tuple(numbers)})"
    start = f"{first} " if first and step > 1 else str(first or "")
    return f"{container}[{start}:{last + 1}" + (f":{step}]" if step > 1 else "]")
