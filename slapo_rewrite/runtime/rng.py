"""Random numbers that differ between tensor-parallel ranks, where they should."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .shards import rank, world_size


@contextmanager
def fork_rng() -> Iterator[None]:
    """A context in which each tensor-parallel rank draws its own random numbers.

    Works with `with fork_rng():`, and with `@fork_rng()` above a `forward`. Ranks are
    seeded alike, so dropout has the same mask on all of them, which is wrong where each
    rank holds other heads or features. Inside, CPU and current CUDA device are seeded
    with one number of torch's CPU generator, mixed with the rank. Afterwards they
    continue as if only that number had been drawn: ranks stay in step whatever each of
    them draws inside. Regions may be nested, and the same state of the generator gives
    the same numbers again, as in recomputation by `torch.utils.checkpoint`.

    In a world of one it does nothing: numbers are drawn as without it.
    """
    if world_size() == 1:
        yield
        return
    number = int(torch.randint(2**62, (), device="cpu"))
    with torch.random.fork_rng([torch.cuda.current_device()] if uses_cuda() else []):
        seed_generators(mixed(number, rank()))
        yield


def seed_generators(seed: int) -> None:
    """Seeds the generators of the CPU and of the current CUDA device."""
    torch.default_generator.manual_seed(seed)
    if uses_cuda():
        torch.cuda.manual_seed(seed)


def uses_cuda() -> bool:
    """Whether CUDA is in use in this process."""
    return len(torch.cuda.default_generators) > 0


def mixed(number: int, rank: int) -> int:
    """A seed for each rank; seeds that are close by would be no better than equal ones."""
    digest = hashlib.sha256(f"{number} {rank}".encode()).digest()
    return int.from_bytes(digest[:7], "little")
