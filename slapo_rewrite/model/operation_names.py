"""Maps the names of operations that people use to the operators that torch runs."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from slapo_rewrite import errors

_ATTENTION = tuple(
    f"_scaled_dot_product_{kind}"
    for kind in (
        *("cudnn_attention", "efficient_attention", "flash_attention"),
        *("flash_attention_for_cpu", "fused_attention_overrideable"),
    )
)
# Functions of torch, and the operators that they run as.
_MEANINGS = {
    "mm": ("mm", "addmm"),
    "bmm": ("bmm", "baddbmm"),
    "linear": ("mm", "addmm"),
    "matmul": ("mm", "addmm", "bmm", "baddbmm"),
    "scaled_dot_product_attention": _ATTENTION,
    "conv1d": ("convolution",),
    "conv2d": ("convolution",),
    "conv3d": ("convolution",),
    "softmax": ("_softmax",),
    "log_softmax": ("_log_softmax",),
    "layer_norm": ("native_layer_norm",),
    "group_norm": ("native_group_norm",),
}
NAMES = tuple(_MEANINGS)


def operations(names: Iterable[str]) -> list[str]:
    """The operators that names mean, as named below `torch.ops`; or raises `UnknownOperation`."""
    return sorted({found for name in names for found in _operations(name)})


class UnknownOperation(Exception):
    """A name without an operator whose result can be saved."""

    def __init__(self, message: str, hint: str | None) -> None:
        super().__init__(message)
        self.hint = hint  # what to say instead


@functools.cache
def _operations(name: str) -> tuple[str, ...]:
    if name in _MEANINGS:
        return tuple(f"aten.{each}.default" for each in _MEANINGS[name])
    short = name.removeprefix("aten.")
    packet = getattr(torch.ops.aten, short.partition(".")[0], None) if short else None
    if packet is None or short.startswith("__"):
        near = errors.did_you_mean(name, [*NAMES, *_known()])
        raise UnknownOperation(f"there is no operation `{name}`", near)
    base, _, chosen = short.partition(".")
    if chosen and chosen not in packet.overloads():
        near = errors.did_you_mean(chosen, packet.overloads())
        raise UnknownOperation(f"`{base}` has no overload `{chosen}`", near)
    found = []
    for overload in (chosen,) if chosen else packet.overloads():
        operation = getattr(packet, overload)
        if chosen or not (operation._schema.is_mutable or "out" in overload):
            found.append(operation)
    if any(o._schema.is_mutable for o in found) or not found:
        raise UnknownOperation(
            f"`{name}` changes a tensor in place, so it has no separate result to keep", None
        )
    if any(torch.Tag.nondeterministic_seeded in o.tags for o in found):
        raise UnknownOperation(
            f"`{name}` draws random numbers: if it is not computed again, later random numbers "
            "change",
            None,
        )
    if all(map(_is_made_of_others, found)):
        raise UnknownOperation(
            f"`{name}` runs as other operations, so it has no separate result to keep",
            "name those. A function in the schedule, passed as `save`, sees them all",
        )
    return tuple(
        f"aten.{o.name().removeprefix('aten::').replace('::', '.')}"
        + ("" if "." in o.name() else ".default")
        for o in found
    )


def _is_made_of_others(operation: torch._ops.OpOverload) -> bool:
    key = "CompositeImplicitAutograd"
    try:
        name = operation.name()  # type: ignore[no-untyped-call]
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    except RuntimeError:  # it has a schema only
        return True


@functools.cache
def _known() -> tuple[str, ...]:
    names = torch._C._dispatch_get_all_op_names()
    short = {n.removeprefix("aten::").partition(".")[0] for n in names if n.startswith("aten::")}
    return tuple(sorted(n for n in short if not n.startswith("_") and not n.endswith("_")))
