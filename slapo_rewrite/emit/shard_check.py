"""Whether the output, as a rank builds it, has the classes and the parts that were asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.changes.output_files import OutputFiles, is_torch
from slapo_rewrite.changes.state import EMPTY, ModuleRequests, Shard
from slapo_rewrite.model import construction_calls
from slapo_rewrite.model.emitted import Emitted
from slapo_rewrite.model.join import Sources, find_parameter_site
from slapo_rewrite.model.short_build import LeftOut
from slapo_rewrite.model.tree import Node, Tree


def check_classes(
    built: Tree, tree: Tree, states: Mapping[str, ModuleRequests], outputs: OutputFiles
) -> None:
    """The modules that were to be of another class are, and no others.

    Args:
        built: The output's module tree.
        tree: The original's.
        states: What was asked of each module path.
        outputs: Say what was to be made.

    Raises:
        Unsupported: What makes some modules makes others too, or puts them elsewhere.
    """
    made_in = list(outputs.made_in(tree))
    meant = {node.path: (made.class_name, why) for node, made, why in made_in}
    functions = {node.path for node, made, _ in made_in if not made.is_class}
    written = dict(meant.values())
    for path, node in tree.nodes.items():
        state = states.get(path, EMPTY)
        if path not in built.nodes or (path in functions and state.replacement is None):
            continue
        if built.nodes[path].cls is LeftOut:  # one that is made stands for it
            continue
        if node.owner and node.owner.path in meant and is_torch(node.owner.cls.__module__):
            continue  # a layer of torch's own is made anew, with what it holds
        kinds = [cls.__name__ for cls in built.nodes[path].cls.__mro__]
        have, was = kinds[0], node.cls.__name__
        want, causes = meant.get(path, (was, written.get(have, ())))
        new = state.replacement
        if path in functions and new and (was in kinds or was != new.target.name):
            continue  # another class, which a function may have chosen
        is_own = path in meant or have in written or state.is_plain() or state.replacement
        if have != want and is_own:
            raise errors.Unsupported(
                f"of the modules that are a `{was}` some were to be made otherwise, by what makes "
                f"others too, or puts them elsewhere: `{path}` is a `{have}`, not a `{want}`",
                at=causes[0].at if causes else None,
                hint="schedule all of them alike, give some a class of their own, or let the "
                "constructor make the elements of a list in their order",
            )


def check_parts(
    emitted: Emitted,
    built: Tree,
    tree: Tree,
    states: Mapping[str, ModuleRequests],
    sources: Sources,
) -> None:
    """What the schedule splits must be a part in the output.

    Args:
        emitted: The output.
        built: Its module tree, of one rank of several.
        tree: The original's.
        states: What was asked of each module path.
        sources: The source files.

    Raises:
        Unsupported: A parameter is whole: something replaces the part after it was made. Or a
            state dict has it by another name, by which nobody knows that it is a part.
    """
    _check_names(emitted, tree)
    for path, parts in emitted.parts.items():
        shards = {s.name: s for s in states[path].shards} if path in states else {}
        for name in {**parts, **shards} if parts else ():
            have: Any = getattr(built.nodes[path].live, name, None)
            axis, size = parts.get(name, (0, None))
            if have is not None and have.shape[axis] != size:
                raise _replaced(tree.nodes.get(path, built.nodes[path]), name, shards, sources)


def _check_names(emitted: Emitted, tree: Tree) -> None:
    """Refuses a model whose state dict has another name for a parameter that is split."""
    if not any(_names_anew(node.live) for node in tree.nodes.values()):
        return
    names = tree.root.live.state_dict().keys()
    for path in sorted(emitted.parts.keys() & tree.nodes.keys()):
        node = tree.nodes[path]
        for name in sorted(emitted.parts[path].keys() & node.parameters.keys()):
            if f"{path}.{name}".lstrip(".") not in names:
                raise errors.Unsupported(
                    f"`{path}.{name}` is not in the model's state dict by this name, by which "
                    "the parts of ranks are cut and put together",
                    at=construction_calls.place(construction_calls.stack_of(node.live)),
                    hint="keep the parameter's own name in `state_dict()`, and rename what is "
                    "saved where it is saved",
                )


def _names_anew(live: Any) -> bool:
    """Whether a module may put something else into a state dict than its own names."""
    methods = (type(live).state_dict, type(live)._save_to_state_dict)
    own = any(method.__module__ != "torch.nn.modules.module" for method in methods)
    return own or bool(live._state_dict_hooks)


def _replaced(
    node: Node, name: str, shards: Mapping[str, Shard], sources: Sources
) -> errors.RewriteError:
    at = None
    with contextlib.suppress(errors.RewriteError):
        site = find_parameter_site(sources, node, name)
        at = None if is_torch(site.file.name) else site.file.at(site.value)
    causes = [s.cause for s in (shards.get(name), *shards.values()) if s is not None]
    also = [c.at for c in causes[:1] if c.at]
    return errors.Unsupported(
        f"`{node.path}.{name}` is replaced by a whole tensor after `{node.name}` was made, "
        "so no rank would have its part",
        at=at or (also.pop() if also else None),
        also=also,
        hint=f"let the constructor of `{node.name}` make `{name}`, and change its values in "
        "place afterwards",
    )
