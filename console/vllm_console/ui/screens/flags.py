"""The flag editor: all flags of a server with their meaning, current value, and value after the next restart."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from rich.style import Style
from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.strip import Strip
from textual.widgets import Input

from vllm_console.fleet.snapshot import ServerView
from vllm_console.text import plain
from vllm_console.ui.actions import bindings
from vllm_console.ui.keymap import key_of
from vllm_console.ui.panes.bars import footer, note_lines
from vllm_console.ui.parts.flag_catalog import FlagCatalog
from vllm_console.ui.parts.flag_edits import FlagEdits
from vllm_console.ui.parts.staging import MeasuredTraffic, measured_traffic
from vllm_console.ui.terminal.lines import LineView, line, wheel_step
from vllm_console.ui.terminal.screens import TerminalScreen
from vllm_console.ui.theme import ACCENT, BAD, CURSOR, DIM, STRONG, WARN
from vllm_console.ui.threads import answer_for, begin_worker, failure
from vllm_console.ui.widgets.draw import KeyHint, Part, cut_rows, fit, keys_line, paragraph
from vllm_console.ui.widgets.entry import Entry
from vllm_console.ui.widgets.frame_box import FrameBox
from vllm_launchers.plan.choices.choice import Choice
from vllm_launchers.plan.findings import FlagError
from vllm_launchers.units import counted
from vllm_launchers.vllm.flags.changes import Edits, FlagValue, flag_text, same_value, unapplied

if TYPE_CHECKING:
    from vllm_console.fleet.local import LocalFleet

WIDE = 110
"""Minimum width to show meanings in the table."""

TALL, ABOUT_ROWS, TALL_ABOUT_ROWS = 36, 4, 8
"""Rows for the description of the selected flag: `TALL_ABOUT_ROWS` from screen height `TALL` on, else `ABOUT_ROWS`."""

WHEEL = 3
"""Flags per notch of the mouse wheel."""

SEARCH = ""


class _FlagList(LineView):
    """The table of flags. It learns its height late, after a layout pass."""

    def on_resize(self) -> None:
        """Draw for the new size."""
        if isinstance(self.screen, FlagsScreen):
            self.screen.redraw()


class FlagsScreen(TerminalScreen[Edits | None]):
    """Edits the flags of ``server``, starting from ``staged``; dismisses with the edits to stage instead, or None."""

    CSS_PATH = "flags.tcss"
    AUTO_FOCUS = ""
    SCOPE = "flags"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("flags")]

    def __init__(
        self, server: ServerView, staged: Edits, fleet: LocalFleet, traffic: MeasuredTraffic | None = None
    ) -> None:
        super().__init__()
        self._server, self._fleet = server, fleet
        self._catalog = FlagCatalog()
        self._edits = FlagEdits(server.flags, dict(unapplied(server.flags, staged)))
        self._before = dict(self._edits.edits)
        self._search = ""
        self._only_set = False
        self._names = self._catalog.matching(self._edits, "")
        self._index = self._top = 0
        self._message: tuple[str, Style | None] = ("", None)
        self._warned = self._analyzing = False
        self._suggested: dict[str, Choice] = {}
        self._traffic, self._traffic_sentence = traffic, ""

    def compose(self) -> ComposeResult:
        """Yield the table, the description of the selected flag, message, input and keys."""
        table = LineView(id="flags-head", classes="bar"), _FlagList(id="flags-list"), LineView(id="flags-about")
        yield FrameBox(*table, id="flags-box")
        yield LineView(id="flags-note")
        yield Entry(id="flags-input")
        yield LineView(id="flags-keys", classes="bar")

    def on_mount(self) -> None:
        """Load the flags of the server's own vLLM."""
        self._arrange()
        if self._traffic is not None:
            self._suggest(self._traffic)
        begin_worker(self, self._learn, "flags", "flags")

    async def _learn(self) -> None:
        if self._server.engine is None:
            return
        try:
            table = await answer_for(self, partial(self._fleet.flags, self._server.engine), "flags")
        except Exception as error:  # noqa: BLE001 - the thread's boundary: shown on the screen
            self._say(failure(error, "can't read the flags of its vLLM"), WARN)
            self.redraw()
            return
        self._catalog = FlagCatalog(table)
        self._list_again(self._under)

    def on_resize(self, _event: events.Resize) -> None:
        """Draw for the new size."""
        self._arrange()

    @property
    def _about_rows(self) -> int:
        return TALL_ABOUT_ROWS if self.app.size.height >= TALL else ABOUT_ROWS

    def _arrange(self) -> None:
        if self.is_mounted:
            self.query_one("#flags-about").styles.height = self._about_rows
            self.call_after_refresh(self.redraw)

    @property
    def _box(self) -> FrameBox:
        return self.query_one("#flags-box", FrameBox)

    @property
    def _input(self) -> Entry:
        return self.query_one("#flags-input", Entry)

    @property
    def _under(self) -> str | None:
        return self._names[self._index] if self._names else None

    # -- drawing ---------------------------------------------------------------------------------------------------

    def redraw(self) -> None:
        """Draw everything."""
        if not self.is_mounted:
            return
        width = self.app.size.width
        title = f"Flags · {self._server.marked_name}"
        count = len(self._edits.edits)
        state: Part = (f"{count} staged" if count else "nothing staged", ACCENT if count else DIM)
        if self._edits.edits != self._before:
            state = (f"{counted(count, 'change') if count else 'no change'}, not staged yet", WARN)
        right = [state]
        if width >= WIDE:
            right.insert(0, (f"{self._catalog.source} · ", DIM))
        if self._only_set:
            right.insert(0, ("only set · ", DIM))
        if self._search:
            right.insert(0, (f"/{plain(self._search)} · ", DIM))
        self._box.show_title(title, right)
        self._show("#flags-head", [flags_heading(self._box.inner_width)])
        self._draw_list()
        self._draw_about()
        self._show("#flags-note", note_lines(*self._message, width))
        typing = self._input.purpose is not None
        self._show("#flags-keys", [keys_line(self._typing_keys(), width) if typing else footer("flags", width)])

    def _typing_keys(self) -> Sequence[KeyHint]:
        key = key_of("flags_back")
        if self._input.purpose == SEARCH:
            return self._input.keys((key, "show all", "screen.flags_back"), "keep the list", chooses=True)
        return self._input.keys((key, "cancel", "screen.flags_back"))

    def _show(self, selector: str, strips: list[Strip]) -> None:
        self.query_one(selector, LineView).show(strips)

    def _draw_list(self) -> None:
        rows = max(1, self.query_one("#flags-list").size.height)
        self._index = min(max(0, self._index), max(0, len(self._names) - 1))
        self._top = min(max(self._top, self._index - rows + 1), self._index, max(0, len(self._names) - rows))
        shown = list(enumerate(self._names))[self._top : self._top + rows]
        width = self._box.inner_width
        strips = [
            flag_row(name, self._server, self._edits, self._catalog, width, index == self._index)
            for index, name in shown
        ]
        if not strips:
            strips = note_lines(self._catalog.no_match(self._search), WARN, width)
        self._show("#flags-list", strips)

    def _draw_about(self) -> None:
        name = self._under
        if name is None:
            adding = "enter adds it if it is a flag's name" if self._input.purpose == SEARCH else ""
            self._show("#flags-about", [line((f" {adding}", DIM))])
        else:
            proposed = self._proposed(name)
            width = self._box.inner_width
            about = about_lines(name, self._server, self._catalog, proposed, self._traffic_sentence, width)
            self._show("#flags-about", cut_rows(about, self._about_rows, width))

    def _proposed(self, name: str) -> Choice | None:
        """The suggestion from the traffic, if its value is still set."""
        choice = self._suggested.get(name)
        return choice if choice is not None and same_value(choice.value, self._edits.value(name)) else None

    def _say(self, text: str, style: Style | None = None) -> None:
        self._message = (plain(text), style)

    # -- moving ----------------------------------------------------------------------------------------------------

    def _move(self, index: int) -> None:
        if self._input.purpose:
            return  # a value for the selected flag is being typed
        self._index = min(max(0, index), max(0, len(self._names) - 1))
        self._say("")
        self.redraw()

    def action_move(self, step: int) -> None:
        """Move the cursor by this many flags."""
        self._move(self._index + step)

    @on(events.MouseScrollUp)
    @on(events.MouseScrollDown)
    def _wheel(self, event: events.MouseEvent) -> None:
        event.stop()
        self.action_move(wheel_step(event) * WHEEL)

    def on_click(self, event: events.Click) -> None:
        """Move to the clicked flag; a double click edits it."""
        table = self.query_one("#flags-list")
        row = event.screen_y - table.region.y
        inside = table.region.contains(event.screen_x, event.screen_y)
        if inside and self._top + row < len(self._names) and not self._input.purpose:
            self._move(self._top + row)
            if event.chain == 2:
                self.action_flags_edit()

    def action_page(self, step: int) -> None:
        """Move the cursor by this many pages."""
        self._move(self._index + step * self.query_one("#flags-list").size.height)

    def action_edge(self, end: int) -> None:
        """Go to the first flag (-1) or the last (1)."""
        self._move(0 if end < 0 else len(self._names) - 1)

    def action_flags_changed(self) -> None:
        """Toggle between all flags and those that are set or changed."""
        self._only_set = not self._only_set
        self._list_again(self._under)

    def _list_again(self, name: str | None) -> None:
        self._names = self._catalog.matching(self._edits, self._search, self._only_set)
        self._index = self._names.index(name) if name in self._names else 0
        self.redraw()

    # -- changing --------------------------------------------------------------------------------------------------

    def _put(self, name: str, value: FlagValue | None) -> None:
        self._edits.put(name, value)
        self._warned = False
        self._list_again(name)

    def action_flags_toggle(self) -> None:
        """Toggle the flag or select its next choice; without choices, edit the value."""
        if self._under is None:
            return
        value = self._catalog.next_value(self._under, self._edits.value(self._under))
        if value is None:
            self.action_flags_edit()
        else:
            self._say("")
            self._put(self._under, value)

    def action_flags_unset(self) -> None:
        """Unset the flag."""
        if self._under is not None:
            self._say("")
            self._put(self._under, None)

    def action_flags_undo(self) -> None:
        """Undo the change of the flag."""
        if self._under is not None:
            self._say("")
            self._edits.undo(self._under)
            self._list_again(self._under)

    def action_flags_edit(self) -> None:
        """Edit the value; a switch is toggled instead."""
        name = self._under
        if name is None:
            return
        value, flag = self._edits.value(name), self._catalog.facts(name)
        if isinstance(value, bool) or (flag is not None and flag.switch):
            self.action_flags_toggle()
            return
        self._input.open(name, flag_text(value) if value is not None else "", flag.choices if flag else ())
        self._say(f"{name}:")
        self.call_after_refresh(self.redraw)

    def action_flags_search(self) -> None:
        """Open the search."""
        self._input.open(SEARCH, self._search, placeholder="words from a name or description")
        self.call_after_refresh(self.redraw)

    def _close(self) -> None:
        self._input.shut()
        self.call_after_refresh(self.redraw)

    @on(Input.Changed, "#flags-input")
    def _on_typed(self, event: Input.Changed) -> None:
        event.stop()
        name = self._input.purpose
        if name == SEARCH:
            self._search = event.value.strip()
            self._list_again(self._search.lstrip("-"))
        elif name is not None:
            self._say(f"{name}:")
            try:
                if event.value.strip():
                    self._catalog.value(name, event.value)
            except FlagError as error:
                self._say(str(error), WARN)
            self.redraw()

    @on(Entry.Stepped)
    def _on_stepped(self, event: Entry.Stepped) -> None:
        event.stop()
        if self._input.purpose == SEARCH:
            self._move(self._index + event.step)

    @on(Input.Submitted, "#flags-input")
    def _on_entered(self, event: Input.Submitted) -> None:
        event.stop()
        name = self._input.purpose
        try:
            if name:
                value = self._catalog.value(name, event.value)
                self._say("")
                self._put(name, value)
            elif not self._names and event.value.strip():
                self._add(event.value)
        except FlagError as error:
            self._say(str(error), BAD)
            self.redraw()
            return
        self._close()

    def _add(self, text: str) -> None:
        """Add an unlisted flag, with the value typed after ``=`` or a space, if any."""
        name, given, value = text.strip().partition("=" if "=" in text else " ")
        name = self._catalog.named(name)
        chosen = self._catalog.value(name, value) if given else None
        self._edits.added.append(name)
        self._search = ""
        if chosen is not None:
            self._edits.put(name, chosen)
        self._say(self._catalog.unknown(name), WARN)
        self._list_again(name)

    # -- measured traffic ------------------------------------------------------------------------------------------

    def action_flags_traffic(self) -> None:
        """Edit flags as the measured traffic suggests."""
        if self._input.purpose is None and not self._analyzing:
            self._analyzing = True
            self._say("analyzing its traffic…")
            self.redraw()
            begin_worker(self, self._analyze, "traffic", "traffic")

    async def _analyze(self) -> None:
        try:
            self._suggest(await answer_for(self, partial(measured_traffic, self._fleet, self._server), "traffic"))
        except Exception as error:  # noqa: BLE001 - the thread's boundary: shown on the screen
            self._say(failure(error, "can't analyze its traffic"), BAD)
        self._analyzing = False
        self.redraw()

    def _suggest(self, traffic: MeasuredTraffic) -> None:
        """Apply the suggestions from the traffic, and list the flags that are set, with reasons."""
        for choice in traffic.choices:
            self._edits.put(choice.flag, choice.value)
        self._suggested = {choice.flag: choice for choice in traffic.choices}
        self._traffic_sentence = traffic.sentence
        if not traffic.choices:
            self._say(traffic.sentence, WARN)
        else:
            count = len(traffic.choices)
            changes = "this change" if count == 1 else f"these {count} changes"
            self._say(f"{key_of('flags_keep')} stages {changes} suggested by the traffic")
            self._only_set, self._search, self._warned = True, "", False
            self._list_again(traffic.choices[0].flag)

    # -- leaving ---------------------------------------------------------------------------------------------------

    def action_flags_keep(self) -> None:
        """Stage the changes and go back."""
        if self._input.purpose:
            self._say(f"First accept the value with enter, or cancel with {key_of('flags_back')}.", WARN)
            self.redraw()
            return
        self.close_with(self._edits.edits)

    def action_flags_back(self) -> None:
        """Close the input, or else end the search, or else go back; unsaved changes need a second press."""
        if self._input.purpose is not None:
            if self._input.purpose == SEARCH:
                self._search = ""
                self._list_again(self._under)
            self._say("")
            self._close()
        elif self._search:
            self._search = ""
            self._list_again(self._under)
        elif self._edits.edits != self._before and not self._warned:
            self._warned = True
            keep, back = key_of("flags_keep"), key_of("flags_back")
            self._say(f"Changes not staged yet: {keep} stages them, {back} again discards them.", WARN)
            self.redraw()
        else:
            self.close_with()


def flags_heading(width: int) -> Strip:
    """The column headings."""
    default = "VLLM'S DEFAULT"
    if value_width(width) < len(default):
        default = "DEFAULT"
    return line((_columns(("", "FLAG", "NOW", "STAGED", default, "MEANING"), width), DIM))


def value_width(width: int) -> int:
    """Width of each value column at this width."""
    return 15 if width >= WIDE else max(len("DEFAULT"), (width - 32 - 2) // 3 - 1)


def flag_row(
    name: str, server: ServerView, edits: FlagEdits, catalog: FlagCatalog, width: int, under_cursor: bool
) -> Strip:
    """One flag: current value, staged value, vLLM's default, and meaning."""
    flag, changed, value = catalog.facts(name), edits.changed(name), edits.value(name)
    staged = ("unset" if value is None else flag_text(value)) if changed else ""
    meaning = flag.meaning if flag else plain(server.reasons.get(name, ""))
    now = flag_text(server.flags.get(name))
    default = flag.default if flag else "–"
    text = _columns(("*" if changed else "", plain(name), plain(now), plain(staged), default, meaning), width)
    if under_cursor:
        return line((text, CURSOR))
    return line((text, ACCENT if changed else STRONG if name in server.flags else None))


def _columns(texts: tuple[str, str, str, str, str, str], width: int) -> str:
    mark, name, now, staged, default, meaning = texts
    wide = width >= WIDE
    each = value_width(width)
    first = 34 if wide else min(30, max(8, width - 2 - 3 * (each + 1)))
    text = f" {mark or ' '}{fit(name, first)} {fit(now, each)} {fit(staged, each)} {fit(default, each)}"
    return fit(f"{text} {meaning}" if wide else text, width)


def about_lines(
    name: str, server: ServerView, catalog: FlagCatalog, proposed: Choice | None, traffic: str, width: int
) -> list[Strip]:
    """A flag's meaning, accepted values, the reason for its value or suggestion (from ``traffic``), and vLLM's help."""
    flag, reason = catalog.facts(name), server.reasons.get(name)
    parts: list[Part] = []
    if proposed is not None:
        parts.append((f"{proposed.source}: {proposed.reason}", ACCENT))
        parts += [(f"trade-off: {proposed.tradeoff}", WARN)] if proposed.tradeoff else []
        parts.append((f"traffic: {traffic}", DIM))
    if flag is None:
        parts.append((catalog.unknown(name) if name not in server.flags else "", WARN))
    else:
        parts.append(f"{name}: {flag.meaning}." if flag.meaning else name)
        if flag.deprecated:
            parts.append((f"deprecated: {flag.deprecated}", WARN))
        parts.append((f"takes {flag.takes}; vLLM's default: {flag.default}", DIM))
    if reason:
        present = f"why {flag_text(server.flags.get(name))} now" if proposed is not None else "why"
        parts.append((f"{present}: {reason}", DIM))
    if flag is not None and flag.help and flag.help.rstrip(".") != flag.meaning:
        parts.append((f"vLLM's help: {flag.help}", DIM))
    strips: list[Strip] = []
    for part in parts:
        text, style = (part, None) if isinstance(part, str) else part
        strips += paragraph(text, width - 1, style)
    return strips
