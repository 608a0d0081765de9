"""`slapo-rewrite plan`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from slapo_rewrite import errors
from slapo_rewrite.commands.answers import DONE, check_installed, say, tell, working
from slapo_rewrite.commands.work_out import is_auto, work_out

if TYPE_CHECKING:
    from slapo_rewrite.plan.planning import Planned


def plan_command(options: argparse.Namespace) -> int:
    """Predicts the best ways to train a model on a number of GPUs."""
    _check_planning(options)
    if is_auto(options.schedule):
        options.write_schedule = None
        work_out(options)
    with working(f"planning {options.source}") as progress:
        planned = _planned(options, progress)
    if options.plot is not None:
        from slapo_rewrite.plan.pareto_plot import draw

        draw(planned, options.plot)
    if not options.json:
        from slapo_rewrite.plan.plan_table import rendered

        print(rendered(planned))
    if options.output is not None:
        from slapo_rewrite.plan.plan_files import write_plan

        with working(f"rewriting {options.source}"):
            names = write_plan(planned, options.output)
        say(f"wrote {options.output}: {', '.join(names)}")
    return tell(DONE, reason="done", **planned.as_json()) if options.json else DONE


def _planned(options: argparse.Namespace, progress: Callable[[str], None]) -> Planned:
    """Imports the planner, which takes long, and plans."""
    from slapo_rewrite.plan.planning import Wanted, memory_size, plan, unknown_gpu
    from slapo_rewrite.simulate.hardware import hardware, known_gpus, own_hardware

    if options.gpu == "measure":
        from slapo_rewrite.plan.measured_machine import measured_machine

        progress("measuring this machine")
        gpu = measured_machine(min(options.nodes_of, options.gpus), options.precision)
    elif options.gpu.lower() in known_gpus():
        gpu = hardware(options.gpu.lower(), options.precision)
    elif options.gpu.endswith(".toml"):
        gpu = own_hardware(Path(options.gpu), options.precision)
    else:
        raise unknown_gpu(options.gpu, known_gpus())
    wanted = Wanted(
        options.source,
        options.schedule,
        options.set,
        options.gpus,
        gpu,
        memory_size(options.memory) if options.memory else gpu.memory,
        options.batch,
        options.sequence,
        options.nodes_of,
        "fp32" if gpu.precision == "tf32" else gpu.precision,
    )
    return plan(wanted, progress)


def _check_planning(options: argparse.Namespace) -> None:
    """Refuses partial nodes and unwritable files before anything is counted."""
    if options.gpus > options.nodes_of and options.gpus % options.nodes_of:
        raise errors.UsageError(
            f"{options.gpus} GPUs are not whole nodes of {options.nodes_of}",
            hint="give the number of GPUs of a node with --nodes-of",
        )
    if options.output is not None and options.output.is_file():
        raise errors.OutputUnwritable(f"`{options.output}` is a file, but has to be a folder")
    if options.plot is None:
        return
    if options.plot.suffix not in (".png", ".svg"):
        raise errors.UsageError("`--plot` writes .png or .svg files")
    check_installed("plan --plot", "tune", "matplotlib")
