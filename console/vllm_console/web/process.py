"""The console of one page: a process of its own, whose terminal is the page.

It speaks Textual's protocol for browsers: packets of a letter, four bytes of length and the content. ``D`` is what a
terminal would show or type, ``M`` a message in JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

DRIVER = "textual.drivers.web_driver:WebDriver"
"""As textual-serve names it. The console has its own way of speaking to it (`ui.terminal.browser`)."""

LEAVE_SECONDS = 3.0
"""How long a console may take to end when its page is gone, and again after SIGTERM."""

MOST_CELLS = 1000
"""Columns and rows of a page, at most."""

_BEGIN = b"__GANGLION__\n"
"""After this line a console speaks in packets."""


class ConsoleProcess:
    """A console that draws into a page, and ends with it."""

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

    async def tell(self, **message: object) -> None:
        """Tell it of the page: its ``type``, such as ``focus``, and more."""
        await self._send(b"M", msgspec.json.encode(message))

    async def end(self) -> int:
        """End it, by force in the end; its exit status. Nothing of it is left afterwards."""
        await self.tell(type="quit")
        self._in.close()
        rest = asyncio.ensure_future(self._drop_output())
        for harder in (self._process.terminate, self._process.kill):
            try:
                return await asyncio.wait_for(self._process.wait(), LEAVE_SECONDS)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    harder()
            finally:
                rest.cancel()
        return await self._process.wait()

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
