"""Submodules that a subclass makes again, with the weights of those they replace."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def same_weights(module: nn.Module) -> Iterator[None]:
    """A context in which new submodules take the weights of those that they replace.

    Frozen weights stay frozen. The random state is restored afterwards: the same seed
    gives the same weights as in a model that makes no submodule twice.
    """
    before = dict(module.named_modules())
    uses_cuda = torch.get_default_device().type == "cuda"
    with torch.random.fork_rng([torch.cuda.current_device()] if uses_cuda else []):
        yield
    taken: tuple[str, ...] = ()
    for path, made in module.named_modules():
        replaced = before.get(path, made)
        if made is replaced:
            continue
        # Flags that others have set on a module, such as being initialised, are kept.
        notes = {name for name, value in vars(replaced).items() if value is True}
        vars(made).update(dict.fromkeys(notes - vars(made).keys(), True))
        if not path.startswith(taken):
            weights = replaced.state_dict(keep_vars=True)
            # Packed weights are initialised differently.
            if weights.keys() == made.state_dict(keep_vars=True).keys():
                made.load_state_dict(weights)
                for name, parameter in made.named_parameters():
                    parameter.requires_grad_(weights[name].requires_grad)
                taken = (*taken, f"{path}.")
