"""Terminal input and output that copes with terminals that stall (a hanging connection) or go away.

Textual's own driver also writes in a thread, but the screen's thread may block on it forever when a terminal accepts no
more output, and it does not notice that a terminal is gone. This relies on internals of `LinuxDriver`, so the Textual
version is pinned.
"""

from __future__ import annotations

import codecs
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from textual._xterm_parser import XTermParser
from textual.drivers.linux_driver import LinuxDriver

if TYPE_CHECKING:
    from vllm_console.ui.terminal.cast import Cast

WAITING_BYTES = 16 << 10
"""Skip frames once this many bytes are queued for the terminal (about one full frame)."""

MOST_BYTES = 1 << 20
"""Maximum number of queued bytes; anything beyond that is dropped."""

PIECE_BYTES = 8 << 10
"""Maximum bytes per write to the terminal."""

LEAVE_SECONDS = 3.0
"""How long to wait on exit for the terminal to accept the sequences that restore it."""

GLANCE_SECONDS = 1.0
"""How often to check that an idle terminal is still connected."""

ESCAPE_SECONDS = 0.05
"""How often to check whether an escape was a key or begins a sequence; only while one is undecided."""

READ_BYTES = 4 << 10
"""Maximum bytes per read of keys."""


class OutputWriter:
    """Writes bytes to a terminal in a thread of its own, so callers never block on the terminal.

    That thread calls ``caught_up`` when the terminal has accepted everything after `behind` was true, and ``lost`` when
    the terminal is gone.
    """

    def __init__(self, descriptor: int, caught_up: Callable[[], None], lost: Callable[[], None]) -> None:
        self._descriptor = descriptor
        self._caught_up = caught_up
        self._lost = lost
        self._changed = threading.Condition()
        self._waiting = bytearray()
        self._on_its_way = 0
        """Number of bytes that are being written to the terminal."""
        self._was_behind = False
        self._ended = False
        threading.Thread(target=self._run, name="terminal-output", daemon=True).start()

    def write(self, data: bytes) -> None:
        """Queue these bytes."""
        with self._changed:
            if not self._ended and len(self._waiting) + len(data) <= MOST_BYTES:
                self._waiting += data
                self._changed.notify_all()

    def behind(self) -> bool:
        """Whether the queue is long: skip this frame and paint everything later."""
        with self._changed:
            behind = len(self._waiting) > WAITING_BYTES
            self._was_behind = self._was_behind or behind
            return behind

    def drop(self) -> None:
        """Drop queued bytes that are not being written yet, such as frames that nobody will see.

        A sequence cut in two by this ends at the escape of the next one.
        """
        with self._changed:
            del self._waiting[self._on_its_way :]

    def close(self, patience: float) -> None:
        """Accept no more bytes, and wait at most ``patience`` seconds for the terminal to accept the rest."""
        until = time.monotonic() + patience
        with self._changed:
            while self._waiting and not self._ended and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            self._ended = True
            self._changed.notify_all()

    def _run(self) -> None:
        gone = select.poll()
        gone.register(self._descriptor, 0)  # an empty mask reports hang-ups and errors only
        try:
            while (piece := self._next()) is not None:
                if not piece and gone.poll(0):
                    raise OSError("hung up")
                try:
                    written = os.write(self._descriptor, piece) if piece else 0
                except BlockingIOError:  # another program made the terminal that they share non-blocking
                    select.select([], [self._descriptor], [], GLANCE_SECONDS)
                    written = 0
                self._took(written)
        except OSError:
            with self._changed:
                self._waiting.clear()
                unasked, self._ended = not self._ended, True
                self._changed.notify_all()
            if unasked:
                self._lost()

    def _next(self) -> bytes | None:
        """The next bytes to write, empty after a while without any; None at the end."""
        with self._changed:
            if not self._waiting and not self._ended:
                self._changed.wait(GLANCE_SECONDS)
            piece = bytes(self._waiting[:PIECE_BYTES])
            self._on_its_way = len(piece)
            return None if self._ended else piece

    def _took(self, count: int) -> None:
        with self._changed:
            del self._waiting[:count]
            self._on_its_way = 0
            caught_up = self._was_behind and not self._waiting
            if not self._waiting:
                self._was_behind = False
                self._changed.notify_all()
        if caught_up:
            self._caught_up()


class WakingEvent(threading.Event):
    """An event that can also be waited for together with files: ``descriptor`` is readable while it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        """Set it."""
        super().set()
        os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Clear it."""
        super().clear()
        if select.select([self.descriptor], [], [], 0)[0]:
            os.eventfd_read(self.descriptor)


class ConsoleDriver(LinuxDriver):
    """Textual's Linux driver with an `OutputWriter` for its output.

    It calls the app's ``terminal_caught_up`` and ``terminal_lost`` from another thread.
    """

    def __init__(self, app: Any, **options: Any) -> None:
        super().__init__(app, **options)
        self.exit_event = self._input_ends = WakingEvent()
        self._descriptor = sys.__stdout__.fileno() if sys.__stdout__ is not None else 1
        self._outlet: OutputWriter | None = None
        self._cast: Cast | None = app.cast

    @property
    def behind(self) -> bool:
        """Whether to skip a frame (`OutputWriter.behind`)."""
        return self._outlet is not None and self._outlet.behind()

    def write(self, data: str) -> None:
        """Queue this output, without waiting for the terminal."""
        if self._cast is not None:
            self._cast.output(data)
        if self._outlet is not None:
            self._outlet.write(data.encode("utf-8", "replace"))

    def start_application_mode(self) -> None:
        """Take over the terminal. (Textual's own writer is started too, but gets nothing to write.)"""
        self._outlet = OutputWriter(self._descriptor, self._app.terminal_caught_up, self._app.terminal_lost)  # type: ignore[attr-defined]
        super().start_application_mode()  # type: ignore[no-untyped-call]

    def stop_application_mode(self) -> None:
        """Restore the terminal, ahead of any queued output: a slow terminal might otherwise never be restored."""
        if self._outlet is not None:
            self._outlet.drop()
        super().stop_application_mode()

    def close(self) -> None:
        """Close the driver after the terminal has been restored."""
        super().close()
        if self._outlet is not None:
            self._outlet.close(LEAVE_SECONDS)

    def run_input_thread(self) -> None:
        """Read keys until the input ends. Textual's own loop polls for that ten times a second; this one is woken."""
        parser = XTermParser(self._debug)
        # Invalid UTF-8, e.g. from a terminal with another encoding, must not stop the reading of keys.
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        while not self.exit_event.is_set():
            timeout = None if parser._timeout_time is None else ESCAPE_SECONDS
            ready, _, _ = select.select([self.fileno, self._input_ends.descriptor], [], [], timeout)
            if self.fileno in ready:
                keys = os.read(self.fileno, READ_BYTES)
                if not keys:
                    return  # the input was closed
                text = decode(keys)  # empty while a character is incomplete; the parser would take that as the end
                for event in parser.feed(text) if text else ():
                    self.process_message(event)
            for event in parser.tick():
                self.process_message(event)

    def _run_input_thread(self) -> None:
        """Read keys. A terminal that is gone cannot be read; that is not an error of the program."""
        try:
            self.run_input_thread()
        except OSError:
            self._app.terminal_lost()  # type: ignore[attr-defined]
