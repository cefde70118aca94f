"""From a finding to its cure by one key: the line of findings, the verdict beside it, and all about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vllm_console.diagnosis.model import Condition, Remedy, Severity
from vllm_console.diagnosis.titles import title_of_code
from vllm_console.fleet.api import FleetError
from vllm_console.fleet.model import Changes
from vllm_console.ui.findings import SIGNS, findings_of, worst_sign
from vllm_console.ui.panes.finding import Told, finding_lines
from vllm_console.ui.theme import to_ascii
from vllm_launchers.plan.findings import Finding, Level

FP8, FEWER = Changes({"kv-cache-dtype": "fp8"}), Changes({"max-num-seqs": 128})


def shown(server, told=None, width=120, most=5, now=None, fakes=None):
    lines = finding_lines(server, told or Told(), now or fakes.NOW, width, most)
    assert all(strip.cell_length <= width for strip in lines)
    return "\n".join(strip.text.rstrip() for strip in lines)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
async def test_the_top_finding_stands_on_the_screen_with_its_key(console, fakes, size):
    async with console(fakes.pressed, fakes.coder, size=size) as c:
        await c.sees("✗ chat  preempting since ")
        assert "--kv-cache-dtype unset → fp8" in c.text
        assert "f stage cure" in c.text or "f cure" in c.text
        assert "Servers" in c.text


async def test_one_key_stages_the_cure_and_r_restarts_with_it(console, fakes):
    async with console(fakes.pressed, fakes.coder) as c:
        await c.press("f")
        await c.sees("staged  --kv-cache-dtype unset → fp8")
        assert "Half the bytes per token" in c.text
        assert "A little precision" in c.text
        await c.press("r", "y")
        await c.until(lambda: c.fleet.calls)
        assert c.fleet.calls == [("restart", "chat", FP8)]


async def test_the_plan_says_whether_the_cure_fits_and_what_becomes_of_the_cache(console, fakes):
    async with console(fakes.pressed) as c:
        await c.press("f")
        await c.sees("✓ fits by estimate; KV cache 123k → 246k tokens")
        assert c.fleet.planned == [("chat", Changes()), ("chat", FP8)]
        await c.press("f")
        await c.sees("✓ fits by estimate; KV cache stays at 123k tokens")
        assert c.fleet.planned[2:] == [("chat", FEWER)], "what runs now is planned once"


async def test_a_cure_that_would_not_start_says_so_beside_it(console, fakes):
    fleet = fakes.FakeFleet(fakes.pressed)
    fleet.findings_after = (Finding("kv_too_small", Level.ERROR, "not one request of the full length fits"),)
    async with console(fleet=fleet) as c:
        await c.press("f")
        await c.sees("✗ would not start: not one request of the full length fits")


async def test_what_is_found_of_the_server_as_it_runs_is_not_laid_to_the_change(console, fakes):
    fleet = fakes.FakeFleet(fakes.pressed)
    fleet.findings = (Finding("old", Level.WARNING, "an old warning"),)
    fleet.findings_after = (Finding("new", Level.WARNING, "fp8 needs an Ada GPU"),)
    async with console(fleet=fleet) as c:
        await c.press("f")
        await c.sees("! fits by estimate; KV cache 123k → 246k tokens; fp8 needs an Ada GPU")
        assert "an old warning" not in c.text


async def test_a_plan_that_cannot_be_made_says_why(console, fakes):
    fleet = fakes.FakeFleet(fakes.pressed)
    fleet.plan_error = FleetError("it cannot be restarted: its record does not say which engine ran it\nmore")
    async with console(fleet=fleet) as c:
        await c.press("f")
        await c.sees("✗ it cannot be restarted: its record does not say which engine ran it")
        assert c.app.operations.staged["chat"], "it stays staged"


async def test_memory_that_is_not_known_is_said_to_be_not_known(console, fakes):
    fleet = fakes.FakeFleet(fakes.pressed)
    fleet.memory = None
    async with console(fleet=fleet) as c:
        await c.press("f")
        await c.sees("– not known whether it fits")


async def test_what_is_staged_by_hand_gets_a_verdict_too(console, fakes):
    async with console(fakes.coder) as c:
        await c.press("v")
        await c.sees("staged: fits by estimate; KV cache")
        await c.press("escape")
        await c.until(lambda: "fits by estimate" not in c.text)


async def test_every_server_gets_its_own_verdict(console, fakes):
    async with console(fakes.pressed, fakes.coder) as c:
        await c.press("f", "j", "v")
        await c.sees("staged: fits by estimate")
        await c.press("k")
        await c.sees("fits by estimate; KV cache 123k → 246k tokens")


async def test_the_same_key_goes_to_the_next_cure_and_round(console, fakes):
    async with console(fakes.pressed) as c:
        await c.press("f")
        await c.sees("cure 1 of 2, f next")
        await c.press("f")
        await c.sees("staged  --max-num-seqs 256 → 128")
        assert c.app.operations.staged["chat"][0].flag == "max-num-seqs"
        assert len(c.app.operations.staged["chat"]) == 1, "one change at a time"
        await c.press("f")
        await c.sees("staged  --kv-cache-dtype unset → fp8")


async def test_a_cure_takes_the_place_of_what_was_staged_and_says_so(console, fakes):
    async with console(fakes.pressed) as c:
        await c.press("p", "f")
        await c.sees("Staged in place of what was staged before: Half the bytes")
        assert [step.flag for step in c.app.operations.staged["chat"]] == ["kv-cache-dtype"]


async def test_a_remedy_without_a_change_of_flags_is_advice(console, fakes):
    condition = Condition(
        "other_tenant", Severity.WARNING, fakes.NOW - 60, "Another process grows on GPU 0.", "It is anna's.",
        remedies=(Remedy(Changes(), "Ask anna (pid 77) to end it, or move the server."),),
    )  # fmt: skip
    async with console(lambda at: replace(fakes.chat(at), conditions=(condition,))) as c:
        await c.sees("! chat  other tenant since")
        await c.sees("Ask anna (pid 77) to end it, or move the server.")
        assert "f stage cure" not in c.text
        await c.press("f")
        await c.sees("Ask anna")
        assert c.app.operations.staged == {}


async def test_what_the_screen_names_is_what_the_key_stages_also_where_advice_comes_first(console, fakes):
    condition = Condition(
        "not_admitted", Severity.CRITICAL, fakes.NOW - 60, "9 requests wait and none runs.", "",
        remedies=(Remedy(Changes(), "Let it go on: POST /resume."), Remedy(FEWER, "Fewer fit.", "Others wait.")),
    )  # fmt: skip
    async with console(lambda at: replace(fakes.chat(at), conditions=(condition,))) as c:
        await c.sees("--max-num-seqs 256 → 128. Price: Others wait.")
        assert "POST /resume" not in c.text
        await c.press("f")
        await c.sees("staged  --max-num-seqs 256 → 128")


async def test_the_question_counts_those_that_wait_for_they_are_lost_too(console, fakes):
    view = fakes.pressed(fakes.NOW)
    assert view.window is not None
    for running, waiting, told in (
        (5, 103, "108 requests are open, 103 of them waiting; a restart ends them."),
        (0, 7, "7 requests wait; a restart ends them."),
        (0, 1, "1 request waits; it is ended."),
        (3, 0, "3 requests are running; a restart ends them."),
    ):
        window = replace(view.window, requests_running=running, requests_waiting=waiting)
        async with console(lambda at, window=window: replace(fakes.pressed(at), window=window)) as c:
            await c.press("r")
            await c.sees(told)
            assert c.fleet.calls == []


async def test_what_another_console_has_done_is_staged_no_more(console, fakes):
    state = {"flags": fakes.pressed(fakes.NOW).flags}
    async with console(lambda at: replace(fakes.pressed(at), flags=state["flags"])) as c:
        await c.press("f")
        await c.sees("staged  --kv-cache-dtype unset → fp8")
        state["flags"] = {**state["flags"], **FP8.set}
        await c.until(lambda: "staged  --kv-cache-dtype" not in c.text)
        assert c.app.operations.staged == {}


async def test_healthy_is_said_plainly_and_offers_nothing(console, fakes):
    async with console(fakes.calm) as c:
        await c.sees("✓ coder  healthy since ")
        assert "KV cache usage 24% (limit 85%)" in c.text
        assert "f stage cure" not in c.text
        await c.press("f")
        await c.sees("Nothing is found that coder would have to be cured of.")


async def test_a_failed_server_is_cured_by_the_same_two_keys(console, fakes):
    async with console(fakes.diagnosed) as c:
        await c.sees("✗ nightly  KV cache too small for max-model-len since")
        await c.press("f")
        await c.sees("--max-model-len 131072 → 40960")
        await c.press("r")
        await c.until(lambda: c.fleet.calls)
        assert c.fleet.calls == [("restart", "nightly", Changes({"max-model-len": 40960}))]


async def test_a_problem_of_another_server_is_marked_in_the_table(console, fakes):
    async with console(fakes.calm, fakes.pressed) as c:
        await c.sees(" ✗chat ")
        assert "▸ coder" in c.text
        await c.press("j")
        await c.sees("▸✗chat ")


async def test_a_problem_that_is_gone_leaves_the_screen(console, fakes):
    state = {"view": fakes.pressed}
    async with console(lambda at: state["view"](at)) as c:
        await c.sees("preempting")
        state["view"] = fakes.chat
        await c.until(lambda: "preempting" not in c.text)


async def test_read_only_shows_the_finding_and_stages_nothing(console, fakes):
    async with console(fakes.pressed, read_only=True) as c:
        await c.sees("✗ chat  preempting")
        assert "f stage cure" not in c.text
        await c.press("f")
        assert c.app.operations.staged == {}
        await c.press("i")
        await c.sees("Why · chat")
        await c.press("enter", "f")
        assert c.app.operations.staged == {}


async def test_somebody_elses_server_is_not_cured(console, fakes):
    async with console(lambda at: replace(fakes.observed(at), conditions=fakes.PRESSED)) as c:
        await c.sees("preempting")
        await c.press("f")
        await c.sees("belongs to anna")
        await c.press("i", "enter")
        assert c.app.operations.staged == {}


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_why_tells_figures_limits_and_their_source_causes_and_prices(console, fakes, size):
    async with console(fakes.pressed, size=size) as c:
        await c.press("i")
        await c.sees("Why · chat")
        for text in ("preempting", "critical", "requests preempted", "limit 2.0%", "objectives of preset chatbot",
                     "The KV cache is full", "Half the bytes per token", "Price: A little precision"):  # fmt: skip
            assert text in c.text, text
        await c.press("end")
        await c.sees("KV cache pressure")
        await c.press("escape")
        await c.sees("Servers")


async def test_why_stages_the_remedy_that_is_picked(console, fakes):
    async with console(fakes.pressed, size=(80, 24)) as c:
        await c.press("i")
        await c.sees("▸ --kv-cache-dtype unset → fp8")
        await c.press("j")
        await c.sees("▸ --max-num-seqs 256 → 128")
        await c.press("j", "j", "j", "k")
        await c.press("enter")
        await c.sees("staged  --max-num-seqs 256 → 128")


async def test_why_has_the_line_of_a_failures_log(console, fakes):
    async with console(fakes.diagnosed) as c:
        await c.press("i")
        await c.sees("line 143: ValueError: To serve at least one request")
        assert "May also play a part: free memory below utilization." in c.text


async def test_why_says_when_nothing_is_found(console, fakes):
    async with console(fakes.coder) as c:
        await c.press("i")
        await c.sees("Nothing is found so far")


def test_every_severity_has_a_sign_of_its_own_in_ascii_too():
    signs = [to_ascii(sign) for sign, _ in SIGNS.values()]
    assert all(sign.isascii() for sign in signs)
    assert len(set(signs)) == len(Severity)


def test_the_line_fits_any_width(fakes):
    hostile = replace(fakes.pressed(fakes.NOW), name="日本語モデル" * 6)
    for width in (20, 40, 79, 80, 119, 120, 200):
        for most in (1, 2, 5):
            for view in (hostile, fakes.calm(fakes.NOW), fakes.diagnosed(fakes.NOW)):
                assert shown(view, width=width, most=most, fakes=fakes).count("\n") < most


def test_what_a_log_says_is_not_taken_as_markup_or_escapes(fakes):
    view = fakes.diagnosed(fakes.NOW)
    assert view.diagnosis is not None
    view = replace(view, diagnosis=replace(view.diagnosis, explanation="[red]\x1b[2Jno[/red]"))
    assert "[red]no[/red]" in shown(view, fakes=fakes)


def test_a_finding_of_days_ago_says_how_long(fakes):
    old = replace(fakes.PRESSED[0], since=fakes.NOW - 3 * 86_400)
    assert "for 3d0h" in shown(replace(fakes.chat(fakes.NOW), conditions=(old,)), fakes=fakes)


def test_codes_are_written_as_people_write_them():
    assert title_of_code("kv_cache_pressure") == "KV cache pressure"
    assert title_of_code("gpu_memory_below_reserve") == "GPU memory below reserve"


def test_a_note_is_not_marked_and_a_stopped_server_has_no_findings(fakes):
    note = replace(fakes.PRESSED[0], severity=Severity.NOTE)
    assert worst_sign(replace(fakes.chat(fakes.NOW), conditions=(note,))) is None
    assert findings_of(replace(fakes.stopped(fakes.NOW), conditions=fakes.PRESSED)) == ()
