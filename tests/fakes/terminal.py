"""A program in a pseudo-terminal, with its screen read by an emulator."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pyte
from rich.cells import cell_len

DEADLINE = 120.0


class Terminal:
    """A program in a pty of a given size, in ``folder``. ``screen`` is the emulated screen."""

    def __init__(
        self, words: Sequence[str], columns: int, rows: int, env: dict[str, str], folder: Path | None = None
    ) -> None:
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = bytearray()
        self.master, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(child)
        self._child = child
        # The test runner may have set a size, which would override the terminal's.
        around = {name: value for name, value in {**os.environ, **env}.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            list(words),
            stdin=child,
            stdout=child,
            stderr=child,
            cwd=folder,
            env={**around, "TERM": env.get("TERM", "xterm-256color"), "COLORTERM": "truecolor"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def pump(self, seconds: float = 0.05) -> None:
        """Read what the program wrote for up to ``seconds``."""
        ready, _, _ = select.select([self.master], [], [], seconds)
        if ready:
            with contextlib.suppress(OSError):
                data = os.read(self.master, 1 << 16)
                self.raw += data
                # The emulator does not know these escape sequences of newer terminals and would print their tails.
                self._stream.feed(data.replace(b"\x1b[>", b"\x1b[?"))

    @property
    def text(self) -> str:
        return "\n".join(map(self._row, range(self.screen.lines)))

    def _row(self, y: int) -> str:
        """A row of the screen. While a wide character is being overwritten, its right half may remain: that cell is
        blank, as in a terminal, but pyte's `display` fails."""
        cells, row = self.screen.buffer[y], ""
        for x in range(self.screen.columns):
            row += cells[x].data or ("" if x and cell_len(cells[x - 1].data) == 2 else " ")
        return row.rstrip()

    def wait_for(self, wanted: str | Callable[[str], bool], seconds: float = DEADLINE) -> str:
        """Read until the screen shows it; on timeout, fail and show the screen."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.pump()
            if wanted in self.text if isinstance(wanted, str) else wanted(self.text):
                return self.text
            if self.process.poll() is not None and not select.select([self.master], [], [], 0)[0]:
                break
        raise AssertionError(f"never saw {wanted!r} (exit {self.process.poll()}); the screen:\n{self.text}")

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        """Change the size as a terminal would."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(rows, columns)
        self.process.send_signal(signal.SIGWINCH)

    def wait_end(self, seconds: float = DEADLINE) -> int:
        """Read until the program has ended; returns its exit code."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it did not end; the screen:\n{self.text}"
            self.pump()
        seen = -1
        while seen != len(self.raw):  # its last output arrives in pieces, including a full screen
            seen = len(self.raw)
            self.pump(0.2)
        return int(self.process.returncode)

    def hang_up(self) -> None:
        """Close the terminal like a broken SSH connection; nothing can be read afterwards."""
        os.close(self.master)
        self.master = -1

    def restored(self) -> bool:
        """Whether terminal modes, screen, cursor and mouse are restored."""
        now = termios.tcgetattr(self._child)
        flags = [(now[i], self.before[i]) for i in range(4)]
        return (
            all(a == b for a, b in flags)
            and self.raw.rfind(b"\x1b[?1049l") > self.raw.rfind(b"\x1b[?1049h")
            and self.raw.rfind(b"\x1b[?25h") > self.raw.rfind(b"\x1b[?25l")
            and self.raw.rfind(b"\x1b[?1000l") >= self.raw.rfind(b"\x1b[?1000h")
        )

    def close(self) -> None:
        """End the program if it is still running."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.master >= 0:
            os.close(self.master)
        os.close(self._child)
