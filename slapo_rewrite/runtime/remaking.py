"""Submodules that are made anew, with the weights of those in whose places they come."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def same_weights(module: nn.Module) -> Iterator[None]:
    """Submodules that are made anew inside take the weights of those before them.

    What is frozen stays so. Random numbers go on as if none had been drawn inside, so
    that from the same seed everything starts as in a model where nothing is made twice.
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
        # What others have noted on a module, that it is initialised say, holds on.
        notes = {name for name, value in vars(replaced).items() if value is True}
        vars(made).update(dict.fromkeys(notes - vars(made).keys(), True))
        if not path.startswith(taken):
            weights = replaced.state_dict(keep_vars=True)
            # What is packed is drawn otherwise.
            if weights.keys() == made.state_dict(keep_vars=True).keys():
                made.load_state_dict(weights)
                for name, parameter in made.named_parameters():
                    parameter.requires_grad_(weights[name].requires_grad)
                taken = (*taken, f"{path}.")
