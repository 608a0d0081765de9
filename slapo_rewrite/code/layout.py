"""How new statements are laid out: as `black` does, where they are too long for their line."""

from __future__ import annotations

import functools
import itertools

import black
from black.mode import TargetVersion

from slapo_rewrite.code.build import reindented


@functools.cache
def _mode(line_length: int) -> black.Mode:
    return black.Mode(
        line_length=line_length, string_normalization=False, target_versions={TargetVersion.PY311}
    )


@functools.cache
def literal(text: str) -> str:
    """A literal on one line, with the quotes that `black` prefers."""
    return black.format_str(text, mode=black.Mode(line_length=10_000)).rstrip("\n")


def formatted(text: str, indent: int, line_length: int) -> str:
    """Statements as `black` lays them out at `indent` columns, ready to stand there.

    The first line carries no indentation, as it stands behind what is there already; the others
    carry all of theirs.
    """
    laid_out = black.format_str(text, mode=_mode(max(20, line_length - indent))).rstrip("\n")
    if '"""' in laid_out or "'''" in laid_out:
        return reindented(laid_out, 0, indent)
    lines = laid_out.split("\n")
    return "\n".join([lines[0], *((" " * indent + line) if line else line for line in lines[1:])])


def at_column(text: str, indent: int, line_length: int) -> str:
    """Statements that stand at column 0, as they stand at another.

    They are laid out anew where a line would be too long. The first line carries no indentation.
    """
    moved = reindented(text, 0, indent)
    first, *others = moved.split("\n")
    if indent and any(len(line) > line_length for line in (" " * indent + first, *others)):
        return formatted(text, indent, line_length)
    return moved


def fitting_at(text: str, indent: int, line_length: int) -> str:
    """Statements at column 0, such that no line is too long once they are indented."""
    return reindented(at_column(text, indent, line_length), indent, 0)


def fitted(text: str, indent: int, line_length: int, comment: str = "", before: str = "") -> str:
    """A statement as it is where it fits, else as `formatted` gives it.

    `comment` follows on its last line. Lines of what stood there `before` stay where each is only
    written otherwise; those that `black` made are its to make again.
    """
    first, *others = f"{text}{comment}".split("\n")
    fits = all(len(line) <= line_length for line in (" " * indent + first, *others))
    if fits and not others:
        return text
    if fits and _has_lines_of(before, text) and formatted(before, indent, line_length) != before:
        return text
    laid_out = formatted(text + comment, indent, line_length)
    if not laid_out.endswith(comment):  # black has put it elsewhere
        return formatted(text, indent, line_length)
    return laid_out.removesuffix(comment)


def _has_lines_of(before: str, text: str) -> bool:
    """Whether a text of several lines has those of another, some of them written otherwise.

    What is indented to a bracket that text stands behind would no longer be under it.
    """
    pairs = itertools.zip_longest(before.split("\n"), text.split("\n"))
    return all(old == new or (old and new and _is_like(old, new)) for old, new in pairs)


def _is_like(old: str, new: str) -> bool:
    def shape(line: str) -> tuple[int, int, bool]:
        opened = sum(map(line.count, "([{")) - sum(map(line.count, ")]}"))
        return len(line) - len(line.lstrip()), opened, line.rstrip().endswith(("(", "[", "{"))

    _, opened, hangs = shape(old)
    return shape(old) == shape(new) and (hangs or opened <= 0)
