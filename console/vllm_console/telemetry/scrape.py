"""Asking a server over HTTP: one kept-alive connection, a deadline for the whole answer, a cap on its size.

Standard library only: the recorder lives beside every server and must stay small.
"""

from __future__ import annotations

import http.client
import socket
import ssl  # http.client has it anyway
import time
from typing import Any
from urllib.parse import urlsplit

from vllm_console.telemetry.model import Sample
from vllm_console.telemetry.parse import NotMetricsError, Parser
from vllm_console.text import plain
from vllm_launchers.addresses import is_loopback, tls_to_own

TIMEOUT_SECONDS = 2.0
BODY_LIMIT = 4 * 1024 * 1024
"""vLLM says some 50 KB per engine."""


class ScrapeError(Exception):
    """A server could not be asked, or what it said is of no use. The message is one sentence for people.

    ``kind`` is one of ``refused``, ``timeout``, ``network``, ``status``, ``redirect``, ``html``, ``empty``,
    ``cut off``, ``too large``, ``garbage`` and ``url``.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _DeadlineSocket(socket.socket):
    """A socket whose every wait ends by one deadline, so that an answer dripping in byte by byte is cut short too."""

    deadline = 0.0

    def _limit(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("deadline passed")
        self.settimeout(left)

    def connect(self, address: Any) -> None:
        self._limit()
        super().connect(address)

    def recv_into(self, *arguments: Any) -> int:
        self._limit()
        return super().recv_into(*arguments)

    def sendall(self, *arguments: Any) -> None:
        self._limit()
        super().sendall(*arguments)


class _DeadlineTlsSocket(_DeadlineSocket, ssl.SSLSocket):
    """The same over TLS; the handshake ends by the deadline as well."""


class _Connection(http.client.HTTPConnection):
    """An HTTP connection over a `_DeadlineSocket`, with TLS where a context for it is given."""

    deadline = 0.0

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        super().__init__(host, port)
        self._tls = tls

    def connect(self) -> None:
        problem: OSError = OSError(f"{self.host} has no address")
        for family, kind, protocol, _, address in socket.getaddrinfo(self.host, self.port, 0, socket.SOCK_STREAM):
            candidate: socket.socket = _DeadlineSocket(family, kind, protocol)
            try:
                self.sock = candidate
                self.limit(self.deadline)
                candidate.connect(address)
                candidate.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._tls is not None:
                    self.sock = candidate = self._tls.wrap_socket(candidate, server_hostname=self.host)
                    self.limit(self.deadline)
            except OSError as error:
                self.sock = None
                candidate.close()
                problem = error
                continue
            return
        raise problem

    def limit(self, deadline: float) -> None:
        """Everything from now on, on this connection or the next, ends by ``deadline`` (`time.monotonic`)."""
        self.deadline = deadline
        if isinstance(self.sock, _DeadlineSocket):
            self.sock.deadline = deadline


class Scraper:
    """Asks one server, again and again, over one connection. Not for use from several threads at once.

    ``url`` is the server's base URL or that of its ``/metrics``. Every method raises `ScrapeError` by ``timeout``
    seconds at the latest (looking up a host name excepted). Redirects are not followed.

    The certificate of an https server is checked unless ``own`` says that it is one of ours, or it is on this machine:
    our servers show whatever certificate they were given, often made out to another name or by themselves; who
    listens on the port is checked by the keeper, by pid.
    """

    def __init__(
        self,
        url: str,
        timeout: float = TIMEOUT_SECONDS,
        body_limit: int = BODY_LIMIT,
        headers: dict[str, str] | None = None,
        *,
        own: bool = False,
    ) -> None:
        scheme, host, port, self._prefix = _split(url)
        self.place = f"{'[' + host + ']' if ':' in host else host}:{port}"
        self._timeout = timeout
        self._body_limit = body_limit
        self._headers = {"Accept": "text/plain, application/json", **(headers or {})}
        self._connection = _Connection(
            host, port, _tls(check=not own and not is_loopback(host)) if scheme == "https" else None
        )
        self._parser = Parser()

    def close(self) -> None:
        """Close the connection; the next question opens a new one."""
        self._connection.close()

    def sample(self, at: float) -> Sample:
        """Ask for ``/metrics`` and read the answer as a look at ``at`` (Unix seconds)."""
        text = self.metrics_text()
        try:
            return self._parser.parse(text, at)
        except NotMetricsError as error:
            raise ScrapeError(error.kind, self._sentence(error.kind)) from None

    def metrics_text(self) -> str:
        """The body of ``/metrics`` as it is, checked for being text but not for its sense."""
        body, content_type = self._get("/metrics")
        if content_type.startswith("text/html"):
            raise ScrapeError("html", self._sentence("html"))
        try:
            return body.decode("utf-8")
        except UnicodeDecodeError:
            raise ScrapeError("garbage", self._sentence("garbage")) from None

    def _get(self, path: str) -> tuple[bytes, str]:
        reused = self._connection.sock is not None
        self._connection.limit(time.monotonic() + self._timeout)
        try:
            try:
                return self._exchange(path)
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
                if not reused:
                    raise
                self.close()  # the server let go of an idle connection: not its fault, ask again
                return self._exchange(path)
        except ScrapeError:
            self.close()
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise self._explained(error, path) from None

    def _exchange(self, path: str) -> tuple[bytes, str]:
        self._connection.request("GET", self._prefix + path, headers=self._headers)
        response = self._connection.getresponse()
        if 300 <= response.status < 400:
            where = f"{self.place} sends {path} elsewhere (HTTP {response.status})"
            raise ScrapeError("redirect", f"{where}: give the server's own address.")
        if response.status != 200:
            raise ScrapeError("status", self._status_sentence(path, response.status, response.reason))
        if response.length is not None and response.length > self._body_limit:
            raise self._too_large(path)
        body = bytearray()
        while chunk := response.read1(65536):
            body += chunk
            if len(body) > self._body_limit:
                raise self._too_large(path)
        if response.length:
            raise http.client.IncompleteRead(bytes(body[:0]), response.length)
        content_type = (response.getheader("Content-Type") or "").lower()
        response.close()  # the answer, not the connection: read1 leaves it open at its end
        return bytes(body), content_type

    def _too_large(self, path: str) -> ScrapeError:
        limit = self._body_limit / (1024 * 1024)
        what = f"{self.place} answered {path} with more than {limit:g} MiB"
        return ScrapeError("too large", f"{what}: vLLM never says so much; check the address.")

    def _status_sentence(self, path: str, status: int, reason: str) -> str:
        advice = {
            401: "it wants an API key",
            403: "it wants an API key",
            404: "check that this is vLLM's address",
            503: "its engine is dead or still starting; see its log",
        }.get(status, "see its log")
        words = plain(reason, 80)
        return f"{self.place} answered {path} with HTTP {status}{' ' + words if words else ''}: {advice}."

    def _sentence(self, kind: str) -> str:
        return {
            "html": f"{self.place} answered with a web page (HTML), not metrics: check that this is vLLM's port.",
            "empty": f"{self.place} answered /metrics with nothing: check that this is vLLM's port.",
            "cut off": f"{self.place} cut its metrics off in the middle: ask again, and see its log if it stays so.",
        }.get(
            kind, f"{self.place} answered /metrics with something that is not metrics: check that this is vLLM's port."
        )

    def _explained(self, error: Exception, path: str) -> ScrapeError:
        place = self.place
        if isinstance(error, TimeoutError):
            message = (
                f"{place} did not answer {path} within {self._timeout:g} s: it is hung, overloaded or unreachable."
            )
            return ScrapeError("timeout", message)
        if isinstance(error, ConnectionRefusedError):
            return ScrapeError("refused", f"{place} refused the connection: no server listens there (yet).")
        if isinstance(error, (http.client.IncompleteRead, http.client.RemoteDisconnected, ConnectionResetError)):
            return ScrapeError("cut off", self._sentence("cut off").replace("its metrics", f"its answer to {path}"))
        if isinstance(error, (http.client.HTTPException, ValueError)):
            return ScrapeError(
                "garbage", f"{place} does not speak HTTP as a server should: check that this is vLLM's port."
            )
        reason = plain(getattr(error, "strerror", None) or str(error), 120)
        return ScrapeError("network", f"{place} could not be reached ({reason}): check host and port.")


def _tls(*, check: bool) -> ssl.SSLContext:
    """How to speak TLS: with a look at the other side's certificate or without."""
    context = ssl.create_default_context() if check else tls_to_own()
    context.sslsocket_class = _DeadlineTlsSocket
    return context


def _split(url: str) -> tuple[str, str, int, str]:
    """Scheme, host, port and path prefix of a server's URL, which may already end in ``/metrics``."""
    shown = plain(url, 120)
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
    except ValueError:
        raise ScrapeError("url", f"{shown}: this is no address; write http://HOST:PORT.") from None
    if parts.scheme not in ("http", "https"):
        raise ScrapeError("url", f"{shown}: only http:// and https:// addresses can be asked.")
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        raise ScrapeError("url", f"{shown}: the port is not a number from 1 to 65535.") from None
    if not parts.hostname or any(character <= " " or character == "\x7f" for character in url):
        raise ScrapeError("url", f"{shown}: this is no address; write http://HOST:PORT.")
    return parts.scheme, parts.hostname, port, parts.path.rstrip("/").removesuffix("/metrics").rstrip("/")


def scrape_once(url: str, at: float, timeout: float = 5.0) -> Sample:
    """Ask a server for its metrics once; raises `ScrapeError`."""
    scraper = Scraper(url, timeout)
    try:
        return scraper.sample(at)
    finally:
        scraper.close()
