"""Numbers of bytes, as people write them."""

from __future__ import annotations

UNITS = {
    "TiB": 2.0**40, "TB": 1e12, "GiB": 2.0**30, "GB": 1e9, "MiB": 2.0**20, "MB": 1e6,
    "KiB": 2.0**10, "kB": 1e3, "B": 1.0,
}  # fmt: skip


def byte_size(text: str) -> float | None:
    """Bytes of `80GiB`, `80GB` or plain bytes; None where it is none of these."""
    unit = next((unit for unit in UNITS if text.endswith(unit)), "")
    try:
        value = float(text.removesuffix(unit)) * UNITS.get(unit, 1.0)
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None


def gib(size: float) -> str:
    """A number of bytes, to be read beside others in GiB; one that would be none is not."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 / 20 else shown_size(size)


def shown_size(size: float) -> str:
    """A number of bytes of any order, to be read."""
    unit = next((unit for unit in ("GiB", "MiB", "KiB") if size >= UNITS[unit]), None)
    return f"{size / UNITS[unit]:.2f} {unit}" if unit else f"{size:.0f} B"
