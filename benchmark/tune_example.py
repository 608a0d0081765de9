"""Does `slapo-rewrite tune` find the best of a space that is small enough to try all of it?

    python -m benchmark.tune_example

The example GPT (`examples/train_gpt/gpt.py`) on two CPU processes: they share each layer or are
replicas, none, half or all of its blocks are recomputed, and each takes 4, 8, 16 or 32 rows: 24
points. Each trial rewrites, starts `torchrun`, trains for some seconds and reports rows per second.

All points are tried first; then the default strategy starts again, with at most eight trials of its
own. Its choice is judged by the measurement of the first search at that point.

Writes `benchmark/results/tune_example.json`.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmark import report
from slapo_rewrite.tune.knob_space import shown
from slapo_rewrite.tune.tuning import Searched, Wanted, tune

NAME = "tune_example"
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_gpt"
MOST_TRIALS, WITHIN = 8, 0.02

SCHEDULE = '''\
"""The example GPT on two processes, in several ways."""

from typing import Annotated

import torch

from slapo_rewrite import Choices


def model(m):
    return m.GPT(m.GPTConfig(n_layer=6, n_embd=128))


def inputs(model):
    windows = torch.randint(256, (2, 17))
    return {"ids": windows[:, :-1], "targets": windows[:, 1:]}


def loss(outputs):
    return outputs[1]


def schedule(
    s,
    tensor_parallel: Annotated[bool, Choices(False, True)] = True,
    ckpt_ratio: Annotated[float, Choices(0.0, 0.5, 1.0)] = 0.0,
):
    if tensor_parallel:
        s["blocks.*.attention.{query,key,value}"].shard(["weight", "bias"], axis=0)
        s["blocks.*.attention.out"].shard("weight", axis=1)
        s["blocks.*.mlp.up"].shard(["weight", "bias"], axis=0)
        s["blocks.*.mlp.down"].shard("weight", axis=1)
        s.infer_sync()
    s["blocks"][:ckpt_ratio].checkpoint()


def space(knobs, batch_size: Annotated[int, Choices(4, 8, 16, 32)] = 8):
    return True
'''

TRAIN = '''\
"""Trains a rewritten GPT for some seconds, and prints how many rows a second it took."""

import importlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

SECONDS = 3.0
folder, is_split, rows = Path(sys.argv[1]), sys.argv[2] == "true", int(sys.argv[3])
sys.path.insert(0, str(folder.parent))
gpt = importlib.import_module(f"{folder.name}.gpt")
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
config = gpt.GPTConfig(n_layer=6, n_embd=128)
if is_split:
    loading = importlib.import_module(f"{folder.name}.loading")
    model = loading.build(lambda: gpt.GPT(config))
else:
    model = DistributedDataParallel(gpt.GPT(config))
optimizer = torch.optim.AdamW(model.parameters())
windows = torch.randint(256, (rows, 65), generator=torch.Generator().manual_seed(1))
ids, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def step():
    model(ids=ids, targets=targets)[1].backward()
    optimizer.step()
    optimizer.zero_grad()


for _ in range(3):
    step()
dist.barrier()
start, steps = time.perf_counter(), 0
is_over = torch.zeros(1)
while not is_over:
    step()
    steps += 1
    is_over.fill_(time.perf_counter() - start > SECONDS)
    dist.broadcast(is_over, 0)
seconds = time.perf_counter() - start
if dist.get_rank() == 0:
    print(json.dumps({"throughput": steps * rows * (1 if is_split else 2) / seconds}))
sys.stdout.flush()
dist.barrier()
os._exit(0)  # once in some hundreds of runs torch's threads abort a process that ends by itself
'''


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "schedule.py").write_text(SCHEDULE)
        (folder / "train.py").write_text(TRAIN)
        run = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
        wanted = Wanted(
            str(EXAMPLE / "gpt.py"),
            str(folder / "schedule.py"),
            f"{run} {folder / 'train.py'} {{out}} {{tensor_parallel}} {{batch_size}}",
            (),
            folder / "exhaustive",
            strategy="exhaustive",
            timeout_s=120,
        )
        every = tune(wanted, print)
        found = tune(
            replace(wanted, folder=folder / "model", strategy="model", most=MOST_TRIALS), print
        )
    results = summary(every, found)
    report.write(NAME, results, table(results))
    assert results["part_of_best"] >= 1 - WITHIN, results


def summary(every: Searched, found: Searched) -> dict[str, Any]:
    best, chosen = every.best, found.best
    assert best is not None and chosen is not None, "nothing ran"
    measured = {trial.number: trial.throughput for trial in every.trials}
    return {
        "versions": report.versions(),
        "machine": report.machine(),
        "points": len(every.space),
        "best": shown(every.space.points[best.number]),
        "best_rows_a_second": best.throughput,
        "worst_rows_a_second": min(measured.values()),
        "found": shown(found.space.points[chosen.number]),
        "found_rows_a_second": measured[chosen.number],
        "part_of_best": measured[chosen.number] / best.throughput,
        "trials": len(found.trials),
        "ended": found.ended,
        "all": every.as_json()["trials"],
        "tried": found.as_json()["trials"],
    }


def table(results: dict[str, Any]) -> str:
    header = ["", "knobs", "rows a second"]
    rows = [
        ["best of all", results["best"], f"{results['best_rows_a_second']:.0f}"],
        [
            f"found in {results['trials']} trials",
            results["found"],
            f"{results['found_rows_a_second']:.0f} ({results['part_of_best']:.1%})",
        ],
        ["worst of all", "", f"{results['worst_rows_a_second']:.0f}"],
    ]
    return report.rendered(header, rows)


if __name__ == "__main__":
    main()
