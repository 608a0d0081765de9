# Written by slapo-rewrite 0.1.0 for modeling_bert.py; rewrite.json says from what.
"""Tensor-parallel layers: each rank holds a part, the group behaves like the whole.

Shapes: B batch, T tokens, D features in, F features out, V vocabulary. A prime (F')
marks the part that this rank holds.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

_group = None
# Its ranks; none where it holds all that there are.
_ranks: tuple[int, ...] = ()
# How many ranks there are inside `world_of`, and which of them this is.
_supposed: tuple[int, int] | None = None


def set_group(group: dist.ProcessGroup | None) -> None:
    """Names the tensor-parallel process group. Call it before the model is built.

    Without it the group is the default one where `torch.distributed` is initialised,
    and a world of one where it is not.

    A model belongs to the group that it is built in. It runs while that one is named:
    with several, name a model's own before it runs.
    """
    global _group, _ranks
    _group, _ranks = group, ()
    if group is not None and dist.get_world_size(group) < dist.get_world_size():
        _ranks = tuple(dist.get_process_group_ranks(group))


@contextmanager
def in_group(group: dist.ProcessGroup | None, ranks: tuple[int, ...]) -> Iterator[None]:
    """Inside, another group is the one that is named."""
    global _group, _ranks
    before = _group, _ranks
    _group, _ranks = group, ranks
    try:
        yield
    finally:
        _group, _ranks = before


@contextmanager
def world_of(size: int, rank: int = 0) -> Iterator[None]:
    """Inside, layers are made as on one of so many ranks, which need not be there.

    In a world of one they are made whole.
    """
    global _supposed
    before, _supposed = _supposed, (size, rank)
    try:
        yield
    finally:
        _supposed = before


def world_size() -> int:
    """How many ranks share the model's layers."""
    if _supposed is not None:
        return _supposed[0]
    return dist.get_world_size(_group) if dist.is_initialized() else 1


def rank() -> int:
    """This process's place in the tensor-parallel group."""
    if _supposed is not None:
        return _supposed[1]
    return dist.get_rank(_group) if dist.is_initialized() else 0


def part_size(size: int, multiple_of: int = 1) -> int:
    """This rank's share of `size`, which must divide evenly in units of `multiple_of`.

    Raises:
        ValueError: `size` does not divide over this many ranks.
    """

    def fits(ranks: int) -> bool:
        return ranks == 1 or size % (ranks * multiple_of) == 0

    world = world_size()
    if not fits(world):
        largest = max(filter(fits, range(1, world)))
        heads = f" = {size / multiple_of:g} heads of {multiple_of}"
        raise ValueError(
            f"{size}{heads if multiple_of > 1 else ''} does not divide over {world} ranks; "
            f"the largest tensor-parallel size below {world} that fits is {largest}"
        )
    return size // world


def part_sizes(size: int, multiple_of: int = 0) -> list[int]:
    """Every rank's share of `size`: as even as possible, the larger shares first.

    Shares in units of `multiple_of` must be even.

    Raises:
        ValueError: `size` cannot be shared by this many ranks.
    """
    world = world_size()
    if multiple_of:
        return [part_size(size, multiple_of)] * world
    if size < world:
        raise ValueError(
            f"{size} cannot be shared by {world} ranks; "
            f"the largest tensor-parallel size that fits is {size}"
        )
    share, rest = divmod(size, world)
    return [share + (r < rest) for r in range(world)]


# What is packed along an axis: how many equal blocks, or the blocks' relative sizes,
# such as (4, 1, 1), or what gives these for the whole axis's size.
Parts = int | Sequence[int] | Callable[[int], Sequence[int]]


def block_sizes(size: int, parts: Parts) -> tuple[int, ...]:
    """Sizes of the blocks packed along an axis of `size`.

    Args:
        size: The whole axis.
        parts: The blocks.

    Raises:
        ValueError: `size` does not divide into such blocks.
    """
    given = parts(size) if callable(parts) else parts
    ratio = (1,) * given if isinstance(given, int) else tuple(given)
    if size % sum(ratio):
        raise ValueError(
            f"{size} does not divide into blocks of relative sizes {ratio}: "
            f"it is not a multiple of {sum(ratio)}"
        )
    return tuple(size // sum(ratio) * r for r in ratio)


@dataclass(frozen=True)
class Shard:
    """How a tensor is divided over the ranks.

    Attributes:
        axis: The axis that is divided.
        blocks: Full sizes of the blocks packed along the axis, ordinarily one. Every
            rank holds a part of each block.
        multiple_of: What equal parts are multiples of, a head say; 0: they may differ.
        group: How many ranks there were when this was made, and which the group had.
    """

    axis: int
    blocks: tuple[int, ...]
    multiple_of: int = 0
    group: tuple[int, tuple[int, ...]] = field(
        default_factory=lambda: (world_size(), _ranks), compare=False
    )

    def check_group(self) -> None:
        """Refuses another group than the one that the tensor is divided over.

        Raises:
            RuntimeError: It is another.
        """
        if self.group != (world_size(), _ranks) and _supposed is None:
            raise RuntimeError(
                f"this model was built in a tensor-parallel group of {self.group[0]}, and "
                f"another of {world_size()} is named now: call `set_group` with its own "
                "group before it runs, and `init_process_group` before it is built"
            )

    def full_size(self) -> int:
        """The axis's size in the full tensor."""
        return sum(self.blocks)

    def sizes(self) -> list[list[int]]:
        """Sizes of the pieces that each rank holds, one for each block."""
        self.check_group()
        by_block = [part_sizes(size, self.multiple_of) for size in self.blocks]
        return [[sizes[r] for sizes in by_block] for r in range(world_size())]

    def ranges(self) -> list[tuple[int, int]]:
        """Where this rank's pieces lie on the full axis, one for each block."""
        found, start = [], 0
        for block, size in enumerate(self.blocks):
            before = sum(sizes[block] for sizes in self.sizes()[: rank()])
            length = self.sizes()[rank()][block]
            found.append((start + before, start + before + length))
            start += size
        return found

    def local_size(self) -> int:
        """The axis's size in this rank's part."""
        return sum(self.sizes()[rank()])

    def is_first(self) -> bool:
        """Whether no rank before this one holds the same part."""
        return True

    def is_full(self, tensor: Tensor) -> bool:
        """Whether `tensor` has the full tensor's size along the axis."""
        return tensor.shape[self.axis : self.axis + 1] == (self.full_size(),)

    def cut(self, full: Tensor) -> Tensor:
        """This rank's part of a full tensor."""
        if world_size() == 1:
            return full
        pieces = [full.narrow(self.axis, a, b - a) for a, b in self.ranges()]
        return torch.cat(pieces, self.axis)

    def gather(self, part: Tensor) -> Tensor:
        """The full tensor, on every rank, from the parts that the ranks hold."""
        self.check_group()
        if world_size() == 1:
            return part
        sizes = [sum(pieces) for pieces in self.sizes()]
        return self.joined(gather_parts(part, self.axis, sizes))

    def joined(self, parts: list[Tensor]) -> Tensor:
        """The full tensor, from the parts of all ranks."""
        sizes = self.sizes()
        pieces = [torch.split(p, sizes[r], self.axis) for r, p in enumerate(parts)]
        by_block = [p[block] for block in range(len(self.blocks)) for p in pieces]
        return torch.cat(by_block, self.axis)


def gather_parts(part: Tensor, axis: int, sizes: list[int]) -> list[Tensor]:
    """Every rank's part, given the ranks' sizes along `axis`."""
    part = part.detach().contiguous()
    # gloo gathers parts of one size only, so pad to the largest and cut again.
    if min(sizes) < max(sizes):
        padding = list(part.shape)
        padding[axis] = max(sizes) - part.shape[axis]
        part = torch.cat([part, part.new_empty(padding)], axis)
    parts = [torch.empty_like(part) for _ in sizes]
    dist.all_gather(parts, part, group=_group)
    return [p.narrow(axis, 0, sizes[r]) for r, p in enumerate(parts)]


def sum_parts(x: Tensor) -> Tensor:
    """The sum of the ranks' tensors, in a new tensor."""
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=_group)
    return x


def max_of_parts(x: Tensor) -> Tensor:
    """The largest of the ranks' tensors, element by element, in a new tensor."""
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, dist.ReduceOp.MAX, group=_group)
    return x


def sum_and_cut(x: Tensor, shard: Shard) -> Tensor:
    """This rank's part of the sum of the ranks' tensors."""
    if len(shard.blocks) > 1 or shard.full_size() % world_size():
        return shard.cut(sum_parts(x))
    x = x.movedim(shard.axis, 0).contiguous()
    part = x.new_empty(shard.local_size(), *x.shape[1:])
    # The name in torch 2.13, which warns of the old one.
    run = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    run(part, x, group=_group)
    return part.movedim(0, shard.axis).contiguous()


def unchanged(x: Tensor) -> Tensor:
    """The tensor itself."""
    return x


class _Collective(torch.autograd.Function):
    """Runs one function on a tensor and another on its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        run: Callable[[Tensor], Tensor],
        run_gradient: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.run, ctx.run_gradient = run, run_gradient
        ctx.group, ctx.ranks = _group, _ranks
        return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        with in_group(ctx.group, ctx.ranks):
            return collective(gradient, ctx.run_gradient, ctx.run), None, None


def collective(
    x: Tensor,
    run: Callable[[Tensor], Tensor],
    run_gradient: Callable[[Tensor], Tensor],
) -> Tensor:
    """`run(x)`, with `run_gradient` applied to its gradient; `x` in a world of one."""
    if world_size() == 1:
        return x
    apply: Callable[..., Tensor] = _Collective.apply
    return apply(x, run, run_gradient)


def all_reduce(x: Tensor) -> Tensor:
    """Sums the ranks' partial results; the gradient passes unchanged."""
    return collective(x, sum_parts, unchanged)


def all_reduce_gradient(x: Tensor) -> Tensor:
    """Passes `x` unchanged; sums the gradients that the ranks have for it."""
    return collective(x, unchanged, sum_parts)


def all_gather(
    x: Tensor,
    axis: int = -1,
    full_size: int | None = None,
    tensor_parallel_output_grad: bool = False,
) -> Tensor:
    """Concatenates the ranks' parts; the gradient is this rank's slice.

    Args:
        x: This rank's part.
        axis: The axis to concatenate along.
        full_size: The axis's size in the result. Without it all parts have one size.
        tensor_parallel_output_grad: The ranks go on to compute different things, so
            their gradients are summed before they are sliced.
    """
    shard = Shard(axis, (full_size or x.shape[axis] * world_size(),))
    cut = (
        partial(sum_and_cut, shard=shard) if tensor_parallel_output_grad else shard.cut
    )
    return collective(x, shard.gather, cut)


def record_shard(module: Any, name: str, shard: Shard) -> None:
    """Notes that `module.<name>` is this rank's part of a tensor divided by `shard`.

    The note stands on the module since parameters may be replaced (`to_empty`, FSDP).
    From then on `load_state_dict` takes the full tensor and keeps this rank's part.
    """
    if world_size() > 1:
        watch_registrations()
    if not hasattr(module, "sharded_parameters"):
        module.sharded_parameters, module.parts_differ = {}, False
        module.register_state_dict_post_hook(_note_whose_parts)
        module.register_load_state_dict_pre_hook(_cut_full_tensors)
        module.register_load_state_dict_post_hook(_mark_parameters)
    module.sharded_parameters[name] = shard
    _mark_parameters(module)


@cache
def watch_registrations() -> Any:
    """From the first call on, what is put into a module is looked at first."""
    return register_module_module_registration_hook(refuse_wrappers)


def refuse_wrappers(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Refuses to put into `parent` what would train other weights than the model's.

    Has a parent that can save itself refuse to save parts.

    Raises:
        RuntimeError: An adapter or a parametrization comes to a layer that works on
            parts, or the ranks that hold the parts are taken for replicas.
    """
    if module is None or world_size() == 1:
        return
    # `parametrizations` is what `torch.nn.utils.parametrize` puts into a layer first.
    if name == "parametrizations":
        refused = hasattr(parent, "sharded_parameters")
    else:
        refused = is_adapter(module, dict(parent.named_children()).get(name))
    if refused:
        raise RuntimeError(
            f"`{name}` of `{type(parent).__name__}` works on this rank's part: each rank "
            "would train other parameters beside it. Adapters (LoRA) and parametrizations "
            "of such layers are trained in one process; leave the layer out of them here"
        )
    if hasattr(type(parent), "save_pretrained") and parts_in(module):
        vars(parent)["save_pretrained"] = partial(_save_whole, parent)
    replicas = vars(parent).get("process_group")
    if isinstance(replicas, dist.ProcessGroup) and parts_in(module):
        ranks = dist.get_process_group_ranks
        if len({*ranks(replicas)} & {*ranks(_group)}) > 1:
            raise RuntimeError(
                f"`{type(parent).__name__}` would take the tensor-parallel ranks for "
                "replicas and copy one rank's parts over those of the others: give it the "
                "data-parallel group. Without replicas train the model itself, and not by "
                "Trainer or accelerate, which know no other group"
            )


def is_adapter(module: nn.Module, layer: Any) -> bool:
    """Whether a module adds parameters to a layer that works on parts, which it holds."""
    if not hasattr(layer, "sharded_parameters") or layer not in module.modules():
        return False
    return not {*module.parameters()} <= {*layer.parameters()}


def check_parts(layer: Any) -> None:
    """Refuses to run a layer in another group than its own, or of which ranks have copies.

    Where the first run finds the same weights on every rank, something has copied one
    rank's part over those of the others, or all have drawn the same numbers.

    Raises:
        RuntimeError: It is so.
    """
    layer.sharded_parameters["weight"].check_group()
    if world_size() == 1 or _supposed is not None:
        return
    weight = layer.weight.detach()
    known = layer.parts_differ or weight.is_meta or hasattr(weight, "full_tensor")
    if known or torch.compiler.is_compiling() or dist.get_backend(_group) == "fake":
        return
    layer.parts_differ = True
    if not weight.numel() or weight.min() == weight.max():
        weight = weight.new_tensor([rank()])  # what is constant may well be alike
    first = layer.sharded_parameters["weight"].is_first()
    total = weight.sum(dtype=torch.float64), weight.float().norm().double()
    place = torch.tensor(float(first), dtype=torch.float64, device=weight.device)
    found = gather_parts(torch.stack([*total, place]), 0, [3] * world_size())
    parts = [tuple(each[:2].tolist()) for each in found if each[2]]
    if len(parts) > 1 and len(set(parts)) == 1:
        raise RuntimeError(
            "all ranks have the same part of the weights. Did DeepSpeed take the tensor-"
            "parallel ranks for replicas (give it `mpu`), or a checkpoint keep one rank's "
            "`state_dict()` (save `loading.full_state_dict(model)`)? A new model begins "
            "with `loading.build`"
        )


def _note_whose_parts(
    module: Any, state_dict: Any, prefix: str, metadata: dict[str, Any]
) -> None:
    """In a state dict: notes which of how many ranks the parts belong to.

    Raises:
        RuntimeError: They are on the meta device, as when transformers' `from_pretrained`,
            which cuts nothing, asks for the names of what it is to read.
    """
    if world_size() == 1:
        return
    metadata["part"] = rank(), world_size()
    for name in module.sharded_parameters:
        part = state_dict.get(prefix + name)
        if hasattr(part, "to_local"):  # FSDP2's, which asks what it holds
            with torch.no_grad():
                part = part.to_local()
        if type(part) is Tensor and part is not getattr(module, name):
            if part.is_meta:
                raise RuntimeError(
                    "`from_pretrained` reads whole tensors, and this rank holds parts: "
                    "build the model and use `loading.load_pretrained(model, path)`, which "
                    "is there if the model was rewritten `--with load_pretrained`"
                )
            # The checkpoint asks the one first; the other keeps both out of pickles.
            vars(part).update(
                __create_write_items__=_refuse_checkpoint, __getstate__=dict
            )


def _refuse_checkpoint(name: str, part: Tensor) -> None:
    """Stops torch.distributed.checkpoint from keeping one rank's part as the whole.

    Raises:
        RuntimeError: Always.
    """
    raise RuntimeError(
        f"`{name}` is this rank's part, and torch.distributed.checkpoint would keep one "
        "rank's part only: save `loading.full_state_dict(model)`, on every rank"
    )


def _cut_full_tensors(
    module: Any, state_dict: dict[str, Any], prefix: str, metadata: Any, *_: object
) -> None:
    """Before loading: replaces full tensors by this rank's parts of them.

    Raises:
        ValueError: There are parts of another rank, or something that is neither full
            nor known to be this rank's part.
    """
    part_of, here = metadata.get("part"), (rank(), world_size())
    if part_of is None and here[1] == 1:
        return
    for name, shard in module.sharded_parameters.items():
        tensor = state_dict.get(prefix + name)
        if not isinstance(tensor, Tensor) or part_of == here:
            continue
        if part_of is not None:
            raise ValueError(
                f"`{prefix}{name}` is the part of rank {part_of[0]} of {part_of[1]}, and "
                f"this is rank {here[0]} of {here[1]}: save `loading.full_state_dict(model)`, "
                "or let each rank load what it saved"
            )
        if shard.is_full(tensor):
            state_dict[prefix + name] = shard.cut(tensor.detach())
        elif tensor.shape == getattr(module, name).shape and not keeps_parts(
            module, tensor
        ):
            raise ValueError(
                f"`{prefix}{name}` is {list(tensor.shape)}: axis {shard.axis} of the full "
                f"tensor has {shard.full_size()} elements. Parts are taken from what "
                "`state_dict()` returned on this rank, not from a copy without its metadata"
            )


def keeps_parts(module: Any, tensor: Tensor) -> bool:
    """Whether a tensor of a part's size is known to be one: FSDP2 or DeepSpeed kept it."""
    return hasattr(tensor, "full_tensor") or getattr(module, "takes_parts", False)


def _save_whole(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The model's own `save_pretrained`, of full tensors.

    Raises:
        RuntimeError: It would write the parts of one of several ranks.
    """
    given = args[2] if len(args) > 2 else kwargs.get("state_dict")
    notes = getattr(given, "_metadata", {}).values()
    if world_size() > 1 and (given is None or any("part" in each for each in notes)):
        raise RuntimeError(
            "`model.save_pretrained` would write this rank's parts only: use "
            "`loading.save_pretrained(model, path)` on every rank, which is there if the "
            "model was rewritten `--with save_pretrained`"
        )
    return type(model).save_pretrained(model, *args, **kwargs)


def _mark_parameters(module: Any, *_: object) -> None:
    """Marks sharded parameters, also those that loading has replaced."""
    module.parts_differ = False  # as far as is known
    for name, shard in module.sharded_parameters.items():
        parameter = getattr(module, name)
        if parameter is None:  # another pipeline stage holds it
            continue
        # DeepSpeed counts a parameter in the gradient norm on every rank if it is so
        # marked, else on the first rank only.
        parameter.model_parallel = shard.is_first()


def parts_in(model: nn.Module) -> dict[int, Shard]:
    """How the model's parameters and buffers are divided, by the tensors' ids."""
    return {
        id(getattr(module, name)): shard
        for module in model.modules()
        for name, shard in getattr(module, "sharded_parameters", {}).items()
    }


def clip_grad_norm_(
    model: nn.Module | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scales the gradients so that the whole model's norm is `max_norm` at most.

    `torch.nn.utils.clip_grad_norm_` would scale by the norm of a rank's own parts, and
    what all ranks have a copy of would drift apart. Every rank calls this one.

    Args:
        model: The model, or its parameters where they are the tensors it was built with.
        max_norm: The largest norm.
        norm_type: Its exponent; may be infinite.
        error_if_nonfinite: Raise where the norm is not finite.
        foreach: As in torch.

    Returns:
        The norm before, the same on every rank.

    Raises:
        RuntimeError: The norm is not finite.
        ValueError: None of the parameters is known to be a part.
    """
    if isinstance(model, nn.Module):
        divided = parts_in(model)
        parameters: list[Any] = list(model.parameters())
        firsts = {
            id(p): divided[id(p)].is_first() for p in parameters if id(p) in divided
        }
    else:
        parameters = [model] if isinstance(model, Tensor) else list(model)
        marked = [p for p in parameters if hasattr(p, "model_parallel")]
        firsts = {id(p): p.model_parallel for p in marked}
        if world_size() > 1 and not marked:
            raise ValueError(
                "none of these parameters is known to be a part: `copy.deepcopy` and FSDP2 "
                "make others; give the model itself"
            )
    parameters = [p for p in parameters if p.grad is not None]
    counted = [p.grad for p in parameters if firsts.get(id(p), rank() == 0)]
    norm: Any = nn.utils.get_total_norm(counted, norm_type, foreach=foreach)
    if hasattr(norm, "full_tensor"):  # FSDP2 divides gradients over the replicas
        norm = norm.full_tensor()
    if parameters and world_size() > 1:
        norm = norm.to(parameters[0].grad.device)
        if norm_type == float("inf"):
            norm = max_of_parts(norm)
        else:
            norm = sum_parts(norm**norm_type) ** (1 / norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"the norm of the gradients is {float(norm)}")
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach)
    return norm  # type: ignore[no-any-return]


def shard_parameter(
    module: nn.Module,
    name: str,
    axis: int,
    *,
    parts: Parts = 1,
    multiple_of: int = 0,
) -> None:
    """Cuts the parameter or buffer `module.<name>` down to this rank's part.

    Args:
        module: The module that holds it.
        name: Its name there.
        axis: The axis to divide.
        parts: Blocks packed along the axis, as in `block_sizes`.
        multiple_of: What equal parts are multiples of; 0: they may differ.
    """
    tensor = getattr(module, name)
    axis = axis % tensor.dim()
    shard = Shard(axis, block_sizes(tensor.shape[axis], parts), multiple_of)
    # In place, so that whatever else is tied to the parameter stays tied.
    tensor.data = shard.cut(tensor.data)
    record_shard(module, name, shard)


def gather_if_sharded(y: Tensor, shard: Shard | None) -> Tensor:
    """The ranks' outputs put together, whose gradient is this rank's slice."""
    return y if shard is None else collective(y, shard.gather, shard.cut)


class OwnSize:
    """A size of this rank's part, which only the layer's constructor sets."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        return self if layer is None else vars(layer)[self.name]

    def __set__(self, layer: Any, size: int) -> None:
        if vars(layer).get(self.name, size) != size and world_size() > 1:
            raise RuntimeError(
                f"`{self.name}` is this rank's part and would no longer fit those of the "
                "others: call `resize_token_embeddings` on the original, in one process, "
                "and load what it saves"
            )
        vars(layer)[self.name] = size


class ColumnParallelLinear(nn.Linear):
    """A linear layer split over its output features: (..., D) -> (..., F').

    Args:
        in_features: D.
        out_features: F, of the whole layer; the attribute of that name is F', and
            `full_out_features` is F.
        bias: Whether a bias is added.
        device: Where the parameters are made.
        dtype: Their type.
        parts: Blocks packed along the output, as in `block_sizes`.
        multiple_of: What equal shares of a block are multiples of; 0: they may differ.
        reduce_input_gradient: Sum the input's gradient over the ranks. Off where
            that is done once for several layers.
        gather_output: Return (..., F) on every rank.
    """

    out_features = OwnSize()

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        parts: Parts = 1,
        multiple_of: int = 0,
        reduce_input_gradient: bool = True,
        gather_output: bool = False,
    ) -> None:
        shard = Shard(0, block_sizes(out_features, parts), multiple_of)
        super().__init__(in_features, shard.local_size(), bias, device, dtype)
        self.full_out_features = out_features
        self.reduce_input_gradient = reduce_input_gradient
        self.output_shard = replace(shard, axis=-1) if gather_output else None
        record_shard(self, "weight", shard)
        if bias:
            record_shard(self, "bias", shard)

    def forward(self, input: Tensor) -> Tensor:
        """Maps (..., D) to (..., F'), or to (..., F) with `gather_output`."""
        check_parts(self)
        if self.reduce_input_gradient:
            input = all_reduce_gradient(input)
        return gather_if_sharded(super().forward(input), self.output_shard)


# Makes the sum of the ranks' partial outputs, and adds the bias (None: there is none).
Reduction = Callable[[Tensor, Tensor | None], Tensor]


def sum_now(y: Tensor, bias: Tensor | None) -> Tensor:
    """The sum of the ranks' partial outputs on every rank, with the bias added to it."""
    y = all_reduce(y)
    return y if bias is None else y + bias.to(y.dtype)


class RowParallelLinear(nn.Linear):
    """A linear layer split over its input features: (..., D') -> (..., F).

    Args:
        in_features: D, of the whole layer; the attribute of that name is D'.
        out_features: F.
        bias: Whether a bias is added.
        device: Where the parameters are made.
        dtype: Their type.
        parts: Blocks packed along the input, as in `block_sizes`.
        multiple_of: What equal shares of a block are multiples of; 0: they may differ.
        reduce: Adds up the ranks' partial outputs, and the bias to the sum.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        parts: Parts = 1,
        multiple_of: int = 0,
        reduce: Reduction = sum_now,
    ) -> None:
        shard = Shard(1, block_sizes(in_features, parts), multiple_of)
        super().__init__(shard.local_size(), out_features, bias, device, dtype)
        self.reduce = reduce
        record_shard(self, "weight", shard)

    def forward(self, input: Tensor) -> Tensor:
        """Maps (..., D') to (..., F), added up as `reduce` does it."""
        check_parts(self)
        if world_size() == 1:
            return super().forward(input)
        return self.reduce(nn.functional.linear(input, self.weight), self.bias)


class VocabParallelEmbedding(nn.Embedding):
    """An embedding split over its vocabulary: ids (B, T) -> (B, T, D).

    Args:
        num_embeddings: V, of the whole table; the attribute of that name is V'.
        embedding_dim: D.
        padding_idx: The id whose row gets no gradient. The attribute is that row in
            this rank's part, None where another rank holds it.
        device: Where the table is made.
        dtype: Its type.
        reduce: Adds up what the ranks find.
    """

    num_embeddings = OwnSize()

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduce: Reduction = sum_now,
    ) -> None:
        sizes = part_sizes(num_embeddings)
        first_id = sum(sizes[: rank()])
        if padding_idx is not None:
            padding_idx = range(num_embeddings)[padding_idx] - first_id
            if not 0 <= padding_idx < sizes[rank()]:
                padding_idx = None
        super().__init__(
            sizes[rank()], embedding_dim, padding_idx, device=device, dtype=dtype
        )
        self.first_id = first_id
        self.full_num_embeddings = num_embeddings
        self.reduce = reduce
        record_shard(self, "weight", Shard(0, (num_embeddings,)))

    def forward(self, input: Tensor) -> Tensor:
        """Looks up ids; what the ranks find is added up as `reduce` does it."""
        check_parts(self)
        if world_size() == 1:
            return super().forward(input)
        end_id = self.first_id + self.weight.shape[0]
        # Ids that no rank holds are not masked: they fail as in `nn.Embedding`.
        elsewhere = (input >= 0) & (input < self.first_id)
        elsewhere |= (input >= end_id) & (input < self.full_num_embeddings)
        x = super().forward((input - self.first_id).masked_fill(elsewhere, 0))
        x = x.masked_fill(elsewhere.unsqueeze(-1), 0)
        return self.reduce(x, None)
