"""README.md and docs/ show what the tool does; `tests/documents.py` says how they are run."""

import inspect
import re
import subprocess
import sys

import pytest

from benchmark import (
    checkpoint_budget,
    pipeline_simulation,
    plan_memory,
    readability,
    report,
    rewrite_time,
    tune_example,
)
from slapo_rewrite import cli
from slapo_rewrite.primitives import registry
from slapo_rewrite.primitives.page import described
from slapo_rewrite.project import Project
from slapo_rewrite.schedule.load import ScheduleFile, bundled
from slapo_rewrite.schedule.plan import Plan
from slapo_rewrite.schedule.selection import Selection
from tests.documents import TARGETS, Reader, read
from tests.golden import ROOT

DOCS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
READ = ("README.md", "CONTRIBUTING.md", *DOCS)
DOCUMENTS = (
    *READ,
    "CHANGELOG.md",
    "benchmark/README.md",
    "examples/review/README.md",
    "examples/train_gpt/README.md",
    "examples/trainer/README.md",
    "generated/README.md",
)


def table(document: str, heading: str) -> list[str]:
    """The code in the first column of the table under a column's name."""
    text = (ROOT / document).read_text()
    rows = re.search(rf"^\| {heading} \|.*\n\| ---.*\n((?:\|.*\n)+)", text, re.M)
    assert rows, heading
    return [
        code for row in rows[1].splitlines() for code in re.findall(r"`([^`]+)`", row.split("|")[1])
    ]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty one to work in, of which nothing stays imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in str(getattr(module, "__file__", None)):
            del sys.modules[name]


@pytest.mark.processes
@pytest.mark.parametrize("document", READ)
def test_what_is_shown(document, folder, capsys):
    reader = Reader(folder, capsys, patient=False)
    for block in read(ROOT / document):
        reader.follow(block)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(
    "document",
    [
        pytest.param(d, marks=pytest.mark.release if d == "docs/training.md" else ())
        for d in READ
        if any(b.long for b in read(ROOT / d))
    ],
)
@pytest.mark.filterwarnings("ignore")  # PEFT asks transformers for what is deprecated there
def test_what_is_shown_and_takes_long(document, folder, capsys):
    reader = Reader(folder, capsys, patient=True, by_torchrun=document == "README.md")
    for block in read(ROOT / document):
        reader.follow(block)


@pytest.mark.long
def test_the_site_is_built_without_a_broken_link(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    pages = {p.parent.relative_to(tmp_path / "site").as_posix() for p in tmp_path.rglob("*.html")}
    assert {f"primitives/{name}" for name in registry()} <= pages
    assert "rules/swiglu" in pages
    assert "Source: Shazeer" in (tmp_path / "site/rules/swiglu/index.html").read_text()


@pytest.fixture(scope="module")
def selection(tmp_path_factory) -> Selection:
    path = tmp_path_factory.mktemp("docs") / "schedule.py"
    (text,) = (b.text for b in read(ROOT / "README.md") if b.is_schedule)
    path.write_text(text)
    project = Project("transformers.models.bert.modeling_bert", str(path))
    return Selection(Plan(project.tree, project.schedule, project.sources), [project.tree.root])


def test_every_target_of_make_that_is_named_exists():
    named = {each for d in READ for each in re.findall(r"`make (\w+)", (ROOT / d).read_text())}
    assert named and named <= TARGETS


@pytest.mark.parametrize("code", table("docs/schedules.md", "selection"))
def test_a_selection_selects(code, selection):
    names = {"s": selection, "layers": selection["bert.encoder.layer"]}
    assert len(eval(code, names))


def test_the_table_of_primitives_is_whole():
    assert {
        re.match(r"\.(\w+)\(", code)[1] for code in table("docs/schedules.md", "primitive")
    } == set(registry())


@pytest.mark.parametrize("code", table("docs/schedules.md", "primitive"))
def test_the_table_of_primitives_calls_arguments_as_they_are_called(code):
    name, shown = re.fullmatch(r"\.(\w+)(\(.*\))", code).groups()
    call = described(name).call.removeprefix(name)
    own, known = (inspect.signature(eval(f"lambda {text[1:-1]}: 0")) for text in (shown, call))
    known = {each.name: each.default for each in known.parameters.values()}
    assert {each.name: each.default for each in own.parameters.values()}.items() <= known.items()


def test_the_table_of_commands_names_every_command():
    named = {
        code.split()[1]
        for code in table("docs/commands.md", "command")
        if code.startswith("slapo-rewrite ")
    }
    assert named - {"SOURCE"} == set(cli.COMMANDS)


def test_every_bundled_schedule_is_named():
    text = (ROOT / "docs/schedules.md").read_text()
    assert set(re.findall(r"\(\.\./rules/schedules/(\w+)\.py\)", text)) == set(bundled())


@pytest.mark.parametrize("name", bundled())
def test_the_table_of_knobs_is_that_of_the_bundled_schedules(name):
    row = re.search(
        r"^\| `sequence_parallel` \|.*$", (ROOT / "docs/schedules.md").read_text(), re.M
    )
    lacking = {"sequence_parallel"} if name == "t5" and "not for T5" in row[0] else set()
    _, *own = inspect.signature(ScheduleFile.load(name).module.schedule).parameters
    assert set(own) == set(table("docs/schedules.md", "knob")) - lacking


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    path = ROOT / document
    made = {"primitives", "rules"}  # by docs/pages.py
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        if not link.startswith("https://") and link.partition("/")[0] not in made:
            assert (path.parent / link).exists(), link


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize(
    "measured",
    [
        readability,
        rewrite_time,
        pipeline_simulation,
        plan_memory,
        checkpoint_budget,
        tune_example,
    ],
    ids=lambda m: m.NAME,
)
def test_figures_are_those_of_the_result_files(measured):
    text = measured.table(report.read(measured.NAME))
    assert report.marked(measured.NAME, text) in report.README.read_text()


def test_every_test_exists_that_the_table_of_slapos_behaviours_names():
    tests = ROOT / "tests"
    named = re.findall(r"\]\((\S+\.py)\): `(test_\w+)`", (tests / "SLAPO.md").read_text())
    assert len(named) > 20
    missing = [(f, t) for f, t in named if f"def {t}(" not in (tests / f).read_text()]
    assert not missing
