"""How long is a training step at two tensor-parallel ranks, compared with other ways to split it?

    python -m benchmark.tensor_parallel

A Llama in two gloo processes on the CPU, forward and backward pass: rewritten by the bundled
schedule, and the original split by transformers' `tp_plan`, by torch's `parallelize_module` (a plan
with the same layers) and by DeepSpeed's AutoTP. All start from one checkpoint, and each must give
the original's loss and hold about half of the parameters. They take turns, in alternating order;
ratios are of times of one round. The small model is bound by the host's work, like small layers on
a GPU.

Writes `benchmark/results/tensor_parallel.json`.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from benchmark import report
from benchmark.collectives import Listener

NAME = "tensor_parallel"
WORLD = 2
ROUNDS, STEPS = 9, 4
COUNTED = 5  # steps, of which that with the fewest collectives counts: others compare copies too
MOST_SHARE = 0.75  # of the parameters on a rank of a model that is split
SOURCE = "transformers.models.llama.modeling_llama"
OURS = "slapo-rewrite"
OUTPUTS = {OURS: (), f"{OURS}, logits gathered": ("parallel_loss=false",)}


@dataclass(frozen=True)
class Size:
    """A Llama, and the batch that it is trained with."""

    layers: int
    hidden: int
    batch: int
    tokens: int

    @property
    def name(self) -> str:
        """Its name in tables."""
        return f"{self.layers} layers of {self.hidden}"

    def config(self) -> Any:
        """Its configuration."""
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=2048,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 3,
            num_hidden_layers=self.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            use_cache=False,
        )

    def inputs(self) -> dict[str, Tensor]:
        """Random tokens, the same on every rank, each of which is predicted."""
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(2048, (self.batch, self.tokens), generator=generator)
        return {"input_ids": ids, "labels": ids}


SIZES = (Size(16, 128, 2, 64), Size(8, 512, 4, 128))


def by_tp_plan(size: Size, folder: Path) -> nn.Module:
    """Split by transformers."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import LlamaForCausalLM

    mesh = init_device_mesh("cpu", (WORLD,))
    model: nn.Module = LlamaForCausalLM.from_pretrained(
        folder / "checkpoint", tp_plan="auto", device_mesh=mesh
    )
    return model


def by_dtensor(size: Size, folder: Path) -> nn.Module:
    """Split by torch, by the same layers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    columns = (*attention, "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    plan: dict[str, Any] = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in rows}
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(original(folder), init_device_mesh("cpu", (WORLD,)), plan)


def by_autotp(size: Size, folder: Path) -> nn.Module:
    """Split by DeepSpeed; its engine is left out of the step."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it takes 30 s to compile
    model = deepspeed.tp_model_init(original(folder), tp_size=WORLD, dtype=torch.float32)
    settings = {
        "train_micro_batch_size_per_gpu": size.batch,
        "tensor_parallel": {"autotp_size": WORLD},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=model, config=settings, optimizer=optimizer)
    module: nn.Module = engine.module
    return module


def rewritten(output: str, size: Size, folder: Path) -> nn.Module:
    """Built from an output, and given the checkpoint's weights."""
    import importlib

    sys.path.insert(0, str(folder))
    model: nn.Module = importlib.import_module(
        f"{folder_of(output)}.modeling_llama"
    ).LlamaForCausalLM(size.config())
    model.load_state_dict(original(folder).state_dict())
    return model


def folder_of(output: str) -> str:
    """The package that an output is written to."""
    return f"llama_{list(OUTPUTS).index(output)}"


def original(folder: Path) -> nn.Module:
    """The original, with the checkpoint's weights."""
    from transformers import LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM.from_pretrained(folder / "checkpoint")
    return model


PEERS: dict[str, Callable[[Size, Path], nn.Module]] = {
    "transformers' tp_plan": by_tp_plan,
    "torch's parallelize_module": by_dtensor,
    "DeepSpeed's AutoTP": by_autotp,
}


def step(model: nn.Module, inputs: dict[str, Tensor]) -> float:
    """Forwards and backwards."""
    loss = model(**inputs).loss
    loss.backward()
    model.zero_grad(set_to_none=True)
    return float(loss.detach())


def held(model: nn.Module) -> int:
    """How many parameters this rank holds; tied ones once."""
    local = (p.to_local() if hasattr(p, "to_local") else p for p in model.parameters())
    return sum(p.numel() for p in local)


def compared(rank: int, size: Size, folder: str, rounds: int) -> None:
    """One rank's part; the first writes what it found."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    dist.init_process_group("gloo")
    place, inputs = Path(folder), size.inputs()
    whole = original(place).train()
    wanted, parameters = step(whole, inputs), held(whole)
    models: dict[str, nn.Module] = {}
    found: dict[str, Any] = {}
    for name in (*OUTPUTS, *PEERS):
        make = PEERS.get(name) or (lambda s, f, output=name: rewritten(output, s, f))
        models[name] = make(size, place).train()
        loss = step(models[name], inputs)
        share = held(models[name]) / parameters
        if abs(loss - wanted) > 1e-4 * abs(wanted):
            raise RuntimeError(f"{name}: a loss of {loss}, the original's is {wanted}")
        if share > MOST_SHARE:
            raise RuntimeError(f"{name}: a rank holds {share:.2f} of the parameters")
        counted = []
        for _ in range(COUNTED):
            with Listener() as listener:
                step(models[name], inputs)
            counted.append(listener.sent)
        least = min(counted, key=Counter.total)
        sizes = [(whole, number) for (_, _, whole), number in least.items()]
        found[name] = {
            "share of the parameters": round(share, 3),
            "collectives": sum(number for _, number in sizes),
            "collective bytes": sum(size * number for size, number in sizes),
            "seconds": [],
            "cpu seconds": [],
        }
    for number in range(rounds):
        names = list(models)
        for name in names if number % 2 == 0 else reversed(names):
            dist.barrier()
            wall, own = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                step(models[name], inputs)
            found[name]["seconds"].append((time.perf_counter() - wall) / STEPS)
            found[name]["cpu seconds"].append((time.process_time() - own) / STEPS)
    if rank == 0:
        torch.save(found, place / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


def measure(size: Size, rounds: int = ROUNDS) -> dict[str, Any]:
    """Every way of splitting a model: times, collectives and what a rank holds."""
    import socket

    from transformers import LlamaForCausalLM

    from slapo_rewrite.emit.rewrite import rewrite
    from slapo_rewrite.emit.write import write

    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
        torch.manual_seed(0)
        LlamaForCausalLM(size.config()).save_pretrained(Path(folder) / "checkpoint")
        for name, knobs in OUTPUTS.items():
            write(Path(folder) / folder_of(name), rewrite(SOURCE, "llama", knobs).files)
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        free.close()
        spawn(compared, (size, folder, rounds), WORLD)
        found: dict[str, Any] = torch.load(Path(folder) / "found.pt")
    for kind in ("seconds", "cpu seconds"):
        ours = found[OURS][kind]
        for row in found.values():
            ratios = [theirs / own for theirs, own in zip(row[kind], ours, strict=True)]
            row |= {kind: round(min(row[kind]), 5)}
            row[f"{kind} over ours"] = round(statistics.median(ratios), 2)
    return found


def table(results: dict[str, Any]) -> str:
    """The results for the README."""
    header = ["split by", "ms", "over ours", "CPU ms a layer", "over ours"]
    header += ["collectives", "MB sent", "of the parameters"]
    rows = []
    for size in SIZES:
        for name, row in results["sizes"][size.name].items():
            cells = [f"{name}, {size.name}", f"{1000 * row['seconds']:.1f}"]
            cells += [f"{row['seconds over ours']:.2f}"]
            cells += [f"{1000 * row['cpu seconds'] / size.layers:.2f}"]
            cells += [f"{row['cpu seconds over ours']:.2f}", str(row["collectives"])]
            cells += [f"{row['collective bytes'] / 1e6:.1f}"]
            rows.append([*cells, f"{row['share of the parameters']:.2f}"])
    return report.rendered(header, rows)


def main() -> None:
    """Measures and writes down."""
    results: dict[str, Any] = {
        "versions": report.versions(("torch", "transformers", "deepspeed")),
        "machine": report.machine(),
        "sizes": {size.name: measure(size) for size in SIZES},
    }
    report.write(NAME, results, table(results))


if __name__ == "__main__":
    main()
