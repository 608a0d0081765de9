"""The bundled schedules communicate no more than necessary."""

import functools

import pytest
import torch

from benchmark import collectives, report
from benchmark.steps import STEPS
from tests.marks import long

MODELS = {step.name: step for step in STEPS}
PLAIN, SEQUENCE, GATHERED = collectives.VARIANTS
# Megatron-LM's, of one layer: number and size, forwards and backwards alike.
LEAST = {PLAIN.name: {"all-reduce": (2, 2.0)}}
LEAST[SEQUENCE.name] = {"all-gather": (2, 2.0), "reduce-scatter": (2, 2.0)}


@functools.cache
def parts(name, variant):
    return collectives.parts(MODELS[name], variant)


@pytest.mark.long
@pytest.mark.parametrize("variant", (PLAIN, SEQUENCE), ids=lambda v: v.name)
@pytest.mark.parametrize("name", [long("BERT-large"), long("GPT-2 medium"), "Llama-3.2-1B"])
def test_a_layer_sends_as_little_as_megatrons(name, variant):
    found = parts(name, variant)["layer"]
    for backward in (False, True):
        rows = [row for row in found if row["backward"] is backward]
        assert {r["kind"]: (r["number"], r["size"]) for r in rows} == LEAST[variant.name]


def test_a_pair_of_t5s_layers_sends_less():
    """What the decoder sends back to the encoder is added up once for all layers."""
    rows = parts("T5-base", PLAIN)["layer"]
    assert [(row["kind"], row["number"], row["size"]) for row in rows] == [
        ("all-reduce", 5, 2.75),
        ("all-reduce", 5, 2.75),
    ]


@pytest.mark.parametrize("name", [long("BERT-large"), long("GPT-2 medium"), "Llama-3.2-1B"])
def test_around_the_layers_as_little_is_sent_as_by_megatron(name):
    """The embedding's sum, that of the head's gradient, and three numbers a token for the loss."""
    step = MODELS[name]
    found = parts(name, PLAIN)
    hidden = step.sizes[collectives.HIDDEN.get(step.config, "hidden_size")]
    loss = 3 * torch.float32.itemsize / (hidden * collectives.DTYPE.itemsize)
    assert [(r["kind"], r["number"]) for r in found["around"]] == [
        ("all-reduce", 3),
        ("all-reduce", 1),
    ]
    assert [r["size"] for r in found["around"]] == pytest.approx([1 + loss, 1], abs=1e-3)
    assert found["added"] < 0.05
    gathered = parts(name, GATHERED)
    assert any(
        r["kind"] == "all-gather"
        and r["size"] == pytest.approx(step.sizes["vocab_size"] / hidden, abs=1e-3)
        for r in gathered["around"]
    )


def test_figures_are_those_of_the_result_file():
    text = collectives.table(report.read(collectives.NAME))
    assert report.marked(collectives.NAME, text) in report.README.read_text()
