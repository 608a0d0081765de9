"""Layout of new statements: that of `black`, if they are too long for their line."""

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
    """A literal on one line, with the quotes of `black`."""
    return black.format_str(text, mode=black.Mode(line_length=10_000)).rstrip("\n")


def formatted(text: str, indent: int, line_length: int) -> str:
    """Statements formatted by `black` for `indent` columns.

    The first line has no indentation, since it follows text that is there already; the others have
    all of it.
    """
    laid_out = black.format_str(text, mode=_mode(max(20, line_length - indent))).rstrip("\n")
    if '"""' in laid_out or "'''" in laid_out:
        return reindented(laid_out, 0, indent)
    lines = laid_out.split("\n")
    return "\n".join([lines[0], *((" " * indent + line) if line else line for line in lines[1:])])


def at_column(text: str, indent: int, line_length: int) -> str:
    """Moves statements from column 0 to another.

    They are formatted if a line would be too long. The first line has no indentation.
    """
    moved = reindented(text, 0, indent)
    first, *others = moved.split("\n")
    if indent and any(len(line) > line_length for line in (" " * indent + first, *others)):
        return formatted(text, indent, line_length)
    return moved


def fitting_at(text: str, indent: int, line_length: int) -> str:
    """Statements at column 0, of which no line is too long after indentation."""
    return reindented(at_column(text, indent, line_length), indent, 0)


def fitted(text: str, indent: int, line_length: int, comment: str = "", before: str = "") -> str:
    """A statement unchanged if it fits, else `formatted`.

    `comment` follows on its last line. If it has the lines of the text `before`, each only with
    other words, these stay, unless `black` made them: then it makes them again.
    """
    first, *others = f"{text}{comment}".split("\n")
    fits = all(len(line) <= line_length for line in (" " * indent + first, *others))
    if fits and not others:
        return text
    if fits and _has_lines_of(before, text) and formatted(before, indent, line_length) != before:
        return text
    laid_out = formatted(text + comment, indent, line_length)
    if not laid_out.endswith(comment):  # black has moved it
        return formatted(text, indent, line_length)
    return laid_out.removesuffix(comment)


def _has_lines_of(before: str, text: str) -> bool:
    """Whether a text has the lines of another, with the same indentation and brackets.

    Lines that are aligned with an opening bracket would no longer be aligned if its line changed.
    """
    pairs = itertools.zip_longest(before.split("\n"), text.split("\n"))
    return all(old == new or (old and new and _is_like(old, new)) for old, new in pairs)


def _is_like(old: str, new: str) -> bool:
    def shape(line: str) -> tuple[int, int, bool]:
        opened = sum(map(line.count, "([{")) - sum(map(line.count, ")]}"))
        return len(line) - len(line.lstrip()), opened, line.rstrip().endswith(("(", "[", "{"))

    _, opened, hangs = shape(old)
    return shape(old) == shape(new) and (hangs or opened <= 0)
