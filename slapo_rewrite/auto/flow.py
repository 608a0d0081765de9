"""Finds which layers feed which others, by one step of a small model.

A layer's result is followed through all operations up to the layers that it reaches. Producers
that reach a common consumer belong together: either producers are split over their outputs and
consumers over their inputs, or none of them is. The elements of a module list are treated as one,
so the result does not grow with a model's depth.
"""

from __future__ import annotations

import contextlib
import itertools
import string
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from slapo_rewrite.code.effects import is_in_place
from slapo_rewrite.model.calls import calls_watched
from slapo_rewrite.model.layers import Split, splits_of
from slapo_rewrite.model.results import tensors
from slapo_rewrite.model.tree import CONTAINERS

# Functions that split a tensor along an axis; the sizes of the pieces show how it is packed.
_APART = {"chunk", "split", "split_with_sizes", "tensor_split", "unbind"}


@dataclass
class Passage:
    """How a layer was used in the step."""

    paths: set[str] = field(default_factory=set)  # the modules that match the pattern
    rows: int = 0  # number of input rows in all, each a vector of features
    width: int = 0  # number of input elements in all
    made: int = 0  # number of features of its result
    # Each way in which its result was split: the sizes of the pieces.
    pieces: list[tuple[int, ...]] = field(default_factory=list)


@dataclass
class Flow:
    """Which layers feed which others, by pattern."""

    # The layers that can be split over their outputs.
    layers: dict[str, Passage] = field(default_factory=dict)
    tables: dict[str, Passage] = field(default_factory=dict)  # embeddings that can be split
    # For each layer, the layers whose results reach it without another layer between.
    sources: dict[str, set[str]] = field(default_factory=dict)
    # For each other module with parameters of its own, the layers whose results reach it.
    between: dict[str, set[str]] = field(default_factory=dict)
    # The layers whose weights are also read outside their own calls.
    read: set[str] = field(default_factory=set)
    # The layers whose results reach the model's outputs.
    ends: set[str] = field(default_factory=set)
    # Patterns of lists whose elements feed one another within a layer, and are kept distinct.
    apart: frozenset[str] = frozenset()


def pattern_of(model: nn.Module, path: str, apart: Collection[str] = ()) -> str:
    """A path with `*` for the numbers of list elements that have modules inside.

    Numbered entries of a dictionary (`expert_0`) count as list elements. A layer may itself be a
    list, as in `nn.ModuleList([attention, feed_forward])`: its elements keep their numbers, and so
    do those of the lists `apart`, and what alone has modules inside, as in `nn.Sequential(norm,
    attention)`: other elements lack what is split there.
    """
    segments: list[str] = []
    module, is_layer = model, False
    for segment in path.split(".") if path else ():
        above, is_element = module, isinstance(module, CONTAINERS) and _is_number(segment, module)
        module = module.get_submodule(segment)
        if isinstance(module, CONTAINERS):
            whole = is_layer = is_element and are_layers(above)
        else:
            known = is_layer or ".".join(segments) in apart
            whole = is_element and not known and any(module.children()) and _has_like(above)
            is_layer = False
        segments.append("*" if whole else segment)
    return ".".join(segments)


def _has_like(container: nn.Module) -> bool:
    """Whether more than one element has modules inside, or there is no other element."""
    inside = [any(each.children()) for each in container.children()]
    return len(inside) == 1 or sum(inside) > 1


def _is_number(key: str, container: nn.Module) -> bool:
    """Whether a key of a container is just a number, or a name numbered among others."""
    stem = key.rstrip(string.digits)
    alike = (n for n, _ in container.named_children() if n.rstrip(string.digits) == stem)
    return key.isdigit() or (stem != key and len([*itertools.islice(alike, 2)]) > 1)


def are_layers(lists: nn.Module) -> bool:
    """Whether each element of a list is a list of different modules that together form a layer.

    They differ in class, or in the modules and shapes inside, in the same way in each layer. Stages
    of a backbone are sequences, too, but of other shapes.
    """
    kinds = [[type(inner) for inner in each.children()] for each in lists.children()]
    alike = all(isinstance(each, (nn.ModuleList, nn.Sequential)) for each in lists.children())
    if not alike or len({*map(len, kinds)}) != 1:
        return False
    held = [[_held(inner) for inner in each.children()] for each in lists.children()]
    several = len({*held[0]}) > 1 and all(each == held[0] for each in held)
    are_lists = all(isinstance(each, nn.ModuleList) for each in lists.children())
    return several or (are_lists and any(len({*each}) > 1 for each in kinds))


def _held(module: nn.Module) -> tuple[object, ...]:
    shapes = (parameter.shape for parameter in module.parameters())
    return (*map(type, module.modules()), *shapes)


def flow_of(model: nn.Module, inputs: Mapping[str, Any], full: nn.Module) -> Flow:
    """Follows one step of the model.

    Args:
        model: A small model, with weights.
        inputs: Keyword arguments of the step.
        full: The full model: lists with more elements there are those that grow with depth.
    """
    flow = _followed(model, inputs, frozenset())
    own = (_list_around(model, full, path) for p in flow.layers for path in _feeds_itself(flow, p))
    # A stack of whole layers is left as it is, since it is split inside each layer: its routers and
    # gates reach those of the next layer only through the residual stream.
    apart = frozenset(each for each in own if each and not _has_pairs(flow, model, each))
    return _followed(model, inputs, apart) if apart else flow


def told_apart(
    model: nn.Module, inputs: Mapping[str, Any], full: nn.Module, stages: Collection[str]
) -> Flow | None:
    """The same, where elements of lists of stages are each a node; None where none may be."""
    alike = frozenset(path for path in stages if _list_around(model, full, path) == path)
    return _followed(model, inputs, alike) if alike else None


def _feeds_itself(flow: Flow, pattern: str) -> list[str]:
    """The modules of a pattern if results of some reach others; else none."""
    return sorted(flow.layers[pattern].paths) if pattern in flow.sources[pattern] else []


def _has_pairs(flow: Flow, model: nn.Module, listed: str) -> bool:
    """Whether a list's elements contain layers that feed a consumer to be split with them."""
    inside = f"{listed}.*."
    for consumer, sources in flow.sources.items():
        module = model.get_submodule(min(flow.layers[consumer].paths))
        is_fed_inside = consumer not in sources and all(s.startswith(inside) for s in sources)
        takes_parts = any(map(is_row, (splits_of(module) or {}).values()))
        if consumer.startswith(inside) and sources and is_fed_inside and takes_parts:
            return True
    return False


def _list_around(model: nn.Module, full: nn.Module, path: str) -> str | None:
    """The pattern of the innermost list around a layer, if it is as long in both models."""
    while path and not isinstance(model.get_submodule(path), CONTAINERS):
        path = path.rpartition(".")[0]
    try:
        counts = {len([*m.get_submodule(path).children()]) for m in (model, full)}
    except AttributeError:
        return None
    return pattern_of(model, path) if path and len(counts) == 1 else None


def _followed(model: nn.Module, inputs: Mapping[str, Any], apart: frozenset[str]) -> Flow:
    recorder = _Recorder(model, apart)
    with torch.enable_grad(), recorder.watching(), recorder:
        outputs = model(**inputs)
    for tensor in tensors(outputs):
        recorder.flow.ends |= recorder.of(tensor)
    return recorder.flow


class _Recorder(TorchFunctionMode):
    """Records for each tensor which layers' results it depends on."""

    def __init__(self, model: nn.Module, apart: frozenset[str]) -> None:
        super().__init__()
        self.model, self.flow, self.depth = model, Flow(apart=apart), 0
        self._made: dict[int, frozenset[str]] = {}
        self._alive: list[torch.Tensor] = []
        # By the id of a layer's weight: the pattern, and the hooks before and after its call.
        self._spelled: dict[int, tuple[str, Any, Any]] = {}
        self._slices: dict[int, set[tuple[int, int, int]]] = {}  # slices of features, by tensor

    def of(self, tensor: torch.Tensor) -> frozenset[str]:
        """The layers whose results a tensor depends on."""
        return self._made.get(id(tensor), frozenset())

    def _sources(self, values: Any) -> frozenset[str]:
        return frozenset().union(*(self.of(tensor) for tensor in tensors(values)))

    def _note(self, values: Any, made: frozenset[str]) -> None:
        for tensor in tensors(values):
            self._made[id(tensor)] = made
            self._alive.append(tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.depth and func is nn.functional.linear:
            weight = kwargs["weight"] if "weight" in kwargs else args[1]
            if id(weight) in self._spelled:  # `F.linear(x, self.qkv.weight)` calls the layer
                _, enter, leave = self._spelled[id(weight)]
                enter(None, args, kwargs)
                leave(None, args, output := func(*args, **kwargs))
                return output
        output = func(*args, **kwargs)
        if not self.depth:
            given = {id(tensor) for tensor in tensors((args, kwargs))}
            self.flow.read |= {self._spelled[each][0] for each in given & self._spelled.keys()}
            made = self._sources((args, kwargs))
            if made:
                name = getattr(func, "__name__", "")
                if name == "__setitem__" or is_in_place(name):
                    self._note(args[:1], made)
                self._note(output, made)
                if len(made) == 1 and name in _APART:
                    self._note_pieces(next(iter(made)), args[0], output)
                elif len(made) == 1 and name == "__getitem__" and type(args[1]) is int:
                    self._note_equal(next(iter(made)), len(args[0]))  # `qkv[0]`
                elif len(made) == 1 and name == "__getitem__" and type(args[1]) is tuple:
                    self._note_slice(next(iter(made)), args[0], args[1])  # `qkv[..., :d]`
        return output

    def _note_pieces(self, layer: str, tensor: torch.Tensor, pieces: Any) -> None:
        shapes = [tuple(piece.shape) for piece in tensors(pieces)]
        known, made = self.flow.layers[layer].pieces, self.flow.layers[layer].made
        # The pieces of `unbind` are equal, and have one axis less.
        axes = enumerate(zip(*shapes, strict=True) if len(shapes[0]) == tensor.dim() else ())
        for axis, sizes in axes:
            if len(sizes) < 2 or sum(sizes) != tensor.shape[axis]:
                continue
            if axis == tensor.dim() - 1 and sum(sizes) != made:
                return  # a split within a head, such as rotary halves
            if sizes not in known:
                known.append(sizes)
        if len({*shapes}) == 1:
            self._note_equal(layer, len(shapes))

    def _note_slice(self, layer: str, tensor: torch.Tensor, index: tuple[Any, ...]) -> None:
        last, size = index[-1] if index else None, tensor.shape[-1]
        is_whole = len(index) == tensor.dim() or any(each is Ellipsis for each in index)
        passage = self.flow.layers[layer]
        if size != passage.made or not is_whole or not isinstance(last, slice):
            return  # a slice within one head, or along another axis
        ends = self._slices.setdefault(id(tensor), set())
        ends.add(last.indices(size))
        ordered = sorted(ends)
        follow = [(0, 0, 1), *ordered, (size, size, 1)]
        if all(one[1] == other[0] and other[2] == 1 for one, other in itertools.pairwise(follow)):
            sizes = tuple(stop - start for start, stop, _ in ordered)
            if len(sizes) > 1 and sizes not in passage.pieces:
                passage.pieces.append(sizes)

    def _note_equal(self, layer: str, count: int) -> None:
        known = self.flow.layers[layer].pieces
        if (equal := (1,) * count) not in known:
            known.append(equal)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Records calls of layers, without the operations inside them."""
        watched = []
        for path, module in self.model.named_modules():
            if path and any(True for _ in module.parameters(recurse=False)):
                pattern = pattern_of(self.model, path, self.flow.apart)
                if is_table(module) or any(map(is_column, (splits_of(module) or {}).values())):
                    watched.append((module, *self._of_layer(module, pattern, path)))
                    self._spelled[id(module.weight)] = (pattern, *watched[-1][1:])
                else:
                    watched.append((module, self._of_other(pattern), None))
        with calls_watched(watched):
            yield

    def _of_layer(self, module: nn.Module, pattern: str, path: str) -> tuple[Any, Any]:
        looks_up = is_table(module)
        kinds = self.flow.tables if looks_up else self.flow.layers

        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self.depth += 1
            if self.depth > 1:
                return
            passage = kinds.setdefault(pattern, Passage())
            passage.paths.add(path)
            given = next(iter(tensors((args, kwargs))), None)
            if given is not None:
                passage.width += given.numel()
                passage.rows += given.numel() // max(1, given.shape[-1] if not looks_up else 1)
            if not looks_up:
                self.flow.sources.setdefault(pattern, set()).update(self._sources((args, kwargs)))

        def leave(_: nn.Module, args: Any, output: Any) -> None:
            self.depth -= 1
            if not self.depth:
                self._note(output, frozenset() if looks_up else frozenset({pattern}))
                if (result := next(iter(tensors(output)), None)) is not None and result.dim():
                    kinds[pattern].made = result.shape[-1]

        return enter, leave

    def _of_other(self, pattern: str) -> Any:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            if not self.depth:
                found = self._sources((args, kwargs))
                self.flow.between.setdefault(pattern, set()).update(found)

        return enter


def is_table(module: nn.Module) -> bool:
    """Whether a layer is an embedding whose rows can be split."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return isinstance(module, kinds) and ("weight", 0) in (splits_of(module) or {})


def is_column(split: Split) -> bool:
    """Whether a layer with this split takes full values and returns shards."""
    return split.output == "partition" and not split.takes_part


def is_row(split: Split) -> bool:
    """Whether a layer with this split takes shards and returns partial sums."""
    return split.output == "partial sum" and split.takes_part


def components(flow: Flow) -> list[tuple[frozenset[str], frozenset[str]]]:
    """The connected components of producers and the consumers that they reach.

    If a layer is both, the roles alternate in the order in which the layers run: one that gets
    shards is a consumer, and returns full values to the next producers, as in a state-space block.
    A second reading makes it a producer, whose own producers stay whole, as in low-rank attention.
    """
    found: list[tuple[set[str], set[str]]] = []
    for consumer, producers in flow.sources.items():
        if not producers:
            continue
        given, taken = set(producers), {consumer}
        apart = []
        for known in found:
            if known[0] & given:
                given |= known[0]
                taken |= known[1]
            else:
                apart.append(known)
        found = [*apart, (given, taken)]
    turns = [
        _in_turns(flow, given, taken) if given & taken else (given, taken) for given, taken in found
    ]
    for given, taken in found:
        feeding = set[str]().union(*(flow.sources[layer] for layer in given & taken))
        if feeding and given - feeding and taken - given:
            turns.append((given - feeding, taken - given))
    return [*dict.fromkeys((frozenset(given), frozenset(taken)) for given, taken in turns)]


def together(
    found: Iterable[tuple[frozenset[str], frozenset[str]]], maker: Callable[[str], object | None]
) -> list[tuple[frozenset[str], frozenset[str]]]:
    """The components, merged if layers of them have the same maker: it builds all of them alike.

    They are not merged if a layer is a producer in one and a consumer in the other.
    """
    merged: list[tuple[frozenset[str], frozenset[str], frozenset[object]]] = []
    for given, taken in found:
        makers = frozenset(m for p in (*given, *taken) if (m := maker(p)) is not None)
        apart = []
        for known in merged:
            if known[2] & makers and not (known[0] | given) & (known[1] | taken):
                given, taken, makers = known[0] | given, known[1] | taken, known[2] | makers
            else:
                apart.append(known)
        merged = [*apart, (given, taken, makers)]
    return [(given, taken) for given, taken, _ in merged]


def _in_turns(flow: Flow, given: set[str], taken: set[str]) -> tuple[set[str], set[str]]:
    """The producers of a component, and the consumers of their shards, by turns."""
    producers: set[str] = set()
    for layer in flow.sources:  # in the order of the calls
        if layer in given | taken and not flow.sources[layer] & producers:
            producers.add(layer)
    consumers = taken - producers
    return (producers & given, consumers) if consumers else (given, taken)
