"""Asks a server that seems to hang for one token: what tells an engine that hangs from one that is busy.

In a thread of its own, one request at a time and one a minute at most, and only to servers of ours.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import time

from vllm_launchers.addresses import reachable

DEADLINE_SECONDS = 20.0
REST_SECONDS = 60.0
"""Between the beginnings of two requests."""


class OneToken:
    """One server's request. `silent_seconds` says what came of it; all of it may be called by one thread only."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._asked_at = float("-inf")
        self._silent_since: float | None = None
        self._answered: bool | None = None
        self.refused = ""
        """What the API server said in place of the engine, so that nothing is known of that; else empty."""

    def ask(self, host: str, port: int, model: str) -> None:
        """Send it, unless one is under way or was sent within the last minute."""
        if self._busy or time.monotonic() - self._asked_at < REST_SECONDS:
            return
        self._asked_at = time.monotonic()
        if self._silent_since is None:
            self._silent_since = self._asked_at
        self._answered = None
        self._thread = threading.Thread(target=self._run, args=(host, port, model), name="one-token", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Until it is answered, or for so long."""
        if self._thread is not None:
            self._thread.join(seconds)

    @property
    def silent_seconds(self) -> float | None:
        """How long it has been without an answer; 0 when the engine answered, None when nothing is known."""
        if self._silent_since is None:
            return None
        if self._busy or self._answered is False:
            return time.monotonic() - self._silent_since
        return 0.0 if self._answered else None

    def forget(self) -> None:
        """The server moves again, or is another by now; the pause between two requests is kept."""
        if not self._busy:
            self._silent_since = self._answered = None
            self.refused = ""

    @property
    def _busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self, host: str, port: int, model: str) -> None:
        try:
            status = _complete(host, port, model)
        except TimeoutError:
            self._answered, self.refused = False, ""
            return
        except (OSError, http.client.HTTPException):
            status = None  # no connection, or cut off: that is for /health to tell
        if status == http.client.OK:
            self._answered, self.refused = True, ""
        else:
            # A refusal (an API key, a model that completes nothing) comes from the API server, not from the engine.
            self._silent_since = None
            self.refused = f"the API server answered it with {status}" if status is not None else ""


def _complete(host: str, port: int, model: str) -> int:
    """The status of a completion of one token. Raises TimeoutError after the deadline."""
    headers = {"content-type": "application/json"}
    if key := os.environ.get("VLLM_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    body = json.dumps({"model": model, "prompt": "1", "max_tokens": 1})
    connection = http.client.HTTPConnection(reachable(host), port, timeout=DEADLINE_SECONDS)
    try:
        connection.request("POST", "/v1/completions", body, headers)
        return connection.getresponse().status
    finally:
        connection.close()
