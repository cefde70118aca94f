"""The table of servers: its order, its columns, its marks."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace
from textual.events import MouseScrollDown, MouseScrollUp

from vllm_console.attached import Endpoint
from vllm_console.settings import Config
from vllm_console.ui.panes.finding import event_line
from vllm_console.ui.panes.kv_cache import kv_cache_lines
from vllm_console.ui.panes.latency import latency_lines
from vllm_console.ui.panes.preemptions import preemption_lines
from vllm_console.ui.panes.servers import (
    COLUMNS,
    Order,
    column_titles,
    columns_for,
    columns_of,
    ordered,
    row,
    state_counts,
)
from vllm_console.ui.panes.sparks import SPARKS, spark_lines
from vllm_console.ui.screens.describe import describe_facts
from vllm_launchers.keeper.records import State


def names(servers, order):
    return [server.name for server in ordered(servers, order)]


def test_unknown_figures_come_last_in_both_directions(fakes):
    servers = [maker(fakes.NOW) for maker in (fakes.docs, fakes.coder, fakes.chat, fakes.observed)]
    assert names(servers, Order("TOK/S", True)) == ["chat", "anna-8100", "coder", "docs"]
    assert names(servers, Order("TOK/S", False)) == ["coder", "anna-8100", "chat", "docs"]
    assert names(servers, Order()) == [server.name for server in servers]


def test_every_column_can_be_sorted_by(fakes):
    servers = [maker(fakes.NOW) for maker in fakes.EVERY_STATE]
    for column in columns_of(servers, 200):
        for descending in (False, True):
            assert sorted(names(servers, Order(column.title, descending))) == sorted(one.name for one in servers)


def test_choosing_a_column_again_reverses_it_and_then_ends_it():
    assert Order().after("TOK/S") == Order("TOK/S", True)
    assert Order("TOK/S", True).after("TOK/S") == Order("TOK/S", False)
    assert Order("TOK/S", False).after("TOK/S") == Order()
    assert Order().after("NAME") == Order("NAME", False)


def test_the_heading_shows_by_what_it_is_sorted(fakes):
    columns = columns_for([fakes.chat(fakes.NOW)], 120)
    assert "PREEMPT/min↓" in column_titles(columns, Order("PREEMPT/min", True)).text
    assert "STATE↑" in column_titles(columns, Order("STATE", False)).text
    assert column_titles(columns).cell_length == column_titles(columns, Order("STATE", False)).cell_length


def test_gpus_have_a_column_where_a_server_has_some(fakes):
    server = fakes.chat(fakes.NOW)
    assert "GPU" in [column.title for column in columns_for([server], 80)]
    columns = columns_for([replace(server, name="a-longer-name", gpus=()), fakes.observed(fakes.NOW)], 80)
    without = [column.title for column in columns_for([replace(server, gpus=())], 60)]
    assert "GPU" in [column.title for column in columns], "one has"
    assert "GPU" not in without
    assert {"KV CACHE", "RUN"} <= set(without), "figures take its room"


def test_an_owner_has_a_column_where_there_is_another_one(fakes):
    mine, theirs = fakes.chat(fakes.NOW), fakes.observed(fakes.NOW)
    assert "OWNER" not in [column.title for column in columns_for([mine], 120)]
    columns = columns_for([mine, theirs], 80)
    assert "OWNER" in [column.title for column in columns]
    assert " anna " in row(theirs, columns, fakes.NOW, 80, False).text
    assert " you " in row(mine, columns, fakes.NOW, 80, False).text


@pytest.mark.parametrize(("age", "shown"), [(59, "starting  59s"), (79, "starting   1m"), (7279, "starting   2h")])
def test_an_age_that_does_not_fit_is_given_in_its_largest_unit(fakes, age, shown):
    server = replace(fakes.docs(fakes.NOW), state=State.STARTING, state_since=fakes.NOW - age)
    assert shown in row(server, columns_for([server], 120), fakes.NOW, 120, False).text


def test_the_age_of_a_process_is_not_how_long_it_has_been_ready(fakes):
    server = replace(fakes.observed(fakes.NOW), state_since=fakes.NOW - 167, since_start=True)
    text = row(server, columns_for([server], 120), fakes.NOW, 120, False).text
    assert " ready " in text
    assert "2m" not in text
    assert describe_facts(server, fakes.NOW)["state"] == "ready, running for 2m47s"
    assert "ready, running since " in event_line(server, None, fakes.NOW, 120).text


def test_how_long_a_server_has_been_unresponsive_is_reported_before_the_reason(fakes):
    server = replace(
        fakes.chat(fakes.NOW), state=State.UNRESPONSIVE, state_since=fakes.NOW - 79, reason="no answer from /health"
    )
    assert "for 1m19s: no answer from /health" in row(server, columns_for([server], 120), fakes.NOW, 120, False).text


def test_why_an_endpoint_cannot_be_reached_is_reported_without_its_address_which_stands_beside_it(fakes):
    reason = "h:8000 could not be reached (No route to host): check host and port."
    far = replace(fakes.lost(fakes.NOW), host="h", port=8000, attached=Endpoint("http://h:8000"), reason=reason)
    text = row(far, columns_for([far], 118), fakes.NOW, 118, False).text
    assert "for 3s: could not be reached (No route to host)" in text


@pytest.mark.parametrize(("usage", "marked"), [(0.38, False), (0.97, True)])
def test_the_mark_of_a_finding_stands_only_at_a_usage_beyond_the_objective(fakes, usage, marked):
    server = fakes.pressed(fakes.NOW)
    server = replace(server, judged=(), window=replace(server.window, kv_cache_usage=usage))
    assert server.missed("kv_cache_usage"), "its finding is open"
    columns = [column for column in columns_for([server], 120) if column.title == "KV CACHE"]
    assert ("!" in row(server, columns, fakes.NOW, 120, False).text.removeprefix(" ✗")) is marked
    title = kv_cache_lines(server, fakes.NOW, 60, 10)[0].text
    assert ("!" in title) is marked


def test_no_mark_stands_where_there_is_no_figure(fakes):
    server = replace(fakes.pressed(fakes.NOW), judged=(), window=None)
    for lines in (preemption_lines(server, fakes.NOW, 60, 10), latency_lines(server, fakes.NOW, 60, 10)):
        assert "!" not in "".join(strip.text for strip in lines)
    assert "!" not in "".join(strip.text for strip in spark_lines(server, tuple(SPARKS), 80))


def test_of_a_server_that_cannot_be_asked_only_that_it_runs_is_reported(fakes):
    server = replace(
        fakes.observed(fakes.NOW),
        state=State.STARTING,
        contacted=False,
        reason="in a container",
        stages=(),
        window=None,
    )
    text = row(server, columns_for([server], 120), fakes.NOW, 120, False).text
    assert "running" in text
    assert "starting" not in text
    assert state_counts([server, fakes.chat(fakes.NOW)]) == "1 ready · 1 running"


@pytest.mark.parametrize(("width", "expected"), [(80, False), (117, False), (160, True)])
def test_models_have_a_column_on_wide_screens_only(fakes, width, expected):
    server = fakes.chat(fakes.NOW)
    columns = columns_for([server], width)
    assert ("MODEL" in [column.title for column in columns]) is expected
    assert ("Llama-3.1-8B" in row(server, columns, fakes.NOW, width, False).text) is expected


def test_a_name_that_is_its_presets_stands_once_on_a_narrow_screen(fakes):
    server = replace(fakes.chat(fakes.NOW), name="chatbot")
    assert row(server, columns_for([server], 80), fakes.NOW, 80, False).text.count("chatbot") == 1


def test_a_marked_server_has_a_star(fakes):
    server = fakes.chat(fakes.NOW)
    columns = columns_for([server], 80)
    assert row(server, columns, fakes.NOW, 80, False, marked=True).text.startswith("* chat")
    assert row(server, columns, fakes.NOW, 80, True, marked=True).text.startswith("▸ chat")


async def test_a_click_on_a_heading_sorts_and_the_cursor_stays(console, fakes):
    async with console(fakes.chat, fakes.coder, fakes.observed) as c:
        x = c.text.splitlines()[2].index("PORT")
        await c.pilot.click(offset=(x, 2))
        await c.pilot.click(offset=(x, 2))
        await c.sees("PORT↓")
        rows = [text.strip("│▸* ✗!").split()[0] for text in c.text.splitlines()[3:6]]
        assert rows == ["anna-8100", "coder", "chat"]
        assert c.app.operations.selected_name == "chat"


async def test_o_chooses_the_column(console, fakes):
    async with console(fakes.chat, fakes.coder, size=(80, 24)) as c:
        await c.press("o")
        await c.sees("Sort servers by which column?")
        await c.sees("3 more ↑↓")
        await c.press("down", "down", "enter")
        await c.sees("STATE↑")


async def test_clicks_move_mark_and_describe(console, fakes):
    async with console(fakes.chat, fakes.coder, fakes.docs) as c:
        await c.pilot.click(offset=(5, 4))
        await c.sees("▸ coder")
        await c.pilot.click(offset=(0, 5))
        await c.sees("1 marked")
        await c.pilot.click(offset=(5, 3), times=2)
        await c.sees("many short chats at once")


async def test_the_wheel_moves_through_the_table(console, fakes):
    async with console(fakes.chat, fakes.coder) as c:
        for event, server in ((MouseScrollDown, "coder"), (MouseScrollUp, "chat")):
            await c.pilot._post_mouse_events([event], widget=c.app.operations._table, offset=(5, 3))
            await c.sees(f"▸ {server}")


async def test_marked_servers_are_stopped_after_one_question_that_lists_them(console, fakes):
    async with console(fakes.chat, fakes.coder, fakes.stopped) as c:
        await c.press("asterisk", "j", "asterisk", "j", "asterisk")
        await c.sees("3 marked")
        await c.press("s")
        await c.sees("Stop 2 servers?")
        await c.sees("chat: ready; 70 requests in flight")
        await c.sees("old: stopped, left as it is")
        assert c.fleet.calls == []
        await c.press("y")
        await c.until(lambda: len(c.fleet.calls) == 2)
        assert sorted(c.fleet.calls) == [("stop", "chat"), ("stop", "coder")]
        await c.until(lambda: "marked" not in c.text)


async def test_marked_servers_are_restarted_each_with_what_is_staged_for_it(console, fakes):
    async with console(fakes.chat, fakes.coder) as c:
        await c.press("p", "asterisk", "j", "asterisk", "r")
        await c.sees("Restart 2 servers?")
        await c.sees("--enable-prefix-caching on → off")
        await c.press("y")
        await c.until(lambda: len(c.fleet.calls) == 2)
        by_name = {name: dict(changes.set) for _, name, changes in c.fleet.calls}
        assert by_name == {"chat": {"enable-prefix-caching": False}, "coder": {}}


async def test_the_question_about_marked_servers_warns_as_the_one_about_a_single_server(console, fakes):
    exposed = "anyone who can reach 0.0.0.0:8000 can use it without an API key"
    async with console(lambda at: replace(fakes.tuned(at), exposed=exposed), fakes.coder, size=(200, 40)) as c:
        await c.press("asterisk", "j", "asterisk", "r")
        await c.sees("Restart 2 servers?")
        await c.sees("! chat: ready; a tuner is running (trial 2 of 4:")
        await c.sees(f"; {exposed}")
        await c.press("n", "s")
        await c.sees("Stop 2 servers?")
        await c.sees("! chat: ready; a tuner is running")
        assert exposed not in c.text


async def test_a_marked_node_of_several_machines_is_not_restarted(console, fakes):
    async with console(lambda at: replace(fakes.chat(at), node="node 1 of 2"), fakes.coder) as c:
        await c.press("asterisk", "j", "asterisk", "r")
        await c.sees("Restart 1 server?")
        await c.sees("chat: ready, left as it is")
        await c.press("y")
        await c.until(lambda: c.fleet.calls)
        assert [name for _, name, _ in c.fleet.calls] == ["coder"]


async def test_anothers_server_is_not_marked(console, fakes):
    async with console(fakes.observed) as c:
        for mark in (c.press("asterisk"), c.pilot.click(offset=(0, 3))):
            await mark
            await c.sees("was started by anna outside this console")
            await c.lacks("marked")
            await c.press("escape")


def test_settings_know_every_column():
    schema = msgspec.json.schema(Config)["$defs"]["Config"]["properties"]
    assert set(schema["columns"]["items"]["enum"]) == set(COLUMNS)


def test_chosen_columns_stand_in_their_order_as_many_as_fit(fakes):
    servers = [fakes.chat(0), fakes.observed(0)]
    chosen = ("state", "model", "ttft", "owner")
    assert [one.title for one in columns_for(servers, 120, chosen)] == ["NAME", "STATE", "MODEL", "TTFT p99", "OWNER"]
    assert [one.title for one in columns_for(servers, 40, chosen)] == ["NAME", "STATE", "TTFT p99", "OWNER"]
    assert [one.title for one in columns_for(servers, 30, chosen)] == ["NAME", "STATE"]


def test_a_status_stands_in_the_first_metric_columns_and_leaves_the_others_alone(fakes):
    server = fakes.broken(fakes.NOW)
    columns = columns_for([server], 100, ("name", "kv", "state", "ttft"))
    shown = row(server, columns, fakes.NOW, 100, selected=False).text
    head = column_titles(columns, Order()).text
    assert shown[head.index("KV CACHE") :].startswith("Exited with")
    assert shown[head.index("STATE") :].startswith("failed")
