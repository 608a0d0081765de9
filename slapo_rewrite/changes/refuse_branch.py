"""Branches of constructors that the model did not take, and that bring in layers among split ones.

What follows from the split was worked out without these layers: at more than one rank the output
refuses a configuration that comes there.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from slapo_rewrite.changes.change import Change
from slapo_rewrite.changes.class_text import ClassText
from slapo_rewrite.changes.output_files import OutputFile
from slapo_rewrite.changes.placement import Placement
from slapo_rewrite.changes.places import AtNode
from slapo_rewrite.code.syntax import encloses, extent
from slapo_rewrite.code.text import Position
from slapo_rewrite.directive import Causes
from slapo_rewrite.model.constructor_branches import Branch, branches


@dataclass(frozen=True)
class RefuseBranch(Change):
    """Before the first statement of a branch: it is for a single rank only."""

    condition: str | None  # of an `a if b else c` in the statement: what would have it taken

    def write_at(self, text: ClassText, place: AtNode) -> None:
        """Writes the line."""
        statement = next(s for s in text.file.statements if extent(s) == place.at)
        line = f"{text.helper('tensor_parallel', 'single_rank_only')}()"
        tests = [o.test for _, o in text.file.around(statement) if isinstance(o, ast.If)]
        if self.condition is not None:
            line = f"if {self.condition}:\n    {line}"
            tests += [node.test for node in ast.walk(statement) if isinstance(node, ast.IfExp)]
        why = "how these layers are split was not worked out"
        text.insert_before(statement, line, why, tuple(tests))


def place_refusals(to: Placement, causes: Causes) -> None:
    """Refuses the branches that no module took which was followed, of what constructs modules.

    In the class of a module with parts of values inside, one that makes a layer of any other kind
    than those that take and give whole values; elsewhere one that makes what takes or gives parts.
    """
    inner, around = to.followed.inner, to.followed.around
    own = {path: node.cls for path, node in to.tree.nodes.items() if to.files.of(node.cls)}
    open_ones = tuple({cls for path, cls in own.items() if path in inner})
    # What takes and gives whole values, whatever is split inside of it.
    closed = {cls for path, cls in own.items() if path in around} - {*open_ones}
    taken: set[tuple[str, Position, bool]] = set()
    untaken: dict[tuple[str, Position, bool], list[tuple[OutputFile, str, Branch]]] = {}
    for path, node in to.tree.nodes.items() if around else ():
        home, is_among = to.files.constructing(node.cls), path in inner | around
        for function in home.classes.methods(node.cls.__name__) if home is not None else ():
            assert home is not None
            if home.classes.method(node.cls.__name__, function.name) is not function:
                continue  # called by `super()` alone: a subclass could not change it
            for branch in branches(home.file, function, node):
                key, made = (home.file.name, branch.at, is_among), branch.classes - closed
                if branch.is_taken:
                    taken.add(key)
                elif made if is_among else any(issubclass(cls, open_ones) for cls in made):
                    untaken.setdefault(key, []).append((home, path, branch))
    refused = untaken.keys() - taken
    for key in sorted(refused):
        file, at, is_among = key
        others = (outer for f, outer, kind in refused if (f, kind) == (file, is_among))
        if any(at != outer and encloses(outer, at) for outer in others):
            continue  # what is around it refuses already
        for home, path, branch in untaken[key]:
            place = AtNode("branch", extent(branch.first), branch.condition)
            home.changes.add(path, place, RefuseBranch(branch.condition), causes)
