"""Runs what ships with the tool on the oldest and the newest versions that `pyproject.toml` allows.

    python -m tests.versions [--only oldest] [--folder .versions]

Each has an environment of its own, of 6 GB where torch comes with CUDA. The bundled schedules and
what `auto` works out are verified in one and in two processes, stages as well.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = Path(__file__).resolve().parents[1]
VARIED = ("torch", "transformers", "libcst", "black")
ENDS = ("oldest", "newest")
BUNDLED = ("bert", "gpt2", "llama", "t5")
KNOBS: tuple[tuple[str, ...], ...] = ((), ("fuse=true", "ckpt_ratio=0.5"), ("pipeline_stages=2",))
AUTO = ("mistral", "opt", "mixtral", "vit", "whisper", "gpt_neox")


def requirements(end: str) -> list[str]:
    """What pip is asked for beside the project: its lower bounds, or nothing but names."""
    text = (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
    wanted = map(Requirement, tomllib.loads(text)["project"]["dependencies"])
    found = []
    for each in wanted:
        floors = [s.version for s in each.specifier if s.operator == ">="]
        if each.name in VARIED:
            found.append(f"{each.name}=={floors[0]}" if end == "oldest" else each.name)
    return found


def environment(end: str, folder: Path) -> Path:
    """Where the programs of an environment are; it is made if it is not there."""
    programs = folder / end / "bin"
    if not (programs / "slapo-rewrite").exists():
        venv.create(folder / end, with_pip=True)
        command = [programs / "pip", "install", "--quiet", "--editable", PROJECT, "deepspeed"]
        subprocess.run([*command, *requirements(end)], check=True)
    return programs


def jobs() -> list[list[str]]:
    """The arguments of each rewrite."""
    bundled = [
        [name, "--schedule", name, *(word for knob in knobs for word in ("--set", knob))]
        for name in BUNDLED
        for knobs in KNOBS
    ]
    return [*bundled, *([name, "--schedule", "auto"] for name in AUTO)]


def fails(programs: Path, job: Sequence[str]) -> str:
    """What a rewrite says that is not verified, splits nothing or leaves tracebacks; else ''."""
    name, *more = job
    source = f"transformers.models.{name}.modeling_{name}"
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "SLAPO_REWRITE_CACHE": "0"}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / name
        command = [programs / "slapo-rewrite", source, *more, "-o", output, "--verify"]
        done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
        is_split = (output / "tensor_parallel.py").exists()
    is_right = is_split and not done.returncode and "Traceback" not in done.stderr
    return "" if is_right else done.stdout + done.stderr


def main() -> int:
    """Runs all, and says how each ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=ENDS, help="one of the two")
    parser.add_argument("--folder", type=Path, default=PROJECT / ".versions")
    options = parser.parse_args()
    failed = 0
    for end in [options.only] if options.only else ENDS:
        programs = environment(end, options.folder)
        freeze = [programs / "pip", "list", "--format", "freeze"]
        listed = subprocess.run(freeze, capture_output=True, text=True, check=True).stdout.split()
        kept = (*VARIED, "deepspeed")
        print(end, *(line for line in listed if line.partition("==")[0] in kept), flush=True)
        for job in jobs():
            start = time.perf_counter()
            said = fails(programs, job)
            failed += bool(said)
            word = "WRONG" if said else "right"
            print(f"  {word} {time.perf_counter() - start:5.0f} s  {' '.join(job)}", flush=True)
            if said:
                print(said, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
