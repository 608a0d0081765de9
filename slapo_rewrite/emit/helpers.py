"""The helper modules of an output: only the definitions in use."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import black

from slapo_rewrite import errors
from slapo_rewrite.emit.pick import Library, Picked
from slapo_rewrite.schedule.load import ScheduleFile

RUNTIME = Path(__file__).resolve().parents[1] / "runtime"

# What an output offers beside what the model file itself calls.
SURFACE = {
    "tensor_parallel": {"set_group"},
    "loading": {"build", "full_state_dict", "load_pretrained", "to_full", "to_local"},
}


def helper_files(
    used: Mapping[str, set[str]], schedule: ScheduleFile, header: str
) -> dict[str, str]:
    """The helper files, by name.

    Args:
        used: Names that the model file uses of each helper module.
        schedule: Where the classes and functions of `modules` are defined.
        header: A comment that says what made the file.

    Raises:
        ScheduleError: The schedule's own code cannot be copied.
    """
    wanted = {module: {n.rpartition(".")[2] for n in names} for module, names in used.items()}
    files: dict[str, str] = {}
    if "modules" in wanted:
        picked = _copied(schedule, wanted["modules"])
        for module, names in picked.helpers.items():
            wanted.setdefault(module, set()).update(names)
        doc = '"""Modules and functions that the schedule defines."""'
        text = black.format_str(f"{doc}\n\n{picked.text}", mode=black.Mode())
        files["modules.py"] = f"{header}\n{text}"
    if wanted.keys() - {"modules"}:
        wanted.setdefault("tensor_parallel", set())
        wanted["loading"] = set(SURFACE["loading"])
    _close(wanted)
    if "loading" in wanted and not _shards_something(wanted["tensor_parallel"]):
        del wanted["loading"]
    for module in sorted(wanted.keys() - {"modules"}):
        picked = _runtime(module).pick(wanted[module] | SURFACE.get(module, set()))
        files[f"{module}.py"] = f'{header}\n"""{picked.docstring}"""\n\n{picked.text}'
    return files


@functools.cache
def _runtime(module: str) -> Library:
    return Library((RUNTIME / f"{module}.py").read_text(encoding="utf-8"))


def _close(wanted: dict[str, set[str]]) -> None:
    """Adds what the wanted names need of other runtime modules."""
    waiting = [m for m in wanted if m != "modules"]
    while waiting:
        module = waiting.pop()
        for other, names in _runtime(module).pick(wanted[module]).helpers.items():
            if not names <= wanted.get(other, set()):
                wanted.setdefault(other, set()).update(names)
                waiting.append(other)


def _shards_something(names: set[str]) -> bool:
    """Whether a parameter is cut anywhere, so that there is something to gather."""
    return "record_shard" in _runtime("tensor_parallel").closure(names)


def _copied(schedule: ScheduleFile, names: set[str]) -> Picked:
    try:
        return Library(schedule.text, schedule.tree).pick(names)
    except KeyError as error:
        raise errors.ScheduleError(
            f"{error} is not defined at the top level of `{schedule.path}`",
            hint="define it there as a class or function",
        ) from None
