"""Follows modules through the statements of a class: what makes them, what they end up named.

An abstract walk, not an interpreter: branches are all taken and remembered as guards, loops are
taken once and remembered, and expressions are kept as syntax. `sites` turns what this finds into
construction sites.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import replace

from slapo_rewrite.code.arguments import first_parameter, values_given
from slapo_rewrite.code.syntax import MAX_UNROLLED, constants_of, counter_of, leaves
from slapo_rewrite.model.constructor_expressions import Expressions, container_form
from slapo_rewrite.model.constructor_values import (
    UNDECIDED,
    Frame,
    Guard,
    Here,
    Item,
    Loop,
    Made,
    Placed,
    Sequence,
    case_guard,
    counted_by,
    covers,
    joined,
    undecided,
    under,
)


class Walker(Expressions):
    """Walks methods of one class and collects what they put where, in `placed`."""

    def walk(self, function: ast.FunctionDef) -> None:
        """Walks a method that Python or somebody else calls."""
        frame = Frame(function)
        here = Here(frame, (), function)
        me = first_parameter(function)
        self._enter(function, here, {} if me is None else {me: [self._self(here)]})

    def _enter(
        self, function: ast.FunctionDef, here: Here, scope: dict[str, list[Made]]
    ) -> list[Made]:
        """Walks a function's body; what it returns."""
        saved = self._scope, self._returns, self._functions
        self._scope, self._returns, self._functions = scope, [], {}
        self._active.append(function)
        self.visited.add(function.name)
        self._block(function.body, here)
        self._active.pop()
        returns = self._returns
        self._scope, self._returns, self._functions = saved
        return returns

    def _block(self, body: Iterable[ast.stmt], here: Here) -> None:
        for statement in body:
            here = self._statement(statement, replace(here, statement=statement))

    def _statement(self, statement: ast.stmt, here: Here) -> Here:
        """Walks one statement; where the statements after it stand."""
        match statement:
            case ast.Assign():
                values = self._values(statement.value, here)
                for target in statement.targets:
                    self._store(target, values, statement.value, here)
            case ast.AnnAssign(value=ast.expr() as value):
                self._store(statement.target, self._values(value, here), value, here)
            case ast.AugAssign(op=ast.Add()):
                self._extend(statement.target, statement.value, here)
            case ast.Expr(value=ast.Call() as call):
                self._effect(call, here)
            case ast.Return(value=ast.expr() as value):
                self._returns += self._values(value, here, "helper")
            case ast.If():
                return self._branch(statement, here)
            case ast.For() | ast.AsyncFor():
                self._loop(statement, here)
            case ast.While():
                self._block(statement.body, here.under(Loop(statement, here.frame)))
                self._block(statement.orelse, here)
            case ast.With() | ast.AsyncWith():
                self._block(statement.body, here)
            case ast.Try() | ast.TryStar():
                self._block(statement.body, here)
                for handler in statement.handlers:
                    self._block(handler.body, here.under(undecided(statement, here)))
                self._block(statement.orelse, here)
                self._block(statement.finalbody, here)
            case ast.Match():
                for case in statement.cases:
                    guards = [case_guard(statement.subject, case.pattern, here)]
                    guards += [Guard(case.guard, True, here.frame)] if case.guard else []
                    self._block(case.body, here.under(*guards))
            case ast.FunctionDef():
                self._functions[statement.name] = statement
        return here

    def _branch(self, statement: ast.If, here: Here) -> Here:
        self._walrus(statement.test, here)
        taken = Guard(statement.test, True, here.frame)
        other = Guard(statement.test, False, here.frame)
        self._block(statement.body, here.under(taken))
        self._block(statement.orelse, here.under(other))
        if leaves(statement.body):
            return here.under(other)
        if leaves(statement.orelse):
            return here.under(taken)
        return here

    def _loop(self, statement: ast.For | ast.AsyncFor, here: Here) -> None:
        constants = constants_of(statement.iter)
        for value in constants:
            self._bind_constants(statement.target, value, here)
            self._block(statement.body, here.under(Loop(statement, here.frame, value=value)))
        if not constants and not self._unrolled(statement, here):
            loop = Loop(statement, here.frame, counter_of(statement.target, statement.iter))
            self._bind_elements(statement.target, statement.iter, here)
            self._block(statement.body, here.under(loop))
        self._block(statement.orelse, here)

    def _unrolled(self, statement: ast.For | ast.AsyncFor, here: Here) -> bool:
        """Walks a loop over a list of which every element is known, once for each element."""
        target, iterable, number = statement.target, statement.iter, None
        match target, iterable:
            case ast.Tuple(elts=[counter, inner]), ast.Call(func=ast.Name(id="enumerate")):
                if len(iterable.args) != 1 or iterable.keywords:
                    return False
                target, iterable, number = inner, iterable.args[0], counter
        if not isinstance(target, ast.Name):
            return False
        held = [made for made in self._held(iterable) if not made.container]
        sequences = [s for made in held for s in made.sequences or ()]
        if len(sequences) != 1 or len(sequences[0].items) > MAX_UNROLLED:
            return False
        items = sequences[0].items
        if any(i.key is not None or i.steps != sequences[0].steps for i in items):
            return False
        for position, item in enumerate(items):
            value: ast.expr = ast.Name(UNDECIDED, ast.Load())
            if number is not None:
                count = ast.Constant(position)
                self._bind_constants(number, count, here)
                value = ast.Tuple([count, value], ast.Load())
            value = ast.fix_missing_locations(ast.copy_location(value, iterable))
            self._scope[target.id] = item.values
            self._block(statement.body, here.under(Loop(statement, here.frame, value=value)))
        return True

    def _bind_constants(self, target: ast.expr, value: ast.expr, here: Here) -> None:
        if isinstance(target, ast.Name):
            self._scope[target.id] = [self._made(value, here, "assign", constant=True)]
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple | ast.List):
            for inner, part in zip(target.elts, value.elts, strict=False):
                self._bind_constants(inner, part, here)

    def _walrus(self, expr: ast.expr, here: Here) -> None:
        for node in ast.walk(expr):
            if isinstance(node, ast.NamedExpr):
                self._store(node.target, self._values(node.value, here), node.value, here)

    def _store(
        self, target: ast.expr, values: list[Made], source: ast.expr, here: Here, kind: str = ""
    ) -> None:
        match target:
            case ast.Name(id=name):
                kept = [v for v in self._scope.get(name, []) if not covers(here.steps, v.steps)]
                self._scope[name] = [*kept, *values]
            case ast.Tuple(elts=elts) | ast.List(elts=elts):
                parts: list[ast.expr] = []
                if isinstance(source, ast.Tuple | ast.List) and len(source.elts) == len(elts):
                    parts = source.elts
                for number, element in enumerate(elts):
                    if parts:
                        part = parts[number]
                        self._store(element, self._values(part, here), part, here)
                    else:
                        self._store(element, values, source, here)
            case _:
                path = self._path(target)
                if path:
                    for value in values:
                        self._place(path, value, here, kind or "assign")
                elif isinstance(target, ast.Attribute | ast.Subscript):
                    self._store_local(target, values, here)

    def _store_local(
        self, target: ast.Attribute | ast.Subscript, values: list[Made], here: Here
    ) -> None:
        """`block.fc = ...` and `parts["fc"] = ...` where a local variable holds the block."""
        if not isinstance(target.value, ast.Name):
            return
        known = self._scope.get(target.value.id, [])
        if isinstance(target, ast.Attribute):
            item = Item(target.attr, values, here.steps, "assign")
            for made in known:
                if isinstance(made.expr, ast.Call):
                    made.attributes.append(item)
        else:
            item = Item(self._text(target.slice), values, here.steps, "dict")
            for sequence in (q for made in known for q in made.sequences or ()):
                sequence.items.append(item)

    def _place(
        self, path: str, value: Made, here: Here, kind: str, counted: Loop | None = None
    ) -> None:
        placed = Placed(path, value, kind, here.steps, counted)
        self.placed.append(placed)
        before = self._paths.get(path, [])
        kept = [p for p in before if not covers(here.steps, p.steps)]
        self._paths[path] = [*kept, placed]

    def _effect(self, call: ast.Call, here: Here) -> None:
        """A call that stands as a statement."""
        match call:
            case ast.Call(func=ast.Name(id="setattr"), args=[owner, name, value]):
                path = joined(self._path(owner), self._text(name))
                self._set(path, value, here, "setattr", counted_by(name, here))
            case ast.Call(func=ast.Attribute(value=owner, attr=attr)):
                self._method_effect(call, owner, attr, here)
            case ast.Call(func=ast.Name()):
                self._inlined(call, here)

    def _method_effect(self, call: ast.Call, owner: ast.expr, attr: str, here: Here) -> None:
        arguments = values_given(call)
        if attr in {"append", "add"} and len(arguments) == 1:
            self._add(owner, None, arguments[0], here, "append")
        elif attr == "insert" and len(arguments) == 2:
            self._add(owner, "*", arguments[1], here, "append")
        elif attr in {"extend", "update"} and len(arguments) == 1:
            self._extend(owner, arguments[0], here)
        elif attr in {"add_module", "register_module"} and len(arguments) == 2:
            name, value = arguments
            self._add(owner, self._text(name), value, here, "add_module", counted_by(name, here))
        elif attr in {"register_parameter", "register_buffer"} and len(arguments) >= 2:
            path = joined(self._path(owner), self._text(arguments[0]))
            kind = attr.removeprefix("register_")
            self._set(path, arguments[1], here, kind, counted_by(arguments[0], here))
        elif attr == "__init__":
            self._constructed(call, owner, here)
        elif self._path(owner) == "" and attr in self._methods:
            self._inlined(call, here)

    def _set(
        self, path: str | None, value: ast.expr, here: Here, kind: str, counted: Loop | None
    ) -> None:
        if path:
            for made in self._values(value, here, kind):
                self._place(path, made, here, kind, counted)

    def _constructed(self, call: ast.Call, owner: ast.expr, here: Here) -> None:
        """`super().__init__(...)`: what a container's constructor is given become its elements."""
        cls = self.file.classes.get(self.class_name)
        form = container_form(self.file, cls.bases[0]) if cls and cls.bases else None
        if form is None:
            return
        named = not (isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name))
        root = self._made(call, here, "assign")
        root.container = True
        root.sequences = self._container(form, call.args[named:], call.keywords, here)
        self._place("", root, here, "assign")

    def _add(
        self,
        owner: ast.expr,
        key: str | None,
        value: ast.expr,
        here: Here,
        kind: str,
        counted: Loop | None = None,
    ) -> None:
        """Adds an element to a list or a container, be it an attribute or a local variable."""
        item = Item(key, self._values(value, here, kind), here.steps, kind, counted)
        targets = self._held(owner)
        for made in targets:
            for sequence in made.sequences or ():
                sequence.items.append(item)
        path = self._path(owner)
        if path is not None and not targets:
            for made in item.values:
                self._place(joined(path, key or "*") or "", made, here, kind, counted)

    def _extend(self, owner: ast.expr, value: ast.expr, here: Here) -> None:
        targets = self._held(owner)
        added = self._sequences(value, here)
        for made in targets:
            assert made.sequences is not None
            made.sequences[:] = [
                Sequence([*old.items, *under(here.steps, new.items)], old.steps)
                for old in made.sequences
                for new in added
            ]
        path = self._path(owner)
        if path is not None and not targets:
            for item in (i for sequence in added for i in sequence.items):
                for made in item.values:
                    self._place(joined(path, item.key or "*") or "", made, here, item.kind)
