"""Full tensors to parts and back, for a model with every way of being sharded."""

import copy
import itertools
import json
import resource

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from slapo_rewrite.runtime import loading
from slapo_rewrite.runtime import tensor_parallel as tp
from slapo_rewrite.runtime.deferred_init import build_deferred
from slapo_rewrite.runtime.packed_axes import Packed
from slapo_rewrite.runtime.stages import ShardedStage
from tests.marks import release
from tests.processes import run

VOCABULARY, WIDTH = 11, 8  # 11 divides over neither 2 nor 4


class Block(nn.Module):
    """Packed q, k and v of two widths, then back; `whole` is the original."""

    def __init__(self, whole):
        super().__init__()
        if whole:
            self.qkv = nn.Linear(WIDTH, 2 * WIDTH)
            self.out = nn.Linear(WIDTH, WIDTH)
        else:
            self.qkv = tp.ColumnParallelLinear(WIDTH, 2 * WIDTH, parts=Packed((2, 1, 1)))
            self.out = tp.RowParallelLinear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        qkv = self.qkv(x)
        wide = qkv.shape[-1] // 2
        q, k, v = qkv.split([wide, wide // 2, wide // 2], -1)
        k, v = k.repeat_interleave(2, -1), v.repeat_interleave(2, -1)
        return self.norm(x + self.out(q * k.tanh() + v))


class Model(nn.Module):
    """Tied table and head weight, and a bias of the model that the head shares."""

    def __init__(self, whole):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))
        self.register_buffer("counts", torch.arange(VOCABULARY))
        self.register_buffer("scale", torch.ones(()))
        if whole:
            self.table = nn.Embedding(VOCABULARY, WIDTH, 0)
            self.head = nn.Linear(WIDTH, VOCABULARY)
        else:
            self.table = tp.VocabParallelEmbedding(VOCABULARY, WIDTH, 0)
            self.head = tp.ColumnParallelLinear(WIDTH, VOCABULARY, gather_output=True)
            tp.shard_parameter(self, "bias", 0)
            tp.shard_parameter(self, "counts", 0)
        self.blocks = nn.ModuleList(Block(whole) for _ in range(2))
        self.head.weight = self.table.weight
        self.head.bias = self.bias

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def models():
    """The original and its sharded form, with the same weights."""
    torch.manual_seed(0)
    whole, sharded = Model(whole=True).double(), Model(whole=False).double()
    with torch.no_grad():
        torch.manual_seed(0)
        for parameter in whole.parameters():
            parameter.normal_()
    sharded.load_state_dict(whole.state_dict())
    return whole, sharded


def same(actual, expected, exactly=True):
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        if exactly:
            assert torch.equal(actual[name], tensor), name
            assert actual[name].dtype == tensor.dtype and not actual[name].requires_grad
        else:
            torch.testing.assert_close(actual[name], tensor, rtol=1e-9, atol=1e-9)


def round_trips():
    whole, sharded = models()
    full = whole.state_dict()
    same(gathered := loading.full_state_dict(sharded), full)
    assert gathered._metadata == full._metadata  # by which modules tell an old state dict
    same(loading.to_local(sharded, full), sharded.state_dict())
    same(loading.to_full(sharded, loading.to_local(sharded, full)), full)
    same(loading.to_local(sharded, sharded.state_dict()), sharded.state_dict())
    assert list(loading.shards(sharded)) == [
        *("bias", "table.weight", "head.weight", "head.bias"),
        *(
            f"blocks.{i}.{name}"
            for i in (0, 1)
            for name in ("qkv.weight", "qkv.bias", "out.weight")
        ),
        "counts",
    ]
    share = sum(p.numel() for p in sharded.parameters()) / sum(
        p.numel() for p in whole.parameters()
    )
    assert share < 0.85 or tp.world_size() == 1


def half_precision_comes_back_bit_for_bit():
    whole, sharded = models()
    full = whole.bfloat16().state_dict()
    sharded.bfloat16().load_state_dict(full)
    same(loading.full_state_dict(sharded), full)


def training_agrees():
    whole, sharded = models()
    ids = torch.tensor([[0, 3, 1, 7, 10], [5, 9, 2, 8, 10]])
    optimisers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (whole, sharded)]
    for _ in range(3):
        for model, optimiser in zip((whole, sharded), optimisers, strict=True):
            optimiser.zero_grad()
            model(ids).backward()
            optimiser.step()

    def gradients(model):
        return {name: p.grad for name, p in model.named_parameters()}

    def moments(model, optimiser):
        return {
            name: optimiser.state[p]["exp_avg_sq"]
            for name, p in model.named_parameters(remove_duplicate=False)
        }

    wanted = moments(whole, optimisers[0])
    assert {"table.weight", "head.weight", "bias", "head.bias"} <= set(wanted)
    same(loading.to_full(sharded, moments(sharded, optimisers[1])), wanted, exactly=False)
    same(loading.to_full(sharded, gradients(sharded)), gradients(whole), exactly=False)
    same(loading.full_state_dict(sharded), whole.state_dict(), exactly=False)
    same(loading.to_local(sharded, gradients(whole)), gradients(sharded), exactly=False)


def some_names_in_any_order():
    """The same names on all ranks, though each rank lists them in an order of its own."""
    whole, sharded = models()
    names = ["head.weight", "blocks.1.qkv.bias", "blocks.0.norm.bias", "counts"]
    names = names[tp.rank() :] + names[: tp.rank()]
    local, full = sharded.state_dict(), whole.state_dict()
    back = loading.to_full(sharded, {name: local[name] for name in names})
    same(back, {name: full[name] for name in names})


def a_tie_to_a_layer_that_is_not_sharded():
    """The other name's layer knows nothing of the shard; the tensor is found all the same."""
    model = nn.Module()
    model.table = tp.VocabParallelEmbedding(VOCABULARY, WIDTH)
    model.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    model.head.weight = model.table.weight
    full = loading.full_state_dict(model)
    assert full["head.weight"].shape == (VOCABULARY, WIDTH)
    assert torch.equal(full["head.weight"], full["table.weight"])


def run_all():
    round_trips()
    half_precision_comes_back_bit_for_bit()
    training_agrees()
    some_names_in_any_order()
    a_tie_to_a_layer_that_is_not_sharded()


@pytest.mark.parametrize(
    "world", [1, *(pytest.param(n, marks=pytest.mark.processes) for n in (2, 4))]
)
def test_between_full_and_local(world):
    run(run_all, world)


def check_build_is_alike(build):
    torch.manual_seed(5)
    whole = Model(whole=True)
    after = torch.rand(3)
    torch.manual_seed(5)
    model = build(lambda: Model(whole=False))
    assert torch.equal(torch.rand(3), after), "random numbers go on as after the whole model"
    full = loading.full_state_dict(model)
    assert full.keys() == whole.state_dict().keys()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(full[name], tensor), name
    assert model.head.weight is model.table.weight


class Measured(nn.Module):
    """Its constructor runs a layer, of which all ranks have the same part until it is filled."""

    def __init__(self):
        super().__init__()
        self.inner = tp.ColumnParallelLinear(WIDTH, WIDTH, gather_output=True)  # parts alike
        self.width = self.inner(torch.zeros(1, WIDTH)).shape[-1]


def check_constructors_run_layers(build):
    torch.manual_seed(5)
    model = build(Measured)
    assert model.width == WIDTH
    assert model.inner(torch.ones(1, WIDTH)).shape == (1, WIDTH)


class Converted(nn.Module):
    """Takes what an older version saved, which it knows by nothing."""

    def __init__(self):
        super().__init__()
        self.inner = tp.ColumnParallelLinear(WIDTH, WIDTH)
        self._register_load_state_dict_pre_hook(self.convert)

    def convert(self, state, prefix, *rest):
        state[f"{prefix}inner.weight"] = 2 * state[f"{prefix}inner.weight"]


def check_hooks_change_nothing(build):
    torch.manual_seed(5)
    whole = nn.Linear(WIDTH, WIDTH)
    torch.manual_seed(5)
    full = loading.full_state_dict(build(Converted))
    assert torch.equal(full["inner.weight"], whole.weight)


def check_seeds():
    torch.manual_seed(tp.rank())
    if tp.world_size() > 1:
        with pytest.raises(ValueError, match="need the same seed"):
            loading.build(lambda: Model(whole=False))
        with pytest.raises(ValueError, match="need the same seed"):
            build_deferred(lambda: Model(whole=False))


def check_load_pretrained(folder):
    torch.manual_seed(6)
    whole = Model(whole=True)
    if tp.rank() == 0:
        kept = {n: t.contiguous() for n, t in whole.state_dict().items()}
        for tied in ("head.weight", "head.bias"):
            del kept[tied]
        names = sorted(kept)
        halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, some in halves.items():
            save_file({n: kept[n] for n in some}, folder / file)
        index = {"weight_map": {n: file for file, some in halves.items() for n in some}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        save_file(kept, folder / "single.safetensors")
        save_file({"encoder." + n: t for n, t in kept.items()}, folder / "other.safetensors")
    if tp.world_size() > 1:
        dist.barrier()
    cases = itertools.product((folder, folder / "single.safetensors"), ("cpu", "meta"))
    for path, device in cases:
        with torch.device(device):
            model = Model(whole=False)
        loading.load_pretrained(model, path)
        assert model.head.weight is model.table.weight
        full = loading.full_state_dict(model)
        for name, tensor in whole.state_dict().items():
            assert torch.equal(full[name], tensor), name
    with pytest.raises(KeyError, match="encoder"):
        loading.load_pretrained(model, folder / "other.safetensors")


def check_save_pretrained(folder):
    """Full tensors, tied ones once, and without what the model leaves out."""
    _, model = models()
    model._keys_to_ignore_on_save = {"scale"}
    for size in (10**9, 400):
        loading.save_pretrained(model, folder / str(size), max_shard_size=size)
        full = loading.full_state_dict(model)
        for tied in ("scale", "head.weight", "head.bias"):
            del full[tied]
        files = sorted((folder / str(size)).glob("*.safetensors"))
        stored = [load_file(file) for file in files]
        assert (len(files) == 1) == (size == 10**9)
        assert sorted(name for file in stored for name in file) == sorted(full)
        assert all(torch.equal(t, full[n]) for file in stored for n, t in file.items())
        most = max(sum(t.nbytes for t in file.values()) for file in stored if len(file) > 1)
        assert most <= size


def largest_use():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Layers(nn.Module):
    """Layers that are initialised once more at the end, as transformers does."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(tp.RowParallelLinear(width, width) for _ in range(number))
        self.apply(lambda module: getattr(module, "reset_parameters", int)())


class SecondHalf(ShardedStage, Layers):
    """A stage of the second half of the layers."""

    def held(self):
        return [self.layers[len(self.layers) // 2 :]]


def check_what_is_held(build, small, large):
    """Beside its own part a rank holds one tensor, not the whole model."""
    torch.manual_seed(0)
    build(*small)
    before = largest_use()
    model = build(*large)
    used = largest_use() - before
    own = sum(p.nbytes for p in model.parameters())
    assert used < 1.5 * own, (used, own)


def build_layers(width, number):
    return build_deferred(lambda: Layers(width, number))


def check_copies_stay_apart():
    def make():
        layer = tp.RowParallelLinear(WIDTH, WIDTH)
        return nn.Sequential(layer, copy.deepcopy(layer))

    torch.manual_seed(0)
    first, second = build_deferred(make)
    assert torch.equal(first.weight, second.weight)
    assert first.weight.data_ptr() != second.weight.data_ptr()


def check_starting(folder):
    check_copies_stay_apart()
    for build in (loading.build, build_deferred):
        check_build_is_alike(build)
        check_hooks_change_nothing(build)
    check_constructors_run_layers(loading.build)
    check_seeds()
    check_load_pretrained(folder)
    check_save_pretrained(folder / "saved")


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("world", [2, release(4)])
@pytest.mark.parametrize("build", [build_layers, SecondHalf])
def test_a_rank_holds_its_part_while_it_starts(world, build):
    number = 16 * world if build is build_layers else 32 * world  # 64 MiB a rank
    run(check_what_is_held, world, build, (8, 2), (1024, number), start="spawn")


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("world", [1, 2, 4])
def test_starting(world, tmp_path):
    run(check_starting, world, tmp_path)


def test_a_checkpoint_of_another_size_is_refused(tmp_path):
    model = Model(whole=False)
    state = {n: t.clone() for n, t in Model(whole=True).state_dict().items()}
    state["table.weight"] = torch.ones(VOCABULARY + 1, WIDTH)
    del state["head.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"table\.weight is 12 long in the checkpoint, not 11"):
        loading.load_pretrained(model, tmp_path)


def test_a_checkpoint_with_other_names(tmp_path):
    """Refused, or with `strict=False` read as far as it goes."""
    state = {n: torch.full_like(t, 2) for n, t in Model(whole=True).state_dict().items()}
    for name in ("head.weight", "head.bias", "blocks.0.norm.bias"):
        del state[name]
    save_file({**state, "pooler.bias": torch.ones(1)}, tmp_path / "model.safetensors")
    model = Model(whole=False)
    with pytest.raises(
        KeyError, match=r"missing: \['blocks.0.norm.bias'\].*only: \['pooler.bias'\]"
    ):
        loading.load_pretrained(model, tmp_path)
    assert not (model.table.weight == 2).any()
    found = loading.load_pretrained(model, tmp_path, strict=False)
    assert found == (["blocks.0.norm.bias"], ["pooler.bias"])
    assert (model.head.weight == 2).all() and (model.blocks[0].norm.bias == 0).all()

    with torch.device("meta"):
        model = Model(whole=False)
        with pytest.raises(ValueError, match="leave the meta device before"):
            loading.load_pretrained(model, tmp_path, strict=False)
        model = Model(whole=False)
    with pytest.raises(ValueError, match=r"`blocks\.0\.norm\.bias` is on the meta device and not"):
        loading.load_pretrained(model, tmp_path, strict=False)
    model.blocks[0].norm.bias = nn.Parameter(torch.ones(WIDTH))  # as it says
    loading.load_pretrained(model, tmp_path, strict=False)
    assert (model.head.weight == 2).all() and (model.blocks[0].norm.bias == 1).all()


class Buffers(nn.Module):
    """What no checkpoint holds, and `_init_weights`, which fills some of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.inner = nn.Module()
        self.inner.register_buffer("angles", torch.arange(4) / 3, persistent=False)
        self.inner.register_buffer("numbers", torch.arange(4), persistent=False)

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.inner:
            module.angles.copy_(torch.arange(4) / 3)
            module.numbers = torch.arange(4)
        else:
            module.partly[0] = 1


@pytest.fixture
def buffers(tmp_path):
    """One on the meta device, and its checkpoint."""
    save_file(nn.Linear(2, 2).state_dict(prefix="linear."), tmp_path / "model.safetensors")
    with torch.device("meta"):
        return Buffers()


def test_buffers_that_no_checkpoint_holds(buffers, tmp_path):
    loading.load_pretrained(buffers, tmp_path)
    assert torch.equal(buffers.inner.angles, torch.arange(4) / 3)
    assert torch.equal(buffers.inner.numbers, torch.arange(4))
    assert not any("inner" in name for name in buffers.state_dict()), "nor does it from now on"


def test_what_cannot_be_had_is_refused(buffers, tmp_path):
    buffers.register_buffer("partly", torch.ones(3, device="meta"), persistent=False)
    with pytest.raises(ValueError, match="`partly` is on the meta device and not in the check"):
        loading.load_pretrained(buffers, tmp_path)
    buffers.register_buffer("partly", torch.zeros(3), persistent=False)  # as it says
    loading.load_pretrained(buffers, tmp_path)

    for module in (buffers.inner, nn.Sequential(buffers.linear)):
        module.kept = torch.ones(3, device="meta")
        with pytest.raises(ValueError, match="kept` is on the meta device"):
            loading.load_pretrained(module, tmp_path, strict=False)
        del module.kept


def test_hooks_of_parameters_come_later(buffers, tmp_path):
    buffers.linear.weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(ValueError, match="register hooks of parameters after"):
        loading.load_pretrained(buffers, tmp_path)


def test_what_is_written_to_a_loaded_model_does_not_reach_the_file(buffers, tmp_path):
    before = (tmp_path / "model.safetensors").read_bytes()
    loading.load_pretrained(buffers, tmp_path)
    with torch.no_grad():
        buffers.linear.weight.zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_checkpoint_of_a_model_without_its_prefix(tmp_path):
    """The base model reads what the model with its head has saved, and the other way about."""
    base, whole = nn.Linear(2, 2), nn.Module()
    whole.base, whole.head = nn.Linear(2, 2), nn.Linear(2, 3)
    base.base_model_prefix = whole.base_model_prefix = "base"
    loading.save_pretrained(whole, tmp_path)
    _, unexpected = loading.load_pretrained(base, tmp_path, strict=False)
    assert unexpected == ["head.bias", "head.weight"] and torch.equal(
        base.weight, whole.base.weight
    )
    loading.save_pretrained(nn.Linear(2, 2), tmp_path)
    missing, _ = loading.load_pretrained(whole, tmp_path, strict=False)
    assert missing == ["head.weight", "head.bias"]


def test_buffers_may_be_sparse():
    """As the heads are by which OpenAI's Whisper aligns words, which no state dict holds."""
    buffers = {"heads": torch.eye(3).to_sparse()}
    model = nn.Module()
    model.register_buffer("heads", torch.zeros(3, 3).to_sparse(), persistent=False)
    loading.take_tensors(model, buffers)
    assert torch.equal(model.heads.to_dense(), torch.eye(3))
    loading.take_tensors(model, buffers)


def test_weights_are_not_made_on_the_meta_device():
    with torch.device("meta"), pytest.raises(ValueError, match="meta device has no weights"):
        loading.build(lambda: Model(whole=False))
