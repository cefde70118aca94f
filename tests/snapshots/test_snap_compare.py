"""Pictures of the comparison of two runs."""

from __future__ import annotations

import pytest

from vllm_console.telemetry.compare import compare
from vllm_console.ui.screens.compare import CompareScreen


def found(made, case):
    before = made.minutes(1)
    if case == "better":
        return compare(*made.pair(before, made.minutes(2, slower=0.6)))
    if case == "worse":
        return compare(*made.pair(before, made.minutes(2, slower=1.6, preempted=0.06)))
    if case == "unlike":
        return compare(*made.pair(before, made.minutes(2, rate=3.4)))
    if case == "nothing":
        return compare(*made.pair(before, made.minutes(2)))
    if case == "several":
        flags = {"max-num-seqs": 64, "kv-cache-dtype": "fp8", "enable-prefix-caching": False}
        return compare(*made.pair(before, made.minutes(2, slower=0.7), flags))
    return compare(*made.pair(before, made.minutes(2, 2)))


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
@pytest.mark.parametrize("case", ["better", "worse", "nothing", "several", "unlike", "little"])
def test_comparison(snap_compare, alone, made, size, case):
    assert snap_compare(alone(lambda: CompareScreen(found(made, case), lambda: None)), terminal_size=size)
