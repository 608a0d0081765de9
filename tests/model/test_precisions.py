"""In which precision operations are computed, held against what `torch.autocast` does with them.

The rows follow torch's list for CUDA, which is applied here without a GPU, to tensors that only
pretend to be on one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from slapo_rewrite import operations
from slapo_rewrite.model.results import tensors
from slapo_rewrite.operations import EITHER, FLOAT32, PRODUCT, name_of, precision_of, rows
from tests.model.test_operations import CASES, last_call, operands, spelled

# What casts, and what takes complex numbers apart.
CASTS = set("to type float double .imag .real imag real view_as_real half bfloat16 chalf".split())
# What torch has on no list, and the tool in float32 all the same.
TOO = {*operations._IN_FLOAT32_TOO.split()}
# What does not run on what only pretends to be there, by these spellings.
UNSEEN = set("""
linear conv3d conv_transpose2d conv_transpose3d chain_matmul addbmm
""".split())


class Pretended:
    """The operands of the examples, in float32 and in bfloat16, as they would be on a GPU."""

    def __init__(self) -> None:
        self.given = [
            {name: self._made(value, dtype) for name, value in operands().items()}
            for dtype in (torch.float32, torch.bfloat16)
        ]

    def _made(self, value: object, dtype: torch.dtype) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        dtype = dtype if value.is_floating_point() else value.dtype
        return torch.empty(value.shape, dtype=dtype, device="cuda")

    def seen(self, text: str) -> tuple[str, str] | None:
        """The operation that a text calls last, and how it is computed; None where it fails."""
        dtypes, name = [], ""
        for given in self.given:
            try:
                func, args, kwargs, _ = last_call(text, given)[-1]
                made = list(tensors(func(*args, **kwargs)))
            except Exception:  # it needs values, say
                return None
            dtypes.append({t.dtype for t in made if t.is_floating_point()})
            name = name_of(func)
        if any(len(each) != 1 for each in dtypes):
            return None
        of_float, of_half = (each.pop() for each in dtypes)
        if of_float == of_half:
            return name, FLOAT32 if of_half == torch.float32 else PRODUCT
        return name, EITHER


@pytest.fixture(scope="module")
def found() -> dict[str, set[str]]:
    """How `torch.autocast` computes each operation, as far as that is seen."""
    found: dict[str, set[str]] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.set_autocast_enabled("cuda", True)
        try:
            pretended = Pretended()
            unseen = (text for name in sorted(rows()) for text in texts(name, found))
            for text in (*CASES, *unseen):
                if (what := pretended.seen(text)) is not None:
                    found.setdefault(what[0], set()).add(what[1])
        finally:
            torch.set_autocast_enabled("cuda", False)
    return found


def texts(name: str, found: dict[str, set[str]]) -> Iterator[str]:
    """Ways to call an operation, until it is seen."""
    for text in spelled(name):
        if name in found or precision_of(name) == EITHER:
            return
        yield text


@pytest.mark.filterwarnings("ignore")
def test_every_row_is_computed_as_torch_computes_it(found):
    wrong = {
        name: kinds
        for name, kinds in found.items()
        if name not in TOO | CASTS and kinds != {precision_of(name)}
    }
    assert not wrong and len(found) > 200


if __name__ == "__main__":
    import time
    t=time.process_time()
    g=found.__wrapped__ if hasattr(found,'__wrapped__') else None
    f=g()
    print(time.process_time()-t, len(f))
    print({n:k for n,k in f.items() if n not in TOO|CASTS and k!={precision_of(n)}})
    print([n for n in rows() if precision_of(n)!=EITHER and n not in f])
