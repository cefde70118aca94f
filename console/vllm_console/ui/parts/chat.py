"""The conversations of a chat: one with a server, or the same with two; and what waits until a server is ready."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from vllm_console.chat.conversation import ChatOptions
from vllm_console.chat.session import ChatSession
from vllm_launchers.errors import OperationError

if TYPE_CHECKING:
    from vllm_console.fleet.local import LocalFleet


class Chat:
    """What a chat screen shows and goes on with when it is opened again. In memory only."""

    def __init__(self, fleet: LocalFleet, name: str, options: ChatOptions | None = None) -> None:
        self._fleet = fleet
        self.options = options or ChatOptions()
        self.sessions = {name: self._session(name)}
        """By server; the first is the chat's own."""
        self.offset = 0
        """How many turns the first server had before the second one joined."""
        self.waiting = ""
        """What is sent as soon as the server is ready."""
        self.draft = ""
        """What was typed and not sent."""
        self.sent_at = 0.0
        """When the last prompt was sent (Unix seconds)."""

    def _session(self, name: str) -> ChatSession:
        return ChatSession(partial(self._fleet.chat_server, name), OperationError)

    @property
    def name(self) -> str:
        """The chat's own server."""
        return next(iter(self.sessions))

    @property
    def running(self) -> bool:
        """Whether an answer is on its way."""
        return any(session.running for session in self.sessions.values())

    def add(self, name: str) -> None:
        """Send what comes next to this server, too."""
        self.offset = len(self.sessions[self.name].turns)
        self.sessions[name] = self._session(name)

    def remove_second(self) -> bool:
        """Go on with the first server alone; False if there is no second one."""
        if len(self.sessions) == 1:
            return False
        _, session = self.sessions.popitem()
        session.stop()
        return True

    def send(self, prompt: str) -> None:
        """Ask the servers."""
        self.waiting, self.sent_at = "", time.time()
        for session in self.sessions.values():
            session.send(prompt, self.options)

    def stop(self) -> None:
        """End the answers that are on their way, and wait for nothing."""
        self.draft, self.waiting = self.waiting or self.draft, ""
        for session in self.sessions.values():
            session.stop()

    def clear(self) -> None:
        """Begin a new conversation."""
        self.waiting, self.offset = "", 0
        for session in self.sessions.values():
            session.clear()
