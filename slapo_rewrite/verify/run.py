"""Compares the model in an output folder with its original, in fresh processes."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.verify.launch import Ranks
from slapo_rewrite.verify.report import Directive, Report, merge

TWIN = Path(__file__).resolve().parents[1] / "model" / "twin.py"
# No other world size gets further than one that fails here.
EARLY = ("starting", "importing", "loading the schedule", "building the original")
ORIGINAL = ("building the original", "making the inputs", "the original")
TWIN_HINT = (
    "the small model that verification makes does not run: define verify_model(m) in the "
    "schedule, and inputs(model) where it needs other inputs, or mend those that are there"
)


def verify(
    out: Path,
    worlds: Sequence[int] = (1, 2),
    *,
    source: str | None = None,
    schedule: str | None = None,
    timeout_s: float = 300,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Compares the model in an output folder with its original.

    Args:
        out: The output folder.
        worlds: The world sizes, one after another.
        source: The original, a module or a file; by default the recorded one.
        schedule: The schedule, a file or the name of a bundled one; by default the recorded one.
        timeout_s: How long one world size may take.
        progress: Told in a few words what is being done.

    Raises:
        NotAnOutput: `out` has no readable record, or lacks the rewritten model.
        SourceError: There is no such file.
        ScheduleError: There is no such schedule.
        UsageError: A world size is not a positive number.
    """
    if not worlds or any(world < 1 for world in worlds):
        raise errors.UsageError(f"world sizes are positive numbers, not {list(worlds)}")
    out = Path(out).resolve()
    record = read_record(out)
    schedule_name = schedule or str(record["schedule"]["name"])
    schedule_path = find_schedule(schedule_name)
    report = Report(tuple(dict.fromkeys(worlds)))
    report.directives = _directives(record, schedule_name)
    job = {
        "tool": "slapo_rewrite",
        "twin": str(TWIN),
        "schedule": str(schedule_path),
        "source": find_source(source or str(record["source"]["name"])),
        "out": str(out),
        "stem": Path(record["source"]["file"]).stem,
        "sys_path": [os.path.abspath(path) for path in sys.path],
    }
    _compare_hash(report, "schedule", record, _sha256(schedule_path))
    for world in report.worlds:
        with tempfile.TemporaryDirectory(prefix="slapo-verify-") as folder:
            ranks = Ranks(job, world, Path(folder), timeout_s, progress or (lambda text: None))
            ranks.run()
            failure = ranks.failure(out)
            _add(report, world, ranks.results(), record)
        if failure is not None:
            report.failures.append(failure)
            if failure.stage.startswith(ORIGINAL):
                report.notes.append(TWIN_HINT)
            if failure.stage.startswith(EARLY):
                break
    return report


def read_record(out: Path) -> dict[str, Any]:
    """The output's `rewrite.json`, as far as verification needs it.

    Raises:
        NotAnOutput: It is missing, damaged, or names a file that is not there.
    """
    path = out / "rewrite.json"
    hint = "verify a folder that slapo-rewrite wrote"
    if not path.is_file():
        raise errors.NotAnOutput(f"`{out}` has no rewrite.json", hint=hint)
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        names = [record["source"]["name"], record["schedule"]["name"], record["source"]["file"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        words = f"`{path}` is damaged: {type(error).__name__}: {error}"
        raise errors.NotAnOutput(words, hint=hint) from None
    if not (out / str(names[2])).is_file():
        raise errors.NotAnOutput(f"`{out}` has no {names[2]}, which its record names", hint=hint)
    return record


def find_source(name: str) -> dict[str, str]:
    """How a rank is told to import the original.

    Raises:
        SourceError: `name` is a path, and there is no such file.
    """
    if not name.endswith(".py") and os.sep not in name:
        return {"module": name}
    path = Path(name)
    if not path.is_file():
        raise errors.SourceError(
            f"there is no source file `{name}` in {Path.cwd()}",
            hint="verify from the folder in which the output was written, or name the source",
        )
    return {"file": str(path.resolve())}


def find_schedule(name: str) -> Path:
    """The schedule's file.

    Raises:
        ScheduleError: There is no such file, or no bundled schedule of that name.
    """
    if name.endswith(".py") or os.sep in name:
        path = Path(name)
        if not path.is_file():
            raise errors.ScheduleError(
                f"there is no schedule file `{name}` in {Path.cwd()}",
                hint="verify from the folder in which the output was written, or name the schedule",
            )
        return path.resolve()
    # Only bundled schedules need what reads schedules.
    from slapo_rewrite.schedule.load import locate

    return locate(name).resolve()


def _directives(record: Mapping[str, Any], schedule: str) -> list[Directive]:
    return [
        Directive(f"{schedule}:{d['line']}", str(d["text"]), tuple(d["paths"]))
        for d in record.get("directives", [])
    ]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _compare_hash(report: Report, what: str, record: Mapping[str, Any], now: str) -> None:
    before = record[what].get("sha256")
    if before and before != now and what not in report.changed:
        report.changed.append(what)
        report.warnings.append(
            f"the {what} {record[what]['name']} is not the one that the output was made from "
            f"(sha256 {before[:8]} then, {now[:8]} now): rewrite again"
        )


def _add(
    report: Report, world: int, results: Mapping[int, Mapping[str, Any]], record: Mapping[str, Any]
) -> None:
    report.rows += merge(world, results)
    for _, result in sorted(results.items()):
        if result.get("share") is not None:
            report.shares[world] = max(report.shares.get(world, 0.0), result["share"])
        if result.get("module"):
            path, error = result["module"]
            report.modules.setdefault(world, (path, error))
        if result.get("source"):
            _compare_hash(report, "source", record, result["source"]["sha256"])
        report.notes += [n for n in result.get("notes", []) if n not in report.notes]
