"""Screenshots of the comparison of two runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from vllm_console.runs.compare import compare
from vllm_console.ui.screens.compare import CompareScreen


def with_bounds(window, at):
    """A minute whose TTFT scatters widely, and whose median ITL is only known to be below 10 ms."""
    figures = {key: value for key, value in window.figures.items() if key != "itl_p50"}
    wild = (0.1, 3.0, 40.0, 0.2, 3.0, 9.0, 0.1, 3.0, 20.0, 4.0)[at % 10]
    return replace(window, figures=figures | {"ttft_mean": wild, "itl_p50_below": 0.01})


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
    if case == "inconclusive":
        return compare(*made.pair(before, [with_bounds(one, at) for at, one in enumerate(made.minutes(2))]))
    if case == "several":
        flags = {"max-num-seqs": 64, "kv-cache-dtype": "fp8", "enable-prefix-caching": False}
        return compare(*made.pair(before, made.minutes(2, slower=0.7), flags))
    return compare(*made.pair(before, made.minutes(2, 2)))


def screen(made, fakes, case):
    console = SimpleNamespace(fleet=fakes.FakeFleet(), late_screens=None)
    return lambda: CompareScreen(found(made, case), lambda _: lambda: None, console)


@pytest.mark.parametrize("size", [(60, 15), (200, 60), (200, 20)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_comparison_at_other_sizes(snap_compare, alone, made, fakes, size):
    assert snap_compare(alone(screen(made, fakes, "worse")), terminal_size=size)


@pytest.mark.parametrize("look_name", ["light", "no-color", "ascii"])
def test_comparison_in_other_themes(snap_compare, alone, made, fakes, look, look_name):
    options = look(look_name)
    app = alone(screen(made, fakes, "worse"))
    app.ascii = options["ascii"]
    assert snap_compare(app, terminal_size=(80, 24))


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
@pytest.mark.parametrize("case", ["better", "worse", "nothing", "inconclusive", "several", "unlike", "little"])
def test_comparison(snap_compare, alone, made, fakes, size, case):
    assert snap_compare(alone(screen(made, fakes, case)), terminal_size=size)
