"""What README.md shows is what the tool does."""

import ast
import re
import shlex

import pytest

from benchmark import pipeline_simulation, plan_memory, readability, report, rewrite_time
from slapo_rewrite import cli
from slapo_rewrite.emit.rewrite import Project, rewrite
from slapo_rewrite.primitives import registry
from slapo_rewrite.schedule.load import bundled
from slapo_rewrite.schedule.plan import Plan
from slapo_rewrite.schedule.selection import Selection
from tests.golden import GENERATED, ROOT

BERT = "transformers.models.bert.modeling_bert"
DOCUMENTS = (
    "README.md",
    "CHANGELOG.md",
    "benchmark/README.md",
    "examples/review/README.md",
    "examples/train_gpt/README.md",
    "examples/trainer/README.md",
    "generated/README.md",
)
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.S | re.M)


def sessions() -> list[tuple[str, str]]:
    """What the console blocks type, with what they show after it."""
    typed = [part for block in blocks("console") for part in re.split(r"^\$ ", block, flags=re.M)]
    return [(part.partition("\n")[0], part.partition("\n")[2]) for part in typed if part]


def without_figures(text: str) -> list[str]:
    """The words of each line: errors differ from machine to machine in their last digits."""
    return [" ".join(re.sub(r"\S*\d\S*", "", line).split()) for line in text.strip().splitlines()]


def table(heading: str) -> list[str]:
    """The code in the first column of the table under a column's name."""
    rows = re.search(rf"^\| {heading} \|.*\n\| ---.*\n((?:\|.*\n)+)", README, re.M)
    assert rows, heading
    return [
        code for row in rows[1].splitlines() for code in re.findall(r"`([^`]+)`", row.split("|")[1])
    ]


def schedules() -> list[str]:
    return [text for text in blocks("python") if "\ndef schedule(" in text]


@pytest.fixture(scope="module")
def selection(tmp_path_factory) -> Selection:
    path = tmp_path_factory.mktemp("docs") / "schedule.py"
    path.write_text(schedules()[0])
    project = Project(BERT, str(path))
    return Selection(Plan(project.tree, project.schedule, project.sources), [project.tree.root])


@pytest.mark.parametrize("text", blocks("python"))
def test_python_parses(text):
    ast.parse(text)


@pytest.mark.parametrize("text", schedules())
def test_a_schedule_runs(text, tmp_path):
    path = tmp_path / "schedule.py"
    path.write_text(text)
    assert "+        self.query = ColumnParallelLinear(" in rewrite(BERT, str(path)).diff()


@pytest.mark.parametrize("text", blocks("diff"))
def test_a_diff_is_one_that_the_tool_makes(text):
    assert any(text in path.read_text() for path in GENERATED.glob("*/*/rewrite.diff"))


@pytest.mark.processes
def test_commands_do_what_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for command, shown in sessions():
        program, *arguments = shlex.split(command, comments=True)
        if program == "make":
            assert re.search(rf"^{arguments[0]}:", MAKEFILE, re.M), command
            continue
        assert program == "slapo-rewrite"
        assert cli.main(arguments) == cli.DONE, command
        printed = capsys.readouterr().out
        assert not shown or without_figures(printed) == without_figures(shown), command


def test_every_target_of_make_that_is_named_exists():
    named = set(re.findall(r"`make (\w+)`", README)) | {"demo", "test"}
    assert named <= set(re.findall(r"^(\w+):", MAKEFILE, re.M))


@pytest.mark.parametrize("code", table("selection"))
def test_a_selection_selects(code, selection):
    names = {"s": selection, "layers": selection["bert.encoder.layer"]}
    assert len(eval(code, names))


def test_the_table_of_primitives_is_whole():
    assert {re.match(r"\.(\w+)\(", code)[1] for code in table("primitive")} == set(registry())


def test_the_table_of_commands_names_every_command():
    named = {code.split()[1] for code in table("command") if code.startswith("slapo-rewrite ")}
    assert named - {"SOURCE"} == set(cli.COMMANDS)


def test_every_bundled_schedule_is_named():
    assert set(re.findall(r"\(rules/schedules/(\w+)\.py\)", README)) == set(bundled())


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    path = ROOT / document
    for link in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if not link.startswith("https://"):
            assert (path.parent / link).exists(), link


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 250


@pytest.mark.parametrize(
    "measured", [readability, rewrite_time, pipeline_simulation, plan_memory], ids=lambda m: m.NAME
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
