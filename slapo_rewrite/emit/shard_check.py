"""Whether the output, as a rank builds it, has the classes and the parts that were asked for."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.changes.output_files import is_torch
from slapo_rewrite.changes.state import ModuleRequests, Shard
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.splice import Change
from slapo_rewrite.model.emitted import Emitted
from slapo_rewrite.model.join import Sources, find_parameter_site
from slapo_rewrite.model.tree import Node, Tree


def check_subclasses(file: SourceFile, text: str, changes: Sequence[Change], built: Tree) -> None:
    """A class that was written for some of a class's instances must be made.

    Args:
        file: The original.
        text: What it became.
        changes: What was written into it.
        built: The output's module tree.

    Raises:
        Unsupported: No module is of it: what was to make it makes other modules too.
    """
    known = {node.name for node in file.tree.body if isinstance(node, ast.ClassDef)}
    made = {cls.__name__ for node in built.nodes.values() for cls in type(node.live).__mro__}
    for node in ast.parse(text).body:
        if not isinstance(node, ast.ClassDef) or node.name in known | made:
            continue
        of = next((base.id for base in node.bases if isinstance(base, ast.Name)), "")
        here = (each for each in changes if each.first <= node.lineno <= each.last)
        causes = [cause for each in here for cause in each.causes]
        if of in known and causes:
            raise errors.Unsupported(
                f"of the modules that are a `{of}` some were to be made otherwise, by what makes "
                "others too",
                at=causes[0].at,
                hint="schedule all of them alike, or give some a class of their own",
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
