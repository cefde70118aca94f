"""Numbers and durations as people read them; what is not known is an en dash."""

from __future__ import annotations

UNKNOWN = "–"


def seconds(value: float | None) -> str:
    """A latency: ``850µs``, ``24ms``, ``1.9s``, ``12s``."""
    if value is None:
        return UNKNOWN
    if value == 0:
        return "0s"
    if value < 0.001:
        return f"{value * 1e6:.0f}µs"
    if value < 1:
        return f"{value * 1000:.0f}ms"
    return f"{value:.1f}s" if value < 10 else f"{value:.0f}s"


def count(value: float | None) -> str:
    """A number of things: ``7``, ``412``, ``2.1k``, ``1.3M``."""
    if value is None:
        return UNKNOWN
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scaled = value / (1e3 if unit == "k" else limit)
            return f"{scaled:.1f}{unit}" if scaled < 100 else f"{scaled:.0f}{unit}"
    return f"{value:.0f}"


def percent(value: float | None, digits: int = 0) -> str:
    """A share from 0 to 1 as a percentage."""
    return UNKNOWN if value is None else f"{value * 100:.{digits}f}%"


def duration(value: float | None) -> str:
    """How long something has gone on: ``42s``, ``7m12s``, ``2h10m``, ``3d4h``."""
    if value is None:
        return UNKNOWN
    whole = max(0, int(value))
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 24 else f"{hours // 24}d{hours % 24}h"
