"""How close does each kernel come to the limit of the GPU's memory?

    python -m benchmark.kernels [--only rms_norm] [--seconds 480]
    python -m benchmark.kernels --tiny --output FILE     tries this script out on a CPU
    python -m benchmark.kernels --choose [--device-name h100]

Needs torch, triton and transformers; measures Liger if it is installed. In one process, for each
kernel: eager, `torch.compile`, Liger, ours and eager again as the control: results that differ by
no more than the two eager runs count as the same. Times are medians of replayed CUDA graphs, so
that launches do not count, or of plain calls for code that waits for the device; inputs rotate over
more bytes than the L2 cache holds. The roofline is measured in the same run, first and last: a copy
of 4 GB and a bfloat16 matrix product of 8192; if the two differ by more than 3%, the run is called
unsteady.

Before timing, outputs and gradients are compared with float32, next to eager's own error, and our
kernel runs once with every wait for the device turned into an error.

Writes `benchmark/results/kernels.json`. With `--choose` it measures every backend of the functions
that rules call instead, by the same clock, and writes `rules/measured/DEVICE.json`, by which
`s.apply_all(backend="measured")` chooses.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.metadata
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmark import kernel_choice, report
from benchmark.kernel_cases import KERNELS, Kernel

NAME = "kernels"
PACKAGES = ("torch", "triton", "transformers", "liger-kernel")
CACHE_BYTES = 256 * 2**20  # more than the L2 cache of an H200
STEADY = kernel_choice.STEADY
TIMED_S, LEAST = 0.5, 5  # of repetitions, and of them at least so many
VARIANTS = ("eager", "compile", "liger", "ours", kernel_choice.AGAIN)


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def backward(function: Callable[..., Any], inputs: Sequence[Tensor], seeds: list[Tensor]) -> Any:
    """Outputs and gradients of the inputs that have one.

    Args:
        function: What is run.
        inputs: Its arguments.
        seeds: The outputs' gradients, made at the first call.
    """
    outputs = as_tuple(function(*inputs))
    if not seeds:
        seeds += [torch.ones_like(o) if not o.dim() else torch.randn_like(o) for o in outputs]
    wanted = [x for x in inputs if x.requires_grad]
    return outputs, torch.autograd.grad(outputs, wanted, seeds, allow_unused=True)


# Errors.


def largest_errors(kernel: Kernel, device: str, tiny: bool) -> dict[str, float] | None:
    """The largest error against float32, relative to the largest value, ours and eager's.

    Dropout draws numbers of its own, and is not compared.
    """
    if kernel.random:
        return None
    inputs = kernel.inputs(device, tiny, seed=0, share=1 if tiny else 16)
    wide = [
        x.detach().float().requires_grad_(x.requires_grad) if x.is_floating_point() else x
        for x in inputs
    ]
    torch.manual_seed(0)  # the same gradients in every run
    seeds = [torch.randn_like(o) for o in as_tuple(kernel.eager(*inputs))]
    exact = backward(kernel.eager, wide, [s.float() for s in seeds])
    errors = {}
    for name, function in (("ours", kernel.ours), ("eager", kernel.eager)):
        mine = backward(function, inputs, [s.clone() for s in seeds])
        pairs = [
            (a.float(), b)
            for part, truth in zip(mine, exact, strict=True)
            for a, b in zip(part, truth, strict=True)
            if b is not None
        ]
        errors[name] = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
    return errors


# Times.


class Clock:
    """Times a function.

    Args:
        device: "cuda", or anything else for trying the script out.
        repetitions: How many samples the median is of.
    """

    def __init__(self, device: str, repetitions: int) -> None:
        self.device, self.repetitions = device, repetitions

    def median_s(self, calls: Sequence[Callable[[], Any]]) -> float:
        """Seconds of one call; the calls take turns, each on inputs of its own."""
        if self.device != "cuda":
            return statistics.median(self._wall(calls) for _ in range(self.repetitions))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
            waiting = what_waits(calls[0])
        torch.cuda.current_stream().wait_stream(stream)
        if waiting is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for call in calls:
                    call()
            spans = self._spans([graph.replay])
            del graph
        else:  # a graph cannot hold it
            spans = self._spans(calls)
        torch.cuda.empty_cache()
        return statistics.median(spans) / 1e3 / len(calls)

    def _spans(self, calls: Sequence[Callable[[], Any]]) -> list[float]:
        """Milliseconds of each repetition of the calls, by the device's events."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        for call in calls:
            call()
        torch.cuda.synchronize()
        most = int(TIMED_S / (time.perf_counter() - started))
        repetitions = max(min(self.repetitions, most), LEAST)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repetitions + 1)]
        for mark in marks:
            for call in calls:
                call()
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]

    def _wall(self, calls: Sequence[Callable[[], Any]]) -> float:
        started = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - started) / len(calls)


def copy_rate(clock: Clock, tiny: bool) -> float:
    """Bytes a second of a copy, read and written."""
    source = torch.randn(2**8 if tiny else 2**27, device=clock.device).to(torch.bfloat16)
    source = source.repeat(16)
    target = torch.empty_like(source)
    # No `copy_`, which in a graph is not carried out by a kernel, and slower.
    return 4 * source.numel() / clock.median_s([lambda: torch.neg(source, out=target)])


def product_rate(clock: Clock, tiny: bool) -> float:
    """Floating-point operations a second of a matrix product."""
    n = 64 if tiny else 8192
    a, b = (torch.randn(n, n, device=clock.device).to(torch.bfloat16) for _ in range(2))
    return 2 * n**3 / clock.median_s([lambda: a @ b])


def roofline(clock: Clock, tiny: bool) -> dict[str, float]:
    """The measured limits of memory and arithmetic."""
    return {
        "copy_bytes_per_s": copy_rate(clock, tiny),
        "product_flops": product_rate(clock, tiny),
    }


def find_variants(kernel: Kernel, compiled: bool) -> dict[str, Callable[..., Any]]:
    """The variants to measure, in order; with Liger if it is installed."""
    found: dict[str, Callable[..., Any]] = {"eager": kernel.eager}
    if compiled:
        found["compile"] = torch.compile(kernel.eager, dynamic=False)
    if kernel.liger is not None:
        try:
            liger = importlib.import_module("liger_kernel.transformers.functional")
        except ImportError:
            pass
        else:
            found["liger"] = kernel.liger(liger)
    return found | {"ours": kernel.ours, kernel_choice.AGAIN: kernel.eager}


def measure(kernel: Kernel, clock: Clock, limits: dict[str, float], options: Any) -> dict[str, Any]:
    """One kernel's errors, times and floors."""
    sets = [kernel.inputs(clock.device, options.tiny, seed=0)]
    size = sum(x.numel() * x.element_size() for x in sets[0])
    copies = 1 if options.tiny else min(-(-CACHE_BYTES // size), 8)
    sets += [kernel.inputs(clock.device, options.tiny, seed) for seed in range(1, copies)]
    floors = kernel.floor_s(sets[0], limits["copy_bytes_per_s"], limits["product_flops"])
    row: dict[str, Any] = {
        "sizes": kernel.tiny if options.tiny else kernel.sizes,
        "floor_s": {"forward": floors[0], "both": floors[1]},
        "errors": largest_errors(kernel, clock.device, options.tiny),
        "waits": waits(kernel, sets[0], clock.device),
        "seconds": {},
    }
    for name, function in find_variants(kernel, compiled=not options.tiny).items():
        if name != "ours" and time.monotonic() > options.deadline:
            row["seconds"][name] = {"failed": "out of time"}
            continue
        try:
            row["seconds"][name] = times(function, sets, clock)
        except Exception as error:  # a peer that fails must not end the others
            row["seconds"][name] = {"failed": f"{type(error).__name__}: {error}"[:200]}
    return row


def times(function: Callable[..., Any], sets: list[list[Tensor]], clock: Clock) -> dict[str, float]:
    """Seconds forwards, and forwards and backwards."""
    seeds: list[Tensor] = []

    def call(inputs: list[Tensor]) -> Callable[[], Any]:
        return lambda: backward(function, inputs, seeds)

    call(sets[0])()
    forward = clock.median_s([lambda inputs=inputs: function(*inputs) for inputs in sets])
    return {"forward": forward, "both": clock.median_s([call(inputs) for inputs in sets])}


def waits(kernel: Kernel, inputs: list[Tensor], device: str) -> str | None:
    """The error if our kernel waits for the device; None without a GPU."""
    if device != "cuda":
        return None
    backward(kernel.ours, inputs, [])  # compiles
    return what_waits(lambda: backward(kernel.ours, inputs, []))


def what_waits(call: Callable[[], Any]) -> str | None:
    """The error if a call, which is already compiled, waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        return str(error)[:200]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


# Reports.


def machine(device: str) -> dict[str, Any]:
    """The machine and the versions of a measurement."""
    found: dict[str, Any] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        gpu = {"name": properties.name, "multiprocessors": properties.multi_processor_count}
        return {"gpu": gpu | {"cuda": torch.version.cuda}, "versions": found}
    return {"gpu": None, **report.machine(), "versions": found}


def table(results: dict[str, Any]) -> str:
    """The results for the README."""
    rows = []
    for name, row in results["kernels"].items():
        floor = row["floor_s"]["both"]
        cells: list[Any] = [name, f"{floor * 1e6:.0f}"]
        for variant in VARIANTS:
            seconds = row["seconds"].get(variant, {}).get("both")
            cells.append("-" if seconds is None else f"{seconds * 1e6:.0f}")
        ours = row["seconds"].get("ours", {})
        for part in ("forward", "both"):
            share = row["floor_s"][part] / ours[part] if part in ours else None
            cells.append("-" if share is None else f"{share:.0%}")
        errors = row["errors"]
        cells.append("-" if errors is None else f"{errors['ours'] / errors['eager']:.2f}")
        rows.append(cells)
    header = ["microseconds, forward and backward", "floor", *VARIANTS]
    header += ["ours at the limit, forward", "and backward", "error over eager's"]
    text = report.rendered(header, rows)
    limits = results["roofline"]["first"]
    steady = "steady" if results["steady"] else "UNSTEADY: no claim"
    copy, product = limits["copy_bytes_per_s"] / 1e12, limits["product_flops"] / 1e12
    on = (results["machine"]["gpu"] or {"name": "a CPU, to try the script out"})["name"]
    return f"{text}\nOn {on}: copies {copy:.2f} TB/s, products {product:.0f} TFLOP/s, {steady}.\n"


def is_steady(first: dict[str, float], last: dict[str, float]) -> bool:
    """Whether the machine was as fast at the end as at the beginning."""
    return all(abs(last[name] / value - 1) <= STEADY for name, value in first.items())


def choose(options: argparse.Namespace, clock: Clock) -> None:
    """Measures the backends of what rules call, and writes the table."""
    found = [
        *kernel_choice.measurements(
            options.only, options.tiny, clock, CACHE_BYTES, options.deadline
        )
    ]
    on = machine(clock.device)
    device = on["gpu"]["name"] if on["gpu"] else "a CPU, to try the script out"
    text = kernel_choice.table(device, on["versions"], found)
    name = options.device_name or kernel_choice.short_name(device)
    if options.tiny and not options.output:
        print(text, end="")
    else:
        path = options.output or kernel_choice.FOLDER / f"{name}.json"
        path.write_text(text)
        print(f"wrote {path}: {len(found)} measurements", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and writes down."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="kernels whose names begin so")
    parser.add_argument("--seconds", type=float, default=480, help="no peer begins after this")
    parser.add_argument("--tiny", action="store_true", help="small sizes, on the CPU")
    parser.add_argument("--choose", action="store_true", help="measure backends, for schedules")
    parser.add_argument("--device-name", help="what schedules are to call this device")
    parser.add_argument("--output", type=Path, help="the result file, instead of the usual one")
    options = parser.parse_args(arguments)
    device = "cpu" if options.tiny else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("benchmark.kernels: there is no GPU here; --tiny tries the script out on the CPU")
    options.deadline = time.monotonic() + options.seconds
    clock = Clock(device, 2 if options.tiny else 20)
    if options.choose:
        choose(options, clock)
        return
    results: dict[str, Any] = {"machine": machine(device), "tiny": options.tiny}
    results["roofline"] = {"first": roofline(clock, options.tiny)}
    results["kernels"] = {}
    for kernel in KERNELS:
        if kernel.name.startswith(options.only):
            print(kernel.name, file=sys.stderr)
            limits = results["roofline"]["first"]
            results["kernels"][kernel.name] = measure(kernel, clock, limits, options)
            if options.output:
                options.output.write_text(json.dumps(results, indent=1) + "\n")
            gc.collect()  # what failed may hold tensors in its traceback
            if device == "cuda":
                torch.cuda.empty_cache()
    results["roofline"]["last"] = roofline(clock, options.tiny)
    results["steady"] = is_steady(**results["roofline"])
    if options.output or options.tiny or options.only:
        if options.output:
            options.output.write_text(json.dumps(results, indent=1) + "\n")
        print(table(results))
    else:
        report.write(NAME, results, table(results))


if __name__ == "__main__":
    main()
