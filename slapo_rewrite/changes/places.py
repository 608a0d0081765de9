"""Where in a class a change stands: no two changes of a definition share a place."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from slapo_rewrite.changes.class_hierarchy import ClassHierarchy
from slapo_rewrite.code.text import Position


@dataclass(frozen=True)
class Place:
    """A place in a class; what it is decides which classes share it."""

    def methods(self, classes: ClassHierarchy, class_name: str) -> list[ast.FunctionDef] | None:
        """The methods in which it stands; None where it is no method's."""
        return None

    def home(self, classes: ClassHierarchy, class_name: str) -> str:
        """The class in whose text it stands, if it is no method's."""
        return class_name

    @property
    def made_at(self) -> Place | None:
        """The construction that it stands at, which not all instances go through."""
        return None


@dataclass(frozen=True)
class AtConstruction(Place):
    """Where something is made."""

    start: int  # the first character of the expression

    def home(self, classes: ClassHierarchy, class_name: str) -> str:
        """The class whose method makes it."""
        return classes.sites[self.start].class_name


@dataclass(frozen=True)
class AtSite(AtConstruction):
    """Where a module is made."""

    index: str = ""  # of the element that it makes there, in a loop; else ''

    @property
    def made_at(self) -> Place | None:
        """The site itself."""
        return AtSite(self.start, self.index)


@dataclass(frozen=True)
class BehindSite(AtSite):
    """Behind the construction of a module."""

    what: tuple[str, ...] = ()  # what stands there


@dataclass(frozen=True)
class AtParameter(AtConstruction):
    """Where a parameter is made, or behind it."""

    what: tuple[str, ...] = ()  # what stands there

    @property
    def made_at(self) -> Place | None:
        """The construction alone."""
        return AtParameter(self.start)


@dataclass(frozen=True)
class AtBase(Place):
    """The base of a class that extends a torch layer."""

    def home(self, classes: ClassHierarchy, class_name: str) -> str:
        """The class that names the base."""
        return classes.lineage(class_name)[-1]


@dataclass(frozen=True)
class BeforeBases(Place):
    """Before the bases of a class."""

    class_name: str
    what: str  # what stands there

    def home(self, classes: ClassHierarchy, class_name: str) -> str:
        """That class."""
        return self.class_name


@dataclass(frozen=True)
class EndOfConstructor(Place):
    """At the end of the constructor."""

    attribute: str  # what is set there

    def home(self, classes: ClassHierarchy, class_name: str) -> str:
        """The class that has the constructor."""
        found = (c for c in classes.lineage(class_name) if classes.file.method(c, "__init__"))
        return next(found, class_name)


@dataclass(frozen=True)
class AroundForward(Place):
    """Around `forward`, to be had in a subclass as well."""

    order: int  # which of them is inside of which


@dataclass(frozen=True)
class AtForward(Place):
    """The beginning or the end of `forward`."""

    side: str  # `argument` or `result`
    of: str = ""  # the argument, where it is not the first

    def methods(self, classes: ClassHierarchy, class_name: str) -> list[ast.FunctionDef] | None:
        """The `forward` that runs."""
        return [m for m in classes.methods(class_name) if m.name == "forward"][:1]


@dataclass(frozen=True)
class AtCalls(Place):
    """Where methods call a submodule."""

    path: str  # the submodule's, below the class
    side: str  # `argument`, `result` or `bias`

    def methods(self, classes: ClassHierarchy, class_name: str) -> list[ast.FunctionDef] | None:
        """Those that call it."""
        found = classes.methods(class_name)
        return [m for m in found if classes.calls_of(m, self.path)]


@dataclass(frozen=True)
class AtReads(Place):
    """Where methods read an attribute of some name."""

    name: str  # the attribute's
    # Where the one place ends that is meant, by line and column; () for all.
    end: tuple[int, ...] = ()

    def methods(self, classes: ClassHierarchy, class_name: str) -> list[ast.FunctionDef] | None:
        """Those that read it."""
        return [
            method
            for method in classes.methods(class_name)
            if any(isinstance(n, ast.Attribute) and n.attr == self.name for n in ast.walk(method))
        ]


@dataclass(frozen=True)
class AtNode(Place):
    """A call, a subscript or a part of a method's text."""

    kind: str  # what is done there
    at: Position  # where it begins and ends
    what: object = ()  # what tells it from others there

    def methods(self, classes: ClassHierarchy, class_name: str) -> list[ast.FunctionDef] | None:
        """The method around it."""
        found = classes.methods(class_name)
        return [m for m in found if m.lineno <= self.at[0] <= (m.end_lineno or self.at[0])]
