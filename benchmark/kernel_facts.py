"""How fast are the kernels by their machine code? A prediction, which needs no GPU.

    python -m benchmark.kernel_facts [--only swiglu]

Every kernel is compiled by Triton's own compiler for three GPUs, in bfloat16, as its launcher would
launch it there at sizes that people use, and its instructions are counted. The predicted time is
the longest of the following, for each wave of programs that run at the same time:

- memory: the bytes of the tensors that it reads and writes, by the rate of a copy;
- issue: one instruction of a warp a cycle on each of a multiprocessor's four schedulers;
- integer, special: those of a unit that takes a warp's instruction in two or in eight cycles;
- latency: one program from its first to its last instruction. It waits `LATENCY` cycles before it
  uses a value that it has just begun to load, 30 at a barrier, and issues every other cycle.

The floor is the necessary memory traffic (`benchmark.kernel_cases`) at that rate. The small sums
over programs that follow some backward passes in PyTorch are left out.

Writes `benchmark/results/kernel_facts.json`. Compiled kernels are taken from Triton's cache, so
a run that was stopped continues where it was.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmark import report
from benchmark.compiled import (
    Launch,
    caught,
    counted,
    disassembled,
    kernel_modules,
    resources,
)
from benchmark.counted import launch_bytes
from benchmark.kernel_cases import KERNELS, Kernel

NAME = "kernel_facts"
PACKAGES = ("torch", "triton")
LATENCY = 800  # cycles of a load from memory that is busy
BARRIER = 30
BARS = {"forward": 1.1, "backward": 1.2}
SHOWN = "sm_90"


@dataclass(frozen=True)
class GPU:
    """The properties of a GPU that the prediction uses.

    Attributes:
        capability: For the compiler.
        multiprocessors: How many; each has 65,536 registers, 64 warps and 32 programs.
        hertz: Their clock.
        copy: Bytes a second of a copy, read and written.
        shared: Bytes of shared memory of one.
    """

    capability: int
    multiprocessors: int
    hertz: float
    copy: float
    shared: int


# Copies and clocks under load are assumed; H200's are figures that were measured elsewhere.
GPUS = {
    "sm_80": GPU(80, 108, 1.41e9, 1.75e12, 164 * 1024),  # A100 of 80 GB
    "sm_90": GPU(90, 132, 1.755e9, 4.3e12, 228 * 1024),  # H200
    "sm_100": GPU(100, 148, 1.85e9, 7.0e12, 228 * 1024),  # B200
}

HIDDEN = (768, 1024, 2048, 4096, 8192)
INNER = (3072, 8192, 14336)
# By kernel: the size that differs, and what it is.
SIZES: dict[str, tuple[str, tuple[int, ...]]] = {
    **dict.fromkeys(
        ("rms_norm", "residual_rms_norm", "layer_norm", "residual_layer_norm dropout"),
        ("d", HIDDEN),
    ),
    "dropout_residual": ("d", (768, 4096)),
    **dict.fromkeys(("bias_gelu", "bias_gelu gelu_new", "swiglu", "geglu tanh"), ("d", INNER)),
    "rotary": ("h", (64, 128)),
    "cross_entropy": ("v", (30522, 32000, 50257, 128256)),
    "masked_softmax": ("t", (512, 1024, 4096)),
}


def cases() -> list[tuple[Kernel, str, int]]:
    """Kernels with the size that differs."""
    found = {kernel.name.removesuffix(" 30522"): kernel for kernel in KERNELS}
    return [(found[name], axis, n) for name, (axis, sizes) in SIZES.items() for n in sizes]


def launches(kernel: Kernel, axis: str, size: int, gpu: GPU) -> dict[str, Launch]:
    """A kernel's launches in the forward and backward pass."""
    found: list[Launch] = []
    sized = Kernel(**{**vars(kernel), "sizes": {**kernel.sizes, axis: size}})
    with caught(kernel_modules(), found.append, gpu.multiprocessors), FakeTensorMode():
        outputs = sized.ours(*sized.inputs("cpu", tiny=False, seed=0))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])
    return dict(zip(BARS, found, strict=True))


def floor_bytes(kernel: Kernel, axis: str, size: int) -> dict[str, float]:
    """The necessary memory traffic of the forward and backward pass."""
    assert kernel.passes is not None
    sizes = {**kernel.sizes, axis: size}
    one = 2 * math.prod(sizes[s] for s in kernel.shapes[0])
    forward, both = kernel.passes
    return {"forward": forward * one, "backward": (both - forward) * one}


def turns_of(launch: Launch) -> int:
    """How often a program goes through its loop."""
    given = launch.arguments
    if "cross_entropy" in launch.name:  # over the classes, four blocks a turn
        return -(-given["v"] // (4 * given["block_v"]))
    return int(-(-given["m"] // (given["block_m"] * launch.grid[-1])))


def resident(registers: int, warps: int, shared: int, gpu: GPU) -> int:
    """How many programs a multiprocessor runs at a time."""
    of_warp = -(-registers // 8) * 8 * 32
    return min(32, 64 // warps, 65536 // (of_warp * warps), gpu.shared // (shared + 1024))


def facts(launch: Launch, floor: float, elements: int, gpu: GPU) -> dict[str, Any]:
    """A launch's code, and the time that it predicts.

    Args:
        launch: What is launched.
        floor: Bytes that have to pass through memory.
        elements: Of the first input, for counts an element.
        gpu: Where.
    """
    compiled = launch.compiled(gpu.capability)
    binary = compiled.asm["cubin"]
    once, turn = counted(disassembled(binary, "-sass"))
    used, warps = resources(binary), compiled.metadata.num_warps
    turns, programs = turns_of(launch) if turn["instructions"] else 0, math.prod(launch.grid)
    at_a_time = resident(used["REG"], warps, compiled.metadata.shared, gpu)
    total = Counter({name: once[name] + turns * turn[name] for name in once | turn})
    executed = {n: total[n] * warps * programs for n in ("instructions", *UNITS)}
    cycles = cycles_of_program(once, turn, turns, warps)
    moved = sum(launch_bytes(launch))
    seconds, limit = predicted(executed, moved, cycles, programs, at_a_time, gpu)
    return {
        "registers": used["REG"],
        "spilled_bytes": used["STACK"] + used["LOCAL"],
        "shared_bytes": compiled.metadata.shared,
        "warps": warps,
        "programs": programs,
        "programs_a_multiprocessor": at_a_time,
        "load_bytes": main_width(total, "load"),
        "store_bytes": main_width(total, "store"),
        "waits_for_memory": total["waits"],
        "prefetched": bool(total["prefetched"]),
        "instructions_an_element": round(executed["instructions"] * 32 / elements, 1),
        "integer_an_element": round(executed["integer"] * 32 / elements, 1),
        "special_an_element": round(executed["special"] * 32 / elements, 2),
        "bytes_an_element": round(moved / elements, 2),
        "floor_us": round(floor / gpu.copy * 1e6, 2),
        "predicted_us": round(seconds * 1e6, 2),
        "limit": limit,
        "over_floor": round(seconds / (floor / gpu.copy), 3),
    }


def main_width(code: Counter[str], kind: str) -> int | None:
    """Bytes of the loads, or stores, that move most; None if a number for a row is all."""
    moved = {w: w * code[f"{kind} {w}"] for w in (1, 2, 4, 8, 16)}
    everything = sum(int(n.split()[1]) * code[n] for n in code if n.startswith(("load", "store")))
    return None if 8 * sum(moved.values()) < everything else max(moved, key=lambda w: moved[w])


# Lanes of a multiprocessor's units.
UNITS = {"integer": 64, "special": 16}


def cycles_of_program(once: Counter[str], turn: Counter[str], turns: int, warps: int) -> float:
    """Cycles of one program from its beginning to its end."""

    def busy(code: Counter[str]) -> float:
        return code["instructions"] * max(2, warps / 4) + BARRIER * code["barriers"]

    start = busy(once) + LATENCY * once["waits"]
    if turn["prefetched"]:  # one turn ahead, at least
        return start + LATENCY + turns * max(busy(turn), LATENCY)
    return start + turns * (busy(turn) + LATENCY * turn["waits"])


def predicted(
    executed: dict[str, int],
    moved: int,
    cycles: float,
    programs: int,
    at_a_time: int,
    gpu: GPU,
) -> tuple[float, str]:
    """Seconds, and what takes them.

    Args:
        executed: Instructions of all warps, by unit.
        moved: Bytes of all programs.
        cycles: Of one program.
        programs: How many there are.
        at_a_time: How many of them a multiprocessor runs.
        gpu: Where.
    """
    full = at_a_time * gpu.multiprocessors
    whole, rest = divmod(programs, full)
    waves = [(size, times) for size, times in ((full, whole), (rest, 1)) if size and times]
    seconds = dict.fromkeys(("memory", "issue", *UNITS, "latency"), 0.0)
    total = 0.0
    for size, times in waves:
        share = size / programs
        busy = min(size, gpu.multiprocessors) * gpu.hertz
        here = {"memory": share * moved / gpu.copy}
        here["issue"] = share * executed["instructions"] / (4 * busy)
        here |= {n: share * executed[n] * 32 / (lanes * busy) for n, lanes in UNITS.items()}
        here["latency"] = cycles / gpu.hertz
        total += times * max(here.values())
        for name, value in here.items():
            seconds[name] += times * value
    return total, max(seconds, key=lambda name: seconds[name])


def measure(case: tuple[int, str, int]) -> tuple[str, str, dict[str, Any]]:
    """One kernel at one size, on every GPU."""
    at, axis, size = case
    kernel = KERNELS[at]
    name = kernel.name.removesuffix(" 30522")
    floors = floor_bytes(kernel, axis, size)
    elements = int(floors["forward"] / kernel.passes[0] / 2)  # type: ignore[index]
    found: dict[str, Any] = {direction: {} for direction in BARS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Triton 3.9: its default will change
        for gpu_name, gpu in GPUS.items():
            for direction, launch in launches(kernel, axis, size, gpu).items():
                row = facts(launch, floors[direction], elements, gpu)
                found[direction][gpu_name] = {"kernel": launch.name, **row}
    return name, str(size), found


def sources() -> dict[str, str]:
    """Identifies a state of the kernels: Triton's hash of each."""
    from triton.runtime.jit import JITFunction

    found = {}
    for module in kernel_modules():
        for name, value in vars(module).items():
            if isinstance(value, JITFunction) and name.endswith("_kernel"):
                found[name] = value.cache_key[:16]
    return dict(sorted(found.items()))


def table(results: dict[str, Any]) -> str:
    """The results for the README, of one GPU."""
    header = ["prediction, H200", "registers", "programs", "instructions", "limit", "over floor"]
    header += ["backward: registers", "programs", "instructions", "limit", "over floor"]
    rows = []
    for name, sizes in results["kernels"].items():
        for size, found in sizes.items():
            cells = [f"{name}, {int(size):,}"]
            for direction, bar in BARS.items():
                row = found[direction][SHOWN]
                over = f"{row['over_floor']:.2f}"
                cells += [str(row["registers"]), str(row["programs_a_multiprocessor"])]
                cells += [f"{row['instructions_an_element']:.0f}", row["limit"]]
                cells.append(over if row["over_floor"] <= bar else f"**{over}**")
            rows.append(cells)
    text = report.rendered(header, rows)
    return f"{text}\n{remarks(results)}"


def is_narrow(row: dict[str, Any]) -> bool:
    """Whether less than 16 bytes are loaded or stored at a time."""
    return not {row["load_bytes"], row["store_bytes"]} <= {16, None}


def remarks(results: dict[str, Any]) -> str:
    """Remarks on all GPUs: spills, narrow access, and, on other GPUs, times above the bar."""
    lines = []
    for kernel, sizes in results["kernels"].items():
        for size, found in sizes.items():
            for direction, bar in BARS.items():
                for gpu, row in found[direction].items():
                    at = f"{kernel}, {int(size):,}, {direction}, on {gpu}"
                    if row["spilled_bytes"]:
                        lines.append(f"- spills: {at}")
                    if is_narrow(row):
                        lines.append(f"- narrow loads or stores: {at}")
                    if gpu != SHOWN and row["over_floor"] > bar:
                        lines.append(f"- {row['over_floor']:.2f}, {row['limit']}: {at}")
    plain = not any(line.startswith(("- spills", "- narrow")) for line in lines)
    head = "On all of them no kernel spills, and main loads and stores are 16 bytes wide.\n"
    head = head if plain else ""
    return head + ("\nBeyond the bars:\n\n" + "\n".join(lines) + "\n" if lines else "")


def run(chosen: Iterable[tuple[Kernel, str, int]], processes: int) -> dict[str, Any]:
    """Kernels with sizes, in several processes."""
    numbered = [(KERNELS.index(kernel), axis, size) for kernel, axis, size in chosen]
    found: dict[str, Any] = {}
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for name, size, row in pool.imap(measure, numbered):
            print(name, size, file=sys.stderr)
            found.setdefault(name, {})[size] = row
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Compiles and writes down."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="kernels whose names begin so; writes nothing")
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {"versions": report.versions(PACKAGES), "sources": sources()}
    results["gpus"] = {name: asdict(gpu) for name, gpu in GPUS.items()}
    chosen = [case for case in cases() if case[0].name.startswith(options.only)]
    results["kernels"] = run(chosen, 2)
    if options.only:
        print(table(results))
    else:
        report.write(NAME, results, table(results))


if __name__ == "__main__":
    main()
