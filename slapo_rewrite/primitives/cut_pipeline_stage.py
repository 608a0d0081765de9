"""`cut_pipeline_stage`: a pipeline stage ends after a module."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import ClassVar

from slapo_rewrite import errors
from slapo_rewrite.edit.state import ModuleState
from slapo_rewrite.model.tree import Node
from slapo_rewrite.primitives.base import (
    Call,
    Example,
    Primitive,
    Refusal,
    check_called,
    signature_of,
)

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

MODEL = """\
import torch


def model(m):
    return m.Stack(8, depth=4)


def inputs(model):
    return {"x": torch.randn(2, 8), "y": torch.randn(2, 1)}


"""


class CutPipelineStage(Primitive):
    """End a pipeline stage after the selected modules.

    The output has a file `pipeline.py`: a class for each stage, written out of the `forward` of the
    modules on the way to the cuts, and `build`, which gives a `deepspeed.pipe.PipelineModule` of
    them with the model's own loss. Branches that training does not take are left out. What a stage
    needs of earlier ones is handed on, or worked out again where it is no part of the backward pass
    (masks, rotary tables). Parameters of several stages are kept in step by `TiedLayerSpec`. A
    stage is a subclass of the model that holds its own part of it, by the same names.

    The stages are written for the arguments that the schedule's `inputs` give; all others have
    their defaults. They are run on a small model before they are written, against the model itself.

    Rewrite:
        s["layers"][1].cut_pipeline_stage()
        -->
        pipeline.py with `StackStage0`, `StackStage1`, `build`, `batch`, `to_full`, `load_full`

    Shapes:
        Unchanged.

    Numerics:
        Exact.

    State:
        A stage's parameters have the names of the original's; `to_full` gathers all stages.

    Raises:
        SR310 a module inside a branch or a loop that is not over layers, or called twice; a value
        that cannot get across; parameters shared in more ways than DeepSpeed has ties; SR306 two
        cuts after one module; SR305 a module list (select one of its elements).

    Source: Slapo, arXiv 2302.08005, section 3.3.3; deepspeed.pipe.
    """

    name = "cut_pipeline_stage"
    examples: ClassVar[tuple[Example, ...]] = (
        Example(STACK, MODEL + 'def schedule(s):\n    s["layers"][1].cut_pipeline_stage()\n'),
        Example(
            STACK,
            MODEL + 'def schedule(s):\n    s["first"].cut_pipeline_stage()\n'
            '    s["layers"][2].cut_pipeline_stage()\n',
        ),
    )
    refusals: ClassVar[tuple[Refusal, ...]] = (
        Refusal(STACK, MODEL + 'def schedule(s):\n    s["last"].cut_pipeline_stage()\n', "SR310"),
        Refusal(STACK, MODEL + 'def schedule(s):\n    s["layers"].cut_pipeline_stage()\n', "SR305"),
        Refusal(
            STACK,
            MODEL + 'def schedule(s):\n    s["layers.*"].cut_pipeline_stage()\n'
            '    s["layers"][2].cut_pipeline_stage()\n',
            "SR306",
        ),
        Refusal(STACK, MODEL + 'def schedule(s):\n    s["first"].cut_pipeline_stage(2)\n', "SR206"),
    )

    def signature(self) -> inspect.Signature:
        """`cut_pipeline_stage()`."""

        def cut_pipeline_stage() -> None: ...

        return signature_of(cut_pipeline_stage)

    def apply(self, call: Call, node: Node, state: ModuleState) -> ModuleState:
        """Marks the module."""
        check_called(call, node)
        if not node.path:
            raise errors.Unsupported(
                "the pipeline ends after the model anyway",
                at=call.directive.at,
                hint="select a module inside it",
            )
        if state.cut is not None:
            raise errors.ConflictingEdits(
                f"a stage ends after `{node.path}` already",
                at=call.directive.at,
                also=[state.cut.at] if state.cut.at else [],
            )
        return replace(state, cut=call.directive)
