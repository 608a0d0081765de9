"""The functions that rules call, in PyTorch's operations alone, match the kernels' numbers."""

from __future__ import annotations

import ast
import inspect
import subprocess

import black
import pytest
import torch

from slapo_rewrite import errors
from slapo_rewrite.emit import kernels
from slapo_rewrite.emit.used_definitions import bound_names
from slapo_rewrite.fusion.kernel_forms import in_torch, kernel_function
from slapo_rewrite.fusion.registry import rules
from slapo_rewrite.model.kernel_samples import SAMPLES, Maker, results, samples
from tests.rewriting import imported
from tests.runtime.kernels.test_picked import path_env

LEAD = "slapo_rewrite.runtime.kernels."
CALLED = sorted({LEAD + name for rule in rules().values() for name in rule.kernels})


def test_all_that_rules_call_has_both_forms_and_inputs():
    assert [name for name in CALLED if in_torch(name) is None] == []
    assert sorted(name.rpartition(".")[2] for name in CALLED) == sorted(SAMPLES)
    assert in_torch(f"{LEAD}plain.is_plain") is None
    assert in_torch("torch.nn.functional.gelu") is None


@pytest.mark.parametrize("name", CALLED)
def test_both_forms_take_the_same_and_give_the_same(name):
    kernel, reference = kernel_function(name), in_torch(name)
    assert reference is not None
    assert inspect.signature(reference) == inspect.signature(kernel)
    assert not inspect.getdoc(reference).startswith("`")
    for dtype in (torch.float32, torch.bfloat16):
        for sample in samples(kernel.__name__, Maker(6, 8, dtype)):
            one, other = results(kernel, sample), results(reference, sample)
            assert one.keys() == other.keys() and len(one) > 1
            for key, tensor in one.items():
                assert torch.equal(tensor, other[key]), key


def defined(text: str) -> set[str]:
    return {name for node in ast.parse(text).body for name in bound_names(node)}


def test_each_stands_alone_and_launches_nothing(tmp_path):
    for name in SAMPLES:
        eager, compiled = (kernels.picked([], *given).text for given in (([name],), ([], [name])))
        assert "triton" not in eager and "autograd.Function" not in eager
        assert f"@torch.compile\ndef {name}(" in compiled and compiled.count("@torch.compile") == 1
        for number, text in enumerate((eager, compiled)):
            assert black.format_str(text, mode=black.Mode()) == text
            used = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
            assert defined(text) - {name} <= used, "something is defined that nothing uses"
            (tmp_path / f"{name}_{number}.py").write_text(text)
    rules = ["--select", "E,F,I,B,UP", "--ignore", "E501,I001", "--isolated", str(tmp_path)]
    done = subprocess.run(["ruff", "check", *rules], capture_output=True, text=True, env=path_env())
    assert done.returncode == 0, done.stdout


def test_one_file_holds_functions_of_several_backends(tmp_path):
    text = kernels.picked(["swiglu"], ["rms_norm", "residual_layer_norm"], ["linear_each"]).text
    assert black.format_str(text, mode=black.Mode()) == text
    assert text.count("def dropped(") == text.count("def activation_reference(") == 1
    assert "class GatedFunction(" in text and "class RMSNormFunction(" not in text
    assert "@torch.compile\ndef linear_each(" in text
    assert text.count("@torch.compile") == 1
    (tmp_path / "several_backends.py").write_text(text)
    module = imported(tmp_path / "several_backends.py")
    x = torch.ones(2, 8)
    assert module.rms_norm(module.swiglu(x, x), x[0]).shape == (2, 8)


def test_one_file_does_not_hold_two_functions_of_one_name():
    with pytest.raises(errors.Unsupported, match="`residual_layer_norm` would be in one file"):
        kernels.picked(["add_layer_norm"], ["residual_layer_norm"])
