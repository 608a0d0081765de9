"""What transformers does for its own models: initial weights, checkpoints."""

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from .loading import weight_maps
from .weights import originals_standing


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


class OriginalCheckpoints:
    """For a model of transformers: its checkpoints are the original's."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Loads, and notes what was known of the parameters at the new ones."""
        parent: Any = super()
        loaded = parent.from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.load_state_dict({}, strict=False)  # for its hooks
        return loaded


class MappedCheckpoints(OriginalCheckpoints):
    """The same where modules stand in others' places, with other weights."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Loads the original's modules, then puts in those that stand for them.

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
        for each in reversed(standing):  # what holds another one before that
            each.give_way(model)
        return loaded

    def save_pretrained(
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Writes the original's tensors, also of a state dict that is the model's own."""
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
