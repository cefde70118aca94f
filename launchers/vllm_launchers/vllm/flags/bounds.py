"""Whether a number is within a flag's bounds."""

from __future__ import annotations

from vllm_launchers.vllm.flags.changes import Number
from vllm_launchers.vllm.flags.flag_table import FlagSpec
from vllm_launchers.vllm.flags.wording import shown

_LARGEST = 2**64
"""No vLLM runs with larger whole numbers: it rejects them, or they do not fit into its 64-bit integers."""


def out_of_bounds(spec: FlagSpec, number: Number, text: str) -> str | None:
    """Return the sentence after ``--flag``, or None. ``text`` is the number as it was set."""
    if isinstance(number, int) and abs(number) >= _LARGEST:
        return f"must be below 2^64, not {shown(text)}"
    if spec.minimum is not None and not number >= spec.minimum:
        return f"must be {spec.minimum:g} or more, not {shown(text)}"
    if spec.above is not None and not number > spec.above:
        return f"must be above {spec.above:g}, not {shown(text)}"
    if spec.maximum is not None and not number <= spec.maximum:
        return f"must be {spec.maximum:g} or less, not {shown(text)}"
    if spec.below is not None and not number < spec.below:
        return f"must be below {spec.below:g}, not {shown(text)}"
    return None
