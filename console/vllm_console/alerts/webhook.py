"""Sends findings to a webhook from a thread of its own: bounded, with deadlines and retries, never in anybody's way."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import ssl

    import httpx

DEADLINE_SECONDS = 10.0
"""For one try, whole: name, connection, sending, answer."""

TRIES = 5
FIRST_WAIT_SECONDS = 1.0
"""Before the second try; doubled each time."""

MOST_WAITING = 100
"""Messages; of more the oldest are lost, which `Webhook.trouble` says."""

AGAIN = (408, 425, 429)
"""Answers that may be others at the next try, beside all from 500 on."""


class Webhook:
    """POSTs JSON documents, one after the other, in order.

    ``headers`` may hold a secret, and the URL's path may be one: neither is ever shown, ``trouble`` names the host.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        *,
        first_wait: float = FIRST_WAIT_SECONDS,
        deadline: float = DEADLINE_SECONDS,
    ) -> None:
        self._url, self._headers = url, dict(headers or {})
        self._first_wait, self._deadline = first_wait, deadline
        self._host = shown_host(url)
        self._tls: ssl.SSLContext | None = None
        self._changed = threading.Condition()
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._sending = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.trouble = ""
        """Why the last message was not taken, or that some were lost, in one sentence."""

    def send(self, document: Mapping[str, Any]) -> None:
        """Put a document in the queue; returns at once."""
        with self._changed:
            if self._ended.is_set():
                return
            if len(self._waiting) >= MOST_WAITING:
                self._waiting.popleft()
                self.trouble = f"the webhook at {self._host} is too slow: messages were lost"
            self._waiting.append(document)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="webhook", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self, patience: float = 2.0) -> None:
        """Give what waits so many seconds to go out, and end."""
        deadline = time.monotonic() + patience
        with self._changed:
            while (self._waiting or self._sending) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            self._ended.set()
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._ended.is_set():
                    self._changed.wait()
                if self._ended.is_set():
                    return
                document, self._sending = self._waiting.popleft(), True
            trouble = self._deliver(document)
            with self._changed:
                self._sending = False
                self.trouble = trouble
                self._changed.notify_all()

    def _deliver(self, document: Mapping[str, Any]) -> str:
        """Send one, with retries; why it could not be, empty when it was taken."""
        import asyncio

        import httpx  # a good part of a second, for those who have a webhook

        wait, trouble = self._first_wait, ""
        for attempt in range(TRIES):
            if attempt and self._ended.wait(wait):
                break
            wait *= 2 if attempt else 1
            try:
                status = asyncio.run(asyncio.wait_for(self._post(httpx, document), self._deadline))
            except TimeoutError:
                trouble = f"did not answer within {self._deadline:g} s"
                continue
            except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
                trouble = f"cannot be reached ({type(error).__name__})"
                continue
            if 200 <= status < 300:
                return ""
            trouble = f"answered {status}"
            if status not in AGAIN and status < 500:
                break
        return f"the webhook at {self._host} {trouble}: a message was lost"

    async def _post(self, http: Any, document: Mapping[str, Any]) -> int:
        """The answer's status; its body is not read. Redirects are not followed: a secret goes to nobody else."""
        if self._tls is None:
            self._tls = http.create_ssl_context()  # reads all certificates: once
        client: httpx.AsyncClient
        async with http.AsyncClient(
            timeout=http.Timeout(self._deadline),
            verify=self._tls,
            follow_redirects=False,
            trust_env=not self._local,
        ) as client:
            async with client.stream("POST", self._url, json=dict(document), headers=self._headers) as answer:
                return int(answer.status_code)

    @property
    def _local(self) -> bool:
        from vllm_launchers.addresses import is_loopback

        return is_loopback(urlsplit(self._url).hostname or "")


def shown_host(url: str) -> str:
    """Of a URL what may be shown: paths and queries of webhooks are secrets."""
    return urlsplit(url).hostname or "?"
