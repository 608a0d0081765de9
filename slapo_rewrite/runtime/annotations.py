"""Attributes of parameters."""

from typing import Any


def annotate(module: Any, name: str, /, **attributes: object) -> None:
    """Sets attributes of the parameter `module.<name>`.

    They are set again after `load_state_dict`, which may have replaced the parameter
    (`assign=True`, or `to_empty` before it).
    """
    if not hasattr(module, "parameter_attributes"):
        module.parameter_attributes = {}
        module.register_load_state_dict_post_hook(set_attributes)
    module.parameter_attributes.setdefault(name, {}).update(attributes)
    set_attributes(module)


def set_attributes(module: Any, *_: object) -> None:
    """Gives a module's parameters the attributes that were noted for them."""
    for name, attributes in module.parameter_attributes.items():
        for key, value in attributes.items():
            setattr(getattr(module, name), key, value)
