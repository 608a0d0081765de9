"""One folder of helpers for several outputs beside it.

    models/
      support/        the union of the helpers that the outputs use, and `support.json`
      bert/           imports `from ..support.tensor_parallel import ...`
      llama/

The record of each output has the names that it uses. The folder is always generated from the
records of the outputs beside it, so that outputs which were moved or use no folder do not count.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slapo_rewrite import __version__, errors
from slapo_rewrite.code import import_lines
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.splice import Change, Edit, apply_edits
from slapo_rewrite.emit import record
from slapo_rewrite.emit.helpers import library_files
from slapo_rewrite.emit.transaction import locked, made, put
from slapo_rewrite.emit.write import check_apart, edited, in_the_way, matches, recorded, write

# The names that an output uses from the folder, by helper module.
Uses = Mapping[str, Collection[str]]


def use_support(
    folder: str,
    uses: Uses,
    files: Mapping[str, str],
    changes: dict[str, list[Change]],
    lengths: Mapping[str, int],
) -> dict[str, str]:
    """The files of an output with its helpers in a support folder, by relative path.

    `changes` are the lines that the schedule caused; they are updated. `lengths` are the line
    lengths of files with another one than black's default.
    """
    helpers = helpers_of(uses)
    modules = {Path(name).stem for name in helpers}
    found = {f"../{folder}/{name}": text for name, text in helpers.items()}
    for name, text in files.items():
        if name in helpers:
            continue
        edits = _redirections(
            folder, name, text, modules, lengths.get(name, import_lines.LINE_LENGTH)
        )
        found[name], lines = apply_edits(text, edits, changes.get(name, ()))
        if name in changes:
            changes[name] = lines
    return found


def _redirections(
    folder: str, name: str, text: str, modules: Collection[str], line_length: int
) -> Iterator[Edit]:
    """The edits that import helpers from the support folder, with sorted import lines."""
    tree = ast.parse(text)
    file = SourceFile(Path(name), Path(name).stem, text, tree, line_length=line_length)
    runs: list[list[ast.ImportFrom]] = []
    for node in (n for n in file.statements if isinstance(n, ast.ImportFrom) and n.level == 1):
        if not runs or runs[-1][-1].end_lineno != node.lineno - 1:
            runs.append([])
        runs[-1].append(node)
    for run in runs:
        leads = [_lead(folder, node, modules) for node in run]
        if leads == [_lead("", node, ()) for node in run]:
            continue
        lines = [
            f"from {lead} import {', '.join(map(ast.unparse, node.names))}"
            for lead, node in sorted(zip(leads, run, strict=True), key=lambda pair: pair[0])
        ]
        for node, line in zip(run, lines, strict=True):
            placed = import_lines.instead(file, node, [line])
            yield placed.caused_by((), "import from the support folder")


def _lead(folder: str, node: ast.ImportFrom, modules: Collection[str]) -> str:
    """The module that names are imported from."""
    if node.module is None and modules and {alias.name for alias in node.names} <= set(modules):
        return f"..{folder}"
    return f"..{folder}.{node.module}" if node.module in modules else f".{node.module or ''}"


def as_recorded(uses: Uses) -> dict[str, list[str]]:
    """Names by helper module, in the form of records."""
    return {module: sorted(names) for module, names in sorted(uses.items())}


def helpers_of(uses: Uses) -> dict[str, str]:
    """The helper files of a support folder."""
    return library_files(uses, "# Written by slapo-rewrite; support.json says for which outputs.")


def _outputs(folder: Path, but: str) -> dict[str, Uses]:
    """The names that outputs beside a support folder use of it, without output `but`."""
    known = (record.found(folder, record.SUPPORT) or {}).get("outputs", ())
    found: dict[str, Uses] = {}
    for path in sorted(folder.absolute().parent.glob(f"*/{record.NAME}")):
        if path.parent.name == but:
            continue
        try:
            support = record.read(path.parent).get("support")
        except errors.NotAnOutput:
            if path.parent.name in known:
                raise
            continue  # may be a file of another tool
        if support is not None and support["folder"] == folder.absolute().name:
            found[path.parent.name] = support["uses"]
    return found


def _union(several: Iterable[Uses]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for uses in several:
        for module, names in uses.items():
            found.setdefault(module, set()).update(names)
    return found


def _files(outputs: Mapping[str, Uses]) -> dict[str, str]:
    """The files of a support folder for these outputs."""
    files = {
        "__init__.py": '"""What the rewritten models beside this folder have in common."""\n',
        **helpers_of(_union(outputs.values())),
    }
    content = {
        "tool": {"name": "slapo-rewrite", "version": __version__, "digest": record.tool_digest()},
        "outputs": {name: as_recorded(uses) for name, uses in sorted(outputs.items())},
        "files": {name: record.digest(text) for name, text in sorted(files.items())},
    }
    return {**files, record.SUPPORT: record.dumped(content)}


def is_current(out: Path, folder: Path, content: Mapping[str, Any]) -> bool:
    """Whether a support folder is up to date with the tool and the outputs, by hashes."""
    try:
        known = record.read(folder, record.SUPPORT)
        outputs = {
            **_outputs(folder, out.absolute().name),
            out.absolute().name: content["support"]["uses"],
        }
    except errors.NotAnOutput:
        return False
    same = known["tool"]["digest"] == record.tool_digest() and known["outputs"] == outputs
    return same and all(record.holds(folder / n, digest) for n, digest in known["files"].items())


def differing(out: Path, folder: Path, uses: Uses) -> list[str]:
    """The files of a support folder that differ from what an output and the others need."""
    name = out.absolute().name
    wanted = _files({**_outputs(folder, name), name: uses})
    return [f"{folder / each}" for each in matches(folder, wanted, record.SUPPORT)]


def write_both(
    out: Path,
    files: Mapping[str, str],
    folder: Path,
    uses: Uses,
    *,
    force: bool = False,
    replacing: Mapping[str, str] | None = None,
    inputs: Collection[Path] = (),
) -> None:
    """Writes an output and its support folder; if one fails, the other is restored.

    At all times the folder has what the output imports: first the union of its old and new helpers,
    and at the end the new ones only.
    """
    check_apart(folder, inputs)
    name = out.absolute().name
    with made(folder), locked(folder):
        others = _outputs(folder, name)
        if not force:
            _check_tool(folder, others)
        both = _meanwhile(others, name, _used_before(out, folder), uses)
        wrong = in_the_way(folder, both, record.SUPPORT)
        if wrong and not force:
            hint = "--force overwrites them. Code for this model alone belongs in its own folder"
            raise edited(folder, wrong, hint)
        known = recorded(folder, record.SUPPORT)
        names = [each for each in (*known, record.SUPPORT) if (folder / each).is_file()]
        before = {each: (folder / each).read_bytes() for each in names}
        put(folder, _encoded(both), known)
        try:
            write(out, files, force=force, replacing=replacing, inputs=inputs)
        except BaseException:
            put(folder, before, both.keys())
            raise
        put(folder, _encoded(_files({**others, name: uses})), both.keys())


def _meanwhile(others: Mapping[str, Uses], name: str, before: Uses, uses: Uses) -> dict[str, str]:
    """The files while an output is written: the union of its old and new helpers.

    Only the new ones if a function gets another backend: a file can hold one of them only, and the
    old output can call either.
    """
    try:
        return _files({**others, name: _union([before, uses])})
    except errors.Unsupported:
        return _files({**others, name: uses})


def _encoded(files: Mapping[str, str]) -> dict[str, bytes]:
    return {name: text.encode() for name, text in files.items()}


def _used_before(out: Path, folder: Path) -> Uses:
    """The names that an output uses of a support folder before it is rewritten."""
    support = (record.found(out) or {}).get("support", {})
    uses: Uses = support["uses"] if support.get("folder") == folder.absolute().name else {}
    return uses


def _check_tool(folder: Path, others: Collection[str]) -> None:
    """Refuses changes of helpers that other outputs import, if another tool version made them."""
    known = record.found(folder, record.SUPPORT)
    if not others or known is None or known["tool"]["digest"] == record.tool_digest():
        return
    today = _files(known["outputs"])
    if any(record.digest(today.get(n, "")) != digest for n, digest in known["files"].items()):
        raise errors.OthersWouldChange(
            f"`{folder}` was written by another version of slapo-rewrite, and the helpers that "
            f"{', '.join(others)} import would change",
            hint="give another folder, and write these outputs with it as well. Or use --force, "
            "and write these outputs again before use",
        )
