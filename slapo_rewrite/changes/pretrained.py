"""Mix-ins with which a transformers model initialises, loads and saves as the original does."""

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

# Mix-ins that keep the original's checkpoint format; the second is for modules with mapped weights.
ORIGINAL, MAPPED = "OriginalCheckpoints", "MappedCheckpoints"
# A mix-in that has transformers treat the model like those of its own package.
LIBRARY = "LibraryModel"


def keep_checkpoints(files: OutputFiles, node: Node, kind: str, causes: Causes) -> None:
    """Adds a mix-in, `ORIGINAL` or `MAPPED`, to the transformers models that contain a module."""
    _mix_in(files, node, kind, causes)
    _mix_in(files, node, LIBRARY, causes)


def keep_all_treatments(
    tree: Tree, files: OutputFiles, before: Iterable[Directive], called: Sequence[Directive]
) -> None:
    """Adds the `LIBRARY` mix-in to models that transformers treats specially, if anything changes.

    It converts their checkpoints, or initialises modules that others must initialise themselves.
    `called` has all directives, even those for a share of layers that is empty: then a knob does
    not change the initial weights just by making a share empty.
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
    """Whether the output includes a file: it has changes, or it constructs modules with changes."""
    below = f"{node.path}." if node.path else ""
    changed = (path for output in files for path in output.changes.by_path)
    return bool(home.changes.by_path) or any(path.startswith(below) for path in changed)


def _specially_initialised(tree: Tree) -> list[Node]:
    """The models whose weight initialisation acts on modules without parameters of their own.

    Transformers calls it for such modules in its own package only.
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
    """The transformers models whose checkpoints it converts, by class name or model type."""
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
    # Building the mapping is slow: first check whether the source contains the name.
    if not name or f'"{name}"' not in _what_is_converted():
        return False
    known: Any = importlib.import_module("transformers.conversion_mapping")
    return known.get_checkpoint_conversion_mapping(name) is not None


@functools.cache
def _what_is_converted() -> str:
    """The source of transformers' conversions; empty if this release has none."""
    found = importlib.util.find_spec("transformers.conversion_mapping")
    return Path(found.origin).read_text(encoding="utf-8") if found and found.origin else ""
