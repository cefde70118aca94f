"""Memory units, formatted numbers, and the sort order of names."""

from __future__ import annotations

from vllm_launchers.patterns import lazy_pattern

GIB = 2**30


_NUMBER = lazy_pattern(r"[0-9]+")


def natural_key(name: str) -> str:
    """Sort key for names: ``replica-2`` comes before ``replica-10``; case is ignored."""
    return _NUMBER.sub(lambda found: found[0].zfill(12), name.casefold())


def in_units(size: float) -> str:
    """Bytes as text: ``1.5 GiB``, ``49.7 MiB``."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"


def counted(number: int, thing: str) -> str:
    """A count with its noun: ``1 request``, ``1,024 requests``."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def three_digits(value: float) -> str:
    """A number with three digits, never in scientific notation: ``0.25``, ``6.94``, ``1,250``."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"
