"""Outputs that several tests read, made once for all tests and workers."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slapo_rewrite.emit.rewrite import Output, rewrite
from slapo_rewrite.emit.write import write
from tests.golden import ROOT


@dataclass(frozen=True)
class Made:
    """Rewrites as `slapo_rewrite.emit.rewrite.rewrite` does, from the root of the repository.

    Attributes:
        folder: Where outputs wait for who asks next; the workers share it.
    """

    folder: Path

    def __call__(
        self, source: str, schedule: str, settings: Sequence[str] = (), *further: str
    ) -> Output:
        """The output; it is the caller's own."""
        name = hashlib.sha256(
            repr((source, schedule, list(settings), further)).encode()
        ).hexdigest()
        kept = self.folder / name
        with open(kept.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
            if not kept.exists():
                with contextlib.chdir(ROOT):
                    made = rewrite(source, schedule, settings, further=further)
                kept.write_bytes(pickle.dumps(made))
        output: Output = pickle.loads(kept.read_bytes())
        return output


@dataclass(frozen=True)
class Packages:
    """Outputs in a folder, each written when it is first asked for: few tests want all of them.

    Attributes:
        folder: Where they stand.
        files: Gives the files of one, by its name.
    """

    folder: Path
    files: Callable[[str], Mapping[str, str]]

    def __call__(self, *names: str) -> Path:
        """The folder, once these are there."""
        for name in names:
            if not (self.folder / name).exists():
                write(self.folder / name, self.files(name))
        return self.folder
