"""PEFT's LoRA at several ranks: the same adapter and training as in one process."""

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

from tests.made import Packages
from tests.marks import long
from tests.processes import run

# PEFT asks transformers for what is deprecated there, and warns that vocabularies may change.
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "vocab_size": 103}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 103, "n_positions": 64}
# Two key/value heads, which four ranks share.
MODELS = {
    "bert": ("BertForMaskedLM", BertConfig(**SIZES)),
    "gpt2": ("GPT2LMHeadModel", GPT2Config(**GPT2)),
    "llama": ("LlamaForCausalLM", LlamaConfig(**SIZES, num_key_value_heads=2)),
}
# Double precision, but the loss of causal models and llama's norms compute in single.
LIMITS = {"bert": 1e-8, "gpt2": 1e-5, "llama": 1e-4}
SETTINGS = {
    "bert": ["ckpt_ratio=0.5"],
    "gpt2": [],
    "llama": [],
    "bert_fused": ["fuse=true"],
    "gpt2_sequence": ["sequence_parallel=true"],
    "llama_sequence": ["sequence_parallel=true"],
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory, made) -> Packages:
    def files(package: str) -> Any:
        case = package.removesuffix("_lora")
        name = case.partition("_")[0]
        source = f"transformers.models.{name}.modeling_{name}"
        return made(source, name, SETTINGS[case], "add_adapters").files

    return Packages(tmp_path_factory.mktemp("lora"), files)


def load(folder: Path, case: str, file: str) -> Any:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(f"{case}_lora.{file}")


def settings(case: str, **further: Any) -> Any:
    from peft import LoraConfig

    targets = r".*(_proj|lm_head)" if "llama" in case else "all-linear"
    return LoraConfig(**{"r": 3, "lora_alpha": 8, "target_modules": targets, **further})


def models(folder: Path, case: str) -> tuple[Any, Any]:
    """An original and a rewritten model of the same weights, which drop nothing."""
    name = case.partition("_")[0]
    kind, config = MODELS[name]
    original = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    torch.manual_seed(0)
    pair = [getattr(m, kind)(config) for m in (original, load(folder, case, f"modeling_{name}"))]
    for model in pair:
        model.load_state_dict(pair[0].state_dict())
        for module in model.double().modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    torch.manual_seed(1)  # the parts that a rank has drawn may be larger than another's
    return pair[0], pair[1]


def adapted(folder: Path, case: str, **further: Any) -> tuple[Any, Any]:
    from peft import get_peft_model

    pair = models(folder, case)
    add = load(folder, case, "lora").add_adapters
    torch.manual_seed(1)
    whole = get_peft_model(pair[0], settings(case, **further))
    torch.manual_seed(1)
    model = add(pair[1], lambda model: get_peft_model(model, settings(case, **further)))
    return whole, model


def same(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor], limit: float) -> None:
    assert have.keys() == want.keys()
    for name, tensor in want.items():
        error = (have[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-6)
        assert error <= limit, f"{name}: {error:.1e}"


def batch(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(103, (3, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def check_training(folder: Path, case: str, **further: Any) -> None:
    """From the first weights on, bit for bit; then 20 steps, with clipping and with dropout."""
    whole, model = adapted(folder, case, **further)
    loading, tensor_parallel = (load(folder, case, n) for n in ("loading", "tensor_parallel"))
    limit = LIMITS[case.partition("_")[0]]
    same(loading.full_state_dict(model), whole.state_dict(), 0.0)
    figures: dict[Any, list[float]] = {}
    for each in (whole, model):
        optimizer = torch.optim.AdamW((p for p in each.parameters() if p.requires_grad), lr=1e-2)
        clip = (nn.utils if each is whole else tensor_parallel).clip_grad_norm_
        torch.manual_seed(2)
        for step in range(20):
            loss = each(**batch(step % 2)).loss
            loss.backward()
            norm = clip(list(each.parameters()), 0.5)
            figures.setdefault(each, []).extend([loss.item(), norm.item()])
            optimizer.step()
            optimizer.zero_grad()
    assert figures[model] == pytest.approx(figures[whole], rel=limit)
    assert figures[whole][-2] < figures[whole][0] - 0.05
    same(loading.full_state_dict(model), whole.state_dict(), limit)
    for each in (whole, model):
        each.eval()
    same({"": model(**batch(0)).logits}, {"": whole(**batch(0)).logits}, limit)

    check_files(folder, case, whole, model)
    merged = loading.full_state_dict(model.merge_and_unload())
    same(merged, whole.merge_and_unload().state_dict(), limit)


def check_files(folder: Path, case: str, whole: Any, model: Any) -> None:
    """An adapter is saved from several ranks and read by one process, and the other way."""
    from peft import PeftModel

    loading, add = load(folder, case, "loading"), load(folder, case, "lora").add_adapters
    limit = LIMITS[case.partition("_")[0]]
    world = load(folder, case, "tensor_parallel").world_size()
    place = folder / f"{case}_adapter_{world}"
    if world > 1:
        with pytest.raises(RuntimeError, match="only this rank's part"):
            model.save_pretrained(place)
    state = loading.full_state_dict(model)
    if not dist.is_initialized() or dist.get_rank() == 0:
        model.save_pretrained(place, state_dict=state, save_embedding_layers=False)
    if dist.is_initialized():
        dist.barrier()
    plain, split = models(folder, case)
    want = whole(**batch(3)).logits
    for each in (
        PeftModel.from_pretrained(plain, place),
        add(split, lambda split: PeftModel.from_pretrained(split, place)),
    ):
        same({"": each(**batch(3)).logits}, {"": want}, limit)
    assert loading.full_state_dict(split).keys() == plain.state_dict().keys()
    # another one beside it, and none
    add(model, lambda model: model.load_adapter(place, "other"))
    model.set_adapter("other")
    same({"": model(**batch(3)).logits}, {"": want}, limit)
    with model.disable_adapter(), whole.disable_adapter():
        same({"": model(**batch(3)).logits}, {"": whole(**batch(3)).logits}, limit)
    model.set_adapter("default")
    model.delete_adapter("other")
    copied = copy.deepcopy(model)
    same({"": copied(**batch(3)).logits}, {"": want}, limit)


def check_all(folder: Path, cases: tuple[str, ...]) -> None:
    for case in cases:
        check_training(folder, case, lora_dropout=0.2)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (1, ("llama",)),
        long(2, ("bert", "llama", "gpt2_sequence")),
        long(2, ("gpt2", "llama_sequence", "bert_fused")),
        long(4, ("gpt2", "llama", "llama_sequence")),
    ],
)
def test_an_adapter_is_that_of_one_process(packages, world, cases):
    run(check_all, world, packages(*(f"{case}_lora" for case in cases)), cases)


REFUSED = {
    "an embedding's": ({"target_modules": ["embed_tokens"]}, "its adapter is more than two"),
    "another product": ({"use_dora": True}, "its adapter is more than two weights"),
    "a bias": ({"lora_bias": True}, "its adapter is more than two weights"),
    "a copy": ({"modules_to_save": ["o_proj"], "target_modules": ["q_proj"]}, "is no LoRA adapter"),
    "of the weights": ({"init_lora_weights": "olora"}, "Please clone"),
    "of principal ones": ({"init_lora_weights": "pissa_niter_2"}, "non-finite"),
}


def check_refusals(folder: Path) -> None:
    from peft import get_peft_model

    add = load(folder, "llama", "lora").add_adapters
    for name, (further, words) in REFUSED.items():
        _, split = models(folder, "llama")
        before = {n: p.clone() for n, p in split.float().named_parameters()}
        given = {"target_modules": ["o_proj"], **further}
        with pytest.raises(Exception, match=words) as caught:
            add(split, lambda split, given=given: get_peft_model(split, settings("", **given)))
        if "weights" not in words and "adapter" not in words:  # torch's own words
            assert "begin with what is made of their weights" in caught.value.__notes__[0]
        now = {n.replace(".base_layer", ""): p for n, p in split.named_parameters()}
        kept = before.keys() & now.keys()
        assert len(kept) > 10 and all(torch.equal(now[n], before[n]) for n in kept), name


def check_seeds(folder: Path) -> None:
    from peft import get_peft_model

    add = load(folder, "llama", "lora").add_adapters
    _, split = models(folder, "llama")
    torch.manual_seed(dist.get_rank())
    with pytest.raises(ValueError, match="the ranks have added different adapters: call"):
        add(split, lambda split: get_peft_model(split, settings("llama")))
    _, split = adapted(folder, "llama", lora_dropout=0.2)
    torch.manual_seed(dist.get_rank())
    with pytest.raises(RuntimeError, match="the ranks draw different ones here"):
        split(**batch(0))


def check_what_is_refused(folder: Path) -> None:
    check_refusals(folder)
    check_seeds(folder)


@pytest.mark.processes
def test_what_would_train_otherwise_is_refused(packages):
    run(check_what_is_refused, 2, packages("llama_lora"))
