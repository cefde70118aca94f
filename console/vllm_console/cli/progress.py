"""Progress of a command, on standard error."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Self

from vllm_console.text import plain

LINE_SECONDS, OFTEN_SECONDS = 10.0, 60.0
"""Interval between lines in a file or a pipe: the first value until the second has passed, then the second."""

REDRAWN_SECONDS = 0.1
"""Minimum time between two updates of a step."""

WIPE = "\r\x1b[K"
"""Return to the beginning of the line and clear it."""


class ProgressLine:
    """Shows a command's progress: on a terminal a line that is overwritten, in a file or a pipe an occasional line.

    ``first`` is written to a file or a pipe in place of the first progress.
    """

    def __init__(self, *, silent: bool = False, first: str = "") -> None:
        self._silent, self._first = silent, first
        self._terminal = sys.stderr.isatty()
        self._due = 0.0
        self._step = ""
        self._drawn_at: float | None = None

    def show(self, text: str, elapsed: float, *, always: bool = False) -> None:
        """Show the progress; in a file or a pipe only if a line is due after ``elapsed`` seconds, or ``always``."""
        if self._terminal:
            self._draw(text)
        elif not self._silent and (self._is_due(elapsed) or always):
            print(plain(self._first or text), file=sys.stderr, flush=True)
            self._first = ""

    def say(self, step: str, text: str) -> None:
        """Show the progress of a step, at most ten times a second; a file or a pipe gets each step once."""
        begins, self._step = step != self._step, step
        if self._terminal:
            if begins or self._drawn_at is None or time.monotonic() - self._drawn_at >= REDRAWN_SECONDS:
                self._draw(text)
        elif begins and not self._silent:
            print(plain(step), file=sys.stderr, flush=True)

    def download(self, total: int) -> Callable[[str, int], None]:
        """A function that shows a download of ``total`` bytes, given its step and the bytes received."""
        from vllm_console.fleet.downloads import DownloadText

        text = DownloadText(total)
        return lambda step, done: self.say(step, text.of(step, done))

    def clear(self) -> None:
        """Erase the line on a terminal."""
        if self._drawn_at is not None and waited_for():
            print(WIPE, end="", file=sys.stderr, flush=True)
        self._drawn_at = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def _draw(self, text: str) -> None:
        if not self._silent and waited_for():
            from shutil import get_terminal_size  # imports every archive format

            fitting = plain(text)[: get_terminal_size().columns - 1]  # a longer line could not be erased
            print(f"{WIPE}{fitting}", end="", file=sys.stderr, flush=True)
            self._drawn_at = time.monotonic()

    def _is_due(self, elapsed: float) -> bool:
        """Whether a line is due: often at first, then once a minute."""
        if elapsed < self._due:
            return False
        every = LINE_SECONDS if elapsed < OFTEN_SECONDS - LINE_SECONDS / 2 else OFTEN_SECONDS
        self._due = (elapsed // every + 1) * every
        return True


def waited_for() -> bool:
    """Whether this is the terminal's foreground process. In the background, its line would overwrite other programs."""
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except (OSError, ValueError):  # no terminal, or not this process's controlling one
        return False
