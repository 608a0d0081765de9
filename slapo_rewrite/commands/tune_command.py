"""`slapo-rewrite tune`."""

from __future__ import annotations

import argparse

from slapo_rewrite import errors
from slapo_rewrite.commands.answers import DONE, NO, check_installed, say, tell, working
from slapo_rewrite.commands.work_out import is_auto


def tune_command(options: argparse.Namespace) -> int:
    """Searches the knobs of a schedule by running a command, or replays measurements."""
    _check_tuning(options)
    drawn = ["matplotlib"] if options.replay is None else []
    check_installed("tune", "tune", "sklearn", *drawn)
    return _replay(options) if options.replay is not None else _search(options)


def _check_tuning(options: argparse.Namespace) -> None:
    """Refuses options that exclude each other, or are out of range."""
    if not 0 < options.confidence < 1:
        raise errors.UsageError("--confidence must be between 0 and 1")
    if options.timeout is not None and not options.timeout > 0:
        raise errors.UsageError("--timeout is above 0")
    if options.replay is not None:
        for name in ("source", "schedule", "run", "trials", "timeout"):
            if getattr(options, name) is not None:
                shown = name.upper() if name == "source" else f"--{name}"
                raise errors.UsageError(f"`--replay` runs nothing, so leave out `{shown}`")
        return
    if options.seeds is not None:
        raise errors.UsageError("`--seeds` needs `--replay`")
    if options.source is None and options.schedule is None:
        raise errors.UsageError(
            "what to tune is missing", hint="give SOURCE --schedule S, or --replay GRID"
        )
    if options.run is None:
        raise errors.UsageError(
            "the command that trains is missing", hint="give --run 'python train.py {out}'"
        )
    if options.schedule is not None and is_auto(options.schedule):
        raise errors.UsageError(
            "`auto` is not available here: only a rewrite, or --diff, derives a schedule",
            hint="write it to a file first, with --write-schedule, and add the knobs' choices",
        )
    if options.strategy and len(options.strategy) > 1:
        raise errors.UsageError("several strategies need `--replay`")


def _replay(options: argparse.Namespace) -> int:
    """Compares strategies on measured throughputs."""
    from slapo_rewrite.tune.replay_grid import read_grid, rendered, replayed
    from slapo_rewrite.tune.strategies import NAMES, check_name

    names = options.strategy or list(NAMES)
    for name in names:
        check_name(name)
    grid = read_grid(options.replay)
    with working(f"replaying {options.replay}"):
        results = replayed(grid, names, options.seeds or 20, options.confidence, options.seed)
    if options.json:
        return tell(DONE, reason="done", **grid.summary(), strategies=results)
    print(rendered(grid, results))
    return DONE


def _search(options: argparse.Namespace) -> int:
    """Tries points by running the command; returns 1 if none of them ran."""
    from slapo_rewrite.tune.tuning import SURFACE, Wanted, tune

    strategy = (options.strategy or ["model"])[0]
    source, schedule = options.source, options.schedule
    if schedule is None:
        source, schedule = None, source  # the schedule has to name its source
    wanted = Wanted(
        source,
        schedule,
        options.run,
        options.set,
        options.output,
        strategy,
        options.seed,
        options.confidence,
        options.trials,
        options.timeout,
    )
    with working(f"tuning {schedule}"):
        searched = tune(wanted, say)
    code = DONE if searched.best is not None else NO
    if options.json:
        reason = "done" if code == DONE else "no point ran"
        return tell(code, reason=reason, **searched.as_json())
    print(searched.render())
    if searched.best is not None:
        print(f"plot of the results: {options.output / SURFACE}")
    return code
