"""Whether the output, as a rank builds it, has the parts that were asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.changes.output_files import is_torch
from slapo_rewrite.changes.state import ModuleRequests, Shard
from slapo_rewrite.model.emitted import Emitted
from slapo_rewrite.model.join import Sources, find_parameter_site
from slapo_rewrite.model.tree import Node, Tree


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
