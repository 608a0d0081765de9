"""Every kernel compiles for a GPU, and none waits for the device or stops `torch.compile`."""

import ast
import textwrap
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.pytorch_utils import Conv1D

from benchmark.compiled import as_on_gpu, caught, kernel_modules
from slapo_rewrite.emit.helpers import RUNTIME
from slapo_rewrite.runtime.kernels.launch import runs_triton
from slapo_rewrite.runtime.kernels.layer_norm import residual_layer_norm
from slapo_rewrite.runtime.kernels.plain import adds_a_bias
from tests.runtime.kernels.compile import calls, compile_all, public

pytest.importorskip("triton")
from triton.runtime.jit import JITFunction

# Calls by which all kernels are launched that are given floats.
FLOATS = (
    "residual_rms_norm",
    "residual_layer_norm",
    "dropout_residual",
    "gated",
    "bias_activation",
    "cross_entropy",
    "masked_softmax",
)
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


@pytest.mark.long
@pytest.mark.parametrize("name", kernels())
def test_a_kernel_compiles(name, launched):
    assert name in launched


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_compile(dtype):
    assert len(compile_all(dtype, "residual_rms_norm")) == 2


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_loaded_ahead_fit_in_every_gpus_shared_memory(dtype):
    """Up to 99 KiB, that of an RTX 3090; longer rows are not loaded ahead."""
    found = {}
    for columns in (4096, 8192, 16384):

        def compile_one(launch, columns=columns):
            if launch.name == "layer_norm_backward_kernel":
                found[columns] = launch.compiled(86).metadata.shared

        with caught(kernel_modules(), compile_one), FakeTensorMode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outputs = calls(dtype, d=columns)["residual_layer_norm"](residual_layer_norm)
            torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])
    assert found[4096] > 16384
    assert max(found.values()) <= 99 * 1024


def test_numbers_in_float64_stay_out_of_the_arithmetic():
    """As torch.compile gives them; it would be slow, and some would not compile."""
    wide = {}

    def compile_one(launch):
        code = launch.compiled(number="fp64").asm["ttir"]
        operations = [line for line in code.splitlines() if "f64" in line and " = arith." in line]
        wide[launch.name] = [line for line in operations if "arith.truncf" not in line]

    with caught(kernel_modules(), compile_one), FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in FLOATS:
            outputs = calls(torch.bfloat16)[name](public(name))
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])
    assert len(wide) == 2 * len(FLOATS)
    assert not any(wide.values()), wide


def test_a_kernel_names_only_what_is_emitted_with_it():
    """`torch.compile` writes a kernel's text anew, with Triton's names and other kernels."""
    for module in kernel_modules():
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction):
                tree = ast.parse(textwrap.dedent(kernel.src))
                names = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
                own = {n.id for n in names if isinstance(n.ctx, ast.Store)}
                own |= {"tl", *kernel.arg_names}
                used = {n.id for n in names} & vars(module).keys() - own
                odd = [n for n in used if not isinstance(getattr(module, n), JITFunction)]
                assert not odd, f"{kernel.__name__} uses {odd}"


@pytest.mark.parametrize("layer", [torch.nn.Linear(3, 4), Conv1D(4, 3)])
def test_torch_compile_reads_of_which_class_a_layer_is(layer):
    def known(layer, x):
        return x if adds_a_bias(layer) else None

    torch._dynamo.reset()
    compiled = torch.compile(known, backend="eager", fullgraph=True)
    assert compiled(layer, torch.ones(1)) is not None


class Traced(Exception):
    """A function was traced to its end."""


@pytest.mark.long
@pytest.mark.parametrize("name", calls(torch.bfloat16))
def test_torch_compile_traces_a_launch(name, monkeypatch):
    """Forwards and backwards in one graph, as on a GPU; there is none here to run it."""

    def backend(graph, inputs):
        def run(*arguments):
            raise Traced(str(graph.graph))

        return run

    torch._dynamo.reset()
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    function = torch.compile(public(name), backend=backend, fullgraph=True)
    with as_on_gpu(kernel_modules()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Traced, match="autograd_function_apply"):
            calls(torch.bfloat16)[name](function)


def test_torch_compile_traces_the_choice_of_the_reference():
    x = torch.ones(3, 8)
    torch._dynamo.reset()
    chosen = torch.compile(lambda x: x + runs_triton(x), backend="eager", fullgraph=True)
    assert torch.equal(chosen(x), x)


def test_every_public_function_is_tried():
    from tests.runtime.kernels.picked import PUBLIC

    assert {name.split()[0] for name in calls(torch.float32)} == set(PUBLIC)
