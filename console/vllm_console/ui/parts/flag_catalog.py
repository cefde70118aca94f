"""Facts about all flags of a vLLM version; common ones come first, with short meanings. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vllm_console.text import plain
from vllm_console.ui.parts.flag_edits import FlagEdits
from vllm_launchers.plan.common_flags import COMMON_FLAGS, CommonFlag, common_flag, flag_name
from vllm_launchers.plan.findings import FlagError
from vllm_launchers.plan.flags import normalize_setting, parse_value
from vllm_launchers.vllm.flags.changes import FlagValue
from vllm_launchers.vllm.flags.check_value import problem
from vllm_launchers.vllm.flags.flag_table import FlagSpec, FlagTable, ValueKind
from vllm_launchers.vllm.flags.releases import assumed_table
from vllm_launchers.vllm.flags.search import closest, resolve_flag_name, search
from vllm_launchers.vllm.flags.wording import expected
from vllm_launchers.vllm.removed_flags import REMOVED_FLAGS

_NUMBERS = (ValueKind.INT, ValueKind.FLOAT, ValueKind.HUMAN_INT)
_ON, _OFF = ("true", "on", "yes"), ("false", "off", "no")


class FlagFacts(msgspec.Struct, frozen=True):
    """A flag as shown to users. ``takes`` describes its values; ``choices`` are offered as completions."""

    name: str
    meaning: str
    default: str
    takes: str
    choices: tuple[str, ...] = ()
    switch: bool = False
    help: str = ""
    group: str = ""
    deprecated: str = ""


class FlagCatalog:
    """Looks up flags in ``table``, the flags of one vLLM; without it, in those of the newest release.

    A table that is assumed refuses nothing.
    """

    def __init__(self, table: FlagTable | None = None) -> None:
        self.table = table or assumed_table()
        common = [flag.name for flag in COMMON_FLAGS if flag.name in self.table.flags]
        self._names = list(dict.fromkeys([*common, *self.table.flags]))

    @property
    def names(self) -> Sequence[str]:
        """All flag names, the common ones first."""
        return self._names

    @property
    def source(self) -> str:
        """The source of this information, in a few words."""
        known = f"all {len(self.table.flags)} flags of vLLM {plain(self.table.version or '')}".rstrip()
        return known + {"release": ", as released", "assumed": ", assumed"}.get(self.table.source, "")

    def facts(self, name: str) -> FlagFacts | None:
        """Return facts about a flag, or None. For ``flag.key``, those of ``flag``."""
        spec = self._spec(name)
        return _of_spec(spec, common_flag(name)) if spec is not None else None

    def value(self, name: str, text: str) -> FlagValue:
        """Parse typed text as a value of the flag's type.

        Raises:
            FlagError: vLLM would refuse it; the text says what is expected.
        """
        spec, text = self.table.get(name), text.strip()
        if not text:
            raise FlagError(f"--{name} needs a value" + (f": {expected(spec)}" if spec is not None else ""))
        value = normalize_setting(name, _typed(name, spec, text))[1]
        if not self.table.assumed and (refused := self.unknown(name) or problem(self.table, name, value)):
            raise FlagError(refused)
        return value

    def unknown(self, name: str) -> str:
        """If the flag is unknown, a sentence with a replacement or the closest known flag; else empty."""
        head = name.partition(".")[0]
        if resolve_flag_name(self.table, head)[0] is not None:
            return ""
        if (removed := REMOVED_FLAGS.get(head)) is not None:
            return f"vLLM {plain(self.table.version or '')} no longer has --{head}: {removed.instead}"
        return problem(self.table, name, True) or ""

    def closest(self, name: str) -> str | None:
        """The known flag with the most similar name."""
        return next(iter(closest(self.table, name.strip().lstrip("-").replace("_", "-").lower())), None)

    def no_match(self, text: str) -> str:
        """Message for a search without matches: what replaced the flag, or the closest name."""
        name = text.partition("=")[0].strip().lstrip("-").replace("_", "-")
        if name in REMOVED_FLAGS:
            return self.unknown(name)
        near = self.closest(name)
        return f"no flag matches '{plain(name)}'" + (f"; did you mean {near}?" if near else "")

    def named(self, text: str) -> str:
        """Return the canonical name of a typed flag.

        Raises:
            FlagError: it can't be a flag's name, is set elsewhere, or this vLLM has no such flag.
        """
        name = flag_name(text)
        if self.table.assumed:
            return name
        if refused := self.unknown(name):
            raise FlagError(refused)
        meant, _ = resolve_flag_name(self.table, name)
        return meant.name if meant is not None and meant.name.startswith(name) else name

    def next_value(self, name: str, value: FlagValue | None) -> FlagValue | None:
        """The next value when toggling a flag: on ↔ off, or the next choice; None if it has no choices."""
        facts = self.facts(name)
        if isinstance(value, bool):
            return not value
        spec = self._spec(name)
        if (
            facts is None
            or not (facts.switch or facts.choices)
            or (spec and spec.kind in _NUMBERS and not spec.choices)
        ):
            return None
        if facts.switch:
            return facts.default != "on"
        choices = facts.choices
        if value is None:
            chosen = next((choice for choice in choices if choice != facts.default), choices[0])
        else:
            at = choices.index(str(value)) if str(value) in choices else -1
            chosen = choices[(at + 1) % len(choices)]
        return self.value(name, chosen)

    def matching(self, edits: FlagEdits, text: str, only_set: bool = False) -> list[str]:
        """The flags to list, set and edited ones first; with ``text``, those that match, best first."""
        names = edits.names()
        if not only_set:
            names = list(dict.fromkeys([*names, *self._names]))
        words = text.lower().replace("_", "-").split()
        words = [word.lstrip("-") or word for word in words]
        if not words:
            return names
        held = [name for name in names if all(word in self._searched(name) for word in words)]
        if not held:
            return held
        ranked = [spec.name for spec in search(self.table, text)]
        exact = [name for name in held if name not in self._names and words[0] in name]
        return list(dict.fromkeys([*exact, *(name for name in ranked if name in names), *held]))

    def _searched(self, name: str) -> str:
        facts = self.facts(name)
        if facts is None:
            return name
        return f"{name} {facts.meaning} {facts.help} {' '.join(facts.choices)} {facts.group}".lower()

    def _spec(self, name: str) -> FlagSpec | None:
        return self.table.get(name) or (self.table.get(name.partition(".")[0]) if "." in name else None)


def _of_spec(spec: FlagSpec, common: CommonFlag | None) -> FlagFacts:
    switch = spec.kind is ValueKind.BOOL
    whole = plain(" ".join(spec.help.split()))
    default = {"true": "on", "false": "off"}.get(spec.default or "", spec.default or "")
    takes = ", ".join(spec.choices) if spec.choices else expected(spec)
    choices = (*spec.choices, *(word for word in spec.words if word not in spec.choices))
    if common is not None and not choices:
        choices = common.words
    if choices and not spec.choices and spec.kind is ValueKind.TEXT:
        takes = f"{', '.join(choices)}{'' if spec.closed else ', …'}"
    return FlagFacts(
        spec.name,
        common.meaning if common else _first_sentence(whole),
        plain(default) or (common.derived if common else "") or "–",
        plain(takes if not spec.many else f"{takes}, several of them"),
        tuple(map(plain, choices)),
        switch,
        whole,
        plain(spec.group),
        plain(spec.deprecated),
    )


def _first_sentence(text: str) -> str:
    first, stop, _ = text.partition(". ")
    return first if stop else text.removesuffix(".")


def _typed(name: str, spec: FlagSpec | None, text: str) -> FlagValue:
    """Convert text to the flag's kind, if known. Invalid text is returned unchanged, to be refused later."""
    low = text.lower()
    match spec.kind if spec is not None else None:
        case ValueKind.BOOL:
            return True if low in _ON else False if low in _OFF else text
        case ValueKind.INT | ValueKind.HUMAN_INT:
            read = parse_value(text)
            return read if isinstance(read, int) and not isinstance(read, bool) else text
        case ValueKind.FLOAT:
            read = parse_value(text)
            try:
                return read if isinstance(read, float) else float(text)
            except ValueError:
                return text
        case ValueKind.TEXT | ValueKind.JSON | ValueKind.JSON_LIST:
            return text
        case ValueKind.OTHER:
            return parse_value(text, name=name)
        case None:
            return True if low in _ON else False if low in _OFF else parse_value(text, name=name)
