"""A unified diff as a terminal shows it."""

from __future__ import annotations

import re
from collections.abc import Iterator

HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
HEADER, PLACE, REMOVED, ADDED, END = "\x1b[1m", "\x1b[36m", "\x1b[31m", "\x1b[32m", "\x1b[m"


def coloured(diff: str) -> str:
    """The diff in git's colours: what goes is red, what comes is green."""
    return "\n".join(f"{c}{line}{END}" if c and line else line for c, line in _colours(diff))


def _colours(diff: str) -> Iterator[tuple[str, str]]:
    """Each line with its colour."""
    old = new = 0  # lines that the hunk still has: one that begins with `---` may be a removed one
    for line in diff.split("\n"):
        if old > 0 or new > 0:
            old -= line[:1] in ("-", " ")
            new -= line[:1] in ("+", " ")
            yield {"-": REMOVED, "+": ADDED}.get(line[:1], ""), line
        elif hunk := HUNK.match(line):
            old, new = (int(count or 1) for count in hunk.groups())
            yield PLACE, line
        else:
            yield HEADER if line[:3] in ("---", "+++") else "", line
