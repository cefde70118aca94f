"""The server of ``vllm-console web``, on loopback: a page, the files it needs, and a console for each open page.

The page's terminal (xterm.js with Textual's protocol), its style sheet and its fonts are those of textual-serve. Its
server is not used: it runs commands through a shell, knows no access control, waits for ever for a program that does
not end, and its page loads a font from the internet.
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
"""As textual-serve names it. The console has its own way of speaking to it (`ui.terminal.browser`)."""

LEAVE_SECONDS = 3.0
"""How long a console may take to end when its page is gone, and again after SIGTERM."""

MOST_CELLS = 1000
"""Columns and rows of a page, at most."""

_BEGIN = b"__GANGLION__\n"
"""After this line a console speaks in packets."""


class ConsoleProcess:
    """A console that draws into a page, and ends with it.

    It speaks Textual's protocol for browsers: packets of a letter, four bytes of length and the content. ``D`` is what
    a terminal would show or type, ``M`` a message in JSON.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._in, self._out = process.stdin, process.stdout

    @classmethod
    async def start(cls, options: Sequence[str], columns: int, rows: int) -> ConsoleProcess:
        """Start ``vllm-console`` with these options, for a page of that size.

        It has a session of its own: ctrl+c in the terminal of the server is for the server, which ends it in order.

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

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    async def show(self, draw: Callable[[bytes], Awaitable[object]]) -> None:
        """Hand what it draws to ``draw`` until it ends. What it prints afterwards is for nobody."""
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
        """Type into it, as keys and the mouse do."""
        await self._send(b"D", text.encode("utf-8", "replace"))

    async def send(self, **message: object) -> None:
        """Tell it of the page: its ``type``, such as ``focus``, and more."""
        await self._send(b"M", msgspec.json.encode(message))

    async def end(self) -> int:
        """End it, by force in the end; its exit status. Nothing of it is left afterwards."""
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
        """A console that can't write waits."""
        while await self._out.read(1 << 16):
            pass


def environment(own: Mapping[str, str], columns: int, rows: int) -> dict[str, str]:
    """The environment of a page's console: a page shows Unicode and all colors, whatever the server's terminal does."""
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
    """Columns or rows as a page gives them."""
    return min(MOST_CELLS, max(1, int(text))) if text.isascii() and text.isdecimal() and len(text) < 6 else default


# -- who may open the page --------------------------------------------------------------------------------------------


COOKIE = "vllm_console"

_LOOPBACK = lazy_pattern(r"(?:127\.0\.0\.1|localhost|\[::1\])(?::\d{1,5})?", re.IGNORECASE | re.ASCII)
"""A ``Host`` header that names this machine. Any port: it may be forwarded, as by ``ssh -L``."""

REFUSED = (
    "Refused. The link of 'vllm-console web' works once, in the browser that opens it first. "
    "End that command with ctrl+c and run it again for a new link."
)


class PageAccess:
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
    return hmac.compare_digest(given.encode(errors="surrogateescape"), right.encode())


# -- the server -------------------------------------------------------------------------------------------------------


MOST_CONSOLES = 8
"""Pages that are open at once, each with a process of some 100 MB."""

HEARTBEAT_SECONDS = 15.0
"""A browser that answers no ping within half of that is gone."""

MOST_MESSAGE_BYTES = 1 << 20
"""A message from a page, such as a pasted text."""

_PAGE = Path(__file__).with_name("page.html")

_OPENING = '<!DOCTYPE html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=./"><a href="./">Open</a>'
"""Answers the link. A redirect would not do: browsers that follow a link of a page elsewhere send no strict cookie."""

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ConsoleServer:
    """Serves consoles that are started with ``options`` to the browser that opens the link first."""

    def __init__(self, options: Sequence[str]) -> None:
        self.access = PageAccess()
        self._options = tuple(options)
        self._open: set[web.WebSocketResponse] = set()
        self._consoles = 0

    async def serve(self, listening: socket.socket, ready: Callable[[], object], ended: asyncio.Event) -> None:
        """Serve until ``ended`` is set; no console is left then. ``ready`` is called once the link works."""
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
        """Everything that is served. All of it is below one path, and behind the cookie."""
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
        """Let in our own page in the browser that has the cookie; take the token for it."""
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
        """A console, for as long as the page is connected."""
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
    """Carry what the console draws and what the page sends, until one of them ends."""

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
    """Do what a message of the page says; one that says nothing known is left out."""
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
    """Nothing is loaded from elsewhere, framed, cached or sent to others, whatever the page's scripts would like."""
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
