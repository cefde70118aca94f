"""The table and the panes as text: columns, values, and marks."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from rich.cells import cell_len
from textual.strip import Strip

from tools import generate_docs
from vllm_console.cli.servers import describe_server
from vllm_console.diagnosis.finding import Finding, Severity
from vllm_console.diagnosis.objectives import agreed
from vllm_console.fleet.snapshot import FleetSnapshot, StateThen
from vllm_console.logs.startup_facts import Stage
from vllm_console.metrics.quantile import text_of
from vllm_console.metrics.sample import EngineSample, Sample, Series, Speculation
from vllm_console.metrics.window import without_rates
from vllm_console.text import clock
from vllm_console.ui.actions import actions
from vllm_console.ui.panes.bars import Polling, header_line, message_lines, notices_of, staged_line
from vllm_console.ui.panes.kv_cache import kv_cache_lines
from vllm_console.ui.panes.latency import latency_lines, on_log_scale
from vllm_console.ui.panes.preemptions import preemption_lines
from vllm_console.ui.panes.servers import column_titles, columns_for, row, state_counts
from vllm_console.ui.panes.sparks import spark_lines
from vllm_console.ui.panes.state import state_lines
from vllm_console.ui.panes.throughput import throughput_lines
from vllm_console.ui.parts import staging
from vllm_console.ui.parts.footer_keys import FooterContext, footer_hints, tail_hints
from vllm_console.ui.parts.staged_plan import PlanVerdict
from vllm_console.ui.parts.time_cursor import ShownTime
from vllm_console.ui.screens.describe import describe_lines
from vllm_console.ui.screens.help import help_lines
from vllm_console.ui.theme import DIM, OK, PAST, WARN
from vllm_console.ui.widgets.chart import PLAIN, ChartView
from vllm_console.ui.widgets.draw import keys_line
from vllm_launchers.keeper.records import State
from vllm_launchers.vllm.flags.changes import Changes


def text(strips: object) -> str:
    strips = [strips] if isinstance(strips, Strip) else strips
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)


def row_text(server: object, now: float, width: int) -> str:
    return text(row(server, columns_for([server], width), now, width, False))


def titles(servers: object, width: int) -> list[str]:
    return [column.title for column in columns_for(servers, width)]


def test_columns_drop_from_the_right(fakes):
    servers = [maker(fakes.NOW) for maker in (*fakes.EVERY_STATE, fakes.asleep)]
    assert titles(servers, 80) == ["NAME", "OWNER", "STATE", "GPU", "PORT", "KV CACHE", "RUN", "WAIT", "PREEMPT/min"]
    assert titles(servers, 120)[:3] == ["NAME", "MODEL", "OWNER"]
    assert titles(servers, 120)[-1] == "ITL p99"
    assert titles(servers, 200)[-1] == "ENGINE"
    assert titles(servers, 40) == ["NAME", "OWNER", "STATE", "GPU"]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 160, 200, 300])
def test_no_table_line_is_wider_than_the_screen(fakes, width):
    servers = [replace(maker(fakes.NOW), name="模型" * 12) for maker in (*fakes.EVERY_STATE, fakes.asleep)]
    columns = columns_for(servers, width)
    for strip in [column_titles(columns), *(row(server, columns, fakes.NOW, width, True) for server in servers)]:
        assert strip.cell_length <= width


def test_wide_names_break_no_column(fakes):
    plain, wide = fakes.chat(fakes.NOW), replace(fakes.chat(fakes.NOW), name="日本😀")
    columns = columns_for([plain, wide], 120)
    ends = [row(server, columns, fakes.NOW, 120, False).cell_length for server in (plain, wide)]
    assert ends[0] == ends[1]


def test_row_marks_missed_objectives(fakes):
    shown = row_text(fakes.chat(fakes.NOW), fakes.NOW, 120)
    assert "99%!" in shown
    assert "17 !" in shown
    calm = row_text(fakes.coder(fakes.NOW), fakes.NOW, 120)
    assert "!" not in calm
    assert "coder sim" in calm


def test_marks_and_findings_agree(fakes):
    """For a single peak, "Healthy … 55 % (limit 85 %)" was once shown above a pane with 91 % in red."""
    chat = fakes.chat(fakes.NOW)
    calm = replace(chat.window, kv_cache_usage=0.91, kv_cache_usage_max=0.91, preemption_share=0.0, latencies={})
    peak = fakes.judged(replace(chat, window=calm, findings=()), held=0.55)
    assert "91%!" not in row_text(peak, fakes.NOW, 120)
    pane = text(kv_cache_lines(peak, fakes.NOW, 60, 12))
    assert "last minute: sustained 55% · now 91%" in pane
    assert "!" not in pane
    narrow = text(kv_cache_lines(peak, fakes.NOW, 38, 12))  # the width of the pane in a terminal with 120 columns
    assert " sustained 55% " in narrow
    earlier = replace(peak, moment=fakes.NOW)
    assert "minute to 12:41: sustained 55% · then 91%" in text(kv_cache_lines(earlier, fakes.NOW, 60, 12))
    assert " sustained 55% " in text(kv_cache_lines(earlier, fakes.NOW, 38, 12))
    dip = replace(calm, kv_cache_usage=0.5, kv_cache_usage_max=0.5)
    held = fakes.judged(replace(chat, window=dip, findings=()), held=0.91)
    shown = text(kv_cache_lines(held, fakes.NOW, 60, 12))
    assert "sustained 91% ! · now 50% ─" in shown, "the judged value has the mark"
    assert "sustained 91% ! ─" in text(kv_cache_lines(held, fakes.NOW, 38, 12))
    close = fakes.judged(replace(chat, window=dip, findings=()), held=0.5)
    assert "sustained 50% ─" in text(kv_cache_lines(close, fakes.NOW, 38, 12)), "the same format for all values"
    assert " now 50% ─" in text(kv_cache_lines(replace(close, judged=()), fakes.NOW, 38, 12)), "nothing is judged"
    good = Finding("healthy", Severity.GOOD, fakes.NOW - 600, "", "")
    (healthy,) = agreed((good,), peak.judged)
    assert healthy.measures[0].value == "55.0%"
    full = fakes.judged(replace(peak, window=calm), held=0.91)
    assert agreed((good,), full.judged) == (), "a missed objective is not healthy"
    assert "91%!" in row_text(full, fakes.NOW, 120)
    lasting = Finding("kv_cache_pressure", Severity.WARNING, fakes.NOW - 60, "", "")
    assert "91%!" not in row_text(replace(peak, findings=(lasting,)), fakes.NOW, 120), (
        "the sustained value is within its objective"
    )
    assert "91%!" in row_text(replace(peak, findings=(lasting,), judged=()), fakes.NOW, 120), "no figure tells"


def test_rows_say_why_there_are_no_numbers(fakes):
    now = fakes.NOW
    assert "weights 61% ━" in row_text(fakes.docs(now), now, 120)
    assert "ValueError: No available memory" in row_text(fakes.broken(now), now, 160)
    assert "/health has not answered" in row_text(fakes.hung(now), now, 120)
    assert "anna  " in row_text(fakes.observed(now), now, 120)
    assert "no metrics" in row_text(replace(fakes.chat(now), sample=None, window=None), now, 120)
    stale = replace(fakes.chat(now), sample=Sample(now - 70, {"0": EngineSample()}))
    assert "no new metrics for 1m10s" in row_text(stale, now, 120)
    waiting = replace(fakes.broken(now), attempt=2, next_attempt_at=now + 8, reason="exit code 1")
    assert "restarts in 8s: exit code 1" in row_text(waiting, now, 120)


def test_row_of_a_moment_before_ready_has_no_values(fakes):
    """The minute before a restart belongs to the previous run."""
    view = replace(fakes.chat(fakes.NOW), moment=fakes.NOW - 60, sample=None)
    for state in (State.STARTING, State.FAILED, State.STOPPED):
        shown = row_text(replace(view, then=StateThen(state, fakes.NOW - 60, 3)), fakes.NOW, 120)
        assert "not ready then" in shown
        assert "%" not in shown
    assert "99%" in row_text(replace(view, then=StateThen(State.READY, fakes.NOW - 600, 3)), fakes.NOW, 120)


def test_latency_title_has_its_window_at_any_width(fakes):
    chat = fakes.chat(fakes.NOW)
    exact = {name: replace(one, exact=True) for name, one in chat.window.latencies.items()}
    past = replace(chat, moment=fakes.NOW, window=replace(chat.window, latencies=exact))
    assert "minute to 12:41, exact ─" in text(latency_lines(past, fakes.NOW, 60, 20))
    assert "minute to 12:41 ─" in text(latency_lines(past, fakes.NOW, 38, 20))


def test_enlarge_key_is_not_shown_in_a_large_pane(fakes):
    server = fakes.chat(fakes.NOW)
    for height, words in ((11, "3 shows all"), (4, "more rows: 3 enlarges")):
        assert words in text(latency_lines(server, fakes.NOW, 60, height))
        assert words not in text(latency_lines(server, fakes.NOW, 60, height, ChartView(large=True)))


def test_missed_value_is_in_the_title_without_the_simulated_mark(fakes):
    server = fakes.coder(fakes.NOW)
    window = replace(server.window, preemptions_per_minute=1234.0, preemption_share=1.5)
    server = fakes.judged(replace(server, window=window))
    shown = text(preemption_lines(server, fakes.NOW, 38, 12))
    assert "1,234/min" in shown
    assert "sim" not in shown, "the header and the mark in the name say it"
    assert "1.5 ! per request" in shown, "above once per request it is not a percentage"


def test_load_is_shown_in_full_in_a_narrow_pane(fakes):
    sending = "load 49.3/s, 60 s left"
    server = replace(fakes.chat(fakes.NOW), load=sending)
    for width in (38, 80):
        lines = throughput_lines(server, fakes.NOW, width, 16)
        assert sending in text(lines)
        assert all(strip.cell_length <= width for strip in lines)
        assert len(lines) <= 16


def test_acceptance_length_is_shown_with_drafts(fakes):
    server = fakes.chat(fakes.NOW)
    drafted = replace(server, window=replace(server.window, speculation=Speculation(7.0, 1.4321, (0.3, 0.13))))
    assert "acceptance length 1.43" in text(throughput_lines(drafted, fakes.NOW, 80, 16))
    assert "acceptance" not in text(throughput_lines(server, fakes.NOW, 80, 16))
    charted = replace(drafted, series=Series(fakes.NOW, 10.0, {"acceptance_length": (1.4,) * 10}))
    assert "acceptance length of drafts" in text(throughput_lines(charted, fakes.NOW, 80, 16))
    line = "speculation acceptance length 1.43, accepted by position 30%, 13%"
    assert any(line in one for one in describe_server(drafted, fakes.NOW))


@pytest.mark.parametrize("lines", [throughput_lines, preemption_lines, kv_cache_lines, latency_lines])
def test_no_chart_line_has_the_warning_color(fakes, lines):
    for strip in lines(fakes.chat(fakes.NOW), fakes.NOW, 80, 30):
        drawn = [one.style for one in strip if any("\u2800" < character < "\u2900" for character in one.text)]
        assert not [style for style in drawn if style and style.color == WARN.color]


def test_unreported_is_a_dash(fakes):
    server = fakes.chat(fakes.NOW)
    server = replace(server, window=replace(server.window, preemptions_per_minute=None, kv_cache_usage=None,
                                            kv_cache_usage_max=None, kv_cache_tokens=None, latencies={}))  # fmt: skip
    assert row_text(server, fakes.NOW, 120).count("–") == 4
    assert "– of – tokens" in text(kv_cache_lines(server, fakes.NOW, 60, 12))
    assert "–/min" in text(preemption_lines(server, fakes.NOW, 60, 12))
    assert text(latency_lines(server, fakes.NOW, 60, 8)).count("–") == 24


def test_states_are_counted(fakes):
    servers = [maker(fakes.NOW) for maker in fakes.EVERY_STATE]
    assert state_counts(servers) == "3 ready · 1 starting · 1 unresponsive · 1 failed · 1 stopped"


def test_latencies_are_next_to_their_objectives(fakes):
    shown = text(latency_lines(fakes.chat(fakes.NOW), fakes.NOW, 60, 8)).splitlines()
    assert shown[2].split() == ["TTFT", "997ms", "767ms", "~1.2s", "~3.7s", "1.0s", "!"]
    assert shown[4].split() == ["queue", "150ms", "<300ms", "<300ms", "~558ms"], "the first bucket ends at 0.3 s"
    assert shown[7].split() == ["end-to-end", "5.1s", "~3.9s", "~6.3s", "19s"]


@pytest.mark.parametrize(("p99", "objective", "expected"), [(0.9, 1.0, False), (2.5, 1.0, True), (0.9, 5.0, True)])
def test_latency_has_a_log_scale_if_its_p50_would_be_on_the_axis(fakes, p99, objective, expected):
    server = fakes.chat(fakes.NOW)
    series = Series(end=fakes.NOW, step=5.0, values={"ttft_p50": (0.2,) * 20, "ttft_p99": (0.3,) * 19 + (p99,)})
    server = replace(server, series=series, objectives=replace(server.objectives, ttft_p99_seconds=objective))
    assert on_log_scale(server, "ttft", PLAIN) is expected
    assert on_log_scale(server, "ttft", ChartView(log=not expected)) is not expected, "as a person chose"


def test_wide_pane_has_the_quantiles_on_a_common_axis(fakes):
    rows = text(latency_lines(fakes.chat(fakes.NOW), fakes.NOW, 160, 30)).splitlines()
    assert "├ p50 ┼ p90 ┤ p99" in rows[1]
    drawn = {row.split()[0]: row for row in rows[2:8]}
    assert all(mark in drawn["end-to-end"] for mark in "├┼┤")
    assert "├" not in drawn["queue"], "a bound has no place"
    assert drawn["end-to-end"].index("├") > drawn["TTFT"].index("├")


def test_narrow_pane_omits_the_p90(fakes):
    shown = text(latency_lines(fakes.chat(fakes.NOW), fakes.NOW, 38, 12)).splitlines()
    assert shown[1].split() == ["mean", "p50", "p99", "obj."]
    assert shown[4].split()[0] == "e2e", "the other rows give way to a chart"
    assert all(len(line) <= 38 for line in shown)


def test_waiting_requests_are_reported_as_not_in_ttft(fakes):
    server = fakes.chat(fakes.NOW)
    waiting = replace(server, window=replace(server.window, requests_waiting=12, longest_wait=41.7))
    assert "12 queued, longest ≥ 41s: not in TTFT" in text(latency_lines(waiting, fakes.NOW, 60, 12))
    assert "12 waiting, longest ≥ 41s" in text(throughput_lines(waiting, fakes.NOW, 60, 12))
    one = replace(server, window=replace(server.window, requests_waiting=1, longest_wait=2.0))
    assert "1 queued, longest ≥ 2s" in text(latency_lines(one, fakes.NOW, 60, 12))
    none = replace(server, window=replace(server.window, requests_waiting=0, longest_wait=None))
    assert "queued" not in text(latency_lines(none, fakes.NOW, 60, 12))


@pytest.mark.parametrize("width", range(14, 90))
def test_no_figure_is_cut_in_its_middle(fakes, width):
    server = fakes.chat(fakes.NOW)
    window = replace(server.window, requests_running=17, requests_waiting=149, longest_wait=45.4)
    server = replace(server, window=window)
    for lines, height in ((kv_cache_lines, 9), (preemption_lines, 9), (latency_lines, 40), (throughput_lines, 9)):
        words = (" tokens · ", "per request", " queued", " out ", "running ·")
        wide = [strip.text for strip in lines(server, fakes.NOW, 200, height)]
        whole = [one for one in wide if any(word in one for word in words)]
        assert whole
        for strip in lines(server, fakes.NOW, width, height):
            shown = strip.text.rstrip().removesuffix("…")
            for full in (one for one in whole if shown.strip() and one.startswith(shown) and one != shown):
                assert cell_len(strip.text) <= width
                assert full[len(shown)] in " ,:", f"{shown!r} of {full!r}"


def test_clauses_that_do_not_fit_are_left_out_from_the_end(fakes):
    server = fakes.chat(fakes.NOW)
    server = replace(server, window=replace(server.window, requests_running=17, requests_waiting=149, longest_wait=45))
    shown = {
        width: [
            next(strip.text.strip() for strip in lines(server, fakes.NOW, width, 20) if word in strip.text)
            for lines, word in ((throughput_lines, "17 running"), (latency_lines, "149 queued"))
        ]
        for width in (60, 38, 30, 24)
    }
    assert shown == {
        60: ["17 running · 149 waiting, longest ≥ 45s", "149 queued, longest ≥ 45s: not in TTFT"],
        38: ["17 running · 149 waiting", "149 queued, longest ≥ 45s"],
        30: ["17 running · 149 waiting", "149 queued, longest ≥ 45s"],
        24: ["17 running", "149 queued"],
    }


@pytest.mark.parametrize("lines", [kv_cache_lines, preemption_lines, latency_lines, throughput_lines, state_lines])
@pytest.mark.parametrize("size", [(80, 14), (38, 9), (66, 28), (12, 3), (1, 1)])
def test_every_pane_keeps_its_height(fakes, lines, size):
    for maker in (*fakes.EVERY_STATE, fakes.asleep):
        server = replace(maker(fakes.NOW), series=fakes.series_at(fakes.NOW, 1.0))
        assert len(lines(server, fakes.NOW, *size)) <= size[1]


def test_silent_server_keeps_its_last_frame(fakes):
    chat = fakes.chat(fakes.NOW)
    series = replace(fakes.series_at(fakes.NOW - 7200, 1.0), as_of=fakes.NOW - 7200)
    ended = replace(chat, state=State.STOPPED, sample=None, window=None, series=series)
    shown = text(kv_cache_lines(ended, fakes.NOW, 60, 12))
    assert f"as of {clock(fakes.NOW - 7200, fakes.NOW)}" in shown
    assert "nothing recorded" not in shown
    assert "now" not in shown.splitlines()[-2]
    unread = text(kv_cache_lines(replace(ended, series=None), fakes.NOW, 60, 12))
    assert "loading" in unread


def test_empty_chart_says_what_it_waits_for(fakes):
    series = fakes.series_at(fakes.NOW, 1.0)
    nothing = replace(series, values={name: (None,) * len(values) for name, values in series.values.items()})
    for state, words in (
        (State.STARTING, "waiting for it to be ready"),
        (State.READY, "waiting for the first metrics"),
        (State.UNRESPONSIVE, "waiting for an answer"),
        (State.FAILED, "nothing recorded in this period"),
    ):
        server = replace(fakes.chat(fakes.NOW), state=state, sample=None, window=None, series=nothing)
        for lines in (kv_cache_lines, preemption_lines, latency_lines, throughput_lines):
            assert words in text(lines(server, fakes.NOW, 60, 12))
    quiet = {name: (None,) * len(values) for name, values in series.values.items() if "_p" in name}
    served = replace(fakes.chat(fakes.NOW), series=replace(series, values={**series.values, **quiet}))
    for size in ((60, 12), (120, 12), (60, 24)):
        shown = text(latency_lines(served, fakes.NOW, *size))
        assert "no chart points yet; figures: last minute" in shown, "the table has figures"
        assert "no requests in this period" not in shown
    assert "figures: the minute before" in text(latency_lines(replace(served, moment=fakes.NOW), fakes.NOW, 60, 12))
    idle = replace(served, window=replace(served.window, latencies={}))
    assert "no requests in this period" in text(latency_lines(idle, fakes.NOW, 60, 12))


def test_old_numbers_show_their_age(fakes):
    server = replace(fakes.chat(fakes.NOW), sample=Sample(fakes.NOW - 42, {"0": EngineSample()}))
    assert "42s old" in text(kv_cache_lines(server, fakes.NOW, 60, 12))


def test_stages_show_their_duration(fakes):
    shown = text(state_lines(fakes.docs(fakes.NOW), fakes.NOW, 80, 20))
    assert "✓ config              3.1s" in shown
    assert "● weights              30s" in shown
    assert "61%" in shown
    assert "total                34s" in shown
    assert "last downtime        41s" in shown
    assert "x remove" in text(state_lines(fakes.broken(fakes.NOW), fakes.NOW, 80, 20))
    assert Stage("weights", 0.0, detail="61%").share == 0.61
    assert Stage("weights", 0.0, detail="15.0 GiB").share is None
    assert Stage("weights", 0.0, detail="a %").share is None


def test_outside_escape_codes_do_not_reach_the_screen(fakes):
    evil = "\x1b]0;gotcha\x07\x1b[31m[bold]x"
    server = replace(fakes.broken(fakes.NOW), reason=evil, name=evil, preset=evil, notice=evil, model=evil)
    drawn = [
        row_text(server, fakes.NOW, 200),
        text(state_lines(server, fakes.NOW, 80, 20)),
        text(Strip.join(message_lines(None, server, None, 120))),
        text(describe_lines(server, fakes.NOW, 100)),
    ]
    for shown in drawn:
        assert "\x1b" not in shown
        assert "\x07" not in shown
        assert "[bold]x" in shown


def test_long_message_is_cut_and_names_the_key_that_shows_all(fakes):
    long, chat = "word " * 60, fakes.chat(fakes.NOW)
    for width in (40, 80, 120):
        (cut,) = message_lines((long, None), chat, None, width, 1)
        assert cut.cell_length <= width
        assert cut.text.endswith("m more")
        assert len(message_lines((long, None), chat, None, width, 2)) == 2
    (noticed,) = message_lines(None, replace(chat, notice=long), None, 80, 1)
    assert noticed.text.endswith("m more")
    machine = fakes.FakeFleet(fakes.chat).snapshot()
    (of_machine,) = message_lines(None, chat, replace(machine, notices=(long,)), 80, 1)
    assert of_machine.text.endswith("m more")


def test_header_shows_the_polling_state(fakes):
    snapshot = fakes.FakeFleet(*fakes.EVERY_STATE).snapshot()
    chat, simulated = fakes.chat(fakes.NOW), fakes.coder(fakes.NOW)
    shown = text(
        header_line(snapshot, Polling(1.0, hanging=12, read_only=True, demo=True), 120, ShownTime(), server=chat)
    )
    assert "gpubox · vLLM 0.33.0 cuda" in shown
    assert "simulated" not in shown
    assert "demo  read-only  data 12s old  15m · 12:41:07" in shown
    assert "paused  15m" in text(header_line(snapshot, Polling(1.0, paused=True), 80, ShownTime()))
    assert "live · 15m · 12:41:07" in text(header_line(snapshot, Polling(1.0), 80, ShownTime()))
    assert header_line(snapshot, Polling(1.0), 40, ShownTime()).cell_length <= 40
    for width in (60, 80, 120):
        assert (
            text(header_line(snapshot, Polling(1.0), width, ShownTime(), server=simulated)).count("simulated") == 1
        ), width
        for real in (chat, replace(chat, engine=None)):
            assert "simulated" not in text(header_line(snapshot, Polling(1.0), width, ShownTime(), server=real)), (
                "it is not selected"
            )


def test_endpoint_values_come_before_gpu_owner_and_port(fakes):
    chat = fakes.chat(fakes.NOW)
    elsewhere = replace(chat, name="h100-3/chat", remote="h100-3", ours=False, owner="alice")
    titles = [column.title for column in columns_for((chat, elsewhere), 80)]
    assert titles == ["NAME", "HOST", "STATE", "KV CACHE", "RUN", "WAIT", "PREEMPT/min", "TTFT p99"]
    assert {"GPU", "PORT"} <= {column.title for column in columns_for((chat,), 80)}
    assert "ITL p99" in [column.title for column in columns_for((chat, elsewhere), 120)]


def test_header_highlights_an_earlier_moment(fakes):
    snapshot = fakes.FakeFleet(*fakes.EVERY_STATE).snapshot()
    strip = header_line(snapshot, Polling(1.0), 80, ShownTime("1h", fakes.NOW - 3600))
    assert "at 11:41:07 · 1h00m ago · 1h  end live" in text(strip)
    assert any(style == PAST for _, style, _ in strip)
    yesterday = header_line(snapshot, Polling(1.0), 80, ShownTime("7d", fakes.NOW - 86_400, of_figures=False))
    assert "at Dec 31 12:41:07 · 1d0h ago · 7d · figures are current" in text(yesterday)


def test_staged_line_shows_changes_and_how_many_more(fakes):
    flags = fakes.chat(0).flags
    two = {"max-num-seqs": 128, "enable-prefix-caching": False}
    staged = {**two, "kv-cache-dtype": "fp8"}
    wide = text(staged_line(flags, staged, 200))
    assert "--max-num-seqs 256 → 128  --enable-prefix-caching on → off  --kv-cache-dtype unset → fp8" in wide
    narrow = staged_line(flags, staged, 80)
    assert narrow.cell_length <= 80
    assert text(narrow).startswith(" staged  seqs 128  prefix off  kv fp8")
    assert text(narrow).endswith("r restart")
    narrowest = staged_line(flags, staged, 40)
    assert narrowest.cell_length <= 40
    assert "seqs 128  +2" in text(narrowest)
    assert "--max-num-seqs 128  --enable-prefix-caching off" in text(staged_line(flags, two, 70))
    assert "[ ] seqs" in text(staged_line(flags, {}, 80))


def test_verdict_after_staged_changes_has_whole_clauses():
    staged = {"max-num-seqs": 14}
    verdict = PlanVerdict("fits (estimate); KV cache 19.3k → 20.1k tokens", OK)
    lines_drawn = [text(staged_line({"max-num-seqs": 32}, staged, width, fits=verdict)) for width in (80, 100)]
    assert "…" not in "".join(lines_drawn)
    assert "fits (estimate). " in lines_drawn[0]
    assert "20.1k tokens" not in lines_drawn[0]


@pytest.mark.parametrize("width", [20, 40, 80, 120])
def test_help_and_quit_are_always_in_the_footer(width):
    shown = keys_line(footer_hints(FooterContext()), width, tail_hints())
    assert shown.cell_length <= width
    assert "? help" in text(shown)
    assert "q quit" in text(shown)


def test_help_names_every_action_once():
    shown = text(help_lines(100, read_only=False))
    for action in actions():
        assert action.title[:60] in shown


def test_ids_and_keys_of_the_registry_are_unique():
    ids = [action.id for action in actions()]
    assert len(ids) == len(set(ids))
    for scope in {action.scope for action in actions()} - {"app"}:
        keys = [key for action in actions() if action.scope == scope for key in action.keys]
        assert len(keys) == len(set(keys)), scope


def test_documented_table_of_keys():
    lines = generate_docs.keys().splitlines()
    assert "| `s` | Stop the selected server, or the marked ones | `stop` |" in lines
    assert len([line for line in lines if line.startswith("| `")]) == len(actions())


def test_utilization_stays_in_bounds_and_knows_the_old_default(fakes):
    old = replace(fakes.VLLM, version="0.11.2")
    server = replace(fakes.chat(0), flags={}, engine=old)
    assert staging.TUNING_KEYS["raise_utilization"].step(server, {}).value == 0.92
    assert staging.TUNING_KEYS["raise_utilization"].step(fakes.chat(0), {}).value == 0.94
    assert staging.TUNING_KEYS["raise_utilization"].step(server, {"gpu-memory-utilization": 0.98}).value == 0.98
    assert staging.TUNING_KEYS["lower_utilization"].step(server, {"gpu-memory-utilization": 0.11}).value == 0.1


def test_changes_and_edits_convert_into_each_other():
    changes = Changes(set={"a": 1, "b": True}, unset=("c",))
    assert Changes.of(changes.edits) == changes
    assert staging.staged_flags({"a": 0, "c": 2, "d": 3}, changes.edits) == {"a": 1, "b": True, "d": 3}


def test_latencies_of_an_ended_load_are_dimmed(fakes):
    server = fakes.chat(fakes.NOW)
    ended = replace(
        server, window=without_rates(replace(server.window, requests_running=0.0, requests_waiting=0.0)), judged=()
    )
    shown = latency_lines(ended, fakes.NOW, 60, 8)
    assert "last minute · load ended" in text(shown[0])
    assert all(segment.style == DIM for segment in shown[4] if any(one.isdigit() for one in segment.text))
    assert "load ended" not in text(latency_lines(server, fakes.NOW, 60, 8))
    cells = row(ended, columns_for([ended], 120), fakes.NOW, 120, False)
    ttft = text_of(ended.window.latencies["ttft"].p99)
    assert next(segment.style for segment in cells if ttft in segment.text).dim


def test_rates_after_a_load_are_not_called_those_of_the_last_minute(fakes):
    server = fakes.chat(fakes.NOW)
    server = replace(server, window=replace(server.window, preemptions_per_minute=12.0))
    assert server.missed("preemption_rate"), "the finding stays open for a while"
    ended = replace(server, window=without_rates(replace(server.window, requests_running=0.0, requests_waiting=0.0)))
    for width in (40, 120):
        for draw in (throughput_lines, preemption_lines):
            assert "last min" in text(draw(server, fakes.NOW, width, 8)[0])
            title = text(draw(ended, fakes.NOW, width, 8)[0])
            assert "load ended" in title
            assert "last min" not in title
    (busy,), (calm,) = (spark_lines(one, ["preemptions"], 80) for one in (server, ended))
    assert "12/min !" in text(busy)
    assert "0/min" in text(calm)
    assert "!" not in text(calm)


@pytest.mark.parametrize(("maker", "sign"), [("stopped", ""), ("observed", "! ")])
def test_requested_stop_is_not_an_alarm(fakes, maker, sign):
    server = replace(getattr(fakes, maker)(fakes.NOW), reason="stopped as requested", notice="")
    ((text, style), *_) = notices_of(server, None)
    assert text == f"{sign}{server.name}: stopped as requested"
    assert (style is WARN) is bool(sign)


def test_notice_about_servers_of_ours_is_shown_before_that_of_a_foreign_one(fakes):
    lost = "The folder of aa was deleted while it ran"
    for maker, first in (("observed", lost), ("chat", "chat: adopted")):
        server = getattr(fakes, maker)(fakes.NOW)
        server = replace(server, reason="", notice="adopted" if server.ours else "read-only")
        snapshot = FleetSnapshot(fakes.NOW, "host", (server,), notices=(lost,))
        assert next(text for text, _ in notices_of(server, snapshot)) == first


def test_large_latency_pane_puts_charts_beside_the_table(fakes):
    chat = fakes.chat(fakes.NOW)
    shown = [strip.text for strip in latency_lines(chat, fakes.NOW, 80, 10)]
    assert len(shown) == 10
    assert all(len(row) <= 80 for row in shown)
    assert [any(f" {name} " in row for row in shown) for name in ("TTFT", "queue", "decode", "end-to-end")] == [
        True
    ] * 4
    assert shown[1].endswith("TTFT p50, p99")
    below = [strip.text for strip in latency_lines(chat, fakes.NOW, 80, 20)]
    assert any(row.startswith(" TTFT p50, p99") for row in below)
