# Written by slapo-rewrite 0.2.0 for modeling_bert.py; rewrite.json says from what.
"""Tensor-parallel layers: each rank holds a part, the group behaves like the whole.

Shapes: B batch, T tokens, D features in, F features out, V vocabulary. A prime (F')
marks the part that this rank holds.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .guards import check_parts, mark_parts, note_whose_parts, watch_registrations
from .shards import Shard, in_world, named_world, rank, sum_parts, world_size
from .shards import set_group as set_group


def unchanged(x: Tensor) -> Tensor:
    """Returns `x`: the identity."""
    return x


Map = Callable[[Tensor], Tensor]


class _Collective(torch.autograd.Function):
    """Runs one function on a tensor and another on its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Map, run_gradient: Map) -> Tensor:
        ctx.run, ctx.run_gradient = run, run_gradient
        ctx.world = named_world()
        return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        with in_world(ctx.world):
            return collective(gradient, ctx.run_gradient, ctx.run), None, None


def collective(x: Tensor, run: Map, run_gradient: Map) -> Tensor:
    """`run(x)`, with `run_gradient` applied to its gradient; `x` in a world of one."""
    if world_size() == 1:
        return x
    if not torch.is_grad_enabled():
        return run(x)
    if torch.compiler.is_exporting():
        raise RuntimeError(
            "torch.export drops the gradients of collectives: export under "
            "torch.no_grad(). The program can run, but not train"
        )
    apply: Callable[..., Tensor] = _Collective.apply
    return apply(x, run, run_gradient)


def all_reduce(x: Tensor) -> Tensor:
    """Sums the ranks' partial results; the gradient passes unchanged."""
    return collective(x, sum_parts, unchanged)


def all_reduce_gradient(x: Tensor) -> Tensor:
    """Passes `x` unchanged; sums its gradient over the ranks."""
    return collective(x, unchanged, sum_parts)


def gather(x: Tensor, shard: Shard) -> Tensor:
    """Concatenates the ranks' parts; the gradient is this rank's slice."""
    return collective(x, shard.gather, shard.cut)


def single_rank_only(layer: Any = None) -> Any:
    """Returns `layer`; refuses it at several ranks, as the model had none when split.

    Raises:
        NotImplementedError: There are several ranks.
    """
    if world_size() > 1:
        raise NotImplementedError(
            "this configuration adds layers that the model did not have when this file "
            "was written: run slapo-rewrite on a model of this configuration"
        )
    return layer


def record_shard(module: Any, name: str, shard: Shard) -> None:
    """Records that `module.<name>` is this rank's part of a tensor divided by `shard`.

    From then on `load_state_dict` takes the full tensor and keeps this rank's part. The
    record is kept on the module, since parameters may be replaced (`to_empty`, FSDP).
    """
    if not hasattr(module, "sharded_parameters"):
        module.sharded_parameters, module.known_parts = {}, None
        module.register_state_dict_post_hook(note_whose_parts)
        module.register_load_state_dict_pre_hook(_cut_full_tensors)
        module.register_load_state_dict_post_hook(mark_parts)
        if world_size() > 1:
            watch_registrations()
    module.sharded_parameters[name] = shard
    mark_parts(module)


def _cut_full_tensors(
    module: Any, state_dict: dict[str, Any], prefix: str, metadata: Any, *_: object
) -> None:
    """Before loading: replaces full tensors by this rank's parts of them."""
    of = metadata.get("part")
    if of == (rank(), world_size()) or (of is None and world_size() == 1):
        return
    for name, shard in module.sharded_parameters.items():
        name, own = prefix + name, getattr(module, name)
        tensor = state_dict.get(name)
        if not isinstance(tensor, Tensor):
            continue
        # What FSDP2 or DeepSpeed saved is known to be a part.
        known = hasattr(tensor, "full_tensor") or getattr(module, "takes_parts", False)
        if of is None and shard.is_full(tensor):
            state_dict[name] = shard.cut(tensor.detach())
        elif of is not None or (tensor.shape == own.shape and not known):
            whose = f"the part of rank {of[0]} of {of[1]}" if of else "of no known rank"
            raise ValueError(
                f"`{name}` is {list(tensor.shape)}, {whose}, and this is rank {rank()} of "
                f"{world_size()}; axis {shard.axis} of the full tensor has {shard.size} "
                "elements. Load `loading.full_state_dict(model)`, or on each rank what its "
                "own `state_dict()` returned, with its metadata"
            )


def clip_grad_norm_(
    model: nn.Module | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` with the norm of the whole model's gradients.

    torch's function would take the norm of a rank's own parts: each rank would scale by
    another number. Every rank calls this one, with the model or, if they are still the
    tensors that it was built with, its parameters.
    """
    if isinstance(model, nn.Module):
        for module in model.modules():
            if hasattr(module, "sharded_parameters"):
                mark_parts(module)
        model = model.parameters()
    parameters: list[Any] = [model] if isinstance(model, Tensor) else list(model)
    if world_size() > 1 and not any(hasattr(p, "model_parallel") for p in parameters):
        raise ValueError(
            "none of these parameters is known as a part: `copy.deepcopy` and FSDP2 "
            "create new ones. Pass the model instead"
        )
    parameters = [p for p in parameters if p.grad is not None]
    is_first = rank() == 0
    counted = [p.grad for p in parameters if getattr(p, "model_parallel", is_first)]
    norm: Any = nn.utils.get_total_norm(counted, norm_type, foreach=foreach)
    if hasattr(norm, "full_tensor"):  # FSDP2 divides gradients over the replicas
        norm = norm.full_tensor()
    if parameters and world_size() > 1:
        norm = norm.to(parameters[0].grad.device).reshape(1)
        norms = Shard(0, world_size()).gather(norm)
        norm = torch.linalg.vector_norm(norms, norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"the norm of the gradients is {float(norm)}")
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach)
    return norm  # type: ignore[no-any-return]


def shard_parameter(
    module: nn.Module,
    name: str,
    axis: int,
    *,
    multiple_of: int = 0,
) -> None:
    """Cuts the parameter or buffer `module.<name>` down to this rank's part of `axis`.

    Parts are equal multiples of `multiple_of`; if that is 0 they may differ in size.
    """
    tensor = getattr(module, name)
    axis = axis % tensor.dim()
    shard = Shard(axis, tensor.shape[axis], multiple_of)
    # In place, so that tied parameters stay tied.
    tensor.data = shard.cut(tensor.data)
    record_shard(module, name, shard)


class ColumnParallelLinear(nn.Linear):
    """A linear layer split over its output features: (..., D) -> (..., F').

    Its `out_features` is F', its `full_out_features` F. Other arguments are as in
    `nn.Linear`.

    Args:
        multiple_of: Shares are equal multiples of it; 0: their sizes may differ.
        reduce_input_gradient: Sum the input's gradient over the ranks. False where it
            is summed once for several layers.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *args: Any,
        multiple_of: int = 0,
        reduce_input_gradient: bool = True,
        **kwargs: Any,
    ) -> None:
        shard = Shard(0, out_features, multiple_of)
        super().__init__(in_features, shard.local_size(), bias, *args, **kwargs)
        self.full_out_features = out_features
        self.enter = all_reduce_gradient if reduce_input_gradient else unchanged
        record_shard(self, "weight", shard)
        if bias:
            record_shard(self, "bias", shard)

    def forward(self, input: Tensor) -> Tensor:
        """Maps (..., D) to (..., F'), or to (..., F) if the output is gathered."""
        check_parts(self)
        input = self.enter(input)
        return super().forward(input)


class RowParallelLinear(nn.Linear):
    """A linear layer split over its input features: (..., D') -> (..., F).

    The constructor takes D; `in_features` is D'. Other arguments are as in `nn.Linear`.

    Args:
        multiple_of: Shares are equal multiples of it; 0: their sizes may differ.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *args: Any,
        multiple_of: int = 0,
        **kwargs: Any,
    ) -> None:
        shard = Shard(1, in_features, multiple_of)
        super().__init__(shard.local_size(), out_features, bias, *args, **kwargs)
        record_shard(self, "weight", shard)

    def forward(self, input: Tensor) -> Tensor:
        """Maps (..., D') to (..., F), summed over the ranks."""
        check_parts(self)
        if world_size() == 1:
            return super().forward(input)
        y = nn.functional.linear(input, self.weight)
        bias: Tensor | None = self.bias
        y = all_reduce(y)
        return y if bias is None else y + bias.to(y.dtype)


class VocabParallelEmbedding(nn.Embedding):
    """An embedding split over its vocabulary: ids (B, T) -> (B, T, D).

    The constructor takes V and the id of the padding. `num_embeddings` is V', and
    `padding_idx` the row of that id in this rank's part; None if another rank holds it.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shard = Shard(0, num_embeddings)
        first, end = shard.ranges(rank())[0]
        if padding_idx is not None:
            row = range(num_embeddings)[padding_idx] - first
            padding_idx = row if 0 <= row < end - first else None
        super().__init__(
            end - first, embedding_dim, padding_idx, device=device, dtype=dtype
        )
        self.shard, self.full_num_embeddings = shard, num_embeddings
        record_shard(self, "weight", shard)

    def forward(self, input: Tensor) -> Tensor:
        """Looks up ids (B, T), and sums: a rank finds zeros for the rows of others."""
        check_parts(self, input)
        if world_size() == 1:
            return super().forward(input)
        rows, elsewhere = self.shard.looked_up(input)
        x = super().forward(rows).masked_fill(elsewhere.unsqueeze(-1), 0)
        return all_reduce(x)
