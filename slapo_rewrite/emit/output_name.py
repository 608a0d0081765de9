"""Checks the name of an output folder, which is a package and imported by its name."""

from __future__ import annotations

import ast
import contextlib
import keyword
import os
import re
import sys
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from slapo_rewrite import errors
from slapo_rewrite.code.locate import locate as locate_source
from slapo_rewrite.code.text import may_be_bound
from slapo_rewrite.emit import record
from slapo_rewrite.emit.inputs import imported
from slapo_rewrite.emit.write import check_apart
from slapo_rewrite.schedule.load import locate as locate_schedule

# Packages that any output may import.
IMPORTED = frozenset({"torch", "transformers", "triton", "deepspeed", "safetensors"})


def check_name(
    out: Path, source: str, schedule: str | None, single_file: bool, support: Path | None = None
) -> None:
    """Refuses a name by which an output could not be imported, or would hide what it imports.

    A single-file output is imported by its module's name, so its folder may have any name that is
    not a file's. `schedule` is None if there is none yet; `support` is the folder beside the output
    for its helpers, or None.
    """
    path = Path(os.path.abspath(out))
    if path.suffix == ".py":
        raise errors.UsageError(
            f"`{out}` is the name of a file: an output is a folder, with the model file, its "
            "record and its diff",
            hint=_another(out, path.stem),
        )
    if single_file or not path.name:
        return
    if not _importable(path.name):
        raise errors.UsageError(
            f"`{path.name}` cannot be imported: an output is a package, so its name has to be a "
            "Python identifier, and no keyword",
            hint=_another(out, path.name),
        )
    file, module = locate_source(source)
    files = [file, *([locate_schedule(schedule)] if schedule is not None else [])]
    check_apart(out, files)
    if support is not None:
        _check_beside(out, support, module, files)
        return
    if _hides(path, module, files):
        raise errors.UsageError(
            f"an output called `{path.name}` would hide the module `{path.name}`",
            hint=_another(out, f"{path.name}_rewritten"),
        )


def _check_beside(out: Path, support: Path, module: str, files: Iterable[Path]) -> None:
    """Refuses a support folder that an output could not import as `..NAME`."""
    path, its = (Path(os.path.abspath(each)) for each in (out, support))
    if path == its or path.parent != its.parent:
        another = out.parent / (its.name if path != its else "support")
        raise errors.UsageError(
            f"`{support}` is not in the folder of `{out}`: a model file imports `..{its.name}`",
            hint=f"give `--support {another}`",
        )
    for each in (its.name, path.parent.name):
        if not _importable(each):
            raise errors.UsageError(
                f"`{each}` cannot be imported: output and support folder are packages, and so is "
                "the folder around them",
                hint=f"give `-o models/{path.name} --support models/support`",
            )
    if _hides(path.parent, module, files):
        raise errors.UsageError(
            f"outputs in `{path.parent.name}` would hide the module `{path.parent.name}`",
            hint=f"give `-o models/{path.name} --support models/{its.name}`",
        )


def _importable(name: str) -> bool:
    """Whether `import NAME` looks for a folder of exactly this name.

    Python normalises identifiers to Unicode's form NFKC, which turns a ligature into two letters.
    """
    plain = unicodedata.normalize("NFKC", name) == name and name != "__main__"
    return plain and may_be_bound(name)


def _hides(package: Path, module: str, files: Iterable[Path]) -> bool:
    """Whether a package has the name of a module that an output may import."""
    inside = (package.parent / "__init__.py").is_file()  # then it has a dotted name
    return not inside and package.name in _imported(module, files)


def _imported(module: str, files: Iterable[Path]) -> set[str]:
    """The top-level modules that an output may import."""
    package, dot, _ = module.partition(".")
    found = {*sys.stdlib_module_names, *IMPORTED, *([package] if dot else [])}
    for file in files:
        with contextlib.suppress(OSError, SyntaxError, ValueError):  # reported later
            found |= {
                name.partition(".")[0] for name in imported(ast.parse(file.read_bytes()), None)
            }
    return found


def _another(out: Path, wanted: str) -> str:
    """A hint with another name."""
    name = re.sub(r"\W", "_", unicodedata.normalize("NFKC", wanted)).replace("__main__", "main")
    name = f"out_{name}" if not name.isidentifier() else name
    name = f"{name}_" if keyword.iskeyword(name) else name
    if out.name != os.path.basename(os.path.abspath(out)):  # such as `.`
        return "give a separate folder, such as `-o out`"
    other = out.with_name(name)
    if (out / record.NAME).is_file():
        return f"rename that folder to `{other}`, and give `-o {other}`"
    return f"give another name, such as `-o {other}`"
