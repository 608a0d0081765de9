"""Finds state that a module sets while it runs, and that recomputation would find changed."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.changes.around_checkpoint import paths_of
from slapo_rewrite.changes.output_files import OutputFiles
from slapo_rewrite.changes.running_methods import running, running_inside
from slapo_rewrite.code.arguments import first_parameter
from slapo_rewrite.code.blocks import statements
from slapo_rewrite.code.dataflow import bound_in, read_in
from slapo_rewrite.code.effects import is_in_place, words_of
from slapo_rewrite.code.subgraphs import MUTATING, SWITCHING, Obstacle, own_nodes, root_of
from slapo_rewrite.code.text import joined_path
from slapo_rewrite.directive import Directive
from slapo_rewrite.hugging_face import KEEPS_TOKENS
from slapo_rewrite.model.held_state import home_of
from slapo_rewrite.model.tree import Node


def carried_over(
    files: OutputFiles, around: Node, node: Node, method: ast.FunctionDef
) -> Obstacle | None:
    """The first statement in a method that would make a second run compute something else.

    A method may set an attribute if all reads come later, or if it caches: it sets the attribute
    under a condition on it, so that the second run finds it set. Buffers are restored.

    Args:
        files: The files.
        around: The checkpointed module.
        node: That module, or one inside it, that runs the method.
        method: A method of `node`, or a function that it calls.
    """
    taken = (inspect.signature(each.cls.forward).parameters for each in (around, node))
    keeps_nothing = any(KEEPS_TOKENS in each for each in taken)  # `use_cache=False` in training
    own = [each for _, each in running(files, node)]
    elsewhere = [each for _, each in running_inside(files, around) if each is not method]
    for statement in statements(method.body) if first_parameter(method) == "self" else ():
        for target, value in _changes(statement):
            paths = _paths(target, method)
            held = [_held(node.live, path) for path in paths]
            if all(each is node.live._buffers for each in held):  # also if `held` is empty
                continue
            if value is not None and _stays(value, paths, method):
                continue
            shown, name = ast.unparse(target), paths[0].rpartition(".")[2]
            if value is None or _is_of_itself(value, paths, method):
                called = {getattr(n.func, "attr", "") for n in _calls(statement)}
                is_method = value is None and all(hasattr(each, "_modules") for each in held)
                if is_method and not any(n in SWITCHING or is_in_place(n) for n in called):
                    continue  # a call of the model's own method, which is checked itself
                if is_method and not called.isdisjoint(SWITCHING):
                    words = f"switches the mode of `{shown}` and of its submodules"
                    return Obstacle(statement, words, "checkpoint modules inside this one")
                words = f"changes `{shown}` in place, and would do so twice"
                return Obstacle(statement, words, "change a copy of it")
            owner = _held(node.live, paths[0].rpartition(".")[0])
            is_theirs = type(owner).__module__.startswith("torch.nn.")
            if keeps_nothing and not is_theirs:
                continue
            others = is_theirs or any(name in words_of(each) for each in elsewhere)
            if (
                (others or _reads(method, name))
                and not _is_set_first(method, name, others)
                and not _is_kept(own, method, statement)
            ):
                words = f"sets `{shown}`, so the second computation may read the value of the first"
                return Obstacle(statement, words, "hand it on as an argument")
    return None


def check_held(
    files: OutputFiles, node: Node, changed: Iterable[tuple[str, str]], cause: Directive
) -> None:
    """Raises if a module reads state that changed while the model ran, without a visible statement.

    `changed` has the state's place, a path below the module or a name in the file, and its name.
    """
    methods = [*running_inside(files, node)]
    shown = {  # `carried_over` checks these
        path.rpartition(".")[2]
        for _, method in methods
        for statement in statements(method.body if first_parameter(method) == "self" else ())
        for target, _ in _changes(statement)
        for path in _paths(target, method)
    }
    space = vars(sys.modules[node.cls.__module__]).items()
    for place, name in sorted(changed):
        last = name.rpartition(".")[2]
        leads = {last, *(word for word, value in space if home_of(value) == place)}
        read = (file.at(method) for file, method in methods if leads & words_of(method))
        at = next(read, None)
        if last not in shown and (at is not None or place in dict(node.live.named_modules())):
            raise errors.Unsupported(
                f"{node.shown} reads `{joined_path(place, name)}`, which changes as the model "
                "runs, and has another value when the backward pass recomputes the module",
                at=at or cause.at,
                cause=cause,
                hint="pass it as an argument, or checkpoint modules that do not read it",
            )


def _changes(statement: ast.stmt) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """The targets that a statement sets, with their new values; None if it changes in place."""
    new = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
    for node in own_nodes(statement):
        match node:
            case ast.Attribute(ctx=ast.Store() | ast.Del()):
                yield node, new
            case ast.Subscript(value=changed, ctx=ast.Store() | ast.Del()):
                yield changed, new
            case ast.Call(func=ast.Attribute(value=changed, attr=name)) if (
                name in MUTATING or is_in_place(name)
            ):
                yield changed, None


def _paths(target: ast.expr, method: ast.FunctionDef) -> tuple[str, ...]:
    """The paths below `self` of a target; () if it is not below `self`."""
    own = (target.attr,) if isinstance(target, ast.Attribute) and root_of(target) == "self" else ()
    found = paths_of(target, method) or own  # `own` for attributes of elements, or of the class
    return tuple(path.removeprefix("__class__.") for path in found)


def _held(live: Any, path: str) -> object:
    """The object at a path; the module's `_buffers` for a buffer, and for anything in one."""
    held = live
    for name in path.replace("*", "0").split(".") if path else ():
        if name in getattr(held, "_buffers", ()):
            return live._buffers
        held = getattr(held, name, None)
    return held


def _stays(value: ast.expr, paths: Sequence[str], method: ast.FunctionDef) -> bool:
    """Whether a value is the attribute's old one: moved by `.to`, kept by a condition, or None."""
    match value:
        case ast.Call(func=ast.Attribute(value=same, attr="to"), args=args, keywords=keywords):
            new = [*args, *(keyword.value for keyword in keywords)]
        case ast.IfExp(
            test=ast.Compare(left=same, ops=[ast.IsNot()], comparators=[ast.Constant(None)]),
            body=inner,
            orelse=ast.Constant(None),
        ) if _paths(same, method) == paths:
            return _stays(inner, paths, method)
        case ast.IfExp(test=ast.Compare(), body=body, orelse=same):
            new = [body]
        case _:
            return False
    return _paths(same, method) == paths and not any(_is_of_itself(n, paths, method) for n in new)


def _is_of_itself(value: ast.expr, paths: Sequence[str], method: ast.FunctionDef) -> bool:
    """Whether an attribute's new value is computed from its old one."""
    read = (n for n in ast.walk(value) if isinstance(n, ast.Attribute))
    return any(set(_paths(n, method)) & set(paths) for n in read)


def _reads(node: ast.AST, name: str) -> bool:
    """Whether code reads an attribute of this name; setting an element of it does not count."""
    nodes = [n for n in ast.walk(node) if isinstance(n, ast.Attribute | ast.Subscript)]
    set_in = [n.value for n in nodes if not isinstance(n.ctx, ast.Load)]
    named = (n for n in nodes if isinstance(n, ast.Attribute) and n.attr == name)
    return any(isinstance(n.ctx, ast.Load) and n not in set_in for n in named)


def _is_set_first(method: ast.FunctionDef, name: str, is_read_elsewhere: bool) -> bool:
    """Whether a method always sets an attribute before anything reads it."""
    for statement in method.body if method.name == "forward" or not is_read_elsewhere else ():
        targets = statement.targets if isinstance(statement, ast.Assign) else ()
        if any(isinstance(t, ast.Attribute) and t.attr == name for t in targets):
            return not _reads(statement, name)
        called = (n.func for n in ast.walk(statement) if isinstance(n, ast.Call))
        if _reads(statement, name) or (
            is_read_elsewhere
            and any(not isinstance(f, ast.Attribute) or paths_of(f, method) for f in called)
        ):
            return False
    return False


def _is_kept(own: Sequence[ast.FunctionDef], method: ast.FunctionDef, statement: ast.stmt) -> bool:
    """Whether a statement caches: it runs under a condition on what it sets, with no other effect.

    This also holds for statements of a method that is only called in such places.
    """
    for guard in (n for n in ast.walk(method) if isinstance(n, ast.If)):
        inside = [*statements(guard.body)]
        if statement in inside and _is_eval(guard.test):
            return True  # eval mode has no recomputation
        if statement not in inside or guard.orelse:
            continue
        called = {getattr(n.func, "attr", "") for s in inside for n in _calls(s)}
        further = [s for each in own if each.name in called for s in statements(each.body)]
        changed = (target for s in (*inside, *further) for target, _ in _changes(s))
        names = {target.attr for target in changed if isinstance(target, ast.Attribute)}
        bound = {name for s in inside for name in bound_in(*own_nodes(s))}
        outside = (s for s in statements(method.body) if s not in (*inside, guard))
        if (
            not names.isdisjoint(words_of(guard.test))
            and not any(isinstance(s, ast.Return) for s in inside)
            and bound.isdisjoint(name for s in outside for name in read_in(*own_nodes(s)))
        ):
            return True
    places = [
        (each, s)
        for each in own
        for s in statements(each.body)
        if any(getattr(n.func, "attr", "") == method.name for n in _calls(s))
    ]
    return bool(places) and all(each is not method and _is_kept(own, each, s) for each, s in places)


def _is_eval(test: ast.expr) -> bool:
    """Whether a condition holds in eval mode only."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=ast.Attribute(ast.Name("self"), "training")):
            return True
        case ast.BoolOp(op=ast.And(), values=values):
            return any(map(_is_eval, values))
    return False


def _calls(statement: ast.stmt) -> list[ast.Call]:
    return [node for node in own_nodes(statement) if isinstance(node, ast.Call)]
