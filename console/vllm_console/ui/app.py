"""The Textual app: polls the fleet in a thread, passes snapshots to the screen, runs verbs and exits cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import isawaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from msgspec.structs import replace
from rich.style import Style
from textual import events
from textual.actions import ActionParseResult
from textual.app import App
from textual.binding import BindingType
from textual.dom import DOMNode
from textual.filter import LineFilter
from textual.message_pump import MessagePump
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Input

from vllm_console.fleet.snapshot import FIRST, FleetSnapshot, ServerView
from vllm_console.history.time_view import TimeView
from vllm_console.text import error_sentence, plain
from vllm_console.ui.actions import bindings
from vllm_console.ui.keymap import chosen_keys, key_of, use_keys
from vllm_console.ui.panes.bars import Polling
from vllm_console.ui.parts.late_screens import LateScreens
from vllm_console.ui.parts.messages import Messages
from vllm_console.ui.parts.recent_commands import RecentCommands
from vllm_console.ui.parts.server_verbs import RefusalError
from vllm_console.ui.screens.operations import OperationsScreen
from vllm_console.ui.terminal.choice import driver_class
from vllm_console.ui.terminal.clipboard import copy
from vllm_console.ui.theme import (
    BAD,
    CONSOLE_THEME,
    OK,
    TERMINAL_THEME,
    THEMES,
    WARN,
    AsciiFilter,
    ThemeFilter,
    wants_ascii,
)
from vllm_console.ui.threads import favor_the_screen, in_thread, woken
from vllm_launchers.errors import OperationError
from vllm_launchers.units import counted

if TYPE_CHECKING:
    from vllm_console.alerts.notifier import Notifier
    from vllm_console.chat.conversation import ChatOptions
    from vllm_console.fleet.local import LocalFleet
    from vllm_console.fleet.types import Replay
    from vllm_console.ui.parts.chat import Chat
    from vllm_console.ui.terminal.cast import Cast

T = TypeVar("T")

PAST_AFTER_SECONDS = 3.0
"""Delay after startup before findings are evaluated for the time no console was open; the first frames come first."""

RESIZE_SECONDS = 0.06
"""Minimum time between two layouts while the terminal is being resized."""

RATES = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds between polls that ``+`` and ``-`` step through."""

END_SECONDS = 6
"""How long the console may take to exit after a signal (whole seconds). Restoring the terminal takes up to 3."""

SETTLE_SECONDS = 1.0
"""How long a key waits until an input has handled the previous key."""

FIRST_SECONDS = 0.3
"""How long the first frame waits for the first snapshot, so that no empty screen is drawn."""

LATE_SECONDS = 3.0
"""How late a snapshot may be before the header shows its age."""


class ConsoleApp(App[None]):
    """The console. It never starts or stops servers on its own; servers outlive it.

    ``refresh`` is in seconds. ``keymap`` is a key preset; ``keys`` maps action ids to the user's own keys. ``theme`` is
    a color theme, ``columns`` the columns of the server table, ``layout`` the initial pane layout. ``demo`` marks a
    demo. ``notifier`` receives every snapshot. ``at`` (Unix seconds) opens an earlier moment, ``server`` selects a
    server, ``replay`` opens an ended run, ``chat`` opens a chat with ``server``; leaving that chat quits. ``state`` is
    the directory for the command history; None keeps none. ``cast`` records the screen. Screenshots go to the first
    directory of ``pictures`` that is writable. ``hints`` enables hints; that file is created once they have been
    followed or hidden.

    Raises:
        KeysError: ``keys`` names an unknown action or assigns one key to two actions.
        UsageError: ``TEXTUAL_DRIVER`` in the environment names no driver.
    """

    CSS_PATH = "screens/operations.tcss"  # Textual loads no CSS_PATH of a default screen
    CSS = """
    Screen { background: ansi_default; color: ansi_default; }
    Toast { background: ansi_default; color: ansi_default; border-left: outer ansi_cyan; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("app")]

    def __init__(
        self,
        fleet: LocalFleet,
        *,
        refresh: float = 1.0,
        read_only: bool = False,
        ascii: bool = False,
        demo: bool = False,
        keymap: str = "default",
        keys: Mapping[str, str] | None = None,
        notifier: Notifier | None = None,
        layout: str = "auto",
        theme: str = TERMINAL_THEME,
        columns: Sequence[str] = (),
        at: float | None = None,
        state: Path | None = None,
        cast: Cast | None = None,
        pictures: Sequence[Path] = (),
        hints: Path | None = None,
        server: str = "",
        replay: Replay | None = None,
        chat: ChatOptions | None = None,
    ) -> None:
        own_keys = chosen_keys(keymap, keys or {})
        super().__init__(driver_class=driver_class(os.environ), ansi_color=True)
        self.cast = cast
        self.hints = hints
        self._chats: dict[str, Chat] = {}
        """Chats by server; they are lost when the console exits."""
        self._chat = (server, chat) if chat is not None else None
        self.demo_wanted = False
        """Whether the user left the console for the demo."""
        self._pictures = tuple(pictures)
        self.animation_level = "none"
        self.register_theme(CONSOLE_THEME)
        # Like `self.theme = …`, which would parse all styles a second time.
        self.set_reactive(App.theme, CONSOLE_THEME.name)
        self.stylesheet.set_variables(self.get_css_variables())
        self.fleet = fleet
        self.notifier = notifier
        self.read_only = read_only
        self.ascii = ascii or wants_ascii(os.environ)
        self.snapshot: FleetSnapshot | None = None
        self.polling = Polling(refresh, read_only=read_only, demo=demo)
        self.messages = Messages()
        """The message history and the message being shown."""
        self._asking: set[str] = set()
        """Names of running queries that must not run twice at once."""
        self.late_screens = LateScreens(self)
        self._reported_trouble = ""
        self.terminated = False
        """Whether a signal or a lost terminal ended the console; nobody reads what is printed afterwards."""
        self._polled_at = 0.0
        self._resized_at = float("-inf")
        self._wake = asyncio.Event()
        self._late: asyncio.TimerHandle | None = None
        """Timer that fires when the current poll is late."""
        self._poll_once = False
        self._first_poll: asyncio.Task[None] | None = None
        self._polled_for: str | None = None
        self.recent = RecentCommands(state)
        self.color_theme = TERMINAL_THEME
        self._theme_filter: ThemeFilter | None = None
        self._ascii_filter = (AsciiFilter(),) if self.ascii else ()
        if why := self.theme_refusal(theme):
            self.messages.note("", why)
        elif THEMES[theme].background:
            self.color_theme, self._theme_filter = theme, ThemeFilter(THEMES[theme])
        self.operations = OperationsScreen(self, layout, at, columns, server=server, replay=replay)
        use_keys(own_keys, ascii=self.ascii)
        self.set_keymap({id: ",".join(names) for id, names in own_keys.items()})

    # -- lifecycle -------------------------------------------------------------------------------------------------

    def get_default_screen(self) -> OperationsScreen:
        """Return the operations screen as the bottom of the stack."""
        return self.operations

    async def on_load(self) -> None:
        """Take the first snapshot, waiting briefly for it so that the first frame can show it."""
        if self.notifier is not None:
            self.notifier.write = self._ring
        self._first_poll = asyncio.create_task(self._poll(), name="first poll")
        await asyncio.wait({self._first_poll}, timeout=FIRST_SECONDS)

    def on_mount(self) -> None:
        """Install signal handlers and start polling."""
        loop = asyncio.get_running_loop()
        if not self.is_headless:
            favor_the_screen()
            signal.signal(signal.SIGALRM, self._end_now)
            for number in (signal.SIGHUP, signal.SIGTERM):
                # Not loop.add_signal_handler: a busy loop would never run such a handler.
                signal.signal(number, partial(self._signaled, loop))
        self._polled_at = loop.time()
        if self._chat is not None:
            self.open_chat(*self._chat, closed=self.action_quit)
        self.run_worker(self._poll_forever(), name="poll", exclusive=True, group="poll")
        self.set_interval(1.0, self._draw_message)  # a message whose time is up goes, also while paused
        if not self.read_only:
            self.set_timer(PAST_AFTER_SECONDS, lambda: self.act("", self.fleet.history.judge_past, str, once="past"))

    def _check_resize(self) -> None:
        """Debounce resizes: sizes that arrive faster than they can be laid out would delay keys. Textual's own debounce
        is 8 ms."""
        wait = self._resized_at + RESIZE_SECONDS - time.monotonic()
        if self._resize_event is None or wait <= 0:
            self._resized_at = time.monotonic()
            super()._check_resize()
            return
        if self._resize_timer is not None:
            self._resize_timer.stop()
        self._resize_timer = self.set_timer(wait, self._check_resize)

    def _display(self, screen: Any, renderable: Any) -> None:
        """Draw a frame, or skip it if the terminal has stalled; the next frame is then a complete one."""
        if renderable is not None and getattr(self._driver, "behind", False):
            return
        super()._display(screen, renderable)

    def terminal_caught_up(self) -> None:
        """Redraw after skipped frames, since the terminal accepts frames again. Callable from any thread."""
        self.call_later(self.refresh)

    def terminal_lost(self) -> None:
        """Exit because the terminal is gone. Callable from any thread."""
        signal.alarm(END_SECONDS)
        self.call_later(self._terminate)

    def _signaled(self, loop: asyncio.AbstractEventLoop, _number: int, _frame: object) -> None:
        """Exit cleanly; force the exit if that takes too long."""
        signal.alarm(END_SECONDS)
        with contextlib.suppress(RuntimeError):  # the loop has ended: it is leaving already
            loop.call_soon_threadsafe(self._terminate)

    def leave_signals(self) -> None:
        """Restore default signal handling and cancel the exit deadline, after `run`."""
        signal.alarm(0)
        for number in (signal.SIGALRM, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)

    def _end_now(self, _number: int, _frame: object) -> None:
        """Force the exit after the deadline, and restore the terminal. Servers and recorders keep running."""
        try:
            if self._driver is not None:
                self._driver.stop_application_mode()
                self._driver.close()
        finally:
            os._exit(1)

    def _terminate(self) -> None:
        """Exit silently after SIGHUP, SIGTERM or loss of the terminal, none of which Textual handles."""
        self.terminated = True
        self.exit()

    def action_quit(self) -> None:  # type: ignore[override]
        """Exit; servers keep running. The caller of `run` prints `farewell`."""
        self.exit()

    def action_help_quit(self) -> None:
        """Show which key quits, for ctrl+c. Overrides Textual's message, which names another key."""
        outcome = "the demo's servers end with it" if self.polling.demo else "servers stay up"
        self.say(f"{key_of('quit')} quits; {outcome}.", WARN)

    def _fatal_error(self) -> None:
        """Exit after an unexpected exception. Textual's own traceback prints all variables, including secrets."""
        self._close_messages_no_wait()

    @property
    def crash(self) -> Exception | None:
        """The unexpected exception that ended the app. The caller reports it once the terminal is restored."""
        return self._exception

    def farewell(self) -> str:
        """Text to print after quitting; empty if there is none or nobody would read it."""
        if self.polling.demo or self.snapshot is None or self.terminated:
            return ""
        names = [plain(server.name) for server in self.snapshot.servers if server.ours and server.state.alive]
        if not names:
            return "No servers running."
        return f"{counted(len(names), 'server')} still running: {', '.join(names)}"

    def hints_ended(self) -> None:
        """Remember that hints have ended. If that can't be written, the next console shows them again."""
        if self.hints is not None:
            with contextlib.suppress(OSError):
                self.hints.touch(0o600)

    # -- polling ---------------------------------------------------------------------------------------------------

    async def _poll_forever(self) -> None:
        """Poll once per refresh interval, one poll at a time. A pause or a new rate takes effect immediately."""
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            self._wake.clear()
            if self._first_poll is not None:
                await self._first_poll
                self._first_poll = None
            elif not self.polling.paused or self._poll_once or self._charts_missing():
                self._poll_once = False
                await self._poll()
            waits = self.polling.paused and not self._charts_missing()
            rest = None if waits else max(0.02, self.polling.refresh - (loop.time() - started))
            await woken(self._wake, rest)

    def _charts_missing(self) -> bool:
        """Whether the newest snapshot lacks the selected server's history, which is then loaded even while paused."""
        if self.snapshot is None or not self.operations.is_mounted:
            return self._polled_for is None
        server = self.operations.selected
        if server is None:
            return False
        return self._polled_for != server.name or (server.series is not None and server.series.loading)

    async def _poll(self) -> None:
        loop = asyncio.get_running_loop()
        self._polled_for = self.operations.selected_name
        self._await_late_poll(loop)
        try:
            screen = self.operations
            take = partial(self._take_snapshot, screen.selected_name, screen.wanted_time, screen.log_reader)
            self.snapshot = await in_thread(take, "poll")
        except Exception as error:  # noqa: BLE001 - the poll's boundary: shown, and tried again
            self.say(f"Could not read the servers: {error_sentence(error)}", BAD)
            self._set_polling(hanging=loop.time() - self._polled_at)
            return
        finally:
            if self._late is not None:
                self._late.cancel()
        self._polled_at = loop.time()
        if self._polled_for == FIRST:
            self._polled_for = next((one.name for one in self.snapshot.servers if one.series is not None), FIRST)
        self._report_trouble()
        self.polling = replace(self.polling, hanging=None, resuming=False)
        leaving = self.operations.is_mounted and not self.screen_stack
        if not leaving:
            self.operations.show_snapshot()

    def _await_late_poll(self, loop: asyncio.AbstractEventLoop) -> None:
        """While the next snapshot is late, keep showing the age of the current one."""

        def is_late() -> None:
            self._await_late_poll(loop)  # first, so that a failure to draw doesn't end it
            self._set_polling(hanging=loop.time() - self._polled_at)

        self._late = loop.call_later(max(LATE_SECONDS, self.polling.refresh), is_late)

    def _take_snapshot(self, selected: str, time: TimeView, read_log: Callable[[], None] | None) -> FleetSnapshot:
        """Take a snapshot, read the log and send notifications. Runs in a thread."""
        snapshot = self.fleet.snapshot(selected, time)
        if read_log is not None:
            read_log()
        if self.notifier is not None:
            self.notifier.update(snapshot)
        return snapshot

    def _report_trouble(self) -> None:
        trouble = self.notifier.trouble if self.notifier is not None else ""
        if trouble and trouble != self._reported_trouble:
            self.say(trouble, BAD)
        self._reported_trouble = trouble

    def _ring(self, data: bytes) -> None:
        """Write to the terminal between two frames. Callable from any thread."""
        if self._driver is None:  # the first snapshot may arrive before the driver exists
            self.call_later(self._ring, data)
        elif not self.is_headless:
            self._driver.write(data.decode("ascii"))

    def server(self, name: str) -> ServerView | None:
        """Return a server of the newest snapshot by name."""
        return self.snapshot.server(name) if self.snapshot is not None else None

    def poll_now(self) -> None:
        """Poll now instead of after the interval, unless paused."""
        if not self.polling.paused:
            self._wake.set()

    def poll_once(self) -> None:
        """Poll now, even while paused."""
        self._poll_once = True
        self._wake.set()

    def _set_polling(self, **changes: object) -> None:
        self.polling = replace(self.polling, **changes)
        if self.operations.is_mounted and self.screen_stack:
            self.operations.draw_header()

    def action_pause(self) -> None:
        """Pause or resume polling."""
        paused = not self.polling.paused
        self._set_polling(paused=paused, resuming=not paused, hanging=None)
        self._wake.set()
        text = f"Paused: figures are frozen. {key_of('pause')} resumes."
        if paused:
            self.show_message(text)
        else:
            self.answered(text)

    def action_refresh_faster(self) -> None:
        """Poll more often."""
        self._step_rate([rate for rate in reversed(RATES) if rate < self.polling.refresh])

    def action_refresh_slower(self) -> None:
        """Poll less often."""
        self._step_rate([rate for rate in RATES if rate > self.polling.refresh])

    def _step_rate(self, rates: list[float]) -> None:
        if rates:
            self._set_polling(refresh=rates[0])
            self._wake.set()

    # -- keys ------------------------------------------------------------------------------------------------------

    async def on_event(self, event: events.Event) -> None:
        """Handle each key completely before the next one, so that keys take effect in the order pressed.

        Textual passes letters to an input at once, but a binding's key climbs through the message queue of every
        ancestor. Without this, ctrl+u deleted text typed after it, and letters typed after the key that opens an input
        ran as commands.
        """
        if not isinstance(event, events.Key | events.Paste) or event.is_forwarded:
            await super().on_event(event)
        elif self.late_screens.keeps(event):
            return
        elif isinstance(event, events.Paste):
            await super().on_event(event)
            if isinstance(self.focused, Input):
                await _settled(self.focused)
        elif not await self._press(event):
            await super().on_event(event)

    async def _press(self, event: events.Key) -> bool:
        """Handle a key. Returns whether it had an effect here."""
        if not self.app_focus:
            self.app_focus = True
        if await self._check_bindings(event.key, priority=True):
            return True
        field = self.focused if isinstance(self.focused, Input) else None
        if event.key == "escape":
            self.screen.clear_selection()
        if field is not None and event.is_printable:
            await field._on_key(event)
        elif not await self._check_bindings(event.key):
            return False
        for used in dict.fromkeys(
            (field, self.focused)
        ):  # an input that just opened must get the focus before the next key
            if isinstance(used, Input):
                await _settled(used)
        return True

    async def _on_key(self, event: events.Key) -> None:
        """Skip Textual's own handler, which runs bindings of a key that no widget handled.

        That may be another screen's binding by now, as after a dialog was closed; `_press` has looked for one in time.
        """
        event.prevent_default()

    # -- the mouse -------------------------------------------------------------------------------------------------

    def on_text_selected(self) -> None:
        """Copy the text selected with the mouse."""
        text = self.screen.get_selected_text() or ""
        if text.strip():
            number = text.rstrip().count("\n") + 1
            copy(self, text.rstrip(), counted(number, "line"), self.say_on_top)

    # -- actions and messages --------------------------------------------------------------------------------------

    def act(
        self,
        doing: str,
        call: Callable[[], T],
        done: Callable[[T], str],
        failed: Callable[[Exception], bool] | None = None,
        *,
        about: str = "",
        once: str = "",
    ) -> None:
        """Run a fleet verb in a thread. ``done`` turns its result into a message; errors are shown, too.

        ``failed`` gets an error first and returns whether it reported it. ``about`` names the server an error is about,
        if that is not the selected one. ``once`` names a query: it is not started again while it is running, and a
        paused console does not poll after it. A verb's effect is shown even while paused.
        """
        if once in self._asking:
            return
        if once:
            self._asking.add(once)
        if doing:
            self.say(doing)
        self.run_worker(self._act(call, done, failed, about, once, doing), name=doing or "verb", group="verbs")

    async def _act(
        self,
        call: Callable[[], T],
        done: Callable[[T], str],
        failed: Callable[[Exception], bool] | None,
        about: str,
        once: str,
        doing: str,
    ) -> None:
        try:
            result = await in_thread(call, "verb")
        except Exception as error:  # noqa: BLE001 - the verb's boundary: shown on the screen
            if failed is None or not failed(error):
                wrong = "" if isinstance(error, OperationError) else "Unexpected error: "
                self.say(f"{wrong}{error_sentence(error)}", BAD, about=about)
        else:
            message = done(result)
            if message:
                self.say(message)
        finally:
            self._asking.discard(once)
        if once:
            self.answered(doing)
            self.poll_now()
        else:
            self.poll_once()

    @property
    def message(self) -> tuple[str, Style | None] | None:
        """The message being shown, if any."""
        shown = self.messages.shown
        return (shown.text, shown.style) if shown is not None else None

    async def run_action(
        self,
        action: str | ActionParseResult,
        default_namespace: DOMNode | None = None,
        namespaces: Mapping[str, DOMNode] | None = None,
    ) -> bool:
        """Run an action, or say why it does not apply."""
        with self.saying_refusals():
            return await super().run_action(action, default_namespace, namespaces)
        return True

    @contextlib.contextmanager
    def saying_refusals(self) -> Iterator[None]:
        """Show a `RefusalError` that is raised in this context."""
        try:
            yield
        except RefusalError as refusal:
            self.say(str(refusal), WARN, about=refusal.about)

    def say(
        self, text: str, style: Style | None = None, server: str = "", *, about: str = "", outage: bool = False
    ) -> None:
        """Show a sentence in the message line for a while; errors stay longer. Other screens show problems as a toast.

        ``server`` is the server whose event this is, if any; an ``outage`` is shown until that server is ready.
        ``about`` is the server of a problem, if that is not the selected one.
        """
        self.messages.say(text, style, server, about=about, outage=outage)
        if not self.screen_stack:
            return
        if self.screen is not self.operations and style is not None:
            self.notify(plain(text), severity="error" if style is BAD else "information", markup=False)
        self._draw_message()

    def say_on_top(self, text: str) -> None:
        """Show the effect of a key; on screens other than the operations screen also as a toast."""
        self.say(text)
        if self.screen is not self.operations:
            self.notify(plain(text), markup=False)

    def show_message(self, text: str, style: Style | None = None) -> None:
        """Show a sentence in the message line for a while without adding it to the message list."""
        self.messages.show(text, style)
        self._draw_message()

    def answered(self, text: str) -> None:
        """Hide the progress message of a finished query."""
        self.messages.answered(text)
        self._draw_message()

    def messages_seen(self) -> None:
        """Mark the shown messages as read."""
        self.messages.seen()
        self._draw_message()

    def _draw_message(self) -> None:
        if self.screen_stack and self.operations.is_mounted:
            self.operations.draw_foot()

    # -- other screens ---------------------------------------------------------------------------------------------

    def open_chat(
        self, name: str, options: ChatOptions | None = None, closed: Callable[[], None] | None = None
    ) -> None:
        """Open the chat with a server; ``options`` apply to a new chat. ``closed`` is called when it is left."""
        from vllm_console.ui.parts.chat import Chat
        from vllm_console.ui.screens.chat import ChatScreen

        if name not in self._chats:
            self._chats[name] = Chat(self.fleet, name, options)
        self.push_screen(ChatScreen(self, self._chats[name]), (lambda _: closed()) if closed is not None else None)

    def action_picture(self) -> None:
        """Save a screenshot and show its path."""
        svg, folders = self.export_screenshot(title="vllm-console"), self._pictures

        def save() -> Path:
            from vllm_console.ui.picture import save_in_first

            return save_in_first(svg, folders)

        def saved(path: Path) -> str:
            self.say(f"Picture saved: {path}", OK)
            return ""

        self.act("", save, saved, once="picture")

    def on_resize(self, event: events.Resize) -> None:
        """Record the new size."""
        if self.cast is not None:
            self.cast.resize(event.size.width, event.size.height)

    def action_help(self) -> None:
        """Show all keys."""
        from vllm_console.ui.screens.help import HelpScreen

        if not isinstance(self.screen, HelpScreen):
            scope = getattr(self.screen, "SCOPE", "")
            now = self.operations.applying if self.screen is self.operations else None
            self.push_screen(HelpScreen(self.read_only, demo=self.polling.demo, scope=scope, now=now))

    def action_commands(self) -> None:
        """Open the command palette, but not over a dialog: the command's effect would be hidden below it."""
        if isinstance(self.screen, ModalScreen):
            return
        from vllm_console.ui.commands import Commands
        from vllm_console.ui.screens.palette import PaletteScreen

        server = self.operations.live

        async def chosen(do: Callable[[], object] | None) -> None:
            if do is not None:
                with self.saying_refusals():
                    done = do()
                    if isawaitable(done):
                        await done
                # In a worker: keys wait for this callback, and writing may block.
                self.run_worker(self._remember_commands(), name="commands", group="remember", exclusive=True)

        engine = server.engine if server is not None else None
        self.push_screen(PaletteScreen(Commands(self, self.screen), self.recent, self.fleet, engine), chosen)

    async def _remember_commands(self) -> None:
        if self.read_only:
            return
        try:
            await in_thread(self.recent.write, "commands")
        except OSError as error:
            self.messages.note("", f"The command was not remembered: {error.strerror}")

    # -- colors ----------------------------------------------------------------------------------------------------

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Line filters that adapt colors and characters: none, or those of the theme and of ``ascii``."""
        filters = [*super().get_line_filters(), *self._ascii_filter]
        return filters if self._theme_filter is None else [*filters, self._theme_filter]

    def theme_refusal(self, name: str) -> str:
        """Why this terminal can't show a theme, in one sentence; empty if it can."""
        if name == TERMINAL_THEME:
            return ""
        if self.no_color:
            return f"Theme {name} is not used: NO_COLOR is set."
        if self.console.color_system not in ("256", "truecolor"):
            return f"Theme {name} is not used: this terminal has 16 colors (TERM={os.environ.get('TERM', 'unset')})."
        return ""

    def choose_theme(self, name: str) -> None:
        """Switch to a theme that the terminal can show."""
        self.color_theme = name
        self._theme_filter = ThemeFilter(THEMES[name]) if THEMES[name].background else None
        for screen in self.screen_stack:
            for node in screen.walk_children(with_self=True):
                if isinstance(node, Widget):
                    node.notify_style_update()
                    node.refresh()
        self.say_on_top(f'Theme {name}. To keep it: theme = "{name}" in config.toml.')

    def action_next_theme(self) -> None:
        """Switch to the next theme that this terminal can show."""
        names = list(THEMES)
        at = names.index(self.color_theme)
        following = [*names[at + 1 :], *names[:at]]
        able = next((name for name in following if not self.theme_refusal(name)), None)
        if able is None:
            self.say(self.theme_refusal(following[0]), WARN)
        else:
            self.choose_theme(able)


async def _settled(field: Input) -> None:
    """Wait until an input and its ancestors have handled the messages that a key caused."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_SECONDS):
            for node in field.ancestors_with_self:
                heard = asyncio.Event()
                if isinstance(node, App) or not isinstance(node, MessagePump) or not node.call_later(heard.set):
                    return
                await heard.wait()
