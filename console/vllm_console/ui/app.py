"""The Textual app: looks at the fleet in a thread, hands snapshots to the screen, runs verbs, ends cleanly."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from rich.style import Style
from textual.app import App
from textual.binding import BindingType
from textual.screen import ModalScreen
from textual.timer import Timer

from vllm_console.fleet.api import Fleet, FleetError
from vllm_console.fleet.model import FleetSnapshot
from vllm_console.text import plain
from vllm_console.ui.actions import bindings, check_keys
from vllm_console.ui.commands import RegistryCommands
from vllm_console.ui.driver import ConsoleDriver
from vllm_console.ui.panes.bars import Looking
from vllm_console.ui.screens.operations import OperationsScreen
from vllm_console.ui.theme import BAD, CONSOLE_THEME, wants_ascii
from vllm_console.ui.threads import favour_the_screen, in_thread

if TYPE_CHECKING:
    from vllm_console.alerts.notifier import Notifier

T = TypeVar("T")

PAST_AFTER_SECONDS = 3.0
"""How long after the start it is judged what held while no console was open: the first pictures come first."""

RESIZE_SECONDS = 0.06
"""The least time between two layouts while the terminal is being resized."""

RATES = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds between looks that ``+`` and ``-`` step through."""

MESSAGE_SECONDS = 8.0
"""How long a message stands before the line is free for a server's own notice."""

PATIENCE_SECONDS = 3.0
"""How late a look may be before its age is shown."""


class ConsoleApp(App[None]):
    """The console. It starts nothing and stops nothing by itself; servers outlive it.

    ``refresh`` is in seconds; ``keys`` maps an action's id to a person's own key; ``demo`` marks a demonstration;
    ``notifier`` is told of every look.

    Raises:
        ValueError: ``keys`` names an unknown action or gives two actions one key; the text says which.
    """

    CSS_PATH = "screens/operations.tcss"  # Textual loads no CSS_PATH of a default screen
    CSS = """
    Screen { background: ansi_default; color: ansi_default; }
    Toast { background: ansi_default; color: ansi_default; border-left: outer ansi_cyan; }
    """
    COMMANDS: ClassVar[set[object]] = {RegistryCommands}  # type: ignore[assignment]
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("app")]
    COMMAND_PALETTE_BINDING = "ctrl+p"

    def __init__(
        self,
        fleet: Fleet,
        *,
        refresh: float = 1.0,
        read_only: bool = False,
        ascii: bool = False,
        demo: bool = False,
        keys: Mapping[str, str] | None = None,
        notifier: Notifier | None = None,
    ) -> None:
        problems = check_keys(keys or {})
        if problems:
            raise ValueError("; ".join(problems))
        super().__init__(driver_class=ConsoleDriver, ansi_color=True)
        self.animation_level = "none"
        self.register_theme(CONSOLE_THEME)
        self.theme = CONSOLE_THEME.name
        self.fleet = fleet
        self.notifier = notifier
        self.read_only = read_only
        self.ascii = ascii or wants_ascii(os.environ)
        self.snapshot: FleetSnapshot | None = None
        """The newest look at everything."""
        self.looking = Looking(refresh, read_only=read_only, demo=demo)
        self.message: tuple[str, Style | None] | None = None
        """What was said last, while it stands."""
        self._message_timer: Timer | None = None
        self._asking: set[str] = set()
        """What is asked for at most once at a time, and is under way."""
        self._untold = ""
        self.told_to_end = False
        """Whether a signal ended it, or its terminal went: nobody reads what is said afterwards."""
        self._seen_at = 0.0
        self._resized_at = float("-inf")
        self._wake = asyncio.Event()
        self._look_once = False
        self.operations = OperationsScreen()
        self.set_keymap(dict(keys or {}))

    # -- life ------------------------------------------------------------------------------------------------------

    def get_default_screen(self) -> OperationsScreen:
        """The operations screen stands at the bottom of everything."""
        return self.operations

    def on_mount(self) -> None:
        """Begin to look, and end when the terminal goes or a person says so."""
        loop = asyncio.get_running_loop()
        if not self.is_headless:
            favour_the_screen()
            for number in (signal.SIGHUP, signal.SIGTERM):
                loop.add_signal_handler(number, self._told_to_end)
        self._seen_at = loop.time()
        if self.notifier is not None:
            self.notifier.write = self._ring
        self.run_worker(self._watch(), name="watch", exclusive=True, group="watch")
        if not self.read_only:
            self.set_timer(PAST_AFTER_SECONDS, lambda: self.act("", self.fleet.judge_past, str))

    def _check_resize(self) -> None:
        """Lay out a new size, but not before the last one has stood for a moment: sizes that come faster than they can
        be laid out would queue up in front of the keys. Textual's own, which has the newest size wait for 8 ms."""
        wait = self._resized_at + RESIZE_SECONDS - time.monotonic()
        if self._resize_event is None or wait <= 0:
            self._resized_at = time.monotonic()
            super()._check_resize()
            return
        if self._resize_timer is not None:
            self._resize_timer.stop()
        self._resize_timer = self.set_timer(wait, self._check_resize)

    def _display(self, screen: Any, renderable: Any) -> None:
        """Draw a picture. One that a stalled terminal would not take is left out; the next one is whole then."""
        if renderable is not None and isinstance(self._driver, ConsoleDriver) and self._driver.behind:
            return
        super()._display(screen, renderable)

    def terminal_caught_up(self) -> None:
        """From any thread: the terminal takes pictures again, and has missed some."""
        self.call_later(self.refresh)

    def terminal_lost(self) -> None:
        """From any thread: the terminal is gone."""
        self.call_later(self._told_to_end)

    def _told_to_end(self) -> None:
        """SIGHUP, SIGTERM, no terminal: leave as after ``q``, without a word. Textual handles none of them."""
        self.told_to_end = True
        self.exit()

    def action_quit(self) -> None:  # type: ignore[override]
        """Leave; servers stay up. Whoever ran the app says so (`farewell`)."""
        self.exit()

    def _fatal_error(self) -> None:
        """End after an unexpected exception. Textual's own way prints all variables, secrets among them."""
        self._close_messages_no_wait()

    @property
    def crash(self) -> Exception | None:
        """The unexpected exception that ended it. Whoever ran the app reports it, once the terminal is itself again."""
        return self._exception

    def farewell(self) -> str:
        """What is said after a person has left; empty when there is nothing to say or nobody to say it to."""
        if self.looking.demo or self.snapshot is None or self.told_to_end:
            return ""
        names = [plain(server.name) for server in self.snapshot.servers if server.ours and server.state.alive]
        if not names:
            return "No server is running."
        return f"{len(names)} {'server' if len(names) == 1 else 'servers'} still running: {', '.join(names)}"

    # -- looking ---------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Look once per refresh, never twice at once; a pause or a changed rate counts at once."""
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            self._wake.clear()
            if not self.looking.paused or self._look_once:
                self._look_once = False
                await self._look()
            rest = None if self.looking.paused else max(0.02, self.looking.refresh - (loop.time() - started))
            try:
                await asyncio.wait_for(self._wake.wait(), rest)
            except TimeoutError:
                continue

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        look = asyncio.ensure_future(in_thread(partial(self._see, self.operations.selected_name), "look at servers"))
        while not (await asyncio.wait({look}, timeout=max(PATIENCE_SECONDS, self.looking.refresh)))[0]:
            self._set_looking(hanging=loop.time() - self._seen_at)
        try:
            self.snapshot = look.result()
        except Exception as error:  # noqa: BLE001 - the look's boundary: said on the screen, and tried again
            self.say(f"Could not look at the servers: {sentence(error)}", BAD)
            return
        self._seen_at = loop.time()
        self._say_untold()
        self.looking = _with(self.looking, hanging=None)
        if self.screen_stack:
            self.operations.show_snapshot()

    def _see(self, selected: str | None) -> FleetSnapshot:
        """In a thread: look, and tell what begins and ends."""
        snapshot = self.fleet.snapshot(selected)
        if self.notifier is not None:
            self.notifier.look(snapshot)
        return snapshot

    def _say_untold(self) -> None:
        """What could not be told, once."""
        trouble = self.notifier.trouble if self.notifier is not None else ""
        if trouble and trouble != self._untold:
            self.say(trouble, BAD)
        self._untold = trouble

    def _ring(self, data: bytes) -> None:
        """Write to the terminal between two pictures; from any thread."""
        if self._driver is not None and not self.is_headless:
            self._driver.write(data.decode("ascii"))

    def look_now(self) -> None:
        """Look at once instead of at the next turn."""
        if not self.looking.paused:
            self._wake.set()

    def look_once(self) -> None:
        """Look at once, also while paused."""
        self._look_once = True
        self._wake.set()

    def _set_looking(self, **changes: object) -> None:
        self.looking = _with(self.looking, **changes)
        if self.operations.is_mounted and self.screen_stack:
            self.operations.draw_header()

    def action_pause(self) -> None:
        """Stop looking, or go on."""
        self._set_looking(paused=not self.looking.paused, hanging=None)
        self._wake.set()

    def action_refresh_faster(self) -> None:
        """Look more often."""
        self._step_rate([rate for rate in reversed(RATES) if rate < self.looking.refresh])

    def action_refresh_slower(self) -> None:
        """Look less often."""
        self._step_rate([rate for rate in RATES if rate > self.looking.refresh])

    def _step_rate(self, rates: list[float]) -> None:
        if rates:
            self._set_looking(refresh=rates[0])
            self._wake.set()

    # -- doing -----------------------------------------------------------------------------------------------------

    def act(
        self,
        doing: str,
        call: Callable[[], T],
        done: Callable[[T], str],
        failed: Callable[[Exception], bool] | None = None,
        *,
        once: str = "",
    ) -> None:
        """Run a verb of the fleet in a thread. ``done`` turns its result into what is said; errors are said too.

        ``failed`` hears of an error first, and says whether that was told. What has the same ``once`` as something
        under way is not begun.
        """
        if once in self._asking:
            return
        if once:
            self._asking.add(once)
        if doing:
            self.say(doing)
        self.run_worker(self._act(call, done, failed, once), name=doing or "verb", group="verbs")

    async def _act(
        self, call: Callable[[], T], done: Callable[[T], str], failed: Callable[[Exception], bool] | None, once: str
    ) -> None:
        try:
            result = await in_thread(call, "verb")
        except Exception as error:  # noqa: BLE001 - the verb's boundary: said on the screen
            if failed is None or not failed(error):
                wrong = "" if isinstance(error, FleetError) else "That went wrong: "
                self.say(f"{wrong}{sentence(error)}", BAD)
        else:
            said = done(result)
            if said:
                self.say(said)
        finally:
            self._asking.discard(once)
        self.look_once()

    def say(self, text: str, style: Style | None = None) -> None:
        """Show a sentence in the message line, for a while. On another screen than operations: as a toast."""
        self.message = (plain(text), style)
        if self._message_timer is not None:
            self._message_timer.stop()
        self._message_timer = self.set_timer(MESSAGE_SECONDS, self._forget_message)
        if not self.screen_stack:
            return
        if self.screen is not self.operations and style is not None:
            self.notify(plain(text), severity="error" if style is BAD else "information", markup=False)
        self._draw_message()

    def _forget_message(self) -> None:
        self.message = self._message_timer = None
        self._draw_message()

    def _draw_message(self) -> None:
        if self.screen_stack and self.operations.is_mounted:
            self.operations.draw_foot()

    # -- other screens ---------------------------------------------------------------------------------------------

    def action_help(self) -> None:
        """All keys."""
        from vllm_console.ui.screens.help import HelpScreen

        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen(self.read_only))

    def action_commands(self) -> None:
        """The command palette."""
        self.action_command_palette()

    def action_command_palette(self) -> None:
        """Open the palette; over a question there is none, for what it lists would go on below."""
        if not isinstance(self.screen, ModalScreen):
            super().action_command_palette()


def _with(looking: Looking, **changes: object) -> Looking:
    from dataclasses import replace

    return replace(looking, **changes)  # type: ignore[arg-type]


def sentence(error: BaseException) -> str:
    """An error's first line, or its kind when it says nothing."""
    first = str(error).strip().splitlines()[:1]
    return plain(first[0]) if first else type(error).__name__
