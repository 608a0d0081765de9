"""The inputs, statements and outputs of each stage."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slapo_rewrite.code.effects import is_in_place
from slapo_rewrite.code.liveness import parts_of
from slapo_rewrite.stages.program import ARGUMENT, Depth, Program, Version, made_of
from slapo_rewrite.stages.value_kinds import Like, ValueKind
from slapo_rewrite.stages.written_text import respelled


@dataclass
class Stage:
    """One stage."""

    pieces: list[int]  # the numbers of its statements, recomputed ones first
    again: list[int]  # the numbers of recomputed statements
    given: list[Version] = field(default_factory=list)  # its inputs from the stage before
    # Arguments of the step that it takes by name, if every stage gets these.
    named: list[Version] = field(default_factory=list)
    # For a value that its layers create themselves: the initial value of the loop to use instead of
    # the one that earlier layers left.
    anew: dict[Version, Version] = field(default_factory=dict)
    # Values that are sent in parts, each with its parts.
    joined: dict[Version, tuple[Version, ...]] = field(default_factory=dict)
    # A value with the full shape of another one of which ranks hold slices: its name, the sliced
    # value, and the token ids that have its first axes.
    whole: tuple[str, Version, Version] | None = None
    hands_on: list[Version] = field(default_factory=list)  # its outputs for the next stage
    # For a statement and a name in it, the name to read instead.
    standing_in: dict[tuple[int, str], str] = field(default_factory=dict)
    # The statements and names for which another value stands in (even one of the same name), with
    # that value's shape and dtype.
    borrowed: dict[tuple[int, str], Like | None] = field(default_factory=dict)


@dataclass
class Brought:
    """How a stage obtains values of earlier stages."""

    given: dict[Version, None] = field(default_factory=dict)  # the values it receives
    # Numbers of the statements that it recomputes.
    again: set[int] = field(default_factory=set)
    anew: dict[Version, Version] = field(default_factory=dict)  # as in `Stage`
    joined: dict[Version, tuple[Version, ...]] = field(default_factory=dict)  # as in `Stage`


@dataclass
class Stages:
    """All stages of a program."""

    program: Program
    stages: list[Stage]  # the stages in order
    tail: Stage  # the statements that compute the loss from the last stage's outputs
    labels: list[str]  # the arguments that the loss needs
    seen: Mapping[Version, ValueKind]  # the kind of each value in a run
    # Whether every stage gets the step's arguments by name. Then only tensors with gradients go
    # from stage to stage.
    by_name: bool = False
    # New names of values that are not called as in the program.
    spelling: dict[Version, str] = field(default_factory=dict)
    # Cache: the statements of stages.
    found: dict[Any, list[str]] = field(default_factory=dict)

    def spelled(self, version: Version) -> str:
        """The name of a value."""
        return self.spelling.get(version, version[0])

    def arguments(self) -> dict[str, str]:
        """The step's arguments that stages take by name, by their names there."""
        taken = {version for stage in self.stages for version in stage.named}
        order = [(name, ARGUMENT) for name in self.program.parameters]
        return {self.spelled(v): v[0] for v in order if v in taken}

    def returned(self, stage: Stage) -> str:
        """The expression that a stage returns."""
        gradients = [v for v in stage.hands_on if self.seen[v].kind == "grad"]
        beside = self.spelled(gradients[0]) if gradients else ""
        texts = []
        for version in stage.hands_on:
            seen, name = self.seen[version], self.spelled(version)
            is_made = version not in stage.given and stage is not self.stages[-1]
            is_copied = seen.is_scattered and is_made
            text = f"{name}.contiguous()" if is_copied else seen.sent(name, beside)
            texts.append(f"{name}[None]" if version in self.single_numbers(stage) else text)
        return ", ".join(texts)

    def single_numbers(self, stage: Stage) -> list[Version]:
        """Scalars that the last stage returns with an added axis: torch joins outputs by rows."""
        if not self.by_name or stage is not self.stages[-1]:
            return []
        likes = {version: self.seen[version].like for version in stage.hands_on}
        return [version for version, like in likes.items() if like is not None and not like[0]]

    def taken_apart(self, stage: Stage) -> list[Version]:
        """The values whose parts a stage sends, or that are constant."""
        wanted = {v for v in stage.hands_on if v not in stage.given}
        made = set(stage.pieces) - {*stage.again}
        joined = {v for other in self.stages for v in other.joined if v[1] in made}
        wanted |= {version for version in joined if self.seen[version].text}
        found: list[Version] = []
        for version, seen in reversed(list(self.seen.items())):
            parts = {(name, version[1]) for name in seen.names(version[0])}
            if parts & wanted or version in wanted & joined:
                wanted.add(version)
                found.insert(0, version)
        return found

    def lines(self, stage: Stage, depth: Depth | None = None, returned: str = "") -> list[str]:
        """The statements of a stage, without unread assignments."""
        key = id(stage), depth, returned
        if key not in self.found:
            self.found[key] = self._lines(stage, depth, returned)
        return [*self.found[key]]

    def _lines(self, stage: Stage, depth: Depth | None, returned: str) -> list[str]:
        came = {
            version: self.seen[version]
            for version in [*stage.given, *stage.joined]
            if self.seen[version].kind in ("shape", "several") and version[1] != ARGUMENT
        }
        texts = [kind.received(version[0]) for version, kind in came.items()]
        if any(kind.kind == "shape" for kind in came.values()):
            texts[0] = f"# Only tensors are sent, so numbers come as the shape of one.\n{texts[0]}"
        if stage.whole is not None:
            name, like, ids = stage.whole[0], *map(self.spelled, stage.whole[1:])
            texts.append(
                "# Ranks may hold slices of the sequence; this has the shape of all of it.\n"
                f"{name} = {like}.new_empty(*{ids}.shape, {like}.shape[-1])"
            )
        for number in stage.pieces:
            piece = self.program.pieces[number]
            text = piece.source(depth)
            names = {n: new for (p, n), new in stage.standing_in.items() if p == number}
            for version in piece.reads:
                new = self.spelled(version)
                if new == version[0] or (number, version[0]) in stage.borrowed:
                    continue
                if hasattr(piece.node, "body") and version[0] in piece.binds:
                    texts.append(f"{version[0]} = {new}")
                else:
                    names[version[0]] = new
            texts.append(respelled(text, names) if names else text)
        texts += [self.seen[whole].taken_apart(whole[0]) for whole in self.taken_apart(stage)]
        return without_idle(texts, returned)


def without_idle(texts: Sequence[str], returned: str) -> list[str]:
    """Removes assignments that nothing reads."""
    kept = list(texts)
    while True:
        function = made_of(kept, returned, ["inputs"])
        statements = [[statement] for statement in function.body[:-1]]
        idle = [
            number
            for number, part in enumerate(parts_of(function, statements))
            if is_plain(function.body[number]) and not part.outputs
        ]
        if not idle:
            return kept
        kept = [text for number, text in enumerate(kept) if number not in idle]


def is_plain(statement: ast.stmt) -> bool:
    """Whether a statement only binds names."""
    if isinstance(statement, ast.If):
        return all(map(is_plain, [*statement.body, *statement.orelse]))
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        return False
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    names = [e for t in targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
    calls = [n.func for n in ast.walk(statement) if isinstance(n, ast.Call)]
    return all(isinstance(n, ast.Name) for n in names) and not any(
        isinstance(f, ast.Attribute) and is_in_place(f.attr) for f in calls
    )
