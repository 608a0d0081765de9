"""Finds the place in a function for a loss that training computes without logits."""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Iterator, Sequence

from slapo_rewrite.code.arguments import values_given
from slapo_rewrite.code.blocks import every_block
from slapo_rewrite.code.dataflow import bound_in, names_in, parameters_in
from slapo_rewrite.code.text import within
from slapo_rewrite.fusion.lm_head import Declined, Head, Labels, depending, named, written
from slapo_rewrite.fusion.loss_fork import Fork
from slapo_rewrite.fusion.rule import RuleMatch
from slapo_rewrite.patterns.canonical_ops import by_module
from slapo_rewrite.patterns.value_graph import Use, Value, described


def fork_of(found: RuleMatch, head: Head, loss: Value, labels: Labels) -> Fork:
    """The fork; raises `Declined` if logits are needed, or statements cannot be separated."""
    return _Forking(found, head, loss, labels).run()


class _Forking:
    def __init__(self, found: RuleMatch, head: Head, loss: Value, labels: Labels) -> None:
        self.found, self.head, self.loss, self.labels = found, head, loss, labels
        graph = self.graph = found.graph
        assert graph.function is not None
        self.function = graph.function
        self.tainted = {id(v): v for v in depending(loss, head.call)}
        self.passed: ast.If | None = None

    def run(self) -> Fork:
        head, loss = self.head.call.statement, self.loss.statement
        call = self.loss.node
        assert head is not None and loss is not None and isinstance(call, ast.Call)
        block = next(b for b in every_block(self.function) if head in b)
        holder = next((s for s in block if within(s, loss)), None)
        if holder is None or block.index(holder) <= block.index(head):
            raise Declined("the loss is not computed below the logits, in the same block")
        making, name = self._making(block, head, holder)
        guard, body, given = self._guard(holder, loss, head) or (None, block, "")
        given = self._left_without(block, making[-1], holder) or given
        first = block.index(making[-1]) + 1 if guard is None else 0
        losing = self._losing(body, loss, first, name)
        self._check_ways(making, losing)
        read = self._read()
        losing = self._named(losing)
        place = guard if guard is not None and losing == body else losing[0]
        hidden, named = self._hidden(place)
        labels = self._labels(place)
        return Fork(
            self.graph,
            self.head,
            name,
            tuple(making),
            given,
            guard,
            tuple(losing),
            call,
            hidden,
            named,
            labels,
            tuple(dict.fromkeys(name for name in read if name)),
            not read,
        )

    # Statements -----------------------------------------------------------------------------------

    def _making(
        self, block: list[ast.stmt], head: ast.stmt, holder: ast.stmt
    ) -> tuple[list[ast.stmt], str]:
        """The statements, from the head's on, that compute the logits, and the logits' name."""
        if not _binds_one(head):
            raise Declined("the statement of the output layer does more than naming the logits")
        chain, names = [v.node for v in self.head.chain], set(bound_in(head))
        first = last = block.index(head)
        for number in range(first + 1, block.index(holder)):
            statement = block[number]
            own = any(within(statement, node) for node in chain)
            if not own or bound_in(statement) != names:
                break
            last = number
        making = block[first : last + 1]
        inside = (s for each in making for s in ast.walk(each) if isinstance(s, ast.stmt))
        if not all(map(_binds_one, inside)):
            raise Declined("the branch of the logits computes more")
        return making, names.pop()

    def _guard(
        self, holder: ast.stmt, loss: ast.stmt, head: ast.stmt
    ) -> tuple[ast.If, list[ast.stmt], str] | None:
        """The `if` around the loss, its block with the loss, and the name tested for None."""
        if holder is loss:
            return None
        if isinstance(holder, ast.If):
            for body, how in ((holder.body, ast.IsNot), (holder.orelse, ast.Is)):
                if loss in body and (name := _compared(holder.test, how)):
                    self._check_same(name, head, holder)
                    return holder, body, name
        raise Declined("the loss is not computed right below `if labels is not None:`")

    def _left_without(self, block: list[ast.stmt], making: ast.stmt, holder: ast.stmt) -> str:
        """The name that, if it is None, makes the function return between logits and loss."""
        between = block[block.index(making) + 1 : block.index(holder)]
        for statement in between:
            match statement:
                case ast.If(test=test, body=[*_, ast.Return()], orelse=[]) if name := _compared(
                    test, ast.Is
                ):
                    self._check_same(name, making, statement)
                    self.passed = statement
                    return name
        return ""

    def _check_same(self, name: str, head: ast.stmt, later: ast.stmt) -> None:
        before, now = self.graph.names[head].get(name), self.graph.names[later].get(name)
        if before is None or before is not now:
            raise Declined(f"`{name}` is bound again between logits and loss")

    def _losing(
        self, body: list[ast.stmt], loss: ast.stmt, first: int, name: str
    ) -> list[ast.stmt]:
        """The statements that only compute the loss, the last one being the loss."""
        if not _gives(loss, self.loss.node):
            raise Declined("the statement computes more than the loss")
        last = body.index(loss)
        start = last
        while start > first and self._serves(body[start - 1], body[start : last + 1], name):
            start -= 1
        return body[start : last + 1]

    def _serves(self, statement: ast.stmt, later: Sequence[ast.stmt], logits: str) -> bool:
        """Whether a statement only binds names that only the loss reads."""
        if not isinstance(statement, ast.Assign | ast.AnnAssign):
            return False
        needed, chain = ({id(v) for v in values} for values in (self.loss.walk(), self.head.chain))
        made = {f"new {name}" for name in by_module()}
        bound = [b for b in self.graph.bound if b.statement is statement]
        for each in bound:
            value = each.value
            known = id(value) in needed or value.number or value.operation in made
            if not known or (each.name == logits and id(value) not in chain):
                return False
        names = {each.name for each in bound} - {logits}
        own = {id(n) for s in (statement, *later) for n in ast.walk(s)}
        end = later[-1].end_lineno or 0
        reads = (n for n in ast.walk(self.function) if isinstance(n, ast.Name) and n.id in names)
        return bool(bound) and not any(n.lineno > end and id(n) not in own for n in reads)

    def _check_ways(self, making: Sequence[ast.stmt], losing: Sequence[ast.stmt]) -> None:
        """Raises if something changes or leaves between head and loss, or is computed elsewhere."""
        first, last = self.head.call, self.loss
        if any(isinstance(node, ast.For | ast.While) for node, _ in first.regions):
            raise Declined("the logits are computed in a loop")
        ways = [way for way in self.graph.exits if first.order < way.order < last.order]
        if any(self.passed is None or not within(self.passed, way.node) for way in ways):
            raise Declined("a statement that leaves the function is between logits and loss")
        values = [self.head.hidden, self.labels.value]
        if self.graph.overwritten(values, first.order, last.order) is not None:
            raise Declined("something is overwritten between logits and loss")
        skipped = [*making, *losing]
        for value in self.tainted.values():
            statement = value.site.statement
            if value.operation == "choice" or statement is None:
                continue
            if not any(within(s, statement) for s in skipped):
                raise Declined(f"{described(value)} of the logits is also computed elsewhere")

    # What else reads the logits -------------------------------------------------------------------

    def _read(self) -> list[str]:
        """The outputs that return the logits, by name or index; '' if without either."""
        found: list[str] = []
        chain = {id(v) for v in self.head.chain}
        for value in self.tainted.values():
            for use in value.uses if value is not self.loss else ():
                if use.by is not None and id(use.by) in self.tainted:
                    continue
                if id(value) not in chain:
                    raise Declined(f"{described(value)} of the logits is also used elsewhere")
                found += self._outputs(value, use)
        return found

    def _outputs(self, value: Value, use: Use) -> Iterator[str]:
        """The outputs of one use of the logits; raises `Declined` unless None may replace them."""
        by = use.by
        if by is None and use.why == "returned":
            yield ""
            return
        if by is not None and by.operation in ("choice", "merge"):
            for later in by.uses:
                yield from self._outputs(by, later)
            return
        held = by is not None and by.operation in ("tuple", "list")
        if by is not None and held and all(map(_is_returned, by.uses)):
            at = [n for n, (_, v) in enumerate(by.arguments) if v is value]
            yield from (str(n) for n in at) if at else ("",)
            return
        if by is not None and isinstance(by.node, ast.Dict) and all(map(_is_returned, by.uses)):
            pairs = zip(by.node.keys, by.node.values, strict=True)
            keys = [key for key, given in pairs if given is use.node or self._holds(given, value)]
            if keys:
                yield from (str(k.value) if isinstance(k, ast.Constant) else "" for k in keys)
                return
        if by is not None and _is_output(by.operation):
            yield from ([key for key, v in by.arguments if v is value] or [""])
            return
        line = getattr(use.node, "lineno", None)
        raise Declined(f"the logits are needed for more than the loss, in line {line}")

    def _holds(self, node: ast.expr, value: Value) -> bool:
        """Whether an expression is a name for a value."""
        return isinstance(node, ast.Name) and self.graph.loads.get(node) is value

    # Operands -------------------------------------------------------------------------------------

    def _hidden(self, place: ast.stmt) -> tuple[str, str]:
        """The text of the head's input, and an expression to bind to that name first, if any."""
        hidden, call = self.head.hidden, self.head.call
        assert call.statement is not None
        held = self.graph.names[place]
        own = bound_in(call.statement)
        held = {n: v for n, v in held.items() if n not in own}
        if self.head.around:
            return written(hidden, held, self.graph.file), ""
        if (name := named(hidden, held)) is not None:
            return name, ""
        assert isinstance(call.node, ast.Call)
        given = values_given(call.node)
        if len(given) != 1 or isinstance(given[0], ast.Starred):
            raise Declined("the output layer gets more than one argument")
        taken = names_in(self.function) | parameters_in(self.function)
        names = ("hidden", "hidden_states", *(f"hidden_{n}" for n in range(2, len(taken) + 3)))
        free = next(name for name in names if name not in taken)
        return free, self.graph.file.segment(given[0])

    def _named(self, losing: list[ast.stmt]) -> list[ast.stmt]:
        """The statements without the first ones, if only these bind the labels to a name."""
        tainted = [value.site.statement for value in self.tainted.values()]
        for number, statement in enumerate(losing):
            if named(self.labels.value, self.graph.names[statement]) is not None:
                return losing[number:]
            if any(each is not None and within(statement, each) for each in tainted):
                break
        return losing

    def _labels(self, place: ast.stmt) -> str:
        """The text of the labels."""
        name = named(self.labels.value, self.graph.names[place])
        if name is None:
            said = described(self.labels.value)
            raise Declined(f"the labels, {said}, have no name at the branch")
        return f"{name}[{self.labels.shift}]" if self.labels.shift else name


def _gives(statement: ast.stmt, call: ast.AST) -> bool:
    """Whether a statement binds or returns the result of a call, possibly with other values."""
    match statement:
        case ast.Assign(targets=[ast.Name()], value=value) | ast.Return(value=value) if (
            value is call
        ):
            return True
        case ast.Return(value=ast.Tuple(elts=given)):
            return call in given
        case ast.Return(value=ast.Call(keywords=named)):
            return call in [each.value for each in named]
    return False


def _compared(test: ast.expr, how: type[ast.cmpop]) -> str:
    """The name that a test compares with None: `labels is not None`."""
    match test:
        case ast.Compare(ast.Name(name), [operator], [ast.Constant(None)]):
            return name if isinstance(operator, how) else ""
    return ""


def _binds_one(statement: ast.stmt) -> bool:
    """Whether a statement only binds one name, or is an `if` without `else`."""
    match statement:
        case ast.Assign(targets=[ast.Name()]) | ast.AugAssign(target=ast.Name()):
            return True
        case ast.AnnAssign(target=ast.Name(), value=ast.expr()) | ast.If(orelse=[]):
            return True
    return False


def _is_returned(use: Use) -> bool:
    """Whether a use of a tuple only returns it, possibly joined with others."""
    if use.by is None:
        return use.why == "returned"
    if use.by.operation in ("add", "choice", "merge", "tuple"):
        return all(map(_is_returned, use.by.uses))
    return False


def _is_output(operation: str) -> bool:
    """Whether an operation constructs a data class or named tuple of outputs."""
    home, _, name = operation.removeprefix("call ").rpartition(".")
    cls = getattr(sys.modules.get(home), name, None)
    return isinstance(cls, type) and (dataclasses.is_dataclass(cls) or hasattr(cls, "_fields"))
