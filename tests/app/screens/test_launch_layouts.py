"""Ways to launch a model side by side on the launch screen, and applying one with a key."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from vllm_console.alternatives_text import alternatives_table, format_legend, format_pace
from vllm_console.ui.panes.launch_plan import launch_plan_lines
from vllm_console.ui.parts.launch_planner import PlanOutcome
from vllm_console.ui.screens.launch import LaunchScreen
from vllm_launchers.launch.request import LaunchRequest
from vllm_launchers.plan.alternatives import Alternative, thrift
from vllm_launchers.plan.choices.pool import Layout
from vllm_launchers.plan.pace import Pace, Paces
from vllm_launchers.vllm.flags.changes import Changes

SMALL, WIDE = (80, 24), (120, 40)
TO_PAIR = Changes(set={"tensor-parallel-size": 2})
PACES = Paces(Pace(1, 0.02, 50.0), Pace(8, 0.025, 320.0), Pace(64, 0.05, 1280.0))


def way(layout: Layout, **more: object) -> Alternative:
    fields: dict[str, object] = {
        "layout": layout, "expert_parallel": False, "kv_cache_dtype": "auto", "quantization": None, "model": None,
        "weights_gib": 12.5, "kv_gib": 20.0, "kv_tokens": 100_000, "concurrent_requests": 30.0, "fits": True,
        "serves": True, "paces": PACES, "tradeoff": "It costs something.", "reason": "It was the best.",
        "chosen": False, "changes": Changes(),
    }  # fmt: skip
    return Alternative(**(fields | more))  # type: ignore[arg-type]


ONE = way(Layout(), chosen=True)
PAIR = way(Layout(2), changes=TO_PAIR, reason="Takes 1 more GPU.")
OTHER = way(
    Layout(), model="Qwen/Qwen3-8B-FP8", changes=Changes(set={"tensor-parallel-size": 1}), paces=None,
    concurrent_requests=None,
)  # fmt: skip


@pytest.fixture
def fleet(fakes):
    class Fleet(fakes.FakeFleet):
        requests: tuple[LaunchRequest, ...] = ()
        ways: tuple[Alternative, ...] = (ONE, PAIR, OTHER)

        def plan(self, request: LaunchRequest):
            self.requests = (*self.requests, request)
            return replace(super().plan(request), alternatives=self.ways, paces=PACES)

    return Fleet()


@pytest.fixture
def screen(host, fleet):
    return host(lambda: LaunchScreen(fleet))


async def planned(pilot, wait_until):
    await wait_until(pilot, lambda: pilot.app.screen.planner.fresh, "a plan")
    await pilot.pause()


def test_the_legend_names_what_the_table_has():
    assert format_legend((ONE, PAIR)) == ("TP tensor parallel; * this plan; GiB per GPU; 1/8/full requests at once")
    mixed = way(Layout(2, 2, 2), expert_parallel=True)
    assert format_legend((ONE, mixed)).startswith(
        "TP tensor, PP pipeline, DP data parallel; experts whole: expert parallel; * this plan"
    )
    assert format_legend((ONE,)).startswith("* this plan")


@pytest.mark.parametrize("size", [SMALL, WIDE])
async def test_the_layouts_have_their_legend(screen, wait_until, size):
    async with screen.run_test(size=size) as pilot:
        await planned(pilot, wait_until)
        await pilot.press("l")
        await wait_until(pilot, lambda: "TP tensor parallel; * this plan" in screen.text())


@pytest.mark.parametrize("size", [SMALL, WIDE])
async def test_the_footer_has_the_keys_that_can_do_something(screen, fleet, wait_until, size):
    fleet.ways = ()
    async with screen.run_test(size=size) as pilot:
        await planned(pilot, wait_until)
        await wait_until(pilot, lambda: "tab section" in screen.text())
        assert "l layouts" not in screen.text()
        assert "f fix" not in screen.text()
        fleet.ways = (ONE, PAIR)
        screen.screen.planner.plan_soon()
        await wait_until(pilot, lambda: "l layouts" in screen.text())


@pytest.mark.parametrize("size", [SMALL, WIDE])
async def test_a_key_shows_layouts_and_enter_applies_one(screen, fleet, wait_until, size):
    async with screen.run_test(size=size) as pilot:
        await planned(pilot, wait_until)
        await pilot.press("l")
        await wait_until(pilot, lambda: "Layouts" in screen.text())
        text = screen.text()
        assert text.splitlines()[-1].split("  ")[:3] == [" j k choose a layout", "enter apply", "esc back to the plan"]
        assert all(part in text for part in ("TP 2", "20/25/50", "50/320/1,280", "Qwen3-8B-FP8"))
        await pilot.click(offset=(1, size[1] - 1))
        await wait_until(pilot, lambda: "Takes 1 more GPU." in screen.text())
        await pilot.click(offset=(3, size[1] - 1))
        await wait_until(pilot, lambda: "Takes 1 more GPU." not in screen.text())
        await pilot.press("down")
        await wait_until(pilot, lambda: "Takes 1 more GPU." in screen.text())
        assert "enter applies: tensor-parallel-size unset → 2" in " ".join(screen.text().split())
        await pilot.press("enter")
        await wait_until(pilot, lambda: fleet.requests[-1].changes == TO_PAIR)
        await wait_until(pilot, lambda: "Applied: TP 2" in screen.text())
        assert not [call for call in fleet.calls if call[0] == "start"]


async def test_another_checkpoint_is_applied_with_its_name(screen, fleet, wait_until):
    async with screen.run_test(size=WIDE) as pilot:
        await planned(pilot, wait_until)
        await pilot.press("l", "down", "down", "enter")
        await wait_until(pilot, lambda: fleet.requests[-1].model == "Qwen/Qwen3-8B-FP8")


async def test_esc_goes_back_to_the_plan_and_changes_nothing(screen, fleet, wait_until):
    async with screen.run_test(size=WIDE) as pilot:
        await planned(pilot, wait_until)
        before = len(fleet.requests)
        await pilot.press("l", "down", "escape")
        await wait_until(pilot, lambda: "Layouts" not in screen.text())
        assert len(fleet.requests) == before
        assert screen.screen is not None
        assert screen.results == []


async def test_the_plan_itself_shows_them_where_there_is_room(screen, wait_until):
    async with screen.run_test(size=(200, 60)) as pilot:
        await planned(pilot, wait_until)
        await wait_until(pilot, lambda: "1* one GPU" in screen.text())
        assert "tok/s 1/8/full" in screen.text()


async def test_where_there_is_one_way_it_is_reported(screen, fleet, wait_until):
    fleet.ways = ()
    async with screen.run_test(size=SMALL) as pilot:
        await planned(pilot, wait_until)
        await pilot.press("l")
        await wait_until(pilot, lambda: "No other layouts to compare" in screen.text())


def test_rows_fit_a_narrow_screen_and_say_what_is_not_known() -> None:
    long = replace(OTHER, layout=Layout(2, 2, 2), model="somebody/a-model-with-a-very-long-name-indeed-AWQ")
    rows = alternatives_table([ONE, PAIR, long], narrow=True)
    assert max(map(len, rows)) <= 76
    assert rows[0].split()[:1] == ["layout"]
    assert rows[1].startswith("1* one GPU")
    assert rows[3].rstrip().endswith("–")


@pytest.mark.parametrize("width", [76, 60, 50])
def test_where_rows_do_not_fit_columns_are_left_out_and_none_is_cut(width: int) -> None:
    rows = alternatives_table([ONE, PAIR, OTHER], narrow=True, room=width)
    assert max(map(len, rows)) <= width
    assert rows[0].split()[-1] in ("1/8/full", "reqs")
    whole = alternatives_table([ONE, PAIR, OTHER], narrow=True)
    assert all(one.startswith(row) for row, one in zip(rows, whole, strict=True))


def test_a_pace_in_words_says_each_number_once() -> None:
    assert format_pace(PACES) == "50 tokens/s (20 ms per token) with 1 request, 320 (25) with 8, 1,280 (50) with 64"
    alone = Paces(PACES.one, None, PACES.one)
    assert format_pace(PACES, 80) == "50 tokens/s (20 ms per token) with 1 request, 320 (25) with 8"
    assert format_pace(PACES, 10) == "50 tokens/s (20 ms per token) with 1 request"
    assert format_pace(alone) == "50 tokens/s (20 ms per token) with 1 request"


def test_thrift_is_a_way_on_more_gpus_that_holds_all() -> None:
    short = replace(ONE, serves=False)
    assert thrift((short, PAIR)) is PAIR
    assert thrift((ONE, PAIR)) is None
    assert thrift((replace(ONE, quantization="fp8"), PAIR)) is PAIR
    assert thrift((short, replace(PAIR, near=False))) is None
    assert thrift((short, replace(PAIR, model="a/b"))) is None


def test_the_expected_pace_is_cut_only_where_no_rows_are_left(fakes):
    plan = replace(fakes.FakeFleet().plan(LaunchRequest("chatbot")), paces=PACES)
    pace = f"expected: {format_pace(PACES)}"

    def shown(height: int) -> str:
        strips = launch_plan_lines(PlanOutcome(plan), (60, height), active=True)
        assert len(strips) <= height
        return "\n".join(strip.text for strip in strips)

    assert pace in " ".join(shown(40).split())
    low = shown(12)
    assert "expected: 50 tokens/s" in low
    assert pace not in " ".join(low.split())
