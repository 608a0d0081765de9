"""Builds the models of a source, a schedule and an output, on the meta device."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.directive import Directive
from slapo_rewrite.emit import record
from slapo_rewrite.emit.current import TOOL_CHANGED, Request
from slapo_rewrite.emit.one_rank import OneRank
from slapo_rewrite.emit.rewrite import try_out
from slapo_rewrite.model.emitted import Emitted, FailedOutput, imported
from slapo_rewrite.model.tree import Tree, build_model
from slapo_rewrite.project import Project
from slapo_rewrite.review.recorded_review import Recorded


class NotBuilt(Exception):
    """The models cannot be built; holds the reason."""


@dataclass(frozen=True)
class Models:
    """The models of the original and of the output."""

    schedule: Any  # the schedule's module
    source: ModuleType  # the original's module
    original: Tree  # the original's model
    alone: Tree  # the output's model in one process
    rank: Tree  # the output's model on rank 0 of `world` ranks
    world: int  # the number of ranks
    emitted: Emitted  # the imported output
    # The schedule's calls, with all their module paths.
    directives: tuple[Directive, ...]
    cuts: tuple[str, ...]  # the paths of the modules after which a pipeline stage ends


@contextlib.contextmanager
def built(recorded: Recorded, world: int | None) -> Iterator[Models]:
    """Builds the models, if the inputs are unchanged; the output is imported in the context."""
    request = _unchanged(recorded)
    is_split = any(call.primitive == "shard" for call in recorded.calls)
    ranks = world or (2 if is_split else 1)
    with contextlib.ExitStack() as stack:
        try:
            project = Project(request.source, request.schedule)
            stack.callback(sys.modules.__setitem__, project.original.name, project.module)
            make = project.schedule.module.model
            original = Tree(build_model(make, project.module))
            with contextlib.redirect_stdout(sys.stderr):
                knobs = project.schedule.settings(request.settings)
                on_ranks = OneRank(request.source, request.schedule, request.settings, try_out)
                plan = project.plan(knobs, on_ranks)
            files = _files(recorded)
            emitted = stack.enter_context(imported(files, recorded.content["source"]["file"]))
            alone = emitted.tree(make)
            rank = emitted.tree(make, ranks)
        except errors.RewriteError as error:
            raise NotBuilt(error.message) from error
        except FailedOutput as error:
            file, line = error.frames[-1]
            raise NotBuilt(f"{file}:{line} fails: {error}") from error
        if ranks > 1 and is_split and _sizes(alone) == _sizes(rank):
            raise NotBuilt(f"its sizes do not fit {ranks} ranks: give another --world")
        yield Models(
            project.schedule.module,
            project.module,
            original,
            alone,
            rank,
            ranks,
            emitted,
            tuple(plan.directives),
            tuple(path for path, state in plan.states.items() if state.cut),
        )


def _unchanged(recorded: Recorded) -> Request:
    """The request of the output; raises `NotBuilt` if its inputs are missing or changed."""
    request = recorded.request
    if isinstance(request, errors.RewriteError):
        raise NotBuilt(f"{request.message}: {request.hint}") from request
    # Another version of the tool builds the same models.
    if changed := [words for words in recorded.changed if words != TOOL_CHANGED]:
        raise NotBuilt(f"{'; '.join(changed)}: `slapo-rewrite update {recorded.out}` rewrites it")
    return request


def _files(recorded: Recorded) -> dict[str, str]:
    """The output's Python files, with those of its support folder by relative path."""
    out, content = recorded.out, recorded.content
    found = {name: out / name for name in content["files"] if name.endswith(".py")}
    if (support := content.get("support")) is not None:
        for path in sorted((out.parent / support["folder"]).glob("*.py")):
            found[f"../{support['folder']}/{path.name}"] = path
    return {name: record.text_at(path) for name, path in found.items()}


def _sizes(tree: Tree) -> list[tuple[int, ...]]:
    return [tuple(p.shape) for node in tree.nodes.values() for p in node.parameters.values()]
