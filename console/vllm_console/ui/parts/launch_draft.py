"""The draft of a launch: preset, fields, engine, changed flags. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from vllm_console.ui.parts.flag_edits import FlagEdits
from vllm_launchers.errors import OperationError, UsageError
from vllm_launchers.launch.errors import NoPlaceError
from vllm_launchers.launch.request import LaunchRequest
from vllm_launchers.plan.alternatives import Alternative
from vllm_launchers.plan.choices.choice import Choice, Source
from vllm_launchers.plan.model import Plan
from vllm_launchers.plan.placement import Placement
from vllm_launchers.presets.model import Preset
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.changes import Changes, Flags, FlagValue, flag_text

FIELDS = ("model", "engine", "name", "host", "port", "gpus", "standby of")
"""Fields besides flags, in display order. GPUs and the last one are only shown if there is something to choose from."""

CYCLED = ("engine", "gpus", "standby of")
"""Fields that cycle through choices instead of taking text."""

NO_GPUS = "none"

CHOSEN = {"engine": "auto", "name": "preset name", "host": "127.0.0.1", "port": "first free", "gpus": "auto",
          "standby of": "none"}  # fmt: skip
"""Displayed defaults of empty fields."""

ABOUT = {
    "model": "model id on the Hugging Face Hub, or a folder; enter lists the models on this machine",
    "engine": "space: next engine found on this machine",
    "name": "the server's name in this console",
    "host": "0.0.0.0 accepts other machines: then set VLLM_API_KEY",
    "port": "where clients connect",
    "gpus": "space: next set, best first; auto picks the best; none lets vLLM choose",
    "standby of": "space: next server with sleep mode; the new one shares its GPUs, and one of the two sleeps",
}


@dataclass(slots=True)
class LaunchDraft:
    """The user's choices. Each preset keeps its own model and flags while other presets are looked at."""

    preset: Preset
    engines: Sequence[Engine] = ()
    engine: int | None = None
    """Index of the chosen engine; None is ``auto``."""
    sets: Sequence[Placement] = ()
    """GPU sets to choose from, best first; empty if GPUs are unknown."""
    chosen_set: Placement | str | None = None
    """The chosen set, or `NO_GPUS`; None is ``auto``."""
    partners: Sequence[str] = ()
    """Servers that the new one could be the standby of."""
    fields: dict[str, str] = field(default_factory=dict)
    planned_flags: Flags = field(default_factory=dict)
    choices: Mapping[str, Choice] = field(default_factory=dict)
    """The planner's choices by flag, including flags it considered and left to vLLM."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    planned_name: str = ""
    """The server's resulting name; empty while unknown."""
    offered: Mapping[str, str] = field(default_factory=dict)
    """A model to use instead of the preset's own, by preset."""
    _found: int | None = None
    _models: dict[str, str] = field(default_factory=dict)
    _edits: dict[str, FlagEdits] = field(default_factory=dict)

    def found(self, engines: Sequence[Engine]) -> None:
        """Set the available engines. If there is no real vLLM, select the simulated engine visibly."""
        self.engines = engines
        if self.engine is None and engines and all(engine.kind is EngineKind.SIMULATED for engine in engines):
            self.engine = self._found = 0

    @property
    def substituted(self) -> bool:
        """Whether the simulated engine is used because no vLLM was found, not by choice."""
        return self._found is not None and self.engine == self._found

    def planned(self, plan: Plan, name: str) -> Plan:
        """Update GPU sets, flags and name from a plan; returns the plan."""
        self.sets, self.planned_name = plan.sets, name
        self.planned_flags, self.reasons = plan.flags, plan.reasons
        self.choices = {choice.flag: choice for choice in plan.choices}
        return plan

    def switch_to(self, preset: Preset) -> None:
        """Switch presets; discards the plan of the previous one."""
        self.preset = preset
        self.planned_flags, self.choices, self.reasons, self.planned_name = {}, {}, {}, ""

    def refused(self, error: OperationError) -> str:
        """Update GPU sets from a refusal, and forget the changes that the last plan had; returns its first line."""
        if isinstance(error, NoPlaceError):
            self.sets = error.sets
        changed = {name for name, choice in self.choices.items() if choice.source is Source.YOU}
        self.choices = {name: choice for name, choice in self.choices.items() if name not in changed}
        self.planned_flags = {name: value for name, value in self.planned_flags.items() if name not in changed}
        self.reasons = {name: reason for name, reason in self.reasons.items() if name not in changed}
        return str(error).partition("\n")[0]

    @property
    def shown(self) -> Sequence[str]:
        """The fields to show."""
        hidden = {"gpus"} if self.text("standby of") or not (self.sets or self.chosen_set) else set()
        return [name for name in FIELDS if name not in hidden and (name != "standby of" or self.partners)]

    @property
    def names(self) -> list[str]:
        """Everything that can be set, in display order: fields, flags of preset and user, then planned flags."""
        mine = [*self.shown, *self.edits.names()]
        chosen = [choice.flag for choice in self.choices.values() if choice.value is not None]
        left = [choice.flag for choice in self.choices.values() if choice.value is None]
        return list(dict.fromkeys([*mine, *self.planned_flags, *chosen, *left]))

    def value(self, name: str) -> FlagValue | None:
        """A flag's resulting value: edited, planned, or from the preset."""
        if self.edits.changed(name):
            return self.edits.value(name)
        if name in self.choices:
            return self.choices[name].value
        return self.edits.base.get(name, self.planned_flags.get(name))

    def leave_out(self, name: str) -> None:
        """Unset a flag; forget one that was only added here."""
        if name in self.edits.base or (name in self.planned_flags and not self.edits.changed(name)):
            self.edits.leave_out(name)
        else:
            self.edits.undo(name)

    def apply(self, changes: Changes) -> None:
        """Apply proposed flag changes."""
        for name, value in changes.set.items():
            self.edits.put(name, value)
        for name in changes.unset:
            self.edits.leave_out(name)

    def take(self, chosen: Alternative) -> None:
        """Apply an alternative: its flags, its checkpoint, and its number of GPUs."""
        self.apply(chosen.changes)
        if chosen.model is not None:
            self.put("model", chosen.model)
        if isinstance(self.chosen_set, Placement) and len(self.chosen_set.gpus) != chosen.layout.total:
            self.chosen_set = None

    def tried(self, name: str, value: FlagValue) -> LaunchDraft:
        """Return a copy of the draft with one more flag or field.

        Raises:
            UsageError: the text is invalid for that field.
        """
        edits = {preset: FlagEdits(one.base, dict(one.edits), list(one.added)) for preset, one in self._edits.items()}
        draft = dataclasses.replace(self, fields=dict(self.fields), _models=dict(self._models), _edits=edits)
        if name in FIELDS:
            draft.put(name, str(value))
        else:
            draft.edits.put(name, value)
        return draft

    @property
    def edits(self) -> FlagEdits:
        """Changes to the preset's flags."""
        if self.preset.name not in self._edits:
            base = {name: setting.value for name, setting in self.preset.flags.items()}
            self._edits[self.preset.name] = FlagEdits(base)
        return self._edits[self.preset.name]

    def text(self, name: str) -> str:
        """A field's text; empty if left to its default."""
        if name == "model":
            return self._models.get(self.preset.name, self.offered.get(self.preset.name, ""))
        if name == "engine":
            return self.engines[self.engine].label if self.engine is not None else ""
        if name == "gpus":
            return set_title(self.chosen_set)
        return self.fields.get(name, "")

    def put(self, name: str, text: str) -> None:
        """Set a field; empty restores its default.

        Raises:
            UsageError: the text is invalid for that field.
        """
        text = text.strip()
        if name == "port" and text and not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
            raise UsageError(f"port must be a number from 1 to 65535, not '{text}'")
        if any(char.isspace() for char in text) and name in ("host", "name"):
            raise UsageError(f"{name} can't contain spaces")
        if name == "engine":
            self.engine = None
        elif name == "gpus":
            self.chosen_set = None
        elif name == "model":
            self._models[self.preset.name] = "" if text == self.preset.model else text
        else:
            self.fields[name] = text

    def next_choice(self, name: str) -> None:
        """Cycle to the next choice of a field: the default, then each engine, GPU set or partner."""
        if name == "gpus":
            choices = [None, *self.sets, NO_GPUS]
            titles = [set_title(choice) for choice in choices]
            at = titles.index(self.text(name)) if self.text(name) in titles else 0
            self.chosen_set = choices[(at + 1) % len(choices)]
        elif name == "standby of":
            names = ["", *self.partners]
            self.fields[name] = names[(names.index(self.text(name)) + 1) % len(names)]
        elif self.engines:
            after = 0 if self.engine is None else self.engine + 1
            self.engine = after if after < len(self.engines) else None

    def touched(self, preset: Preset) -> bool:
        """Whether this preset's model or flags were changed."""
        edits = self._edits.get(preset.name)
        return bool(self._models.get(preset.name)) or bool(edits and edits.edits)

    @property
    def any_touched(self) -> bool:
        """Whether the draft has any changes."""
        return bool(
            self.engine != self._found
            or self.chosen_set is not None
            or any(self.fields.values())
            or any(self._models.values())
            or any(edits.edits for edits in self._edits.values())
        )

    def request(self, force: bool = False) -> LaunchRequest:
        """The launch request; ``force`` overrides errors that may be wrong."""
        chosen = self.engines[self.engine] if self.engine is not None else None
        request = LaunchRequest(
            preset=self.preset.name,
            model=self.text("model") or None,
            name=self.text("name") or None,
            host=self.text("host") or None,
            port=int(self.text("port")) if self.text("port") else None,
            changes=Changes.of(self.edits.edits),
            force=force,
        )
        if standby := self.text("standby of"):
            request = replace(request, standby_of=standby)
        elif self.chosen_set is None:
            request = replace(request, place="offered")
        elif not isinstance(self.chosen_set, str):
            slice_ = self.chosen_set.mig
            request = replace(request, gpus=self.chosen_set.gpus, place=slice_.uuid if slice_ else "")
        if chosen is None:
            return request
        real = chosen.kind is EngineKind.VLLM
        return replace(request, engine=chosen.kind.value, vllm=chosen.path if real else None)

    def reason(self, name: str) -> str:
        """The reason for a flag's value; for a changed flag, the preset's value."""
        setting, choice = self.preset.flags.get(name), self.choices.get(name)
        if self.edits.changed(name):
            if setting is None:
                return "set by you" if self.edits.value(name) is not None else "unset by you"
            return f"preset: {flag_text(setting.value)} ({setting.why})"
        if choice is not None:
            return choice.reason
        return setting.why if setting is not None else self.reasons.get(name, "")

    def tradeoff(self, name: str) -> str:
        """The trade-off of a flag's value; empty if there is none."""
        choice = self.choices.get(name)
        return choice.tradeoff if choice is not None else ""

    def source(self, name: str) -> str:
        """Who chose a flag's value, in one word."""
        if self.edits.changed(name):
            return Source.YOU
        if name in self.choices:
            return self.choices[name].source
        return Source.PRESET if name in self.preset.flags else ""


def set_title(chosen: Placement | str | None) -> str:
    """A short text for a GPU choice: indices, a slice's UUID, or ``none``; empty for auto."""
    if chosen is None or isinstance(chosen, str):
        return chosen or ""
    return chosen.mig.uuid if chosen.mig else ",".join(map(str, chosen.gpus))


def set_devices(chosen: Placement) -> str:
    """The UUID of each GPU, since indices are ambiguous."""
    pairs = zip(chosen.gpus, chosen.uuids, strict=True)
    return ", ".join(f"GPU {index} is {uuid}" if uuid else f"GPU {index}" for index, uuid in pairs)
