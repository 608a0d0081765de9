"""Stages run by torch's own schedules in real processes, against the model in one."""

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.locate import locate
from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.model.small_model import loss_of, step_inputs
from slapo_rewrite.runtime.torch_pipeline import UnshardedPipeline
from slapo_rewrite.schedule.source_module import import_source
from tests.marks import release
from tests.processes import run
from tests.rewriting import written
from tests.stages.cases import CASES, Case, for_torch

pytestmark = pytest.mark.processes

MICRO_BATCHES, STEPS = 4, 5
SHORT = 3  # at this step sequences are shorter
FURTHER_ONE = 1  # after this step gradients are kept, and those of the next are added
LARGEST_NORM = 0.3  # what gradients are clipped to, which are larger in some steps


# The gradient that its second stage gives back does not lie in one piece of memory. Beside what is
# trained it needs numbers, other ones for another length, and a tensor without gradient.
TURNED = """\
from torch import nn
from torch.nn import functional as F


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x):
        x = self.linear(x)
        return x, (x.shape[1] // 2, 2), [x.detach().cos()]


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = First()
        self.last = nn.Linear(6, 1)

    def forward(self, x, y):
        x, size, cosines = self.first(x)
        x = x.transpose(1, 2).cumsum(-1) / 16
        x = x.transpose(1, 2).unflatten(1, size).flip(2).flatten(1, 2)
        x = self.last(x * cosines[0])
        return F.mse_loss(x, y)
"""
TURNED_SCHEDULE = """\
import torch


def model(m):
    return m.Turned()


def inputs(model):
    return {"x": torch.rand(2, 16, 4), "y": torch.rand(2, 16, 1)}


def schedule(s):
    s["first"].cut_pipeline_stage()
"""


# What its stages hand on they have also saved, for the gradients of their weights.
HANDED_ON = """\
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)

    def forward(self, x, first):
        return x + self.linear(self.norm(first))


class HandedOn(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x, y):
        x = first = self.first(x)
        for block in self.blocks:
            x = block(x, first)
        return F.mse_loss(x, y)
"""
HANDED_ON_SCHEDULE = TURNED_SCHEDULE.partition("def schedule")[0].replace("Turned", "HandedOn")
HANDED_ON_SCHEDULE = (
    HANDED_ON_SCHEDULE.replace("16, 1)", "16, 4)")
    + """\
def schedule(s):
    for number in range(3):
        s[f"blocks.{number}"].cut_pipeline_stage()
"""
)


@dataclass(frozen=True)
class Layout:
    """How the stages of a model are run.

    Attributes:
        case: The model's name.
        pipeline: Ranks on the axis `pp`.
        kind: The schedule.
        replicas: What makes the replicas, of which there are two, alike; None for one.
        shards: Ranks on the axis `tp`.
    """

    case: str
    pipeline: int
    kind: Any
    replicas: Any = None
    shards: int = 1


LAYOUTS = (
    Layout("gpt", 2, Schedule1F1B, shards=2),
    Layout("slices", 2, ScheduleGPipe, shards=2),
    Layout("turned", 2, Schedule1F1B, replicas=DistributedDataParallel),
    Layout("t5", 2, ScheduleInterleaved1F1B, replicas=fully_shard),
    Layout("handed_on", 4, ScheduleInterleavedZeroBubble),
)
FURTHER = (
    Layout("bert", 2, Schedule1F1B, replicas=DistributedDataParallel),
    Layout("llama", 4, ScheduleGPipe),
    Layout("gpt2", 4, Schedule1F1B),
    Layout("gpt2", 2, ScheduleInterleaved1F1B, replicas=fully_shard),
    Layout("t5", 4, Schedule1F1B),
)


def made(folder: Path) -> tuple[Any, Any, Any]:
    """The schedule, the rewritten model's module and its pipeline, from an output folder."""
    sys.path.insert(0, str(folder.parent))
    name = next(folder.glob("*.model")).stem  # a marker
    names = ("s", name, "pipeline")
    schedule, module, pipeline = (importlib.import_module(f"{folder.name}.{n}") for n in names)
    return schedule, module, pipeline


def steps_of(schedule: Any, model: Any, replicas: int) -> list[list[dict[str, Any]]]:
    """What the micro-batches of all steps give the model, those of all replicas."""
    count = MICRO_BATCHES * replicas
    steps = [
        [step_inputs(schedule, model, seed=count * step + m) for m in range(count)]
        for step in range(STEPS)
    ]
    steps[SHORT] = [
        {name: value[:, :-2].contiguous() for name, value in inputs.items()}
        for inputs in steps[SHORT]
    ]
    return steps


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Several micro-batches as one batch."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def trained(folders: dict[str, Path], layouts: tuple[Layout, ...]) -> list[Any]:
    """For each layout, losses and weights after training, and the loss in a last evaluation."""
    results = []
    for layout in layouts:
        folder = folders[layout.case]
        schedule, module, pipeline = made(folder)
        start = torch.load(folder / "weights.pt")
        copies = 2 if layout.replicas else 1
        sizes = (layout.pipeline, copies, layout.shards)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp"))
        torch.manual_seed(0)
        model = schedule.model(module)
        torch.manual_seed(0)
        stages = pipeline.build(*built_with(model), mesh=mesh)
        # transformers initialises a file of its own a little differently from one outside of it.
        drawn = start if layout.shards > 1 else model.state_dict()
        torch.testing.assert_close(pipeline.to_full(stages), drawn, rtol=0, atol=0)
        pipeline.load_full(stages, start)
        torch.testing.assert_close(pipeline.to_full(stages), start, rtol=0, atol=0)
        for stage in stages:
            if layout.replicas is fully_shard:
                fully_shard(stage.submod, mesh=mesh["dp"])
            elif layout.replicas:
                group = mesh["dp"].get_group()
                stage.submod = layout.replicas(stage.submod, process_group=group)
        if layout.kind is ScheduleInterleaved1F1B:
            with pytest.raises(ValueError, match="runs one stage on a rank, but there are 2"):
                pipeline.schedule(stages, Schedule1F1B, MICRO_BATCHES)
            first_batch = pipeline.batch(**joined(steps_of(schedule, model, 1)[0]))
            in_a_v = pipeline.schedule(stages, ScheduleZBVZeroBubble, MICRO_BATCHES)
            with pytest.raises(ValueError, match="places stages on ranks differently than `build`"):
                in_a_v.step(**first_batch)
        parameters = [p for stage in stages for p in stage.submod.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        run = pipeline.schedule(stages, layout.kind, MICRO_BATCHES)
        first = MICRO_BATCHES * mesh["dp"].get_local_rank()
        losses = []
        check_refusals(pipeline, run, joined(steps_of(schedule, model, 1)[0]))
        for number, step in enumerate(steps_of(schedule, model, copies)):
            mine = joined(step[first : first + MICRO_BATCHES])
            losses.append(run.step(**pipeline.batch(**mine)))
            if number != FURTHER_ONE:
                pipeline.clip_grad_norm_(stages, LARGEST_NORM)
                optimizer.step()
                optimizer.zero_grad()
        full = pipeline.to_full(stages, first_rank_only=True)
        outputs, after = run.eval(**pipeline.batch(**mine))
        assert bool(losses[0]) == bool(after) == (outputs is not None)
        again, none = run.eval(**pipeline.batch(**mine) | {"target": None})
        assert not none and (again is None) == (outputs is None)
        evaluated = [float(sum(each)) / MICRO_BATCHES for each in [*losses, after] if each]
        own = sum(p.numel() for p in parameters)
        results.append((evaluated, full or None, own, first))
    return results


def built_with(model: Any) -> tuple[Any, ...]:
    """What a model's class is given."""
    return (model.config,) if hasattr(model, "config") else ()


def check_refusals(pipeline: Any, run: Any, inputs: dict[str, Any]) -> None:
    """What cannot be run is said before anything is sent."""
    count = len(pipeline.STAGES)
    whole = init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
    if count == 2:
        with pytest.raises(ValueError, match="cut into 2 stages, which 4 ranks on the axis `pp`"):
            pipeline.build(mesh=whole)
    with pytest.raises(ValueError, match=f"no axis `pp` for the {count} stages, only .'dp'"):
        pipeline.build(mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
    batch = pipeline.batch(**inputs)
    with pytest.raises(ValueError, match="labels, but they are None"):
        run.step(**batch | {"target": None})
    rows = {name: value[1:] for name, value in batch.items()}
    with pytest.raises(ValueError, match="7} rows cannot be divided into 4 equal"):
        run.step(**rows)


def reference(folder: Path, source: str, copies: int) -> tuple[Any, Any, int]:
    """Losses of the original in one process, and its weights; saves what it starts from."""
    schedule = importlib.import_module(f"{folder.name}.s")
    module = import_source(SourceFile.read(*locate(source)))
    torch.manual_seed(0)
    model = schedule.model(module)
    model.train()
    torch.save(model.state_dict(), folder / "weights.pt")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for number, step in enumerate(steps_of(schedule, model, copies)):
        each = [loss_of(schedule, model(**inputs), inputs) for inputs in step]
        (sum(each) / len(step)).backward()
        if number != FURTHER_ONE:
            torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(torch.stack(each).detach())
    with torch.no_grad():
        losses.append(torch.stack([loss_of(schedule, model(**inputs), inputs) for inputs in step]))
    return torch.stack(losses), model.state_dict(), sum(p.numel() for p in model.parameters())


@pytest.mark.long
@pytest.mark.parametrize("layouts", [LAYOUTS, release(FURTHER)], ids=["short", "further"])
def test_torch_schedules_train_as_one_process_does(layouts, tmp_path):
    cases = dict(CASES)
    own = {"turned": (TURNED, TURNED_SCHEDULE), "handed_on": (HANDED_ON, HANDED_ON_SCHEDULE)}
    for name, (text, schedule) in own.items():
        (tmp_path / f"{name}_model.py").write_text(text)
        cases[name] = Case(str(tmp_path / f"{name}_model.py"), schedule)
    folders = {}
    for name in dict.fromkeys(layout.case for layout in layouts):
        source, text = cases[name].source, for_torch(cases[name].schedule)
        (tmp_path / f"{name}.py").write_text(text)
        output = rewrite(source, str(tmp_path / f"{name}.py"))
        assert not any("deepspeed" in text for text in output.files.values())
        model_file = written(tmp_path, output)
        folders[name] = model_file.parent
        (model_file.parent / "s.py").write_text(text)
        (model_file.parent / f"{model_file.stem}.model").touch()
    sys.path.insert(0, str(tmp_path))
    expected = [
        reference(folders[at.case], cases[at.case].source, 2 if at.replicas else 1)
        for at in layouts
    ]
    ranks = run(trained, 4, folders, layouts, timeout_s=300)
    for number, (losses, weights, size) in enumerate(expected):
        for results in ranks:
            had, full, own, first = results[number]
            assert own < size
            if had:
                wanted = losses[:, first : first + MICRO_BATCHES].mean(1)
                torch.testing.assert_close(torch.tensor(had), wanted, rtol=1e-5, atol=1e-6)
            if full is not None:
                torch.testing.assert_close(full, weights, rtol=1e-4, atol=1e-5)
        assert any(results[number][0] for results in ranks)


def check_clipping(dtype: torch.dtype) -> None:
    """One layer on each rank, of which the second is not trained."""
    torch.manual_seed(0)
    whole = torch.nn.Linear(3, 3, dtype=dtype)
    own = torch.nn.Linear(3, 3, dtype=dtype)
    own.load_state_dict(whole.state_dict())
    for model in (whole, own):
        model(torch.ones(2, 3, dtype=dtype)).square().sum().backward()
    if dist.get_rank() == 1:
        own.zero_grad()
    pipeline = UnshardedPipeline((), {}, "")
    stage: Any = SimpleNamespace(submod=own, device="cpu", group=dist.group.WORLD)
    norm = pipeline.clip_grad_norm_([stage], 0.1)
    want = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    if dist.get_rank() == 0:
        torch.testing.assert_close(norm, want)
        torch.testing.assert_close(own.weight.grad, whole.weight.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_are_as_precise_as_the_gradients(dtype):
    run(check_clipping, 2, dtype)
