"""Parts of a method: recomputed as a method of their own, or under another random state."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from slapo_rewrite import errors
from slapo_rewrite.edit.definition import ForkPart, RecomputePart
from slapo_rewrite.edit.expressions import formatted
from slapo_rewrite.edit.imports import CHECKPOINT, Imports
from slapo_rewrite.edit.kept import buffers_context, context
from slapo_rewrite.edit.lineages import Lineages
from slapo_rewrite.edit.lines import Lines, written
from slapo_rewrite.edit.splice import Edit, apply_edits, moved
from slapo_rewrite.edit.state import Directive, Part
from slapo_rewrite.edit.text import within
from slapo_rewrite.hugging_face import CACHES
from slapo_rewrite.source.calls import Calls, called_names, find_calls, obstacle
from slapo_rewrite.source.liveness import local_names, part_of

MAX_NAME = 40


def find_part(lineages: Lineages, class_name: str, part: Part, cause: Directive) -> Calls:
    """The statements of a class's methods that a part means.

    Raises:
        UnknownPath: No method makes the calls.
        Unsupported: Several methods do.
    """
    file = lineages.file
    methods: dict[str, ast.FunctionDef] = {}
    for method in lineages.methods(class_name):
        if method.name != "__init__":
            methods.setdefault(method.name, method)
    found = [c for m in methods.values() if (c := find_calls(m, part.calls)) is not None]
    known = [name for method in methods.values() for name, _ in called_names(method)]
    wanted = part.calls if isinstance(part.calls, tuple) else ()
    missing = [name for name in wanted if name not in known]
    if missing or not found:
        asked = missing[0] if missing else str(part.calls)
        what = f"calls `{asked}`" if missing else f"calls anything that matches `{asked}`"
        of_self = [name for name in known if name not in lineages.file.names]
        raise errors.UnknownPath(
            f"no method of `{class_name}` {what}",
            at=cause.at,
            also=[file.at(methods["forward"])] if "forward" in methods else [],
            hint=errors.did_you_mean(asked, of_self),
        )
    if len(found) > 1:
        first, second = found[:2]
        raise errors.Unsupported(
            f"the calls stand in several methods of `{class_name}`",
            at=cause.at,
            also=[file.at(first.calls[0]), file.at(second.calls[0])],
            hint=f"name those of `{first.method.name}` or those of `{second.method.name}`",
        )
    return found[0]


@dataclass(frozen=True)
class _Wanted:
    change: ForkPart | RecomputePart
    calls: Calls
    causes: tuple[Directive, ...]
    span: tuple[int, int]


class PartWriter:
    """Rewrites parts of the methods of one class.

    Args:
        lineages: The classes of the model file.
        imports: Takes the names that the edits refer to.
        class_name: The class.
        line_length: The file's own.
    """

    def __init__(
        self, lineages: Lineages, imports: Imports, class_name: str, line_length: int
    ) -> None:
        self.lineages, self.imports, self.class_name = lineages, imports, class_name
        self.line_length, self.file = line_length, lineages.file
        self.wanted: list[_Wanted] = []
        self.names: set[str] = set()

    def add(self, change: ForkPart | RecomputePart, causes: tuple[Directive, ...]) -> None:
        """Takes one part."""
        calls = find_part(self.lineages, self.class_name, change.part, causes[0])
        span = (self.file.span(calls.run[0])[0], self.file.span(calls.run[-1])[1])
        self.wanted.append(_Wanted(change, calls, causes, span))

    def write(self, lines: dict[ast.stmt, Lines]) -> None:
        """Rewrites the parts, what stands in others first.

        Args:
            lines: What changes in the class so far; what changes in a part goes along with it.

        Raises:
            RewriteError: A part cannot be taken out, or overlaps with another one.
        """
        order = sorted(
            self.wanted, key=lambda w: (w.span[1] - w.span[0], isinstance(w.change, RecomputePart))
        )
        for number, wanted in enumerate(order):
            for other in order[:number]:
                self._check_apart(wanted, other)
        for wanted in order:
            if isinstance(wanted.change, RecomputePart) and wanted.calls.is_single:
                self._wrap_call(wanted, wanted.change, lines)
        for wanted in order:
            if isinstance(wanted.change, ForkPart):
                self._fork(wanted, lines)
            elif not wanted.calls.is_single:
                self._take_out(wanted, wanted.change, lines)

    def _check_apart(self, one: _Wanted, other: _Wanted) -> None:
        (start, end), (first, last) = one.span, other.span
        nested = start <= first and last <= end
        same = one.span == other.span and type(one.change) is type(other.change)
        if (nested and not same) or end <= first or last <= start:
            return
        raise errors.ConflictingEdits(
            f"two parts of `{self.class_name}.{one.calls.method.name}` overlap",
            at=other.causes[0].at,
            also=[c.at for c in one.causes[:1] if c.at],
            hint="name calls that stand apart, or all of them in one part",
        )

    # A single call ----------------------------------------------------------------------------

    def _wrap_call(
        self, wanted: _Wanted, change: RecomputePart, lines: dict[ast.stmt, Lines]
    ) -> None:
        """`self.mlp(x)  ->  checkpoint(self.mlp, x, use_reentrant=False)`."""
        (call,), (statement,) = wanted.calls.calls, wanted.calls.run
        function = self.imports.outside(CHECKPOINT, "checkpoint", wanted.causes)
        options = ", ".join(self._options(change, wanted.causes))
        start = self.file.span(call)[0]
        callee_end = self.file.span(call.func)[1]
        opened = self.file.text.index("(", callee_end) + 1
        why = f"`{self.file.segment(call.func)}`, checkpointed"
        edits = [Edit(start, start, f"{function}(", wanted.causes, why)]
        separator = ", " if call.args or call.keywords else f", {options}"
        edits.append(Edit(callee_end, opened, separator, wanted.causes, why))
        if call.keywords:
            place = self.file.span(call.keywords[0])[0]
            edits.append(Edit(place, place, f"{options}, ", wanted.causes, why))
        elif call.args:
            place = self.file.span(call.args[-1])[1]
            edits.append(Edit(place, place, f", {options}", wanted.causes, why))
        lines.setdefault(statement, Lines()).inside += edits
        used = {n.id for n in ast.walk(call) if isinstance(n, ast.Name)}
        self._empty_caches(wanted, statement, used, lines)

    def _options(self, change: RecomputePart, causes: tuple[Directive, ...]) -> Iterator[str]:
        yield "use_reentrant=False"
        if change.kept is not None:
            yield f"context_fn={context(self.imports, change.kept, causes)}"
        elif change.updates_buffers:
            yield f"context_fn={buffers_context(self.imports, causes)}"

    def _empty_caches(
        self, wanted: _Wanted, statement: ast.stmt, used: set[str], lines: dict[ast.stmt, Lines]
    ) -> None:
        """A cache of keys and values is not passed on in training: it would be filled twice."""
        caches = [n for n in CACHES if n in used & local_names(wanted.calls.method)]
        if caches:
            text = "if self.training:\n    # Computing this a second time would fill the cache a "
            text += "second time.\n" + "".join(f"    {name} = None\n" for name in caches)
            before = lines.setdefault(statement, Lines()).before
            if all(known != text for known, _, _ in before):
                before.append((text, wanted.causes, "no cache in training"))

    # Several statements -----------------------------------------------------------------------

    def _text(self, wanted: _Wanted, lines: dict[ast.stmt, Lines]) -> tuple[int, int, str]:
        """Where the statements stand, comments above included, and their text with what changes.

        The changes are taken out of `lines`.
        """
        start, end = self._lead(wanted.span[0]), self._tail(wanted.span[1])
        inside = {
            s: c for s, c in lines.items() if any(within(outer, s) for outer in wanted.calls.run)
        }
        for statement in inside:
            del lines[statement]
        edits = moved(written(self.file, inside, self.line_length), -start)
        text, _ = apply_edits(self.file.text[start:end], edits)
        return start, end, text

    def _lead(self, start: int) -> int:
        """The first character of the comment lines directly above, or of the statement."""
        text = self.file.text
        line = text.rfind("\n", 0, start) + 1
        while True:
            above = text.rfind("\n", 0, max(0, line - 1)) + 1
            shown = text[above:line].strip()
            if above == line or not shown.startswith("#"):
                break
            if len(text[above:line]) - len(text[above:line].lstrip()) != start - (
                text.rfind("\n", 0, start) + 1
            ):
                break
            line = above
        return line + len(text[line:]) - len(text[line:].lstrip(" \t"))

    def _tail(self, end: int) -> int:
        """Past a comment behind the last statement."""
        rest = self.file.text[end:].partition("\n")[0]
        return end + len(rest.rstrip()) if rest.strip().startswith("#") else end

    def _indented(self, wanted: _Wanted, text: str, indent: int) -> str:
        """The statements at another indentation; the first line carries none."""
        before = wanted.calls.run[0].col_offset
        if before == indent:
            return text
        for statement in wanted.calls.run:
            for node in ast.walk(statement):
                if isinstance(node, ast.Constant | ast.JoinedStr) and node.lineno != (
                    node.end_lineno
                ):
                    raise errors.Unsupported(
                        "a string over several lines would change with the indentation",
                        at=self.file.at(node),
                        also=[c.at for c in wanted.causes[:1] if c.at],
                        hint="write it as lines in parentheses",
                    )
        pad, shorter = " " * max(0, indent - before), max(0, before - indent)
        first, *others = text.split("\n")
        shifted = [pad + o[shorter:] if o.strip() else o for o in others]
        if any(len(line) > self.line_length for line in shifted):
            plain = "\n".join([first, *(o.removeprefix(" " * before) for o in others)])
            return formatted(plain, indent, self.line_length)
        return "\n".join([first, *shifted])

    def _fork(self, wanted: _Wanted, lines: dict[ast.stmt, Lines]) -> None:
        start, end, text = self._text(wanted, lines)
        indent = wanted.calls.run[0].col_offset
        fork_rng = self.imports.helper("rng", "fork_rng", wanted.causes)
        body = " " * (indent + 4) + self._indented(wanted, text, indent + 4)
        text = f"with {fork_rng}():\n{body}"
        why = "random numbers that differ between ranks"
        edit = Edit(start, end, text, wanted.causes, why)
        lines.setdefault(wanted.calls.run[0], Lines()).around.append(edit)

    def _take_out(
        self, wanted: _Wanted, change: RecomputePart, lines: dict[ast.stmt, Lines]
    ) -> None:
        """A method of the statements, and in their place its checkpointed call."""
        run, method = wanted.calls.run, wanted.calls.method
        part = part_of(method, run)
        inputs = [name for name in part.inputs if name != "self"]
        self._check(wanted, part.unsure, inputs)
        name = self._method_name(wanted, change.part)
        returned = isinstance(run[-1], ast.Return)
        if not part.outputs and not returned:
            raise errors.Unsupported(
                f"nothing that this part of `{self.class_name}.{method.name}` computes is read "
                "later",
                at=self.file.at(run[0]),
                also=[c.at for c in wanted.causes[:1] if c.at],
                hint="name more calls, those that use what it computes",
            )
        stars = {a.arg: s for a, s in ((method.args.vararg, "*"), (method.args.kwarg, "**")) if a}
        inputs.sort(key=lambda n: len(stars.get(n, "")))
        shown = [stars.get(n, "") + n for n in inputs]
        plain = [n for n in shown if not n.startswith("**")]
        options = self._options(change, wanted.causes)
        call = ", ".join([f"self.{name}", *plain, *options, *shown[len(plain) :]])
        function = self.imports.outside(CHECKPOINT, "checkpoint", wanted.causes)
        results = ", ".join(part.outputs)
        call = f"{'return' if returned else results + ' ='} {function}({call})"

        start, end, text = self._text(wanted, lines)
        indent, why = run[0].col_offset, f"`{name}`, checkpointed"
        call = formatted(call, indent, self.line_length)
        here = lines.setdefault(run[0], Lines())
        here.around.append(Edit(start, end, call, wanted.causes, why))
        self._empty_caches(wanted, run[0], set(inputs), lines)

        margin = method.col_offset
        doc = f"The part of `{method.name}` that is computed again in the backward pass."
        head = formatted(
            f"def {name}({', '.join(['self', *shown])}): ...", margin, self.line_length
        )
        body = [f'"""{doc}"""', self._indented(wanted, text, margin + 4)]
        body += [] if returned else [f"return {results}"]
        pad = " " * (margin + 4)
        new = "\n\n" + " " * margin + head.removesuffix(" ...") + "\n"
        new += "\n".join(pad + line for line in body)
        place = self._tail(self.file.span(method)[1])
        edit = Edit(place, place, new, wanted.causes, why)
        lines.setdefault(method, Lines()).around.append(edit)

    def _check(self, wanted: _Wanted, unsure: tuple[str, ...], inputs: list[str]) -> None:
        run, method = wanted.calls.run, wanted.calls.method
        here = f"this part of `{self.class_name}.{method.name}`"
        also = [c.at for c in wanted.causes[:1] if c.at]
        found = obstacle(run, inputs)
        if found is not None:
            raise errors.Unsupported(
                f"{here} {found.words}", at=self.file.at(found.node), also=also, hint=found.hint
            )
        if unsure:
            raise errors.Unsupported(
                f"{here} cannot be a method of its own: `{unsure[0]}` is not bound on every way "
                "through it",
                at=self.file.at(run[0]),
                also=also,
                hint=f"bind `{unsure[0]}` before, or name calls so that it is bound and read on "
                "one side",
            )
        for argument in (method.args.vararg, method.args.kwarg):
            if argument and any(
                isinstance(n, ast.Name) and n.id == argument.arg and isinstance(n.ctx, ast.Store)
                for statement in run
                for n in ast.walk(statement)
            ):
                raise errors.Unsupported(
                    f"{here} binds `{argument.arg}` anew", at=self.file.at(run[0]), also=also
                )
        for statement in run:
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and node.id in ("locals", "__class__"):
                    raise errors.Unsupported(
                        f"{here} reads `{node.id}`", at=self.file.at(node), also=also
                    )

    def _method_name(self, wanted: _Wanted, part: Part) -> str:
        """A name that says what is called: `_ln_2_and_mlp`, `_ln_2_to_mlp`."""
        taken = {m.name for m in self.lineages.methods(self.class_name)} | self.names
        taken |= {
            n.attr for n in ast.walk(self.file.classes[self.class_name])
            if isinstance(n, ast.Attribute)
        }  # fmt: skip
        if part.name is not None:
            if part.name in taken:
                raise errors.NameTaken(
                    f"`{self.class_name}` has a `{part.name}` already",
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
    """A called name as part of another: `layer.-1` as `last_layer`."""
    head, _, index = name.rpartition(".")
    if index.lstrip("-").isdigit():
        name = f"last_{head}" if index == "-1" else f"{head}_{index.lstrip('-')}"
    return re.sub(r"\W", "_", name).strip("_")
