"""The server of ``vllm-console web``, on loopback: a page, the files it needs, and a console for each open page.

The page's terminal (xterm.js with Textual's protocol), its style sheet and its fonts are those of textual-serve. Its
server is not used: it runs commands through a shell, knows no access control, waits for ever for a program that does
not end, and its page loads a font from the internet.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from vllm_console.web.access import COOKIE, REFUSED, Access, names_this_machine, same_origin
from vllm_console.web.process import MOST_CELLS, ConsoleProcess, cells

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
        self.access = Access()
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
            console = await ConsoleProcess.start(self._options, columns, rows)
            try:
                await _connect(page, console)
            finally:
                await asyncio.shield(console.end())
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
            await console.tell(type="resize", width=min(width, MOST_CELLS), height=min(height, MOST_CELLS))
        case ["focus" | "blur" as kind]:
            await console.tell(type=kind)
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
