# Written by slapo-rewrite 0.2.0 for modeling_gpt_neo.py; rewrite.json says from what.
"""What activation checkpoints keep and restore when they recompute a forward pass."""

from typing import Any

from torch import nn


class EarlierBuffers:
    """A context in which a module has the buffers that it had when this was made.

    Args:
        module: The module, with its submodules.
    """

    def __init__(self, module: nn.Module) -> None:
        self.places = [
            (each, name, buffer.clone())
            for each in module.modules()
            for name, buffer in each.named_buffers(recurse=False)
        ]
        self.later: list[Any] = []

    def __enter__(self) -> None:
        """Puts copies of the earlier buffers in."""
        self.later = [getattr(module, name) for module, name, _ in self.places]
        for module, name, buffer in self.places:
            setattr(module, name, buffer.clone())

    def __exit__(self, *error: object) -> None:
        """Puts the later buffers back."""
        for (module, name, _), buffer in zip(self.places, self.later, strict=True):
            setattr(module, name, buffer)
