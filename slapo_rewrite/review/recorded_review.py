"""The part of a review that comes from the record and the files, without building a model."""

from __future__ import annotations

import ast
import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.code.file import lines_of
from slapo_rewrite.emit import record
from slapo_rewrite.emit.current import Request, reasons, requested_again
from slapo_rewrite.emit.diff_hunks import original_text
from slapo_rewrite.emit.explanation import more_of, rule_words
from slapo_rewrite.emit.write import hand_edited
from slapo_rewrite.primitives.page import first_line
from slapo_rewrite.review.review_parts import (
    Call,
    Check,
    Compared,
    Helper,
    Part,
    Reason,
    Row,
    RuleOutcome,
    ScheduleLine,
    Verification,
)
from slapo_rewrite.schedule.load import locate

CONTEXT = 3


@dataclass(frozen=True)
class Recorded:
    """An output's record and files, prepared for a review."""

    out: Path  # the folder
    content: Mapping[str, Any]  # the record
    calls: tuple[Call, ...]  # the schedule's calls, in the record's order
    files: tuple[Compared, ...]  # the rewritten files, compared with their originals
    helpers: tuple[Helper, ...]  # the new files
    rules: tuple[RuleOutcome, ...]  # the outcomes of rules
    verification: Verification | None  # None if the output was not verified
    # The schedule's lines; only those that call a primitive, if the schedule changed or is missing.
    schedule: tuple[ScheduleLine, ...]
    has_schedule: bool  # whether it is the whole schedule
    # Hand-edited files: their written text compared with their current one.
    edits: tuple[Compared, ...]
    changed: tuple[str, ...]  # messages about changed inputs
    # The request that it was written for; the error if its inputs are not found.
    request: Request | errors.RewriteError
    warnings: tuple[str, ...] = ()  # the warnings of the rewrite


def read_output(out: Path, source: str | None = None, schedule: str | None = None) -> Recorded:
    """Reads an output; raises `NotAnOutput` if its record, or a file named there, is missing."""
    content = record.read(out)
    _check_whole(out, content)
    request: Request | errors.RewriteError
    try:
        request = requested_again(content, source, schedule)
        changed = reasons(content, request)
    except errors.RewriteError as error:
        request, changed = error, [error.message]
    calls = tuple(_call(each) for each in content.get("directives", ()))
    files = tuple(_compared_files(out, content, calls))
    text = _schedule_text(content, schedule)
    return Recorded(
        out,
        content,
        calls,
        files,
        tuple(_helpers(out, content, calls)),
        tuple(_rules(content, calls)),
        _verification(content.get("verification")),
        tuple(_schedule_lines(text, calls, files)),
        text is not None,
        tuple(_edits(out)),
        tuple(changed),
        request,
        tuple(content.get("warnings", ())),
    )


def _check_whole(out: Path, content: Mapping[str, Any]) -> None:
    """Raises `NotAnOutput` if files of the output are missing."""
    missing = sorted(name for name in content["files"] if not (out / name).is_file())
    if missing:
        raise errors.NotAnOutput(
            f"`{out}` lacks {', '.join(missing)}, which its record names",
            hint=f"slapo-rewrite update {out} writes it again",
        )


def _call(directive: Mapping[str, Any]) -> Call:
    return Call(
        directive["line"],
        directive["primitive"],
        directive["text"],
        more_of(directive),
        tuple(directive["paths"]),
    )


def _compared_files(out: Path, content: Mapping[str, Any], calls: Sequence[Call]) -> list[Compared]:
    """Every rewritten file, as it was written, compared with its original."""
    path = out / "rewrite.diff"
    diff = record.text_at(path)
    written = record.written_files(out)
    found = []
    for name in [content["source"]["file"], *content.get("copies", {})]:
        new = written[name] if name in written else record.text_at(out / name)
        if (old := original_text(diff, name, new)) is None:
            raise errors.NotAnOutput(
                f"`{path}` is not the diff of {name} as it was written",
                hint=f"slapo-rewrite update {out} writes it again",
            )
        parts = tuple(_with_reasons(name, part, content, calls) for part in _parts(old, new))
        absolute = len(content.get("absolute", {}).get(name, ()))
        found.append(Compared(name, old, new, parts, absolute))
    return found


def _parts(old: str, new: str) -> list[Part]:
    """The differing parts of two texts, side by side."""
    matcher = difflib.SequenceMatcher(None, lines_of(old), lines_of(new), autojunk=False)
    found = []
    for group in matcher.get_grouped_opcodes(CONTEXT):
        rows: list[Row] = []
        for tag, i, j, k, m in group:
            for a, b in zip_longest(range(i + 1, j + 1), range(k + 1, m + 1)):
                kind = "added" if a is None else "removed" if b is None else "changed"
                rows.append(Row("same" if tag == "equal" else kind, a, b))
        found.append(Part(tuple(rows)))
    return found


def _with_reasons(name: str, part: Part, content: Mapping[str, Any], calls: Sequence[Call]) -> Part:
    """A part of a file, with the recorded reasons of its changes."""
    numbers = [row.new for row in part.rows if row.new is not None]
    own = {row.new for row in part.rows if row.kind in ("added", "changed")}
    first, last = (numbers[0], numbers[-1]) if numbers else (0, 0)
    found = []
    for change in content.get("changes", ()):
        if change["file"] != name or not change["lines"]:
            continue
        start, stop = change["lines"]
        inside = own.intersection(range(start, stop + 1))
        # A change that only removes lines is recorded at a line that stays.
        if inside or (first <= start and stop <= last):
            found.append(_reason(change, calls))
    return Part(part.rows, tuple(dict.fromkeys(found)))


def _reason(change: Mapping[str, Any], calls: Sequence[Call]) -> Reason:
    own = dict.fromkeys(calls[number] for number in change["directives"])
    return Reason(change["why"], tuple(own))


def _helpers(out: Path, content: Mapping[str, Any], calls: Sequence[Call]) -> list[Helper]:
    found = []
    for change in content.get("changes", ()):
        if change["lines"] is not None:
            continue
        text = record.text_at(out / change["file"])
        try:
            about = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        except SyntaxError:  # the file was edited
            about = ""
        reason = _reason(change, calls)
        found.append(Helper(change["file"], len(text.splitlines()), about, reason))
    return found


def _rules(content: Mapping[str, Any], calls: Sequence[Call]) -> list[RuleOutcome]:
    found = []
    for note in content.get("rules", ()):
        call, words = calls[note["directive"]], tuple(rule_words(note))
        does = first_line(note["rule"])
        found.append(RuleOutcome(note["rule"], does, "applied" in note, words, call))
    return sorted(found, key=lambda outcome: not outcome.fired)


def _verification(content: Mapping[str, Any] | None) -> Verification | None:
    if content is None:
        return None
    worlds = [_world(world) for world in content["worlds"]]
    names = dict.fromkeys(row["check"] for row in content["checks"])
    of = {(_world(row["world"]), row["check"]): row for row in content["checks"]}
    checks = tuple(Check(n, tuple(of.get((world, n)) for world in worlds)) for n in names)
    failures = tuple(f"{_world(each['world'])}: {each['what']}" for each in content["failures"])
    changed = bool(content["changed"])
    return Verification(content["verdict"], tuple(worlds), checks, failures, changed)


def _world(recorded: int | str) -> str:
    """A world size or the layout of a pipeline, as text."""
    return f"world {recorded}" if isinstance(recorded, int) else f"pipeline {recorded}"


def _schedule_text(content: Mapping[str, Any], schedule: str | None) -> str | None:
    """The schedule's text; None if it is missing or changed."""
    try:
        data = locate(schedule or content["schedule"]["name"]).read_bytes()
    except (errors.RewriteError, OSError):
        return None
    if record.digest(data) != content["schedule"]["sha256"]:
        return None
    return data.decode("utf-8-sig")


def _schedule_lines(
    text: str | None, calls: Sequence[Call], files: Sequence[Compared]
) -> list[ScheduleLine]:
    """The schedule's lines with the changes that they caused."""
    places: dict[int, dict[tuple[str, int, str], None]] = {}
    for file in files:
        for number, part in enumerate(file.parts, 1):
            for reason in part.reasons:
                for call in () if reason.is_import else reason.calls:
                    if call.line is not None:
                        own = places.setdefault(call.line, {})
                        own[file.name, number, part.place] = None
    lines = dict(enumerate(lines_of(text.rstrip()), 1)) if text is not None else {}
    if text is None:
        lines = {call.line: call.text for call in calls if call.line is not None}
    return [
        ScheduleLine(number, line, tuple(places.get(number, ())))
        for number, line in sorted(lines.items())
    ]


def _edits(out: Path) -> list[Compared]:
    """The files that were edited by hand, with their differences."""
    written = record.written_files(out)
    found = []
    for name in hand_edited(out):
        if name in written:
            now = record.text_at(out / name)
            found.append(Compared(name, written[name], now, tuple(_parts(written[name], now))))
    return found


def counted_calls(calls: Sequence[Call]) -> str:
    """The numbers of calls of each primitive: `4 shard, 1 checkpoint`."""
    by_hand = dict.fromkeys((c.line, c.primitive) for c in calls if c.paths)
    counts = Counter(primitive for _, primitive in by_hand)
    return ", ".join(f"{count} {name}" for name, count in counts.items())
