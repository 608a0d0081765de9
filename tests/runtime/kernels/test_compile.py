"""Every kernel compiles for a GPU, and none waits for the device."""

import ast

import pytest
import torch

from slapo_rewrite.emit.helpers import RUNTIME
from tests.runtime.kernels.compile import calls, compile_all

pytest.importorskip("triton")

FILES = sorted((RUNTIME / "kernels").glob("*.py"))


@pytest.fixture(scope="module")
def launched() -> set[str]:
    """The kernels that compile in bfloat16, all others being of the same code."""
    return set(compile_all(torch.bfloat16))


def kernels() -> list[str]:
    return [
        node.name
        for path in FILES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    ]


@pytest.mark.parametrize("name", kernels())
def test_a_kernel_compiles(name, launched):
    assert name in launched


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_compile(dtype):
    assert len(compile_all(dtype, "residual_rms_norm")) == 2


def test_every_public_function_is_tried():
    from tests.runtime.kernels.picked import PUBLIC

    assert {name.split()[0] for name in calls(torch.float32)} == set(PUBLIC)
