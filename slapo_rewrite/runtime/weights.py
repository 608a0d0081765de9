"""The weights of a module that replaces another, made from the other's weights."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .packed_axes import block_sizes
from .shards import world_of

# (start, stop) along each axis of a tensor.
Ranges = Sequence[tuple[int, int]]
Shapes = Mapping[str, tuple[int, ...]]
# Returns an original tensor, or an object that can be sliced like one.
Get = Callable[[str], Any]


class Weight:
    """A tensor made from tensors of the original."""

    def names(self) -> tuple[str, ...]:
        """The original's tensors that this is made of."""
        raise NotImplementedError

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """The tensor's shape, given the original's shapes."""
        raise NotImplementedError

    def read(self, get: Get, shapes: Shapes, ranges: Ranges) -> Tensor:
        """The part of the tensor within `ranges`; `get` returns originals by name."""
        raise NotImplementedError

    def view(self, originals: Mapping[str, Tensor]) -> Tensor:
        """The tensor as a view of an original's tensor, if it is one."""
        raise NotImplementedError

    def write(self, tensor: Tensor, originals: Mapping[str, Tensor]) -> None:
        """Writes the tensor back into the originals."""
        self.view(originals).copy_(tensor)


@dataclass(frozen=True)
class Original(Weight):
    """A tensor of the original, unchanged."""

    name: str

    def names(self) -> tuple[str, ...]:
        """Its name."""
        return (self.name,)

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """Its shape."""
        return tuple(shapes[self.name])

    def read(self, get: Get, shapes: Shapes, ranges: Ranges) -> Tensor:
        """The slice of it."""
        tensor: Tensor = get(self.name)[tuple(slice(a, b) for a, b in ranges)]
        return tensor

    def view(self, originals: Mapping[str, Tensor]) -> Tensor:
        """The whole of it."""
        return originals[self.name]


@dataclass(frozen=True)
class Concat(Weight):
    """Tensors concatenated along an axis."""

    sources: tuple[Weight, ...]
    axis: int

    def names(self) -> tuple[str, ...]:
        """Those of all sources."""
        return tuple(name for source in self.sources for name in source.names())

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """The sources' shape, as long as all of them along the axis."""
        shape = list(self.sources[0].shape(shapes))
        shape[self.axis] = sum(s.shape(shapes)[self.axis] for s in self.sources)
        return tuple(shape)

    def read(self, get: Get, shapes: Shapes, ranges: Ranges) -> Tensor:
        """What the range covers of each source."""
        first, last = ranges[self.axis]
        start, pieces = 0, []
        for source in self.sources:
            size = source.shape(shapes)[self.axis]
            inside = (max(first - start, 0), min(last - start, size))
            if inside[0] < inside[1]:
                here = [*ranges]
                here[self.axis] = inside
                pieces.append(source.read(get, shapes, here))
            start += size
        return torch.cat(pieces, self.axis)

    def write(self, tensor: Tensor, originals: Mapping[str, Tensor]) -> None:
        """Writes each source its slice."""
        shapes = {name: tuple(originals[name].shape) for name in self.names()}
        sizes = [source.shape(shapes)[self.axis] for source in self.sources]
        pieces = torch.split(tensor, sizes, self.axis)
        for source, piece in zip(self.sources, pieces, strict=True):
            source.write(piece, originals)


@dataclass(frozen=True)
class Split(Weight):
    """One of the blocks that a tensor packs along an axis."""

    source: Weight
    parts: int | tuple[int, ...]
    index: int
    axis: int

    def names(self) -> tuple[str, ...]:
        """The source's."""
        return self.source.names()

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """The source's shape, as long as the block along the axis."""
        shape = list(self.source.shape(shapes))
        shape[self.axis] = self._block(shape[self.axis])[1]
        return tuple(shape)

    def read(self, get: Get, shapes: Shapes, ranges: Ranges) -> Tensor:
        """The source within the block."""
        start, _ = self._block(self.source.shape(shapes)[self.axis])
        first, last = ranges[self.axis]
        here = [*ranges]
        here[self.axis] = (start + first, start + last)
        return self.source.read(get, shapes, here)

    def view(self, originals: Mapping[str, Tensor]) -> Tensor:
        """The block in the source."""
        whole = self.source.view(originals)
        return whole.narrow(self.axis, *self._block(whole.shape[self.axis]))

    def _block(self, size: int) -> tuple[int, int]:
        """Where the block begins, and how long it is."""
        sizes = block_sizes(size, self.parts)
        return sum(sizes[: self.index]), sizes[self.index]


@dataclass(frozen=True)
class Transpose(Weight):
    """A matrix, transposed."""

    source: Weight

    def names(self) -> tuple[str, ...]:
        """The source's."""
        return self.source.names()

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """The source's shape, reversed."""
        rows, columns = self.source.shape(shapes)
        return columns, rows

    def read(self, get: Get, shapes: Shapes, ranges: Ranges) -> Tensor:
        """The source's part, transposed."""
        rows, columns = ranges
        return self.source.read(get, shapes, (columns, rows)).t()

    def view(self, originals: Mapping[str, Tensor]) -> Tensor:
        """The source, transposed."""
        return self.source.view(originals).t()

    def write(self, tensor: Tensor, originals: Mapping[str, Tensor]) -> None:
        """Writes it back transposed."""
        self.source.write(tensor.t(), originals)


def weight_of(source: str | Weight) -> Weight:
    """A name of the original as a weight; other weights as they are."""
    return Original(source) if isinstance(source, str) else source


def concat(*sources: str | Weight, axis: int = 0) -> Concat:
    """The originals one after another: `concat("query.weight", "key.weight")`.

    Args:
        sources: Names of the original's tensors, or `split` or `transpose` of them.
        axis: Counted from 0.
    """
    return Concat(tuple(weight_of(source) for source in sources), axis)


def split(
    source: str | Weight,
    parts: int | Sequence[int],
    index: int,
    axis: int = 0,
) -> Split:
    """A block of an original that packs several: `split("qkv.weight", 3, 0)`.

    Args:
        source: The name of the original's tensor, or its `transpose`.
        parts: How many equal blocks, or the blocks' relative sizes, such as (4, 1, 1).
        index: Which block, counted from 0.
        axis: The axis that they are packed along, counted from 0.
    """
    blocks = parts if isinstance(parts, int) else tuple(parts)
    return Split(weight_of(source), blocks, index, axis)


def transpose(source: str | Weight) -> Transpose:
    """The transpose of an original: `transpose("dense.weight")`."""
    return Transpose(weight_of(source))


@dataclass(frozen=True)
class Found:
    """A tensor made from others when it is sliced, from no more than it needs."""

    name: str
    weight: Weight
    get: Get
    shapes: Shapes

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.weight.shape(self.shapes)

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        ranges = [(s.start, s.stop) for s in slices]
        return self.weight.read(self.get, self.shapes, ranges)


class WeightMap:
    """How a module's parameters and buffers are made of those of another.

    Attributes:
        weights: What each of the module's tensors is made of, by its name there.
        shapes: The shapes of the original's tensors, by their names and in its order.
    """

    def __init__(self, weights: Mapping[str, Weight], shapes: Shapes) -> None:
        self.weights, self.shapes = dict(weights), dict(shapes)
        self.taken = {n for weight in self.weights.values() for n in weight.names()}

    def to_new(self, named: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
        """Puts the module's tensors in the place of the original's below `prefix`.

        What has the module's names and shapes already stays as it is.
        """
        result = {
            name: tensor
            for name, tensor in named.items()
            if not name.startswith(prefix) or name[len(prefix) :] not in self.taken
        }
        for name, weight in self.weights.items():
            sources = [named.get(prefix + source) for source in weight.names()]
            if all(map(self._is_original, weight.names(), sources)):
                full = [(0, size) for size in weight.shape(self.shapes)]
                tensor = weight.read(
                    lambda source: named[prefix + source].detach(), self.shapes, full
                )
                result[prefix + name] = tensor.contiguous()
            elif prefix + name in named:
                result[prefix + name] = named[prefix + name]
        return result

    def are_original(self, named: Mapping[str, Tensor], prefix: str) -> bool:
        """Whether the tensors below `prefix` are the original's."""
        return all(
            self._is_original(name, named.get(prefix + name)) for name in self.taken
        )

    def _is_original(self, name: str, tensor: Tensor | None) -> bool:
        return tensor is not None and tuple(tensor.shape) == self.shapes[name]

    def originals(self, named: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
        """The original's names, each with a tensor of its own where it is taken."""
        new = {prefix + name for name in self.weights}
        result = {name: named[name] for name in named if name not in new}
        for name, weight in self.weights.items():
            tensor = named[prefix + name]
            result |= {prefix + source: tensor.detach() for source in weight.names()}
        return result

    def found(self, stored: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """The module's tensors of stored ones that can be sliced, unread."""
        taken = {prefix + name for name in self.taken}
        result = {name: stored[name] for name in stored if name not in taken}

        def get(name: str) -> Any:
            original = stored[prefix + name]
            if tuple(original.shape) != self.shapes[name]:
                raise ValueError(
                    f"{original.name} is {list(original.shape)} in the checkpoint, not "
                    f"{list(self.shapes[name])}"
                )
            return original

        for name, weight in self.weights.items():
            if all(prefix + source in stored for source in weight.names()):
                result[prefix + name] = Found(prefix + name, weight, get, self.shapes)
        return result

    def to_original(
        self, named: Mapping[str, Tensor], prefix: str
    ) -> dict[str, Tensor]:
        """Puts the original's tensors in the place of the module's below `prefix`.

        If only some of the tensors that make up an original are given, as can happen
        with gradients, the rest of it is zero.
        """
        made: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            value = named.get(prefix + name)
            if value is not None:
                for source in weight.names():
                    if source not in made:
                        made[source] = value.new_zeros(self.shapes[source])
                weight.write(value, made)
        own = {n: t for n, t in named.items() if n.startswith(prefix)}
        kept = {n: t for n, t in own.items() if n[len(prefix) :] not in self.weights}
        here = {prefix + name: tensor for name, tensor in made.items()} | kept
        order = [prefix + name for name in self.shapes if prefix + name in here]
        ordered = {name: here[name] for name in [*order, *here]}
        return dict(_in_place(named, own, ordered))


def _in_place(
    named: Mapping[str, Tensor], own: Mapping[str, Tensor], other: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The items of `named`, with `other` instead of `own`, where its first item was."""
    waiting = True
    for name, tensor in named.items():
        if name not in own:
            yield name, tensor
        elif waiting:
            yield from other.items()
            waiting = False


# The records of `map_weights` inside `originals_standing`; whether inside `originals_only`.
_standing: list["StandingOriginal"] | None = None
_only = False


@dataclass
class StandingOriginal:
    """An original in the place of the module that replaces it.

    Attributes:
        original: The original.
        module: The replacement, as it was made: with or without memory.
        buffers: The replacement's buffers that no state dict holds.
    """

    original: nn.Module
    module: nn.Module
    buffers: dict[str, Tensor]

    def give_way(self, model: nn.Module) -> None:
        """Puts the module in the original's place in `model`, with its weights."""
        module, taken = self.module, self.original.state_dict()
        first: dict[int, str] = {}
        tied = {
            name: first.setdefault(id(tensor), name)
            for name, tensor in module.state_dict(keep_vars=True).items()
        }
        module.load_state_dict(taken, assign=True)
        for name, other in tied.items():
            put(module, name, look_up(module, other))
        for name, buffer in self.buffers.items():
            device = next((tensor.device for tensor in taken.values()), buffer.device)
            put(module, name, buffer.to(device))
        module.train(self.original.training)
        for parent in model.modules():
            for name, child in parent.named_children():
                if child is self.original:
                    setattr(parent, name, module)


def look_up(module: nn.Module, name: str) -> Any:
    """The tensor of that name below `module`."""
    path, _, last = name.rpartition(".")
    return getattr(module.get_submodule(path), last)


def put(module: nn.Module, name: str, tensor: Any) -> None:
    """Sets the tensor of that name below `module`."""
    path, _, last = name.rpartition(".")
    setattr(module.get_submodule(path), last, tensor)


@contextmanager
def originals_standing() -> Iterator[list[StandingOriginal]]:
    """A context in which `map_weights` returns originals, and lists their replacements."""
    global _standing
    before, _standing = _standing, []
    try:
        yield _standing
    finally:
        _standing = before


@contextmanager
def originals_only() -> Iterator[None]:
    """A context in which `map_weights` makes only originals, for their initial weights."""
    global _only
    before, _only = _only, True
    try:
        yield
    finally:
        _only = before


def map_weights(
    make: Callable[[], nn.Module],
    original: Callable[[], nn.Module],
    weights: Mapping[str, str | Weight],
) -> Any:
    """Makes a module, and records how its tensors follow from those that it replaces.

    From then on `load_state_dict` takes the original's tensors. Tensors that are not in
    `weights` have the original's names.

    Args:
        make: Makes the module.
        original: Makes the original, which is looked at on the meta device only.
        weights: What each tensor is made of, by its name in the module.
    """
    if _only:
        return original()
    with torch.device("meta"), world_of(1), originals_only():
        shapes = {n: tuple(t.shape) for n, t in original().state_dict().items()}
    module: Any = make()
    module.weight_map = WeightMap(
        {name: weight_of(source) for name, source in weights.items()}, shapes
    )
    taking = module.register_load_state_dict_pre_hook(_take_originals)
    # A sharded layer's own hook cuts what this one makes.
    module._load_state_dict_pre_hooks.move_to_end(taking.id, last=False)
    module.register_state_dict_post_hook(_mark_as_mapped)
    if _standing is None:
        return module
    with world_of(1):
        standing = original()
    _standing.append(StandingOriginal(standing, module, unsaved_buffers(module, make)))
    return standing


def unsaved_buffers(
    module: nn.Module, make: Callable[[], nn.Module]
) -> dict[str, Tensor]:
    """The buffers that a state dict leaves out, with memory if the module has none."""
    saved = module.state_dict().keys()
    names = [name for name, _ in module.named_buffers() if name not in saved]
    if names and module.get_buffer(names[0]).is_meta:
        with torch.device("cpu"), originals_only():
            module = make()
    return {name: module.get_buffer(name) for name in names}


def _take_originals(
    module: Any, state_dict: dict[str, Any], prefix: str, metadata: Any, *_: object
) -> None:
    """Before loading: makes the module's tensors from the original's."""
    if "mapped" not in metadata:
        new = module.weight_map.to_new(state_dict, prefix)
        state_dict.clear()
        state_dict.update(new)


def _mark_as_mapped(
    module: nn.Module, state_dict: Any, prefix: str, metadata: dict[str, Any]
) -> None:
    """Marks the module's own state dict, which may look like the original's."""
    metadata["mapped"] = True
