"""Calls as operations: every spelling of an operation gives the same value."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

from slapo_rewrite.code.effects import is_in_place, writes
from slapo_rewrite.code.evaluate import Constant
from slapo_rewrite.code.facts import Function, Property, Submodule
from slapo_rewrite.code.file import SourceFile, read_once
from slapo_rewrite.code.names import is_name
from slapo_rewrite.code.text import joined_path
from slapo_rewrite.patterns.canonical_ops import Operation, by_module, draws, draws_by_name
from slapo_rewrite.patterns.interprocedural import Called, Through
from slapo_rewrite.patterns.known_ops import Given, numbered
from slapo_rewrite.patterns.value_graph import Exit, Value, equal

# Where rules are, whose functions their patterns may share.
RULES = "slapo_rewrite.rules."

# Functions that compute from numbers, or look at a value without keeping it.
_PLAIN = {"len", "int", "float", "bool", "str", "isinstance", "hasattr", "range", "min", "max"}
_PLAIN |= {"tuple", "list", "type", "abs", "sum", "round", "enumerate", "zip", "getattr"}


@dataclass(frozen=True)
class Callee:
    """What a call calls; one of these."""

    function: str = ""  # the dotted name of a function
    options: tuple[tuple[str, object], ...] = ()  # arguments that it already has
    method: str = ""  # the name of a method of `on`, or of the module at `path` where `on` is None
    on: Value | None = None  # the value whose method it is
    path: str = ""  # the path of a submodule
    module: Submodule | None = None  # that submodule, or a class whose new instance is called
    value: Value | None = None  # anything else


class Calls(Through):
    """Makes values of calls."""

    # What is called ---------------------------------------------------------------------------

    def call(self, node: ast.Call) -> Value:
        """What a call gives."""
        callee = self._callee(node.func)
        given = [("*" if isinstance(a, ast.Starred) else "", self.expr(a)) for a in node.args]
        given += [(k.arg or "**", self.expr(k.value)) for k in node.keywords]
        if callee.function == "builtins.getattr" and len(given) == 2:
            found = self._attribute_of(given[0][1], given[1][1].literal, node)
            if found is not None:
                return found
        return self.called(callee, given, node)

    def _callee(self, func: ast.expr) -> Callee:
        if not isinstance(func, ast.Attribute):
            return self.callee_of(self.expr(func))
        on = self.expr(func.value)
        if on.operation == "name":
            return Callee(function=f"{on.literal}.{func.attr}")
        if on.operation in ("self", "attribute"):
            path = joined(on, func.attr)
            if f"self.{path}" in self.scope:
                return self.callee_of(self.scope[f"self.{path}"])
            held = self._held(path)
            if held is not None:
                return held
            if on.operation == "self":
                return Callee(method=func.attr, path=str(on.literal))
        return Callee(method=func.attr, on=on)

    def callee_of(self, value: Value) -> Callee:
        """What is called where a value is."""
        if value.operation == "name":
            return Callee(function=str(value.literal))
        if value.operation == "attribute":
            return self._held(str(value.literal)) or Callee(value=value)
        return Callee(value=value)

    def _held(self, path: str) -> Callee | None:
        """The submodule or function that an attribute holds."""
        match self.facts.look(path):
            case Submodule() as module:
                return Callee(path=path, module=module)
            case Function(method=method) if method:
                return Callee(method=method, path=path.rpartition(".")[0])
            case Function(name=name, options=options):
                return Callee(function=name, options=options)
        return None

    def _attribute_of(self, value: Value, name: object, node: ast.AST) -> Value | None:
        if value.operation not in ("self", "attribute") or not isinstance(name, str):
            return None
        return self.load_attribute(joined(value, name), node)

    def load_attribute(self, path: str, node: ast.AST) -> Value:
        """What an attribute of the module holds."""
        if f"self.{path}" in self.scope:
            return self.scope[f"self.{path}"]
        if path.rpartition(".")[2] == "training":
            return self.leaf("training", None, node, number=True, path=path)
        fact = self.facts.look(path)
        if self.pattern and isinstance(fact, Constant):
            return self.constant(fact.value, node)
        if isinstance(fact, Property):
            return self.make("property", [], node, literal=path, pure=False)
        if isinstance(fact, Submodule | Function):  # it is to be called, in a pattern as well
            return self.leaf("attribute", path, node)
        return self.attribute(path, node, isinstance(fact, Constant))

    def called(self, callee: Callee, given: Given, node: ast.AST) -> Value:
        """What a call of this gives."""
        given = [*given, *((n, self.constant(v, node)) for n, v in callee.options)]
        if callee.module is not None:
            return self._module(callee.path, callee.module, given, node)
        if callee.function:
            return self._function(callee.function, given, node)
        if callee.on is not None:
            return self._method(callee.method, callee.on, given, node)
        if callee.method:
            return self._own_method(callee.path, callee.method, given, node)
        assert callee.value is not None
        if callee.value.operation.startswith("new "):
            return self._instance(callee.value, given, node)
        if callee.value.operation == "opaque" and writes(callee.value.node):
            self.overwrite(callee.value, node)
        arguments = [("function", callee.value), *numbered(given)]
        return self.make("call", arguments, node, random=True, pure=False)

    # Functions and methods ----------------------------------------------------------------------

    def _function(self, name: str, given: Given, node: ast.AST) -> Value:
        if name.endswith(".call_module") and name.startswith("slapo_rewrite"):
            return self.make("call_module", numbered(given), node, pure=False)
        found = self.named_operation(name, given, node)
        if found is not None:
            return found
        if name == "builtins.setattr" and len(given) == 3 and given[0][1].operation == "self":
            self.hold(f"self.{joined(given[0][1], str(given[1][1].literal))}", given[2][1])
        if name.startswith("torch.") and name.rpartition(".")[2].startswith("set_"):
            self.graph.exits.append(Exit(node, self.next(), total=True))
        if name in by_module():
            return self.make(f"new {name}", numbered(given), node)
        home, _, last = name.rpartition(".")
        file = self._defining(home)
        if file is not None and last in file.functions:
            function = file.functions[last]
            value = self.make(
                f"call {name}",
                numbered(given),
                node,
                random=draws(function, file.functions),
                pure=False,
            )
            self.look_into(Called(value, file, function, given))
            return value
        if home in ("torch", "operator", "torch.Tensor"):
            return self._unlisted(last, given, node, pure=True)
        plain = home == "math" or (home == "builtins" and last in _PLAIN)
        if plain and all(v.operation == "constant" for _, v in given):
            folded = self.folded(name, [v for _, v in given], node)
            if folded is not None:
                return folded
        plain = plain or home == "torch.nn.functional"
        random = draws_by_name(last) if plain else True
        number = plain and home in ("math", "builtins")
        value = self.make(
            f"call {name}", numbered(given), node, random=random, pure=plain, number=number
        )
        self._written(value, given, node)
        return value

    def _defining(self, home: str) -> SourceFile | None:
        """The file of a module whose functions are looked through: for patterns, rules' as well."""
        if home == self.file.name:
            return self.file
        return imported_file(home) if self.pattern and home.startswith(RULES) else None

    def _method(self, name: str, on: Value, given: Given, node: ast.AST) -> Value:
        given = [("", on), *given]
        if is_in_place(name):
            value = self._operation(name.rstrip("_"), given, node, overwrites=on)
            return value or self._unlisted(name, given, node, overwrites=on)
        return self._operation(name, given, node) or self._unlisted(name, given, node)

    def _unlisted(
        self,
        name: str,
        given: Given,
        node: ast.AST,
        overwrites: Value | None = None,
        pure: bool = False,
    ) -> Value:
        """An operation that is known by its name alone; as a method, whose it is is not known."""
        random = draws_by_name(name)
        value = self.make(
            name,
            numbered(given),
            node,
            random=random,
            pure=pure and not random,
            overwrites=overwrites,
        )
        if overwrites is not None:
            self.overwrite(overwrites, node)
        self._written(value, given, node)
        return value

    def _written(self, value: Value, given: Given, node: ast.AST) -> None:
        """Notes what a call writes into: its `out`, or its first operand if told `inplace`."""
        for name, argument in given:
            if name == "out":
                self.overwrite(argument, node)
            if name == "inplace" and argument.literal is not False:
                value.overwrites = given[0][1]
                self.overwrite(given[0][1], node)

    # Methods of the module, submodules ----------------------------------------------------------

    def _own_method(self, path: str, name: str, given: Given, node: ast.AST) -> Value:
        computed = self.facts.look(joined_path(path, name)) == Property()
        found = None if computed else self.facts.method(path, name)
        random = found is None or draws(found[1], found[0].functions)
        value = self.make(f"call self.{name}", numbered(given), node, random=random, pure=False)
        if found is not None:
            marks = found[1].decorator_list
            static = any(is_name(d, "staticmethod") for d in marks)
            owner = None if static else path
            self.look_into(Called(value, *found, given, owner))
        return value

    def _module(self, path: str, module: Submodule, given: Given, node: ast.AST) -> Value:
        if module.regex is not None:
            regex = self.constant(module.regex, node)
            return self.make("call_module", numbered([("", regex), *given]), node, pure=False)
        known = by_module().get(module.cls)
        if known is not None and not all(self._is(path, *each) for each in known.only):
            known = None
        inputs = self._inputs(known, given, node) if known is not None else None
        if known is not None and inputs is not None:
            for name, default in known.parameters[known.inputs :]:
                inputs[name] = self._option(path, known, name, default, node)
            return self.operation(known, inputs, node, called=path, given=given)
        own = self.attribute(path, node)
        forward = self.facts.method(path, "forward") if module.plain else None
        value = self.make(
            f"module {module.cls}",
            [("module", own), *numbered(given)],
            node,
            random=module.random,
            pure=False,
            called=path,
            given=tuple(given),
        )
        if module.cls == "torch.nn.Identity" and len(given) == 1:
            value.look_through = lambda: given[0][1]
        elif module.cls == "torch.nn.Sequential" and len(given) == 1:
            value.look_through = lambda: self._inner(value, self.file).chain(
                path, module, given[0][1], node
            )
        elif forward is not None:
            value.stateful = not module.stateless
            own_alone = module.cls.startswith("torch.nn.")  # those write to their own buffers
            self.look_into(Called(value, *forward, given, path), effects=not own_alone)
        return value

    def _inputs(self, known: Operation, given: Given, node: ast.AST) -> dict[str, Value] | None:
        """What a call of a module of `torch.nn` is given; None where that is not what it takes."""
        taken = Operation(known.name, known.parameters[: known.inputs])
        return self.bound(taken, given, node)

    def _is(self, path: str, name: str, value: object) -> bool:
        """Whether an attribute of a module, where it has it, has a certain value."""
        fact = self.facts.look(f"{path}.{name}")
        return fact is None or (isinstance(fact, Constant) and equal(fact.value, value))

    def _option(
        self, path: str, known: Operation, name: str, default: object, node: ast.AST
    ) -> Value:
        """What a module of `torch.nn` gives for a parameter of its operation."""
        if name == "training":
            return self.leaf("training", None, node, number=True, path=f"{path}.training")
        fact = self.facts.look(f"{path}.{name}")
        if name in known.tensors and not isinstance(fact, Constant):
            return self.attribute(f"{path}.{name}", node)
        if self.pattern and name in known.free:
            return self.wildcard(f"{path}.{name}", node)
        if fact is None:  # torch's modules do not have every option of their operation
            return self.constant(default, node)
        if not isinstance(fact, Constant):
            return self.attribute(f"{path}.{name}", node)
        return self.leaf("constant", fact.value, node, number=True, path=f"{path}.{name}")

    def chain(self, path: str, module: Submodule, value: Value, node: ast.AST) -> Value:
        """The modules of a `Sequential`, called one after the other."""
        for name in module.children:
            inner = joined_path(path, name)
            fact = self.facts.look(inner)
            if isinstance(fact, Submodule):
                place = self.facts.place(inner)
                value = self._module(inner, fact, [("", value)], place[1] if place else node)
        return value

    def _instance(self, new: Value, given: Given, node: ast.AST) -> Value:
        """`nn.GELU()(x)`: a module that is made only to be called, as it is made."""
        known = by_module()[new.operation.removeprefix("new ")]
        options = [p for p in known.parameters[known.inputs :] if p[0] != "training"]
        maker = Operation(known.name, tuple(options))
        made = [("" if key.isdecimal() else key, value) for key, value in new.arguments]
        arguments = None if known.tensors else self.bound(maker, made, node)
        inputs = self._inputs(known, given, node)
        altered = any(mutation.target is new for mutation in self.graph.mutations)
        if altered or arguments is None or inputs is None:
            return self.make("call", [("function", new), *numbered(given)], node, pure=False)
        if "training" in known.names:
            arguments["training"] = self.constant(True, node)  # as every new module
        arguments |= inputs
        ordered = {name: arguments[name] for name in known.names}
        return self.operation(known, ordered, node)


def imported_file(name: str) -> SourceFile | None:
    """The file of a module that is imported; None where it has none."""
    path = getattr(sys.modules.get(name), "__file__", None)
    return read_once(Path(path), name) if path else None


def joined(value: Value, name: str) -> str:
    """The path of an attribute of the module, or of an attribute of it."""
    return joined_path(str(value.literal or ""), name)
