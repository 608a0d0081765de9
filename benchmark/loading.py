"""How much memory does a rank need to start a model, and how long does it take?

    python -m benchmark.loading

A tensor-parallel Llama in bfloat16, in fresh processes over gloo: initialised by `loading.build`
and `deferred_init.build_deferred`, read by `load_pretrained` into a model on the meta device, and
written by `save_pretrained`; beside them the original, constructed and by `from_pretrained`, in one
process. It measures the increase of private memory (the system's `RssAnon`, read each millisecond)
and the CPU time of the thread that does it, each as the maximum over the ranks. Of several
interleaved rounds the most memory and the least time count.

Writes `benchmark/results/loading.json`.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmark import report
from slapo_rewrite.cli import main as slapo_rewrite
from tests.processes import run

NAME = "loading"
SOURCE = "transformers.models.llama.modeling_llama"
HELPERS = ("build_deferred", "load_pretrained", "save_pretrained")
# What is done by how many ranks.
WAYS = {
    "constructed": (1,),
    "from_pretrained": (1,),
    "load_pretrained": (1, 2, 4),
    "build": (2, 4),
    "build_deferred": (2, 4),
    "save_pretrained": (2, 4),
}
FILE = 100 * 10**6  # bytes of tensors in a file that is written
ROUNDS = 2


@dataclass(frozen=True)
class Size:
    """How large the model is."""

    layers: int
    hidden: int
    vocabulary: int

    def config(self) -> Any:
        """The model's configuration."""
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 11 // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=16,
            num_key_value_heads=16,
        )


LARGE, SMALL = Size(35, 1024, 32_000), Size(1, 64, 128)


@dataclass(frozen=True)
class Use:
    """The memory and time of a call.

    Attributes:
        parameters: Bytes of the parameters that the rank holds in the end.
        peak: Bytes of memory at most, beyond what there was before.
        cpu: Seconds.
    """

    parameters: int
    peak: int
    cpu: float


def private_memory() -> int:
    """Bytes of memory that are this process's own, and no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def used(call: Callable[[], nn.Module]) -> Use:
    """The memory and time of a call that starts a model, or works on one."""
    before = peak = private_memory()
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.001):
            peak = max(peak, private_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.thread_time()
    model = call()
    cpu = time.thread_time() - start
    ended.set()
    watcher.join()
    held = sum(parameter.nbytes for parameter in model.parameters())
    return Use(held, max(peak, private_memory()) - before, cpu)


def of_a_rank(way: str, folder: str, size: Size) -> Use:
    """One rank's memory and time, after a small model has gone through the same."""
    sys.path.insert(0, folder)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.bfloat16)
    start(way, folder, SMALL)
    return start(way, folder, size)


def start(way: str, folder: str, size: Size) -> Use:
    """Starts a model, or writes one."""
    torch.manual_seed(0)
    config, stored = size.config(), f"{folder}/checkpoint_{size.layers}"
    original = importlib.import_module(SOURCE).LlamaForCausalLM
    rewritten = importlib.import_module("rewritten.modeling_llama").LlamaForCausalLM
    loading = importlib.import_module("rewritten.loading")
    deferred_init = importlib.import_module("rewritten.deferred_init")

    def loaded() -> nn.Module:
        with torch.device("meta"):
            model: nn.Module = rewritten(config)
        loading.load_pretrained(model, stored)
        return model

    if way == "save_pretrained":
        model = loaded()

        def saved() -> nn.Module:
            loading.save_pretrained(model, f"{folder}/saved", FILE)
            return model

        return used(saved)
    return used(
        {
            "constructed": lambda: original(config),
            "from_pretrained": lambda: original.from_pretrained(stored),
            "load_pretrained": loaded,
            "build": lambda: loading.build(lambda: rewritten(config)),
            "build_deferred": lambda: deferred_init.build_deferred(lambda: rewritten(config)),
        }[way]
    )


def prepare(folder: str, size: Size) -> None:
    """Rewrites the model, and writes checkpoints of the original."""
    options = [word for name in HELPERS for word in ("--with", name)]
    slapo_rewrite([SOURCE, "--schedule", "llama", *options, "-o", f"{folder}/rewritten"])
    torch.set_default_dtype(torch.bfloat16)
    original = importlib.import_module(SOURCE).LlamaForCausalLM
    for each in (SMALL, size):
        path = f"{folder}/checkpoint_{each.layers}"
        original(each.config()).save_pretrained(path, max_shard_size="300MB")


def in_one_process(function: Callable[..., Any], *args: Any) -> Any:
    """A function's result in a separate process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def measure(
    size: Size = LARGE, ways: dict[str, tuple[int, ...]] = WAYS, rounds: int = ROUNDS
) -> list[dict[str, Any]]:
    """The memory and time of each way with each number of ranks."""
    found: dict[tuple[str, int], list[Use]] = {}
    with tempfile.TemporaryDirectory() as folder:
        in_one_process(prepare, folder, size)
        for _ in range(rounds):
            for way, world in [(way, world) for way, worlds in ways.items() for world in worlds]:
                args = (of_a_rank, way, folder, size)
                ranks = (
                    [in_one_process(*args)]
                    if world == 1
                    else run(args[0], world, *args[1:], timeout_s=400, start="spawn")
                )
                found.setdefault((way, world), []).append(
                    Use(
                        max(use.parameters for use in ranks),
                        max(use.peak for use in ranks),
                        max(use.cpu for use in ranks),
                    )
                )
    return [
        {
            "way": way,
            "ranks": world,
            **asdict(
                Use(
                    uses[0].parameters,
                    max(use.peak for use in uses),
                    round(min(use.cpu for use in uses), 3),
                )
            ),
        }
        for (way, world), uses in found.items()
    ]


def table(results: dict[str, Any]) -> str:
    """The results for the README."""
    rows = [
        [
            row["way"],
            row["ranks"],
            round(row["parameters"] / 2**20),
            round(row["peak"] / 2**20),
            f"{row['peak'] / row['parameters']:.2f}",
            f"{row['cpu']:.2f}",
        ]
        for row in results["rows"]
    ]
    header = ["", "ranks", "a rank holds, MiB", "peak, MiB", "peak over held", "CPU seconds"]
    return report.rendered(header, rows)


def main() -> None:
    """Measures and writes down."""
    results = {
        "versions": report.versions(("torch", "transformers", "safetensors")),
        "machine": report.machine(),
        "rounds": ROUNDS,
        "file": FILE,
        "rows": measure(),
    }
    report.write(NAME, results, table(results))


if __name__ == "__main__":
    main()
