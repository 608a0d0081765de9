"""Finds updates of buffers in checkpointed modules, which must happen only once."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from slapo_rewrite import errors
from slapo_rewrite.changes.output_files import OutputFiles
from slapo_rewrite.changes.running_methods import changed_by, running
from slapo_rewrite.changes.save_policy import SavePolicy
from slapo_rewrite.code.arguments import values_given
from slapo_rewrite.code.handed import ANY_OF_SELF, Handed
from slapo_rewrite.directive import Directive
from slapo_rewrite.hugging_face import COLLECTING
from slapo_rewrite.model.tree import Node

# The torch functions that change buffers among their arguments.
UPDATING = ("batch_norm", "instance_norm")
# Names that give access to all buffers of a module.
OF_ALL = ("buffers", "named_buffers", "_buffers", "state_dict", "__dict__")
# Python's built-in functions that do not call or change their arguments.
READING = {"abs", "bool", "enumerate", "float", "getattr", "int", "isinstance", "len", "list"}
READING |= {"max", "min", "print", "range", "str", "sum", "super", "tuple", "type", "zip"}


def updates_buffers(files: OutputFiles, node: Node, kept: SavePolicy, cause: Directive) -> bool:
    """Whether running a module may change buffers, which must happen only once.

    Raises if it does and results are `kept`, which prevents that, or if an inner hook runs twice.
    """
    _check_hooks(node, cause)
    if kept is not None:
        _check_kept(node, cause)
    updates = any(_updates_own(files, each) for each in node.walk())
    if updates and kept is not None:
        raise errors.Unsupported(
            f"{node.shown} updates buffers as it runs, and with `save` they would be updated twice",
            at=cause.at,
            hint="remove `save`: without it they are updated once",
        )
    return updates


# Hooks of these modules change nothing but buffers.
_HARMLESS = ("torch.nn.utils.", COLLECTING)


def _check_hooks(node: Node, cause: Directive) -> None:
    """Raises if a module inside has a hook with other effects, which would run twice."""
    for path, module in node.live.named_modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        homes = [str(getattr(hook, "__module__", "")) for hook in hooks]
        own = [home for home in homes if not home.startswith(_HARMLESS)]
        if path and own:  # those of the module itself run around what is computed again
            raise errors.Unsupported(
                f"`{node.path}.{path}` has a hook, which would run twice",
                at=cause.at,
                hint="checkpoint other modules, or move the hook's code into a `forward`",
            )


def _check_kept(node: Node, cause: Directive) -> None:
    """Raises if results of recurrent layers are to be kept: their gates are computed in place.

    Torch splits the products into views without version counting (`unsafe_chunk`), so a checkpoint
    would use the overwritten values.
    """
    for path, module in node.live.named_modules(prefix=node.path):
        if type(module).__module__ == "torch.nn.modules.rnn":
            raise errors.Unsupported(
                f"`{path}` overwrites results that `save` would keep",
                at=cause.at,
                hint="remove `save`, or checkpoint other modules",
            )


def _updates_own(files: OutputFiles, node: Node) -> bool:
    """Whether a module may change its buffers, or those of modules in it."""
    live = node.live
    own = [name for name, _ in live.named_buffers(recurse=False)]
    if own and live._forward_pre_hooks:
        return True  # as the hooks of `spectral_norm` do
    for cls in node.cls.__mro__ if own else ():
        if cls.__module__ == "torch.nn.modules.module":
            break
        if cls.__module__.startswith("torch.nn.modules."):
            return cls.__module__.endswith(("batchnorm", "instancenorm"))
        home = files.of(cls)
        if home is None or cls.__name__ not in home.file.classes:
            return True  # unknown
    names = {path.rpartition(".")[2] for path, _ in live.named_buffers()}
    around = [name for name, child in live.named_children() if [*child.buffers()]]
    given = {ANY_OF_SELF, *(f"self.{name}" for name in (*own, *around))}
    return bool(names) and any(
        any(_may_be_set(each, names) for each in ast.walk(method))
        or Handed(changed=functools.partial(may_be_changed_by, files, node, method)).changed_later(
            method, given
        )
        for _, method in running(files, node)
    )


def _may_be_set(expr: ast.AST, names: set[str]) -> bool:
    """Whether an expression may set a buffer of these names, or one of unknown name."""
    match expr:
        case ast.Attribute(attr=name, ctx=ast.Store() | ast.Del()) | ast.Constant(value=name):
            return name in names
        case ast.Attribute(attr=name):
            return name in OF_ALL
        case ast.Call(func=ast.Name(id="setattr" | "vars")):
            return True
    return False


def may_be_changed_by(
    files: OutputFiles, node: Node, method: ast.FunctionDef, call: ast.Call
) -> Iterator[ast.expr]:
    """The arguments that a call changes, or may change.

    Functions of torch and methods of tensors change nothing unless their names say so.
    """
    home = files.of(node.cls)
    assert home is not None
    name = home.file.qualified(call.func) or ""
    match call.func:
        case ast.Name(id=plain) if plain not in home.file.functions:
            known = name.startswith("torch.") or plain in READING
        case ast.Attribute(value=ast.Name(id="self"), attr=attr) if attr not in node.children:
            known = home.classes.method(node.cls.__name__, attr) is not None
        case ast.Attribute() | ast.Subscript():
            known = name.rpartition(".")[2] not in UPDATING
        case _:
            known = False
    yield from changed_by(call, files, node, method) if known else values_given(call)
