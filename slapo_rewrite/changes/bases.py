"""Changes of a class's bases: a tensor-parallel layer for torch's, or an additional mix-in."""

from __future__ import annotations

import ast
from dataclasses import dataclass

import libcst as cst

from slapo_rewrite import errors
from slapo_rewrite.changes.change import Change
from slapo_rewrite.changes.class_hierarchy import is_call_of_super
from slapo_rewrite.changes.class_text import ClassText
from slapo_rewrite.changes.places import BeforeBases, Place
from slapo_rewrite.code.build import parsed, with_keywords
from slapo_rewrite.model.layers import Layer


@dataclass(frozen=True)
class DeriveFrom(Change):
    """In a class that extends a torch layer: the tensor-parallel layer as its base instead."""

    layer: Layer
    original: str

    is_parallel = False

    def write_at(self, text: ClassText, place: Place) -> None:
        """Replaces the base, and passes its keyword arguments in `super().__init__`."""
        layer, file = self.layer, text.file
        node = file.classes[text.classes.lineage(text.class_name)[-1]]
        base = next(
            (b for b in node.bases if ast.unparse(b).rpartition(".")[2] == self.original), None
        )
        constructor = file.method(node.name, "__init__")
        calls = [n for n in ast.walk(constructor or node) if isinstance(n, ast.Call)]
        made = next((c for c in calls if is_call_of_super(c, "__init__")), None)
        if base is None or (layer.keywords and (constructor is None or made is None)):
            raise errors.UnfollowableConstruction(
                f"`{text.class_name}` does not name `{self.original}` as its base, or does not "
                "call its constructor by `super()`",
                at=file.at(node),
                cause=text.causes,
            )
        why = f"`{node.name}` becomes a {layer.name}"
        name = text.helper(layer.module, layer.name)
        text.put(base, name, why)
        if layer.keywords and constructor is not None and made is not None:
            keywords = text.imports.keywords(layer, text.causes)
            text.replace(made, lambda call: with_keywords(call, keywords), why)


@dataclass(frozen=True)
class MixIn(Change):
    """In a class: a mix-in before its bases."""

    module: str  # the helper module that defines it
    name: str  # the class
    why: str  # its purpose, as a sentence

    is_parallel = False

    def write_at(self, text: ClassText, place: BeforeBases) -> None:
        """Inserts it before the other bases."""
        node = text.file.classes[place.class_name]
        name = text.helper(self.module, self.name)

        def make(made: cst.ClassDef) -> cst.ClassDef:
            end = len(made.bases) - len(node.bases)  # after mix-ins that were inserted earlier
            added = [*made.bases[:end], cst.Arg(parsed(name)), *made.bases[end:]]
            return made.with_changes(bases=added)

        text.replace(node, make, self.why)
