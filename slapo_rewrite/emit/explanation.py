"""Explains which line of the schedule caused a line of the output."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.code.text import listed
from slapo_rewrite.emit import record
from slapo_rewrite.emit.diff_hunks import hunks
from slapo_rewrite.emit.write import hand_edited


def explain(out: Path, place: str | None) -> str:
    """The causes of one line of an output, or of every change in it.

    A place is `FILE:LINE`, or the number of a line of the model file.
    """
    content = record.read(out)
    edited = hand_edited(out)
    lines = [f"note: {name} was edited by hand, so line numbers may be off" for name in edited]
    if place is None:
        lines += _changes(content)
        name = content["schedule"]["name"]
        own = (d for d in content.get("directives", ()) if "outcome" in d)
        lines += [f"{name}:{d['line']}  {d['text']}: {d['outcome']}" for d in own]
        lines += [line for note in content.get("rules", ()) for line in _rule(content, note)]
        return "\n".join(lines) or "nothing was changed"
    name, number = _place(out, content, place)
    text = _line(out, name, number)
    said = f"{name}:{number}: {text.strip()}"
    if change := _change_at(out, content, name, number, text):
        lines += [said, *_causes(content, change)]
    elif name not in (content["source"]["file"], *content.get("copies", ())):
        lines.append(f"{name}: written beside the model file")
    elif number in content.get("absolute", {}).get(name, ()):
        lines += [said, "    an import made absolute, since the file left its package"]
    else:
        lines += [said, "    as in the original"]
    return "\n".join(lines)


def explained(out: Path, place: str | None) -> dict[str, Any]:
    """The same as `explain`, as data: changes with the schedule's lines that ask for them."""
    content = record.read(out)
    changes, rules = content.get("changes", []), content.get("rules", [])
    if place is not None:
        name, number = _place(out, content, place)
        found = _change_at(out, content, name, number, _line(out, name, number))
        changes, rules = [found] if found else [], []
    lines = content["directives"]
    return {
        "schedule": content["schedule"]["name"],
        "edited": sorted(hand_edited(out)),
        "changes": [{**c, "directives": [lines[n] for n in c["directives"]]} for c in changes],
        "rules": [{**rule, "directive": lines[rule["directive"]]} for rule in rules],
    }


def _change_at(
    out: Path, content: dict[str, Any], name: str, number: int, text: str
) -> dict[str, Any] | None:
    """The recorded change that contains a line of an output; None without one."""
    blank = not text.strip() and number in _added(out, name)  # beside added lines
    for change in content.get("changes", ()):
        first, last = change["lines"] or (1, number)
        if change["file"] == name and first - 2 * blank <= number <= last + 2 * blank:
            found: dict[str, Any] = change
            return found
    return None


def _place(out: Path, content: dict[str, Any], place: str) -> tuple[str, int]:
    file, _, number = place.rpartition(":")
    name = Path(file).name if file else content["source"]["file"]
    if not re.fullmatch(r"0*[1-9][0-9]{0,9}", number):
        raise errors.UsageError(
            f"`{place}` is not FILE:LINE", hint="write modeling_bert.py:120, say"
        )
    support = content.get("support", {})
    beside = f"../{support.get('folder')}/{name}"
    if any(change["file"] == beside for change in content.get("changes", ())):
        return beside, int(number)
    if name not in content["files"]:
        raise errors.UsageError(
            f"`{out}` has no file `{name}`", hint=errors.did_you_mean(name, content["files"])
        )
    return name, int(number)


def _line(out: Path, name: str, number: int) -> str:
    try:
        lines = (out / name).read_bytes().decode(errors="replace").split("\n")
    except OSError as error:
        raise errors.UsageError(f"cannot read `{out / name}`: {error.strerror or error}") from None
    lines = lines if lines[-1] else lines[:-1]
    if number > len(lines):
        raise errors.UsageError(f"`{name}` has {len(lines)} lines: there is no line {number}")
    return lines[number - 1]


def _added(out: Path, name: str) -> set[int]:
    """The added lines of a file, by the output's own diff."""
    diff = record.text_at(out / "rewrite.diff")
    return {number for hunk in hunks(diff) if hunk.file == name for number in hunk.added}


def _changes(content: dict[str, Any]) -> list[str]:
    """Every change with its causes; whole files with equal causes share a line."""
    together: dict[tuple[str, ...], list[str]] = {}
    for change in content.get("changes", ()):
        where, span = change["file"], change["lines"]
        if span:
            where += f":{span[0]}" + (f"-{span[1]}" if span[1] > span[0] else "")
        said = (change["why"], *_causes(content, change))
        together.setdefault((where if span else "", *said), []).append(where)
    return [
        line
        for (_, why, *causes), places in together.items()
        for line in (f"{', '.join(places)}  {why}", *causes)
    ]


def _rule(content: dict[str, Any], note: dict[str, Any]) -> list[str]:
    """The outcome of a rule that a line of the schedule asked for, as lines."""
    cause = content["directives"][note["directive"]]
    lead = f"rule `{note['rule']}` of {content['schedule']['name']}:{cause['line']}"
    return [f"{lead}: {words}" for words in rule_words(note)]


def rule_words(note: Mapping[str, Any]) -> list[str]:
    """The outcome of a rule as messages: where it was applied, where and why it was not."""
    found = []
    if "applied" in note:
        paths = [path or "the model itself" for path in note["applied"]]
        found.append(f"applied in {', '.join(paths)}")
    chosen = note.get("chosen", {}).items()
    found += [f"in {path or 'the model itself'} by {why}" for path, why in chosen]
    found += [f"left {path}: {why}" for path, why in note.get("left", {}).items()]
    if "nearest" in note:
        found.append(f"matches nothing; nearest is {note['nearest']}")
    if "lacking" in note:
        names = listed(note["lacking"])
        found.append(f"matches nothing; at the nearest miss there is no {names}")
    return found or ["matches nothing, without a near miss"]


def _causes(content: dict[str, Any], change: dict[str, Any]) -> list[str]:
    schedule = content["schedule"]["name"]
    found = [content["directives"][number] for number in change["directives"]]
    # A loop in the schedule calls one line several times.
    lines = [(f"    {schedule}:{d['line']}  {d['text']}", more_of(d)) for d in found]
    return list(dict.fromkeys(f"{line}  ({more})" if more else line for line, more in lines))


def more_of(directive: Mapping[str, Any]) -> str:
    """Details that a line of the schedule does not say: the collective, the share of a list."""
    if what := directive.get("inferred"):
        return f"inferred: {what} on {', '.join(directive['paths'])}"
    return ", ".join(directive.get("shares", ()))
