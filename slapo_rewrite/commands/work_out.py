"""`--schedule auto`: derives a schedule, and goes on as if its file had been given."""

from __future__ import annotations

import argparse

from slapo_rewrite.commands.answers import say, working


def is_auto(schedule: str) -> bool:
    """Whether a schedule is to be derived from the model."""
    return schedule == "auto" or schedule.startswith("auto:")


def work_out(options: argparse.Namespace) -> None:
    """Derives the schedule, writes it, and sets `options.schedule` to its file."""
    from slapo_rewrite.auto.schedule_file import worked_out

    file = options.write_schedule
    if file is None and options.output is not None:
        name = options.output.absolute().name.removesuffix(".py")
        file = options.output.parent / f"{name}_schedule.py"
    wanted = options.schedule.partition(":")[2]
    with working(f"deriving a schedule for {options.source}"):
        made, words = worked_out(options.source, wanted, file)
    say(words)
    options.schedule = str(made)
