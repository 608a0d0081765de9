"""Half-precision outputs match the original up to rounding, on several ranks as well."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.emit.write import write
from slapo_rewrite.model.small_model import build_small
from slapo_rewrite.runtime import mixed_conv1d, mixed_parallel, mixed_parallel_conv1d
from slapo_rewrite.runtime.kernels import plain
from slapo_rewrite.verify.run import verify
from tests.golden import ROOT

MODELS = ROOT / "tests" / "models"
# The bundled schedules and those of the models here, with products in half precision.
SCHEDULE = """\
import importlib.util

spec = importlib.util.spec_from_file_location("own", {path!r})
own = importlib.util.module_from_spec(spec)
spec.loader.exec_module(own)
model, verify_model = own.model, own.verify_model
{more}

def schedule(s):
    s.autocast()
    own.schedule(s{knobs})
"""


def written(folder: Path, source: str, schedule: str) -> Path:
    """An output below a folder."""
    path = folder / "schedule.py"
    path.write_text(schedule)
    write(out := folder / f"output_{folder.name}", rewrite(source, str(path)).files)
    return out


def checked(out: Path, *worlds: int) -> None:
    report = verify(out, worlds)
    assert report.ok, report.render()
    assert {"rounding in bfloat16", "gradients"} <= {row.name for row in report.rows}


@pytest.mark.processes
def test_a_model_split_over_two_ranks(tmp_path):
    more = "inputs, loss = own.inputs, own.loss\n"
    schedule = SCHEDULE.format(path=str(MODELS / "gpt_schedule.py"), more=more, knobs="")
    out = written(tmp_path, str(MODELS / "gpt.py"), schedule)
    assert "BFloat16RowParallelLinear" in (out / "gpt.py").read_text()
    checked(out, 1, 2)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "world", "knobs"),
    [
        ("bert", 2, ", sequence_parallel=True, ckpt_ratio=0.5"),
        ("gpt2", 2, ", fuse=True"),
        ("llama", 4, ""),  # with half as many heads for keys and values
        ("t5", 1, ", tensor_parallel=False, fuse=True"),
    ],
)
def test_models_of_transformers(tmp_path, name, world, knobs):
    path = str(ROOT / "rules" / "schedules" / f"{name}.py")
    schedule = SCHEDULE.format(path=path, more="", knobs=knobs)
    checked(written(tmp_path, f"transformers.models.{name}.modeling_{name}", schedule), world)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_tokens_are_generated_with_a_cache(tmp_path, name, monkeypatch):
    path = str(ROOT / "rules" / "schedules" / f"{name}.py")
    schedule = SCHEDULE.format(path=path, more="", knobs=", tensor_parallel=False")
    out = written(tmp_path, f"transformers.models.{name}.modeling_{name}", schedule)
    monkeypatch.syspath_prepend(out.parent)
    module = importlib.import_module(f"{out.name}.modeling_{name}")
    original = sys.modules[f"transformers.models.{name}.modeling_{name}"]
    made = importlib.util.spec_from_file_location("own", path)
    assert made is not None and made.loader is not None
    own = importlib.util.module_from_spec(made)
    made.loader.exec_module(own)
    torch.manual_seed(0)
    want = build_small(own, original).eval()
    model = build_small(own, module).eval()
    model.load_state_dict(want.state_dict())
    ids = torch.randint(200, (2, 5))
    with torch.no_grad():
        cached = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert cached.shape == (2, 9)
        whole = model(cached[:, :-1]).logits
        assert torch.allclose(whole.float(), want(cached[:, :-1]).logits, atol=0.05)


@pytest.mark.parametrize("prefix", ["BFloat16", "Float16"])
def test_kernels_call_layers_in_half_precision(prefix):
    """Kernels multiply by a float32 layer's weights themselves, but have to call these layers."""
    layers = [
        getattr(module, prefix + name)
        for module, names in (
            (mixed_parallel, ("ColumnParallelLinear", "RowParallelLinear", "Linear")),
            (mixed_parallel_conv1d, ("ColumnParallelConv1D", "RowParallelConv1D")),
            (mixed_conv1d, ("Conv1D",)),
        )
        for name in names
    ]
    for cls in layers:
        layer = cls(8, 8)
        assert not plain.is_plain(layer) and not plain.adds_a_bias(layer)
        dtype = torch.bfloat16 if prefix == "BFloat16" else torch.float16
        y = layer(torch.randn(2, 8))
        assert y.dtype == dtype and layer.weight.dtype == torch.float32
        y.float().sum().backward()
        assert layer.weight.grad.dtype == torch.float32
