"""What modules around one that is computed again may change of what it reads, in between."""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterator

from slapo_rewrite import errors
from slapo_rewrite.changes.output_files import OutputFiles
from slapo_rewrite.changes.running_methods import changed_by, running, running_inside
from slapo_rewrite.code.dataflow import bound_in, read_in
from slapo_rewrite.code.effects import is_in_place, stored, words_of
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.handed import Handed
from slapo_rewrite.code.liveness import local_names
from slapo_rewrite.code.names import is_name, module_paths
from slapo_rewrite.code.subgraphs import changes_of_file
from slapo_rewrite.code.text import with_wildcards
from slapo_rewrite.directive import Causes, Directive
from slapo_rewrite.model.tree import Node

# What calls a module with other weights, or differentiates it, which is over in the backward pass.
TRANSFORMS = (
    "torch.func.",
    "torch.vmap",
    "torch.nn.utils.stateless.",
    "torch.autograd.functional.",
)
OVER_MODULES = ("modules", "children", "named_modules", "named_children")
DEEPEST = 12  # modules in one another, of which any may be meant
# What changes a module, beside methods whose names end with an underscore.
CHANGING = ("load_state_dict", "apply", "setattr", "delattr", "vars")
CALLS = ("forward", "__call__", "__init__")


def check_transformed(
    files: OutputFiles, node: Node, caches: Collection[str], cause: Directive
) -> None:
    """Refuses a module that it or those around it call with other weights, or differentiate.

    Args:
        files: The files.
        node: The module.
        caches: What it is given and does not get in training, by name.
        cause: Who asks.

    Raises:
        Unsupported: They may.
    """
    inner: Node | None = None
    for outer in node.outwards():
        for file, function in running(files, outer):
            for call, name in transforms(file, function):
                if _may_take(call, inner):
                    raise errors.Unsupported(
                        f"`{name}` may call {node.shown}: what it changes is no longer so "
                        "in the backward pass, where that is computed again",
                        at=file.at(call),
                        cause=cause,
                        hint="checkpoint modules that it does not call",
                    )
            if outer is not node:
                _refuse_set(files, file, function, node, outer, cause)
                _refuse_global(files, file, function, node, cause)
        if outer is not node:
            _refuse_changed(files, node, outer, caches, cause)
        inner = outer


def _refuse_set(
    files: OutputFiles,
    file: SourceFile,
    function: ast.FunctionDef,
    node: Node,
    outer: Node,
    cause: Directive,
) -> None:
    """Refuses what a module around sets or changes, which may be other by then."""
    relative = with_wildcards(outer.below(node.path))
    for each in ast.walk(function):
        match each:
            case ast.Attribute(value=owner, attr=name, ctx=ast.Store() | ast.Del()) if _is_shared(
                owner, file, function, node, outer
            ) and any(name in words_of(method) for _, method in running_inside(files, node)):
                words = f"`{ast.unparse(each)}` is set while the model runs, and may be another by "
                words += f"the backward pass, where {node.shown} is computed again and reads it"
                raise _not_the_same(file, each, words, cause)
            case (
                ast.Attribute(value=owner, ctx=ast.Store() | ast.Del())
                | ast.Subscript(value=owner, ctx=ast.Store() | ast.Del())
            ):
                words = "is set while the model runs, and may be another"
            case (
                ast.Call(func=ast.Attribute(value=owner, attr=name))
                | ast.Call(func=ast.Name(id=name), args=[owner, *_])
            ) if _is_changing(files, node, name):
                words = "changes what may be other"
            case _:
                continue
        if any(_leads_to(relative, path) for path in _paths(owner, function)):
            words = f"`{ast.unparse(each)}` {words} by the backward pass, where {node.shown} is "
            raise _not_the_same(file, each, f"{words}computed again", cause)


def _is_shared(
    owner: ast.expr, file: SourceFile, function: ast.FunctionDef, node: Node, outer: Node
) -> bool:
    """Whether a module and one around may share what has an attribute: a class, a configuration."""
    match owner:
        case ast.Call(func=ast.Name(id="type")) | ast.Attribute(attr="__class__"):
            return True
        case ast.Name(id=name) if name in file.classes:
            return True
    inside = {*node.live.modules()}
    apart = {name for name, child in outer.children.items() if child.live not in inside}
    first = {path.partition(".")[0] for path in module_paths(owner, function)}
    return bool(first - {"", *apart})


def _refuse_global(
    files: OutputFiles, file: SourceFile, function: ast.FunctionDef, node: Node, cause: Directive
) -> None:
    """Refuses what a module around changes of what the file itself holds, and the module reads."""
    changed = {name for name, _, _ in changes_of_file(file, function, function.body)}
    if not changed:
        return
    for at, method in running_inside(files, node):
        if at is file and (read := sorted(changed & read_in(method))):
            words = f"`{function.name}` changes `{read[0]}`, which may be another by the backward "
            words += f"pass, where {node.shown} is computed again and reads it"
            raise _not_the_same(file, function, words, cause)


def _not_the_same(
    file: SourceFile, at: ast.AST, words: str, cause: Directive
) -> errors.RewriteError:
    return errors.Unsupported(
        words,
        at=file.at(at),
        cause=cause,
        hint="hand it to the module as an argument, or checkpoint modules beside it",
    )


def _is_changing(files: OutputFiles, node: Node, name: str) -> bool:
    """Whether a call by this name changes a module: by what it is called, or what it stores."""
    methods = (
        method
        for cls in {inner.cls for inner in node.walk()}
        if name not in CALLS
        and (home := files.of(cls)) is not None
        and (method := home.classes.method(cls.__name__, name)) is not None
    )
    return name in CHANGING or is_in_place(name) or any(map(stored, methods))


def _leads_to(path: str, other: str) -> bool:
    """Whether a path is that of a module, or of one around it; `*` may be any name."""
    segments, others = path.split("."), other.split(".")
    pairs = zip(segments, others, strict=False)
    return len(segments) <= len(others) and all(a == b or "*" in (a, b) for a, b in pairs)


# Both are asked of each call again, for every module that is checkpointed.
_names_of = functools.lru_cache(maxsize=256)(local_names)


@functools.lru_cache(maxsize=4096)
def _paths(expr: ast.expr, function: ast.FunctionDef) -> tuple[str, ...]:
    """The paths of modules that an expression may mean, with wildcards; loops are followed."""
    paths = [*module_paths(expr, function)]
    match expr:
        case ast.Attribute(value=value, attr=attr):
            paths += (f"{path}.{attr}".lstrip(".") for path in _paths(value, function))
        case ast.Subscript(value=value):  # by a number that is not known here
            paths += (f"{path}.0" for path in _paths(value, function))
        case ast.Name(id=name):
            for loop in ast.walk(function):
                if isinstance(loop, ast.For | ast.comprehension) and name in bound_in(loop.target):
                    over = [n for n in ast.walk(loop.iter) if isinstance(n, ast.Attribute)]
                    paths += (f"{path}.0" for n in over for path in module_paths(n, function))
                    if any(n.attr in OVER_MODULES for n in over):
                        paths += (".".join("0" * depth) for depth in range(1, DEEPEST))
    return tuple(with_wildcards(path) for path in paths)


def _refuse_changed(
    files: OutputFiles, node: Node, outer: Node, caches: Collection[str], cause: Directive
) -> None:
    """Refuses what a module around hands to it, or to what it lies in, and changes afterwards."""
    relative = with_wildcards(outer.below(node.path))
    methods = [*running(files, outer)]
    through: set[str] = set()  # methods that call it

    def handed(expr: ast.AST, function: ast.FunctionDef) -> list[ast.expr]:
        if not isinstance(expr, ast.Call):
            return []
        of_function = [path for path in _paths(expr.func, function) if path]
        given = [k.value if k.arg else ast.Starred(k.value) for k in expr.keywords]
        given = [*expr.args, *given]
        taken = [path for each in given for path in _paths(each, function) if path]
        called = [path.removesuffix(".forward").removesuffix(".__call__") for path in of_function]
        # What a local name or another call gives may be any module.
        unknown = isinstance(expr.func, ast.Call | ast.Lambda) or (
            isinstance(expr.func, ast.Name)
            and not of_function
            and expr.func.id in _names_of(function)
        )
        if not (unknown or any(p in through or _leads_to(p, relative) for p in called + taken)):
            return []
        return [each for each in given if not any(is_name(each, name) for name in caches)]

    for _ in methods:
        calls = {
            function.name
            for _, function in methods
            if any(handed(each, function) for each in ast.walk(function))
        }
        if calls - {"forward"} <= through:
            break
        through |= calls - {"forward"}
    for file, function in methods:
        follow = Handed(
            functools.partial(handed, function=function),
            functools.partial(changed_by, files=files, outer=outer, function=function),
        )
        check_unchanged(file, function, follow, node.shown, (cause,))


def check_unchanged(
    file: SourceFile, function: ast.FunctionDef, follow: Handed, what: str, causes: Causes
) -> None:
    """Refuses a function that changes what it handed to something that is computed again.

    Raises:
        Unsupported: It does.
    """
    if found := follow.changed_later(function):
        raise errors.Unsupported(
            f"`{function.name}` {found.words} after {what} was given it, which is computed again "
            "in the backward pass, of what it holds by then",
            at=file.at(found.node),
            cause=causes,
            hint="change a copy of it, or checkpoint modules beside it",
        )


def transforms(file: SourceFile, function: ast.FunctionDef) -> Iterator[tuple[ast.Call, str]]:
    """The calls of a function that call something in another way, by their names."""
    for call in (each for each in ast.walk(function) if isinstance(each, ast.Call)):
        name = file.qualified(call.func) or ""
        if name.startswith(TRANSFORMS):
            yield call, name


def _may_take(call: ast.Call, inner: Node | None) -> bool:
    """Whether a call may be given a module: it is, or what it is given is not plain to see.

    Args:
        call: The call.
        inner: The module, a child of the one that makes the call; None for that one itself. What
            computes with parts of that is done again as a whole.
    """
    if not call.args:
        return True
    match call.args[0]:
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return name == (inner.path.rpartition(".")[2] if inner is not None else "forward")
        case ast.Lambda() as given if inner is None:
            owners = [n.value for n in ast.walk(given) if isinstance(n, ast.Attribute)]
            return any(is_name(n, "self") and n not in owners for n in ast.walk(given))
        case _:
            return True
