"""The command palette: an input at the bottom of the screen with matching commands above."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len
from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.strip import Strip
from textual.widgets import Input

from vllm_console.text import plain
from vllm_console.ui.commands import Commands, Do, TypedCommand
from vllm_console.ui.parts.flag_catalog import FlagCatalog
from vllm_console.ui.parts.recent_commands import RecentCommands
from vllm_console.ui.parts.server_verbs import RefusalError
from vllm_console.ui.terminal.lines import LineView, clickable, line, wheel_step
from vllm_console.ui.terminal.screens import TerminalModal
from vllm_console.ui.theme import ACCENT, DIM, KEY, STRONG, WARN
from vllm_console.ui.threads import answer_for
from vllm_console.ui.widgets.draw import LEAST_TEXT, Part, fit, paragraph, rule, wrapped
from vllm_console.ui.widgets.entry import Entry
from vllm_console.ui.widgets.placed_area import set_height
from vllm_launchers.errors import OperationError
from vllm_launchers.presets.model import Preset
from vllm_launchers.vllm.engines import Engine

if TYPE_CHECKING:
    from vllm_console.fleet.local import LocalFleet

SHARE = 3
"""The palette takes 1/`SHARE` of the screen's rows; findings and the table stay visible above it."""

LEAST_ROWS, MOST_ROWS = 3, 8
"""Rows for commands, however many match, so that the screen above does not move."""


class PaletteScreen(TerminalModal[Do | None]):
    """Reads a command; dismisses with a function that runs it, or None. The screen above stays visible.

    Without input, no command is selected, so that enter alone does nothing.
    """

    CSS_PATH = "palette.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Leave", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
    ]

    def __init__(self, commands: Commands, recent: RecentCommands, fleet: LocalFleet, engine: Engine | None) -> None:
        super().__init__()
        self._commands, self._recent, self._fleet, self._engine = commands, recent, fleet, engine
        self._found: Sequence[TypedCommand] = ()
        self._at: int | None = None
        self._top = 0
        self._wrong = ""
        self._list = LineView(id="palette-list")
        self._entry = Entry(id="palette-input")

    def compose(self) -> ComposeResult:
        """Yield the list and the input below it."""
        with Vertical(id="palette"):
            yield self._list
            with Horizontal(id="palette-line"):
                yield LineView(id="palette-prompt")
                yield self._entry

    def on_mount(self) -> None:
        """Focus the input and load completions."""
        self.query_one("#palette-prompt", LineView).show([line((":", KEY))])
        self._entry.open("command", placeholder=self._commands.examples)
        self._look_up()
        self.run_worker(self._learn(), name="commands", group="commands")

    async def _learn(self) -> None:
        try:
            presets, catalog = await answer_for(
                self, partial(_known, self._fleet, self._engine, self._recent), "commands"
            )
        except OperationError as error:
            self._wrong = plain(str(error))
        else:
            self._commands.learn(presets, catalog)
        self._look_up()

    @property
    def _rows(self) -> int:
        return min(MOST_ROWS, max(LEAST_ROWS, self.app.size.height // SHARE - 2))

    # -- matching --------------------------------------------------------------------------------------------------

    def _look_up(self) -> None:
        """List matching commands; keep the selected one if it still matches."""
        before = self._found[self._at].text if self._at is not None and self._at < len(self._found) else None
        typed = self._entry.value
        self._found = self._commands.matching(typed, self._recent.texts)
        texts = [command.text for command in self._found]
        if before in texts and before is not None:
            self._at = texts.index(before)
        else:
            self._at = 0 if typed.strip() and self._found and self._found[0].preselected(typed) else None
        self._draw()

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        self._wrong, self._at = "", None
        self._look_up()

    # -- drawing ---------------------------------------------------------------------------------------------------

    def on_resize(self) -> None:
        """Draw for the new size."""
        if self.is_mounted:
            self._draw()

    def _draw(self) -> None:
        width, rows = self.app.size.width, self._rows
        at = self._at or 0
        self._top = max(0, min(self._top, at, len(self._found) - rows), at - rows + 1)
        shown = list(enumerate(self._found))[self._top : self._top + rows]
        column = max((cell_len(command.text) for _, command in shown), default=0)
        column = min(column, max(20, width // 2))
        strips: list[Strip] = []
        free = rows - len(shown)
        for index, command in shown:
            row = _rows(command, index, index == self._at, column, width, 1 + free)
            strips, free = [*strips, *row], free - len(row) + 1
        wrong = self._wrong or ("" if self._found else self._commands.refusal(self._entry.value))
        if wrong and not self._found:
            strips = paragraph(wrong, width, WARN, indent="  ", most=rows)
        elif wrong:
            strips = [*strips[: rows - 1], line((fit(f"  {plain(wrong)}", width).rstrip(), WARN))]
        set_height(self._list, rows + 1)
        self._list.show([_title(len(self._found), width), *strips])

    # -- keys and mouse --------------------------------------------------------------------------------------------

    @on(Entry.Stepped)
    def _stepped(self, event: Entry.Stepped) -> None:
        event.stop()
        self._move(event.step)

    def _move(self, by: int) -> None:
        if self._found:
            at = (0 if by > 0 else len(self._found) - 1) if self._at is None else self._at + by
            self._at = max(0, min(len(self._found) - 1, at))
            self._wrong = ""
            self._draw()

    def action_page(self, by: int) -> None:
        """Move by pages."""
        self._move(by * self._rows)

    @on(Entry.Completing)
    def _complete(self, event: Entry.Completing) -> None:
        """Copy the selected or first command into the input."""
        event.stop()
        if self._found:
            command = self._found[self._at or 0]
            self._entry.put(command.text if command.open else f"{command.text} ")

    @on(Input.Submitted)
    def _entered(self, event: Input.Submitted) -> None:
        event.stop()
        if self._at is not None:
            self._run(self._found[self._at])
        elif not self._entry.value.strip():
            self.close_with()
        elif self._found:
            self._wrong = "Choose a command with ↓ first."
            self._draw()

    def action_choose(self, index: int) -> None:
        """Run the clicked command."""
        if index < len(self._found):
            self._at = index
            self._run(self._found[index])

    def _run(self, command: TypedCommand) -> None:
        """Close and run a command; complete it if it is incomplete; if it does not apply, say why."""
        if command.open:
            self._entry.put(command.text)
            return
        try:
            do = command.prepare()
        except RefusalError as error:
            self._wrong = "" if str(error) == command.wrong else str(error)
            self._draw()
            return
        self._recent.add(command.text)
        self.close_with(do)

    def action_leave(self) -> None:
        """Close without a command."""
        self.close_with()

    @on(events.MouseScrollUp)
    @on(events.MouseScrollDown)
    def _wheel(self, event: events.MouseEvent) -> None:
        event.stop()
        self._move(wheel_step(event))


def _known(fleet: LocalFleet, engine: Engine | None, recent: RecentCommands) -> tuple[Sequence[Preset], FlagCatalog]:
    """Read the presets, an engine's flags, and the command history. Runs in a thread."""
    recent.read()
    presets, _ = fleet.presets()
    return presets, FlagCatalog(fleet.flags(engine) if engine is not None else None)


def _title(count: int, width: int) -> Strip:
    keys: list[Part] = []
    for key, text in (("↑↓", "choose"), ("tab", "complete"), ("enter", "run"), ("esc", "back")):
        keys += [(key, KEY), (f" {text}  ", DIM)]
    keys[-1] = (" back", DIM)
    number = f"Commands · {count}" if count else "Commands"
    return rule(number, width, keys)


def _rows(command: TypedCommand, index: int, here: bool, column: int, width: int, most: int) -> list[Strip]:
    """One row: command, description and key. The reason why it can't run wraps to at most ``most`` rows."""
    action = f"screen.choose({index})"
    key = f" {command.key} " if command.key and width >= 60 else ""
    title, style = (command.wrong, WARN) if command.wrong else (command.title, DIM)
    room = max(0, width - column - 4 - cell_len(key))
    title, *more = wrapped(plain(title), max(LEAST_TEXT, room), most) if command.wrong else (title,)
    first = line(
        ("▸ " if here else "  ", clickable(action, ACCENT)),
        (fit(plain(command.text), column), clickable(action, STRONG if here else None)),
        (fit(f"  {plain(title)}", room + 2), clickable(action, style)),
        (key, clickable(action, KEY)),
    )
    indent = " " * (column + 4)
    return [first, *(line(indent, (row, clickable(action, style))) for row in more)]
