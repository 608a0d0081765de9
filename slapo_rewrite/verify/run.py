"""Compares the model in an output folder with its original, in fresh processes."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.code.names import is_name
from slapo_rewrite.directive import REDIRECTED
from slapo_rewrite.verify.launch import ForkServer, Ranks
from slapo_rewrite.verify.rank_layout import Layout, Training, World, named, ranks_of
from slapo_rewrite.verify.report import Directive, Report, merge

TWIN = Path(__file__).resolve().parents[1] / "model" / "small_model.py"
# If one world fails in these steps, every other would fail there too.
EARLY = ("starting", "importing", "loading the schedule", "building the original")
ORIGINAL = ("building the original", "making the inputs", "the original")
SLOW_IMPORTS = ("torch", "transformers", "deepspeed")
MANY = 8  # with more ranks, one process first checks whether the model can be built
# The key in a rule's record for outputs that the schedule makes None in training.
ABSENT = "none in training"
TWIN_HINT = (
    "the small model that verification makes does not run: define verify_model(m) in the "
    "schedule, and inputs(model) if it needs other inputs, or fix the present ones"
)


def verify(
    out: Path,
    worlds: Sequence[World] | None = None,
    *,
    training: Training | None = None,
    source: str | None = None,
    schedule: str | None = None,
    timeout_s: float = 300,
    progress: Callable[[str], None] = lambda text: None,
    checked: Callable[[str], None] = lambda text: None,
    server: ForkServer | None = None,
) -> Report:
    """Compares the model in an output folder with its original.

    Args:
        out: The output folder.
        worlds: World sizes for the whole model and layouts for its pipeline, verified in this
            order; by default those of `chosen`.
        training: Settings for training a pipeline.
        source: The original, a module or a file; by default the recorded one.
        schedule: The schedule, a file or the name of a bundled one; by default the recorded one.
        timeout_s: The time limit for one world.
        progress: Called with a short text on what is being done.
        checked: Called with a line on each check, once it is done.
        server: Starts the ranks; by default a new one that imports what this output needs.

    Raises:
        NotAnOutput: `out` has no readable record, or no rewritten model.
        SourceError: The source file does not exist.
        ScheduleError: The schedule does not exist.
        UsageError: A world size is not a positive number, or the output cannot run at a size or in
            a layout.
    """
    out = Path(out).resolve()
    record = read_record(out)
    worlds = chosen(out) if worlds is None else worlds
    sizes = [world for world in worlds if isinstance(world, int)]
    if not worlds or any(size < 1 for size in sizes):
        raise errors.UsageError(f"world sizes are positive numbers, not {sizes}")
    for world in worlds:
        if isinstance(world, Layout):
            check_layout(out, world)
    schedule_name = schedule or str(record["schedule"]["name"])
    schedule_path = find_schedule(schedule_name)
    report = Report(tuple(dict.fromkeys(worlds)))
    report.directives = [
        Directive(f"{schedule_name}:{d['line']}", str(d["text"]), tuple(d["paths"]))
        for d in record.get("directives", ())
    ]
    job = {
        "tool": "slapo_rewrite",
        "twin": str(TWIN),
        "depth": record.get("depth", 2),
        "schedule": str(schedule_path),
        "source": find_source(source or str(record["source"]["name"])),
        "out": str(out),
        "stem": Path(record["source"]["file"]).stem,
        "support": record.get("support", {}).get("folder"),
        "rewritten": rewritten_classes(out, record, report.directives),
        "absent": [n for note in record.get("rules", ()) for n in note.get(ABSENT, ())],
        "replaced": [
            re.escape(path).replace(r"\*", r"\d+")
            for directive in record.get("directives", ())
            if str(directive["primitive"]).startswith("replace")
            for path in directive["paths"]
        ],
        "sys_path": [os.path.abspath(path) for path in sys.path],
        "training": asdict(training or Training()),
        # Of several dtypes the one with the largest rounding error: bfloat16 before float16.
        "half": min(record.get("half", ()), default=None),
        "engine": "deepspeed" if needs_deepspeed(out) else "torch",
        "fits": None,
    }
    if job["half"]:
        report.notes.append(
            f"compared with the casts to {job['half']} left out: what they round is held against "
            "torch.autocast"
        )
    digest = hashlib.sha256(schedule_path.read_bytes()).hexdigest()
    _compare_hash(report, "schedule", record, digest)
    with contextlib.ExitStack() as stack:
        if server is None:
            server = stack.enter_context(ForkServer(_shared_imports(out)))
        for world in report.worlds:
            if ranks_of(world) > MANY:
                _check_fits(server, job, world, timeout_s, progress)
        for world in report.worlds:
            with tempfile.TemporaryDirectory(prefix="slapo-verify-") as folder:
                layout = None if isinstance(world, int) else asdict(world)
                told = {**job, "layout": layout}
                ranks = Ranks(server, told, world, Path(folder), timeout_s, progress, checked)
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


def _shared_imports(out: Path) -> list[str]:
    """The modules of slowly imported libraries that an output imports, and torch."""
    found = {"torch": None}
    for file in sorted(out.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            found |= dict.fromkeys(n for n in names if n.partition(".")[0] in SLOW_IMPORTS)
    return list(found)


def _check_fits(
    server: ForkServer,
    job: Mapping[str, Any],
    world: World,
    timeout_s: float,
    progress: Callable[[str], None],
) -> None:
    """Checks in one process whether the model can be built on many ranks, before starting them."""
    ranks = world if isinstance(world, int) else world.tensor
    with tempfile.TemporaryDirectory(prefix="slapo-verify-") as folder:
        told = {**job, "layout": None, "fits": ranks}
        one = Ranks(
            server,
            told,
            1,
            Path(folder),
            timeout_s,
            lambda text: progress(f"can the model be built at {named(world)}?"),
            lambda text: None,
        )
        one.run()
        words = one.results().get(0, {}).get("misfit")
    if words:
        raise errors.UsageError(
            f"the model cannot be built at {named(world)}: {words}",
            hint="the verified model may be a smaller one: give a size that fits, or build another "
            "in verify_model(m) of the schedule",
        )


def chosen(
    out: Path,
    sizes: Sequence[int] | None = None,
    pipe: int | None = None,
    tensor: int | None = None,
    data: int | None = None,
) -> list[World]:
    """The worlds to verify, by the arguments of a command line.

    By default the whole model at sizes 1 and 2, and the pipeline, if there is one, with one rank
    per stage. If only one of the two kinds is asked for, only that.
    """
    stages = stages_of(out)
    asked = not (pipe is tensor is data is None)
    if asked and not stages:
        raise errors.UsageError(
            f"`{out}` has no pipeline stages: --pp, --tp and --dp lay out the ranks of a pipeline",
            hint="cut the model in the schedule, with cut_pipeline_stage or cut_evenly, or use "
            "--world for a model without stages",
        )
    worlds: list[World] = list(sizes or ([] if asked else [1, 2]))
    if asked or (stages and not sizes):
        worlds.append(Layout(*(1 if n is None else n for n in (pipe or stages, tensor, data))))
    return worlds


def stages_of(out: Path) -> int:
    """The number of an output's pipeline stages."""
    for node in _pipeline(out):
        if isinstance(node, ast.Assign) and is_name(node.targets[0], "STAGES"):
            return len(node.value.elts) if isinstance(node.value, ast.Tuple) else 0
    return 0


def needs_deepspeed(out: Path) -> bool:
    """Whether the stages of an output are for DeepSpeed's engine, not for torch's pipelining."""
    imports = [n for n in _pipeline(out) if isinstance(n, ast.ImportFrom) and n.module]
    return any(str(n.module).rpartition(".")[2] == "deepspeed_pipeline" for n in imports)


def _pipeline(out: Path) -> list[ast.stmt]:
    path = out / "pipeline.py"
    return ast.parse(path.read_bytes()).body if path.is_file() else []


def check_layout(out: Path, layout: Layout) -> None:
    """Refuses a layout that the stages of an output cannot run in (`UsageError`)."""
    stages = stages_of(out)
    if min(layout.pipe, layout.tensor, layout.data) < 1:
        raise errors.UsageError("--pp, --tp and --dp are positive numbers")
    if layout.pipe != stages:
        raise errors.UsageError(
            f"the model in `{out}` is cut into {stages} stages, not {layout.pipe}",
            hint=f"give --pp {stages}, or change the cuts in the schedule and rewrite",
        )
    if layout.tensor > 1 and "tensor_parallel" not in _helpers(out):
        raise errors.UsageError(
            f"--tp {layout.tensor} does not fit: nothing in `{out}` is split over ranks",
            hint="leave out --tp, or shard layers in the schedule",
        )
    if needs_deepspeed(out) and importlib.util.find_spec("deepspeed") is None:
        raise errors.UsageError(
            f"the pipeline stages in `{out}` run on deepspeed, which is not installed",
            hint="pip install deepspeed, or give --world to verify the whole model alone",
        )


def _helpers(out: Path) -> set[str]:
    """The names of an output's modules, and of the helpers that it uses in its support folder."""
    record = read_record(out)
    return {path.stem for path in out.glob("*.py")} | {*record.get("support", {}).get("uses", ())}


def read_record(out: Path) -> dict[str, Any]:
    """Reads an output's `rewrite.json`; raises `NotAnOutput` if an entry needed here is missing."""
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
        raise errors.NotAnOutput(f"`{out}` has no {names[2]}, but its record names it", hint=hint)
    return record


def rewritten_classes(
    out: Path, record: Mapping[str, Any], directives: Sequence[Directive]
) -> list[dict[str, Any]]:
    """The classes that the schedule changed or added in an output's copies of source files.

    Classes are left out if only an import of another copy inside a method was changed.

    Returns:
        For each class its name, its file's stem, the module of which the file is a copy (None for
        the model's own file), and the schedule's lines.
    """
    copies = {record["source"]["file"]: None}
    copies |= {name: copy["module"] for name, copy in record.get("copies", {}).items()}
    found = []
    for name, module in copies.items():
        file = out / str(name)
        known = (c for c in record.get("changes", ()) if c["file"] == name and c["directives"])
        changes = [change for change in known if change.get("why") != REDIRECTED]
        for node in ast.parse(file.read_bytes()).body if changes and file.is_file() else ():
            if not isinstance(node, ast.ClassDef):
                continue
            start, end = node.lineno, node.end_lineno or node.lineno
            inside = [c for c in changes if c["lines"][0] <= end and start <= c["lines"][1]]
            numbers = dict.fromkeys(n for c in inside for n in c["directives"])
            lines = [f"{directives[n].place}: {directives[n].text}" for n in numbers]
            if inside:
                about = {"name": node.name, "stem": Path(name).stem, "module": module}
                found.append({**about, "lines": list(dict.fromkeys(lines))})
    return found


def find_source(name: str) -> dict[str, str]:
    """How a rank imports the original: by module name or file, which has to exist."""
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
    """The path of the schedule's file, for a path or the name of a bundled schedule."""
    if name.endswith(".py") or os.sep in name:
        path = Path(name)
        if not path.is_file():
            raise errors.ScheduleError(
                f"there is no schedule file `{name}` in {Path.cwd()}",
                hint="verify from the folder in which the output was written, or name the schedule",
            )
        return path.resolve()
    # Imported here because only bundled schedules need it.
    from slapo_rewrite.schedule.load import locate

    return locate(name).resolve()


def _compare_hash(report: Report, what: str, record: Mapping[str, Any], now: str) -> None:
    before = record[what].get("sha256")
    if before and before != now and what not in report.changed:
        report.changed.append(what)
        report.warnings.append(
            f"the {what} {record[what]['name']} is not the one that the output was made from "
            f"(sha256 {before[:8]} then, {now[:8]} now): rewrite again"
        )


def _add(
    report: Report,
    world: World,
    results: Mapping[int, Mapping[str, Any]],
    record: Mapping[str, Any],
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
