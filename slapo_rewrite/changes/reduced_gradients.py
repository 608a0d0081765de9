"""Places all-reduces of the gradients of whole parameters that are used with a rank's parts.

If a module's own methods read the parameter, its class all-reduces the gradient, or a runtime layer
replaces the class. If another module reads it (`self.norm.weight`), that expression is changed.
"""

from __future__ import annotations

from collections.abc import Mapping

from slapo_rewrite import errors
from slapo_rewrite.changes.bases import DeriveFrom
from slapo_rewrite.changes.change_set import own_copy
from slapo_rewrite.changes.construction import UseParallelLayer
from slapo_rewrite.changes.output_files import OutputFile
from slapo_rewrite.changes.parameters import ReduceParameterGradient
from slapo_rewrite.changes.placement import Placement
from slapo_rewrite.changes.places import AtBase, AtReads
from slapo_rewrite.changes.reads import is_question, values_read
from slapo_rewrite.code.syntax import end_position
from slapo_rewrite.directive import Causes, Directive, merged_causes
from slapo_rewrite.groups import grouped
from slapo_rewrite.model.layers import SUMMING, summing_base
from slapo_rewrite.model.tree import Node
from slapo_rewrite.sharding.types import Reading


class ReducedGradients:
    """Places gradient sums for whole parameters used with parts, and for those like them."""

    def __init__(self, to: Placement) -> None:
        self.tree, self.states, self.files = to.tree, to.states, to.files
        self.followed = to.followed
        ordered = sorted(self.followed.readings, key=str)
        self.readings = grouped(((each.path, each.name), each) for each in ordered)

    def place(self, owners: Mapping[str, list[Directive]], holders: Mapping[str, Node]) -> None:
        """Places the sums in classes of modules, and where other modules read parameters."""
        for (path, name), source in sorted(self.followed.shared.items()):
            causes = self._causes_of(source) or merged_causes(*owners.values())
            for reading in self.readings.get((path, name), ()):
                if not reading.inside:
                    self._where_read(reading, causes)
            if not self._belongs_to_class(path, name):
                continue
            alike, holder = {path: self.tree.nodes[path]}, holders.get(path)
            for owner in owners if holder else ():
                node = self.tree.nodes.get(owner + path[len(holder.path) :]) if holder else None
                if node is not None and holder and self.tree.nodes[owner].cls is holder.cls:
                    alike[node.path] = node
            for node in alike.values():
                self._in_class(node, name, causes)

    def _causes_of(self, path: str | None) -> Causes:
        state = self.states.get(path) if path is not None else None
        return merged_causes(state.causes()) if state else ()

    def _belongs_to_class(self, path: str, name: str) -> bool:
        """Whether a module's own class sums the gradient: it reads the parameter, or nothing else.

        If it does not read it, the class may still sum, to share the definition with instances that
        do. A decomposed layer is not called: its call site reads its parameters.
        """
        if (state := self.states.get(path)) is not None and state.decompose:
            return False
        found = self.readings.get((path, name), [])
        if any(reading.inside for reading in found):
            return True
        node = self.tree.nodes[path]
        if not found:
            live = node.live._parameters[name]
            return not any(self.tree.nodes[p].live._parameters[n] is live for p, n in self.readings)
        return node.cls not in SUMMING and any(
            reading.inside and self.tree.nodes[reading.path].cls is node.cls
            for key in self.followed.shared
            for reading in self.readings.get(key, ())
        )

    def _where_read(self, reading: Reading, causes: Causes) -> None:
        """Sums the gradient of a parameter where a method of another module reads it."""
        what, place = f"`{reading.path}.{reading.name}`", reading.place
        also = [c.at for c in causes[:1] if c.at]
        if place is None or not self.files.holds(place.filename):
            raise errors.Unsupported(
                f"{what} is used on parts, so its gradients have to be added up, but this file, "
                "where it is read, is not rewritten",
                at=also[0] if also else None,
                hint="call the module that it belongs to, or gather the values that it is used on",
            )
        home, end = self.files.at(place), place.at[2:]
        at = self.files.span(place)
        reader = self.tree.nodes.get(reading.reader) if reading.reader is not None else None
        names = self.files.lineage(reader.cls, home) if reader else ()
        methods = [m for cls in names[:1] for m in home.classes.methods(cls)]
        if any(is_question(method, end) for method in methods):
            return
        values = (node for m in methods for node in values_read(m, reading.name))
        if reader is None or all(end_position(n) != end for n in values):
            raise errors.Unsupported(
                f"{what} is used on parts, so its gradients have to be added up where it is read, "
                "but this is not a statement of a module's method",
                at=at,
                also=also,
                hint=f"read `.{reading.name}` in a plain statement of a method, by this name",
            )
        here = {
            key
            for key, known in self.readings.items()
            if any((r.reader, r.place) == (reading.reader, place) for r in known)
        }
        if others := sorted(here - self.followed.shared.keys()):
            raise errors.Unsupported(
                f"{what} is used on parts, so its gradients have to be added up, but those of "
                f"`{'.'.join(others[0])}`, also read here, must not be",
                at=at,
                also=also,
                hint="read them in two places, or use both on parts",
            )
        change = ReduceParameterGradient(reading.name)
        home.changes.add(reader.path, AtReads(reading.name, end), change, causes)

    def _in_class(self, node: Node, name: str, causes: Causes) -> None:
        """Sums the gradient of a parameter in its module's class, or by a runtime layer."""
        base = summing_base(node.cls)
        home = self.files.of(node.cls)
        if base is node.cls:
            if node.path in self.states and self.states[node.path].replacement:
                raise errors.Unsupported(
                    f"{node.shown} runs on a part, but is replaced: its gradients cannot be added "
                    "up",
                    at=causes[0].at if causes else None,
                    hint="add them up in the new class, or gather its input",
                )
            self.files.making(node).changes.at_site(node, UseParallelLayer(SUMMING[base]), causes)
        elif base and home and _leaves_the_work(node.cls, home):
            what = DeriveFrom(SUMMING[base], base.__name__)
            home.changes.add(node.path, AtBase(), what, causes)
        elif home and (state := self.states.get(node.path)) and state.inlined:
            raise errors.Unsupported(
                f"`{node.path}.{name}` is used on parts, but {node.shown} is inlined: its "
                "gradients cannot be added up",
                at=state.inlined.cause.at,
            )
        elif home:
            home.changes.add(node.path, AtReads(name), ReduceParameterGradient(name), causes)
        else:
            raise errors.Unsupported(
                f"`{node.path}.{name}` is whole on every rank, but is used on parts: its "
                f"gradients have to be added up, but `{node.cls.__qualname__}` is no class of a "
                "file that is rewritten",
                at=causes[0].at if causes else None,
                hint=own_copy(node.cls.__name__, self.files.main.file),
            )


def _leaves_the_work(cls: type, home: OutputFile) -> bool:
    """Whether a class leaves the computation to a base class of another file."""
    names = home.classes.lineage(cls.__name__)
    return all(home.classes.extends_forward(c) for c in cls.__mro__ if c.__name__ in names)
