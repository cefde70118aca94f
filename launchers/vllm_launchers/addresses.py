"""Where a server that binds to an address is asked, and who can reach it.

Standard library only: every room may use it.
"""

from __future__ import annotations

_WILDCARDS = {"": "127.0.0.1", "*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""Hosts that mean all addresses of a machine, and the one under which that machine itself reaches them."""


def is_wildcard(host: str) -> bool:
    """Whether a server that binds to ``host`` listens on all addresses."""
    return host.strip("[]") in _WILDCARDS


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    import ipaddress  # seldom wanted, and not small: a keeper lives beside every server

    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def reachable(host: str) -> str:
    """The address at which this machine asks a server that binds to ``host``; without brackets."""
    host = host.strip("[]")
    return _WILDCARDS.get(host, host)


def base_url(host: str, port: int, *, tls: bool = False) -> str:
    """The URL at which this machine asks a server that binds to ``host`` and ``port``, over TLS or not."""
    asked, scheme = reachable(host), "https" if tls else "http"
    return f"{scheme}://[{asked}]:{port}" if ":" in asked else f"{scheme}://{asked}:{port}"
