"""Edits of a set of flags. Pure."""

from __future__ import annotations

import msgspec

from vllm_launchers.vllm.flags.changes import Flags, FlagValue, same_value


class FlagEdits(msgspec.Struct):
    """Edits on top of ``base``, the current flags. None in ``edits`` unsets a flag."""

    base: Flags
    edits: dict[str, FlagValue | None] = msgspec.field(default_factory=dict)
    added: list[str] = msgspec.field(default_factory=list)
    """Names that the user added, in order, with or without a value."""

    def put(self, name: str, value: FlagValue | None) -> None:
        """Set or unset a flag. A value equal to the base is not an edit."""
        if same_value(self.base.get(name), value):
            self.edits.pop(name, None)
        else:
            self.edits[name] = value

    def leave_out(self, name: str) -> None:
        """Unset a flag, even one that is not in the base but would be set by the plan."""
        self.edits[name] = None

    def undo(self, name: str) -> None:
        """Undo the edit of a flag."""
        self.edits.pop(name, None)
        if name in self.added:
            self.added.remove(name)

    def value(self, name: str) -> FlagValue | None:
        """The resulting value of a flag; None if unset."""
        return self.edits[name] if name in self.edits else self.base.get(name)

    def changed(self, name: str) -> bool:
        """Whether a flag is edited."""
        return name in self.edits

    def names(self) -> list[str]:
        """Names of set or edited flags, those of the base first."""
        return list(dict.fromkeys([*self.base, *self.edits, *self.added]))
