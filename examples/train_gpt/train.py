"""Trains gpt.py on text.txt: in one process, or on several, by what slapo-rewrite wrote of it.

    python train.py --single
    torchrun --nproc-per-node 4 train.py --tensor 2

Both print the same losses.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from gpt import GPT, GPTConfig

Settings = dict[str, Any]

HERE = Path(__file__).parent
CONFIG = GPTConfig()


def main() -> None:
    """Reads the command line, and trains."""
    parser = argparse.ArgumentParser(description="Train a small GPT.")
    parser.add_argument("--single", action="store_true", help="the original, in one process")
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--steps", type=int, default=100, help="how far to train")
    parser.add_argument("--text", type=Path, default=HERE / "text.txt", help="what to train on")
    parser.add_argument("--save", help="a folder for the checkpoint of the last step")
    parser.add_argument("--resume", help="a folder with a checkpoint to go on from")
    args = parser.parse_args()
    settings = json.loads((HERE / "ds_config.json").read_text())
    text = torch.tensor(list(args.text.read_bytes()))
    torch.manual_seed(0)  # every rank alike: each draws its part of the same weights
    if args.single:
        train_in_one_process(text, settings, args.steps)
    else:
        train_with_deepspeed(text, settings, args)


def train_in_one_process(text: Tensor, settings: Settings, steps: int) -> None:
    """The original model, and what DeepSpeed's settings say, written out."""
    size = settings["train_micro_batch_size_per_gpu"]
    micro_batches = settings["train_batch_size"] // size
    model = GPT(CONFIG)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    scheduler = LambdaLR(optimizer, warmup)
    for step in range(steps):
        total = 0.0
        for number in range(micro_batches):
            _, loss = model(**micro_batch(text, size, step * micro_batches + number))
            (loss / micro_batches).backward()
            total += loss.item() / micro_batches
        clip_grad_norm_(model.parameters(), settings["gradient_clipping"])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        report(step, total)


def train_with_deepspeed(text: Tensor, settings: Settings, args: argparse.Namespace) -> None:
    """The stages in parallel/, run by DeepSpeed's pipeline engine."""
    import deepspeed
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    from parallel import pipeline

    deepspeed.utils.logger.setLevel(logging.WARNING)
    # An operation of DeepSpeed's for CPUs, whose compilation takes half a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    stages = len(pipeline.STAGES)
    processes = torch.distributed.get_world_size()
    replicas, left = divmod(processes, stages * args.tensor)
    if left:
        raise SystemExit(f"{processes} processes are not {stages} x {args.tensor} x a number")
    topology = PipeModelDataParallelTopology(stages, args.tensor, replicas)
    module = pipeline.build(CONFIG, topology=topology)
    optimizer = AdamW(module.parameters(), lr=3e-3)
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        lr_scheduler=LambdaLR(optimizer, warmup),
        config=settings,
    )
    if args.resume:
        engine.load_checkpoint(args.resume)
    size, micro_batches = engine.train_micro_batch_size_per_gpu(), engine.micro_batches
    replica = engine.grid.get_data_parallel_rank()
    for step in range(engine.global_steps, args.steps):
        first = (step * replicas + replica) * micro_batches
        numbers = range(first, first + micro_batches)
        batches = (pipeline.batch(**micro_batch(text, size, number)) for number in numbers)
        loss = engine.train_batch(batches)
        if engine.global_rank == 0:
            report(step, loss.item())
    if args.save:
        engine.save_checkpoint(args.save)
    torch.distributed.destroy_process_group()


def micro_batch(text: Tensor, size: int, number: int) -> dict[str, Tensor]:
    """What the model is given: pieces of the text, and the byte that comes after each byte."""
    generator = torch.Generator().manual_seed(number)
    last = len(text) - CONFIG.block_size
    starts = torch.randint(last, (size,), generator=generator).tolist()
    pieces = torch.stack([text[start : start + CONFIG.block_size + 1] for start in starts])
    return {"ids": pieces[:, :-1].contiguous(), "targets": pieces[:, 1:].contiguous()}


def warmup(step: int) -> float:
    """Which part of the learning rate a step has."""
    return min(1.0, (step + 1) / 10)


def report(step: int, loss: float) -> None:
    """Prints a step's loss."""
    print(f"step {step:4}  loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
