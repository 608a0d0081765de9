"""Rewrites small sources in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from slapo_rewrite import errors
from slapo_rewrite.emit.rewrite import Output, rewrite


def rewritten(
    folder: Path, source: str, schedule: str, settings: tuple[str, ...] = (), newline: str = "\n"
) -> Output:
    """The output for the text of a source file and of a schedule."""
    number = len(list(folder.glob("source_*.py")))
    path = folder / f"source_{number}.py"
    path.write_text(source, encoding="utf-8", newline=newline)
    (folder / "s.py").write_text(schedule, encoding="utf-8")
    return rewrite(str(path), str(folder / "s.py"), settings)


def changed_lines(output: Output) -> str:
    """The added and removed lines of the model file, blank ones apart."""
    lines = output.diff(0).splitlines(keepends=True)[2:]
    return "".join(line for line in lines if line[0] in "+-" and line[1:].strip())


def refused(
    folder: Path, source: str, schedule: str, code: str, settings: tuple[str, ...] = ()
) -> str:
    """The rendered error that a rewrite ends with."""
    with pytest.raises(errors.RewriteError) as caught:
        rewritten(folder, source, schedule, settings)
    assert caught.value.code == code, caught.value.render()
    return caught.value.render()
