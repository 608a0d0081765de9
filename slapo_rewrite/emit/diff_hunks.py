"""Parses the diff of an output: colours it, finds added lines, restores the original."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
NO_END = "\\ No newline at end of file"
HEADER, PLACE, REMOVED, ADDED, END = "\x1b[1m", "\x1b[36m", "\x1b[31m", "\x1b[32m", "\x1b[m"
COLOURS = {"-": REMOVED, "+": ADDED, "@": PLACE}


def marked(diff: str) -> Iterator[tuple[str, str]]:
    """Each line of a unified diff with its mark: `@` begins a hunk; '' is for lines outside hunks.

    A line of a hunk that begins with `---` may be a removed one, so lines are counted.
    """
    old = new = 0
    for line in diff.split("\n"):
        mark = line[:1]
        if (old > 0 or new > 0) and line != NO_END:
            old -= mark in ("-", " ")
            new -= mark in ("+", " ")
            yield mark, line
        elif hunk := HUNK.match(line):
            old, new = int(hunk[1] or 1), int(hunk[3] or 1)
            yield "@", line
        else:
            yield "", line


def coloured(diff: str) -> str:
    """The diff in git's colours: removed lines are red, added ones green."""
    shown = []
    for mark, line in marked(diff):
        is_header = not mark and line[:3] in ("---", "+++")
        colour = HEADER if is_header else COLOURS.get(mark, "")
        shown.append(f"{colour}{line}{END}" if colour else line)
    return "\n".join(shown)


@dataclass
class Hunk:
    """Lines of a rewritten file, and the lines of the original that they replace."""

    file: str  # the file's name in the output
    # The number of its first line in the rewritten file, 1-based; or of the line before it.
    first: int
    old: list[str] = field(default_factory=list)  # the original's lines, each with its end
    new: list[str] = field(default_factory=list)  # the rewritten file's lines
    # The numbers of the lines that the original does not have.
    added: list[int] = field(default_factory=list)


def hunks(diff: str) -> Iterator[Hunk]:
    """The hunks of a unified diff, whose new side is `rewritten/FILE`."""
    file, last, found = "", "", Hunk("", 0)
    for mark, line in marked(diff):
        if line == NO_END:
            for side in {"-": [found.old], "+": [found.new]}.get(last, [found.old, found.new]):
                side[-1] = side[-1].removesuffix("\n")
        elif mark == "@" and (place := HUNK.match(line)):
            if found.file:
                yield found
            found = Hunk(file, int(place[2]))
        elif mark:
            last, text = mark, line[1:] + "\n"
            if mark in ("-", " "):
                found.old.append(text)
            if mark == "+":
                found.added.append(found.first + len(found.new))
            if mark in ("+", " "):
                found.new.append(text)
        elif line.startswith("+++ "):
            file = line.partition("/")[2]
    if found.file:
        yield found


def ended_lines(text: str) -> list[str]:
    """The lines of a text with their ends; the last one may have none."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def original_text(diff: str, name: str, text: str) -> str | None:
    """The original of a rewritten file, with absolute imports.

    None if the diff does not fit the text.
    """
    lines = ended_lines(text)
    # Backwards, so that earlier line numbers stay valid.
    for hunk in reversed([hunk for hunk in hunks(diff) if hunk.file == name]):
        start = hunk.first - 1 if hunk.new else hunk.first
        end = start + len(hunk.new)
        if lines[start:end] != hunk.new:
            return None
        lines[start:end] = hunk.old
    return "".join(lines)
