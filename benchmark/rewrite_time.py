"""How long does a rewrite take?

    python -m benchmark.rewrite_time [--repetitions 7] [--depth-repetitions 30]

CPU time of the whole command for BERT and Llama, split into starting (Python, torch, libcst,
black), importing the model's package, building the module tree, rewriting and writing. Beside it,
in the same run, what one pass over the same file costs at least: libcst's floor (parse, one visit,
print) and black. Every repetition is a fresh process, and the kinds take turns.

Whether a deep model takes longer: Llama with 2, 32 and 126 layers, and with 2 once more to show
the noise. Every repetition is a process forked after one rewrite, and the depths take turns.

`--check` on unchanged inputs: elapsed time of the command.

Figures are medians. Writes `benchmark/results/rewrite_time.json`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmark import report

NAME = "rewrite_time"
MODELS = {"bert": 0.3, "llama": 0.2}  # and the seconds that rewriting may take
DEPTHS = (2, 32, 126)
MOST_DEPTH_RATIO = 1.05
MOST_CHECK_S = 0.5
LAYERS = "num_hidden_layers=32"  # as the bundled schedule writes it


def source(model: str) -> str:
    """The module that defines a model."""
    return f"transformers.models.{model}.modeling_{model}"


def measure_rewrite(model: str) -> dict[str, float]:
    """CPU time of the command, part by part; everything since the process began counts."""
    from slapo_rewrite.emit.rewrite import rewrite
    from slapo_rewrite.emit.write import write

    started = time.process_time()
    output = rewrite(source(model), model)
    rewritten = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "out"), output.files)
    done = time.process_time()
    parts = dict(output.seconds)
    return {
        "start": started + (rewritten - started - sum(parts.values())),
        "import": parts["import"],
        "tree": parts["read"] + parts["tree"],
        "rewrite": parts["rewrite"],
        "construct": parts["construct"],
        "write": parts["write"] + done - rewritten,
        "all": done,
    }


def measure_floor(model: str) -> dict[str, float]:
    """CPU time of libcst and of black on the whole file."""
    import black
    import libcst

    from slapo_rewrite.code.file import locate
    from slapo_rewrite.emit.rewrite import line_length

    text = locate(source(model))[0].read_text(encoding="utf-8")
    start = time.process_time()
    assert libcst.parse_module(text).visit(libcst.CSTTransformer()).code == text
    parsed = time.process_time()
    black.format_str(text, mode=black.Mode(line_length=line_length(text)))
    return {"libcst": parsed - start, "black": time.process_time() - parsed}


def fresh(function: Callable[[str], dict[str, float]], model: str) -> dict[str, float]:
    """What a function measures in a process of its own."""
    command = [sys.executable, "-m", "benchmark.rewrite_time", "--measure"]
    done = subprocess.run(
        [*command, function.__name__, model],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=report.FOLDER.parent,
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def medians(figures: list[dict[str, float]]) -> dict[str, float]:
    """The median of every part."""
    return {part: round(statistics.median(f[part] for f in figures), 4) for part in figures[0]}


def whole_commands(repetitions: int) -> dict[str, dict[str, float]]:
    """BERT and Llama, with the floor."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(repetitions + 1):
        for model in MODELS:
            for function in (measure_rewrite, measure_floor):
                figures = fresh(function, model)
                found.setdefault((model, function.__name__), []).append(figures)
    # The first round only fills the file cache.
    return {
        model: {
            k: v
            for f in ("measure_rewrite", "measure_floor")
            for k, v in medians(found[model, f][1:]).items()
        }
        for model in MODELS
    }


def depths(repetitions: int) -> dict[str, Any]:
    """Rewriting Llama at several depths."""
    from slapo_rewrite.emit.rewrite import rewrite
    from slapo_rewrite.schedule.load import locate

    rewrite(source("llama"), "llama")  # imports everything
    # A collection in a copy would copy every page that it marks.
    gc.collect()
    gc.freeze()
    bundled = locate("llama").read_text(encoding="utf-8")
    assert LAYERS in bundled
    with tempfile.TemporaryDirectory() as folder:
        schedules = []
        for number, layers in enumerate((*DEPTHS, DEPTHS[0])):
            path = Path(folder, f"schedule_{number}.py")
            path.write_text(bundled.replace(LAYERS, f"num_hidden_layers={layers}"))
            schedules.append(str(path))
        found: list[list[float]] = [[] for _ in schedules]
        for turn in range(repetitions):
            order = list(enumerate(schedules))
            for number, schedule in order if turn % 2 else reversed(order):
                parts = forked(lambda path=schedule: rewrite(source("llama"), path).seconds)
                found[number].append(parts["rewrite"])
    middle = [statistics.median(times) for times in found]
    return {
        "seconds": {str(layers): round(m, 4) for layers, m in zip(DEPTHS, middle, strict=False)},
        "ratio": round(max(middle[:-1]) / min(middle[:-1]), 3),
        "noise": round(max(middle[0], middle[-1]) / min(middle[0], middle[-1]), 3),
        "repetitions": repetitions,
    }


def forked(function: Callable[[], dict[str, float]]) -> dict[str, float]:
    """What a function gives in a copy of this process."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with os.fdopen(write_end, "w") as pipe:
                json.dump(function(), pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, "a repetition failed"
    figures: dict[str, float] = json.loads(text)
    return figures


def check_seconds(repetitions: int) -> float:
    """Elapsed time of `--check` where nothing has changed."""
    command = [sys.executable, "-m", "slapo_rewrite", source("bert"), "--schedule", "bert"]
    times = []
    with tempfile.TemporaryDirectory() as folder:
        command += ["-o", str(Path(folder, "bert"))]
        subprocess.run(command, check=True, capture_output=True, cwd=report.FOLDER.parent)
        for _ in range(repetitions):
            start = time.perf_counter()
            subprocess.run(
                [*command, "--check"], check=True, capture_output=True, cwd=report.FOLDER.parent
            )
            times.append(time.perf_counter() - start)
    return round(statistics.median(times), 3)


def table(results: dict[str, Any]) -> str:
    """The results for the README."""
    parts = ("start", "import", "tree", "rewrite", "write", "all", "libcst", "black")
    rows = [
        [model, *(f"{figures[part]:.3f}" for part in parts), f"{MODELS[model]}"]
        for model, figures in results["commands"].items()
    ]
    header = ["CPU seconds", "start", "import", "tree", "**rewrite**", "write", "all of it"]
    commands = report.rendered([*header, "libcst's floor", "black", "bar for rewriting"], rows)
    deep = results["depths"]
    header = ["", *(f"{layers} layers" for layers in deep["seconds"])]
    row = ["rewriting Llama, CPU seconds", *(f"{s:.3f}" for s in deep["seconds"].values())]
    slowest = report.rendered(
        [*header, "largest over smallest", "2 layers over 2 layers", "bar"],
        [[*row, deep["ratio"], deep["noise"], MOST_DEPTH_RATIO]],
    )
    check = report.rendered(
        ["", "elapsed seconds", "bar"],
        [["`--check`, nothing changed", results["check"], MOST_CHECK_S]],
    )
    return f"{commands}\n{slowest}\n{check}"


def main() -> None:
    """Measures and writes down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--depth-repetitions", type=int, default=30)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        function, model = options.measure
        print(json.dumps(globals()[function](model)))
        return
    results = {"versions": report.versions(), "machine": report.machine()}
    results["commands"] = whole_commands(options.repetitions)
    results["depths"] = depths(options.depth_repetitions)
    results["check"] = check_seconds(options.repetitions)
    report.write(NAME, results, table(results))


if __name__ == "__main__":
    main()
