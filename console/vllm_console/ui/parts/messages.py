"""The console's messages: the present one, errors that nobody has seen yet, and all earlier ones."""

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

SAME_SECONDS = 3.0
"""A server's event within so many seconds of the answer to a key that says the same is that answer."""


class Held(msgspec.Struct, frozen=True):
    """Which server was selected, and the state of the one that a message is about."""

    selected: str
    about: str
    state: str


class Message(msgspec.Struct, frozen=True):
    """A sentence, when it was last shown (Unix seconds), how often in a row, and the server it is about, if any.

    ``outage``: it says that the server does not serve, which is out of date once it is ready. ``held`` is what held
    when a key was answered with a problem; once that is no more so, the answer is out of date.
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
        """Whether it stays for longer, until it was seen."""
        return self.style is BAD


class Messages:
    """Keeps all messages. ``clock`` gives Unix seconds."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self._kept: deque[Message] = deque(maxlen=MOST_KEPT)
        self._current: Message | None = None
        self._unseen: Message | None = None
        self._selected = ""
        self._states: Mapping[str, str] = {}

    @property
    def history(self) -> Sequence[Message]:
        """Every message, the oldest first."""
        return tuple(self._kept)

    @property
    def shown(self) -> Message | None:
        """What is to be shown: the newest while it is new, else the last error until it was seen."""
        return self._current or self._unseen

    def say(
        self, text: str, style: Style | None = None, server: str = "", *, about: str = "", outage: bool = False
    ) -> None:
        """Say a sentence; it is shown until `expire`, an error until `seen` or `expire_error`.

        ``server``: it is an event of that one. An ``outage`` of it is shown until `ready`. ``about``: the server of a
        problem that a key is answered with, if that is not the selected one.
        """
        held = self._held(about) if style in (BAD, WARN) and not server else None
        message = self._keep(Message(self.clock(), plain(text), style, server, outage=outage, held=held))
        self._current = message
        if message.error:
            self._unseen = message

    def show(self, text: str, style: Style | None = None) -> None:
        """Show a sentence until `expire`, without keeping it: it answers a key that is pressed many times."""
        self._current = Message(self.clock(), plain(text), style)

    def note(self, server: str, text: str, style: Style | None = None) -> None:
        """Keep an event of a server without showing it as a message."""
        self._keep(Message(self.clock(), plain(text), style, server))

    def outdate(self, server: str) -> None:
        """Something else has happened to a server: what was said of it before is shown no more."""
        if self._current is not None and self._current.server == server:
            self._current = None

    def ready(self, server: str) -> None:
        """A server is ready: that it did not serve is shown no more, other errors are."""
        if self._unseen is not None and self._unseen.outage and self._unseen.server == server:
            self._unseen = None

    def answered(self, text: str) -> None:
        """A question was answered: that it was asked is shown no more."""
        if self._current is not None and self._current.text == plain(text):
            self._current = None

    def accepted(self, server: str) -> None:
        """The user's verb on a server was accepted: what went wrong before is out of date, but not another server's."""
        if self._unseen is not None and self._unseen.server in ("", server):
            self._unseen = None

    def observe(self, selected: str, states: Mapping[str, str]) -> None:
        """Which server is selected, and the state of each: problems of another server or state are shown no more."""
        self._selected, self._states = selected, states
        if self._current is not None and self._over(self._current):
            self._current = None
        if self._unseen is not None and self._over(self._unseen):
            self._unseen = None

    def _held(self, about: str) -> Held | None:
        """What holds now of that server, or of the selected one."""
        if not self._selected:
            return None
        about = about or self._selected
        return Held(self._selected, about, self._states.get(about, ""))

    def _over(self, message: Message) -> bool:
        held = message.held
        if held is None:
            return False
        left = self._selected != held.selected and held.selected in self._states  # else it is gone, which moves on
        return left or self._states.get(held.about, held.state) != held.state

    def expire(self) -> None:
        """The newest message has been shown for long enough."""
        self._current = None

    def expire_error(self) -> None:
        """The last error has been shown for long enough, seen or not; that a server does not serve still holds."""
        if self._unseen is not None and not self._unseen.outage:
            self._unseen = None

    @property
    def unseen_error(self) -> bool:
        """Whether an error is shown that nobody has read yet."""
        return self._unseen is not None

    def seen(self) -> None:
        """Somebody has read what is shown."""
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
        """What a key was answered if this event says the same, or the other way round."""
        for kept in reversed(self._kept):
            if message.at - kept.at > SAME_SECONDS:
                return None
            if kept.text == message.text and bool(kept.server) != bool(message.server):
                return kept
        return None
