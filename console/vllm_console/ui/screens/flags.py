"""All flags of a server: what they mean, what they are, what they are to become with the next restart."""

from __future__ import annotations

import textwrap
from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.screen import Screen
from textual.strip import Strip
from textual.suggester import SuggestFromList
from textual.widgets import Input

from vllm_console.fleet.model import Changes, FlagValue, ServerView
from vllm_console.text import plain
from vllm_console.ui.actions import bindings
from vllm_console.ui.flag_edits import FlagEdits, matching_names, next_value
from vllm_console.ui.screens.footing import footer
from vllm_console.ui.theme import ACCENT, BAD, CURSOR, DIM, STRONG, WARN
from vllm_console.ui.widgets.draw import Part, fit, rule
from vllm_console.ui.widgets.lines import LineView, line
from vllm_launchers.plan.common_flags import common_flag, flag_name, flag_text, name_warning, parse_flag_value
from vllm_launchers.plan.errors import FlagError

WIDE = 110
"""From this width on meanings stand in the table."""

ABOUT_ROWS = 3


class FlagsScreen(Screen[Changes | None]):
    """Edits the flags of ``server``, beginning with what is ``staged``; dismisses with what is to be staged instead.

    None means that all stays as it was.
    """

    CSS_PATH = "flags.tcss"
    AUTO_FOCUS = ""
    SCOPE = "flags"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("flags")]

    def __init__(self, server: ServerView, staged: Changes) -> None:
        super().__init__()
        self._server = server
        self._edits = FlagEdits.of(server.flags, staged)
        self._before = self._edits.changes
        self._search = ""
        self._only_set = False
        self._names = matching_names(self._edits, "", False)
        self._index = self._top = 0
        self._editing: str | None = None
        """What the input is for: a flag's name, or "" for the search; None while it is closed."""
        self._said: Part = ""
        self._warned = False

    def compose(self) -> ComposeResult:
        """Title, table, what the flag under the cursor means, input, keys."""
        yield LineView(id="flags-title", classes="bar")
        yield LineView(id="flags-head", classes="bar")
        yield LineView(id="flags-list")
        yield LineView(id="flags-about")
        yield LineView(id="flags-note", classes="bar")
        yield Input(id="flags-input", compact=True)
        yield LineView(id="flags-keys", classes="bar")

    def on_mount(self) -> None:
        """The input stays away until it is needed."""
        self._input.display = False
        self._draw()

    def on_resize(self, _event: events.Resize) -> None:
        """Draw for the new size."""
        self.call_after_refresh(self._draw)

    @property
    def _input(self) -> Input:
        return self.query_one("#flags-input", Input)

    @property
    def _under(self) -> str | None:
        return self._names[self._index] if self._names else None

    # -- drawing ---------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        width = self.app.size.width
        title = f"Flags · {plain(self._server.name)}{' · simulated' if self._server.simulated else ''}"
        count = len(self._edits.edits)
        right: list[Part] = [(f"{count} staged" if count else "nothing staged", ACCENT if count else DIM)]
        if self._only_set:
            right.insert(0, ("only set · ", DIM))
        if self._search:
            right.insert(0, (f"/{plain(self._search)} · ", DIM))
        self._show("#flags-title", [rule(title, width, right)])
        self._show(
            "#flags-head", [line((self._columns(" ", "FLAG", "NOW", "STAGED", "VLLM'S DEFAULT", "MEANING"), DIM))]
        )
        self._draw_list()
        self._draw_about()
        self._show("#flags-note", [line(" ", self._said) if self._said else line()])
        self._show("#flags-keys", [footer("flags", width)])

    def _show(self, selector: str, strips: list[Strip]) -> None:
        self.query_one(selector, LineView).show(strips)

    def _columns(self, mark: str, name: str, now: str, staged: str, default: str, meaning: str) -> str:
        width = self.app.size.width
        wide = width >= WIDE
        first, each = (32, 15) if wide else (30, (width - 32 - 2) // 3 - 1)
        text = f" {mark}{fit(name, first)} {fit(now, each)} {fit(staged, each)} {fit(default, each)}"
        return fit(f"{text} {meaning}" if wide else text, width)

    def _draw_list(self) -> None:
        rows = max(1, self.query_one("#flags-list").size.height)
        self._index = min(max(0, self._index), max(0, len(self._names) - 1))
        self._top = min(max(self._top, self._index - rows + 1), self._index)
        strips = [self._row(name, index == self._index) for index, name in enumerate(self._names)]
        if not strips:
            strips = [line((f" no flag matches '{plain(self._search)}'", DIM))]
        self._show("#flags-list", strips[self._top : self._top + rows])

    def _row(self, name: str, under_cursor: bool) -> Strip:
        flag, changed = common_flag(name), self._edits.changed(name)
        staged = (
            ("left out" if self._edits.value(name) is None else flag_text(self._edits.value(name))) if changed else ""
        )
        now = flag_text(self._server.flags.get(name))
        text = self._columns(
            "*" if changed else " ", plain(name), plain(now), plain(staged), flag.default if flag else "–",
            flag.meaning if flag else plain(self._server.reasons.get(name, "")),
        )  # fmt: skip
        if under_cursor:
            return line((text, CURSOR))
        return line((text, ACCENT if changed else STRONG if name in self._server.flags else None))

    def _draw_about(self) -> None:
        name, width = self._under, self.app.size.width
        if name is None:
            adding = "enter adds it, if it is a flag's name" if self._editing == "" else ""
            self._show("#flags-about", [line((f" {adding}", DIM))])
            return
        flag = common_flag(name)
        texts: list[Part] = [f"{name}: {flag.meaning}." if flag else (name_warning(name, self._server.flags), WARN)]
        if flag and flag.choices:
            texts.append((f"takes {', '.join(flag.choices)}{', …' if flag.open_choices else ''}", DIM))
        elif flag:
            texts.append((f"takes: {flag.kind.value}", DIM))
        if reason := self._server.reasons.get(name):
            texts.append((f"set because {plain(reason)}", DIM))
        strips = []
        for part in texts:
            text, style = (part, None) if isinstance(part, str) else part
            strips += [line((f" {row}", style)) for row in textwrap.wrap(plain(text), width - 2)]
        self._show("#flags-about", strips[:ABOUT_ROWS])

    def _say(self, text: str, style: object = None) -> None:
        self._said = (plain(text), BAD if style is BAD else WARN if style is WARN else None) if text else ""

    # -- moving ----------------------------------------------------------------------------------------------------

    def _move(self, index: int) -> None:
        self._index = min(max(0, index), max(0, len(self._names) - 1))
        self._say("")
        self._draw()

    def action_flags_down(self) -> None:
        """Next flag."""
        self._move(self._index + 1)

    def action_flags_up(self) -> None:
        """Previous flag."""
        self._move(self._index - 1)

    def action_flags_page_down(self) -> None:
        """A page down."""
        self._move(self._index + self.query_one("#flags-list").size.height)

    def action_flags_page_up(self) -> None:
        """A page up."""
        self._move(self._index - self.query_one("#flags-list").size.height)

    def action_flags_first(self) -> None:
        """First flag."""
        self._move(0)

    def action_flags_last(self) -> None:
        """Last flag."""
        self._move(len(self._names) - 1)

    def action_flags_changed(self) -> None:
        """Only flags that are set or changed, or all."""
        self._only_set = not self._only_set
        self._list_again(self._under)

    def _list_again(self, name: str | None) -> None:
        self._names = matching_names(self._edits, self._search, self._only_set)
        self._index = self._names.index(name) if name in self._names else 0
        self._draw()

    # -- changing --------------------------------------------------------------------------------------------------

    def _put(self, name: str, value: FlagValue | None) -> None:
        self._edits.put(name, value)
        self._warned = False
        self._list_again(name)

    def action_flags_toggle(self) -> None:
        """On or off, or the next choice; a value without choices is edited."""
        if self._under is None:
            return
        value = next_value(self._under, self._edits.value(self._under))
        if value is None:
            self.action_flags_edit()
        else:
            self._say("")
            self._put(self._under, value)

    def action_flags_unset(self) -> None:
        """Leave the flag out."""
        if self._under is not None:
            self._say("")
            self._put(self._under, None)

    def action_flags_undo(self) -> None:
        """Take back the change."""
        if self._under is not None:
            self._say("")
            self._edits.undo(self._under)
            self._list_again(self._under)

    def action_flags_edit(self) -> None:
        """Edit the value; a flag that is on or off is switched instead."""
        name = self._under
        if name is None:
            return
        value, flag = self._edits.value(name), common_flag(name)
        if isinstance(value, bool) or (flag is not None and flag.kind.name == "BOOL"):
            self.action_flags_toggle()
            return
        self._open(name, flag_text(value) if value is not None else "", flag.choices if flag else (), f"{name} = ")

    def action_flags_search(self) -> None:
        """Type words to search for."""
        self._open("", self._search, (), "words of a name or meaning; enter keeps the list, esc shows all")

    def _open(self, purpose: str, text: str, choices: tuple[str, ...], hint: str) -> None:
        self._editing = purpose
        field = self._input
        field.suggester = SuggestFromList(choices, case_sensitive=False) if choices else None
        field.placeholder = f"value of {purpose}" if purpose else hint
        field.value, field.display = text, True
        field.cursor_position = len(text)
        if purpose:
            self._say(f"{purpose}: enter takes it{', → completes' if choices else ''}, esc leaves it as it was")
        field.focus()
        self.call_after_refresh(self._draw)

    def _close(self) -> None:
        self._editing = None
        self._input.display = False
        self.set_focus(None)
        self.call_after_refresh(self._draw)

    @on(Input.Changed, "#flags-input")
    def _on_typed(self, event: Input.Changed) -> None:
        event.stop()
        if self._editing == "":
            self._search = event.value.strip()
            self._list_again(self._search.lstrip("-"))

    @on(Input.Submitted, "#flags-input")
    def _on_entered(self, event: Input.Submitted) -> None:
        event.stop()
        try:
            if self._editing:
                value = parse_flag_value(self._editing, event.value)
                self._say("")
                self._put(self._editing, value)
            elif not self._names and event.value.strip():
                self._add(event.value)
        except FlagError as error:
            self._say(str(error), BAD)
            self._draw()
            return
        self._close()

    def _add(self, text: str) -> None:
        """Add a flag that the list does not know, with a value when one was typed after ``=``."""
        name, equals, value = text.partition("=") if "=" in text else (*text.strip().partition(" ")[:2], "")
        name = flag_name(name)
        self._edits.added.append(name)
        self._search = ""
        if equals.strip():
            self._edits.put(name, parse_flag_value(name, value))
        self._say(name_warning(name), WARN)
        self._list_again(name)

    # -- leaving ---------------------------------------------------------------------------------------------------

    def action_flags_keep(self) -> None:
        """Stage the changes and go back."""
        if self._editing:
            self._say("First take the value with enter, or leave it with esc.", WARN)
            self._draw()
            return
        self.dismiss(self._edits.changes)

    def action_flags_back(self) -> None:
        """Close the input; show all flags again; go back, the second time also when changes get lost."""
        if self._editing is not None:
            if self._editing == "":
                self._search = ""
                self._list_again(self._under)
            self._say("")
            self._close()
        elif self._search:
            self._search = ""
            self._list_again(self._under)
        elif self._edits.changes != self._before and not self._warned:
            self._warned = True
            self._say("Your changes are not staged yet: ctrl+s stages them, esc again drops them.", WARN)
            self._draw()
        else:
            self.dismiss(None)
