"""The console's messages: the current one, unread errors, and history."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec.structs import replace
from rich.style import Style

from vllm_console.text import plain
from vllm_console.ui.theme import BAD, WARN

MOST_KEPT = 300

MESSAGE_SECONDS = 15.0
"""How long a message is shown before the selected server's own notices may replace it."""

ERROR_SECONDS = 60.0
"""How long an error is shown unless it is dismissed; the message list keeps it."""

SAME_SECONDS = 3.0
"""An event this soon after an answer with the same text is treated as the same message."""


class Held(msgspec.Struct, frozen=True):
    """The selected server, and the state of the server a message is about."""

    selected: str
    about: str
    state: str


class Message(msgspec.Struct, frozen=True):
    """A message: when it was last shown (Unix seconds), how often in a row, and the server it is about, if any.

    ``outage`` marks messages that are obsolete once the server is ready. ``held`` is the situation in which a key was
    answered with a problem; the message is obsolete once that changes.
    """

    at: float
    text: str
    style: Style | None = None
    server: str = ""
    times: int = 1
    outage: bool = False
    held: Held | None = None

    @property
    def error(self) -> bool:
        """Whether the message stays longer, until it is read."""
        return self.style is BAD


class Messages:
    """Keeps the messages. ``clock`` returns Unix seconds."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self._kept: deque[Message] = deque(maxlen=MOST_KEPT)
        self._current: Message | None = None
        self._unseen: Message | None = None
        self._selected = ""
        self._states: Mapping[str, str] = {}

    @property
    def history(self) -> Sequence[Message]:
        """All messages, oldest first."""
        return tuple(self._kept)

    @property
    def shown(self) -> Message | None:
        """The message to show: a recent one, or else the last unread error."""
        return self._recent(self._current, MESSAGE_SECONDS) or self._error

    @property
    def _error(self) -> Message | None:
        """The last unread error until its time is up; outages stay."""
        if self._unseen is not None and self._unseen.outage:
            return self._unseen
        return self._recent(self._unseen, ERROR_SECONDS)

    def _recent(self, message: Message | None, seconds: float) -> Message | None:
        return message if message is not None and abs(self.clock() - message.at) < seconds else None

    def say(
        self, text: str, style: Style | None = None, server: str = "", *, about: str = "", outage: bool = False
    ) -> None:
        """Add a message. It is shown for `MESSAGE_SECONDS`, an error for `ERROR_SECONDS` or until `seen`.

        ``server`` is the server whose event this is, if any; an ``outage`` is shown until `ready`. ``about`` is the
        server that a problem is about, if that is not the selected one.
        """
        held = self._held(about) if style in (BAD, WARN) and not server else None
        message = self._keep(Message(self.clock(), plain(text), style, server, outage=outage, held=held))
        self._current = message
        if message.error:
            self._unseen = message

    def show(self, text: str, style: Style | None = None) -> None:
        """Show a message for its time without keeping it, for keys that are pressed many times."""
        self._current = Message(self.clock(), plain(text), style)

    def note(self, server: str, text: str, style: Style | None = None) -> None:
        """Add an event to the history without showing it."""
        self._keep(Message(self.clock(), plain(text), style, server))

    def outdate(self, server: str) -> None:
        """Hide the current message about a server, to which something else has happened."""
        if self._current is not None and self._current.server == server:
            self._current = None

    def ready(self, server: str) -> None:
        """Hide an outage message of a server that is ready; other errors stay."""
        if self._unseen is not None and self._unseen.outage and self._unseen.server == server:
            self._unseen = None

    def answered(self, text: str) -> None:
        """Hide the progress message of a finished query."""
        if self._current is not None and self._current.text == plain(text):
            self._current = None

    def accepted(self, server: str) -> None:
        """Hide an earlier error after a verb on a server was accepted, unless it is about another server."""
        if self._unseen is not None and self._unseen.server in ("", server):
            self._unseen = None

    def observe(self, selected: str, states: Mapping[str, str]) -> None:
        """Set the selected server and the state of each; hide problems that no longer apply."""
        self._selected, self._states = selected, states
        if self._current is not None and self._over(self._current):
            self._current = None
        if self._unseen is not None and self._over(self._unseen):
            self._unseen = None

    def _held(self, about: str) -> Held | None:
        """The current situation of that server, or of the selected one."""
        if not self._selected:
            return None
        about = about or self._selected
        return Held(self._selected, about, self._states.get(about, ""))

    def _over(self, message: Message) -> bool:
        held = message.held
        if held is None:
            return False
        left = self._selected != held.selected and held.selected in self._states  # a removed server doesn't count
        return left or self._states.get(held.about, held.state) != held.state

    def expire(self) -> None:
        """Hide the current message before its time is up."""
        self._current = None

    @property
    def unseen_error(self) -> bool:
        """Whether an unread error is shown."""
        return self._error is not None

    def seen(self) -> None:
        """Mark what is shown as read."""
        self._current = self._unseen = None

    def newest_of(self, server: str) -> Message | None:
        """The newest event of a server."""
        return next((message for message in reversed(self._kept) if message.server == server), None)

    def _keep(self, message: Message) -> Message:
        if (same := self._said_already(message)) is not None:
            self._kept.remove(same)
            message = replace(message, server=message.server or same.server)
        last = self._kept[-1] if self._kept else None
        if last is not None and (last.text, last.server) == (message.text, message.server):
            message = replace(message, times=last.times + 1)
            self._kept.pop()
        self._kept.append(message)
        return message

    def _said_already(self, message: Message) -> Message | None:
        """A recent message with this text, if exactly one of the two is a server's event, the other an answer."""
        for kept in reversed(self._kept):
            if message.at - kept.at > SAME_SECONDS:
                return None
            if kept.text == message.text and bool(kept.server) != bool(message.server):
                return kept
        return None
