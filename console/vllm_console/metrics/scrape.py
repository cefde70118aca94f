"""Scrape a server over HTTP: one keep-alive connection, a deadline for the whole response, a cap on its size.

Standard library only: a recorder runs beside every server and must stay small.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from vllm_console.metrics.parse import NotMetricsError, Parser
from vllm_console.metrics.sample import Sample
from vllm_console.text import plain
from vllm_launchers.addresses import is_loopback, server_url, tls_to_own
from vllm_launchers.errors import OperationError, UsageError
from vllm_launchers.http_connection import (
    CutOffError,
    HttpConnection,
    NoResponseError,
    NotHttpError,
    TooLargeError,
)
from vllm_launchers.listeners import Owner, WrongProcessError

if TYPE_CHECKING:
    import ssl

TIMEOUT_SECONDS = 2.0
BODY_LIMIT = 4 * 1024 * 1024
"""vLLM reports about 50 KB per engine."""
_UNUSABLE = frozenset({9, 10, 62, 64})
"""OpenSSL error codes of certificates that no CA makes valid: not yet valid, expired, wrong name or address."""

UNANSWERED_SAMPLES = 3
"""Consecutive timeouts before a server that was ready counts as unresponsive, as with keepers."""

_HEADERS = {"Accept": "text/plain, application/json"}


class ScrapeError(OperationError):
    """A server could not be scraped, or its response is unusable. The message is one sentence for users.

    ``kind`` is one of ``refused``, ``wrong process``, ``timeout``, ``network``, ``untrusted`` (certificate from an
    unknown CA), ``certificate`` (wrong name or expired), ``status``, ``redirect``, ``html``, ``empty``, ``cut off``,
    ``too large``, ``garbage`` and ``url``. ``status`` is the HTTP status, 0 without a response.
    """

    def __init__(self, kind: str, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.kind, self.status = kind, status


class Scraper:
    """Scrapes one server repeatedly over one connection. Not thread-safe.

    ``url`` is the server's base URL or that of its ``/metrics``. Requests end with `ScrapeError` after ``timeout``
    seconds at the latest (DNS lookup excepted). Redirects are not followed.

    ``owner`` is the server's process on this machine: no other process is contacted, so one that took its port cannot
    impersonate it. An https server's certificate is verified unless an ``owner`` is given or the server is on this
    machine, since local servers often have a self-signed certificate or one for another name. With ``tls``, a context
    from `verifying`, local certificates are verified too. ``key`` is the API key to send with each request.
    """

    def __init__(
        self,
        url: str,
        timeout: float = TIMEOUT_SECONDS,
        *,
        owner: Owner | None = None,
        key: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        try:
            server = server_url(url)
        except UsageError as error:
            raise ScrapeError("url", f"{error}.") from error
        host, self._secure, self._prefix = server.host, server.tls, server.path
        self.place = f"{'[' + host + ']' if ':' in host else host}:{server.port}"
        self._timeout = timeout
        self._headers = _HEADERS | ({"Authorization": f"Bearer {key}"} if key else {})
        context = tls
        if self._secure and tls is None:
            context = verifying() if owner is None and not is_loopback(host) else tls_to_own()
        self._connection = HttpConnection(host, server.port, context if self._secure else None, owner)
        self._parser = Parser()

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        self._connection.close()

    def sample(self, at: float) -> Sample:
        """Scrape ``/metrics`` as a sample at ``at`` (Unix seconds)."""
        return self.parse(self.metrics_text(), at)

    def parse(self, text: str, at: float) -> Sample:
        """Parse a ``/metrics`` body of the server as a sample at ``at`` (Unix seconds)."""
        try:
            return self._parser.parse(text, at)
        except NotMetricsError as error:
            raise ScrapeError(error.kind, self._sentence(error.kind)) from None

    def metrics_text(self) -> str:
        """The raw body of ``/metrics``, verified to be text but not parsed."""
        body, content_type = self.get("/metrics")
        if content_type.startswith("text/html"):
            raise ScrapeError("html", self._sentence("html"))
        try:
            return body.decode("utf-8")
        except UnicodeDecodeError:
            raise ScrapeError("garbage", self._sentence("garbage")) from None

    def version(self) -> str | None:
        """The version reported by ``/version``; None if the server does not report a usable one."""
        import json  # needed once per server

        try:
            document = json.loads(self.get("/version")[0])
        except (ScrapeError, ValueError, RecursionError):
            return None
        version = document.get("version") if isinstance(document, dict) else None
        return plain(version, 60) if isinstance(version, str) else None

    def get(self, path: str) -> tuple[bytes, str]:
        """The body at a path below the base URL, and its content type in lower case."""
        reused = self._connection.sock is not None
        self._connection.deadline = time.monotonic() + self._timeout
        try:
            try:
                return self._exchange(path)
            except (ConnectionResetError, BrokenPipeError):
                if not reused:
                    raise
                self.close()  # the server closed an idle connection: retry
                return self._exchange(path)
        except ScrapeError:
            self.close()
            raise
        except (OSError, CutOffError, NotHttpError, ValueError) as error:
            self.close()
            raise self._explained(error, path) from None

    def _exchange(self, path: str) -> tuple[bytes, str]:
        response = self._connection.get(self._prefix + path, self._headers)
        if 300 <= response.status < 400:
            target = plain(response.headers.get("location", "").partition("?")[0], 100)
            where = f"{self.place} redirects {path} (HTTP {response.status}{' to ' if target else ''}{target})"
            raise ScrapeError("redirect", f"{where}: give the server's own address.", response.status)
        if response.status != 200:
            raise ScrapeError("status", self._status_sentence(path, response.status, response.reason), response.status)
        try:
            return response.read(BODY_LIMIT), response.headers.get("content-type", "").lower()
        except TooLargeError:
            limit = BODY_LIMIT / (1024 * 1024)
            what = f"{self.place} answered {path} with more than {limit:g} MiB"
            message = f"{what}: vLLM's metrics page is never that large; check the address."
            raise ScrapeError("too large", message) from None

    def _status_sentence(self, path: str, status: int, reason: str) -> str:
        advice = {
            401: "it requires an API key",
            403: "it requires an API key",
            404: "check that this is vLLM's address",
            503: "its engine is dead or still starting; see its log",
        }.get(status, "see its log")
        words = plain(reason, 80)
        return f"{self.place} answered {path} with HTTP {status}{' ' + words if words else ''}: {advice}."

    def _sentence(self, kind: str) -> str:
        return {
            "html": f"{self.place} answered with a web page (HTML), not metrics: check that this is vLLM's port.",
            "empty": f"{self.place} answered /metrics with nothing: check that this is vLLM's port.",
            "cut off": f"{self.place} sent truncated metrics: try again, and see its log if that persists.",
        }.get(
            kind, f"{self.place} answered /metrics with something that is not metrics: check that this is vLLM's port."
        )

    def _explained(self, error: Exception, path: str) -> ScrapeError:
        place = self.place
        if isinstance(error, TimeoutError):
            message = f"{place} did not answer {path} within {self._timeout:g}s: it is hung, overloaded or unreachable."
            return ScrapeError("timeout", message)
        if isinstance(error, WrongProcessError):
            return ScrapeError("wrong process", f"{error}: its metrics are ignored.")
        if isinstance(error, ConnectionRefusedError):
            return ScrapeError("refused", f"{place} refused the connection: no server listens there (yet).")
        if isinstance(error, NoResponseError) and not self._secure:
            message = (
                f"{place} closed the connection without a response: if it uses TLS, its address is https://{place}"
            )
            return ScrapeError("cut off", f"{message}.")
        if isinstance(error, (CutOffError, ConnectionResetError)):
            return ScrapeError("cut off", self._sentence("cut off").replace("its metrics", f"its answer to {path}"))
        if self._secure and (found := _tls_problem(error, place)) is not None:
            return found
        if isinstance(error, (NotHttpError, ValueError)):
            return ScrapeError("garbage", f"{place} does not respond with valid HTTP: check that this is vLLM's port.")
        reason = plain(getattr(error, "strerror", None) or str(error), 120)
        return ScrapeError("network", f"{place} could not be reached ({reason}): check host and port.")


def still_busy(unanswered: int, *, ready: bool) -> bool:
    """Whether a server counts as busy after so many consecutive timeouts, rather than as unresponsive."""
    return ready and 0 < unanswered < UNANSWERED_SAMPLES


def _tls_problem(error: Exception, place: str) -> ScrapeError | None:
    """The error to report if TLS is what failed, otherwise None."""
    import ssl

    if isinstance(error, ssl.SSLCertVerificationError):  # a subclass of ValueError
        why = plain(error.verify_message, 120).rstrip(".")
        if error.verify_code in _UNUSABLE:
            return ScrapeError("certificate", f"{place} presents an invalid certificate: {why}.")
        return ScrapeError("untrusted", f"{place} shows a certificate that is not trusted: {why}.")
    if isinstance(error, ssl.SSLError):
        return ScrapeError("network", f"{place} failed the TLS handshake: check scheme (https) and port.")
    return None


def verifying(ca: str = "") -> ssl.SSLContext:
    """A TLS context that verifies certificates, trusting only the CAs in file ``ca`` if given. Raises `ScrapeError`."""
    import ssl  # takes several MB, which only recorders of TLS servers should spend

    try:
        return ssl.create_default_context(cafile=ca or None)
    except OSError as error:  # also an ssl.SSLError
        shown = plain(ca, 200)
        raise ScrapeError("url", f"{shown} contains no readable PEM certificates.") from error


def scrape_once(url: str, at: float, timeout: float = 5.0) -> Sample:
    """Scrape a server once; raises `ScrapeError`."""
    with contextlib.closing(Scraper(url, timeout)) as scraper:
        return scraper.sample(at)
