"""The address at which a server is reached, given the one it binds or its URL, and who can reach it.

Standard library only: every package may use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_launchers.errors import UsageError
from vllm_launchers.values import Value

if TYPE_CHECKING:
    import socket
    import ssl

TLS_FLAGS = ("ssl-certfile", "ssl-keyfile")
"""vLLM uses TLS if any of these flags is set: as in uvicorn, either file is enough."""

_WILDCARDS = {"": "127.0.0.1", "*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""Hosts that mean all addresses of a machine, and the address at which the machine itself reaches them."""

_PORTS = {"http": 80, "https": 443}
"""Default ports by scheme."""


def family_of(host: str) -> socket.AddressFamily:
    """The socket family that vLLM binds for ``host``: IPv6 for an IPv6 address, else IPv4 (also for names).

    Like ``create_server_socket`` in vLLM's entry points, 0.8 to 0.33.
    """
    import socket  # slow to import, and not needed by commands that do not connect to anything

    return socket.AddressFamily.AF_INET6 if ":" in host else socket.AddressFamily.AF_INET


def is_wildcard(host: str) -> bool:
    """Whether a server that binds to ``host`` listens on all addresses."""
    return host.strip("[]") in _WILDCARDS


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address. The only name known to be local is ``localhost``."""
    host = host.strip("[]")
    if host in ("127.0.0.1", "::1") or host in _WILDCARDS:
        return host not in _WILDCARDS
    import ipaddress  # rarely needed and not small, while a keeper runs beside every server

    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower().removesuffix(".") == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def format_exposure(host: str, key: bool | None) -> str:
    """A warning about a server that others can reach and use; empty if it is local or has an API key.

    ``key``: whether it has one; None if none was seen but it may have one. All such warnings come from here.
    """
    if key or is_loopback(host):
        return ""
    where = f"all addresses ({host})" if host.strip("[]") else "all addresses"
    where = where if is_wildcard(host) else host
    if key is None:
        return f"it listens on {where}, no API key seen: anyone who can reach it can use it, unless it has one"
    return f"it listens on {where} without an API key: anyone who can reach it can use it"


def reachable(host: str) -> str:
    """The address, without brackets, at which this machine reaches a server that binds ``host``."""
    host = host.strip("[]")
    return _WILDCARDS.get(host, host)


def base_url(host: str, port: int, *, tls: bool = False) -> str:
    """The URL at which this machine reaches a server that binds ``host`` and ``port``."""
    asked, scheme = reachable(host), "https" if tls else "http"
    return f"{scheme}://[{asked}]:{port}" if ":" in asked else f"{scheme}://{asked}:{port}"


class ServerUrl(Value):
    """A server's URL, as parsed by `server_url`: ``path`` is empty or begins with a slash and ends without one."""

    scheme: str
    host: str
    port: int
    path: str = ""

    @property
    def tls(self) -> bool:
        """Whether the server speaks TLS."""
        return self.scheme == "https"

    @property
    def base(self) -> str:
        """The base URL of its API, without the default port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.path}"


def server_url(text: str) -> ServerUrl:
    """Parse a server's URL, which may end with ``/v1`` or ``/metrics``.

    Raises:
        UsageError: it is not such a URL, or has a user name, a query or a fragment. A password is not shown.
    """
    from urllib.parse import urlsplit  # not small either

    shown = "the URL" if "@" in text else repr(text[:200])
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port == 0 or parts.scheme not in _PORTS or not text.isprintable() or " " in text:
        raise UsageError(f"{shown} is not a server URL; expected one such as http://gpubox:8000")
    if parts.username is not None:
        raise UsageError("the URL contains a user name; for an API key, attach the endpoint with --key-env VAR")
    if parts.query or parts.fragment:
        raise UsageError(f"{shown} has a query or a fragment: give the server's base URL")
    if not parts.path.isascii():
        raise UsageError(f"{shown} has a path that is not ASCII: percent-encode it")
    path = parts.path.rstrip("/")
    for ending in ("/metrics", "/v1"):
        path = path.removesuffix(ending).rstrip("/")
    return ServerUrl(parts.scheme, host, port or _PORTS[parts.scheme], path)


def tls_to_own() -> ssl.SSLContext:
    """A TLS context for a server on this machine that accepts any certificate.

    Our servers use the certificate they were given, often for a public name or from an untrusted issuer. That the
    server's own process listens on the port is stronger proof.
    """
    import ssl  # takes several MB that only keepers of such servers should spend

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # without loading CA certificates, which takes 20 ms
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
