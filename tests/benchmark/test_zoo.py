"""The zoo's table is that of its outcomes, and nothing in them is a wrong number or a traceback."""

import pytest

from benchmark import report, zoo
from slapo_rewrite.verify.launch import ForkServer

OUTCOMES = report.read(zoo.NAME)["families"]


def test_the_readme_shows_the_committed_outcomes():
    assert report.marked(zoo.NAME, zoo.table(OUTCOMES)) in report.README.read_text()
    readme = report.FOLDER.parent / "README.md"
    assert zoo.summary(OUTCOMES) in " ".join(readme.read_text().split())


def test_every_original_is_given_back_by_an_empty_schedule():
    assert {found["identity"] for found in OUTCOMES if zoo.runs(found)} == {zoo.RIGHT}


@pytest.mark.release
def test_a_family_comes_out_as_recorded():
    known = {found["family"]: found for found in OUTCOMES}
    right = [n for n, f in known.items() if zoo.runs(f) and f.get("seconds", 9) < 3]
    with ForkServer(zoo.SHARED) as server:
        *_, found = zoo.outcomes(right[0], server, zoo.LIMIT_S)
    assert {c: found[c] for c in zoo.COLUMNS} == {c: known[right[0]][c] for c in zoo.COLUMNS}
