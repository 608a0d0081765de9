"""The differences of a new output to the old one, without changes of the source itself."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slapo_rewrite.emit import record
from slapo_rewrite.emit.diff_hunks import ended_lines, original_text
from slapo_rewrite.emit.rewrite import Output
from slapo_rewrite.emit.source_diff import unified_diff

SIDES = ("before", "now")


@dataclass(frozen=True)
class Fresh:
    """The differences in one file."""

    name: str  # the file's name
    # Its old text, updated by the changes of its source; None for a new file.
    before: str | None
    now: str | None  # its new text; None if it is no longer written
    from_source: int = 0  # the number of changes of the source itself

    def render(self, context: int = 1) -> str:
        """The differences as a unified diff, with a remark on changes of the source."""
        if self.before is None:
            return f"# {self.name}: new, {len((self.now or '').splitlines())} lines\n"
        if self.now is None:
            return f"# {self.name}: no longer written\n"
        remark = ""
        if self.from_source:
            places = "place" if self.from_source == 1 else "places"
            remark = f"# {self.name}: the source has changed in {self.from_source} {places}\n"
        return remark + unified_diff(self.before, self.now, self.name, context, SIDES)


def fresh_in(out: Path, output: Output) -> list[Fresh]:
    """The differences of an output, not written yet, to the Python files of a folder."""
    before = record.written_files(out)
    diff = record.text_at(out / "rewrite.diff")
    now = {name: text for name, text in output.files.items() if name.endswith(".py")}
    found = []
    for name in sorted({*before, *now}):
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        count = 0
        if old is not None and new is not None and name in output.originals:
            source = original_text(diff, name, old)
            if source is not None:
                own = output.originals[name].absolute
                old, count = _with_sources_own(old, new, source, own)
        found.append(Fresh(name, old, new, count))
    return found


def _with_sources_own(old: str, new: str, source: str, source_now: str) -> tuple[str, int]:
    """The old text of a file, updated by the changes that its source has as well; their number."""
    own = Counter(change for _, change in _changes(ended_lines(source), ended_lines(source_now)))
    lines, count = ended_lines(old), 0
    for start, change in reversed(_changes(lines, ended_lines(new))):
        if own[change]:
            own[change] -= 1
            count += 1
            lines[start : start + len(change[0])] = change[1]
    return "".join(lines), count


_Change = tuple[tuple[str, ...], tuple[str, ...]]


def _changes(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, _Change]]:
    """The differences of two texts: the line number, and the lines in each."""
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    return [
        (a, (tuple(old[a:b]), tuple(new[c:d])))
        for tag, a, b, c, d in matcher.get_opcodes()
        if tag != "equal"
    ]
