"""What changes in `forward` and in the arguments of its calls."""

from __future__ import annotations

import ast

from slapo_rewrite import errors
from slapo_rewrite.edit.definition import ChangeArgument, Key, What, WrapCall, WrapInput, WrapOutput
from slapo_rewrite.edit.imports import Imports
from slapo_rewrite.edit.lineages import Lineages
from slapo_rewrite.edit.lines import At, Lines
from slapo_rewrite.edit.splice import Edit
from slapo_rewrite.edit.state import Directive
from slapo_rewrite.edit.text import accessor, returns, simple_statements

# How a list of sizes is written that must be this rank's shares.
SHARES = "[{part_size}(size) for size in {argument}]"


class ForwardWriter:
    """Changes the methods of one class that compute.

    Args:
        lineages: The classes of the model file.
        imports: Takes the names that the changes refer to.
        class_name: The class.
        at: Takes the changes, by their statements.
    """

    def __init__(self, lineages: Lineages, imports: Imports, class_name: str, at: At) -> None:
        self.lineages, self.imports, self.class_name, self.at = lineages, imports, class_name, at
        self.file = lineages.file

    def wrap(self, change: What, causes: tuple[Directive, ...]) -> None:
        """Puts a collective at the input or the output of `forward`."""
        forward = self._forward(causes)
        if isinstance(change, WrapInput):
            positional = [*forward.args.posonlyargs, *forward.args.args][1:]
            if not positional:
                raise errors.Unsupported(
                    f"`{self.class_name}.forward` has no first argument",
                    at=self.file.at(forward),
                    also=[c.at for c in causes[:1] if c.at],
                )
            name = positional[0].arg
            body = forward.body[1:] if ast.get_docstring(forward) is not None else forward.body
            function = self.imports.helper("tensor_parallel", change.function, causes)
            self.at(body[0]).before.append(
                (f"{name} = {function}({name})", causes, f"{change.function} of the input")
            )
        elif isinstance(change, WrapOutput):
            for statement in returns(forward):
                value = statement.value
                if isinstance(value, ast.Tuple) and value.elts:
                    value = value.elts[0]
                if value is None:
                    continue
                start, end = self.file.span(value)
                text = self._collective(
                    change.function, self.file.segment(value), change.axis, causes
                )
                self.at(statement).inside.append(
                    Edit(start, end, text, causes, f"{change.function} of the output")
                )

    def fork(self, causes: tuple[Directive, ...]) -> None:
        """Decorates `forward`, so that its random numbers differ between ranks."""
        method = self.lineages.method(self.class_name, "forward")
        assert method is not None
        start = self.file.span(method)[0]
        decorator = f"@{self.imports.helper('rng', 'fork_rng', causes)}()"
        text = decorator + "\n" + " " * method.col_offset
        why = "random numbers that differ between ranks"
        self.at(method.body[0]).around.append(Edit(start, start, text, causes, why))

    def _forward(self, causes: tuple[Directive, ...]) -> ast.FunctionDef:
        forward = self.lineages.method(self.class_name, "forward")
        if forward is None:
            raise errors.Unsupported(
                f"`{self.class_name}` has no `forward` of its own to put the collective in",
                at=self.file.at(self.file.classes[self.class_name]),
                also=[c.at for c in causes[:1] if c.at],
                hint="put the sync on a module inside or around it",
            )
        return forward

    def _collective(
        self, function: str, value: str, axis: int | None, causes: tuple[Directive, ...]
    ) -> str:
        reference = self.imports.helper("tensor_parallel", function, causes)
        return f"{reference}({value}{'' if axis in (None, -1) else f', axis={axis}'})"

    def wrap_calls(self, path: str, change: WrapCall, causes: tuple[Directive, ...]) -> None:
        """Puts a collective around the calls of the module at a path below the class."""
        wanted = accessor(path)
        found = False
        for method in self.lineages.methods(self.class_name):
            for statement in simple_statements(method):
                for node in ast.walk(statement):
                    if not (isinstance(node, ast.Call) and ast.unparse(node.func) == wanted):
                        continue
                    target: ast.expr = node if change.around == "result" else node.args[0]
                    start, end = self.file.span(target)
                    text = self._collective(
                        change.function, self.file.segment(target), change.axis, causes
                    )
                    self.at(statement).inside.append(
                        Edit(start, end, text, causes, f"{change.function} at `{path}`")
                    )
                    found = True
        if not found:
            raise errors.Unsupported(
                f"no method of `{self.class_name}` calls `{wanted}(...)`: there is no place for "
                "the collective",
                at=self.file.at(self.file.classes[self.class_name]),
                also=[c.at for c in causes[:1] if c.at],
                hint="put the sync on a module around it",
            )

    def change_argument(
        self, key: Key, change: ChangeArgument, causes: tuple[Directive, ...]
    ) -> None:
        """Writes an argument differently, by the place of its call and its index in it."""
        _, line, column, end_line, end_column, index = key
        for method in self.lineages.methods(self.class_name):
            for statement in simple_statements(method):
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
                    self._write_argument(argument, template, self.at(statement), causes)
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

    def share_parameter(self, name: str, causes: tuple[Directive, ...]) -> None:
        """Adds up a parameter's gradients where `forward` reads it."""
        found = False
        for method in self.lineages.methods(self.class_name):
            if method.name.startswith("_init") or method.name == "__init__":
                continue
            for statement in simple_statements(method):
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
                        self.at(statement).inside.append(Edit(start, end, text, causes, why))
                        found = True
        if not found:
            raise errors.Unsupported(
                f"no method of `{self.class_name}` reads `self.{name}`: there is no place to "
                "add up its gradients",
                at=self.file.at(self.file.classes[self.class_name]),
                also=[c.at for c in causes[:1] if c.at],
            )
