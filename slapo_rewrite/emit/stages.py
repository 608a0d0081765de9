"""The file of an output that holds its pipeline stages."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from slapo_rewrite import errors
from slapo_rewrite.edit.state import Directive
from slapo_rewrite.emit.helpers import helper_files, runtime_library
from slapo_rewrite.stages.program import Cut

if TYPE_CHECKING:
    from slapo_rewrite.emit.rewrite import Project

# What every pipeline uses of the runtime module.
USED = {"check_ties", "gathered", "has_place", "keep", "stage_of"}


def stage_files(
    project: Project,
    cuts: Sequence[Cut],
    files: Mapping[str, str],
    used: Mapping[str, set[str]],
    header: str,
    single_file: bool,
    sliced: Directive | None,
) -> dict[str, str]:
    """`pipeline.py`, and the helper files that it needs.

    Args:
        project: The source and the schedule.
        cuts: Where stages end.
        files: The output's other files.
        used: Names that the model file uses of each helper module.
        header: A comment that says what made the file.
        single_file: Whether there is to be one file only.
        sliced: What lets ranks hold slices of the values between layers.

    Raises:
        CannotCut: No stage can end there.
    """
    from slapo_rewrite.stages.cut import pipeline

    if single_file:
        raise errors.CannotCut(
            "pipeline stages are a file of their own, which `--single-file` does not leave",
            at=cuts[0].cause.at,
            hint="leave out --single-file, or the cuts",
        )
    files = {"__init__.py": "", **files}
    text = pipeline(files, project.file, project.schedule.module, cuts, sliced)
    wanted = USED | ({"count_once"} if text.tie else set())
    wanted |= {"check_settings"} if text.settings else set()
    wanted |= {"model_parallel_group"} if text.has_shards else set()
    picked = runtime_library("pipeline").pick(wanted)
    imports: dict[str, set[str]] = {}
    for line in (line for group in picked.imports for line in group):
        statement = ast.parse(line).body[0]
        if isinstance(statement, ast.ImportFrom):
            module = "." * statement.level + (statement.module or "")
            imports.setdefault(module, set()).update(a.name for a in statement.names)
        elif isinstance(statement, ast.Import):
            for alias in statement.names:
                shown = alias.name + (f" as {alias.asname}" if alias.asname else "")
                imports.setdefault(shown, set()).add("")
    more = helper_files({**used, **picked.helpers}, project.schedule, header)
    return {
        "pipeline.py": text.written(header, picked.body, imports),
        "delayed.py": more["delayed.py"],
    }
