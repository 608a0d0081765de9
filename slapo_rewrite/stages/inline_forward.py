"""Flattens a model's `forward` into one run of statements, specialised for training steps.

Branches that training never takes are removed, and the `forward` of each module that contains a cut
is inlined. The remaining code keeps its text, line breaks and comments.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from slapo_rewrite import errors
from slapo_rewrite.code.arguments import Signature, all_arguments, first_parameter, values_given
from slapo_rewrite.code.blocks import statements
from slapo_rewrite.code.dataflow import body_of, bound_in, names_in, stays_as_it_is
from slapo_rewrite.code.evaluate import (
    NONE,
    UNKNOWN,
    Constant,
    KnownKwargs,
    KnownObject,
    Unknown,
    Worth,
    field_at,
    truth_of,
)
from slapo_rewrite.code.liveness import breaks, live_after, local_names
from slapo_rewrite.code.names import is_name
from slapo_rewrite.code.runs import comment_after, comments_before
from slapo_rewrite.code.text import accessor, listed, within
from slapo_rewrite.stages.defining_files import DefiningFile, DefiningFiles
from slapo_rewrite.stages.environment import Environment, steps_of
from slapo_rewrite.stages.flat import Flat, Line, Result, Scope
from slapo_rewrite.stages.function_syntax import (
    always_named,
    fields_given,
    is_default,
    is_handed_on,
    is_made_for,
    is_plain_read,
    is_read_before,
    is_read_by_key,
    keyword_name,
    positional_name,
    reads_in,
    signature_of,
)
from slapo_rewrite.stages.loops import loop_over, path_of, sliced
from slapo_rewrite.stages.program import Cut, altered_in
from slapo_rewrite.stages.rounds import Given, Item, Rounds
from slapo_rewrite.stages.step_loss import FUNCTION, StepLoss, is_picked_later, only_loss
from slapo_rewrite.stages.written_text import (
    alone,
    closed,
    dedented,
    enclosed,
    respelled,
    span_of,
    written_out,
)


class Outdated(str):
    """An empty text in place of an expression in which a variable has been reassigned since."""

    def __new__(cls, name: str) -> Outdated:
        """Stores the name of the variable."""
        outdated = super().__new__(cls)
        outdated.name = name
        return outdated

    name: str


_CLOSED = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# Keyword arguments that decorators consume: the kind of object to return.
FOR_DECORATORS = {"return_dict"}
_COMPOUND = (ast.For, ast.While, ast.With, ast.Try, ast.Match, ast.FunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Method:
    """A method of a module of the model."""

    live: Any  # the module
    path: str
    home: DefiningFile  # the file that defines the method
    function: ast.FunctionDef  # the method


class Flattening:
    """Flattens the `forward` of a model.

    Args:
        model: The model, on the meta device.
        inside: Paths of the modules whose `forward` is inlined: those that contain a cut.
        loss: How the loss is computed from the result.
        cuts: The ends of stages.
    """

    def __init__(
        self,
        model: Any,
        files: DefiningFiles,
        inside: set[str],
        loss: StepLoss,
        cuts: Sequence[Cut],
    ) -> None:
        self.model, self.files, self.inside, self.loss = model, files, inside, loss
        self.unsure: set[str] = set()
        self.cuts = [cut.path for cut in cuts]
        self.also = [cut.cause.at for cut in cuts[:1] if cut.cause.at]
        # Attributes of the model that decided branches so far, by path.
        self.settings: dict[str, Any] = {}
        self.out: list[Line] = []  # the output lines
        self.comments: list[str] = []  # comments to write above the next statement
        self.is_aside = False  # whether the output is only inspected and then discarded
        self.named: set[ast.NamedExpr] = set()  # the `:=` that were moved to lines of their own
        way = [*map(model.get_submodule, sorted(inside))]
        self.changing, self.in_steps = files.changing(way), files.changing(way, by_itself=True)
        self.depth = 0  # the number of branches and loops around the current statement

    def environment(self, method: Method, values: dict[str, Worth]) -> Environment:
        """The environment of a method; `values` has its parameters and local names."""
        world, settings = method.home.world, self.settings
        return Environment(None, method.live, method.path, values, world, settings, self.changing)

    def refused(
        self, message: str, scope: Scope, node: ast.AST, hint: str | None = None
    ) -> errors.CannotCut:
        """The error for a node in a function."""
        return errors.CannotCut(message, at=scope.file.at(node), also=self.also, hint=hint)

    def flat(self, given: Iterable[str]) -> Flat:
        """The flat `forward`, for a training step with these arguments."""
        given = set(given)
        method = self.method_of(self.model, "", "forward")
        function = only_loss(method.function, self.loss, method.home.world)
        values: dict[str, Worth] = {}
        names = self.environment(method, values)
        written = self.files.names_of(function, method.home, "model")
        after = frozenset() if self.loss.arguments is None else {FUNCTION, *self.loss.names}
        scope = Scope(function, method.home.file, names, "self", written, frozenset(after))
        parameters, made = [], []
        takes = Signature.of(function, bound=True)
        for name, argument in zip(takes.names, all_arguments(function)[1:], strict=False):
            default = takes.defaults.get(name)
            if name in given:
                values[name] = Unknown(True, Tensor)
                parameters.append(name)
            elif name == "use_cache":
                values[name] = Constant(False)
            elif default is not None:
                values[name] = names.value(default)
                if isinstance(default, (ast.List, ast.Dict, ast.Set, ast.UnaryOp)):
                    made.append((name, default))
            else:
                raise self.refused(
                    f"`forward` needs `{name}`, but the training step does not pass it",
                    scope,
                    argument,
                    "return it from inputs(model) in the schedule",
                )
        if takes.options:
            more: dict[str, Worth] = {
                name: Unknown(True, Tensor)
                for name in sorted(given - {*parameters, *self.loss.names})
            }
            values |= more
            parameters += more
            values[takes.options] = KnownKwargs({name: name for name in more}, more)
        names.me = first_parameter(function)
        for name in after & local_names(function):
            if name in parameters and name in bound_in(*function.body):
                raise self.refused(
                    f"`{name}` gets another value here, but the loss in the schedule takes the "
                    "value that the step gets",
                    scope,
                    function,
                    "bind the new value to another name in `forward`",
                )
            if name not in parameters:
                scope.written[name] = f"model_{name}"
        parameters += [name for name in self.loss.names if name not in parameters]
        for name, default in made:  # defaults that are written as assignments
            target = ast.copy_location(ast.Name(name, ast.Store()), default)
            if not (isinstance(default, ast.UnaryOp) or stays_as_it_is(function, target)):
                raise self.refused(
                    f"the default of `{name}` is one object for all steps, and may change here",
                    scope,
                    default,
                    "make None the default, and create the object in `forward`",
                )
            assign = ast.copy_location(ast.Assign([target], default), default)
            self.assigned(assign, target, default, scope)
        result, lines = self.block(body_of(function), scope), self.out
        if result is not None and is_picked_later(method.function, self.loss):
            result = Result(self.loss.picked(result.text), Unknown(True))
        if result is None:
            raise self.refused("`forward` returns nothing", scope, function)
        bound = bound_in(*(ast.parse(line.text) for line in lines)) | set(parameters)
        for name in sorted(bound & self.files.values.keys()):
            raise self.refused(
                f"`{name}` of {self.files.origins[name][0]} is also a local name in a `forward` "
                "that uses it",
                scope,
                function,
                "rename the local one",
            )
        fixed = tuple(p for p in self.settings if p.rpartition(".")[2] in self.changing)
        loss = self.loss.text(result.text)
        return Flat(tuple(parameters), lines, loss, dict(self.settings), fixed)

    # Statements -------------------------------------------------------------------------------

    def block(self, body: Sequence[ast.stmt], scope: Scope) -> Result | None:
        """Writes statements; gives the result if they return."""
        for statement in body:
            self.comments += comments_before(scope.file, statement)
            result = self.statement(statement, scope)
            if result is not None:
                return result
        return None

    def statement(self, node: ast.stmt, scope: Scope) -> Result | None:
        """Writes one statement."""
        self.write_named(node, scope)
        match node:
            case ast.Return():
                return self.returned(node, scope)
            case ast.If():
                return self.branch(node, scope)
            case ast.Assign(targets=[target], value=value):
                self.assigned(node, target, value, scope)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.assigned(node, target, value, scope)
            case ast.AnnAssign() | ast.Pass():
                pass
            case ast.Expr(value=value) if self.is_settled(value, scope):
                pass
            case ast.For():
                return self.loop(node, scope)
            case ast.Raise() if not self.depth:
                raise self.refused("a training step ends in this error", scope, node)
            case ast.Assert(test=test) if scope.names.decided(test):
                self.comments.clear()
            case ast.With():
                items = ", ".join(
                    self.text(i.context_expr, scope)
                    + (f" as {scope.file.segment(i.optional_vars)}" if i.optional_vars else "")
                    for i in node.items
                )
                self.compound(node, f"with {items}:", node.body, scope)
            case _ if isinstance(node, _COMPOUND):
                kind = type(node).__name__.lower()
                word = {"functiondef": "def", "classdef": "class"}.get(kind, kind)
                raise self.refused(
                    f"`{word}` cannot be written out",
                    scope,
                    node,
                    "put it into the `forward` of a separate module",
                )
            case _:
                self.forget(bound_in(node), scope, node)
                self.emit(self.text(node, scope), node, scope)
        return None

    def write_named(self, node: ast.stmt, scope: Scope) -> None:
        """Writes the `:=` in a statement as assignments before it."""
        for expression in ast.iter_child_nodes(node):
            if not isinstance(expression, ast.expr):
                continue
            always = list(always_named(expression))
            for named in (n for n in ast.walk(expression) if isinstance(n, ast.NamedExpr)):
                if named not in always or is_read_before(expression, named):
                    raise self.refused(
                        f"`{named.target.id} :=` cannot be moved to a line before the statement",
                        scope,
                        named,
                        "bind the name on a separate line",
                    )
            for named in always:
                self.bind(node, named.target, self.result(named.value, scope), scope)
                self.named.add(named)

    def is_settled(self, value: ast.expr, scope: Scope) -> bool:
        """Whether an expression statement can be left out."""
        match value:
            case ast.Constant():
                return True
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=name), attr="pop"),
                args=[ast.Constant(value=str(key)), *_],
            ):
                extra = scope.names.values.get(name)
                if isinstance(extra, KnownKwargs):
                    scope.names.values[name] = KnownKwargs(
                        {k: v for k, v in extra.texts.items() if k != key},
                        {k: v for k, v in extra.values.items() if k != key},
                    )
                    return True
        return False

    def returned(self, node: ast.Return, scope: Scope) -> Result:
        """The result of a `return` statement."""
        self.comments.clear()
        if self.depth:
            raise self.refused(
                "a `return` inside a branch or loop that training may or may not take",
                scope,
                node,
                "bind the result to a name, and return it at the end of `forward`",
            )
        match node.value:
            case None:
                return Result("None", NONE)
            case ast.Dict(keys=keys, values=values) if all(keys):  # without `**`
                pairs = zip(keys, values, strict=True)
                texts = [[self.text(e, scope) for e in pair if e] for pair in pairs]
                return Result(f"{{{', '.join(map(': '.join, texts))}}}", Unknown(True))
        return self.result(node.value, scope)

    def result(self, node: ast.expr, scope: Scope) -> Result:
        """An expression's text and its known value."""
        if isinstance(node, ast.Call) and (inner := self.callee(node, scope)):
            return self.inlined(node, *inner, scope)
        if isinstance(node, ast.Tuple) and not any(isinstance(e, ast.Starred) for e in node.elts):
            texts = []
            for each in node.elts:
                text = self.result(each, scope).text
                is_bare = isinstance(each, ast.Tuple) and not text.startswith("()")
                texts.append(f"({text})" if is_bare else text)
            listed = ", ".join(texts) + ("," if len(texts) == 1 else "")
            return Result(listed or "()", Unknown(True), tuple(texts))
        made = self.made(node, scope)
        if made is not None:
            return Result(written_out(made), made)
        value = scope.names.settled(node)
        if isinstance(node, ast.Call) and isinstance(value, Unknown):
            value = self.known_of_result(node, scope) or value
        return Result(alone(self.text(node, scope)), value)

    def handed_on(self, target: ast.Name, value: ast.expr, scope: Scope) -> KnownKwargs | None:
        """A dictionary that is only unpacked by `**` in calls, so that its items can be inlined.

        Its values must be names and attributes, since calls must stay in place. An empty dictionary
        may also be filled, and read by constant keys.
        """
        if isinstance(value, ast.IfExp) and (way := scope.names.decided(value.test)) is not None:
            value = value.body if way else value.orelse
        if self.depth or (sifted := self.sifted(value, scope)) is not None:
            return None if self.depth else sifted
        if not isinstance(value, ast.Dict):
            return None
        if not value.keys and is_read_by_key(scope.function, target.id):
            return KnownKwargs()
        keys = [k.value for k in value.keys if isinstance(k, ast.Constant)]
        names = [k for k in keys if isinstance(k, str)]
        plain = all(is_plain_read(v) for v in value.values)
        if len(names) != len(value.keys) or not plain:
            return None
        if not is_handed_on(scope.function, target.id):
            return None
        texts = {n: self.text(v, scope) for n, v in zip(names, value.values, strict=True)}
        known = {n: scope.names.settled(v) for n, v in zip(names, value.values, strict=True)}
        return KnownKwargs(texts, known)

    def sifted(self, value: ast.expr, scope: Scope) -> KnownKwargs | None:
        """The union of two known dictionaries, or a comprehension over a known empty one."""

        def known(name: str) -> KnownKwargs | None:
            found = scope.names.values.get(name)
            return found if isinstance(found, KnownKwargs) else None

        match value:
            case ast.BinOp(left=ast.Name(id=left), op=ast.BitOr(), right=ast.Name(id=right)):
                if (one := known(left)) and (other := known(right)):
                    texts = {
                        **self.current(one.texts, scope, value),
                        **self.current(other.texts, scope, value),
                    }
                    return KnownKwargs(texts, {**one.values, **other.values})
            case ast.DictComp(generators=[only]):
                match only:
                    case (
                        ast.comprehension(
                            iter=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="items"))
                        )
                        | ast.comprehension(
                            ifs=[ast.Compare(ops=[ast.In()], comparators=[ast.Name(id=name)])]
                        )
                    ) if (of := known(name)) and not of.texts:
                        return KnownKwargs()
        return None

    def made(self, node: ast.expr, scope: Scope) -> KnownObject | None:
        """The known object that a call of a data class constructs."""
        if not isinstance(node, ast.Call):
            return None
        cls: Any = scope.names.global_at(node.func)
        given = fields_given(node, cls)
        if given is None:
            return None
        texts = {name: self.text(value, scope) for name, value in given.items()}
        values = {name: scope.names.settled(value) for name, value in given.items()}
        return KnownObject(cls, texts, values)

    def branch(self, node: ast.If, scope: Scope) -> Result | None:
        """Writes the branch that training takes, or both if that is not known."""
        decided = scope.names.decided(node.test)
        if decided is None and self.names_cut(node, scope):
            # Attributes that only methods between steps set count as known; each step checks them.
            decided = replace(scope.names, changing=self.in_steps).decided(node.test)
        if decided is not None:
            taken = node.body if decided else node.orelse
            if not taken:
                self.comments.clear()
            return self.block(taken, scope)
        test = alone(self.text(node.test, scope))
        given = self.given(scope)
        self.forget(bound_in(node), scope, node)
        self.compound(node, f"if {test}:", node.body, scope, node.orelse, given)
        return None

    def names_cut(self, node: ast.stmt, scope: Scope) -> bool:
        """Whether a statement mentions a module at a cut, or one that contains a cut."""
        chains = (scope.names.chain(n) for n in ast.walk(node) if isinstance(n, ast.expr))
        paths = [f"{scope.names.path_of(steps)}." for steps in chains if steps]
        return any(f"{cut}.".startswith(path) for cut in self.cuts for path in paths)

    def loop(self, node: ast.For, scope: Scope) -> Result | None:
        """Writes a loop; iterations that contain the end of a stage are unrolled."""
        rounds = Rounds(scope.names, node)
        head = f"for {self.text(node.target, scope)} in {self.text(node.iter, scope)}: pass"
        loop = loop_over(ast.parse(head).body[0])
        lists = {path_of(each) for each in loop.lists} if loop is not None else set()
        if "range" in names_in(node.iter):  # its body decides whether it can be divided
            lists, loop = lists if loop_over(node) is not None else set(), None
        apart = self.rounds_apart(rounds, lists, scope)
        if not apart:
            self.whole_loop(node, rounds, scope)
            return None
        if self.depth or node.orelse or breaks(node, ast.Break | ast.Continue):
            where = "is in a branch or loop" if self.depth else "may end or go on early"
            raise self.refused(
                f"a stage cannot end in {listed(apart.values())}: this loop {where}",
                scope,
                node,
                "cut before or after it",
            )
        scope.names.rely_on(rounds.relied_on)
        number = 0
        while number < (rounds.number or 0):
            stop = min((n for n in apart if n >= number), default=rounds.number or 0)
            if loop is not None and stop - number > 1:
                self.whole_loop(node, rounds, scope)
                last = None if stop == rounds.number else loop.first + stop
                self.out[-1].text = sliced(self.out[-1].text, loop.first + number, last)
                number = stop
                continue
            for target, given in rounds.given(number):
                self.bind_round(node, target, given, scope)
            if (result := self.block(node.body, scope)) is not None:
                return result
            number += 1
        return None

    def rounds_apart(self, rounds: Rounds, lists: Set[str], scope: Scope) -> dict[int, str]:
        """The iterations of a loop that contain the end of a stage, with the module at that end.

        Ends between iterations over the layer lists in `lists` do not count: the loop is divided.
        """
        found: dict[int, str] = {}
        before = dict(scope.names.values)
        read = [n for s in rounds.loop.body for n in ast.walk(s)]
        for number in range(rounds.number or 0):
            given = {t.id: g for t, g in rounds.given(number) if isinstance(t, ast.Name)}
            known = {n: g for n, g in given.items() if isinstance(g, Constant | Unknown)}
            scope.names.values |= known
            uses = (n for n in read if isinstance(n, ast.Name | ast.Subscript))
            uses = (n for n in uses if known.keys() & names_in(n))
            several = (each for g in given.values() if isinstance(g, tuple) for each in g)
            for steps in (*map(scope.names.chain, uses), *map(steps_of, several)):
                if not steps:
                    continue
                path = scope.names.path_of(steps)
                ends_after = path in self.cuts and path.rpartition(".")[0] not in lists
                if ends_after or any(cut.startswith(f"{path}.") for cut in self.cuts):
                    found[number] = path
        scope.names.values.clear()
        scope.names.values |= before
        return found

    def bind_round(self, node: ast.For, target: ast.expr, given: Given, scope: Scope) -> None:
        """Binds a loop variable to its value in one iteration."""
        text, worth = self.of_round(given, scope)
        if isinstance(target, ast.Name) and not isinstance(given, Item):
            scope.names.values[target.id] = worth
            return
        self.forget(bound_in(target), scope, node)
        self.emit(f"{self.text(target, scope)} = {text}", node, scope)

    def of_round(self, given: Given, scope: Scope) -> tuple[str, Worth]:
        """The text and the known value of a loop variable in one iteration."""
        match given:
            case Item():
                return f"{self.text(given.listed, scope)}[{given.number}]", UNKNOWN
            case tuple():
                each = {str(n): self.of_round(one, scope) for n, one in enumerate(given)}
                texts = {n: text for n, (text, _) in each.items()}
                made = KnownObject(tuple, texts, {n: worth for n, (_, worth) in each.items()})
                return written_out(made), made
            case Constant():
                return repr(given.value), given
        steps = steps_of(given)
        return accessor(scope.names.path_of(steps or [])), given

    def whole_loop(self, node: ast.For, rounds: Rounds, scope: Scope) -> None:
        """Writes a loop without unrolling."""
        given = self.given(scope)
        self.forget(bound_in(node), scope, node)
        for name, elements in rounds.modules().items():
            scope.names.values[name] = Unknown(True, is_module=True)
            kinds = {type(element): element for element in elements}
            if len({str(signature_of(element)) for element in kinds.values()}) == 1:
                scope.elements[name] = elements[0]
        target, iterable = self.text(node.target, scope), self.text(node.iter, scope)
        head = f"for {target} in {iterable}:"
        self.compound(node, head, node.body, scope, node.orelse, given)

    @staticmethod
    def given(scope: Scope) -> set[str]:
        """The names that are known not to be None here."""
        return {
            name
            for name, value in scope.names.values.items()
            if isinstance(value, Unknown) and value.is_given
        }

    def compound(
        self,
        node: ast.stmt,
        head: str,
        body: Sequence[ast.stmt],
        scope: Scope,
        orelse: Sequence[ast.stmt] = (),
        given: Set[str] = frozenset(),
    ) -> None:
        """Writes a compound statement; `given` are the names that are not None before it."""
        self.spell_out(node, scope)
        comments, self.comments = self.comments, []
        around, self.unsure = self.unsure, set()
        self.depth += 1
        texts = []
        out = self.out
        for inner in (body, orelse):
            lines = self.out = []
            self.block(inner, scope)
            texts.append("\n".join(line.text for line in lines))
        self.out = out
        self.depth -= 1
        self.comments = comments
        for name in bound_in(node):  # what is known inside holds for one branch only
            scope.names.values[name] = Unknown(name in given and name not in self.unsure)
        self.unsure |= around
        if not texts[0] and not texts[1]:
            self.comments.clear()
            return
        text = f"{head}\n{textwrap.indent(texts[0] or 'pass', '    ')}"
        if len(lines) == 1 and texts[1].startswith("if "):
            text += f"\nel{texts[1]}"
        elif texts[1]:
            text += f"\nelse:\n{textwrap.indent(texts[1], '    ')}"
        self.emit(text, node, scope)

    def assigned(self, node: ast.stmt, target: ast.expr, value: ast.expr, scope: Scope) -> None:
        """Writes an assignment, unless the value is known."""
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Call):
            inner = self.callee(value, scope)
            if inner is not None:
                result = self.inlined(value, *inner, scope)
                self.unpacked(node, target, result, scope)
                return
        several = scope.names.values.get(value.id) if isinstance(value, ast.Name) else None
        if isinstance(target, ast.Tuple) and isinstance(several, KnownObject):
            plain = [each for each in target.elts if isinstance(each, ast.Name)]
            if several.cls is tuple and len(plain) == len(target.elts) == len(several.texts):
                for each, key in zip(plain, several.texts, strict=True):
                    self.bind(node, each, Result(several.texts[key], several.values[key]), scope)
                return
        if isinstance(target, ast.Name) and (handed := self.handed_on(target, value, scope)):
            scope.names.values[target.id] = handed
            self.comments.clear()
            return
        if isinstance(target, ast.Tuple) and (parts := self.first_fields(value, scope)):
            before = ((target.elts[:number], part) for number, part in enumerate(parts))
            if not any(self.reads_bound(names, part, scope) for names, part in before):
                self.unpacked(node, target, Result("", UNKNOWN, parts), scope)
                return
        result = self.result(value, scope)
        match target:
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key))):
                if isinstance(known := scope.names.values.get(name), KnownKwargs):
                    self.fill(known, name, key, result, scope, node)
                    return
            case ast.Attribute(value=ast.Name(id=name), attr=key):
                if isinstance(known := scope.names.values.get(name), KnownObject):
                    if self.is_here_alone(known, name, scope):
                        self.fill(known, name, key, result, scope, node)
                        return
                    raise self.refused(
                        f"`{name}.{key}` changes after the record `{name}` was created",
                        scope,
                        node,
                        "create the record with its final values",
                    )
        if not isinstance(target, ast.Name):
            self.forget(bound_in(node), scope, node)
            self.emit(self.text(node, scope), node, scope)
            return
        self.bind(node, target, result, scope)

    @staticmethod
    def reads_bound(targets: Iterable[ast.expr], text: str, scope: Scope) -> bool:
        """Whether an expression reads any of the names that are assigned before it."""
        bound = {scope.spelled(name) for target in targets for name in names_in(target)}
        return not bound.isdisjoint(names_in(ast.parse(text)))

    def is_here_alone(self, known: KnownObject, name: str, scope: Scope) -> bool:
        """Whether an object has no other reference, is no argument, and always changes here."""
        if self.depth or name in {a.arg for a in all_arguments(scope.function)}:
            return False
        held = [*scope.names.values.values()]
        several = (of for of in held if isinstance(of, KnownObject | KnownKwargs))
        held += [each for of in several for each in of.values.values()]
        return sum(each is known for each in held) == 1

    def fill(
        self,
        known: KnownKwargs | KnownObject,
        name: str,
        key: str,
        result: Result,
        scope: Scope,
        node: ast.stmt,
    ) -> None:
        """Sets an item of a known dictionary or record: the value gets a variable of its own."""
        new = re.sub(r"\W", "_", f"{scope.spelled(name)}_{key}")
        while new in local_names(scope.function) | scope.after:
            new += "_"
        self.outdate(new, scope)
        value = result.value
        if isinstance(value, KnownObject):
            value = Unknown(True, value.cls, value.values)
        elif isinstance(value, Constant):
            value = Unknown(value != NONE)
        known = scope.names.values[name] = replace(
            known, texts={**known.texts, key: new}, values={**known.values, key: value}
        )
        self.emit(f"{new} = {result.text}", node, scope)

    def spell_out(self, node: ast.stmt, scope: Scope) -> None:
        """Writes known dictionaries that a statement may mutate."""
        for name in dict.fromkeys(altered_in(node, {})):
            known = scope.names.values.get(name)
            if isinstance(known, KnownKwargs):
                texts = self.current(known.texts, scope, node)
                pairs = ", ".join(f"{key!r}: {text}" for key, text in texts.items())
                self.out.append(Line(f"{scope.spelled(name)} = {{{pairs}}}", scope.file.at(node)))
                scope.names.values[name] = Unknown(True)

    def unpacked(self, node: ast.stmt, target: ast.Tuple, result: Result, scope: Scope) -> None:
        """Binds each name of a target tuple to its part of a result."""
        names = [e for e in target.elts if isinstance(e, ast.Name)]
        if len(names) != len(target.elts) or len(result.parts) != len(names):
            self.forget(bound_in(node), scope, node)
            self.emit(f"{self.text(target, scope)} = {result.text}", node, scope)
            return
        for number, name in enumerate(names):
            text = result.parts[number]
            value = Constant(None) if text == "None" else Unknown()
            self.bind(node, name, Result(text, value), scope)

    def bind(self, node: ast.stmt, target: ast.Name, result: Result, scope: Scope) -> None:
        """Binds a name to its value; writes the assignment unless the value is known."""
        name, value = target.id, result.value
        written = scope.spelled(name)
        inside_compound = self.depth > 0
        if isinstance(value, Constant | KnownObject) and not inside_compound:
            scope.names.values[name] = value
            self.comments.clear()
            return
        known = value if isinstance(value, Unknown) else Unknown()
        scope.names.values[name] = known
        if not known.is_given:
            self.unsure.add(name)
        self.outdate(written, scope)
        if result.text != written:
            self.emit(f"{written} = {result.text}", node, scope)
        else:
            self.comments.clear()

    def forget(self, bound: Iterable[str], scope: Scope, node: ast.stmt) -> None:
        """Forgets the known values of names that a statement binds; writes those still needed."""
        for name in bound:
            value = scope.names.values.get(name)
            if hasattr(node, "body") or reads_in(node, name):
                text = ""
                if isinstance(value, Constant):
                    text = repr(value.value)
                elif isinstance(value, KnownObject) and all(value.texts.values()):
                    text = written_out(value)
                if text:
                    self.out.append(Line(f"{scope.spelled(name)} = {text}", scope.file.at(node)))
            scope.names.values[name] = Unknown()
            if not isinstance(node, (*_COMPOUND, ast.If)):
                self.unsure.add(name)
            self.outdate(scope.spelled(name), scope)

    @staticmethod
    def outdate(written: str, scope: Scope) -> None:
        """Invalidates known objects whose expressions read a variable that was reassigned."""
        for name, value in scope.names.values.items():
            if isinstance(value, KnownObject | KnownKwargs):
                texts = {
                    key: Outdated(written) if written in names_in(ast.parse(text)) else text
                    for key, text in value.texts.items()
                }
                if texts != value.texts:
                    scope.names.values[name] = replace(value, texts=texts)

    def emit(self, text: str, node: ast.stmt, scope: Scope) -> None:
        """Adds a statement, with the comments above and beside it."""
        above, self.comments = self.comments, []
        if not isinstance(node, _COMPOUND) and not isinstance(node, ast.If):
            text += comment_after(scope.file, node)
        self.out.append(Line("\n".join([*above, text]), scope.file.at(node)))

    # Calls --------------------------------------------------------------------------------------

    def call(self, node: ast.Call, scope: Scope) -> str | None:
        """The text of a call without arguments that equal defaults, or of an inlined result."""
        if (got := scope.names.module_got(node)) is not None:
            return accessor(next(n for n, m in self.model.named_modules() if m is got))
        match node.func:
            case ast.Attribute(value=ast.Name(id=name), attr="get" | "pop"):
                extra = scope.names.values.get(name)
                if isinstance(extra, KnownKwargs) and isinstance(node.args[0], ast.Constant):
                    key = str(node.args[0].value)
                    if key in extra.texts:
                        return self.current(extra.texts, scope, node)[key]
                    return self.text(node.args[1], scope) if len(node.args) > 1 else "None"
        if (inner := self.callee(node, scope)) is not None:
            return enclosed(self.inlined(node, *inner, scope).text)
        taken = signature_of(self.called(node, scope))
        by_name: list[tuple[str, str]] = []
        changed = False
        for keyword in node.keywords:
            value = scope.names.value(keyword.value)
            if keyword.arg is None and isinstance(value, KnownKwargs):
                changed = True
                by_name += [
                    (f"{name}={text}", "")
                    for name, text in self.current(value.texts, scope, keyword.value).items()
                    if not is_default(name, value.values[name], taken)
                ]
            elif keyword.arg is not None and is_default(keyword.arg, value, taken):
                changed = True
            else:
                beside = comment_after(scope.file, keyword)
                by_name.append((self.text(keyword, scope), beside))
        positional = list(node.args)
        while positional and taken is not None and not isinstance(positional[-1], ast.Starred):
            parameter = positional_name(taken, len(positional) - 1)
            value = scope.names.value(positional[-1])
            written = isinstance(positional[-1], ast.Constant)
            if parameter is None or written or not is_default(parameter, value, taken):
                break
            positional.pop()
            changed = True
        while positional and taken is not None and isinstance(positional[-1], ast.Name):
            parameter = keyword_name(taken, len(positional) - 1)
            if parameter is None or not isinstance(scope.names.value(positional[-1]), Constant):
                break
            last = positional.pop()
            beside = comment_after(scope.file, last)
            by_name.insert(0, (f"{parameter}={self.text(last, scope)}", beside))
            changed = True
        if not changed:
            return None
        function = self.text(node.func, scope)
        kept = [(self.text(a, scope), comment_after(scope.file, a)) for a in positional]
        kept += by_name
        if not any(comment for _, comment in kept):
            return f"{function}({', '.join(text for text, _ in kept)})"
        body = "\n".join(f"    {text},{comment}" for text, comment in kept)
        return f"{function}(\n{body}\n)"

    def element(self, node: ast.Subscript, scope: Scope) -> str | None:
        """The text of an element of an inlined module's result."""
        match node:
            case ast.Subscript(value=ast.Call() as call, slice=ast.Constant(value=int(number))) if (
                inner := self.callee(call, scope)
            ):
                result = self.inlined(call, *inner, scope)
                if 0 <= number < len(result.parts):
                    return enclosed(result.parts[number])
                return f"{enclosed(result.text)}[{number}]"
        return None

    def known_of_result(self, node: ast.Call, scope: Scope) -> Unknown | None:
        """What is known of a module's result, from analysing its `forward`."""
        steps = scope.names.chain(node.func)
        if not steps or self.is_aside:
            return None
        comments, depth, settings = list(self.comments), self.depth, dict(self.settings)
        out, self.out = self.out, []
        value: Worth = Unknown()
        self.is_aside = True
        try:
            found = scope.names.object_at(steps)
            path = scope.names.path_of(steps)
            method = self.method_of(found, path, "forward")
            self.depth = 0
            value = self.inlined(node, method, accessor(path), scope).value
        except (errors.CannotCut, AttributeError):
            pass
        self.is_aside = False
        self.out, self.comments, self.depth = out, comments, depth
        if isinstance(value, KnownObject):
            return Unknown(True, value.cls, value.values)
        self.settings.clear()
        self.settings.update(settings)
        return None

    def called(self, node: ast.Call, scope: Scope) -> Any:
        """The called function or module, if known."""
        if isinstance(node.func, ast.Name) and node.func.id in scope.elements:
            return scope.elements[node.func.id]
        steps = scope.names.chain(node.func)
        return scope.names.global_at(node.func) if steps is None else scope.names.found_at(steps)

    def callee(self, node: ast.Call, scope: Scope) -> tuple[Method, str] | None:
        """The called method if it is to be inlined, and the text of its module in the output."""
        if (method := self.base_method(node, scope)) is not None:
            return method, scope.prefix
        steps = scope.names.chain(node.func)
        if not steps:
            return None
        path, found = scope.names.path_of(steps), scope.names.found_at(steps)
        if path in self.inside:
            if self.depth:
                raise self.refused(
                    f"`{path}` is called inside a branch or loop, and cannot be cut",
                    scope,
                    node,
                    "cut before or after it",
                )
            return self.method_of(found, path, "forward"), accessor(path)
        if len(steps) == 1 and inspect.ismethod(found) and not self.depth:
            return self.own_method(node, steps[0], scope)
        return None

    def base_method(self, node: ast.Call, scope: Scope) -> Method | None:
        """The method that `super().forward(...)` calls, if it leads to a cut."""
        if "super" not in names_in(node.func):
            return None
        names = scope.names
        home = next(f for f in self.files.known() if f.file is scope.file)
        here = Method(names.live, names.path, home, scope.function)
        bases = (m for call, m in self.base_methods(here) if call is node)
        return next((m for m in bases if self.leads_to_cut(m, set())), None)

    def base_methods(self, method: Method) -> Iterator[tuple[ast.Call, Method]]:
        """The `super()` calls of a method, each with the base class's method."""
        live, function = method.live, method.function
        calls = [n for n in ast.walk(function) if isinstance(n, ast.Call)]
        named = {
            call: call.func.attr
            for call in calls
            if isinstance(call.func, ast.Attribute)
            and isinstance(of := call.func.value, ast.Call)
            and is_name(of.func, "super")
            and not of.args
        }
        for cls in type(live).__mro__ if named else ():
            home = self.files.of(cls)
            own = home.file.method(cls.__name__, function.name) if home is not None else None
            if home is None or home.file is not method.home.file or own is None:
                continue
            if own.lineno == function.lineno:
                for call, name in named.items():
                    with contextlib.suppress(errors.CannotCut):
                        yield call, self.method_of(live, method.path, name, cls)

    def own_method(self, node: ast.Call, name: str, scope: Scope) -> tuple[Method, str] | None:
        """A method of the same module that leads to a cut, or that inlining makes shorter."""
        try:
            method = self.method_of(scope.names.live, scope.names.path, name)
        except errors.CannotCut:
            return None
        if self.leads_to_cut(method, set()):
            return method, scope.prefix
        given = values_given(node)
        if not any(isinstance(scope.names.value(v), Constant) for v in given):
            return None
        function = method.function
        if method.home.file is not scope.file:
            return None
        tests = [n for n in ast.walk(function) if isinstance(n, ast.If)]
        last = function.body[-1]
        returns = [n for n in ast.walk(function) if isinstance(n, ast.Return)]
        plain = not function.decorator_list and not any(
            isinstance(n, ast.For | ast.While | ast.With | ast.Try) for n in ast.walk(function)
        )
        if not tests or returns != [last] or not plain:
            return None
        return method, scope.prefix

    def leads_to_cut(self, method: Method, seen: set[str]) -> bool:
        """Whether a method mentions a module at or around a cut, or calls a method that does."""
        above = f"{method.path}." if method.path else ""
        wanted = {c.removeprefix(above).split(".")[0] for c in self.cuts if c.startswith(above)}
        me = first_parameter(method.function)
        read = {
            node.attr
            for node in ast.walk(method.function)
            if isinstance(node, ast.Attribute) and is_name(node.value, me)
        } - seen
        if read & wanted:
            return True
        seen |= read
        if any(self.leads_to_cut(base, seen) for _, base in self.base_methods(method)):
            return True
        for name in sorted(read):
            if inspect.ismethod(getattr(method.live, name, None)):
                with contextlib.suppress(errors.CannotCut):
                    if self.leads_to_cut(self.method_of(method.live, method.path, name), seen):
                        return True
        return False

    def method_of(self, module: Any, path: str, name: str, behind: type | None = None) -> Method:
        """A method of a module, in the file that defines it.

        If a class `behind` is given, the search starts after it in the method resolution order.
        """
        classes = type(module).__mro__
        classes = classes[classes.index(behind) + 1 :] if behind is not None else classes
        cls = next((c for c in classes if name in vars(c)), type(module))
        home = self.files.of(cls)
        function = home.file.method(cls.__name__, name) if home is not None else None
        if home is not None and function is not None:
            return Method(module, path, home, function)
        raise errors.CannotCut(
            f"the `{name}` of `{path or 's'}` ({type(module).__name__}) is in no file of a model, "
            "so it cannot be cut",
            at=self.also[0] if self.also else None,
            hint=f"write the class into {self.files.main.file.path.name}, or cut elsewhere",
        )

    # Writing a function where it is called ------------------------------------------------------

    def inlined(self, node: ast.Call, method: Method, prefix: str, scope: Scope) -> Result:
        """Writes a function's statements; returns its result."""
        self.comments.clear()
        path, function = method.path, method.function
        *_, word = re.findall(r"[^\W\d]\w*(?:\.\d+)*", path) or ["model"]
        word = word.replace(".", "_")
        written = self.files.names_of(function, method.home, word)
        arguments = self.bound(node, method, written, scope)
        values: dict[str, Worth] = {}
        names = self.environment(method, values)
        needed = scope.after | self.needed_after(node, scope)
        inner = Scope(function, method.home.file, names, prefix, written, frozenset(needed))
        bound = bound_in(*function.body)
        moves: list[tuple[str, str]] = []
        for name in local_names(function) - arguments.keys():
            if name in needed:
                inner.written[name] = f"{word}_{name}"
        taken = {inner.spelled(n) for n in bound}
        for name, result in arguments.items():
            values[name] = elsewhere(result.value)
            if not isinstance(result.value, Unknown):
                if name in needed and name in bound:
                    inner.written[name] = f"{word}_{name}"
                continue
            is_name = result.text.isidentifier()
            if is_name and name not in bound and result.text not in taken:
                if result.text != name:
                    inner.written[name] = result.text
                continue
            if name in needed and (name in bound or result.text != name):
                inner.written[name] = f"{word}_{name}"
            moves.append((inner.spelled(name), result.text))
        at = scope.file.at(node)
        for number, (target, text) in enumerate(moves):
            if any(re.search(rf"\b{target}\b", later) for _, later in moves[number + 1 :]):
                raise self.refused(
                    f"the arguments of `{path}` swap their names", scope, node, "name them apart"
                )
            if target != text:
                self.out.append(Line(f"{target} = {text}", at))
        names.me = first_parameter(function)
        returned = self.block(body_of(function), inner) or Result("None", NONE)
        self.comments.clear()
        return replace(returned, value=elsewhere(returned.value))

    def bound(
        self, node: ast.Call, method: Method, written: Mapping[str, str], scope: Scope
    ) -> dict[str, Result]:
        """The argument of each parameter of a method in a call."""
        function = method.function
        if any(isinstance(a, ast.Starred) for a in node.args) or function.args.vararg:
            raise self.refused("a call with `*` cannot be written out", scope, node)
        arguments = [("", self.result(value, scope)) for value in node.args]
        for keyword in node.keywords:
            if keyword.arg is None:
                extra = scope.names.value(keyword.value)
                if not isinstance(extra, KnownKwargs):
                    raise self.refused("the arguments in `**` are not known here", scope, node)
                given_texts = self.current(extra.texts, scope, keyword.value)
                arguments += [(k, Result(given_texts[k], extra.values[k])) for k in extra.texts]
            else:
                arguments.append((keyword.arg, self.result(keyword.value, scope)))
        takes = Signature.of(function, bound=True)
        bound = takes.bind(arguments)
        given = bound.given
        for name in bound.missing:
            default = takes.defaults.get(name)
            if name == "use_cache":
                given[name] = Result("False", Constant(False))
            elif default is None:
                raise self.refused(f"`{name}` is not given here", scope, node)
            else:
                text = respelled(ast.unparse(default), written)
                given[name] = Result(text, self.environment(method, {}).value(default))
        if takes.options:
            aside = FOR_DECORATORS if function.decorator_list else set()
            more = {name: result for name, result in bound.extra if name not in aside}
            texts = {name: result.text for name, result in more.items()}
            values = {name: result.value for name, result in more.items()}
            given[takes.options] = Result("", KnownKwargs(texts, values))
        return given

    def needed_after(self, node: ast.AST, scope: Scope) -> set[str]:
        """The names in the output that the caller may read after a call."""
        statement = [s for s in statements(scope.function.body) if within(s, node)][-1]
        inside = set(ast.walk(node))
        beside = {
            n.id
            for n in ast.walk(statement)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n not in inside
        }
        found: set[str] = set()
        for name in live_after(scope.function, statement) - bound_in(statement) | beside:
            value = scope.names.values.get(name)
            if isinstance(value, KnownObject | KnownKwargs):
                found |= {n for text in value.texts.values() for n in names_in(ast.parse(text))}
            elif name in scope.names.values and not isinstance(value, Constant):
                found.add(scope.spelled(name))
        return found

    # Expressions --------------------------------------------------------------------------------

    def text(self, node: ast.expr | ast.stmt | ast.keyword, scope: Scope) -> str:
        """The text of an expression or simple statement in the output."""
        start, end = scope.file.span(node)
        text, position = [], start
        for first, last, new in sorted(self.edits(node, scope)):
            text += [scope.file.text[position:first], new]
            position = last
        joined = "".join([*text, scope.file.text[position:end]])
        return dedented(joined, scope.file, node)

    def edits(self, node: ast.AST, scope: Scope) -> Iterator[tuple[int, int, str]]:
        """The parts of a node that have another text in the output."""
        names = scope.names
        new: str | None = None
        if isinstance(node, _CLOSED):
            own = {n: names.values[n] for n in bound_in(node) if n in names.values}
            names.values.update(dict.fromkeys(own, Unknown()))
            for child in ast.iter_child_nodes(node):
                yield from list(self.edits(child, scope))
            names.values.update(own)
            return
        match node:
            case ast.Name():
                new = self.name(node, scope)
            case ast.NamedExpr(target=target) if node in self.named:
                read = ast.Name(target.id, ast.Load())
                new = self.name(read, scope) or target.id
            case ast.Attribute() if (value := self.field(node, scope)) is not None:
                new = value
            case ast.Subscript() if (value := self.field(node, scope)) is not None:
                new = value
            case ast.Subscript() if (value := self.element(node, scope)) is not None:
                new = value
            case ast.Subscript(value=listed) if self.is_all_of_it(node, scope):
                new = self.text(listed, scope)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                one, other = names.value(body), names.value(orelse)
                if one == other and isinstance(one, Constant) and not one.is_setting:
                    new = repr(one.value)
                elif (known := names.decided(test)) is not None:
                    chosen = body if known else orelse
                    new = closed(self.text(chosen, scope), chosen)
            case ast.BoolOp():
                new = self.shortened(node, scope)
            case ast.Compare() | ast.UnaryOp(op=ast.Not()):
                if (truth := names.decided(node)) is not None:
                    new = repr(truth)
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
                added = names.value(right)
                if isinstance(right, ast.Name) and added == Constant(0):
                    new = closed(self.text(left, scope), left)
                elif (
                    isinstance(left, ast.Name)
                    and isinstance(node.op, ast.Add)
                    and names.value(left) == Constant(0)
                ):
                    new = closed(self.text(right, scope), right)
            case ast.Call():
                new = self.call(node, scope)
        if new is not None:
            yield (*span_of(node, scope.file), new)
            return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr_context | ast.operator | ast.boolop | ast.cmpop):
                continue
            yield from self.edits(child, scope)

    def name(self, node: ast.Name, scope: Scope) -> str | None:
        """The text of a name in the output; None if it stays the same."""
        if node.id == scope.names.me:
            return scope.prefix if scope.prefix != node.id else None
        value = scope.names.values.get(node.id)
        if isinstance(node.ctx, ast.Load) and isinstance(value, Constant):
            return repr(value.value)
        if isinstance(value, Unknown) and value.steps and isinstance(node.ctx, ast.Load):
            return accessor(scope.names.path_of([*value.steps]))
        if isinstance(value, KnownObject) and isinstance(node.ctx, ast.Load):
            self.current(value.texts, scope, node)
            return written_out(value)
        return scope.written.get(node.id)

    def field(self, node: ast.Attribute | ast.Subscript, scope: Scope) -> str | None:
        """The expression of an attribute, or of an element by index, of a known object."""
        base = scope.names.value(node.value)
        if isinstance(base, KnownKwargs):
            match node:
                case ast.Subscript(slice=ast.Constant(value=str(key)), ctx=ast.Load()):
                    return self.current(base.texts, scope, node).get(key)
        if not isinstance(base, KnownObject):
            return None
        name: str | None = None
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int):
            name = field_at(base.cls, base.values, node.slice.value)
        if name is None:
            return None
        return self.current({name: base.texts.get(name, "None")}, scope, node)[name]

    def first_fields(self, node: ast.expr, scope: Scope) -> tuple[str, ...]:
        """The expressions of the first elements of a known object: for `outputs[:2]`, of two."""
        match node:
            case ast.Subscript(
                value=base,
                slice=ast.Slice(lower=None, upper=ast.Constant(value=int(count)), step=None),
                ctx=ast.Load(),
            ) if isinstance(scope.names.value(base), KnownObject):
                each = (ast.Subscript(base, ast.Constant(n), ast.Load()) for n in range(count))
                found = [self.field(ast.copy_location(one, node), scope) for one in each]
                return tuple(text for text in found if text) if all(found) else ()
        return ()

    def current(self, texts: Mapping[str, str], scope: Scope, node: ast.AST) -> Mapping[str, str]:
        """The expressions of a known object; raises if their variables have been reassigned."""
        for text in texts.values():
            if isinstance(text, Outdated):
                raise self.refused(
                    f"this was computed from `{text.name}`, which has another value now",
                    scope,
                    node,
                    f"give that value another name than `{text.name}`",
                )
        return texts

    def is_all_of_it(self, node: ast.Subscript, scope: Scope) -> bool:
        """Whether a slice of layers ends at the length with which `__init__` makes the list."""
        steps = scope.names.chain(node.value)
        if not steps or not isinstance(node.slice, ast.Slice):
            return False
        upper = node.slice.upper
        if node.slice.lower or node.slice.step or upper is None:
            return False
        try:
            owner = scope.names.object_at(steps[:-1])
            init = self.method_of(owner, ".".join(steps[:-1]), "__init__")
            full = len(getattr(owner, steps[-1]))
        except (AttributeError, TypeError, errors.CannotCut):
            return False
        number = ast.unparse(upper).removeprefix(f"{scope.names.me}.")
        same = scope.names.value(upper) == Constant(full, is_setting=True)
        return same and is_made_for(init.function, steps[-1], number)

    def shortened(self, node: ast.BoolOp, scope: Scope) -> str | None:
        """`a and b` without operands known to be true, `a or b` without those known false."""
        value = scope.names.value(node)
        if isinstance(value, Constant) and not value.is_setting:
            scope.names.decided(node)
            return repr(value.value)
        neutral = isinstance(node.op, ast.And)
        *first, last = node.values
        kept = [v for v in first if truth_of(scope.names.value(v)) is not neutral]
        if len(kept) == len(first):
            return None
        for operand in first:
            if operand not in kept:
                scope.names.decided(operand)
        if not kept:
            return closed(self.text(last, scope), last)
        word = " and " if neutral else " or "
        loose = ast.BoolOp | ast.IfExp | ast.Lambda | ast.NamedExpr
        texts = [(self.text(v, scope), v) for v in [*kept, last]]
        return f"({word.join(f'({t})' if isinstance(v, loose) else t for t, v in texts)})"


def elsewhere(value: Worth) -> Worth:
    """What is known of a value inside a method of another module."""
    return replace(value, steps=()) if isinstance(value, Unknown) else value
