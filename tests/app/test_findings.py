"""From a finding to its fix by one key: the line of findings, the verdict next to it, and its details."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace

from vllm_console.diagnosis.failure.diagnose import diagnose
from vllm_console.diagnosis.finding import Finding, Fix, Measure, Severity, title_of_code
from vllm_console.metrics.sample import Series
from vllm_console.ui.findings import SIGNS, findings_of, worst_sign
from vllm_console.ui.panes.finding import StagedState, finding_lines, measure_text
from vllm_console.ui.parts import staged_plan
from vllm_console.ui.parts.server_verbs import in_flight
from vllm_console.ui.parts.staged_plan import PlanVerdict
from vllm_console.ui.screens.findings import TWO_COLUMNS, FindingsScreen, findings_page
from vllm_console.ui.theme import DIM, to_ascii
from vllm_launchers.errors import OperationError
from vllm_launchers.plan import findings as plan_findings
from vllm_launchers.plan.findings import Level
from vllm_launchers.vllm.flags.changes import Changes

FP8, FEWER = Changes({"kv-cache-dtype": "fp8"}), Changes({"max-num-seqs": 128})


def unpredicted(_code, _fix):
    return ""


def shown(server, told=None, width=120, most=5, now=None, fakes=None):
    lines = finding_lines(server, told or StagedState(), now or fakes.NOW, width, most)
    assert all(strip.cell_length <= width for strip in lines)
    return "\n".join(strip.text.rstrip() for strip in lines)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
async def test_the_top_finding_stands_on_the_screen_with_its_key(console, fakes, size):
    async with console(fakes.pressed, fakes.coder, size=size) as c:
        await c.sees("✗ chat  preempting since ")
        await c.sees("--kv-cache-dtype unset → fp8")
        await c.until(lambda: "f stage fix" in c.text or "f fix" in c.text, "the key of the fix")
        await c.sees("Servers")


async def test_one_key_stages_the_fix_and_r_restarts_with_it(console, fakes):
    async with console(fakes.pressed, fakes.coder) as c:
        await c.press("f")
        await c.sees("staged  --kv-cache-dtype unset → fp8")
        await c.sees("Half the bytes per token")
        await c.sees("A little precision")
        await c.press("r", "y")
        await c.until(lambda: c.fleet.calls)
        assert c.fleet.calls == [("restart", "chat", FP8)]


async def test_the_plan_says_whether_the_fix_fits_and_what_becomes_of_the_cache(console, fakes):
    async with console(fakes.pressed) as c:
        await c.press("f")
        await c.sees("fits (estimate); KV cache 123k → about 246k tokens")
        assert c.fleet.planned == [("chat", Changes()), ("chat", FP8)]
        await c.press("f")
        await c.sees("fits (estimate); KV cache stays at about 123k tokens")
        assert c.fleet.planned[2:] == [("chat", FEWER)], "what runs now is planned once"


async def test_a_fix_that_would_not_start_reports_it_beside_it(console, fakes):
    fleet = fakes.FakeFleet(fakes.pressed)
    fleet.findings_after = (
        plan_findings.PlanFinding("kv_too_small", Level.ERROR, "not one request of the full length fits"),
    )
    async with console(fleet=fleet) as c:
        await c.press("f")
        await c.sees("will not start: not one request of the full length fits")


async def test_what_is_found_of_the_server_as_it_runs_is_not_laid_to_the_change(console, fakes):
    fleet = fakes.FakeFleet(fakes.pressed)
    fleet.findings = (plan_findings.PlanFinding("old", Level.WARNING, "an old warning"),)
    fleet.findings_after = (plan_findings.PlanFinding("new", Level.WARNING, "fp8 needs an Ada GPU"),)
    async with console(fleet=fleet) as c:
        await c.press("f")
        await c.sees("fits (estimate); KV cache 123k → about 246k tokens; fp8 needs an Ada GPU")
        await c.lacks("an old warning")


async def test_what_another_process_took_meanwhile_is_not_laid_to_the_change(console, fakes, monkeypatch):
    monkeypatch.setattr(staged_plan, "PLAN_SECONDS", 0.0)
    fleet = fakes.FakeFleet(fakes.pressed)
    async with console(fleet=fleet) as c:
        await c.press("f")
        await c.sees("fits (estimate)")
        taken = plan_findings.PlanFinding("memory_taken", Level.WARNING, "another process holds 30 GiB")
        fleet.findings = fleet.findings_after = (taken,)
        await c.press("f")
        await c.sees("fits (estimate); KV cache stays at about 123k tokens")
        await c.lacks("another process holds 30 GiB")


async def test_an_old_verdict_is_replaced(console, fakes):
    fleet = fakes.FakeFleet(fakes.pressed)
    async with console(fleet=fleet) as c:
        await c.press("f")
        await c.sees("fits (estimate)")
        fleet.findings_after = (plan_findings.PlanFinding("kv_too_small", Level.ERROR, "no request fits"),)
        c.app.operations.staged_plans.by_server["chat"].at -= staged_plan.AGAIN_SECONDS
        await c.sees("no request fits")


async def test_a_plan_that_cannot_be_made_says_why(console, fakes):
    fleet = fakes.FakeFleet(fakes.pressed)
    fleet.plan_error = OperationError("it can't be restarted: its record does not say which engine ran it\nmore")
    async with console(fleet=fleet) as c:
        await c.press("f")
        await c.sees("it can't be restarted: its record does not say which engine ran it")
        assert c.app.operations.staging.by_server["chat"], "it stays staged"


async def test_memory_that_is_not_known_is_reported_as_not_known(console, fakes):
    fleet = fakes.FakeFleet(fakes.pressed)
    fleet.memory = None
    async with console(fleet=fleet) as c:
        await c.press("f")
        await c.sees("unknown whether it fits")


async def test_what_is_staged_by_hand_gets_a_verdict_too(console, fakes):
    async with console(fakes.coder) as c:
        await c.press("v")
        await c.sees("staged: fits (estimate); KV cache")
        await c.press("escape")
        await c.until(lambda: "fits (estimate)" not in c.text)


async def test_every_server_gets_its_own_verdict(console, fakes):
    async with console(fakes.pressed, fakes.coder) as c:
        await c.press("f", "j", "v")
        await c.sees("staged: fits (estimate)")
        await c.press("k")
        await c.sees("fits (estimate); KV cache 123k → about 246k tokens")


async def test_the_same_key_goes_to_the_next_fix_and_round(console, fakes):
    async with console(fakes.pressed) as c:
        await c.press("f")
        await c.sees("fix 1/2, f next")
        await c.press("f")
        await c.sees("staged  --max-num-seqs 256 → 128")
        assert list(c.app.operations.staging.by_server["chat"]) == ["max-num-seqs"], "one change at a time"
        await c.press("f")
        await c.sees("staged  --kv-cache-dtype unset → fp8")


async def test_a_fix_takes_the_place_of_what_was_staged_and_reports_it(console, fakes):
    async with console(fakes.pressed) as c:
        await c.press("p", "f")
        await c.sees("Staged (replaces the earlier changes). r restarts.")
        assert list(c.app.operations.staging.by_server["chat"]) == ["kv-cache-dtype"]


async def test_a_remedy_without_a_change_of_flags_is_advice(console, fakes):
    finding = Finding(
        "other_tenant", Severity.WARNING, fakes.NOW - 60, "Another process grows on GPU 0.", "It is anna's.",
        fixes=(Fix(Changes(), "Ask anna (pid 77) to end it, or move the server."),),
    )  # fmt: skip
    async with console(lambda at: replace(fakes.chat(at), findings=(finding,))) as c:
        await c.sees("! chat  other tenant since")
        await c.sees("Ask anna (pid 77) to end it, or move the server.")
        await c.lacks("f stage fix")
        await c.press("f")
        await c.sees("Ask anna")
        assert c.app.operations.staging.by_server == {}


async def test_advice_to_start_a_second_server_has_its_key(console, fakes):
    why = "Start a second server on another GPU, or send fewer concurrent requests."
    finding = Finding(
        "oversubscribed_compute", Severity.WARNING, fakes.NOW - 60, "Slow.", "", (), (Fix(Changes(), why),)
    )
    async with console(lambda at: replace(fakes.chat(at), findings=(finding,))) as c:
        await c.sees("n new server")
        await c.press("f")
        await c.sees("n launches one.")


async def test_what_the_screen_names_is_what_the_key_stages_also_where_advice_comes_first(console, fakes):
    finding = Finding(
        "not_admitted", Severity.CRITICAL, fakes.NOW - 60, "9 requests wait and none runs.", "",
        fixes=(Fix(Changes(), "Let it go on: POST /resume."), Fix(FEWER, "Fewer fit.", "Others wait.")),
    )  # fmt: skip
    async with console(lambda at: replace(fakes.chat(at), findings=(finding,))) as c:
        await c.sees("--max-num-seqs 256 → 128. Trade-off: Others wait.")
        await c.lacks("POST /resume")
        await c.press("f")
        await c.sees("staged  --max-num-seqs 256 → 128")


async def test_the_question_counts_those_that_wait_for_they_are_lost_too(console, fakes):
    view = fakes.pressed(fakes.NOW)
    assert view.window is not None
    for running, waiting, told in (
        (5, 103, "108 requests in flight (103 queued) will be aborted."),
        (0, 7, "7 requests in flight (7 queued) will be aborted."),
        (0, 1, "1 request in flight (1 queued) will be aborted."),
        (3, 0, "3 requests in flight will be aborted."),
        (0, 0, "No request is in flight now"),
    ):
        window = replace(view.window, requests_running=running, requests_waiting=waiting)
        async with console(lambda at, window=window: replace(fakes.pressed(at), window=window)) as c:
            await c.press("r")
            await c.sees(told)
            assert c.fleet.calls == []


def test_the_question_names_the_load_of_this_console(fakes):
    window = replace(fakes.pressed(fakes.NOW).window, requests_running=62, requests_waiting=2)
    server = replace(fakes.pressed(fakes.NOW), window=window, load="load 6.9 req/s, 41s left")
    told = "64 requests in flight (2 queued) will be aborted, including this console's load."
    assert in_flight(server) == [told]


async def test_the_question_is_kept_up_to_date_while_it_is_open(console, fakes):
    """It once said that 8 requests would be aborted when there were already 45."""
    view = fakes.pressed(fakes.NOW)
    state = {"running": 8}

    def now(at):
        return replace(
            fakes.pressed(at), window=replace(view.window, requests_waiting=0, requests_running=state["running"])
        )

    async with console(now) as c:
        await c.press("r")
        await c.sees("8 requests in flight will be aborted.")
        state["running"] = 45
        await c.sees("45 requests in flight will be aborted.")
        await c.sees("No flag changes.")


async def test_a_restart_that_cannot_be_planned_asks_twice(console, fakes):
    async with console(fakes.pressed) as c:
        c.fleet.plan_error = OperationError("max-model-len 999999 is more than the model has")
        await c.press("left_square_bracket")
        await c.sees("max-model-len 999999 is more")
        await c.press("r")
        await c.sees("The plan has an error: nothing is restarted without another confirmation.")
        await c.lacks("will be aborted")
        await c.lacks("Expected downtime")


async def test_a_restart_that_would_certainly_fail_is_refused_without_a_question(console, fakes):
    async with console(fakes.pressed) as c:
        reason = "--max-num-seqs must be 1 or more"
        c.fleet.findings_after = (
            plan_findings.PlanFinding("flag_value", Level.ERROR, f"vLLM 0.33.0 will not start: {reason}"),
        )
        await c.press("left_square_bracket")
        await c.sees("will not start: --max-num-seqs must be 1 or more")
        await c.press("r")
        await c.sees("was not restarted: it will not start: --max-num-seqs must be 1 or more")
        await c.lacks("Restart chat?")
        assert c.fleet.calls == []


async def test_a_restart_asks_where_the_requests_in_flight_are_not_known(console, fakes):
    for window in (None, replace(fakes.pressed(fakes.NOW).window, requests_running=None)):
        async with console(lambda at, window=window: replace(fakes.pressed(at), window=window)) as c:
            await c.press("r")
            await c.sees("The number of requests in flight is unknown; all will be aborted.")
            assert c.fleet.calls == []


async def test_what_another_console_has_done_is_staged_no_more(console, fakes):
    state = {"flags": fakes.pressed(fakes.NOW).flags}
    async with console(lambda at: replace(fakes.pressed(at), flags=state["flags"])) as c:
        await c.press("f")
        await c.sees("staged  --kv-cache-dtype unset → fp8")
        state["flags"] = {**state["flags"], **FP8.set}
        await c.until(lambda: "staged  --kv-cache-dtype" not in c.text)
        assert c.app.operations.staging.by_server == {}


async def test_healthy_is_reported_plainly_and_offers_nothing(console, fakes):
    async with console(fakes.calm) as c:
        await c.sees("✓ coder  healthy since ")
        await c.sees("KV cache usage (sustained) 24% (limit 85%)")
        await c.lacks("f stage fix")
        await c.press("f")
        await c.sees("No problems found on coder.")


async def test_a_failed_server_is_fixed_by_the_same_two_keys(console, fakes):
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
        await c.sees("▸ coder")
        await c.press("j")
        await c.sees("▸✗chat ")


async def test_a_problem_that_is_gone_leaves_the_screen(console, fakes):
    state = {"view": fakes.pressed}
    async with console(lambda at: state["view"](at)) as c:
        await c.sees("preempting")
        state["view"] = fakes.chat
        await c.until(lambda: "preempting since" not in c.text)
        await c.sees("chat: finding ended: preempting.")


@pytest.mark.parametrize("change", [{"flags": {"max-num-seqs": 64}}, {"generation": 4}, {"preset": "batch"}])
async def test_a_fix_for_flags_that_are_no_longer_in_effect_is_not_staged(console, fakes, change):
    now = {}
    async with console(lambda at: replace(fakes.pressed(at), **now)) as c:
        await c.press("i")
        await c.sees("Findings · chat")
        now.update(change)
        name, value = next(iter(change.items()))
        await c.until(lambda: getattr(c.app.snapshot.server("chat"), name) == value)
        await c.press("enter")
        await c.sees("chat was restarted since: i shows its findings now.")
        assert c.app.operations.staging.by_server == {}
        await c.press("i", "enter")
        await c.sees("Staged.")


async def test_the_fix_of_a_server_that_is_gone_is_not_staged(console, fakes):
    async with console(fakes.pressed, fakes.coder) as c:
        await c.press("i")
        await c.sees("Findings · chat")
        del c.fleet.makers[0]
        await c.until(lambda: c.app.snapshot.server("chat") is None)
        await c.press("enter")
        await c.sees("chat is gone.")
        assert c.app.operations.staging.by_server == {}


async def test_a_fix_is_not_staged_for_one_node_of_several(console, fakes):
    async with console(lambda at: replace(fakes.pressed(at), node="node 1 of 2")) as c:
        await c.press("i")
        await c.sees("Findings · chat")
        await c.press("enter")
        await c.until(lambda: c.app.operations.on_top and c.app.message is not None)
        assert c.app.operations.staging.by_server == {}


async def test_read_only_shows_the_finding_and_stages_nothing(console, fakes):
    async with console(fakes.pressed, read_only=True) as c:
        await c.sees("✗ chat  preempting")
        await c.lacks("f stage fix")
        await c.press("f")
        assert c.app.operations.staging.by_server == {}
        await c.press("i")
        await c.sees("Findings · chat")
        await c.press("enter", "f")
        assert c.app.operations.staging.by_server == {}


async def test_no_fix_is_staged_for_another_users_server(console, fakes):
    async with console(lambda at: replace(fakes.observed(at), findings=fakes.PRESSED)) as c:
        await c.sees("preempting")
        await c.press("f")
        await c.sees("was started by anna outside this console")
        await c.press("i", "enter")
        assert c.app.operations.staging.by_server == {}


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_the_findings_show_figures_limits_and_their_source_causes_and_tradeoffs(console, fakes, size):
    async with console(fakes.pressed, size=size) as c:
        await c.press("i")
        await c.sees("Findings · chat")
        for text in ("preempting", "critical", "requests preempted", "2.0%", "objectives of preset chatbot",
                     "The KV cache is full", "Half the bytes per token", "Trade-off: A little precision"):  # fmt: skip
            await c.sees(text)
        await c.press("end")
        await c.sees("KV cache pressure")
        await c.press("escape")
        await c.sees("Servers")


def test_a_tradeoff_stands_below_the_reason_unless_there_are_wide_columns(fakes):
    for width in (80, 99):
        rows = page_text(
            findings_page(fakes.pressed(fakes.NOW), fakes.NOW, width, 0, unpredicted, stages=True)
        ).splitlines()
        assert all(row.startswith("     Trade-off:") for row in rows if "Trade-off:" in row), width
    wide = page_text(findings_page(fakes.pressed(fakes.NOW), fakes.NOW, 200, 0, unpredicted, stages=True))
    assert any(row.partition("Trade-off:")[0].strip(" │") for row in wide.splitlines() if "Trade-off:" in row)


def test_a_limit_joins_the_brackets_of_its_figure():
    assert measure_text(Measure("refused", "100% (61 of 61)", "5%", "")) == "refused 100% (61 of 61), limit 5%"
    assert measure_text(Measure("usage", "91%", "85%", "")) == "usage 91% (limit 85%)"


async def test_why_stages_the_remedy_that_is_picked(console, fakes):
    async with console(fakes.pressed, size=(80, 24)) as c:
        await c.press("i")
        await c.sees("▸ --kv-cache-dtype unset → fp8")
        await c.press("j")
        await c.sees("▸ --max-num-seqs 256 → 128")
        await c.press("j", "j", "j", "k")
        await c.press("enter")
        await c.sees("staged  --max-num-seqs 256 → 128")


def test_an_end_by_sigterm_from_outside_is_no_critical_failure(fakes):
    stopped = diagnose(["*** SIGTERM received at time=1795320211 on cpu 0 ***"], 0)
    (found,) = findings_of(replace(fakes.broken(fakes.NOW), diagnosis=stopped))
    assert (found.title, found.severity) == ("interrupted", Severity.WARNING)
    assert len(found.symptom) < 60, "it is read in a table's row"
    assert found.fixes[0].why.startswith("Start it again")


async def test_why_has_the_line_of_a_failures_log(console, fakes):
    async with console(fakes.diagnosed) as c:
        await c.press("i")
        await c.sees("line 143: ValueError: To serve at least one request")
        await c.sees("Possibly also: free memory below utilization.")


async def test_why_says_when_nothing_is_found(console, fakes):
    async with console(fakes.coder) as c:
        await c.press("i")
        await c.sees("No findings: not enough traffic yet")


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


def test_where_the_symptom_has_no_room_the_line_has_a_figure_with_its_limit(fakes):
    finding = replace(fakes.PRESSED[0], symptom="18 preemptions/min, 1.2 per running request, and rising.")
    server = replace(fakes.pressed(fakes.NOW), findings=(finding,))
    since = time.strftime("%H:%M", time.localtime(finding.since))
    assert "1.2 per running request" in shown(server, width=120, most=3, fakes=fakes)
    assert f"preempting since {since}: 7.2% (limit 2.0%)  " in shown(server, width=76, most=2, fakes=fakes)
    renamed = replace(server, name="chat-for-anna")
    assert "preempting: 7.2% (limit 2.0%)  " in shown(renamed, width=70, most=2, fakes=fakes), "before the time"


async def test_what_a_fix_costs_comes_first_where_there_is_one_line(console, fakes):
    async with console(fakes.pressed, size=(80, 24)) as c:
        await c.press("f")
        await c.sees("Staged. Trade-off: A little precision; check the answers. r restarts.")


async def test_a_full_cache_that_no_finding_reports_of_yet_is_reported(console, fakes):
    def full(at):
        server = fakes.chat(at)
        window = replace(server.window, kv_cache_usage=0.99, kv_cache_usage_max=0.99)
        return replace(server, window=window, findings=())

    async with console(full) as c:
        await c.sees("· chat  KV cache 99% (limit 85%): becomes a finding after 30s")
        await c.press("i")
        await c.sees("No findings yet. KV cache 99%")


def test_a_server_whose_cache_fills_up_is_not_called_healthy(fakes):
    calm = fakes.calm(fakes.NOW)
    window = replace(calm.window, kv_cache_usage=0.93, kv_cache_usage_max=0.93)
    assert "healthy" in shown(calm, fakes=fakes)
    text = shown(replace(calm, window=window), fakes=fakes)
    assert "healthy" not in text
    assert "KV cache 93% (limit" in text


def test_what_a_log_says_is_not_taken_as_markup_or_escapes(fakes):
    view = fakes.diagnosed(fakes.NOW)
    assert view.diagnosis is not None
    view = replace(view, diagnosis=replace(view.diagnosis, explanation="[red]\x1b[2Jno[/red]"))
    assert "[red]no[/red]" in shown(view, fakes=fakes)


def test_a_finding_of_days_ago_says_how_long(fakes):
    old = replace(fakes.PRESSED[0], since=fakes.NOW - 3 * 86_400)
    assert "for 3d0h" in shown(replace(fakes.chat(fakes.NOW), findings=(old,)), fakes=fakes)


def test_codes_are_written_as_people_write_them():
    assert title_of_code("kv_cache_pressure") == "KV cache pressure"
    assert title_of_code("oversubscribed_memory") == "KV cache is the bottleneck"
    assert title_of_code("slow_first_token") == "TTFT above objective"
    assert title_of_code("gpu_memory_below_reserve") == "GPU memory below reserve"


def test_a_note_is_not_marked_and_a_stopped_server_has_no_findings(fakes):
    note = replace(fakes.PRESSED[0], severity=Severity.NOTE)
    assert worst_sign(replace(fakes.chat(fakes.NOW), findings=(note,))) is None
    assert findings_of(replace(fakes.stopped(fakes.NOW), findings=fakes.PRESSED)) == ()


def page_text(page):
    return "\n".join(strip.text.rstrip() for strip in page.lines)


def test_a_wide_screen_lists_findings_beside_the_picked_one_with_its_chart(fakes):
    series = Series(end=fakes.NOW, step=5.0, values={"preemptions": (1.0,) * 180})
    server = replace(fakes.pressed(fakes.NOW), series=series)
    page = findings_page(server, fakes.NOW, 118, 0, unpredicted, stages=True)
    text = page_text(page)
    assert all(strip.cell_length <= 118 for strip in page.lines)
    assert all(title_of_code(found.code) in text for found in server.findings)
    assert "2 Preemptions" in text
    assert "MEASURED" in text
    last = findings_page(server, fakes.NOW, 118, len(page.items) - 1, unpredicted, stages=True)
    assert last.items[-1].finding == len(server.findings) - 1
    assert page_text(last) != text


def test_findings_without_a_fix_can_be_picked_on_a_wide_screen(fakes):
    server = fakes.pressed(fakes.NOW)
    items = findings_page(server, fakes.NOW, TWO_COLUMNS, 0, unpredicted).items
    assert [item.finding for item in items] == list(range(len(server.findings)))
    assert not any(item.fix for item in items), "nothing can be staged"
    assert not findings_page(server, fakes.NOW, 80, 0, unpredicted).items


def test_a_fix_has_its_predicted_effect(fakes):
    server = fakes.pressed(fakes.NOW)
    fix = findings_of(server)[0].flag_fixes[0]
    page = findings_page(
        server,
        fakes.NOW,
        118,
        0,
        stages=True,
        predicted=lambda _code, one: ("predicted: TTFT", DIM) if one == fix else "",
    )
    assert page_text(page).count("predicted: TTFT") == 1
    segments = [segment for strip in page.lines for segment in strip if "predicted: TTFT" in segment.text]
    assert [segment.style for segment in segments] == [DIM]


async def test_a_finding_picked_on_a_wide_screen_is_replaced_when_the_screen_becomes_narrow(console, fakes):
    healthy = replace(fakes.HEALTHY[0], fixes=())
    async with console(lambda at: replace(fakes.chat(at), findings=(*fakes.PRESSED, healthy)), size=(130, 40)) as c:
        await c.press("i")
        await c.until(lambda: isinstance(c.app.screen, FindingsScreen))
        last = findings_page(c.app.operations.selected, fakes.NOW, 130, 0, unpredicted, stages=True).items[-1]
        assert last.fix is None
        await c.press(*["down"] * 4)
        await c.pilot.resize_terminal(90, 40)
        await c.press("enter")
        await c.sees("staged  --max-num-seqs")


@pytest.mark.parametrize("width", [60, 70, 80, 90, 99])
def test_a_figure_within_its_limit_is_not_told_without_its_name(fakes, width):
    """A queue at max-num-seqs: the nearly empty KV cache says nothing about the queue."""
    usage = Measure("KV cache usage", "0%", "85%", "objectives of preset chatbot", within=True)
    waiting, running = Measure("waiting", "60"), Measure("running", "4", "4", "max-num-seqs")
    found = Finding(
        "oversubscribed_sequences", Severity.WARNING, fakes.NOW - 60, f"The queue grows: {'very ' * 30}long.", "Cause.",
        (waiting, running, usage), (Fix(Changes({"max-num-seqs": 16}), "More run.", "Slower streams."),),
    )  # fmt: skip
    server = replace(fakes.chat(fakes.NOW), findings=(found,), judged=())
    first = finding_lines(server, StagedState(), fakes.NOW, width, 2)[0].text
    assert "max-num-seqs is the bottleneck" in first
    assert ": 0%" not in first
    over = replace(found, measures=(waiting, running, replace(usage, value="97%", within=False)))
    told = finding_lines(replace(server, findings=(over,)), StagedState(), fakes.NOW, 70, 2)[0].text
    assert "97%" in told


@pytest.mark.parametrize(("rate", "running"), [("7/min", "62"), ("9/min", "1,024")])
@pytest.mark.parametrize("width", [60, 70, 80, 90, 99])
def test_a_figure_within_its_limit_does_not_stand_for_a_finding_that_has_another(fakes, width, rate, running):
    measures = (
        Measure("preemptions per request", "0.13", "0.05"), Measure("preemptions", rate, "10/min", within=True),
        Measure("running", running, "2,048", within=True),
    )  # fmt: skip
    found = Finding("preempting", Severity.CRITICAL, fakes.NOW - 60, f"It is {'very ' * 30}full.", "Cause.", measures)
    server = replace(fakes.chat(fakes.NOW), findings=(found,), judged=())
    first = finding_lines(server, StagedState(), fakes.NOW, width, 2)[0].text
    assert "preempting" in first
    assert rate not in first
    assert running not in first


TRADEOFF = "Output can differ slightly; it was measured here. Blocks become large, so only long ones are found."


@pytest.mark.parametrize(
    ("width", "most", "effect", "told"),
    [
        (120, 3, "", "--kv-cache-dtype unset → fp8. Trade-off: Output can differ slightly; it was measured here."),
        (110, 2, "", "--kv-cache-dtype unset → fp8. Trade-off: Output can differ slightly."),
        (80, 2, "", "--kv-cache-dtype unset → fp8. Trade-off: Output can differ slightly."),
        (80, 2, "predicted: TTFT p50 −31%", "--kv-cache-dtype unset → fp8, predicted: TTFT p50 −31%"),
        (60, 2, "", "--kv-cache-dtype unset → fp8"),
    ],
)  # fmt: skip
def test_where_there_is_little_room_a_trade_off_is_left_out_in_whole_clauses(fakes, width, most, effect, told):
    view = fakes.pressed(fakes.NOW)
    top = view.findings[0]
    fix = replace(top.fixes[0], tradeoff=TRADEOFF)
    server = replace(view, findings=(replace(top, fixes=(fix, *top.fixes[1:])), *view.findings[1:]))
    below = shown(server, StagedState(effect=effect), width, most, fakes=fakes).splitlines()[1:]
    text = " ".join(" ".join(row.partition("i findings")[0].split()) for row in below)
    assert text.startswith(told)
    assert "…" not in text
    if most == 2:
        assert text == told


def test_a_verdict_stands_without_the_trade_off_that_it_leaves_no_room_for(fakes):
    view = fakes.pressed(fakes.NOW)
    fix = view.findings[0].fixes[0]
    verdict = PlanVerdict("fits (estimate); KV cache 123k → 246k tokens; fp8 needs a newer GPU", DIM)
    told = StagedState(staged=fix.changes.edits, verdict=verdict)
    assert shown(view, told, 80, 2, fakes=fakes).splitlines()[1].strip() == f"staged: {verdict.message}"


@pytest.mark.parametrize(("size", "told"), [((120, 24), True), ((80, 40), True), ((120, 40), False)])
async def test_staging_a_fix_tells_the_trade_off_where_the_line_of_findings_may_not(console, fakes, size, told):
    async with console(fakes.pressed, size=size) as c:
        await c.press("f")
        await c.sees("Staged.")
        assert c.app.message is not None
        assert ("Trade-off: A little precision; check the answers." in c.app.message[0]) is told


async def test_a_fix_of_many_flags_is_told_whole_on_the_screen_of_findings(console, fakes):
    changes = Changes({"kv-cache-dtype": "fp8", "max-num-batched-tokens": 16384, "gpu-memory-utilization": 0.95})

    def pressed(at):
        view = fakes.pressed(at)
        return replace(view, findings=(replace(view.findings[0], fixes=(Fix(changes, "Why."),)),))

    async with console(pressed, size=(80, 40)) as c:
        await c.press("i")
        await c.sees("--kv-cache-dtype unset → fp8, ")
        await c.sees("→ 0.95")
