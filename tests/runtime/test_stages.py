"""The parts of a model that a stage keeps."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from slapo_rewrite.runtime import deepspeed_pipeline, torch_pipeline
from slapo_rewrite.runtime.deepspeed_pipeline import check_layout
from slapo_rewrite.runtime.deferred_init import construct
from slapo_rewrite.runtime.stages import (
    Compared,
    FixedSettings,
    Unlike,
    UnshardedStage,
    check_settings,
    check_ties,
    gathered,
    has_place,
    keep,
    tensors_of,
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(3))
        self.layers[2].weight.register_hook(lambda gradient: 7 + 0 * gradient)
        self.layers[2].weight.kind = "seven"
        self.deep = False


def stage(choose) -> Model:
    torch.manual_seed(0)
    model = construct(Model, lambda model: tensors_of(choose(model)))
    keep(model, choose(model))
    return model


def test_a_stage_holds_its_part_and_nothing_else():
    part = stage(lambda m: (m.layers[2:], m.norm, m.scale))
    torch.manual_seed(0)
    whole = Model()
    names = {
        n for n in whole.state_dict() if n.startswith(("layers.2", "layers.3", "norm", "scale"))
    }
    assert part.state_dict().keys() == names
    for name, tensor in part.state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[name]) and not tensor.is_meta
    assert part.embedding is None and part.layers[0] is None and part.head is None
    assert [has_place(part, f"layers.{i}.weight") for i in range(4)] == [False, False, True, True]


def test_weights_are_sent_in_few_pieces(monkeypatch, tmp_path):
    """A message a tensor takes long where there are many, on a busy machine most of all."""
    sent, broadcast = [], dist.broadcast
    monkeypatch.setattr("slapo_rewrite.runtime.stages.BUNDLE", 100)
    monkeypatch.setattr(
        dist, "broadcast", lambda t, *a, **k: (sent.append(len(t)), broadcast(t, *a, **k))
    )
    named = {f"{n}.weight": torch.randn(3, 7) for n in range(20)}
    named |= {
        "long": torch.randn(300),
        "steps": torch.tensor(3),
        "mask": torch.ones(2, dtype=torch.bool),
    }
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        found = gathered(named, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    assert sorted(sent) == [1, 2, 84, 84, 84, 84, 84, 300]
    assert found.keys() == named.keys()
    for name, tensor in named.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
        assert found[name].untyped_storage().nbytes() == tensor.untyped_storage().nbytes()


def test_modules_stay_for_their_sizes_without_what_they_hold():
    class Last(UnshardedStage, Model):
        SIZES = ("embedding",)
        TIES = (("embedding.weight", "head.weight"),)

        def held(self):
            return (self.layers[3:],)

    part = Last()
    assert part.embedding.embedding_dim == 3 and part.embedding.weight is None
    assert part.head is None and part.state_dict().keys() == {"layers.3.weight", "layers.3.bias"}


def test_other_names_of_what_is_held_stay():
    part = stage(lambda m: (m.embedding,))
    assert part.state_dict().keys() == {"embedding.weight", "head.weight"}
    assert part.head.weight is part.embedding.weight


def test_hooks_and_attributes_of_parameters_stay():
    part = stage(lambda m: (m.layers[2],))
    part.layers[2](torch.ones(1, 3)).sum().backward()
    assert part.layers[2].weight.kind == "seven"
    assert torch.equal(part.layers[2].weight.grad, torch.full((3, 3), 7.0))


def test_a_model_that_does_something_else_is_refused():
    model = Model()
    check_settings(model, {"deep": False})
    check_ties(model, [("embedding.weight", "head.weight")])
    with pytest.raises(ValueError, match="`deep` is False, but the stages were written for True"):
        check_settings(model, {"deep": True})
    with pytest.raises(ValueError, match="ties other parameters"):
        check_ties(model, [])
    model.head.weight = nn.Parameter(torch.ones(5, 3))
    with pytest.raises(ValueError, match="ties other parameters"):
        check_ties(model, [("embedding.weight", "head.weight")])


def test_on_the_meta_device_a_stage_has_no_memory():
    with torch.device("meta"):
        part = construct(Model, lambda model: [model.scale])
    keep(part, (part.layers[2:], part.norm))
    assert part.state_dict() and all(tensor.is_meta for tensor in part.state_dict().values())
    assert part.embedding is None and part.head is None


def test_a_stage_without_layers_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleList())
    with pytest.raises(ValueError, match="fewer layers than the one that was cut"):
        keep(model, (model[0], model[1]))


def test_a_setting_that_was_changed_since_is_refused_in_the_next_step():
    class Stage(nn.Linear):
        SETTINGS = {"remade": False, "last.remade": False}  # noqa: RUF012
        remade, last = False, None

    part = Stage(2, 2)
    part.register_forward_pre_hook(FixedSettings(("remade", "last.remade")))
    part(torch.ones(1, 2))
    part.remade = True
    with pytest.raises(ValueError, match="`remade` is True, but the stages were written for False"):
        part(torch.ones(1, 2))


def test_settings_that_are_given():
    model = nn.Linear(2, 2)
    check_settings(model, {"bias": ...})
    check_settings(model, {"training": Unlike(2)})
    with pytest.raises(ValueError, match=r"`training` is True, but .* but True"):
        check_settings(model, {"training": Unlike(True)})
    check_settings(model, {"in_features": Compared("<=", "out_features")})
    for sign, other in ((">", 2), ("<", "out_features"), ("<", "weight")):
        with pytest.raises(ValueError, match="`in_features` is 2"):
            check_settings(model, {"in_features": Compared(sign, other)})
    model.bias = None
    with pytest.raises(ValueError, match="`bias` is None"):
        check_settings(model, {"bias": ...})


class Topology:
    """A layout of stages and of ranks that share each of them."""

    def __init__(self, pipe: int, model: int) -> None:
        self.sizes = {"pipe": pipe, "model": model}

    def get_dim(self, axis: str) -> int:
        return self.sizes[axis]

    def world_size(self) -> int:
        return math.prod(self.sizes.values())


@pytest.mark.parametrize(
    ("num_stages", "topology", "message"),
    [
        (2, None, None),
        (None, Topology(2, 2), None),
        (3, None, "cut into 2 stages, not 3"),
        (None, Topology(4, 1), "cut into 2 stages, not 4"),
        (2, Topology(2, 3), "4 processes do not fit a topology of 6 ranks"),
        (None, Topology(2, 1), "4 processes do not fit a topology of 2 ranks"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(num_stages, topology, message, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    refused = pytest.raises(ValueError, match=message) if message else nullcontext()
    with refused:
        check_layout(2, num_stages, topology)


def test_a_step_has_the_arguments_that_the_stages_were_written_for():
    engines = deepspeed_pipeline.UnshardedPipeline((), inputs=("a", "b"), labels=("c",))
    assert engines.batch(c=3, b=2, a=1) == ((1, 2), 3)
    torchs = torch_pipeline.UnshardedPipeline((), inputs={"given_a": "a"}, label="c")
    assert torchs.batch(a=1, c=3) == {"given_a": 1, "target": 3}
    for pipeline in (engines, torchs):
        with pytest.raises(TypeError, match=r"the stages take \['a', .*, not \['a', 'd'\]"):
            pipeline.batch(a=1, d=2)
        assert "weights of its own stage" in pipeline.build.__doc__


def test_a_stage_may_write_into_what_it_is_given():
    given = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    x, y = torch_pipeline.with_sendable_gradients(Model(), given)
    x += 2 * y
    x.square().sum().backward()
    assert [t.grad.tolist() for t in given] == [[6.0] * 3, [12.0] * 3]
