"""The address at which a server is reached, given the one it binds, and who can reach it.

Standard library only: every package may use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    import ssl

TLS_FLAGS = ("ssl-certfile", "ssl-keyfile")
"""vLLM uses TLS if any of these flags is set: as in uvicorn, either file is enough."""

_WILDCARDS = {"": "127.0.0.1", "*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""Hosts that mean all addresses of a machine, and the address at which the machine itself reaches them."""


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
