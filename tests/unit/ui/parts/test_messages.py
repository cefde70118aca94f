"""Messages are kept once: a result of a key and an equal event are one message."""

from __future__ import annotations

from vllm_console.ui.parts.messages import ERROR_SECONDS, MESSAGE_SECONDS, Messages
from vllm_console.ui.theme import BAD, WARN


class Clock:
    at = 1000.0

    def __call__(self) -> float:
        return self.at


def kept(messages):
    return [(one.text, one.server, one.times) for one in messages.history]


def test_answer_and_equal_event_are_one_message_per_server():
    messages = Messages(Clock())
    for name in ("chat", "docs"):
        messages.say(f"{name} is stopping.")
    for name in ("chat", "docs"):
        messages.note(name, f"{name} is stopping.")
    assert kept(messages) == [("chat is stopping.", "chat", 1), ("docs is stopping.", "docs", 1)]
    messages.say("docs is stopping.")
    assert kept(messages)[-1] == ("docs is stopping.", "docs", 1)
    assert messages.newest_of("chat").text == "chat is stopping."


def test_later_repetition_is_another_message():
    clock = Clock()
    messages = Messages(clock)
    messages.say("chat is ready.")
    clock.at += 60
    messages.note("chat", "chat is ready.")
    messages.note("chat", "chat is ready.")
    assert kept(messages) == [("chat is ready.", "", 1), ("chat is ready.", "chat", 2)]


def test_failure_is_shown_until_ready_and_other_errors_until_seen():
    clock = Clock()
    messages = Messages(clock)
    messages.say("chat failed: killed", BAD, "chat", outage=True)
    clock.at += MESSAGE_SECONDS
    messages.ready("docs")
    assert messages.shown.text == "chat failed: killed"
    messages.ready("chat")
    assert messages.shown is None
    messages.say("chat: its flags were refused.", BAD, "chat")
    clock.at += MESSAGE_SECONDS
    messages.ready("chat")
    assert messages.shown.text == "chat: its flags were refused."
    assert [one.text for one in messages.history] == ["chat failed: killed", "chat: its flags were refused."]


def test_a_problem_that_a_key_was_answered_with_ends_with_the_state_or_the_selection():
    def said(text, style=BAD, about=""):
        messages = Messages(Clock())
        messages.observe("lora", {"lora": "starting", "docs": "ready"})
        messages.say(text, style, about=about)
        return messages

    for style in (BAD, WARN):
        messages = said("lora is starting, not ready: its adapters can't be known now", style)
        messages.observe("lora", {"lora": "starting", "docs": "failed"})
        assert messages.shown is not None, "nothing has changed that it is about"
        messages.observe("lora", {"lora": "ready", "docs": "failed"})
        assert messages.shown is None
        assert [one.style for one in messages.history] == [style], "it is kept"
    messages = said("lora serves no adapter 'nosuch'")
    messages.observe("docs", {"lora": "starting", "docs": "ready"})
    assert messages.shown is None, "another server is selected"
    messages = said("docs is being restarted.", about="docs")
    messages.observe("lora", {"lora": "ready", "docs": "ready"})
    assert messages.shown is not None, "it is about docs"
    messages.observe("lora", {"lora": "ready", "docs": "starting"})
    assert messages.shown is None
    messages = said("lora is gone.", WARN, about="lora")
    messages.observe("docs", {"docs": "ready"})
    assert messages.shown is not None, "the selection moved on by itself"
    messages = said("lora is restarting as run 2.", None)
    messages.observe("docs", {"lora": "stopping", "docs": "ready"})
    assert messages.shown is not None, "what was done is said for its time"


def test_an_error_ends_after_its_time_and_a_failure_does_not():
    clock = Clock()
    messages = Messages(clock)
    messages.say("disk full", BAD)
    clock.at += MESSAGE_SECONDS
    assert messages.shown.text == "disk full"
    assert messages.unseen_error
    clock.at += ERROR_SECONDS - MESSAGE_SECONDS
    assert messages.shown is None
    assert not messages.unseen_error
    messages.say("chat failed: killed", BAD, "chat", outage=True)
    clock.at += ERROR_SECONDS
    assert messages.shown.text == "chat failed: killed"
