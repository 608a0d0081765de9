"""Checkpointing: checks for what a recomputation must not repeat, and options of the call."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Self

from slapo_rewrite import errors
from slapo_rewrite.changes.around_checkpoint import check_transformed, forward_of, transforms
from slapo_rewrite.changes.buffer_updates import may_be_changed_by, updates_buffers
from slapo_rewrite.changes.carried_over import carried_over
from slapo_rewrite.changes.imports import Imports
from slapo_rewrite.changes.output_files import OutputFiles
from slapo_rewrite.changes.placement import Placement, Requested
from slapo_rewrite.changes.running_methods import running, running_inside
from slapo_rewrite.changes.save_policy import SavePolicy, context
from slapo_rewrite.code.arguments import Signature, parameters
from slapo_rewrite.code.effects import stored
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.handed import Handed
from slapo_rewrite.code.subgraphs import (
    Obstacle,
    change_of_given,
    draw_beside_torch,
    varying,
)
from slapo_rewrite.directive import Causes, Directive
from slapo_rewrite.hugging_face import CACHE, KEEPS_TOKENS, names_of_caches
from slapo_rewrite.model.tree import Node, Tree


@dataclass(frozen=True)
class Recomputed(Requested):
    """Recomputes the activations of a module, or of a part of it, in the backward pass."""

    kept: SavePolicy = None  # the results that are kept
    updates_buffers: bool = False  # whether it updates buffers as it runs
    draws: bool = False  # whether it draws random numbers of Python or NumPy
    caches: tuple[str, ...] = ()  # the cache arguments of the module and of modules inside it
    left: tuple[str, ...] = ()  # arguments that callers must not pass where it is recomputed

    def checked(self, to: Placement, node: Node, twice: Iterable[Node], cause: Directive) -> Self:
        """The change with its options set; raises if the modules in `twice` must not run twice."""
        check_repeats(to.files, twice, cause)
        return replace(
            self,
            updates_buffers=updates_buffers(to.files, node, self.kept, cause),
            draws=any(draw_beside_torch(*each) for each in running_inside(to.files, node)),
            caches=caches_taken(to.files, to.tree, node.cls),
        )

    def options(self, imports: Imports, causes: Causes) -> list[tuple[str, str]]:
        """The keyword arguments of torch's `checkpoint`."""
        contexts = ""
        if self.kept is not None:
            contexts = context(imports, self.kept, causes)
        elif self.updates_buffers:
            contexts = f"{imports.helper('recomputation', 'update_buffers_once', causes)}(self)"
        if self.draws:
            contexts = f"{imports.helper('recomputation', 'draw_again', causes)}({contexts})"
        options = [("use_reentrant", "False")]
        return [*options, ("context_fn", contexts)] if contexts else options


# Transforms of `torch.func` that fail inside a checkpoint, whose saved-tensor hooks they reject.
REVERSE = ("grad", "grad_and_value", "vjp", "jacrev", "hessian")


def left_out(to: Placement, node: Node, cause: Directive) -> tuple[str, ...]:
    """The smallest set of arguments that must be left out for recomputation; often empty.

    Only optional arguments; the module raises at run time if one is passed all the same.
    """
    forward = forward_of(to.files, node)
    defaults = Signature.of(forward).defaults if forward is not None else {}
    constants = {n: each.value for n, each in defaults.items() if isinstance(each, ast.Constant)}
    optional = [name for name in reversed(constants) if constants[name] is None]
    if to.around_forward(node) is not to.files.of(node.cls):
        optional = []  # its file is not rewritten
    caches = caches_taken(to.files, to.tree, node.cls)
    refused: errors.RewriteError | None = None
    for names in dict.fromkeys(((), *((name,) for name in optional), tuple(optional))):
        try:
            check_recomputed(to.files, node, cause, names)
            check_transformed(to.files, node, caches, cause, names)
        except errors.Unsupported as error:
            refused = refused or error
        else:
            return names
    assert refused is not None
    raise refused


def check_recomputed(
    files: OutputFiles, node: Node, cause: Directive, left: Collection[str] = ()
) -> None:
    """Raises if a module's `forward` changes its arguments, except for those left out."""
    if getattr(node.live, "inplace", False) is True:
        raise errors.Unsupported(
            f"{node.shown} changes its input in place, and would change it twice",
            at=cause.at,
            hint="remove `inplace`, or checkpoint a module around it",
        )
    home = files.of(node.cls)
    forward = forward_of(files, node)
    if home is None or forward is None:
        return
    given = {*parameters(forward)} - {"self", *_may_be_left_out(node), *left}
    if forward.args.kwarg:
        given.discard(forward.args.kwarg.arg)  # each call makes a new dictionary
    if (found := change_of_given(forward, given)) is not None:
        hint = "change a copy of it, or checkpoint modules inside this one"
        _refuse(home.file, forward, replace(found, hint=hint), cause)


def _may_be_left_out(node: Node) -> set[str]:
    """The optional arguments of a module that may be caches."""
    names = names_of_caches(node.cls.forward.__module__)
    taken = inspect.signature(node.cls.forward).parameters
    return {n for n in names if CACHE in names or (n in taken and taken[n].default is None)}


def check_repeats(files: OutputFiles, nodes: Iterable[Node], cause: Directive) -> None:
    """Raises if modules compute something else in a second run, for example random numbers."""
    within = {inner.cls: (each, inner) for each in nodes for inner in each.walk()}
    for around, node in within.values():
        for file, method in running(files, node):
            _refuse(file, method, carried_over(files, around, node, method), cause)
            _refuse(file, method, varying(file, [method]), cause)
            for call, name in transforms(file, method):
                if name.startswith("torch.func.") and name.rpartition(".")[2] in REVERSE:
                    words = f"calls `{name}`, which torch does not allow in selective checkpointing"
                    hint = "checkpoint modules that do not call autograd"
                    _refuse(file, method, Obstacle(call, words, hint), cause)


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


def caches_taken(files: OutputFiles, tree: Tree, cls: type) -> tuple[str, ...]:
    """The names of arguments with caches that modules of a class, or those inside, fill.

    All instances of the class share one text, so the caches of all are included. An argument that
    is not filled does not count, such as the memory of an earlier segment. `use_cache` counts if a
    module has a cache itself.
    """
    around = [node for node in tree.nodes.values() if node.cls is cls]
    taken: set[str] = set()
    for inner in {each.cls: each for node in around for each in node.walk()}.values():
        names = names_of_caches(inner.cls.forward.__module__)
        takes = inspect.signature(inner.cls.forward).parameters.keys()
        given = takes & {*names}
        taken |= {name for name in given if CACHE in names or _may_fill(files, inner, name)}
        if any(stored(method) for _, method in running(files, inner)):
            taken |= takes & {KEEPS_TOKENS}
    return tuple(sorted(taken))


def _may_fill(files: OutputFiles, node: Node, name: str) -> bool:
    """Whether a module may change an argument of its `forward`."""
    forward = forward_of(files, node)
    if forward is None:
        return True
    changed = functools.partial(may_be_changed_by, files, node, forward)
    return Handed(changed=changed).changed_later(forward, {name}) is not None


def without_caches(
    function: ast.FunctionDef, used: Collection[str], caches: Iterable[str]
) -> list[str]:
    """Lines that reset a function's cache arguments; empty if there are none.

    Only names in `used` count; caches may also be among `**kwargs`.
    """
    off = {KEEPS_TOKENS: False}
    lines = [f"{name} = {off.get(name)}" for name in caches if name in used]
    rest = function.args.kwarg.arg if function.args.kwarg else None
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    given = [{k.arg or ast.unparse(k) for k in call.keywords} for call in calls]
    hidden = {n for names in given if f"**{rest}" in names for n in caches if n not in names}
    hidden.discard(KEEPS_TOKENS)
    more = sorted(hidden - {*parameters(function)}) if rest in used else ()
    return [*lines, *(f'{rest}.pop("{name}", None)' for name in more)]
