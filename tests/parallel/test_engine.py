"""DeepSpeed's pipeline engine beyond training steps, with stages in real processes."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parallel.test_pipeline import GPT
from tests.processes import run
from tests.rewriting import imported

pytestmark = pytest.mark.processes

SIZES = {"vocab_size": 203, "block_size": 32, "n_layer": 4, "n_head": 4, "n_embd": 32}


LENGTHS = (16, 24, 8)


class Trainer:
    """An engine of DeepSpeed's with the stages of an output.

    Args:
        out: The output.
        shards: Tensor-parallel ranks of a stage.
        sizes: The model's.
        config: More of the engine's configuration.
        build: More arguments of `build`.
    """

    def __init__(self, out: Path, shards: int, sizes=SIZES, config=(), **build: Any):
        import deepspeed
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend="gloo")
        self.pipeline = imported(out / "pipeline.py")
        self.config = imported(out / "gpt.py").GPTConfig(**sizes)
        stages = len(self.pipeline.STAGES)
        replicas = dist.get_world_size() // (stages * shards)
        topology = PipeModelDataParallelTopology(stages, shards, replicas)
        torch.manual_seed(0)
        self.module = self.pipeline.build(self.config, topology=topology, **build)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        self.engine, *_ = deepspeed.initialize(
            model=self.module,
            optimizer=self.optimizer,
            config={
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 2,
                "gradient_clipping": 0.0,
                "zero_optimization": {"stage": 1},
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 1000,
                "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
                **dict(config),
            },
        )

    def train(self, *lengths: int) -> list[float]:
        """Trains on pieces of such lengths, one length for each step; the losses."""
        return [float(self.engine.train_batch(self.batches(length))) for length in lengths]

    def batches(self, length: int) -> Any:
        """Micro-batches of pieces of a length, this replica's."""
        first = 2 * self.engine.grid.get_data_parallel_rank()
        given = [inputs(length, number) for number in range(first, first + 2)]
        return iter([self.pipeline.batch(**each) for each in given])


def inputs(length: int, number: int) -> dict[str, torch.Tensor]:
    """A micro-batch."""
    generator = torch.Generator().manual_seed(number)
    idx = torch.randint(SIZES["vocab_size"], (2, length + 1), generator=generator)
    return {"idx": idx[:, :-1].contiguous(), "targets": idx[:, 1:].contiguous()}


def checkpoints(out: Path, folder: Path) -> Any:
    """Loads what was written for one or two tensor-parallel ranks; trains, and saves."""
    trainer = Trainer(out, shards=2)
    trainer.engine.load_checkpoint(folder / "two", load_module_only=True)
    loaded = trainer.pipeline.to_full(trainer.module)
    trainer.train(16, 16)
    trainer.engine.save_checkpoint(folder / "saved")
    full = trainer.pipeline.to_full(trainer.module)
    trainer = Trainer(out, shards=1)
    trainer.engine.load_checkpoint(folder / "one", load_module_only=True)
    again = trainer.pipeline.to_full(trainer.module)
    trainer.train(16)  # from the loaded weights, also those that ZeRO keeps
    return loaded, full, again, trainer.pipeline.to_full(trainer.module)


def lengths(out: Path) -> Any:
    """Trains on batches of several lengths, and evaluates some of another one."""
    trainer = Trainer(out, shards=2, dynamic_shape=True)
    losses = trainer.train(*LENGTHS)
    full = trainer.pipeline.to_full(trainer.module)
    on_first = trainer.pipeline.to_full(trainer.module, first_rank_only=True)
    torch.testing.assert_close(on_first, {} if dist.get_rank() else full, rtol=0, atol=0)
    loss, logits = trainer.engine.eval_batch(trainer.batches(12), return_logits=True)
    return losses, full, float(loss), None if logits is None else logits.shape


def dropout(plain: Path, checkpointed: Path) -> Any:
    """What ranks draw, and what they train to, with layers recomputed or not."""
    found = []
    for out in (plain, checkpointed):
        trainer = Trainer(out, shards=2, sizes={**SIZES, "dropout": 0.3})
        drawn = torch.rand(3).tolist()
        losses = trainer.train(16, 16)
        named = trainer.module.named_parameters()
        norms = {name: p.tolist() for name, p in named if "ln_" in name}
        found.append((drawn, norms, losses, trainer.pipeline.to_full(trainer.module)))
    Trainer(plain, shards=1)
    return *found, torch.rand(3).tolist()


def everything(folder: Path, out: Path, *with_dropout: Path) -> Any:
    """All of it, in the same processes."""
    return checkpoints(out, folder), lengths(out), dropout(*with_dropout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def out(folder) -> Path:
    return GPT.written(folder, 2)


@pytest.fixture(scope="module")
def original(out) -> torch.nn.Module:
    torch.manual_seed(0)
    return imported(Path(GPT.source)).GPT(imported(out / "gpt.py").GPTConfig(**SIZES))


@pytest.fixture(scope="module")
def ranks(folder, out, original) -> list[Any]:
    """What the ranks found."""
    pipeline = imported(out / "pipeline.py")
    start, config = original.state_dict(), original.config
    pipeline.write_checkpoint(folder / "two", start, config, tensor_parallel_size=2)
    pipeline.write_checkpoint(folder / "one", start, config)
    lines = ('s["transformer.h.*.attn"].fork_rng()', "s.cut_evenly(2)")
    cases = {"plain": (), "checkpointed": ("ckpt_ratio=1.0",)}
    written = [
        replace(GPT, name=name, cuts={2: lines}, settings=settings).written(folder, 2)
        for name, settings in cases.items()
    ]
    return run(everything, 4, folder, out, *written, timeout_s=300)


def trained(original: torch.nn.Module, steps: list[list[dict[str, torch.Tensor]]]) -> Any:
    """A copy of the original after such steps, and its losses."""
    model = copy.deepcopy(original)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in steps:
        loss = torch.stack([model(**each)[1] for each in step]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


@pytest.mark.long
def test_checkpoints_are_made_of_the_original_and_give_it_back(ranks, folder, out, original):
    loaded, full, again, after = ranks[0][0]
    for found in (loaded, again):
        torch.testing.assert_close(found, original.state_dict(), rtol=0, atol=0)
    read = imported(out / "pipeline.py").read_checkpoint(folder / "saved", original.config)
    assert list(read) == list(original.state_dict())
    torch.testing.assert_close(read, full, rtol=0, atol=0)
    model, _ = trained(original, [[inputs(16, number) for number in range(4)]])
    torch.testing.assert_close(after, model.state_dict(), rtol=1e-4, atol=1e-5)


def test_batches_of_several_lengths(ranks, original):
    model, expected = trained(original, [[inputs(n, 0), inputs(n, 1)] for n in LENGTHS])
    with torch.no_grad():
        evaluated = sum(float(model(**inputs(12, number))[1]) / 2 for number in range(2))
    for _, (losses, full, loss, logits), _ in ranks:
        assert losses == pytest.approx(expected, rel=1e-5)
        assert loss == pytest.approx(evaluated, rel=1e-5)
        torch.testing.assert_close(full, model.state_dict(), rtol=1e-4, atol=1e-5)
        assert logits in (None, (2, 12, 203))


def test_stages_and_replicas_drop_out_for_themselves(ranks):
    (plain, checkpointed, _), *others = (found[2] for found in ranks)
    for of_rank, _, _ in others:  # tensor-parallel ranks agree on what they both hold
        assert of_rank[2] == plain[2]
    drawn = [found[2][0][0] for found in ranks]
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
    assert ranks[0][2][0][1] == ranks[1][2][0][1] and ranks[2][2][0][1] == ranks[3][2][0][1]
    assert len({tuple(found[2][2]) for found in ranks}) == 4
    # What is recomputed is dropped out as before.
    assert checkpointed[2] == plain[2]
    torch.testing.assert_close(checkpointed[3], plain[3], rtol=0, atol=0)
