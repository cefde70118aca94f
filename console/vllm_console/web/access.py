"""Who may see the console in a browser: whoever opens the link first, and from then on that browser alone.

The link holds a token that is good for one use. It is exchanged for a cookie. Browsers don't separate cookies by port,
so that a page of another user's server on this machine would be sent it too: its path is a random one, below which
everything is served, and to which nobody else can lead the browser.

A page elsewhere can have a name of its own lead to this machine (DNS rebinding), or connect to it from its script. The
first is recognized by the ``Host`` header, the second by ``Origin``.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Mapping

COOKIE = "vllm_console"

_LOOPBACK = re.compile(r"(?:127\.0\.0\.1|localhost|\[::1\])(?::\d{1,5})?", re.IGNORECASE | re.ASCII)
"""A ``Host`` header that names this machine. Any port: it may be forwarded, as by ``ssh -L``."""

REFUSED = (
    "Refused. The link of 'vllm-console web' works once, in the browser that opens it first. "
    "End that command with ctrl+c and run it again for a new link."
)


class Access:
    """The path, the token and the cookie of one ``vllm-console web``."""

    def __init__(self) -> None:
        self.path = f"/{secrets.token_urlsafe(12)}/"
        """Everything is below it."""
        self._token: str | None = secrets.token_urlsafe(32)
        self._cookie = secrets.token_urlsafe(32)

    def link(self, port: int) -> str:
        """What a person opens in a browser, once."""
        return f"http://127.0.0.1:{port}{self.path}?token={self._token}"

    def exchange(self, token: str) -> str | None:
        """The cookie for the token, which is used up by that; None for any other."""
        if self._token is None or not _same(token, self._token):
            return None
        self._token = None
        return self._cookie

    def admits(self, cookies: Mapping[str, str]) -> bool:
        """Whether these cookies are those of the browser that had the token."""
        return self._token is None and _same(cookies.get(COOKIE, ""), self._cookie)


def names_this_machine(host: str) -> bool:
    """Whether a ``Host`` header names this machine by a name that nobody else can hand out."""
    return _LOOPBACK.fullmatch(host) is not None


def same_origin(origin: str, host: str) -> bool:
    """Whether an ``Origin`` header is that of our own page, reached as ``host``."""
    return origin.lower() == f"http://{host}".lower()


def _same(given: str, right: str) -> bool:
    return hmac.compare_digest(given.encode(), right.encode())
