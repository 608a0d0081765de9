"""Rewritten Hugging Face models stay such: checkpoints in and out, generation."""

from __future__ import annotations

import copy
import importlib
import json
import pickle
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers

from slapo_rewrite.emit.write import write
from slapo_rewrite.schedule.load import ScheduleFile
from tests.marks import long
from tests.processes import run

FILES = ("load_pretrained", "save_pretrained")
CASES = {
    "bert": "BertForMaskedLM",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "t5": "T5ForConditionalGeneration",
}
GENERATING = ("gpt2", "llama", "t5")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory, made) -> Path:
    """The rewritten models, and of each original a checkpoint and what it generates."""
    folder = tmp_path_factory.mktemp("outputs")
    for name in CASES:
        source = f"transformers.models.{name}.modeling_{name}"
        write(folder / f"{name}_read", made(source, name, ["ckpt_ratio=0.5"], *FILES).files)
        if name in GENERATING:
            write(
                folder / f"{name}_split_read",
                made(source, name, [], *FILES).files,
            )
        torch.manual_seed(0)
        original = ScheduleFile.load(name).module.verify_model(importlib.import_module(source))
        with torch.no_grad():  # such that what is generated varies
            for parameter in original.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        # Several files and an index, as large checkpoints have.
        original.save_pretrained(folder / f"{name}_weights", max_shard_size="60KB")
        torch.save((original.state_dict(), generated(name, original)), folder / f"{name}.pt")
    return folder


def generated(name: str, model) -> list[torch.Tensor]:
    """Tokens: greedily with and without a cache, by beams, and drawn at random."""
    if name not in GENERATING:
        return []
    ids = torch.tensor([[5, 6, 7], [9, 3, 4]])
    each = {"max_new_tokens": 6, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    if model.config.is_encoder_decoder:
        each["decoder_start_token_id"] = 0
    found = []
    for how in ({}, {"use_cache": False}, {"num_beams": 2}, {"do_sample": True}):
        torch.manual_seed(1)
        found.append(model.eval().generate(ids, **{"do_sample": False, **each, **how}))
    return found


def load_module(folder: Path, name: str, file: str):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(f"{name}_read.{file}")


def same(actual, expected) -> None:
    assert actual.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in actual.items())


@pytest.mark.parametrize("name", CASES)
def test_from_and_save_pretrained_in_a_world_of_one(outputs, tmp_path, name):
    module = load_module(outputs, name, f"modeling_{name}")
    state, tokens = torch.load(outputs / f"{name}.pt")
    model, said = getattr(module, CASES[name]).from_pretrained(
        outputs / f"{name}_weights", output_loading_info=True
    )
    assert not any(said.values()), said
    same(model.state_dict(), state)
    assert all(map(torch.equal, generated(name, model), tokens))

    original = getattr(transformers, CASES[name]).from_pretrained(outputs / f"{name}_weights")
    written = {}
    for side in (original, model):
        folder = tmp_path / type(side).__module__
        side.save_pretrained(folder, max_shard_size="60KB")
        written[side] = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert len(written[model]) > 9 and written[model] == written[original]


class Asked:
    """Counts what is read of a checkpoint, as `safe_open` gives it."""

    numbers = 0  # how many, of all tensors
    whole: tuple[str, ...] = ()  # tensors that were read as a whole

    def __init__(self, file):
        self.file = self.tensors = file

    def __enter__(self):
        self.tensors = self.file.__enter__()
        return self

    def __exit__(self, *error):
        return self.file.__exit__(*error)

    def keys(self):
        return self.tensors.keys()

    def get_tensor(self, name):
        Asked.whole += (name,)
        return self.counted(self.tensors.get_tensor(name))

    def get_slice(self, name):
        self.slice = self.tensors.get_slice(name)
        return self

    def get_shape(self):
        return self.slice.get_shape()

    def __getitem__(self, key):
        return self.counted(self.slice[key])

    def counted(self, tensor):
        Asked.numbers += tensor.numel()
        return tensor


def check_load(folder: Path, name: str, loading, module, state) -> None:
    """Every rank reads what it keeps, and nothing else."""
    model = ScheduleFile.load(name).module.verify_model(module)
    Asked.numbers, Asked.whole, opened = 0, (), loading.open_checkpoint
    loading.open_checkpoint = lambda file: Asked(opened(file))
    assert loading.load_pretrained(model, folder / f"{name}_weights") == ([], [])
    loading.open_checkpoint = opened
    same(loading.full_state_dict(model), state)
    held = {id(t): t.numel() for t in model.state_dict(keep_vars=True).values()}
    assert Asked.numbers == sum(held.values())
    assert not set(Asked.whole) & loading.shards(model).keys()


def check_load_from_meta(folder: Path, name: str, loading, module) -> None:
    """Built without memory, a model is after loading what it is if built with weights."""
    schedule = ScheduleFile.load(name).module
    expected = schedule.verify_model(module)
    loading.load_pretrained(expected, folder / f"{name}_weights")
    with torch.device("meta"):
        model = schedule.verify_model(module)
    assert loading.load_pretrained(model, folder / f"{name}_weights") == ([], [])
    same(model.state_dict(), expected.state_dict())
    same(dict(model.named_buffers()), dict(expected.named_buffers()))
    own = [dict(side.named_parameters()) for side in (model, expected)]
    assert own[0].keys() == own[1].keys(), "what is tied stays so"
    for key, parameter in own[0].items():
        assert vars(parameter) == vars(own[1][key]), key
        assert parameter.requires_grad == own[1][key].requires_grad
    ids = torch.tensor([[5, 6, 7], [9, 3, 4]])
    inputs = {"decoder_input_ids": ids, "use_cache": False} if name == "t5" else {}
    losses = []
    for side in (model, expected):
        loss = side.eval()(input_ids=ids, labels=ids, **inputs).loss
        loss.backward()
        torch.optim.SGD(side.parameters(), 0.1).step()
        losses.append(loss)
    assert torch.equal(*losses)
    same(model.state_dict(), expected.state_dict())


def check_save(folder: Path, name: str, loading, module, world: int) -> None:
    """What several ranks write is what the original writes in one process, byte for byte."""
    model = ScheduleFile.load(name).module.verify_model(module)
    loading.load_pretrained(model, folder / f"{name}_weights")
    there, wanted = folder / f"{name}_of_{world}", folder / f"{name}_weights"
    loading.save_pretrained(model, there, 60_000)
    original, said = getattr(transformers, CASES[name]).from_pretrained(
        there, output_loading_info=True
    )
    assert not any(said.values()), said
    same(original.state_dict(), torch.load(folder / f"{name}.pt")[0])
    for file in ("config.json", *(["generation_config.json"] if name in GENERATING else [])):
        assert (there / file).read_bytes() == (wanted / file).read_bytes()
    index = json.loads((there / "model.safetensors.index.json").read_text())
    theirs = json.loads((wanted / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == theirs["weight_map"].keys()
    assert index["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    loading.wait_for_group()

    loading.save_pretrained(model, there)  # in one file, and nothing is left of the others
    assert [f.name for f in there.glob("model*")] == ["model.safetensors"]
    again = ScheduleFile.load(name).module.verify_model(module)
    loading.load_pretrained(again, there)
    same(again.state_dict(), model.state_dict())
    if world > 1:
        for side in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            for given in ({}, {"state_dict": model.state_dict()}):
                with pytest.raises(RuntimeError, match=r"use `loading\.save_pretrained` of"):
                    side.save_pretrained(folder / f"{name}_refused", **given)
        with pytest.raises(RuntimeError, match=r"use `loading\.load_pretrained"):
            getattr(module, CASES[name]).from_pretrained(wanted)
    # transformers' own way, with all weights in memory on every rank
    full = loading.full_state_dict(model)
    if not dist.is_initialized() or dist.get_rank() == 0:
        model.save_pretrained(folder / f"{name}_whole_{world}", state_dict=dict(full))
        same(type(original).from_pretrained(folder / f"{name}_whole_{world}").state_dict(), full)


def check_build(name: str, loading, module, shards) -> None:
    # transformers initialises a file of its own a little differently from one outside of it,
    # so the reference is the rewritten model in a world of one.
    schedule = ScheduleFile.load(name).module
    torch.manual_seed(3)
    with shards.world_of(1):
        whole = schedule.verify_model(module).state_dict()
    torch.manual_seed(3)
    built = loading.full_state_dict(loading.build(partial(schedule.verify_model, module)))
    same(built, whole)


def check_all(folder: Path) -> None:
    for name in CASES:
        module = load_module(folder, name, f"modeling_{name}")
        loading = load_module(folder, name, "loading")
        tensor_parallel = load_module(folder, name, "tensor_parallel")
        state, tokens = torch.load(folder / f"{name}.pt")
        check_load(folder, name, loading, module, state)
        check_load_from_meta(folder, name, loading, module)
        check_save(folder, name, loading, module, tensor_parallel.world_size())
        check_build(name, loading, module, load_module(folder, name, "shards"))
        check_generation(folder, name, name, tokens)
        if name in GENERATING and tensor_parallel.world_size() == 2:
            check_generation(folder, name, f"{name}_split", tokens)


def check_generation(folder: Path, name: str, output: str, tokens: list[torch.Tensor]) -> None:
    """Every rank finds the original's tokens, drawn ones as well where all are seeded alike."""
    module = load_module(folder, output, f"modeling_{name}")
    model = ScheduleFile.load(name).module.verify_model(module)
    load_module(folder, output, "loading").load_pretrained(model, folder / f"{name}_weights")
    assert all(map(torch.equal, generated(name, model), tokens))


@pytest.mark.processes
@pytest.mark.parametrize("world", [1, 2, long(4)])
def test_weights_and_generation(outputs, world):
    run(check_all, world, outputs)


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
        assert "64 = 4 heads of 16 does not divide over 3 ranks" in words
