"""Converts between the original's full tensors and the parts that this rank holds."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .shards import (
    Shard,
    are_alike,
    parts_in,
    rank,
    wait_for_group,
    world_of,
    world_size,
)
from .weights import originals_only  # for weights


def shards(model: nn.Module) -> dict[str, Shard]:
    """The shards of parameters and buffers by name; tied tensors under every name."""
    found = parts_in(model)
    return {n: found[id(t)] for n, t in named_tensors(model) if id(t) in found}


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name; tied tensors under every name."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def weight_maps(model: nn.Module) -> dict[str, Any]:
    """How the weights of replaced modules follow from the originals', by prefix."""
    return {
        f"{path}.": module.weight_map
        for path, module in model.named_modules()
        if hasattr(module, "weight_map")
    }


def under_original_names(
    model: nn.Module, named: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Converts the model's full tensors to those of the original."""
    for prefix, weight_map in reversed(weight_maps(model).items()):
        named = weight_map.to_original(named, prefix)
    return dict(named)


def to_local(model: nn.Module, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Cuts this rank's parts out of the original's full tensors, by parameter name.

    They may be parameters, gradients or optimiser moments. Parts are kept as they are.
    """
    for prefix, weight_map in weight_maps(model).items():  # for weights
        named = weight_map.to_new(named, prefix)
    local = dict(named)
    for name, shard in shards(model).items():
        if name in named and shard.is_full(named[name]):
            local[name] = shard.cut(named[name])
    return local


def to_full(model: nn.Module, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gathers the ranks' parts, by parameter name, to the original's full tensors.

    Every rank calls it, with the same names. The parts may be those of FSDP2.
    """
    divided = shards(model)
    full = dict(named)
    for name in sorted(named):  # all ranks must gather in the same order
        part = named[name]
        if hasattr(part, "full_tensor"):  # FSDP2 divides it further, over the replicas
            part = part.full_tensor()
        full[name] = divided[name].gather(part) if name in divided else part
    full = under_original_names(model, full)  # for weights
    return full


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The original's state dict, on every rank. Every rank calls it."""
    state = model.state_dict()
    full = to_full(model, state)
    # The metadata of modules, such as versions, is kept, except for whose parts these
    # were.
    for note in getattr(state, "_metadata", {}).values():
        note.pop("part", None)
        note.pop("mapped", None)  # for weights
    state.clear()  # for weights
    state.update(full)
    return state


def build(make: Callable[[], nn.Module]) -> nn.Module:
    """The model that `make()` returns, initialised alike at every world size.

    Each rank first makes the whole model, draws the same weights as one process, bit
    for bit, and keeps its parts of them. So the ranks must be seeded alike.

    Raises:
        ValueError: The ranks are not seeded alike, or the default device is the meta
            device, which holds no weights.
    """
    check_seeds()
    make = starting_as_originals(make)  # for weights
    if world_size() == 1:
        return make()
    with world_of(1):
        original = make()
        whole = original.state_dict()
    # A constructor may run layers, whose parts are still the same on all ranks.
    with drawing_apart(), world_of(world_size(), rank()):
        model = make()
    model.load_state_dict(whole)
    take_tensors(model, dict(named_tensors(original)))
    return model


@torch.no_grad()
def take_tensors(model: nn.Module, full: Mapping[str, Tensor]) -> None:
    """Copies what `load_state_dict` does not set.

    A hook of the model's may change parameters while they are loaded, and a constructor
    may draw buffers that are not in the state dict.
    """
    local = to_local(model, full)
    for name, own in named_tensors(model):
        part = local.get(name, own)
        is_other = not torch.equal(part.to_dense(), own.to_dense())  # some are sparse
        if is_other and part.shape == own.shape:
            own.copy_(part)


def starting_as_originals(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Makes the model with weights converted from those that the originals draw."""

    def made() -> nn.Module:
        with drawing_apart():
            model = make()
        with world_of(1), originals_only():
            original = make()
            whole = original.state_dict()
        model.load_state_dict(whole)
        take_tensors(model, dict(named_tensors(original)))
        return model

    return made


def drawing_apart() -> AbstractContextManager[None]:
    """A context that leaves the state of the random number generator as it was."""
    device = torch.get_default_device()
    devices = [] if device.type == "cpu" else [device]
    return torch.random.fork_rng(devices, device_type=device.type)


def check_seeds() -> None:
    """Refuses ranks that would not draw the weights that one process draws."""
    device = torch.get_default_device()
    if device.type == "meta":
        raise ValueError("the meta device has no weights: leave `torch.device('meta')`")
    if world_size() == 1:
        return
    random: Any = torch if device.type == "cpu" else torch.get_device_module(device)
    if not are_alike(random.get_rng_state().to(device)):
        raise ValueError(
            "all ranks of a tensor-parallel group need the same seed before the model is "
            "built, so that they draw the same weights: torch.manual_seed(0), for example"
        )


def load_pretrained(
    model: nn.Module, path: str | Path, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Reads a safetensors checkpoint, each rank only its parts.

    The model may have been built inside `with torch.device("meta"):`, which saves
    drawing weights; it then gets memory on the default device. On the CPU, parts that
    are contiguous in the file are memory-mapped: do not change the file while the model
    is in use. Training does not write to it.

    Args:
        model: The model; its parameters are filled in place.
        path: A `.safetensors` file, or a folder with one or with an index of several.
        strict: The checkpoint must have the model's tensors and no others. Otherwise
            tensors that are not in it stay as they are.

    Returns:
        The names that the checkpoint lacks, and those that the model lacks.

    Raises:
        KeyError: `strict`, and the checkpoint and the model differ in their names.
        ValueError: A tensor has another size than in the model, or one on the meta
            device is not in the checkpoint and cannot be computed.
    """
    divided, stored = shards(model), stored_tensors(Path(path))
    own = model.state_dict(keep_vars=True)
    originals: Mapping[str, Tensor] = own
    for prefix, weight_map in weight_maps(model).items():
        originals = weight_map.originals(originals, prefix)
    base = getattr(model, "base_model_prefix", "")
    names = checkpoint_names(originals, set(stored), base)
    loaded = {id(originals[name]) for name in names}
    missing = [
        n for n, t in originals.items() if n not in names and id(t) not in loaded
    ]
    unexpected = sorted(set(stored) - set(names.values()))
    if strict and (missing or unexpected):
        hint = (
            "; if transformers converts this checkpoint as it reads it, have it write the "
            "converted one: `save_pretrained(path, save_original_format=False)`"
        )
        raise KeyError(
            f"missing: {missing}; in the checkpoint only: {unexpected}"
            f"{hint if missing and unexpected and base else ''}"
        )
    files = {*stored.values()} if any(t.is_meta for t in model.parameters()) else ()
    opened = {file: open_checkpoint(file) for file in files}
    found: Mapping[str, Any] = {
        n: Stored(stored[c], c, opened.get(stored[c])) for n, c in names.items()
    }
    for prefix, weight_map in weight_maps(model).items():
        found = weight_map.found(found, prefix)
    fill_unsaved_buffers(model, {*own})
    for name, tensor in own.items():
        if name in found:
            part = read_part(found[name], divided.get(name))
            if part.shape != tensor.shape:
                raise ValueError(
                    f"{name} is {list(part.shape)} in the checkpoint and "
                    f"{list(tensor.shape)} in the model"
                )
            if tensor.is_meta:
                give_values(tensor, part)
            else:
                tensor.data.copy_(part)
    for place, module in model.named_modules():
        named: dict[str, Any] = dict(
            vars(module)
        )  # with tensors that are not registered
        named |= module.named_parameters(recurse=False)
        named |= module.named_buffers(recurse=False)
        for name, tensor in named.items():
            if isinstance(tensor, Tensor) and tensor.is_meta:
                raise without_values(place, name)
    return missing, unexpected


def without_values(path: str, name: str) -> ValueError:
    """The error for a tensor that has no values to load."""
    return ValueError(
        f"`{path}{'.' if path else ''}{name}` is on the meta device and not in the "
        "checkpoint: put a tensor with values there before loading, or build the model "
        "on another device"
    )


def give_values(tensor: Any, values: Tensor) -> None:
    """Replaces a tensor on the meta device in place, so that ties and attributes stay.

    Raises:
        ValueError: The default device is the meta device, or the tensor has hooks.
    """
    device = torch.get_default_device()
    if device.type == "meta" or tensor._backward_hooks:
        raise ValueError(
            "leave the meta device before loading, and register hooks of parameters after"
        )
    given: Any = values.to(device, tensor.dtype)
    if isinstance(tensor, nn.Parameter):
        given = nn.Parameter(given, tensor.requires_grad)
    vars(given).update(vars(tensor))
    swap: Any = torch.utils.swap_tensors
    swap(tensor, given)


@torch.no_grad()
def fill_unsaved_buffers(model: nn.Module, saved: set[str]) -> None:
    """Fills buffers on the meta device that no checkpoint holds, as transformers does.

    The model's `_init_weights` fills those of its modules. It runs twice, on buffers of
    zeros and of ones, to see whether it writes every element.

    Raises:
        ValueError: It does not write all of a buffer.
    """
    models: dict[str, Any] = {}
    for path, module in model.named_modules():
        above = models.get(path.rpartition(".")[0])
        models[path] = module if hasattr(module, "_init_weights") else above
        unsaved = {
            name: buffer
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_meta and f"{path}.{name}".removeprefix(".") not in saved
        }
        if (
            not unsaved
            or models[path] is None
            or parts_in(module).keys() & {id(buffer) for buffer in unsaved.values()}
        ):
            continue  # `load_pretrained` refuses it in the end
        runs: list[dict[str, Tensor]] = []
        for buffer in unsaved.values():
            give_values(buffer, torch.zeros(buffer.shape, dtype=buffer.dtype))
        for value in (0, 1):
            for buffer in unsaved.values():
                buffer.fill_(value)
            models[path]._init_weights(module)
            runs.append({name: getattr(module, name).clone() for name in unsaved})
        for name in unsaved:
            if not torch.equal(runs[0][name], runs[1][name]):
                raise without_values(path, name)


def stored_tensors(path: Path) -> dict[str, Path]:
    """The file that holds each tensor of a checkpoint, by the tensor's name."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        by_name = json.loads(index.read_text())["weight_map"]
        return {name: path / file for name, file in by_name.items()}
    file = path / "model.safetensors" if path.is_dir() else path
    with open_checkpoint(file) as tensors:
        return dict.fromkeys(tensors.keys(), file)


def open_checkpoint(file: Path) -> Any:
    """Opens a safetensors file; tensors are read when they are asked for."""
    from safetensors import safe_open

    return safe_open(file, framework="pt")


def checkpoint_names(
    own: Mapping[str, Tensor], stored: set[str], prefix: str
) -> dict[str, str]:
    """The name in the checkpoint of each of the model's tensors.

    A tensor that is not there is left out: it may be tied to another. The names in a
    checkpoint of the base model lack `prefix`; those of a model with a head have it.
    """
    names = {}
    for name in own:
        forms = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
        found = next((form for form in forms if form in stored), None)
        if found is not None:
            names[name] = found
    return names


@dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint, of which only the slices that are used are read.

    Attributes:
        file: The file.
        name: The tensor's name there.
        opened: The open file, where contiguous slices are to be memory-mapped.
    """

    file: Path
    name: str
    opened: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The full tensor's shape."""
        tensors = self.opened or open_checkpoint(self.file)
        return tuple(tensors.get_slice(self.name).get_shape())

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        if self.opened:
            part = self.slice_of(self.opened, slices)
            if part.is_contiguous():
                return part
        # Pages that were read stay in memory for as long as the file is open.
        with open_checkpoint(self.file) as tensors:
            return self.slice_of(tensors, slices).contiguous()

    def slice_of(self, tensors: Any, slices: tuple[slice, ...]) -> Tensor:
        """A slice of the tensor, from an open file."""
        part: Tensor = (
            tensors.get_slice(self.name)[slices]
            if slices
            else tensors.get_tensor(self.name)
        )
        return part


def read_part(stored: Any, shard: Shard | None) -> Tensor:
    """Reads a tensor of a checkpoint, or this rank's part of it.

    Raises:
        ValueError: The tensor has not the full size that the model expects.
    """
    slices = [slice(0, size) for size in stored.shape]
    if shard is None:
        whole: Tensor = stored[tuple(slices)]
        return whole
    size = stored.shape[shard.axis]
    if size != shard.size:
        raise ValueError(
            f"{stored.name} is {size} long in the checkpoint, not {shard.size}"
        )
    pieces = []
    for start, stop in shard.ranges(rank()):
        slices[shard.axis] = slice(start, stop)
        pieces.append(stored[tuple(slices)])
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, shard.axis)


def save_pretrained(
    model: nn.Module, path: str | Path, max_shard_size: int = 5 * 10**9
) -> None:
    """Writes the original's checkpoint, as its `save_pretrained` would in one process.

    Every rank calls it. The first process writes, and holds the full tensors of one
    file at a time. Tied tensors are written once.

    Args:
        model: The model; if it is a Hugging Face one, its configuration is written too.
        path: The folder.
        max_shard_size: Bytes of tensors per file. A larger tensor gets its own file.
    """
    path = Path(path)
    divided, own = shards(model), saved_tensors(model)
    files = checkpoint_files(own, divided, tuple(weight_maps(model)), max_shard_size)
    by_name: dict[str, str] = {}
    writes = not dist.is_initialized() or dist.get_rank() == 0
    if writes:
        prepare_folder(model, path)
    sizes = {name: size_in_bytes(own[name], divided.get(name)) for name in own}
    # One buffer for all files: memory freed in between might stay with the process.
    most = max(sum(sizes[n] + ALIGNED for n in names) for names in files.values())
    memory = torch.empty(most, dtype=torch.uint8, device="cpu" if writes else "meta")
    for file, names in files.items():
        tensors, end = {}, 0
        for name in names:
            part, shard = own[name].detach(), divided.get(name)
            place = memory[end : end + sizes[name]].view(part.dtype)
            tensors[name] = gather_into(place, part, shard)
            end += -(-sizes[name] // ALIGNED) * ALIGNED
        if writes:
            tensors = under_original_names(model, tensors)
            by_name |= dict.fromkeys(tensors, file)
            write_checkpoint(tensors, path / file)
    if writes and len(files) > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": by_name,
        }
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    wait_for_group()


ALIGNED = 64  # bytes; where a tensor may begin in the buffer
PIECE = 2**21  # bytes gathered at a time


def gather_into(memory: Tensor, part: Tensor, shard: Shard | None) -> Tensor:
    """Gathers the full tensor into `memory`, a piece at a time."""
    if hasattr(part, "full_tensor"):  # FSDP2 divides parts further, over the replicas
        part = part.full_tensor()
    shape, axis = list(part.shape), 0
    if shard is not None:
        shape[shard.axis], axis = shard.size, int(shard.axis == 0)
    full = memory.view(shape)
    if shard is None or axis == part.dim():  # no other axis to cut pieces along
        return full.copy_(part if shard is None else shard.gather(part))
    length = max(1, PIECE * shape[axis] // max(1, full.nbytes))
    pieces = torch.split(part, length, axis), torch.split(full, length, axis)
    for piece, place in zip(*pieces, strict=True):
        place.copy_(shard.gather(piece))
    return full


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that a checkpoint holds; a tied one under its first name."""
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    by_tensor: dict[int, str] = {}
    own = model.state_dict(keep_vars=True)
    for name, tensor in own.items():
        if name not in left_out:
            by_tensor.setdefault(id(tensor), name)
    return {name: own[name] for name in by_tensor.values()}


def size_in_bytes(part: Tensor, shard: Shard | None) -> int:
    """Bytes of the full tensor."""
    size = part.numel() * part.element_size()
    return size if shard is None else size // max(1, shard.local_size()) * shard.size


def checkpoint_files(
    own: Mapping[str, Tensor],
    divided: Mapping[str, Shard],
    together: tuple[str, ...],
    max_shard_size: int,
) -> dict[str, list[str]]:
    """The names of the tensors in each file of a checkpoint.

    Args:
        own: The tensors to save.
        divided: The shards of those that are divided.
        together: Prefixes of names that belong in the same file.
        max_shard_size: Bytes of tensors per file.
    """
    groups: list[list[str]] = [[]]
    filled = 0
    for name, tensor in own.items():
        size = size_in_bytes(tensor, divided.get(name))
        begun = groups[-1] and any(
            name.startswith(p) and groups[-1][-1].startswith(p) for p in together
        )
        if groups[-1] and filled + size > max_shard_size and not begun:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {
        f"model-{number:05}-of-{len(groups):05}.safetensors": names
        for number, names in enumerate(groups, 1)
    }


def prepare_folder(model: nn.Module, path: Path) -> None:
    """Makes the folder, deletes an earlier checkpoint and writes the configuration."""
    path.mkdir(parents=True, exist_ok=True)
    save: Any = getattr(model, "save_pretrained", None)
    if save is not None:
        save(path, state_dict={})  # all but weights
    for pattern in ("model.safetensors*", "model-*-of-*.safetensors"):
        for file in path.glob(pattern):
            file.unlink()


def write_checkpoint(tensors: dict[str, Tensor], file: Path) -> None:
    """Writes a safetensors file."""
    from safetensors.torch import save_file

    save_file(tensors, file, metadata={"format": "pt"})
