"""Decides by hashes, fast and without torch, whether an output is up to date with its inputs.

This covers what depends on the inputs' text alone. If user code may read other files, the clock or
the environment, only a rewrite can tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slapo_rewrite import __version__, errors
from slapo_rewrite.code.locate import locate as locate_source
from slapo_rewrite.code.own_files import is_own
from slapo_rewrite.emit import inputs, record
from slapo_rewrite.groups import grouped
from slapo_rewrite.schedule.load import locate as locate_schedule

# Up to this many changed modules of one package are named one by one.
NAMED = 4
TOOL_CHANGED = "slapo-rewrite itself has changed"


@dataclass(frozen=True)
class Request:
    """The output that a command line asks for."""

    source: str  # the source, as given
    source_file: Path
    schedule: str  # the schedule, as given
    schedule_file: Path
    settings: tuple[str, ...]  # the knobs that are set, as `name=value`
    single_file: bool  # whether the helpers become part of the model file
    further: tuple[str, ...]  # the further helpers, in order
    support: str | None  # the name of the folder beside the output for its helpers

    @classmethod
    def of(
        cls,
        source: str,
        schedule: str,
        settings: Sequence[str],
        single_file: bool,
        further: Iterable[str],
        support: str | None,
    ) -> Request:
        """The request of a command's options."""
        found = (source, locate_source(source)[0], schedule, locate_schedule(schedule))
        return cls(*found, tuple(settings), single_file, tuple(sorted(set(further))), support)

    @property
    def knobs(self) -> dict[str, str]:
        """The knobs that are set, as text."""
        return dict(item.split("=", 1) for item in self.settings if "=" in item)


def requested_again(
    content: Mapping[str, Any], source: str | None = None, schedule: str | None = None
) -> Request:
    """The request that an output was written for; an error if a newer version wrote it."""
    written = content.get("tool", {}).get("version", "")
    if _version(written) > _version(__version__):
        raise errors.NotAnOutput(
            f"this output was written by slapo-rewrite {written}, which is newer than this one, "
            f"{__version__}",
            hint=f"install slapo-rewrite {written}, or write the output again with this one: "
            "slapo-rewrite SOURCE --schedule S -o OUT --force",
        )
    try:
        return Request.of(
            source or content["source"]["name"],
            schedule or content["schedule"]["name"],
            [f"{name}={value}" for name, value in content.get("set", {}).items()],
            content.get("single_file", False),
            content.get("with", ()),
            content.get("support", {}).get("folder"),
        )
    except errors.RewriteError as error:
        error.hint = (
            "run this in the folder in which the output was written, or give --source and "
            "--schedule" + (f"; {error.hint}" if error.hint else "")
        )
        raise


def _version(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def is_current(
    out: Path, content: Mapping[str, Any], request: Request, shared: Path | None
) -> bool:
    """Whether neither the inputs of an output nor its files have changed."""
    if not is_requested(content, request) or any(
        not record.holds(out / name, record.as_left(content, name)) for name in content["files"]
    ):
        return False
    if shared is None:
        return True
    from slapo_rewrite.emit import support_folder  # imports what writes code

    return support_folder.is_current(out, shared, content)


def is_requested(content: Mapping[str, Any], request: Request) -> bool:
    """Whether a record is of this request, and none of its recorded inputs has changed."""
    if content.get("support", {}).get("folder") != request.support:
        return False
    if content.get("single_file", False) != request.single_file:
        return False
    if content.get("tool", {}).get("digest") != record.tool_digest():
        return False
    return not reasons(content, request)


def is_certain(content: Mapping[str, Any], request: Request) -> bool:
    """Whether a rewrite would certainly give the recorded output again.

    Deny by default: False if names are spelled differently, or if user code may depend on anything
    that is not recorded.
    """
    given = [(content[key]["name"], getattr(request, key)) for key in ("source", "schedule")]
    if any(before != now for before, now in given) or not all("=" in s for s in request.settings):
        return False
    if not is_requested(content, request):
        return False
    modules, packages = _modules(content), content.get("packages", {})
    found = [request.source_file, request.schedule_file]
    found += [file for name in modules if (file := _file(name, request)) is not None]
    hiding = [
        file for n in packages if n not in modules and (file := _file(n, request)) is not None
    ]
    if any(is_own(str(file)) for file in hiding):
        return False
    own = [file for file in found if is_own(str(file))]
    known = {*modules, *packages, request.source_file.stem}
    return not any(inputs.may_change(file, known) for file in own)


def reasons(content: Mapping[str, Any], request: Request) -> list[str]:
    """What has changed since an output was written, as messages."""
    found = []
    if content.get("with", []) != list(request.further):
        named = [", ".join(names) or "none" for names in (content.get("with", []), request.further)]
        found.append(f"further helpers were {named[0]}, and are now {named[1]}")
    if content["source"]["sha256"] != record.digest(request.source_file.read_bytes()):
        found.append(f"the source {content['source']['name']} has changed")
    if content["schedule"]["sha256"] != record.digest(request.schedule_file.read_bytes()):
        found.append(f"the schedule {content['schedule']['name']} has changed")
    for name, version in content.get("packages", {}).items():
        if record.installed(name) != version:
            found.append(f"{name} was {version}, and is now {record.installed(name)}")
    found += changed_modules([n for n, d in _modules(content).items() if _digest(n, request) != d])
    if content.get("set", {}) != request.knobs:
        found.append(f"knobs were {content.get('set', {})}, and are now {request.knobs}")
    if content.get("tool", {}).get("digest") not in (None, record.tool_digest()):
        found.append(TOOL_CHANGED)
    return found


def changed_modules(modules: Sequence[str]) -> list[str]:
    """Messages about changed modules; for many of one package, as of a checkout, their number."""
    packages = grouped((name.split(".")[0], name) for name in modules)
    return [
        line
        for package, names in packages.items()
        for line in (
            [f"{name} has changed" for name in names]
            if len(names) <= NAMED
            else [f"{len(names)} modules of {package} have changed, {names[0]} among them"]
        )
    ]


def up_to_date(out: Path, request: Request, shared: Path | None) -> list[str] | None:
    """The warnings of an output that a rewrite would leave as it is.

    None if it has to be rewritten, or if it contains merged hand edits.
    """
    try:
        content = record.read(out)
        if content.get("merged") or not is_current(out, content, request, shared):
            return None
    except (errors.NotAnOutput, OSError):
        return None
    return list(content.get("warnings", ())) if is_certain(content, request) else None


def _modules(content: Mapping[str, Any]) -> dict[str, str]:
    """The hashes of the modules beside the source that an output was made from."""
    copies = content.get("copies", {}).values()
    return {**content.get("depends", {}), **{c["module"]: c["sha256"] for c in copies}}


def _file(name: str, request: Request) -> Path | None:
    """The file of a module that source or schedule imports."""
    return inputs.find(name, request.source_file, request.schedule_file)


def _digest(name: str, request: Request) -> str | None:
    file = _file(name, request)
    try:
        return record.digest(file.read_bytes()) if file is not None else None
    except OSError:
        return None
