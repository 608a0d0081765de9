"""What is new in an output that was written again, beside what its source has changed itself."""

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
    """What is new in one file."""

    name: str  # the file's name
    # What it held, with what the source has changed itself; None where it is new.
    before: str | None
    now: str | None  # what it is to hold; None where it is no longer written
    from_source: int = 0  # how many places the source has changed itself

    def render(self, context: int = 1) -> str:
        """The difference as a unified diff, with a remark on what it leaves out."""
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
    """What is new in the Python files of a folder's output, which was not put there yet."""
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
    """A file as it was, with the changes in it that its source has made alike, and how many."""
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
    """Where two texts differ: what stands there in one, and in the other."""
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    return [
        (a, (tuple(old[a:b]), tuple(new[c:d])))
        for tag, a, b, c, d in matcher.get_opcodes()
        if tag != "equal"
    ]
