"""Outputs that several tests look at, made once for all of them and for all workers."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slapo_rewrite.emit.rewrite import Output, rewrite
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
