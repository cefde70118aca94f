"""The launch screen: a preset, what it sets and why, changes to it, and the command line it all comes to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from rich.style import Style
from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Container, Vertical
from textual.screen import Screen
from textual.strip import Strip
from textual.suggester import SuggestFromList
from textual.timer import Timer
from textual.widgets import Input

from vllm_console.fleet.api import Fleet, FleetError, PresetProblem, UsageError
from vllm_console.fleet.model import Preset, ServerView
from vllm_console.text import plain
from vllm_console.ui.actions import bindings
from vllm_console.ui.flag_edits import next_value
from vllm_console.ui.launch_draft import CYCLED, FIELDS, LaunchDraft
from vllm_console.ui.screens.footing import footer
from vllm_console.ui.screens.launch_lines import (
    Outcome,
    outcome_parts,
    plan_lines,
    preset_lines,
    setting_lines,
    setting_names,
)
from vllm_console.ui.theme import BAD, DIM, WARN
from vllm_console.ui.threads import in_thread
from vllm_console.ui.widgets.draw import rule
from vllm_console.ui.widgets.lines import LineView, line
from vllm_launchers.plan.common_flags import COMMON_FLAGS, common_flag, flag_name, flag_text, parse_flag_value
from vllm_launchers.plan.errors import FlagError

TWO_COLUMNS, THREE_COLUMNS = 110, 170
"""Widths from which sections stand beside each other; below the first, one at a time."""

SECTIONS = ("presets", "settings", "plan")
DEBOUNCE_SECONDS = 0.12
"""How long a choice must stand before it is planned."""

ADDING = "+"  # what the input is for while a flag's name is typed


class LaunchScreen(Screen[ServerView | None]):
    """Puts a launch together and does it; dismisses with the server, or None when nothing was launched."""

    CSS_PATH = "launch.tcss"
    AUTO_FOCUS = ""
    SCOPE = "launch"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("launch")]

    def __init__(self, fleet: Fleet, preset: str | None = None) -> None:
        super().__init__()
        self._fleet, self._wanted = fleet, preset
        self._presets: Sequence[Preset] = ()
        self._problems: Sequence[PresetProblem] = ()
        self._draft: LaunchDraft | None = None
        self._outcome = Outcome()
        self._section = "presets"
        self._cursor = 0
        self._editing: str | None = None
        self._said: tuple[str, Style | None] = ("", None)
        self._launching = self._warned = False
        self._timer: Timer | None = None

    def compose(self) -> ComposeResult:
        """Title, the three sections, input, keys."""
        yield LineView(id="launch-title", classes="bar")
        with Container(id="launch-body"):
            yield LineView(id="launch-presets")
            with Vertical(id="launch-right"):
                yield LineView(id="launch-settings")
                yield LineView(id="launch-plan")
        with Vertical(id="launch-foot"):
            yield LineView(id="launch-note", classes="bar")
            yield Input(id="launch-input", compact=True)
        yield LineView(id="launch-keys", classes="bar")

    def on_mount(self) -> None:
        """Ask for presets and engines."""
        self._input.display = False
        self._arrange()
        self.run_worker(self._load(), name="presets", exclusive=True, group="load")

    async def _load(self) -> None:
        try:
            self._presets, self._problems = await in_thread(self._fleet.presets, "presets")
            if self._presets:
                chosen = next((preset for preset in self._presets if preset.name == self._wanted), self._presets[0])
                self._draft = LaunchDraft(chosen)
                self._plan_soon()
                self._draft.found(await in_thread(self._fleet.engines, "engines"))
            else:
                self._say("No preset can be used: see what is wrong with each file.", BAD)
        except FleetError as error:
            self._say(str(error), BAD)
        self._draw()

    # -- drawing ---------------------------------------------------------------------------------------------------

    def on_resize(self, _event: events.Resize) -> None:
        """Lay out for the new size."""
        if self.is_mounted:
            self._arrange()

    def _arrange(self) -> None:
        """Sections beside each other where there is room, else the one that has the keys."""
        width = self.app.size.width
        alone, three = width < TWO_COLUMNS, width >= THREE_COLUMNS
        self.set_class(not alone and not three, "-two")
        self.set_class(three, "-three")
        for section in SECTIONS:
            self.query_one(f"#launch-{section}").display = not alone or section == self._section
        self.query_one("#launch-right").display = not alone or self._section != "presets"
        self.call_after_refresh(self._draw)

    def _draw(self) -> None:
        width = self.app.size.width
        self._show("launch-title", [rule("Launch a server", width, outcome_parts(self._outcome))])
        self._show("launch-keys", [footer("launch", width)])
        draft = self._draft
        text, style = self._said
        if draft is None:
            self._show("launch-note", [line((f" {text or 'reading presets …'}", style or DIM))])
            return
        self._cursor = min(self._cursor, len(setting_names(draft)) - 1)
        for section in SECTIONS:
            self._draw_section(section, draft)
        if not text and width < TWO_COLUMNS:
            error, hint = self._outcome.error, "tab: presets → settings → what will run"
            text, style = (error, BAD) if error else (hint, DIM)
        self._show("launch-note", [line((f" {plain(text)}", style))])

    @property
    def _input(self) -> Input:
        return self.query_one("#launch-input", Input)

    def _show(self, id: str, strips: Sequence[Strip]) -> None:
        self.query_one(f"#{id}", LineView).show(strips)

    def _draw_section(self, section: str, draft: LaunchDraft) -> None:
        view = self.query_one(f"#launch-{section}", LineView)
        width, height = view.size
        if not width or not view.display:
            return
        active = section == self._section
        if section == "presets":
            view.show(preset_lines(self._presets, self._problems, draft, (width, height), active))
        elif section == "settings":
            view.show(setting_lines(draft, self._outcome.plan, width, height, self._cursor, active))
        else:
            view.show(plan_lines(self._outcome, width, active, "launching …" if self._launching else ""))

    def _say(self, text: str, style: Style | None = None) -> None:
        self._said = (plain(text), style)

    # -- planning --------------------------------------------------------------------------------------------------

    def _plan_soon(self) -> None:
        """Plan what stands now, once it has stood for a moment."""
        self._outcome = Outcome()
        self._warned = False
        if self._timer is not None:
            self._timer.stop()
        self._timer = self.set_timer(DEBOUNCE_SECONDS, self._start_planning)
        self._draw()

    def _start_planning(self) -> None:
        self.run_worker(self._plan(), name="plan", exclusive=True, group="plan")

    async def _plan(self) -> None:
        if self._draft is None:
            return
        try:
            plan = await in_thread(partial(self._fleet.plan, self._draft.request()), "plan")
            self._outcome = Outcome(self._draft.planned(plan))
        except FleetError as error:
            self._outcome = Outcome(error=self._draft.refused(error))
        except Exception as error:  # noqa: BLE001 - the thread's boundary: said on the screen
            self._outcome = Outcome(error=f"this could not be planned: {error}")
        self._draw()

    def action_launch_start(self) -> None:
        """Launch what is shown."""
        if self._draft is None or self._launching:
            return
        if self._editing is not None:
            self._say("First take the value with enter, or leave it with esc.", WARN)
        elif self._outcome.error:
            self._say(f"Not launched: {self._outcome.error}", BAD)
        else:
            self._launching = True
            self._say("launching …")
            self.run_worker(self._start(self._draft), name="start", group="start")
        self._draw()

    async def _start(self, draft: LaunchDraft) -> None:
        try:
            server = await in_thread(partial(self._fleet.start, draft.request()), "start")
        except FleetError as error:
            self._say(f"Not launched: {str(error).partition(chr(10))[0]}", BAD)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: said on the screen
            self._say(f"Not launched, that went wrong: {error}", BAD)
        else:
            self.dismiss(server)
            return
        self._launching = False
        self._draw()

    # -- moving ----------------------------------------------------------------------------------------------------

    def _to_section(self, step: int) -> None:
        self._section = SECTIONS[(SECTIONS.index(self._section) + step) % len(SECTIONS)]
        self._say("")
        self._arrange()

    def action_launch_next(self) -> None:
        """Next section."""
        self._to_section(1)

    def action_launch_previous(self) -> None:
        """Previous section."""
        self._to_section(-1)

    def _move(self, step: int) -> None:
        draft = self._draft
        if draft is None:
            return
        self._say("")
        if self._section == "presets":
            at = [preset.name for preset in self._presets].index(draft.preset.name)
            after = self._presets[min(max(0, at + step), len(self._presets) - 1)]
            if after is not draft.preset:
                draft.preset = after
                self._plan_soon()
        elif self._section == "settings":
            self._cursor = min(max(0, self._cursor + step), len(setting_names(draft)) - 1)
        self._draw()

    def action_launch_down(self) -> None:
        """Next line."""
        self._move(1)

    def action_launch_up(self) -> None:
        """Previous line."""
        self._move(-1)

    def action_launch_page_down(self) -> None:
        """Several lines down."""
        self._move(10)

    def action_launch_page_up(self) -> None:
        """Several lines up."""
        self._move(-10)

    # -- editing ---------------------------------------------------------------------------------------------------

    @property
    def _at(self) -> str | None:
        """The field or flag under the cursor."""
        if self._draft is None or self._section != "settings":
            return None
        return setting_names(self._draft)[self._cursor]

    def action_launch_open(self) -> None:
        """On a preset go to its settings; edit a field or flag; on the plan launch it."""
        name, draft = self._at, self._draft
        if self._section == "presets":
            self._to_section(1)
        elif self._section == "plan":
            self.action_launch_start()
        elif name is not None and draft is not None:
            flag = common_flag(name)
            value = draft.edits.value(name) if name not in FIELDS else None
            if name in CYCLED or isinstance(value, bool) or (flag and flag.kind.name == "BOOL"):
                self.action_launch_toggle()
            elif name in FIELDS:
                self._open(name, draft.text(name) or (draft.preset.model if name == "model" else ""), ())
            else:
                self._open(name, flag_text(value) if value is not None else "", flag.choices if flag else ())

    def action_launch_toggle(self) -> None:
        """The next engine or set of GPUs; a flag on or off, or its next choice."""
        name, draft = self._at, self._draft
        if name is None or draft is None:
            return
        if name in CYCLED:
            draft.next_choice(name)
        elif name in FIELDS or (value := next_value(name, draft.edits.value(name))) is None:
            if name in FIELDS or not isinstance(draft.edits.value(name), bool):
                self.action_launch_open()
            return
        else:
            draft.edits.put(name, value)
        self._plan_soon()

    def action_launch_add(self) -> None:
        """Type the name of a flag to add."""
        if self._draft is not None:
            self._section = "settings"
            self._arrange()
            self._open(ADDING, "", tuple(flag.name for flag in COMMON_FLAGS))

    def action_launch_remove(self) -> None:
        """Leave the flag out, or leave the field to the program."""
        name, draft = self._at, self._draft
        if name is None or draft is None:
            return
        if name in draft.edits.base:
            draft.edits.put(name, None)
            self._plan_soon()
        else:
            self.action_launch_undo()

    def action_launch_undo(self) -> None:
        """As the preset has it."""
        if self._at is None or self._draft is None:
            return
        if self._at in FIELDS:
            self._draft.put(self._at, "")
        else:
            self._draft.edits.undo(self._at)
        self._plan_soon()

    def _open(self, purpose: str, text: str, choices: tuple[str, ...]) -> None:
        self._editing = purpose
        field = self._input
        what = "Name of a flag, or NAME=VALUE" if purpose == ADDING else purpose
        self._say(f"{what}: enter takes it{', → completes' if choices else ''}, esc leaves it as it was")
        field.suggester = SuggestFromList(choices, case_sensitive=False) if choices else None
        field.value, field.display = text, True
        field.cursor_position = len(text)
        field.focus()
        self.call_after_refresh(self._draw)

    def _close(self) -> None:
        self._editing = None
        self._input.display = False
        self.set_focus(None)
        self.call_after_refresh(self._draw)

    @on(Input.Submitted, "#launch-input")
    def _on_entered(self, event: Input.Submitted) -> None:
        event.stop()
        draft, purpose = self._draft, self._editing
        if draft is None or purpose is None:
            return
        self._say("")
        try:
            if purpose == ADDING:
                self._add(draft, event.value)
            elif purpose in FIELDS:
                draft.put(purpose, event.value)
            else:
                draft.edits.put(purpose, parse_flag_value(purpose, event.value))
        except (FlagError, UsageError) as error:
            self._say(str(error), BAD)
            self._draw()
            return
        self._close()
        self._plan_soon()

    def _add(self, draft: LaunchDraft, text: str) -> None:
        name, equals, value = text.partition("=")
        name = flag_name(name)
        flag = common_flag(name)
        if equals:
            draft.edits.put(name, parse_flag_value(name, value))
        elif draft.edits.value(name) is None:
            switch = next_value(name, None) if flag and flag.kind.name == "BOOL" else None
            draft.edits.added.append(name)
            if switch is not None:
                draft.edits.put(name, switch)
        self._cursor = setting_names(draft).index(name)
        if draft.edits.value(name) is None:
            self.call_after_refresh(self.action_launch_open)

    def action_launch_back(self) -> None:
        """Close the input; go back, the second time also when changes get lost."""
        if self._editing is not None:
            self._say("")
            self._close()
        elif self._launching:
            self._say("It is being launched; this closes by itself.", WARN)
            self._draw()
        elif self._draft is not None and self._draft.any_touched and not self._warned:
            self._warned = True
            self._say("Nothing is launched yet: ctrl+s launches, esc again drops your changes.", WARN)
            self._draw()
        else:
            self.dismiss(None)
