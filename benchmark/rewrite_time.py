"""How long does a rewrite take?

    python -m benchmark.rewrite_time [--repetitions 7] [--depth-repetitions 30] [--only PART ...]

CPU time of a command, `--diff` without its cache, over the floor: importing torch and the file
of BERT in plain Python. All take turns, and each is compared with the floor of its own round, so
that other load on the machine counts for both.

CPU time of commands that need no rewrite: the minimum over all rounds.

CPU time of the whole command for BERT and Llama, split into starting (Python, torch, libcst,
black), importing the model's package, building the module tree, rewriting and writing. In the same
run, the least cost of one pass over the same file: libcst's floor (parse, one visit, print) and
black. Every repetition is a fresh process, and the kinds take turns.

CPU time by depth: Llama with 2, 32 and 126 layers, and with 2 again to show the noise. Every
repetition is a process forked after one rewrite, and the depths take turns.

Figures are medians unless stated otherwise. Writes `benchmark/results/rewrite_time.json`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
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
FLOOR = ["-c", "import torch; import transformers.models.bert.modeling_bert"]
GPT = ["tests/models/gpt.py", "--schedule", "tests/models/gpt_schedule.py"]
MOST_OVER_FLOOR = {"bert": 0.85, "llama": 0.85, "t5": 0.85, "gpt": 0.65}
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

    from slapo_rewrite.code.file import line_length
    from slapo_rewrite.code.locate import locate

    text = locate(source(model))[0].read_text(encoding="utf-8")
    start = time.process_time()
    assert libcst.parse_module(text).visit(libcst.CSTTransformer()).code == text
    parsed = time.process_time()
    black.format_str(text, mode=black.Mode(line_length=line_length(text)))
    return {"libcst": parsed - start, "black": time.process_time() - parsed}


def fresh(function: Callable[[str], dict[str, float]], model: str) -> dict[str, float]:
    """The figures that a function measures in a separate process."""
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
    """A function's result in a fork of this process."""
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


def cpu_seconds(arguments: list[str], environment: dict[str, str]) -> float:
    """CPU time of Python with these arguments, from its start to its end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *arguments],
        check=True,
        capture_output=True,
        cwd=report.FOLDER.parent,
        env=environment,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def call(model: str, *options: str) -> list[str]:
    """The arguments of Python for a command about a model."""
    own = GPT if model == "gpt" else [source(model), "--schedule", model]
    return ["-m", "slapo_rewrite", *own, *options]


def environment(folder: str, cache: str) -> dict[str, str]:
    """One thread, modules compiled as an installer compiles them, a cache of its own."""
    own = {"OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": f"{folder}/compiled"}
    own |= {"SLAPO_REWRITE_CACHE": cache, "XDG_CACHE_HOME": f"{folder}/cache"}
    known = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {**known, **own}


def over_floor(repetitions: int) -> dict[str, Any]:
    """CPU time of whole commands over that of importing BERT's file."""
    calls = {"floor": FLOOR} | {model: call(model, "--diff") for model in MOST_OVER_FLOOR}
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(repetitions + 1):
            known = environment(folder, "0")
            rounds.append({name: cpu_seconds(each, known) for name, each in calls.items()})
    ratios = {m: sorted(r[m] / r["floor"] for r in rounds[1:]) for m in MOST_OVER_FLOOR}
    return {
        "machine": report.machine(),
        "repetitions": repetitions,
        "ratios": {m: round(statistics.median(found), 3) for m, found in ratios.items()},
        "spread": {m: [round(found[0], 3), round(found[-1], 3)] for m, found in ratios.items()},
    }


def answers(repetitions: int) -> dict[str, Any]:
    """CPU time of commands that nothing has to be rewritten for."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        out, known = f"{folder}/bert_out", environment(folder, "1")
        calls = {
            "`-o OUT`, nothing changed": (call("bert", "-o", out), 0.3),
            "`--check`, nothing changed": (call("bert", "-o", out, "--check"), 0.3),
            "`--diff`, nothing changed": (call("bert", "--diff"), 0.3),
            "`primitives`": (["-m", "slapo_rewrite", "primitives"], 0.15),
            "`primitives shard`": (["-m", "slapo_rewrite", "primitives", "shard"], 0.15),
        }
        for turn in range(repetitions + 1):
            for name, (arguments, _) in calls.items():
                seconds = cpu_seconds(arguments, known)
                if turn:
                    found[name] = min(seconds, found.get(name, seconds))
    return {name: [round(s, 3), calls[name][1]] for name, s in found.items()}


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
    over = results["over_floor"]
    ratios = report.rendered(
        ["`--diff`", *over["ratios"]],
        [
            ["CPU time over the floor", *(f"**{ratio:.2f}**" for ratio in over["ratios"].values())],
            ["least and most", *(f"{a:.2f} - {b:.2f}" for a, b in over["spread"].values())],
            ["bar", *MOST_OVER_FLOOR.values()],
        ],
    )
    rows = [[name, *figures] for name, figures in results["answers"].items()]
    at_once = report.rendered(["", "CPU seconds", "bar"], rows)
    return f"{ratios}\n{at_once}\n{commands}\n{slowest}"


PARTS: dict[str, Callable[[int], Any]] = {
    "over_floor": over_floor,
    "answers": answers,
    "commands": whole_commands,
    "depths": depths,
}


def main() -> None:
    """Measures and writes down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--depth-repetitions", type=int, default=30)
    parser.add_argument(
        "--only",
        nargs="+",
        default=PARTS,
        choices=PARTS,
        help="measure these; the other figures stay as they are",
    )
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        function, model = options.measure
        print(json.dumps(globals()[function](model)))
        return
    results = {"versions": report.versions(), "machine": report.machine()}
    if set(PARTS) - {*options.only}:
        before, results = results, report.read(NAME)
        assert results["versions"] == before["versions"], "measure all parts on these versions"
    for part in options.only:
        again = options.depth_repetitions if part == "depths" else options.repetitions
        results[part] = PARTS[part](again)
    report.write(NAME, results, table(results))


if __name__ == "__main__":
    main()
