"""The server of ``vllm-console web``, on loopback: a page, the files it needs, and a console process per open page.

The page's terminal (xterm.js with Textual's protocol), style sheet and fonts come from textual-serve. Its server is not
used because it runs commands through a shell, has no access control and waits forever for a program that does not end,
and because its page loads a font from the internet.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import importlib.resources
import os
import re
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from vllm_launchers.patterns import lazy_pattern

DRIVER = "textual.drivers.web_driver:WebDriver"
"""The name that textual-serve uses. The console replaces it with its own driver (`ui.terminal.browser`)."""

LEAVE_SECONDS = 3.0
"""How long a console may take to end after its page is gone, and again after SIGTERM."""

MOST_CELLS = 1000
"""Maximum columns and rows of a page."""

_BEGIN = b"__GANGLION__\n"
"""After this line a console sends packets."""


class ConsoleProcess:
    """A console that draws into a page and ends with it.

    It speaks Textual's browser protocol: packets of one letter, a four-byte length and the content. ``D`` is terminal
    input or output, ``M`` a JSON message.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._in, self._out = process.stdin, process.stdout

    @classmethod
    async def start(cls, options: Sequence[str], columns: int, rows: int) -> ConsoleProcess:
        """Start ``vllm-console`` with these options, for a page of this size.

        It gets its own session, so that ctrl+c in the server's terminal only reaches the server, which then ends it
        properly.

        Raises:
            OSError: it can't be started.
        """
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "vllm_console",
                *options,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=environment(os.environ, columns, rows),
                start_new_session=True,
            )
        )

    async def show(self, draw: Callable[[bytes], Awaitable[object]]) -> None:
        """Pass its output to ``draw`` until it ends; later output is ignored."""
        with contextlib.suppress(asyncio.IncompleteReadError, ValueError, ConnectionError):
            while (line := await self._out.readline()) != _BEGIN:
                if not line:
                    return
            while True:
                kind = await self._out.readexactly(1)
                content = await self._out.readexactly(int.from_bytes(await self._out.readexactly(4), "big"))
                if kind == b"D":
                    await draw(content)
                elif kind == b"M" and msgspec.json.decode(content) == {"type": "exit"}:
                    return

    async def type(self, text: str) -> None:
        """Type into it, like the keyboard and the mouse."""
        await self._send(b"D", text.encode("utf-8", "replace"))

    async def send(self, **message: object) -> None:
        """Send a message about the page: its ``type``, such as ``focus``, and more."""
        await self._send(b"M", msgspec.json.encode(message))

    async def end(self) -> int:
        """End it, by force if needed, and return its exit status. Nothing of it remains afterwards."""
        await self.send(type="quit")
        self._in.close()
        rest = asyncio.ensure_future(self._drop_output())
        try:
            for harder in (self._process.terminate, self._process.kill):
                try:
                    return await asyncio.wait_for(self._process.wait(), LEAVE_SECONDS)
                except TimeoutError:
                    with contextlib.suppress(ProcessLookupError):
                        harder()
            return await self._process.wait()
        finally:
            rest.cancel()

    async def _send(self, kind: bytes, content: bytes) -> None:
        with contextlib.suppress(ConnectionError, RuntimeError):  # it has ended
            self._in.write(kind + len(content).to_bytes(4, "big") + content)
            await self._in.drain()

    async def _drop_output(self) -> None:
        """Read and discard output, because a console that can't write blocks."""
        while await self._out.read(1 << 16):
            pass


def environment(own: Mapping[str, str], columns: int, rows: int) -> dict[str, str]:
    """The environment of a page's console. A page shows Unicode and all colors, whatever the server's terminal does."""
    theirs = {name: value for name, value in own.items() if name not in {"TMUX", "TMUX_PANE", "STY"}}
    return theirs | {
        "TEXTUAL_DRIVER": DRIVER,
        "TEXTUAL_COLOR_SYSTEM": "truecolor",
        "TERM": "xterm-256color",
        "LC_ALL": "C.UTF-8",
        "COLUMNS": str(columns),
        "ROWS": str(rows),
    }


def cells(text: str, default: int) -> int:
    """Parse the columns or rows that a page sends; limited to `MOST_CELLS`."""
    return min(MOST_CELLS, max(1, int(text))) if text.isascii() and text.isdecimal() and len(text) < 6 else default


# -- who may open the page --------------------------------------------------------------------------------------------


COOKIE = "vllm_console"

_LOOPBACK = lazy_pattern(r"(?:127\.0\.0\.1|localhost|\[::1\])(?::\d{1,5})?", re.IGNORECASE | re.ASCII)
"""A ``Host`` header that names this machine. Any port is allowed because it may be forwarded, e.g. by ``ssh -L``."""

REFUSED = (
    "Refused. The link of 'vllm-console web' works once, in the browser that opens it first. "
    "End that command with ctrl+c and run it again for a new link."
)


class PageAccess:
    """The path, token and cookie of one ``vllm-console web``."""

    def __init__(self) -> None:
        self.path = f"/{secrets.token_urlsafe(12)}/"
        self._token: str | None = secrets.token_urlsafe(32)
        self._cookie = secrets.token_urlsafe(32)

    def link(self, port: int) -> str:
        """The link to open in a browser, once."""
        return f"http://127.0.0.1:{port}{self.path}?token={self._token}"

    def exchange(self, token: str) -> str | None:
        """Exchange the token, which is then used up, for the cookie; None for any other token."""
        if self._token is None or not _same(token, self._token):
            return None
        self._token = None
        return self._cookie

    def admits(self, cookies: Mapping[str, str]) -> bool:
        """Whether these cookies are from the browser that had the token."""
        return self._token is None and _same(cookies.get(COOKIE, ""), self._cookie)


def names_this_machine(host: str) -> bool:
    """Whether a ``Host`` header names this machine by a name that nobody else controls."""
    return _LOOPBACK.fullmatch(host) is not None


def same_origin(origin: str, host: str) -> bool:
    """Whether an ``Origin`` header is that of our own page, reached as ``host``."""
    return origin.lower() == f"http://{host}".lower()


def _same(given: str, right: str) -> bool:
    return hmac.compare_digest(given.encode(errors="surrogateescape"), right.encode())


# -- the server -------------------------------------------------------------------------------------------------------


MOST_CONSOLES = 8
"""Maximum number of open pages, each with a process of about 100 MB."""

HEARTBEAT_SECONDS = 15.0
"""A browser that does not answer a ping within half of this is gone."""

MOST_MESSAGE_BYTES = 1 << 20
"""Maximum size of a message from a page, such as pasted text."""

_PAGE = Path(__file__).with_name("page.html")

_OPENING = '<!DOCTYPE html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=./"><a href="./">Open</a>'
"""The response to the link. A redirect would not work: browsers that follow a link from another site do not send strict
cookies."""

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ConsoleServer:
    """Serves consoles, started with ``options``, to the browser that opens the link first."""

    def __init__(self, options: Sequence[str]) -> None:
        self.access = PageAccess()
        self._options = tuple(options)
        self._open: set[web.WebSocketResponse] = set()
        self._consoles = 0

    async def serve(self, listening: socket.socket, ready: Callable[[], object], ended: asyncio.Event) -> None:
        """Serve until ``ended`` is set; no console remains then. ``ready`` is called once the link works."""
        runner = web.AppRunner(self.application(), access_log=None, shutdown_timeout=30.0)
        await runner.setup()
        try:
            await web.SockSite(runner, listening).start()
            ready()
            await ended.wait()
            await asyncio.gather(*(page.close(code=WSCloseCode.GOING_AWAY) for page in tuple(self._open)))
        finally:
            await runner.cleanup()

    def application(self) -> web.Application:
        """The application. Everything is below one path and requires the cookie."""
        application = web.Application(middlewares=[self._admit])
        path = self.access.path
        application.router.add_get(path, self._page)
        application.router.add_get(f"{path}page.js", _script)
        application.router.add_get(f"{path}ws", self._terminal)
        application.router.add_static(f"{path}static", _static_files())
        application.on_response_prepare.append(_harden)
        return application

    @web.middleware
    async def _admit(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Admit our own page in the browser that has the cookie; exchange the token for it."""
        origin = request.headers.get("Origin")
        if not names_this_machine(request.host) or not (origin is None or same_origin(origin, request.host)):
            raise web.HTTPForbidden(text="Refused: this is not the address of 'vllm-console web' on its own machine.")
        if self.access.admits(request.cookies):
            return await handler(request)
        if request.method == "GET" and request.path == self.access.path:
            cookie = self.access.exchange(request.query.get("token", ""))
            if cookie is not None:
                answer = web.Response(text=_OPENING, content_type="text/html")
                answer.set_cookie(COOKIE, cookie, path=self.access.path, httponly=True, samesite="Strict")
                return answer
        raise web.HTTPForbidden(text=REFUSED)

    async def _page(self, request: web.Request) -> web.Response:
        if "token" in request.query:  # opened again by the browser that has the cookie
            return web.Response(text=_OPENING, content_type="text/html")
        address = f"ws://{request.host}{self.access.path}ws"
        return web.Response(text=_PAGE.read_text("utf-8").replace("{{websocket}}", address), content_type="text/html")

    async def _terminal(self, request: web.Request) -> web.StreamResponse:
        """Run a console for as long as the page is connected."""
        if "Origin" not in request.headers:  # every browser sends it
            raise web.HTTPForbidden(text=REFUSED)
        if self._consoles >= MOST_CONSOLES:
            raise web.HTTPServiceUnavailable(text=f"{MOST_CONSOLES} pages are open: close one, then open this again.")
        self._consoles += 1
        try:
            page = web.WebSocketResponse(heartbeat=HEARTBEAT_SECONDS, max_msg_size=MOST_MESSAGE_BYTES)
            await page.prepare(request)
            self._open.add(page)
            columns, rows = (
                cells(request.query.get(name, ""), usual) for name, usual in (("width", 80), ("height", 24))
            )
            try:
                console = await ConsoleProcess.start(self._options, columns, rows)
                try:
                    await _connect(page, console)
                finally:
                    await asyncio.shield(console.end())
            finally:
                self._open.discard(page)
        finally:
            self._consoles -= 1
        return page


async def _connect(page: web.WebSocketResponse, console: ConsoleProcess) -> None:
    """Forward the console's output and the page's messages until one of them ends."""

    async def draw() -> None:
        await console.show(page.send_bytes)
        await page.close()

    drawing = asyncio.ensure_future(draw())
    try:
        async for message in page:
            if message.type is WSMsgType.TEXT:
                await _take(message.data, page, console)
    finally:
        drawing.cancel()
        await asyncio.gather(drawing, return_exceptions=True)


async def _take(text: str, page: web.WebSocketResponse, console: ConsoleProcess) -> None:
    """Handle a message from the page; ignore unknown ones."""
    try:
        message = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return
    match message:
        case ["stdin", str(typed)]:
            await console.type(typed)
        case ["resize", {"width": int(width), "height": int(height)}] if min(width, height) > 0:
            await console.send(type="resize", width=min(width, MOST_CELLS), height=min(height, MOST_CELLS))
        case ["focus" | "blur" as kind]:
            await console.send(type=kind)
        case ["ping", str(sent)]:
            await page.send_json(["pong", sent])


async def _script(_: web.Request) -> web.FileResponse:
    return web.FileResponse(_PAGE.with_suffix(".js"))


def _static_files() -> Path:
    return Path(str(importlib.resources.files("textual_serve").joinpath("static")))


async def _harden(request: web.Request, answer: web.StreamResponse) -> None:
    """Prevent loading from elsewhere, framing, caching and referrers, regardless of the page's scripts."""
    socket_too = f" ws://{request.host}" if names_this_machine(request.host) else ""
    answer.headers["Content-Security-Policy"] = (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; font-src 'self'; "
        f"img-src 'self' data:; connect-src 'self'{socket_too}; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    answer.headers["Cache-Control"] = "no-store"
    answer.headers["Referrer-Policy"] = "no-referrer"
    answer.headers["X-Content-Type-Options"] = "nosniff"
    answer.headers["Cross-Origin-Resource-Policy"] = "same-origin"
