"""torch.compile and torch.export of an output: the original's numbers, in as few graphs as its."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import BertConfig, GPT2Config, LlamaConfig

from tests.made import Packages
from tests.marks import all_but
from tests.processes import run

# What torch says of the original as well.
pytestmark = [
    pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "vocab_size": 104}
DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 104, "n_positions": 64}
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
MODELS = {
    "bert": ("BertForMaskedLM", BertConfig(**SIZES, **DROPOUT)),
    "gpt2": ("GPT2LMHeadModel", GPT2Config(**GPT2)),
    "llama": ("LlamaForCausalLM", LlamaConfig(**SIZES, num_key_value_heads=2)),
}
VARIANTS = {
    "split": [],
    "fused": ["fuse=true"],
    "recomputed": ["ckpt_ratio=0.5", "sequence_parallel=true"],
}
# Of the others transformers itself asks for what is not one graph, or torch does not read what a
# criterion says that `forward` makes: BERT's loss of split logits is a graph of its own.
WHOLE = {"llama"}
LIMIT = 1e-6  # the norm of Llama computes in float32


@pytest.fixture(scope="module")
def packages(tmp_path_factory, made) -> Packages:
    def files(package: str) -> Any:
        name, _, variant = package.partition("_")
        source = f"transformers.models.{name}.modeling_{name}"
        return made(source, name, VARIANTS[variant]).files

    return Packages(tmp_path_factory.mktemp("compile"), files)


def pair(folder: Path, name: str, variant: str) -> tuple[Any, Any, Any]:
    """The original, an output with its weights, and the output's `loading`."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    kind, config = MODELS[name]
    original = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    rewritten = importlib.import_module(f"{name}_{variant}.modeling_{name}")
    torch.manual_seed(0)
    config.use_cache = False
    whole = getattr(original, kind)(copy.deepcopy(config)).double()
    model = getattr(rewritten, kind)(copy.deepcopy(config)).double()
    model.load_state_dict(whole.state_dict())
    return whole, model, importlib.import_module(f"{name}_{variant}.loading")


def batch() -> dict[str, Tensor]:
    ids = torch.randint(104, (2, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def step(model: nn.Module, called: Any) -> dict[str, Tensor]:
    """The loss of a step, and the gradients."""
    outputs = called(**batch())
    outputs.loss.backward()
    return {"": outputs.loss.detach(), **gradients(model)}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def check_alike(what: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys(), what
    for name, tensor in want.items():
        error = (got[name] - tensor).abs().max().item()
        assert error < LIMIT, f"{what}: {name or 'loss'}: {error:.1e}"


def check_compiled(folder: Path, name: str, variant: str, backend: str) -> None:
    whole, model, loading = pair(folder, name, variant)
    want = step(whole, whole)
    torch.compiler.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=name in WHOLE)
    got = step(model, compiled)
    got = {"": got.pop(""), **loading.to_full(model, got)}
    check_alike(f"{name} {variant}", got, want)


@pytest.mark.release
@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "variant", "world", "backend"),
    [
        ("bert", "fused", 2, "aot_eager"),
        ("llama", "recomputed", 2, "aot_eager"),
        ("gpt2", "fused", 1, "inductor"),
        ("llama", "split", 2, "inductor"),
    ],
)
def test_compiled_as_a_whole(packages, name, variant, world, backend):
    """Llama is one graph, as its original is. What inductor compiles went through AOT before."""
    folder = packages(f"{name}_{variant}")
    run(check_compiled, world, folder, name, variant, backend, timeout_s=500)


@pytest.mark.parametrize("variant", all_but(["fused"], VARIANTS))
@pytest.mark.parametrize("name", all_but(["llama"], MODELS))
def test_no_more_graphs_than_the_original(packages, name, variant):
    counts = []
    for model in pair(packages(f"{name}_{variant}"), name, variant)[:2]:
        torch.compiler.reset()
        counts.append(torch._dynamo.explain(model)(**batch()).graph_count)
    assert counts[1] <= counts[0] + 2 * (name == "bert") <= 3, counts


def export(model: nn.Module) -> Any:
    return torch.export.export(model, (), batch()).module()


def check_exported(folder: Path, names: tuple[str, ...], variant: str) -> None:
    for name in names:
        whole, model, _ = pair(folder, name, variant)
        want = step(whole, whole)
        if not dist.is_initialized():
            program = export(model)
            got = program(**batch())
            got.loss.backward()
            check_alike(name, {"": got.loss.detach(), **gradients(program)}, want)
            continue
        with pytest.raises(RuntimeError, match=r"export under torch\.no_grad\(\)"):
            export(model)
        with torch.no_grad():
            got = export(model)(**batch()).loss
        check_alike(name, {"": got}, {"": want[""]})


@pytest.mark.processes
@pytest.mark.parametrize("variant", all_but(["split"], ["split", "fused"]))
@pytest.mark.parametrize("world", all_but([1], [1, 2]))
def test_exported(packages, world, variant):
    """At several ranks for running alone, since programs keep no gradients of collectives."""
    folder = packages(*(f"{name}_{variant}" for name in MODELS))
    run(check_exported, world, folder, tuple(MODELS), variant)
