"""A launch while a person puts it together: preset, fields, engine, changed flags. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from vllm_console.fleet.api import UsageError
from vllm_console.fleet.model import Engine, LaunchRequest, Preset
from vllm_console.ui.flag_edits import FlagEdits
from vllm_launchers.plan.model import EngineKind

FIELDS = ("model", "engine", "name", "host", "port")
"""What is chosen besides flags, in the order shown."""

CHOSEN = {"engine": "auto", "name": "the preset's", "host": "127.0.0.1", "port": "first free"}
"""What holds for a field that is left empty."""

ABOUT = {
    "model": "a model id on the hub, or a folder",
    "engine": "space takes the next one found on this machine",
    "name": "what the server is called here",
    "host": "0.0.0.0 lets other machines in: then set VLLM_API_KEY",
    "port": "where clients reach it",
}


@dataclass(slots=True)
class LaunchDraft:
    """Choices so far. Those of a preset (model, flags) are kept when another preset is looked at."""

    preset: Preset
    engines: Sequence[Engine] = ()
    engine: int | None = None
    """Index of the chosen engine; None is ``auto``."""
    fields: dict[str, str] = field(default_factory=dict)
    _found: int | None = None
    _models: dict[str, str] = field(default_factory=dict)
    _edits: dict[str, FlagEdits] = field(default_factory=dict)

    def found(self, engines: Sequence[Engine]) -> None:
        """Take in which engines there are. Where no real vLLM is, the simulated one stands chosen for all to see."""
        self.engines = engines
        if self.engine is None and engines and all(engine.kind is EngineKind.SIMULATED for engine in engines):
            self.engine = self._found = 0

    @property
    def edits(self) -> FlagEdits:
        """Changes to the preset's flags."""
        if self.preset.name not in self._edits:
            base = {name: setting.value for name, setting in self.preset.flags.items()}
            self._edits[self.preset.name] = FlagEdits(base)
        return self._edits[self.preset.name]

    def text(self, name: str) -> str:
        """What a person put into a field; empty when it is left to the program."""
        if name == "model":
            return self._models.get(self.preset.name, "")
        if name == "engine":
            return self.engines[self.engine].label if self.engine is not None else ""
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
            raise UsageError(f"{name} cannot hold spaces")
        if name == "engine":
            self.engine = None
        elif name == "model":
            self._models[self.preset.name] = "" if text == self.preset.model else text
        else:
            self.fields[name] = text

    def next_engine(self) -> None:
        """Auto, then each engine in turn."""
        if self.engines:
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
            or any(self.fields.values())
            or any(self._models.values())
            or any(edits.edits for edits in self._edits.values())
        )

    def request(self) -> LaunchRequest:
        """What the fleet is asked for."""
        chosen = self.engines[self.engine] if self.engine is not None else None
        request = LaunchRequest(
            preset=self.preset.name,
            model=self.text("model") or None,
            name=self.text("name") or None,
            host=self.text("host") or None,
            port=int(self.text("port")) if self.text("port") else None,
            changes=self.edits.changes,
        )
        if chosen is None:
            return request
        real = chosen.kind is EngineKind.VLLM
        return replace(request, engine=chosen.kind.value, vllm=chosen.path if real else None)

    def reason(self, name: str, reasons: Mapping[str, str]) -> str:
        """Why a flag is set: the preset's reason; for a changed one, what it was."""
        setting = self.preset.flags.get(name)
        if self.edits.changed(name):
            return "changed here" if setting is None else f"the preset has {setting.value}: {setting.why}"
        return setting.why if setting else reasons.get(name, "")
