"""What a model of transformers needs to start, read and write checkpoints as the original does."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from slapo_rewrite.changes.bases import MixIn
from slapo_rewrite.changes.output_files import OutputFile, OutputFiles
from slapo_rewrite.changes.places import BeforeBases
from slapo_rewrite.directive import Causes, Directive, merged_causes
from slapo_rewrite.model.initial import initialises_inside
from slapo_rewrite.model.layers import qualified
from slapo_rewrite.model.tree import Node, Tree

# The model's checkpoints are the original's, also where modules have other weights.
ORIGINAL, MAPPED = "OriginalCheckpoints", "MappedCheckpoints"
# Transformers treats the model as it does those of its own package.
LIBRARY = "LibraryModel"


def keep_checkpoints(files: OutputFiles, node: Node, kind: str, causes: Causes) -> None:
    """Gives the models of transformers that hold a module a base class, `ORIGINAL` or `MAPPED`."""
    _mix_in(files, node, kind, causes)
    _mix_in(files, node, LIBRARY, causes)


def keep_all_treatments(
    tree: Tree, files: OutputFiles, before: Iterable[Directive], called: Sequence[Directive]
) -> None:
    """Has transformers treat every model specially that it did, once anything is called for.

    It converts their checkpoints, or initialises what others have to initialise themselves.
    `called` is all that is called for, were it for a share of layers that is none: a knob that says
    no more than that does not change the weights that training starts with.
    """
    changes = (known for output in files for known in output.changes.causes.values())
    causes = merged_causes(before, *(why for known in changes for why in known.values()))
    causes = causes or tuple(called)
    treated = [*converted_models(tree), *_specially_initialised(tree)] if causes else []
    for node in treated:
        _mix_in(files, node, LIBRARY, causes[:1])


def _mix_in(files: OutputFiles, node: Node, kind: str, causes: Causes) -> None:
    for above in node.outwards():
        home = files.of(above.cls)
        own = [c for c in above.cls.__mro__ if home and files.of(c) is home]
        base = next((c for c in reversed(own) if is_pretrained(c)), None)
        stays = home is not None and files.is_other(home) and not _is_held(files, home, above)
        if home and base and not stays and (kind != LIBRARY or is_of_library(base)):
            what = "treatment" if kind == LIBRARY else "checkpoints"
            place = BeforeBases(base.__name__, what)
            known = home.changes.by_path.get(above.path, {}).get(place)
            why = f"`{base.__name__}` starts, reads and writes checkpoints as the original does"
            change = known if kind == ORIGINAL and known else MixIn("pretrained", kind, why)
            home.changes.add(above.path, place, change, causes)


def _is_held(files: OutputFiles, home: OutputFile, node: Node) -> bool:
    """Whether the output has a file besides the model's: it changes, or makes what does."""
    below = f"{node.path}." if node.path else ""
    changed = (path for output in files for path in output.changes.by_path)
    return bool(home.changes.by_path) or any(path.startswith(below) for path in changed)


def _specially_initialised(tree: Tree) -> list[Node]:
    """The models that initialise weights when they are asked to do so for a module without any.

    Transformers asks for such modules in its own package only.
    """
    models: dict[str, Node | None] = {}
    found: dict[str, Node] = {}
    for path, node in tree.nodes.items():
        above = models[node.parent.path] if node.parent else None
        model = models[path] = node if is_pretrained(node.cls) else above
        if model is None or model.path in found or not is_of_library(model.cls):
            continue
        if initialises_inside(model.live, node.live):
            found[model.path] = model
    return list(found.values())


def converted_models(tree: Tree) -> list[Node]:
    """The models of transformers whose checkpoints it converts, of classes in files of its own."""
    return [
        node
        for node in tree.nodes.values()
        if is_pretrained(node.cls)
        and any(map(_is_converted, (node.cls.__name__, _config(node).model_type)))
    ]


def _config(node: Node) -> Any:
    return node.live.config


def is_pretrained(cls: type) -> bool:
    """Whether a class is a model of transformers."""
    return any(qualified(c) == "transformers.modeling_utils.PreTrainedModel" for c in cls.__mro__)


def is_of_library(cls: type) -> bool:
    """Whether transformers counts a class as one of its own, by its package."""
    return cls.__module__.startswith("transformers.")


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
