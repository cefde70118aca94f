"""The launch screen: presets, settings with reasons, and the resulting plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import replace
from rich.style import Style
from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Container, Vertical
from textual.strip import Strip
from textual.widgets import Input

from vllm_console.fleet.snapshot import ServerView
from vllm_console.fleet.types import PresetProblem
from vllm_console.text import plain
from vllm_console.ui.actions import bindings
from vllm_console.ui.keymap import key_of
from vllm_console.ui.panes.bars import footer, note_lines
from vllm_console.ui.panes.launch_models import model_lines
from vllm_console.ui.panes.launch_plan import (
    NO_VLLM,
    command_text,
    format_fix,
    launch_plan_lines,
    layout_lines,
    outcome_parts,
    strip_lines,
)
from vllm_console.ui.panes.launch_settings import adding_lines, preset_lines, setting_lines
from vllm_console.ui.parts.launch_draft import LaunchDraft
from vllm_console.ui.parts.launch_editor import LaunchEditor
from vllm_console.ui.parts.launch_planner import LaunchPlanner, PlanOutcome
from vllm_console.ui.parts.model_download import ModelDownloads
from vllm_console.ui.parts.model_picker import ModelPicker
from vllm_console.ui.screens.dialogs import PAGE
from vllm_console.ui.terminal.clipboard import copy
from vllm_console.ui.terminal.lines import LineView, wheel_step
from vllm_console.ui.terminal.screens import TerminalScreen
from vllm_console.ui.theme import BAD, DIM, WARN
from vllm_console.ui.threads import answer_for, begin_worker, failure
from vllm_console.ui.widgets.draw import KeyHint, keys_line, rule, title_bar
from vllm_console.ui.widgets.entry import Entry
from vllm_console.ui.widgets.framed import FramedView, frames_fit
from vllm_launchers.errors import OperationError
from vllm_launchers.launch.request import LaunchRequest
from vllm_launchers.plan.alternatives import Alternative
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.presets.model import Preset
from vllm_launchers.vllm.flags.changes import Changes

if TYPE_CHECKING:
    from vllm_console.fleet.local import LocalFleet

LAUNCH, LEAVE = "launch", "leave"
"""What a second press of the key does after a warning."""

TWO_COLUMNS, THREE_COLUMNS = 110, 170
"""Minimum widths for two and three sections side by side; below, one at a time is shown."""

LEAST_WITH_STRIP = 12
"""Minimum screen height for the plan summary below the active section."""

STRIP_ROWS = 3
"""Height of the plan summary; a longer error gets more."""

NOTE_ROWS = 5

LEAST_SECTION = 6
"""Minimum height that errors and messages leave to the active section."""

UNBOUNDED = 1000
"""A height for measuring how many rows a section needs."""

SECTIONS = ("presets", "settings", "plan")

FIRST_PRESET = "chatbot"
"""The preset offered if nothing has run yet."""

MANY = 10_000
"""More lines than any list has."""


class _Section(FramedView):
    """One of the three sections. A resize redraws all of them after layout."""

    def on_resize(self) -> None:
        """Draw for the new size."""
        if isinstance(self.screen, LaunchScreen):
            self.screen.redraw()


class LaunchScreen(TerminalScreen[ServerView | None]):
    """Composes a launch and starts it; dismisses with the server, or None if nothing was launched.

    Opens with ``preset`` or else the last used one. If that does not fit, it selects the first one that fits.
    """

    CSS_PATH = "launch.tcss"
    AUTO_FOCUS = ""
    SCOPE = "launch"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("launch")]

    def __init__(
        self, fleet: LocalFleet, preset: str | None = None, *, choose_model: bool = False, partners: Sequence[str] = ()
    ) -> None:
        """``partners`` are servers that the new one could be the standby of."""
        super().__init__()
        self._fleet = fleet
        self._wanted = preset
        self._partners = partners
        self._presets: Sequence[Preset] = ()
        self._problems: Sequence[PresetProblem] = ()
        self._section = "presets"
        self._cursor = 0
        self._under = ""
        """The selected field or flag; it stays selected when a plan adds or removes lines."""
        self._selected = 0
        self._layout_index: int | None = None
        """Index of the selected layout while layouts are shown instead of the plan."""
        self._message: tuple[str, Style | None] = ("", None)
        self._launching = self._launch_next = False
        self._choose_model = choose_model
        self._choosing_first = False
        """Whether the list of models that the screen opened with is still shown."""
        self._armed = ""
        self._first = False
        """Whether nothing has run on this machine yet."""
        self._settings_rows: int | None = None
        """Height of the settings above the plan; None leaves it to the style sheet."""
        self.entry = Entry(id="launch-input")
        self.planner = LaunchPlanner(self, fleet, self._invalidated, self._planned, self.redraw)
        self.picker = ModelPicker(self, fleet, self.redraw, self._offer_models)
        self.downloads = ModelDownloads(self, fleet, self._say, self.redraw, self._downloaded)
        self.editor = LaunchEditor(self.entry, self.planner, self.picker, self._say, self.go_to, self._redraw_for)

    def compose(self) -> ComposeResult:
        """Yield the title, the three sections, the plan summary, message, input and keys."""
        yield LineView(id="launch-title", classes="bar")
        with Container(id="launch-body"):
            yield _Section(id="launch-presets")
            with Vertical(id="launch-right"):
                yield _Section(id="launch-settings")
                yield _Section(id="launch-plan")
        yield LineView(id="launch-strip")
        with Vertical(id="launch-foot"):
            yield LineView(id="launch-note")
            yield self.entry
        yield LineView(id="launch-keys", classes="bar")

    def on_mount(self) -> None:
        """Load presets and engines."""
        self._arrange()
        begin_worker(self, self._load, "presets", "load")

    async def _load(self) -> None:
        try:
            self._presets, self._problems = await answer_for(self, self._presets_by_use, "presets")
            if self._presets:
                wanted = self._wanted or (FIRST_PRESET if self._first else "")
                chosen = next((preset for preset in self._presets if preset.name == wanted), self._presets[0])
                self.planner.draft = draft = LaunchDraft(chosen, partners=self._partners)
                self.planner.plan_soon()
                draft.found(await answer_for(self, self._fleet.engines, "engines"))
                if draft.engine is not None:
                    self.planner.plan_soon()
                if self._first and draft.engine is None and not self._choose_model:
                    await self._offer_model(draft)
                elif not self._first:
                    await self._offer_preset(draft)
                if self._choose_model and not self.editor.typing:
                    self.go_to("model")
                    self.editor.edit("model")
                    self._choosing_first = True
            else:
                self._say("No usable preset: the list shows each file's problem.", BAD)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: shown on the screen
            self._say(failure(error, "can't read presets and engines"), BAD)
        self.redraw()

    async def _offer_model(self, draft: LaunchDraft) -> None:
        """If nothing was changed yet, offer a local model instead of a download."""
        from vllm_console.ui.parts.first_launch import first_models

        models = await self.picker.read()
        call = partial(first_models, self._fleet, models, self._presets, draft.request())
        offered = await answer_for(self, call, "first model")
        if (model := offered.get(draft.preset.name)) and not draft.any_touched and not self.editor.typing:
            draft.offered = offered
            self._say(f"{model} is on this machine; {draft.preset.model}, the preset's own, would be downloaded.")
            self.planner.plan_soon()

    async def _offer_preset(self, draft: LaunchDraft) -> None:
        """If the preset does not fit and nothing was changed yet, select the first one that fits."""
        from vllm_console.ui.parts.first_launch import first_fitting

        opened = draft.preset
        presets = {preset.name: preset for preset in (opened, *self._presets)}
        requests = [replace(draft.request(), preset=name) for name in presets]
        found = await answer_for(self, partial(first_fitting, self._fleet, requests), "first preset")
        chosen = draft.preset is not opened or draft.any_touched or self._section != "presets"
        if found is not None and found.preset != opened.name and not chosen:
            self._say(f"{opened.name} does not fit now; {found.preset} does and is selected.")
            self._take_preset(draft, presets[found.preset])

    def _take_preset(self, draft: LaunchDraft, preset: Preset) -> None:
        draft.switch_to(preset)
        self.planner.outcome, self._selected = PlanOutcome(), 0
        self.planner.plan_soon()

    def _presets_by_use(self) -> tuple[Sequence[Preset], Sequence[PresetProblem]]:
        """The presets, last used first, then unused ones in their usual order. Runs in a thread."""
        presets, problems = self._fleet.presets()
        try:
            used = self._fleet.history.used_presets()
        except OperationError:
            return presets, problems  # past runs are unknown
        self._first = not used
        order = {name: at for at, name in enumerate(used)}
        return sorted(presets, key=lambda preset: order.get(preset.name, len(order))), problems

    def on_unmount(self) -> None:
        """Stop downloads and preparations."""
        self.downloads.cancel()
        self.planner.hand_over()
        if self._fleet.judge_launches:
            self._fleet.engine_check.close()

    def _invalidated(self) -> None:
        self._armed, self._launch_next = "", False
        self.redraw()

    def _planned(self) -> None:
        self._selected = min(self._selected, max(0, len(self.planner.outcome.findings) - 1))
        if self._launch_next:
            self._launch_planned()
        self.redraw()

    def _say(self, text: str, style: Style | None = None) -> None:
        self._message = (plain(text), style)

    # -- drawing ---------------------------------------------------------------------------------------------------

    def on_resize(self, _event: events.Resize) -> None:
        """Lay out for the new size."""
        if self.is_mounted:
            self._arrange()

    def _arrange(self) -> None:
        """Show sections side by side if they fit, else the active one."""
        width = self.app.size.width
        alone, three = width < TWO_COLUMNS, width >= THREE_COLUMNS
        self.set_class(not alone and not three, "-two")
        self.set_class(three, "-three")
        for section in SECTIONS:
            self.query_one(f"#launch-{section}").display = not alone or section == self._section
        self.query_one("#launch-right").display = not alone or self._section != "presets"
        low = self.app.size.height < LEAST_WITH_STRIP
        self.query_one("#launch-strip").display = alone and self._section != "plan" and not low
        self.call_after_refresh(self.redraw)

    def redraw(self) -> None:
        """Draw everything."""
        if not self.is_mounted:
            return
        width = self.app.size.width
        bar = title_bar if frames_fit(self.app.size) else rule
        title = "Launch a server"
        outcome = outcome_parts(self.planner.outcome, width - len(title) - 9)
        self._show("launch-title", [bar(title, width, outcome)])
        if self.editor.typing:
            keys = keys_line(self.editor.key_hints, width)
        elif self._layout_index is not None:
            keys = keys_line(_layout_keys(), width)
        else:
            keys = footer("launch", width, self._idle_keys())
        self._show("launch-keys", [keys])
        draft = self.planner.draft
        text, style = self._message
        if draft is None:
            self._show_note(text or "Reading presets…", style or DIM)
            return
        self._move_to(self._under)
        self._cursor = min(self._cursor, len(draft.names) - 1)
        self._under = draft.names[self._cursor]
        self._share_rows(draft)
        for section in SECTIONS:
            self._draw_section(section, draft)
        refused = bool(self.planner.outcome.error) or any(
            found.level is Level.ERROR for found in self.planner.outcome.findings
        )
        hint = f"{key_of('launch_next')}: presets → settings → plan"
        if not text and self.downloads.running:
            text = self.downloads.line
        elif not text and refused and width < TWO_COLUMNS:
            text, style = hint, DIM  # an error takes precedence over the engine note
        elif not text and draft.substituted and width < TWO_COLUMNS and self._section != "plan":  # the plan has it, too
            text, style = NO_VLLM, WARN
        elif not text and width < TWO_COLUMNS:
            text, style = hint, DIM
        self._show_note(text, style)
        self._show_strip(text, refused)

    def _show_strip(self, note: str, refused: bool) -> None:
        """Show the plan summary: an error in full if rows permit, unless the message already says it."""
        view, planner, size = self.query_one("#launch-strip", LineView), self.planner, self.app.size
        findings = planner.outcome.findings
        said = bool(findings) and plain(findings[min(self._selected, len(findings) - 1)].message) in note
        rows = STRIP_ROWS
        if refused and not said:
            note_rows = len(self.query_one("#launch-note", LineView).lines)
            rows = max(STRIP_ROWS, size.height - 2 - note_rows - self.editor.typing - LEAST_SECTION)
        strip = strip_lines(
            planner.outcome, size.width, self._selected, fresh=planner.fresh, height=rows, asking=planner.asking
        )
        if said:
            strip, rows = strip[:1], 1
        rows = max(len(strip), min(rows, STRIP_ROWS))
        if view.styles.height is None or view.styles.height.value != rows:
            view.styles.height = rows
        view.show(strip)

    def _idle_keys(self) -> set[str]:
        """Actions without effect on the plan shown."""
        fixes = self.planner.outcome.fix or any(found.fix for found in self.planner.outcome.findings)
        return {name for name, idle in (("launch_fix", not fixes), ("launch_layouts", not self._alternatives)) if idle}

    def _share_rows(self, draft: LaunchDraft) -> None:
        """If settings are above the plan, give the plan the rows it needs and the settings all others."""
        settings, right = self.query_one("#launch-settings", FramedView), self.query_one("#launch-right")
        width, total = right.size
        frame = frames_fit(self.app.size)  # one row per section, one column per side
        width, total = width - 2 * frame, total - 2 * frame
        outcome, wanted = self.planner.outcome, None
        known = outcome.plan is not None or bool(outcome.error)
        if self.has_class("-two") and width > 0 and known and self._layout_index is None:
            plan = launch_plan_lines(
                outcome, (width, UNBOUNDED), active=False, selected=self._selected, note=_note_of(draft)
            )
            least = total * 4 // 9
            wanted = max(least, total - len(plan))
            if not (self.editor.adding or self.editor.picking):
                size = (width, UNBOUNDED)
                need = setting_lines(draft, outcome.plan, self.planner.catalog, size, self._cursor, active=True)
                wanted = max(least, min(wanted, len(need)))
        wanted = wanted + frame if wanted is not None else None
        if wanted != self._settings_rows:
            self._settings_rows = wanted
            settings.styles.height = wanted

    def _show_note(self, text: str, style: Style | None) -> None:
        """Show a message; each extra line takes a row from the sections."""
        view, size = self.query_one("#launch-note", LineView), self.app.size
        most = max(2, min(NOTE_ROWS, size.height - 4 - LEAST_SECTION))
        view.show(note_lines(plain(text), style, size.width, most))

    def _show(self, id: str, strips: Sequence[Strip]) -> None:
        self.query_one(f"#{id}", LineView).show(strips)

    def _draw_section(self, section: str, draft: LaunchDraft) -> None:
        view = self.query_one(f"#launch-{section}", FramedView)
        if not view.size.width or not view.display:
            return
        view.framed, view.focused_frame = frames_fit(self.app.size), section == self._section
        view.show_lines(self._section_lines(section, draft, view.room))

    def _section_lines(self, section: str, draft: LaunchDraft, size: tuple[int, int]) -> Sequence[Strip]:
        active, planner, editor = section == self._section, self.planner, self.editor
        if section == "presets":
            return preset_lines(self._presets, self._problems, draft, size, active)
        if section == "plan" and self._layout_index is not None:
            return layout_lines(planner.outcome, size, self._layout_index, fresh=planner.fresh)
        if section == "plan":
            return launch_plan_lines(
                planner.outcome,
                size,
                active,
                self._selected,
                busy="launching…" if self._launching else "",
                fresh=planner.fresh,
                asking=planner.asking,
                note=_note_of(draft),
            )
        if editor.picking:
            picker = self.picker
            return model_lines(
                picker.matches,
                picker.fits,
                picker.picked,
                size,
                reading=picker.reading,
                problems=picker.problems,
                none_here=not (picker.reading or picker.names),
            )
        if editor.adding:
            return adding_lines(planner.catalog, editor.matches, editor.picked, self.entry.value, size)
        return setting_lines(draft, planner.outcome.plan, planner.catalog, size, self._cursor, active)

    def _redraw_for(self, after_layout: bool) -> None:
        if after_layout:
            self.call_after_refresh(self.redraw)
        else:
            self.redraw()

    # -- moving ----------------------------------------------------------------------------------------------------

    def action_section(self, step: int) -> None:
        """Go to the next section, or the previous one for -1."""
        self._layout_index = None
        self._section = SECTIONS[(SECTIONS.index(self._section) + step) % len(SECTIONS)]
        self._armed = ""
        self._say("")
        self._arrange()

    def go_to(self, name: str) -> None:
        """Select a field or flag in the settings."""
        if self._section != "settings":
            self._section = "settings"
            self._arrange()
        self._move_to(name)

    def _move_to(self, name: str) -> None:
        names = self.planner.draft.names if self.planner.draft is not None else []
        if name in names:
            self._cursor, self._under = names.index(name), name

    def action_move(self, step: int) -> None:
        """Move the cursor by this many lines; on the plan, by findings."""
        draft = self.planner.draft
        if draft is None or self.editor.typing:
            return
        self._say("")
        self._armed = ""
        if self._layout_index is not None:
            self._layout_index = min(max(0, self._layout_index + step), max(0, len(self._alternatives) - 1))
        elif self._section == "presets":
            at = [preset.name for preset in self._presets].index(draft.preset.name)
            after = self._presets[min(max(0, at + step), len(self._presets) - 1)]
            if after is not draft.preset:
                self._take_preset(draft, after)
        elif self._section == "settings":
            self._move_to(draft.names[min(max(0, self._cursor + step), len(draft.names) - 1)])
        else:
            self._selected = min(max(0, self._selected + step), max(0, len(self.planner.outcome.findings) - 1))
        self.redraw()

    @on(events.MouseScrollUp)
    @on(events.MouseScrollDown)
    def _wheel(self, event: events.MouseEvent) -> None:
        event.stop()
        self.action_move(wheel_step(event))

    def on_click(self, event: events.Click) -> None:
        """Go to the clicked section."""
        clicked, _ = self.get_widget_at(event.screen_x, event.screen_y)
        section = (clicked.id or "").removeprefix("launch-")
        if section in SECTIONS and section != self._section and not self.editor.typing:
            self.action_section(SECTIONS.index(section) - SECTIONS.index(self._section))

    def action_page(self, by: int) -> None:
        """Move the cursor by this many pages."""
        self.action_move(by * PAGE)

    def action_edge(self, end: int) -> None:
        """Go to the first line (-1) or the last (1)."""
        self.action_move(end * MANY)

    # -- layouts ---------------------------------------------------------------------------------------------------

    @property
    def _alternatives(self) -> Sequence[Alternative]:
        return self.planner.outcome.plan.alternatives if self.planner.outcome.plan is not None else ()

    def action_launch_layouts(self) -> None:
        """Toggle between the plan and other layouts."""
        if self.editor.typing:
            return
        self._say("")
        if self._layout_index is not None:
            self._layout_index = None
        elif not self.planner.fresh:
            self._say("Still planning…", WARN)
        elif not self._alternatives:
            self._say("No other layouts to compare.")
        else:
            self._section, self._layout_index = "plan", 0
        self._arrange()
        self.redraw()

    def _apply_layout(self, number: int) -> None:
        if self.planner.draft is None or not self.planner.fresh:
            self._say("Still planning…", WARN)
        elif number >= len(self._alternatives) or self._alternatives[number].chosen:
            self._layout_index = None
            self._say("That is already the plan.")
        else:
            chosen = self._alternatives[number]
            self.planner.draft.take(chosen)
            self._layout_index, self._selected = None, 0
            self._say(f"Applied: {chosen.label}. {key_of('launch_undo')} undoes a flag's change.")
            self.planner.plan_soon()
            return
        self.redraw()

    @property
    def current(self) -> str | None:
        """The selected field or flag."""
        if self.planner.draft is None or self._section != "settings":
            return None
        names = self.planner.draft.names
        return names[min(self._cursor, len(names) - 1)]

    def action_launch_open(self) -> None:
        """Act on the selection: go to a preset's settings, edit a field or flag, apply a layout, or launch the plan."""
        if self._layout_index is not None:
            self._apply_layout(self._layout_index)
        elif self._section == "presets":
            self.action_section(1)
        elif self._section == "plan":
            self.action_launch_start()
        else:
            self.editor.edit(self.current)

    def action_launch_back(self) -> None:
        """Close the input or go back; unsaved changes need a second press."""
        if self._choosing_first:
            self.editor.cancel()
            self.close_with()
        elif self.editor.typing:
            self.editor.cancel()
        elif self._layout_index is not None:
            self._layout_index = None
            self._say("")
            self.redraw()
        elif self.downloads.running:
            self._say("Canceling the download…")
            self.downloads.cancel()
            self.redraw()
        elif self._launching:
            self._say("Launching; this screen closes automatically.", WARN)
            self.redraw()
        elif self.planner.draft is not None and self.planner.draft.any_touched and self._armed != LEAVE:
            self._armed = LEAVE
            start, back = key_of("launch_start"), key_of("launch_back")
            self._say(f"Not launched yet: {start} launches, {back} again discards your changes.", WARN)
            self.redraw()
        else:
            self.close_with()

    # -- editing ---------------------------------------------------------------------------------------------------

    def action_launch_toggle(self) -> None:
        """Select the next engine or GPU set, or toggle a flag or select its next choice."""
        self.editor.toggle(self.current)

    def action_launch_add(self) -> None:
        """Search all flags for one to add."""
        self.editor.add()

    def action_launch_remove(self) -> None:
        """Unset the flag, or clear the field."""
        self.editor.remove(self.current)

    def action_launch_undo(self) -> None:
        """Restore the preset's value."""
        self.editor.undo(self.current)

    @on(Input.Changed, "#launch-input")
    def _on_typed(self, event: Input.Changed) -> None:
        event.stop()
        self.editor.typed(event.value)

    @on(Entry.Stepped)
    def _on_stepped(self, event: Entry.Stepped) -> None:
        event.stop()
        self.editor.step(event.step)

    @on(Entry.Completing)
    def _on_completing(self, event: Entry.Completing) -> None:
        event.stop()
        self.editor.complete()

    def _offer_models(self, names: Sequence[str]) -> None:
        if self.editor.picking:
            self.entry.offer(names)

    @on(Input.Submitted, "#launch-input")
    def _on_entered(self, event: Input.Submitted) -> None:
        event.stop()
        picking, self._choosing_first = self.editor.picking, False
        self.editor.entered(event.value)
        model = self.planner.draft.text("model") if self.planner.draft is not None else ""
        if picking and not self.editor.typing and self.picker.missing(model):
            get = key_of("launch_get")
            self._say(f"{model} is not on this machine: {get} downloads it now; otherwise vLLM does at startup.")
            self.redraw()

    def action_launch_get(self) -> None:
        """Download the model from the hub, after confirmation."""
        draft = self.planner.draft
        if draft is not None and not self.editor.typing and not self._launching:
            self.downloads.begin(draft.request().model or draft.preset.model)

    def _downloaded(self) -> None:
        """List the downloaded model among the local ones, and plan with its files."""
        self.picker.forget()
        self.planner.plan_soon()

    def action_launch_fix(self) -> None:
        """Apply the fix of the selected finding, or else the first fix of another one."""
        outcome, draft = self.planner.outcome, self.planner.draft
        if draft is None or self.editor.typing:
            return
        if not self.planner.fresh:
            self._say("Still planning…", WARN)
        elif outcome.plan is None and outcome.fix is None:
            self._say(f"No flag fixes this: {outcome.error}" if outcome.error else "There is no plan yet.", WARN)
        elif outcome.plan is None and outcome.fix is not None:
            self._apply_fix(draft, outcome.fix, format_fix(outcome.fix, outcome.flags))
        elif not outcome.findings:
            self._say("No findings to fix.")
        else:
            at = min(self._selected, len(outcome.findings) - 1)
            found = next((one for one in (outcome.findings[at], *outcome.findings) if one.fix is not None), None)
            if found is None or found.fix is None or outcome.plan is None:
                self._say("No flag change fixes this.", WARN)
            else:
                self._apply_fix(draft, found.fix, f"{found.code}: {format_fix(found.fix, outcome.plan.flags)}")
        self.redraw()

    def _apply_fix(self, draft: LaunchDraft, fix: Changes, text: str) -> None:
        self._say(text)
        draft.apply(fix)
        self._move_to(next(iter(fix.edits), ""))
        self._selected = 0
        self.planner.plan_soon()

    def action_launch_copy(self) -> None:
        """Copy the command line."""
        if self.planner.outcome.plan is None:
            self._say("No command line yet.", WARN)
        else:
            copy(self.app, command_text(self.planner.outcome.plan), "Command line", self._report)
        self.redraw()

    def _report(self, text: str) -> None:
        self._say(text)
        self.redraw()

    # -- launching -------------------------------------------------------------------------------------------------

    def action_launch_start(self) -> None:
        """Launch the draft; plan it first if the plan is outdated."""
        if self.planner.draft is None or self._launching:
            return
        if self.downloads.running:
            self._say(
                f"The model is still downloading: launch when it is done, or {key_of('launch_back')} cancels.", WARN
            )
        elif self.editor.typing:
            self._say(f"First accept the value with enter, or cancel with {key_of('launch_back')}.", WARN)
        elif self.planner.fresh:
            self._launch_planned()
        else:
            self._launch_next = True
            self._say("Planning first…")
            self.planner.plan_now()
        self.redraw()

    def _launch_planned(self) -> None:
        """Launch the plan: never despite a certain error; despite warnings and uncertain errors on a second press."""
        self._launch_next = False
        outcome = self.planner.outcome
        if outcome.error:
            self._say(f"Not launched: {outcome.error}", BAD)
            return
        errors = [finding for finding in outcome.findings if finding.level is Level.ERROR]
        warnings = [finding for finding in outcome.findings if finding.level is Level.WARNING]
        if sure := next((finding for finding in errors if finding.surely), None):
            self._select(sure)
            self._say(f"Not launched: {sure.message}", BAD)
        elif (found := [*errors, *warnings]) and self._armed != LAUNCH:
            self._armed = LAUNCH
            self._select(found[0])
            self._say(f"{key_of('launch_start')} again launches anyway: {found[0].message}", BAD if errors else WARN)
        elif self.planner.draft is not None:
            self._launching = True
            self.planner.hand_over()
            self._say("Launching…")
            request = self.planner.draft.request(force=bool(errors))
            self.run_worker(self._start(request), name="start", group="start")

    def _select(self, finding: PlanFinding) -> None:
        self._selected = self.planner.outcome.findings.index(finding)

    async def _start(self, request: LaunchRequest) -> None:
        try:
            server = await answer_for(self, partial(self._fleet.start, request), "start")
        except Exception as error:  # noqa: BLE001 - the thread's boundary: shown on the screen
            why = failure(error, "unexpected error").partition("\n")[0]
            self._say(f"Not launched: {why}", BAD)
        else:
            self.close_with(server)
            return
        self._launching = False
        self.planner.plan_soon()  # a new plan may show the cause


def _layout_keys() -> list[KeyHint]:
    down, up, take, back = map(key_of, ("move_down", "move_up", "launch_open", "launch_back"))
    return [
        (f"{down} {up}", "choose a layout", "screen.move(1)|screen.move(-1)"),
        (take, "apply", "screen.launch_open"),
        (back, "back to the plan", "screen.launch_back"),
    ]


def _note_of(draft: LaunchDraft) -> str:
    return NO_VLLM if draft.substituted else ""
