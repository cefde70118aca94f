"""Changes to a set of flags while the user makes them: what was, what is staged, what comes next. Pure."""

from __future__ import annotations

import msgspec

from vllm_launchers.vllm.flags.changes import Changes, Flags, FlagValue, same_value


class FlagEdits(msgspec.Struct):
    """Edits on top of ``base``, the flags as they are. None in ``edits`` leaves a flag out."""

    base: Flags
    edits: dict[str, FlagValue | None] = msgspec.field(default_factory=dict)
    added: list[str] = msgspec.field(default_factory=list)
    """Names that the user added, in that order, whether they have a value yet or not."""

    @classmethod
    def of(cls, base: Flags, changes: Changes) -> FlagEdits:
        """Edits that come to these changes."""
        edits = cls(base)
        for name, value in changes.set.items():
            edits.put(name, value)
        for name in changes.unset:
            edits.put(name, None)
        return edits

    def put(self, name: str, value: FlagValue | None) -> None:
        """Set a flag, or leave it out; what leads back to the base is no edit."""
        present = name in self.base
        if (present and value is not None and same_value(self.base[name], value)) or (not present and value is None):
            self.edits.pop(name, None)
        else:
            self.edits[name] = value

    def leave_out(self, name: str) -> None:
        """See that a flag is not given, also one that is not in the base but would be chosen."""
        self.edits[name] = None

    def undo(self, name: str) -> None:
        """Take back the edit of a flag."""
        self.edits.pop(name, None)
        if name in self.added:
            self.added.remove(name)

    def value(self, name: str) -> FlagValue | None:
        """What the flag would be; None when it is left out."""
        return self.edits[name] if name in self.edits else self.base.get(name)

    def changed(self, name: str) -> bool:
        """Whether it is edited."""
        return name in self.edits

    @property
    def changes(self) -> Changes:
        """The edits as a difference of flags."""
        return Changes(
            set={name: value for name, value in self.edits.items() if value is not None},
            unset=tuple(name for name, value in self.edits.items() if value is None),
        )

    def names(self) -> list[str]:
        """Flags that are set or edited: those of the base first, in their order."""
        return list(dict.fromkeys([*self.base, *self.edits, *self.added]))
