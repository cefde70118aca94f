"""How a download goes, as commands and screens write it."""

from __future__ import annotations

import time
from collections import deque

from vllm_console.text import duration, plain, size

WINDOW = 10.0
"""The speed is that of this many seconds."""


class DownloadText:
    """Bytes, speed and time left of a download of so many bytes."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._points: deque[tuple[float, int]] = deque()

    def of(self, step: str, done: int) -> str:
        """``downloading: 3.2 GiB of 15 GiB, 110 MiB/s, 1m50s left``; ``done`` of the bytes are here now."""
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
