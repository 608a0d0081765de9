"""Follows modules through the statements of a class: what makes them, what they end up named.

An abstract walk, not an interpreter: branches are all taken and remembered as guards, loops are
taken once and remembered, and expressions are kept as syntax. `sites` turns what this finds into
construction sites.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from slapo_rewrite.source.index import SourceFile

CONTAINERS = {
    "ModuleList": "list",
    "ParameterList": "list",
    "Sequential": "sequential",
    "ModuleDict": "dict",
    "ParameterDict": "dict",
}
# Methods that return the module they are called on; functions that return the module they get.
_CHAINED = {"to", "eval", "train", "requires_grad_", "half", "float", "double", "bfloat16", "cuda"}
_CHAINED |= {"cpu", "apply", "type", "share_memory", "to_empty"}
_WRAPPERS = {"weight_norm", "spectral_norm", "deepcopy", "copy", "script", "compile", "orthogonal"}
_WRAPPERS |= {"checkpoint_wrapper", "remove_weight_norm", "maybe_compile"}
_FACTORIES = {"from_config", "_from_config", "from_pretrained", "load_backbone", "create_model"}
_MAX_DEPTH = 4
_MAX_UNROLLED = 32
UNDECIDED = "<undecided>"


@dataclass(frozen=True, eq=False)
class Frame:
    """A function as called from one place.

    Attributes:
        function: Its definition.
        call: The call, an expression of `parent.function`; None where Python itself calls it.
        parent: The caller.
    """

    function: ast.FunctionDef
    call: ast.Call | None = None
    parent: Frame | None = None


@dataclass(frozen=True, eq=False)
class Guard:
    """A test that must come out as `sense` for what follows to run."""

    test: ast.expr
    sense: bool
    frame: Frame


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop around a construction.

    Attributes:
        node: The `for` of a comprehension or of a statement; a `while`.
        frame: Where it stands.
        counter: The local variable that counts its iterations from 0, if there is one.
        value: The constant that its target stands for, where a loop over constants was unrolled.
        first: The number of the list element that is made here in the first iteration; None where
            that is not known.
        every: How many elements each iteration adds to the list.
    """

    node: ast.comprehension | ast.For | ast.AsyncFor | ast.While
    frame: Frame
    counter: str | None = None
    value: ast.expr | None = None
    first: int | None = None
    every: int = 1

    @property
    def index(self) -> str | None:
        """The local variable that counts the elements made from 0, if there is one."""
        return self.counter if self.first == 0 and self.every == 1 else None

    def iteration(self, element: int) -> int | None:
        """The iteration that makes an element of the list here; None where none does."""
        if self.first is None or element < self.first or (element - self.first) % self.every:
            return None
        return (element - self.first) // self.every


Step = Guard | Loop


@dataclass(eq=False)
class Item:
    """An element put into a list, a dict or a module container.

    Attributes:
        key: Its name as a pattern; None where its place in the order is its name.
        counted: The loop whose iterations the name counts, if it does.
    """

    key: str | None
    values: list[Made]
    steps: tuple[Step, ...]
    kind: str
    counted: Loop | None = None


@dataclass(eq=False)
class Sequence:
    """Elements in order, of a list that was created under `steps`."""

    items: list[Item]
    steps: tuple[Step, ...]


@dataclass(eq=False)
class Made:
    """What an expression makes.

    Attributes:
        expr: The expression.
        statement: The innermost statement that holds it.
        kind: How it is put in its place.
        steps: Guards and loops around it, outermost first.
        frame: Where it stands.
        sequences: Elements of a list, dict or container; several where branches made several.
        container: Whether it is a module container, rather than a plain list or dict.
        inner: What a helper function returns, or a wrapper was given.
        alias: The path of the existing module that the expression means.
        attributes: What is put into it while a local variable holds it.
    """

    expr: ast.expr
    statement: ast.stmt
    kind: str
    steps: tuple[Step, ...]
    frame: Frame
    sequences: list[Sequence] | None = None
    container: bool = False
    inner: list[Made] = field(default_factory=list)
    alias: str | None = None
    constant: bool = False
    attributes: list[Item] = field(default_factory=list)


@dataclass(eq=False)
class Placed:
    """A value given to an attribute path of the object under construction."""

    path: str
    value: Made
    kind: str
    steps: tuple[Step, ...]
    counted: Loop | None = None


@dataclass(frozen=True)
class _Here:
    frame: Frame
    steps: tuple[Step, ...]
    statement: ast.stmt

    def under(self, *steps: Step) -> _Here:
        return replace(self, steps=(*self.steps, *steps))


class Walker:
    """Walks methods of one class and collects what they put where, in `placed`."""

    def __init__(self, file: SourceFile, class_name: str) -> None:
        self.file = file
        self.class_name = class_name
        self.placed: list[Placed] = []
        self.visited: set[str] = set()
        self._methods = {m.name: m for m in file.methods(class_name)}
        self._paths: dict[str, list[Placed]] = {}
        self._scope: dict[str, list[Made]] = {}
        self._functions: dict[str, ast.FunctionDef] = {}
        self._returns: list[Made] = []
        self._active: list[ast.FunctionDef] = []

    def walk(self, function: ast.FunctionDef) -> None:
        """Walks a method that Python or somebody else calls."""
        frame = Frame(function)
        here = _Here(frame, (), function)
        scope: dict[str, list[Made]] = {}
        if function.args.args:
            scope[function.args.args[0].arg] = [self._self(here)]
        self._enter(function, here, scope)

    def _self(self, here: _Here) -> Made:
        name = ast.copy_location(ast.Name("self", ast.Load()), here.frame.function)
        return Made(name, here.statement, "alias", (), here.frame, alias="")

    def _enter(
        self, function: ast.FunctionDef, here: _Here, scope: dict[str, list[Made]]
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

    # Statements -----------------------------------------------------------------------------

    def _block(self, body: Iterable[ast.stmt], here: _Here) -> None:
        for statement in body:
            here = self._statement(statement, replace(here, statement=statement))

    def _statement(self, statement: ast.stmt, here: _Here) -> _Here:
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
                    self._block(handler.body, here.under(_undecided(statement, here)))
                self._block(statement.orelse, here)
                self._block(statement.finalbody, here)
            case ast.Match():
                for case in statement.cases:
                    guards = [_case_guard(statement.subject, case.pattern, here)]
                    guards += [Guard(case.guard, True, here.frame)] if case.guard else []
                    self._block(case.body, here.under(*guards))
            case ast.FunctionDef():
                self._functions[statement.name] = statement
        return here

    def _branch(self, statement: ast.If, here: _Here) -> _Here:
        self._walrus(statement.test, here)
        taken = Guard(statement.test, True, here.frame)
        other = Guard(statement.test, False, here.frame)
        self._block(statement.body, here.under(taken))
        self._block(statement.orelse, here.under(other))
        if _leaves(statement.body):
            return here.under(other)
        if _leaves(statement.orelse):
            return here.under(taken)
        return here

    def _loop(self, statement: ast.For | ast.AsyncFor, here: _Here) -> None:
        constants = _constants(statement.iter)
        for value in constants:
            self._bind_constants(statement.target, value, here)
            self._block(statement.body, here.under(Loop(statement, here.frame, value=value)))
        if not constants and not self._unrolled(statement, here):
            loop = Loop(statement, here.frame, _counter(statement.target, statement.iter))
            self._bind_elements(statement.target, statement.iter, here)
            self._block(statement.body, here.under(loop))
        self._block(statement.orelse, here)

    def _unrolled(self, statement: ast.For | ast.AsyncFor, here: _Here) -> bool:
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
        if len(sequences) != 1 or len(sequences[0].items) > _MAX_UNROLLED:
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

    def _bind_constants(self, target: ast.expr, value: ast.expr, here: _Here) -> None:
        if isinstance(target, ast.Name):
            self._scope[target.id] = [
                Made(value, here.statement, "assign", here.steps, here.frame, constant=True)
            ]
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple | ast.List):
            for inner, part in zip(target.elts, value.elts, strict=False):
                self._bind_constants(inner, part, here)

    def _bind_elements(self, target: ast.expr, iterable: ast.expr, here: _Here) -> None:
        """Binds a loop's target to the elements of a list of modules, if it is one."""
        if (
            isinstance(iterable, ast.Call)
            and isinstance(iterable.func, ast.Name)
            and iterable.func.id in {"enumerate", "zip", "reversed", "list", "tuple"}
        ):
            if iterable.func.id in {"reversed", "list", "tuple"} and iterable.args:
                self._bind_elements(target, iterable.args[0], here)
            elif isinstance(target, ast.Tuple):
                offset = iterable.func.id == "enumerate"
                for inner, part in zip(target.elts[offset:], iterable.args, strict=False):
                    self._bind_elements(inner, part, here)
                if offset and target.elts:
                    self._unbind(target.elts[0])
            return
        self._unbind(target)
        if not isinstance(target, ast.Name):
            return
        path = self._path(iterable)
        if path is not None:
            alias = f"{path}.*" if path else "*"
            self._scope[target.id] = [
                Made(iterable, here.statement, "alias", here.steps, here.frame, alias=alias)
            ]

    def _unbind(self, target: ast.expr) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                self._scope.pop(node.id, None)

    def _walrus(self, expr: ast.expr, here: _Here) -> None:
        for node in ast.walk(expr):
            if isinstance(node, ast.NamedExpr):
                self._store(node.target, self._values(node.value, here), node.value, here)

    # Places ---------------------------------------------------------------------------------

    def _store(
        self, target: ast.expr, values: list[Made], source: ast.expr, here: _Here, kind: str = ""
    ) -> None:
        match target:
            case ast.Name(id=name):
                kept = [v for v in self._scope.get(name, []) if not _covers(here.steps, v.steps)]
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
        self, target: ast.Attribute | ast.Subscript, values: list[Made], here: _Here
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
        self, path: str, value: Made, here: _Here, kind: str, counted: Loop | None = None
    ) -> None:
        placed = Placed(path, value, kind, here.steps, counted)
        self.placed.append(placed)
        before = self._paths.get(path, [])
        kept = [p for p in before if not _covers(here.steps, p.steps)]
        self._paths[path] = [*kept, placed]

    def _path(self, expr: ast.expr) -> str | None:
        """The attribute path, from the object under construction, that an expression means."""
        match expr:
            case ast.Name(id=name):
                aliases = {v.alias for v in self._scope.get(name, [])}
                return aliases.pop() if len(aliases) == 1 else None
            case ast.Attribute():
                return _joined(self._path(expr.value), expr.attr)
            case ast.Subscript():
                return _joined(self._path(expr.value), self._text(expr.slice))
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, name, *_]):
                return _joined(self._path(owner), self._text(name))
        return None

    def _text(self, expr: ast.expr | None) -> str:
        """A string expression as a pattern: `*` stands for what is not known."""
        match expr:
            case ast.Constant(value=str() | int() as value) if not isinstance(value, bool):
                return str(value)
            case ast.Name(id=name):
                values = self._scope.get(name, [])
                if len(values) == 1 and values[0].constant:
                    return self._text(values[0].expr)
            case ast.JoinedStr(values=parts):
                texts = [
                    self._text(p.value if isinstance(p, ast.FormattedValue) else p) for p in parts
                ]
                return re.sub(r"\*+", "*", "".join(texts))
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                if not any(_is_number(side) for side in (left, right)):
                    return re.sub(r"\*+", "*", self._text(left) + self._text(right))
            case ast.BinOp(left=ast.Constant(value=str(text)), op=ast.Mod()):
                return re.sub(r"\*+", "*", re.sub(r"%[\d.]*[dsi]", "*", text))
            case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)), attr="format")):
                return re.sub(r"\*+", "*", re.sub(r"\{[^{}]*\}", "*", text))
            case ast.Call(func=ast.Name(id="str"), args=[inner]):
                return self._text(inner)
        return "*"

    # Effects --------------------------------------------------------------------------------

    def _effect(self, call: ast.Call, here: _Here) -> None:
        """A call that stands as a statement."""
        match call:
            case ast.Call(func=ast.Name(id="setattr"), args=[owner, name, value]):
                path = _joined(self._path(owner), self._text(name))
                self._set(path, value, here, "setattr", _counted(name, here))
            case ast.Call(func=ast.Attribute(value=owner, attr=attr)):
                self._method_effect(call, owner, attr, here)
            case ast.Call(func=ast.Name()):
                self._inlined(call, here)

    def _method_effect(self, call: ast.Call, owner: ast.expr, attr: str, here: _Here) -> None:
        arguments = [*call.args, *(k.value for k in call.keywords)]
        if attr in {"append", "add"} and len(arguments) == 1:
            self._add(owner, None, arguments[0], here, "append")
        elif attr == "insert" and len(arguments) == 2:
            self._add(owner, "*", arguments[1], here, "append")
        elif attr in {"extend", "update"} and len(arguments) == 1:
            self._extend(owner, arguments[0], here)
        elif attr in {"add_module", "register_module"} and len(arguments) == 2:
            name, value = arguments
            self._add(owner, self._text(name), value, here, "add_module", _counted(name, here))
        elif attr in {"register_parameter", "register_buffer"} and len(arguments) >= 2:
            path = _joined(self._path(owner), self._text(arguments[0]))
            kind = attr.removeprefix("register_")
            self._set(path, arguments[1], here, kind, _counted(arguments[0], here))
        elif attr == "__init__":
            self._constructed(call, owner, here)
        elif self._path(owner) == "" and attr in self._methods:
            self._inlined(call, here)

    def _set(
        self, path: str | None, value: ast.expr, here: _Here, kind: str, counted: Loop | None
    ) -> None:
        if path:
            for made in self._values(value, here, kind):
                self._place(path, made, here, kind, counted)

    def _constructed(self, call: ast.Call, owner: ast.expr, here: _Here) -> None:
        """`super().__init__(...)`: what a container's constructor is given become its elements."""
        cls = self.file.classes.get(self.class_name)
        form = container_form(self.file, cls.bases[0]) if cls and cls.bases else None
        if form is None:
            return
        named = not (isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name))
        root = Made(call, here.statement, "assign", here.steps, here.frame, container=True)
        root.sequences = self._container(form, call.args[named:], call.keywords, here)
        self._place("", root, here, "assign")

    def _add(
        self,
        owner: ast.expr,
        key: str | None,
        value: ast.expr,
        here: _Here,
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
                self._place(_joined(path, key or "*") or "", made, here, kind, counted)

    def _extend(self, owner: ast.expr, value: ast.expr, here: _Here) -> None:
        targets = self._held(owner)
        added = self._sequences(value, here)
        for made in targets:
            assert made.sequences is not None
            made.sequences[:] = [
                Sequence([*old.items, *_under(here.steps, new.items)], old.steps)
                for old in made.sequences
                for new in added
            ]
        path = self._path(owner)
        if path is not None and not targets:
            for item in (i for sequence in added for i in sequence.items):
                for made in item.values:
                    self._place(_joined(path, item.key or "*") or "", made, here, item.kind)

    def _held(self, owner: ast.expr) -> list[Made]:
        """The lists and containers that an expression means here."""
        found: list[Made] = []
        path = self._path(owner)
        if isinstance(owner, ast.Name):
            found = [v for v in self._scope.get(owner.id, []) if v.sequences is not None]
        if not found and path is not None:
            found = [p.value for p in self._paths.get(path, []) if p.value.sequences is not None]
        return found

    # Expressions ----------------------------------------------------------------------------

    def _values(self, expr: ast.expr, here: _Here, kind: str = "assign") -> list[Made]:
        """What an expression makes: one value, or one for each way that its branches go."""
        match expr:
            case ast.IfExp():
                taken = Guard(expr.test, True, here.frame)
                other = Guard(expr.test, False, here.frame)
                return [
                    # A variable's value may come from before the test: it is still under it here.
                    value if guard in value.steps else replace(value, steps=(*value.steps, guard))
                    for guard, side in ((taken, expr.body), (other, expr.orelse))
                    for value in self._values(side, here.under(guard), kind)
                ]
            case ast.BoolOp():
                unsure = here.under(_undecided(expr, here))
                return [v for part in expr.values for v in self._values(part, unsure, kind)]
            case ast.NamedExpr():
                values = self._values(expr.value, here, kind)
                self._store(expr.target, values, expr.value, here)
                return values
            case ast.Name(id=name) if self._scope.get(name):
                return [v for v in self._scope[name] if _compatible(v.steps, here.steps)]
            case ast.Name(id=name):
                role = "argument" if name in _parameters(here.frame.function) else "alias"
                return [self._made(expr, here, role)]
            case ast.Attribute() | ast.Subscript():
                return self._reference(expr, here, kind)
            case ast.Call():
                return [self._call(expr, here, kind)]
            case ast.List() | ast.Tuple() | ast.ListComp() | ast.GeneratorExp():
                return [self._plain(expr, here, kind)]
            case ast.Dict() | ast.DictComp() | ast.BinOp(op=ast.Add() | ast.Mult()):
                return [self._plain(expr, here, kind)]
            case ast.Constant():
                return [self._made(expr, here, kind, constant=True)]
        return [self._made(expr, here, kind)]

    def _made(self, expr: ast.expr, here: _Here, kind: str, constant: bool = False) -> Made:
        return Made(expr, here.statement, kind, here.steps, here.frame, constant=constant)

    def _plain(self, expr: ast.expr, here: _Here, kind: str) -> Made:
        made = self._made(expr, here, kind)
        made.sequences = self._sequences(expr, here)
        return made

    def _reference(self, expr: ast.Attribute | ast.Subscript, here: _Here, kind: str) -> list[Made]:
        path = self._path(expr)
        if path is None:
            role = "factory" if isinstance(expr, ast.Subscript) else "alias"
            return [self._made(expr, here, role)]
        known = [p.value for p in self._paths.get(path, []) if _compatible(p.steps, here.steps)]
        if known:
            return known
        made = self._made(expr, here, "alias")
        made.alias = path
        return [made]

    def _call(self, call: ast.Call, here: _Here, kind: str) -> Made:
        func = call.func
        form = container_form(self.file, func)
        if form is not None:
            made = self._made(call, here, kind)
            made.container = True
            made.sequences = self._container(form, call.args, call.keywords, here)
            return made
        last = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
        if isinstance(func, ast.Attribute) and last in _CHAINED:
            inner = self._values(func.value, here, kind)
            if len(inner) == 1 and (isinstance(inner[0].expr, ast.Call) or inner[0].alias):
                return inner[0]
        if last in _WRAPPERS and call.args:
            made = self._made(call, here, "helper")
            made.inner = self._values(call.args[0], here, kind)
            return made
        if last in {"list", "tuple", "dict", "OrderedDict", "reversed"}:
            return self._plain(call, here, kind)
        if last in {"Parameter", "Buffer"} and kind == "assign":
            return self._made(call, here, last.lower())
        returned = self._inlined(call, here)
        if returned is not None:
            made = self._made(call, here, "helper")
            made.inner = returned
            return made
        return self._made(call, here, "factory" if last in _FACTORIES else kind)

    def _inlined(self, call: ast.Call, here: _Here) -> list[Made] | None:
        """What a call of a method of this class, or of a function in this file, returns."""
        function, bound = self._callee(call.func)
        if function is None or function in self._active or len(self._active) > _MAX_DEPTH:
            return None
        scope: dict[str, list[Made]] = {}
        names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
        if bound and names:
            scope[names.pop(0)] = [self._self(here)]
        given = dict(zip(names, call.args, strict=False))
        given |= {k.arg: k.value for k in call.keywords if k.arg}
        for name, value in given.items():
            if isinstance(value, ast.Starred):
                break
            if isinstance(value, ast.Constant | ast.Call | ast.Name | ast.Attribute | ast.List):
                scope[name] = self._values(value, here)
        frame = Frame(function, call, here.frame)
        return self._enter(function, _Here(frame, here.steps, here.statement), scope)

    def _callee(self, func: ast.expr) -> tuple[ast.FunctionDef | None, bool]:
        """The function of this file that a call reaches; whether its first argument is bound."""
        if isinstance(func, ast.Name):
            return self._functions.get(func.id) or self.file.functions.get(func.id), False
        if isinstance(func, ast.Attribute):
            named_class = isinstance(func.value, ast.Name) and func.value.id == self.class_name
            if self._path(func.value) == "" or named_class:
                method = self._methods.get(func.attr)
                static = method is not None and any(
                    isinstance(d, ast.Name) and d.id == "staticmethod"
                    for d in method.decorator_list
                )
                return method, not static and not named_class
        return None, False

    # Elements -------------------------------------------------------------------------------

    def _container(
        self, form: str, args: list[ast.expr], keywords: list[ast.keyword], here: _Here
    ) -> list[Sequence]:
        """The elements that a module container is made with."""
        if form == "sequential":
            if len(args) == 1 and self._is_dict(args[0]):
                return self._sequences(args[0], here)
            positions = ast.List(list(args), ast.Load())
            return self._sequences(positions, here, "sequential")
        given = args or [k.value for k in keywords if k.arg in {"modules", "values", "parameters"}]
        return self._sequences(given[0], here) if given else [Sequence([], here.steps)]

    def _is_dict(self, expr: ast.expr) -> bool:
        match expr:
            case ast.Dict() | ast.DictComp():
                return True
            case ast.Call(func=ast.Name(id="OrderedDict" | "dict")):
                return True
            case ast.Call(func=ast.Attribute(attr="OrderedDict")):
                return True
            case ast.Name(id=name):
                return any(self._is_dict(v.expr) for v in self._scope.get(name, []))
        return False

    def _sequences(self, expr: ast.expr, here: _Here, kind: str = "list") -> list[Sequence]:
        """The elements of a list or dict expression, one sequence for each way its branches go."""
        match expr:
            case ast.List(elts=elts) | ast.Tuple(elts=elts) | ast.Set(elts=elts):
                return self._elements(elts, here, kind)
            case ast.ListComp(elt=element) | ast.GeneratorExp(elt=element):
                inner = self._turned(expr.generators, here)
                values = self._values(element, inner, "comprehension")
                return [Sequence([Item(None, values, inner.steps, "comprehension")], here.steps)]
            case ast.Dict():
                return self._pairs(list(zip(expr.keys, expr.values, strict=True)), here)
            case ast.DictComp():
                inner = self._turned(expr.generators, here)
                values = self._values(expr.value, inner, "comprehension")
                counted = _counted(expr.key, inner)
                item = Item(self._text(expr.key), values, inner.steps, "comprehension", counted)
                return [Sequence([item], here.steps)]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return [
                    _concatenated(a, b)
                    for a in self._sequences(left, here, kind)
                    for b in self._sequences(right, here, kind)
                ]
            case ast.BinOp(left=left, op=ast.Mult()):
                items = [i for s in self._sequences(left, here) for i in s.items]
                return [Sequence([replace(i, key="*") for i in items], here.steps)]
            case ast.Call():
                return self._called_sequences(expr, here, kind)
        found = [
            sequence
            for value in self._values(expr, here)
            if value.expr is not expr
            for sequence in (value.sequences or _inner_sequences(value))
        ]
        return [replace(s, items=[*s.items]) for s in found] or [Sequence([], here.steps)]

    def _called_sequences(self, call: ast.Call, here: _Here, kind: str) -> list[Sequence]:
        last = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        last = call.func.id if isinstance(call.func, ast.Name) else last
        if last in {"dict", "OrderedDict"}:
            given = [(ast.Constant(k.arg), k.value) for k in call.keywords if k.arg]
            found = self._pairs(list(given), here)
            if not call.args:
                return found
            if isinstance(call.args[0], ast.List | ast.Tuple):
                pairs = [e.elts for e in call.args[0].elts if isinstance(e, ast.Tuple | ast.List)]
                return self._pairs([(p[0], p[1]) for p in pairs if len(p) == 2], here)
            return self._sequences(call.args[0], here, kind)
        if last in {"list", "tuple", "reversed", "filter"} and call.args:
            return self._sequences(call.args[-1], here, kind)
        if last in {"values", "items"} and isinstance(call.func, ast.Attribute):
            return self._sequences(call.func.value, here, kind)
        value = self._call(call, here, kind)
        return (
            value.sequences
            or _inner_sequences(value)
            or [Sequence([Item("*", [value], here.steps, "helper")], here.steps)]
        )

    def _elements(self, elts: list[ast.expr], here: _Here, kind: str) -> list[Sequence]:
        found = [Sequence([], here.steps)]
        for element in elts:
            if isinstance(element, ast.Starred):
                parts = self._sequences(element.value, here)
            elif isinstance(element, ast.Tuple) and len(element.elts) == 2:
                parts = self._pairs([(element.elts[0], element.elts[1])], here)
            else:
                item = Item(None, self._values(element, here, kind), here.steps, kind)
                parts = [Sequence([item], here.steps)]
            found = [_concatenated(a, b) for a in found for b in parts]
        return found

    def _pairs(
        self, pairs: Iterable[tuple[ast.expr | None, ast.expr]], here: _Here
    ) -> list[Sequence]:
        items: list[Item] = []
        for key, value in pairs:
            if key is None:
                items += [i for s in self._sequences(value, here) for i in s.items]
            else:
                values = self._values(value, here, "dict")
                items.append(Item(self._text(key), values, here.steps, "dict"))
        return [Sequence(items, here.steps)]

    def _turned(self, generators: list[ast.comprehension], here: _Here) -> _Here:
        for generator in generators:
            counter = _counter(generator.target, generator.iter) if not generator.ifs else None
            here = here.under(Loop(generator, here.frame, counter))
            self._bind_elements(generator.target, generator.iter, here)
            here = here.under(*(Guard(test, True, here.frame) for test in generator.ifs))
        return here


def container_form(file: SourceFile, expr: ast.expr, depth: int = 0) -> str | None:
    """Which of torch's containers a class is, if any: 'list', 'sequential' or 'dict'.

    A subclass that has no constructor of its own counts as what it is derived from.
    """
    name = file.qualified(expr)
    if name is None:
        return None
    last = name.rpartition(".")[2]
    if name.startswith("torch.nn.") and last in CONTAINERS:
        return CONTAINERS[last]
    cls = file.classes.get(last) if name == f"{file.name}.{last}" else None
    if cls is None or not cls.bases or depth > _MAX_DEPTH or file.method(last, "__init__"):
        return None
    return container_form(file, cls.bases[0], depth + 1)


def _inner_sequences(value: Made) -> list[Sequence]:
    return [s for inner in value.inner for s in inner.sequences or _inner_sequences(inner)]


def _under(steps: tuple[Step, ...], items: list[Item]) -> list[Item]:
    return [replace(i, steps=merged(steps, i.steps)) for i in items]


def _concatenated(first: Sequence, second: Sequence) -> Sequence:
    return Sequence([*first.items, *second.items], common(first.steps, second.steps))


def common(one: tuple[Step, ...], other: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps that both begin with."""
    pairs = itertools.takewhile(lambda pair: pair[0] is pair[1], zip(one, other, strict=False))
    return tuple(step for step, _ in pairs)


def _parameters(function: ast.FunctionDef) -> set[str]:
    given = function.args
    names = {a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    return names | {a.arg for a in (given.vararg, given.kwarg) if a}


def _joined(path: str | None, name: str) -> str | None:
    if path is None:
        return None
    return f"{path}.{name}" if path else name


def _covers(steps: tuple[Step, ...], other: tuple[Step, ...]) -> bool:
    """Whether whatever ran under `other` is always followed by what runs under `steps`."""
    return steps == other[: len(steps)]


def _compatible(made: tuple[Step, ...], used: tuple[Step, ...]) -> bool:
    """Whether one run can pass through both: no test is taken both ways."""
    senses = {g.test: g.sense for g in made if isinstance(g, Guard)}
    return all(senses.get(g.test, g.sense) == g.sense for g in used if isinstance(g, Guard))


def merged(outer: tuple[Step, ...], inner: tuple[Step, ...]) -> tuple[Step, ...]:
    """Both sets of steps, the shared ones once."""
    if _covers(outer, inner):
        return inner
    return (*outer, *(s for s in inner if s not in outer))


def _leaves(body: list[ast.stmt]) -> bool:
    """Whether a block always ends what is around it (one that raises needs no guard after it)."""
    return bool(body) and isinstance(body[-1], ast.Return | ast.Continue | ast.Break)


def _counted(name: ast.expr, here: _Here) -> Loop | None:
    """The loop whose counter is all that varies in a name: `f"layer{i}"`, `str(i)`."""
    nodes = list(ast.walk(name))
    variables = {n.id for n in nodes if isinstance(n, ast.Name)} - {"str"}
    arithmetic = any(isinstance(n, ast.Constant) and not isinstance(n.value, str) for n in nodes)
    loops = [s for s in here.steps if isinstance(s, Loop) and s.value is None]
    if arithmetic or not loops or variables != {loops[-1].counter}:
        return None
    return loops[-1]


def _undecided(node: ast.stmt | ast.expr, here: _Here) -> Guard:
    return Guard(ast.copy_location(ast.Name(UNDECIDED, ast.Load()), node), True, here.frame)


def _case_guard(subject: ast.expr, pattern: ast.pattern, here: _Here) -> Guard:
    match pattern:
        case ast.MatchValue(value=value):
            test = ast.Compare(subject, [ast.Eq()], [value])
        case ast.MatchSingleton(value=value):
            test = ast.Compare(subject, [ast.Is()], [ast.Constant(value)])
        case ast.MatchOr(patterns=patterns) if all(isinstance(p, ast.MatchValue) for p in patterns):
            options = [p.value for p in patterns if isinstance(p, ast.MatchValue)]
            test = ast.Compare(subject, [ast.In()], [ast.Tuple(options, ast.Load())])
        case _:
            return _undecided(subject, here)
    return Guard(ast.fix_missing_locations(ast.copy_location(test, subject)), True, here.frame)


def _constants(iterable: ast.expr) -> list[ast.expr]:
    """The elements of a short literal of constants; none for anything else."""

    def constant(expr: ast.expr) -> bool:
        if isinstance(expr, ast.Tuple | ast.List):
            return any(constant(e) for e in expr.elts)
        return isinstance(expr, ast.Constant)

    if isinstance(iterable, ast.Tuple | ast.List) and len(iterable.elts) <= _MAX_UNROLLED:
        return iterable.elts if all(constant(e) for e in iterable.elts) else []
    return []


def _counter(target: ast.expr, iterable: ast.expr) -> str | None:
    """The variable of a loop that counts its iterations from 0."""
    match target, iterable:
        case ast.Name(id=name), ast.Call(func=ast.Name(id="range"), args=[_]):
            return name
        case ast.Name(id=name), ast.Call(func=ast.Name(id="range"), args=[first, _]):
            return name if _is_zero(first) else None
        case ast.Tuple(elts=[ast.Name(id=name), _]), ast.Call(func=ast.Name(id="enumerate")):
            starts = [*iterable.args[1:], *(k.value for k in iterable.keywords)]
            return name if all(_is_zero(s) for s in starts) else None
        case ast.Tuple(elts=elts), ast.Call(func=ast.Name(id="zip"), args=args):
            counters = (_counter(t, a) for t, a in zip(elts, args, strict=False))
            return next((c for c in counters if c), None)
    return None


def _is_number(expr: ast.expr) -> bool:
    return isinstance(expr, ast.Constant) and isinstance(expr.value, int | float)


def _is_zero(expr: ast.expr) -> bool:
    return isinstance(expr, ast.Constant) and expr.value == 0


def local_assignments(function: ast.FunctionDef, name: str) -> Iterator[ast.stmt]:
    """The statements of a function that bind a local name, in the order of the text."""
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=targets):
                if any(_binds(t, name) for t in targets):
                    yield node
            case ast.AnnAssign(target=target, value=ast.expr()) | ast.AugAssign(target=target):
                if _binds(target, name):
                    yield node
            case ast.For(target=target):
                if _binds(target, name):
                    yield node
            case ast.If() | ast.Expr() | ast.Return():
                if any(
                    isinstance(n, ast.NamedExpr) and n.target.id == name
                    for field_ in ("test", "value")
                    for n in ast.walk(getattr(node, field_, None) or ast.Pass())
                ):
                    yield node


def _binds(target: ast.expr, name: str) -> bool:
    return any(
        isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store)
        for n in ast.walk(target)
    )
