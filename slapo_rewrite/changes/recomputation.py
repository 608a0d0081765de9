"""What must not happen twice where a module is computed again in the backward pass."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from slapo_rewrite import errors
from slapo_rewrite.changes.output_files import OutputFiles
from slapo_rewrite.changes.save_policy import SavePolicy
from slapo_rewrite.code.arguments import argument_of, parameters
from slapo_rewrite.code.dataflow import bound_in, names_in, read_in
from slapo_rewrite.code.effects import own_calls, plain_calls, stored
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.handed import Handed
from slapo_rewrite.code.lines import Causes
from slapo_rewrite.code.liveness import local_names, statements
from slapo_rewrite.code.names import is_name, module_paths
from slapo_rewrite.code.subgraphs import Obstacle, change_of_given, changing, varying
from slapo_rewrite.code.text import with_wildcards
from slapo_rewrite.directive import Directive
from slapo_rewrite.hugging_face import CACHES, names_of_caches
from slapo_rewrite.model.tree import Node, Tree

# Methods that a run of the model does not call.
CONSTRUCTING = ("__init__", "reset_parameters", "_init_weights", "init_weights")
# What torch computes with buffers it does not change, but for these.
UPDATING = ("batch_norm", "instance_norm")
# What calls a module with other weights, or differentiates it, which is over in the backward pass.
TRANSFORMS = (
    "torch.func.",
    "torch.vmap",
    "torch.nn.utils.stateless.",
    "torch.autograd.functional.",
)
# Of these what torch cannot do inside of what is computed again: it hooks what it keeps.
REVERSE = ("grad", "grad_and_value", "vjp", "jacrev", "hessian")
MOST_CALLS = 3  # inside of one another, that are followed to what they change
# What changes a module, beside methods whose names end with an underscore.
CHANGING = ("load_state_dict", "apply", "setattr", "delattr", "vars")
CALLS = ("forward", "__call__", "__init__")
TORCH = ("torch", "F", "nn", "math")
# What may run with the model of some files, by name.
_NAMED: WeakKeyDictionary[OutputFiles, frozenset[str]] = WeakKeyDictionary()


def check_recomputed(files: OutputFiles, node: Node, cause: Directive) -> None:
    """Refuses a module whose `forward` changes what it is given.

    Raises:
        Unsupported: It does.
    """
    if getattr(node.live, "inplace", False) is True:
        raise errors.Unsupported(
            f"`{node.path}` changes its input in place, and would do so twice",
            at=cause.at,
            hint="take `inplace` out, or checkpoint a module around it",
        )
    home = files.of(node.cls)
    forward = home.classes.method(node.cls.__name__, "forward") if home else None
    if home is None or forward is None:
        return
    given = {*parameters(forward)} - {"self", *names_of_caches(node.cls.forward.__module__)}
    if forward.args.kwarg:
        given.discard(forward.args.kwarg.arg)  # a dictionary made by the call
    _refuse(home.file, forward, _change(forward, given, node), cause)


def check_repeats(files: OutputFiles, nodes: Iterable[Node], cause: Directive) -> None:
    """Refuses modules that compute something else a second time, or count on themselves.

    Raises:
        Unsupported: They draw random numbers that are not set back, say.
    """
    for node in {inner.cls: inner for each in nodes for inner in each.walk()}.values():
        for file, method in _running(files, node):
            if method.name == "forward":
                _refuse(file, method, _change(method, set(), node), cause)
            _refuse(file, method, varying(file, [method]), cause)
            for call, name in _transforms(file, method):
                if name.startswith("torch.func.") and name.rpartition(".")[2] in REVERSE:
                    words = f"calls `{name}`, which torch does not allow where values are kept so"
                    hint = "checkpoint modules that do not differentiate themselves"
                    _refuse(file, method, Obstacle(call, words, hint), cause)


def check_transformed(files: OutputFiles, node: Node, cause: Directive) -> None:
    """Refuses a module that it or those around it call with other weights, or differentiate.

    Raises:
        Unsupported: They may.
    """
    inner: Node | None = None
    outer: Node | None = node
    while outer is not None:
        for file, function in _running(files, outer):
            for call, name in _transforms(file, function):
                if _may_take(call, inner):
                    raise errors.Unsupported(
                        f"`{name}` may call `{node.path or 's'}`: what it changes is no longer so "
                        "in the backward pass, where that is computed again",
                        at=file.at(call),
                        cause=cause,
                        hint="checkpoint modules that it does not call",
                    )
            if outer is not node:
                _refuse_set(files, file, function, node, outer, cause)
                _refuse_global(files, file, function, node, cause)
        if outer is not node:
            _refuse_changed(files, node, outer, cause)
        inner, outer = outer, outer.parent


def _refuse_set(
    files: OutputFiles,
    file: SourceFile,
    function: ast.FunctionDef,
    node: Node,
    outer: Node,
    cause: Directive,
) -> None:
    """Refuses what a module around sets or changes, which may be other by then."""
    relative = with_wildcards(_relative(node, outer))
    for each in ast.walk(function):
        match each:
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
            words = f"`{ast.unparse(each)}` {words} by the backward pass, where `{node.path}` is "
            raise _not_the_same(file, each, f"{words}computed again", cause)


def _refuse_global(
    files: OutputFiles, file: SourceFile, function: ast.FunctionDef, node: Node, cause: Directive
) -> None:
    """Refuses what a module around changes of what the file itself holds, and the module reads."""
    held = bound_in(*(each for each in file.tree.body if isinstance(each, ast.Assign)))
    body = [*statements(function.body)]
    named = {name for each in body if isinstance(each, ast.Global) for name in each.names}
    own = local_names(function)

    def root(expr: ast.expr) -> str | None:
        while isinstance(expr, ast.Attribute | ast.Subscript):
            expr = expr.value
        return expr.id if isinstance(expr, ast.Name) and expr.id in held - own else None

    changed = named.union(*(names_in(found.node) for s in body if (found := changing(s, root))))
    changed &= named | held
    if not changed:
        return
    for inner in {each.cls: each for each in node.walk()}.values():
        for at, method in _running(files, inner):
            if at is file and (read := sorted(changed & read_in(method))):
                words = (
                    f"`{function.name}` changes `{read[0]}`, which may be another by the backward "
                )
                words += f"pass, where `{node.path}` is computed again and reads it"
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
    is_marked = name.endswith("_") and not name.endswith("__")
    return name in CHANGING or is_marked or any(map(stored, methods))


def _leads_to(path: str, other: str) -> bool:
    """Whether a path is that of a module, or of one around it; `*` may be any name."""
    segments, others = path.split("."), other.split(".")
    pairs = zip(segments, others, strict=False)
    return len(segments) <= len(others) and all(a == b or "*" in (a, b) for a, b in pairs)


def _relative(node: Node, outer: Node) -> str:
    """The path of a module from one around it."""
    return node.path[len(outer.path) + 1 if outer.path else 0 :]


def _paths(expr: ast.expr, function: ast.FunctionDef) -> list[str]:
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
                    over = (n for n in ast.walk(loop.iter) if isinstance(n, ast.Attribute))
                    paths += (f"{path}.0" for n in over for path in module_paths(n, function))
    return [with_wildcards(path) for path in paths]


def _refuse_changed(files: OutputFiles, node: Node, outer: Node, cause: Directive) -> None:
    """Refuses what a module around hands to it, or to what it lies in, and changes afterwards."""
    relative = with_wildcards(_relative(node, outer))
    caches = names_of_caches(node.cls.forward.__module__)
    running = [*_running(files, outer)]
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
            and expr.func.id in local_names(function)
        )
        if not (unknown or any(p in through or _leads_to(p, relative) for p in called + taken)):
            return []
        return [each for each in given if not any(is_name(each, name) for name in caches)]

    for _ in running:
        calls = {
            function.name
            for _, function in running
            if any(handed(each, function) for each in ast.walk(function))
        }
        if calls - {"forward"} <= through:
            break
        through |= calls - {"forward"}
    for file, function in running:
        follow = Handed(
            functools.partial(handed, function=function),
            functools.partial(_changed_by, files=files, outer=outer, function=function),
        )
        check_unchanged(file, function, follow, f"`{node.path}`", (cause,))


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


def _changed_by(
    call: ast.Call, files: OutputFiles, outer: Node, function: ast.FunctionDef, depth: int = 0
) -> Iterator[ast.expr]:
    """The arguments of a call that the function, method or module that it calls changes."""
    callee: ast.FunctionDef | None = None
    inner: Node | None = None
    home = files.of(outer.cls) if depth < MOST_CALLS else None
    if isinstance(call.func, ast.Name) and home is not None:
        callee = home.file.functions.get(call.func.id)
    for path in module_paths(call.func, function) if callee is None and home is not None else ():
        inner = outer
        for part in path.split("."):
            inner = inner.children.get(part) if inner is not None else None
        while inner is not None and inner.is_container and inner.children:
            inner = next(iter(inner.children.values()))
        if inner is not None and getattr(inner.live, "inplace", False) is True:
            yield from call.args[:1]
        at, name = (home, path) if inner is None else (files.of(inner.cls), "forward")
        cls = outer.cls if inner is None else inner.cls
        callee = at.classes.method(cls.__name__, name) if at is not None else None
    for name in parameters(callee) if callee is not None else ():
        assert callee is not None
        given = argument_of(callee, call, name)
        deeper = functools.partial(
            _changed_by, files=files, outer=inner or outer, function=callee, depth=depth + 1
        )
        if given is not None and Handed(changed=deeper).changed_later(callee, {name}):
            yield given


def _transforms(file: SourceFile, function: ast.FunctionDef) -> Iterator[tuple[ast.Call, str]]:
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


def _running(files: OutputFiles, node: Node) -> Iterator[tuple[SourceFile, ast.FunctionDef]]:
    """The methods of a module that run with it, each with the functions that it calls."""
    home = files.of(node.cls)
    for method in home.classes.methods(node.cls.__name__) if home is not None else ():
        assert home is not None
        if method.name in _named_while_running(files, node):
            functions = home.file.functions
            yield home.file, method
            yield from ((home.file, functions[n]) for n in plain_calls(method) if n in functions)


def _named_while_running(files: OutputFiles, node: Node) -> frozenset[str]:
    """What may run with a model: `forward`, what that names anywhere, and so on."""
    if files in _NAMED:
        return _NAMED[files]
    while node.parent is not None:
        node = node.parent
    functions: dict[str, list[ast.FunctionDef]] = {}
    new = {"forward"}
    for cls in {inner.cls for inner in node.walk()}:
        if (home := files.of(cls)) is None:
            continue
        methods = home.classes.methods(cls.__name__)
        # A `forward` that is not read here may call any of them.
        is_read = any(method.name == "forward" for method in methods)
        for method in methods:
            functions.setdefault(method.name, []).append(method)
            if method.name in CONSTRUCTING:
                new |= _names(method) - {*own_calls(method)}  # hooks, say
            elif method.name.startswith("__") or not is_read:
                new.add(method.name)
        for name, function in home.file.functions.items():
            functions.setdefault(name, []).append(function)
    named: set[str] = set()
    while new:
        named |= new
        new = {n for name in new for f in functions.get(name, ()) for n in _names(f)} - named
    _NAMED[files] = frozenset(named - {*CONSTRUCTING})
    return _NAMED[files]


def _names(function: ast.FunctionDef) -> set[str]:
    """The names of attributes and variables in a function, and words that may be some."""
    found = set()
    for node in ast.walk(function):
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.Constant(value=str(name)):
                found.add(name)
    return found


def _change(forward: ast.FunctionDef, given: set[str], node: Node) -> Obstacle | None:
    """What changes an argument, or counts on the module: but for a buffer, which is set back."""
    found = change_of_given(forward, given, node.live._buffers)
    hint = "change a copy of it, or checkpoint modules inside this one"
    return replace(found, hint=hint) if found else None


def _refuse(
    file: SourceFile, function: ast.FunctionDef, found: Obstacle | None, cause: Directive
) -> None:
    if found is not None:
        raise errors.Unsupported(
            f"`{function.name}` {found.words}: it is computed again in the backward pass",
            at=file.at(found.node),
            cause=cause,
            hint=found.hint,
        )


def updates_buffers(files: OutputFiles, node: Node, kept: SavePolicy, cause: Directive) -> bool:
    """Whether running a module may change buffers, which has to happen once.

    Raises:
        Unsupported: It may, and some results are kept, which keeps it from happening once, or
            torch itself writes over results that are kept; a hook inside it would run twice.
    """
    _check_hooks(node, cause)
    if kept is not None:
        _check_kept(node, cause)
    named = _named_while_running(files, node)
    updates = any(_updates_own(files, each, named) for each in node.live.modules())
    if updates and kept is not None:
        raise errors.Unsupported(
            f"`{node.path}` updates buffers as it runs, which `save` cannot keep from "
            "happening twice",
            at=cause.at,
            hint="take `save` out: without it they are updated once",
        )
    return updates


def _check_hooks(node: Node, cause: Directive) -> None:
    """Refuses hooks inside of a module; torch's own change nothing but buffers."""
    for path, module in node.live.named_modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        own = [hook for hook in hooks if not _is_of_torch(hook)]
        if path and own:  # those of the module itself run around what is computed again
            raise errors.Unsupported(
                f"`{node.path}.{path}` has a hook, which would run twice",
                at=cause.at,
                hint="checkpoint modules beside it, or do in a `forward` what the hook does",
            )


def _is_of_torch(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.nn.utils.")


def _check_kept(node: Node, cause: Directive) -> None:
    """Refuses to keep results of recurrent layers, the gates of which are computed in place.

    torch takes the products apart as views that do not count what is written to them
    (`unsafe_chunk`), so that a checkpoint would go on with what was left there.
    """
    for path, module in node.live.named_modules(prefix=node.path):
        if type(module).__module__ == "torch.nn.modules.rnn":
            raise errors.Unsupported(
                f"`{path}` writes over results that `save` would keep",
                at=cause.at,
                hint="take `save` out, or checkpoint modules beside it",
            )


def caches_taken(tree: Tree, cls: type) -> tuple[str, ...]:
    """The caches that modules of a class and those inside of them take, by their arguments' names.

    What some of these hold the others need not: one text is right for all of them.
    """
    around = [node.live for node in tree.nodes.values() if node.cls is cls]
    taken: set[str] = set()
    for each in {type(inner) for live in around for inner in live.modules()}:
        names = names_of_caches(each.forward.__module__)
        taken |= inspect.signature(each.forward).parameters.keys() & {*names}
    return tuple(sorted(taken))


def without_caches(
    function: ast.FunctionDef, used: Collection[str], caches: Iterable[str]
) -> list[str]:
    """Lines that leave a function without the caches it was given, none where there are none.

    Args:
        function: The function.
        used: Its names that count.
        caches: Those that its module takes, and that what it calls takes, which may be among its
            `**kwargs`.
    """
    lines = [f"{name} = None" for name in dict.fromkeys((*CACHES, *caches)) if name in used]
    rest = function.args.kwarg.arg if function.args.kwarg else None
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    given = [{k.arg or ast.unparse(k) for k in call.keywords} for call in calls]
    hidden = {n for names in given if f"**{rest}" in names for n in caches if n not in names}
    more = sorted(hidden - {*parameters(function)}) if rest in used else ()
    return [*lines, *(f'{rest}.pop("{name}", None)' for name in more)]


def _updates_own(files: OutputFiles, module: Any, running: Collection[str]) -> bool:
    names = {name for name, _ in module.named_buffers(recurse=False)}
    if not names:
        return False
    if module._forward_pre_hooks:
        return True  # as those of `spectral_norm` do
    for cls in type(module).__mro__:
        if cls.__module__ == "torch.nn.modules.module":
            break
        if cls.__module__.startswith("torch.nn.modules."):
            return cls.__module__.endswith(("batchnorm", "instancenorm"))
        home = files.of(cls)
        if home is None or cls.__name__ not in home.file.classes:
            return True  # not known not to
        for method in home.file.methods(cls.__name__):
            if method.name in running and any(_changes(method, names)):
                return True
    return False


def _changes(method: ast.FunctionDef, names: set[str]) -> Iterator[bool]:
    """For each place where a method names a buffer, whether it may change it there."""
    above = {child: node for node in ast.walk(method) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(method):
        if (
            isinstance(node, ast.Attribute)
            and node.attr in names
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            yield not isinstance(node.ctx, ast.Load) or _may_change(node, above)
        elif isinstance(node, ast.Constant) and node.value in names:
            yield True  # setattr, register_buffer


def _may_change(node: ast.expr, above: dict[ast.AST, ast.AST]) -> bool:
    """Whether what is done with a value may change it."""
    parent = above[node]
    match parent:
        case ast.Attribute(attr=attr, ctx=ast.Load()):
            changes = attr.endswith("_") and not attr.endswith("__")
            return changes or _may_change(parent, above)
        case ast.Attribute() | ast.AugAssign() | ast.Assign() | ast.NamedExpr():
            return True
        case ast.Subscript(value=value, ctx=ctx) if value is node:
            return not isinstance(ctx, ast.Load) or _may_change(parent, above)
        case ast.Call(func=func) if func is node:
            return False  # a method that makes another tensor
        case ast.keyword(arg=arg):
            return arg == "out" or _may_change_argument(above[parent])
        case ast.Call():
            return _may_change_argument(parent)
    return False


def _may_change_argument(call: ast.AST) -> bool:
    """Whether a call may change what it is given: what torch and tensors compute does not."""
    assert isinstance(call, ast.Call)
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    text = ast.unparse(call.func)
    pure = text.partition(".")[0] in TORCH or not text.startswith("self.")
    return not name or name in UPDATING or not pure
