"""Shared by the scripts here: the machine, the versions, result files and their tables."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slapo_rewrite.emit.record import installed

FOLDER = Path(__file__).resolve().parent
README = FOLDER / "README.md"
PACKAGES = ("torch", "transformers", "libcst", "black")


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    """Versions of Python and of the packages whose speed is measured."""
    return {"python": platform.python_version(), **{name: installed(name) for name in packages}}


def machine() -> dict[str, Any]:
    """The processor, and how busy it was."""
    model = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text().splitlines()
        model = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), model)
    return {"cpu": model, "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}


def rendered(header: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table, figures to the right."""
    lines = [f"| {' | '.join(header)} |", "| --- |" + " ---: |" * (len(header) - 1)]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join(lines) + "\n"


def read(name: str) -> dict[str, Any]:
    """A result file."""
    content: dict[str, Any] = json.loads((FOLDER / "results" / f"{name}.json").read_text())
    return content


def write(name: str, results: dict[str, Any], text: str) -> None:
    """Writes a result file, and puts its tables between their marks in the README."""
    (FOLDER / "results").mkdir(exist_ok=True)
    path = FOLDER / "results" / f"{name}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    before, mark, rest = README.read_text().partition(f"<!-- {name} -->\n")
    assert mark, f"{README} has no place for {name}"
    _, _, after = rest.partition(f"<!-- end of {name} -->\n")
    README.write_text(f"{before}{marked(name, text)}{after}")
    print(text)


def marked(name: str, text: str) -> str:
    """A script's part of the README."""
    return f"<!-- {name} -->\n{text}<!-- end of {name} -->\n"
