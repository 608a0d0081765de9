"""Sharded layers and collectives, compared with the whole layers that they replace.

The checks run on every rank of real gloo groups, in double precision, where agreement to 1e-12
leaves no room for a wrong formula.
"""

import copy
import io
import pickle
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers.pytorch_utils import Conv1D

from slapo_rewrite.model.meta_device import pretend_world
from slapo_rewrite.runtime import guards, shards
from slapo_rewrite.runtime import tensor_parallel as tp
from slapo_rewrite.runtime.conv1d import ColumnParallelConv1D, RowParallelConv1D
from slapo_rewrite.runtime.embedding_bag import VocabParallelEmbeddingBag
from slapo_rewrite.runtime.loading import full_state_dict, to_full
from slapo_rewrite.runtime.packed_axes import Packed, block_sizes
from slapo_rewrite.runtime.replicated import (
    ReplicatedEmbedding,
    ReplicatedLayerNorm,
    ReplicatedLinear,
    ReplicatedRMSNorm,
)
from tests.processes import run

# (out_features, options): uneven, packed and grouped-query layouts.
COLUMN_CASES = [
    (12, {}),
    (10, {}),
    (24, {"parts": Packed(3)}),
    (21, {"parts": Packed(3)}),
    (48, {"parts": Packed((4, 1, 1)), "multiple_of": 2}),
    (12, {"bias": False}),
]
ROW_CASES = [
    (12, {}),
    (10, {}),
    (24, {"parts": Packed(2), "multiple_of": 3}),
    (12, {"bias": False}),
]


def seeded(*shape):
    """The same random tensor on every rank."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def leaf(*shape):
    return seeded(*shape).requires_grad_()


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def pair(whole, sharded):
    """Both in double precision, with the same seeded weights."""
    whole, sharded = whole.double(), sharded.double()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.copy_(seeded(*parameter.shape))
    sharded.load_state_dict(whole.state_dict())
    return whole, sharded


def same_gradients(whole, sharded):
    expected = {name: p.grad for name, p in whole.named_parameters()}
    actual = to_full(sharded, {name: p.grad for name, p in sharded.named_parameters()})
    assert list(actual) == list(expected)
    for name, gradient in expected.items():
        close(actual[name], gradient)


def shard_of(sharded, axis=-1):
    return replace(sharded.sharded_parameters["weight"], axis=axis)


# Layers ---------------------------------------------------------------------------------------


def check_column_parallel_linear():
    for size, options in COLUMN_CASES:
        column_parallel(
            nn.Linear(6, size, options.get("bias", True)),
            tp.ColumnParallelLinear(6, size, **options),
            tp.ColumnParallelLinear(6, size, **options, gather_output=True),
            tp.ColumnParallelLinear(6, size, **options, reduce_input_gradient=False),
        )
    layer = tp.ColumnParallelLinear(6, 12)
    assert (layer.in_features, layer.out_features) == (6, 12 // tp.world_size())


def check_column_parallel_conv1d():
    for size, options in COLUMN_CASES:
        if "bias" not in options:
            column_parallel(
                Conv1D(size, 6),
                ColumnParallelConv1D(size, 6, **options),
                ColumnParallelConv1D(size, 6, **options, gather_output=True),
                ColumnParallelConv1D(size, 6, **options, reduce_input_gradient=False),
            )
    layer = ColumnParallelConv1D(12, 6)
    assert (layer.nx, layer.nf) == (6, 12 // tp.world_size())


def column_parallel(whole, sharded, gathering, unreduced):
    whole, sharded = pair(whole, sharded)
    size = whole(seeded(1, 6)).shape[-1]
    x = leaf(2, 3, 6)
    y = whole(x)
    y.backward(seeded(2, 3, size))
    cut = shard_of(sharded).cut

    for layer in (sharded, gathering.double(), unreduced.double()):
        layer.load_state_dict(whole.state_dict())
        gathers = layer is gathering
        x_sharded = leaf(2, 3, 6)
        y_sharded = layer(x_sharded)
        close(y_sharded, y if gathers else cut(y))
        gradient = seeded(2, 3, size)
        y_sharded.backward(gradient if gathers else cut(gradient))
        reduced = layer is not unreduced or tp.world_size() == 1
        close(x_sharded.grad if reduced else tp.all_reduce(x_sharded.grad), x.grad)
        same_gradients(whole, layer)


def check_row_parallel_linear():
    for size, options in ROW_CASES:
        row_parallel(
            size,
            nn.Linear(size, 8, options.get("bias", True)),
            tp.RowParallelLinear(size, 8, **options),
            tp.RowParallelLinear(size, 8, **options, reduce=tp.sum_later),
            tp.RowParallelLinear(size, 8, **options, reduce=tp.ReduceScatter(axis=1)),
        )
    layer = tp.RowParallelLinear(12, 8)
    assert (layer.in_features, layer.out_features) == (12 // tp.world_size(), 8)


def check_row_parallel_conv1d():
    for size, options in ROW_CASES:
        if "bias" not in options:
            row_parallel(
                size,
                Conv1D(8, size),
                RowParallelConv1D(8, size, **options),
                RowParallelConv1D(8, size, **options, reduce=tp.sum_later),
                RowParallelConv1D(8, size, **options, reduce=tp.ReduceScatter(axis=1)),
            )
    layer = RowParallelConv1D(8, 12)
    assert (layer.nx, layer.nf) == (12 // tp.world_size(), 8)


def row_parallel(size, whole, sharded, unreduced, scattering):
    whole, sharded = pair(whole, sharded)
    unreduced.double().load_state_dict(whole.state_dict())
    scattering.double().load_state_dict(whole.state_dict())
    x = leaf(2, 4, size)
    y = whole(x)
    y.backward(seeded(2, 4, 8))
    cut = shard_of(sharded).cut

    def reduce_later(x_cut):
        return tp.all_reduce(unreduced(x_cut))

    def reduce_scatter_later(x_cut):
        return tp.all_gather(tp.reduce_scatter(unreduced(x_cut), 1), 1)

    def gather_later(x_cut):
        return tp.all_gather(scattering(x_cut), 1)

    layers = {
        sharded: sharded,
        reduce_later: unreduced,
        reduce_scatter_later: unreduced,
        gather_later: scattering,
    }
    for forward, layer in layers.items():
        layer.zero_grad()
        x_sharded = cut(seeded(2, 4, size)).requires_grad_()
        y_sharded = forward(x_sharded)
        close(y_sharded, y)
        y_sharded.backward(seeded(2, 4, 8))
        close(x_sharded.grad, cut(x.grad))
        same_gradients(whole, layer)


def check_vocab_parallel_embedding():
    ids = torch.tensor([[0, 3, 9, 7], [5, 9, 2, 8]])
    for padding_idx in (None, 0, 9, -3):
        whole, sharded = pair(
            nn.Embedding(10, 4, padding_idx), tp.VocabParallelEmbedding(10, 4, padding_idx)
        )
        partial, scattering = (
            tp.VocabParallelEmbedding(10, 4, padding_idx, reduce=reduce).double()
            for reduce in (tp.sum_later, tp.ReduceScatter(axis=1))
        )
        partial.load_state_dict(whole.state_dict())
        scattering.load_state_dict(whole.state_dict())
        whole(ids).backward(seeded(2, 4, 4))
        joined = {sharded: tp.unchanged, partial: tp.all_reduce}
        joined[scattering] = lambda y: tp.all_gather(y, 1)
        for layer, join in joined.items():
            y = join(layer(ids))
            close(y, whole(ids))
            y.backward(seeded(2, 4, 4))
            same_gradients(whole, layer)

        first = sum(shards.part_sizes(10)[: tp.rank()])
        row = None if padding_idx is None else padding_idx % 10 - first
        here = row is not None and 0 <= row < sharded.num_embeddings
        assert sharded.padding_idx == (row if here else None)

    for wrong in (-1, 10):
        with pytest.raises(IndexError):
            sharded(torch.tensor([0, wrong]))
    with pytest.raises(IndexError):
        tp.VocabParallelEmbedding(10, 4, padding_idx=10)
    for kind in (
        tp.VocabParallelEmbedding, tp.ColumnParallelEmbedding, VocabParallelEmbeddingBag,
    ):  # fmt: skip
        with pytest.raises(ValueError, match="gradients are dense"):
            kind(10, 4, sparse=True)


def check_vocab_parallel_embedding_bag():
    ids, bags = torch.tensor([0, 3, 9, 7, 5, 9, 2, 8]), torch.tensor([0, 3, 3, 7])
    ended, weights = torch.tensor([0, 3, 3, 7, 8]), seeded(8)
    for mode in ("sum", "mean"):
        whole, sharded = pair(
            nn.EmbeddingBag(10, 4, mode=mode), VocabParallelEmbeddingBag(10, 4, mode=mode)
        )
        later = VocabParallelEmbeddingBag(10, 4, mode=mode, reduce=tp.sum_later).double()
        later.load_state_dict(whole.state_dict())
        given = [(ids.view(2, 4),), (ids, bags)]
        given += [(ids, bags, weights), (ids.view(2, 4), None, weights.view(2, 4))][: mode == "sum"]
        for args in given:
            for layer, join in ((sharded, tp.unchanged), (later, tp.all_reduce)):
                y, want = join(layer(*args)), whole(*args)
                close(y, want)
                whole.zero_grad()
                layer.zero_grad()
                want.backward(seeded(*want.shape))
                y.backward(seeded(*want.shape))
                same_gradients(whole, layer)
        for each in (whole, sharded):
            each.include_last_offset = True
        close(sharded(ids, ended), whole(ids, ended))
        for wrong in (-1, 10):
            with pytest.raises((IndexError, RuntimeError)):
                sharded(torch.tensor([[0, wrong]]))
    with pytest.raises((ValueError, NotImplementedError)):  # these are means
        later(ids, bags, weights)
    with pytest.raises(ValueError, match="maxima"):
        VocabParallelEmbeddingBag(10, 4, mode="max")


def check_column_parallel_embedding():
    ids = torch.tensor([[0, 3, 9, 7], [5, 9, 2, 8]])
    whole, sharded = pair(nn.Embedding(10, 8, 3), tp.ColumnParallelEmbedding(10, 8, 3))
    _, gathering = pair(whole, tp.ColumnParallelEmbedding(10, 8, 3, gather_output=True))
    cut = shard_of(sharded).cut
    whole(ids).backward(seeded(2, 4, 8))
    close(sharded(ids), cut(whole(ids)))
    sharded(ids).backward(cut(seeded(2, 4, 8)))
    same_gradients(whole, sharded)
    close(gathering(ids), whole(ids))
    gathering(ids).backward(seeded(2, 4, 8))
    same_gradients(whole, gathering)
    assert sharded.embedding_dim == 8 // tp.world_size()


def check_replicated_layers():
    # Each rank runs its slice of the tokens; a whole layer runs all of them.
    for whole, layer in (
        (nn.LayerNorm(6), ReplicatedLayerNorm(6)),
        (nn.LayerNorm(6, bias=False), ReplicatedLayerNorm(6, bias=False)),
        (nn.LayerNorm(6, elementwise_affine=False), ReplicatedLayerNorm(6, 1e-5, False)),
        (nn.RMSNorm(6, eps=1e-6), ReplicatedRMSNorm(6, eps=1e-6)),
        (nn.Linear(6, 5), ReplicatedLinear(6, 5)),
        (nn.Linear(6, 5, bias=False), ReplicatedLinear(6, 5, bias=False)),
        (nn.Embedding(9, 6, 2), ReplicatedEmbedding(9, 6, 2)),
    ):
        whole, layer = pair(whole, layer)
        ids = isinstance(whole, nn.Embedding)
        x = torch.tensor([[0, 3, 2, 7], [5, 8, 2, 8]]) if ids else seeded(2, 4, 6)
        assert layer.state_dict().keys() == whole.state_dict().keys()
        y, part = whole(x), layer(tp.scatter(x, 1))
        close(part, tp.scatter(y, 1))
        if y.requires_grad:
            y.backward(seeded(*y.shape))
            part.backward(tp.scatter(seeded(*y.shape), 1))
            same_gradients(whole, layer)


class Tied(nn.Module):
    """An embedding whose table is the head's weight, and a bias with two names."""

    def __init__(self, embedding, head):
        super().__init__()
        self.embedding, self.head = embedding, head
        self.head.weight = self.embedding.weight
        self.bias = self.head.bias

    def forward(self, ids):
        return self.head(self.embedding(ids))


def check_tied_embedding_and_head():
    whole = Tied(nn.Embedding(10, 4, 1), nn.Linear(4, 10))
    sharded = Tied(
        tp.VocabParallelEmbedding(10, 4, 1), tp.ColumnParallelLinear(4, 10, gather_output=True)
    )
    tp.record_shard(sharded, "bias", sharded.head.sharded_parameters["bias"])
    whole, sharded = pair(whole, sharded)
    ids = torch.tensor([[0, 3, 1, 7], [5, 9, 2, 8]])
    for model in (whole, sharded):
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    close(sharded(ids), whole(ids))
    same_gradients(whole, sharded)
    assert sharded.head.weight is sharded.embedding.weight


def check_gradient_of_a_gradient():
    first, first_sharded = pair(nn.Linear(6, 12), tp.ColumnParallelLinear(6, 12))
    second, second_sharded = pair(nn.Linear(12, 4), tp.RowParallelLinear(12, 4))
    found = []
    for model in (
        nn.Sequential(first, nn.GELU(), second),
        nn.Sequential(first_sharded, nn.GELU(), second_sharded),
    ):
        x = leaf(3, 6)
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        found.append(x.grad)
    close(found[1], found[0])
    same_gradients(first, first_sharded)


def check_half_precision():
    for layer, whole in (
        (tp.RowParallelLinear(16, 8), nn.Linear(16, 8)),
        (RowParallelConv1D(8, 16), Conv1D(8, 16)),
    ):
        whole, layer = pair(whole, layer)
        whole, layer = whole.float(), layer.float()
        x = seeded(4, 16).float()
        part = shard_of(layer).cut(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(part).dtype == whole(x).dtype
        torch.testing.assert_close(
            layer.bfloat16()(part.bfloat16()).float(), whole(x), rtol=0.05, atol=0.1
        )
    head = tp.ColumnParallelLinear(16, 10, gather_output=True).bfloat16()
    full = seeded(10, 16).bfloat16()
    head.load_state_dict({"weight": full, "bias": seeded(10).bfloat16()})
    assert torch.equal(to_full(head, head.state_dict())["weight"], full)
    assert head(seeded(4, 16).bfloat16()).dtype == torch.bfloat16


# Collectives ----------------------------------------------------------------------------------


def check_collectives():
    world, rank = tp.world_size(), tp.rank()
    mine = [seeded(3, 4, 5) * (r + 1) for r in range(world)]  # what each rank holds
    total = sum(mine)
    x = mine[rank].clone()

    def forward_and_gradient(function, *args, x=x, **options):
        x = x.clone().requires_grad_()
        before = x.detach().clone()
        y = function(x, *args, **options)
        gradient = seeded(*y.shape) * (rank + 1)
        y.backward(gradient)
        assert torch.equal(x, before) and torch.equal(gradient, seeded(*y.shape) * (rank + 1))
        return y.detach(), x.grad

    scale = sum(range(1, world + 1))
    y, gradient = forward_and_gradient(tp.all_reduce)
    close(y, total)
    close(gradient, seeded(3, 4, 5) * (rank + 1))
    y, gradient = forward_and_gradient(tp.all_reduce_gradient)
    close(y, x)
    close(gradient, seeded(3, 4, 5) * scale)

    for axis in (0, 1, -1):
        y, gradient = forward_and_gradient(tp.all_gather, axis)
        close(y, torch.cat(mine, axis))
        own = seeded(*y.shape).chunk(world, axis)[rank]
        close(gradient, own * (rank + 1))
        _, gradient = forward_and_gradient(tp.all_gather, axis, tensor_parallel_output_grad=True)
        close(gradient, own * scale)

    for axis, size in ((0, 4), (1, 8), (-2, 8)):
        whole = seeded(size, size, 5)
        shard = tp.Shard(axis, size)
        y, gradient = forward_and_gradient(tp.scatter, axis, x=whole)
        close(y, shard.cut(whole))
        close(gradient, torch.cat([seeded(*y.shape) * (r + 1) for r in range(world)], axis))
        y, gradient = forward_and_gradient(tp.reduce_scatter, axis, x=whole * (rank + 1))
        close(y, shard.cut(whole) * scale)
        close(gradient, torch.cat([seeded(*y.shape) * (r + 1) for r in range(world)], axis))

    full = seeded(3, 8, 4)
    for old, new in ((-1, -2), (-2, -1), (1, 2)):
        before, after = tp.Shard(old, full.shape[old]), tp.Shard(new, full.shape[new])
        y, gradient = forward_and_gradient(tp.all_to_all, old, new, x=before.cut(full))
        close(y, after.cut(full))
        pieces = [seeded(*y.shape) * (r + 1) for r in range(world)]
        close(gradient, before.cut(torch.cat(pieces, new)))

    for size in (8, 10):  # 10 divides unevenly over 4
        shard = tp.Shard(1, size)
        whole = seeded(3, size, 5)
        y, gradient = forward_and_gradient(tp.all_gather, 1, size, x=shard.cut(whole))
        close(y, whole)
        close(gradient, shard.cut(seeded(3, size, 5)) * (rank + 1))
        _, gradient = forward_and_gradient(tp.all_gather, 1, size, True, x=shard.cut(whole))
        close(gradient, shard.cut(seeded(3, size, 5)) * scale)


def check_collectives_leave_a_world_of_one_alone():
    if tp.world_size() == 1:
        x = leaf(2, 2)
        for y in (
            tp.all_reduce(x),
            tp.all_reduce_gradient(x),
            tp.all_gather(x),
            tp.reduce_scatter(x, 0),
            tp.scatter(x, 0),
            tp.all_to_all(x, 0, 1),
        ):
            assert y is x


# State ----------------------------------------------------------------------------------------


def check_loading_full_and_local_tensors():
    whole, sharded = pair(nn.Linear(6, 12), tp.ColumnParallelLinear(6, 12, parts=Packed(3)))
    full = whole.state_dict()
    local = copy.deepcopy(sharded.state_dict())
    assert all(torch.equal(to_full(sharded, local)[name], full[name]) for name in full)

    other = tp.ColumnParallelLinear(6, 12, parts=Packed(3)).double()
    other.load_state_dict(local)
    assert all(torch.equal(other.state_dict()[name], local[name]) for name in local)
    assert all(full[name].shape == p.shape for name, p in whole.named_parameters())

    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({"weight": full["weight"]})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        other.load_state_dict({**full, "extra": full["bias"]})
    for wrong in (torch.zeros(17, 6), torch.zeros(())):
        with pytest.raises(RuntimeError, match="size mismatch"):
            other.load_state_dict({**full, "weight": wrong})

    for twin in (copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        with torch.no_grad():
            twin.weight.zero_()
        twin.load_state_dict(full)
        assert torch.equal(twin.weight, sharded.weight)
        assert twin.weight is not other.weight and twin.weight.model_parallel


def check_parts_of_other_ranks():
    """What one rank saved and all load; a smaller model's full tensors, of a part's size."""
    layer, world = tp.ColumnParallelLinear(6, 12), tp.world_size()
    saved = io.BytesIO()
    torch.save(layer.state_dict(), saved)
    saved.seek(0)
    layer.load_state_dict(torch.load(saved))
    of_all = [None] * world
    if world > 1:
        dist.all_gather_object(of_all, layer.state_dict())
    before = layer.weight.clone()
    for rank, state in enumerate(of_all if world > 1 else []):
        if rank != tp.rank():
            words = f"part of rank {rank} of {world}, and this is rank {tp.rank()} of {world};"
            with pytest.raises(ValueError, match=words):
                layer.load_state_dict(state)
    smaller = nn.Linear(6, 12 // world).state_dict()
    for state in (smaller, dict(layer.state_dict())) if world > 1 else ():
        with pytest.raises(ValueError, match="of the full tensor has 12 elements"):
            layer.load_state_dict(state)
    assert torch.equal(layer.weight, before)
    layer.takes_parts = True  # as in a stage of DeepSpeed, whose files lose the note
    layer.load_state_dict(dict(layer.state_dict()))


def check_resizing():
    """As transformers' `resize_token_embeddings` does it: parts neither run then nor are saved."""
    table, head = tp.VocabParallelEmbedding(12, 4), tp.ColumnParallelLinear(4, 12)
    for layer, name, x in (
        (table, "num_embeddings", torch.arange(4)),
        (head, "out_features", torch.zeros(2, 4)),
    ):
        layer(x)
        layer.weight.data = torch.zeros(20, 4)
        setattr(layer, name, 20)
        if tp.world_size() == 1:
            layer.load_state_dict({**layer.state_dict(), "weight": torch.ones(20, 4)})
            continue
        for use in (lambda n=layer, x=x: n(x), lambda n=layer: full_state_dict(n)):
            with pytest.raises(RuntimeError, match="in one process, save it, and load"):
                use()


def check_copies_of_one_ranks_part():
    """As a broadcast over the group leaves them, and drawing without `loading.build`."""
    if tp.world_size() == 1:
        return
    for layer in (tp.ColumnParallelLinear(6, 12), tp.RowParallelLinear(12, 6)):
        layer(torch.zeros(2, layer.weight.shape[1]))
        twin = copy.deepcopy(layer)
        dist.broadcast(twin.weight.data, 0)
        twin(torch.zeros(2, layer.weight.shape[1]))  # no first run any more
        twin.load_state_dict(twin.state_dict())
        with pytest.raises(RuntimeError, match="all ranks have the same part"):
            twin(torch.zeros(2, layer.weight.shape[1]))
        nn.init.ones_(twin.weight)
        twin.load_state_dict(twin.state_dict())
        twin(torch.zeros(2, layer.weight.shape[1]))
    for layer in (tp.ColumnParallelLinear(12, 12), tp.RowParallelLinear(12, 12)):
        layer.load_state_dict({"weight": torch.eye(12), "bias": torch.zeros(12)})
        layer(torch.zeros(2, layer.weight.shape[1]))  # alike but for where the ones are
    torch.manual_seed(0)
    table = tp.VocabParallelEmbedding(8 * tp.world_size() + 1, 20)  # rank 0 has a row more
    with pytest.raises(RuntimeError, match="all ranks have the same part"):
        table(torch.arange(4))


def check_clip_grad_norm():
    """Parts count once each, copies once; the scaled gradients are the whole model's."""
    for norm_type in (2.0, 1.0, float("inf")):
        for max_norm in (0.01, 1e9):
            whole = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 6)).double()
            sharded = nn.Sequential(
                tp.ColumnParallelLinear(6, 12, gather_output=True),
                nn.LayerNorm(12),
                tp.ColumnParallelLinear(12, 6, gather_output=True),
            )
            if tp.world_size() == 4:  # of 6 features ranks have one or two
                assert sharded[2].weight.shape[0] == (2, 2, 1, 1)[tp.rank()]
            sharded.double()
            with torch.no_grad():
                for number, parameter in enumerate(whole.parameters()):
                    parameter.copy_(seeded(*parameter.shape) + number)
            sharded.load_state_dict(whole.state_dict())
            x = seeded(5, 6)
            for model in (whole, sharded):
                model(x).square().sum().backward()
            want = nn.utils.clip_grad_norm_(whole.parameters(), max_norm, norm_type)
            given = sharded if norm_type == 2.0 else sharded.parameters()
            close(tp.clip_grad_norm_(given, max_norm, norm_type), want)
            gradients = {name: p.grad for name, p in sharded.named_parameters()}
            for name, gradient in to_full(sharded, gradients).items():
                close(gradient, whole.get_parameter(name).grad)
            with mock.patch.object(guards, "are_alike", side_effect=AssertionError):
                sharded(x)  # the ranks' parts are compared in the first run alone
    copied = copy.deepcopy(sharded)
    if tp.world_size() > 1:  # its layers see which parameters are parts as they run
        with pytest.raises(ValueError, match="Pass the model instead"):
            tp.clip_grad_norm_(copied.parameters(), 1.0)
    copied(x).sum().backward()
    copied[0].weight.grad.fill_(float("nan") if tp.rank() == 0 else 0.0)
    with pytest.raises(RuntimeError, match="norm of the gradients is nan"):
        tp.clip_grad_norm_(copied, 1.0, error_if_nonfinite=True)


def check_meta_device():
    full = nn.Linear(6, 10).state_dict()
    expected = tp.ColumnParallelLinear(6, 10)
    expected.load_state_dict(full)

    materialised = tp.ColumnParallelLinear(6, 10, device="meta").to_empty(device="cpu")
    materialised.load_state_dict(full)
    assigned = tp.ColumnParallelLinear(6, 10, device="meta")
    assigned.load_state_dict(full, assign=True)
    for layer in (materialised, assigned):
        assert torch.equal(layer.weight, expected.weight)
        assert layer.weight.requires_grad and layer.weight.model_parallel
        assert layer.bias.model_parallel
    # A part does not keep the full tensor alive.
    assert assigned.weight.untyped_storage().nbytes() == assigned.weight.nbytes

    with torch.device("meta"):
        model = nn.Module()
        model.table = nn.Parameter(torch.empty(8, 3))
        tp.shard_parameter(model, "table", 0)
        assert tp.VocabParallelEmbedding(10, 4, 0).weight.is_meta
        assert ColumnParallelConv1D(12, 4, parts=Packed(3)).weight.is_meta
    assert model.table.is_meta and model.table.shape == (8 // tp.world_size(), 3)


def check_shard_parameter():
    def build():
        model = nn.Module()
        model.table = nn.Parameter(seeded(3, 24))
        model.scale = nn.Parameter(seeded(10).bfloat16(), requires_grad=False)
        model.twin = model.scale
        model.register_buffer("ids", torch.arange(8))
        model.register_buffer("mask", torch.ones(8), persistent=False)
        return model

    whole, model = build(), build()
    tp.shard_parameter(model, "table", -1, parts=Packed((4, 1, 1)))
    tp.shard_parameter(model, "scale", 0)
    tp.shard_parameter(model, "ids", 0)
    tp.shard_parameter(model, "mask", 0)
    assert model.twin is model.scale and not model.scale.requires_grad
    assert model.scale.dtype == torch.bfloat16
    assert model.table.requires_grad and model.table.model_parallel
    assert list(model.state_dict()) == list(whole.state_dict())
    assert torch.equal(to_full(model, {"mask": model.mask})["mask"], whole.mask)
    blocks = whole.table.split([16, 4, 4], 1)
    part = [block.chunk(tp.world_size(), 1)[tp.rank()] for block in blocks]
    assert torch.equal(model.table, torch.cat(part, 1))

    tp.record_shard(model, "twin", model.sharded_parameters["scale"])
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for tensor in twin.state_dict().values():
                tensor.zero_()
        twin.load_state_dict(whole.state_dict())
        back = to_full(twin, twin.state_dict())
        assert all(torch.equal(back[name], t) for name, t in whole.state_dict().items())


CHECKS = [check for name, check in list(globals().items()) if name.startswith("check_")]


def run_checks():
    for check in CHECKS:
        check()


@pytest.mark.parametrize(
    "world", [1, *(pytest.param(n, marks=pytest.mark.processes) for n in (2, 4))]
)
def test_agrees_with_whole_layers(world):
    run(run_checks, world)


def check_two_models_with_groups_of_their_own(own):
    """Each runs while its group is named; what is under way keeps its group."""
    whole, layer = pair(nn.Linear(4, 4), tp.ColumnParallelLinear(4, 4))
    x = leaf(3, 4)
    rows = tp.RowParallelLinear(4, 4)
    y = layer(x).square().sum()
    alone = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    for group, ranks in ((None, 4), (alone, 1)):
        tp.set_group(group)
        words = f"group of 2, but the current group is another one, of {ranks}: call `set_g"
        for use in (
            lambda: layer(x),
            lambda: rows(x[:, :2]),
            lambda: to_full(layer, layer.state_dict()),
        ):
            with pytest.raises(RuntimeError, match=words):
                use()
        other = pair(nn.Linear(4, 4), tp.ColumnParallelLinear(4, 4))[1]
        assert other.weight.shape[0] == 4 // ranks
    y.backward()
    want = torch.autograd.grad(whole(x).square().sum(), x)[0]
    close(x.grad, want)
    tp.set_group(own)
    close(layer(x), whole(x).chunk(2, -1)[tp.rank()])
    close(to_full(layer, layer.state_dict())["weight"], whole.weight)


def two_groups_of_two():
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    tp.set_group(groups[dist.get_rank() // 2])
    assert (tp.world_size(), tp.rank()) == (2, dist.get_rank() % 2)
    check_column_parallel_linear()
    check_row_parallel_linear()
    check_collectives()
    check_two_models_with_groups_of_their_own(groups[dist.get_rank() // 2])
    return tp.all_reduce(torch.tensor(float(dist.get_rank()))).item()


@pytest.mark.processes
def test_group_smaller_than_the_world():
    assert run(two_groups_of_two, 4) == [1, 1, 5, 5]


# Without processes ----------------------------------------------------------------------------


def test_a_model_that_is_older_than_the_group():
    """Its layers are whole, and would be taken for parts."""
    layer = tp.RowParallelLinear(4, 4)
    with (
        pretend_world(2),
        pytest.raises(RuntimeError, match="`init_process_group` before it is built"),
    ):
        layer(torch.ones(2, 4))


@pytest.fixture
def world_of(monkeypatch):
    def pretend(world, rank=0):
        monkeypatch.setattr(shards, "_world", shards.World(supposed=(world, rank)))

    return pretend


@pytest.mark.parametrize(
    ("sharded", "whole"),
    [
        (lambda: tp.ColumnParallelLinear(6, 10), lambda: nn.Linear(6, 10)),
        (lambda: tp.RowParallelLinear(6, 10), lambda: nn.Linear(6, 10)),
        (lambda: tp.VocabParallelEmbedding(9, 4, 2), lambda: nn.Embedding(9, 4, 2)),
        (lambda: tp.ColumnParallelEmbedding(9, 4, -1), lambda: nn.Embedding(9, 4, -1)),
        (lambda: ColumnParallelConv1D(10, 6), lambda: Conv1D(10, 6)),
        (lambda: RowParallelConv1D(10, 6), lambda: Conv1D(10, 6)),
    ],
)
def test_world_of_one_is_the_whole_layer(sharded, whole):
    torch.manual_seed(0)
    expected, then = whole(), torch.rand(1)
    torch.manual_seed(0)
    layer, after = sharded(), torch.rand(1)
    assert torch.equal(after, then)
    for name, value in expected.state_dict().items():
        assert torch.equal(layer.state_dict()[name], value)
    assert isinstance(layer, type(expected))
    x = torch.tensor([1, 2, 8]) if isinstance(layer, nn.Embedding) else torch.rand(3, 6)
    assert torch.equal(layer(x), expected(x))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda: tp.part_size(12),
            "12 does not divide over 8 ranks; "
            "the largest tensor-parallel size below 8 that fits is 6",
        ),
        (
            lambda: tp.ColumnParallelLinear(6, 48, parts=Packed((4, 1, 1)), multiple_of=4),
            "8 = 2 heads of 4 does not divide over 8 ranks; "
            "the largest tensor-parallel size below 8 that fits is 2",
        ),
        (
            lambda: tp.ColumnParallelLinear(6, 7),
            "7 does not divide over 8 ranks; "
            "the largest tensor-parallel size below 8 that fits is 7",
        ),
        (
            lambda: tp.RowParallelLinear(64, 4, parts=Packed(5)),
            "64 does not divide into blocks of relative sizes (1, 1, 1, 1, 1): "
            "it is not a multiple of 5",
        ),
    ],
)
def test_sizes_that_do_not_fit(world_of, build, words):
    world_of(8)
    with pytest.raises(ValueError) as caught:
        build()
    assert str(caught.value) == words


@pytest.mark.parametrize(
    "collective",
    [
        lambda x: tp.scatter(x, 1),
        lambda x: tp.reduce_scatter(x, 1),
        lambda x: tp.all_to_all(x, -1, 1),
    ],
)
def test_a_sequence_that_does_not_divide(world_of, collective):
    world_of(4)
    with pytest.raises(ValueError) as caught:
        collective(torch.zeros(2, 17, 8))
    assert str(caught.value) == (
        "axis 1 of a tensor of shape (2, 17, 8) does not divide over 4 ranks: "
        "pad its 17 elements to a multiple of 4"
    )


def test_sizes():
    assert tp.part_size(12) == 12 and shards.part_sizes(7, 2) == [7]  # a world of one fits all
    assert block_sizes(48, (4, 1, 1)) == (32, 8, 8)
    assert block_sizes(48, [32, 8, 8]) == (32, 8, 8)


def test_uneven_sizes_put_the_larger_first(world_of):
    world_of(4)
    assert shards.part_sizes(30522) == [7631, 7631, 7630, 7630]
    assert shards.part_sizes(24, 3) == [6] * 4


@pytest.mark.parametrize("world", [2, 3, 4])
def test_blocks_are_cut_one_by_one(world_of, world):
    full = torch.arange(3 * 12 * 2).view(3, 12, 2)
    world_of(world)
    shard = Packed((2, 1))(1, 12)
    parts = []
    for rank in range(world):
        world_of(world, rank)
        parts.append(shard.cut(full))
        assert parts[-1].shape[1] == shard.local_size() == shard.sizes()[rank]
    ends = [stop - start for start, stop in (shard.ranges(r)[0] for r in range(world))]
    first = torch.cat([part[:, :end] for part, end in zip(parts, ends, strict=True)], 1)
    second = torch.cat([part[:, end:] for part, end in zip(parts, ends, strict=True)], 1)
    assert torch.equal(torch.cat([first, second], 1), full)
    assert torch.equal(shard.joined(parts), full)
