"""Keys do what the registry says: staging, verbs, moving about, refusing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vllm_console.fleet.api import FleetError
from vllm_console.fleet.model import Changes, State


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("left_square_bracket", {"max-num-seqs": 128}),
        ("left_square_bracket left_square_bracket", {"max-num-seqs": 64}),
        ("right_square_bracket", {"max-num-seqs": 512}),
        ("left_curly_bracket", {"max-model-len": 2048}),
        ("right_curly_bracket", {"max-model-len": 8192}),
        ("less_than_sign", {"gpu-memory-utilization": 0.9}),
        ("greater_than_sign greater_than_sign", {"gpu-memory-utilization": 0.96}),
        ("p", {"enable-prefix-caching": False}),
        ("P", {"enable-chunked-prefill": False}),
        ("v", {"kv-cache-dtype": "fp8"}),
        ("z", {"max-num-seqs": 512}),
        ("p v backspace", {"enable-prefix-caching": False}),
    ],
)
async def test_a_key_stages_a_change_and_r_restarts_with_it(console, keys, expected):
    async with console() as c:
        await c.press(*keys.split())
        await c.sees("staged")
        await c.press("r")
        await c.sees("Restart chat?")
        assert c.fleet.calls == []
        await c.press("y")
        await c.until(lambda: c.fleet.calls)
        assert c.fleet.calls == [("restart", "chat", Changes(set=expected))]
        await c.sees("restarts as generation 4")
        assert "staged" not in c.text


async def test_there_and_back_again_stages_nothing(console):
    async with console() as c:
        await c.press("left_square_bracket", "right_square_bracket", "p", "p", "v", "v", "P", "P")
        await c.sees("sequences")
        assert c.app.operations.staged == {}


async def test_a_flag_without_a_value_is_counted_from_vllms_default(console):
    async with console() as c:
        await c.press("j", "left_square_bracket")
        await c.sees("counted from vLLM's default of 256")
        await c.press("r", "y")
        await c.until(lambda: c.fleet.calls)
        assert c.fleet.calls == [("restart", "coder", Changes(set={"max-num-seqs": 128}))]


async def test_escape_drops_all_that_is_staged(console):
    async with console() as c:
        await c.press("p", "v", "escape")
        await c.sees("sequences")
        assert c.app.operations.staged == {}


async def test_each_server_keeps_its_own_staged_changes(console):
    async with console() as c:
        await c.press("p", "j")
        assert "staged" not in c.text
        await c.press("k")
        await c.sees("--enable-prefix-caching on → off")


async def test_a_restart_of_an_idle_server_does_not_ask(console, fakes):
    async with console(lambda at: replace(fakes.stopped(at), name="idle")) as c:
        await c.press("r")
        await c.until(lambda: c.fleet.calls)
        assert c.fleet.calls == [("restart", "idle", Changes())]


async def test_a_refusal_is_one_sentence_and_keeps_what_was_staged(console):
    async with console() as c:
        c.fleet.error = FleetError("port 8000 is taken by nginx (pid 7)\ndetails")
        await c.press("p", "r", "y")
        await c.sees("port 8000 is taken by nginx (pid 7)")
        assert "details" not in c.text
        assert c.app.operations.staged["chat"]


async def test_an_unforeseen_error_is_said_and_the_console_lives(console):
    async with console() as c:
        c.fleet.error = ZeroDivisionError("[/b] division")
        await c.press("s", "y")
        await c.sees("That went wrong: [/b] division")
        await c.press("j")
        assert c.app.operations.selected_name == "coder"


async def test_stop_asks_first_and_n_leaves_it(console):
    async with console() as c:
        await c.press("s", "n")
        await c.press("s")
        await c.sees("Stop chat?")
        assert c.fleet.calls == []
        await c.press("y")
        await c.until(lambda: c.fleet.calls)
        assert c.fleet.calls == [("stop", "chat")]


async def test_switch_picks_a_preset_and_confirms(console):
    async with console() as c:
        await c.press("w")
        await c.sees("Completions, latency first")
        await c.press("j", "enter")
        await c.sees("Switch chat to code-generation?")
        await c.press("y")
        await c.until(lambda: c.fleet.calls)
        assert c.fleet.calls == [("switch", "chat", "code-generation")]


async def test_only_what_is_down_is_forgotten(console, fakes):
    async with console(fakes.chat, fakes.broken) as c:
        await c.press("x")
        await c.sees("s stops it")
        await c.press("j", "x", "y")
        await c.until(lambda: c.fleet.calls)
        assert c.fleet.calls == [("forget", "nightly")]


async def test_load_goes_on_and_off(console, fakes):
    busy = {"load": ""}
    async with console(lambda at: replace(fakes.chat(at), load=busy["load"])) as c:
        await c.press("b")
        await c.until(lambda: c.fleet.calls)
        busy["load"] = "4 requests/s, 58 s left"
        await c.sees("4 requests/s, 58 s left")
        await c.press("b")
        await c.until(lambda: len(c.fleet.calls) == 2)
        assert c.fleet.calls == [("start_load", "chat"), ("stop_load", "chat")]


async def test_what_belongs_to_someone_else_is_never_touched(console, fakes):
    async with console(fakes.observed) as c:
        for key in ("r", "s", "x", "w", "b", "p", "e", "z"):
            await c.press(key)
        await c.sees("belongs to anna")
        assert c.fleet.calls == []
        assert c.app.operations.staged == {}


async def test_read_only_refuses_every_change_and_hides_the_keys(console):
    async with console(read_only=True) as c:
        for key in ("n", "e", "r", "s", "w", "x", "b", "p", "P", "v", "z", "left_square_bracket", "backspace"):
            await c.press(key)
        assert c.app.screen is c.app.operations
        assert c.fleet.calls == []
        assert c.app.operations.staged == {}
        footer = c.text.splitlines()[-1]
        assert "restart" not in footer
        assert "describe" in footer
        assert "read-only" in c.text
        await c.press("question_mark")
        await c.sees("Help")
        assert "Stop the selected server" not in c.text


async def test_the_filter_narrows_the_table_and_escape_ends_it(console):
    async with console() as c:
        await c.press("slash", "b", "a", "t", "c", "h", "enter")
        await c.sees("Servers with “batch”")
        assert "nightly" in c.text
        assert "coder" not in c.text
        assert c.app.operations.selected_name == "nightly"
        await c.press("escape")
        await c.sees("coder")


async def test_the_cursor_stays_on_its_server_when_the_list_changes(console, fakes):
    async with console(fakes.chat, fakes.coder, fakes.docs) as c:
        await c.press("j")
        c.fleet.makers = [fakes.broken, fakes.chat, fakes.observed, fakes.coder]
        await c.sees("anna")
        assert c.app.operations.selected_name == "coder"
        c.fleet.makers = [fakes.broken, fakes.chat]
        await c.until(lambda: c.app.operations.selected_name == "chat", "the cursor on a server that is there")
        c.fleet.makers = []
        await c.sees("No server is running")


async def test_more_servers_than_rows_scroll_with_the_cursor(console, fakes):
    servers = [lambda at, i=i: replace(fakes.coder(at), name=f"s{i:02}", port=9000 + i) for i in range(30)]
    async with console(*servers, size=(80, 24)) as c:
        assert "s29" not in c.text
        await c.press("end")
        await c.sees("▸ s29")
        assert "more ↑↓" in c.text
        await c.press("home")
        await c.sees("▸ s00")


async def test_y_copies_the_command_line(console):
    async with console() as c:
        await c.press("y")
        await c.sees("Copied the command line of chat")
        assert c.app.clipboard.startswith("/opt/vllm/bin/vllm serve meta-llama")


async def test_number_keys_and_tab_choose_a_pane(console):
    async with console(size=(80, 24)) as c:
        await c.sees("1 KV cache")
        await c.press("3")
        await c.sees("3 Latency")
        assert "1 KV cache" not in c.text
        await c.press("tab")
        await c.sees("4 Requests")
        await c.press("shift+tab", "shift+tab")
        await c.sees("2 Preemptions")


async def test_a_pane_alone_and_all_again(console):
    async with console() as c:
        await c.press("2")
        await c.until(lambda: "1 KV cache" not in c.text)
        assert "2 Preemptions" in c.text
        await c.press("2")
        await c.sees("1 KV cache")


async def test_stages_take_the_place_of_panes_while_a_server_starts(console, fakes):
    state = {"view": fakes.chat}
    async with console(lambda at: state["view"](at)) as c:
        await c.sees("1 KV cache")
        state["view"] = lambda at: replace(fakes.docs(at), name="chat")
        await c.sees("Start-up of chat")
        assert "1 KV cache" not in c.text
        assert "5 Log" in c.text
        state["view"] = fakes.chat
        await c.sees("1 KV cache")
        await c.sees("chat is ready; it was away for 41.2 s.")


async def test_describe_shows_flags_with_their_reasons(console):
    async with console() as c:
        await c.press("enter")
        await c.sees("many short chats at once")
        await c.sees("--max-num-seqs  512 → 256")
        await c.press("escape")
        await c.sees("Servers")


async def test_the_palette_runs_actions_of_the_registry(console):
    async with console() as c:
        await c.press("colon")
        await c.until(lambda: c.app.screen is not c.app.operations)
        await c.press(*"prefix")
        await c.sees("Prefix caching on or off")
        await c.until(lambda: c.text.count("off  (p)") == 1)
        await c.press("enter")
        await c.sees("--enable-prefix-caching on → off")


async def test_quitting_says_what_still_runs(console):
    async with console() as c:
        assert c.app.farewell() == "4 servers still running: chat, coder, docs, vision"
    async with console(demo=True) as c:
        assert c.app.farewell() == ""


def test_the_states_that_the_fake_fleet_shows_are_all_there_are_but_stopping(fakes):
    assert {maker(fakes.NOW).state for maker in fakes.EVERY_STATE} == set(State) - {State.STOPPING}
