"""The launch screen's editing: fields and flags changed by keys, judged and planned while they are typed."""

from __future__ import annotations

from collections.abc import Sequence

from textual import on
from textual.widgets import Input

from vllm_console.fleet.api import Fleet, UsageError
from vllm_console.fleet.model import FlagValue
from vllm_console.ui.launch_draft import CYCLED, FIELDS, LaunchDraft
from vllm_console.ui.screens.launch_planning import LaunchPlanning
from vllm_console.ui.theme import BAD, WARN
from vllm_console.ui.widgets.entry import Entry
from vllm_launchers.plan.common_flags import flag_text
from vllm_launchers.plan.errors import FlagError

ADDING = "+"
"""What the entry is for while a flag is searched."""


class LaunchEditing(LaunchPlanning):
    """Changes the draft. Which line is under the cursor is the screen's."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self._found: Sequence[str] = ()
        """Flags that match what is typed while one is added."""
        self._pick = 0
        self._tried = False
        """Whether what is planned is a value that is still being typed."""

    @property
    def _input(self) -> Entry:
        return self.query_one("#launch-input", Entry)

    @property
    def typing(self) -> bool:
        """Whether a value is being typed."""
        return self._input.purpose is not None

    @property
    def _at(self) -> str | None:
        """The field or flag under the cursor."""
        raise NotImplementedError

    def go_to(self, name: str) -> None:
        """Put the cursor on a field or flag."""
        raise NotImplementedError

    # -- keys ------------------------------------------------------------------------------------------------------

    def edit(self) -> None:
        """Edit the field or flag under the cursor; switch one that is on or off."""
        name, draft = self._at, self._draft
        if name is None or draft is None:
            return
        if name in CYCLED:
            self.action_launch_toggle()
        elif name in FIELDS:
            self._open(name, draft.text(name) or (draft.preset.model if name == "model" else ""))
        else:
            value, facts = draft.value(name), self._book.facts(name)
            if isinstance(value, bool) or (facts and facts.switch):
                self.action_launch_toggle()
            else:
                choices = facts.choices if facts else ()
                self._open(name, flag_text(value) if value is not None else "", choices)

    def action_launch_toggle(self) -> None:
        """The next engine or set of GPUs; a flag on or off, or its next choice."""
        name, draft = self._at, self._draft
        if name is None or draft is None:
            return
        if name in CYCLED:
            draft.next_choice(name)
        elif name in FIELDS or (value := self._book.next_value(name, draft.value(name))) is None:
            self.edit()
            return
        else:
            draft.edits.put(name, value)
        self.plan_soon()

    def action_launch_add(self) -> None:
        """Search all flags for one to add."""
        if self._draft is not None and not self.typing:
            self.go_to(self._draft.names[0])
            self._pick, self._found = 0, self._book.names
            self._open(ADDING, "", tuple(self._book.names))

    def action_launch_remove(self) -> None:
        """Leave the flag out, or leave the field to the program."""
        name, draft = self._at, self._draft
        if name is None or draft is None:
            return
        if name in FIELDS:
            draft.put(name, "")
        else:
            draft.leave_out(name)
        self.plan_soon()

    def action_launch_undo(self) -> None:
        """As the preset has it."""
        if self._at is None or self._draft is None:
            return
        if self._at in FIELDS:
            self._draft.put(self._at, "")
        else:
            self._draft.edits.undo(self._at)
        self.plan_soon()

    # -- typing ----------------------------------------------------------------------------------------------------

    def _open(self, purpose: str, text: str, choices: Sequence[str] = ()) -> None:
        self._input.open(purpose, text, choices, cycled=purpose != ADDING)
        self._say(self._hint(purpose, bool(choices)))
        self.call_after_refresh(self.redraw)

    @staticmethod
    def _hint(purpose: str, choices: bool) -> str:
        if purpose == ADDING:
            return "Words of a flag's name or meaning, or NAME=VALUE: ↑ ↓ choose, enter takes it, esc leaves"
        more = ", tab completes, ↑ ↓ go through the choices" if choices else ""
        return f"{purpose}: enter takes it{more}, esc leaves it as it was"

    def leave_entry(self) -> None:
        """Close the entry without taking what stands there."""
        self._say("")
        self._close()
        if self._tried:
            self.plan_soon()

    def _close(self) -> None:
        self._input.shut()
        self._found = ()
        self.call_after_refresh(self.redraw)

    @on(Input.Changed, "#launch-input")
    def _on_typed(self, event: Input.Changed) -> None:
        """Judge what is typed, and plan it as if it were taken."""
        event.stop()
        draft, purpose = self._draft, self._input.purpose
        if draft is None or purpose is None:
            return
        text = event.value.strip()
        if purpose == ADDING:
            name, _, text = text.partition("=")
            self._found, self._pick = self._book.matching(draft.edits, name.strip()), 0
            purpose = name.strip()
        facts = self._book.facts(purpose)
        self._say(self._hint(self._input.purpose or "", bool(facts and facts.choices)))
        try:
            if purpose and text:
                self._try(draft, purpose, text)
        except (FlagError, UsageError) as error:
            self._say(str(error), WARN)
        self.redraw()

    def _try(self, draft: LaunchDraft, name: str, text: str) -> None:
        if name in FIELDS:
            tried = draft.tried(name, text)
        else:
            name = self._book.named(name)
            tried = draft.tried(name, self._book.value(name, text))
        if self._tried or tried.request() != draft.request():
            self._tried = True
            self.plan_soon(tried)

    @on(Entry.Stepped)
    def _on_stepped(self, event: Entry.Stepped) -> None:
        event.stop()
        if self._input.purpose == ADDING and self._found:
            self._pick = min(max(0, self._pick + event.step), len(self._found) - 1)
            self.redraw()

    @on(Input.Submitted, "#launch-input")
    def _on_entered(self, event: Input.Submitted) -> None:
        event.stop()
        draft, purpose = self._draft, self._input.purpose
        if draft is None or purpose is None:
            return
        try:
            if purpose == ADDING:
                self._add(draft, event.value)
                return
            if purpose in FIELDS:
                draft.put(purpose, event.value)
            else:
                draft.edits.put(purpose, self._book.value(purpose, event.value))
        except (FlagError, UsageError) as error:
            self._say(str(error), BAD)
            self.redraw()
            return
        self._taken()

    def _taken(self) -> None:
        self._say("")
        self._close()
        self._tried = False
        self.plan_soon()

    def _add(self, draft: LaunchDraft, text: str) -> None:
        """Add a flag: the one typed as ``NAME=VALUE`` or by its whole name, else the one that is picked."""
        name, equals, value = (part.strip() for part in text.partition("="))
        plain_name = name.lstrip("-").replace("_", "-").lower()
        if not equals and self._found and (self._pick or self._book.facts(plain_name) is None):
            name = self._found[self._pick]
        name = self._book.named(name)
        chosen: FlagValue | None = None
        if equals:
            chosen = self._book.value(name, value)
        elif draft.value(name) is None:
            facts = self._book.facts(name)
            chosen = self._book.next_value(name, None) if facts and facts.switch else None
        if chosen is not None:
            draft.edits.put(name, chosen)
        if name not in draft.names:
            draft.edits.added.append(name)
        warning = self._book.unknown(name)
        self._taken()
        self._say(warning, WARN)
        self.go_to(name)
        if draft.value(name) is None:
            self.call_after_refresh(self.edit)
