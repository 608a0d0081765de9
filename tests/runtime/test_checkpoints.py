"""Checkpoints of several ranks, joined in one process."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from slapo_rewrite.runtime import checkpoints
from slapo_rewrite.runtime.grouped_query import ReplicatedShard
from slapo_rewrite.runtime.packed_axes import Packed
from slapo_rewrite.runtime.shards import Shard, world_of
from slapo_rewrite.runtime.tensor_parallel import ColumnParallelLinear
from tests.processes import run


@pytest.mark.parametrize(
    "shard",
    [
        Shard(0, 8),
        Shard(1, 11),
        Packed((2, 1, 1))(0, 16),
        Shard(0, 16, multiple_of=4),
        ReplicatedShard(0, 8, multiple_of=4),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_make_up_the_whole(shard, size):
    full = torch.rand(shard.size, shard.size)
    parts = []
    for rank in range(size):
        with world_of(size, rank):
            parts.append(shard.cut(full))
    with world_of(size):
        assert torch.equal(shard.joined(parts), full)


class Model(nn.Module):
    def __init__(self, layers: int = 2, width: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, 2) for _ in range(layers)])


def stage(number: int) -> Model:
    """A part of the model under the whole's names."""
    model = Model()
    model.layers[1 - number] = None
    return model


def test_other_stages_and_other_models_are_refused(tmp_path):
    full = Model().state_dict()
    checkpoints.write_layers(tmp_path, full, [lambda: stage(0), lambda: stage(1)])
    files = checkpoints.layer_files(tmp_path, None, 2)
    read = checkpoints.united(files, Model)
    assert list(read) == list(full) and all(torch.equal(read[n], full[n]) for n in full)
    with pytest.raises(ValueError, match="a checkpoint of 2 stages, not 3"):
        checkpoints.layer_files(tmp_path, "weights", 3)
    with pytest.raises(ValueError, match=r"only the model has \['layers\.2\.bias'"):
        checkpoints.united(files, lambda: Model(3))
    with pytest.raises(ValueError, match=r"layers.0.weight is \[2, 2\] in .* and \[2, 3\]"):
        checkpoints.united(files, lambda: Model(width=3))
    with pytest.raises(FileExistsError):
        checkpoints.write_layers(tmp_path, full, [lambda: stage(0)])


def written_and_read(folder: Path, ranks: int) -> bool:
    """What each of the processes that train writes and reads for so many ranks, on its own."""
    folder /= f"{ranks}_{dist.get_rank()}"
    full = nn.Linear(4, 7).state_dict()
    for rank in range(ranks):
        with world_of(ranks, rank):
            checkpoints.write_layers(folder, full, [lambda: ColumnParallelLinear(4, 7)], rank)
    files = checkpoints.layer_files(folder, "weights", 1)
    read = checkpoints.joined(files, lambda: ColumnParallelLinear(4, 7))
    return all(torch.equal(read[name], full[name]) for name in full)


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [1, 3])
def test_processes_that_share_layers_read_what_other_numbers_of_ranks_wrote(tmp_path, ranks):
    assert all(run(written_and_read, 2, tmp_path, ranks))
