"""Lines that set attributes of parameters, after the construction of their modules."""

from __future__ import annotations

import ast
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from slapo_rewrite import errors
from slapo_rewrite.changes.change import PlacedChange
from slapo_rewrite.changes.class_text import ClassText
from slapo_rewrite.changes.elements import sliced, spans
from slapo_rewrite.changes.placement import Placement, Requested
from slapo_rewrite.changes.places import AtParameter, AtSite, Place
from slapo_rewrite.changes.pretrained import ORIGINAL, keep_checkpoints
from slapo_rewrite.code.dataflow import names_in
from slapo_rewrite.code.layout import literal
from slapo_rewrite.code.text import accessor
from slapo_rewrite.directive import Causes, Directive, merged_causes
from slapo_rewrite.model.construction_sites import Site
from slapo_rewrite.model.tree import Node


@dataclass
class _Wanted:
    """The attributes of one parameter, as keyword arguments, and the directives that ask."""

    arguments: list[str] = field(default_factory=list)
    causes: Causes = ()


@dataclass(frozen=True)
class Annotate(Requested):
    """After the construction of a module or a parameter: an attribute of the parameter."""

    name: str  # the parameter
    key: str  # the attribute
    value: str  # its value as source

    order = 1
    prefix = "Annotated"
    says = "whose parameters have attributes of their own"
    is_parallel = False
    is_called = False
    is_lasting = True

    def place(self, to: Placement, node: Node, cause: Directive) -> None:
        """After the construction of the parameter."""
        to.add_behind_parameter(node, self.name, self.key, self, cause)
        keep_checkpoints(to.files, node, ORIGINAL, (cause,))

    def group(self, place: Place) -> Hashable:
        """All attributes of one parameter are written together, for all elements of a loop."""
        assert isinstance(place, AtSite | AtParameter)
        return Annotate, type(place), place.start, self.name

    def write(self, text: ClassText, here: Sequence[PlacedChange]) -> None:
        """Writes one line for each parameter."""
        by_index: dict[str, _Wanted] = {}
        for placed in here:
            change = placed.change
            assert isinstance(change, Annotate)
            index = placed.place.index if isinstance(placed.place, AtSite) else ""
            wanted = by_index.setdefault(index, _Wanted())
            wanted.arguments.append(f"{change.key}={literal(change.value)}")
            wanted.causes = merged_causes(wanted.causes, placed.causes)
        place = here[0].place
        assert isinstance(place, AtSite | AtParameter)
        site = text.classes.sites[place.start]
        if isinstance(place, AtParameter):
            self._check_own(site, text, by_index[""])
            self._line(site.statement, "self", text, by_index[""])
        elif not site.loops:
            self._line(site.statement, accessor(site.path), text, by_index[""])
        else:
            self._elements(site, text, by_index)

    def _line(
        self, statement: ast.stmt, module: str, text: ClassText, wanted: _Wanted, head: str = ""
    ) -> None:
        """Inserts the call for a module, inside a loop with this head if there is one."""
        asking = text.asked_by(wanted.causes)
        function = asking.helper("annotations", "annotate")
        line = f'{head}{function}({module}, "{self.name}", {", ".join(wanted.arguments)})'
        asking.insert_after(statement, line, f"attributes of `{self.name}`")

    def _check_own(self, site: Site, text: ClassText, wanted: _Wanted) -> None:
        if site.loops or not isinstance(site.statement, (ast.Assign, ast.AnnAssign, ast.Expr)):
            raise errors.UnfollowableConstruction(
                f"`{site.path}` is not created by a separate statement",
                at=text.file.at(site.value),
                cause=wanted.causes,
                hint="create it in `__init__`: `self.name = nn.Parameter(...)`",
            )

    def _elements(self, site: Site, text: ClassText, by_index: dict[str, _Wanted]) -> None:
        """Inserts a loop over the elements, after the outermost loop that constructs them."""
        before, _, after = site.path.partition(".*")
        if "*" in before + after or not all(index.isdecimal() for index in by_index):
            raise errors.UnfollowableConstruction(
                f"`{site.path}` is constructed in loops: a single element cannot be named there",
                at=text.file.at(site.value),
                cause=merged_causes(*(w.causes for w in by_index.values())),
                hint="construct it in a separate class, or in a single list",
            )
        groups: dict[str, tuple[_Wanted, list[int]]] = {}
        for index, wanted in by_index.items():
            shown = ", ".join(wanted.arguments)  # elements with the same attributes share a loop
            known = groups.setdefault(shown, (_Wanted(wanted.arguments), []))
            known[0].causes = merged_causes(known[0].causes, wanted.causes)
            known[1].append(int(index))
        loop = site.loops[0].node
        statement = loop if isinstance(loop, ast.For) else site.statement
        used = names_in(site.function)
        variable = next(n for n in ("module", "element", "each", "annotated") if n not in used)
        every = {int(index) for index in text.indices.of(site)}
        sets = [set(numbers) for _, numbers in groups.values()]
        causes = merged_causes(*(wanted.causes for wanted, _ in groups.values()))
        alike = [*sets, every.difference(*sets)]
        regions = text.indices.regions(site, causes, alike, counted=False)
        module = accessor(after.removeprefix(".")) if after else "self"
        module = variable + module.removeprefix("self")
        for wanted, numbers in groups.values():
            container = accessor(before)
            is_whole = every.issubset(numbers) and _is_alone(site, before, text)
            chosen = [_chosen(container, sorted(numbers), is_whole)]
            if regions and not is_whole:
                chosen = [sliced(container, *span) for span in spans(set(numbers), regions)]
            for elements in chosen:
                head = f"for {variable} in {elements}:\n    "
                self._line(statement, module, text, wanted, head)


def _is_alone(site: Site, container: str, text: ClassText) -> bool:
    """Whether a site constructs all elements of its list."""
    return not any(
        other is not site and other.path.startswith(f"{container}.")
        for other in text.classes.sites.values()
        if other.class_name == site.class_name
    )


def _chosen(container: str, numbers: list[int], is_whole: bool) -> str:
    """An expression for some elements of a list."""
    first, last = numbers[0], numbers[-1]
    if is_whole:
        return container
    step = numbers[1] - first if len(numbers) > 1 else 1
    if numbers != list(range(first, last + 1, step)):
        return f"({container}[i] for i in {tuple(numbers)})"
    start = f"{first} " if first and step > 1 else str(first or "")
    return f"{container}[{start}:{last + 1}" + (f":{step}]" if step > 1 else "]")
