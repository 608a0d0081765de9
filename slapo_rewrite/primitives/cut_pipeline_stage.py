"""`cut_pipeline_stage`: ends a pipeline stage after a module."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from slapo_rewrite import errors
from slapo_rewrite.changes.state import TARGETS, ModuleRequests, StageCut
from slapo_rewrite.examples import Example, Refusal, Sample, setting
from slapo_rewrite.model.tree import Node
from slapo_rewrite.primitives.base import Call, Primitive, check_called

STACK = """\
import torch
from torch import nn
from torch.nn import functional as F


class Stack(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.last = nn.Linear(width, 1)

    def forward(self, x, y):
        x = self.first(x)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return F.mse_loss(self.last(x), y)
"""

MODEL = setting("Stack(8, depth=4)", '{"x": torch.randn(2, 8), "y": torch.randn(2, 1)}', loss=None)
SAMPLE = Sample(STACK, MODEL)


class CutPipelineStage(Primitive):
    """End a pipeline stage after the selected modules.

    The output gets a file `pipeline.py` with a class for each stage and `build`, which makes the
    stages. The classes are composed of the `forward` code of all modules that contain a cut, also
    from other files, whose names are imported. Branches that training does not take are left out.
    Values from earlier stages are passed on, or recomputed if they are not part of the backward
    pass (masks, rotary tables). A stage is a subclass of the model that holds its own part of it,
    by the same names. The loss is the model's own, or the schedule's `loss` of its outputs.
    `loss(outputs, y)` takes targets from the inputs; the model does not get them unless its
    `forward` names them.

    `target` is the library that runs the stages, the same for all cuts of a schedule.

    - `"deepspeed"`: `build(config)` returns a `deepspeed.pipe.PipelineModule`. Parameters of
      several stages are synchronised by `TiedLayerSpec`.
    - `"torch"`: `build(config, mesh=mesh)` returns this rank's stages, each a
      `torch.distributed.pipelining.PipelineStage`, by the axes `pp` and `tp` of the mesh. Each
      stage takes the arguments of the step that it needs by name. `schedule` runs them by a class
      of torch's, and sums the gradients of parameters that several stages hold.

    The stages are written for the arguments that the schedule's `inputs` returns; all others have
    their defaults. Before they are written, a small model of them is compared with the original
    for two steps and in eval mode, each with weights and buffers of its own.
    `slapo-rewrite verify OUT --pp 2 --tp 2 --dp 2` compares training in real processes.

    Rewrite:
        s["layers"][1].cut_pipeline_stage()
        -->
        pipeline.py with `StackStage0`, `StackStage1`, `build`, `batch`, `to_full`, `load_full`

        s["layers"][1].cut_pipeline_stage(target="torch")
        -->
        the same with `schedule`, without DeepSpeed:
        stages = pipeline.build(8, depth=4, mesh=mesh)
        schedule = pipeline.schedule(stages, Schedule1F1B, n_microbatches=2)
        losses = schedule.step(**pipeline.batch(x=x, y=y))

    Shapes: Unchanged.
    Numerics: Exact. Gradients are of the mean of the micro-batches' losses.
    State: A stage's parameters have the names of the original's; `to_full` gathers all stages.

    Raises:
        SR310 a module inside a branch or a loop that is not over layers, or called twice; a value
        that cannot be sent; a buffer, weight, attribute or argument that one stage changes and
        another reads or changes as well; parameters tied in more ways than DeepSpeed supports;
        SR306 two cuts after one module, or for different targets; SR305 a module list (select one
        of its elements); SR206 an unknown target.

    Source: Slapo, arXiv 2302.08005, section 3.3.3; deepspeed.pipe; torch.distributed.pipelining.
    """

    name = "cut_pipeline_stage"
    examples: ClassVar[tuple[Example, ...]] = (
        SAMPLE.example('s["layers"][1].cut_pipeline_stage()'),
        SAMPLE.example("""\
s["first"].cut_pipeline_stage()
s["layers"][2].cut_pipeline_stage()
"""),
        SAMPLE.example('s["layers"][1].cut_pipeline_stage(target="torch")'),
    )
    refusals: ClassVar[tuple[Refusal, ...]] = (
        SAMPLE.refused("SR310", 's["last"].cut_pipeline_stage()'),
        SAMPLE.refused("SR305", 's["layers"].cut_pipeline_stage()'),
        SAMPLE.refused(
            "SR306", 's["layers.*"].cut_pipeline_stage()', 's["layers"][2].cut_pipeline_stage()'
        ),
        SAMPLE.refused("SR206", 's["first"].cut_pipeline_stage(2)'),
        SAMPLE.refused(
            "SR306",
            's["first"].cut_pipeline_stage()',
            's["layers"][2].cut_pipeline_stage(target="torch")',
        ),
    )

    @staticmethod
    def takes(target: str = "deepspeed") -> None:
        """`cut_pipeline_stage(target="deepspeed")`."""

    def apply(self, call: Call, node: Node, state: ModuleRequests) -> ModuleRequests:
        """Marks the module."""
        target = call.arguments["target"]
        if target not in TARGETS:
            raise errors.BadArgument(
                f"stages are cut for {' or '.join(TARGETS)}, not for {target!r}",
                hint=errors.did_you_mean(str(target), TARGETS),
            )
        if (
            node.parent is None or node.parent.cls.__name__ != "ModuleList"
        ):  # a list in a list may be a loop's iteration
            check_called(call, node)
        if not node.path:
            raise errors.Unsupported(
                "the pipeline ends after the model anyway", hint="select a module inside it"
            )
        if state.cut is not None:
            raise errors.ConflictingEdits(
                f"a stage already ends after {node.shown}", cause=state.cut.cause
            )
        return replace(state, cut=StageCut(target, call.directive))
