"""Loading and unloading LoRA adapters of a running server: a small dialog."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input

from vllm_console.fleet.adapters import limits_text, request_states
from vllm_console.fleet.verbs import UsageError
from vllm_console.text import count, plain, size
from vllm_console.ui.closing import close_screen
from vllm_console.ui.screens.dialogs import answer_parts
from vllm_console.ui.terminal.lines import LineView, line
from vllm_console.ui.theme import BAD, DIM, KEY, STRONG, WARN
from vllm_console.ui.widgets.draw import fit

if TYPE_CHECKING:
    from vllm_console.fleet.adapters import Adapter, Adapters, Loaded
    from vllm_console.fleet.snapshot import ServerView
    from vllm_console.ui.app import ConsoleApp

MOST_SHOWN = 8

ALWAYS_SHOWN = 10
"""Rows of the dialog besides adapters, one of them for how many are left out."""

UNLOAD = "unload"


class AdapterDialog(ModalScreen[str | None]):
    """Shows the adapters and takes one line, ``NAME FOLDER`` or ``unload NAME``; dismisses with it, or None."""

    CSS_PATH = "dialogs.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "Leave", show=False)]

    def __init__(self, found: Adapters) -> None:
        super().__init__()
        self._found = found

    def compose(self) -> ComposeResult:
        """A box with the adapters and a line to type into."""
        yield Vertical(LineView(id="question"), Input(id="adapter", compact=True), LineView(id="answers"), id="dialog")

    def on_mount(self) -> None:
        """Show what is served."""
        self.query_one("#dialog").set_class(getattr(self.app, "ascii", False), "-ascii")
        self._draw("")
        self.set_focus(self.query_one(Input))  # at once: keys typed next are for it

    def _draw(self, wrong: str) -> None:
        # Nine tenths of the screen minus the border, and minus what is always shown.
        room = int(0.9 * self.app.size.height) - 2 - ALWAYS_SHOWN
        adapters = self._found.adapters
        rows = [adapter_text(one) for one in adapters[: max(1, min(MOST_SHOWN, room))]]
        if left := len(adapters) - len(rows):
            rows.append(f"and {left} more: vllm-console lora list {self._found.server}")
        width = max(40, min(76, self.app.size.width - 14))
        self.query_one("#question", LineView).show(
            [
                line((fit(plain(f"LoRA adapters of {self._found.server}"), width).rstrip(), STRONG)),
                line((fit(f"at most {limits_text(self._found)}", width).rstrip(), DIM)),
                *(line(fit(plain(text), width).rstrip()) for text in rows or ["It serves none."]),
                line(),
                line("name and folder:  ", ("poems ~/adapters/poems", KEY)),
                line("to unload one:    ", (f"{UNLOAD} poems", KEY)),
                line((fit(plain(wrong), width).rstrip(), BAD)),
            ]
        )
        answers = [
            *answer_parts("enter", "load or unload", "screen.take"),
            *answer_parts("esc", "cancel", "screen.leave"),
        ]
        self.query_one("#answers", LineView).show([line(), line(*answers)])

    def on_resize(self) -> None:
        """Show as much as fits now."""
        if self.is_mounted:
            self._draw("")

    async def action_take(self) -> None:
        """As enter does in the line."""
        await self.query_one(Input).action_submit()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Take the line, if it can be understood."""
        try:
            parse(event.value)
        except UsageError as error:
            self._draw(str(error))
        else:
            close_screen(self, event.value)

    def action_leave(self) -> None:
        """Close without a change."""
        close_screen(self)


def adapter_text(one: Adapter) -> str:
    """An adapter in a line: name, requests, rank, size."""
    rank = f"rank {count(one.rank)}" if one.rank is not None else "rank unknown"
    return f"{one.name}  requests: {request_states(one)}  {rank}  {size(one.size)}"


def parse(text: str) -> tuple[str, str]:
    """An adapter's name and its folder, which is empty where it is to be unloaded.

    Raises:
        UsageError: it can't be understood.
    """
    name, _, rest = text.strip().partition(" ")
    if not name or not rest.strip():
        raise UsageError(f"type a name and a folder, or {UNLOAD} and a name")
    return (rest.strip(), "") if name == UNLOAD else (name, rest.strip())


def change_adapters(console: ConsoleApp, server: ServerView) -> None:
    """Ask what to load into a server of one's own or unload from it, and do it."""
    fleet, name = console.fleet, server.name

    def ask(found: Adapters) -> str:
        if found.fixed:
            console.say(f"{found.fixed}.", WARN)
        elif console.operations.on_top:
            console.push_screen(AdapterDialog(found), typed)
        return ""

    def typed(text: str | None) -> None:
        if text is None:
            return
        adapter, folder = parse(text)
        if folder:
            console.act(f"Loading {adapter}…", lambda: fleet.load_adapter(name, adapter, folder), done("served"))
        else:
            console.act(f"Unloading {adapter}…", lambda: fleet.unload_adapter(name, adapter), done("unloaded"))

    def done(how: str) -> Callable[[Loaded], str]:
        def message(found: Loaded) -> str:
            return "; ".join([f"{name}: {found.name} is {how}", *found.notes]) + "."

        return message

    console.act("", lambda: fleet.adapters(name), ask, once=f"adapters of {name}")
