"""Reads and writes byte sizes in the form that people use."""

from __future__ import annotations

UNITS = {
    "TiB": 2.0**40, "TB": 1e12, "GiB": 2.0**30, "GB": 1e9, "MiB": 2.0**20, "MB": 1e6,
    "KiB": 2.0**10, "kB": 1e3, "B": 1.0,
}  # fmt: skip


def byte_size(text: str) -> float | None:
    """Bytes of a text such as `80GiB`, `80GB` or `1000`; None for any other text."""
    unit = next((unit for unit in UNITS if text.endswith(unit)), "")
    try:
        value = float(text.removesuffix(unit)) * UNITS.get(unit, 1.0)
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None


def gib(size: float) -> str:
    """A byte size for output beside others in GiB; one that would read 0.0 in another unit."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 / 20 else shown_size(size)


def shown_size(size: float) -> str:
    """A byte size for output, in the largest unit that fits it."""
    unit = next((unit for unit in ("GiB", "MiB", "KiB") if size >= UNITS[unit]), None)
    return f"{size / UNITS[unit]:.2f} {unit}" if unit else f"{size:.0f} B"
