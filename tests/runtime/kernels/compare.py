"""Compares a kernel with the operations that it replaces, in float64 and in its own dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 7, 127, 1000, 1027)
FEWER = (7, 1027)


class Maker:
    """Makes random tensors, alike on every device.

    Args:
        device: Where to.
        dtype: Their dtype.
    """

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return x.to(self.device, dtype or self.dtype)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How long rows are tried."""
        return SIZES if self.dtype == torch.float32 else FEWER

    def labels(self, *shape: int, below: int) -> Tensor:
        return torch.randint(below, shape, generator=self.generator).to(self.device)

    def strided(self, *shape: int) -> list[Tensor]:
        """The shape laid out in several ways: packed, every other row, transposed, spread."""
        wide = self(*shape[:-1], 2 * shape[-1])
        rows = self(2 * shape[0], *shape[1:])
        turned = self(*reversed(shape)).permute(*reversed(range(len(shape))))
        return [wide[..., shape[-1] :], wide[..., ::2], rows[::2], turned]


def float64_or_32(x: Tensor) -> torch.dtype:
    """What stands for float32 when a formula is evaluated in float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def results(function: Callable[..., Any], inputs: Sequence[Any], seeds: Sequence[Tensor]) -> Any:
    """Outputs of a function, and the gradients of its floating-point inputs."""
    leaves = [
        x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in inputs
    ]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    chosen = [s.to(o.dtype).expand(o.shape) for o, s in zip(outputs, seeds, strict=False)]
    gradients = torch.autograd.grad(outputs, wanted, chosen)
    return [o.detach() for o in outputs], list(gradients)


def compare(
    kernel: Callable[..., Any], original: Callable[..., Any], *inputs: Any, least: float = 0.0
) -> None:
    """Asserts that errors are at most twice the original's own, and one unit in the last place.

    Args:
        kernel: Ours.
        original: The operations; evaluated in float64 when its inputs are.
        inputs: Arguments of both.
        least: A unit in the last place is at least that of this number: of what cancels.
    """
    doubled = [
        x.detach().double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in inputs
    ]
    shapes = original(*doubled)
    shapes = shapes if isinstance(shapes, tuple) else (shapes,)
    generator = torch.Generator().manual_seed(1)
    dtype = next(x.dtype for x in inputs if isinstance(x, Tensor) and x.is_floating_point())
    seeds = [
        torch.randn(s.shape, generator=generator, dtype=torch.float64).to(s.device, dtype)
        for s in shapes
    ]
    exact, eager = results(original, doubled, seeds), results(original, inputs, seeds)
    ours = results(kernel, inputs, seeds)
    for part, all_three in zip(
        ("output", "gradient"), zip(ours, eager, exact, strict=True), strict=True
    ):
        for i, (mine, theirs, truth) in enumerate(zip(*all_three, strict=True)):
            assert mine.shape == theirs.shape, (part, i, mine.shape, theirs.shape)
            assert mine.dtype == theirs.dtype, (part, i, mine.dtype, theirs.dtype)
            if not truth.numel():
                continue
            error = (mine.double() - truth).abs().max()
            own = (theirs.double() - truth).abs().max()
            unit = torch.finfo(mine.dtype).eps * max(truth.abs().max(), least)
            assert error <= 2 * own + unit, (
                f"{part} {i}: error {error:.3g}, the original's {own:.3g}, a unit {unit:.3g}; "
                f"inputs {[tuple(x.shape) for x in inputs if isinstance(x, Tensor)]} {dtype}"
            )
