"""What downloads have in common: the question before, and a line on how they go."""

from __future__ import annotations

import argparse
import sys
from types import TracebackType

from vllm_console.fleet.downloads import DownloadText
from vllm_console.fleet.verbs import RefusedError
from vllm_console.text import plain

WIPE = "\r\x1b[K"


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
        self._silent = silent
        self._drawn = sys.stderr.isatty()
        self._step = ""
        self._text = DownloadText(total)

    def show(self, step: str, done: int) -> None:
        """It goes on: ``done`` of the bytes are here."""
        if self._silent:
            return
        if self._drawn:
            print(f"{WIPE}{self._text.of(step, done)}", end="", file=sys.stderr, flush=True)
        elif step != self._step:
            print(plain(step), file=sys.stderr, flush=True)
        self._step = step

    def __enter__(self) -> DownloadLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the line."""
        if self._drawn and self._step:
            print(WIPE, end="", file=sys.stderr, flush=True)
