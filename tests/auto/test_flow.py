"""Components of producers and consumers, as found by a step of a small model."""

import pytest
import torch
from torch import nn

from slapo_rewrite.auto.flow import components, flow_of, pattern_of, together


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        q, k, v = self.norm(self.q(x)), self.k(x), self.v(x)
        return self.o((q @ k.transpose(-2, -1)).softmax(-1) @ v)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x) * self.gate(x).sigmoid())


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(q * k + v)


class StateSpace(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.select = nn.Linear(8, 16), nn.Linear(16, 6)
        self.step, self.leave = nn.Linear(2, 16), nn.Linear(16, 8)

    def forward(self, x):
        x = self.enter(x)
        step, write = self.select(x).split([2, 4], dim=-1)
        return self.leave(x * self.step(step) * write.sum(-1, keepdim=True))


class LowRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.few, self.many = nn.Linear(8, 6), nn.Linear(4, 16)
        self.q, self.o = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        few, shared = self.few(x).split([4, 2], dim=-1)
        return self.o(self.q(x) * self.many(few) * shared.sum(-1, keepdim=True))


class Assigned(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.out = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, x):
        y = torch.zeros(*x.shape)
        y[..., :4] = self.one(x)
        y[..., 4:] = self.two(x)
        return self.out(y)


class Stack(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def found(model):
    flow = flow_of(model, {"x": torch.randn(2, 5, 8)}, model)
    return flow, {(" ".join(sorted(p)), " ".join(sorted(c))) for p, c in components(flow)}


def test_producers_of_one_consumer_hang_together():
    flow, pairs = found(Attention())
    assert pairs == {("k q v", "o")}
    assert flow.between == {"norm": {"q"}} and flow.ends == {"o"}
    assert found(MLP())[1] == {("gate up", "down")}


def test_layers_that_are_both_take_turns():
    """What is given parts adds up, and what is behind it begins with whole values again."""
    assert found(StateSpace())[1] == {("enter step", "leave select"), ("step", "leave")}


def test_layers_that_are_both_may_give_parts_of_what_comes_whole():
    """As attention of low rank: heads are split where they are made, and not what they share."""
    assert found(LowRank())[1] == {("few q", "many o"), ("many q", "o")}


def test_what_is_written_in_place_is_followed():
    assert found(Assigned())[1] == {("one two", "out")}


def test_pieces_tell_how_a_result_is_packed():
    flow, pairs = found(Packed())
    assert pairs == {("qkv", "out")}
    assert (8, 8, 8) in flow.layers["qkv"].pieces and not flow.layers["out"].pieces


class Sliced(Packed):
    def forward(self, x):
        qkv = self.qkv(x)
        q, k, v = qkv[..., :8], qkv[:, 8:16].contiguous(), qkv[..., 16:]
        return self.out(q[..., :4].repeat(1, 2) * k + v)


def test_heads_of_several_kinds_are_pieces():
    class Shared(Packed):
        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (6, 4)).split([4, 1, 1], dim=2)
            return self.out((q * k + v).sum(-1).repeat(1, 1, 2))

    model = Shared()
    assert flow_of(model, {"x": torch.ones(2, 3, 8)}, model).layers["qkv"].pieces == [(4, 1, 1)]


def test_pieces_of_a_head_tell_nothing_of_how_a_result_is_packed():
    class Rotary(Packed):
        def forward(self, x):
            one, other = self.qkv(x).unflatten(-1, (4, 6)).chunk(2, dim=-1)
            return torch.cat((-other, one), -1)

    model = Rotary()
    assert flow_of(model, {"x": torch.ones(2, 3, 8)}, model).layers["qkv"].pieces == []


def test_slices_that_follow_one_another_tell_how_a_result_is_packed():
    """And not those of what it was made into: halves that are rotated are of one head."""
    flow = flow_of(Sliced(), {"x": torch.randn(2, 8)}, Sliced())
    assert flow.layers["qkv"].pieces == [(8, 8, 8)]


def test_a_weight_that_is_used_past_its_call_is_read():
    class Reading(nn.Module):
        def __init__(self):
            super().__init__()
            self.called, self.read, self.idle = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            return self.called(x) @ self.read.weight

    assert flow_of(Reading(), {"x": torch.randn(2, 8)}, Reading()).read == {"read"}


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_elements_of_a_list_are_one(depth):
    flow, pairs = found(Stack(*(MLP() for _ in range(depth))))
    stream = {("layers.*.down", "layers.*.gate layers.*.up")} if depth > 1 else set()
    assert pairs == {("layers.*.gate layers.*.up", "layers.*.down")} | stream
    assert len(flow.layers["layers.*.down"].paths) == depth


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.linear(x)).relu()


class Bottleneck(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(Convolution(), Convolution(), Convolution())

    def forward(self, x):
        return self.parts(x)


def test_elements_that_feed_one_another_are_not_one_where_depth_does_not_count_them():
    deep = Stack(*(Bottleneck() for _ in range(7)))
    flow = flow_of(Stack(Bottleneck(), Bottleneck()), {"x": torch.randn(2, 5, 8)}, deep)
    assert flow.apart == {"layers.*.parts"}
    assert "layers.*.parts.0.linear" in flow.sources["layers.*.parts.1.linear"]
    assert pattern_of(deep, "layers.6.parts.1.linear", flow.apart) == "layers.*.parts.1.linear"
    shallow = Stack(Convolution(), Convolution())
    plain = flow_of(shallow, {"x": torch.randn(2, 8)}, Stack(*(Convolution() for _ in range(7))))
    assert not plain.apart and set(plain.layers) == {"layers.*.linear"}


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.mlp = nn.Linear(8, 1), MLP()

    def forward(self, x):
        return self.router(x).sigmoid() * self.mlp(x)


def test_layers_whose_routers_reach_one_another_along_the_stream_stay_one():
    """In a small model, where nothing is deeper than what is followed."""
    flow, pairs = found(Stack(Routed(), Routed(), Routed()))
    assert "layers.*.router" in flow.sources["layers.*.router"] and not flow.apart
    assert ("layers.*.mlp.gate layers.*.mlp.up", "layers.*.mlp.down") in pairs


def test_layers_in_a_sequence_are_not_one():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    assert [pattern_of(model, path) for path, _ in model.named_modules()] == ["", "0", "1", "2"]


def test_what_a_dictionary_numbers_is_one():
    model = nn.Module()
    model.experts = nn.ModuleDict({f"expert_{n}": MLP() for n in range(3)})
    model.experts["dropout"] = nn.Dropout()
    model.towers = nn.ModuleDict({"text": MLP(), "image": MLP(), "layer1": MLP()})
    found = {pattern_of(model, path) for path, _ in model.named_modules()}
    assert {"experts.*.up", "experts.dropout"} < found
    assert {"towers.text.up", "towers.image.up", "towers.layer1.up"} < found
    assert not any(path.startswith(("experts.e", "towers.*")) for path in found)


def test_a_list_of_lists_that_are_layers_is_one():
    def pair(number):
        return nn.ModuleList([Attention() if number % 2 else nn.Identity(), MLP()])

    model = nn.Module()
    model.layers = nn.ModuleList([pair(number) for number in range(3)])
    model.stages = nn.ModuleList([nn.ModuleList([MLP(), MLP()]) for _ in range(3)])
    # Of one class, that holds other things; and of one that does so otherwise in each list.
    inner = [nn.ModuleList([Stack(Attention()), Stack(MLP())]) for _ in range(2)]
    model.wrapped = nn.ModuleList(inner)
    model.growing = nn.ModuleList([inner[0], nn.ModuleList([Stack(MLP()), Stack(MLP())])])
    found = {pattern_of(model, path) for path, _ in model.named_modules(remove_duplicate=False)}
    assert {"layers.*.0.q", "layers.*.1.up", "stages.0.*.up", "stages.2.*.up"} <= found
    assert {"wrapped.*.0.layers.*", "wrapped.*.1.layers.*", "growing.0.*.layers.*"} <= found
    assert not any(path.startswith(("layers.0", "stages.*", "growing.*")) for path in found)


@pytest.mark.parametrize(
    ("makers", "expected"),
    [
        ({}, ["a > b", "c > d", "d > e"]),
        ({"b": "f", "d": "f"}, ["a c > b d", "d > e"]),
        ({"a": "f", "c": "g", "d": "f"}, ["a c > b d", "d > e"]),
        ({"b": "f", "e": "f", "c": "g", "d": "g"}, ["c > d", "a d > b e"]),
        ({"d": "f", "e": "f"}, ["a > b", "c > d", "d > e"]),  # `d` would be both
    ],
)
def test_what_one_function_makes_is_one_component(makers, expected):
    pairs = [(frozenset(one), frozenset(two)) for one, two in ("ab", "cd", "de")]
    found = together(pairs, makers.get)
    assert sorted(" > ".join(" ".join(sorted(s)) for s in pair) for pair in found) == sorted(
        expected
    )
