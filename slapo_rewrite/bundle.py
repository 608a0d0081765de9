"""Finds the tool's own rules and schedules."""

from __future__ import annotations

from pathlib import Path


def rules_folder() -> Path:
    """The folder `rules`: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "rules"
    return inside if inside.is_dir() else package.parent / "rules"
