"""Changes that transformers makes to embeddings are right at several ranks, or refused."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import BertConfig, GPT2Config, LlamaConfig

from slapo_rewrite.emit.write import write
from tests.processes import run

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "vocab_size": 104}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 104, "n_positions": 64}
# The output layers of the first two are tied to the embeddings, of an even vocabulary.
MODELS = {
    "bert": ("BertForMaskedLM", BertConfig(**SIZES)),
    "gpt2": ("GPT2LMHeadModel", GPT2Config(**GPT2)),
    "llama": ("LlamaForCausalLM", LlamaConfig(**SIZES)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, made) -> Path:
    path = tmp_path_factory.mktemp("embeddings")
    for name in MODELS:
        source = f"transformers.models.{name}.modeling_{name}"
        write(path / f"{name}_embedding", made(source, name).files)
    return path


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(12).view(2, 6) * 8
    with torch.no_grad():
        return model(input_ids=ids).logits


def put_another_in(model: Any) -> None:
    torch.manual_seed(3)
    model.set_input_embeddings(nn.Embedding(104, 32).double())


def put_another_out(model: Any) -> None:
    torch.manual_seed(3)
    model.set_output_embeddings(nn.Linear(32, 104).double())


def put_another_in_and_tie(model: Any) -> None:
    put_another_in(model)
    model.tie_weights()


def resize(model: Any) -> None:
    model.resize_token_embeddings(112, mean_resizing=False)


RIGHT = {
    "tied": lambda model: model.tie_weights(),
    "the same": lambda model: model.set_input_embeddings(model.get_input_embeddings()),
    "frozen": lambda model: model.get_input_embeddings().requires_grad_(False),
    "another embedding": put_another_in,
    "another output": put_another_out,
}


def check(folder: Path, name: str) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    kind, config = MODELS[name]
    original = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    rewritten = importlib.import_module(f"{name}_embedding.modeling_{name}")

    def pair() -> tuple[Any, Any]:
        torch.manual_seed(0)
        whole = getattr(original, kind)(copy.deepcopy(config)).double().eval()
        model = getattr(rewritten, kind)(copy.deepcopy(config)).double().eval()
        model.load_state_dict(whole.state_dict())
        return whole, model

    for what, act in RIGHT.items():
        whole, model = pair()
        for each in (whole, model):
            act(each)
        error = (logits(model) - logits(whole)).abs().max()
        assert error < 1e-8, f"{name}: {what}: {error:.1e}"
    if not dist.is_initialized():  # where there is but one rank, all is right
        for act in (resize, put_another_in_and_tie):
            whole, model = pair()
            for each in (whole, model):
                torch.manual_seed(4)
                act(each)
            assert (logits(model) - logits(whole)).abs().max() < 1e-8
        return
    whole, model = pair()
    loading = importlib.import_module(f"{name}_embedding.loading")
    part = "axis 0 has 52 of 104: replace, resize"
    with pytest.raises(RuntimeError, match=f"made from this rank's part alone|{part}"):
        resize(model)
        logits(model)
    with pytest.raises(RuntimeError, match=part):  # the embedding has another size by then
        loading.full_state_dict(model)
    whole, model = pair()
    logits(model)
    put_another_in_and_tie(model)
    if name != "llama":
        with pytest.raises(RuntimeError, match="replaced this rank's part, whose axis 0 has 52"):
            logits(model)
    # as the refusals say
    for act in (resize, put_another_in_and_tie):
        whole, _ = pair()
        act(whole)
        model = getattr(rewritten, kind)(copy.deepcopy(whole.config)).double().eval()
        model.load_state_dict(whole.state_dict())
        assert (logits(model) - logits(whole)).abs().max() < 1e-8


def check_all(folder: Path) -> None:
    for name in MODELS:
        check(folder, name)


@pytest.mark.processes
@pytest.mark.parametrize("world", [1, 2])
def test_embeddings_are_right_or_refused(folder, world):
    run(check_all, world, folder)
