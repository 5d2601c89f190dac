"""Figures as people read them."""

from __future__ import annotations


def count(number: int, noun: str) -> str:
    """A number of things: ``1 block``, ``2,000 blocks``, ``2 entries``."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def size(number: float) -> str:
    """Bytes for people: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.2f} GiB"


def duration(seconds: float | None) -> str:
    """Seconds for people: ``45 ms``, ``1.20 s``, ``3.5 h``."""
    if seconds is None:
        return "-"
    if seconds < 0.01:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    for unit, length_s, most in (("s", 1, 300), ("min", 60, 300), ("h", 3600, 72)):
        if (number := seconds / length_s) < most:
            return f"{number:.2f} {unit}" if unit == "s" else f"{number:.1f} {unit}"
    return f"{seconds / 86400:.1f} days"


def percent(share: float | None) -> str:
    """A share in 0..1 as ``97.5``."""
    return "-" if share is None else f"{share * 100:.1f}"
