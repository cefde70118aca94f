"""Input and output for a browser page: output goes to the page's server as packets, over a pipe.

Textual's own driver blocks on the pipe and keeps running when the server is gone. This relies on internals of
`WebDriver`, so the Textual version is pinned.
"""

from __future__ import annotations

from typing import Any

from textual.drivers.web_driver import WebDriver

from vllm_console.ui.terminal.driver import LEAVE_SECONDS, OutputWriter


class BrowserDriver(WebDriver):
    """Textual's browser driver with an `OutputWriter` for its packets.

    It calls the app's ``terminal_caught_up`` and ``terminal_lost`` from another thread.
    """

    def __init__(self, app: Any, **options: Any) -> None:
        super().__init__(app, **options)
        # A packet is written completely or not at all, and none is dropped: the next one would not be understood.
        self._outlet = OutputWriter(self.fileno, app.terminal_caught_up, app.terminal_lost)
        self._write = self._outlet.write  # type: ignore[assignment]

    @property
    def behind(self) -> bool:
        """Whether to skip a frame (`OutputWriter.behind`)."""
        return self._outlet.behind()

    def run_input_thread(self) -> None:
        """Read keys until the app ends; it also ends if the server is gone."""
        super().run_input_thread()
        if not self.exit_event.is_set():
            self._app.terminal_lost()  # type: ignore[attr-defined]

    def close(self) -> None:
        """Close the driver after the server has been notified."""
        super().close()
        self._outlet.close(LEAVE_SECONDS)
