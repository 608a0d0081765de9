"""Regions of a method: checkpointed, or with forked random numbers."""

from __future__ import annotations

import ast
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import libcst as cst

from slapo_rewrite import errors
from slapo_rewrite.changes.around_checkpoint import check_transformed, check_unchanged
from slapo_rewrite.changes.change import PlacedChange
from slapo_rewrite.changes.class_text import ClassText
from slapo_rewrite.changes.imports import CHECKPOINT
from slapo_rewrite.changes.placement import Placement, Requested, Subgraph, find_subgraph
from slapo_rewrite.changes.places import Place
from slapo_rewrite.changes.recomputation import Recomputed, without_caches
from slapo_rewrite.code.arguments import values_given
from slapo_rewrite.code.build import call as call_of
from slapo_rewrite.code.build import code, parsed
from slapo_rewrite.code.dataflow import bound_in, names_in
from slapo_rewrite.code.handed import Handed
from slapo_rewrite.code.layout import fitting_at
from slapo_rewrite.code.lines import written
from slapo_rewrite.code.liveness import local_names, part_of
from slapo_rewrite.code.runs import Run, behind, compound
from slapo_rewrite.code.subgraphs import Calls, called_names, obstacle, varying
from slapo_rewrite.code.text import within
from slapo_rewrite.directive import Causes, Directive
from slapo_rewrite.model.tree import Node

MAX_NAME = 40


@dataclass(frozen=True)
class Region(Requested):
    """In a method: some statements, selected by the calls in them."""

    part: Subgraph  # the statements

    order = 3
    is_parallel = False

    def group(self, place: Place) -> Hashable:
        """All regions of a class are written together, since they may be nested."""
        return Region

    def place(self, to: Placement, node: Node, cause: Directive) -> None:
        """In the method that makes the calls."""
        to.add_to_region(node, self.part, self, cause)

    def write(self, text: ClassText, here: Sequence[PlacedChange]) -> None:
        """Writes all regions, with the other changes of their statements."""
        _Regions(text).write(here)


@dataclass(frozen=True)
class ForkRegion(Region):
    """In a method: statements whose random numbers differ between ranks."""

    prefix = "Forked"
    says = "with random numbers of which some differ between ranks"


@dataclass(frozen=True)
class RecomputeRegion(Recomputed, Region):
    """In a method: statements whose activations are computed again in the backward pass."""

    prefix = "Checkpointed"
    says = "that recomputes part of its activations in the backward pass"

    def place(self, to: Placement, node: Node, cause: Directive) -> None:
        """Likewise, after the checks of recomputation."""
        change = self.checked(to, node, node.children.values(), cause)
        check_transformed(to.files, node, change.caches, cause)
        to.add_to_region(node, self.part, change, cause)


@dataclass(frozen=True)
class _Wanted:
    change: Region
    calls: Calls
    causes: Causes
    span: tuple[int, int]


class _Regions:
    """Writes the regions of one class."""

    def __init__(self, text: ClassText) -> None:
        self.text, self.file, self.imports = text, text.file, text.imports
        self.class_name, self.line_length = text.class_name, text.file.line_length
        self.names: set[str] = set()

    def write(self, here: Sequence[PlacedChange]) -> None:
        """Writes the regions, inner ones first; raises if two overlap."""
        order = sorted(
            map(self._found, here),
            key=lambda w: (w.span[1] - w.span[0], isinstance(w.change, RecomputeRegion)),
        )
        for number, wanted in enumerate(order):
            for other in order[:number]:
                self._check_apart(wanted, other)
        for wanted in order:
            if isinstance(wanted.change, RecomputeRegion) and wanted.calls.is_single:
                self._wrap_call(wanted, wanted.change)
        for wanted in order:
            if isinstance(wanted.change, ForkRegion):
                self._fork(wanted)
            elif isinstance(wanted.change, RecomputeRegion) and not wanted.calls.is_single:
                self._take_out(wanted, wanted.change)

    def _found(self, placed_change: PlacedChange) -> _Wanted:
        assert isinstance(placed_change.change, Region)
        calls = find_subgraph(
            self.text.classes, self.class_name, placed_change.change.part, placed_change.causes[0]
        )
        span = (self.file.span(calls.run[0])[0], self.file.span(calls.run[-1])[1])
        return _Wanted(placed_change.change, calls, placed_change.causes, span)

    def _check_apart(self, one: _Wanted, other: _Wanted) -> None:
        (start, end), (first, last) = one.span, other.span
        nested = start <= first and last <= end
        same = one.span == other.span and type(one.change) is type(other.change)
        if (nested and not same) or end <= first or last <= start:
            return
        raise errors.ConflictingEdits(
            f"two parts of `{self.class_name}.{one.calls.method.name}` overlap",
            at=other.causes[0].at,
            cause=one.causes,
            hint="name calls that do not overlap, or all of them in one part",
        )

    # A single call ----------------------------------------------------------------------------

    def _wrap_call(self, wanted: _Wanted, change: RecomputeRegion) -> None:
        """`self.mlp(x)  ->  checkpoint(self.mlp, x, use_reentrant=False)`."""
        (call,), (statement,) = wanted.calls.calls, wanted.calls.run
        self._check_unchanged(wanted, call, values_given(call))
        function = self.imports.outside(CHECKPOINT, "checkpoint", wanted.causes)
        options = call_of("f", keywords=change.options(self.imports, wanted.causes)).args

        def make(made: cst.BaseExpression) -> cst.Call:
            called = self.file.segment(call.func)
            if not isinstance(made, cst.Call) or code(made.func) != called:
                raise errors.ConflictingEdits(
                    f"another change writes the call of `{called}` as `{code(made)}`",
                    at=wanted.causes[0].at,
                    cause=wanted.causes,
                    hint="checkpoint the module around it, or several calls with this one",
                )
            given = [a.with_changes(comma=cst.MaybeSentinel.DEFAULT) for a in made.args]
            count = sum(1 for a in given if a.keyword is None and a.star != "**")
            args = [cst.Arg(made.func), *given[:count], *options, *given[count:]]
            return made.with_changes(func=parsed(function), args=args)

        why = f"`{self.file.segment(call.func)}`, checkpointed"
        self.text.asked_by(wanted.causes).replace(call, make, why)
        self._empty_caches(wanted, change, statement, set(names_in(call)))

    def _empty_caches(
        self, wanted: _Wanted, change: RecomputeRegion, statement: ast.stmt, used: set[str]
    ) -> None:
        """Inserts lines that drop caches of keys and values in training: they would fill twice."""
        method = wanted.calls.method
        lines = without_caches(method, used & local_names(method), change.caches)
        if lines:
            text = "if self.training:\n    # Computing this a second time would fill the cache a "
            text += "second time.\n" + "".join(f"    {line}\n" for line in lines)
            if all(line.text != text for line in self.text.at(statement).before):
                asking = self.text.asked_by(wanted.causes)
                asking.insert_before(statement, text, "no cache in training")

    # Several statements -----------------------------------------------------------------------

    def _text(self, wanted: _Wanted) -> tuple[Run, str]:
        """The statements with the comments above, and their changed text.

        Removes these changes from those of the class.
        """
        run = Run.of(self.file, wanted.calls.run).with_comments()
        lines = self.text.lines
        inside = {
            s: c for s, c in lines.items() if any(within(outer, s) for outer in wanted.calls.run)
        }
        for statement in inside:
            del lines[statement]
        return run, run.text(written(self.file, inside))

    def _fork(self, wanted: _Wanted) -> None:
        run, text = self._text(wanted)
        fork_rng = self.imports.helper("rng", "fork_rng", wanted.causes)
        edit = run.replaced(compound(f"with {fork_rng}():", text))
        why = "random numbers that differ between ranks"
        self.text.asked_by(wanted.causes).place(run.statements[0], edit, why)

    def _take_out(self, wanted: _Wanted, change: RecomputeRegion) -> None:
        """Moves the statements to a new method, and puts its checkpointed call in their place."""
        run, method = wanted.calls.run, wanted.calls.method
        asking = self.text.asked_by(wanted.causes)
        part = part_of(method, run)
        inputs = [name for name in part.inputs if name != "self"]
        self._check(wanted, part.unsure, inputs)
        self._check_unchanged(wanted, run[0], [ast.Name(name, ast.Load()) for name in inputs])
        name = self._method_name(wanted, change.part)
        returned = isinstance(run[-1], ast.Return)
        if not part.outputs and not returned:
            raise errors.Unsupported(
                f"no result of this part of `{self.class_name}.{method.name}` is read later",
                **asking.where(run[0]),
                hint="name more calls: those that use its results",
            )
        stars = {a.arg: s for a, s in ((method.args.vararg, "*"), (method.args.kwarg, "**")) if a}
        inputs.sort(key=lambda n: len(stars.get(n, "")))
        shown = [stars.get(n, "") + n for n in inputs]
        plain = [n for n in shown if not n.startswith("**")]
        options = (f"{k}={v}" for k, v in change.options(self.imports, wanted.causes))
        call = ", ".join([f"self.{name}", *plain, *options, *shown[len(plain) :]])
        function = self.imports.outside(CHECKPOINT, "checkpoint", wanted.causes)
        results = ", ".join(part.outputs)
        call = f"{'return' if returned else results + ' ='} {function}({call})"
        why = f"`{name}`, checkpointed"
        statements, text = self._text(wanted)
        edit = statements.replaced(call)
        asking.place(run[0], edit, why)
        self._empty_caches(wanted, change, run[0], set(inputs))

        column, margin = method.col_offset, method.body[0].col_offset
        if statements.column != margin:  # without re-indentation, lines keep their length
            text = fitting_at(text, margin, self.line_length)
        doc = f"The part of `{method.name}` that is computed again in the backward pass."
        body = [f'"""{doc}"""', text, *([] if returned else [f"return {results}"])]
        head = f"def {name}({', '.join(['self', *shown])}):"
        head = fitting_at(f"{head} ...", column, self.line_length).removesuffix(" ...")
        edit = behind(self.file, method, compound(head, "\n".join(body)), 1)
        asking.place(method, edit, why)

    def _check(self, wanted: _Wanted, unsure: tuple[str, ...], inputs: list[str]) -> None:
        run, method = wanted.calls.run, wanted.calls.method
        asking = self.text.asked_by(wanted.causes)
        here = f"this part of `{self.class_name}.{method.name}`"
        found = obstacle(run, inputs) or varying(self.file, run)
        if found is not None:
            raise errors.Unsupported(
                f"{here} {found.words}",
                **asking.where(found.node),
                hint=found.hint,
            )
        if unsure:
            raise errors.Unsupported(
                f"{here} cannot become a method: `{unsure[0]}` is not bound on every path through "
                "it",
                **asking.where(run[0]),
                hint=f"bind `{unsure[0]}` before, or select calls so that the same part binds and "
                "reads it",
            )
        for argument in (method.args.vararg, method.args.kwarg):
            if argument and argument.arg in bound_in(*run):
                raise errors.Unsupported(
                    f"{here} binds `{argument.arg}` anew",
                    **asking.where(run[0]),
                )
        for statement in run:
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and node.id in ("locals", "__class__"):
                    raise errors.Unsupported(f"{here} reads `{node.id}`", **asking.where(node))

    def _check_unchanged(self, wanted: _Wanted, start: ast.AST, given: list[ast.expr]) -> None:
        """Raises if an input of a region changes before the backward pass."""
        here = f"a part of `{self.class_name}.{wanted.calls.method.name}`"
        started = next(n for n in ast.walk(start) if isinstance(n, ast.expr))
        follow = Handed(lambda node: given if node is started else ())
        check_unchanged(self.file, wanted.calls.method, follow, here, wanted.causes)

    def _method_name(self, wanted: _Wanted, part: Subgraph) -> str:
        """A method name made of the called names: `_ln_2_and_mlp`, `_ln_2_to_mlp`."""
        taken = {m.name for m in self.text.methods()} | self.names
        taken |= {
            n.attr for n in ast.walk(self.file.classes[self.class_name])
            if isinstance(n, ast.Attribute)
        }  # fmt: skip
        if part.name is not None:
            if part.name in taken:
                raise errors.NameTaken(
                    f"`{self.class_name}` already has a `{part.name}`",
                    at=wanted.causes[0].at,
                    hint="choose another name",
                )
            name = part.name
        else:
            called = {id(call): n for n, call in called_names(wanted.calls.method)}
            names = list(dict.fromkeys(_word(called[id(c)]) for c in wanted.calls.calls))
            joined = "_and_".join(names)
            if len(names) > 2 or len(joined) > MAX_NAME:
                joined = f"{names[0]}_to_{names[-1]}"
            name = f"_{joined}" if len(names) > 1 else f"_{joined}_part"
            while name in taken:
                name += "_part"
        self.names.add(name)
        return name


def _word(name: str) -> str:
    """A called name as part of an identifier: `layer.-1` as `last_layer`."""
    head, _, index = name.rpartition(".")
    if index.lstrip("-").isdigit():
        name = f"last_{head}" if index == "-1" else f"{head}_{index.lstrip('-')}"
    return re.sub(r"\W", "_", name).strip("_")
