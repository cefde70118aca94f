"""Reports findings to the log, a webhook and the terminal. The console and ``watch`` call it at every snapshot."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from vllm_console.alerts.findings import (
    Alert,
    Event,
    FindingTracker,
    at_least,
    document,
    gravest,
    replayed,
)
from vllm_console.diagnosis.finding import Severity, title_of_code
from vllm_console.fleet.snapshot import FleetSnapshot
from vllm_console.settings import Alerts
from vllm_console.text import plain
from vllm_launchers.addresses import is_loopback
from vllm_launchers.private import open_file, open_regular, own_folder

if TYPE_CHECKING:
    import ssl

    import httpx


NAME, OLDER, LOCK = "findings.log", "findings.log.1", "findings.lock"
MOST_BYTES = 1 << 20
"""At this size, the log is rotated, and the previous older log is deleted."""
MOST_READ = 2 * MOST_BYTES
"""Maximum number of bytes read of an even longer file."""


class FindingsLog:
    """Appends to the log. If several consoles and ``watch`` commands run, the one with the lock writes.

    Never raises for disk errors: ``trouble`` describes them in a sentence.
    """

    def __init__(self, state: Path) -> None:
        self.path = state / NAME
        self._older, self._lock_path = state / OLDER, state / LOCK
        self._lock: int | None = None
        self.trouble = ""

    def mine(self) -> bool:
        """Whether this process writes and sends; it takes over if no other process does."""
        if self._lock is not None:
            return True
        try:
            own_folder(self.path.parent)
            lock = open_file(self._lock_path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            self._say(self._lock_path, error)
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if not isinstance(error, BlockingIOError):  # a file system without locks
                self.trouble = f"{self._lock_path}: can't be locked ({error.strerror}): no finding is logged or sent"
            return False
        self._lock = lock
        return True

    def append(self, document: Mapping[str, Any]) -> None:
        """Write one line."""
        line = (json.dumps(document, ensure_ascii=True) + "\n").encode()
        try:
            with contextlib.suppress(FileNotFoundError):
                if self.path.stat().st_size + len(line) > MOST_BYTES:
                    self.path.replace(self._older)
            descriptor = open_file(self.path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
            try:
                _write(descriptor, line)
            finally:
                os.close(descriptor)
        except OSError as error:
            self._say(self.path, error)
        else:
            self.trouble = ""

    def read(self) -> Iterator[Mapping[str, Any]]:
        """All entries, oldest first; invalid lines are skipped."""
        for path in (self._older, self.path):
            try:
                with open_regular(path) as file:
                    lines = file.read(MOST_READ).splitlines()
            except OSError:
                continue
            for line in lines:
                try:
                    document = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(document, dict):
                    yield document

    def close(self) -> None:
        """Release the lock, so that another console can write."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _say(self, path: Path, error: OSError) -> None:
        self.trouble = f"{path}: can't be written: {error.strerror}"


def _write(descriptor: int, line: bytes) -> None:
    """Write all of a line or nothing: a write cut short by a full disk is undone. Raises OSError."""
    before = os.fstat(descriptor).st_size
    left = line
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, before)  # no other process writes: the lock is held
        raise


DEADLINE_SECONDS = 10.0
"""Timeout of one attempt in total: name lookup, connection, sending, answer."""

TRIES = 5
FIRST_WAIT_SECONDS = 1.0
"""Delay before the second attempt; doubled each time."""

MOST_WAITING = 100
"""Maximum number of queued messages; beyond that, the oldest are dropped, which `Webhook.trouble` reports."""

AGAIN = (408, 425, 429)
"""Status codes that are retried, in addition to all from 500 on."""


class Webhook:
    """POSTs JSON documents one at a time, in order.

    ``headers`` may hold a secret, and the URL's path may be one: neither is ever shown, and ``trouble`` names only the
    host.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url, self._headers = url, headers
        self._host = urlsplit(url).hostname or "?"
        self._tls: ssl.SSLContext | None = None
        self._changed = threading.Condition()
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._sending = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.trouble = ""
        """Why the last message was not delivered, or that some were dropped, in one sentence."""

    def send(self, document: Mapping[str, Any]) -> None:
        """Queue a document; returns at once."""
        with self._changed:
            if self._ended.is_set():
                return
            if len(self._waiting) >= MOST_WAITING:
                self._waiting.popleft()
                self.trouble = f"the webhook at {self._host} is too slow: messages lost"
            self._waiting.append(document)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="webhook", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self, patience: float = 2.0) -> None:
        """Give queued documents this many seconds to be sent, then end."""
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
        """Send one document, with retries; return why it failed, empty if it was delivered."""
        import asyncio

        import httpx  # slow to import, and only webhooks need it

        wait, trouble = FIRST_WAIT_SECONDS, ""
        for attempt in range(TRIES):
            if attempt and self._ended.wait(wait):
                break
            wait *= 2 if attempt else 1
            try:
                status = asyncio.run(asyncio.wait_for(self._post(httpx, document), DEADLINE_SECONDS))
            except TimeoutError:
                trouble = f"did not answer within {DEADLINE_SECONDS:g}s"
                continue
            except Exception as error:  # noqa: BLE001 - the thread's boundary: reported, and further messages are sent
                trouble = f"can't be reached ({type(error).__name__})"
                continue
            if 200 <= status < 300:
                return ""
            trouble = f"answered {status}"
            if status not in AGAIN and status < 500:
                break
        return f"the webhook at {self._host} {trouble}: message lost"

    async def _post(self, http: Any, document: Mapping[str, Any]) -> int:
        """The response status; the body is not read. Redirects are not followed: secrets must go to no other host."""
        if self._tls is None:
            self._tls = http.create_ssl_context()  # reads all certificates: done once
        client: httpx.AsyncClient
        async with http.AsyncClient(
            timeout=http.Timeout(DEADLINE_SECONDS),
            verify=self._tls,
            follow_redirects=False,
            trust_env=not is_loopback(self._host),
        ) as client:
            async with client.stream("POST", self._url, json=dict(document), headers=self._headers) as answer:
                return int(answer.status_code)


ESC, BEL = "\x1b", "\x07"
TITLE = "vllm-console"
MOST_MESSAGE_CHARACTERS = 160
"""Maximum message length, about what desktops show."""

RING_EVERY_SECONDS = 10.0
"""Everything that begins or ends within this time is reported together."""


class TerminalSignal(StrEnum):
    """A way to notify a terminal."""

    BELL = "bell"
    OSC9 = "osc9"
    """A desktop notification in iTerm2, WezTerm, Ghostty, kitty, Windows Terminal."""
    OSC777 = "osc777"
    """The same for foot, urxvt, WezTerm, Ghostty, VTE."""


def ring(text: str, ways: Collection[TerminalSignal], environ: Mapping[str, str]) -> bytes:
    """The bytes to write to the terminal for a message. Inside tmux, sequences are passed through, but not the bell."""
    body = _safe(text)
    sequences = []
    if TerminalSignal.OSC9 in ways:
        sequences.append(f"{ESC}]9;{TITLE}: {body}{BEL}")
    if TerminalSignal.OSC777 in ways:
        sequences.append(f"{ESC}]777;notify;{TITLE};{body.replace(';', ',')}{BEL}")
    if environ.get("TMUX"):
        sequences = [f"{ESC}Ptmux;{sequence.replace(ESC, ESC * 2)}{ESC}\\" for sequence in sequences]
    if TerminalSignal.BELL in ways:
        sequences.append(BEL)
    return "".join(sequences).encode("ascii")


def _safe(text: str) -> str:
    shown = "".join(c if " " <= c <= "~" else "?" for c in plain(text).replace("–", "-").replace("×", "x"))
    return shown if len(shown) <= MOST_MESSAGE_CHARACTERS else f"{shown[: MOST_MESSAGE_CHARACTERS - 3]}..."


def message(alerts: Sequence[Alert]) -> str:
    """Several findings in one line: the most severe, and the number of others."""
    first = gravest(alerts)
    finding = first.finding.finding
    title = f"{first.finding.server}: {title_of_code(finding.code)}"
    words = f"{title} ended" if first.event is Event.ENDED else f"{title} ({finding.severity})"
    return words if len(alerts) == 1 else f"{words}, and {len(alerts) - 1} more"


class TerminalBell:
    """Rings at most once per period: alerts in a quiet period are reported together when it ends."""

    def __init__(self, ways: Collection[TerminalSignal], environ: Mapping[str, str]) -> None:
        self._ways, self._environ = frozenset(ways), environ
        self._waiting: list[Alert] = []
        self._rang_at = float("-inf")

    def take(self, alerts: Sequence[Alert], now: float) -> bytes:
        """The bytes to write now (``now`` from any monotonic clock); empty if nothing is enabled or due."""
        if not self._ways:
            return b""
        self._waiting += alerts
        if not self._waiting or now - self._rang_at < RING_EVERY_SECONDS:
            return b""
        text, self._waiting = message(self._waiting), []
        self._rang_at = now
        return ring(text, self._ways, self._environ)


class Notifier:
    """Reports each beginning and end of a finding once.

    If several consoles share a state folder, one of them writes the log and sends to the webhook; each rings its own
    terminal through ``write``, which gets bytes and must not block. A ``read_only`` one only rings. Nothing here
    raises; ``trouble`` describes errors in a sentence.
    """

    def __init__(
        self,
        state: Path,
        wanted: Alerts,
        *,
        environ: Mapping[str, str],
        write: Callable[[bytes], None] | None = None,
        read_only: bool = False,
    ) -> None:
        self._read_only = read_only
        self._log = FindingsLog(state)
        self._tracker: FindingTracker | None = None
        self._least = Severity(wanted.severity)
        self._ringer = TerminalBell([TerminalSignal(way) for way in wanted.terminal], environ)
        self.write = write
        self._missing = ""
        self._webhook = self._hook(wanted, environ)

    @property
    def trouble(self) -> str:
        """Why something could not be reported; empty if nothing is wrong."""
        sent = self._webhook.trouble if self._webhook is not None else ""
        return "; ".join(filter(None, (self._missing, self._log.trouble, sent)))

    def update(self, snapshot: FleetSnapshot) -> tuple[Alert, ...]:
        """Process a snapshot of all servers; report and return what began or ended."""
        if self._tracker is None:
            self._tracker = FindingTracker(replayed(self._log.read()))
        alerts = self._tracker.update(snapshot.servers, snapshot.at)
        wanted = [one for one in alerts if at_least(one.finding.finding, self._least)]
        if alerts and not self._read_only and self._log.mine():
            for one in alerts:
                self._log.append(document(one))
            for one in wanted:
                self._send(one, snapshot.hostname)
        if self.write is not None and (data := self._ringer.take(wanted, time.monotonic())):
            self.write(data)
        return alerts

    def close(self) -> None:
        """Give queued messages a moment to be sent, and let another console take over."""
        if self._webhook is not None:
            self._webhook.close()
        self._log.close()

    def _send(self, alert: Alert, hostname: str) -> None:
        if self._webhook is not None:
            # Chats such as Slack and Mattermost show ``text`` and ignore the rest.
            self._webhook.send({"text": f"{hostname}: {alert.sentence}", "host": hostname, **document(alert)})

    def _hook(self, wanted: Alerts, environ: Mapping[str, str]) -> Webhook | None:
        if not wanted.webhook or self._read_only:
            return None
        if not wanted.webhook_header_env:
            return Webhook(wanted.webhook, {})
        secret = environ.get(wanted.webhook_header_env, "")
        if not secret or not secret.isascii() or not secret.isprintable():
            fault = "contains characters that are not allowed in a header" if secret else "is not set"
            self._missing = f"alerts: {wanted.webhook_header_env} {fault}, so the webhook is not used"
            return None
        return Webhook(wanted.webhook, {wanted.webhook_header: secret})
