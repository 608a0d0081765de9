"""Renders a short review as Markdown, for a pull request's comment."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from slapo_rewrite.emit.record import text_at
from slapo_rewrite.review.gathered import Review, counted, duration, size

# GitHub limits comments to 65,536 characters; a longer diff is only on the page.
MOST_OF_DIFF = 20_000


def review_comment(review: Review) -> str:
    """The review as Markdown."""
    recorded = review.recorded
    lines = [f"### {_code(str(recorded.out))}, rewritten by slapo-rewrite", ""]
    lines += [f"{number}. {line}" for number, line in enumerate(review.summary(), 1)]
    notes = [f"Since it was written: {words}." for words in recorded.changed]
    notes += [f"{_code(file.name)} was edited by hand." for file in recorded.edits]
    notes += [f"Warning: {words}" for words in recorded.warnings]
    lines += [line for note in notes for line in ("", f"> {note}")]
    if places := sum(len(file.parts) for file in recorded.files):
        lines += _folded(f"What changed because of what, {counted(places, 'place')}", _why(review))
        lines += _folded("The diff", _diff(review))
    if recorded.rules:
        fired = sum(rule.fired for rule in recorded.rules)
        title = f"Rules: {fired} fired, {len(recorded.rules) - fired} did not"
        lines += _folded(title, _rules(review))
    if recorded.verification is not None and recorded.verification.verdict != "equal":
        lines += _folded("What is not equal", _wrong(review))
    if review.prediction is not None:
        lines += _folded("Predicted for a GPU: memory and time", _predicted(review))
    return "\n".join(lines) + "\n"


def _folded(title: str, lines: Iterable[str]) -> list[str]:
    return ["", f"<details><summary>{title}</summary>", "", *lines, "", "</details>"]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for cells in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _why(review: Review) -> Iterator[str]:
    recorded = review.recorded
    name = recorded.content["schedule"]["name"]
    return _table(
        ("where", "what", "because of"),
        (
            (
                f"{file.name}:{part.place}",
                reason.what,
                "<br>".join(f"{name}:{call.line} {_code(call.text)}" for call in reason.lines),
            )
            for file in recorded.files
            for part in file.parts
            for reason in part.reasons
            if not reason.is_import
        ),
    )


def _diff(review: Review) -> list[str]:
    text = text_at(review.recorded.out / "rewrite.diff")
    if len(text) > MOST_OF_DIFF:
        length = counted(len(text.splitlines()), "line")
        return [f"It has {length}: see {_code(str(review.recorded.out / 'rewrite.diff'))}."]
    fence = max(_fence(text), "```", key=len)
    return [f"{fence}diff", text.rstrip("\n"), fence]


def _rules(review: Review) -> Iterator[str]:
    return _table(
        ("rule", "", "where, or why not"),
        (
            (_code(rule.rule), "fired" if rule.fired else "did not fire", "<br>".join(rule.words))
            for rule in review.recorded.rules
        ),
    )


def _wrong(review: Review) -> Iterator[str]:
    found = review.recorded.verification
    assert found is not None
    yield from (f"- {words}" for words in found.failures)
    for check in found.checks:
        for world, cell in zip(found.worlds, check.cells, strict=True):
            if cell is not None and not cell["ok"]:
                by = f" by {cell['error']}, of at most {cell['limit']}" if "limit" in cell else ""
                yield f"- {check.name} at {world}{by}"


def _predicted(review: Review) -> Iterator[str]:
    prediction = review.prediction
    assert prediction is not None
    models = prediction.models
    rows = [[kind, *(size(m.memory[kind]) for m in models)] for kind in models[0].memory]
    rows += [["**memory**", *(size(model.predicted.memory) for model in models)]]
    rows += [[kind, *(duration(m.seconds[kind]) for m in models)] for kind in prediction.spent]
    rows += [["**step**", *(duration(model.predicted.seconds) for model in models)]]
    yield from _table(("", *(model.name for model in models)), rows)
    yield f"\nCounted, not measured: a step with {prediction.batch}, in bfloat16, on H200s."


def _code(text: str) -> str:
    """Text between as many backticks as it needs."""
    marks = _fence(text)
    return f"{marks}{text}{marks}"


def _fence(text: str) -> str:
    return "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
