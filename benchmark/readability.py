"""How much of a rewritten model file does a reader of the original know already?

    python -m benchmark.readability

For every output of `generated/`: the lines of the original that are kept, the hunks of the diff,
the lines that are new, and those of the helper files beside it, Triton kernels among them. A
relative import that became absolute, since the file leaves its package, does not count as kept, and
is left out of hunks and new lines.

Writes `benchmark/results/readability.json`.
"""

from __future__ import annotations

from typing import Any

from benchmark import report
from tests.golden import goldens, readability

NAME = "readability"


def table(results: dict[str, Any]) -> str:
    """The results for the README."""
    names = ("imports", "hunks", "added", "helpers")
    rows = [
        [output, f"{row['kept_percent']}%", *(row[name] for name in names)]
        for output, row in results["outputs"].items()
    ]
    header = ["output", "original lines kept", "imports made absolute", "hunks", "lines added"]
    header.append("helper lines")
    return report.rendered(header, rows)


def main() -> None:
    """Rewrites, compares and writes down."""
    outputs = {}
    for golden in goldens():
        row = readability(golden, golden.make())
        outputs[golden.folder] = {
            "lines": row.lines,
            "kept": row.kept,
            "kept_percent": round(row.kept_percent, 1),
            "imports": row.imports,
            "hunks": row.hunks,
            "added": row.added,
            "helpers": row.helpers,
        }
    results = {"versions": report.versions(), "outputs": outputs}
    report.write(NAME, results, table(results))


if __name__ == "__main__":
    main()
