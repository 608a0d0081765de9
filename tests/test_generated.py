"""`generated/` is what the bundled schedules give today."""

import json
import subprocess

import pytest

from slapo_rewrite.emit import record
from tests import golden

AGAIN = "run `make generated`, and read what changed"


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return golden.everything()


@pytest.fixture(scope="module")
def ignored() -> set[str]:
    """Model files that git leaves out; they need not be there."""
    return {
        f"{item.folder}/modeling_{item.model}.py"
        for item in golden.goldens()
        if not item.committed_whole
    }


def test_every_committed_file_is_current(made, ignored):
    wrong = [
        name
        for name, text in made.items()
        if name not in ignored and (golden.GENERATED / name).read_bytes() != text.encode()
    ]
    assert not wrong, AGAIN


def test_no_file_is_left_from_a_schedule_that_is_gone(made):
    assert golden.present() <= made.keys(), AGAIN


@pytest.mark.parametrize("item", golden.goldens(), ids=lambda item: item.folder)
def test_the_model_file_is_the_one_that_the_record_names(made, item):
    content = record.read(golden.GENERATED / item.folder)
    name = content["source"]["file"]
    assert content["files"][name] == record.digest(made[f"{item.folder}/{name}"]), AGAIN


@pytest.mark.parametrize("item", golden.goldens(), ids=lambda item: item.folder)
def test_a_record_says_nothing_of_the_machine(item):
    text = (golden.GENERATED / item.folder / record.NAME).read_text()
    content = json.loads(text)
    assert (content["source"]["name"], content["schedule"]["name"]) == (item.source, item.schedule)
    assert str(golden.ROOT) not in text
    assert "digest" not in content["tool"]


def test_git_leaves_out_the_model_files_and_nothing_else(made, ignored):
    if not (golden.ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    paths = "\n".join(f"generated/{name}" for name in sorted(made))
    found = subprocess.run(
        ["git", "check-ignore", "--no-index", "--stdin"],
        input=paths,
        capture_output=True,
        text=True,
        cwd=golden.ROOT,
    )
    assert set(found.stdout.split()) == {f"generated/{name}" for name in ignored}
