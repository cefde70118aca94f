"""Flags from measured traffic: one key stages suggestions with their reasons."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from vllm_console.diagnosis.finding import Finding, Severity
from vllm_console.history.workload import SeenWorkload
from vllm_console.ui.app import ConsoleApp
from vllm_console.ui.parts.flag_catalog import FlagCatalog
from vllm_console.ui.parts.staging import measured_traffic
from vllm_console.ui.screens.flags import FlagsScreen, about_lines
from vllm_launchers.errors import OperationError
from vllm_launchers.plan.choices.choice import Choice, Source
from vllm_launchers.presets.model import Workload

SEEN = SeenWorkload(Workload(900, 250, 0.1, 40), 2400, 60.0, "2,400 requests in 60 minutes: prompts of 900 tokens.")
LENGTH = Choice("max-model-len", 1152, "95 % of requests are shorter", Source.WORKLOAD, "Longer ones are refused.")
CACHING = Choice("enable-prefix-caching", False, "prompts are unique", Source.WORKLOAD)
STAGED = {"max-model-len": 1152, "enable-prefix-caching": False}


@pytest.fixture
def fleet(fakes):
    fleet = fakes.FakeFleet(fakes.chat)
    fleet.workloads = {"chat": SEEN}
    fleet.suggestions = {"chat": (LENGTH, CACHING, Choice("dtype", None, "left to vLLM", Source.MODEL))}
    return fleet


@pytest.fixture
def editor(host, fakes, fleet):
    return host(lambda: FlagsScreen(fakes.chat(fakes.NOW), {}, fleet))


async def test_one_key_stages_what_the_traffic_asks_for_with_reason_and_tradeoff(editor, wait_until):
    async with editor.run_test(size=(80, 24)) as pilot:
        await pilot.press("t")
        await wait_until(pilot, lambda: "2 changes, not staged yet" in editor.text())
        text = " ".join(editor.text().split())
        assert "2,400 requests in 60 minutes" in text
        assert "workload: 95 % of requests are shorter" in text
        assert "trade-off: Longer ones are refused." in text
        assert "gpu-memory-utilization" in text, "what is set is listed"
        assert "kv-cache-dtype" not in text, "and nothing else"
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: editor.results)
    assert editor.results == [STAGED]


def test_the_reason_of_the_present_value_is_not_that_of_the_suggested_one(fakes):
    server = replace(fakes.chat(fakes.NOW), flags={"max-model-len": 4096}, reasons={"max-model-len": "set by you"})
    lines = about_lines("max-model-len", server, FlagCatalog(), LENGTH, "2,400 requests", 80)
    assert " why 4096 now: set by you" in [strip.text.rstrip() for strip in lines]


async def test_a_reason_holds_only_while_its_value_stands(editor, wait_until):
    async with editor.run_test(size=(80, 24)) as pilot:
        await pilot.press("t")
        await wait_until(pilot, lambda: "95 % of requests are shorter" in editor.text())
        await pilot.press("enter", *"2048", "enter")
        await wait_until(pilot, lambda: "2048" in editor.text())
        assert "95 % of requests are shorter" not in editor.text()


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (None, "No traffic recorded yet."),
        (SeenWorkload(None, 7, 2.0, "7 requests ended in 2 minutes: at least 50 are needed to go by."), "at least 50"),
    ],
)
async def test_too_little_traffic_is_reported_and_stages_nothing(editor, fleet, wait_until, seen, words):
    fleet.workloads = {} if seen is None else {"chat": seen}
    async with editor.run_test(size=(120, 30)) as pilot:
        await pilot.press("t")
        await wait_until(pilot, lambda: words in editor.text())
        assert "nothing staged" in editor.text()


async def test_traffic_that_the_flags_fit_is_reported(editor, fleet, wait_until):
    fleet.suggestions = {}
    async with editor.run_test(size=(120, 30)) as pilot:
        await pilot.press("t")
        await wait_until(pilot, lambda: "Its flags fit its traffic." in editor.text())


async def test_an_error_is_one_sentence(editor, fleet, wait_until):
    def refuse(name, workload, room=None):
        raise OperationError("its record can't be read")

    fleet.suggest = refuse
    async with editor.run_test(size=(80, 24)) as pilot:
        await pilot.press("t")
        await wait_until(pilot, lambda: "its record can't be read" in editor.text())


async def test_from_the_operations_screen_the_same_key_opens_the_flags_with_them(fleet, wait_until):
    app = ConsoleApp(fleet, refresh=0.05)
    async with app.run_test(size=(120, 30)) as pilot:
        await wait_until(pilot, lambda: app.snapshot is not None)
        await pilot.press("t")
        await wait_until(pilot, lambda: isinstance(app.screen, FlagsScreen))
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: app.screen is app.operations)
        assert app.operations.staging.by_server["chat"] == STAGED


async def test_from_the_operations_screen_too_little_is_reported_there(fleet, wait_until):
    fleet.workloads = {}
    app = ConsoleApp(fleet, refresh=0.05)
    async with app.run_test(size=(120, 30)) as pilot:
        await wait_until(pilot, lambda: app.snapshot is not None)
        await pilot.press("t")
        await wait_until(pilot, lambda: app.message and "No traffic recorded yet" in app.message[0])
        assert app.screen is app.operations


def test_what_would_make_an_open_finding_worse_is_not_suggested(fakes, fleet):
    """Prompts are delaying the streams right now; longer steps would make that worse."""
    longer, more = (Choice(flag, 8192, "", Source.WORKLOAD) for flag in ("max-num-batched-tokens", "max-num-seqs"))
    fleet.suggestions = {"chat": (LENGTH, longer)}
    held_up = Finding("prefill_contention", Severity.WARNING, 0.0, "", "")
    server = replace(fakes.chat(fakes.NOW), findings=(held_up,))
    found = measured_traffic(fleet, server)
    assert [choice.flag for choice in found.choices] == ["max-model-len"]
    assert found.sentence.startswith("--max-num-batched-tokens stays: prefill contention. 2,400 requests")
    assert measured_traffic(fleet, replace(server, findings=())).choices == (LENGTH, longer)

    fleet.suggest = lambda name, seen, keep=(): (more,) if keep else (longer,)
    full = replace(server, findings=(held_up, Finding("preempting", Severity.WARNING, 0.0, "", "")))
    found = measured_traffic(fleet, full)
    assert found.choices == (), "nor what is only suggested because the other flag stays"
    assert found.sentence.startswith("Its other flags fit its traffic. --max-num-seqs stays: preempting. ")


def test_what_is_left_to_vllm_is_no_change(fleet):
    assert [choice.flag for choice in measured_traffic(fleet, fleet.snapshot().server("chat")).choices] == [
        "max-model-len",
        "enable-prefix-caching",
    ]
