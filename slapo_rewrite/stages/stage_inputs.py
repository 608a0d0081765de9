"""Plans what each stage receives, recomputes, and sends."""

from __future__ import annotations

import ast
import contextlib
import copy
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.code.dataflow import names_in
from slapo_rewrite.directive import Directive
from slapo_rewrite.errors import Span
from slapo_rewrite.stages.program import (
    ARGUMENT,
    Piece,
    Program,
    Version,
)
from slapo_rewrite.stages.stage_layout import Brought, Stage, Stages
from slapo_rewrite.stages.trained_reads import trains
from slapo_rewrite.stages.value_kinds import ValueKind


class Planner:
    """Decides which values cross each cut.

    Args:
        seen: The kind of each value in a run.
        model: The model, for finding parameters.
        cuts: The schedule's lines, one for each cut.
        by_name: Whether every stage gets the step's arguments by name.
        sliced: The directive by which ranks hold slices of the values between layers, if any.
    """

    def __init__(
        self,
        program: Program,
        seen: Mapping[Version, ValueKind],
        model: Any,
        cuts: Sequence[Span | None],
        by_name: bool,
        sliced: Directive | None,
    ) -> None:
        self.program, self.seen, self.model, self.cuts = program, seen, model, cuts
        self.by_name, self.sliced = by_name, sliced
        # Numbers of statements that no other stage may recompute.
        self.once: set[int] = set()
        self.stuck: list[Version] = []  # values that could not get to a stage that needs them
        # The value that another one is a part of.
        self.wholes = {
            (part, number): (name, number)
            for (name, number), kind in seen.items()
            for part in kind.names(name)
        }

    def stages(self) -> Stages:
        """The stages; raises `CannotCut` if a value cannot cross, or a stage has no parameters."""
        program = self.program
        numbers = range(len(program.pieces))
        ends = (n for n in numbers if self.trains(piece := program.pieces[n]) or self.asks(piece))
        last = max(ends, default=-1)
        own: list[list[int]] = [[] for _ in range(program.stages + 1)]
        for number in numbers:
            own[program.pieces[number].stage if number <= last else -1].append(number)
        try:
            return self.planned(own)
        except errors.CannotCut:
            with contextlib.suppress(errors.CannotCut):
                return self.planned(self.later(own))
            raise

    def later(self, own: Sequence[Sequence[int]]) -> list[list[int]]:
        """Moves the ends of stages after following statements without parameters.

        Their results may cross the cut where their operands cannot. Statements for the loss stay,
        from the first one on that reads an argument.
        """
        found = [list(numbers) for numbers in own]
        for earlier, numbers in pairwise(found):
            while numbers and not self.trains(piece := self.program.pieces[numbers[0]]):
                if numbers is found[-1] and ARGUMENT in (number for _, number in piece.reads):
                    break
                earlier.append(numbers.pop(0))
        return found

    def planned(self, divided: Sequence[list[int]]) -> Stages:
        """The stages, from the numbers of the statements of each stage and of the loss."""
        program = self.program
        *own, of_loss = divided
        for number, statements in enumerate(own):
            if not any(self.trains(program.pieces[n]) for n in statements):
                last_one = number + 1 == len(own)
                raise errors.CannotCut(
                    "nothing with parameters comes after the last cut"
                    if last_one
                    else f"stage {number} would have no parameters",
                    at=self.cuts[min(number, len(self.cuts) - 1)],
                    hint="cut where modules with parameters stand before and after",
                )
        wanted, last = list(program.loss_reads), own[-1][-1]
        tail = self.stage(len(own), of_loss, last + 1, wanted, True)
        if self.by_name:  # the loss gets one label; the last stage passes the others on
            before = {v for piece in program.pieces[: last + 1] for v in piece.reads}
            named = sorted(tail.named, key=before.__contains__)
            labels, needed = named[:1], [*tail.given, *named[1:]]
        else:
            labels = [v for v in tail.given if v[1] == ARGUMENT]
            needed = [v for v in tail.given if v[1] != ARGUMENT]
        found: list[Stage] = []
        for number in reversed(range(len(own))):
            start = own[number][0]
            stage = self.stage(number, own[number], start, needed, False)
            stage.hands_on = needed
            found.insert(0, stage)
            needed = stage.given
        # An engine requires labels even if the loss needs no argument of the step.
        names = [name for name, _ in labels or [*found[0].given, *found[0].named][:1]]
        stages = Stages(program, found, tail, names, self.seen, self.by_name)
        while (clash := self.clash(stages)) is not None:
            if clash[1] == ARGUMENT and clash not in stages.spelling:
                stages.spelling[clash] = f"given_{clash[0]}"
                continue
            again = {n for stage in [*found, tail] for n in stage.again} - self.once
            of_name = {n for n in again if clash[0] in dict(program.pieces[n].reads)}
            if not of_name:
                raise self.cannot_be_told_apart(clash)
            self.once |= of_name  # send the results of statements that read it, instead
            return self.planned(divided)
        return stages

    def trains(self, piece: Piece) -> bool:
        """Whether a statement calls a module with parameters, or reads a parameter."""
        return trains(self.model, piece.text)

    def asks(self, piece: Piece) -> bool:
        """Whether a statement reads an argument that is an option, such as `return_loss=True`.

        Stages get options by name; the loss only gets tensors.
        """
        read = (self.seen[version] for version in piece.reads if version[1] == ARGUMENT)
        return self.by_name and any(
            kind.kind in ("other", "shape") or kind.text not in ("", "None") for kind in read
        )

    def stage(
        self, number: int, own: list[int], start: int, handed_on: Iterable[Version], is_tail: bool
    ) -> Stage:
        """Plans what a stage receives, and what it recomputes."""
        pieces = self.program.pieces
        wanted = [v for n in own for v in pieces[n].reads] + list(handed_on)
        brought = Brought()
        for version in wanted:
            if version[1] < start and (number or version[1] == ARGUMENT):
                self.bring(version, number, brought, is_tail)
        given = brought.given
        again = sorted(brought.again)
        stage = Stage([*again, *own], again, anew=brought.anew, joined=brought.joined)
        for piece in again:
            for version in pieces[piece].reads:
                if not self.stays_behind(version, number) or version in given:
                    continue
                try:
                    stand_in = self.substitute(piece, version, given, number)
                except errors.CannotCut:
                    if piece in self.once:
                        raise
                    self.once.add(piece)
                    with contextlib.suppress(errors.CannotCut):
                        return self.stage(number, own, start, handed_on, is_tail)
                    raise
                stage.borrowed[piece, version[0]] = self.seen[stand_in].like
                name = stand_in[0]
                if self.sliced is not None:
                    name = f"whole_{name}"
                    ids = self.ids(piece, version, given)
                    given[ids] = None
                    stage.whole = name, stand_in, ids
                stage.standing_in[piece, version[0]] = name
        ordered = self.ordered(given)
        stage.named = [v for v in ordered if self.by_name and v[1] == ARGUMENT]
        stage.given = [v for v in ordered if v not in stage.named]
        stage.standing_in = {k: new for k, new in stage.standing_in.items() if k[1] != new}
        return stage

    def bring(self, version: Version, stage: int, to: Brought, is_tail: bool) -> None:
        """Lets a stage obtain a value: by recomputation, or from the stage before.

        If neither works for a value that goes from layer to layer, the stage uses the initial value
        of the loop: layers that create a missing value do so again. The trial checks that.
        """
        number, seen = version[1], self.seen[version]
        is_argument = number == ARGUMENT
        is_at_hand = self.by_name or seen.kind == "int" or not stage or is_tail
        if seen.kind == "grad" or (is_argument and is_at_hand):
            to.given[version] = None
            return
        if number in to.again and version not in self.wholes:
            return
        refusal = None
        if self.may_be_done_again(version):
            before = copy.deepcopy(to)
            to.again.add(number)
            try:
                for needed in self.program.pieces[number].reads:
                    if not self.stays_behind(needed, stage, is_tail):
                        self.bring(needed, stage, to, is_tail)
                return
            except errors.CannotCut as error:
                refusal = error
                vars(to).update(vars(before))
        first = None if refusal else self.before_layers(version)
        if self.is_sendable(version) and not self.is_better_anew(version, first):
            self.send(version, to)
        elif first is not None and seen.kind != "record":
            to.anew[version] = first
            self.bring(first, stage, to, is_tail)
        else:
            raise refusal or self.cannot_get_there(version, stage)

    def may_be_done_again(self, version: Version) -> bool:
        """Whether several stages may execute the statement of a value."""
        number = version[1]
        if number == ARGUMENT or version in self.wholes or number in self.once:
            return False
        piece, seen = self.program.pieces[number], self.seen[version]
        if isinstance(piece.node, ast.AugAssign) and seen.like and self.is_sendable(version):
            return False  # it would change in place a value that is sent as well
        return not seen.is_drawn and not self.trains(piece)

    def is_sendable(self, version: Version) -> bool:
        """Whether a value can be sent: directly, as the shape of a tensor, or in parts."""
        name, number = version
        seen = self.seen[version]
        if seen.text and number != ARGUMENT and self.branches(number):
            return False  # it may differ with other data
        if number == ARGUMENT or seen.kind != "several":
            is_sent = seen.kind in ("grad", "float", "shape")
            return number != ARGUMENT and (is_sent or (seen.kind == "int" and not self.by_name))
        return all(self.is_sendable((part, number)) for part in seen.names(name))

    def is_better_anew(self, version: Version, first: Version | None) -> bool:
        """Whether layers should create a value again that the first of them creates from None.

        DeepSpeed would send zeros as its gradient.
        """
        is_made = first is not None and self.seen[first].text == "None"
        return is_made and not self.by_name and self.seen[version].kind == "float"

    def branches(self, number: int) -> bool:
        """Whether a statement branches on tensors."""
        nodes = ast.walk(self.program.pieces[number].node)
        tests = (n.test for n in nodes if isinstance(n, ast.If | ast.IfExp | ast.While))
        return not names_in(*tests).isdisjoint(n for (n, _), kind in self.seen.items() if kind.like)

    def send(self, version: Version, to: Brought) -> None:
        """Lets a stage receive a value from the stage before, in parts if need be."""
        name, number = version
        parts = tuple((part, number) for part in self.seen[version].names(name))
        for part in parts:
            self.send(part, to)
        if self.seen[version].kind == "several":
            to.joined[version] = parts
        else:
            to.given[version] = None

    def cannot_get_there(self, version: Version, stage: int) -> errors.CannotCut:
        """The error for a value that a stage needs and cannot obtain."""
        name, number = version
        self.stuck.append(version)
        what = {
            "float": "a float without gradient",
            "int": "a tensor without gradient",
            "complex": "complex, so its gradient would not come back",
        }.get(self.seen[version].kind, "no tensor")
        at = self.program.pieces[number].at if number != ARGUMENT else None
        also = [self.cuts[min(stage, len(self.cuts)) - 1]]
        places = [p for p in (at, *also) if p]
        return errors.CannotCut(
            f"`{name}` is needed after the cut and cannot get there: it is {what}, and it is "
            "computed from parameters or from values that cannot be sent",
            at=places[0] if places else None,
            also=places[1:],
            hint="cut where it is no longer needed, or compute it inside the layers",
        )

    def stays_behind(self, version: Version, stage: int, is_tail: bool = False) -> bool:
        """Whether recomputation in a stage can use at most the shape of a value."""
        is_float = self.seen[version].kind == "float" and version[1] == ARGUMENT and not is_tail
        return self.seen[version].kind == "grad" or (is_float and stage > 0 and not self.by_name)

    def before_layers(self, version: Version) -> Version | None:
        """The value of the same name before a loop over layers."""
        name, number = version
        while number != ARGUMENT and self.program.pieces[number].layers is not None:
            earlier = [v for v in self.program.pieces[number].reads if v[0] == name]
            if not earlier:
                return None
            name, number = earlier[0]
        return (name, number) if number != version[1] else None

    def substitute(
        self, piece: int, version: Version, given: Iterable[Version], stage: int
    ) -> Version:
        """An available value with the shape of another one, of which only the shape is needed.

        The trial checks that, unless a branch depends on the value. The last axis, that of
        features, may have another size; the trial checks this as well.
        """
        seen = self.seen[version]
        alike = [v for v in given if self.seen[v].kind == "grad" and self.seen[v].is_like(seen)]
        # Prefer one that is computed from it: other sizes may be equal by chance.
        alike.sort(key=lambda v: (self.seen[v].like != seen.like, version not in self.made_of(v)))
        plain = not is_tested(self.program.pieces[piece].node, version[0])
        if alike and plain:
            return alike[0]
        at = self.program.pieces[piece].at
        cut = self.cuts[min(stage, len(self.cuts)) - 1]
        raise errors.CannotCut(
            f"`{version[0]}` is needed after the cut for its shape, but no value of that shape "
            "gets there"
            if plain
            else (f"a branch after the cut depends on `{version[0]}`, which does not get there"),
            at=at,
            also=[cut],
            hint="cut elsewhere, or use the shape of another value in `forward`",
        )

    def ids(self, piece: int, version: Version, given: Iterable[Version]) -> Version:
        """An argument with the shape of a value's first axes, which is not sliced over ranks."""
        like = self.seen[version].like
        shape = like[0][:-1] if like is not None else None
        for each in [*given, *((name, ARGUMENT) for name in self.program.parameters)]:
            seen = self.seen[each]
            if each[1] == ARGUMENT and seen.kind == "int" and seen.like and seen.like[0] == shape:
                return each
        assert self.sliced is not None
        raise errors.CannotCut(
            f"`{version[0]}` is needed after the cut for its shape, but each rank may only have a "
            "slice of it there",
            at=self.program.pieces[piece].at,
            also=[self.sliced.at, *self.cuts[:1]],
            hint="cut this model without sequence parallelism, or use the shape of the token ids "
            "in `forward`",
        )

    def made_of(self, version: Version) -> set[Version]:
        """The values that a value is computed from, directly or indirectly."""
        found: set[Version] = set()
        waiting = [version]
        while waiting:
            _, number = waiting.pop()
            if number != ARGUMENT:
                reads = set(self.program.pieces[number].reads) - found
                found |= reads
                waiting += reads
        return found

    def ordered(self, given: Iterable[Version]) -> list[Version]:
        """The inputs of a stage: tensors with gradients first, then arguments of the step."""

        def key(version: Version) -> tuple[int, int]:
            name, number = version
            if self.seen[version].kind == "grad":
                return 0, number
            if number == ARGUMENT:
                return 1, self.program.parameters.index(name)
            return 2, number

        return sorted(given, key=key)

    def clash(self, stages: Stages) -> Version | None:
        """A value that needs another name, since its own has another value in some stage.

        An argument can be renamed; other values cannot.
        """
        for stage in [*stages.stages, stages.tail]:
            has: dict[str, Version] = {}
            for version in [*stage.given, *stage.named]:
                name = stages.spelled(version)
                if name in has:
                    return self.renamed(version, has[name])
                has[name] = version
            has.update({version[0]: version for version in stage.joined})
            for number in stage.pieces:
                piece = self.program.pieces[number]
                for read in piece.reads:
                    version = stage.anew.get(read, read)
                    name = stages.spelled(version)
                    if (number, version[0]) in stage.borrowed:
                        continue
                    if has.get(name) != version:
                        return self.renamed(version, has.get(name))
                has.update({name: (name, number) for name in piece.binds})
            for whole in stages.taken_apart(stage):
                if has.get(whole[0]) != whole:
                    return self.renamed(whole, has.get(whole[0]))
                has.update({part: (part, whole[1]) for part in self.seen[whole].names(whole[0])})
            for version in stage.hands_on:
                name = stages.spelled(version)
                if has.get(name) != version:
                    return self.renamed(version, has.get(name))
        return None

    @staticmethod
    def renamed(version: Version, other: Version | None) -> Version:
        """The argument among two values of one name, or the first."""
        return next((v for v in (version, other) if v is not None and v[1] == ARGUMENT), version)

    def cannot_be_told_apart(self, version: Version) -> errors.CannotCut:
        """The error for two values of one name in a stage."""
        number = version[1]
        return errors.CannotCut(
            f"two values called `{version[0]}` are needed at the same time",
            at=self.program.pieces[number].at if number != ARGUMENT else self.cuts[0],
            also=[c for c in self.cuts if c],
            hint="rename one of them in `forward`",
        )


def is_tested(node: ast.stmt, name: str) -> bool:
    """Whether the test of a branch reads a name."""
    tests = (n.test for n in ast.walk(node) if isinstance(n, ast.If | ast.While))
    return name in names_in(*tests)
