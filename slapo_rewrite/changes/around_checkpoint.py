"""Checks that code around a checkpointed module leaves its inputs unchanged until the backward."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Collection, Iterator

from slapo_rewrite import errors
from slapo_rewrite.changes.output_files import OutputFiles
from slapo_rewrite.changes.running_methods import changed_by, running
from slapo_rewrite.code.arguments import argument_of, parameters
from slapo_rewrite.code.dataflow import bound_in
from slapo_rewrite.code.effects import is_in_place, stored
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.handed import Handed
from slapo_rewrite.code.liveness import local_names
from slapo_rewrite.code.names import is_name, module_paths
from slapo_rewrite.code.text import with_wildcards
from slapo_rewrite.directive import Causes, Directive
from slapo_rewrite.model.tree import Node

# Transforms that call a module with other weights, or differentiate it, before the backward pass.
TRANSFORMS = (
    "torch.func.",
    "torch.vmap",
    "torch.nn.utils.stateless.",
    "torch.autograd.functional.",
)
# Names of calls that change a module, besides methods with a trailing underscore.
CHANGING = ("load_state_dict", "apply", "setattr", "delattr", "vars")
CALLS = ("forward", "__call__", "__init__")


def check_transformed(
    files: OutputFiles,
    node: Node,
    caches: Collection[str],
    cause: Directive,
    left: Collection[str] = (),
) -> None:
    """Raises if the module or those around it apply function transforms (`torch.func`) to it.

    Also raises if modules around it change one of its arguments, or its attributes, later.
    """
    inner: Node | None = None
    for outer in node.outwards():
        for file, function in running(files, outer):
            for call, name in transforms(file, function):
                if _may_take(call, inner):
                    raise errors.Unsupported(
                        f"`{name}` may call {node.shown}: its changes no longer hold when the "
                        "backward pass recomputes that",
                        at=file.at(call),
                        cause=cause,
                        hint="checkpoint modules that it does not call",
                    )
            if outer is not node:
                _refuse_set(files, file, function, node, outer, cause)
        if outer is not node:
            around = _Around(files, node, outer, caches, left)
            for file, function in around.methods:
                check_unchanged(file, function, around.follow(function), node.shown, (cause,))
        inner = outer


def _refuse_set(
    files: OutputFiles,
    file: SourceFile,
    function: ast.FunctionDef,
    node: Node,
    outer: Node,
    cause: Directive,
) -> None:
    """Raises if an outer module's method sets an attribute of the module, or changes it."""
    relative = with_wildcards(outer.below(node.path))
    for each in ast.walk(function):
        match each:
            case (
                ast.Attribute(value=owner, ctx=ast.Store() | ast.Del())
                | ast.Subscript(value=owner, ctx=ast.Store() | ast.Del())
            ):
                words = "is set while the model runs, and may have another value"
            case (
                ast.Call(func=ast.Attribute(value=owner, attr=name))
                | ast.Call(func=ast.Name(id=name), args=[owner, *_])
            ) if _is_changing(files, node, name):
                words = "changes state that may differ"
            case _:
                continue
        if any(_leads_to(relative, path) for path in paths_of(owner, function)):
            words = f"`{ast.unparse(each)}` {words} when the backward pass computes {node.shown} "
            raise errors.Unsupported(
                f"{words}again",
                at=file.at(each),
                cause=cause,
                hint="pass it to the module as an argument, or checkpoint other modules",
            )


def _is_changing(files: OutputFiles, node: Node, name: str) -> bool:
    """Whether a call by this name changes a module: by its name, or by what the method stores."""
    methods = (
        method
        for cls in {inner.cls for inner in node.walk()}
        if name not in CALLS
        and (home := files.of(cls)) is not None
        and (method := home.classes.method(cls.__name__, name)) is not None
    )
    return name in CHANGING or is_in_place(name) or any(map(stored, methods))


def _leads_to(path: str, other: str) -> bool:
    """Whether the first path is the second's, or one around it; `*` matches any name."""
    segments, others = path.split("."), other.split(".")
    pairs = zip(segments, others, strict=False)
    return len(segments) <= len(others) and all(a == b or "*" in (a, b) for a, b in pairs)


# Caches: both are asked about each call again for every checkpointed module.
_names_of = functools.lru_cache(maxsize=256)(local_names)


@functools.lru_cache(maxsize=4096)
def paths_of(expr: ast.expr, function: ast.FunctionDef) -> tuple[str, ...]:
    """The paths of modules that an expression may denote, with wildcards; follows loops."""
    paths = [*module_paths(expr, function)]
    match expr:
        case ast.Attribute(value=value, attr=attr):
            paths += (f"{path}.{attr}".lstrip(".") for path in paths_of(value, function))
        case ast.Subscript(value=value):  # the index is not known
            paths += (f"{path}.0" for path in paths_of(value, function))
        case ast.Name(id=name):
            for loop in ast.walk(function):
                if isinstance(loop, ast.For | ast.comprehension) and name in bound_in(loop.target):
                    over = [n for n in ast.walk(loop.iter) if isinstance(n, ast.Attribute)]
                    paths += (f"{path}.0" for n in over for path in module_paths(n, function))
    return tuple(with_wildcards(path) for path in paths)


class _Around:
    """The arguments that an outer module passes to a checkpointed module, or to modules around it.

    `caches` names arguments of `node` that are dropped in training, `left` those that callers must
    not pass in training.
    """

    def __init__(
        self,
        files: OutputFiles,
        node: Node,
        outer: Node,
        caches: Collection[str],
        left: Collection[str],
    ) -> None:
        self.files, self.node, self.outer = files, node, outer
        self.caches, self.left = caches, left
        self.relative = outer.below(node.path)
        self.methods = [*running(files, outer)]
        self.known: dict[tuple[ast.FunctionDef, str], bool] = {}
        self.through: dict[str, ast.FunctionDef] = {}  # the methods that call the module
        for _ in self.methods:
            calls = {
                function.name: function
                for _, function in self.methods
                if function.name != "forward"
                and any(self._given(each, function) for each in ast.walk(function))
            }
            if calls.keys() <= self.through.keys():
                break
            self.through |= calls

    def follow(self, function: ast.FunctionDef) -> Handed:
        """Tracks what a method of the outer module passes to the module, and changes."""
        return Handed(
            functools.partial(self._handed, function=function),
            functools.partial(changed_by, files=self.files, outer=self.outer, function=function),
            functools.partial(self._is_absent, function=function),
        )

    def _handed(self, expr: ast.expr, function: ast.FunctionDef) -> list[ast.expr]:
        return [
            each
            for each in self._given(expr, function)
            if not any(is_name(each, name) for name in self.caches)
            and not (self.left and self._is_left(expr, each, function))
        ]

    def _given(self, expr: ast.AST, function: ast.FunctionDef) -> list[ast.expr]:
        """The arguments of a call of the module, of a module around it, or of a possible caller."""
        if not isinstance(expr, ast.Call):
            return []
        of_function = [path for path in paths_of(expr.func, function) if path]
        given = [k.value if k.arg else ast.Starred(k.value) for k in expr.keywords]
        given = [*expr.args, *given]
        taken = [path for each in given for path in paths_of(each, function) if path]
        called = [path.removesuffix(".forward").removesuffix(".__call__") for path in of_function]
        # A local variable, or another call's result, may be any module.
        unknown = isinstance(expr.func, ast.Call | ast.Lambda) or (
            isinstance(expr.func, ast.Name)
            and not of_function
            and expr.func.id in _names_of(function)
        )
        pattern = with_wildcards(self.relative)
        if not self._may_take(expr):  # the call is of another element of the list
            called = [path for path in called if path != pattern]
        leads = any(p in self.through or _leads_to(p, pattern) for p in called + taken)
        return given if unknown or leads else []

    def _may_take(self, call: ast.Call) -> bool:
        """Whether the module's `forward` accepts the keyword arguments of a call."""
        taken = inspect.signature(self.node.cls.forward).parameters
        names = {keyword.arg for keyword in call.keywords} - {None}
        has_rest = any(each.kind is each.VAR_KEYWORD for each in taken.values())
        return has_rest or names <= taken.keys()

    def _is_left(self, call: ast.expr, given: ast.expr, function: ast.FunctionDef) -> bool:
        """Whether an argument only reaches the module as one of those in `left`, if at all."""
        if not isinstance(call, ast.Call) or not (paths := paths_of(call.func, function)):
            return False
        for path in paths:
            inner: Node | None = self.outer
            callee = self.through.get(path)
            if callee is None and _leads_to(path, with_wildcards(self.relative)):
                way = self.relative.split(".")[: path.count(".") + 1]
                inner = self.outer.at(".".join(way))
                callee = forward_of(self.files, inner) if inner is not None else None
            if inner is None or callee is None:
                return False
            names = [n for n in parameters(callee) if argument_of(callee, call, n) is given]
            if not names or not self._ends_as_left(inner, callee, names[0]):
                return False
        return True

    def _is_absent(self, call: ast.Call, given: ast.expr, function: ast.FunctionDef) -> bool:
        """Whether a call passes a value to the module itself, as one of those in `left`."""
        depths = {path.count(".") for path in paths_of(call.func, function)} if self.left else set()
        return depths == {self.relative.count(".")} and self._is_left(call, given, function)

    def _ends_as_left(self, inner: Node, callee: ast.FunctionDef, name: str) -> bool:
        if inner is self.node:
            return name in self.left
        if (callee, name) not in self.known:
            self.known[callee, name] = False  # for recursive calls
            inside = inner is not self.outer
            around = (
                _Around(self.files, self.node, inner, self.caches, self.left) if inside else self
            )
            self.known[callee, name] = not around.follow(callee).hands_on(callee, name)
        return self.known[callee, name]


def forward_of(files: OutputFiles, node: Node) -> ast.FunctionDef | None:
    """The definition of a module's `forward`, if its file is among the output's."""
    home = files.of(node.cls)
    return home.classes.method(node.cls.__name__, "forward") if home is not None else None


def check_unchanged(
    file: SourceFile, function: ast.FunctionDef, follow: Handed, what: str, causes: Causes
) -> None:
    """Raises if a function changes a value after passing it to checkpointed code."""
    if found := follow.changed_later(function):
        raise errors.Unsupported(
            f"`{function.name}` {found.words} after passing it to {what}, which the backward pass "
            "recomputes from the changed value",
            at=file.at(found.node),
            cause=causes,
            hint="change a copy of it, or checkpoint other modules",
        )


def transforms(file: SourceFile, function: ast.FunctionDef) -> Iterator[tuple[ast.Call, str]]:
    """The calls of function transforms in a function, with their names."""
    for call in (each for each in ast.walk(function) if isinstance(each, ast.Call)):
        name = file.qualified(call.func) or ""
        if name.startswith(TRANSFORMS):
            yield call, name


def _may_take(call: ast.Call, inner: Node | None) -> bool:
    """Whether a call may take a module: it does, or its first argument is not known.

    `inner` is the child of the calling module, or None for the calling module itself: a transform
    of parts of it is recomputed as a whole.
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
