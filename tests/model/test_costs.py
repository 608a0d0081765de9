"""Costs of elements, compared with published formulas and with the model itself."""

import pytest
import torch
from torch import nn

from benchmark import element_costs
from slapo_rewrite.model.costs import ON_CPU, ON_GPU, Product, costs_of, elements_of, flops_of
from tests.marks import all_but
from tests.simulate.shapes import PUBLISHED, SHAPES


@pytest.mark.parametrize("name", SHAPES)
def test_every_parameter_is_counted(name):
    costs = SHAPES[name].costs(sequences=2)
    once = {name: size for cost in costs for name, size in cost.parameters.items()}
    assert round(sum(once.values()) / 1e6) == SHAPES[name].parameters
    # The vocabulary's table is read by the embedding and by the head, which share it.
    first, *_, last = costs
    assert set(first.parameters) & set(last.parameters)
    assert all(cost.flops and cost.held for cost in costs[1:])


def test_a_layer_is_what_its_formulas_say():
    s, b, h = 512, 4, 1024
    costs = SHAPES["BERT-large"].costs(sequences=b)
    layer = costs[1]
    assert layer.flops == costs[24].flops and layer.moved == costs[24].moved
    # 12h² weights, two operations each; scores and their product with the values.
    assert layer.flops == 2 * b * s * 12 * h * h + 2 * 2 * b * s * s * h
    # Korthikanti et al. 2022, arXiv:2205.05198, eq. 1 and 2, without the scores, which flash
    # attention does not keep.
    assert layer.held == pytest.approx(34 * s * b * h, rel=0.005)
    assert layer.held_whole == pytest.approx(10 * s * b * h, rel=0.005)
    assert layer.sent == layer.given == 2 * s * b * h
    head = costs[-1]
    assert head.flops == 2 * b * s * (h * h + h * 30522)


def test_an_embedding_reads_what_it_looks_up():
    first = SHAPES["Llama-1B"].costs(sequences=1)[0]
    assert first.flops == 0
    assert first.moved < 10 * first.sent


def test_of_several_results_the_first_goes_on():
    # Its layers return their attention's weights beside the hidden states.
    layer = PUBLISHED["GPT-Neo-1.3B"].costs(sequences=1)[1]
    assert layer.sent == 512 * 2048 * 4
    assert layer.moved_whole < layer.moved / 4


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.b(self.a(x)))


@pytest.mark.parametrize("paths", [["a", "b"], ["b", "a"]])
def test_elements_are_called_in_their_order(paths):
    with torch.device("meta"):
        model = Twice()
    with pytest.raises(ValueError, match="once"):
        costs_of(model, {"x": torch.ones(2, 4)}, paths)
    (cost,) = costs_of(model, {"x": torch.ones(2, 4)}, ["b"])
    assert cost.flops == 3 * 2 * 2 * 4 * 4
    assert not model.a._forward_hooks and not model.b._forward_pre_hooks


@pytest.mark.parametrize("name", all_but(["Llama-1B"], SHAPES))
def test_a_model_can_be_cut_between_its_layers_and_what_stands_beside_them(name):
    model, inputs = SHAPES[name].built(sequences=2)
    found = elements_of(model, inputs)
    assert [path for path in found if path in SHAPES[name].elements] == SHAPES[name].elements
    assert not [path for path in found if path.count(".") > 3]
    plain = costs_of(model, inputs, found)
    # A mask's values are not there; that it is one must be enough. What it hides is looked at.
    masked = costs_of(model, inputs | {"attention_mask": inputs["input_ids"]}, found)
    assert all(one.flops >= other.flops for one, other in zip(masked, plain, strict=True))
    whole = element_costs.costs_of(model, inputs, found)
    assert [(c.flops, c.moved) for c in whole] == [(c.flops, c.moved) for c in plain]
    assert not any(module._forward_pre_hooks for module in model.modules())


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.again = nn.ModuleList([nn.Linear(4, 4)])
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4)))
        self.unused = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        for _ in range(2):
            x = self.again[0](x)
        return self.head(x)


def test_elements_are_those_with_parameters_that_are_called_once():
    with torch.device("meta"):
        model = Mixed()
    found = elements_of(model, {"x": torch.ones(2, 4)})
    assert found == ["body.0", "body.2.0", "head"]
    costs = costs_of(model, {"x": torch.ones(2, 4)}, found)
    assert [cost.flops / 64 for cost in costs] == [1, 3, 1]


def kind(rows, columns):
    """What a product of so many rows and columns is."""
    x = torch.empty(rows, 64, device="meta", dtype=torch.bfloat16)
    weight = torch.empty(columns, 64, device="meta", dtype=torch.bfloat16)
    made = Product.of(torch.ops.aten.mm.default, (x, weight.t(), torch.mm(x, weight.t())))
    assert made.width == 2
    return made.kind


def test_rows_of_a_product_that_are_no_whole_16_bytes_are_told():
    assert kind(100, 32128) == kind(100, 8) == "plain"
    assert kind(100, 50257) == kind(100, 30522) == kind(100, 4) == "unaligned"
    assert kind(3, 64) == "plain"  # an odd number of rows is none of odd length
    columns = torch.empty(64, 3, device="meta").t()  # which begin oddly
    assert Product.of(torch.ops.aten.mm.default, (columns,)) == ("unaligned", 4)


def test_attention_is_told_and_whether_it_takes_a_bias():
    ops = torch.ops.aten
    assert Product.of(ops._scaled_dot_product_flash_attention.default, ()).kind == "attention"
    assert Product.of(ops._scaled_dot_product_efficient_attention.default, ()).kind == "masked"


@pytest.mark.parametrize("instead", [ON_GPU, ON_CPU])
def test_values_of_another_width_than_queries_keep_it(instead):
    with torch.device("meta"):
        query, key = torch.empty(2, 1, 2, 5, 24).unbind()
        value = torch.empty(1, 2, 5, 16, requires_grad=True)
    attend = torch.nn.functional.scaled_dot_product_attention
    result = instead[attend](query, key, value)
    assert result.shape == value.shape
    result.sum().backward()
    assert value.grad.shape == value.shape


def test_causal_attention_looks_at_half():
    q = torch.empty(2, 4, 128, 64, device="meta", dtype=torch.bfloat16)
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    whole, half = (flops_of(op, (q, q, q, 0.0, causal), {}, None) for causal in (False, True))
    assert whole == 2 * 2 * 2 * 4 * 128 * 128 * 64 and half == whole / 2


def test_grouped_products_count_each_row_once():
    def flops(*shapes):
        made = [torch.empty(shape, device="meta") for shape in shapes]
        return flops_of(torch.ops.aten._grouped_mm.default, made, {}, None)

    rows, experts, inside, outside = 100, 8, 64, 32
    expected = 2 * rows * inside * outside
    assert flops((rows, inside), (experts, inside, outside)) == expected
    assert flops((inside, rows), (rows, outside)) == expected  # the gradient of the weights
    assert flops((experts, 5, inside), (experts, inside, outside)) == expected / rows * 5 * experts
