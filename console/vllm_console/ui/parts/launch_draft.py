"""A launch while the user puts it together: preset, fields, engine, changed flags. Pure."""

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
from vllm_launchers.plan.common_flags import flag_text
from vllm_launchers.plan.model import Plan
from vllm_launchers.plan.placement import Placement
from vllm_launchers.presets.model import Preset
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.changes import Changes, Flags, FlagValue

FIELDS = ("model", "engine", "name", "host", "port", "gpus", "standby of")
"""What is chosen besides flags, in the order shown; GPUs only where some are known, the last only where a server can
have a standby.
"""

CYCLED = ("engine", "gpus", "standby of")
"""Fields whose choices are gone through instead of typed."""

NO_GPUS = "none"

CHOSEN = {"engine": "auto", "name": "preset name", "host": "127.0.0.1", "port": "first free", "gpus": "auto",
          "standby of": "none"}  # fmt: skip
"""What holds for a field that is left empty."""

ABOUT = {
    "model": "model id on the Hugging Face Hub, or a folder; enter lists the models on this machine",
    "engine": "space: next engine found on this machine",
    "name": "the server's name in this console",
    "host": "0.0.0.0 accepts other machines: then set VLLM_API_KEY",
    "port": "where clients connect",
    "gpus": "space: next set, best first; auto takes the best; none leaves it to vLLM",
    "standby of": "space: next server with sleep mode; the new one shares its GPUs, and one of the two sleeps",
}


@dataclass(slots=True)
class LaunchDraft:
    """Choices so far. Those of a preset (model, flags) are kept when another preset is looked at."""

    preset: Preset
    engines: Sequence[Engine] = ()
    engine: int | None = None
    """Index of the chosen engine; None is ``auto``."""
    sets: Sequence[Placement] = ()
    """The sets of GPUs to choose from, the best first; none where GPUs are not known."""
    chosen_set: Placement | str | None = None
    """The chosen set, or `NO_GPUS`; None is ``auto``."""
    partners: Sequence[str] = ()
    """Servers that the new one could be the standby of."""
    fields: dict[str, str] = field(default_factory=dict)
    planned_flags: Flags = field(default_factory=dict)
    """All flags of the newest plan."""
    choices: Mapping[str, Choice] = field(default_factory=dict)
    """Why each of them is set, and what was thought about and left to vLLM."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    planned_name: str = ""
    """The name that the server would get; empty as long as that is not known."""
    offered: Mapping[str, str] = field(default_factory=dict)
    """By preset, a model in place of its own."""
    _found: int | None = None
    _models: dict[str, str] = field(default_factory=dict)
    _edits: dict[str, FlagEdits] = field(default_factory=dict)

    def found(self, engines: Sequence[Engine]) -> None:
        """Take in which engines there are. Where no real vLLM is, the simulated one stands chosen for all to see."""
        self.engines = engines
        if self.engine is None and engines and all(engine.kind is EngineKind.SIMULATED for engine in engines):
            self.engine = self._found = 0

    @property
    def substituted(self) -> bool:
        """Whether the simulated engine stands for a vLLM that was not found, and nobody has chosen it."""
        return self._found is not None and self.engine == self._found

    def planned(self, plan: Plan, name: str) -> Plan:
        """Take in what a plan says of GPUs and flags, and the server's name; returns the plan."""
        self.sets, self.planned_name = plan.sets, name
        self.planned_flags, self.reasons = plan.flags, plan.reasons
        self.choices = {choice.flag: choice for choice in plan.choices}
        return plan

    def switch_to(self, preset: Preset) -> None:
        """Take another preset; the plan of the one before is obsolete."""
        self.preset = preset
        self.planned_flags, self.choices, self.reasons, self.planned_name = {}, {}, {}, ""

    def refused(self, error: OperationError) -> str:
        """Take in what a refusal says of GPUs; returns its sentence."""
        if isinstance(error, NoPlaceError):
            self.sets = error.sets
        return str(error).partition("\n")[0]

    @property
    def shown(self) -> Sequence[str]:
        """The fields there are to fill in."""
        hidden = {"gpus"} if self.text("standby of") or not (self.sets or self.chosen_set) else set()
        return [name for name in FIELDS if name not in hidden and (name != "standby of" or self.partners)]

    @property
    def names(self) -> list[str]:
        """What there is to set, in the order shown: fields, flags of the preset and the person, then chosen ones."""
        mine = [*self.shown, *self.edits.names()]
        chosen = [choice.flag for choice in self.choices.values() if choice.value is not None]
        left = [choice.flag for choice in self.choices.values() if choice.value is None]
        return list(dict.fromkeys([*mine, *self.planned_flags, *chosen, *left]))

    def value(self, name: str) -> FlagValue | None:
        """What a flag would be: as edited, as in the preset, or as it was chosen."""
        if self.edits.changed(name):
            return self.edits.value(name)
        if name in self.choices:
            return self.choices[name].value
        return self.edits.base.get(name, self.planned_flags.get(name))

    def leave_out(self, name: str) -> None:
        """See that a flag is not given; one that was only added here is forgotten."""
        if name in self.edits.base or (name in self.planned_flags and not self.edits.changed(name)):
            self.edits.leave_out(name)
        else:
            self.edits.undo(name)

    def apply(self, changes: Changes) -> None:
        """Make a change of flags that somebody proposed."""
        for name, value in changes.set.items():
            self.edits.put(name, value)
        for name in changes.unset:
            self.edits.leave_out(name)

    def take(self, chosen: Alternative) -> None:
        """Make another way to launch it the plan: its flags, its checkpoint, and as many GPUs as it needs."""
        self.apply(chosen.changes)
        if chosen.model is not None:
            self.put("model", chosen.model)
        if isinstance(self.chosen_set, Placement) and len(self.chosen_set.gpus) != chosen.layout.total:
            self.chosen_set = None

    def tried(self, name: str, value: FlagValue) -> LaunchDraft:
        """A draft with one more flag or field; this one stays as it is.

        Raises:
            UsageError: the text cannot stand in that field.
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
        """What the user put into a field; empty when it is left to the program."""
        if name == "model":
            return self._models.get(self.preset.name, self.offered.get(self.preset.name, ""))
        if name == "engine":
            return self.engines[self.engine].label if self.engine is not None else ""
        if name == "gpus":
            return set_title(self.chosen_set)
        return self.fields.get(name, "")

    def put(self, name: str, text: str) -> None:
        """Fill in a field; empty leaves it to the program.

        Raises:
            UsageError: the text cannot stand there; one sentence says why.
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
        """Auto, then each engine, or set of GPUs, in turn."""
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
        """Whether anything of this preset was changed."""
        edits = self._edits.get(preset.name)
        return bool(self._models.get(preset.name)) or bool(edits and edits.edits)

    @property
    def any_touched(self) -> bool:
        """Whether there is anything to lose."""
        return bool(
            self.engine != self._found
            or self.chosen_set is not None
            or any(self.fields.values())
            or any(self._models.values())
            or any(edits.edits for edits in self._edits.values())
        )

    def request(self, force: bool = False) -> LaunchRequest:
        """What the fleet is asked for; ``force`` starts in spite of errors that may be wrong."""
        chosen = self.engines[self.engine] if self.engine is not None else None
        request = LaunchRequest(
            preset=self.preset.name,
            model=self.text("model") or None,
            name=self.text("name") or None,
            host=self.text("host") or None,
            port=int(self.text("port")) if self.text("port") else None,
            changes=self.edits.changes,
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
        """Why a flag is as it is: the preset's reason, or that of whoever chose; for a changed one, what it was."""
        setting, choice = self.preset.flags.get(name), self.choices.get(name)
        if self.edits.changed(name):
            if setting is None:
                return "set by you" if self.edits.value(name) is not None else "unset by you"
            return f"preset: {flag_text(setting.value)} ({setting.why})"
        if choice is not None:
            return choice.reason
        return setting.why if setting is not None else self.reasons.get(name, "")

    def tradeoff(self, name: str) -> str:
        """The trade-off of a flag's value; empty if none is given."""
        choice = self.choices.get(name)
        return choice.tradeoff if choice is not None else ""

    def source(self, name: str) -> str:
        """Who chose a flag's value, in a word."""
        if self.edits.changed(name):
            return Source.YOU
        if name in self.choices:
            return self.choices[name].source
        return Source.PRESET if name in self.preset.flags else ""


def set_title(chosen: Placement | str | None) -> str:
    """A choice of GPUs in a few words: indices, a slice's UUID, ``none``; empty for auto."""
    if chosen is None or isinstance(chosen, str):
        return chosen or ""
    return chosen.mig.uuid if chosen.mig else ",".join(map(str, chosen.gpus))


def set_devices(chosen: Placement) -> str:
    """Which GPU has which UUID, so that indices are unambiguous."""
    pairs = zip(chosen.gpus, chosen.uuids, strict=True)
    return ", ".join(f"GPU {index} is {uuid}" if uuid else f"GPU {index}" for index, uuid in pairs)
