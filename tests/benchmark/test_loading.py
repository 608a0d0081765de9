"""Cost of starting a model: the recorded figures, and those that no machine changes."""

import pytest

from benchmark import loading, report


def rows(results, way):
    return [row for row in results["rows"] if row["way"] == way]


def test_figures_are_those_of_the_result_file():
    text = loading.table(report.read(loading.NAME))
    assert report.marked(loading.NAME, text) in report.README.read_text()


def test_figures_meet_the_bars():
    results = report.read(loading.NAME)
    (theirs,) = rows(results, "from_pretrained")
    for row in rows(results, "build_deferred"):
        assert row["peak"] <= 1.3 * row["parameters"]
    for row in rows(results, "load_pretrained"):
        assert row["peak"] <= 1.2 * row["parameters"]
        assert row["cpu"] <= 2 * theirs["cpu"] / row["ranks"] + 0.15
    for row in rows(results, "save_pretrained"):
        assert row["peak"] <= 1.6 * results["file"]


@pytest.mark.release
@pytest.mark.processes
def test_a_smaller_model_is_started_so_too():
    ranks = 2
    ways = {"constructed": (1,), "build_deferred": (ranks,), "load_pretrained": (ranks,)}
    size = loading.Size(layers=4 * ranks, hidden=1024, vocabulary=8000)
    results = {"rows": loading.measure(size, ways, rounds=1)}
    (whole,) = rows(results, "constructed")
    (built,) = rows(results, "build_deferred")
    (loaded,) = rows(results, "load_pretrained")
    assert built["parameters"] < 1.1 * whole["parameters"] / ranks
    assert built["peak"] <= 1.6 * built["parameters"] and built["cpu"] <= 2 * whole["cpu"]
    assert loaded["peak"] <= 1.2 * loaded["parameters"] and loaded["cpu"] <= whole["cpu"] / 2
