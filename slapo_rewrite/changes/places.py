"""The places in a class that changes apply to: a definition has one change for each place."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from slapo_rewrite.changes.class_hierarchy import ClassHierarchy
from slapo_rewrite.code.text import Position


@dataclass(frozen=True)
class Place:
    """A place in a class. Its kind decides which related classes share it."""

    def methods(self, classes: ClassHierarchy, class_name: str) -> list[ast.FunctionDef] | None:
        """The methods that contain it; None for a place outside of methods."""
        return None

    def home(self, classes: ClassHierarchy, class_name: str) -> str:
        """The class whose text contains it, for a place outside of methods."""
        return class_name

    @property
    def made_at(self) -> Place | None:
        """The construction site it belongs to, which some instances may not execute."""
        return None


@dataclass(frozen=True)
class AtConstruction(Place):
    """A construction site."""

    start: int  # the first character of the expression

    def home(self, classes: ClassHierarchy, class_name: str) -> str:
        """The class whose method has the site."""
        return classes.sites[self.start].class_name


@dataclass(frozen=True)
class AtSite(AtConstruction):
    """The construction site of a module."""

    index: str = ""  # the index of the element, for a site in a loop; else ''

    @property
    def made_at(self) -> Place | None:
        """The site itself."""
        return AtSite(self.start, self.index)


@dataclass(frozen=True)
class BehindSite(AtSite):
    """After the construction of a module."""

    what: tuple[str, ...] = ()  # tells several changes there apart


@dataclass(frozen=True)
class AtParameter(AtConstruction):
    """The construction of a parameter, or the place after it."""

    what: tuple[str, ...] = ()  # tells several changes there apart

    @property
    def made_at(self) -> Place | None:
        """The construction alone."""
        return AtParameter(self.start)


@dataclass(frozen=True)
class AtBase(Place):
    """The torch layer among the bases of a class that extends one."""

    def home(self, classes: ClassHierarchy, class_name: str) -> str:
        """The class that names the base."""
        return classes.lineage(class_name)[-1]


@dataclass(frozen=True)
class BeforeBases(Place):
    """Before the bases of a class."""

    class_name: str
    what: str  # tells several changes there apart

    def home(self, classes: ClassHierarchy, class_name: str) -> str:
        """That class."""
        return self.class_name


@dataclass(frozen=True)
class EndOfConstructor(Place):
    """At the end of the constructor."""

    attribute: str  # the attribute that is set there

    def home(self, classes: ClassHierarchy, class_name: str) -> str:
        """The class that has the constructor."""
        found = (c for c in classes.lineage(class_name) if classes.file.method(c, "__init__"))
        return next(found, class_name)


@dataclass(frozen=True)
class AroundForward(Place):
    """Around `forward` as a whole, which a subclass can do as well."""

    order: int  # the nesting: 0 is innermost


@dataclass(frozen=True)
class AtForward(Place):
    """The beginning or the end of `forward`."""

    side: str  # `argument` or `result`
    of: str = ""  # the argument, where it is not the first

    def methods(self, classes: ClassHierarchy, class_name: str) -> list[ast.FunctionDef] | None:
        """The `forward` that instances run."""
        return [m for m in classes.methods(class_name) if m.name == "forward"][:1]


@dataclass(frozen=True)
class AtCalls(Place):
    """Where methods call a submodule."""

    path: str  # the submodule's path below the class
    side: str  # `argument`, `result` or `bias`

    def methods(self, classes: ClassHierarchy, class_name: str) -> list[ast.FunctionDef] | None:
        """The methods that call it."""
        found = classes.methods(class_name)
        return [m for m in found if classes.calls_of(m, self.path)]


@dataclass(frozen=True)
class AtReads(Place):
    """Where methods read an attribute of a given name."""

    name: str  # the attribute
    # The end of the one expression that is meant, by line and column; () for all.
    end: tuple[int, ...] = ()

    def methods(self, classes: ClassHierarchy, class_name: str) -> list[ast.FunctionDef] | None:
        """The methods that read it."""
        return [
            method
            for method in classes.methods(class_name)
            if any(isinstance(n, ast.Attribute) and n.attr == self.name for n in ast.walk(method))
        ]


@dataclass(frozen=True)
class AtNode(Place):
    """A call, a subscript or another part of a method's text."""

    kind: str  # the kind of change
    at: Position  # where it begins and ends
    what: object = ()  # tells several changes there apart

    def methods(self, classes: ClassHierarchy, class_name: str) -> list[ast.FunctionDef] | None:
        """The method that contains it."""
        found = classes.methods(class_name)
        return [m for m in found if m.lineno <= self.at[0] <= (m.end_lineno or self.at[0])]
