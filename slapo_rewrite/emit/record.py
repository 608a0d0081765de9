"""Reads `rewrite.json`: an output's inputs, its files, and why each line changed."""

from __future__ import annotations

import base64
import bz2
import functools
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.bundle import rules_folder

NAME = "rewrite.json"
SUPPORT = "support.json"  # the record of a support folder for several outputs


def digest(data: str | bytes) -> str:
    """The SHA-256 of a text or bytes."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def holds(path: Path, expected: str | None) -> bool:
    """Whether a file exists, and has this SHA-256."""
    return path.is_file() and digest(path.read_bytes()) == expected


def text_at(path: Path) -> str:
    """The text of an output's file, even if it is damaged; '' if there is none."""
    return path.read_bytes().decode(errors="replace") if path.is_file() else ""


@functools.cache
def tool_digest() -> str:
    """A hash of the tool's own files, since another version may give another output.

    Bundled schedules are left out: a record has its schedule's hash. The rules are inside the
    package only if it is installed.
    """
    root, rules = Path(__file__).resolve().parents[1], rules_folder()
    own = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    files = {name: path for name, path in own.items() if not name.startswith("rules/")}
    files |= {f"rules/{path.stem}": path for path in (rules / "fusions").glob("*.py")}
    files |= {f"measured/{path.stem}": path for path in (rules / "measured").glob("*.json")}
    total = hashlib.sha256()
    for name, path in sorted(files.items()):
        total.update(name.encode())
        total.update(path.read_bytes())
    return total.hexdigest()


def dumped(content: Mapping[str, Any]) -> str:
    """JSON with a line for each entry of the long lists."""
    text = json.dumps(content, indent=1, ensure_ascii=False, default=repr)
    # Lists of numbers go on one line.
    text = re.sub(r"\[\s+((?:-?\d+,?\s+)+)\]", lambda m: "[" + " ".join(m[1].split()) + "]", text)
    return text + "\n"


@functools.cache
def installed(package: str) -> str | None:
    """The version of an installed package, without importing it.

    The label of a build (`+cpu`) is removed: an output does not depend on it.
    """
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


# The schema of the parts of a record that are read: a list of one shape, a mapping to one (`*`),
# alternatives in a tuple; `?` marks optional keys.
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
    "half?": [str],
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
            "outcome?": str,
            "shares?": [str],
        }
    ],
    "changes?": [{"file": str, "lines": ([int], type(None)), "directives": [int], "why": str}],
    "rules?": [
        {
            "directive": int,
            "rule": str,
            "applied?": [str],
            "chosen?": {"*": str},
            "left?": {"*": str},
            "nearest?": str,
            "lacking?": [str],
        }
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
SUPPORT_SHAPE: Any = {"tool": {"digest": str}, "outputs": {"*": {"*": [str]}}, "files": {"*": str}}
# More than any Python file of an output has; a manipulated packed text may expand to far more.
MOST_BYTES = 32 << 20


def read(out: Path, name: str = NAME) -> dict[str, Any]:
    """The record of an output or a support folder; raises `NotAnOutput` without a valid one."""
    path = out / name
    if out.is_file():
        raise errors.NotAnOutput(f"`{out}` is a file, not the folder of an output")
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
            f"`{path}` is not a record of slapo-rewrite: its {wrong} is not valid",
            hint="restore it, or write to another folder",
        )
    return content  # type: ignore[no-any-return]


def found(out: Path, name: str = NAME) -> dict[str, Any] | None:
    """The record of an output or a support folder; None without a valid one."""
    try:
        return read(out, name)
    except errors.NotAnOutput:
        return None


def misfit(value: object, shape: Any, name: str = "top level") -> str | None:
    """The name of a part of a JSON value that does not match the schema; None if all match."""
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
    """Whether a value is the name of a file in a folder, and not a path elsewhere."""
    if not isinstance(name, str) or not name.strip(".") or "\0" in name:
        return False
    return not {"/", "\\"} & set(name)


def packed(text: str) -> str:
    """A text, compressed for a record: bzip2, then base 85."""
    return base64.b85encode(bz2.compress(text.encode())).decode()


def written_files(out: Path) -> dict[str, str]:
    """The Python files of an output as they were written, before any later edits."""
    kept = read(out).get("written", {})
    try:
        return {name: _unpacked(text) for name, text in kept.items()}
    except (ValueError, OSError, EOFError) as error:
        raise errors.NotAnOutput(
            f"`{out / NAME}` is damaged: its copy of the written files cannot be read: {error}"
        ) from None


def _unpacked(text: str) -> str:
    unpacker = bz2.BZ2Decompressor()
    data = unpacker.decompress(base64.b85decode(text), MOST_BYTES)
    if not unpacker.eof:
        raise ValueError("it is cut off, or too long")
    return data.decode()


def comparable(text: str) -> str:
    """The text of a record without the parts that say nothing about the output.

    The result of verification is added later. The tool's digest only saves `--check` a rewrite: an
    output stays current if another version of the tool gives the same files. The written files and
    the hashes of merged ones serve `--merge`.
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
    """The text of a record with the result of a verification."""
    return dumped({**json.loads(text), "verification": dict(verification)})


def with_merged(text: str, merged: Mapping[str, str]) -> str:
    """The text of a record with the hashes of files that contain merged hand edits."""
    content = json.loads(text)
    written = content.pop("written")
    kept = {"merged": {n: digest(t) for n, t in merged.items()}} if merged else {}
    return dumped({**content, **kept, "written": written})


def as_left(content: Mapping[str, Any], name: str) -> str | None:
    """The hash of an output's file as the tool left it, merged hand edits included."""
    merged, files = content.get("merged", {}), content["files"]
    found: str | None = merged.get(name, files.get(name))
    return found
