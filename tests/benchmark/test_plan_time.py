"""Accuracy of planned times: the recorded figures match today's predictions."""

import pytest

from benchmark import plan_time, report
from benchmark.steps import step


def test_figures_are_those_of_the_result_file():
    text = plan_time.table(report.read(plan_time.NAME))
    assert report.marked(plan_time.NAME, text) in report.README.read_text()


def test_planned_time_is_near_what_was_measured():
    for case in report.read(plan_time.NAME)["cases"]:
        assert 0.75 <= case["predicted"] / case["measured"] <= 1.1, case


@pytest.mark.parametrize("model, way", [("GPT-2 medium", "ours"), ("T5-base", "SDPA")])
def test_figures_are_what_is_predicted_today(tmp_path, model, way):
    results = report.read(plan_time.NAME)
    own = [case for case in results["cases"] if (case["model"], case["way"]) == (model, way)]
    predictor = plan_time.predictor_of(step(model), plan_time.WAYS[way], results["gpu"], tmp_path)
    for case in own:
        guess = plan_time.predicted_seconds(predictor, case["rows"])
        assert guess == pytest.approx(case["predicted"], rel=1e-3), case
