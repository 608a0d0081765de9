"""Writes calls: the `forward` of a module on the way to a cut is written where it is called."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.code.arguments import Signature, first_parameter, values_given
from slapo_rewrite.code.dataflow import body_of, bound_in, names_in
from slapo_rewrite.code.evaluate import NONE, Constant, KnownKwargs, KnownObject, Unknown, Worth
from slapo_rewrite.code.liveness import live_after, local_names
from slapo_rewrite.code.names import is_name
from slapo_rewrite.code.text import accessor
from slapo_rewrite.stages.flat import Line, Result, Scope
from slapo_rewrite.stages.flat_expressions import Expressions, Method
from slapo_rewrite.stages.function_syntax import (
    is_default,
    keyword_name,
    positional_name,
    signature_of,
    statement_of,
)
from slapo_rewrite.stages.written_text import comment_after, enclosed, respelled

# Keyword arguments that decorators take for themselves: what a result is wrapped in.
FOR_DECORATORS = {"return_dict"}


class Calls(Expressions):
    """Writes expressions with calls."""

    @abstractmethod
    def block(self, body: Sequence[ast.stmt], scope: Scope) -> Result | None:
        """Writes statements; gives what they return, where they do."""

    @abstractmethod
    def result(self, node: ast.expr, scope: Scope) -> Result:
        """An expression's text, and what is known of it."""

    def call(self, node: ast.Call, scope: Scope) -> str | None:
        """A call without the arguments that it has anyway; the text of a module written out."""
        if (got := scope.names.module_got(node)) is not None:
            return accessor(next(n for n, m in self.model.named_modules() if m is got))
        match node.func:
            case ast.Attribute(value=ast.Name(id=name), attr="get" | "pop"):
                extra = scope.names.values.get(name)
                if isinstance(extra, KnownKwargs) and isinstance(node.args[0], ast.Constant):
                    key = str(node.args[0].value)
                    if key in extra.texts:
                        return self.current(extra, scope, node)[key]
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
                    for name, text in self.current(value, scope, keyword.value).items()
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
        """The text of an element of what a module that is written out gives."""
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
        """What is known of what a module gives, from the `forward` that makes it."""
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
        """The function or module that is called, where it is known."""
        if isinstance(node.func, ast.Name) and node.func.id in scope.elements:
            return scope.elements[node.func.id]
        steps = scope.names.chain(node.func)
        if steps is not None:
            try:
                return scope.names.object_at(steps)
            except AttributeError:
                return None
        return scope.names.global_at(node.func)

    def callee(self, node: ast.Call, scope: Scope) -> tuple[Method, str] | None:
        """What is called and is to be written out, and how the result spells its module."""
        if (method := self.base_method(node, scope)) is not None:
            return method, scope.prefix
        steps = scope.names.chain(node.func)
        if not steps:
            return None
        path = scope.names.path_of(steps)
        try:
            found = scope.names.object_at(steps)
        except AttributeError:
            return None
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
        """What `super().forward(...)` calls, where that leads to a cut."""
        if "super" not in names_in(node.func):
            return None
        names = scope.names
        home = next(f for f in self.files.known() if f.file is scope.file)
        here = Method(names.live, names.path, home, scope.function)
        bases = (m for call, m in self.base_methods(here) if call is node)
        return next((m for m in bases if self.leads_to_cut(m, set())), None)

    def base_methods(self, method: Method) -> Iterator[tuple[ast.Call, Method]]:
        """The calls of a method by `super()`, each with the method of a base class."""
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
        """A method of the same module that leads to a cut, or that is shorter when written out."""
        try:
            method = self.method_of(scope.names.live, scope.names.path, name)
        except errors.CannotCut:
            return None
        if not method.function.decorator_list and self.leads_to_cut(method, set()):
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
        """Whether a method names what is cut or what holds it, or calls one that does."""
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
        """The method of a module, as it stands in the file that defines it.

        Where a class of the module is given, it is that of one of the bases behind it.
        """
        classes = type(module).__mro__
        classes = classes[classes.index(behind) + 1 :] if behind is not None else classes
        cls = next((c for c in classes if name in vars(c)), type(module))
        home = self.files.of(cls)
        function = home.file.method(cls.__name__, name) if home is not None else None
        if home is not None and function is not None:
            return Method(module, path, home, function)
        raise errors.CannotCut(
            f"the `{name}` of `{path or 's'}` ({type(module).__name__}) stands in no file of a "
            "model, so that it cannot be cut",
            at=self.also[0] if self.also else None,
            hint=f"write the class into {self.files.main.file.path.name}, or cut elsewhere",
        )

    # Writing a function where it is called ------------------------------------------------------

    def inlined(self, node: ast.Call, method: Method, prefix: str, scope: Scope) -> Result:
        """Writes a function's statements; gives what it returns."""
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
                    f"the arguments of `{path}` change places", scope, node, "name them apart"
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
        """What each parameter of a method is given by a call."""
        function = method.function
        if any(isinstance(a, ast.Starred) for a in node.args) or function.args.vararg:
            raise self.refused("a call with `*` cannot be written out", scope, node)
        arguments = [("", self.result(value, scope)) for value in node.args]
        for keyword in node.keywords:
            if keyword.arg is None:
                extra = scope.names.value(keyword.value)
                if not isinstance(extra, KnownKwargs):
                    raise self.refused("what `**` stands for here is not known", scope, node)
                given_texts = self.current(extra, scope, keyword.value)
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
        """The names of the result that the caller may read after a call."""
        statement = statement_of(scope.function, node)
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


def elsewhere(value: Worth) -> Worth:
    """What is known of a value in the method of another module."""
    return replace(value, steps=()) if isinstance(value, Unknown) else value
