"""Compares rewritten files with their originals."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from slapo_rewrite.code.file import SourceFile, lines_of
from slapo_rewrite.code.splice import apply_edits
from slapo_rewrite.emit.diff_hunks import ended_lines
from slapo_rewrite.emit.sibling_files import absolute_imports


@dataclass(frozen=True)
class Original:
    """The original that a rewritten file is compared with."""

    text: str  # the source
    absolute: str  # the source, with relative imports that the rewritten file has as absolute
    lines: tuple[int, ...]  # the lines of these imports in the rewritten file

    @classmethod
    def of(cls, file: SourceFile, rewritten: str) -> Original:
        """The original of a rewritten file."""
        before = set(lines_of(file.text))  # absolute before, or examples in strings
        imported = {
            number: line.split()[1]
            for number, line in enumerate(lines_of(rewritten), 1)
            if line.lstrip().startswith("from ") and len(line.split()) > 1 and line not in before
        }
        known = set(imported.values())
        edits = [e for e in (absolute_imports(file) if file.package else []) if e.text in known]
        text = file.as_stored(apply_edits(file.text, edits)[0])
        made = {e.text for e in edits}
        own = tuple(number for number, module in imported.items() if module in made)
        return cls(file.as_stored(file.text), text, own)


def whole_diff(originals: Mapping[str, Original], files: Mapping[str, str], context: int) -> str:
    """The unified diffs of all rewritten files against their originals, model file first."""
    text = ""
    for name, original in originals.items():
        if count := len(original.lines):
            shown = "a relative import" if count == 1 else f"{count} relative imports"
            text += f"# {name}: {shown} of the original made absolute, which is not shown\n"
        text += unified_diff(original.absolute, files[name], name, context)
    return text


def unified_diff(
    before: str,
    after: str,
    name: str,
    context: int,
    sides: tuple[str, str] = ("original", "rewritten"),
) -> str:
    """The unified diff of two texts; '' if they are equal."""
    lines = difflib.unified_diff(
        ended_lines(before),
        ended_lines(after),
        f"{sides[0]}/{name}",
        f"{sides[1]}/{name}",
        n=context,
    )
    return "".join(
        line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines
    )
