"""Writes what changes in one class: in its own text, or as a subclass."""

from __future__ import annotations

import ast
import builtins
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from slapo_rewrite import errors
from slapo_rewrite.edit.definition import (
    Attach,
    ChangeArgument,
    Definition,
    DeriveFrom,
    Key,
    MakeClass,
    MakeLayer,
    MakeOther,
    ReadWhole,
    ShareParameter,
    SplitParameter,
    What,
    WrapCall,
    WrapInput,
    WrapOutput,
    united,
)
from slapo_rewrite.edit.expressions import formatted, parenthesised, replace_call
from slapo_rewrite.edit.imports import CHECKPOINT, Imports
from slapo_rewrite.edit.splice import Edit, apply_edits
from slapo_rewrite.edit.state import Directive
from slapo_rewrite.source.index import SourceFile
from slapo_rewrite.source.sites import Site

# What transformers calls the cache that a layer fills: filled twice, it would hold every key twice.
CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params", "past_states")

# How a list of sizes is written that must be this rank's shares.
SHARES = "[{part_size}(size) for size in {argument}]"

HOOKS = {
    "fwd_pre": "register_forward_pre_hook",
    "fwd_post": "register_forward_hook",
    "bwd_post": "register_full_backward_hook",
}


@dataclass
class Lines:
    """What changes around one statement: parts of it, and whole lines before or after it.

    Attributes:
        inside: Edits of the statement itself.
        before: Lines before it, with their causes and why they are there.
        after: Lines after it.
        around: Edits of the loop that it stands in.
        again: Whether a subclass repeats it although nothing in it changes.
    """

    inside: list[Edit] = field(default_factory=list)
    before: list[tuple[str, tuple[Directive, ...], str]] = field(default_factory=list)
    after: list[tuple[str, tuple[Directive, ...], str]] = field(default_factory=list)
    around: list[Edit] = field(default_factory=list)
    again: bool = False


class ClassWriter:
    """Edits one source file, class by class.

    Args:
        file: The file.
        sites: Construction sites by the first character of their expression.
        imports: Takes the names that the edits refer to.
        line_length: The file's own.
        lineages: Each class and those of the file that it is derived from.
    """

    def __init__(
        self,
        file: SourceFile,
        sites: Mapping[int, Site],
        imports: Imports,
        line_length: int,
        lineages: Mapping[str, tuple[str, ...]],
    ) -> None:
        self.file, self.sites, self.imports, self.line_length = file, sites, imports, line_length
        self.lineages = lineages
        self.reads: dict[ast.stmt, list[Edit]] = {}

    def _method(self, class_name: str, name: str) -> ast.FunctionDef | None:
        """A method, the class's own or one that it inherits in this file."""
        found = (self.file.method(c, name) for c in self.lineage(class_name))
        return next((method for method in found if method is not None), None)

    def _methods(self, class_name: str) -> Iterator[ast.FunctionDef]:
        """The methods, those that it inherits in this file included."""
        for name in self.lineage(class_name):
            yield from self.file.methods(name)

    def lineage(self, class_name: str) -> tuple[str, ...]:
        """The class and those of this file that it is derived from, in the order of look-up."""
        return self.lineages.get(class_name, (class_name,))

    def home(self, class_name: str, key: Key) -> str:
        """The class in whose text a change stands."""
        if key[0] in ("site", "parameter", "hook"):
            return self.sites[key[1]].class_name
        if key[0] == "base":
            return self.lineage(class_name)[-1]
        if key[0] in ("size", "forward"):
            wanted = "__init__" if key[0] == "size" else "forward"
            found = (c for c in self.lineage(class_name) if self.file.method(c, wanted))
            return next(found, class_name)
        if key[0] in ("argument", "read"):
            line = key[1] if key[0] == "argument" else self.file.text.count("\n", 0, key[1]) + 1
            return next((c for c in self.lineage(class_name) if self.holds(c, line)), class_name)
        return class_name

    def holds(self, class_name: str, line: int) -> bool:
        """Whether a line stands in the text of a class."""
        node = self.file.classes.get(class_name)
        return node is not None and node.lineno <= line <= (node.end_lineno or line)

    # In place.

    def in_place(self, class_name: str, definition: Definition, indices: IndexSets) -> list[Edit]:
        """The edits that make the class what `definition` says."""
        return self._written(self._lines(class_name, definition, indices))

    def _written(self, lines: Mapping[ast.stmt, Lines]) -> list[Edit]:
        edits = []
        for statement, change in lines.items():
            start, end = self.file.span(statement)
            indent = statement.col_offset
            pad = "\n" + " " * indent
            edits += change.around
            if change.inside:
                text, _ = apply_edits(self.file.text[start:end], _moved(change.inside, -start))
                causes = united(*(e.causes for e in change.inside))
                why = "; ".join(dict.fromkeys(e.why for e in change.inside))
                edits.append(Edit(start, end, self._fitted(text, indent), causes, why))
            # Lines of one cause stand together in one edit.
            for text, causes, why in change.before:
                edits.append(
                    Edit(start, start, formatted(text, indent, self.line_length) + pad, causes, why)
                )
            for text, causes, why in change.after:
                line_end = self._end_of_line(end)
                edits.append(
                    Edit(
                        line_end,
                        line_end,
                        pad + formatted(text, indent, self.line_length),
                        causes,
                        why,
                    )
                )
        return edits

    def _end_of_line(self, position: int) -> int:
        """Past a comment that stands behind the statement."""
        line_end = self.file.text.find("\n", position)
        rest = self.file.text[position : line_end if line_end >= 0 else None]
        return position + len(rest.rstrip()) if rest.strip().startswith("#") else position

    def _fitted(self, text: str, indent: int) -> str:
        """The statement as it is where it fits on its line, else as black lays it out."""
        if "\n" not in text and indent + len(text) <= self.line_length:
            return text
        return formatted(text, indent, self.line_length)

    def _lines(
        self, class_name: str, definition: Definition, indices: IndexSets
    ) -> dict[ast.stmt, Lines]:
        lines: dict[ast.stmt, Lines] = {}

        def at(statement: ast.stmt) -> Lines:
            return lines.setdefault(statement, Lines())

        self.reads = self._whole_sizes(class_name, definition)
        by_site: dict[int, dict[str, What]] = {}
        causes: dict[int, tuple[Directive, ...]] = {}
        for key, change in definition.changes.items():
            why = definition.causes.get(key, ())
            if key[0] == "site":
                by_site.setdefault(key[1], {})[key[2]] = change
                causes[key[1]] = united(causes.get(key[1], ()), why)
            elif key[0] == "parameter" and isinstance(change, SplitParameter):
                site = self.sites[key[1]]
                text = self._split_parameter(key[3], change, why)
                at(site.statement).after.append((text, why, f"cut `{key[3]}` to this rank's part"))
            elif key[0] == "hook" and isinstance(change, Attach):
                site = self.sites[key[1]]
                text = self._hook(site, key[2], change, why)
                at(site.statement).after.append((text, why, f"hook on `{site.path}`"))
            elif key[0] == "base" and isinstance(change, DeriveFrom):
                self._derive(class_name, change, why, at)
            elif key[0] == "size":
                constructor = self._method(class_name, "__init__")
                assert constructor is not None
                text = self._own_share(key[1], why)
                at(constructor.body[-1]).after.append(
                    (text, why, f"this rank's share of `{key[1]}`")
                )
            elif key[0] == "forward":
                self._wrap_forward(class_name, change, why, at)
            elif key[0] == "call" and isinstance(change, WrapCall):
                self._wrap_calls(class_name, key[1], change, why, at)
            elif key[0] == "argument" and isinstance(change, ChangeArgument):
                self._change_argument(class_name, key, change, why, at)
            elif key[0] == "gradient" and isinstance(change, ShareParameter):
                self._share_parameter(class_name, change.name, why, at)
        for start, changes in by_site.items():
            self._change_site(self.sites[start], changes, causes[start], indices, at)
        for statement, edits in self.reads.items():
            around = list(at(statement).inside)
            at(statement).inside += [
                e for e in edits if not any(o.start <= e.start and e.end <= o.end for o in around)
            ]
        return lines

    def _derive(
        self,
        class_name: str,
        change: DeriveFrom,
        causes: tuple[Directive, ...],
        at: Callable[[ast.stmt], Lines],
    ) -> None:
        """Puts a tensor-parallel layer in the place of a class's base."""
        layer = change.layer
        node = self.file.classes[self.lineage(class_name)[-1]]
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
            statement = next(s for s in _simple_statements(constructor) if _within(s, made))
            start, end = self.file.span(made)
            keywords = [(name, _literal(value)) for name, value in layer.keywords]
            text = replace_call(self.file.segment(made), None, keywords)
            at(statement).inside.append(Edit(start, end, text, causes, why))

    def readings(self, class_name: str, path: str, attribute: str) -> Iterator[ast.Attribute]:
        """The places where a class reads an attribute of the module at a path below it."""
        wanted = f"{accessor(path)}.{attribute}"
        for method in self._methods(class_name):
            for node in ast.walk(method):
                if (
                    isinstance(node, ast.Attribute)
                    and _is_attribute(node)
                    and node.attr == attribute
                    and ast.unparse(node) == wanted
                ):
                    yield node

    def _whole_sizes(self, class_name: str, definition: Definition) -> dict[ast.stmt, list[Edit]]:
        """The edits that read whole sizes where a layer's own are read, by statement."""
        wanted = {k[1]: w for k, w in definition.changes.items() if isinstance(w, ReadWhole)}
        found: dict[ast.stmt, list[Edit]] = {}
        for method in self._methods(class_name) if wanted else ():
            for statement in _simple_statements(method):
                for node in ast.walk(statement):
                    what = wanted.get(self.file.span(node)[1]) if _is_attribute(node) else None
                    if what is None or not isinstance(node, ast.Attribute):
                        continue
                    start, end = self.file.span(node.value)[1] + 1, self.file.span(node)[1]
                    causes = definition.causes.get(("read", end), ())
                    why = f"the size of the whole `{ast.unparse(node.value)}`"
                    edit = Edit(start, end, what.attribute, causes, why)
                    found.setdefault(statement, []).append(edit)
        return found

    def _segment(self, node: ast.AST) -> str:
        """The text of an expression, with whole sizes where a layer's own are read."""
        start, end = self.file.span(node)
        inside = [
            e for edits in self.reads.values() for e in edits if start <= e.start and e.end <= end
        ]
        return apply_edits(self.file.text[start:end], _moved(inside, -start))[0]

    def extends_forward(self, class_name: str) -> bool:
        """Whether a class has no `forward`, or one that leaves the layer's work to `super()`."""
        forward = self.file.method(class_name, "forward")
        return forward is None or any(
            isinstance(n, ast.Call) and ast.unparse(n.func) == "super().forward"
            for n in ast.walk(forward)
        )

    # Construction sites.

    def _change_site(
        self,
        site: Site,
        changes: Mapping[str, What],
        causes: tuple[Directive, ...],
        indices: IndexSets,
        at: Callable[[ast.stmt], Lines],
    ) -> None:
        start, end = self.file.span(site.value)
        present = indices.of(site)
        if len(set(changes.values())) == 1 and present <= changes.keys():
            what = next(iter(changes.values()))
            if isinstance(what, MakeClass) and self._change_variable(site, what, causes, at):
                return
            text = self._made(site, what, causes)
            at(site.statement).inside.append(Edit(start, end, text, causes, _why(site, what)))
            return
        text, edits = self._choice(site, changes, causes, present)
        lines = at(site.statement)
        lines.inside.append(Edit(start, end, text, causes, f"choose by index for `{site.path}`"))
        first, last = self.file.span(site.statement)
        for edit in edits:
            inside = first <= edit.start and edit.end <= last
            (lines.inside if inside else lines.around).append(edit)

    def _made(self, site: Site, what: What, causes: tuple[Directive, ...]) -> str:
        """The construction with what was asked in it."""
        original = self._segment(site.value)
        elsewhere = site.kind in ("argument", "alias")
        if isinstance(what, MakeOther) and what.arguments is not None and not elsewhere:
            # Whatever the expression is, a call of another class takes its place.
            return (
                f"{what.subclass or self.imports.function(what.target, causes)}({what.arguments})"
            )
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
            keywords = [(name, _literal(value)) for name, value in layer.keywords]
            if layer.unit is not None:
                keywords.append(("multiple_of", f"self.{layer.unit}"))
            name = what.subclass or self.imports.helper(layer.module, layer.name, causes)
            return replace_call(original, name, keywords)
        if isinstance(what, MakeOther):
            name = what.subclass or self.imports.function(what.target, causes)
            return replace_call(original, name, arguments=what.arguments)
        assert isinstance(what, MakeClass)
        return replace_call(original, what.name)

    def _change_variable(
        self,
        site: Site,
        what: MakeClass,
        causes: tuple[Directive, ...],
        at: Callable[[ast.stmt], Lines],
    ) -> bool:
        """A class that a local variable holds is changed where the variable gets it."""
        if not site.variable:
            return False
        for statement in site.variable:
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and node.id == what.original:
                    start, end = self.file.span(node)
                    at(statement).inside.append(
                        Edit(start, end, what.name, causes, _why(site, what))
                    )
                    at(site.statement).again = True
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

    # Lines that are added.

    def _split_parameter(
        self, name: str, change: SplitParameter, causes: tuple[Directive, ...]
    ) -> str:
        function = self.imports.helper("tensor_parallel", "shard_parameter", causes)
        parts = f", parts={_literal(_parts(change.parts))}" if len(change.parts) > 1 else ""
        return f'{function}(self, "{name}", axis={change.axis}{parts})'

    def _own_share(self, attribute: str, causes: tuple[Directive, ...]) -> str:
        function = self.imports.helper("tensor_parallel", "part_size", causes)
        return f"self.{attribute} = {function}(self.{attribute})"

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

    # `forward`.

    def _forward(self, class_name: str, causes: tuple[Directive, ...]) -> ast.FunctionDef:
        forward = self._method(class_name, "forward")
        if forward is None:
            raise errors.Unsupported(
                f"`{class_name}` has no `forward` of its own to put the collective in",
                at=self.file.at(self.file.classes[class_name]),
                also=[c.at for c in causes[:1] if c.at],
                hint="put the sync on a module inside or around it",
            )
        return forward

    def _wrap_forward(
        self,
        class_name: str,
        change: What,
        causes: tuple[Directive, ...],
        at: Callable[[ast.stmt], Lines],
    ) -> None:
        forward = self._forward(class_name, causes)
        if isinstance(change, WrapInput):
            positional = [*forward.args.posonlyargs, *forward.args.args][1:]
            if not positional:
                raise errors.Unsupported(
                    f"`{class_name}.forward` has no first argument",
                    at=self.file.at(forward),
                    also=[c.at for c in causes[:1] if c.at],
                )
            name = positional[0].arg
            body = forward.body[1:] if ast.get_docstring(forward) is not None else forward.body
            function = self.imports.helper("tensor_parallel", change.function, causes)
            at(body[0]).before.append(
                (f"{name} = {function}({name})", causes, f"{change.function} of the input")
            )
        elif isinstance(change, WrapOutput):
            for statement in _returns(forward):
                value = statement.value
                if isinstance(value, ast.Tuple) and value.elts:
                    value = value.elts[0]
                if value is None:
                    continue
                start, end = self.file.span(value)
                text = self._collective(
                    change.function, self.file.segment(value), change.axis, causes
                )
                at(statement).inside.append(
                    Edit(start, end, text, causes, f"{change.function} of the output")
                )

    def _collective(
        self, function: str, value: str, axis: int | None, causes: tuple[Directive, ...]
    ) -> str:
        reference = self.imports.helper("tensor_parallel", function, causes)
        return f"{reference}({value}{'' if axis in (None, -1) else f', axis={axis}'})"

    def _wrap_calls(
        self,
        class_name: str,
        path: str,
        change: WrapCall,
        causes: tuple[Directive, ...],
        at: Callable[[ast.stmt], Lines],
    ) -> None:
        wanted = accessor(path)
        found = False
        for method in self._methods(class_name):
            for statement in _simple_statements(method):
                for node in ast.walk(statement):
                    if not (isinstance(node, ast.Call) and ast.unparse(node.func) == wanted):
                        continue
                    target: ast.expr = node if change.around == "result" else node.args[0]
                    start, end = self.file.span(target)
                    text = self._collective(
                        change.function, self.file.segment(target), change.axis, causes
                    )
                    at(statement).inside.append(
                        Edit(start, end, text, causes, f"{change.function} at `{path}`")
                    )
                    found = True
        if not found:
            raise errors.Unsupported(
                f"no method of `{class_name}` calls `{wanted}(...)`: there is no place for "
                "the collective",
                at=self.file.at(self.file.classes[class_name]),
                also=[c.at for c in causes[:1] if c.at],
                hint="put the sync on a module around it",
            )

    def _change_argument(
        self,
        class_name: str,
        key: Key,
        change: ChangeArgument,
        causes: tuple[Directive, ...],
        at: Callable[[ast.stmt], Lines],
    ) -> None:
        _, line, column, end_line, end_column, index = key
        for method in self._methods(class_name):
            for statement in _simple_statements(method):
                for node in ast.walk(statement):
                    if not isinstance(node, (ast.Call, ast.Subscript)):
                        continue
                    # Of a method call, Python tells the place from the method's name on.
                    starts = [node.col_offset]
                    if isinstance(node, ast.Call):
                        starts.append(getattr(node.func, "end_col_offset", -1))
                    if (node.end_lineno, node.end_col_offset) != (end_line, end_column) or not (
                        node.lineno == line and column in starts
                    ):
                        continue
                    argument, whole = self._argument(node, index)
                    if argument is None:
                        continue
                    template = SHARES if whole else change.template
                    self._write_argument(argument, template, at(statement), causes)
                    return
        raise errors.UnfollowableSize(
            "an argument of this call depends on the sharded size, and cannot be told apart "
            "from the others",
            at=errors.Span(self.file.display, line, column + 1, 1, self.file.line(line)),
            also=[c.at for c in causes[:1] if c.at],
            hint="write the sizes out one by one, or keep them in integer attributes of the module",
        )

    def _argument(
        self, node: ast.Call | ast.Subscript, index: tuple[int | str, ...]
    ) -> tuple[ast.expr | None, bool]:
        """The argument at `index`, and whether it is a list that stands there as a whole."""
        if isinstance(node, ast.Subscript):
            keys = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            number, which = index
            key = keys[number] if isinstance(number, int) and number < len(keys) else None
            if not isinstance(key, ast.Slice):
                return None, False
            return (key.lower if which == "start" else key.upper), False
        arguments: list[ast.expr] = list(node.args)
        if (self.file.qualified(node.func) or "").startswith("torch."):
            arguments = arguments[1:]
        if (
            len(arguments) == 1
            and len(index) == 1
            and isinstance(arguments[0], (ast.Tuple, ast.List))
        ):
            arguments = arguments[0].elts
        first = index[0]
        starred = any(isinstance(a, ast.Starred) for a in arguments)
        if starred or not isinstance(first, int) or first >= len(arguments):
            return None, False
        argument = arguments[first]
        if len(index) == 1:
            return argument, False
        if not isinstance(argument, (ast.Tuple, ast.List)):
            return argument, True
        second = index[1]
        if not isinstance(second, int) or any(isinstance(a, ast.Starred) for a in argument.elts):
            return None, False
        return argument.elts[second], False

    def _write_argument(
        self, argument: ast.expr, template: str, lines: Lines, causes: tuple[Directive, ...]
    ) -> None:
        start, end = self.file.span(argument)
        if any((e.start, e.end) == (start, end) for e in lines.inside):
            return
        function = ""
        if "{part_size}" in template:
            function = self.imports.helper("tensor_parallel", "part_size", causes)
        text = template.format(argument=self.file.segment(argument), part_size=function)
        why = "what depends on the sharded size follows"
        lines.inside.append(Edit(start, end, text, causes, why))

    def _share_parameter(
        self,
        class_name: str,
        name: str,
        causes: tuple[Directive, ...],
        at: Callable[[ast.stmt], Lines],
    ) -> None:
        """Adds up a parameter's gradients where `forward` reads it."""
        found = False
        for method in self._methods(class_name):
            if method.name.startswith("_init") or method.name == "__init__":
                continue
            for statement in _simple_statements(method):
                of_attributes = {
                    id(n.value)
                    for n in ast.walk(statement)
                    if isinstance(n, ast.Attribute) and n.attr in ("dtype", "device", "shape")
                }
                for node in ast.walk(statement):
                    if (
                        isinstance(node, ast.Attribute)
                        and isinstance(node.ctx, ast.Load)
                        and id(node) not in of_attributes
                        and ast.unparse(node) == f"self.{name}"
                    ):
                        start, end = self.file.span(node)
                        text = self._collective(
                            "all_reduce_gradient", self.file.segment(node), None, causes
                        )
                        why = f"`{name}` is used on this rank's part: its gradients are added up"
                        at(statement).inside.append(Edit(start, end, text, causes, why))
                        found = True
        if not found:
            raise errors.Unsupported(
                f"no method of `{class_name}` reads `self.{name}`: there is no place to add up "
                "its gradients",
                at=self.file.at(self.file.classes[class_name]),
                also=[c.at for c in causes[:1] if c.at],
            )

    # As a subclass.

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
        lines = self._lines(class_name, whole, indices)
        wanted = self._lines(class_name, _only(whole, extra), indices)
        constructor = self._method(class_name, "__init__")
        body = ["\n".join(_docstring(doc, 4, self.line_length)) + "\n"]
        in_init = {s: lines[s] for s in wanted if constructor and _within(constructor, s)}
        elsewhere = {s: lines[s] for s in wanted if s not in in_init}
        if in_init and constructor:
            body.append(self._constructor(class_name, constructor, in_init, relatives, optional))
        for method in self._methods(class_name):
            inside = {s: c for s, c in elsewhere.items() if _within(method, s)}
            if not inside:
                continue
            if method is not self._method(class_name, method.name):
                raise errors.UnfollowableConstruction(
                    f"some instances of `{class_name}` differ in a method that it calls by "
                    "`super()`",
                    at=self.file.at(next(iter(inside))),
                    hint="schedule all instances alike",
                )
            body.append(self._override(class_name, method, inside))
        return f"class {new_name}({class_name}):\n" + "\n".join(body)

    def _constructor(
        self,
        class_name: str,
        constructor: ast.FunctionDef,
        lines: Mapping[ast.stmt, Lines],
        relatives: Mapping[int, str],
        optional: set[int],
    ) -> str:
        header = self._header(constructor)
        passed = ", ".join(_passed_on(constructor.args))
        text = [header, f"        super().__init__({passed})"]
        known = {a.arg for a in _arguments(constructor.args)} | self.file.names | set(dir(builtins))
        body: list[str] = []
        for statement in sorted(lines, key=lambda s: s.lineno):
            self._check_repeatable(class_name, constructor, statement)
            change = lines[statement]
            guards = (
                self._guards(constructor, statement) if self._starts(statement) & optional else []
            )
            depth = 8 + 4 * len(guards)
            indent = " " * depth
            block = [" " * (8 + 4 * n) + guard for n, guard in enumerate(guards)]
            if change.inside or change.again:
                local = self._locals(constructor, statement, known)
                block += [
                    indent + formatted(self.file.segment(s), depth, self.line_length)
                    for s in local
                    if s not in lines
                ]
                start, end = self.file.span(statement)
                again, _ = apply_edits(self.file.text[start:end], _moved(change.inside, -start))
                again = self._reassigned(statement, again, relatives)
                block.append(indent + formatted(again, depth, self.line_length))
            block += [
                indent + formatted(t, depth, self.line_length)
                for t, _, _ in (*change.before, *change.after)
            ]
            body += ["\n".join(block)] if guards else block
        return "\n".join([*text, *dict.fromkeys(body)]) + "\n"

    def _starts(self, statement: ast.stmt) -> set[int]:
        """The construction sites in a statement."""
        return {start for start, site in self.sites.items() if site.statement is statement}

    def _guards(self, constructor: ast.FunctionDef, statement: ast.stmt) -> list[str]:
        """The conditions under which the constructor comes to a statement, outermost first."""
        found = []
        for node in ast.walk(constructor):
            if isinstance(node, ast.If) and _within(node, statement) and node is not statement:
                test = self.file.segment(node.test)
                taken = any(_within(inner, statement) for inner in node.body)
                found.append(f"if {test}:" if taken else f"if not ({test}):")
        return found

    def _reassigned(self, statement: ast.stmt, text: str, relatives: Mapping[int, str]) -> str:
        """In a subclass, `self.layer[0] = X` takes the place of `self.layer.append(X)`."""
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
        """A statement can stand in a subclass's constructor unless a loop is around it."""
        for node in ast.walk(constructor):
            if isinstance(node, (ast.For, ast.While, ast.With, ast.Try)) and _within(
                node, statement
            ):
                raise errors.UnfollowableConstruction(
                    f"some instances of `{class_name}` differ in what is made here, inside a "
                    f"`{type(node).__name__.lower()}`",
                    at=self.file.at(statement),
                    hint="schedule all instances alike, or make these modules outside of it",
                )

    def _locals(
        self, constructor: ast.FunctionDef, statement: ast.stmt, known: set[str]
    ) -> list[ast.stmt]:
        """The assignments of local variables that a statement uses, in order."""
        bound = {
            n.id
            for n in ast.walk(statement)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }
        missing = {
            n.id
            for n in ast.walk(statement)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id not in known | bound
        }
        needed: list[ast.stmt] = []
        for name in sorted(missing):
            assigned = [
                s
                for s in constructor.body
                if isinstance(s, ast.Assign)
                and any(isinstance(t, ast.Name) and t.id == name for t in s.targets)
            ]
            if len(assigned) != 1:
                raise errors.UnfollowableConstruction(
                    f"what is made here depends on the local variable `{name}`",
                    at=self.file.at(statement),
                    hint=f"keep `{name}` in an attribute of the module",
                )
            needed += [s for s in self._locals(constructor, assigned[0], known) if s not in needed]
            needed.append(assigned[0])
        return needed

    def _override(
        self, class_name: str, method: ast.FunctionDef, lines: Mapping[ast.stmt, Lines]
    ) -> str:
        start = (
            self.file.span(method.decorator_list[0])[0] - 1
            if method.decorator_list
            else self.file.span(method)[0]
        )
        end = self.file.span(method)[1]
        if "super()" in self.file.text[start:end]:
            raise errors.UnfollowableConstruction(
                f"some instances of `{class_name}` need another `{method.name}`, and this one "
                "calls `super()`",
                at=self.file.at(method),
                hint="schedule all instances alike",
            )
        text, _ = apply_edits(self.file.text[start:end], _moved(self._written(lines), -start))
        return " " * method.col_offset + text + "\n"

    def _header(self, method: ast.FunctionDef) -> str:
        start, _ = self.file.span(method)
        first = method.body[0]
        end = self.file.offset(first.lineno, 0)
        header = self.file.text[start:end].rstrip()
        # Comments between the header and the body do not belong to it.
        while header.rsplit("\n", 1)[-1].lstrip().startswith("#"):
            header = header.rsplit("\n", 1)[0].rstrip()
        return " " * method.col_offset + header

    def recomputing(
        self, class_name: str, new_name: str, shown: str, causes: tuple[Directive, ...]
    ) -> str:
        """A subclass whose activations are computed again in the backward pass."""
        forward = (
            self.file.method(class_name, "forward") if class_name in self.file.classes else None
        )
        call = self.imports.outside(CHECKPOINT, "checkpoint", causes)
        doc = f"A `{shown}` that recomputes its activations in the backward pass."
        text = [f"class {new_name}({shown}):", *_docstring(doc, 4, self.line_length), ""]
        names = [a.arg for a in _arguments(forward.args)] if forward else []
        caches = [name for name in names if name in CACHES]
        if forward is None or not caches:
            text += [
                "    def forward(self, *args, **kwargs):",
                f"        return {call}(super().forward, *args, use_reentrant=False, **kwargs)",
            ]
            return "\n".join(text) + "\n"
        passed = list(_passed_on(forward.args, by_name=False))
        stars = [p for p in passed if p.startswith("**")]
        plain = [p for p in passed if not p.startswith("**")]
        arguments = ", ".join(["super().forward", *plain, "use_reentrant=False", *stars])
        text += [
            self._header(forward),
            "        if self.training:",
            "            # Computing the layer a second time would fill the cache a second time.",
            *(f"            {name} = None" for name in caches),
            "        return "
            + formatted(f"{call}({arguments})", 8, self.line_length - len("return ")),
        ]
        return "\n".join(text) + "\n"


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


def condition(variable: str, indices: list[int], total: int) -> str:
    """An expression that is true for these indices out of `range(total)`.

    `[0, 1, 2] -> i < 3`, `[4, 5] of 6 -> i >= 4`, `[0, 2, 4] -> i % 2 == 0`.
    """
    first, last, count = indices[0], indices[-1], len(indices)
    if count == 1:
        return f"{variable} == {first}"
    step = indices[1] - first
    if indices == list(range(first, last + 1)):
        if first == 0:
            return f"{variable} < {last + 1}"
        return (
            f"{variable} >= {first}" if last == total - 1 else f"{first} <= {variable} < {last + 1}"
        )
    if indices == list(range(first % step, total, step)):
        return f"{variable} % {step} == {first % step}"
    return f"{variable} in ({', '.join(map(str, indices))})"


def accessor(path: str) -> str:
    """A module path as an expression: `mlp.0.c_fc -> self.mlp[0].c_fc`."""
    text = "self"
    for segment in path.split("."):
        text += f"[{segment}]" if segment.isdigit() else f".{segment}"
    return text


def _parts(parts: tuple[int, ...]) -> int | tuple[int, ...]:
    return len(parts) if len(set(parts)) == 1 else parts


def _literal(value: object) -> str:
    return repr(value)


def _number(index: str) -> int:
    return int(index.rsplit(".", 1)[-1]) if index else 0


def _why(site: Site, what: What) -> str:
    if isinstance(what, MakeLayer):
        return f"`{site.path}` becomes a {what.layer.name}"
    if isinstance(what, MakeOther):
        return f"`{site.path}` is replaced by {what.target.name}"
    return f"`{site.path}` becomes a {what.name}" if isinstance(what, MakeClass) else site.path


def _only(definition: Definition, keys: set[Key]) -> Definition:
    return Definition(
        {k: v for k, v in definition.changes.items() if k in keys},
        {k: v for k, v in definition.causes.items() if k in keys},
        definition.present,
        definition.nodes,
    )


def _moved(edits: Iterable[Edit], by: int) -> list[Edit]:
    return [Edit(e.start + by, e.end + by, e.text, e.causes, e.why) for e in edits]


def _is_attribute(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)


def _within(outer: ast.AST, inner: ast.AST) -> bool:
    return any(node is inner for node in ast.walk(outer))


def _returns(function: ast.FunctionDef) -> Iterator[ast.Return]:
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Return):
            yield node
        elif not isinstance(
            node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
        ):
            waiting += list(ast.iter_child_nodes(node))


def _simple_statements(function: ast.FunctionDef) -> Iterator[ast.stmt]:
    for node in ast.walk(function):
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            yield node


def _arguments(arguments: ast.arguments) -> list[ast.arg]:
    found = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return found + [a for a in (arguments.vararg, arguments.kwarg) if a]


def _passed_on(arguments: ast.arguments, by_name: bool = True) -> Iterator[str]:
    """The arguments of a method's caller, handed on as they came."""
    positional = [*arguments.posonlyargs, *arguments.args][1:]
    required = len(positional) - len(arguments.defaults)
    for number, argument in enumerate(positional):
        optional = by_name and number >= required and not arguments.vararg
        yield f"{argument.arg}={argument.arg}" if optional else argument.arg
    if arguments.vararg:
        yield f"*{arguments.vararg.arg}"
    for argument in arguments.kwonlyargs:
        yield f"{argument.arg}={argument.arg}"
    if arguments.kwarg:
        yield f"**{arguments.kwarg.arg}"


def _docstring(text: str, indent: int, line_length: int) -> list[str]:
    """A docstring of one line, or broken over several where it does not fit."""
    pad = " " * indent
    if len(pad) + len(text) + 6 <= line_length:
        return [f'{pad}"""{text}"""']
    return [
        *textwrap.wrap(
            f'"""{text}',
            line_length,
            initial_indent=pad,
            subsequent_indent=pad,
            break_on_hyphens=False,
        ),
        f'{pad}"""',
    ]
