"""What an expression in a constructor makes: modules, and the lists and dicts that hold them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import replace

from slapo_rewrite.code.arguments import Signature, first_parameter, given_by, parameters
from slapo_rewrite.code.dataflow import names_in
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.names import is_name
from slapo_rewrite.code.syntax import counter_of, is_number
from slapo_rewrite.model.constructor_values import (
    Frame,
    Guard,
    Here,
    Item,
    Loop,
    Made,
    Placed,
    Sequence,
    compatible,
    concatenated,
    counted_by,
    inner_sequences,
    joined,
    undecided,
)

CONTAINERS = {
    "ModuleList": "list", "ParameterList": "list", "Sequential": "sequential", "ModuleDict": "dict",
    "ParameterDict": "dict",
}  # fmt: skip
# Methods that return the module they are called on; functions that return the module they get.
_CHAINED = {"to", "eval", "train", "requires_grad_", "half", "float", "double", "bfloat16", "cuda"}
_CHAINED |= {"cpu", "apply", "type", "share_memory", "to_empty"}
_WRAPPERS = {"weight_norm", "spectral_norm", "deepcopy", "copy", "script", "compile", "orthogonal"}
_WRAPPERS |= {"checkpoint_wrapper", "remove_weight_norm", "maybe_compile"}
_FACTORIES = {"from_config", "_from_config", "from_pretrained", "load_backbone", "create_model"}
_MAX_DEPTH = 4


class Expressions:
    """What expressions make, where local variables and attributes hold what they hold so far."""

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

    def _enter(
        self, function: ast.FunctionDef, here: Here, scope: dict[str, list[Made]]
    ) -> list[Made]:
        """Walks a function's body; what it returns."""
        raise NotImplementedError

    def _store(
        self, target: ast.expr, values: list[Made], source: ast.expr, here: Here, kind: str = ""
    ) -> None:
        """Gives a value to an assignment's target."""
        raise NotImplementedError

    def _path(self, expr: ast.expr) -> str | None:
        """The attribute path, from the object under construction, that an expression means."""
        match expr:
            case ast.Name(id=name):
                aliases = {v.alias for v in self._scope.get(name, [])}
                return aliases.pop() if len(aliases) == 1 else None
            case ast.Attribute():
                return joined(self._path(expr.value), expr.attr)
            case ast.Subscript():
                return joined(self._path(expr.value), self._text(expr.slice))
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, name, *_]):
                return joined(self._path(owner), self._text(name))
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
                if not any(is_number(side) for side in (left, right)):
                    return re.sub(r"\*+", "*", self._text(left) + self._text(right))
            case ast.BinOp(left=ast.Constant(value=str(text)), op=ast.Mod()):
                return re.sub(r"\*+", "*", re.sub(r"%[\d.]*[dsi]", "*", text))
            case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)), attr="format")):
                return re.sub(r"\*+", "*", re.sub(r"\{[^{}]*\}", "*", text))
            case ast.Call(func=ast.Name(id="str"), args=[inner]):
                return self._text(inner)
        return "*"

    def _held(self, owner: ast.expr) -> list[Made]:
        """The lists and containers that an expression means here."""
        found: list[Made] = []
        path = self._path(owner)
        if isinstance(owner, ast.Name):
            found = [v for v in self._scope.get(owner.id, []) if v.sequences is not None]
        if not found and path is not None:
            found = [p.value for p in self._paths.get(path, []) if p.value.sequences is not None]
        return found

    def _values(self, expr: ast.expr, here: Here, kind: str = "assign") -> list[Made]:
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
                unsure = here.under(undecided(expr, here))
                return [v for part in expr.values for v in self._values(part, unsure, kind)]
            case ast.NamedExpr():
                values = self._values(expr.value, here, kind)
                self._store(expr.target, values, expr.value, here)
                return values
            case ast.Name(id=name) if self._scope.get(name):
                return [v for v in self._scope[name] if compatible(v.steps, here.steps)]
            case ast.Name(id=name):
                role = "argument" if name in parameters(here.frame.function) else "alias"
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

    def _made(self, expr: ast.expr, here: Here, kind: str, constant: bool = False) -> Made:
        return Made(expr, here.statement, kind, here.steps, here.frame, constant=constant)

    def _plain(self, expr: ast.expr, here: Here, kind: str) -> Made:
        made = self._made(expr, here, kind)
        made.sequences = self._sequences(expr, here)
        return made

    def _reference(self, expr: ast.Attribute | ast.Subscript, here: Here, kind: str) -> list[Made]:
        path = self._path(expr)
        if path is None:
            role = "factory" if isinstance(expr, ast.Subscript) else "alias"
            return [self._made(expr, here, role)]
        known = [p.value for p in self._paths.get(path, []) if compatible(p.steps, here.steps)]
        if known:
            return known
        made = self._made(expr, here, "alias")
        made.alias = path
        return [made]

    def _call(self, call: ast.Call, here: Here, kind: str) -> Made:
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

    def _inlined(self, call: ast.Call, here: Here) -> list[Made] | None:
        """What a call of a method of this class, or of a function in this file, returns."""
        function, bound = self._callee(call.func)
        if function is None or function in self._active or len(self._active) > _MAX_DEPTH:
            return None
        scope: dict[str, list[Made]] = {}
        me = first_parameter(function)
        if bound and me is not None:
            scope[me] = [self._self(here)]
        given = Signature.of(function, bound).bind(given_by(call)).given
        for name, value in given.items():
            if isinstance(value, ast.Constant | ast.Call | ast.Name | ast.Attribute | ast.List):
                scope[name] = self._values(value, here)
        frame = Frame(function, call, here.frame)
        return self._enter(function, Here(frame, here.steps, here.statement), scope)

    def _callee(self, func: ast.expr) -> tuple[ast.FunctionDef | None, bool]:
        """The function of this file that a call reaches; whether its first argument is bound."""
        if isinstance(func, ast.Name):
            return self._functions.get(func.id) or self.file.functions.get(func.id), False
        if isinstance(func, ast.Attribute):
            named_class = is_name(func.value, self.class_name)
            if self._path(func.value) == "" or named_class:
                method = self._methods.get(func.attr)
                static = method is not None and any(
                    is_name(d, "staticmethod") for d in method.decorator_list
                )
                return method, not static and not named_class
        return None, False

    def _container(
        self, form: str, args: list[ast.expr], keywords: list[ast.keyword], here: Here
    ) -> list[Sequence]:
        """The elements that a module container is made with."""
        given = args or [k.value for k in keywords if k.arg in {"modules", "values", "parameters"}]
        match form, given:
            case ("sequential", [ast.Starred(value=ast.Name() as all_of_them)]) | (
                "list",
                [ast.Name() as all_of_them],
            ):
                values = self._values(all_of_them, here)
                if [v.kind for v in values] == ["argument"]:  # who calls the constructor made them
                    return [Sequence([Item("*", values, here.steps, "argument")], here.steps)]
        if form == "sequential":
            if len(args) == 1 and self._is_dict(args[0]):
                return self._sequences(args[0], here)
            positions = ast.List(list(args), ast.Load())
            return self._sequences(positions, here, "sequential")
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

    def _sequences(self, expr: ast.expr, here: Here, kind: str = "list") -> list[Sequence]:
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
                counted = counted_by(expr.key, inner)
                item = Item(self._text(expr.key), values, inner.steps, "comprehension", counted)
                return [Sequence([item], here.steps)]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return [
                    concatenated(a, b)
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
            for sequence in (value.sequences or inner_sequences(value))
        ]
        return [replace(s, items=[*s.items]) for s in found] or [Sequence([], here.steps)]

    def _called_sequences(self, call: ast.Call, here: Here, kind: str) -> list[Sequence]:
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
            or inner_sequences(value)
            or [Sequence([Item("*", [value], here.steps, "helper")], here.steps)]
        )

    def _elements(self, elts: list[ast.expr], here: Here, kind: str) -> list[Sequence]:
        found = [Sequence([], here.steps)]
        for element in elts:
            if isinstance(element, ast.Starred):
                parts = self._sequences(element.value, here)
            elif isinstance(element, ast.Tuple) and len(element.elts) == 2:
                parts = self._pairs([(element.elts[0], element.elts[1])], here)
            else:
                item = Item(None, self._values(element, here, kind), here.steps, kind)
                parts = [Sequence([item], here.steps)]
            found = [concatenated(a, b) for a in found for b in parts]
        return found

    def _pairs(
        self, pairs: Iterable[tuple[ast.expr | None, ast.expr]], here: Here
    ) -> list[Sequence]:
        items: list[Item] = []
        for key, value in pairs:
            if key is None:
                items += [i for s in self._sequences(value, here) for i in s.items]
            else:
                values = self._values(value, here, "dict")
                items.append(Item(self._text(key), values, here.steps, "dict"))
        return [Sequence(items, here.steps)]

    def _turned(self, generators: list[ast.comprehension], here: Here) -> Here:
        for generator in generators:
            counter = counter_of(generator.target, generator.iter) if not generator.ifs else None
            here = here.under(Loop(generator, here.frame, counter))
            self._bind_elements(generator.target, generator.iter, here)
            here = here.under(*(Guard(test, True, here.frame) for test in generator.ifs))
        return here

    def _bind_elements(self, target: ast.expr, iterable: ast.expr, here: Here) -> None:
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
            self._scope[target.id] = [made := self._made(iterable, here, "alias")]
            made.alias = joined(path, "*")

    def _unbind(self, target: ast.expr) -> None:
        for name in names_in(target):
            self._scope.pop(name, None)

    def _self(self, here: Here) -> Made:
        name = ast.copy_location(ast.Name("self", ast.Load()), here.frame.function)
        return Made(name, here.statement, "alias", (), here.frame, alias="")


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
