"""Does the simulator predict the time of a pipeline's step, and what does it predict for many GPUs?

    python -m benchmark.pipeline_simulation

Compares simulated steps with steps of DeepSpeed's engine in real processes, simulated tensor
parallelism with published times, and cuts into stages with DeepSpeed's; a model on 8 to 1,024 GPUs
is simulated only. Needs no GPU.

Writes `benchmark/results/pipeline_simulation.json`.
"""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

from benchmark import report
from benchmark.element_costs import Cost
from benchmark.split_stages import Split, SplitStep, forward_seconds, made_of, step_of, step_seconds
from slapo_rewrite.simulate.balance import stage_ends
from slapo_rewrite.simulate.hardware import Device, Link, hardware
from slapo_rewrite.simulate.pipeline import Stage, simulate
from tests.simulate.engine import RealClock, compared
from tests.simulate.shapes import LLAMA_33B, PUBLISHED, SHAPES

NAME = "pipeline_simulation"
PACKAGES = ("torch", "transformers", "deepspeed")

# Forward passes in milliseconds by the number of ranks. The first gives the device's speed.
TIMES = (
    ("BERT-large", "V100", {1: 27.8, 4: 11.7, 8: 8.6}),
    ("BERT-large", "A100", {2: 12.8, 4: 8.1}),
    ("GPT-Neo-1.3B", "A100", {2: 36.8, 4: 20.3}),
)
# Memory as the data sheets have it; what NCCL's own tests get for large sums within a machine.
MEMORY = {"V100": 900e9, "A100": 1555e9}
LATENCY = 30e-6
NVLINK = {"V100": Link(LATENCY, 130e9), "A100": Link(LATENCY, 230e9)}

# What the large table takes for granted: an H200 in machines of eight.
H200 = hardware("h200").device
CAPACITY = 130e9
WITHIN, BETWEEN = Link(20e-6, 370e9), Link(20e-6, 45e9)
IN_MACHINE = 8
SEQUENCES = 1024
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
SHOWN = 64  # of these, every split is shown
TENSOR, PIPELINE = (1, 2, 4, 8), (1, 2, 4, 8, 16)


def engines() -> list[dict[str, Any]]:
    """Steps of DeepSpeed's engine, and what was simulated."""
    return [
        {"count": count, "micro_batches": 2 * count, **asdict(row)}
        for count in (2, 4)
        for row in compared(count, micro_batches=2 * count, steps=5, clock=RealClock)
    ]


def formula() -> dict[str, float]:
    """The largest pipeline of equal stages, and how long it takes to simulate."""
    simulate([Stage(1, 2)], 1)
    start = time.process_time()
    step = simulate([Stage(1, 2)] * 128, 512)
    seconds = time.process_time() - start
    return {"bubble": step.bubble, "formula": 127 / (512 + 127), "seconds": round(seconds, 1)}


def published() -> list[dict[str, Any]]:
    """Published forward passes on several ranks, and what was predicted from the first."""
    rows = []
    for model, gpu, times in TIMES:
        costs = PUBLISHED[model].costs(sequences=1)
        given, *others = times
        for ranks in others:
            (speed, predicted), (_, slower) = (
                predict(costs, MEMORY[gpu], replace(NVLINK[gpu], latency=latency), times, ranks)
                for latency in (LATENCY, 2 * LATENCY)
            )
            missing = times[ranks] / 1e3 - predicted
            rows.append(
                {
                    "model": model,
                    "gpu": gpu,
                    "given_ranks": given,
                    "given_ms": times[given],
                    "teraflops": speed / 1e12,
                    "ranks": ranks,
                    "published_ms": times[ranks],
                    "predicted_ms": 1e3 * predicted,
                    # With another latency the prediction changes in proportion.
                    "fitting_latency_us": 1e6 * LATENCY * (1 + missing / (slower - predicted)),
                }
            )
    return rows


def predict(
    costs: list[Cost], memory: float, link: Link, times: dict[int, float], ranks: int
) -> tuple[float, float]:
    """The device's speed, by the first of `times`, and seconds of a forward pass with it."""
    given, milliseconds = next(iter(times.items()))
    flops = sum(cost.flops for cost in costs)
    speed = flops / given / (milliseconds / 1e3 - without_products(costs, memory, link, given))
    return speed, flops / ranks / speed + without_products(costs, memory, link, ranks)


def without_products(costs: list[Cost], memory: float, link: Link, ranks: int) -> float:
    """Seconds of everything but the products; layers sum twice, and the embedding once."""
    split = Split(ranks, link, [1, *[2] * (len(costs) - 2), 0])
    return sum(forward_seconds(costs, Device(math.inf, memory), split))


def cuts() -> list[dict[str, Any]]:
    """The dearest stage over the mean, cut by cost and in DeepSpeed's ways."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its imports use what torch will take away
        from deepspeed.runtime.utils import partition_balanced, partition_uniform
    rows = []
    for model, shape in SHAPES.items():
        costs = shape.costs()
        seconds = step_seconds(costs, H200)
        parameters = [sum(cost.parameters.values()) for cost in costs]
        for stages in (2, 4, 8):
            ends = {
                "uniform": partition_uniform(len(costs), stages)[1:],
                "parameters": partition_balanced(parameters, stages)[1:],
                "cost": stage_ends(seconds, stages),
            }
            mean = sum(seconds) / stages
            dearest = {
                way: max(sum(seconds[a:b]) for a, b in pairwise([0, *found])) / mean
                for way, found in ends.items()
            }
            rows.append({"model": model, "stages": stages, **dearest})
    return rows


def link(span: int) -> Link:
    """The link between ranks that are at most this far apart."""
    return WITHIN if span <= IN_MACHINE else BETWEEN


def step_on(
    costs: list[Cost], tensor: int, pipe: int, replicas: int, recomputes: bool
) -> tuple[SplitStep, int]:
    """A step on so many GPUs, one sequence a micro-batch, and how many of these it has."""
    split = Split(tensor, link(tensor), [1, *[2] * (len(costs) - 2), 1])
    ends = stage_ends(step_seconds(costs, H200, split), pipe)
    step = step_of(
        *made_of(costs, ends, H200, split=split, recomputes=recomputes),
        SEQUENCES // replicas,
        H200,
        pipeline=link(2 * tensor * replicas),  # ranks are numbered by tensor, data, pipeline
        data=link(tensor * replicas),
        replicas=replicas,
    )
    return step, SEQUENCES // replicas


def splits(costs: list[Cost], gpus: int, length: int) -> list[dict[str, Any]]:
    """All ways to split a model over GPUs that there is memory for; nothing is recomputed if so."""
    rows = []
    for tensor in TENSOR:
        for pipe in PIPELINE:
            replicas = gpus // (tensor * pipe)
            if not replicas or replicas > SEQUENCES:
                continue
            for recomputes in (False, True):
                step, micro_batches = step_on(costs, tensor, pipe, replicas, recomputes)
                memory = max(step.memory)
                if memory <= CAPACITY:
                    rows.append(
                        {
                            "gpus": gpus,
                            "split": [tensor, pipe, replicas],
                            "micro_batches": micro_batches,
                            "recomputes": recomputes,
                            "seconds": step.seconds,
                            "bubble": step.bubble,
                            "memory": memory,
                            "tokens": SEQUENCES * length / step.seconds / gpus,
                        }
                    )
                    break
    return rows


def many() -> list[dict[str, Any]]:
    """For each number of GPUs the best split of the large model, and all of them for one."""
    costs = LLAMA_33B.costs(sequences=1)
    rows = []
    for gpus in GPUS:
        found = sorted(splits(costs, gpus, LLAMA_33B.length), key=lambda row: row["seconds"])
        rows += found if gpus == SHOWN else found[:1]
    return rows


def table(results: dict[str, Any]) -> str:
    """The results for the README."""
    parts = [
        engine_table(results["engine"]),
        formula_line(results["formula"]),
        published_table(results["published"]),
        cuts_table(results["cuts"]),
        many_table(results["many"]),
    ]
    return "\n".join(parts)


def engine_table(rows: list[dict[str, Any]]) -> str:
    """Steps of the engine."""
    header = [
        "stages", "micro-batches", "stages are", "measured, ms", "simulated, ms", "difference",
        "(m + p - 1) by dearest, ms",
    ]  # fmt: skip
    return report.rendered(
        header,
        [
            [
                row["count"],
                row["micro_batches"],
                row["stages"],
                f"{1e3 * row['measured']:.0f}",
                f"{1e3 * row['predicted']:.0f}",
                difference(row["predicted"], row["measured"]),
                f"{1e3 * row['formula']:.0f}",
            ]
            for row in rows
        ],
    )


def formula_line(found: dict[str, float]) -> str:
    """The largest pipeline."""
    return (
        f"128 equal stages and 512 micro-batches: a bubble of {found['bubble']:.4%} is simulated "
        f"in {found['seconds']} s, and (p - 1) / (m + p - 1) is {found['formula']:.4%}.\n"
    )


def published_table(rows: list[dict[str, Any]]) -> str:
    """Tensor parallelism."""
    header = [
        "forward pass of", "given, ms", "so TFLOP/s", "ranks", "published, ms", "predicted, ms",
        "difference", "latency that fits, µs",
    ]  # fmt: skip
    return report.rendered(
        header,
        [
            [
                f"{row['model']}, {row['gpu']}",
                f"{row['given_ms']} on {row['given_ranks']}",
                f"{row['teraflops']:.1f}",
                row["ranks"],
                row["published_ms"],
                f"{row['predicted_ms']:.1f}",
                difference(row["predicted_ms"], row["published_ms"]),
                f"{row['fitting_latency_us']:.0f}",
            ]
            for row in rows
        ],
    )


def cuts_table(rows: list[dict[str, Any]]) -> str:
    """Cuts into stages."""
    return report.rendered(
        ["dearest stage over mean", "stages", "`uniform`", "`parameters`", "by cost"],
        [
            [
                row["model"],
                row["stages"],
                *(f"{row[k]:.2f}" for k in ("uniform", "parameters", "cost")),
            ]
            for row in rows
        ],
    )


def many_table(rows: list[dict[str, Any]]) -> str:
    """The best split for each number of GPUs, and all of them for one."""
    best = [min((r for r in rows if r["gpus"] == n), key=lambda r: r["seconds"]) for n in GPUS]
    header = [
        "**simulated**: GPUs", "tensor x pipeline x data", "micro-batches", "recomputed",
        "step, s", "bubble", "memory, GB", "tokens/s and GPU",
    ]  # fmt: skip
    of = {tuple(row["split"]): row for row in rows if row["gpus"] == SHOWN}
    grid = [
        [f"tensor {tensor}", *(cell(of, tensor, pipe) for pipe in PIPELINE)] for tensor in TENSOR
    ]
    corner = f"**simulated**: tokens/s and GPU, {SHOWN} GPUs"
    return "\n".join(
        [
            report.rendered(header, [many_row(row) for row in best]),
            report.rendered([corner, *(f"pipeline {pipe}" for pipe in PIPELINE)], grid),
        ]
    )


def many_row(row: dict[str, Any]) -> list[Any]:
    """One split."""
    return [
        f"{row['gpus']:,}",
        " x ".join(map(str, row["split"])),
        row["micro_batches"],
        "everything" if row["recomputes"] else "nothing",
        f"{row['seconds']:.2f}",
        f"{row['bubble']:.1%}",
        f"{row['memory'] / 1e9:.0f}",
        f"{row['tokens']:,.0f}",
    ]


def cell(of: dict[tuple[int, ...], dict[str, Any]], tensor: int, pipe: int) -> str:
    """A GPU's throughput if its memory suffices; in italics if everything is recomputed."""
    if tensor * pipe > SHOWN:
        return ""
    row = of.get((tensor, pipe, SHOWN // (tensor * pipe)))
    if row is None:
        return "no memory"
    tokens = f"{row['tokens']:,.0f}"
    return f"*{tokens}*" if row["recomputes"] else tokens


def difference(predicted: float, true: float) -> str:
    """By how much a prediction is off."""
    return f"{predicted / true - 1:+.1%}"


def main() -> None:
    """Simulates, measures and writes down."""
    results = {
        "machine": report.machine(),
        "versions": report.versions(PACKAGES),
        "engine": engines(),
        "formula": formula(),
        "published": published(),
        "cuts": cuts(),
        "many": many(),
    }
    report.write(NAME, results, table(results))


if __name__ == "__main__":
    main()
