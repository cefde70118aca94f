"""The state of a chat: a conversation with one server, or the same with two, and a prompt waiting for a server."""

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
    """A chat, kept in memory so that a reopened chat screen can continue it."""

    def __init__(self, fleet: LocalFleet, name: str, options: ChatOptions | None = None) -> None:
        self._fleet = fleet
        self.options = options or ChatOptions()
        self.sessions = {name: self._session(name)}
        """Sessions by server; the first is the chat's own."""
        self.offset = 0
        """Number of turns before the second server joined."""
        self.waiting = ""
        """Prompt to send as soon as the server is ready."""
        self.draft = ""
        self.sent_at = 0.0

    def _session(self, name: str) -> ChatSession:
        return ChatSession(partial(self._fleet.chat_server, name), OperationError)

    @property
    def name(self) -> str:
        """The chat's own server."""
        return next(iter(self.sessions))

    @property
    def running(self) -> bool:
        """Whether an answer is being generated."""
        return any(session.running for session in self.sessions.values())

    def add(self, name: str) -> None:
        """Add a second server, which gets all further prompts, too."""
        self.offset = len(self.sessions[self.name].turns)
        self.sessions[name] = self._session(name)

    def remove_second(self) -> bool:
        """Remove the second server; False if there is none."""
        if len(self.sessions) == 1:
            return False
        _, session = self.sessions.popitem()
        session.stop()
        return True

    def send(self, prompt: str) -> None:
        """Send a prompt to the servers."""
        self.waiting, self.sent_at = "", time.time()
        for session in self.sessions.values():
            session.send(prompt, self.options)

    def stop(self) -> None:
        """Stop running answers; a waiting prompt becomes the draft again."""
        self.draft, self.waiting = self.waiting or self.draft, ""
        for session in self.sessions.values():
            session.stop()

    def clear(self) -> None:
        """Start a new conversation."""
        self.waiting, self.offset = "", 0
        for session in self.sessions.values():
            session.clear()
