"""What a model of transformers needs to keep reading and writing the original's checkpoints."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from pathlib import Path
from typing import Any

from slapo_rewrite.edit.definition import MixIn
from slapo_rewrite.edit.desks import Desks
from slapo_rewrite.edit.state import Directive
from slapo_rewrite.model.layers import qualified
from slapo_rewrite.model.tree import Node, Tree

# The model's checkpoints are the original's, also where modules have other weights.
ORIGINAL, MAPPED = "OriginalCheckpoints", "MappedCheckpoints"


def keep_checkpoints(desks: Desks, node: Node, kind: str, causes: tuple[Directive, ...]) -> None:
    """Gives the models of transformers that hold a module a base class for their checkpoints.

    Args:
        desks: Take the changes.
        node: The module, which may be a model itself.
        kind: `ORIGINAL` or `MAPPED`, which does more.
        causes: The directives behind it.
    """
    above: Node | None = node
    while above is not None:
        home = desks.of(above.cls)
        own = [c for c in above.cls.__mro__ if home and desks.of(c) is home]
        base = next((c for c in reversed(own) if is_pretrained(c)), None)
        stays = home is not None and desks.is_other(home) and not home.places.changes
        if home and base and not stays:
            key = ("mixin", base.__name__)
            known = home.places.changes.get(above.path, {}).get(key)
            what = known if kind == ORIGINAL and known else MixIn("pretrained", kind)
            home.places.add(above.path, key, what, causes)
        above = above.parent


def converted_models(tree: Tree) -> list[Node]:
    """The models of transformers whose checkpoints it converts, of classes in files of its own."""
    return [
        node
        for node in tree.nodes.values()
        if is_pretrained(node.cls)
        and any(map(_is_converted, (node.cls.__name__, _config(node).model_type)))
    ]


def is_pretrained(cls: type) -> bool:
    """Whether a class is a model of transformers."""
    return any(qualified(c) == "transformers.modeling_utils.PreTrainedModel" for c in cls.__mro__)


def _config(node: Node) -> Any:
    return node.live.config


@functools.cache
def _is_converted(name: str | None) -> bool:
    """Whether transformers converts checkpoints for a class or a type of model."""
    # All that it knows takes a while to build: look first whether it says the name at all.
    if not name or f'"{name}"' not in _what_is_converted():
        return False
    known: Any = importlib.import_module("transformers.conversion_mapping")
    return known.get_checkpoint_conversion_mapping(name) is not None


@functools.cache
def _what_is_converted() -> str:
    """The text of transformers' conversions; empty where a release has none."""
    found = importlib.util.find_spec("transformers.conversion_mapping")
    return Path(found.origin).read_text(encoding="utf-8") if found and found.origin else ""
