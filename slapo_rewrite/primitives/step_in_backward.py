"""`step_in_backward`: updates each parameter as soon as its gradient is complete."""

from __future__ import annotations

from dataclasses import dataclass

from slapo_rewrite import errors
from slapo_rewrite.changes.bases import MixIn
from slapo_rewrite.changes.change_set import own_copy
from slapo_rewrite.changes.class_text import ClassText
from slapo_rewrite.changes.placement import Placement, Requested
from slapo_rewrite.changes.places import BeforeBases, Place
from slapo_rewrite.changes.state import ModuleRequests
from slapo_rewrite.directive import Directive
from slapo_rewrite.model.tree import Node
from slapo_rewrite.primitives.base import Call, Primitive
from slapo_rewrite.primitives.checkpoint import SAMPLE


@dataclass(frozen=True)
class StepInBackward(Requested):
    """Lets the model's class update its parameters in the backward pass."""

    is_parallel = False

    def place(self, to: Placement, node: Node, cause: Directive) -> None:
        """Adds a base class to the model's class."""
        if cut := [state.cut.cause for state in to.states.values() if state.cut]:
            raise errors.Unsupported(
                "pipeline stages run several backward passes in a step, so no gradient is "
                "complete before the last one",
                at=cause.at,
                cause=cut,
                hint="remove `step_in_backward` or the cuts",
            )
        if (home := to.files.of(node.cls)) is None:
            raise errors.Unsupported(
                f"the model is a `{node.cls.__module__}.{node.cls.__qualname__}`, which is no "
                "class of a file that is rewritten",
                at=cause.at,
                hint=own_copy(node.cls.__name__, to.files.main.file),
            )
        place = BeforeBases(node.cls.__name__, "steps")
        why = f"`{node.cls.__name__}` can update its parameters in the backward pass"
        change = MixIn("backward_steps", "StepsInBackward", why)
        home.changes.add(node.path, place, change, (cause,))

    def write_at(self, text: ClassText, place: Place) -> None:
        """Writes nothing: the base class is another change."""


class StepInBackwardPrimitive(Primitive):
    """Give the model a method by which the backward pass updates each parameter.

    A parameter is updated as soon as its gradient is complete, and the gradient is freed, so that
    the gradients of a model are never all in memory at once. Nothing changes until a training
    script calls the method, once, instead of making an optimizer:

        model.step_in_backward(lambda name, parameter: AdamW([parameter], lr=1e-4))

    Each `backward` is then a step: gradients cannot be accumulated over several, nor scaled (by a
    `torch.amp.GradScaler`, as float16 needs), nor clipped by their total norm. After `backward`
    there are no gradients: `clip_grad_norm_` and `clip_grad_value_` clip nothing, and the norm is
    0. The optimizers refuse steps of the training loop; remove them, and code that prepares them.
    To clip values, clip each gradient when it is computed (each replica clips its own):

        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1, 1))

    Gradients of tensor-parallel ranks are all-reduced before the update; those of replicas are
    averaged over the group passed as `replicas`. With torch's checkpoints and `use_reentrant=True`
    (not with the primitive's) each call of a layer that is called more than once is a step.

    Rewrite:
        class Model(nn.Module):
        -->
        class Model(StepsInBackward, nn.Module):

    Shapes: Unchanged.
    Numerics: Exact: optimizers of single parameters compute the same as one for all.
    State: Unchanged.

    Raises:
        SR305 a module other than the model itself, one with such a method of its own, or pipeline
        stages, which accumulate gradients; SR106 a small model computes other gradients with it,
        as if the backward pass reads `weight.detach()` after it has updated the weight.

    Source: ROAM, arXiv 2310.19295; torch.Tensor.register_post_accumulate_grad_hook.
    """

    name = "step_in_backward"
    examples = (
        SAMPLE.example(
            "s.step_in_backward()",
            """\
+from .backward_steps import StepsInBackward
-class Stack(nn.Module):
+class Stack(StepsInBackward, nn.Module):
""",
        ),
    )
    refusals = (
        SAMPLE.refused("SR305", 's["blocks.*"].step_in_backward()'),
        SAMPLE.refused(
            "SR305", "s.step_in_backward()", 's["blocks.1"].cut_pipeline_stage(target="torch")'
        ),
    )

    @staticmethod
    def takes() -> None:
        """`step_in_backward()`."""

    def apply(self, call: Call, node: Node, state: ModuleRequests) -> ModuleRequests:
        """Marks the model."""
        if node.path:
            raise errors.Unsupported(
                f"{node.shown} is part of a model: the model itself updates all parameters",
                hint="s.step_in_backward()",
            )
        if earlier := [cause for _, cause in state.asks(StepInBackward)]:
            raise errors.Unsupported(
                "the model already updates its parameters in the backward pass", cause=earlier
            )
        if hasattr(node.cls, self.name):
            raise errors.Unsupported(f"`{node.cls.__name__}` already defines `{self.name}`")
        return state.asking(StepInBackward(), call.directive)
