"""Makes the record of a new output: its inputs, its files, and why each line changed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slapo_rewrite import __version__
from slapo_rewrite.changes.mixed_precision import HalfPrecision
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.text import with_wildcards
from slapo_rewrite.directive import Directive, needed_depth
from slapo_rewrite.emit import record
from slapo_rewrite.emit.draft import Draft, Options
from slapo_rewrite.emit.support_folder import as_recorded
from slapo_rewrite.project import Project
from slapo_rewrite.schedule.load import MODULE as SCHEDULE
from slapo_rewrite.schedule.plan import Plan


def record_text(
    project: Project,
    draft: Draft,
    options: Options,
    plan: Plan,
    inferred: Iterable[Directive],
    knobs: Mapping[str, Any],
    files: Mapping[str, str],
    absolute: Mapping[str, Iterable[int]],
    copies: Mapping[str, SourceFile],
    own: Mapping[str, Path],
) -> str:
    """The text of `rewrite.json`.

    `inferred` are the inferred collectives, `absolute` the lines of rewritten files with imports
    that were made absolute, `copies` the other rewritten files, and `own` the user's modules that
    source and schedule import.
    """
    directives = [*plan.directives, *inferred]
    depth = needed_depth(directives)
    rules = [{"directive": n, **note} for n, notes in plan.notes.items() for note in notes]
    given = dict(item.split("=", 1) for item in options.settings)
    further = sorted(name for names in options.further.values() for name in names)
    half = {request.dtype for s in plan.states.values() for request, _ in s.asks(HalfPrecision)}
    support = {"folder": options.support, "uses": as_recorded(draft.uses or {})}
    warnings = [without_folder(warning) for warning in draft.warnings]
    content = {
        "tool": {"name": "slapo-rewrite", "version": __version__, "digest": record.tool_digest()},
        "source": {
            "name": project.source_name,
            "file": draft.model_file,
            "sha256": stored(project.original),
        },
        "schedule": {
            "name": project.schedule.name,
            "sha256": _read_digest(project.schedule.path, project.started),
        },
        "knobs": {name: knobs[name] for name in sorted(knobs)},
        "set": dict(sorted(given.items())),
        "single_file": options.single_file,
        **({"support": support} if options.support is not None else {}),
        **({"with": further} if further else {}),
        **({"depth": depth} if depth > 2 else {}),
        **({"half": sorted(half)} if half else {}),
        "packages": packages(project, own),
        **({"copies": copied(copies)} if copies else {}),
        "depends": depends(project, copies, own),
        "files": {name: record.digest(text) for name, text in sorted(files.items())},
        "directives": [directive(d) for d in directives],
        "changes": [*_changes(draft)],
        **({"absolute": {n: [*lines] for n, lines in absolute.items()}} if absolute else {}),
        **({"rules": rules} if rules else {}),
        **({"warnings": warnings} if warnings else {}),
        "verification": None,
        "written": {n: record.packed(t) for n, t in sorted(files.items()) if n.endswith(".py")},
    }
    return record.dumped(content)


def _changes(draft: Draft) -> Iterator[dict[str, Any]]:
    """The directives that caused each changed line, and those that need each helper file."""
    for name, own in draft.changes.items():
        for change in own:
            yield {
                "file": name,
                "lines": [change.first, change.last],
                "directives": [d.number for d in change.causes],
                "why": change.why,
            }
    for name, causes in sorted(draft.helper_causes().items()):
        yield {
            "file": name,
            "lines": None,
            "directives": sorted({d.number for d in causes}),
            "why": "what the model file calls",
        }


def stored(file: SourceFile) -> str:
    """The SHA-256 of a source file."""
    return record.digest(file.as_stored(file.text))


def without_folder(warning: str) -> str:
    """`/home/me/net.py:3: ...` -> `net.py:3: ...`: a record holds no machine's paths."""
    return re.sub(r"^[^:`\n]*[/\\]([^/\\:]+:\d+: )", r"\1", warning)


def directive(item: Directive) -> dict[str, Any]:
    """One primitive call, with numeric segments of its module paths replaced by `*`."""
    content = {
        "primitive": item.primitive,
        "line": item.at.line if item.at else None,
        "text": item.text,
        "paths": list(dict.fromkeys(with_wildcards(p) for p in item.paths)),
    }
    if item.inferred:
        return {**content, "inferred": item.inferred}
    if item.outcome is not None:
        return {**content, "outcome": item.outcome}
    shares = [str(share) for share in item.shares if item.paths]
    return {**content, "shares": shares} if shares else content


def packages(project: Project, own: Mapping[str, Path]) -> dict[str, str]:
    """Versions of torch, and of the packages that the source and the user's own modules import."""
    tops = {project.original.name.partition(".")[0]}
    tops |= {name.partition(".")[0] for name in project.original.imports.values()}
    for name in (SCHEDULE, *own):
        file = project.sources.file_named(name)
        tops |= {n.partition(".")[0] for n in file.imports.values()} if file is not None else set()
    tops -= {*sys.stdlib_module_names, *(name.partition(".")[0] for name in own), "torch"}
    return {
        name: version for name in ("torch", *sorted(tops)) if (version := record.installed(name))
    }


def copied(copies: Mapping[str, SourceFile]) -> dict[str, dict[str, str]]:
    """The other rewritten files, with their module names and hashes."""
    return {
        name: {"module": file.name, "sha256": stored(file)} for name, file in sorted(copies.items())
    }


def depends(
    project: Project, copies: Mapping[str, SourceFile], own: Mapping[str, Path]
) -> dict[str, str]:
    """The hashes of the other files that an output depends on.

    These are the files of the model's classes, without torch's, and the user's own modules.
    """
    modules = {node.cls.__module__ for node in project.tree.nodes.values()}
    config = getattr(project.tree.root.live, "config", None)
    if config is not None:
        modules.add(type(config).__module__)
    modules -= {file.name for file in copies.values()} | {project.file.name, SCHEDULE}
    found = {}
    for name in sorted(modules - own.keys()):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and name.split(".")[0] not in ("torch", "builtins"):
            found[name] = record.digest(Path(file).read_bytes())
    names = own.keys() - {file.name for file in copies.values()}
    found |= {name: _read_digest(own[name], project.started) for name in names}
    return dict(sorted(found.items()))


def _read_digest(path: Path, started: float) -> str:
    """The hash of a user's file that was read in a run which began at this time, in seconds.

    A file that was changed since gets an impossible hash, since it may have been read before.
    """
    return (
        record.digest(path.read_bytes())
        if os.stat(path).st_mtime <= started
        else "changed meanwhile"
    )
