"""`slapo-rewrite verify OUT`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slapo_rewrite.commands.answers import DONE, NO, say, tell, tidy, working


def verify_command(options: argparse.Namespace) -> int:
    """Verifies an existing output."""
    tidy(options.out)
    return verified(options.out, options, options.source, options.schedule)


def verified(
    out: Path, options: argparse.Namespace, source: str | None, schedule: str | None
) -> int:
    """Runs an output against its original, records the result and prints it."""
    from slapo_rewrite.emit import record
    from slapo_rewrite.emit.transaction import state
    from slapo_rewrite.emit.write import note_verification
    from slapo_rewrite.verify.run import chosen, verify

    record.read(out)
    verified = state(out / record.NAME)
    assert verified is not None
    worlds = chosen(out, options.world, options.pp, options.tp, options.dp)
    with working(f"verifying {out}") as progress:
        report = verify(
            out, worlds, source=source, schedule=schedule, progress=progress, checked=say
        )
    code = DONE if report.ok else NO
    if options.json:
        tell(code, reason=report.verdict, **report.record(), warnings=report.warnings)
    else:
        print(report.render())
    if not note_verification(out, report.record(), verified):
        print(
            f"note: {out} was written again meanwhile: its record lacks this result",
            file=sys.stderr,
        )
    return code
