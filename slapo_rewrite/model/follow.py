"""Finds what inside `forward` depends on a sharded size, by running it on the meta device.

The model runs twice, without memory or weights: whole, and as rank 0 of a group would run it, with
the sharded layers in place. Both runs call the same operations in the same order, so comparing the
shapes at each call tells which axes are partitions, and an operation that was told a size (`view`,
`split`, `expand`, an index) tells which of its arguments must shrink with them. An argument that is
an attribute of the module (`self.num_heads`) becomes this rank's share of it; an argument of `view`
that is a plain number becomes -1; anything else is refused with its line.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from slapo_rewrite.model.layers import Layer
from slapo_rewrite.model.tree import Node, Tree

Shape = tuple[int, ...]

# World sizes that are tried until one divides every head count.
WORLD_SIZES = (2, 3, 4, 5, 7, 8)


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter of a module's own that is split: its name, axis and packed parts."""

    name: str
    axis: int
    parts: tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Where in a file a call stands; lines are 1-based, columns 0-based in UTF-8 bytes."""

    filename: str
    line: int
    end_line: int
    column: int
    end_column: int


@dataclass(frozen=True)
class ArgumentChange:
    """An argument of a call that must be written as `template` has it."""

    place: Place
    index: tuple[int, ...]
    template: str


@dataclass
class Followed:
    """What follows from the sharded sizes.

    Attributes:
        sizes: Integer attributes that become this rank's share, by the class of the module.
        units: The attribute that a split must be a multiple of, by owner class and relative path of
        the layer. arguments: Arguments of calls in `forward` that have to change.
    """

    sizes: dict[type, set[str]] = field(default_factory=dict)
    units: dict[tuple[type, str], str] = field(default_factory=dict)
    arguments: set[ArgumentChange] = field(default_factory=set)


class CannotRun(Exception):
    """The whole model does not run on the meta device, so nothing can be said."""


class CannotFollow(Exception):
    """An operation that cannot be made to fit the sharded sizes.

    Attributes:
        place: The operation, where it stands in a file.
        path: The sharded layer it concerns, where known.
        hint: What the user can do.
    """

    def __init__(
        self, message: str, place: Place | None, path: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message)
        self.place, self.path, self.hint = place, path, hint


class _Indivisible(Exception):
    """This world size does not divide a head count; another may."""


class _Again(Exception):
    """An attribute was found that must shrink: start again with it."""


class Size(int):
    """An integer attribute that remembers whose it is."""

    owner: Node
    attribute: str

    @classmethod
    def of(cls, value: int, owner: Node, attribute: str) -> Size:
        """`value`, marked."""
        size = cls(value)
        size.owner, size.attribute = owner, attribute
        return size


@dataclass
class _Entry:
    """One recorded operation of the whole model."""

    function: Callable[..., Any]
    inputs: list[Shape]
    outputs: list[Shape]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _shapes(value: Any) -> list[Shape]:
    return [tuple(t.shape) for t in _tensors(value)]


def follow(
    tree: Tree,
    layers: Mapping[str, Layer],
    parameters: Mapping[str, Sequence[ShardedParameter]],
    inputs: Mapping[str, Any],
    editable: Callable[[str], bool],
) -> Followed:
    """What in the model depends on the sharded sizes.

    Args:
        tree: The model on the meta device; it is left as it was.
        layers: The sharded layer at each path.
        parameters: The split parameters of a module's own, by the module's path.
        inputs: Keyword arguments of one training step.
        editable: Whether a file may be changed.

    Raises:
        CannotRun: The whole model does not run on the meta device.
        CannotFollow: Something does not fit the sharded sizes.
    """
    given = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    model = tree.root.live
    training = model.training
    model.train()
    try:
        for shortened in (True, False):
            try:
                with (
                    _one_of_each(tree, layers, parameters)
                    if shortened
                    else contextlib.nullcontext()
                ):
                    return _follow(tree, layers, parameters, given, editable)
            except CannotRun:
                if not shortened:
                    raise
    finally:
        model.train(training)
    raise AssertionError("not reached")


def _follow(
    tree: Tree,
    layers: Mapping[str, Layer],
    parameters: Mapping[str, Sequence[ShardedParameter]],
    inputs: Mapping[str, Any],
    editable: Callable[[str], bool],
) -> Followed:
    model = tree.root.live
    whole = _Whole(tree, layers)
    try:
        with torch.no_grad(), torch.device("meta"), whole.watching(), whole:
            expected = model(**inputs)
    except Exception as error:
        raise CannotRun(f"{type(error).__name__}: {error}") from error
    indivisible: Exception | None = None
    for world in WORLD_SIZES:
        followed = Followed()
        try:
            while True:
                rank = _Rank(tree, layers, parameters, whole.entries, followed, editable)
                try:
                    with _pretended_group(world), rank.installed():
                        with torch.no_grad(), torch.device("meta"), rank:
                            got = model(**inputs)
                        _compare_outputs(expected, got)
                    return followed
                except _Again:
                    continue
                except (CannotFollow, _Indivisible):
                    raise
                except Exception as error:
                    raise CannotFollow(
                        f"`forward` does not fit the sharded sizes: {error}",
                        _place_in_traceback(error, editable),
                        hint="a layer that is split over its inputs wants an input that is a partition",
                    ) from error
        except _Indivisible as error:
            indivisible = indivisible or error
    raise CannotFollow(str(indivisible), None)


def _compare_outputs(expected: Any, got: Any) -> None:
    def named(value: Any) -> dict[str, torch.Tensor]:
        if isinstance(value, Mapping):
            return {k: v for k, v in value.items() if isinstance(v, torch.Tensor)}
        return {f"output {i}": t for i, t in enumerate(_tensors(value))}

    for (name, want), have in zip(named(expected).items(), named(got).values(), strict=False):
        if want.shape != have.shape:
            raise CannotFollow(
                f"the model's `{name}` has shape {list(have.shape)} on a rank instead of "
                f"{list(want.shape)}",
                None,
                hint=(
                    'gather it: .sync("fwd_post", "all_gather", axis=-1) on the layer that makes it'
                ),
            )


@contextlib.contextmanager
def _pretended_group(world: int) -> Iterator[None]:
    """A process group of `world` ranks of which this process is the first and only one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _one_of_each(
    tree: Tree,
    layers: Mapping[str, Layer],
    parameters: Mapping[str, Sequence[ShardedParameter]],
) -> Iterator[None]:
    """Leaves one of equal elements in every module list: the runs cost what classes cost."""
    keys: dict[str, int] = {}
    numbers: dict[Any, int] = {}
    for path in reversed(tree.nodes):
        node = tree.nodes[path]
        key = (
            node.cls,
            layers.get(path),
            tuple(parameters.get(path, ())),
            tuple((n, tuple(p.shape)) for n, p in node.parameters.items()),
            tuple((n, keys[c.path]) for n, c in node.children.items()),
        )
        keys[path] = numbers.setdefault(key, len(numbers))
    shortened: list[tuple[nn.Module, dict[str, Any]]] = []
    for node in tree.nodes.values():
        if isinstance(node.live, nn.ModuleList) and len(node.children) > 1:
            kept = {keys[c.path]: c for c in reversed(list(node.children.values()))}
            if len(kept) < len(node.children):
                elements = sorted(kept.values(), key=lambda c: int(c.name))
                shortened.append((node.live, dict(node.live._modules)))
                node.live._modules.clear()
                node.live._modules.update({str(i): c.live for i, c in enumerate(elements)})
    try:
        yield
    finally:
        for live, modules in shortened:
            live._modules.clear()
            live._modules.update(modules)


class _Whole(TorchFunctionMode):
    """Records the operations of the whole model, outside of the layers that will be sharded."""

    def __init__(self, tree: Tree, layers: Mapping[str, Layer]) -> None:
        super().__init__()
        self.tree, self.layers = tree, layers
        self.entries: list[_Entry] = []
        self.depth = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Skips what happens inside the layers."""
        handles = []
        for path in self.layers:
            live = self.tree.nodes[path].live
            handles.append(live.register_forward_pre_hook(self._enter))
            handles.append(live.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.depth += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.entries.append(_Entry(_layer_call, _shapes(args), _shapes(output)))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.depth:
            return func(*args, **kwargs)
        inputs = _shapes((args, kwargs))
        output = func(*args, **kwargs)
        outputs = _shapes(output)
        if outputs:
            self.entries.append(_Entry(func, inputs, outputs))
        return output


def _layer_call() -> None:
    """Stands for the call of a sharded layer in the record."""


class _Rank(TorchFunctionMode):
    """Runs the model with its sharded layers, and compares each operation with the record."""

    def __init__(
        self,
        tree: Tree,
        layers: Mapping[str, Layer],
        parameters: Mapping[str, Sequence[ShardedParameter]],
        entries: list[_Entry],
        followed: Followed,
        editable: Callable[[str], bool],
    ) -> None:
        super().__init__()
        self.tree, self.layers, self.parameters = tree, layers, parameters
        self.entries, self.followed, self.editable = entries, followed, editable
        self.position = 0
        self.depth = 0
        self.origins: dict[int, str] = {}
        self.made_with: dict[int, set[Size]] = {}
        self.alive: list[Any] = []
        followed.arguments.clear()
        self.rules: dict[str, Callable[..., Any]] = {
            "view": self._view,
            "reshape": self._view,
            "split": self._split,
            "split_with_sizes": self._split,
            "chunk": self._chunk,
            "expand": self._expand,
            "__getitem__": self._index,
        }

    # Putting the sharded layers in place.

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """The model with sharded layers, split parameters and marked integers, for one run."""
        undo: list[Callable[[], None]] = []
        try:
            with torch.device("meta"):
                for path, layer in self.layers.items():
                    self._install_layer(self.tree.nodes[path], layer, undo)
                for path, shards in self.parameters.items():
                    self._install_parameters(self.tree.nodes[path], shards, undo)
            for owner in self._owners():
                self._mark_sizes(owner, undo)
            yield
        finally:
            for action in reversed(undo):
                action()

    def _owners(self) -> list[Node]:
        owners = {}
        for path in (*self.layers, *self.parameters):
            node = self.tree.nodes[path]
            owner = node.owner if path in self.layers else node
            if owner is not None:
                owners[owner.path] = owner
        return list(owners.values())

    def _install_layer(self, node: Node, layer: Layer, undo: list[Callable[[], None]]) -> None:
        parent = node.parent
        assert parent is not None
        name = next((n for n, m in parent.live._modules.items() if m is node.live), None)
        if name is None:  # left out of a shortened list
            return
        try:
            new = _make(layer, node.live)
        except ValueError as error:
            raise _Indivisible(f"`{node.path}`: {error}") from error
        new.train()
        new.register_forward_pre_hook(self._enter)
        new.register_forward_hook(self._leave)
        object.__setattr__(new, "_followed_path", node.path)
        modules, old = parent.live._modules, node.live
        modules[name] = new
        undo.append(lambda: modules.__setitem__(name, old))

    def _install_parameters(
        self, node: Node, shards: Sequence[ShardedParameter], undo: list[Callable[[], None]]
    ) -> None:
        world = dist.get_world_size()
        for shard in shards:
            held = (
                node.live._parameters if shard.name in node.live._parameters else node.live._buffers
            )
            old: Any = held[shard.name]
            shape = list(old.shape)
            total = sum(shard.parts)
            blocks = [shape[shard.axis] * p // total for p in shard.parts]
            shape[shard.axis] = sum(-(-b // world) for b in blocks)
            new: Any = torch.empty(shape, dtype=old.dtype, device="meta")
            held[shard.name] = nn.Parameter(new) if isinstance(old, nn.Parameter) else new
            undo.append(lambda h=held, n=shard.name, o=old: h.__setitem__(n, o))  # type: ignore[misc]

    def _mark_sizes(self, owner: Node, undo: list[Callable[[], None]]) -> None:
        held = owner.live.__dict__
        shrunk = self.followed.sizes.get(owner.cls, set())
        world = dist.get_world_size()
        for name, value in list(held.items()):
            if type(value) is int and value > 1 and not name.startswith("_"):
                if name in shrunk:
                    if value % world:
                        raise _Indivisible(f"`{owner.path}.{name}` is {value}")
                    held[name] = value // world
                else:
                    held[name] = Size.of(value, owner, name)
                undo.append(lambda n=name, v=value: held.__setitem__(n, v))  # type: ignore[misc]

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.depth += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.depth -= 1
        if self.depth == 0:
            self._next(_layer_call)
            for tensor in _tensors(output):
                self.origins[id(tensor)] = str(module._followed_path)
                self.alive.append(tensor)

    # One operation.

    def _next(self, func: Callable[..., Any]) -> _Entry:
        if self.position >= len(self.entries) or self.entries[self.position].function is not func:
            raise CannotFollow(
                "with sharded sizes `forward` takes another way than without", self._place()
            )
        self.position += 1
        return self.entries[self.position - 1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.depth:
            return func(*args, **kwargs)
        rule = self.rules.get(getattr(func, "__name__", ""))
        entry = self.entries[self.position] if self.position < len(self.entries) else None
        if rule and args and isinstance(args[0], torch.Tensor) and entry and entry.function is func:
            if len(entry.inputs[0]) != args[0].dim():
                raise CannotFollow("the number of axes depends on the sharded size", self._place())
            args, kwargs = rule(entry, args, kwargs)
        try:
            output = func(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError) as error:
            self._shrink_what_it_was_made_with((args, kwargs))
            raise CannotFollow(
                f"`{getattr(func, '__name__', func)}` does not fit the sharded sizes: {error}",
                self._place(),
            ) from error
        outputs = _shapes(output)
        if outputs:
            self._check(self._next(func), outputs, args, kwargs)
            self._hand_on(args, kwargs, output)
        return output

    def _check(self, entry: _Entry, outputs: list[Shape], args: Any, kwargs: Any) -> None:
        """An operation's result has the whole model's shape, or less along some axes."""
        for want, have in zip(entry.outputs, outputs, strict=False):
            if len(want) != len(have) or any(h > w for h, w in zip(have, want, strict=True)):
                self._shrink_what_it_was_made_with((args, kwargs))
                raise CannotFollow(
                    f"the result has shape {list(have)} on a rank, and {list(want)} without "
                    "sharding",
                    self._place(),
                )

    def _hand_on(self, args: Any, kwargs: Any, output: Any) -> None:
        """Remembers which layer a result comes from, and with which attributes it was made."""
        sizes = {s for s in _sizes((args, kwargs)) if not any(True for _ in _tensors(args))}
        origin = None
        for tensor in _tensors((args, kwargs)):
            sizes |= self.made_with.get(id(tensor), set())
            origin = origin or self.origins.get(id(tensor))
        single = len(list(_tensors((args, kwargs)))) == 1
        for tensor in _tensors(output):
            if sizes:
                self.made_with[id(tensor)] = sizes
            if origin and single:
                self.origins[id(tensor)] = origin
            self.alive.append(tensor)

    def _shrink_what_it_was_made_with(self, value: Any) -> None:
        for tensor in _tensors(value):
            for size in self.made_with.get(id(tensor), ()):
                if int(size) in tensor.shape:
                    self._shrink(size)

    def _shrink(self, size: Size) -> None:
        """From now on the attribute is this rank's share, on every module of the class."""
        self.followed.sizes.setdefault(size.owner.cls, set()).add(size.attribute)
        raise _Again

    # Operations that are told a size.

    def _view(self, entry: _Entry, args: Any, kwargs: Any) -> Any:
        tensor, given = args[0], list(args[1:]) or [kwargs.get("shape", kwargs.get("size"))]
        nested = len(given) == 1 and isinstance(given[0], (list, tuple))
        sizes = list(given[0]) if nested else given
        if not sizes or not all(isinstance(s, int) for s in sizes):
            return args, kwargs
        whole_in, whole_out, here = entry.inputs[0], entry.outputs[0], tuple(tensor.shape)
        if whole_in == here:
            return args, kwargs
        wanted = self._local_shape(whole_in, here, whole_out, sizes, tensor)
        for axis, (size, want) in enumerate(zip(sizes, wanted, strict=True)):
            if size in (-1, want):
                continue
            if isinstance(size, Size):
                self._shrink(size)
            place = self._editable_place()
            if place is None or -1 in sizes:
                raise CannotFollow(
                    f"this reshapes to {size} where a rank has {want}",
                    self._place(),
                    self.origins.get(id(tensor)),
                )
            self.followed.arguments.add(ArgumentChange(place, (axis,), "-1"))
            sizes[axis] = want
        return (tensor, *sizes), {}

    def _local_shape(
        self, whole_in: Shape, here: Shape, whole_out: Shape, sizes: list[int], tensor: torch.Tensor
    ) -> list[int]:
        """The shape that the result must have on a rank."""
        wanted = list(whole_out)
        for ins, outs in groups(whole_in, whole_out):
            before = _product(whole_in[i] for i in ins)
            now = _product(here[i] for i in ins)
            if before == now:
                continue
            # A contiguous part of a flattened axis is a part of its leftmost factor.
            factors = [j for j in outs if whole_out[j] > 1] or list(outs)
            free = [j for j in factors if sizes[j] == -1 or isinstance(sizes[j], Size)]
            chosen = free[0] if free and len(ins) == 1 and len(factors) > 1 else factors[0]
            rest = before // whole_out[chosen] if whole_out[chosen] else 1
            if now % rest:
                raise _Indivisible(
                    f"{now} features on a rank are not a multiple of {rest}, the size of a head"
                )
            wanted[chosen] = now // rest
            self._note_unit(tensor, sizes, chosen, factors)
        return wanted

    def _note_unit(
        self, tensor: torch.Tensor, sizes: list[int], chosen: int, factors: list[int]
    ) -> None:
        """A head's size that is an attribute is the unit in which the layer must be split."""
        path = self.origins.get(id(tensor))
        inner = [sizes[j] for j in factors if j > chosen]
        if path is None or sizes[chosen] != -1 or len(inner) != 1:
            return
        node = self.tree.nodes[path]
        unit = inner[0]
        if isinstance(unit, Size) and node.owner is not None and unit.owner.cls is node.owner.cls:
            self.followed.units[node.owner.cls, node.relative] = unit.attribute

    def _split(self, entry: _Entry, args: Any, kwargs: Any) -> Any:
        tensor, sizes, axis = _bound(
            args, kwargs, "split_size_or_sections", "split_size", "split_sizes"
        )
        whole, here = entry.inputs[0][axis], tensor.shape[axis]
        if whole == here:
            return args, kwargs
        pieces = [shape[axis] for shape in entry.outputs]
        self._check_parts(tensor, pieces)
        local = [p * here // whole for p in pieces]
        if isinstance(sizes, int):
            if sizes != local[0]:
                sizes = self._told(sizes, local[0], 1, tensor)
            return (tensor, sizes, axis), {}
        sizes = [
            s if s == want else self._told(s, want, 1, tensor)
            for s, want in zip(sizes, local, strict=True)
        ]
        return (tensor, sizes, axis), {}

    def _told(self, size: int, want: int, index: int, tensor: torch.Tensor) -> int:
        """A size handed to an operation that must be a rank's."""
        if isinstance(size, Size):
            self._shrink(size)
        raise CannotFollow(
            f"this is told the size {int(size)} where a rank has {want}",
            self._place(),
            self.origins.get(id(tensor)),
            "keep the size in an integer attribute of the module: attributes follow by themselves",
        )

    def _check_parts(self, tensor: torch.Tensor, pieces: list[int]) -> None:
        """What is taken apart along the sharded axis must have been sharded in these parts."""
        path = self.origins.get(id(tensor))
        if path is None or len(pieces) == 1:
            return
        packed = dict(self.layers[path].keywords).get("parts", 1)
        ratio = (1,) * packed if isinstance(packed, int) else tuple(packed)  # type: ignore[arg-type]
        total, whole = sum(ratio), sum(pieces)
        if len(ratio) != len(pieces) or any(
            r * whole != p * total for r, p in zip(ratio, pieces, strict=True)
        ):
            wanted = len(pieces) if len(set(pieces)) == 1 else pieces
            raise CannotFollow(
                f"`{path}` is taken apart in pieces of {pieces} here, but was not sharded in "
                "these parts",
                self._place(),
                path,
                f"shard it with parts={wanted}, so that every rank has its share of each",
            )

    def _chunk(self, entry: _Entry, args: Any, kwargs: Any) -> Any:
        tensor, _, axis = _bound(args, kwargs, "chunks")
        if entry.inputs[0][axis] != tensor.shape[axis]:
            self._check_parts(tensor, [shape[axis] for shape in entry.outputs])
        return args, kwargs

    def _expand(self, entry: _Entry, args: Any, kwargs: Any) -> Any:
        tensor, given = args[0], list(args[1:])
        nested = len(given) == 1 and isinstance(given[0], (list, tuple))
        sizes = list(given[0]) if nested else given
        ahead = len(sizes) - tensor.dim()
        for axis, (whole, here) in enumerate(zip(entry.inputs[0], tensor.shape, strict=True)):
            size = sizes[ahead + axis] if sizes else -1
            if whole == here or size in (-1, here):
                continue
            if isinstance(size, Size):
                self._shrink(size)
            place = self._editable_place()
            if place is None:
                raise CannotFollow(f"this expands to {size} where a rank has {here}", self._place())
            self.followed.arguments.add(ArgumentChange(place, (ahead + axis,), "-1"))
            sizes[ahead + axis] = -1
        return (tensor, *sizes), {}

    def _index(self, entry: _Entry, args: Any, kwargs: Any) -> Any:
        tensor, key = args
        keys = key if isinstance(key, tuple) else (key,)
        if any(isinstance(k, (torch.Tensor, list)) for k in keys):
            return args, kwargs
        taken = sum(1 for k in keys if k is not None and k is not Ellipsis)
        axis = 0
        for item in keys:
            if item is Ellipsis:
                axis += tensor.dim() - taken
            elif item is not None:
                whole, here = entry.inputs[0][axis], tensor.shape[axis]
                if whole != here:
                    self._slice(tensor, item, whole, here)
                axis += 1
        return args, kwargs

    def _slice(self, tensor: torch.Tensor, item: Any, whole: int, here: int) -> None:
        if isinstance(item, slice) and item.start is None and item.stop is None:
            return
        if isinstance(item, slice):
            for bound in (item.start, item.stop):
                if isinstance(bound, Size):
                    self._shrink(bound)
        raise CannotFollow(
            f"this indexes a sharded axis, which has {here} of {whole} elements on a rank",
            self._place(),
            self.origins.get(id(tensor)),
            "gather the value before, or split it with `split` or `chunk`",
        )

    # Where an operation stands.

    def _frame(self) -> types.FrameType | None:
        """The frame that calls the operation: the first outside torch and of this file."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            if name != __file__ and "/torch/" not in name.replace("\\", "/"):
                return frame
            frame = frame.f_back
        return None

    def _place(self) -> Place | None:
        """The operation's place in an editable file, or the place that leads to it."""
        frame = self._frame()
        while frame is not None and not self.editable(frame.f_code.co_filename):
            frame = frame.f_back
        return _place_of(frame) if frame else None

    def _editable_place(self) -> Place | None:
        """The operation's own place, where its file may be changed."""
        frame = self._frame()
        if frame is None or not self.editable(frame.f_code.co_filename):
            return None
        return _place_of(frame)


def _place_of(frame: types.FrameType) -> Place | None:
    return _place_at(frame.f_code, frame.f_lasti)


def _place_at(code: types.CodeType, instruction: int) -> Place | None:
    line, end_line, column, end_column = list(code.co_positions())[instruction // 2]
    if line is None or end_line is None or column is None or end_column is None:
        return None
    return Place(code.co_filename, line, end_line, column, end_column)


def _place_in_traceback(error: BaseException, editable: Callable[[str], bool]) -> Place | None:
    """The innermost place of an error that lies in a file that may be changed."""
    found, traceback = None, error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if editable(code.co_filename):
            found = _place_at(code, traceback.tb_lasti)
        traceback = traceback.tb_next
    return found


def _make(layer: Layer, original: nn.Module) -> nn.Module:
    """The layer that takes the original's place, on this rank of the pretended group."""
    import importlib

    cls = getattr(importlib.import_module(f"slapo_rewrite.runtime.{layer.module}"), layer.name)
    keywords = dict(layer.keywords)
    if isinstance(original, nn.Linear):
        new = cls(
            original.in_features, original.out_features, original.bias is not None, **keywords
        )
    elif isinstance(original, nn.Embedding):
        new = cls(original.num_embeddings, original.embedding_dim, original.padding_idx, **keywords)
    else:
        new = cls(original.nf, original.nx, **keywords)
    made: nn.Module = new.to(next(original.parameters()).dtype)
    return made


def _sizes(value: Any) -> Iterator[Size]:
    if isinstance(value, Size):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _sizes(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _sizes(item)


def _bound(args: Any, kwargs: Any, *names: str) -> tuple[torch.Tensor, Any, int]:
    """Tensor, second argument and non-negative axis of `split`, `chunk` and their like."""
    rest = list(args[1:])
    value = rest.pop(0) if rest else next(kwargs[n] for n in names if n in kwargs)
    axis = rest.pop(0) if rest else kwargs.get("dim", 0)
    return args[0], value, axis % args[0].dim()


def _product(values: Any) -> int:
    result = 1
    for value in values:
        result *= value
    return result


def groups(before: Shape, after: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """Which axes of a reshaped tensor are made from which, as smallest groups of equal product.

    `(2, 16, 768) -> (2, 16, 12, 64)` gives `[0]-[0]`, `[1]-[1]`, `[2]-[2, 3]`.
    """
    i = j = 0
    while i < len(before) or j < len(after):
        ins, outs = [], []
        left = right = 1
        if i < len(before):
            ins.append(i)
            left = before[i]
            i += 1
        if j < len(after):
            outs.append(j)
            right = after[j]
            j += 1
        while left != right:
            if left < right and i < len(before):
                left *= before[i]
                ins.append(i)
                i += 1
            elif j < len(after):
                right *= after[j]
                outs.append(j)
                j += 1
            else:
                break
        # Axes of size one belong to whatever is before them.
        while i < len(before) and before[i] == 1 and (j >= len(after) or after[j] != 1):
            ins.append(i)
            i += 1
        while j < len(after) and after[j] == 1 and (i >= len(before) or before[i] != 1):
            outs.append(j)
            j += 1
        yield ins, outs
