"""Undoing what a long command has begun, however it ends."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType


class Canceling:
    """What signals do: they cancel at once, or after the step that must be done whole."""

    def __init__(self) -> None:
        self._whole = self.wanted = False

    def handle(self, _number: int, _frame: FrameType | None) -> None:
        """Handle a signal."""
        self.wanted = True
        if not self._whole:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def afterwards(self) -> Iterator[None]:
        """A signal within the block cancels at its end."""
        self._whole = True
        try:
            yield
        finally:
            self._whole = False
        if self.wanted:
            raise KeyboardInterrupt


@contextlib.contextmanager
def undone_at_end(undo: Callable[[], None]) -> Iterator[Canceling]:
    """SIGINT, SIGTERM and SIGHUP end the block as Ctrl-C does; then ``undo`` is called, and no signal cuts it short.

    A SIGHUP that is ignored, as under nohup, stays so.
    """
    cancel = Canceling()
    handled = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handled.append(signal.SIGHUP)
    before = {number: signal.signal(number, cancel.handle) for number in handled}
    try:
        yield cancel
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_IGN)
        cancel.wanted = False  # what undoes it is not canceled
        undo()
        for number, handler in before.items():
            signal.signal(number, handler)
