"""The command line: arguments -> one call -> an exit code.

0 done; 1 the answer is "no" (`--check`, `verify`); 2 the user's input is wrong; 3 a defect of the
tool. What costs seconds to import (torch, transformers) is imported by the calls that need it.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slapo_rewrite import __version__, errors
from slapo_rewrite.garbage import collector_paused
from slapo_rewrite.parsers import PARSERS, complete

if TYPE_CHECKING:
    from slapo_rewrite.emit.current import Asked
    from slapo_rewrite.emit.merge import Merged
    from slapo_rewrite.emit.rewrite import Output

DONE, NO, DEFECT = 0, 1, 3  # 2 is what errors say of themselves


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code.

    Args:
        arguments: The command line; without it the program's own, which ends afterwards.
    """
    with collector_paused():
        code = _code(list(sys.argv[1:] if arguments is None else arguments))
    if arguments is None:
        _end(code)
    return code


def _end(code: int) -> None:
    """Ends the program without taking apart all that it imported, which takes half a second.

    Where that would leave something undone, Python ends it as ever.
    """
    if threading.active_count() > 1:
        return
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        return
    os._exit(code)


def _code(arguments: list[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:
        complete()
    for_programs = "--json" in arguments
    try:
        name = arguments[0] if arguments and arguments[0] in COMMANDS else ""
        options = _parsed(name, arguments)
        return COMMANDS.get(name, _rewrite)(options)
    except errors.RewriteError as error:
        print(error.render(), file=sys.stderr)
        if for_programs:
            _tell(error.exit_code, **error.record())
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader went away; leave nothing for the interpreter to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except Exception:
        traceback.print_exc()
        print(
            f"internal error: this is a defect of slapo-rewrite {__version__}, not of your input",
            file=sys.stderr,
        )
        if for_programs:
            _tell(DEFECT, reason="defect")
        return DEFECT


def _parsed(name: str, arguments: list[str]) -> argparse.Namespace:
    """The options; what reads like a command that there is not is answered with those there are.

    Raises:
        UsageError: They cannot be read.
    """
    try:
        return PARSERS[name]().parse_args(arguments[bool(name) :])
    except errors.UsageError:
        meant = errors.nearest(arguments[0], COMMANDS) if arguments and not name else []
        if not meant or os.path.exists(arguments[0]) or not arguments[0].isalpha():
            raise
        raise errors.UsageError(
            f"there is no command `{arguments[0]}`",
            hint=f"did you mean `slapo-rewrite {meant[0]}`?",
        ) from None


def _tell(code: int, **facts: Any) -> int:
    """Prints what programs read, and returns the exit code."""
    import json

    print(json.dumps({"exit": code, **facts}, indent=1))
    return code


def _answered(options: argparse.Namespace, code: int, words: str, **facts: Any) -> int:
    """Says how it went, to people or to programs, and returns the exit code."""
    if options.json:
        return _tell(code, **facts)
    print(words)
    return code


def _up_to_date(options: argparse.Namespace, out: Path, warnings: Iterable[str]) -> int:
    """Says that an output is what it would be again."""
    _warn(warnings)
    return _answered(options, DONE, f"{out} is up to date", reason="up to date", files=[])


def _rewrite(options: argparse.Namespace) -> int:
    _check_combination(options)
    if _is_auto(options.schedule):
        _check_names(options, None)
        _work_out(options)
    _check_names(options, options.schedule)
    from slapo_rewrite.emit import current

    asked = current.Asked.of(
        options.source,
        options.schedule,
        options.set,
        options.single_file,
        options.further,
        _folder_name(options),
    )
    if options.check:
        return _check(options, options.output, options.support, asked)
    if options.diff:
        return _diff(options, asked)
    warnings = current.up_to_date(options.output, asked, options.support)
    if warnings is None:
        code = _written(options, asked)
    else:
        code = _up_to_date(options, options.output, warnings)
    if options.verify and code == DONE:
        return _verified(options.output, options, options.source, options.schedule)
    return code


def _check_names(options: argparse.Namespace, schedule: str | None) -> None:
    """Refuses names that output and support folder cannot have; ends what was interrupted there."""
    if options.output is None:
        return
    from slapo_rewrite.emit.output_name import check_name

    single = options.single_file
    check_name(options.output, options.source, schedule, single, options.support)
    _tidy(options.output)
    if options.support is not None:
        _tidy(options.support)


def _is_auto(schedule: str) -> bool:
    """Whether a schedule is to be worked out."""
    return schedule == "auto" or schedule.startswith("auto:")


def _work_out(options: argparse.Namespace) -> None:
    """Works the schedule out, and goes on as if its file had been given."""
    from slapo_rewrite.auto.schedule_file import worked_out

    file = options.write_schedule
    if file is None and options.output is not None:
        name = options.output.absolute().name.removesuffix(".py")
        file = options.output.parent / f"{name}_schedule.py"
    wanted = options.schedule.partition(":")[2]
    with _working(f"working out a schedule for {options.source}"):
        said = worked_out(options.source, wanted, file)
    _say(said.words)
    options.schedule = str(said.file)


def _warn(warnings: Iterable[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _diff(options: argparse.Namespace, asked: Asked) -> int:
    """Prints the diff, which may have been made before."""
    from slapo_rewrite.emit import diff_cache
    from slapo_rewrite.emit.diff_colours import coloured

    if (known := diff_cache.look_up(diff_cache.place(asked), asked)) is None:
        output = _rewritten(asked)
        known = output.diff(), output.warnings
    diff, warnings = known
    _warn(warnings)
    print(coloured(diff) if _shows_colours() else diff, end="")
    return DONE


def _written(options: argparse.Namespace, asked: Asked) -> int:
    """Rewrites, and writes the output folder."""
    output = _rewritten(asked)
    _warn(output.warnings)
    merge = _put(options.output, output, options.support, options.merge, options.force)
    if options.json:
        return _told_merge("written", merge)
    print(f"wrote {options.output}: {', '.join(merge.files)}")
    if options.support is not None:
        print(f"its helpers are in {options.support}")
    return _merged(merge)


def _put(out: Path, output: Output, support: Path | None, merges: bool, force: bool) -> Merged:
    """Puts an output in its folder, with what was edited there by hand where that is asked for."""
    from slapo_rewrite.emit import record
    from slapo_rewrite.emit.merge import Merged, merged
    from slapo_rewrite.emit.support_folder import write_both
    from slapo_rewrite.emit.write import write

    merge = Merged(output.files, [], {})
    if merges and (out / record.NAME).is_file():
        merge = merged(out, output.files)
    how: dict[str, Any] = {
        "force": force,
        "replacing": merge.replacing,
        "inputs": output.inputs,
    }
    if support is None:
        write(out, merge.files, **how)
    else:
        write_both(out, merge.files, support, output.uses, **how)
    return merge


def _told_merge(reason: str, merge: Merged, **facts: Any) -> int:
    """The same for programs."""
    return _tell(
        NO if merge.conflicts else DONE,
        reason="conflicts" if merge.conflicts else reason,
        files=sorted(merge.files),
        conflicts=sorted(merge.conflicts),
        **facts,
    )


def _merged(merge: Merged) -> int:
    """Says what is left to do by hand."""
    if merge.conflicts:
        print(f"conflicts to resolve by hand: {', '.join(merge.conflicts)}")
        return NO
    return DONE


def _rewritten(asked: Asked) -> Output:
    """What is asked for, in memory."""
    from slapo_rewrite.emit import diff_cache, record
    from slapo_rewrite.emit.rewrite import rewrite

    place = diff_cache.place(asked)
    with _working(f"rewriting {asked.source}"):
        output = rewrite(
            asked.source,
            asked.schedule,
            asked.settings,
            single_file=asked.single_file,
            further=asked.further,
            support=asked.support,
        )
    if place is not None:
        diff_cache.keep(place, asked, output.files[record.NAME], output.diff(), output.warnings)
    return output


def _folder_name(options: argparse.Namespace) -> str | None:
    """What the support folder is called, if there is to be one."""
    return options.support.absolute().name if options.support is not None else None


def _shows_colours() -> bool:
    """Whether ordinary output goes to a terminal whose user wants colours (no-color.org)."""
    unwanted = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not unwanted


def _tidy(out: Path) -> None:
    """Ends what a run that was interrupted began in an output folder, and says so."""
    from slapo_rewrite.emit.transaction import tidied

    if words := tidied(out):
        print(f"note: {words}", file=sys.stderr)


def _asked(options: argparse.Namespace) -> list[str]:
    """Which of these options are given."""
    return [
        f"--{name}" for name in ("world", "pp", "tp", "dp") if getattr(options, name) is not None
    ]


def _check_combination(options: argparse.Namespace) -> None:
    if options.output is None and not options.diff:
        raise errors.UsageError(
            "where to write is missing", hint="give -o OUT, or --diff to print only"
        )
    if options.write_schedule is not None and not _is_auto(options.schedule):
        raise errors.UsageError("`--write-schedule` belongs to `--schedule auto`")
    if options.check and options.output is None:
        raise errors.UsageError("`--check` needs the folder to check", hint="give -o OUT")
    if sum((options.diff, options.check, options.verify)) > 1:
        raise errors.UsageError("`--diff`, `--check` and `--verify` exclude one another")
    if options.support is not None and options.single_file:
        raise errors.UsageError(
            "`--single-file` puts the helpers into the model file, `--support` into a folder: "
            "give one"
        )
    if options.json and (options.diff or options.verify):
        raise errors.UsageError(
            "`--json` tells what was written, or what `--check` found",
            hint="`slapo-rewrite verify OUT --json` tells of a verification",
        )
    if options.merge and options.force:
        raise errors.UsageError("`--merge` keeps hand edits, `--force` overwrites them: give one")
    if (asked := _asked(options)) and not options.verify:
        raise errors.UsageError(f"`{asked[0]}` belongs to `--verify`")


def _check(options: argparse.Namespace, out: Path, shared: Path | None, asked: Asked) -> int:
    """Answers from hashes where nothing changed, without importing torch."""
    from slapo_rewrite.emit import current, record

    try:
        content = record.read(out)
    except errors.NotAnOutput as error:
        return _answered(options, NO, f"not current: {error.message}", **error.record())
    if current.is_current(out, content, asked, shared):
        return _answered(options, DONE, f"{out} is current", reason="current")
    from slapo_rewrite.emit import support_folder
    from slapo_rewrite.emit.write import matches

    output = _rewritten(asked)
    wrong = matches(out, output.files)
    if shared is not None:
        wrong += support_folder.differing(out, shared, output.uses)
    if not wrong:
        return _answered(options, DONE, f"{out} is current", reason="current")
    reasons = list(current.reasons(content, asked))
    words = "\n".join([*reasons, f"not current: {', '.join(wrong)}"])
    return _answered(options, NO, words, reason="not current", files=wrong, inputs=reasons)


def _verified(
    out: Path, options: argparse.Namespace, source: str | None, schedule: str | None
) -> int:
    from slapo_rewrite.emit import record
    from slapo_rewrite.emit.transaction import state
    from slapo_rewrite.emit.write import note_verification
    from slapo_rewrite.verify.run import chosen, verify

    record.read(out)
    verified = state(out / record.NAME)
    assert verified is not None
    worlds = chosen(out, options.world, options.pp, options.tp, options.dp)
    with _working(f"verifying {out}") as progress:
        report = verify(
            out, worlds, source=source, schedule=schedule, progress=progress, checked=_say
        )
    code = DONE if report.ok else NO
    if options.json:
        _tell(code, reason=report.verdict, **report.record(), warnings=report.warnings)
    else:
        print(report.render())
    if not note_verification(out, report.record(), verified):
        print(
            f"note: {out} was written again meanwhile: this is not in its record", file=sys.stderr
        )
    return code


def _verify(options: argparse.Namespace) -> int:
    _tidy(options.out)
    return _verified(options.out, options, options.source, options.schedule)


def _explain(options: argparse.Namespace) -> int:
    whole = "--html" if options.html is not None else "--markdown" if options.markdown else None
    if whole is not None and options.json:
        raise errors.UsageError(f"`{whole}` and `--json` are two forms: give one")
    if whole is None:
        for name in ("world", "source", "schedule"):
            if getattr(options, name) is not None:
                raise errors.UsageError(f"`--{name}` belongs to `--html` and `--markdown`")
    elif options.place is not None:
        raise errors.UsageError(f"`{whole}` tells of every line: give it without FILE:LINE")
    _tidy(options.out)
    if whole is not None:
        return _reviewed(options)
    from slapo_rewrite.emit.explanation import explain, explained

    if options.json:
        return _tell(DONE, reason="done", **explained(options.out, options.place))
    print(explain(options.out, options.place))
    return DONE


def _reviewed(options: argparse.Namespace) -> int:
    """Writes the page for review, and prints the comment."""
    from slapo_rewrite.emit import record

    record.read(options.out)
    if options.html is not None:
        _check_installed("explain --html", "review", "matplotlib")
    from slapo_rewrite.review.gathered import gathered

    with _working(f"reviewing {options.out}"):
        review = gathered(
            options.out, world=options.world, source=options.source, schedule=options.schedule
        )
    if options.html is not None:
        from slapo_rewrite.review.review_page import review_page

        try:
            options.html.write_text(review_page(review), encoding="utf-8")
        except OSError as error:
            raise errors.OutputUnwritable(
                f"cannot write `{options.html}`: {error.strerror or error}"
            ) from None
        if not options.markdown:
            print("\n".join([*review.summary(), f"wrote {options.html}"]))
    if options.markdown:
        from slapo_rewrite.review.review_comment import review_comment

        print(review_comment(review), end="")
    return DONE


def _check_installed(command: str, extra: str, *packages: str) -> None:
    """Refuses a command whose packages are not installed."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError:
            raise errors.MissingPackage(
                f"`slapo-rewrite {command}` needs `{package}`, which is not installed",
                hint=f"pip install {' '.join(_packages_of(extra))}",
            ) from None


def _packages_of(extra: str) -> list[str]:
    """What one of the package's extras installs, by name."""
    from importlib.metadata import requires

    wanted = [line for line in requires("slapo-rewrite") or () if f'extra == "{extra}"' in line]
    return [re.split(r"[^\w-]", line, maxsplit=1)[0] for line in wanted]


def _update(options: argparse.Namespace) -> int:
    if options.check and options.force:
        raise errors.UsageError("`--check` writes nothing, `--force` overwrites: give one")
    out = options.out
    _tidy(out)
    from slapo_rewrite.emit import current, record

    content = record.read(out)
    asked = current.asked_again(content, options.source, options.schedule)
    shared = None if asked.support is None else out.absolute().parent / asked.support
    if shared is not None:
        _tidy(shared)
    if options.check:
        return _check(options, out, shared, asked)
    if (warnings := current.up_to_date(out, asked, shared)) is not None:
        return _up_to_date(options, out, warnings)
    reasons = list(current.reasons(content, asked))
    if not options.json:
        print("\n".join(reasons or ["none of its recorded inputs has changed"]))
    output = _rewritten(asked)
    _warn(output.warnings)
    from slapo_rewrite.emit.diff_colours import coloured
    from slapo_rewrite.emit.fresh_changes import fresh_in

    new = "".join(each.render() for each in fresh_in(out, output))
    merge = _put(out, output, shared, merges=not options.force, force=options.force)
    if options.json:
        return _told_merge("updated" if new else "no difference", merge, inputs=reasons, diff=new)
    print(coloured(new) if _shows_colours() else new, end="")
    print(f"updated {out}" if new else f"{out} stays as it is: that makes no difference")
    if kept := sorted(merge.replacing.keys() - set(merge.conflicts)):
        print(f"hand edits carried over: {', '.join(kept)}")
    if content.get("verification") and new:
        print(f"what was verified has changed: slapo-rewrite verify {out}")
    return _merged(merge)


def _tree(options: argparse.Namespace) -> int:
    from slapo_rewrite.model.listing import render_tree, tree_record
    from slapo_rewrite.project import Project

    with _working(f"building {options.source}"):
        project = Project(options.source, options.schedule)
    if options.json:
        return _tell(DONE, reason="done", **tree_record(project.tree, project.sources))
    print(render_tree(project.tree, project.sources))
    return DONE


def _primitives(options: argparse.Namespace) -> int:
    from slapo_rewrite.primitives.page import listing, page

    print(page(options.name) if options.name else listing())
    return DONE


def _tune(options: argparse.Namespace) -> int:
    _check_tuning(options)
    drawn = ["matplotlib"] if options.replay is None else []
    _check_installed("tune", "tune", "sklearn", *drawn)
    return _replay(options) if options.replay is not None else _search(options)


def _plan(options: argparse.Namespace) -> int:
    _check_planning(options)
    if _is_auto(options.schedule):
        options.write_schedule = None
        _work_out(options)
    from slapo_rewrite.plan.planning import Wanted, memory_size, plan, unknown_gpu
    from slapo_rewrite.simulate.hardware import hardware, known_gpus

    if options.gpu == "measure":
        from slapo_rewrite.plan.measured_machine import measured_machine

        with _working("measuring this machine"):
            gpu = measured_machine(min(options.nodes_of, options.gpus))
    elif options.gpu in known_gpus():
        gpu = hardware(options.gpu)
    else:
        raise unknown_gpu(options.gpu, known_gpus())
    memory = memory_size(options.memory) if options.memory else gpu.memory
    wanted = Wanted(
        options.source,
        options.schedule,
        options.set,
        options.gpus,
        gpu,
        memory,
        options.batch,
        options.sequence,
        options.nodes_of,
        options.precision or gpu.precision,
    )
    with _working(f"planning {options.source}") as progress:
        planned = plan(wanted, progress)
    if options.plot is not None:
        from slapo_rewrite.plan.pareto_plot import draw

        draw(planned, options.plot)
    from slapo_rewrite.plan.plan_table import rendered

    print(planned.as_json() if options.json else rendered(planned))
    if options.output is not None:
        from slapo_rewrite.plan.plan_files import write_plan

        with _working(f"rewriting {options.source}"):
            names = write_plan(planned, options.output)
        _say(f"wrote {options.output}: {', '.join(names)}")
    return DONE


def _check_planning(options: argparse.Namespace) -> None:
    """Refuses a plot that cannot be drawn."""
    if options.plot is None:
        return
    if options.plot.suffix not in (".png", ".svg"):
        raise errors.UsageError("`--plot` writes .png or .svg files")
    _check_installed("plan --plot", "tune", "matplotlib")


def _check_tuning(options: argparse.Namespace) -> None:
    """Refuses what does not go together, or is out of range."""
    if not 0 < options.confidence < 1:
        raise errors.UsageError("--confidence lies between 0 and 1")
    if options.timeout is not None and not options.timeout > 0:
        raise errors.UsageError("--timeout is above 0")
    if options.replay is not None:
        for name in ("source", "schedule", "run", "trials", "timeout"):
            if getattr(options, name) is not None:
                shown = name.upper() if name == "source" else f"--{name}"
                raise errors.UsageError(f"`--replay` runs nothing, so `{shown}` is too much")
        return
    if options.seeds is not None:
        raise errors.UsageError("`--seeds` belongs to `--replay`")
    if options.source is None and options.schedule is None:
        raise errors.UsageError(
            "what to tune is missing", hint="give SOURCE --schedule S, or --replay GRID"
        )
    if options.run is None:
        raise errors.UsageError(
            "the command that trains is missing", hint="give --run 'python train.py {out}'"
        )
    if options.schedule is not None and _is_auto(options.schedule):
        raise errors.UsageError(
            "`auto` works a schedule out where files are written or shown",
            hint="have it written first, by --write-schedule, and say in it what knobs may be",
        )
    if options.strategy and len(options.strategy) > 1:
        raise errors.UsageError("several strategies are for `--replay`")


def _replay(options: argparse.Namespace) -> int:
    """How strategies do on measured throughputs."""
    from slapo_rewrite.tune.replay_grid import read_grid, rendered, replayed
    from slapo_rewrite.tune.strategies import NAMES, check_name

    names = options.strategy or list(NAMES)
    for name in names:
        check_name(name)
    grid = read_grid(options.replay)
    with _working(f"replaying {options.replay}"):
        results = replayed(grid, names, options.seeds or 20, options.confidence, options.seed)
    if options.json:
        import json

        print(json.dumps({**grid.summary(), "strategies": results}, indent=1))
    else:
        print(rendered(grid, results))
    return DONE


def _search(options: argparse.Namespace) -> int:
    """Tries points for real; 1 where none of them ran."""
    from slapo_rewrite.tune.tuning import SURFACE, Wanted, tune

    strategy = (options.strategy or ["model"])[0]
    source, schedule = options.source, options.schedule
    if schedule is None:
        source, schedule = None, source  # which has to say what it is of
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
    with _working(f"tuning {schedule}"):
        searched = tune(wanted, _say)
    if options.json:
        import json

        print(json.dumps(searched.as_json(), indent=1))
    else:
        print(searched.render())
        if searched.best is not None:
            print(f"the surface is drawn in {options.output / SURFACE}")
    return DONE if searched.best is not None else NO


def _say(line: str) -> None:
    """A line that stands in a log too; on a terminal, above what shows that work goes on."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def _working(what: str) -> Iterator[Callable[[str], None]]:
    """Shows that work goes on, on a terminal; in a pipe nothing is shown.

    What the user's own code prints meanwhile is no output of the command, and goes to stderr.
    """
    with redirect_stdout(sys.stderr):
        if not sys.stderr.isatty():
            yield lambda text: None
            return
        from rich.console import Console

        with Console(stderr=True).status(what) as status:
            yield lambda text: status.update(f"{what}: {text}")


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "explain": _explain,
    "tree": _tree,
    "update": _update,
    "verify": _verify,
    "primitives": _primitives,
    "plan": _plan,
    "tune": _tune,
}
