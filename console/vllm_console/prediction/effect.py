"""A prediction in words, where its numbers would suggest more precision than there is. Pure.

Near capacity, an interval is too wide to be useful; beyond what a server has shown, even a narrow one depends on
extrapolated step times. Then only the direction and the order of magnitude are shown, or that they are unknown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_console.prediction.predict import Estimate

UNDECIDED = 1.5
"""An interval around the current value whose ends differ by more than this factor shows no direction."""
WIDE = 3.0
"""Ends that differ by more than this factor show only the order of magnitude."""
SEVERAL, TENFOLD = 2.0, 10.0

NOT_KNOWN = "unknown"


def is_rough(before: Estimate, after: Estimate) -> bool:
    """Whether an interval is too wide for its ends to be useful.

    If all of it is below half of the current value, its upper end is useful enough.
    """
    now, low, high = before.value, after.low, after.high
    if not now or low is None or high is None or high <= now / SEVERAL:
        return False
    return high > low * (UNDECIDED if low <= now <= high else WIDE)


def in_words(before: Estimate, after: Estimate) -> str:
    """``several times as high``, ``lower``, ``about the same``: what is certain, then what may be; or `NOT_KNOWN`."""
    now, low, high = before.value, after.low, after.high
    if now is None or low is None or high is None:
        return NOT_KNOWN
    if not high:
        return "none"
    if low <= now <= high:
        return NOT_KNOWN if not now or high > low * UNDECIDED else "about the same"
    if not now:
        return "some"
    return _higher(low / now, high / now) if low > now else _lower(high / now, low / now)


def _higher(surely: float, perhaps: float) -> str:
    if surely >= TENFOLD:
        return "more than ten times as high"
    if surely >= SEVERAL:
        return "several times as high"
    if perhaps >= TENFOLD:
        return "higher, perhaps more than tenfold"
    return "higher, perhaps several times" if perhaps >= SEVERAL else "higher"


def _lower(surely: float, perhaps: float) -> str:
    if surely <= 1 / TENFOLD:
        return "less than a tenth as high"
    if surely <= 1 / SEVERAL:
        return "less than half as high"
    return "lower, perhaps by more than half" if perhaps <= 1 / SEVERAL else "lower"


def surely_rises(before: Estimate, after: Estimate) -> bool:
    """Whether the whole interval is above the current value."""
    return before.value is not None and after.low is not None and after.low > before.value
