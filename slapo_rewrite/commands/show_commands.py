"""The commands that only show something: `explain`, `tree` and `primitives`."""

from __future__ import annotations

import argparse

from slapo_rewrite import errors
from slapo_rewrite.commands.answers import DONE, check_installed, tell, tidy, working


def explain_command(options: argparse.Namespace) -> int:
    """Explains which line of the schedule caused a change, or writes the page for review."""
    whole = "--html" if options.html is not None else "--markdown" if options.markdown else None
    if whole is not None and options.json:
        raise errors.UsageError(f"`{whole}` and `--json` exclude each other")
    if whole is None:
        for name in ("world", "source", "schedule"):
            if getattr(options, name) is not None:
                raise errors.UsageError(f"`--{name}` needs `--html` or `--markdown`")
    elif options.place is not None:
        raise errors.UsageError(f"`{whole}` shows every line: use it without FILE:LINE")
    tidy(options.out)
    if whole is not None:
        return _reviewed(options)
    from slapo_rewrite.emit.explanation import explain, explained

    if options.json:
        return tell(DONE, reason="done", **explained(options.out, options.place))
    print(explain(options.out, options.place))
    return DONE


def _reviewed(options: argparse.Namespace) -> int:
    """Writes the page for review, and prints the comment."""
    from slapo_rewrite.emit import record

    record.read(options.out)
    if options.html is not None:
        check_installed("explain --html", "review", "matplotlib")
    from slapo_rewrite.review.gathered import gathered

    with working(f"reviewing {options.out}"):
        review = gathered(
            options.out, world=options.world, source=options.source, schedule=options.schedule
        )
    if options.html is not None:
        from slapo_rewrite.review.review_page import review_page

        try:
            options.html.write_text(review_page(review), encoding="utf-8")
        except OSError as error:
            raise errors.unwritable(options.html, error) from None
        if not options.markdown:
            print("\n".join([*review.summary(), f"wrote {options.html}"]))
    if options.markdown:
        from slapo_rewrite.review.review_comment import review_comment

        print(review_comment(review), end="")
    return DONE


def tree_command(options: argparse.Namespace) -> int:
    """Lists the modules of a model."""
    from slapo_rewrite.model.listing import render_tree, tree_record
    from slapo_rewrite.project import Project

    with working(f"building {options.source}"):
        project = Project(options.source, options.schedule)
    if options.json:
        return tell(DONE, reason="done", **tree_record(project.tree, project.sources))
    print(render_tree(project.tree, project.sources))
    return DONE


def primitives_command(options: argparse.Namespace) -> int:
    """Lists the primitives, or shows one."""
    from slapo_rewrite.primitives.page import listing, page

    print(page(options.name) if options.name else listing())
    return DONE
