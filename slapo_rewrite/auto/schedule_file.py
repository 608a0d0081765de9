"""Keeps derived schedules in files; never overwrites a file that the user wrote or edited."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from slapo_rewrite import __version__, errors
from slapo_rewrite.code.locate import locate, near_files
from slapo_rewrite.emit.diff_cache import folder

# The last line of a derived file: the digest of its inputs, and that of the lines above.
_SEAL = "# slapo-rewrite {version}: worked out of {source}, {digest}\n"
_SEALED = re.compile(r"^# slapo-rewrite (\S+): worked out of ([0-9a-f]+), ([0-9a-f]+)\n\Z", re.M)


def worked_out(source: str, wanted: str, file: Path | None) -> tuple[Path, str]:
    """A file with the derived schedule for a source, and a line for output that says so.

    An existing file is reused if it is still valid.

    Args:
        source: A file or an importable module.
        wanted: A class of the source, or a file that describes the model; may be empty.
        file: The file to write; None for one in the tool's cache.

    Raises:
        ScheduleError: The file was not derived, or was edited; or no schedule can be derived.
    """
    given = _digest(f"{locate(source)[0].read_text(encoding='utf-8')}{_said_in(wanted)}")
    if file is None:
        file = folder() / f"auto_{_digest(f'{source}:{wanted}')}.py"
    if file.exists():
        known = _known(file)
        if known == (__version__, given):
            return file, f"{file} is unchanged"
    from slapo_rewrite.auto.derive import derive

    derived = derive(source, wanted)
    text = derived.text
    file.parent.mkdir(parents=True, exist_ok=True)
    seal = _SEAL.format(version=__version__, source=given, digest=_digest(text))
    file.write_text(f"{text}\n{seal}", encoding="utf-8")
    split = f"{derived.share:.0%} of the parameters are split"
    return file, f"wrote {file}: {'; '.join((derived.title, split, *derived.others))}"


def _known(file: Path) -> tuple[str, str]:
    """The tool's version and the digest of the inputs from which a file was derived.

    Raises:
        ScheduleError: The file was not derived, or was edited since.
    """
    text = file.read_text(encoding="utf-8")
    found = _SEALED.search(text)
    if found is None or _digest(text[: found.start() - 1]) != found[3]:
        raise errors.ScheduleError(
            f"`{file}` already exists, with other contents",
            hint=f"use it (--schedule {file}), or name another file: --write-schedule FILE.py",
        )
    return found[1], found[2]


def _said_in(wanted: str) -> str:
    if not wanted.endswith(".py"):
        return wanted
    try:
        return Path(wanted).read_text(encoding="utf-8")
    except OSError as error:
        raise errors.ScheduleError(
            f"cannot read `{wanted}`: {error.strerror or error}", hint=near_files(Path(wanted))
        ) from None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
