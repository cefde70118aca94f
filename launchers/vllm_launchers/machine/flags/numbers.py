"""Numbers as vLLM's parser reads them. Pure."""

from __future__ import annotations

import re

Number = int | float

_SUFFIXED = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)([kKmMgGtT])")
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def human_int(text: str) -> int | None:
    """A whole number that may be written 4k (4,000), 4K (4,096) or 1.5k; there is no 1.5K. None where it is none."""
    text = text.strip()
    try:
        if match := _SUFFIXED.fullmatch(text):
            number, unit = match.groups()
            return int(float(number) * _UNITS[unit]) if unit.islower() else int(number) * _UNITS[unit]
        return int(text)
    except ValueError:
        return None
