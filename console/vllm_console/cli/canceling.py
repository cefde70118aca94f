"""Undoing what a long command has begun, however it ends."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType


@contextlib.contextmanager
def undone_at_end(undo: Callable[[], None]) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP end the block as Ctrl-C does; then ``undo`` is called, and no signal cuts it short.

    A SIGHUP that is ignored, as under nohup, stays so.
    """

    def cancel(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    handled = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handled.append(signal.SIGHUP)
    before = {number: signal.signal(number, cancel) for number in handled}
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_IGN)
        undo()
        for number, handler in before.items():
            signal.signal(number, handler)
