"""Rewritten Hugging Face models stay such: checkpoints in and out, generation."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers

from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.emit.write import write
from slapo_rewrite.schedule.load import ScheduleFile
from tests.processes import run

CASES = [("bert", "BertForMaskedLM"), ("gpt2", "GPT2LMHeadModel")]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> Path:
    """Rewritten BERT and GPT-2, and a checkpoint of each original."""
    folder = tmp_path_factory.mktemp("outputs")
    for name, _ in CASES:
        source = f"transformers.models.{name}.modeling_{name}"
        output = rewrite(source, name, ["ckpt_ratio=0.5"])
        write(folder / f"{name}_out", output.files)
        original = ScheduleFile.load(name).module.verify_model(importlib.import_module(source))
        # Several files and an index, as large checkpoints have.
        original.save_pretrained(folder / f"{name}_weights", max_shard_size="60KB")
        torch.save(original.state_dict(), folder / f"{name}.pt")
    return folder


def load_module(folder: Path, name: str, file: str):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(f"{name}_out.{file}")


@pytest.mark.parametrize(("name", "cls"), CASES)
def test_from_and_save_pretrained_in_a_world_of_one(outputs, tmp_path, name, cls):
    module = load_module(outputs, name, f"modeling_{name}")
    model = getattr(module, cls).from_pretrained(outputs / f"{name}_weights")
    state = torch.load(outputs / f"{name}.pt")
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    model.save_pretrained(tmp_path)
    original = getattr(transformers, cls).from_pretrained(tmp_path)
    assert all(torch.equal(t, state[n]) for n, t in original.state_dict().items())
    if name == "gpt2":
        ids = torch.tensor([[5, 6, 7]])
        kwargs = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(ids, **kwargs), original.generate(ids, **kwargs))


def check_start(folder: Path) -> None:
    for name, _ in CASES:
        module = load_module(folder, name, f"modeling_{name}")
        loading = load_module(folder, name, "loading")
        schedule = ScheduleFile.load(name).module
        state = torch.load(folder / f"{name}.pt")
        model = schedule.verify_model(module)
        loading.load_pretrained(model, folder / f"{name}_weights")
        full = loading.full_state_dict(model)
        assert full.keys() == state.keys()
        assert all(torch.equal(full[n], state[n]) for n in state)

        # transformers initialises a file of its own a little differently from one outside of it,
        # so the reference is the rewritten model in a world of one.
        tensor_parallel = load_module(folder, name, "tensor_parallel")
        torch.manual_seed(3)
        with tensor_parallel.world_of_one():
            whole = schedule.verify_model(module).state_dict()
        torch.manual_seed(3)
        built = loading.full_state_dict(loading.build(partial(schedule.verify_model, module)))
        assert all(torch.equal(built[n], t) for n, t in whole.items())


@pytest.mark.processes
@pytest.mark.parametrize("world", [1, 2])
def test_starting_from_a_checkpoint_or_a_seed(outputs, world):
    run(check_start, world, outputs)


def fail_to_build(folder: Path) -> str:
    module = load_module(folder, "bert", "modeling_bert")
    try:
        ScheduleFile.load("bert").module.verify_model(module)
    except ValueError as error:
        return str(error)
    return "built"


@pytest.mark.processes
def test_a_world_size_that_does_not_fit_fails_in_words(outputs):
    """Four heads over three ranks."""
    for words in run(fail_to_build, 3, outputs):
        assert "64 does not divide over 3 ranks in units of 16" in words
