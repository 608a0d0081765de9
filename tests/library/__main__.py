"""Runs transformers' own tests of models on originals and on what they are rewritten to.

    python -m tests.library [--only bert gpt2] [--folder .library]

The tests are those of the installed transformers' source distribution, for the small model of each
schedule; it lacks the tests of generation and of export. Every test has to end alike for the
original and for the rewritten file, in one process.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
BUNDLED = ("bert", "gpt2", "llama", "t5")
AUTO = ("mixtral", "opt", "vit", "whisper")
KNOBS = ((), ("fuse=true", "ckpt_ratio=0.5"))
# What the distribution lacks, and the tests inherit from.
LACKING = {
    "exporters/test_export.py": "ExportTesterMixin",
    "generation/test_utils.py": "GenerationTesterMixin",
}


def library_tests(folder: Path) -> Path:
    """A package of the distribution's tests and of the case that runs them; made if not there."""
    package = folder / "library"
    if not package.exists():
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        wanted = f"transformers=={version('transformers')}"
        source = ["--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--dest", folder]
        subprocess.run([*pip, "download", *source, wanted], check=True)
        subprocess.run(
            [*pip, "install", "--no-deps", "--target", folder, "parameterized"], check=True
        )
        with tarfile.open(next(folder.glob("transformers-*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
        (next(folder.glob("transformers-*/tests"))).rename(package)
        for name, mixin in LACKING.items():
            (package / name).parent.mkdir()
            (package / name).write_text(f"class {mixin}:\n    pass\n", encoding="utf-8")
        for each in (package, *(p for p in package.iterdir() if p.is_dir())):
            (each / "__init__.py").touch()
    shutil.copy(Path(__file__).with_name("model_case.py"), package / "test_case.py")
    return package


def outcomes(package: Path, source: str, schedule: str, output: str) -> dict[str, str]:
    """How each test ends, by its name, for an original, or for the output in a folder."""
    variables = {
        **os.environ,
        "SOURCE": source,
        "SCHEDULE": schedule,
        "OUTPUT": output,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": f"{package.parent}{os.pathsep}{PROJECT}",
    }
    # Without this project's configuration, which knows its own markers alone.
    options = ["-c", os.devnull, "-q", "-rA", "--tb=no", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, package / "test_case.py"]
    done = subprocess.run(
        command, cwd=package.parent, env=variables, capture_output=True, text=True, check=False
    )
    found = re.findall(r"^(PASSED|FAILED|ERROR) \S+::(\w+)", done.stdout, re.MULTILINE)
    if not found:
        raise RuntimeError(done.stdout + done.stderr)
    return {name: outcome for outcome, name in found}


def compared(package: Path, name: str, folder: Path) -> bool:
    """Says how the tests end for a model's outputs, and whether they end as for the original."""
    source, schedule = f"transformers.models.{name}.modeling_{name}", name
    rewrite = [Path(sys.executable).with_name("slapo-rewrite"), source, "--schedule"]
    if name not in BUNDLED:
        schedule = str(folder / f"{name}.py")
        command = [*rewrite, "auto", "--write-schedule", schedule, "--diff"]
        subprocess.run(command, check=True, capture_output=True)
    original = outcomes(package, source, schedule, "")
    is_alike = True
    for number, knobs in enumerate(KNOBS):
        output = folder / f"{name}_{number}"
        settings = [word for knob in knobs for word in ("--set", knob)]
        subprocess.run(
            [*rewrite, schedule, *settings, "-o", output], check=True, capture_output=True
        )
        found = outcomes(package, source, schedule, str(output))
        passed = sum(outcome == "PASSED" for outcome in found.values())
        print(f"{name} {' '.join(knobs) or 'as it is'}: {passed} pass", flush=True)
        for test in sorted({test for test, _ in original.items() ^ found.items()}):
            is_alike = False
            print(f"  {test}: {original.get(test)}, rewritten {found.get(test)}")
    return is_alike


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all, and says where they differ."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", metavar="MODEL", default=[*BUNDLED, *AUTO])
    parser.add_argument("--folder", type=Path, default=PROJECT / ".library")
    options = parser.parse_args(arguments)
    options.folder.mkdir(exist_ok=True)
    package = library_tests(options.folder.resolve())
    with tempfile.TemporaryDirectory() as folder:
        alike = [compared(package, name, Path(folder)) for name in options.only]
    return int(not all(alike))


if __name__ == "__main__":
    sys.exit(main())
