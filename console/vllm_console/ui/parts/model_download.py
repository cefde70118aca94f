"""Downloads models from the launch screen: confirms first, runs in a separate process, shows progress."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.style import Style
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import Input

from vllm_console.fleet.downloads import DownloadText
from vllm_console.text import plain, size
from vllm_console.ui.keymap import key_of
from vllm_console.ui.screens.dialogs import Confirm
from vllm_console.ui.theme import BAD, WARN
from vllm_console.ui.threads import answer_for, begin_worker, failure
from vllm_launchers.errors import OperationError
from vllm_launchers.units import counted

if TYPE_CHECKING:
    from vllm_console.fleet.downloads import ModelDownload
    from vllm_console.fleet.local import LocalFleet

REDRAW_SECONDS = 0.5


class ModelDownloads:
    """One download at a time. ``say`` shows a message, ``redraw`` the screen; ``done`` is called after success."""

    def __init__(
        self,
        screen: Screen[Any],
        fleet: LocalFleet,
        say: Callable[[str, Style | None], None],
        redraw: Callable[[], None],
        done: Callable[[], None],
    ) -> None:
        self._screen, self._fleet, self._say, self._redraw, self._done = screen, fleet, say, redraw, done
        self._download: ModelDownload | None = None
        self._text = DownloadText(0)
        self._progress = ("downloading", 0)
        self._timer: Timer | None = None

    @property
    def running(self) -> bool:
        """Whether a model is being downloaded."""
        return self._download is not None

    @property
    def line(self) -> str:
        """Progress, and the key that cancels; empty without a download."""
        if self._download is None:
            return ""
        return f"{self._download.model}: {self._text.of(*self._progress)} · {key_of('launch_back')} cancels"

    def begin(self, model: str) -> None:
        """Ask the hub about a model, then confirm."""
        if not self.running:
            self._tell(f"asking the hub about {model}…")
            begin_worker(self._screen, partial(self._ask, model), "download", "download")

    def cancel(self) -> None:
        """Cancel the download; complete files are kept."""
        if self._download is not None:
            self._download.cancel()

    def _tell(self, text: str, style: Style | None = None) -> None:
        self._say(text, style)
        self._redraw()

    async def _ask(self, model: str) -> None:
        try:
            found = await answer_for(self._screen, partial(self._fleet.model_download, model), "download")
        except Exception as error:  # noqa: BLE001 - the thread's boundary: shown on the screen
            self._tell(failure(error, f"can't ask the hub about {model}"), BAD)
        else:
            self._offer(found)

    def _offer(self, found: ModelDownload) -> None:
        if found.code:
            command = f"vllm-console models get {found.model} --with-code"
            self._tell(f"{found.model} comes with Python code of its own: '{command}' downloads it.", WARN)
        elif not found.missing_bytes:
            self._tell(f"{found.model} is on this machine: {size(found.bytes)}.")
        elif self._screen.app.screen is not self._screen or isinstance(self._screen.focused, Input):
            self._tell(f"{found.model}: {size(found.missing_bytes)} to download; {key_of('launch_get')} downloads it.")
        else:
            self._tell("")
            details = [
                f"{counted(found.files, 'file')}, {size(found.bytes)}: {size(found.missing_bytes)} to download",
                f"{size(found.free_bytes)} free at {plain(found.cache)}",
            ]
            question = Confirm(f"Download {plain(found.model)}?", details, "download", late=True)
            self._screen.app.push_screen(question, partial(self._answered, found))

    def _answered(self, found: ModelDownload, yes: bool | None) -> None:
        if yes and not self.running:
            self._download, self._text, self._progress = found, DownloadText(found.missing_bytes), ("downloading", 0)
            self._timer = self._screen.set_interval(REDRAW_SECONDS, self._redraw)
            begin_worker(self._screen, partial(self._run, found), "download", "download")

    async def _run(self, found: ModelDownload) -> None:
        text, style = f"{found.model} is on this machine, every file verified.", None
        try:
            await answer_for(self._screen, partial(found.run, self._went_on), "download")
        except OperationError as error:
            text, style = str(error), WARN
        except Exception as error:  # noqa: BLE001 - the thread's boundary: shown on the screen
            text, style = f"{found.model}: {error}", BAD
        finally:
            found.cancel()  # in case the screen was closed; no effect after the end
            self._download = None
            if self._timer is not None:
                self._timer.stop()
        self._tell(text, style)
        if style is None:
            self._done()

    def _went_on(self, step: str, done: int) -> None:
        self._progress = (step, done)
