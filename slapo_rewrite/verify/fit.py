"""Whether a model can be built on many ranks, as one process tells in which they are pretended."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from .original import Original


def misfit(original: Original, ranks: int) -> str | None:
    """What the rewritten model says where it is built as the first of so many ranks.

    Args:
        original: The original and the output, imported.
        ranks: How many share the layers.

    Returns:
        Its words where a size does not fit; None where all do, or where nothing can be said.
    """
    try:
        with _pretended(ranks), original.twin.on_meta():
            depth = original.job["depth"]
            original.twin.build_small(original.schedule, original.rewritten_module, depth)
    except ValueError as error:
        out = Path(original.job["out"])
        if any(Path(f.filename).parent == out for f in traceback.extract_tb(error.__traceback__)):
            return str(error)
    except Exception:
        return None  # not every model can be built without memory; the ranks say what is wrong
    return None


@contextlib.contextmanager
def _pretended(ranks: int) -> Iterator[None]:
    """A process group of so many ranks, of which this process is the first and only one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
