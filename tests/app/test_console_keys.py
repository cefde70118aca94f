"""Keys do what the registry says: staging, server actions, navigation, refusals."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from vllm_console.fleet.snapshot import SleepView
from vllm_launchers.errors import OperationError
from vllm_launchers.keeper.records import SleepStep, State
from vllm_launchers.vllm.flags.changes import Changes


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
        await c.sees("is restarting as run 4")
        await c.lacks("staged")


async def test_a_key_stages_no_fp8_cache_where_vllm_refuses_it(console, fakes):
    problem = "on NVIDIA RTX A6000 vLLM's Triton attention backend refuses it"

    def chat(at):
        return replace(fakes.chat(at), fp8_cache_problem=problem)

    async with console(chat) as c:
        await c.press("v")
        await c.sees("FP8 KV cache not staged")
        assert c.app.operations.staging.by_server == {}


async def test_there_and_back_again_stages_nothing(console):
    async with console() as c:
        await c.press("left_square_bracket", "right_square_bracket", "p", "p", "v", "v", "P", "P")
        await c.sees("sequences")
        assert c.app.operations.staging.by_server == {}


async def test_a_flag_without_a_value_is_counted_from_vllms_default(console):
    async with console() as c:
        await c.press("j", "left_square_bracket")
        await c.sees("starting from vLLM's default of 256")
        await c.press("r", "y")
        await c.until(lambda: c.fleet.calls)
        assert c.fleet.calls == [("restart", "coder", Changes(set={"max-num-seqs": 128}))]


async def test_escape_drops_one_staged_change_and_asks_before_it_drops_several(console):
    async with console() as c:
        await c.press("p", "escape")
        await c.until(lambda: c.app.operations.staging.by_server == {})
        await c.press("p", "v", "escape")
        await c.sees("Drop 2 staged changes of chat?")
        await c.press("escape")
        await c.sees("--enable-prefix-caching off")
        assert len(c.app.operations.staging.of("chat")) == 2
        await c.press("escape", "y")
        await c.until(lambda: c.app.operations.staging.by_server == {})


async def test_a_revert_keeps_other_staged_changes(console):
    async with console() as c:
        await c.press("p", "z")
        await c.sees("in addition to 1 other change")
        flags = list(c.app.operations.staging.of("chat"))
        assert flags[0] == "enable-prefix-caching"
        assert len(flags) > 1


async def test_each_server_keeps_its_own_staged_changes(console):
    async with console() as c:
        await c.press("p", "j")
        await c.lacks("staged")
        await c.press("k")
        await c.sees("--enable-prefix-caching on → off")


async def test_a_restart_of_an_idle_server_does_not_ask(console, fakes):
    async with console(lambda at: replace(fakes.stopped(at), name="idle")) as c:
        await c.press("r")
        await c.until(lambda: c.fleet.calls)
        assert c.fleet.calls == [("restart", "idle", Changes())]


async def test_a_refusal_is_one_sentence_and_keeps_what_was_staged(console):
    async with console() as c:
        c.fleet.error = OperationError("port 8000 is taken by nginx (pid 7)\ndetails")
        await c.press("p", "r", "y")
        await c.sees("port 8000 is taken by nginx (pid 7)")
        await c.lacks("details")
        assert c.app.operations.staging.by_server["chat"]


async def test_an_unforeseen_error_is_reported_and_the_console_lives(console):
    async with console() as c:
        c.fleet.error = ZeroDivisionError("[/b] division")
        await c.press("s", "y")
        await c.sees("Unexpected error: [/b] division")
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
        await c.press("enter")
        await c.sees("Switch chat to code-generation?")
        await c.press("y")
        await c.until(lambda: c.fleet.calls)
        assert c.fleet.calls == [("switch", "chat", "code-generation")]


@pytest.mark.parametrize("presses", [("W",), ("j", "W")], ids=["on the one that serves", "on the one that sleeps"])
async def test_one_key_switches_a_standby_pair(console, fakes, presses):
    async with console(fakes.sleeper, fakes.asleep) as c:
        await c.sees("level 1, about 15.3 GiB of weights in host memory")
        await c.press(*presses)
        await c.sees("Wake up asleep?")
        await c.sees("sleeper goes to sleep first.")
        await c.press("y")
        await c.until(lambda: c.fleet.calls)
        assert c.fleet.calls == [("wake", "asleep")]


@pytest.mark.parametrize(
    ("checked", "message", "shown"),
    [
        (4, "", "asleep is awake and answers as before."),
        (0, "no golden answers were recorded to compare with", "asleep is awake; no golden answers were recorded"),
    ],
)
async def test_answers_as_before_is_said_only_if_they_were_compared(console, fakes, checked, message, shown):
    class Fleet(fakes.FakeFleet):
        def wake(self, name, **options):
            sleep = SleepView(SleepStep.AWAKE, 1, fakes.NOW, message, checked=checked)
            return replace(super().wake(name, **options), state=State.READY, sleep=sleep)

    async with console(fleet=Fleet(fakes.asleep)) as c:
        await c.press("W")
        await c.sees("Wake up asleep?")
        await c.press("y")
        await c.sees(shown)


async def test_a_server_without_a_partner_is_put_to_sleep(console, fakes):
    async with console(fakes.sleeper) as c:
        await c.press("W")
        await c.sees("Put sleeper to sleep?")
        await c.press("y")
        await c.until(lambda: c.fleet.calls)
        assert c.fleet.calls == [("sleep", "sleeper")]


async def test_a_server_that_cannot_sleep_says_how_it_could(console):
    async with console() as c:
        await c.press("W")
        await c.sees("chat can't sleep: set --enable-sleep-mode (e), then restart (r).")
        assert c.fleet.calls == []


async def test_only_what_is_down_is_forgotten(console, fakes):
    async with console(fakes.chat, fakes.broken) as c:
        await c.press("x")
        await c.sees("stop it first (s)")
        await c.press("j", "x", "y")
        await c.until(lambda: c.fleet.calls)
        assert c.fleet.calls == [("forget", "nightly")]


async def test_a_flag_about_the_gpus_memory_is_not_staged_for_a_cpu_build(console, fakes):
    def on_cpu(at):
        server = fakes.chat(at)
        return replace(server, engine=replace(server.engine, build="cpu"))

    async with console(on_cpu) as c:
        await c.press("greater_than_sign")
        await c.sees("VLLM_CPU_KVCACHE_SPACE sizes the KV cache")
        assert c.app.operations.staging.by_server == {}


async def test_load_goes_on_and_off(console, fakes):
    busy = {"load": ""}
    idle = replace(fakes.chat(fakes.NOW).window, requests_running=0, requests_waiting=0, requests_per_second=0)
    async with console(lambda at: replace(fakes.chat(at), load=busy["load"], window=idle)) as c:
        await c.press("b")
        await c.until(lambda: c.fleet.calls)
        busy["load"] = "4 requests/s, 58 s left"
        await c.sees("4 requests/s, 58 s left")
        await c.press("b")
        await c.until(lambda: len(c.fleet.calls) == 2)
        assert c.fleet.calls == [("start_load", "chat"), ("stop_load", "chat")]


async def test_a_load_on_a_server_that_others_use_is_sent_after_a_yes(console, fakes):
    async with console(fakes.chat) as c:
        await c.press("b")
        await c.sees("70 requests are in flight on chat. Send a load anyway?")
        await c.press("n")
        await c.lacks("Send a load anyway?")
        assert c.fleet.calls == []
        await c.press("b", "y")
        await c.until(lambda: c.fleet.calls == [("start_load", "chat")])


async def test_a_load_is_asked_about_where_others_sent_requests_in_the_last_minute(console, fakes):
    window = replace(fakes.chat(fakes.NOW).window, requests_running=0, requests_waiting=0, requests_per_second=2.0)
    async with console(lambda at: replace(fakes.chat(at), window=window)) as c:
        await c.press("b")
        await c.sees("chat served 2.0 req/s in the last minute. Send a load anyway?")
        await c.press("n")
        await c.lacks("Send a load anyway?")
        assert c.fleet.calls == []


async def test_what_belongs_to_someone_else_is_never_touched(console, fakes):
    async with console(fakes.observed) as c:
        for key in ("r", "s", "x", "w", "b", "p", "e", "z"):
            await c.press(key)
        await c.sees("was started by anna outside this console")
        assert c.fleet.calls == []
        assert c.app.operations.staging.by_server == {}


async def test_read_only_refuses_every_change_and_hides_the_keys(console):
    async with console(read_only=True) as c:
        for key in ("n", "e", "r", "s", "w", "x", "b", "p", "P", "v", "z", "left_square_bracket", "backspace"):
            await c.press(key)
        assert c.app.screen is c.app.operations
        assert c.fleet.calls == []
        assert c.app.operations.staging.by_server == {}
        footer = c.text.splitlines()[-1]
        assert "restart" not in footer
        assert "describe" in footer
        await c.sees("read-only")
        await c.press("question_mark")
        await c.sees("Help")
        await c.lacks("Stop the selected server")


async def test_the_filter_narrows_the_table_and_escape_ends_it(console):
    async with console() as c:
        await c.press("slash", "b", "a", "t", "c", "h", "enter")
        await c.sees("Servers matching 'batch'")
        await c.sees("nightly")
        await c.lacks("coder")
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
        await c.sees("No servers running")


async def test_more_servers_than_rows_scroll_with_the_cursor(console, fakes):
    servers = [lambda at, i=i: replace(fakes.coder(at), name=f"s{i:02}", port=9000 + i) for i in range(30)]
    async with console(*servers, size=(80, 24)) as c:
        await c.lacks("s29")
        await c.press("G")
        await c.sees("▸ s29")
        await c.sees("more ↑↓")
        await c.press("g")
        await c.sees("▸ s00")


async def test_y_copies_the_command_line(console):
    async with console() as c:
        await c.press("y")
        await c.sees("Command line of chat copied to")
        assert c.app.clipboard.startswith("/opt/vllm/bin/vllm serve meta-llama")


async def test_number_keys_and_tab_choose_a_pane(console):
    async with console(size=(80, 24)) as c:
        await c.sees("1 KV cache")
        await c.press("3")
        await c.sees("3 Latency")
        await c.lacks("1 KV cache")
        await c.press("tab")
        await c.sees("4 Throughput")
        await c.press("shift+tab", "shift+tab")
        await c.sees("2 Preemptions")


async def test_a_pane_alone_and_all_again(console):
    async with console() as c:
        await c.press("2")
        await c.until(lambda: "1 KV cache" not in c.text)
        await c.sees("2 Preemptions")
        await c.press("2")
        await c.sees("1 KV cache")


async def test_stages_take_the_place_of_panes_while_a_server_starts(console, fakes):
    state = {"view": fakes.chat}
    async with console(lambda at: state["view"](at)) as c:
        await c.sees("1 KV cache")
        state["view"] = lambda at: replace(fakes.docs(at), name="chat")
        await c.sees("Start-up of chat")
        await c.lacks("1 KV cache")
        await c.sees("5 Log")
        state["view"] = fakes.chat
        await c.sees("1 KV cache")
        await c.sees("chat is ready (41s downtime).")


async def test_describe_shows_flags_with_their_reasons(console):
    async with console() as c:
        await c.press("enter")
        await c.sees("many short chats at once")
        await c.sees("--max-num-seqs  512     256")
        await c.press("escape")
        await c.sees("Servers")


async def test_the_palette_runs_actions_of_the_registry(console):
    async with console() as c:
        await c.press("colon")
        await c.until(lambda: c.app.screen is not c.app.operations)
        await c.press(*"prefix")
        await c.sees("Toggle prefix caching")
        await c.press("enter")
        await c.sees("--enable-prefix-caching on → off")


async def test_quitting_says_what_still_runs(console):
    async with console() as c:
        assert c.app.farewell() == "4 servers still running: chat, coder, docs, vision"
    async with console(demo=True) as c:
        assert c.app.farewell() == ""


def test_the_states_that_the_fake_fleet_shows_are_all_there_are_but_two(fakes):
    assert {maker(fakes.NOW).state for maker in fakes.EVERY_STATE} == set(State) - {State.STOPPING, State.ASLEEP}


async def test_a_key_that_changes_something_says_that_the_console_is_read_only(console, fakes):
    async with console(fakes.pressed, read_only=True) as c:
        for key in ("n", "r", "f"):
            c.app.messages_seen()
            await c.press(key)
            await c.sees("Nothing was changed: this console is read-only")
        c.app.messages_seen()
        await c.press("i")
        await c.sees("Findings · chat")


async def test_ctrl_c_names_the_key_that_quits(console):
    async with console(keys={"quit": "Q"}) as c:
        await c.press("ctrl+c")
        await c.sees("Q quits; servers stay up.")


async def test_a_first_generation_offers_no_revert(console, fakes):
    async with console(fakes.coder) as c:
        await c.sees("v KV dtype")
        await c.lacks("z revert")


async def test_in_the_demo_it_is_reported_that_its_servers_end(console):
    async with console(demo=True) as c:
        await c.press("ctrl+c")
        await c.sees("q quits; the demo's servers end with it.")
        await c.press("question_mark", "slash", *"quit")
        await c.sees("Quit; the demo's servers end with it")
        await c.lacks("servers stay up")


async def test_on_a_page_of_a_browser_the_way_to_changes_is_named(console, fakes, monkeypatch):
    fleet = fakes.FakeFleet(fakes.coder)
    fleet.read_only_by = "--read-only"
    async with console(fleet=fleet, read_only=True) as c:
        await c.sees("read-only (--read-only): nothing can be changed here")
        monkeypatch.setenv("TEXTUAL_DRIVER", "textual.drivers.web_driver:WebDriver")
        await c.press("s")
        await c.sees("started without --allow-changes, see 'vllm-console web --help'")
