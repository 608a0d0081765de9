"""`slapo-rewrite SOURCE --schedule S`, and `update OUT`, which repeats a recorded request."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slapo_rewrite import errors
from slapo_rewrite.commands.answers import DONE, NO, answered, shows_colours, tidy, warn, working
from slapo_rewrite.commands.verify_command import verified
from slapo_rewrite.commands.work_out import is_auto, work_out

if TYPE_CHECKING:
    from slapo_rewrite.emit.current import Request
    from slapo_rewrite.emit.merge import Merged
    from slapo_rewrite.emit.rewrite import Output


def rewrite_command(options: argparse.Namespace) -> int:
    """Rewrites, and writes, shows, checks or verifies the output."""
    _check_combination(options)
    if is_auto(options.schedule):
        _check_names(options, None)
        work_out(options)
    _check_names(options, options.schedule)
    from slapo_rewrite.emit import current

    request = current.Request.of(
        options.source,
        options.schedule,
        options.set,
        options.single_file,
        options.further,
        options.support.absolute().name if options.support is not None else None,
    )
    if options.check:
        remedy = "run the same command without --check to update it"
        return _check(options, options.output, options.support, request, remedy)
    if options.diff:
        return _diff(options, request)
    warnings = current.up_to_date(options.output, request, options.support)
    if warnings is None:
        code = _written(options, request)
    else:
        code = _up_to_date(options, options.output, warnings)
    if options.verify and code == DONE:
        return verified(options.output, options, options.source, options.schedule)
    return code


def _check_combination(options: argparse.Namespace) -> None:
    if options.output is None and not options.diff:
        raise errors.UsageError(
            "the output folder is missing", hint="give -o OUT, or --diff to only print"
        )
    if options.write_schedule is not None and not is_auto(options.schedule):
        raise errors.UsageError("`--write-schedule` needs `--schedule auto`")
    if options.check and options.output is None:
        raise errors.UsageError("`--check` needs the folder to check", hint="give -o OUT")
    if sum((options.diff, options.check, options.verify)) > 1:
        raise errors.UsageError("`--diff`, `--check` and `--verify` exclude each other")
    if options.support is not None and options.single_file:
        raise errors.UsageError(
            "`--single-file` puts the helpers into the model file, `--support` into a folder: "
            "give one"
        )
    if options.json and (options.diff or options.verify):
        raise errors.UsageError(
            "`--json` tells what was written, or what `--check` found",
            hint="use `slapo-rewrite verify OUT --json` for a verification",
        )
    if options.merge and options.force:
        raise errors.UsageError("`--merge` keeps hand edits, `--force` overwrites them: give one")
    if (given := _asked(options)) and not options.verify:
        raise errors.UsageError(f"`{given[0]}` needs `--verify`")


def _asked(options: argparse.Namespace) -> list[str]:
    """The given options of verification."""
    return [
        f"--{name}" for name in ("world", "pp", "tp", "dp") if getattr(options, name) is not None
    ]


def _check_names(options: argparse.Namespace, schedule: str | None) -> None:
    """Checks the names of output and support folder; recovers both from interrupted runs."""
    if options.output is None:
        return
    from slapo_rewrite.emit.output_name import check_name

    single = options.single_file
    check_name(options.output, options.source, schedule, single, options.support)
    tidy(options.output)
    if options.support is not None:
        tidy(options.support)


def _check(
    options: argparse.Namespace, out: Path, shared: Path | None, request: Request, remedy: str
) -> int:
    """Checks whether an output is current; by hashes, without torch, if nothing changed."""
    from slapo_rewrite.emit import current, record

    try:
        content = record.read(out)
    except errors.NotAnOutput as error:
        return answered(options, NO, f"not current: {error.message}", **error.record())
    if current.is_current(out, content, request, shared):
        return answered(options, DONE, f"{out} is current", reason="current")
    from slapo_rewrite.emit import support_folder
    from slapo_rewrite.emit.write import matches

    output = _rewritten(request)
    wrong = matches(out, output.files)
    if shared is not None:
        wrong += support_folder.differing(out, shared, output.uses)
    if not wrong:
        return answered(options, DONE, f"{out} is current", reason="current")
    reasons = list(current.reasons(content, request))
    words = "\n".join([*reasons, f"not current: {', '.join(wrong)}", remedy])
    return answered(options, NO, words, reason="not current", files=wrong, inputs=reasons)


def _diff(options: argparse.Namespace, request: Request) -> int:
    """Prints the diff, from the cache if possible."""
    from slapo_rewrite.emit import diff_cache

    if (known := diff_cache.look_up(diff_cache.place(request), request)) is None:
        output = _rewritten(request)
        known = output.diff(), output.warnings
    diff, warnings = known
    warn(warnings)
    print(_shown(diff), end="")
    return DONE


def _shown(diff: str) -> str:
    from slapo_rewrite.emit.diff_hunks import coloured

    return coloured(diff) if shows_colours() else diff


def _written(options: argparse.Namespace, request: Request) -> int:
    """Rewrites, and writes the output folder."""
    output = _rewritten(request)
    warn(output.warnings)
    merge = _put(options.output, output, options.support, options.merge, options.force)
    words = [f"wrote {options.output}: {', '.join(merge.files)}"]
    if options.support is not None:
        words.append(f"its helpers are in {options.support}")
    return _answered_merge(options, merge, "written", words)


def _rewritten(request: Request) -> Output:
    """The output of a request, in memory."""
    from slapo_rewrite.emit import diff_cache, record

    place = diff_cache.place(request)
    with working(f"rewriting {request.source}"):
        from slapo_rewrite.emit.rewrite import rewrite

        output = rewrite(
            request.source,
            request.schedule,
            request.settings,
            single_file=request.single_file,
            further=request.further,
            support=request.support,
        )
    if place is not None:
        diff_cache.keep(place, request, output.files[record.NAME], output.diff(), output.warnings)
    return output


def _up_to_date(options: argparse.Namespace, out: Path, warnings: Iterable[str]) -> int:
    """Answers that an output is up to date."""
    warn(warnings)
    return answered(options, DONE, f"{out} is up to date", reason="up to date", files=[])


def _put(out: Path, output: Output, support: Path | None, merges: bool, force: bool) -> Merged:
    """Writes an output to its folder, with hand edits merged if `merges`."""
    from slapo_rewrite.emit import record
    from slapo_rewrite.emit.merge import Merged, merged
    from slapo_rewrite.emit.support_folder import write_both
    from slapo_rewrite.emit.write import write

    merge = Merged(output.files, [], {})
    if merges and (out / record.NAME).is_file():
        merge = merged(out, output.files)
    how: dict[str, Any] = {"force": force, "replacing": merge.replacing, "inputs": output.inputs}
    if support is None:
        write(out, merge.files, **how)
    else:
        write_both(out, merge.files, support, output.uses, **how)
    return merge


def _answered_merge(
    options: argparse.Namespace, merge: Merged, reason: str, words: list[str], **facts: Any
) -> int:
    """Answers which files were written, and which conflicts are left."""
    code = DONE
    if merge.conflicts:
        code, reason = NO, "conflicts"
        words = [*words, f"conflicts to resolve by hand: {', '.join(merge.conflicts)}"]
    facts = {"files": sorted(merge.files), "conflicts": sorted(merge.conflicts), **facts}
    return answered(options, code, "\n".join(words), reason=reason, **facts)


def update_command(options: argparse.Namespace) -> int:
    """Rewrites an output with its recorded request, and shows the differences."""
    if options.check and options.force:
        raise errors.UsageError("`--check` writes nothing, `--force` overwrites: give one")
    out = options.out
    tidy(out)
    from slapo_rewrite.emit import current, record

    content = record.read(out)
    request = current.requested_again(content, options.source, options.schedule)
    shared = None if request.support is None else out.absolute().parent / request.support
    if shared is not None:
        tidy(shared)
    if options.check:
        return _check(options, out, shared, request, f"run slapo-rewrite update {out}")
    if (warnings := current.up_to_date(out, request, shared)) is not None:
        return _up_to_date(options, out, warnings)
    reasons = list(current.reasons(content, request))
    if not options.json:
        print("\n".join(reasons or ["none of its recorded inputs has changed"]))
    output = _rewritten(request)
    warn(output.warnings)
    from slapo_rewrite.emit.fresh_changes import fresh_in

    new = "".join(each.render() for each in fresh_in(out, output))
    merge = _put(out, output, shared, merges=not options.force, force=options.force)
    words = [_shown(new).removesuffix("\n")] if new else []
    words.append(f"updated {out}" if new else f"{out} stays as it is: the output is the same")
    if kept := sorted(merge.replacing.keys() - set(merge.conflicts)):
        words.append(f"hand edits carried over: {', '.join(kept)}")
    if content.get("verification") and new:
        words.append(f"changed since it was verified: run slapo-rewrite verify {out}")
    reason = "updated" if new else "no difference"
    return _answered_merge(options, merge, reason, words, inputs=reasons, diff=new)
