"""What downloads have in common: the question before, and a line on how they go."""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from types import TracebackType

from vllm_console.fleet.verbs import RefusedError
from vllm_console.text import duration, plain, size

WIPE = "\r\x1b[K"
WINDOW = 10.0
"""The speed is that of this many seconds."""


def confirmed(args: argparse.Namespace, question: str) -> None:
    """Ask on a terminal unless ``--yes`` says so.

    Raises:
        RefusedError: nobody said yes.
    """
    if args.yes:
        return
    if sys.stdin.isatty() and sys.stdout.isatty() and not args.json:
        print(f"{plain(question)} [y/N] ", end="", flush=True)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
        raise RefusedError("not done")
    raise RefusedError(f"{plain(question)} --yes says so without a terminal")


class DownloadLine:
    """A line on the terminal that is overwritten: bytes, speed and time left; elsewhere a line for each step."""

    def __init__(self, total: int, *, silent: bool) -> None:
        self._total, self._silent = total, silent
        self._drawn = sys.stderr.isatty()
        self._step = ""
        self._points: deque[tuple[float, int]] = deque()

    def show(self, step: str, done: int) -> None:
        """It goes on: ``done`` of the bytes are here."""
        if self._silent:
            return
        if self._drawn:
            print(f"{WIPE}{self._text(step, done)}", end="", file=sys.stderr, flush=True)
        elif step != self._step:
            print(plain(step), file=sys.stderr, flush=True)
        self._step = step

    def _text(self, step: str, done: int) -> str:
        now = time.monotonic()
        self._points.append((now, done))
        while now - self._points[0][0] > WINDOW:
            self._points.popleft()
        since, before = self._points[0]
        speed = (done - before) / (now - since) if now > since else 0.0
        text = f"{plain(step, 40)}: {size(min(done, self._total))} of {size(self._total)}"
        if speed > 0 and done < self._total:
            text += f", {size(speed)}/s, {duration((self._total - done) / speed)} left"
        return text

    def __enter__(self) -> DownloadLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the line."""
        if self._drawn and self._step:
            print(WIPE, end="", file=sys.stderr, flush=True)
