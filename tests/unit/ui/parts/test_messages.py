"""Messages are kept once: an answer to a key and an equal event are one."""

from __future__ import annotations

from vllm_console.ui.parts.messages import Messages
from vllm_console.ui.theme import BAD


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
    messages = Messages(Clock())
    messages.say("chat failed: killed", BAD, "chat", outage=True)
    messages.expire()
    messages.ready("docs")
    assert messages.shown.text == "chat failed: killed"
    messages.ready("chat")
    assert messages.shown is None
    messages.say("chat: its flags were refused.", BAD, "chat")
    messages.expire()
    messages.ready("chat")
    assert messages.shown.text == "chat: its flags were refused."
    assert [one.text for one in messages.history] == ["chat failed: killed", "chat: its flags were refused."]
