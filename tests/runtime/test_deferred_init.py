"""Constructors that run without memory: every value and every random number as ever."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrizations

from slapo_rewrite.runtime.deferred_init import construct
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


class Copies(nn.Module):
    """Parameters that are made of others, in ways that torch does not tell of."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.copied = copy.deepcopy(self.first)
        self.filled = nn.Linear(3, 3)
        self.filled.load_state_dict(self.first.state_dict())
        self.by_numpy = nn.Parameter(torch.from_numpy(self.first.weight.detach().numpy() * 2))
        self.listed = nn.Parameter(torch.tensor(self.first.weight.tolist()))
        self.shared = nn.Parameter(self.first.weight.data)
        self.item = nn.Parameter(torch.full((2,), self.first.bias[0].item()))
        self.many = nn.Linear(3, 3)
        with torch.no_grad():
            torch._foreach_copy_([*self.many.parameters()], [*self.first.parameters()])
            self.filled.bias[0] = self.first.bias[1]
        self.set = nn.Linear(3, 3)
        self.set.weight.data = self.first.weight.data.clone()
        large = self.first.weight.abs().sum() > 1
        self.last = nn.Linear(3, 3 if large else 2)


@pytest.mark.parametrize("name", list(tensors(Copies())))
def test_what_is_made_of_other_parameters_is_right(name):
    torch.manual_seed(0)
    real = tensors(Copies())[name]
    torch.manual_seed(0)
    made = construct(Copies, lambda model: [tensors(model)[name]])
    assert torch.equal(tensors(made)[name], real)


def test_an_error_of_the_constructor_is_its_own():
    with pytest.raises(ZeroDivisionError):
        construct(lambda: nn.Linear(1, 1 // 0), lambda model: ())
