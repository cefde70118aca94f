"""The launch screen: a preset, what it sets and why, changes to it, and the plan that it all comes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.style import Style
from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Container, Vertical
from textual.strip import Strip

from vllm_console.fleet.api import Fleet, FleetError, PresetProblem
from vllm_console.fleet.model import Preset
from vllm_console.text import plain
from vllm_console.ui.actions import bindings
from vllm_console.ui.launch_draft import LaunchDraft
from vllm_console.ui.screens.footing import footer, note_lines
from vllm_console.ui.screens.launch_editing import ADDING, LaunchEditing
from vllm_console.ui.screens.launch_lines import adding_lines, preset_lines, setting_lines
from vllm_console.ui.screens.launch_plan_lines import outcome_parts, plan_lines, strip_lines
from vllm_console.ui.screens.launch_planning import LEAVE
from vllm_console.ui.theme import BAD, DIM, WARN
from vllm_console.ui.threads import answer_for
from vllm_console.ui.widgets.draw import rule
from vllm_console.ui.widgets.entry import Entry
from vllm_console.ui.widgets.lines import LineView

TWO_COLUMNS, THREE_COLUMNS = 110, 170
"""Widths from which sections stand beside each other; below the first, one at a time."""

SECTIONS = ("presets", "settings", "plan")


class LaunchScreen(LaunchEditing):
    """Puts a launch together and does it; dismisses with the server, or None when nothing was launched."""

    CSS_PATH = "launch.tcss"
    AUTO_FOCUS = ""
    SCOPE = "launch"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("launch")]

    def __init__(self, fleet: Fleet, preset: str | None = None) -> None:
        super().__init__(fleet)
        self._wanted = preset
        self._presets: Sequence[Preset] = ()
        self._problems: Sequence[PresetProblem] = ()
        self._section = "presets"
        self._cursor = 0
        self._under = ""
        """The field or flag under the cursor: it stays there when a plan brings or takes other lines."""

    def compose(self) -> ComposeResult:
        """Title, the three sections, the budget in short where the plan is not shown, input, keys."""
        yield LineView(id="launch-title", classes="bar")
        with Container(id="launch-body"):
            yield LineView(id="launch-presets")
            with Vertical(id="launch-right"):
                yield LineView(id="launch-settings")
                yield LineView(id="launch-plan")
        yield LineView(id="launch-strip")
        with Vertical(id="launch-foot"):
            yield LineView(id="launch-note")
            yield Entry(id="launch-input")
        yield LineView(id="launch-keys", classes="bar")

    def on_mount(self) -> None:
        """Ask for presets and engines."""
        self._arrange()
        self.run_worker(self._load(), name="presets", exclusive=True, group="load")

    async def _load(self) -> None:
        try:
            self._presets, self._problems = await answer_for(self, self._fleet.presets, "presets")
            if self._presets:
                chosen = next((preset for preset in self._presets if preset.name == self._wanted), self._presets[0])
                self._draft = LaunchDraft(chosen)
                self.plan_soon()
                self._draft.found(await answer_for(self, self._fleet.engines, "engines"))
                if self._draft.engine is not None:
                    self.plan_soon()
            else:
                self._say("No preset can be used: see what is wrong with each file.", BAD)
        except FleetError as error:
            self._say(str(error), BAD)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: said on the screen
            self._say(f"presets and engines could not be read: {error}", BAD)
        self.redraw()

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
        self.query_one("#launch-strip").display = alone and self._section != "plan"
        self.call_after_refresh(self.redraw)

    def redraw(self) -> None:
        """Draw everything that is shown."""
        if not self.is_mounted:
            return
        width = self.app.size.width
        self._show("launch-title", [rule("Launch a server", width, outcome_parts(self._outcome))])
        self._show("launch-keys", [footer("launch", width)])
        draft = self._draft
        text, style = self._said
        if draft is None:
            self._show_note(text or "reading presets …", style or DIM)
            return
        self._move_to(self._under)
        self._cursor = min(self._cursor, len(draft.names) - 1)
        self._under = draft.names[self._cursor]
        for section in SECTIONS:
            self._draw_section(section, draft)
        self._show("launch-strip", strip_lines(self._outcome, width, self._selected, fresh=self._fresh))
        if not text and width < TWO_COLUMNS:
            text, style = "tab: presets → settings → what will run", DIM
        self._show_note(text, style)

    def _show_note(self, text: str, style: Style | None) -> None:
        """Say it, over two lines where it takes them: then there is a row less for the sections."""
        view = self.query_one("#launch-note", LineView)
        before = len(view.lines)
        view.show(note_lines(plain(text), style, self.app.size.width))
        if len(view.lines) != before:
            self.call_after_refresh(self.redraw)

    def _show(self, id: str, strips: Sequence[Strip]) -> None:
        self.query_one(f"#{id}", LineView).show(strips)

    def _draw_section(self, section: str, draft: LaunchDraft) -> None:
        view = self.query_one(f"#launch-{section}", LineView)
        size = width, _ = view.size
        if not width or not view.display:
            return
        active = section == self._section
        if section == "presets":
            view.show(preset_lines(self._presets, self._problems, draft, size, active))
        elif section == "plan":
            busy = "launching …" if self._launching else ""
            view.show(plan_lines(self._outcome, size, active, self._selected, busy=busy, fresh=self._fresh))
        elif self._input.purpose == ADDING:
            view.show(adding_lines(self._book, self._found, self._pick, self._input.value, size))
        else:
            view.show(setting_lines(draft, self._outcome.plan, self._book, size, self._cursor, active))

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

    def go_to(self, name: str) -> None:
        """Put the cursor on a field or flag of the settings."""
        if self._section != "settings":
            self._section = "settings"
            self._arrange()
        self._move_to(name)

    def fixed(self, name: str) -> None:
        """The cursor stands on what was mended, wherever one looks."""
        self._move_to(name)

    def _move_to(self, name: str) -> None:
        names = self._draft.names if self._draft is not None else []
        if name in names:
            self._cursor, self._under = names.index(name), name

    def _move(self, step: int) -> None:
        draft = self._draft
        if draft is None or self.typing:
            return
        self._say("")
        self._armed = ""
        if self._section == "presets":
            at = [preset.name for preset in self._presets].index(draft.preset.name)
            after = self._presets[min(max(0, at + step), len(self._presets) - 1)]
            if after is not draft.preset:
                draft.look_at(after)
                self._outcome, self._selected = type(self._outcome)(), 0
                self.plan_soon()
        elif self._section == "settings":
            self._move_to(draft.names[min(max(0, self._cursor + step), len(draft.names) - 1)])
        else:
            self._selected = min(max(0, self._selected + step), max(0, len(self._outcome.findings) - 1))
        self.redraw()

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

    @property
    def _at(self) -> str | None:
        """The field or flag under the cursor."""
        if self._draft is None or self._section != "settings":
            return None
        names = self._draft.names
        return names[min(self._cursor, len(names) - 1)]

    def action_launch_open(self) -> None:
        """On a preset go to its settings; edit a field or flag; on the plan launch it."""
        if self._section == "presets":
            self._to_section(1)
        elif self._section == "plan":
            self.action_launch_start()
        else:
            self.edit()

    def action_launch_back(self) -> None:
        """Close the input; go back, the second time also when changes get lost."""
        if self.typing:
            self.leave_entry()
        elif self._launching:
            self._say("It is being launched; this closes by itself.", WARN)
            self.redraw()
        elif self._draft is not None and self._draft.any_touched and self._armed != LEAVE:
            self._armed = LEAVE
            self._say("Nothing is launched yet: ctrl+s launches, esc again drops your changes.", WARN)
            self.redraw()
        else:
            self.dismiss(None)
