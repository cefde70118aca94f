"""Asks a server that seems to hang for one token: what tells an engine that hangs from one that is busy.

In a thread of its own, one request at a time and one a minute at most, and only to servers of ours.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import time

from vllm_console.text import plain
from vllm_launchers.addresses import reachable, tls_to_own

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

    def ask(self, host: str, port: int, model: str, *, tls: bool = False) -> None:
        """Send it, unless one is under way or was sent within the last minute."""
        if self._busy or time.monotonic() - self._asked_at < REST_SECONDS:
            return
        self._asked_at = time.monotonic()
        if self._silent_since is None:
            self._silent_since = self._asked_at
        self._answered = None
        self._thread = threading.Thread(target=self._run, args=(host, port, model, tls), name="one-token", daemon=True)
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

    def _run(self, host: str, port: int, model: str, tls: bool) -> None:
        try:
            status = _complete(host, port, model, tls=tls)
        except TimeoutError:
            self._answered, self.refused = False, ""
            return
        except (OSError, http.client.HTTPException) as error:  # no connection, or cut off: nothing of the engine
            self._silent_since = None
            self.refused = f"it could not be sent: {plain(str(error), 120) or type(error).__name__}"
            return
        except ValueError:  # whose words would have the key in them
            self._silent_since = None
            self.refused = "it could not be sent: VLLM_API_KEY has characters that no HTTP header can carry"
            return
        if status == http.client.OK:
            self._answered, self.refused = True, ""
        else:
            # A refusal (an API key, a model that completes nothing) comes from the API server, not from the engine.
            self._silent_since = None
            self.refused = f"the API server answered it with {status}"


def _complete(host: str, port: int, model: str, *, tls: bool) -> int:
    """The status of a completion of one token. Raises TimeoutError after the deadline."""
    headers = {"content-type": "application/json"}
    if key := os.environ.get("VLLM_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    body = json.dumps({"model": model, "prompt": "1", "max_tokens": 1})
    where = reachable(host), port
    connection = (
        http.client.HTTPSConnection(*where, timeout=DEADLINE_SECONDS, context=tls_to_own())
        if tls
        else http.client.HTTPConnection(*where, timeout=DEADLINE_SECONDS)
    )
    try:
        connection.request("POST", "/v1/completions", body, headers)
        return connection.getresponse().status
    finally:
        connection.close()
