"""Weights made from another module's, whole or in part, and converted back bit for bit."""

import functools

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from slapo_rewrite import concat, split, transpose
from slapo_rewrite.runtime import loading, weights


class Before(nn.Module):
    """The original: grouped-query projections, a packed pair, a matrix kept transposed."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.q = nn.Linear(4, 8)
        self.k = nn.Linear(4, 2)
        self.v = nn.Linear(4, 2)
        self.pair = nn.Linear(4, 6, bias=False)
        self.turned = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("scale", torch.tensor(2.0))


class After(nn.Module):
    """What stands in its place."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.up = nn.Linear(4, 2, bias=False)
        self.gate = nn.Linear(4, 4, bias=False)
        self.turned = nn.Parameter(torch.zeros(4, 4))
        self.norm = nn.LayerNorm(4)
        self.register_buffer("factor", torch.tensor(0.0))


MAP = {
    "qkv.weight": concat("q.weight", "k.weight", "v.weight"),
    "qkv.bias": concat("q.bias", "k.bias", "v.bias"),
    "gate.weight": split("pair.weight", (2, 1), 0),
    "up.weight": split("pair.weight", (2, 1), 1),
    "turned": transpose("turned"),
    "factor": "scale",
}


def model(make):
    return nn.ModuleDict({"first": nn.Linear(2, 2), "inner": make(), "last": nn.Linear(2, 2)})


def models():
    torch.manual_seed(0)
    before = model(Before)
    after = model(lambda: weights.map_weights(After, original=Before, weights=MAP))
    after.load_state_dict(before.state_dict())
    return before, after


def test_weights_go_in_and_come_back():
    before, after = models()
    state, inner = before.state_dict(), after["inner"]
    assert torch.equal(inner.qkv.weight[8:10], before["inner"].k.weight)
    assert torch.equal(inner.up.weight, before["inner"].pair.weight[4:])
    assert torch.equal(inner.turned, before["inner"].turned.t())
    full = loading.full_state_dict(after)
    assert list(full) == list(state)
    assert all(torch.equal(full[name], state[name]) for name in state)


def test_a_state_dict_of_its_own_is_taken_as_it_is():
    _, after = models()
    own = {name: tensor.clone() for name, tensor in after.state_dict().items()}
    _, other = models()
    other.load_state_dict(after.state_dict())
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, own[name]), name  # the square matrix is not turned again


def test_a_missing_weight_is_named():
    before, after = models()
    state = before.state_dict()
    del state["inner.k.weight"]
    with pytest.raises(RuntimeError, match=r"qkv\.weight"):
        after.load_state_dict(state)


def test_gradients_come_back_and_go_in():
    before, after = models()
    gradients = {n: torch.randn_like(p) for n, p in before.named_parameters()}
    local = loading.to_local(after, gradients)
    assert {n: t.shape for n, t in local.items()} == {
        n: p.shape for n, p in after.named_parameters()
    }
    back = loading.to_full(after, local)
    assert list(back) == list(gradients)
    assert all(torch.equal(back[name], gradients[name]) for name in back)


def test_a_part_without_gradient_is_zero():
    _, after = models()
    back = loading.to_full(after, {"inner.gate.weight": torch.ones(4, 4)})
    assert list(back) == ["inner.pair.weight"]
    assert back["inner.pair.weight"].sum(1).tolist() == [4, 4, 4, 4, 0, 0]


@pytest.mark.parametrize("name", ["qkv.weight", "up.weight", "nested"])
def test_a_part_is_read_without_the_rest(name):
    torch.manual_seed(0)
    state = Before().state_dict()
    shapes = {n: tuple(t.shape) for n, t in state.items()}
    nested = concat(transpose(concat("q.weight", "v.weight")), split("turned", 2, 1, 1), axis=1)
    weight = {**MAP, "nested": nested}[name]
    rows, columns = weight.shape(shapes)
    whole = weight.read(state.__getitem__, shapes, ((0, rows), (0, columns)))
    for first in range(rows):
        for last in range(first + 1, rows + 1):
            part = weight.read(state.__getitem__, shapes, ((first, last), (1, columns)))
            assert torch.equal(part, whole[first:last, 1:])


class Initialised(nn.Module):
    """Draws the weights of what it holds once more, as many models do for themselves."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.head = inner(), nn.Linear(4, 4)
        self.apply(self.draw)

    def draw(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)


def test_building_starts_from_what_the_originals_draw():
    torch.manual_seed(0)
    before, state = Initialised(Before), torch.get_rng_state()
    torch.manual_seed(0)
    mapped = functools.partial(weights.map_weights, After, original=Before, weights=MAP)
    after = loading.build(lambda: Initialised(mapped))
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(loading.full_state_dict(after), before.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("size", [10**9, 100])
def test_checkpoints_hold_the_originals_names(tmp_path, size):
    before, after = models()
    state = before.state_dict()
    loading.save_pretrained(after, tmp_path, max_shard_size=size)
    stored = {n: t for f in tmp_path.glob("*.safetensors") for n, t in load_file(f).items()}
    assert stored.keys() == state.keys()
    assert all(torch.equal(stored[name], state[name]) for name in state)
    torch.manual_seed(1)
    other = model(lambda: weights.map_weights(After, original=Before, weights=MAP))
    assert loading.load_pretrained(other, tmp_path) == ([], [])
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, after.state_dict()[name]), name


def test_a_checkpoint_of_other_sizes_or_without_a_weight(tmp_path):
    before, after = models()
    state = before.state_dict()
    lacking = {n: t for n, t in state.items() if n != "inner.k.weight"}
    save_file(lacking, tmp_path / "model.safetensors")
    with pytest.raises(KeyError, match=r"missing: \['inner\.k\.weight'\]"):
        loading.load_pretrained(after, tmp_path)
    missing, unexpected = loading.load_pretrained(after, tmp_path, strict=False)
    assert (missing, unexpected) == (["inner.k.weight"], [])
    save_file(state | {"inner.k.weight": torch.ones(3, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"inner\.k\.weight is \[3, 4\] in the checkpoint"):
        loading.load_pretrained(after, tmp_path)
