"""Makes the file of an output with its pipeline stages."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from slapo_rewrite import errors
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.directive import Directive
from slapo_rewrite.errors import Span
from slapo_rewrite.model.emitted import Emitted
from slapo_rewrite.model.small_model import one_thread
from slapo_rewrite.project import Project

if TYPE_CHECKING:
    from slapo_rewrite.stages.pipeline_module import PipelineText
    from slapo_rewrite.stages.program import Cut


def pipeline_text(
    project: Project,
    cuts: Sequence[Cut],
    emitted: Emitted,
    files: Mapping[str, str],
    model_file: str,
    single_file: bool,
    sliced: Directive | None,
) -> PipelineText:
    """The text of `pipeline.py`, and the helpers that it needs.

    `emitted` is the imported output, and `sliced` the directive by which ranks hold slices of the
    activations between layers.
    """
    from slapo_rewrite.stages.cut import pipeline

    if single_file:
        raise errors.CannotCut(
            "pipeline stages need a separate file, which `--single-file` does not allow",
            at=cuts[0].cause.at,
            hint="leave out --single-file, or the cuts",
        )
    if others := [cut for cut in cuts if cut.target != cuts[0].target]:
        first, other = sorted((cuts[0], others[0]), key=lambda cut: cut.cause.number)
        raise errors.ConflictingEdits(
            f'this stage is cut for target="{other.target}", and another one for "{first.target}"',
            at=other.cause.at,
            cause=first.cause,
            hint="one pipeline.py is for one engine: give all cuts the same target",
        )
    file, schedule = project.file.edited(files[model_file]), project.schedule.module
    file.path = project.file.path.with_name(model_file)
    with one_thread():
        with project.timed("tree"):
            tree = emitted.tree(schedule.model)
        try:
            return pipeline(files, file, schedule, cuts, sliced, emitted.module, tree)
        except errors.CannotCut as error:
            places = [error.at, *error.also]
            error.at, *also = (
                place and _in_original(place, project.original, file) for place in places
            )
            error.also = tuple(place for place in also if place is not None)
            raise


def _in_original(place: Span, original: SourceFile, rewritten: SourceFile) -> Span:
    """The same place in the user's file, or in the rewritten one if the line is not there."""
    if place.path != rewritten.display:
        return place
    lines = original.text.splitlines(), rewritten.text.splitlines()
    for block in difflib.SequenceMatcher(None, *lines, autojunk=False).get_matching_blocks():
        if block.b < place.line <= block.b + block.size:
            return replace(place, line=place.line + block.a - block.b)
    return replace(place, path=f"rewritten/{rewritten.path.name}")
