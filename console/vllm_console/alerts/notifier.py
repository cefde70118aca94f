"""Tells findings: to the log, to a webhook, to the terminal. The console calls it at every look, as does ``watch``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from vllm_console.alerts.findings import Book, Finding, Told, at_least, document, replayed
from vllm_console.alerts.log import FindingsLog
from vllm_console.alerts.terminal import Ringer, Way
from vllm_console.alerts.webhook import Webhook
from vllm_console.config import Alerts
from vllm_console.diagnosis.model import Severity
from vllm_console.fleet.model import FleetSnapshot


class Notifier:
    """What begins and ends, told once.

    Of several consoles on one state folder one writes the log and sends to the webhook; each rings its own terminal,
    by ``write``, which gets bytes and must not block. A ``read_only`` one rings, and writes and sends nothing. Nothing
    here raises; ``trouble`` is what went wrong, in a sentence.
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
        self._book: Book | None = None
        self._least = Severity(wanted.severity)
        self._ringer = Ringer([Way(way) for way in wanted.terminal], environ)
        self.write = write
        self._missing = ""
        self._webhook = self._hook(wanted, environ)

    @property
    def trouble(self) -> str:
        """Why something could not be told; empty when nothing is wrong."""
        sent = self._webhook.trouble if self._webhook is not None else ""
        return "; ".join(filter(None, (self._missing, self._log.trouble, sent)))

    def look(self, snapshot: FleetSnapshot) -> tuple[Told, ...]:
        """Take in a look at all servers; what began or ended is told, and returned."""
        if self._book is None:
            self._book = Book(self._known())
        told = self._book.look(snapshot.servers, snapshot.at)
        wanted = [one for one in told if at_least(one.finding.condition, self._least)]
        if told and not self._read_only and self._log.mine():
            for one in told:
                self._log.append(document(one))
            for one in wanted:
                self._send(one, snapshot.hostname)
        if self.write is not None and (data := self._ringer.take(wanted, time.monotonic())):
            self.write(data)
        return told

    def close(self) -> None:
        """Give messages on their way a moment, and let another console take over."""
        if self._webhook is not None:
            self._webhook.close()
        self._log.close()

    def _known(self) -> dict[tuple[str, str], Finding]:
        return replayed(self._log.read())

    def _send(self, told: Told, hostname: str) -> None:
        if self._webhook is not None:
            # Chats such as Slack and Mattermost show ``text`` and pass over the rest.
            self._webhook.send({"text": f"{hostname}: {told.sentence}", "host": hostname, **document(told)})

    def _hook(self, wanted: Alerts, environ: Mapping[str, str]) -> Webhook | None:
        if not wanted.webhook or self._read_only:
            return None
        if not wanted.webhook_header_env:
            return Webhook(wanted.webhook)
        secret = environ.get(wanted.webhook_header_env, "")
        if not secret or not secret.isascii() or not secret.isprintable():
            fault = "holds what no header can" if secret else "is not set"
            self._missing = f"alerts: {wanted.webhook_header_env} {fault}, so the webhook is not asked"
            return None
        return Webhook(wanted.webhook, {wanted.webhook_header: secret})
