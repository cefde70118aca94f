"""Where a server that binds to an address is asked, and who can reach it.

Standard library only: every room may use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl

TLS_FLAGS = ("ssl-certfile", "ssl-keyfile")
"""Flags of vLLM with any of which it speaks TLS: as uvicorn takes it, either file is enough."""

_WILDCARDS = {"": "127.0.0.1", "*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""Hosts that mean all addresses of a machine, and the one under which that machine itself reaches them."""


def is_wildcard(host: str) -> bool:
    """Whether a server that binds to ``host`` listens on all addresses."""
    return host.strip("[]") in _WILDCARDS


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address. Of names ``localhost`` alone is known to be such."""
    host = host.strip("[]")
    if host in ("127.0.0.1", "::1") or host in _WILDCARDS:
        return host not in _WILDCARDS
    import ipaddress  # seldom wanted, and not small: a keeper lives beside every server

    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower().removesuffix(".") == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def open_words(host: str, key: bool | None) -> str:
    """The warning of a server that others can reach and use; empty for one that is alone or has an API key.

    ``key`` is whether it has one, None where none was seen and that cannot be known. The one place that decides.
    """
    if key or is_loopback(host):
        return ""
    where = f"all addresses ({host})" if host.strip("[]") else "all addresses"
    where = where if is_wildcard(host) else host
    if key is None:
        return f"it listens on {where}, no API key seen: whoever reaches it can use it, unless it has one"
    return f"it listens on {where} without an API key: whoever reaches it can use it"


def reachable(host: str) -> str:
    """The address at which this machine asks a server that binds to ``host``; without brackets."""
    host = host.strip("[]")
    return _WILDCARDS.get(host, host)


def base_url(host: str, port: int, *, tls: bool = False) -> str:
    """The URL at which this machine asks a server that binds to ``host`` and ``port``, over TLS or not."""
    asked, scheme = reachable(host), "https" if tls else "http"
    return f"{scheme}://[{asked}]:{port}" if ":" in asked else f"{scheme}://{asked}:{port}"


def tls_to_own() -> ssl.SSLContext:
    """How to speak TLS with a server on this machine, whatever certificate it shows.

    Ours show what they were given, often made out to a public name or by nobody that this machine trusts; whether the
    port is the server's own is seen by who listens there, which says more.
    """
    import ssl  # several MB that only those of such a server are to have

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # reads none of the authorities of this machine: that takes 20 ms
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
