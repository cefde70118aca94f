"""Layouts of panes: every layout fills its area, and the best one is chosen for a size."""

from __future__ import annotations

import itertools

import pytest
from textual.geometry import Region, Size

from vllm_console.ui.parts.pane_layout import (
    LOG,
    METRICS,
    PANES,
    REQUESTS,
    SPARKS,
    STEPS,
    LayoutInputs,
    PaneChoice,
    PaneLayout,
    arrange,
    best_layout,
)

MEASURED = LayoutInputs(server=True, measured=True, gpu_rows=12)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((60, 15), "focus"),
        ((80, 24), "focus"),
        ((120, 40), "overview"),
        ((200, 60), "overview"),
        ((200, 20), "wide"),
        ((120, 24), "wide"),
        ((90, 60), "tall"),
    ],
)
def test_the_best_layout_for_a_size(size, expected):
    assert best_layout(Size(*size)) == expected


AREAS = ((60, 5), (80, 13), (111, 23), (120, 27), (90, 46), (200, 10), (200, 47), (40, 60), (20, 1))


@pytest.mark.parametrize("layout", [one for one in PaneLayout if one is not PaneLayout.AUTO])
@pytest.mark.parametrize(
    "shown",
    [
        MEASURED,
        LayoutInputs(True, True),
        LayoutInputs(True, False, 12),
        LayoutInputs(False, False, 12),
        LayoutInputs(False, False),
    ],
    ids=["measured", "no GPUs", "starting", "no server", "nothing"],
)
def test_regions_fill_the_area_and_do_not_overlap(layout, shown):
    for area, large in itertools.product(AREAS, ("", *PANES)):
        regions = arrange(layout, large, Size(*area), shown).regions
        assert regions
        for region in regions.values():
            assert Region(0, 0, *area).contains_region(region), (area, large)
            assert region.width > 0, (area, large)
        for one, other in itertools.combinations(regions.values(), 2):
            assert not one.overlaps(other), (area, large)
        assert max(region.bottom for region in regions.values()) == area[1], (area, large)


def test_one_large_pane_and_the_others_as_a_line_each_where_there_is_room():
    roomy = arrange(PaneLayout.FOCUS, "latency", Size(80, 13), MEASURED)
    assert roomy.large == "latency"
    assert roomy.spark_panes == ["kv-cache", "preemptions", "throughput"]
    assert roomy.regions["latency"].height == 10
    short = arrange(PaneLayout.FOCUS, "", Size(60, 5), MEASURED)
    assert list(short.regions) == ["kv-cache"]
    assert short.spark_panes == []


def test_side_by_side_shows_as_many_panes_as_fit():
    assert list(arrange(PaneLayout.WIDE, "", Size(200, 10), MEASURED).regions) == list(PANES[:5])
    assert list(arrange(PaneLayout.WIDE, "", Size(120, 10), MEASURED).regions) == list(PANES[:3])


def test_a_tall_screen_has_all_but_the_panes_of_the_probe():
    assert set(arrange(PaneLayout.TALL, "", Size(90, 46), MEASURED).regions) == {*PANES} - {REQUESTS, STEPS}


def test_a_log_zoomed_while_a_server_starts_is_alone():
    assert list(arrange(PaneLayout.OVERVIEW, LOG, Size(120, 27), LayoutInputs(True, False)).regions) == [LOG]


def test_numbers_and_tab_choose_the_large_pane():
    choice = PaneChoice()
    choice.zoom(3)
    assert choice.zoomed == "latency"
    choice.zoom(3)
    assert choice.zoomed == ""
    choice.step(1, "")
    assert choice.zoomed == METRICS[0]
    choice.step(-1, choice.zoomed)
    assert choice.zoomed == PANES[-1]


def test_the_layout_key_goes_round_and_back_from_a_zoomed_pane():
    choice = PaneChoice()
    choice.zoom(1)
    choice.next_layout()
    assert (choice.layout, choice.zoomed) == (PaneLayout.AUTO, "")
    seen = []
    for _ in PaneLayout:
        choice.next_layout()
        seen.append(choice.layout)
    assert set(seen) == set(PaneLayout)
    assert choice.layout is PaneLayout.AUTO


def test_what_is_drawn_as_a_line_has_rows_for_each():
    arrangement = arrange(PaneLayout.FOCUS, "kv-cache", Size(80, 40), MEASURED)
    assert arrangement.regions[SPARKS].height == len(arrangement.spark_panes) == 3


async def test_the_layout_of_the_settings_is_the_first_one(console, fakes):
    async with console(fakes.chat, size=(200, 20), layout="focus") as c:
        await c.sees("L focus")
        assert c.app.operations._arrangement.large == "kv-cache"
        await c.press("L")
        await c.sees("L wide")
        await c.sees("4 Throughput ──")


async def test_another_size_gets_its_own_layout(console, fakes):
    async with console(fakes.chat, size=(120, 40)) as c:
        await c.sees("L auto: overview")
        await c.pilot.resize_terminal(80, 24)
        await c.until(lambda: c.app.operations._sparks.lines, "panes as lines")
        await c.pilot.resize_terminal(200, 20)
        await c.sees("L auto: wide")
