"""The kernels themselves, run by Triton's interpreter in a process of its own, and on a GPU."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.golden import ROOT
from tests.runtime.kernels.cases import CASES

pytest.importorskip("triton")


# One case of most kernels, which takes the interpreter least; the others have further sizes and
# options.
SHORT = {
    "cross_entropy_at_the_edges",
    "dropout_goes_back_by_the_same_mask",
    "gated_units",
    "gelu_is_as_near_as_it_says",
    "layer_norm_of_one_column_is_its_bias",
    "linear_cross_entropy_in_chunks",
    "linear_each_adds_up_in_the_products",
    "residual_rms_norm_gives_both",
    "rms_norm_of_any_strides",
    "rotary_with_heads_behind_tokens",
    "softmax_of_rows_masked_whole",
}


@pytest.fixture(scope="module")
def found() -> dict[str, str | None]:
    """What each case found: one process for all, since starting costs more than most of them."""
    return run({"TRITON_INTERPRET": "1"}, "--only", *sorted(SHORT))


@pytest.fixture(scope="module")
def found_slowly() -> dict[str, str | None]:
    return run({"TRITON_INTERPRET": "1"}, "--but", *sorted(SHORT))


def run(environment: dict[str, str], *arguments: str) -> dict[str, str | None]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.kernels.cases", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])["found"]


@pytest.mark.parametrize("name", sorted(SHORT))
def test_a_kernel_computes_what_it_stands_for(name, found):
    assert found[name] is None, found[name]


@pytest.mark.release
@pytest.mark.parametrize("name", sorted(CASES.keys() - SHORT))
def test_so_does_it_in_all_sizes_and_ways(name, found_slowly):
    assert found_slowly[name] is None, found_slowly[name]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_compute_the_same_on_a_gpu():
    found = run({"TRITON_INTERPRET": "0"}, "--device", "cuda")
    assert not any(found.values()), "\n".join(filter(None, found.values()))


@pytest.mark.long
def test_a_wrong_kernel_is_found():
    script = """
        from tests.runtime.kernels import cases
        from slapo_rewrite.runtime.kernels import gated
        cases.round_like_hardware()
        right = gated.gated_backward
        gated.gated_backward = lambda *a: [1.01 * g for g in right(*a)]
        try:
            cases.gated_units("cpu")
        except AssertionError as error:
            print("found:", error)
    """
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(line[8:] for line in script.splitlines())],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
    )
    assert done.stdout.startswith("found: gradient 0"), done.stdout + done.stderr
