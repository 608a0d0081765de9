"""What changes where modules are made, and the choice by index where elements differ."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping

from slapo_rewrite import errors
from slapo_rewrite.edit.definition import MakeClass, MakeLayer, MakeOther, What
from slapo_rewrite.edit.expressions import parenthesised, replace_call
from slapo_rewrite.edit.imports import Imports
from slapo_rewrite.edit.late import Late
from slapo_rewrite.edit.lines import At
from slapo_rewrite.edit.splice import Edit
from slapo_rewrite.edit.state import Directive
from slapo_rewrite.edit.text import condition
from slapo_rewrite.edit.weights import written
from slapo_rewrite.model.layers import Layer, Unit
from slapo_rewrite.source.index import SourceFile
from slapo_rewrite.source.sites import Site


class IndexSets:
    """Which elements of each looping construction site exist, over all instances of the class."""

    def __init__(self) -> None:
        self._present: dict[int, set[str]] = {}

    def add(self, start: int, index: str) -> None:
        """Notes that an instance has the element."""
        self._present.setdefault(start, set()).add(index)

    def of(self, site: Site) -> set[str]:
        """The indices of the elements that the site makes."""
        return self._present.get(site.file.span(site.value)[0], {""})


class SiteWriter:
    """Changes the construction sites of one class.

    Args:
        file: The file.
        imports: Takes the names that the changes refer to.
        segment: The text of an expression, as it is to stand in what is made.
        at: Takes the changes, by their statements.
    """

    def __init__(
        self, file: SourceFile, imports: Imports, segment: Callable[[ast.AST], str], at: At
    ) -> None:
        self.file, self.imports, self.segment, self.at = file, imports, segment, at

    def change(
        self,
        site: Site,
        changes: Mapping[str, What],
        causes: tuple[Directive, ...],
        indices: IndexSets,
    ) -> None:
        """Changes what one site makes, for all elements or by their indices."""
        start, end = self.file.span(site.value)
        present = indices.of(site)
        if len(set(changes.values())) == 1 and present <= changes.keys():
            what = next(iter(changes.values()))
            if isinstance(what, MakeClass) and self._change_variable(site, what, causes):
                return
            text = self._made(site, what, causes)
            self.at(site.statement).inside.append(Edit(start, end, text, causes, _why(site, what)))
            return
        text, edits = self._choice(site, changes, causes, present)
        lines = self.at(site.statement)
        lines.inside.append(Edit(start, end, text, causes, f"choose by index for `{site.path}`"))
        first, last = self.file.span(site.statement)
        for edit in edits:
            inside = first <= edit.start and edit.end <= last
            (lines.inside if inside else lines.around).append(edit)

    def _made(self, site: Site, what: What, causes: tuple[Directive, ...]) -> str:
        """The construction with what was asked in it."""
        text = self._construction(site, what, causes)
        if not isinstance(what, MakeOther) or not what.weights:
            return text

        def reference(name: str) -> str:
            return self.imports.helper("weights", name, causes)

        weights = ", ".join(f'"{n}": {written(w, reference)}' for n, w in what.weights)
        original = f"original=lambda: {self.file.segment(site.value)}"
        made = f"lambda: {text}"
        return f"{reference('map_weights')}({made}, {original}, weights={{{weights}}})"

    def _construction(self, site: Site, what: What, causes: tuple[Directive, ...]) -> str:
        original = self.segment(site.value)
        elsewhere = site.kind in ("argument", "alias")
        if isinstance(what, MakeOther) and what.arguments is not None and not elsewhere:
            # Whatever the expression is, a call of another class takes its place.
            made = f"{self._other(what, causes)}({what.arguments})"
            return replace_call(made, keywords=self._keywords(site, what.layer, causes))
        if elsewhere or not isinstance(site.value, ast.Call) or site.kind in ("helper", "factory"):
            with_arguments = isinstance(what, MakeOther) and not elsewhere
            raise errors.UnfollowableConstruction(
                f"`{site.path}` is not made by a call that names its class",
                at=self.file.at(site.value),
                also=[c.at for c in causes[:1] if c.at],
                hint='give the new module\'s own constructor arguments: replace(..., args="...")'
                if with_arguments
                else "write the construction out: self.name = Class(...)",
            )
        if isinstance(what, MakeLayer):
            layer = what.layer
            name = what.subclass or self.imports.helper(layer.module, layer.name, causes)
            return replace_call(original, name, self._keywords(site, layer, causes))
        if isinstance(what, MakeOther):
            keywords = self._keywords(site, what.layer, causes)
            return replace_call(original, self._other(what, causes), keywords)
        assert isinstance(what, MakeClass)
        if any(isinstance(s.value, ast.Call) for s in assigned(site)):
            raise errors.UnfollowableConstruction(
                f"elements of `{site.path}` differ, and what is called here is not "
                f"`{what.original}` itself",
                at=self.file.at(site.value),
                also=[c.at for c in causes[:1] if c.at],
                hint=f"write the construction out: {what.original}(...)",
            )
        name, callee = self._specialised(what, causes), site.callee
        if isinstance(callee, ast.Attribute) and _means(self.file, callee.value, what.original):
            name = f"{name}.{callee.attr}"  # another way to make one
        return replace_call(original, name)

    def _keywords(
        self, site: Site, layer: Layer | None, causes: tuple[Directive, ...]
    ) -> list[tuple[str, str]]:
        """What a layer, if any, is given beside the original's arguments."""
        if layer is None:
            return []
        keywords = self.imports.keywords(layer, causes)
        if layer.unit is not None:
            keywords.append(("multiple_of", self._unit(site, layer.unit, causes)))
        return keywords

    def _unit(self, site: Site, unit: Unit, causes: tuple[Directive, ...]) -> str:
        """The worth of a unit where a layer is made, be its attribute set there or later."""
        attribute = re.match(r"self\.(\w+)", unit.text)
        if attribute is None:
            return unit.text
        inside = unit.text[attribute.end() :]
        value = Late(self.file, site.function, site.statement).attribute(attribute[1])
        if value is not None and (not inside or re.fullmatch(r"[\w.]+", value)):
            return f"{value}{inside}"
        if inside and unit.size:  # of what nothing is known yet but its worth
            return str(unit.size)
        raise errors.UnfollowableConstruction(
            f"`{site.path}` must be split in multiples of `{unit.text}`, which is set later",
            at=self.file.at(site.value),
            also=[c.at for c in causes[:1] if c.at],
            hint=f"set `{attribute[0]}` above `self.{site.path}`",
        )

    def _specialised(self, what: MakeClass, causes: tuple[Directive, ...]) -> str:
        """A specialised class."""
        if what.module is None:
            return what.name
        return self.imports.helper(what.module, what.name, causes)

    def _other(self, what: MakeOther, causes: tuple[Directive, ...]) -> str:
        """The class that stands in the place of the original's."""
        if what.subclass is not None:
            return what.subclass
        if what.layer is not None:
            return self.imports.helper(what.layer.module, what.layer.name, causes)
        return self.imports.function(what.target, causes)

    def _change_variable(self, site: Site, what: MakeClass, causes: tuple[Directive, ...]) -> bool:
        """A class that a local variable holds is changed where the variable gets it."""
        callees = [n for n in ast.walk(site.function) if _same_name(n, site.callee)]
        if not site.variable or len(callees) > 1:  # other modules are made of it as well
            return False
        for statement in site.variable:
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and node.id == what.original:
                    start, end = self.file.span(node)
                    self.at(statement).inside.append(
                        Edit(start, end, self._specialised(what, causes), causes, _why(site, what))
                    )
                    self.at(site.statement).again = True
                    return True
        return False

    def _choice(
        self,
        site: Site,
        changes: Mapping[str, What],
        causes: tuple[Directive, ...],
        present: set[str],
    ) -> tuple[str, list[Edit]]:
        """`New(...) if i < 6 else Old(...)`, and what the loop needs for it to know `i`."""
        variable, edits = self._counter(site, causes)
        by_text: dict[str, list[int]] = {}
        original = self.file.segment(site.value)
        for index in sorted(present, key=_number):
            what = changes.get(index)
            text = original if what is None else self._made(site, what, causes)
            by_text.setdefault(text, []).append(_number(index))
        # What most elements are stands last, the original's own class if it is among them.
        order = sorted(by_text, key=lambda t: (t == original, len(by_text[t])))
        text = parenthesised(order[-1]) if "\n" in order[-1] else order[-1]
        total = len(present)
        for choice in reversed(order[:-1]):
            test = condition(variable, by_text[choice], total)
            text = f"{choice} if {test} else {text}"
        return text, edits

    def _counter(self, site: Site, causes: tuple[Directive, ...]) -> tuple[str, list[Edit]]:
        """The variable that counts the elements, and the edits that give the loop one."""
        if site.index and site.index != "_":
            return site.index, []
        loop = site.loop
        if (
            loop is None
            or len(site.loops) != 1
            or not isinstance(loop.node, (ast.comprehension, ast.For))
        ):
            raise self._no_counter(site, causes)
        node = loop.node
        used = {n.id for n in ast.walk(site.function) if isinstance(n, ast.Name)}
        name = next(n for n in ("i", "index", "layer_index", "element_index") if n not in used)
        start, end = self.file.span(node.target)
        if site.index == "_" and isinstance(node.target, ast.Name):
            return name, [Edit(start, end, name, causes, "count the elements")]
        if loop.first not in (0, None) or isinstance(node, ast.For):
            raise self._no_counter(site, causes)
        target = self.file.segment(node.target)
        if isinstance(node.target, ast.Tuple) and not target.startswith("("):
            target = f"({target})"
        first, last = self.file.span(node.iter)
        return name, [
            Edit(start, end, f"{name}, {target}", causes, "count the elements"),
            Edit(
                first,
                last,
                f"enumerate({self.file.segment(node.iter)})",
                causes,
                "count the elements",
            ),
        ]

    def _no_counter(self, site: Site, causes: tuple[Directive, ...]) -> errors.RewriteError:
        return errors.UnfollowableConstruction(
            f"elements of `{site.path}` differ, and nothing counts them where they are made",
            at=self.file.at(site.value),
            also=[c.at for c in causes[:1] if c.at],
            hint="number them in the source: for i, ... in enumerate(...)",
        )


def _same_name(node: ast.AST, name: ast.expr | None) -> bool:
    """Whether a node reads the local variable that another one reads."""
    if not isinstance(node, ast.Name) or not isinstance(name, ast.Name):
        return False
    return node.id == name.id and isinstance(node.ctx, ast.Load)


def assigned(site: Site) -> list[ast.Assign]:
    """The assignments of the variable that holds the class that a site calls."""
    return [statement for statement in site.variable if isinstance(statement, ast.Assign)]


def _means(file: SourceFile, expr: ast.expr, class_name: str) -> bool:
    return (file.qualified(expr) or "").rpartition(".")[2] == class_name


def _number(index: str) -> int:
    return int(index.rsplit(".", 1)[-1]) if index else 0


def _why(site: Site, what: What) -> str:
    if isinstance(what, MakeLayer):
        return f"`{site.path}` becomes a {what.layer.name}"
    if isinstance(what, MakeOther):
        return f"`{site.path}` is replaced by {what.target.name}"
    return f"`{site.path}` becomes a {what.name}" if isinstance(what, MakeClass) else site.path
