"""A plan of transformers is written as a schedule, and `auto` sends no more than it does."""

import pytest
import torch
from torch import nn

from benchmark import auto_against_tp_plan as against
from benchmark import report

OUTCOMES = report.read(against.NAME)["families"]
COUNTED = [found for found in OUTCOMES if against.is_counted(found)]


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(2, 8, 4))
        self.down_proj = nn.Parameter(torch.zeros(2, 4, 4))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        block = nn.ModuleDict(
            {"up": nn.Linear(4, 8), "down": nn.Linear(8, 4), "experts": Experts()}
        )
        self.layers = nn.ModuleList([block])
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)


@pytest.mark.parametrize(
    ("pattern", "style", "lines"),
    [
        ("layers.*.up", "colwise", ["s[\"layers.*.up\"].shard(['weight', 'bias'], axis=0)"]),
        ("layers.*.down", "rowwise", ["s[\"layers.*.down\"].shard(['weight'], axis=1)"]),
        (
            "layers.*.down",
            "rowwise_split_input",
            [
                "s[\"layers.*.down\"].shard(['weight'], axis=1)",
                's["layers.*.down"].sync("fwd_pre", "scatter", axis=-1)',
            ],
        ),
        (
            "head",
            "colwise_gather_output",
            [
                "s[\"head\"].shard(['weight'], axis=0)",
                's["head"].sync("fwd_post", "all_gather", axis=-1)',
            ],
        ),
        ("words", "embedding_rowwise", ["s[\"words\"].shard(['weight'], axis=0)"]),
        (
            "layers.*.experts.gate_up_proj",
            "packed_colwise",
            ['s["layers.*.experts"].shard("gate_up_proj", axis=1, parts=2)'],
        ),
        (
            "layers.*.experts.down_proj",
            "rowwise",
            ['s["layers.*.experts"].shard("down_proj", axis=2)'],
        ),
        ("layers.*.norm", "replicated_with_grad_allreduce", []),
        ("layers.*.not_there", "colwise", []),
    ],
)
def test_an_entry_of_a_plan_is_written_as_lines(pattern, style, lines):
    first = next(against.schedules_of(Model(), {pattern: style}))
    assert first == [*lines, "s.infer_sync()"]


def test_what_has_no_counterpart_is_said():
    with pytest.raises(against.NotCounted, match="`grouped_gemm` has no counterpart"):
        next(against.schedules_of(Model(), {"layers.*.up": "grouped_gemm"}))


def test_of_what_both_split_auto_sends_no_more():
    cheap = [found for found in COUNTED if against.of_shared(found) <= against.SAME]
    assert len(COUNTED) >= 40
    assert len(cheap) / len(COUNTED) >= 0.95


def test_figures_are_those_of_the_result_file():
    assert report.marked(against.NAME, against.table(OUTCOMES)) in report.README.read_text()


def test_where_more_is_sent_a_step_takes_less_time():
    """What `auto` splits beside the plan is worth what it sends."""
    dear = [found for found in COUNTED if against.times(found) > against.SAME]
    timed = [found for found in dear if "shared_seconds" in found]
    assert timed
    for found in timed:
        assert found["auto_seconds"] < found["shared_seconds"], found["family"]
        assert found["auto_seconds"] < found["plan_seconds"], found["family"]
