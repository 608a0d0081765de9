"""Whether the output, as a rank builds it, has the classes and the parts that were asked for."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.changes.output_files import OutputFiles, is_torch
from slapo_rewrite.changes.state import ModuleRequests, Shard
from slapo_rewrite.model.emitted import Emitted
from slapo_rewrite.model.join import Sources, find_parameter_site
from slapo_rewrite.model.layers import splits_of
from slapo_rewrite.model.short_build import LeftOut
from slapo_rewrite.model.tree import Node, Tree, build_model
from slapo_rewrite.project import Project


def check_classes(built: Tree, tree: Tree, outputs: OutputFiles) -> None:
    """The modules that were to be of another class are, and no others.

    Args:
        built: The output's module tree.
        tree: The original's.
        outputs: Say what was to be made.

    Raises:
        Unsupported: What makes some modules makes others too, or puts them elsewhere.
    """
    made_in = list(outputs.made_in(tree))
    meant = {node.path: (made.class_name, why) for node, made, why in made_in}
    functions = {node.path for node, made, _ in made_in if not made.is_class}
    written = dict(meant.values())
    for path, node in tree.nodes.items():
        if path not in built.nodes or path in functions:
            continue
        if built.nodes[path].cls is LeftOut:  # one that is made stands for it
            continue
        have, was = built.nodes[path].cls.__name__, node.cls.__name__
        want, causes = meant.get(path, (was, written.get(have, ())))
        if have != want and (path in meant or have in written):
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
        Unsupported: A parameter is whole: something replaces the part after it was made.
    """
    for path, parts in emitted.parts.items():
        shards = {s.name: s for s in states[path].shards} if path in states else {}
        for name in {**parts, **shards} if parts else ():
            have: Any = getattr(built.nodes[path].live, name, None)
            axis, size = parts.get(name, (0, None))
            if have is not None and have.shape[axis] != size:
                raise _replaced(tree.nodes.get(path, built.nodes[path]), name, shards, sources)


def check_numbers(built: Tree, project: Project, outputs: OutputFiles) -> None:
    """What a constructor works out of sizes is what it is in the whole model, or asked for.

    A number that it reads off a weight is a rank's there, and no operation shows that.

    Args:
        built: The output's module tree, of one rank of several.
        project: The source and the original's tree.
        outputs: Say which attributes are to be a rank's share.

    Raises:
        Unsupported: A number is another one.
    """
    shares = outputs.shares_of(project.tree)
    wrong = list(_other_numbers(project.tree, built, shares))
    if not wrong:
        return
    again = Tree(build_model(project.schedule.module.model, project.module))
    drawn = {(node.path, name) for node, name in _other_numbers(project.tree, again, shares)}
    for node, name in wrong:
        if (node.path, name) not in drawn:
            have, want = (getattr(t.nodes[node.path].live, name) for t in (built, project.tree))
            shown = f"{node.path}.{name}".lstrip(".")
            raise errors.Unsupported(
                f"`{shown}` is {have!r} on a rank of two, and {want!r} in the whole model: its "
                "constructor reads it off something that is split",
                at=_assigned_at(project.sources, node.cls, name),
                hint="work it out of the constructor's arguments",
            )


def _other_numbers(
    tree: Tree, other: Tree, shares: Mapping[str, set[str]]
) -> Iterator[tuple[Node, str]]:
    for path, node in tree.nodes.items():
        # A layer that is split has a rank's sizes, and what reads them is looked at.
        is_layer = is_torch(node.cls.__module__) or splits_of(node.live) is not None
        if is_layer or path not in other.nodes:
            continue
        own, others = vars(node.live), vars(other.nodes[path].live)
        for name in (own.keys() & others.keys()) - shares[path]:
            whole, here = own[name], others[name]
            if _is_number(whole) and _is_number(here) and whole != here:
                yield node, name


def _assigned_at(sources: Sources, cls: type, name: str) -> errors.Span | None:
    for file, own in sources.classes(cls):
        constructor = file.method(own, "__init__")
        for node in ast.walk(constructor) if constructor is not None else ():
            match node:
                case ast.Attribute(attr=attribute, ctx=ast.Store()) if attribute == name:
                    return file.at(node)
    return None


def _is_number(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_number, value))
    return isinstance(value, int | float) and value == value


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
