"""The way to a page of a browser and from it: what is drawn goes to the server of the page as packets, over a pipe.

Textual's own driver for this waits for the pipe, and goes on when the server is gone. This leans on what `WebDriver`
has inside: the version is pinned.
"""

from __future__ import annotations

from typing import Any

from textual.drivers.web_driver import WebDriver

from vllm_console.ui.terminal.driver import LEAVE_SECONDS, OutputWriter


class BrowserDriver(WebDriver):
    """Textual's driver for browsers, with an `OutputWriter` for its packets. It notifies the app of what happens to the
    page: ``terminal_caught_up`` and ``terminal_lost``, from another thread."""

    def __init__(self, app: Any, **options: Any) -> None:
        super().__init__(app, **options)
        # A packet is written as a whole or not at all, and none is dropped: the next one would not be understood.
        self._outlet = OutputWriter(self.fileno, app.terminal_caught_up, app.terminal_lost)
        self._write = self._outlet.write  # type: ignore[assignment]

    @property
    def behind(self) -> bool:
        """Whether a picture had better be left out (`OutputWriter.behind`)."""
        return self._outlet.behind()

    def run_input_thread(self) -> None:
        """Read keys until the app ends; without a server it ends, too."""
        super().run_input_thread()
        if not self.exit_event.is_set():
            self._app.terminal_lost()  # type: ignore[attr-defined]

    def close(self) -> None:
        """End, once the server has been notified."""
        super().close()
        self._outlet.close(LEAVE_SECONDS)
