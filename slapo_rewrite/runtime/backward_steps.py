"""Updates of parameters during the backward pass."""

from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

# Parameters that the backward pass updates; a copy of one has no such hooks.
_UPDATED: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()


class StepsInBackward(nn.Module):
    """A model that can update each parameter as soon as its gradient is complete."""

    def step_in_backward(
        self,
        make_optimizer: Callable[[str, nn.Parameter], Optimizer],
        replicas: dist.ProcessGroup | None = None,
    ) -> dict[str, Optimizer]:
        """Makes `backward` update the parameters and drop each gradient after its use.

        Call it once before training, instead of making one optimizer:

            model.step_in_backward(lambda name, parameter: AdamW([parameter], lr=1e-4))

        Each `backward` is a step: gradients cannot be accumulated over several, scaled
        or clipped by their total norm. Afterwards there are none: `clip_grad_norm_`
        clips nothing and returns 0, and a step by one of the optimizers raises an
        error. It is not for a model inside `DistributedDataParallel`, FSDP or ZeRO,
        which add up gradients later; pass `replicas` instead.

        Args:
            make_optimizer: Makes a parameter's optimizer, given its name and itself.
            replicas: The data-parallel processes, over which gradients are averaged. All
                have to use the same parameters in a step.

        Returns:
            The optimizers by the parameters' names, for schedulers and checkpoints.

        Raises:
            RuntimeError: It was called before, on this model or one that shares parameters.
        """
        trained = [(n, p) for n, p in self.named_parameters() if p.requires_grad]
        if taken := [n for n, p in trained if p in _UPDATED]:
            raise RuntimeError(
                f"`{taken[0]}` is already updated in the backward pass: call "
                "`step_in_backward` once, on the model that holds all parameters"
            )
        optimizers = {n: make_optimizer(n, p) for n, p in trained}

        def refuse_late(name: str, parameter: nn.Parameter, *_: Any) -> None:
            if parameter.grad is None:
                raise RuntimeError(
                    f"the gradient of `{name}` was used in the backward pass, since each "
                    "`backward` is a step: a loop that accumulates, scales or clips "
                    "gradients needs an ordinary optimizer, without `step_in_backward`"
                )

        def step(optimizer: Optimizer, number: int, parameter: nn.Parameter) -> None:
            if replicas is not None and parameter.grad is not None:
                turn = torch.tensor([number, -number], device=parameter.device)
                dist.all_reduce(turn, dist.ReduceOp.MAX, replicas)
                if turn.sum():
                    raise RuntimeError(
                        f"`{trained[number][0]}` has a gradient here, but the replicas use "
                        "different parameters, as when an expert gets no token: use an "
                        "ordinary optimizer and "
                        "`DistributedDataParallel(find_unused_parameters=True)`"
                    )
                parameter.grad.div_(dist.get_world_size(replicas))
                dist.all_reduce(parameter.grad, group=replicas)
            optimizer.step()
            optimizer.zero_grad()

        for number, (name, optimizer) in enumerate(optimizers.items()):
            parameter: Any = self.get_parameter(name)
            # A step by the training loop would do nothing, and hide the mistake.
            optimizer.register_step_pre_hook(partial(refuse_late, name, parameter))
            _UPDATED[parameter] = True
            hook = partial(step, optimizer, number)
            parameter.register_post_accumulate_grad_hook(hook)
        return optimizers
