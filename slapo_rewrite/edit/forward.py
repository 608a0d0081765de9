"""What changes in `forward` and in the arguments of its calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from slapo_rewrite import errors
from slapo_rewrite.edit.definition import (
    AddBias,
    ChangeArgument,
    Collective,
    Key,
    ShareParameter,
    StatisticOfParts,
    What,
    WrapCall,
    WrapInput,
    WrapOutput,
)
from slapo_rewrite.edit.imports import Imports
from slapo_rewrite.edit.lineages import Lineages
from slapo_rewrite.edit.lines import At, Lines
from slapo_rewrite.edit.reads import values_read
from slapo_rewrite.edit.splice import Edit
from slapo_rewrite.edit.state import Directive
from slapo_rewrite.edit.text import accessor, returns, simple_statements
from slapo_rewrite.model.follow import CALL

Found = tuple[ast.FunctionDef, ast.stmt, ast.Call | ast.Subscript]

# How a list of sizes is written that must be this rank's shares.
SHARES = "[{part_size}(size) for size in {argument}]"


def given(forward: ast.FunctionDef, change: WrapInput, text: str) -> str:
    """A statement about an argument of `forward`, for where that is given."""
    if change.of is None:
        return text
    arguments = forward.args
    named = [*arguments.posonlyargs, *arguments.args]
    defaults = dict(
        zip(reversed([a.arg for a in named]), reversed(arguments.defaults), strict=False)
    )
    own = zip((a.arg for a in arguments.kwonlyargs), arguments.kw_defaults, strict=True)
    default = {**defaults, **dict(own)}.get(change.of)
    if isinstance(default, ast.Constant) and default.value is None:
        return f"if {change.of} is not None:\n    {text}"
    return text


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
            name = change.of or positional[0].arg
            body = forward.body[1:] if ast.get_docstring(forward) is not None else forward.body
            for collective in change.collectives:
                text = given(forward, change, f"{name} = {self.applied(collective, name, causes)}")
                why = f"{collective.function} of {f'`{name}`' if change.of else 'the input'}"
                self.at(body[0]).before.append((text, causes, why))
        elif isinstance(change, WrapOutput):
            for statement in returns(forward):
                if statement.value is not None:
                    value = self._returned(statement.value, change, causes)
                    self._wrap(statement, value, change.collectives, causes, "output", True)

    def _returned(
        self, value: ast.expr, change: WrapOutput, causes: tuple[Directive, ...]
    ) -> ast.expr:
        """The first tensor in a returned expression."""
        found: ast.expr | None = None if change.nested else value
        if isinstance(value, ast.BinOp) and isinstance(value.left, ast.Tuple):
            value = value.left
        if isinstance(value, ast.Tuple) and value.elts:
            found = value.elts[0]
        elif isinstance(value, ast.Call):
            first = dict(change.first).get(ast.unparse(value.func))
            if first is not None:
                named = {k.arg: k.value for k in value.keywords}
                found = value.args[0] if value.args else named.get(first)
        if found is None or isinstance(found, ast.Starred):
            raise errors.Unsupported(
                f"`{self.class_name}.forward` returns its first tensor inside of something that "
                "is not written out here",
                at=self.file.at(value),
                also=[c.at for c in causes[:1] if c.at],
                hint="return a tuple or a call that names the tensor, or put the sync on a module "
                "inside",
            )
        return found

    def _wrap(
        self,
        statement: ast.stmt,
        value: ast.expr,
        collectives: Sequence[Collective],
        causes: tuple[Directive, ...],
        what: str,
        outside: bool,
    ) -> None:
        """Puts collectives around an expression, outside or inside of those that it has."""
        start, end = self.file.span(value)
        why = f"{', '.join(c.function for c in collectives)} of the {what}"
        before, after = "", ""
        for collective in collectives:
            opened, closed = self.call(collective, causes)
            before, after = opened + before, after + closed
        inside = self.at(statement).inside
        head = Edit(start, start, before, causes, why)
        tail = Edit(end, end, after, causes, why)
        # Insertions at one place stand in the order in which they are given.
        inside.insert(0 if outside else len(inside), head)
        inside.insert(len(inside) if outside else 0, tail)

    def call(self, collective: Collective, causes: tuple[Directive, ...]) -> tuple[str, str]:
        """What stands before and behind the value in a call of a collective."""
        reference = self.imports.helper("tensor_parallel", collective.function, causes)
        keywords = "".join(f", {name}={value!r}" for name, value in collective.keywords)
        return f"{reference}(", f"{keywords})"

    def applied(self, collective: Collective, value: str, causes: tuple[Directive, ...]) -> str:
        """The text of a value that goes through a collective."""
        before, after = self.call(collective, causes)
        return f"{before}{value}{after}"

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

    def wrap_calls(self, path: str, change: WrapCall, causes: tuple[Directive, ...]) -> None:
        """Puts collectives around the calls of the module at a path below the class."""
        wanted = accessor(path)
        found = False
        for method in self.lineages.methods(self.class_name):
            for statement in simple_statements(method):
                for node in ast.walk(statement):
                    if not (isinstance(node, ast.Call) and ast.unparse(node.func) == wanted):
                        continue
                    result = change.around == "result"
                    target = node if result else self._first_argument(node, change, causes)
                    what = f"{change.around} of `{path}`"
                    self._wrap(statement, target, change.collectives, causes, what, not result)
                    found = True
        if not found:
            raise errors.Unsupported(
                f"no method of `{self.class_name}` calls `{wanted}(...)`: there is no place for "
                "the collective",
                at=self.file.at(self.file.classes[self.class_name]),
                also=[c.at for c in causes[:1] if c.at],
                hint="put the sync on a module around it",
            )

    def add_bias(self, path: str, change: AddBias, causes: tuple[Directive, ...]) -> None:
        """Writes out the product and the sum where a linear layer is called."""
        layer = accessor(path)
        found = False
        for method in self.lineages.methods(self.class_name):
            for statement in simple_statements(method):
                for node in ast.walk(statement):
                    if isinstance(node, ast.Call) and ast.unparse(node.func) == layer:
                        self._add_bias(statement, node, layer, change, causes)
                        found = True
        if not found:
            raise errors.Unsupported(
                f"no method of `{self.class_name}` calls `{layer}(...)`: there is no place for "
                "the sum",
                at=self.file.at(self.file.classes[self.class_name]),
                also=[c.at for c in causes[:1] if c.at],
                hint="a layer that is called through a container or a loop is not decomposed",
            )

    def _add_bias(
        self,
        statement: ast.stmt,
        call: ast.Call,
        layer: str,
        change: AddBias,
        causes: tuple[Directive, ...],
    ) -> None:
        if len(call.args) != 1 or call.keywords or isinstance(call.args[0], ast.Starred):
            raise errors.Unsupported(
                f"`{layer}` is not called with its input alone",
                at=self.file.at(call),
                also=[c.at for c in causes[:1] if c.at],
            )
        value = call.args[0]

        def through(collective: Collective | None) -> tuple[str, str]:
            return self.call(collective, causes) if collective else ("", "")

        def parameter(name: str) -> str:
            opened, closed = ("", "")
            if name in change.shared:
                opened, closed = through(Collective("all_reduce_gradient"))
            return f"{opened}{layer}.{name}{closed}"

        head, tail = through(change.before)
        alone = change.before is None and change.after is None and not change.shared
        if alone:  # called if something was put around it meanwhile
            head = f"{self.imports.helper('kernels', 'linear_product', causes)}("
            tail = f", {layer})"
        elif change.product == "linear":
            head = f"{self._functional('linear', causes)}({head}"
            tail = f"{tail}, {parameter('weight')})"
        else:
            if not head and not isinstance(value, (ast.Name, ast.Attribute, ast.Call)):
                head, tail = "(", ")"
            tail = f"{tail} @ {parameter('weight')}"
        opened, closed = through(change.after)
        head, tail = f"{opened}{head}", f"{tail}{closed}"
        if change.adds:
            tail += f" + {parameter('bias')}"
        called = alone or change.product == "linear" or change.after is not None
        is_call = not change.adds and called
        if not (is_call or self._stands_alone(statement, call)):
            head, tail = f"({head}", f"{tail})"
        (start, end), (first, last) = self.file.span(call), self.file.span(value)
        where = "separately" if change.adds else "by what follows"
        why = f"the bias of `{layer.removeprefix('self.')}` is added {where}"
        inside = self.at(statement).inside
        inside.append(Edit(start, first, head, causes, why))
        inside.append(Edit(last, end, tail, causes, why))

    def _stands_alone(self, statement: ast.stmt, value: ast.expr) -> bool:
        """Whether an expression stands where a sum needs no parentheses."""
        for node in ast.walk(statement):
            if value in ast.iter_child_nodes(node):
                wholly = isinstance(node, (ast.Assign, ast.AnnAssign, ast.Return, ast.keyword))
                return wholly or (isinstance(node, ast.Call) and value in node.args)
        return False

    def _functional(self, name: str, causes: tuple[Directive, ...]) -> str:
        """How the file calls a function of `torch.nn.functional`."""
        for known, attribute in (
            ("torch.nn.functional", ""),
            ("torch.nn", "functional."),
            ("torch", "nn.functional."),
        ):
            for alias, meaning in self.file.imports.items():
                if meaning == known:
                    return f"{alias}.{attribute}{name}"
        return self.imports.outside("torch.nn.functional", name, causes)

    def _first_argument(
        self, call: ast.Call, change: WrapCall, causes: tuple[Directive, ...]
    ) -> ast.expr:
        named = {k.arg: k.value for k in call.keywords}
        found = call.args[0] if call.args else named.get(change.name)
        if found is None or isinstance(found, ast.Starred):
            raise errors.Unsupported(
                "this call does not name the argument that the collective is for",
                at=self.file.at(call),
                also=[c.at for c in causes[:1] if c.at],
                hint="put the sync on a module around it",
            )
        return found

    def change_argument(
        self, key: Key, change: ChangeArgument, causes: tuple[Directive, ...]
    ) -> None:
        """Writes an argument differently, by the place of its call and its index in it."""
        _, line, column, *_, index = key
        for _, statement, node in nodes_at(self.lineages, self.class_name, key):
            if index == (CALL,) and isinstance(node, ast.Call):
                self._call_layer(node, change.template, self.at(statement), causes)
                return
            argument, whole = self._argument(node, index)
            if argument is not None:
                template = SHARES if whole else change.template
                self._write_argument(node, argument, template, self.at(statement), causes)
                return
        raise errors.UnfollowableSize(
            "an argument of this call depends on the sharded size, and cannot be told apart "
            "from the others",
            at=errors.Span(self.file.display, line, column + 1, 1, self.file.line(line)),
            also=[c.at for c in causes[:1] if c.at],
            hint="write the sizes out one by one, or keep them in integer attributes of the module",
        )

    def _call_layer(
        self, node: ast.Call, layer: str, lines: Lines, causes: tuple[Directive, ...]
    ) -> None:
        """Calls a layer, in the place of a function that is given its parameters."""
        (start, end), (first, last) = self.file.span(node), self.file.span(node.args[0])
        why = f"`{layer}` computes it, with its collectives"
        lines.inside.append(Edit(start, first, f"{layer}(", causes, why))
        lines.inside.append(Edit(last, end, ")", causes, why))

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
        self,
        node: ast.Call | ast.Subscript,
        argument: ast.expr,
        template: str,
        lines: Lines,
        causes: tuple[Directive, ...],
    ) -> None:
        start, end = self.file.span(argument)
        if any((e.start, e.end) == (start, end) for e in lines.inside):
            return
        function = ""
        if "{part_size}" in template:
            function = self.imports.helper("tensor_parallel", "part_size", causes)
        given = self.file.segment(argument)
        text = template.format(argument=given, part_size=function, own="{own}")
        if "{own}" in text:
            text = self._own_size(node, given, text, causes)
        why = "what depends on the sharded size follows"
        lines.inside.append(Edit(start, end, text, causes, why))

    def _own_size(
        self,
        node: ast.Call | ast.Subscript,
        argument: str,
        template: str,
        causes: tuple[Directive, ...],
    ) -> str:
        """A size that a tensor has itself, uneven parts included."""
        tensor = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            tensor = node.func.value
        if tensor is not None and all(
            isinstance(n, (ast.Name, ast.Attribute, ast.expr_context)) for n in ast.walk(tensor)
        ):
            return template.replace("{own}", f"{self.file.segment(tensor)}.shape")
        sizes = self.imports.helper("tensor_parallel", "part_sizes", causes)
        return f"{sizes}({argument})[{self.imports.helper('tensor_parallel', 'rank', causes)}()]"

    def statistic(self, key: Key, change: StatisticOfParts, causes: tuple[Directive, ...]) -> None:
        """Takes a mean or variance over all ranks: a method of a tensor, or a function of torch."""
        _, line, column, *_ = key
        found = nodes_at(self.lineages, self.class_name, key)
        for method, statement, call in found:
            value = self._of_what(call) if isinstance(call, ast.Call) else None
            if value is None:
                continue
            assert isinstance(call, ast.Call)
            why = f"over all ranks' parts of `{change.parameter}`"
            name = self.imports.helper("normalization", change.function, causes)
            size = self.imports.helper("normalization", "full_size", causes)
            (start, end), (first, last) = self.file.span(call), self.file.span(value)
            others = [a for a in (*call.args, *call.keywords) if a is not value]
            rest = ", " if others else ")"
            end = min((self.file.span(a)[0] for a in others), default=end)
            size = f'{size}({method.args.args[0].arg}, "{change.parameter}")'
            inside = self.at(statement).inside
            inside.append(Edit(start, first, f"{name}(", causes, why))
            inside.append(Edit(last, end, f", {size}{rest}", causes, why))
            return
        raise errors.UnfollowableSize(
            "this is to be taken over all ranks, and cannot be told apart from what is beside it",
            at=errors.Span(self.file.display, line, column + 1, 1, self.file.line(line)),
            also=[c.at for c in causes[:1] if c.at],
            hint="write it as a method of the tensor, `x.mean(-1)`",
        )

    def _of_what(self, call: ast.Call) -> ast.expr | None:
        """What an operation is called on: the object, or the first argument of torch's function."""
        if (self.file.qualified(call.func) or "").startswith("torch."):
            return call.args[0] if call.args else None
        return call.func.value if isinstance(call.func, ast.Attribute) else None

    def share_parameter(self, change: ShareParameter, causes: tuple[Directive, ...]) -> None:
        """Adds up a parameter's gradients where methods read it."""
        name, found = change.name, False
        for method in self.lineages.methods(self.class_name):
            if method.name.startswith("_init") or method.name == "__init__":
                continue
            for statement, node in values_read(method, name):
                if not (
                    ast.unparse(node) == f"self.{name}"
                    if change.end is None
                    else change.end == (node.end_lineno, node.end_col_offset)
                ):
                    continue
                start, end = self.file.span(node)
                text = self.applied(
                    Collective("all_reduce_gradient"), self.file.segment(node), causes
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


def nodes_at(lineages: Lineages, class_name: str, key: Key) -> Iterator[Found]:
    """The calls and subscripts at a place, with the method and the statement that they are in."""
    _, line, column, end_line, end_column, *_ = key
    for method in lineages.methods(class_name):
        for statement in simple_statements(method):
            for node in ast.walk(statement):
                if not isinstance(node, (ast.Call, ast.Subscript)):
                    continue
                starts = [(node.lineno, node.col_offset)]
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    # Of a method that stands on another line than what it is called on, Python
                    # tells the place from its name on.
                    ending = node.func.end_col_offset or 0
                    length = len(node.func.attr.encode())
                    starts.append((node.func.end_lineno or node.lineno, ending - length))
                end = (node.end_lineno, node.end_col_offset)
                if end == (end_line, end_column) and (line, column) in starts:
                    yield method, statement, node
