"""The traffic that the tuner replays: the recorded requests, one per second."""

from __future__ import annotations

import itertools

import pytest

from vllm_console.fleet.tuning import _at_one_per_second
from vllm_launchers.engine_model.traffic_replay import Arrival


def test_repetition_has_no_double_arrival() -> None:
    traffic = _at_one_per_second([Arrival(10.0 + 2 * at, 100, 10) for at in range(5)])
    repeated = [one.at + place * len(traffic) for place in range(3) for one in traffic]
    gaps = [after - before for before, after in itertools.pairwise(repeated)]
    assert gaps == pytest.approx([1.0] * 14)
