"""Model downloads from the Hugging Face hub, and download progress as text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from vllm_console.text import duration, plain, size
from vllm_launchers.errors import OperationError
from vllm_launchers.vllm.hub import Hub

WINDOW = 10.0
"""Interval over which the speed is averaged, in seconds."""


class DownloadText:
    """Progress text of a download of ``total`` bytes: bytes, speed and time left."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._points: deque[tuple[float, int]] = deque()

    def of(self, step: str, done: int) -> str:
        """``downloading: 3.2 GiB of 15 GiB, 110 MiB/s, 1m50s left``; ``done`` is the number of bytes present."""
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


class ModelDownload:
    """A model download; the constructor queries the hub and blocks.

    ``engines`` are paths of additional vLLM installations, as in the settings. ``code`` is whether the model has its
    own Python code; ``missing_bytes`` are still to be downloaded.

    Raises:
        OperationError: it can't be downloaded: no such model, no access, no answer, no disk space.
    """

    def __init__(self, model: str, engines: Sequence[str]) -> None:
        self._hub = Hub(engines)
        self._found = self._hub.about(model)
        if problem := self._hub.no_room(self._found):
            raise OperationError(problem)
        self.model, self.code = model, self._found.code
        self.files, self.bytes = len(self._found.files), self._found.bytes
        self.missing_bytes, self.free_bytes = self._hub.missing_bytes(self._found), self._hub.free_bytes()
        self.cache = str(self._hub.cache)

    def run(self, progress: Callable[[str, int], None]) -> None:
        """Download and verify the model; blocks. ``progress`` gets the step and its bytes, in other threads.

        Raises:
            OperationError: it could not be downloaded, or was canceled; complete files stay.
        """
        self._hub.get(self._found, progress)

    def cancel(self) -> None:
        """Cancel the download; callable from any thread."""
        self._hub.cancel()
