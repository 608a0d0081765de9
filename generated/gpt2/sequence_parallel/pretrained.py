# Written by slapo-rewrite 0.2.0 for modeling_gpt2.py; rewrite.json says from what.
"""What transformers does for its own models: initial weights, checkpoints."""


class LibraryModel:
    """A model that transformers is to treat as the original, which is one of its own.

    For a class outside of its package it skips what `_init_weights` does for modules
    without parameters of their own, such as attention, so that others start from weights
    of another scale; nor does it convert checkpoints.
    """

    @classmethod
    def is_custom_code(cls) -> bool:
        """Whether transformers leaves these things to the model: no."""
        return False
