"""How long does a training step take on a GPU, before and after rewriting?

    python -m benchmark.train_step --prepare DIR       where slapo-rewrite is installed
    python -m benchmark.train_step --run DIR           where the GPU is; under nine minutes
    python -m benchmark.train_step --publish FILE      puts a result file into README.md

`--prepare` writes the rewritten models of the imported transformers: the machine with the GPU needs
this version, torch and triton, and nothing else. For another version than the installed one, run
`pip install --target FOLDER transformers==VERSION`, and put the folder first in PYTHONPATH.

Each model has one process, with variants from the same weights: eager attention, SDPA, SDPA with
`torch.compile`, Liger if it is installed and knows the model, ours, ours with `torch.compile`, and
SDPA again as the control: variants that differ by no more than twice the two SDPA runs count as
equal. Rounds of 8 steps with fused AdamW go through the variants in alternating order, on 4 batches
that rotate, timed by events on the device. Before, loss and gradients are compared with float32;
afterwards come a pass for peak memory, and one at each variant's own largest batch. The roofline is
measured first and last; if it changes by more than 3%, the run makes no claim.

`--tiny` tries all of this out on a CPU. Writes `benchmark/results/train_step.json`.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmark import kernels, report
from benchmark.steps import STEPS, Step, flops_per_token

NAME = "train_step"
PREPARED = "prepared.json"
PEAK_FLOPS = 989e12  # of an H100 or H200, dense bfloat16
WARM_UP, STEPS_A_ROUND, BATCHES = 6, 8, 4
ERROR_LIMIT = 1.1  # times eager's
ERROR_TOKENS = 512  # of one sequence
LARGEST_S = 4  # for finding a variant's largest batch, at least
COMPILE_S = 30  # no compilation begins with less time left
EAGER, BASE, CONTROL, OURS = "eager attention", "SDPA", "SDPA again", "ours"


@dataclass(frozen=True)
class Variant:
    """One way to run a step.

    Attributes:
        name: What it is called in tables.
        attention: The attention implementation, by transformers' name.
        rewritten: Whether it is our output.
        compiled: Whether `torch.compile` runs it.
        liger: Whether Liger's kernels are put into it.
    """

    name: str
    attention: str
    rewritten: bool = False
    compiled: bool = False
    liger: bool = False


VARIANTS = (
    Variant(EAGER, "eager"),
    Variant(BASE, "sdpa"),
    Variant("Liger, SDPA", "sdpa", liger=True),
    Variant(OURS, "sdpa", rewritten=True),
    Variant(CONTROL, "sdpa"),
    # Last, since compiling takes long.
    Variant("SDPA, compiled", "sdpa", compiled=True),
    Variant("ours, compiled", "sdpa", rewritten=True, compiled=True),
)


# Where the tool is.


def prepare(folder: Path, only: str) -> None:
    """Writes the rewritten models, and what they were made from.

    Args:
        folder: Where to.
        only: How the names of the models begin.
    """
    from benchmark import traffic

    made = {}
    for step in STEPS:
        if step.name.startswith(only):
            output = traffic.rewritten(step, traffic.OURS)
            place = folder / step.schedule
            place.mkdir(parents=True, exist_ok=True)
            for name, text in output.files.items():
                (place / name).write_text(text, encoding="utf-8", newline="")
            made[step.name] = {"folder": step.schedule, "model": output.model_file}
    import transformers

    record = {"transformers": transformers.__version__, "models": made}
    (folder / PREPARED).write_text(json.dumps(record, indent=1) + "\n")


# Where the GPU is.


def load(folder: Path, model: dict[str, str]) -> ModuleType:
    """The module of a rewritten model."""
    package = f"rewritten_{model['folder']}"
    place = folder / model["folder"]
    spec = importlib.util.spec_from_file_location(
        package, place / "__init__.py", submodule_search_locations=[str(place)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[package] = module
    spec.loader.exec_module(module)
    return importlib.import_module(f"{package}.{Path(model['model']).stem}")


def with_liger(model: Any, module: ModuleType) -> dict[str, Any]:
    """Puts Liger's kernels into a model; what it changes in the module besides, put back."""
    liger = importlib.import_module("liger_kernel.transformers.monkey_patch")
    before = dict(vars(module))
    liger.MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type](model=model)
    changed = {name: x for name, x in vars(module).items() if before.get(name) is not x}
    vars(module).update({name: before[name] for name in changed if name in before})
    return changed


class Runner:
    """A variant's model, its optimiser and its batches.

    Args:
        step: The training step.
        variant: How it runs.
        module: What defines the model.
        state: The weights that it starts from.
        device: Where it runs.
    """

    def __init__(
        self,
        step: Step,
        variant: Variant,
        module: ModuleType,
        state: dict[str, Tensor],
        device: str,
    ) -> None:
        self.step, self.variant, self.device = step, variant, device
        with torch.device(device):
            self.model = step.build(module, variant.attention)
        self.model.load_state_dict(state)
        self.globals = vars(module)
        self.patches = with_liger(self.model, module) if variant.liger else {}
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-5, fused=device == "cuda" or None
        )
        self.call: Callable[..., Any] = self.model
        if variant.compiled:
            self.call = torch.compile(self.model, dynamic=False)
        self.batches = [step.inputs(seed, device) for seed in range(BATCHES)]
        self.done = 0

    def held_bytes(self) -> int:
        """The bytes that it holds between steps."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        for state in self.optimizer.state.values():
            tensors += [x for x in state.values() if isinstance(x, Tensor)]
        return sum(x.numel() * x.element_size() for x in tensors)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Inside, the module's functions are those that the variant puts there."""
        plain = {name: self.globals[name] for name in self.patches}
        self.globals.update(self.patches)
        try:
            yield
        finally:
            self.globals.update(plain)
            self.optimizer.zero_grad()

    def train(self, steps: int) -> None:
        """Full steps: forwards, backwards and the optimiser."""
        for _ in range(steps):
            batch = self.batches[self.done % BATCHES]
            self.call(**batch).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.done += 1

    def seconds(self, steps: int = STEPS_A_ROUND) -> float:
        """The seconds of one step, averaged over `steps`."""
        if self.device != "cuda":
            started = time.perf_counter()
            self.train(steps)
            return (time.perf_counter() - started) / steps
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.train(steps)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / steps

    def gradients(self) -> dict[str, Tensor]:
        """The loss and every gradient of a batch of one sequence, without dropout."""
        batch = {name: x[:1, :ERROR_TOKENS] for name, x in self.batches[0].items()}
        self.model.eval()
        try:
            loss = self.call(**batch).loss
            loss.backward()
        finally:
            self.model.train()
        found = {"loss": loss.detach().float()}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad.float()
        self.optimizer.zero_grad()
        return found


def error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """The errors of the loss, and of all gradients together, relative to their size."""
    if missing := sorted(exact.keys() ^ found.keys()):
        raise ValueError(f"these have a gradient in one of two models only: {missing[:3]}")
    names = exact.keys() - {"loss"}
    wrong = sum((found[name] - exact[name]).square().sum().item() for name in names)
    whole = sum(exact[name].square().sum().item() for name in names)
    loss = abs(found["loss"].item() / exact["loss"].item() - 1)
    return {"loss": loss, "gradients": math.sqrt(wrong / whole)}


def exact_gradients(step: Step, module: ModuleType, state: dict[str, Tensor], device: str) -> Any:
    """The original's loss and gradients in float32."""
    with torch.device(device):
        model = step.build(module, "sdpa", torch.float32).eval()
    model.load_state_dict(state)
    batch = {name: x[:1, :ERROR_TOKENS] for name, x in step.inputs(0, device).items()}
    loss = model(**batch).loss
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


class Bench:
    """Measures one model.

    Args:
        step: The training step.
        output: Our module.
        options: The command's.
        deadline: No round begins after this.
    """

    def __init__(self, step: Step, output: ModuleType, options: Any, deadline: float) -> None:
        self.step, self.options, self.deadline = step, options, deadline
        self.begun = time.monotonic()
        self.device = "cpu" if options.tiny else "cuda"
        self.original = importlib.import_module(step.source)
        self.output = output
        torch.manual_seed(0)
        with torch.device(self.device):
            self.state = step.build(self.original, "sdpa").state_dict()
        self.failed: dict[str, str] = {}

    def run(self) -> dict[str, Any]:
        """All of it."""
        errors = self.errors()
        runners = {v.name: self.started(v) for v in self.variants()}
        rounds = self.rounds({name: r for name, r in runners.items() if r is not None})
        peaks = {
            name: self.peak(runner)
            for name, runner in runners.items()
            if runner is not None and name not in self.failed
        }
        del runners
        self.free()
        return {
            "batch": self.step.batch,
            "tokens": self.step.tokens,
            "targets": self.step.targets,
            "flops_per_token": flops_per_token(self.step),
            "errors": errors,
            "seconds": rounds,
            "peak_bytes": peaks,
            "largest": self.largest(),
            "failed": self.failed,
        }

    def variants(self) -> list[Variant]:
        """The variants that can run here."""
        liger = importlib.util.find_spec("liger_kernel") is not None
        return [
            v
            for v in VARIANTS
            if not (v.liger and not (liger and self.step.liger))
            and not (v.compiled and (self.options.tiny or self.options.eager))
        ]

    def free(self) -> None:
        """Gives memory back."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def made(self, variant: Variant, step: Step | None = None) -> Runner:
        """A variant's runner."""
        module = self.output if variant.rewritten else self.original
        return Runner(step or self.step, variant, module, self.state, self.device)

    def attempt(self, name: str, action: Callable[[], Any]) -> Any:
        """An action's result; None, and a note, if it fails: the others continue."""
        self.say(name)
        try:
            return action()
        except Exception as error_:
            self.failed[name] = f"{type(error_).__name__}: {error_}".partition("\n")[0][:200]
        self.free()
        return None

    def say(self, what: str) -> None:
        """Tells what is being done, and when it began."""
        print(f"{time.monotonic() - self.begun:6.1f} s: {what}", file=sys.stderr, flush=True)

    def errors(self) -> dict[str, dict[str, float]]:
        """The errors of eager attention, SDPA and ours against float32, before any timing."""
        exact = exact_gradients(self.step, self.original, self.state, self.device)

        def wrong(variant: Variant) -> dict[str, float]:
            runner = self.made(variant)
            with runner.patched():
                return error(runner.gradients(), exact)

        found: dict[str, dict[str, float]] = {}
        for variant in VARIANTS:
            if variant.name in (EAGER, BASE, OURS):
                figures = self.attempt(f"{variant.name}, errors", lambda v=variant: wrong(v))
                if figures is not None:
                    found[variant.name] = figures
        return found

    def started(self, variant: Variant) -> Runner | None:
        """A runner that is warm; None where it fails."""
        if time.monotonic() + variant.compiled * COMPILE_S > self.deadline:
            self.failed[variant.name] = "out of time"
            return None

        def start() -> Runner:
            runner = self.made(variant)
            with runner.patched():
                runner.train(WARM_UP)
            return runner

        runner: Runner | None = self.attempt(variant.name, start)
        return runner

    def rounds(self, runners: dict[str, Runner]) -> dict[str, list[float]]:
        """Seconds of a step in every round, the variants in turn, every other round backwards."""
        seconds: dict[str, list[float]] = {name: [] for name in runners}
        for number in range(self.options.rounds):
            if time.monotonic() > self.deadline and number >= 2:
                break
            self.say(f"round {number + 1}")
            order = list(runners) if number % 2 == 0 else list(runners)[::-1]
            for name in order:
                with runners[name].patched():
                    runners[name].train(1)  # what the others evicted is warm again
                    seconds[name].append(runners[name].seconds())
        return seconds

    def peak(self, runner: Runner) -> int:
        """The most memory that a step holds, without what the other variants do."""
        if self.device != "cuda":
            return 0
        self.free()
        with runner.patched():
            torch.cuda.reset_peak_memory_stats()
            others = torch.cuda.memory_allocated() - runner.held_bytes()
            runner.train(1)
            return torch.cuda.max_memory_allocated() - others

    def largest(self) -> dict[str, dict[str, float]]:
        """The largest batch, of powers of two times the usual, and tokens a second at it."""
        found: dict[str, dict[str, float]] = {}
        for variant in VARIANTS:
            if variant.name not in (BASE, OURS):
                continue
            batch, until = self.step.batch, max(self.deadline, time.monotonic() + LARGEST_S)
            while time.monotonic() < until:
                step = replace(self.step, batch=batch)
                self.say(f"{variant.name}, batch {batch}")
                try:
                    found[variant.name] = self.at(step, variant)
                except torch.OutOfMemoryError:
                    self.free()
                    break
                self.free()
                if self.device != "cuda":
                    break
                batch *= 2
        return found

    def at(self, step: Step, variant: Variant) -> dict[str, float]:
        """A variant at a batch of its own."""
        runner = self.made(variant, step)
        with runner.patched():
            runner.train(2)
            return {"batch": step.batch, "tokens_per_s": step.step_tokens / runner.seconds(3)}


# Reports.


def ratios(row: dict[str, Any], name: str) -> list[float]:
    """How many times as fast as SDPA, round by round."""
    base = row["seconds"].get(BASE, [])
    return [b / mine for b, mine in zip(base, row["seconds"].get(name, []), strict=False)]


def threshold(row: dict[str, Any]) -> float | None:
    """The speed-up to exceed for a claim; None if the control did not run."""
    control = ratios(row, CONTROL)
    return 1 + 2 * abs(statistics.median(control) - 1) if control else None


def verdict(row: dict[str, Any], steady: bool) -> str:
    """The claim that can be made of ours against SDPA."""
    mine, least = ratios(row, OURS), threshold(row)
    if not mine or least is None:
        return "not measured"
    if not steady:
        return "no claim: the machine changed"
    errors = row["errors"]
    if OURS not in errors or EAGER not in errors:
        return "no claim: gradients were not compared"
    if errors[OURS]["gradients"] > ERROR_LIMIT * errors[EAGER]["gradients"]:
        return "no claim: gradients are less exact than eager's"
    ratio = statistics.median(mine)
    if abs(ratio - 1) <= least - 1:
        return "no difference"
    return f"{ratio:.2f} times SDPA"


def table(results: dict[str, Any]) -> str:
    """The results for the README."""
    rows, memory = [], []
    for name, row in results["steps"].items():
        tokens = row["batch"] * (row["tokens"] + row["targets"])
        for variant, seconds in row["seconds"].items():
            if not seconds:
                continue
            speed = tokens / statistics.median(seconds)
            spread = (max(seconds) - min(seconds)) / statistics.median(seconds)
            rows.append(
                [
                    f"{name}, {variant}",
                    f"{speed:.0f}",
                    f"{spread:.1%}",
                    f"{statistics.median(ratios(row, variant)):.3f}",
                    f"{speed * row['flops_per_token'] / PEAK_FLOPS:.1%}",
                    f"{row['peak_bytes'].get(variant, 0) / 2**30:.1f}",
                ]
            )
        for variant, most in row["largest"].items():
            memory.append([f"{name}, {variant}", most["batch"], f"{most['tokens_per_s']:.0f}"])
    header = ["equal batch", "tokens a second", "spread", "over SDPA", "MFU", "peak GiB"]
    text = report.rendered(header, rows)
    text += "\n" + report.rendered(["own largest batch", "batch", "tokens a second"], memory)
    said = [f"{n}: {verdict(row, results['steady'])}" for n, row in results["steps"].items()]
    for name, row in results["steps"].items():
        said += [f"{name}, {variant} failed: {why}" for variant, why in row["failed"].items()]
    machine = results["machine"]
    on = (machine["gpu"] or {"name": "a CPU, to try the script out"})["name"]
    return f"{text}\nOn {on}. {'; '.join(said)}.\n"


def run(options: Any) -> dict[str, Any]:
    """All models, one after the other."""
    import transformers

    prepared = json.loads((options.run / PREPARED).read_text())
    if prepared["transformers"] != transformers.__version__:
        sys.exit(
            f"benchmark.train_step: {options.run} was prepared for transformers "
            f"{prepared['transformers']}, and {transformers.__version__} is installed; prepare it "
            "again with that version first in PYTHONPATH"
        )
    device = "cpu" if options.tiny else "cuda"
    clock = kernels.Clock(device, 2 if options.tiny else 10)
    results: dict[str, Any] = {
        "machine": kernels.machine(device),
        "tiny": options.tiny,
        "optimizer": "torch.optim.AdamW" + ("" if options.tiny else ", fused"),
        "roofline": {"first": kernels.roofline(clock, options.tiny)},
        "steps": {},
    }
    steps = [s for s in STEPS if s.name in prepared["models"] and s.name.startswith(options.only)]
    started = time.monotonic()
    for number, step in enumerate(steps, 1):
        print(step.name, file=sys.stderr)
        deadline = started + options.seconds * number / len(steps)
        output = load(options.run, prepared["models"][step.name])
        bench = Bench(step.tiny() if options.tiny else step, output, options, deadline)
        results["steps"][step.name] = bench.run()
        bench.free()
        if options.output:
            options.output.write_text(json.dumps(results, indent=1) + "\n")
    results["roofline"]["last"] = kernels.roofline(clock, options.tiny)
    results["steady"] = kernels.is_steady(**results["roofline"])
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepares, or measures and writes down."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--prepare", type=Path, metavar="DIR", help="write the rewritten models")
    action.add_argument("--run", type=Path, metavar="DIR", help="measure them")
    action.add_argument("--publish", type=Path, metavar="FILE", help="put results into README.md")
    parser.add_argument("--only", default="", help="models whose names begin so")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=300, help="no round begins after this")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--tiny", action="store_true", help="small sizes, on the CPU")
    parser.add_argument("--output", type=Path, help="the result file, instead of the usual one")
    options = parser.parse_args(arguments)
    if options.prepare:
        prepare(options.prepare, options.only)
        return
    if options.publish:
        results = json.loads(options.publish.read_text())
        report.write(NAME, results, table(results))
        return
    if not options.tiny and not torch.cuda.is_available():
        sys.exit("benchmark.train_step: there is no GPU here; --tiny tries it out on the CPU")
    results = run(options)
    if options.output or options.tiny or options.only:
        if options.output:
            options.output.write_text(json.dumps(results, indent=1) + "\n")
        print(table(results))
    else:
        report.write(NAME, results, table(results))


if __name__ == "__main__":
    main()
