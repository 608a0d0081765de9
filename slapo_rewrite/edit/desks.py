"""The files that are rewritten, with what is collected for each: the model's, the schedule's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from slapo_rewrite import errors
from slapo_rewrite.edit.imports import Imports
from slapo_rewrite.edit.lineages import Lineages
from slapo_rewrite.edit.places import Places
from slapo_rewrite.model.follow import Place
from slapo_rewrite.model.join import Sources, find_site
from slapo_rewrite.model.tree import Node, Tree
from slapo_rewrite.source.index import SourceFile


@dataclass
class Desk:
    """What is collected for one file.

    Attributes:
        file: The file.
        places: What changes in its classes.
        lineages: Its classes.
        imports: Names that it needs of the helper modules.
    """

    file: SourceFile
    places: Places
    lineages: Lineages
    imports: Imports


class Desks:
    """One desk for each file that defines classes of the model and may be rewritten.

    Args:
        tree: The module tree.
        sources: The source files.

    Attributes:
        main: The model file's.
    """

    def __init__(self, tree: Tree, sources: Sources) -> None:
        self.sources = sources
        classes = list({node.cls: None for node in tree.nodes.values()})
        files = {sources.main.name: sources.main}
        for cls in classes:
            for base in cls.__mro__:
                file = sources.file_of(base) if base.__module__ in sources.editable else None
                if file is not None:
                    files[file.name] = file
        self._desks = {name: self._desk(file, classes) for name, file in files.items()}
        self.main = self._desks[sources.main.name]
        self._by_path = {
            name: desk
            for desk in self
            for name in (
                str(desk.file.path),
                os.path.realpath(desk.file.path),
                os.path.abspath(desk.file.path),
            )
        }

    def _desk(self, file: SourceFile, classes: list[type]) -> Desk:
        names = {
            cls.__name__: tuple(
                c.__name__
                for c in cls.__mro__
                if c.__name__ in file.classes and self.sources.file_of(c) is file
            )
            for cls in classes
            # Classes of two files may have one name.
            if self.sources.file_of(cls) is file or cls.__name__ not in file.classes
        }
        places = Places(self.sources, file)
        return Desk(file, places, Lineages(file, places.sites, names), Imports(file))

    def __iter__(self) -> Iterator[Desk]:
        return iter(self._desks.values())

    def of(self, cls: type) -> Desk | None:
        """The desk of the file that defines a class; None where that is not rewritten."""
        file = self.sources.file_of(cls)
        return self._desks.get(file.name) if file is not None else None

    def making(self, node: Node) -> Desk:
        """The desk of the file that makes a module; the model file's where that is not known."""
        try:
            site = find_site(self.sources, node) if node.owner is not None else None
        except errors.UnfollowableConstruction:
            site = None
        return self._desks.get(site.file.name, self.main) if site else self.main

    def holds(self, filename: str) -> bool:
        """Whether a file is one that is rewritten."""
        return filename in self._by_path

    def at(self, place: Place) -> Desk:
        """The desk of the file that a place stands in."""
        return self._by_path.get(place.filename, self.main)

    def siblings(self, known: Mapping[str, tuple[str, ...]]) -> None:
        """Says which elements modules stand for."""
        for desk in self:
            desk.places.siblings = dict(known)
