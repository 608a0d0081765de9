"""Checkpoints by torch.distributed.checkpoint, saved at one world size and read at another."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from .loading import shards
from .shards import Shard, rank


def sharded_state(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Any:
    """The state for `save` and `load` of torch.distributed.checkpoint, on every rank.

        checkpoint.save({"train": sharded_state(model, optimizer)}, checkpoint_id=path)
        checkpoint.load({"train": sharded_state(model, optimizer)}, checkpoint_id=path)

    Tensors are stored under the model's own names, and each rank's part by its position
    in the full tensor.

    Args:
        model: The model itself, which FSDP2 may have divided further.
        optimizers: Its optimizers.
    """
    return ShardedState(model, optimizers)


class ShardedState:
    """The state of a model and of its optimizers.

    Args:
        model: The model.
        optimizers: Its optimizers.
    """

    def __init__(
        self, model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...]
    ) -> None:
        self.model, self.optimizers = model, optimizers

    def state_dict(self) -> dict[str, Any]:
        """Full tensors, of which this rank holds parts.

        Raises:
            ValueError: An optimizer's state of a part has another shape than the part.
        """
        state: Any = get_state_dict(self.model, self.optimizers)
        model, optimizer = state
        # Copies, since these are the optimizers' own dictionaries.
        kept = {name: dict(own) for name, own in optimizer.get("state", {}).items()}
        for name, shard in shards(self.model).items():
            part = model.get(name)
            if part is None:  # a buffer that is not stored
                continue
            model[name] = FullTensor.of(part, shard)
            for key, tensor in kept.get(name, {}).items():
                if tensor.shape == part.shape:
                    kept[name][key] = FullTensor.of(tensor, shard)
                elif tensor.numel() > 1:
                    raise ValueError(
                        f"the optimizer's `{key}` of `{name}` has another shape than the "
                        "parameter, so it cannot be resharded: `torch.save` it on each rank"
                    )
        return {"model": model, "optimizer": {**optimizer, "state": kept}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the parts that were read for this rank."""
        model, optimizer = state_dict["model"], state_dict["optimizer"]
        for tensors in (model, *optimizer.get("state", {}).values()):
            for name, tensor in tensors.items():
                tensors[name] = getattr(tensor, "part", tensor)
        set_state_dict(
            self.model,
            self.optimizers,
            model_state_dict=model,
            optim_state_dict=optimizer,
        )


class FullTensor(Tensor):
    """Stands for a full tensor in a state dict, and takes no memory.

    Attributes:
        part: This rank's part of it.
        pieces: The part's blocks, by the position in the full tensor where each begins.
    """

    part: Tensor
    pieces: dict[torch.Size, Tensor]

    @classmethod
    def of(cls, part: Any, shard: Shard) -> "FullTensor":
        """The full tensor of a part, which FSDP2 may have divided further."""
        begin, local = [0] * part.dim(), part
        if hasattr(part, "to_local"):
            begin = list(part.__create_chunk_list__()[0].offsets)
            local = part.to_local()
        axis, shape = shard.axis, list(part.shape)
        shape[axis] = shard.size
        full: Any = local.new_empty(()).expand(shape).as_subclass(cls)
        full.part, full.pieces, start = part, {}, 0
        for first, last in shard.ranges(rank()):
            low = max(start, begin[axis])
            high = min(start + last - first, begin[axis] + local.shape[axis])
            if low < high and local.numel():
                place = torch.Size(
                    [*begin[:axis], first + low - start, *begin[axis + 1 :]]
                )
                piece = local.narrow(axis, low - begin[axis], high - low)
                full.pieces[place] = piece
            start += last - first
        return full  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.__name__ in ("clone", "copy_", "cpu", "cuda", "to", "__deepcopy__"):
            raise TypeError(
                "this is a placeholder for a full tensor, and has no values: use it with "
                "`save`, `load` and `async_save` of torch.distributed.checkpoint only"
            )
        parent: Any = super()
        return parent.__torch_function__(func, types, args, kwargs or {})

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The offset and size of each piece."""
        return [
            ChunkStorageMetadata(offsets=place, sizes=piece.shape)
            for place, piece in self.pieces.items()
        ]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        """An item to write for each piece."""
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self),
                    size=self.shape,
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """One of the pieces."""
        assert index.offset is not None
        return self.pieces[index.offset]
