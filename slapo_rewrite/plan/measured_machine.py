"""Measures this machine in seconds: a matrix product, a copy, an all-reduce of two processes."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.multiprocessing.spawn import ProcessException, start_processes

from slapo_rewrite.simulate.hardware import Device, Hardware, Link, no_such_products, own_device

ROUNDS = 5
SMALL, LARGE = 2**12, 2**24  # bytes of the all-reduces
WIDTH = {"cpu": 1024, "cuda": 8192}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
COPIED = {"cpu": 2**27, "cuda": 2**30}


def measured_machine(node: int, precision: str | None = None) -> Hardware:
    """Measures this machine, as a row of the table of hardware.

    The ranks of a node share it; on the CPU they also share its memory. The default precision of
    matrix products is `bf16` on a GPU and `fp32` on the CPU.
    """
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    precision = precision or ("bf16" if kind == "cuda" else "fp32")
    if (kind, precision) == ("cpu", "tf32"):
        raise no_such_products("this machine's CPU", precision)
    flops = _products(kind, precision)
    source = torch.zeros(COPIED[kind], dtype=torch.uint8, device=kind)
    target = torch.empty_like(source)
    bandwidth = 2 * COPIED[kind] / _seconds(lambda: target.copy_(source))
    link = _link(kind)
    if kind == "cuda":
        title = torch.cuda.get_device_name()
        memory = float(torch.cuda.get_device_properties(0).total_memory)
    else:
        title = f"a rank of {node} on this machine's CPU of {torch.get_num_threads()} threads"
        flops, bandwidth = flops / node, bandwidth / node
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / node
    said = (
        f"measured on this machine ({title}): {flops / 1e12:.3g} Tflop/s in {precision}, "
        f"{bandwidth / 1e9:.3g} GB/s",
        f"two processes send each other {link.bandwidth / 1000000000.0:.3g} GB/s after "
        f"{link.latency * 1000000.0:.0f} us"
        if link is not None
        else ("links between ranks cannot be measured with one GPU: assumed to be as fast as it"),
        "links between nodes are assumed to be as fast as those between ranks",
    )
    link = link or Link(10e-6, bandwidth)
    device = own_device(flops, bandwidth) if kind == "cuda" else Device(flops, bandwidth)
    return Hardware(
        "cpu" if kind == "cpu" else "measure", title, device, memory, link, link, precision, said
    )


def _products(kind: str, precision: str) -> float:
    """The FLOPs per second of matrix products."""
    width, dtype = WIDTH[kind], DTYPES.get(precision, torch.float32)
    one, other = (torch.randn(width, width, device=kind, dtype=dtype) for _ in range(2))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        return 2 * width**3 / _seconds(lambda: one @ other)
    finally:
        torch.set_float32_matmul_precision(before)


def _seconds(work: Callable[[], Any]) -> float:
    """The minimal time of several rounds."""
    least = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        least = min(least, time.perf_counter() - start)
    return least


def _link(kind: str) -> Link | None:
    """The link between two processes; None if there is only one GPU."""
    if kind == "cuda" and torch.cuda.device_count() < 2:
        return None
    # CPU ranks are forked, which need not import torch again; CUDA does not work after a fork.
    how = "spawn" if kind == "cuda" else "fork"
    queue: Any = multiprocessing.get_context(how).SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        try:
            given = kind, f"{folder}/store", queue
            start_processes(_summed, given, nprocs=2, start_method=how)  # type: ignore[no-untyped-call]
        except ProcessException:
            return None
    small, large = queue.get()
    latency = max(small, 1e-7)
    # An all-reduce of two ranks sends as many bytes as the tensor has.
    return Link(latency, LARGE / max(large - latency, 1e-9))


def _summed(rank: int, kind: str, store: str, queue: Any) -> None:
    torch.set_num_threads(1)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
    if kind == "cuda":
        torch.cuda.set_device(rank)
    found = []
    for size in (SMALL, LARGE):
        given = torch.zeros(size, dtype=torch.uint8, device=kind)
        dist.all_reduce(given)  # opens connections
        found.append(_seconds(lambda given=given: dist.all_reduce(given)))  # type: ignore[misc]
    if rank == 0:
        queue.put(tuple(found))
    dist.destroy_process_group()
