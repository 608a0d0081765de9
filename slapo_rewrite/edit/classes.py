"""Writes what changes in one class: in its own text, or as a subclass."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace

from slapo_rewrite import errors
from slapo_rewrite.edit.annotations import Annotations
from slapo_rewrite.edit.definition import (
    FORK,
    AddBias,
    Annotate,
    Attach,
    ChangeArgument,
    Definition,
    DeriveFrom,
    DivideByReplicas,
    ForkPart,
    Key,
    LossOfParts,
    MixIn,
    OwnShare,
    RecomputePart,
    ShareParameter,
    SplitParameter,
    StatisticOfParts,
    What,
    WrapCall,
    Write,
    united,
)
from slapo_rewrite.edit.expressions import replace_call
from slapo_rewrite.edit.forward import ForwardWriter
from slapo_rewrite.edit.imports import Imports
from slapo_rewrite.edit.lineages import Lineages
from slapo_rewrite.edit.lines import SHARE_OF, At, Lines, written
from slapo_rewrite.edit.losses import LossWriter
from slapo_rewrite.edit.parts import PartWriter
from slapo_rewrite.edit.reads import WholeSizes
from slapo_rewrite.edit.sites import IndexSets, SiteWriter
from slapo_rewrite.edit.splice import Edit
from slapo_rewrite.edit.state import Directive
from slapo_rewrite.edit.subclasses import SubclassWriter
from slapo_rewrite.edit.text import accessor, simple_statements, within
from slapo_rewrite.source.sites import Site

HOOKS = {
    "fwd_pre": "register_forward_pre_hook",
    "fwd_post": "register_forward_hook",
    "bwd_post": "register_full_backward_hook",
}


class ClassWriter:
    """Edits one source file, class by class.

    Args:
        lineages: The classes of the file.
        imports: Takes the names that the edits refer to.
        line_length: The file's own.

    Attributes:
        subclasses: Writes the text of subclasses.
    """

    def __init__(self, lineages: Lineages, imports: Imports, line_length: int) -> None:
        self.lineages, self.imports, self.line_length = lineages, imports, line_length
        self.file = lineages.file
        self.subclasses = SubclassWriter(lineages, imports, line_length)

    def in_place(self, class_name: str, definition: Definition, indices: IndexSets) -> list[Edit]:
        """The edits that make the class what `definition` says."""
        return written(self.file, self._lines(class_name, definition, indices), self.line_length)

    def subclass(
        self,
        class_name: str,
        new_name: str,
        whole: Definition,
        extra: set[Key],
        indices: IndexSets,
        relatives: Mapping[int, str],
        optional: set[int],
        doc: str,
    ) -> str:
        """A subclass in which only the changes at `extra` stand.

        Args:
            class_name: The class it is derived from, as it is after its own edits.
            new_name: Its name.
            whole: Everything that its instances want, so that a statement is repeated as a whole.
            extra: What the class itself does not do.
            indices: The elements that each loop makes.
            relatives: Where a module is that a site outside of loops makes, by the site.
            optional: The sites that not all of its instances go through.
            doc: The docstring's one line.
        """
        borders = {k for k in extra if k[0] == "forward"}
        inner = self._lines(class_name, _only(whole, extra - borders), indices)
        around = self._around_forward(class_name, whole, borders, inner)
        if around is None:
            inner = self._lines(class_name, _only(whole, extra), indices)
        lines = self._lines(class_name, whole, indices)
        changed = {s: _in_subclass(lines[s], inner[s]) for s in inner}
        for method in self.lineages.methods(class_name):
            # A constructor goes on from its base's; any other method is written anew as a whole.
            if method.name != "__init__" and any(within(method, s) for s in inner):
                changed |= {s: change for s, change in lines.items() if within(method, s)}
        text = self.subclasses.subclass(class_name, new_name, changed, relatives, optional, doc)
        return text + (around or "")

    def _around_forward(
        self,
        class_name: str,
        definition: Definition,
        borders: set[Key],
        inner: Mapping[ast.stmt, Lines],
    ) -> str | None:
        """A method with collectives around the class's own `forward`, where that is enough."""
        forward = self.lineages.method(class_name, "forward")
        wraps = [definition.changes[k] for k in sorted(borders)]
        if not wraps or forward is None or any(within(forward, s) for s in inner):
            return None
        causes = united(*(definition.causes.get(k, ()) for k in borders))
        writer = ForwardWriter(self.lineages, self.imports, class_name, lambda _: Lines())
        return self.subclasses.around_forward(forward, wraps, writer, causes)

    def _lines(
        self, class_name: str, definition: Definition, indices: IndexSets
    ) -> dict[ast.stmt, Lines]:
        lines: dict[ast.stmt, Lines] = {}

        def at(statement: ast.stmt) -> Lines:
            return lines.setdefault(statement, Lines())

        reads = WholeSizes(self.lineages, class_name, definition)
        made = SiteWriter(self.file, self.imports, reads.segment, at)
        forward = ForwardWriter(self.lineages, self.imports, class_name, at)
        annotations = Annotations(self.lineages, self.imports, at)
        losses = LossWriter(self.lineages, self.imports, class_name, at, self.line_length)
        parts = PartWriter(self.lineages, self.imports, class_name, self.line_length)
        by_site: dict[int, dict[str, What]] = {}
        causes: dict[int, tuple[Directive, ...]] = {}
        for key, change in definition.changes.items():
            why = definition.causes.get(key, ())
            if key[0] == "site":
                by_site.setdefault(key[1], {})[key[2]] = change
                causes[key[1]] = united(causes.get(key[1], ()), why)
            elif isinstance(change, Annotate):
                annotations.add(key, change, why)
            elif key[0] == "parameter" and isinstance(change, SplitParameter):
                site = self.lineages.sites[key[1]]
                text = self._split_parameter(site, key[3], change, why)
                at(site.statement).after.append((text, why, f"cut `{key[3]}` to this rank's part"))
            elif key[0] == "hook" and isinstance(change, Attach):
                site = self.lineages.sites[key[1]]
                text = self._hook(site, key[2], change, why)
                at(site.statement).after.append((text, why, f"hook on `{site.path}`"))
            elif key[0] == "base" and isinstance(change, DeriveFrom):
                self._derive(class_name, change, why, at)
            elif key[0] == "mixin" and isinstance(change, MixIn):
                self._mix_in(key[1], change, why, at)
            elif key[0] == "size":
                constructor = self.lineages.method(class_name, "__init__")
                assert constructor is not None
                text = self._own_share(key[1], change, why)
                at(constructor.body[-1]).after.append((text, why, f"{SHARE_OF} `{key[1]}`"))
            elif isinstance(change, (ForkPart, RecomputePart)):
                parts.add(change, why)
            elif isinstance(change, Write):
                edits = [Edit(*edit, why, f"`{change.what}`") for edit in change.edits]
                at(change.statement).around += edits
                if change.after:
                    line = (change.after, why, f"`{change.what}`")
                    at(change.statement).after.append(line)
            elif key == FORK:
                forward.fork(why)
            elif key[0] == "forward":
                forward.wrap(change, why)
            elif key[0] == "call" and isinstance(change, AddBias):
                forward.add_bias(key[1], change, why)
            elif key[0] == "call" and isinstance(change, WrapCall):
                forward.wrap_calls(key[1], change, why)
            elif key[0] == "argument" and isinstance(change, ChangeArgument):
                forward.change_argument(key, change, why)
            elif key[0] == "loss" and isinstance(change, LossOfParts):
                losses.write(key, change, why)
            elif key[0] == "statistic" and isinstance(change, StatisticOfParts):
                forward.statistic(key, change, why)
            elif key[0] == "gradient" and isinstance(change, ShareParameter):
                forward.share_parameter(change, why)
        annotations.write(indices)
        for start, changes in by_site.items():
            made.change(self.lineages.sites[start], changes, causes[start], indices)
        for statement, edits in reads.by_statement.items():
            around = list(at(statement).inside)
            at(statement).inside += [
                e for e in edits if not any(o.start <= e.start and e.end <= o.end for o in around)
            ]
        parts.write(lines)
        return lines

    def _derive(
        self, class_name: str, change: DeriveFrom, causes: tuple[Directive, ...], at: At
    ) -> None:
        """Puts a tensor-parallel layer in the place of a class's base."""
        layer = change.layer
        node = self.file.classes[self.lineages.lineage(class_name)[-1]]
        base = next(
            (b for b in node.bases if ast.unparse(b).rpartition(".")[2] == change.original), None
        )
        constructor = self.file.method(node.name, "__init__")
        calls = [n for n in ast.walk(constructor or node) if isinstance(n, ast.Call)]
        made = next((c for c in calls if ast.unparse(c.func) == "super().__init__"), None)
        if base is None or (layer.keywords and (constructor is None or made is None)):
            raise errors.UnfollowableConstruction(
                f"`{class_name}` does not name `{change.original}` as its base and call its "
                "constructor by `super()`",
                at=self.file.at(node),
                also=[c.at for c in causes[:1] if c.at],
            )
        why = f"`{node.name}` becomes a {layer.name}"
        start, end = self.file.span(base)
        name = self.imports.helper(layer.module, layer.name, causes)
        at(node.body[0]).around.append(Edit(start, end, name, causes, why))
        if layer.keywords and constructor is not None and made is not None:
            statement = next(s for s in simple_statements(constructor) if within(s, made))
            start, end = self.file.span(made)
            keywords = self.imports.keywords(layer, causes)
            text = replace_call(self.file.segment(made), None, keywords)
            at(statement).inside.append(Edit(start, end, text, causes, why))

    def _mix_in(
        self, class_name: str, change: MixIn, causes: tuple[Directive, ...], at: At
    ) -> None:
        """Puts another base before those that a class has."""
        node = self.file.classes[class_name]
        start, _ = self.file.span(node.bases[0])
        name = self.imports.helper(change.module, change.name, causes)
        why = f"`{class_name}` starts, reads and writes checkpoints as the original does"
        at(node.body[0]).around.append(Edit(start, start, f"{name}, ", causes, why))

    def _split_parameter(
        self, site: Site, name: str, change: SplitParameter, causes: tuple[Directive, ...]
    ) -> str:
        function = self.imports.helper("tensor_parallel", "shard_parameter", causes)
        parts = f", parts={self.imports.value(change.parts, causes)}" if change.parts != 1 else ""
        text = f'{function}(self, "{name}", axis={change.axis}{parts})'
        bound = getattr(site.statement, "value", None)
        if isinstance(bound, ast.IfExp) and bound is not site.value:  # None for some instances
            return f"if self.{name} is not None:\n    {text}"
        return text

    def _own_share(self, attribute: str, change: What, causes: tuple[Directive, ...]) -> str:
        if isinstance(change, DivideByReplicas):
            return f"self.{attribute} //= {accessor(change.layer)}.replicas"
        assert isinstance(change, OwnShare)
        function = self.imports.helper("tensor_parallel", "part_size", causes)
        times = f" * {accessor(change.layer)}.replicas" if change.layer else ""
        return f"self.{attribute} = {function}(self.{attribute}{times})"

    def _hook(self, site: Site, index: str, change: Attach, causes: tuple[Directive, ...]) -> str:
        if index:
            raise errors.UnfollowableConstruction(
                f"`{site.path}` is made in a loop: a hook cannot be put on one element there",
                at=self.file.at(site.value),
                also=[c.at for c in causes[:1] if c.at],
                hint="put the sync on a module inside the element",
            )
        function = self.imports.function(change.function, causes)
        return f"{accessor(site.path)}.{HOOKS[change.mode]}({function})"


def _in_subclass(whole: Lines, extra: Lines) -> Lines:
    """What a subclass's constructor says at a statement that its base's has carried out.

    A statement that is repeated needs what follows it once more, but no size is cut twice.
    """
    repeated = extra.inside or extra.again
    after = [
        line
        for line in whole.after
        if line in extra.after or (repeated and not line[2].startswith(SHARE_OF))
    ]
    return replace(whole, after=after, before=whole.before if repeated else extra.before)


def _only(definition: Definition, keys: set[Key]) -> Definition:
    return Definition(
        {k: v for k, v in definition.changes.items() if k in keys},
        {k: v for k, v in definition.causes.items() if k in keys},
        definition.present,
        definition.nodes,
    )
