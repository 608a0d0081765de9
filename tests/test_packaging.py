"""The contents of a wheel, and that what it starts is light."""

import email
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from slapo_rewrite import __version__
from slapo_rewrite.cli import COMMANDS
from tests.documents import read, shows

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "slapo_rewrite", "rules")
# What must not be imported before a command is known to need it: seconds, all of it.
HEAVY = ("torch", "transformers", "libcst", "black")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout, built where nothing else lies."""
    return built(tmp_path_factory.mktemp("wheel"), "--wheel")


def built(folder: Path, *what: str) -> Path:
    """The wheel of a copy of this checkout; of the source distribution where `what` is nothing."""
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)
    command = ["-m", "build", *what, "--no-isolation", "--outdir", str(folder / "dist")]
    done = subprocess.run(
        [sys.executable, *command, str(folder)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def modules(folder: str) -> set[str]:
    return {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")}


@pytest.mark.long
def test_a_wheel_holds_every_module_of_the_package(names):
    assert modules("slapo_rewrite") <= names
    assert "slapo_rewrite/runtime/tensor_parallel.py" in names
    assert "slapo_rewrite/verify/worker.py" in names


def test_a_wheel_holds_the_rules_inside_the_package(names):
    rules = modules("rules")
    assert "rules/schedules/bert.py" in rules
    assert {f"slapo_rewrite/{name}" for name in rules} <= names
    assert not any(name.startswith("rules/") for name in names)


def test_a_wheel_holds_what_was_measured(names):
    tables = {path.name for path in (ROOT / "rules/measured").iterdir()}
    assert "README.md" in tables
    assert {f"slapo_rewrite/rules/measured/{name}" for name in tables} <= names


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


def test_the_release_is_called_alike_everywhere():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (.*)$", changes, re.M)[0] in (__version__, "Unreleased")
    assert f"\n## {__version__}\n" in changes
    hook = (ROOT / "docs/commands.md").read_text()
    assert f"rev: v{__version__}\n" in hook


@pytest.mark.release
def test_a_source_distribution_installed_in_an_empty_environment_does_the_tutorial(tmp_path):
    """What it depends on is found where the tests have it, since torch takes minutes to install."""
    (tmp_path / "source").mkdir()
    wheel = built(tmp_path / "source")
    assert len(list(wheel.parent.glob("*.tar.gz"))) == 1
    venv.create(tmp_path / "venv", symlinks=True)
    own = tmp_path / "venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(own), "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True, timeout=300)
    (packages,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    place = python("import slapo_rewrite; print(slapo_rewrite.__file__)", program=str(own))
    assert Path(place.strip()).is_relative_to(packages)
    folder = tmp_path / "user"
    folder.mkdir()
    did = []
    for block in read(ROOT / "docs/tutorial.md"):
        if block.title:
            (folder / block.title).write_text(block.text)
        for command, shown in block.sessions() if block.language == "console" else ():
            program, *arguments = shlex.split(command)
            if program in ("pip", "torchrun") or "staged" in arguments:
                continue
            done = subprocess.run(
                [str(own.with_name(program)), *arguments],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=300,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            assert done.returncode == 0, done.stderr
            assert shows(shown, done.stdout), done.stdout
            did.append(arguments[0])
    assert did == ["tree", "gpt.py", "explain", "verify", "explain", "train.py"]


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


def python(script: str, *arguments: str, program: str = sys.executable) -> str:
    """What a script prints in a fresh interpreter, outside the checkout."""
    done = subprocess.run(
        [program, "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(sys.prefix),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_pythons_that_are_named_are_those_that_the_documents_name():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [each.rpartition(" ")[2] for each in project["classifiers"] if "Python :: 3" in each]
    assert project["requires-python"] == f">={named[0]}"
    for document in ("README.md", "docs/tutorial.md"):
        assert f"Python {named[0]} to {named[-1]}" in (ROOT / document).read_text()
    limits = (ROOT / "docs/limits.md").read_text()
    assert f"On Python {', '.join(named[1:-1])} and {named[-1]} the wheel was installed" in limits
