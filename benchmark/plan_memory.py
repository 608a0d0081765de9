"""How close is the memory that `slapo-rewrite plan` predicts to torch's count in a real step?

    python -m benchmark.plan_memory

Small models of four families, rewritten, trained in float32 on the CPU: alone, on two ranks that
share each layer, and on two replicas with DeepSpeed's ZeRO 1; with and without recomputation, with
and without fusion, with one micro-batch and with two. The second step is measured, from its first
operator to its last, by torch's `MemTracker`: the peak of the bytes of all live tensors.

The prediction is composed from two layers of each kind, counted without memory, as in `plan`.

Writes `benchmark/results/plan_memory.json`.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker

from benchmark import report
from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.model.emitted import imported
from slapo_rewrite.model.folded_step import Counted, StepShape
from slapo_rewrite.plan.rewritten_step import counted_rewrite
from slapo_rewrite.project import Project
from slapo_rewrite.schedule.load import ScheduleFile
from slapo_rewrite.simulate.step_memory import Unfolded, in_runs, states
from tests.plan.small_models import MODELS, source_of, written_schedule
from tests.processes import run

NAME = "plan_memory"
ROWS, TOKENS = 4, 64
BUCKET = 100_000  # elements of a bucket of ZeRO's; some of these parameters have more
ALONE, SPLIT, ZERO = "alone", "two share layers", "two replicas, ZeRO 1"
WAYS = (ALONE, SPLIT, ZERO)


@dataclass(frozen=True)
class Case:
    """A model and the way in which it is trained.

    Attributes:
        model: The family.
        way: How many ranks there are, and what they share.
        ratio: The share of the layers that are recomputed.
        fused: Whether rules are applied.
        micro_batches: How many make up a step.
    """

    model: str
    way: str
    ratio: float
    fused: bool
    micro_batches: int

    @property
    def settings(self) -> list[str]:
        """The arguments of `--set`."""
        return [f"fuse={self.fused}", f"ckpt_ratio={self.ratio}"]


def cases() -> Iterator[Case]:
    """All that are measured."""
    for model, way, fused in itertools.product(MODELS, WAYS, (False, True)):
        for ratio in (0.0, 0.5, 1.0):
            yield Case(model, way, ratio, fused, 1 if ratio != 0.5 else 2)


def predicted(case: Case, schedule: str, known: dict[Any, tuple[Counted, Counted]]) -> float:
    """Bytes that a rank holds at most, from two layers of each kind.

    Args:
        case: What is trained.
        schedule: The schedule's file.
        known: What has been counted before; is added to.
    """
    ranks = 2 if case.way == SPLIT else 1
    key = (case.model, case.fused, ranks)
    if key not in known:
        said = [f"fuse={case.fused}", "ckpt_ratio=1.0"]
        shape = StepShape(TOKENS, torch.float32, is_gpu=False)
        source = source_of(case.model)
        found = counted_rewrite(Project(source, schedule), said, [ranks], shape)[ranks]
        assert not isinstance(found, str), found
        known[key] = found
    both = known[key]
    plain = both[0]
    runs = in_runs(Unfolded(*both).pieces(case.ratio))
    parameters = sum(plain.names.values())
    outside = plain.profile.buffers + plain.profile.inputs.of(ROWS)
    kept = states("fp32", 1, 2, BUCKET) if case.way == ZERO else states("fp32", 0, 1)
    most = kept.most(runs, parameters, ROWS, 1, case.micro_batches)
    # torch's Adam works one tensor after the other, with two temporaries of its size. Of ZeRO's
    # it is one: the rank's part, with as large a gradient in the place of all.
    update = parameters * kept.each + 2 * 4 * max(plain.names.values())
    if case.way == ZERO:
        update = parameters * (kept.weight + kept.optimizer + (1 + 2) * 4 / 2)
    most = max(most, update)
    return outside + most


def measured(case: Case, schedule: str) -> float:
    """Bytes that the fullest rank holds at most in a step, by torch's own count."""
    world = 1 if case.way == ALONE else 2
    output = rewrite(source_of(case.model), schedule, case.settings, tries=lambda *_: None)
    texts = (output.files, output.model_file)
    return max(run(_trained, world, case, schedule, *texts, timeout_s=300))


def _trained(case: Case, schedule: str, files: dict[str, str], model_file: str) -> float:
    importlib.import_module(source_of(case.model))
    file = ScheduleFile.load(schedule)
    torch.manual_seed(0)
    with warnings.catch_warnings(), imported(files, model_file) as emitted:
        warnings.simplefilter("ignore")
        if case.way == ZERO:  # its ranks hold whole layers
            emitted.helper("tensor_parallel").set_group(_alone())  # type: ignore[union-attr]
        build: Any = (lambda make: make()) if case.way != SPLIT else emitted.helper("loading").build  # type: ignore[union-attr]
        model = build(lambda: file.module.model(emitted.module)).train()
        step = _engine_step(model, case) if case.way == ZERO else _plain_step(model, case)
        ids = torch.randint(3, 2000, (case.micro_batches, ROWS, TOKENS))
        batches = [{"input_ids": own.clone(), "labels": own.clone()} for own in ids]
        for batch in batches if "t5" not in case.model else ():
            batch["decoder_input_ids"] = batch["input_ids"].clone()
        del ids
        step(batches)
        gc.collect()
        tracker = MemTracker()
        if case.way == ZERO:  # whatever the engine holds, but not the batch that waits its turn
            waiting = {id(t) for batch in batches[1:] for t in batch.values()}
            alive = [x for x in gc.get_objects() if isinstance(x, Tensor) and id(x) not in waiting]
            tracker.track_external(*alive)
            del alive
        else:
            tracker.track_external(*batches[0].values(), *step.holds)  # type: ignore[attr-defined]
        with tracker:
            step(batches, tracker.reset_mod_stats)
        found = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    return float(found)


def _plain_step(model: nn.Module, case: Case) -> Callable[..., None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(batches: list[Any], before: Callable[[], None] = lambda: None) -> None:
        for batch in batches:
            before()
            loss = model(**batch, **_more(case)).loss
            loss.backward()
            del loss
        optimizer.step()
        optimizer.zero_grad()

    step.holds = (model, optimizer)  # type: ignore[attr-defined]
    return step


def _engine_step(model: nn.Module, case: Case) -> Callable[..., None]:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which it would compile
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        config={
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": case.micro_batches,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1, "reduce_bucket_size": BUCKET},
        },
    )

    def step(batches: list[Any], before: Callable[[], None] = lambda: None) -> None:
        for batch in batches:
            before()
            loss = engine(**batch, **_more(case)).loss
            engine.backward(loss)
            del loss
            engine.step()

    return step


def _more(case: Case) -> dict[str, Any]:
    return {} if case.model == "bert" else {"use_cache": False}


def _alone() -> Any:
    import torch.distributed as dist

    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def results(chosen: list[Case]) -> list[dict[str, Any]]:
    """Predicts and measures each."""
    found = []
    known: dict[Any, tuple[Counted, Counted]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in chosen:
            schedule = written_schedule(case.model, Path(folder))
            want, have = measured(case, schedule), predicted(case, schedule, known)
            found.append(
                {**asdict(case), "measured": want, "predicted": have, "error": have / want - 1}
            )
            print(f"{found[-1]['error']:+.2%} {case}", flush=True)
    return found


def table(content: dict[str, Any]) -> str:
    """The largest errors, by model and way, in the README's Markdown."""
    rows = []
    for model in MODELS:
        row: list[Any] = [model]
        for way in WAYS:
            own = [r for r in content["cases"] if (r["model"], r["way"]) == (model, way)]
            low, high = (f(r["error"] for r in own) for f in (min, max))
            row.append(f"{low:+.1%} to {high:+.1%}")
        rows.append(row)
    return report.rendered(["predicted over measured", *WAYS], rows)


def main() -> None:
    content = {
        "versions": report.versions(("torch", "transformers", "deepspeed")),
        "rows": ROWS,
        "tokens": TOKENS,
        "cases": results(list(cases())),
    }
    report.write(NAME, content, table(content))


if __name__ == "__main__":
    main()
