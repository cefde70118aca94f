"""Edits a launch draft by keys and input; input is checked and planned while it is typed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.style import Style

from vllm_console.ui.keymap import key_of
from vllm_console.ui.parts.launch_draft import CHOSEN, CYCLED, FIELDS, LaunchDraft
from vllm_console.ui.parts.launch_planner import LaunchPlanner
from vllm_console.ui.parts.model_picker import ModelPicker
from vllm_console.ui.theme import BAD, WARN
from vllm_console.ui.widgets.draw import KeyHint
from vllm_console.ui.widgets.entry import Entry
from vllm_launchers.errors import UsageError
from vllm_launchers.plan.findings import FlagError
from vllm_launchers.vllm.flags.changes import FlagValue, flag_text

ADDING = "+"
"""The entry's purpose while searching for a flag."""

MODEL = "model"
"""The entry's purpose while choosing a model."""

Say = Callable[[str, Style | None], None]


class LaunchEditor:
    """Edits the planner's draft. ``entry`` is the input, ``picker`` lists models.

    ``say`` shows a message, ``go_to`` selects a field or flag, ``redraw`` draws the screen (True: after the next
    layout).
    """

    def __init__(
        self,
        entry: Entry,
        planner: LaunchPlanner,
        picker: ModelPicker,
        say: Say,
        go_to: Callable[[str], None],
        redraw: Callable[[bool], None],
    ) -> None:
        self._entry, self._planner, self._say, self._go_to, self._redraw = entry, planner, say, go_to, redraw
        self._picker = picker
        self.matches: Sequence[str] = ()
        """Flags matching the input while adding one."""
        self.picked = 0
        """Index of the match that enter adds."""
        self._tried = False
        """Whether the plan includes a value that has not been accepted yet."""

    @property
    def typing(self) -> bool:
        """Whether the input is open."""
        return self._entry.purpose is not None

    @property
    def adding(self) -> bool:
        """Whether a flag is being added."""
        return self._entry.purpose == ADDING

    @property
    def picking(self) -> bool:
        """Whether a model is being chosen."""
        return self._entry.purpose == MODEL

    @property
    def key_hints(self) -> Sequence[KeyHint]:
        """The keys that apply while typing."""
        back = key_of("launch_back"), "cancel", "screen.launch_back"
        listed = self.adding or self.picking
        return self._entry.keys(back, "add" if self.adding else "accept", chooses=listed, completes=self.picking)

    # -- keys ------------------------------------------------------------------------------------------------------

    def edit(self, name: str | None) -> None:
        """Edit a field or flag; toggle a switch."""
        draft = self._planner.draft
        if name is None or draft is None:
            return
        if name in CYCLED:
            self.toggle(name)
        elif name == MODEL:
            text = draft.text(name) or draft.preset.model
            self._picker.open(draft.request(), text)
            self._open(name, text, self._picker.names)
        elif name in FIELDS:
            self._open(name, draft.text(name))
        else:
            value, facts = draft.value(name), self._planner.catalog.facts(name)
            if isinstance(value, bool) or (facts and facts.switch):
                self.toggle(name)
            else:
                choices = facts.choices if facts else ()
                self._open(name, flag_text(value) if value is not None else "", choices)

    def toggle(self, name: str | None) -> None:
        """Select the next choice of a field or flag, or toggle a switch; otherwise edit it."""
        draft = self._planner.draft
        if name is None or draft is None:
            return
        if name in CYCLED:
            draft.next_choice(name)
        elif name in FIELDS or (value := self._planner.catalog.next_value(name, draft.value(name))) is None:
            self.edit(name)
            return
        else:
            draft.edits.put(name, value)
        self._planner.plan_soon()

    def add(self) -> None:
        """Search all flags for one to add."""
        draft, catalog = self._planner.draft, self._planner.catalog
        if draft is not None and not self.typing:
            self._go_to(draft.names[0])
            self.picked, self.matches = 0, catalog.names
            self._open(ADDING, "", tuple(catalog.names))

    def remove(self, name: str | None) -> None:
        """Unset the flag, or clear the field."""
        draft = self._planner.draft
        if name is None or draft is None:
            return
        if name in FIELDS:
            draft.put(name, "")
        else:
            draft.leave_out(name)
        self._planner.plan_soon()

    def undo(self, name: str | None) -> None:
        """Restore the preset's value."""
        draft = self._planner.draft
        if name is None or draft is None:
            return
        if name in FIELDS:
            draft.put(name, "")
        else:
            draft.edits.undo(name)
        self._planner.plan_soon()

    def cancel(self) -> None:
        """Close the entry without accepting its text."""
        self._say("", None)
        self._close()
        if self._tried:
            self._planner.plan_soon()

    # -- typing ----------------------------------------------------------------------------------------------------

    def _open(self, purpose: str, text: str, choices: Sequence[str] = ()) -> None:
        self._entry.open(purpose, text, choices, cycled=purpose not in (ADDING, MODEL))
        self._say(_hint(purpose), None)
        self._redraw(True)

    def _close(self) -> None:
        if self.picking:
            self._picker.close()
        self._entry.shut()
        self.matches = ()
        self._redraw(True)

    def typed(self, text: str) -> None:
        """Check the input and plan as if it were accepted."""
        draft, purpose, catalog = self._planner.draft, self._entry.purpose, self._planner.catalog
        if draft is None or purpose is None:
            return
        text = text.strip()
        if purpose == MODEL and text != self._picker.picked_name:
            self._picker.narrow(text)
        if purpose == ADDING:
            name, _, text = text.partition("=")
            self.matches, self.picked = catalog.matching(draft.edits, name.strip()), 0
            purpose = name.strip()
        self._say(_hint(self._entry.purpose or ""), None)
        try:
            if purpose and text:
                self._try(draft, purpose, text)
        except (FlagError, UsageError) as error:
            self._say(str(error), WARN)
        self._redraw(False)

    def _try(self, draft: LaunchDraft, name: str, text: str) -> None:
        if name in FIELDS:
            tried = draft.tried(name, text)
        else:
            name = self._planner.catalog.named(name)
            tried = draft.tried(name, self._planner.catalog.value(name, text))
        if self._tried or tried.request() != draft.request():
            self._tried = True
            self._planner.plan_soon(tried)

    def step(self, by: int) -> None:
        """Go to the next or previous match; a model is planned as if accepted."""
        draft = self._planner.draft
        if self.picking and draft is not None:
            self._picker.step(by)
            self._try(draft, MODEL, self._picker.picked_name or self._entry.value)
            self._redraw(False)
        if self.adding and self.matches:
            self.picked = min(max(0, self.picked + by), len(self.matches) - 1)
            self._redraw(False)

    def complete(self) -> None:
        """Complete the input with the selected or first matching model."""
        if self.picking and self._picker.matches:
            self._entry.put(self._picker.picked_name or self._picker.matches[0].model)

    def entered(self, text: str) -> None:
        """Accept the input."""
        draft, purpose = self._planner.draft, self._entry.purpose
        if draft is None or purpose is None:
            return
        try:
            if purpose == ADDING:
                self._add(draft, text)
                return
            if purpose == MODEL:
                text = self._picker.picked_name or text
            if purpose in FIELDS:
                _refuse_emptied(draft, purpose, text)
                draft.put(purpose, text)
            else:
                draft.edits.put(purpose, self._planner.catalog.value(purpose, text))
        except (FlagError, UsageError) as error:
            self._say(str(error), BAD)
            self._redraw(False)
            return
        self._accepted()

    def _accepted(self) -> None:
        self._say("", None)
        self._close()
        self._tried = False
        self._planner.plan_soon()

    def _add(self, draft: LaunchDraft, text: str) -> None:
        """Add the flag typed as ``NAME=VALUE`` or by its full name, or else the selected match."""
        catalog = self._planner.catalog
        name, equals, value = (part.strip() for part in text.partition("="))
        plain_name = name.lstrip("-").replace("_", "-").lower()
        if not equals and self.matches and (self.picked or catalog.facts(plain_name) is None):
            name = self.matches[self.picked]
        name = catalog.named(name)
        chosen: FlagValue | None = None
        if equals:
            chosen = catalog.value(name, value)
        elif draft.value(name) is None:
            facts = catalog.facts(name)
            chosen = catalog.next_value(name, None) if facts and facts.switch else None
        if chosen is not None:
            draft.edits.put(name, chosen)
        if name not in draft.names:
            draft.edits.added.append(name)
        warning = catalog.unknown(name)
        self._accepted()
        self._say(warning, WARN)
        self._go_to(name)
        if draft.value(name) is None:
            self._entry.call_after_refresh(self.edit, name)


def _hint(purpose: str) -> str:
    if purpose == ADDING:
        return "Type a flag's name or meaning, or NAME=VALUE."
    return "Type part of a name, a hub id or a folder." if purpose == MODEL else f"{purpose}:"


def _refuse_emptied(draft: LaunchDraft, name: str, text: str) -> None:
    """Refuse an emptied field, which would silently get its default.

    Raises:
        UsageError: the field was emptied; the text names the key that restores the default.
    """
    before = draft.text(name) or (draft.preset.model if name == "model" else "")
    if before and not text.strip():
        default = CHOSEN.get(name, draft.preset.model)
        raise UsageError(
            f"{name} can't be empty: {key_of('launch_back')} keeps '{before}', "
            f"then {key_of('launch_remove')} resets it to {default}"
        )
