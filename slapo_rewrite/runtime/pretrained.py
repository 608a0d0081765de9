"""Lets transformers treat the model as its own: initial weights, checkpoints."""

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from .loading import weight_maps
from .weights import originals_standing


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


class OriginalCheckpoints:
    """A Hugging Face model that reads and writes the original's checkpoints."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Loads a checkpoint, and marks the new parameters like the old ones."""
        parent: Any = super()
        loaded = parent.from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.load_state_dict({}, strict=False)  # runs its hooks
        return loaded


class MappedCheckpoints(OriginalCheckpoints):
    """The same for a model with replaced modules that have other weights."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Loads the original's modules, then puts their replacements in.

        Raises:
            ValueError: `device_map` spreads the model over several devices.
        """
        with originals_standing() as standing:
            loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if hasattr(model, "_hf_hook"):
            raise ValueError(
                "`from_pretrained` cannot spread this model over several devices: "
                "leave `device_map` out, or name one device"
            )
        for each in reversed(standing):  # outer modules first
            each.give_way(model)
        return loaded

    def save_pretrained(
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Writes the original's tensors, converted from the model's if need be."""
        parent, model = cast(Any, super()), cast(nn.Module, self)
        own = model.state_dict() if state_dict is None else state_dict
        named: Mapping[str, Tensor] = own
        for prefix, weight_map in reversed(weight_maps(model).items()):
            metadata = getattr(own, "_metadata", {}).get(prefix[:-1], {})
            if "mapped" in metadata or not weight_map.are_original(named, prefix):
                named = weight_map.to_original(named, prefix)
        return parent.save_pretrained(
            save_directory, is_main_process, dict(named), **kwargs
        )
