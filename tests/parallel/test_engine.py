"""What DeepSpeed's pipeline engine offers beside training steps, with stages in real processes."""

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


def test_the_engine(tmp_path):
    out = GPT.written(tmp_path, 2)
    pipeline, module = imported(out / "pipeline.py"), imported(out / "gpt.py")
    config = module.GPTConfig(**SIZES)
    original = imported(Path(GPT.source)).GPT(config)
    start = {name: tensor.clone() for name, tensor in original.state_dict().items()}
    pipeline.write_checkpoint(tmp_path / "two", start, config, tensor_parallel_size=2)
    pipeline.write_checkpoint(tmp_path / "one", start, config)
    loaded, full, again, trained = run(checkpoints, 4, out, tmp_path)[0]
    for found in (loaded, again):
        torch.testing.assert_close(found, start, rtol=0, atol=0)
    read = pipeline.read_checkpoint(tmp_path / "saved", config)
    assert list(read) == list(start)
    torch.testing.assert_close(read, full, rtol=0, atol=0)
    optimizer = torch.optim.SGD(original.parameters(), lr=0.1, momentum=0.9)
    for number in range(4):
        (original(**inputs(16, number))[1] / 4).backward()
    optimizer.step()
    torch.testing.assert_close(trained, original.state_dict(), rtol=1e-4, atol=1e-5)
