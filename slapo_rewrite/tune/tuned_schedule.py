"""Reads what a schedule declares for tuning: choices of knobs, knobs of the run, constraints.

    def schedule(s, ckpt_ratio: Annotated[float, Choices(0.0, 0.5, 1.0)] = 0.5): ...

    def space(knobs, batch_size: Annotated[int, Choices(8, 16, 32)] = 8):
        return knobs.batch_size * knobs.ckpt_ratio <= 16

`space` is optional. It returns whether a point may be tried; its keyword parameters are knobs of
the training command, which the schedule does not have.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.schedule.choices import declared
from slapo_rewrite.schedule.load import ScheduleFile
from slapo_rewrite.tune.knob_space import Axis, KnobSpace, Point, shown_value

EXAMPLE = "`ckpt_ratio: Annotated[float, Choices(0.0, 0.5, 1.0)] = 0.5`"


@dataclass(frozen=True)
class Tuned:
    """A schedule and its space for tuning."""

    schedule: ScheduleFile
    space: KnobSpace  # the points
    of_schedule: tuple[str, ...]  # the names of tuned knobs of the schedule
    settings: Mapping[str, Any]  # the values of all knobs of the schedule without tuning

    def given(self, point: Point, fixed: Sequence[str]) -> list[str]:
        """The settings of `--set` for a point, with the fixed ones."""
        return [*fixed, *(f"{name}={shown_value(point[name])}" for name in self.of_schedule)]


def read(name: str, fixed: Sequence[str]) -> Tuned:
    """Loads a schedule file, and creates the space that it declares.

    `fixed` has `K=V` for each knob that is not tuned.
    """
    schedule = ScheduleFile.load(name)
    settings = schedule.settings(fixed)
    known = {item.partition("=")[0] for item in fixed}
    own = schedule.guarded(lambda: declared(schedule.module.schedule), "reading the knobs' choices")
    space: Callable[..., Any] | None = getattr(schedule.module, "space", None)
    at = schedule.definition("space")
    runs = schedule.guarded(lambda: declared(space), "reading `space`") if space else {}
    for twice in runs.keys() & settings.keys():
        raise errors.BadSpace(
            f"knob `{twice}` is both the schedule's and the run's",
            at=at,
            hint=f"in `space`, read `knobs.{twice}` instead of declaring it",
        )
    if unknown := known & runs.keys():
        raise errors.BadSpace(f"`--set {min(unknown)}` is a knob of the run, not of the schedule")
    free = {n: choices for n, choices in own.items() if n not in known}
    for n, choices in free.items():  # checks values before the search
        schedule.settings([f"{n}={shown_value(value)}" for value in choices.values])
    axes = [Axis(n, c.values, c.memory) for n, c in {**free, **runs}.items()]
    if not axes:
        raise errors.BadSpace(
            f"no knob of `{schedule.path}` has choices" + (" left" if own else ""),
            at=schedule.definition("schedule"),
            hint=f"write {EXAMPLE}, with `from slapo_rewrite import Choices`",
        )

    def allowed(point: Point) -> bool:
        assert space is not None
        knobs = types.SimpleNamespace(**{**settings, **point})
        answer = schedule.guarded(lambda: space(knobs, **{n: point[n] for n in runs}), "`space`")
        if not isinstance(answer, bool):
            raise errors.BadSpace(
                f"`space` returns {answer!r}, not True or False",
                at=at,
                hint="return True or False",
            )
        return answer

    try:
        made = KnobSpace(axes, allowed) if space else KnobSpace(axes)
    except errors.BadSpace as error:
        error.at = error.at or at or schedule.definition("schedule")
        raise
    return Tuned(schedule, made, tuple(free), settings)
