"""A log on the screen: follows its end, stands still under a reader, searches, filters. Files are read in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.segment import Segment
from textual import events
from textual.message import Message

from vllm_console.logs.file import Level, LogFile
from vllm_console.ui.theme import CURSOR, DIM
from vllm_console.ui.threads import in_thread
from vllm_console.ui.widgets.draw import fit
from vllm_console.ui.widgets.lines import LineView, line
from vllm_console.ui.widgets.log_lines import log_strips
from vllm_console.ui.widgets.log_pager import Filter, LogPager, Page

TICK_SECONDS = 0.25
"""The least time between two looks at a log that grows: what scrolls by faster is skipped."""

IDLE_SECONDS = 0.5
"""The time between two looks at one that does not."""

PANE_SECONDS = 1.25
"""The same for a pane, whose holder asks for a look with each of its own, so that both are painted at once."""

SIDEWAYS = 16
"""Cells per step when scrolling sideways."""

WHEEL = 3
"""Lines per notch of the mouse wheel."""

FILTERS: tuple[Filter, ...] = (None, Level.WARNING, Level.ERROR)

FILTER_NAMES = {None: "all lines", Level.WARNING: "warnings and errors", Level.ERROR: "errors"}

_Command = Callable[[LogPager], Page]


class LogView(LineView):
    """Shows a log file; all of it can be reached. It takes no focus: whoever holds it calls its methods.

    ``compact`` is for a pane: the state stands in the view's own last row while it is paused, and it looks seldom
    unless it is told to (`look`). Without it, listen to `Moved` and show `status` elsewhere.
    """

    DEFAULT_CSS = "LogView { height: 1fr; width: 1fr; }"

    class Moved(Message):
        """What the view shows or does has changed."""

        def __init__(self, view: LogView) -> None:
            super().__init__()
            self.view = view

        @property
        def control(self) -> LogView:
            """The view."""
            return self.view

    def __init__(
        self,
        *,
        compact: bool = True,
        clean: Callable[[str], str] | None = None,
        name: str | None = None,
        id: str | None = None,
        classes: str | None = None,
    ) -> None:
        super().__init__(name=name, id=id, classes=classes)
        self.page = Page()
        """What was read last."""
        self.wrap = False
        self._compact = compact
        self._clean = clean
        self._left = 0
        self._path: Path | None = None
        self._pager: LogPager | None = None
        self._selected: int | None = None
        self._commands: list[_Command] = []
        self._rows_owed = 0
        self._wake = asyncio.Event()

    # -- what holders call -----------------------------------------------------------------------------------------

    def open(self, path: Path | str) -> None:
        """Show this log from its end; it need not exist yet."""
        self._path, self._selected, self._left = Path(path), None, 0
        self._commands.clear()
        self._rows_owed = 0
        self._wake.set()

    def look(self) -> None:
        """Look now what came."""
        self._wake.set()

    def scroll_rows(self, rows: int) -> None:
        """Scroll down, or up when negative; what comes at once is taken together."""
        self._selected = None
        self._rows_owed += rows
        self._wake.set()

    def scroll_pages(self, pages: int) -> None:
        """Scroll by pages, one line of which stays."""
        self.scroll_rows(pages * max(1, self._rows - 1))

    def scroll_sideways(self, steps: int) -> None:
        """Scroll right, or left when negative."""
        self._left = max(0, self._left + steps * SIDEWAYS) if not self.wrap else 0
        self._draw()

    def go_home(self) -> None:
        """Go to the oldest line."""
        self._do(LogPager.home)

    def follow(self) -> None:
        """Go to the end and follow."""
        self._selected, self._left = None, 0
        self._do(LogPager.end)

    def toggle_hold(self) -> None:
        """Stop following where the reader is, or follow again."""
        self._do(LogPager.hold if self.page.following else LogPager.end)

    def cycle_filter(self) -> None:
        """All lines, warnings and errors, errors."""
        after = FILTERS[(FILTERS.index(self.page.filter) + 1) % len(FILTERS)]
        self._do(lambda pager: pager.set_filter(after))

    def toggle_wrap(self) -> None:
        """Wrap long lines, or cut them."""
        self.wrap, self._left = not self.wrap, 0
        self._draw()
        self.post_message(self.Moved(self))

    def find(self, text: str) -> None:
        """Search upwards from what is shown; an empty text ends the search."""
        self._selected = None
        self._do(lambda pager: pager.find(text))

    def find_next(self, backwards: bool) -> None:
        """The next match above (backwards) or below."""
        self._selected = None
        self._do(lambda pager: pager.find_next(backwards))

    def select(self, step: int) -> None:
        """Move the selection by lines; the first time it is put on the last line shown."""
        if not self.page.lines:
            return
        offsets = [shown.offset for shown in self.page.lines]
        if self.marked not in offsets:
            index = len(offsets) - 1
        else:
            index = min(max(0, offsets.index(self.marked) + step), len(offsets) - 1)
        self._selected = offsets[index]
        self._do(LogPager.hold)

    @property
    def marked(self) -> int | None:
        """Offset of the selected line, else of the line found last."""
        return self._selected if self._selected is not None else self.page.match

    @property
    def copied_text(self) -> str:
        """The selected line, or all that is shown."""
        chosen = [shown.text for shown in self.page.lines if shown.offset == self.marked]
        return "\n".join(chosen or [shown.text for shown in self.page.lines])

    @property
    def status(self) -> str:
        """``following`` or ``paused · 12 new``."""
        if self.page.following:
            return "following"
        return f"paused · {self.page.new_lines:,} new" if self.page.new_lines else "paused"

    # -- reading ---------------------------------------------------------------------------------------------------

    @property
    def _rows(self) -> int:
        return max(1, self.size.height)

    def on_mount(self) -> None:
        """Begin to read."""
        self.run_worker(self._serve(), name="log", exclusive=True, group="log")

    def _do(self, command: _Command) -> None:
        self._flush_scroll()
        self._commands.append(command)
        self._wake.set()

    def _flush_scroll(self) -> None:
        if self._rows_owed:
            rows, self._rows_owed = self._rows_owed, 0
            self._commands.append(lambda pager: pager.scroll(rows))

    async def _serve(self) -> None:
        """Carry out what was asked, else look what came; one read at a time, each in a thread."""
        try:
            while True:
                before = self.page
                await self._turn()
                if self.page.busy:
                    await asyncio.sleep(0.01)
                    continue
                pause = IDLE_SECONDS if self.page == before else TICK_SECONDS
                pause = PANE_SECONDS if self._compact else pause
                try:
                    await asyncio.wait_for(self._wake.wait(), pause)
                except TimeoutError:
                    continue
        finally:
            pager = self._pager
            if pager is not None:
                asyncio.get_running_loop().run_in_executor(None, pager.log.close)

    async def _turn(self) -> None:
        self._wake.clear()
        self._flush_scroll()
        commands, self._commands = self._commands, []
        if self._path is None or not (commands or (self.is_on_screen and self.screen.is_active)):
            return
        try:
            page = await in_thread(partial(self._read, self._path, self._rows, commands), "read log")
        except Exception as error:  # noqa: BLE001 - the thread's boundary: said in the log's place
            page = Page(note=f"the log cannot be read: {getattr(error, 'strerror', None) or error}")
        self._show_page(page)

    def _read(self, path: Path, rows: int, commands: list[_Command]) -> Page:
        """In the thread: the only place that touches the pager."""
        if self._pager is None or self._pager.log.path != path:
            if self._pager is not None:
                self._pager.log.close()
            self._pager = LogPager(LogFile(path, clean=self._clean or _redact()), rows)
        page = self._pager.page()
        for command in commands:
            page = command(self._pager)
        if commands:
            return page
        return self._pager.step() if page.busy else self._pager.tick()

    # -- drawing ---------------------------------------------------------------------------------------------------

    def _show_page(self, page: Page) -> None:
        changed = page != self.page
        self.page = page
        if changed:
            self._draw()
            self.post_message(self.Moved(self))

    def _draw(self) -> None:
        width, height = self.size
        if not width or not height:
            return
        page = self.page
        strips = log_strips(
            page.lines, width, height, wanted=page.wanted, match=self.marked,
            left=self._left, wrap=self.wrap, from_end=page.following,
        )  # fmt: skip
        if not strips and page.note:
            strips = [line((fit(f" {page.note}", width), DIM))]
        elif not strips and self._path is not None:
            strips = [line((" nothing in the log yet" if page.filter is None else " no such lines so far", DIM))]
        if self._compact and not page.following:
            strips += [line()] * (height - len(strips))
            mark = f" {self.status} "
            strips[-1] = strips[-1].adjust_cell_length(max(0, width - len(mark))).crop(0, max(0, width - len(mark)))
            strips[-1] = type(strips[-1])([*strips[-1], Segment(mark, CURSOR)])
        self.show(strips)

    def on_resize(self, event: events.Resize) -> None:
        """Read and draw for the new size."""
        if event.size.height:
            rows = event.size.height
            self._draw()
            if self._path is not None:
                self._do(lambda pager: pager.resize(rows))

    def on_show(self) -> None:
        """Look at once when the view comes into sight."""
        self._wake.set()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Scroll up."""
        event.stop()
        self.scroll_rows(-WHEEL)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Scroll down."""
        event.stop()
        self.scroll_rows(WHEEL)

    def on_click(self, event: events.Click) -> None:
        """Select the line under the mouse."""
        if not self._compact and not self.wrap and event.y < len(self.page.lines):
            self._selected = self.page.lines[event.y].offset
            self._do(LogPager.hold)


def _redact() -> Callable[[str], str]:
    from vllm_launchers.plan.secrets import redact

    return redact
