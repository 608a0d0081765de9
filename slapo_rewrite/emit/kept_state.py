"""Whether modules of the output keep what was done to them after they were made.

A subclass's constructor runs the original's, and makes some of its modules again. What the
original did to these in between has to hold for the new ones as well. And what a constructor reads
off a split weight has to be what it is in the whole model.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.changes.output_files import OutputFiles, is_torch
from slapo_rewrite.changes.state import ModuleRequests
from slapo_rewrite.code.names import module_paths
from slapo_rewrite.model import construction_calls
from slapo_rewrite.model.emitted import Emitted
from slapo_rewrite.model.join import Sources
from slapo_rewrite.model.layers import splits_of
from slapo_rewrite.model.short_build import LeftOut
from slapo_rewrite.model.tree import Node, Tree, build_model
from slapo_rewrite.model.uncalled import HOOKS
from slapo_rewrite.project import Project


def check_kept(
    emitted: Emitted, built: Tree, project: Project, states: Mapping[str, ModuleRequests]
) -> None:
    """Parameters are there, frozen, and tied as in the original, and hooks are where they were.

    Args:
        emitted: The output.
        built: Its module tree, of one rank of several.
        project: The source and the original's tree.
        states: What was asked of each module path.

    Raises:
        Unsupported: Something is not.
    """
    tree, others = project.tree, _replaced(states)
    for path in others:
        _check_settings(tree.nodes[path[:-1]], built, project.sources)
    for path, node in tree.nodes.items():
        live = built.nodes[path].live if path in built.nodes else None
        if live is None or isinstance(live, LeftOut):
            continue
        lost = _uncalled(node.live, live)
        if not f"{path}.".startswith(others):
            parts = emitted.parts.get(path, {})
            lost = lost or _lost(node.live, live) or _resized(node.live, live, parts)
        if lost:
            raise _not_kept(node, lost)
    for name, names in tree.ties.items():
        path = name.rpartition(".")[0]
        if not f"{path}.".startswith(others) and _is_untied(names, built):
            shown = "` and `".join(names[:2])
            raise _not_kept(tree.nodes[path], f"`{shown}` are no longer one parameter there")


def check_attributes(
    emitted: Emitted,
    built: Tree,
    project: Project,
    outputs: OutputFiles,
    states: Mapping[str, ModuleRequests],
) -> None:
    """Numbers and words that modules hold are those of the original, or asked for.

    Args:
        emitted: The output.
        built: Its module tree, of one rank of several.
        project: The source and the original's tree.
        outputs: Say which attributes are to be a rank's share.
        states: What was asked of each module path.

    Raises:
        Unsupported: One is another.
    """
    shares, others = outputs.shares_of(project.tree), _replaced(states)

    def differing(other: Tree) -> Iterator[tuple[Node, str]]:
        for node, name in _other_values(project.tree, other):
            if name not in shares[node.path] and not f"{node.path}.".startswith(others):
                yield node, name

    wrong = list(differing(built))
    if not wrong:
        return
    make = project.schedule.module.model
    drawn = {(n.path, name) for n, name in differing(Tree(build_model(make, project.module)))}
    for node, name in wrong:
        if (node.path, name) not in drawn:
            lost = {(n.path, name) for n, name in differing(emitted.tree(make))}
            have, want = (getattr(t.nodes[node.path].live, name) for t in (built, project.tree))
            if (node.path, name) in lost:
                raise _not_kept(node, f"its `{name}` is {have!r} there, and was {want!r}")
            raise _read_off(node, name, have, want, project.sources)


def _replaced(states: Mapping[str, ModuleRequests]) -> tuple[str, ...]:
    """The paths of modules in whose places the schedule puts others, with a dot behind."""
    return tuple(f"{path}." for path, state in states.items() if state.replacement)


def _check_settings(node: Node, built: Tree, sources: Sources) -> None:
    """Refuses to replace, in a subclass's constructor, what the class's own sets attributes of.

    They are set on the original, before another module comes in its place.
    """
    owner = node.owner
    if owner is None or owner.path not in built.nodes:
        return
    if built.nodes[owner.path].cls.__name__ == owner.cls.__name__:
        return
    for file, own in sources.classes(owner.cls):
        if (constructor := file.method(own, "__init__")) is None:
            continue
        for each in ast.walk(constructor):
            match each:
                case ast.Attribute(value=value, attr=name, ctx=ast.Store()):
                    if node.relative in module_paths(value, constructor):
                        lost = f"its `{name}` is set before another module comes in its place"
                        raise _not_kept(node, lost, file.at(each))


def _uncalled(own: Any, other: Any) -> str | None:
    """What happens no more where another module is called, in words."""
    if "forward" in vars(own) and "forward" not in vars(other):
        return "it has not the `forward` there that was put on it"
    if any(len(getattr(own, table)) > len(getattr(other, table)) for table in HOOKS):
        return "it has not the hooks there that were put on it"
    return None


def _lost(own: Any, other: Any) -> str | None:
    """Which parameter of another module is not as it was, in words."""
    for name, parameter in own._parameters.items():
        if name not in other._parameters:
            continue
        have = other._parameters[name]
        if have is None or parameter is None:
            if have is not parameter:
                return f"its `{name}` is {'left out' if have is None else 'back'} there"
        elif have.requires_grad != parameter.requires_grad:
            return f"its `{name}` is {'not ' if have.requires_grad else ''}frozen there"
    return None


def _resized(own: Any, other: Any, parts: Mapping[str, tuple[int, int]]) -> str | None:
    """Which tensor is a part on a rank that nothing says is one, in words."""
    have: dict[str, Any] = {**other._parameters, **other._buffers}
    for name, tensor in {**own._parameters, **own._buffers}.items():
        there = have.get(name)
        if name in parts or tensor is None or there is None or there.shape == tensor.shape:
            continue
        shapes = f"{tuple(there.shape)} on a rank of two, and {tuple(tensor.shape)} whole"
        return f"its `{name}` is made of what is split: its shape is {shapes}"
    return None


def _is_untied(names: tuple[str, ...], built: Tree) -> bool:
    known = {name for name in names if name.rpartition(".")[0] in built.nodes}
    return len(known) > 1 and any(not known <= {*built.ties.get(n, ())} for n in known)


def _not_kept(node: Node, lost: str, at: errors.Span | None = None) -> errors.RewriteError:
    return errors.Unsupported(
        f"`{node.path or 's'}` (`{node.cls.__name__}`) is not the original's in the output: {lost}",
        at=at or construction_calls.place(construction_calls.stack_of(node.live)),
        hint="have it so from its own constructor, by an argument say, or schedule all instances "
        "of the class that holds it alike",
    )


def _other_values(tree: Tree, other: Tree) -> Iterator[tuple[Node, str]]:
    for path, node in tree.nodes.items():
        if path not in other.nodes:
            continue
        # A layer that is split has a rank's sizes, and what reads them is looked at.
        is_layer = is_torch(node.cls.__module__) or splits_of(node.live) is not None
        own, others = vars(node.live), vars(other.nodes[path].live)
        for name in own.keys() & others.keys() - {"training"}:
            whole, here = own[name], others[name]
            if is_layer and not _is_no_size(whole):
                continue
            if _is_plain(whole) and _is_plain(here) and whole != here:
                yield node, name


def _read_off(
    node: Node, name: str, have: object, want: object, sources: Sources
) -> errors.RewriteError:
    shown = f"{node.path}.{name}".lstrip(".")
    return errors.Unsupported(
        f"`{shown}` is {have!r} on a rank of two, and {want!r} in the whole model: its "
        "constructor reads it off something that is split",
        at=_assigned_at(sources, node.cls, name),
        hint="work it out of the constructor's arguments",
    )


def _assigned_at(sources: Sources, cls: type, name: str) -> errors.Span | None:
    for file, own in sources.classes(cls):
        constructor = file.method(own, "__init__")
        for node in ast.walk(constructor) if constructor is not None else ():
            match node:
                case ast.Attribute(attr=attribute, ctx=ast.Store()) if attribute == name:
                    return file.at(node)
    return None


def _is_no_size(value: object) -> bool:
    return isinstance(value, bool | float | str) and value == value


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, int | float | str) and value == value
