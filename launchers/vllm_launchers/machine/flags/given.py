"""Flags that are set, as questions about them want them: numbers, switches, keys of JSON flags. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping

from vllm_launchers.machine.flags.model import FlagTable, FlagValue, ValueKind
from vllm_launchers.machine.flags.numbers import human_int
from vllm_launchers.machine.flags.search import resolve

Flags = Mapping[str, FlagValue]


class Given:
    """Flags that are set, over vLLM's defaults: asked by full name, whatever alias they were set by.

    ``resolved`` are values of flags that vLLM works out itself where they are not set.
    """

    def __init__(self, table: FlagTable, flags: Flags, resolved: Flags) -> None:
        self._table = table
        self._resolved = resolved
        self._flags: dict[str, FlagValue] = {}
        self._keys: dict[str, dict[str, FlagValue]] = {}
        for name, value in flags.items():
            head, dot, key = name.partition(".")
            spec, _ = resolve(table, head)
            if spec is None:
                continue
            if dot:
                self._keys.setdefault(spec.name, {})[key.partition(".")[0]] = value
            elif spec.opposite and head.replace("_", "-") == spec.opposite:
                self._flags[spec.name] = not value
            else:
                self._flags[spec.name] = value

    def has(self, name: str) -> bool:
        """Whether a flag is set to something."""
        return name in self._flags and self._flags[name] not in ("", "None")

    def on(self, name: str) -> bool:
        """Whether a switch is on, set or by default."""
        if name in self._flags:
            return self._flags[name] is True
        spec = self._table.get(name)
        return spec is not None and spec.kind is ValueKind.BOOL and spec.default == "true"

    def off(self, name: str) -> bool:
        """Whether a switch was set to off."""
        return self._flags.get(name) is False

    def text(self, name: str) -> str:
        """A value as text, set or by default; empty where there is none."""
        if name in self._flags:
            return str(self._flags[name]) if self.has(name) else ""
        spec = self._table.get(name)
        return (spec.default or "") if spec is not None else ""

    def count(self, name: str, *, given: bool = False) -> int | None:
        """A whole number, set or by default; None where there is none, or with ``given`` where it was not set."""
        if given and not self.has(name):
            return None
        return human_int(self.text(name))

    def limit(self, name: str) -> int | None:
        """A whole number, set or worked out by vLLM as far as that is known."""
        return self.count(name, given=True) if self.has(name) else human_int(str(self._resolved.get(name, "")))

    def words(self, name: str) -> tuple[str, ...]:
        """The words that are known of a flag."""
        spec = self._table.get(name)
        return spec.words if spec is not None else ()

    def key(self, name: str, key: str) -> object:
        """A key of a JSON flag, set in either way, or None."""
        if key in (keys := self._keys.get(name, {})):
            return keys[key]
        try:
            document = json.loads(self.text(name)) if self.has(name) else {}
        except (ValueError, RecursionError):
            return None
        return document.get(key) if isinstance(document, dict) else None
