"""Reads the diff of an output: which lines it puts in, and what the original was."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from slapo_rewrite.emit.diff_colours import HUNK

NO_END = "\\ No newline at end of file"


@dataclass
class Hunk:
    """Lines of a rewritten file, and those of the original that they stand for.

    Attributes:
        file: The file's name in the output.
        first: The first of the rewritten file's lines, 1-based; the one before, where it has none.
        old: The original's lines, each with its end.
        new: The rewritten file's.
        added: The numbers of its lines that the original does not have.
    """

    file: str
    first: int
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    added: list[int] = field(default_factory=list)


def hunks(diff: str) -> Iterator[Hunk]:
    """The hunks of a unified diff, whose new side is `rewritten/FILE`."""
    file, mark, found = "", "", Hunk("", 0)
    old = new = 0  # lines that the hunk still has: one that begins with `---` may be a removed one
    for line in diff.split("\n"):
        if line == NO_END:
            for side in {"-": [found.old], "+": [found.new]}.get(mark, [found.old, found.new]):
                side[-1] = side[-1].removesuffix("\n")
        elif old > 0 or new > 0:
            mark, text = line[:1], line[1:] + "\n"
            if mark in ("-", " "):
                found.old.append(text)
                old -= 1
            if mark in ("+", " "):
                if mark == "+":
                    found.added.append(found.first + len(found.new))
                found.new.append(text)
                new -= 1
        elif place := HUNK.match(line):
            if found.file:
                yield found
            old, new = (int(count or 1) for count in place.groups())
            found = Hunk(file, int(re.findall(r"\+(\d+)", line)[0]))
        elif line.startswith("+++ "):
            file = line.partition("/")[2]
    if found.file:
        yield found


def original_text(diff: str, name: str, text: str) -> str | None:
    """What a rewritten file was made of, its imports absolute.

    Args:
        diff: The output's diff.
        name: The file's name.
        text: What it holds.

    Returns:
        None where the diff is of another text.
    """
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    # Backwards, so that places stay what they are.
    for hunk in reversed([hunk for hunk in hunks(diff) if hunk.file == name]):
        start = hunk.first - 1 if hunk.new else hunk.first
        end = start + len(hunk.new)
        if lines[start:end] != hunk.new:
            return None
        lines[start:end] = hunk.old
    return "".join(lines)
