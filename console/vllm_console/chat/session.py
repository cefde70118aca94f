"""A conversation for a screen: each answer is read in its own thread, and can be shown as it arrives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_console.chat.answer import Answer, AnswerReader
from vllm_console.chat.conversation import ChatOptions, Turn

if TYPE_CHECKING:
    from vllm_console.chat.client import ChatClient, ChatServer
    from vllm_console.load.client import LoadTarget


class ChatSession:
    """A conversation with one server, kept in memory only. Its methods never block and are thread-safe.

    ``find`` returns where the server is; it is called for each answer, since the server may have been restarted. If it
    raises ``refusals``, its text becomes the answer's problem.
    """

    def __init__(self, find: Callable[[], ChatServer], refusals: type[Exception]) -> None:
        self._find, self._refusals = find, refusals
        self._lock = threading.Lock()
        self._client: ChatClient | None = None
        self._turns: tuple[Turn, ...] = ()
        self._prompt = ""
        self._reader: AnswerReader | None = None
        self._running = self._stopped = False
        self._cleared = False
        """Whether the answer in progress belongs to a conversation that was cleared."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Answer] | None = None

    @property
    def running(self) -> bool:
        """Whether an answer is in progress."""
        return self._running

    @property
    def target(self) -> LoadTarget | None:
        """The served model; None until the server was asked."""
        client = self._client
        return client.target if client is not None else None

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns, including the one in progress as received so far."""
        with self._lock:
            if not self._running or self._cleared:
                return self._turns
            now = self._reader.answer(running=True) if self._reader is not None else Answer(running=True)
            return (*self._turns, Turn(self._prompt, now))

    def send(self, prompt: str, options: ChatOptions) -> bool:
        """Request an answer; False if one is already in progress."""
        with self._lock:
            if self._running:
                return False
            self._prompt, self._reader = prompt, None
            self._running, self._stopped, self._cleared = True, False, False
        threading.Thread(target=self._answer, args=(prompt, options), name="chat", daemon=True).start()
        return True

    def stop(self) -> None:
        """Cancel the answer in progress, if any: closing its stream makes the server abort the request."""
        with self._lock:
            if not self._running:
                return
            self._stopped = True
            if self._loop is not None and self._task is not None:
                self._loop.call_soon_threadsafe(self._task.cancel)

    def clear(self) -> None:
        """Begin a new conversation."""
        self.stop()
        with self._lock:
            self._turns, self._cleared = (), True

    def _answer(self, prompt: str, options: ChatOptions) -> None:
        answer = self._answered(self._turns, prompt, options)
        with self._lock:
            self._running, self._loop, self._task = False, None, None
            if not self._cleared:
                self._turns = (*self._turns, Turn(prompt, answer))

    def _answered(self, turns: tuple[Turn, ...], prompt: str, options: ChatOptions) -> Answer:
        from vllm_console.chat.client import ChatClient  # imports httpx, which a console needs for nothing else

        try:
            server = self._find()
            if self._client is None:
                self._client = ChatClient(server)
            self._client.server = server
            return asyncio.run(self._ask(self._client, turns, prompt, options))
        except self._refusals as error:
            return Answer(problem=str(error))
        except asyncio.CancelledError:
            return self._reader.answer(stopped=True) if self._reader is not None else Answer(stopped=True)
        except Exception as error:  # noqa: BLE001 - thread boundary: shown in the answer's place
            return Answer(problem=f"unexpected error: {type(error).__name__}: {error}")

    async def _ask(self, client: ChatClient, turns: tuple[Turn, ...], prompt: str, options: ChatOptions) -> Answer:
        with self._lock:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            if self._stopped:
                raise asyncio.CancelledError
        return await client.ask(turns, prompt, options, self._changed)

    def _changed(self, reader: AnswerReader) -> None:
        self._reader = reader
