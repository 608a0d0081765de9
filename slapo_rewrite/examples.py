"""Worked examples of primitives and rules: shown as documentation, run as tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """A source file, a schedule for it, and the changed lines that come of it.

    It is shown by `slapo-rewrite primitives NAME` and run as a test. What the schedule prints
    stands in `printed`, and what it shows, where there are several, in `about`.
    """

    source: str
    schedule: str
    diff: str = ""
    printed: str = ""
    about: str = ""


@dataclass(frozen=True)
class Refusal:
    """A schedule line that is refused for a source file, with the error's code."""

    source: str
    schedule: str
    code: str
