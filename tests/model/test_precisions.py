"""In which precision operations are computed, held against what `torch.autocast` does with them.

The rows follow torch's list for CUDA, which is applied here without a GPU, to tensors that only
pretend to be on one. That for CPUs is shorter, and is applied to tensors with values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from slapo_rewrite import operations
from slapo_rewrite.model.results import tensors
from slapo_rewrite.operations import EITHER, FLOAT32, PRODUCT, name_of, precision_of, rows
from tests.model.test_operations import CASES, last_call, operands, spelled

PAIR = (torch.float32, torch.bfloat16)
# What casts, and what takes complex numbers apart.
CASTS = {
    *("to", "type", "float", "double", "half", "bfloat16", "chalf"),
    *(".imag", ".real", "imag", "real", "view_as_real"),
}
# What torch has on no list, and the tool in float32 all the same.
TOO = set(operations._IN_FLOAT32_TOO.split())
# Products below what pretends to be a tensor on a GPU, where nothing is seen of them.
BELOW = {"inner", "tensordot"}
# Of what is said to be no one's choice, those that need values or have complex results.
UNSEEN = {
    *("addbmm", "binary_cross_entropy", "complex", "corrcoef", "cov", "float_power", "linalg_inv"),
    *("linalg_matrix_rank", "linear", "multi_margin_loss", "nanquantile", "nll_loss", "polar"),
    *("quantile", "trace", "view_as_complex"),
}


class Examples:
    """The operands of the examples on a device, in float32 and in bfloat16."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.given = [
            {name: self._made(value, dtype) for name, value in operands().items()} for dtype in PAIR
        ]

    def _made(self, value: object, dtype: torch.dtype) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        dtype = dtype if value.is_floating_point() else value.dtype
        if self.device == "cpu":
            return value.to(dtype)
        return torch.empty(value.shape, dtype=dtype, device=self.device)

    def seen(self, text: str) -> tuple[str, str] | None:
        """The operation that a text calls last, and how it is computed; None where it fails."""
        dtypes, name = [], ""
        for given in self.given:
            try:
                func, args, kwargs, _ = last_call(text, given)[-1]
                made = list(tensors(func(*args, **kwargs)))
            except Exception:
                return None
            dtypes.append({t.dtype for t in made if t.dtype in PAIR})
            name = name_of(func)
        if any(len(each) != 1 for each in dtypes):
            return None
        of_float, of_half = (each.pop() for each in dtypes)
        if of_float == of_half:
            return name, FLOAT32 if of_half == torch.float32 else PRODUCT
        return name, EITHER


@contextlib.contextmanager
def autocast(device: str) -> Iterator[None]:
    """`torch.autocast`, which does not look whether there is such a device."""
    torch.set_autocast_dtype(device, torch.bfloat16)
    torch.set_autocast_enabled(device, True)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, False)


def texts(name: str, found: dict[str, set[str]]) -> Iterator[str]:
    """Ways to call an operation that has a precision of its own, until it is seen."""
    for text in spelled(name):
        if name in found or precision_of(name) == EITHER:
            return
        yield text


def all_seen(device: str) -> dict[str, set[str]]:
    """How `torch.autocast` computes each operation on a device, as far as that is seen."""
    found: dict[str, set[str]] = {}
    pretends = FakeTensorMode(allow_non_fake_inputs=True) if device == "cuda" else None
    with pretends or contextlib.nullcontext(), autocast(device):
        examples = Examples(device)
        unseen = (text for name in sorted(rows()) for text in texts(name, found))
        for text in (*CASES, *unseen):
            if (what := examples.seen(text)) is not None:
                found.setdefault(what[0], set()).add(what[1])
    return found


@pytest.mark.filterwarnings("ignore")
def test_every_row_is_computed_as_on_a_gpu():
    found = all_seen("cuda")
    wrong = {
        name: kinds
        for name, kinds in found.items()
        if name not in TOO | CASTS | BELOW and kinds != {precision_of(name)}
    }
    assert not wrong and len(found) > 200
    named = {name for name in rows() if precision_of(name) != EITHER}
    assert {n for n in named - found.keys() if not n.startswith("fft_")} <= UNSEEN


@pytest.mark.filterwarnings("ignore")
def test_what_cpus_compute_so_is_computed_so():
    found = all_seen("cpu")
    wrong = {
        name: kinds
        for name, kinds in found.items()
        if name not in CASTS | {"cov", "corrcoef"} and not kinds <= {precision_of(name), EITHER}
    }
    assert not wrong and found["linear"] == found["addbmm"] == {PRODUCT}


@pytest.mark.filterwarnings("ignore")
def test_what_is_not_known_on_parts_is_computed_in_what_it_is_given():
    def each(dtype):
        x = torch.ones(2, 4, 6, 6, dtype=dtype)
        yield "functional.unfold", F.unfold(x, 3)
        yield "functional.fold", F.fold(x.new_ones(2, 36, 16), (6, 6), 3)
        yield "pad_sequence", nn.utils.rnn.pad_sequence([x[0, 0], x[0, 0, :2]])
        yield "pixel_shuffle", F.pixel_shuffle(x, 2)
        yield "pixel_unshuffle", F.pixel_unshuffle(x, 2)
        yield "channel_shuffle", F.channel_shuffle(x, 2)
        yield "rot90", torch.rot90(x, 1, (2, 3))
        yield "masked_scatter", x.masked_scatter(x > 0, x)
        yield "masked_scatter_", x.masked_scatter_(x > 0, x.clone())
        yield "index_put", x.index_put((torch.tensor([0]),), x[0])
        yield "index_put_", x.index_put_((torch.tensor([0]),), x[1].clone())
        yield "threshold", F.threshold(x, 0.1, 0.0)

    for dtype in PAIR:
        with autocast("cpu"):
            found = dict(each(dtype))
        assert {name: made.dtype for name, made in found.items()} == dict.fromkeys(found, dtype)
        assert found.keys() == {*operations._AS_GIVEN.split()}
    assert {precision_of(name) for name in found} == {EITHER}
    assert [name_of(f) for f in (F.unfold, torch.Tensor.unfold)] == ["functional.unfold", "unfold"]
    assert precision_of(name_of(F.fold)) == EITHER


def test_what_is_not_known_on_parts_is_kept_from_losing_digits():
    """Torch samples in the precision of the grid, in which halves cannot tell neighbours apart."""
    assert precision_of(name_of(F.grid_sample)) == precision_of(name_of(torch.histc)) == FLOAT32


def test_what_works_in_place_keeps_its_precision():
    assert precision_of("exp") == FLOAT32 and precision_of("exp_") == EITHER
    assert precision_of("my_own") is None
