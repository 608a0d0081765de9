"""Whether running a module changes buffers, which has to happen once where it is computed again."""

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

# What torch computes with buffers it does not change, but for these.
UPDATING = ("batch_norm", "instance_norm")
# What leads to the buffers of a module, whatever their names.
OF_ALL = ("buffers", "named_buffers", "_buffers", "state_dict", "__dict__")
# Of Python's own functions those that call nothing that they are given.
READING = {"abs", "bool", "enumerate", "float", "getattr", "int", "isinstance", "len", "list"}
READING |= {"max", "min", "print", "range", "str", "sum", "super", "tuple", "type", "zip"}


def updates_buffers(files: OutputFiles, node: Node, kept: SavePolicy, cause: Directive) -> bool:
    """Whether running a module may change buffers, which has to happen once.

    That cannot be seen to where some results are kept, or a hook inside would run twice.
    """
    _check_hooks(node, cause)
    if kept is not None:
        _check_kept(node, cause)
    updates = any(_updates_own(files, each) for each in node.walk())
    if updates and kept is not None:
        raise errors.Unsupported(
            f"{node.shown} updates buffers as it runs, which `save` cannot keep from "
            "happening twice",
            at=cause.at,
            hint="take `save` out: without it they are updated once",
        )
    return updates


# Torch's own change nothing but buffers.
_HARMLESS = ("torch.nn.utils.", COLLECTING)


def _check_hooks(node: Node, cause: Directive) -> None:
    """Refuses hooks inside of a module that may do something again where they run twice."""
    for path, module in node.live.named_modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        homes = [str(getattr(hook, "__module__", "")) for hook in hooks]
        own = [home for home in homes if not home.startswith(_HARMLESS)]
        if path and own:  # those of the module itself run around what is computed again
            raise errors.Unsupported(
                f"`{node.path}.{path}` has a hook, which would run twice",
                at=cause.at,
                hint="checkpoint modules beside it, or do in a `forward` what the hook does",
            )


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


def _updates_own(files: OutputFiles, node: Node) -> bool:
    """Whether a module may change its buffers, or those of modules in it."""
    live = node.live
    own = [name for name, _ in live.named_buffers(recurse=False)]
    if own and live._forward_pre_hooks:
        return True  # as those of `spectral_norm` do
    for cls in node.cls.__mro__ if own else ():
        if cls.__module__ == "torch.nn.modules.module":
            break
        if cls.__module__.startswith("torch.nn.modules."):
            return cls.__module__.endswith(("batchnorm", "instancenorm"))
        home = files.of(cls)
        if home is None or cls.__name__ not in home.file.classes:
            return True  # not known not to
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
    """Whether a buffer may be another after an expression, of these names or of any."""
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
    """The arguments of a call that it changes, or of which nothing is known.

    What torch and tensors compute changes nothing, but by the names of their methods.
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
