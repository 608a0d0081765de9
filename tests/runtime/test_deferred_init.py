"""Constructors that run without memory give the usual values and random numbers."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrizations

from slapo_rewrite.runtime.deferred_init import construct, fill_parts, random_states, restore
from tests.models import gpt


class Odd(nn.Module):
    """What constructors do to make their parameters and buffers."""

    def __init__(self):
        super().__init__()
        self.scaled = nn.Parameter(torch.randn(3, 4) * 0.02)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
        self.listed = torch.rand(3).tolist(), torch.rand(2).numpy().sum()
        self.chosen = nn.Linear(2, 2) if torch.rand(()) > 0.2 else None
        with torch.device("meta"):
            self.size_alone = nn.Linear(3, 3).weight.shape  # draws nothing
        self.others = nn.Parameter(torch.from_numpy(np.random.rand(2, 3)) * random.random())
        self.found = torch.nonzero(torch.rand(8) > 0.5)
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)).bool())
        table = torch.zeros(10, 6)
        angles = torch.arange(10).unsqueeze(1) * torch.exp(torch.arange(0, 6, 2) * -0.3)
        table[:, 0::2], table[:, 1::2] = angles.sin(), angles.cos()
        self.register_buffer("table", table)
        self.given = nn.Parameter(torch.tensor([1.0, 2.0]))  # has values, and so is real
        self.given.data.mul_(torch.rand(2))
        self.rounded = nn.Parameter(torch.rand(3, 3).to(torch.bfloat16))
        self.ordered = nn.Parameter(torch.randperm(6).float())
        self.inverse = nn.Parameter(torch.linalg.inv(torch.rand(3, 3)))
        self.turned = nn.Parameter(nn.init.kaiming_normal_(torch.empty(6, 7)).T)
        self.partly = nn.Parameter(torch.empty(4, 4))
        self.partly.data.normal_(generator=torch.Generator().manual_seed(3))
        self.partly.data[1].zero_()
        for name in ("orthogonal_", "trunc_normal_", "eye_", "xavier_uniform_"):
            made = getattr(nn.init, name)(torch.empty(5, 4))
            self.register_parameter(name, nn.Parameter(made))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(4, 3), 0.5))
        self.conv, self.lstm = nn.Conv2d(3, 4, 2), nn.LSTM(3, 4)
        self.embedding, self.norm = nn.Embedding(5, 4, padding_idx=1), nn.BatchNorm1d(3)
        self.tied = nn.Embedding(2, 2)
        self.tied.weight = self.chosen.weight
        self.requires_grad_(True).inverse.requires_grad = False


class Reading(Odd):
    """What reads the values of parameters."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
        self.copies = nn.TransformerEncoder(layer, 2)
        self.weight_norm = parametrizations.weight_norm(nn.Linear(3, 4))
        self.spectral_norm = parametrizations.spectral_norm(nn.Linear(3, 4))
        self.truncated = nn.Parameter(torch.empty(3, 5))
        nn.init.trunc_normal_(self.truncated)


def small(name: str, **sizes: int):
    """A small Hugging Face model with padding in its vocabulary and a tie."""
    config = getattr(transformers, f"{name}Config")(vocab_size=203, pad_token_id=0, **sizes)
    heads = {"GPT2": "GPT2LMHeadModel", "T5": "T5ForConditionalGeneration"}
    head = heads.get(name, f"{name}ForMaskedLM" if name == "Bert" else f"{name}ForCausalLM")
    return getattr(transformers, head)(config)


MAKERS = {
    "odd": Odd,
    "reading": Reading,
    "gpt": lambda: gpt.GPT(gpt.GPTConfig(203, 32, n_layer=3, n_head=4, n_embd=64)),
    "bert": lambda: small("Bert", hidden_size=48, num_hidden_layers=2),
    "gpt2": lambda: small("GPT2", n_embd=48, n_layer=2),
    "llama": lambda: small("Llama", hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
    "t5": lambda: small("T5", d_model=64, num_layers=2),
}


def seed() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    named = dict(model.named_parameters(remove_duplicate=False))
    return named | dict(model.named_buffers(remove_duplicate=False))


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("name", MAKERS)
def test_values_are_those_of_a_real_construction(name, part):
    """Of all parameters, or of every third."""

    def wanted(model: nn.Module) -> dict[str, torch.Tensor]:
        named = list(tensors(model).items())
        return dict(named if part == 3 else named[part::3])

    seed()
    real = MAKERS[name]()
    after = torch.get_rng_state()
    seed()
    made = construct(MAKERS[name], lambda model: wanted(model).values())
    assert torch.equal(torch.get_rng_state(), after), "random numbers go on as after the real one"

    expected, found = wanted(real), wanted(made)
    assert found.keys() == expected.keys()
    for key, value in found.items():
        want = expected[key]
        assert torch.equal(value, want) and value.dtype == want.dtype, key
        assert value.stride() == want.stride() and value.requires_grad == want.requires_grad, key
    if isinstance(made, Odd):
        assert (made.rates, made.listed) == (real.rates, real.listed)
        assert torch.equal(made.found, real.found)
    if part < 3 and name != "reading":
        held = {id(value) for value in found.values()}
        others = [p for p in made.parameters() if p.dim() > 1 and id(p) not in held]
        assert others and not any(p.untyped_storage().nbytes() for p in others)


# What constructors make of parameters, in ways that torch does not tell of.


def deep_copy(model):
    model.other = copy.deepcopy(model.first)


def loaded(model):
    model.other = nn.Linear(3, 3)
    model.other.load_state_dict(model.first.state_dict())


def by_numpy(model):
    model.other = nn.Parameter(torch.from_numpy(model.first.weight.detach().numpy() * 2))


def listed(model):
    model.other = nn.Parameter(torch.tensor(model.first.weight.tolist()))


def shared(model):
    model.other = nn.Parameter(model.first.weight.data.t())


def some_rows(model):
    model.other = nn.Parameter(model.first.weight.data[[0, 2]])


def one_number(model):
    model.other = nn.Parameter(torch.full((2, 2), model.first.weight[0, 1].item()))


@torch.no_grad()
def all_at_once(model):
    model.other = nn.Linear(3, 3)
    torch._foreach_copy_([*model.other.parameters()], [*model.first.parameters()])


@torch.no_grad()
def one_row(model):
    model.other = nn.Linear(3, 3)
    model.other.weight[0] = model.first.weight[1]


@torch.no_grad()
def of_itself(model):
    model.first.weight.data.copy_(model.first.weight)


def other_data(model):
    model.other = nn.Linear(3, 3)
    model.other.weight.data = model.first.weight.data.clone()


def size_by_values(model):
    model.other = nn.Linear(3, 3 if model.first.weight.abs().sum() > 1 else 2)


def by_chance(model):
    for _ in range(16):
        if torch.rand(()) > 0.5:
            model.first.weight.data.mul_(2)
        else:
            model.first.weight.data.fill_(torch.rand(()))


class Made(nn.Module):
    """A layer, and what is made of it."""

    def __init__(self, way):
        super().__init__()
        self.first = nn.Linear(3, 3)
        way(self)


WAYS = (deep_copy, loaded, by_numpy, listed, shared, some_rows, one_number, all_at_once, one_row)
WAYS += (of_itself, other_data, size_by_values, by_chance)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_made_of_parameters_is_right(way):
    """All that is wanted, each alone, and each when it is final."""
    seed()
    real = tensors(Made(way))
    for names in (list(real), *([name] for name in real)):
        seed()
        made = construct(
            lambda: Made(way), lambda model, names=names: [tensors(model)[n] for n in names]
        )
        assert all(torch.equal(tensors(made)[name], real[name]) for name in names)
    taken = {}
    seed()
    construct(
        lambda: Made(way),
        lambda model: tensors(model).values(),
        lambda place, tensor: taken.update({place: tensor.clone()}),
    )
    assert all(torch.equal(taken[place], tensor) for place, tensor in enumerate(real.values()))


def test_a_constructor_that_takes_another_course_is_run_once_more():
    runs = []

    def make():
        runs.append(0)
        return Made(by_chance)

    construct(make, nn.Module.parameters)
    assert len(runs) == 3


def test_an_error_of_the_constructor_is_its_own():
    with pytest.raises(ZeroDivisionError):
        construct(lambda: nn.Linear(1, 1 // 0), lambda model: ())


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("noise", torch.rand(4), persistent=False)
        self.register_buffer("positions", torch.arange(4), persistent=False)


def test_parts_have_the_buffers_that_no_state_dict_holds():
    model = Noisy()
    states = random_states()
    whole = Noisy()
    restore(states)
    fill_parts(model, Noisy)
    for one, other in zip(model.buffers(), whole.buffers(), strict=True):
        assert torch.equal(one, other)
