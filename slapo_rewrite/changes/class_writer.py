"""Writes the changes of one class: into its own text, or as a subclass."""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from slapo_rewrite import errors
from slapo_rewrite.changes.around_forward import Recompute
from slapo_rewrite.changes.border_syncs import SyncInput, SyncOutput
from slapo_rewrite.changes.change import Change, PlacedChange
from slapo_rewrite.changes.class_hierarchy import ClassHierarchy
from slapo_rewrite.changes.class_text import ClassText
from slapo_rewrite.changes.collective import through
from slapo_rewrite.changes.definition import Definition
from slapo_rewrite.changes.elements import IndexSets
from slapo_rewrite.changes.imports import CHECKPOINT, Imports
from slapo_rewrite.changes.places import AtForward, Place
from slapo_rewrite.changes.recomputation import without_caches
from slapo_rewrite.code.arguments import Signature, all_arguments, parameters, passed_on
from slapo_rewrite.code.build import code, reindented
from slapo_rewrite.code.dataflow import bound_in, read_in
from slapo_rewrite.code.layout import fitted
from slapo_rewrite.code.lines import Lines, changed, written
from slapo_rewrite.code.runs import definition_text, header_text
from slapo_rewrite.code.splice import Edit
from slapo_rewrite.code.text import accessor, docstring, with_article, within
from slapo_rewrite.directive import Causes, merged_causes

_NO_CACHE = "Computing the layer a second time would fill the cache a second time."
_ANY_FORWARD = "    def forward(self, *args, **kwargs):"


@dataclass(frozen=True)
class Subclass:
    """A subclass in which some statements are changed."""

    base: str  # its base class, which may have edits of its own
    name: str
    doc: str  # the one line of its docstring
    # The path that each construction site outside of loops assigns to.
    relatives: Mapping[int, str] = field(default_factory=dict)
    optional: Collection[int] = ()  # the construction sites that some instances do not execute


class ClassWriter:
    """Edits one source file, class by class."""

    def __init__(self, classes: ClassHierarchy, imports: Imports) -> None:
        self.classes, self.imports = classes, imports
        self.file = classes.file
        self.line_length = self.file.line_length

    def in_place(self, class_name: str, definition: Definition, indices: IndexSets) -> list[Edit]:
        """The edits of the class itself for `definition`."""
        return written(self.file, self._lines(class_name, definition, indices))

    def subclass(
        self, new: Subclass, whole: Definition, extra: set[Place], indices: IndexSets
    ) -> str:
        """The text of a subclass with the changes at `extra` only.

        `whole` has all changes of its instances: a repeated statement is written with all of them.
        """
        class_name = new.base
        borders: set[Place] = {place for place in extra if isinstance(place, AtForward)}
        inner = self._lines(class_name, whole.only(extra - borders), indices)
        around = self._around_forward(class_name, whole, borders, inner)
        if around is None:
            inner = self._lines(class_name, whole.only(extra), indices)
        lines = self._lines(class_name, whole, indices)
        # Drops statements that only change without the rest: a loop may need a counter then.
        own = {s: _in_subclass(lines[s], inner[s]) for s in inner if s in lines}
        for method in self.classes.methods(class_name):
            # A constructor extends its base's; any other method is rewritten as a whole.
            if method.name != "__init__" and any(within(method, s) for s in inner):
                own |= {s: change for s, change in lines.items() if within(method, s)}
        return self.text_of(new, own) + (around or "")

    def _around_forward(
        self,
        class_name: str,
        definition: Definition,
        borders: set[Place],
        inner: Mapping[ast.stmt, Lines],
    ) -> str | None:
        """A `forward` with collectives around `super().forward`; None if that does not suffice."""
        forward = self.classes.method(class_name, "forward")
        wraps = [definition.changes[k] for k in sorted(borders, key=str)]
        if not wraps or forward is None or any(within(forward, s) for s in inner):
            return None
        causes = merged_causes(*(definition.causes.get(k, ()) for k in borders))
        return self._between(forward, wraps, causes)

    def _lines(
        self, class_name: str, definition: Definition, indices: IndexSets
    ) -> dict[ast.stmt, Lines]:
        """The changes of the class, by statement."""
        text = ClassText(self.classes, self.imports, class_name, definition.changes, indices)
        groups: dict[Hashable, list[PlacedChange]] = {}
        for place, change in definition.changes.items():
            placed = PlacedChange(place, change, definition.causes.get(place, ()))
            groups.setdefault(change.group(place), []).append(placed)
        # Changes that include the lines of others are written after them.
        for here in sorted(groups.values(), key=lambda group: group[0].change.order):
            alone = len(here) == 1
            causes = here[0].causes if alone else merged_causes(*(each.causes for each in here))
            here[0].change.write(text.asked_by(causes), here)
        return text.lines

    def text_of(self, new: Subclass, lines: Mapping[ast.stmt, Lines]) -> str:
        """The text of a subclass with these changes, by statement."""
        class_name = new.base
        constructor = self.classes.method(class_name, "__init__")
        body = ["\n".join(docstring(new.doc, 4, self.line_length)) + "\n"]
        in_init = {s: c for s, c in lines.items() if constructor and within(constructor, s)}
        elsewhere = {s: c for s, c in lines.items() if s not in in_init}
        if in_init and constructor:
            body.append(self._constructor(new, constructor, in_init))
        for method in self.classes.methods(class_name):
            inside = {s: c for s, c in elsewhere.items() if within(method, s)}
            if not inside:
                continue
            if method is not self.classes.method(class_name, method.name):
                raise errors.UnfollowableConstruction(
                    f"some instances of `{class_name}` differ in a method that is called by "
                    "`super()`",
                    at=self.file.at(next(iter(inside))),
                    hint="schedule all instances alike",
                )
            body.append(self._override(class_name, method, inside))
        return f"class {new.name}({class_name}):\n" + "\n".join(body)

    def _constructor(
        self, new: Subclass, constructor: ast.FunctionDef, lines: Mapping[ast.stmt, Lines]
    ) -> str:
        header = header_text(self.file, constructor)
        passed = ", ".join(passed_on(constructor))
        call = fitted(f"super().__init__({passed})", 8, self.line_length)
        text = [header, " " * 8 + call]
        made: list[ast.stmt | ast.expr] = [
            statement for statement, change in lines.items() if change.inside or change.again
        ]
        made += [test for change in lines.values() for line in change.before for test in line.tests]
        text += [
            " " * 8 + reindented(self.file.segment(local), local.col_offset, 8)
            for local in self._locals(constructor, made)
            if local not in lines
        ]
        body: list[str] = []
        anew = changed(self.file, lines)
        for statement in sorted(lines, key=lambda s: s.lineno):
            self._check_repeatable(new.base, constructor, statement)
            change = lines[statement]
            may_be_left = not self._starts(statement).isdisjoint(new.optional)
            may_be_left |= any(line.tests for line in change.before)
            guards = self._guards(constructor, statement) if may_be_left else []
            if self._starts(statement) and (change.inside or change.again):
                same_weights = self.imports.helper("remaking", "same_weights", change.causes())
                guards.insert(0, f"with {same_weights}(self):")
            depth = 8 + 4 * len(guards)
            indent = " " * depth
            block = [" " * (8 + 4 * n) + guard for n, guard in enumerate(guards)]
            if change.inside or change.again:
                again = anew[statement][2] if statement in anew else self.file.segment(statement)
                again = self._reassigned(statement, again, new.relatives)
                block.append(indent + fitted(again, depth, self.line_length))
            shares = [line for line in change.after if line.once]
            block += [
                indent + fitted(line.text, depth, self.line_length)
                for line in (*change.before, *change.after)
                if line not in shares
            ]
            if guards and body and body[-1].startswith(f"{block[0]}\n"):
                body[-1] += "\n" + "\n".join(block[1:])
            else:
                body += ["\n".join(block)] if guards else block
            body += [" " * 8 + fitted(line.text, 8, self.line_length) for line in shares]
        return "\n".join([*text, *dict.fromkeys(body)]) + "\n"

    def _starts(self, statement: ast.stmt) -> set[int]:
        """The construction sites in a statement."""
        return {start for start, site in self.classes.sites.items() if site.statement is statement}

    def _guards(self, constructor: ast.FunctionDef, statement: ast.stmt) -> list[str]:
        """The `if` lines under which the constructor executes a statement, outermost first."""
        tests = [
            (self.file.segment(t), taken) for t, taken in self._conditions(constructor, statement)
        ]
        return [f"if {test}:" if taken else f"if not ({test}):" for test, taken in tests]

    def _conditions(
        self, constructor: ast.FunctionDef, statement: ast.stmt | ast.expr
    ) -> list[tuple[ast.expr, bool]]:
        """The tests around a statement, outermost first, each with the truth value it needs."""
        around = reversed([*self.file.around(statement, constructor)])
        return [(o.test, inner in o.body) for inner, o in around if isinstance(o, ast.If)]

    def _reassigned(self, statement: ast.stmt, text: str, relatives: Mapping[int, str]) -> str:
        """The text for a subclass: `self.layer.append(X)` becomes `self.layer[0] = X`."""
        value = statement.value if isinstance(statement, ast.Expr) else None
        if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)):
            return text
        start = min(self._starts(statement), default=None)
        if value.func.attr == "append" and start is not None:
            parsed = ast.parse(text).body[0]
            assert isinstance(parsed, ast.Expr) and isinstance(parsed.value, ast.Call)
            made = ast.get_source_segment(text, parsed.value.args[0])
            return f"{accessor(relatives[start])} = {made}"
        return text

    def _check_repeatable(
        self, class_name: str, constructor: ast.FunctionDef, statement: ast.stmt
    ) -> None:
        """Raises for a statement inside a loop, `with` or `try`: a subclass cannot repeat it."""
        for _, node in self.file.around(statement, constructor):
            if isinstance(node, (ast.For, ast.While, ast.With, ast.Try)):
                raise errors.UnfollowableConstruction(
                    f"some instances of `{class_name}` differ in the modules constructed here, "
                    f"inside a `{type(node).__name__.lower()}`",
                    at=self.file.at(statement),
                    hint="schedule all instances alike, or construct these modules outside of it",
                )

    def _locals(
        self, constructor: ast.FunctionDef, statements: Iterable[ast.stmt | ast.expr]
    ) -> list[ast.stmt]:
        """The assignments of local variables and arguments that statements or tests read."""
        known = {*parameters(constructor), *self.file.names, *dir(builtins)}
        needed: list[ast.stmt] = []
        left = list(statements)
        while left:
            statement = left.pop()
            tests = [test for test, _ in self._conditions(constructor, statement)]
            for name in sorted(read_in(statement, *tests)):
                bound = [s for s in constructor.body if name in _bound_beside(s, statement)]
                late = [s for s in bound if s.lineno > statement.lineno]
                if statement in needed:  # assignments after this one do not affect it
                    bound, late = [s for s in bound if s not in late], []
                found = bound or name in known or name in bound_in(statement)
                if late or not found or not all(map(_only_binds, bound)):
                    raise errors.UnfollowableConstruction(
                        f"the modules constructed here depend on the local variable `{name}`",
                        at=self.file.at(statement),
                        hint=f"keep `{name}` in an attribute of the module",
                    )
                new = [s for s in bound if s not in needed]
                needed += new
                left += new
        return sorted(needed, key=lambda s: s.lineno)

    def _override(
        self, class_name: str, method: ast.FunctionDef, lines: Mapping[ast.stmt, Lines]
    ) -> str:
        if "super()" in self.file.segment(method):
            raise errors.UnfollowableConstruction(
                f"some instances of `{class_name}` need another `{method.name}`, and this one "
                "calls `super()`",
                at=self.file.at(method),
                hint="schedule all instances alike",
            )
        edits = written(self.file, lines)
        return definition_text(self.file, method, edits) + "\n"

    def forking(self, new_name: str, shown: str, mixed: str, causes: Causes) -> str:
        """A subclass whose random numbers differ between tensor-parallel ranks."""
        fork_rng = self.imports.helper("rng", "fork_rng", causes)
        doc = f"`{shown}` with random numbers that differ between tensor-parallel ranks."
        text = [
            f"    @{fork_rng}()",
            _ANY_FORWARD,
            "        return super().forward(*args, **kwargs)",
        ]
        return self._wrapper(new_name, f"{mixed}{shown}", doc, text)

    def _wrapper(self, name: str, bases: str, doc: str, lines: Iterable[str]) -> str:
        """The text of a class with a docstring and these lines."""
        head = [f"class {name}({bases}):", *docstring(doc, 4, self.line_length), ""]
        return "\n".join([*head, *lines]) + "\n"

    def _between(
        self, forward: ast.FunctionDef, wraps: Sequence[Change], causes: Causes
    ) -> str | None:
        """A `forward` that calls `super().forward` between collectives.

        None if the class's `forward` must be rewritten: if it returns more than a tensor, say.
        """
        names = Signature.of(forward, bound=True).positional
        inputs = [wrap for wrap in wraps if isinstance(wrap, SyncInput)]
        if any((wrap.of or names[0]) not in names for wrap in inputs if names):
            return None
        # All arguments up to the last one with a collective are written by name.
        last = max((names.index(wrap.of) if wrap.of else 0 for wrap in inputs), default=-1)
        values = dict(zip(names, names[: last + 1], strict=False))
        helper = functools.partial(self.imports.helper, causes=causes)
        lines: list[str] = []
        outputs: list[SyncOutput] = []
        for wrap in wraps:
            if isinstance(wrap, SyncInput) and names:
                name = wrap.of or names[0]
                value = code(through(wrap.collectives, name, helper))
                if wrap.of is None:
                    values[name] = value
                else:
                    lines.append(wrap.where_given(forward, f"{name} = {value}"))
            elif isinstance(wrap, SyncOutput) and not wrap.nested:
                outputs.append(wrap)
            else:
                return None
        more = ["*args, **kwargs"] if len(parameters(forward)) > last + 2 else []
        own = [self._parameter(forward, name, last > 0) for name in values]
        header = ", ".join(["self", *own, *more])
        result = f"super().forward({', '.join([*values.values(), *more])})"
        for wrap in outputs:
            result = code(through(wrap.collectives, result, helper))
        text = "\n".join([*lines, f"return {result}"])
        returned = f" -> {self.file.segment(forward.returns)}" if forward.returns else ""
        return (
            f"\n    def forward({header}){returned}:\n        {fitted(text, 8, self.line_length)}\n"
        )

    def _parameter(self, forward: ast.FunctionDef, name: str, optional: bool) -> str:
        """The text of a parameter, with its default if it is optional."""
        parameter = next(each for each in all_arguments(forward) if each.arg == name)
        text, default = self.file.segment(parameter), Signature.of(forward).defaults.get(name)
        return text if default is None or not optional else f"{text}={self.file.segment(default)}"

    def recomputing(
        self,
        class_name: str,
        new_name: str,
        shown: str,
        mixed: str,
        what: Recompute,
        causes: Causes,
    ) -> str:
        """The text of a subclass that recomputes its activations in the backward pass."""
        own = class_name in self.file.classes
        forward = self.classes.method(class_name, "forward") if own else None
        call = self.imports.outside(CHECKPOINT, "checkpoint", causes)
        of_it = with_article(shown)
        doc = f"{of_it} that recomputes its activations in the backward pass."
        options = [f"{k}={v}" for k, v in what.options(self.imports, causes)]
        if what.kept is not None:
            doc = f"{of_it} that recomputes most of its activations in the backward pass."
        text, passed = [_ANY_FORWARD], ["*args", "**kwargs"]
        lines = without_caches(forward, parameters(forward), what.caches) if forward else []
        if forward is not None and (lines or what.left):
            # A decorator may look up arguments by name, and add missing ones.
            passed = list(passed_on(forward, by_name=bool(forward.decorator_list)))
            text = [header_text(self.file, forward)]
            if what.left:
                check = self.imports.helper("recomputation", "check_left_out", causes)
                given = ", ".join(f"{name}={name}" for name in what.left)
                text.append("        " + fitted(f"{check}({given})", 8, self.line_length))
            if lines:
                text += ["        if self.training:", f"            # {_NO_CACHE}"]
                text += [f"            {line}" for line in lines]
        stars = [p for p in passed if p.startswith("**")]
        plain = [p for p in passed if not p.startswith("**")]
        arguments = ", ".join(["super().forward", *plain, *options, *stars])
        text.append("        " + fitted(f"return {call}({arguments})", 8, self.line_length))
        return self._wrapper(new_name, f"{mixed}{shown}", doc, text)


def _bound_beside(outer: ast.stmt, statement: ast.stmt | ast.expr) -> Set[str]:
    """The names that a statement binds, apart from those that `statement` inside it binds."""
    if not within(outer, statement):
        return bound_in(outer)
    own = {*ast.walk(statement)}
    return bound_in(*(n for n in ast.walk(outer) if isinstance(n, ast.Name) and n not in own))


def _only_binds(statement: ast.stmt) -> bool:
    """Whether a statement only assigns local variables, so that it can be repeated."""
    if isinstance(statement, ast.If):
        return all(map(_only_binds, (*statement.body, *statement.orelse)))
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        targets = [statement.target]
    else:
        return False
    parts = (p for t in targets for p in (t.elts if isinstance(t, ast.Tuple) else [t]))
    return all(isinstance(part, ast.Name) for part in parts)


def _in_subclass(whole: Lines, extra: Lines) -> Lines:
    """The lines of a subclass's constructor for a statement that its base's has executed.

    A repeated statement needs the lines after it again, but no size may be divided twice.
    """
    repeated = extra.inside or extra.again
    after = [line for line in whole.after if line in extra.after or (repeated and not line.once)]
    return replace(whole, after=after, before=whole.before if repeated else extra.before)
