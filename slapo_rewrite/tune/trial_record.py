"""The file of trials: one JSON object per line, of which the first describes the search.

An interrupted search continues from it. A record of another space, command, source or schedule is
refused, since its figures do not apply.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from slapo_rewrite import __version__, errors
from slapo_rewrite.emit.record import digest, installed
from slapo_rewrite.emit.transaction import lock
from slapo_rewrite.tune.knob_space import KnobSpace, Trial

FORMAT = 1
PACKAGES = ("torch", "transformers", "deepspeed", "triton")
# The entries that must be equal for trials to count.
SAME = ("source", "source_sha256", "schedule", "schedule_sha256", "set", "run", "knobs", "machine")


def header(
    source: str, texts: Mapping[str, str], given: Sequence[str], command: str, space: KnobSpace
) -> dict[str, Any]:
    """The content of the first line."""
    from torch import cuda

    versions = {name: installed(name) for name in PACKAGES}
    gpus = [cuda.get_device_name(number) for number in range(cuda.device_count())]
    return {
        "format": FORMAT,
        "tool": __version__,
        "source": source,
        **{f"{name}_sha256": digest(text) for name, text in texts.items()},
        "set": list(given),
        "run": command,
        "knobs": {axis.name: list(axis.values) for axis in space.axes},
        "points": len(space),
        "machine": {"kind": platform.machine(), "cores": os.cpu_count(), "gpus": gpus},
        "python": platform.python_version(),
        "packages": {name: version for name, version in versions.items() if version},
    }


@contextlib.contextmanager
def recording(path: Path, head: Mapping[str, Any], space: KnobSpace) -> Iterator[TrialRecord]:
    """Opens a record, locked against other searches, in the context.

    It creates the folder of the file. A lock file beside it names the process. `head` is the
    required content of the first line.
    """
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(path.with_suffix(".lock"), "a+", encoding="utf-8"))
            if not lock(file.fileno()):
                file.seek(0)
                raise errors.OutputUnwritable(
                    f"another `tune` is running in `{path.parent}`: {file.read().strip()}",
                    hint="wait for it, then repeat this command to continue the search; or give "
                    "another folder: -o FOLDER",
                )
            file.truncate(0)
            since = datetime.now().strftime("%Y-%m-%d %H:%M")
            file.write(f"process {os.getpid()} on {platform.node()}, since {since}\n")
            file.flush()
            record = TrialRecord(path, head, space)
        except OSError as error:
            raise errors.unwritable(path.parent, error) from error
        yield record


class TrialRecord:
    """A record of trials that is open for writing.

    Raises:
        OtherTrials: The file belongs to another search, or is damaged.
    """

    def __init__(self, path: Path, head: Mapping[str, Any], space: KnobSpace) -> None:
        self.path, self._space = path, space
        self.trials: list[Trial] = []
        if path.is_file() and path.stat().st_size:
            self._read(head)
        else:
            self._append(head)

    def _read(self, head: Mapping[str, Any]) -> None:
        text = self.path.read_text(encoding="utf-8")
        # An incomplete last line, from an interrupted write, is not a trial.
        whole = text[: text.rfind("\n") + 1]
        numbers = {json.dumps(dict(p), sort_keys=True): i for i, p in enumerate(self._space.points)}
        hint = f"remove `{self.path}` to start again, or give another folder: -o FOLDER"
        try:
            first, *lines = (json.loads(line) for line in whole.splitlines())
            differing = [name for name in SAME if first.get(name) != head.get(name)]
            if differing and not lines and "format" in first:  # nothing of that search ran
                whole = json.dumps(head) + "\n"
            elif differing:
                raise errors.OtherTrials(
                    f"`{self.path}` holds trials of another " + ", ".join(differing), hint=hint
                )
            for line in lines:
                number = numbers[json.dumps(line["knobs"], sort_keys=True)]
                self.trials.append(Trial(number, line["outcome"], float(line["throughput"])))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise errors.OtherTrials(
                f"`{self.path}` is not a record of these trials", hint=hint
            ) from None
        if whole != text:
            self.path.write_text(whole, encoding="utf-8")

    def add(self, trial: Trial, seconds: float) -> None:
        """Adds a trial and writes it to the file."""
        self.trials.append(trial)
        self._append(
            {
                "trial": len(self.trials),
                "knobs": dict(self._space.points[trial.number]),
                "outcome": trial.kind,
                "throughput": trial.throughput,
                "seconds": round(seconds, 1),
            }
        )

    def _append(self, line: Mapping[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
