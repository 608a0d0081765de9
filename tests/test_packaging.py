"""What a wheel holds, and that what it starts is light."""

import email
import importlib
import json
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from slapo_rewrite import __version__
from slapo_rewrite.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "slapo_rewrite", "rules")
# What must not be imported before a command is known to need it: seconds, all of it.
HEAVY = ("torch", "transformers", "libcst", "black")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout, built where nothing else lies."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)
    command = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder / "dist")]
    done = subprocess.run(
        [sys.executable, *command, str(folder)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def modules(folder: str) -> set[str]:
    return {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")}


def test_a_wheel_holds_every_module_of_the_package(names):
    assert modules("slapo_rewrite") <= names
    assert "slapo_rewrite/runtime/tensor_parallel.py" in names
    assert "slapo_rewrite/verify/worker.py" in names


def test_a_wheel_holds_the_rules_inside_the_package(names):
    rules = modules("rules")
    assert "rules/schedules/bert.py" in rules
    assert {f"slapo_rewrite/{name}" for name in rules} <= names
    assert not any(name.startswith("rules/") for name in names)


def test_a_wheel_holds_no_tests_and_no_outputs(names):
    assert {name.split("/")[0] for name in names} == {
        "slapo_rewrite",
        f"slapo_rewrite-{__version__}.dist-info",
    }


def test_a_wheel_says_that_it_is_typed_and_how_it_is_licensed(names):
    assert "slapo_rewrite/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_a_wheel_has_the_version_that_the_package_has(wheel, names):
    (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    with zipfile.ZipFile(wheel) as archive:
        content = email.message_from_bytes(archive.read(metadata))
    assert content["Version"] == __version__
    assert content["License-Expression"] == "Apache-2.0"


def test_the_console_script_leads_to_a_function(wheel, names):
    (entry,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
    with zipfile.ZipFile(wheel) as archive:
        lines = archive.read(entry).decode().split("\n")
    (script,) = (line for line in lines if line.startswith("slapo-rewrite"))
    module, _, function = script.partition("=")[2].strip().partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_bundled_schedules_are_found_in_a_wheel(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    script = """
        import json, pathlib, sys
        sys.path.insert(0, sys.argv[1])
        from slapo_rewrite.schedule.load import bundled
        import slapo_rewrite.rules.schedules
        print(json.dumps({name: str(path) for name, path in bundled().items()}))
    """
    found = json.loads(python(script, str(tmp_path)))
    assert sorted(found) == sorted(
        path.stem for path in (ROOT / "rules/schedules").glob("*.py") if path.stem != "__init__"
    )
    inside = tmp_path / "slapo_rewrite/rules/schedules"
    assert {Path(path).parent for path in found.values()} == {inside}


def test_rules_are_a_package_in_a_checkout_too():
    import slapo_rewrite.rules.schedules as schedules

    assert Path(str(schedules.__file__)).parent.name == "schedules"


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_whole_and_needs_nothing_that_costs_seconds(command):
    script = f"""
        import sys
        from slapo_rewrite import cli
        try:
            cli.main([*{command!r}.split(), "--help"])
        except SystemExit as done:
            assert not done.code
        print([name for name in {HEAVY!r} if name in sys.modules])
    """
    shown = python(script)
    assert shown.splitlines()[-1] == "[]"
    assert f"example:\n  slapo-rewrite {command}" in shown
    assert [line.split()[0] for line in shown.splitlines()[-5:-1]] == ["0", "1", "2", "3"]


def python(script: str, *arguments: str) -> str:
    """What a script prints in a fresh interpreter, outside the checkout."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(sys.prefix),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
