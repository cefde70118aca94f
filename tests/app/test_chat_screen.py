"""The chat screen: streaming, stopping, two servers, options, pasted text, and harmless display of responses."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from textual import events

from fakes.scripted_chat import end, said, script  # noqa: F401 - fixtures
from vllm_console.chat.client import ChatServer
from vllm_console.chat.conversation import ChatOptions
from vllm_console.metrics.sample import EngineSample, Sample
from vllm_console.ui.screens import chat as chat_screen
from vllm_console.ui.screens.chat import (
    LINE_BREAK,
    ChatScreen,
    _wrapped,
    as_line,
    as_text,
    status_line,
    waiting_text,
    with_option,
)
from vllm_launchers.keeper.records import State

HOSTILE = "[red]x[/] \x1b[31mred\x1b]52;c;aGk=\x07\u202e end"


@pytest.fixture
def fleet(fakes, script):  # noqa: F811 - the fixture
    """Two ready servers that both respond as scripted; the state of the first can be changed."""

    class Fleet(fakes.FakeFleet):
        state = State.READY

        def chat_server(self, name):
            self.calls.append(("chat_server", name))
            return ChatServer(name, script.url)

    def chat(at):
        return replace(fakes.chat(at), state=made.state)

    made = Fleet(chat, lambda at: replace(fakes.coder(at), state=State.READY))
    return made


async def test_without_an_answer_ctrl_c_says_which_key_leaves(console, fleet):
    async with console(fleet=fleet) as c:
        await c.press("A", "ctrl+c")
        assert [toast.message for toast in c.app._notifications] == ["esc leaves the chat."]
        assert isinstance(c.app.screen, ChatScreen)


async def test_an_answer_streams_with_its_figures_and_is_text_whatever_it_says(console, fleet, script, said, end):  # noqa: F811
    script.pieces = [said(reasoning="hm [b]"), said(content=HOSTILE), None]
    async with console(fleet=fleet) as c:
        await c.press("A", *"hi", "enter")
        await c.sees("[red]x[/] red end")
        await c.sees("reasoning")
        await c.sees("hm [b]")
        await c.sees("TTFT")
        await c.until(lambda: "KV cache" in c.text.splitlines()[1], "the cache in the second row")
        await c.press("escape")
        await c.sees("stopped")
        assert script.gone.wait(20)
        assert isinstance(c.app.screen, ChatScreen), "escape stops first"
        script.pieces = [said(content="second"), end]
        await c.press(*"more", "enter")
        await c.sees("second")
        await c.until(lambda: len(script.requests) == 2)
        assert [one["content"] for one in script.requests[1][1]["messages"]][::2] == ["hi", "more"]
        await c.press("escape")
        await c.until(lambda: c.app.operations.on_top)
        await c.press("A")
        await c.sees("second")
        await c.press("ctrl+n")
        await c.sees("The conversation is never written")


async def test_an_answer_that_takes_long_to_draw_is_drawn_less_often(console, fleet, script, said, end, monkeypatch):  # noqa: F811
    script.pieces = [said(content="a long answer"), None]
    async with console(fleet=fleet) as c:
        await c.press("A", *"hi", "enter")
        await c.sees("a long answer")
        screen, clock, drawn = c.app.screen, [1e9], []
        monkeypatch.setattr(chat_screen, "time", SimpleNamespace(time=time.time, monotonic=lambda: clock[0]))

        def redraw():
            drawn.append(clock[0])
            clock[0] += 1.0

        monkeypatch.setattr(screen, "_redraw", redraw)
        for _ in range(50):
            screen._tick()
            clock[0] += 0.1
        assert len(drawn) == 2
        screen._chat.stop()
        await c.until(lambda: len(drawn) > 2, "the end of the answer is drawn without delay")


async def test_escape_quits_if_the_chat_was_opened_by_its_command(console, fleet, script, said, end):  # noqa: F811
    script.pieces = [said(content="answer"), end]
    async with console(fleet=fleet, server="chat", chat=ChatOptions()) as c:
        await c.press(*"hi", "enter")
        await c.sees("answer")
        await c.until(lambda: not c.app.screen._chat.running)
        await c.press("escape")
        await c.until(lambda: not c.app.is_running, "the end of the program")


async def test_at_80_columns_the_models_name_gives_way_and_the_figures_stay(console, fleet, fakes, script, said, end):  # noqa: F811
    model = "some-organization/A-Model-With-A-Very-Long-Name-Of-Its-Own-70B-Instruct-AWQ"
    script.pieces = [said(content="answer"), end]
    long = fakes.FakeFleet(lambda at: replace(fakes.chat(at), model=model))
    long.chat_server = fleet.chat_server
    async with console(fleet=long, size=(80, 24)) as c:
        await c.press("A", *"hi", "enter")
        await c.sees("TTFT")
        await c.sees("tok/s")
        status = c.text.splitlines()[1]
        assert all(word in status for word in ("chat", "KV cache", "running", "waiting"))
        assert "  A-Model-With" in status, "without its organization"
        assert status.rstrip().endswith("…")


@pytest.mark.parametrize("size", [(60, 20), (80, 24)])
async def test_it_warns_while_a_tuner_or_a_load_test_measures_the_server(console, fleet, fakes, size):
    state = {"tuner": fakes.tuned(fakes.NOW).tuner}
    measured = fakes.FakeFleet(lambda at: replace(fakes.chat(at), **state))
    measured.chat_server = fleet.chat_server
    async with console(fleet=measured, size=size) as c:
        await c.press("A")
        await c.sees("A tuner measures chat: your requests will distort its")
        state.update(tuner=None, load_test=12)
        await c.sees("A load test measures chat: your requests will distort its")
        state.update(load_test=None)
        await c.lacks("distorts")


@pytest.mark.parametrize("width", range(20, 120, 3))
def test_figures_of_the_status_are_whole_and_reasons_end_between_words(fakes, width):
    figures = {"": EngineSample(kv_cache_usage=0.913, requests_running=12345.0, requests_waiting=678.0)}
    server = replace(fakes.chat(fakes.NOW), sample=Sample(fakes.NOW, figures))
    words = status_line("chat", server, fakes.NOW, width).text.split()
    assert all(words[at + 1] == "12.3k" for at, word in enumerate(words) if word == "running"), words
    assert all(words[at + 1] == "678" for at, word in enumerate(words) if word == "waiting"), words
    reason = "The KV cache is too small for one request of the full context length: it needs sixteen GiB"
    failed = replace(server, state=State.FAILED, reason=reason)
    text = status_line("chat", failed, fakes.NOW, width).text.rstrip()
    assert len(text) <= width
    cut = text.partition("failed  ")[2].removesuffix(" …")
    assert width < 30 or f"{reason} ".startswith(f"{cut} ")


async def test_the_same_goes_to_a_second_server(console, fleet, script, said, end):  # noqa: F811
    script.pieces = [said(content="answer"), end]
    async with console(fleet=fleet) as c:
        await c.press("A", "ctrl+b")
        await c.sees("Also send to which server?")
        await c.press("enter", *"hi", "enter")
        await c.until(lambda: any(row.count("answer") == 2 for row in c.text.splitlines()), "two answers in a row")
        assert len(script.requests) == 2
        await c.press("ctrl+b")
        await c.sees("─ Chat · chat ─")


async def test_what_is_sent_too_early_waits_until_the_server_is_ready(console, fleet, script, said, end):  # noqa: F811
    fleet.state = State.STARTING
    script.pieces = [said(content="good morning"), end]
    async with console(fleet=fleet) as c:
        await c.press("A", *"hi", "enter")
        await c.sees("Sent as soon as chat is ready.")
        assert script.requests == []
        fleet.state = State.READY
        await c.sees("good morning")


async def test_a_prompt_without_an_answer_stands_in_the_line_again(console, fleet, script, said):  # noqa: F811
    script.pieces = []
    async with console(fleet=fleet) as c:
        await c.press("A", *"hi", "enter")
        await c.sees("chat: the connection ended before the answer did")
        await c.until(lambda: c.app.focused is not None and c.app.focused.value == "hi")


async def test_options_are_typed_and_shown_and_code_has_them(console, fleet, script):  # noqa: F811
    async with console(fleet=fleet) as c:
        await c.press("A", *"draft", "ctrl+o")
        await c.sees("continue the text without a chat template, as for a base model")
        await c.press("down", "enter", *"9", "enter")
        await c.until(lambda: c.app._chats["chat"].options.temperature is None)
        await c.press("backspace", *"0.5", "enter")
        await c.sees("temperature 0.5")
        await c.until(lambda: c.app.focused is not None and c.app.focused.value == "draft")
        await c.press("ctrl+g")
        await c.sees('"temperature": 0.5')
        await c.sees('"content": "draft"')
        await c.press("tab")
        await c.sees("from openai import OpenAI")


async def test_code_has_the_prompt_that_is_being_answered(console, fleet, script, said):  # noqa: F811
    script.pieces = [said(content="so far"), None]
    async with console(fleet=fleet) as c:
        await c.press("A", *"question", "enter")
        await c.sees("so far")
        await c.press("ctrl+g")
        await c.sees('"content": "question"')
        await c.lacks("so far")


async def test_pasted_line_ends_stay(console, fleet, script, said, end):  # noqa: F811
    script.pieces = [said(content="ok"), end]
    async with console(fleet=fleet) as c:
        await c.press("A")
        await c.until(lambda: c.app.focused is not None)
        c.app.focused.post_message(events.Paste("a\r\n\tb\x1b[2J"))
        await c.until(lambda: c.app.focused.value == f"a{LINE_BREAK}    b")
        await c.press("ctrl+j", "c", "enter")
        await c.until(lambda: script.requests)
        assert script.requests[0][1]["messages"] == [{"role": "user", "content": "a\n    b\nc"}]


async def test_nothing_is_asked_of_servers_of_others_nor_in_a_read_only_console(console, fakes):
    async with console(lambda at: replace(fakes.chat(at), ours=False, owner="anna")) as c:
        await c.press("A")
        await c.sees("started by anna")
    async with console(fakes.chat, read_only=True) as c:
        await c.press("A")
        await c.pilot.pause()
        assert c.app.operations.on_top


def test_line_ends_of_a_paste_and_wrapped_lines():
    assert as_text(as_line("a\r\nb\rc")) == "a\nb\nc"
    assert _wrapped("日本語" * 5, 10) == ("日本語日本", "語日本語日", "本語日本語")
    assert _wrapped("    def f(): return 1", 12) == ("    def f():", "return 1")


def test_an_option_is_read_from_its_text_and_a_wrong_one_names_it():
    assert with_option(ChatOptions(), "stop", " a | \\n ").stop == ("a", "\n")
    assert with_option(ChatOptions(max_tokens=3), "max tokens", "").max_tokens is None
    for name, text in (("max tokens", "0"), ("max tokens", "x"), ("temperature", "2.1"), ("temperature", "nan")):
        with pytest.raises(ValueError, match=name):
            with_option(ChatOptions(), name, text)


def waits_of(fakes, waiting, at=100.0):
    """A server with that many waiting requests."""
    server = fakes.chat(fakes.NOW)
    assert server.sample is not None
    one = replace(next(iter(server.sample.engines.values())), requests_waiting=waiting)
    return replace(server, sample=replace(server.sample, at=at, engines={0: one}))


def test_while_a_request_waits_it_says_how_long_and_how_many_are_before_it_at_most(fakes):
    assert waiting_text(waits_of(fakes, 8.0), 90.0, 102.5) == (
        "waiting 12s: at most 7 requests ahead in the server's queue"
    )
    assert waiting_text(waits_of(fakes, 2.0), 90.0, 102.5) == (
        "waiting 12s: at most 1 request ahead in the server's queue"
    )


@pytest.mark.parametrize("waiting", [None, 0.0, 1.0])
def test_no_number_is_reported_that_is_not_known(fakes, waiting):
    assert waiting_text(waits_of(fakes, waiting), 90.0, 102.5) == "waiting 12s for the first token"
    assert waiting_text(waits_of(fakes, 8.0, at=80.0), 90.0, 102.5) == "waiting 12s for the first token", "too old"
    assert waiting_text(None, 90.0, 102.5) == "waiting 12s for the first token"


def test_in_the_first_second_there_is_nothing_to_say(fakes):
    assert waiting_text(waits_of(fakes, None), 90.0, 90.5) == "…"
