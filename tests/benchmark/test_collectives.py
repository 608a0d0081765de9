"""What the bundled schedules send is what has to be sent."""

import pytest

from benchmark import collectives, report
from benchmark.steps import STEPS
from tests.marks import long

MODELS = {step.name: step for step in STEPS}
PLAIN, SEQUENCE = collectives.VARIANTS
# Megatron-LM's, of one layer: number and size, forwards and backwards alike.
LEAST = {PLAIN.name: {"all-reduce": (2, 2.0)}}
LEAST[SEQUENCE.name] = {"all-gather": (2, 2.0), "reduce-scatter": (2, 2.0)}


@pytest.mark.parametrize("variant", collectives.VARIANTS, ids=lambda v: v.name)
@pytest.mark.parametrize("name", [long("BERT-large"), long("GPT-2 medium"), "Llama-3.2-1B"])
def test_a_layer_sends_as_little_as_megatrons(name, variant):
    found = collectives.of_a_layer(MODELS[name], variant)
    for backward in (False, True):
        rows = [row for row in found if row["backward"] is backward]
        assert {r["kind"]: (r["number"], r["size"]) for r in rows} == LEAST[variant.name]


def test_a_pair_of_t5s_layers_sends_less():
    """What the decoder sends back to the encoder is added up once for all layers."""
    rows = collectives.of_a_layer(MODELS["T5-base"], PLAIN)
    assert [(row["kind"], row["number"], row["size"]) for row in rows] == [
        ("all-reduce", 5, 3.0),
        ("all-reduce", 5, 3.0),
    ]


def test_figures_are_those_of_the_result_file():
    text = collectives.table(report.read(collectives.NAME))
    assert report.marked(collectives.NAME, text) in report.README.read_text()
