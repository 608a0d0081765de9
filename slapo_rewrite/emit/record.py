"""`rewrite.json`: what went into an output, what came out, and why each line changed."""

from __future__ import annotations

import base64
import bz2
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slapo_rewrite import __version__, errors
from slapo_rewrite.bundle import rules_folder
from slapo_rewrite.code.splice import Change
from slapo_rewrite.code.text import with_wildcards
from slapo_rewrite.directive import Directive, depth_of
from slapo_rewrite.schedule.load import MODULE as SCHEDULE

if TYPE_CHECKING:
    from slapo_rewrite.code.file import SourceFile
    from slapo_rewrite.emit.rewrite import Project

NAME = "rewrite.json"
SUPPORT = "support.json"  # that of a folder of helpers for several outputs


def digest(data: str | bytes) -> str:
    """The SHA-256 of a text."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def stored(file: SourceFile) -> str:
    """The SHA-256 of a source file."""
    return digest(file.as_stored(file.text))


@functools.cache
def tool_digest() -> str:
    """One hash over the tool's own files: another tool may give another output.

    Without the bundled schedules: a record holds its schedule's own hash. The rules lie in the
    package only where it is installed.
    """
    root, rules = Path(__file__).resolve().parents[1], rules_folder()
    own = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    files = {name: path for name, path in own.items() if not name.startswith("rules/")}
    files |= {f"rules/{path.stem}": path for path in (rules / "fusions").glob("*.py")}
    total = hashlib.sha256()
    for name, path in sorted(files.items()):
        total.update(name.encode())
        total.update(path.read_bytes())
    return total.hexdigest()


def written(
    project: Project,
    model_file: str,
    directives: Sequence[Directive],
    knobs: Mapping[str, Any],
    given: Mapping[str, str],
    files: Mapping[str, str],
    changes: Mapping[str, Iterable[Change]],
    helpers: Mapping[str, Iterable[Directive]],
    single_file: bool,
    further: Iterable[str],
    absolute: Mapping[str, Iterable[int]],
    copies: Mapping[str, SourceFile],
    rules: Mapping[int, Iterable[Mapping[str, object]]],
    own: Mapping[str, Path],
    support: Mapping[str, Any] | None,
    warnings: Iterable[str],
) -> str:
    """The text of `rewrite.json`.

    Args:
        project: The source and the schedule.
        model_file: The name of the rewritten model file.
        directives: The primitive calls, and what was inferred.
        knobs: Every knob's value.
        given: The knobs that the command line set, as text.
        files: The output's other files.
        changes: Lines of the rewritten files, with what caused them.
        helpers: Helper files, with what caused them.
        single_file: Whether the helpers are part of the model file.
        further: The further helpers that were asked for.
        absolute: The lines of rewritten files with imports that were made absolute.
        copies: The other files that are rewritten, by their names in the output.
        rules: What became of the rules that a directive asked for, by its number.
        own: The user's modules that source and schedule import, by their names.
        support: The folder beside the output that holds its helpers, and what it uses of them.
        warnings: What could not be checked.
    """
    depth = depth_of(share for d in directives if d.paths for share in d.shares)
    applied = [{"directive": n, **note} for n, notes in rules.items() for note in notes]
    content = {
        "tool": {"name": "slapo-rewrite", "version": __version__, "digest": tool_digest()},
        "source": {
            "name": project.source_name,
            "file": model_file,
            "sha256": stored(project.original),
        },
        "schedule": {
            "name": project.schedule.name,
            "sha256": _read_digest(project.schedule.path, project.started),
        },
        "knobs": {name: knobs[name] for name in sorted(knobs)},
        "set": dict(sorted(given.items())),
        "single_file": single_file,
        **({"support": support} if support is not None else {}),
        **({"with": sorted(further)} if further else {}),
        **({"depth": depth} if depth > 2 else {}),
        "packages": packages(project, own),
        **({"copies": copied(copies)} if copies else {}),
        "depends": depends(project, copies, own),
        "files": {name: digest(text) for name, text in sorted(files.items())},
        "directives": [directive(d) for d in directives],
        "changes": [
            {
                "file": name,
                "lines": [change.first, change.last],
                "directives": [d.number for d in change.causes],
                "why": change.why,
            }
            for name, own in changes.items()
            for change in own
        ]
        + [
            {
                "file": name,
                "lines": None,
                "directives": sorted({d.number for d in causes}),
                "why": "what the model file calls",
            }
            for name, causes in sorted(helpers.items())
        ],
        **({"absolute": {n: [*lines] for n, lines in absolute.items()}} if absolute else {}),
        **({"rules": applied} if applied else {}),
        **({"warnings": told} if (told := [without_folder(w) for w in warnings]) else {}),
        "verification": None,
        "written": {n: packed(t) for n, t in sorted(files.items()) if n.endswith(".py")},
    }
    return dumped(content)


def without_folder(warning: str) -> str:
    """`/home/me/net.py:3: ...` -> `net.py:3: ...`: a record holds no path of one machine."""
    return re.sub(r"^[^:`\n]*[/\\]([^/\\:]+:\d+: )", r"\1", warning)


def dumped(content: Mapping[str, Any]) -> str:
    """JSON with a line for each entry of the long lists."""
    text = json.dumps(content, indent=1, ensure_ascii=False, default=repr)
    # Number lists, and what holds nothing else, on one line.
    text = re.sub(r"\[\s+((?:-?\d+,?\s+)+)\]", lambda m: "[" + " ".join(m[1].split()) + "]", text)
    return text + "\n"


def directive(item: Directive) -> dict[str, Any]:
    """One primitive call, with its module paths in short: numeric segments are written as `*`."""
    content = {
        "primitive": item.primitive,
        "line": item.at.line if item.at else None,
        "text": item.text,
        "paths": list(dict.fromkeys(with_wildcards(p) for p in item.paths)),
    }
    if item.inferred:
        return {**content, "inferred": item.inferred}
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
    return {name: version for name in ("torch", *sorted(tops)) if (version := installed(name))}


def installed(package: str) -> str | None:
    """The version of an installed package, without importing it.

    The label of a build (`+cpu`) is left out: an output does not depend on it.
    """
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def copied(copies: Mapping[str, SourceFile]) -> dict[str, dict[str, str]]:
    """The other files that are rewritten: the modules that they are, and their hashes."""
    return {
        name: {"module": file.name, "sha256": stored(file)} for name, file in sorted(copies.items())
    }


def depends(
    project: Project, copies: Mapping[str, SourceFile], own: Mapping[str, Path]
) -> dict[str, str]:
    """Hashes of the other files that go into an output.

    Those that the model's classes come from, torch's own apart, and the user's own modules.
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
            found[name] = digest(Path(file).read_bytes())
    names = own.keys() - {file.name for file in copies.values()}
    found |= {name: _read_digest(own[name], project.started) for name in names}
    return dict(sorted(found.items()))


def _read_digest(path: Path, started: float) -> str:
    """The hash of a user's file that was read in a run which began at a time, in seconds.

    None that a file could have where it was written to since: it may have been read before.
    """
    return digest(path.read_bytes()) if os.stat(path).st_mtime <= started else "changed meanwhile"


# What of a record is read again: a list of one shape, a mapping to one (`*`), alternatives in a
# tuple; `?` marks what may be left out.
SHAPE: Any = {
    "source": {"name": str, "file": str, "sha256": str},
    "schedule": {"name": str, "sha256": str},
    "files": {"*": str},
    "merged?": {"*": str},
    "tool?": {"version?": str, "digest?": str},
    "set?": {"*": str},
    "single_file?": bool,
    "support?": {"folder": str, "uses": {"*": [str]}},
    "with?": [str],
    "depth?": int,
    "absolute?": {"*": [int]},
    "packages?": {"*": str},
    "copies?": {"*": {"module": str, "sha256": str}},
    "depends?": {"*": str},
    "directives?": [
        {
            "primitive": str,
            "line": (int, type(None)),
            "text": str,
            "paths": [str],
            "inferred?": str,
            "shares?": [str],
        },
    ],
    "changes?": [
        {"file": str, "lines": ([int], type(None)), "directives": [int], "why": str},
    ],
    "rules?": [
        {
            "directive": int,
            "rule": str,
            "applied?": [str],
            "left?": {"*": str},
            "nearest?": str,
            "lacking?": [str],
        },
    ],
    "warnings?": [str],
    "verification?": (
        type(None),
        {
            "verdict": str,
            "worlds": [(int, str)],
            "changed": [str],
            "checks": [
                {
                    "world": (int, str),
                    "check": str,
                    "ok": bool,
                    "error?": (float, int, str, type(None)),
                    "limit?": (float, int),
                }
            ],
            "failures": [{"world": (int, str), "what": str}],
        },
    ),
    "written?": {"*": str},
}
SUPPORT_SHAPE: Any = {
    "tool": {"digest": str},
    "outputs": {"*": {"*": [str]}},
    "files": {"*": str},
}
# A Python file of an output has less; what is packed may grow by far more.
MOST_BYTES = 32 << 20


def read(out: Path, name: str = NAME) -> dict[str, Any]:
    """The record of an output folder, or that of a support folder, which has another name.

    Raises:
        NotAnOutput: There is none, or it is damaged.
    """
    path = out / name
    if path.exists() and not path.is_file():
        raise errors.NotAnOutput(f"`{path}` is not a file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise errors.NotAnOutput(
            f"`{out}` holds no {name}: it was not written by slapo-rewrite",
            hint=f"slapo-rewrite SOURCE --schedule S -o {out} writes an output there",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise errors.NotAnOutput(f"`{path}` cannot be read: {error}") from None
    wrong = misfit(content, SHAPE if name == NAME else SUPPORT_SHAPE)
    if wrong is None:
        names = [*content["files"], *content.get("outputs", ())]
        names += [content[key]["file"] for key in ("source",) if key in content]
        names += [content[key]["folder"] for key in ("support",) if key in content]
        wrong = next((f"files[{each!r}]" for each in names if not is_plain_name(each)), None)
    known = range(len(content.get("directives", ()))) if wrong is None else ()
    for change in content.get("changes", ()) if wrong is None else ():
        if not set(change["directives"]) <= set(known) or len(change["lines"] or (1, 1)) != 2:
            wrong = "changes"
    if wrong is None and any(n["directive"] not in known for n in content.get("rules", ())):
        wrong = "rules"
    if wrong is not None:
        raise errors.NotAnOutput(
            f"`{path}` is not a record of slapo-rewrite: its {wrong} is not what it writes",
            hint="restore it, or write to another folder",
        )
    return content  # type: ignore[no-any-return]


def misfit(value: object, shape: Any, name: str = "top level") -> str | None:
    """Which part of a value that was read from JSON has not the shape it should have."""
    if isinstance(shape, tuple):
        return None if any(misfit(value, each) is None for each in shape) else name
    if isinstance(shape, list):
        if not isinstance(value, list):
            return name
        return next((name for each in value if misfit(each, shape[0])), None)
    if not isinstance(shape, dict):
        return None if isinstance(value, shape) else name
    if not isinstance(value, dict):
        return name
    if "*" in shape:
        return next((name for each in value.values() if misfit(each, shape["*"])), None)
    for key, inner in shape.items():
        own = key.removesuffix("?")
        if own not in value:
            if own == key:
                return f"`{own}`"
        elif found := misfit(value[own], inner, f"`{own}`"):
            return found
    return None


def is_plain_name(name: object) -> bool:
    """Whether something is the name of a file in a folder, and leads nowhere else."""
    if not isinstance(name, str) or not name.strip(".") or "\0" in name:
        return False
    return not {"/", "\\"} & set(name)


def packed(text: str) -> str:
    """A text in as little room as a record should give it: bzip2, then base 85."""
    return base64.b85encode(bz2.compress(text.encode())).decode()


def written_files(out: Path) -> dict[str, str]:
    """The Python files of an output as they were written, whatever became of them since.

    Raises:
        NotAnOutput: The folder has no record.
    """
    kept = read(out).get("written", {})
    try:
        return {name: _unpacked(text) for name, text in kept.items()}
    except (ValueError, OSError, EOFError) as error:
        raise errors.NotAnOutput(
            f"`{out / NAME}` is damaged: what it keeps of the written files cannot be read: {error}"
        ) from None


def _unpacked(text: str) -> str:
    unpacker = bz2.BZ2Decompressor()
    data = unpacker.decompress(base64.b85decode(text), MOST_BYTES)
    if not unpacker.eof:
        raise ValueError("it is cut off, or too long")
    return data.decode()


def comparable(text: str) -> str:
    """The text of a record without what says nothing about the output.

    What verification found is added later, the digest of the tool only spares `--check` a rewrite
    (another tool that gives the same files leaves an output current), and the files themselves and
    what hand edits made of them are there for `--merge`.
    """
    try:
        content = json.loads(text)
    except ValueError:
        return text
    if not isinstance(content, dict):
        return text
    tool = content.get("tool", {})
    tool = {k: v for k, v in tool.items() if k != "digest"} if isinstance(tool, dict) else tool
    kept = {k: v for k, v in content.items() if k not in ("written", "merged")}
    return dumped({**kept, "tool": tool, "verification": None})


def with_verification(text: str, verification: Mapping[str, Any]) -> str:
    """The text of a record with a verification in it."""
    return dumped({**json.loads(text), "verification": dict(verification)})


def with_merged(text: str, merged: Mapping[str, str]) -> str:
    """The text of a record with what its files became by edits that were carried over.

    Args:
        text: The record.
        merged: The texts of the files that hold such edits, by name.
    """
    content = json.loads(text)
    written = content.pop("written")
    kept = {"merged": {n: digest(t) for n, t in merged.items()}} if merged else {}
    return dumped({**content, **kept, "written": written})


def as_left(content: Mapping[str, Any], name: str) -> str | None:
    """The hash of a file of an output as the tool left it, with the edits that it carried over."""
    merged, files = content.get("merged", {}), content["files"]
    found: str | None = merged.get(name, files.get(name))
    return found
