"""What each stage is given, computes and hands on, and its statements."""

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

    pieces: list[int]  # numbers of its statements, those that it works out again first
    again: list[int]  # the numbers of these
    given: list[Version] = field(default_factory=list)  # what it takes from the stage before
    # Arguments of the step that it takes by name, where every stage is given these.
    named: list[Version] = field(default_factory=list)
    # What its layers make themselves: the value that the loop began with, by the one that earlier
    # layers left.
    anew: dict[Version, Version] = field(default_factory=dict)
    # Values that it is given in parts, each with these.
    joined: dict[Version, tuple[Version, ...]] = field(default_factory=dict)
    # A value in the shape that another one has on all ranks together, where each holds a slice of
    # it: its name, that of what it is made like, and of ids in its first axes.
    whole: tuple[str, Version, Version] | None = None
    hands_on: list[Version] = field(default_factory=list)  # what it gives to the next one
    # For a statement and a name in it, the name that is read in its place.
    standing_in: dict[tuple[int, str], str] = field(default_factory=dict)
    # The statements and names for which another value stands in, of the same name too, each with
    # that value's shape and type.
    borrowed: dict[tuple[int, str], Like | None] = field(default_factory=dict)


@dataclass
class Brought:
    """How a stage comes by values of earlier ones."""

    given: dict[Version, None] = field(default_factory=dict)  # what it is given
    # Numbers of the statements that it works out again.
    again: set[int] = field(default_factory=set)
    anew: dict[Version, Version] = field(default_factory=dict)  # as in `Stage`
    joined: dict[Version, tuple[Version, ...]] = field(default_factory=dict)  # as in `Stage`


@dataclass
class Stages:
    """All stages of a program."""

    program: Program
    stages: list[Stage]  # those that run one after the other
    tail: Stage  # the statements that make the loss of what the last stage gives
    labels: list[str]  # the arguments that the loss needs
    seen: Mapping[Version, ValueKind]  # what each value was in a run
    # Whether every stage is given the step's arguments by name. Only what takes part in the
    # backward pass goes from stage to stage then.
    by_name: bool = False
    # Values that are called otherwise than in the program.
    spelling: dict[Version, str] = field(default_factory=dict)
    # The statements of stages that were asked for.
    found: dict[Any, list[str]] = field(default_factory=dict)

    def spelled(self, version: Version) -> str:
        """What a value is called."""
        return self.spelling.get(version, version[0])

    def arguments(self) -> dict[str, str]:
        """What the stages take by name: the step's arguments, by what they are called there."""
        taken = {version for stage in self.stages for version in stage.named}
        order = [(name, ARGUMENT) for name in self.program.parameters]
        return {self.spelled(v): v[0] for v in order if v in taken}

    def returned(self, stage: Stage) -> str:
        """What a stage returns."""
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
        """The numbers that the last stage hands on in a row each: torch joins outputs by rows."""
        if not self.by_name or stage is not self.stages[-1]:
            return []
        likes = {version: self.seen[version].like for version in stage.hands_on}
        return [version for version, like in likes.items() if like is not None and not like[0]]

    def taken_apart(self, stage: Stage) -> list[Version]:
        """The values of which a stage hands on the parts, or that have none."""
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
        """The statements of a stage, without those whose results nothing reads."""
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
    """Statements without the assignments that nothing reads."""
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
    """Whether a statement does nothing but bind names."""
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
