"""Finds what inside `forward` depends on a sharded size, by running it on the meta device.

The model runs twice, without memory or weights: whole, and as rank 0 of a group would run it, with
the sharded layers in place. Both runs call the same operations in the same order, so comparing the
shapes at each call tells which axes are partitions, and an operation that was told a size (`view`,
`split`, `expand`, an index) tells which of its arguments must shrink with them. An argument that
is made of attributes of a module (`self.num_heads`) makes one of them this rank's share; any other
is changed where it stands, to -1 or to its `part_size`; what can be neither is refused with its
line. On the way `Flow` judges whether each operation is right on parts and partial sums.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from slapo_rewrite.model.flow import PART, PARTIAL, Flow, Misuse, State
from slapo_rewrite.model.layers import Layer, Split, splits_of
from slapo_rewrite.model.sizes import (
    Attribute,
    Shape,
    Size,
    groups,
    numbers,
    product,
    shapes,
    tensors,
)
from slapo_rewrite.model.tree import Node, Tree

# World sizes that are tried until one divides every head count.
WORLD_SIZES = (2, 3, 4, 5, 7, 8)

# What a size must be a multiple of for its parts to be taken as even ones.
EVEN = 8

# How an argument is written that must be this rank's share.
INFERRED = "-1"
SHARE = "{part_size}({argument})"


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter of a module's own that is split: its name, axis and packed parts."""

    name: str
    axis: int
    parts: tuple[int, ...]


@dataclass(frozen=True)
class Border:
    """A collective at the border of a module, where no sharded layer carries it out.

    Attributes:
        mode: `fwd_pre`, `fwd_post` or `bwd_post`.
        operation: `all_reduce`, `all_gather`, or `function` for one that is taken to do what is
            needed.
        axis: The axis of an all-gather.
    """

    mode: str
    operation: str
    axis: int | None = None


@dataclass(frozen=True)
class Asked:
    """What is sharded and synchronised.

    Attributes:
        layers: The sharded layer at each path.
        parameters: The split parameters of a module's own, by the module's path.
        borders: Further collectives, by the module's path.
    """

    layers: Mapping[str, Layer]
    parameters: Mapping[str, Sequence[ShardedParameter]]
    borders: Mapping[str, Sequence[Border]] = field(default_factory=dict)


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
    """An argument of a call that must be written differently.

    Attributes:
        place: The call, or the subscript.
        index: Which argument: its number, and further ones into a list; for a subscript the axis's
            number and `start` or `stop`.
        template: How it is written, with `{argument}` for what stands there and `{part_size}` for
            that function.
    """

    place: Place
    index: tuple[int | str, ...]
    template: str


@dataclass
class Followed:
    """What follows from the sharded sizes.

    Attributes:
        sizes: Integer attributes that become this rank's share.
        units: The attribute that a split must be a multiple of, by owner class and relative path
            of the layer.
        arguments: Arguments of calls in `forward` that have to change.
        shared: Whole parameters that meet parts, by module path and name: their gradients have to
            be added up.
    """

    sizes: frozenset[Attribute] = frozenset()
    units: dict[tuple[type, str], str] = field(default_factory=dict)
    arguments: set[ArgumentChange] = field(default_factory=set)
    shared: frozenset[tuple[str, str]] = frozenset()


class CannotRun(Exception):
    """The whole model does not run on the meta device, so nothing can be said."""


class CannotFollow(Exception):
    """An operation that cannot be made to fit the sharded sizes.

    Attributes:
        place: The operation, where it stands in a file.
        path: The sharded layer it concerns, where known.
        hint: What the user can do.
        attributes: Attributes that might mend it if they were this rank's share.
        changeable: Whether the number can be changed where it stands, if no attribute mends it.
        uncovered: Parameters whose gradients would have to be added up.
        position: How many operations fitted before.
    """

    def __init__(
        self,
        message: str,
        place: Place | None,
        path: str | None = None,
        hint: str | None = None,
        *,
        attributes: Sequence[Attribute] = (),
        changeable: bool = False,
        uncovered: frozenset[tuple[str, str]] = frozenset(),
        position: int = 0,
    ) -> None:
        super().__init__(message)
        self.place, self.path, self.hint = place, path, hint
        self.attributes, self.changeable = attributes, changeable
        self.uncovered, self.position = uncovered, position


class _Diverged(CannotFollow):
    """`forward` goes another way than without sharding; what was wrong came before."""


class _Indivisible(Exception):
    """This world size does not divide a head count; another may."""

    def __init__(self, message: str, place: Place | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.place, self.hint = place, hint


@dataclass
class _Entry:
    """One recorded operation of the whole model."""

    function: Callable[..., Any]
    inputs: list[Shape]
    outputs: list[Shape]
    numbers: list[float]
    key: tuple[Any, ...] = ()


def follow(
    tree: Tree,
    asked: Asked,
    inputs: Mapping[str, Any],
    editable: Callable[[str], bool],
) -> Followed:
    """What in the model depends on the sharded sizes.

    Args:
        tree: The model on the meta device; it is left as it was.
        asked: What is sharded and synchronised.
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
        return _Following(tree, asked, given, editable).run()
    finally:
        model.train(training)


@dataclass(frozen=True)
class _Guess:
    """What a run as a rank takes for granted.

    Attributes:
        sizes: Attributes that are this rank's share.
        fixed: Attributes that are not.
        shared: Whole parameters whose gradients are added up.
    """

    sizes: frozenset[Attribute] = frozenset()
    fixed: frozenset[Attribute] = frozenset()
    shared: frozenset[tuple[str, str]] = frozenset()


class _Following:
    """Runs the model whole once, and as a rank until everything fits."""

    def __init__(
        self, tree: Tree, asked: Asked, inputs: Mapping[str, Any], editable: Callable[[str], bool]
    ) -> None:
        self.tree, self.asked, self.inputs, self.editable = tree, asked, inputs, editable
        self.model = tree.root.live
        self.whole = _Whole(tree, asked.layers)
        self.expected: Any = None

    def run(self) -> Followed:
        try:
            with torch.enable_grad(), torch.device("meta"), self.whole.watching(), self.whole:
                self.expected = self.model(**self.inputs)
        except Exception as error:
            raise CannotRun(f"{type(error).__name__}: {error}") from error
        indivisible: _Indivisible | None = None
        for world in WORLD_SIZES:
            try:
                with _pretended_group(world):
                    return self._search(_Guess())
            except _Indivisible as error:
                indivisible = indivisible or error
            except _Diverged:
                if indivisible is None:
                    raise
                break
        assert indivisible is not None
        raise CannotFollow(str(indivisible), indivisible.place, hint=indivisible.hint)

    def _search(self, wanted: _Guess) -> Followed:
        """The first way to make everything fit, trying what a failure points at."""
        try:
            return self._attempt(wanted)
        except CannotFollow as error:
            if error.uncovered - wanted.shared:
                return self._search(replace(wanted, shared=wanted.shared | error.uncovered))
            furthest, indivisible = error, None
            further = [replace(wanted, sizes=wanted.sizes | {a}) for a in error.attributes]
            if error.attributes and error.changeable:
                further.append(replace(wanted, fixed=wanted.fixed | set(error.attributes)))
            for guess in further:
                try:
                    return self._search(guess)
                except CannotFollow as other:
                    furthest = max(furthest, other, key=lambda e: e.position)
                except _Indivisible as other:
                    indivisible = indivisible or other
            raise indivisible or furthest from None

    def _attempt(self, wanted: _Guess) -> Followed:
        followed = Followed(sizes=wanted.sizes, shared=wanted.shared)
        rank = _Rank(self.tree, self.asked, self.whole.entries, followed, wanted, self.editable)
        try:
            with rank.installed(), torch.enable_grad(), torch.device("meta"), rank:
                got = self.model(**self.inputs)
        except CannotFollow as error:
            error.position = rank.position
            raise
        except _Indivisible:
            raise
        except Misuse as error:
            raise rank.refused(error) from error
        except Exception as error:
            raise CannotFollow(
                f"`forward` does not fit the sharded sizes: {error}".rstrip(": "),
                _place_in_traceback(error, self.editable),
            ) from error
        _compare_outputs(self.expected, got, rank.flow)
        return followed


def _compare_outputs(expected: Any, got: Any, flow: Flow) -> None:
    def named(value: Any) -> dict[str, torch.Tensor]:
        if isinstance(value, Mapping):
            return {k: v for k, v in value.items() if isinstance(v, torch.Tensor)}
        return {f"output {i}": t for i, t in enumerate(tensors(value))}

    for (name, want), have in zip(named(expected).items(), named(got).values(), strict=False):
        state = flow.of(have)
        if want.shape != have.shape:
            raise CannotFollow(
                f"the model's `{name}` has shape {list(have.shape)} on a rank instead of "
                f"{list(want.shape)}",
                None,
                state.source,
                'gather it: .sync("fwd_post", "all_gather", axis=-1) on the layer that makes it',
            )
        if state.kind == PARTIAL:
            raise CannotFollow(
                f"the model's `{name}` is a partial sum on each rank",
                None,
                state.source,
                'add it up: .sync("fwd_post", "all_reduce")',
                position=sys.maxsize,
            )
        if state.covered:
            raise CannotFollow(
                f"the model's `{name}` stands inside `{state.covered}`, whose `bwd_post` sync "
                "would count "
                "its gradient once for each rank",
                None,
                state.covered,
                "put the sync where the value goes into sharded layers and nowhere else",
                position=sys.maxsize,
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
            self.entries.append(_Entry(_layer_call, shapes(args), shapes(output), []))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = _with_values(func, args, kwargs or {})
        if (answer := _answer(func, args)) is not None:
            return answer
        if self.depth:
            return func(*args, **kwargs)
        inputs, given = shapes((args, kwargs)), list(numbers((args, kwargs)))
        output = func(*args, **kwargs)
        outputs = shapes(output)
        if outputs:
            key = _key(args[1]) if getattr(func, "__name__", "") == "__getitem__" else ()
            self.entries.append(_Entry(func, inputs, outputs, given, key))
        return output


def _with_values(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call that makes a tensor, such that one without axes has a value.

    `forward` may branch on it: a layer that is dropped at random is one that `torch.rand([])` says.
    """
    if func in _MAKING:
        first = args[0] if args else kwargs.get("size", kwargs.get("data"))
        plain = isinstance(first, (bool, int, float)) and func in (torch.tensor, torch.as_tensor)
        if plain or (isinstance(first, (list, tuple)) and not first and func is not torch.tensor):
            return {**kwargs, "device": "cpu"}
    return kwargs


def _answer(func: Callable[..., Any], args: Any) -> Any:
    """What an operation says that asks for values which are not there; None for any other.

    Yes-or-no questions of a tensor without values are answered with no, and a coin that `forward`
    tosses (`torch.rand([]) < 0.1`) falls on the likelier side.
    """
    if func in (torch.Tensor.__bool__, torch.Tensor.__contains__):
        return False if isinstance(args[0], torch.Tensor) and args[0].is_meta else None
    if func is torch.rand and (not args or args[0] in ((), [])):
        return torch.full([], 0.99, device="cpu")
    return None


def _layer_call() -> None:
    """Stands for the call of a sharded layer in the record."""


# Functions that make tensors from sizes or numbers.
_MAKING = {
    torch.tensor, torch.as_tensor, torch.rand, torch.randn, torch.zeros, torch.ones, torch.full,
    torch.empty,
}  # fmt: skip

# Operations whose numbers are values, not sizes.
_ARITHMETIC = {
    "add", "sub", "mul", "div", "pow", "true_divide", "floor_divide", "rsub", "__rsub__",
    "__rtruediv__", "__rpow__", "add_", "sub_", "mul_", "div_", "clamp", "fmod", "remainder",
    "where", "masked_fill", "masked_fill_",
}  # fmt: skip

# Functions that make tensors of equal elements: any rank's part of one is like any other's.
_CONSTANT = {
    "zeros", "ones", "empty", "full", "new_zeros", "new_ones", "new_empty", "new_full", "rand",
    "randn", "zeros_like", "ones_like", "empty_like", "full_like",
}  # fmt: skip

# The sizes of the blocks that lie packed along each split axis of a tensor.
Blocks = dict[int, Shape]


class _Rank(TorchFunctionMode):
    """Runs the sharded model, holding every operation against the whole model's record."""

    def __init__(
        self,
        tree: Tree,
        asked: Asked,
        entries: list[_Entry],
        followed: Followed,
        wanted: _Guess,
        editable: Callable[[str], bool],
    ) -> None:
        super().__init__()
        self.tree, self.asked, self.wanted = tree, asked, wanted
        self.entries, self.followed, self.editable = entries, followed, editable
        self.flow = Flow()
        self.position = 0
        self.depth = 0
        self.origins: dict[int, str] = {}
        self.made_with: dict[int, tuple[Size, ...]] = {}
        self.blocks: dict[int, Blocks] = {}
        self.alive: list[Any] = []
        self.rules: dict[str, Callable[..., Any]] = {
            "view": self._view,
            "reshape": self._view,
            "unflatten": self._unflatten,
            "split": self._split,
            "split_with_sizes": self._split,
            "chunk": self._chunk,
            "expand": self._expand,
            "repeat": self._repeat,
            "__getitem__": self._index,
        }

    # Putting the sharded layers in place.

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """The model with sharded layers, split parameters and marked integers, during a run."""
        undo: list[Callable[[], None]] = []
        try:
            with torch.device("meta"):
                for path, layer in self.asked.layers.items():
                    self._install_layer(self.tree.nodes[path], layer, undo)
                for path, shards in self.asked.parameters.items():
                    self._install_parameters(self.tree.nodes[path], shards, undo)
            for path, borders in self.asked.borders.items():
                self._install_borders(self.tree.nodes[path], borders, undo)
            self._know_parameters()
            holders = self._holders()
            for path, holder in holders.items():
                self._mark_sizes(self.tree.nodes[path], holder, undo)
            yield
        finally:
            for action in reversed(undo):
                action()

    def _holders(self) -> dict[str, Node]:
        """For every module below sharded parameters or with some: the nearest that has them."""
        own = set()
        for path in (*self.asked.layers, *self.asked.parameters):
            node = self.tree.nodes[path]
            owner = node.owner if path in self.asked.layers else node
            if owner is not None:
                own.add(owner.path)
        found: dict[str, Node] = {}
        for path, node in self.tree.nodes.items():
            if path in own:
                found[path] = node
            elif node.parent is not None and node.parent.path in found:
                found[path] = found[node.parent.path]
        return found

    def _know_parameters(self) -> None:
        split = {(p, s.name) for p, shards in self.asked.parameters.items() for s in shards}
        for path, node in self.tree.nodes.items():
            if path in self.asked.layers:
                continue
            for name, parameter in node.live._parameters.items():
                key = (path, name)
                if parameter is None:
                    continue
                if key in split:
                    self.flow.set(parameter, State(PART, path))
                else:
                    covered = path if key in self.followed.shared else None
                    self.flow.set(
                        parameter,
                        State(covered=covered, parameters=None if covered else frozenset({key})),
                    )

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
            whole = [shape[shard.axis] * p // total for p in shard.parts]
            shape[shard.axis] = sum(-(-b // world) for b in whole)
            new: Any = torch.empty(shape, dtype=old.dtype, device="meta")
            part = nn.Parameter(new) if isinstance(old, nn.Parameter) else new
            held[shard.name] = part
            self.blocks[id(part)] = {shard.axis: tuple(whole)}
            self.flow.set(part, State(PART, node.path))
            undo.append(lambda h=held, n=shard.name, o=old: h.__setitem__(n, o))  # type: ignore[misc]

    def _install_borders(
        self, node: Node, borders: Sequence[Border], undo: list[Callable[[], None]]
    ) -> None:
        # The module that stands there now: a sharded layer has taken the original's place.
        parent = node.parent
        live = parent.live._modules.get(node.name, node.live) if parent else node.live
        live = (
            live if isinstance(live, nn.Module) and hasattr(live, "_followed_path") else node.live
        )
        for border in borders:
            if border.mode == "fwd_post":

                def after(module: nn.Module, args: Any, output: Any, b: Border = border) -> Any:
                    return self._leave_border(node, b, output)

                handle: Any = live.register_forward_hook(after)
            else:

                def before(module: nn.Module, args: Any, kwargs: Any, b: Border = border) -> Any:
                    return self._enter_border(node, b, args, kwargs)

                handle = live.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            undo.append(handle.remove)

    def _mark_sizes(self, node: Node, holder: Node, undo: list[Callable[[], None]]) -> None:
        module = sys.modules.get(node.cls.__module__)
        if node.path in self.asked.layers or not self.editable(
            getattr(module, "__file__", "") or ""
        ):
            return
        held = node.live.__dict__
        world = dist.get_world_size()
        for name, value in list(held.items()):
            if type(value) is int and value > 1 and not name.startswith("_"):
                attribute = Attribute(node.cls, holder.cls, name)
                if attribute in self.followed.sizes:
                    if value % world:
                        raise _Indivisible(f"`{node.path}.{name}` is {value}")
                    held[name] = Size.of(value // world, [attribute])
                else:
                    held[name] = Size.of(value, [attribute])
                undo.append(lambda n=name, v=value: held.__setitem__(n, v))  # type: ignore[misc]

    # At the borders of layers and modules.

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.depth += 1
        if self.depth == 1:
            path = str(module._followed_path)
            self._check_layer_input(path, args[0] if args else None)

    def _check_layer_input(self, path: str, tensor: Any) -> None:
        """Raises `Misuse` where a layer is given what it does not take."""
        if not isinstance(tensor, torch.Tensor):
            return
        layer, state = self.asked.layers[path], self.flow.of(tensor)
        split = _split_of(self.tree.nodes[path], layer)
        keywords = dict(layer.keywords)
        if state.kind == PARTIAL:
            raise Misuse(
                f"`{path}` needs its input, but `{state.source}` gives a partial sum of it on "
                "each rank",
                'add it up: .sync("fwd_post", "all_reduce")',
                state.source,
            )
        if split.output == "partial sum" and tensor.is_floating_point():
            if state.kind != PART:
                raise Misuse(
                    f"`{path}` is split over its inputs, but its input is whole on every rank",
                    "split the layer before it over its outputs, or this one as well",
                    path,
                )
            self._check_same_blocks(path, tensor, keywords)
        elif split.has_input_gradient:
            borders = self.asked.borders.get(path, ())
            if any(b.mode == "bwd_post" for b in borders):
                return
            if keywords.get("reduce_input_gradient", True):
                self.flow.cover(tensor, path)
            else:
                self.flow.meet_parts([tensor], f"`{path}`")

    def _check_same_blocks(
        self, path: str, tensor: torch.Tensor, keywords: Mapping[str, Any]
    ) -> None:
        packed = self.blocks.get(id(tensor), {}).get(tensor.dim() - 1, (1,))
        ratio = _ratio(keywords.get("parts", 1))
        if _reduced(packed) != _reduced(ratio):
            raise Misuse(
                f"the input of `{path}` has {_described(packed)} along its split axis, but the "
                "layer is sharded "
                f"for {_described(ratio)}",
                "shard both with the same `parts`",
                path,
            )

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.depth -= 1
        if self.depth:
            return
        self._next(_layer_call)
        path = str(module._followed_path)
        layer = self.asked.layers[path]
        split = _split_of(self.tree.nodes[path], layer)
        keywords = dict(layer.keywords)
        for tensor in tensors(output):
            if split.output == "partition":
                kind = State() if keywords.get("gather_output") else State(PART, path)
            else:
                kind = State() if keywords.get("reduce_output", True) else State(PARTIAL, path)
            self.flow.set(tensor, kind)
            if kind.kind == PART:
                self.origins[id(tensor)] = path
                whole = self.entries[self.position - 1].outputs[0][-1]
                ratio = _ratio(keywords.get("parts", 1))
                self.blocks[id(tensor)] = {
                    tensor.dim() - 1: tuple(whole * r // sum(ratio) for r in ratio)
                }
            self.alive.append(tensor)

    def _enter_border(self, node: Node, border: Border, args: Any, kwargs: Any) -> Any:
        """The arguments of a module with the first one covered."""
        first = next((n for n, v in kwargs.items() if isinstance(v, torch.Tensor)), None)
        tensor = args[0] if args else kwargs.get(first)
        if not isinstance(tensor, torch.Tensor):
            return None
        self.depth += 1
        try:
            new = tensor.view_as(tensor)
        finally:
            self.depth -= 1
        self._same(tensor, new)
        if border.operation == "function":
            if border.mode == "bwd_post" and self.flow.of(tensor).covered is None:
                self.flow.set(new, State(self.flow.of(tensor).kind, covered=node.path))
        else:
            self.flow.set(new, self.flow.cover(tensor, node.path))
        if args:
            return (new, *args[1:]), kwargs
        return args, {**kwargs, first: new}

    def _leave_border(self, node: Node, border: Border, output: Any) -> Any:
        """The output of a module with its first tensor made whole."""
        tensor = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(tensor, torch.Tensor):
            return None
        state = self.flow.of(tensor)
        self.depth += 1
        try:
            new = tensor.view_as(tensor)
            if border.operation == "all_gather" or (
                border.operation == "function" and state.kind == PART
            ):
                new = self._gathered(node, tensor, border)
        finally:
            self.depth -= 1
        if border.operation == "all_reduce":
            if state.kind == PART:
                raise Misuse(
                    f"the output of `{node.path}` is a part: an all-reduce would add up different "
                    "features",
                    'gather it: .sync("fwd_post", "all_gather", axis=-1)',
                    node.path,
                )
            self.flow.set(new, self.flow.add_up(tensor, node.path))
        else:
            self.flow.set(new, State())
        self.alive.append(new)
        return (new, *output[1:]) if isinstance(output, tuple) else new

    def _gathered(self, node: Node, tensor: torch.Tensor, border: Border) -> torch.Tensor:
        """The tensor with the split axis whole again."""
        state = self.flow.of(tensor)
        if state.kind != PART:
            raise Misuse(
                f"the output of `{node.path}` is "
                f"{'a partial sum' if state.kind == PARTIAL else 'whole'}: an "
                "all-gather would line up the ranks' copies",
                'add it up: .sync("fwd_post", "all_reduce")' if state.kind == PARTIAL else None,
                node.path,
            )
        shape = list(tensor.shape)
        axis = border.axis if border.axis is not None else -1
        packed = self.blocks.get(id(tensor), {}).get(axis % tensor.dim())
        shape[axis] = sum(packed) if packed else shape[axis] * dist.get_world_size()
        if border.operation == "all_gather" and shape[axis] % EVEN:
            raise Misuse(
                f"the output of `{node.path}` has {shape[axis]} features, which not every world "
                "size "
                "divides: only the layer that makes it can gather uneven parts",
                f'gather it there: .sync("fwd_post", "all_gather", axis=-1) on `{state.source}`',
                node.path,
            )
        return tensor.new_empty(shape, requires_grad=tensor.requires_grad)

    def refused(self, error: Misuse) -> CannotFollow:
        """A misuse, with the place in the model where it happens."""
        return CannotFollow(
            str(error),
            _place_in_traceback(error, self.editable),
            error.path,
            error.hint,
            uncovered=error.uncovered,
            position=self.position,
        )

    # One operation.

    def _next(self, func: Callable[..., Any]) -> _Entry:
        if self.position >= len(self.entries) or self.entries[self.position].function != func:
            raise _Diverged(
                "with sharded sizes `forward` takes another way than without", self._place()
            )
        self.position += 1
        return self.entries[self.position - 1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = _with_values(func, args, kwargs or {})
        if (answer := _answer(func, args)) is not None:
            return answer
        if self.depth:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        rule = self.rules.get(name)
        entry = self.entries[self.position] if self.position < len(self.entries) else None
        known = entry is not None and entry.function == func
        blocks: Blocks | None = None
        if rule and args and isinstance(args[0], torch.Tensor) and known:
            assert entry is not None
            if len(entry.inputs[0]) != args[0].dim():
                raise CannotFollow("the number of axes depends on the sharded size", self._place())
            args, kwargs, blocks = rule(entry, args, kwargs)
        try:
            output = func(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError) as error:
            raise self._unfit(name or str(func), args, kwargs, error) from error
        if shapes(output):
            self._take_in(name, self._next(func), args, kwargs, output, blocks)
        elif name == "__setitem__":
            self._assigned(args)
        return output

    def _unfit(self, name: str, args: Any, kwargs: Any, error: Exception) -> CannotFollow:
        """An operation that fails on what a rank has."""
        given = list(tensors((args, kwargs)))
        part = next((t for t in given if self.flow.of(t).kind == PART), None)
        whole = next((t for t in given if self.flow.of(t).kind != PART and t.dim()), None)
        message, hint = f"`{name}` does not fit the sharded sizes: {error}", None
        if part is not None and whole is not None:
            source = self.flow.of(part).source
            message = (
                f"`{name}` joins a part of shape {list(part.shape)}, of `{source}`, with a whole "
                f"value of shape {list(whole.shape)}"
            )
            hint = "split what the whole value is made from as well, or gather the part"
        return CannotFollow(
            message,
            self._place(),
            self._a_source((args, kwargs)),
            hint,
            attributes=self._made_with((args, kwargs)),
        )

    def _take_in(
        self, name: str, entry: _Entry, args: Any, kwargs: Any, output: Any, blocks: Blocks | None
    ) -> None:
        inputs, outputs = list(tensors((args, kwargs))), list(tensors(output))
        self._check(entry, outputs, args, kwargs)
        self._check_numbers(name, entry, args, kwargs)
        self._check_made(name, entry, inputs, outputs)
        self.flow.operate(name, inputs, entry.inputs, args, kwargs, outputs)
        self._hand_on(name, entry, inputs, (args, kwargs), outputs, blocks)

    def _check(self, entry: _Entry, outputs: list[torch.Tensor], args: Any, kwargs: Any) -> None:
        """An operation's result has the whole model's shape, or less along some axes."""
        if len(outputs) != len(entry.outputs):
            raise _Diverged(
                f"this gives {len(outputs)} tensors on a rank, and {len(entry.outputs)} without "
                "sharding",
                self._place(),
            )
        for want, have in zip(entry.outputs, outputs, strict=True):
            if len(want) != have.dim() or any(h > w for h, w in zip(have.shape, want, strict=True)):
                raise CannotFollow(
                    f"the result has shape {list(have.shape)} on a rank, and {list(want)} without "
                    "sharding",
                    self._place(),
                    attributes=self._made_with((args, kwargs)),
                )

    def _check_numbers(self, name: str, entry: _Entry, args: Any, kwargs: Any) -> None:
        """A number that is a value, a scale say, is the whole model's."""
        here = list(numbers((args, kwargs)))
        for want, have in zip(entry.numbers, here, strict=False):
            if want != have and (name in _ARITHMETIC or isinstance(want, float)):
                raise CannotFollow(
                    f"this computes with {have:g} on a rank, and with {want:g} without sharding",
                    self._place(),
                    hint="take it from what is not split, an attribute set in `__init__` say",
                )

    def _check_made(
        self,
        name: str,
        entry: _Entry,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> None:
        """A tensor that is made from sizes alone is the same for any rank's part."""
        if name in _CONSTANT or any(
            tuple(t.shape) != w for t, w in zip(inputs, entry.inputs, strict=False)
        ):
            return
        if name in ("expand", "repeat", "broadcast_to"):
            return
        for want, have in zip(entry.outputs, outputs, strict=True):
            if want != tuple(have.shape):
                raise CannotFollow(
                    f"`{name}` gives the first {list(have.shape)} of {list(want)} elements here, "
                    "on every rank "
                    "the same ones",
                    self._place(),
                )

    def _assigned(self, args: Any) -> None:
        """`x[...] = y` makes `x` what `y` is."""
        if len(args) == 3 and isinstance(args[2], torch.Tensor):
            state = self.flow.of(args[2])
            if state.kind != self.flow.of(args[0]).kind:
                self.flow.set(args[0], state)

    def _hand_on(
        self,
        name: str,
        entry: _Entry,
        inputs: list[torch.Tensor],
        given: Any,
        outputs: list[torch.Tensor],
        blocks: Blocks | None,
    ) -> None:
        """Remembers where a result comes from, with which sizes it was made, how it is packed."""
        made = tuple(_sizes(given)) if name in _CONSTANT or name in ("expand", "repeat") else ()
        for tensor in inputs:
            made += self.made_with.get(id(tensor), ())
        origin = self.origins.get(id(inputs[0])) if len(inputs) == 1 else None
        for number, tensor in enumerate(outputs):
            if made:
                self.made_with[id(tensor)] = made
            if origin:
                self.origins[id(tensor)] = origin
            found = blocks
            if found is None or len(outputs) > 1:
                found = self._blocks_of(name, entry, inputs, given[0], tensor, number)
            if found:
                self.blocks[id(tensor)] = found
            self.alive.append(tensor)

    def _blocks_of(
        self,
        name: str,
        entry: _Entry,
        inputs: list[torch.Tensor],
        args: Any,
        output: torch.Tensor,
        number: int,
    ) -> Blocks:
        """How the split axes of a result are packed."""
        found: Blocks = {}
        whole = entry.outputs[number]
        for tensor, shape in zip(inputs, entry.inputs, strict=False):
            for axis, packed in self.blocks.get(id(tensor), {}).items():
                place = _moved_axis(name, args, tensor.dim(), axis, output.dim(), shape, whole)
                if place is None or place >= output.dim() or output.shape[place] == whole[place]:
                    continue
                if sum(packed) != whole[place]:
                    continue
                if place in found and _reduced(found[place]) != _reduced(packed):
                    raise CannotFollow(
                        f"this joins {_described(found[place])} with {_described(packed)} along a "
                        "split axis",
                        self._place(),
                        hint="shard both layers with the same `parts`",
                    )
                found[place] = packed
        return found

    def _same(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Remembers of a copy what is known of the original."""
        for table in (self.origins, self.made_with, self.blocks):
            if id(old) in table:
                table[id(new)] = table[id(old)]  # type: ignore[assignment]
        self.flow.set(new, self.flow.of(old))
        self.alive.append(new)

    def _made_with(self, value: Any) -> list[Attribute]:
        """The attributes that full-sized tensors among the operands were made with."""
        found: list[Attribute] = []
        for tensor in tensors(value):
            for size in self.made_with.get(id(tensor), ()):
                if int(size) in tensor.shape:
                    found += self._open(size)
        return list(dict.fromkeys(found))

    def _open(self, size: int) -> list[Attribute]:
        """The attributes of a number that may yet turn out to be this rank's share."""
        known = self.wanted.sizes | self.wanted.fixed
        return [a for a in getattr(size, "attributes", ()) if a not in known]

    def _a_source(self, value: Any) -> str | None:
        return next((s for t in tensors(value) if (s := self.flow.of(t).source)), None)

    # Operations that are told a size.

    def _view(self, entry: _Entry, args: Any, kwargs: Any) -> Any:
        tensor, given = args[0], list(args[1:]) or [kwargs.get("shape", kwargs.get("size"))]
        nested = len(given) == 1 and isinstance(given[0], (list, tuple))
        sizes = list(given[0]) if nested else given
        here = tuple(tensor.shape)
        if not sizes or not all(isinstance(s, int) for s in sizes) or entry.inputs[0] == here:
            return args, kwargs, None
        shape, blocks = self._regrouped(tensor, entry.inputs[0], entry.outputs[0], sizes)
        sizes = self._fitted(tensor, sizes, shape, first=0)
        return (tensor, *sizes), {}, blocks

    def _unflatten(self, entry: _Entry, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        axis = (args[1] if len(args) > 1 else kwargs["dim"]) % tensor.dim()
        sizes = list(args[2] if len(args) > 2 else kwargs["sizes"])
        if entry.inputs[0] == tuple(tensor.shape):
            return args, kwargs, None
        around = [*tensor.shape[:axis], *sizes, *tensor.shape[axis + 1 :]]
        shape, blocks = self._regrouped(tensor, entry.inputs[0], entry.outputs[0], around)
        inner = shape[axis : axis + len(sizes)]
        self._fitted(tensor, sizes, inner, first=None, argument=1)
        return (tensor, axis, inner), {}, blocks

    def _fitted(
        self,
        tensor: torch.Tensor,
        sizes: list[int],
        wanted: list[int],
        first: int | None,
        argument: int = 0,
    ) -> list[int]:
        """The sizes with those changed in the source that do not fit."""
        fitted = list(sizes)
        for axis, (size, want) in enumerate(zip(sizes, wanted, strict=True)):
            if size in (-1, want):
                continue
            index = (axis,) if first is not None else (argument, axis)
            template = INFERRED
            place = self._editable_place()
            taken = any(c.place == place and c.index != index for c in self.followed.arguments)
            if -1 in sizes or taken:
                template = SHARE
            self._change(tensor, size, want, index, template, "this reshapes to")
            fitted[axis] = want
        return fitted

    def _change(
        self,
        tensor: torch.Tensor,
        size: int,
        want: int,
        index: tuple[int | str, ...],
        template: str,
        does: str,
    ) -> None:
        """Makes a number the rank's own: by its attributes, or else where it stands."""
        attributes = self._open(size)
        place = self._editable_place()
        fits = template == INFERRED or want * dist.get_world_size() == size
        if attributes or place is None or not fits:
            raise CannotFollow(
                f"{does} {int(size)} where a rank has {want}",
                self._place(),
                self.origins.get(id(tensor)),
                "keep the size in an integer attribute of the module: attributes follow by "
                "themselves",
                attributes=attributes,
                changeable=place is not None and fits,
            )
        self.followed.arguments.add(ArgumentChange(place, index, template))

    def _regrouped(
        self, tensor: torch.Tensor, whole_in: Shape, whole_out: Shape, sizes: list[int]
    ) -> tuple[list[int], Blocks]:
        """The shape that a reshaped tensor must have on a rank, and how its axes are packed."""
        here, known = tuple(tensor.shape), self.blocks.get(id(tensor), {})
        wanted: list[int] = list(whole_out)
        blocks: Blocks = {}
        for ins, outs in groups(whole_in, whole_out):
            split = [i for i in ins if whole_in[i] != here[i]]
            if not split:
                continue
            if len(split) > 1:
                raise CannotFollow("this merges two split axes into one", self._place())
            axis = split[0]
            packed = known.get(axis, (whole_in[axis],))
            ahead = product(whole_in[i] for i in ins if i < axis)
            if len(ins) == len(outs) == 1:
                wanted[outs[0]], blocks[outs[0]] = here[axis], packed
                continue
            if len(set(packed)) > 1:
                raise self._not_in_parts(tensor, packed)
            chosen, outer = self._factor(tensor, outs, whole_out, ahead * len(packed))
            rest = product(whole_in[i] for i in ins) // whole_out[chosen]
            now = product(here[i] for i in ins)
            if now % rest:
                count = whole_out[chosen]
                raise _Indivisible(
                    f"this regroups {whole_in[axis]} features in {count} blocks of {rest}, of "
                    "which "
                    f"{dist.get_world_size()} ranks cannot have the same number",
                    self._place(),
                    f"if each block has a share for every rank, shard with parts={count}",
                )
            wanted[chosen] = now // rest
            blocks[chosen] = (whole_out[chosen] // outer,) * outer
            self._note_unit(tensor, sizes, chosen, outs)
        return wanted, blocks

    def _factor(
        self, tensor: torch.Tensor, outs: list[int], whole_out: Shape, outer: int
    ) -> tuple[int, int]:
        """Which factor of a regrouped axis is split, and in how many blocks it lies packed.

        A rank holds a contiguous part of each of `outer` blocks: a part of the first factor after
        those that count the blocks.
        """
        before = 1
        for axis in outs:
            size = whole_out[axis]
            if before * size <= outer and outer % (before * size) == 0 and outer > before:
                before *= size
                continue
            if size == 1 and len(outs) > 1 and axis != outs[-1]:
                continue
            if outer % before or (size * before) % outer:
                break
            return axis, outer // before
        raise self._not_in_parts(tensor, (1,) * outer)

    def _not_in_parts(self, tensor: torch.Tensor, packed: Shape) -> CannotFollow:
        path = self.origins.get(id(tensor))
        return CannotFollow(
            f"this regroups features that lie packed in {_described(packed)}, as "
            f"{f'`{path}`' if path else 'they'} {'was' if path else 'were'} sharded",
            self._place(),
            path,
            "take the parts apart first, with `split` or `chunk`, or shard with the `parts` that "
            "are meant here",
        )

    def _note_unit(
        self, tensor: torch.Tensor, sizes: list[int], chosen: int, outs: list[int]
    ) -> None:
        """A head's size that is an attribute is the unit in which the layer must be split."""
        path = self.origins.get(id(tensor))
        inner = [sizes[j] for j in outs if j > chosen]
        if path is None or sizes[chosen] != -1 or len(inner) != 1:
            return
        node = self.tree.nodes[path]
        found: tuple[Attribute, ...] = getattr(inner[0], "attributes", ())
        if len(found) == 1 and node.owner is not None and found[0].cls is node.owner.cls:
            self.followed.units[node.owner.cls, node.relative] = found[0].name

    def _split(self, entry: _Entry, args: Any, kwargs: Any) -> Any:
        tensor, sizes, axis = _bound(
            args, kwargs, "split_size_or_sections", "split_size", "split_sizes"
        )
        whole, here = entry.inputs[0][axis], tensor.shape[axis]
        if whole == here:
            return args, kwargs, None
        pieces = [shape[axis] for shape in entry.outputs]
        self._check_parts(tensor, axis, whole, pieces)
        local = [p * here // whole for p in pieces]
        if isinstance(sizes, int):
            if sizes != local[0]:
                self._change(tensor, sizes, local[0], (0,), SHARE, "this splits by")
            return (tensor, local[0], axis), {}, None
        for number, (size, want) in enumerate(zip(sizes, local, strict=True)):
            if size != want:
                self._change(tensor, size, want, (0, number), SHARE, "this splits by")
        return (tensor, local, axis), {}, None

    def _check_parts(
        self, tensor: torch.Tensor, axis: int, whole: int, pieces: Sequence[int]
    ) -> None:
        """What is taken apart along the split axis must have been sharded in these parts."""
        if len(pieces) == 1:
            return
        packed = self.blocks.get(id(tensor), {}).get(axis, (whole,))
        if _borders(packed) >= _borders(pieces):
            return
        path = self.origins.get(id(tensor))
        wanted = len(pieces) if len(set(pieces)) == 1 else list(pieces)
        raise CannotFollow(
            f"{f'`{path}`' if path else 'this'} is taken apart in pieces of {list(pieces)} here, "
            "but was not "
            "sharded in these parts",
            self._place(),
            path,
            f"shard it with parts={wanted}, so that every rank has its share of each",
        )

    def _chunk(self, entry: _Entry, args: Any, kwargs: Any) -> Any:
        tensor, _, axis = _bound(args, kwargs, "chunks")
        if entry.inputs[0][axis] != tensor.shape[axis]:
            self._check_parts(tensor, axis, entry.inputs[0][axis], [s[axis] for s in entry.outputs])
        return args, kwargs, None

    def _expand(self, entry: _Entry, args: Any, kwargs: Any) -> Any:
        tensor, given = args[0], list(args[1:])
        nested = len(given) == 1 and isinstance(given[0], (list, tuple))
        sizes = list(given[0]) if nested else given
        ahead = len(sizes) - tensor.dim()
        for axis, (whole, here) in enumerate(zip(entry.inputs[0], tensor.shape, strict=True)):
            size = sizes[ahead + axis] if sizes else -1
            if whole == here or size in (-1, here):
                continue
            self._change(tensor, size, here, (ahead + axis,), INFERRED, "this expands to")
            sizes[ahead + axis] = here
        return (tensor, *sizes), {}, None

    def _repeat(self, entry: _Entry, args: Any, kwargs: Any) -> Any:
        tensor, given = args[0], list(args[1:])
        times = list(given[0]) if len(given) == 1 and isinstance(given[0], (list, tuple)) else given
        ahead = len(times) - tensor.dim()
        for axis, (whole, here) in enumerate(zip(entry.inputs[0], tensor.shape, strict=True)):
            if whole != here and times and times[ahead + axis] != 1:
                raise CannotFollow(
                    "this repeats what a rank has, where the whole would be repeated", self._place()
                )
        return args, kwargs, None

    def _index(self, entry: _Entry, args: Any, kwargs: Any) -> Any:
        tensor, key = args
        keys = _key(key)
        taken = sum(_axes_taken(k) for k in keys)
        axis, result, changed = 0, list(keys), False
        for number, item in enumerate(keys):
            if item is Ellipsis:
                axis += tensor.dim() - taken
                continue
            for inner in range(axis, axis + _axes_taken(item)):
                whole, here = entry.inputs[0][inner], tensor.shape[inner]
                if whole != here:
                    meant = entry.key[number]
                    result[number] = self._slice(tensor, inner, item, meant, whole, number)
                    changed = changed or result[number] is not item
            axis += _axes_taken(item)
        return ((tensor, tuple(result)) if changed else args), kwargs, None

    def _slice(
        self, tensor: torch.Tensor, axis: int, item: Any, meant: Any, whole: int, number: int
    ) -> Any:
        if isinstance(item, slice) and item.start is None and item.stop is None:
            return item
        here = tensor.shape[axis]
        if not isinstance(item, slice) or item.step not in (None, 1):
            raise CannotFollow(
                f"this indexes a split axis, which has {here} of {whole} elements on a rank",
                self._place(),
                self.origins.get(id(tensor)),
                "gather the value before, or split it with `split` or `chunk`",
            )
        # The whole model cuts the axis at these places; a rank cuts at its share of them.
        bounds = []
        for which in ("start", "stop"):
            bound = getattr(item, which)
            if bound is None or bound == 0:
                bounds.append(bound)
                continue
            packed = self.blocks.get(id(tensor), {}).get(axis, (whole,))
            cut = getattr(meant, which)
            if (cut if cut >= 0 else whole + cut) not in _borders(packed):
                raise CannotFollow(
                    f"this cuts a split axis at {int(cut)} of {whole}, inside a part",
                    self._place(),
                    self.origins.get(id(tensor)),
                    "shard with the `parts` that are meant here",
                )
            want = cut * here // whole
            if bound != want:
                self._change(tensor, bound, want, (number, which), SHARE, "this cuts at")
            bounds.append(want)
        return slice(bounds[0], bounds[1], item.step)

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


def _split_of(node: Node, layer: Layer) -> Split:
    """How a layer splits the module whose place it takes."""
    splits = (splits_of(node.cls) or {}).values()
    return next(split for split in splits if split.name == layer.name)


def _ratio(parts: Any) -> Shape:
    return (1,) * parts if isinstance(parts, int) else tuple(parts)


def _reduced(packed: Sequence[int]) -> Shape:
    """The blocks' sizes relative to each other; one block is `(1,)`."""
    common = math.gcd(*packed)
    return tuple(size // common for size in packed)


def _borders(pieces: Sequence[int]) -> set[int]:
    """Where pieces that lie side by side begin and end."""
    return set(itertools.accumulate(pieces, initial=0))


def _described(packed: Sequence[int]) -> str:
    if len(packed) == 1:
        return "one block"
    if len(set(packed)) == 1:
        return f"{len(packed)} equal parts"
    return f"parts of {list(packed)}"


def _key(key: Any) -> tuple[Any, ...]:
    """What stands between the brackets of an index, item by item."""
    return key if isinstance(key, tuple) else (key,)


def _axes_taken(key: Any) -> int:
    """How many axes one item of an index stands for."""
    if key is None or key is Ellipsis or isinstance(key, bool):
        return 0
    if isinstance(key, torch.Tensor) and key.dtype == torch.bool:
        return key.dim()
    return 1


def _moved_axis(
    name: str, args: Any, rank: int, axis: int, out_rank: int, shape: Shape, whole: Shape
) -> int | None:
    """Where an axis of an operand is in the result: counted from the right, unless axes move."""
    if name in ("transpose", "swapaxes", "transpose_") and len(args) == 3:
        first, second = args[1] % rank, args[2] % rank
        return int({first: second, second: first}.get(axis, axis))
    if name == "permute":
        order = args[1] if isinstance(args[1], (list, tuple)) else args[1:]
        return [int(a) % rank for a in order].index(axis)
    place = axis + out_rank - rank
    if 0 <= place < out_rank and whole[place] == shape[axis]:
        return place
    same = [i for i, size in enumerate(whole) if size == shape[axis]]
    return same[0] if len(same) == 1 else None
