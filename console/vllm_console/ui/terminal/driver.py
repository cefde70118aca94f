"""The way to the terminal and from it, for terminals that stall (a connection that hangs) or go away.

Textual's own driver writes in a thread too, but lets the screen's thread wait for it for ever where a terminal takes
nothing more, and notices no terminal that is gone. This leans on what `LinuxDriver` has inside: the version is pinned.
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
"""From so much on that the terminal has not taken yet, pictures are left out; a whole one has about as much."""

MOST_BYTES = 1 << 20
"""So much waits for a terminal at most; what is written beyond is lost."""

PIECE_BYTES = 8 << 10
"""What is handed to the terminal at once."""

LEAVE_SECONDS = 3.0
"""How long leaving waits for a terminal to take what gives it back as it was."""

GLANCE_SECONDS = 1.0
"""How often it is looked whether a terminal is still there to which nothing is written."""

ESCAPE_SECONDS = 0.05
"""How often it is looked whether an escape was a key, or begins a sequence; only after one that nothing followed."""

READ_BYTES = 4 << 10
"""What is read of the keys at once."""


class OutputWriter:
    """Bytes on their way to a terminal. A thread of its own writes them: whoever calls here never waits for it.

    ``caught_up`` is called, in that thread, when the terminal has taken all after `behind` was true; ``lost`` when
    the terminal is gone.
    """

    def __init__(self, descriptor: int, caught_up: Callable[[], None], lost: Callable[[], None]) -> None:
        self._descriptor = descriptor
        self._caught_up = caught_up
        self._lost = lost
        self._changed = threading.Condition()
        self._waiting = bytearray()
        self._on_its_way = 0
        """So many of them are being handed to the terminal."""
        self._was_behind = False
        self._ended = False
        threading.Thread(target=self._run, name="terminal-output", daemon=True).start()

    def write(self, data: bytes) -> None:
        """Have this written after what was given before."""
        with self._changed:
            if not self._ended and len(self._waiting) + len(data) <= MOST_BYTES:
                self._waiting += data
                self._changed.notify_all()

    def behind(self) -> bool:
        """Whether the terminal has much to take still: a picture had better be left out, and painted whole later."""
        with self._changed:
            behind = len(self._waiting) > WAITING_BYTES
            self._was_behind = self._was_behind or behind
            return behind

    def drop(self) -> None:
        """Forget what the terminal has not been handed yet: pictures that nobody will look at any more.

        A sequence that is cut in two by that ends at the next one's escape.
        """
        with self._changed:
            del self._waiting[self._on_its_way :]

    def close(self, patience: float) -> None:
        """Take nothing more, and wait for the terminal to take the rest, for so many seconds at most."""
        until = time.monotonic() + patience
        with self._changed:
            while self._waiting and not self._ended and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            self._ended = True
            self._changed.notify_all()

    def _run(self) -> None:
        gone = select.poll()
        gone.register(self._descriptor, 0)  # without a mask it reports hang-ups only
        try:
            while (piece := self._next()) is not None:
                if not piece and gone.poll(0):
                    raise OSError("hung up")
                written = os.write(self._descriptor, piece) if piece else 0
                self._took(written)
        except OSError:
            with self._changed:
                self._waiting.clear()
                unasked, self._ended = not self._ended, True
                self._changed.notify_all()
            if unasked:
                self._lost()

    def _next(self) -> bytes | None:
        """What comes next, empty when there was nothing for a while; None at the end."""
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
    """An event that can also be waited for beside files: ``descriptor`` is readable while it is set."""

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
    """Textual's driver for Linux, with an `OutputWriter` for what it writes. It calls the app's ``terminal_caught_up``
    and ``terminal_lost`` from another thread."""

    def __init__(self, app: Any, **options: Any) -> None:
        super().__init__(app, **options)
        self.exit_event = self._input_ends = WakingEvent()
        self._descriptor = sys.__stdout__.fileno() if sys.__stdout__ is not None else 1
        self._outlet: OutputWriter | None = None
        self._cast: Cast | None = app.cast

    @property
    def behind(self) -> bool:
        """Whether a picture had better be left out (`OutputWriter.behind`)."""
        return self._outlet is not None and self._outlet.behind()

    def write(self, data: str) -> None:
        """Have this written, without waiting for the terminal."""
        if self._cast is not None:
            self._cast.output(data)
        if self._outlet is not None:
            self._outlet.write(data.encode("utf-8", "replace"))

    def start_application_mode(self) -> None:
        """Take the terminal. (Textual's own writer is started too, and gets nothing to write.)"""
        self._outlet = OutputWriter(self._descriptor, self._app.terminal_caught_up, self._app.terminal_lost)  # type: ignore[attr-defined]
        super().start_application_mode()  # type: ignore[no-untyped-call]

    def stop_application_mode(self) -> None:
        """Give the terminal back, before all that still waits for a slow one: else it would be left as it is."""
        if self._outlet is not None:
            self._outlet.drop()
        super().stop_application_mode()

    def close(self) -> None:
        """End, once the terminal has been given back."""
        super().close()
        if self._outlet is not None:
            self._outlet.close(LEAVE_SECONDS)

    def run_input_thread(self) -> None:
        """Read keys until the input ends. Textual's own asks ten times a second whether it has; this one is woken."""
        parser = XTermParser(self._debug)
        # Bytes that are no UTF-8, as of a terminal with another encoding, must not end the reading of keys.
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        while not self.exit_event.is_set():
            timeout = None if parser._timeout_time is None else ESCAPE_SECONDS
            ready, _, _ = select.select([self.fileno, self._input_ends.descriptor], [], [], timeout)
            if self.fileno in ready:
                keys = os.read(self.fileno, READ_BYTES)
                if not keys:
                    return  # the input was closed
                text = decode(keys)  # empty as long as a character is incomplete; to the parser that is the end
                for event in parser.feed(text) if text else ():
                    self.process_message(event)
            for event in parser.tick():
                self.process_message(event)

    def _run_input_thread(self) -> None:
        """Read keys; a terminal that is gone cannot be read, and is no failure of the program."""
        try:
            self.run_input_thread()
        except OSError:
            self._app.terminal_lost()  # type: ignore[attr-defined]
