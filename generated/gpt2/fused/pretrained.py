# Written by slapo-rewrite 0.2.0 for modeling_gpt2.py; rewrite.json says from what.
"""Lets transformers treat the model as its own: initial weights, checkpoints."""


class LibraryModel:
    """A model that transformers initialises and loads as one of its own classes.

    For custom classes it does not call `_init_weights` on modules without parameters of
    their own, such as attention, which may set the scale of other weights; and it does
    not convert checkpoints.
    """

    @classmethod
    def is_custom_code(cls) -> bool:
        """Whether transformers is to treat this as a custom class: no."""
        return False
