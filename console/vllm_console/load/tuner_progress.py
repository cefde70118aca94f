"""A tuner's activity on a server, as noted for everyone who watches that server. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from enum import IntEnum, StrEnum

import msgspec

from vllm_console.text import duration, plain, rate, seconds
from vllm_launchers.vllm.flags.changes import Flags, FlagValue, change_text, flag_text, value_word


class TunerStep(StrEnum):
    """The current activity of a tuner."""

    MEASURING = "measuring"
    PREDICTING = "predicting"
    RESTARTING = "restarting"
    FINISHING = "finishing"
    """Restarts with the flags to keep."""


class TextLength(IntEnum):
    """How much of a text fits."""

    FULL = 0
    BRIEF = 1
    """Without explanations."""
    SHORT = 2
    """With short flag names."""
    SHORTEST = 3
    """Without the flags' previous values."""


_SHORT_NAMES = {"max-num-seqs": "seqs", "max-num-batched-tokens": "tokens", "gpu-memory-utilization": "memory"}


class TunerFigure(msgspec.Struct, frozen=True):
    """A measured value of the objective. ``bound`` is ``most`` or ``least`` if only a bound of it is known."""

    value: float
    bound: str = ""


class TunerBest(msgspec.Struct, frozen=True):
    """The best candidate so far: the number of its newest trial, the flags it sets, and its measurement."""

    trial: int
    set: Flags
    measured: TunerFigure


class TunerProgress(msgspec.Struct, frozen=True):
    """A tuner's progress. Times are Unix seconds: since when it has been at its ``step``, and when its budget ends.

    ``trial`` of at most ``trials`` is running; 0 before the first one and after the last. ``set`` has the flags that
    its candidate sets (while `FINISHING`: the better flags), empty for the original flags. ``was`` has the original
    values of all flags that any candidate sets. ``best`` is None until a candidate was measured to be better than the
    original flags. The runs after ``first_run`` up to ``last_run`` are the tuner's. ``pid`` is its process.
    """

    objective: str
    unit: str
    step: TunerStep
    since: float
    until: float
    trials: int
    trial: int = 0
    set: Flags = msgspec.field(default_factory=dict)
    was: Mapping[str, FlagValue | None] = msgspec.field(default_factory=dict)
    original: TunerFigure | None = None
    so_far: TunerFigure | None = None
    """Preliminary result for the original flags; None once their measurement has ended, or without any."""
    best: TunerBest | None = None
    first_run: int = 0
    last_run: int = 0
    pid: int = 0

    def started(self, run: int) -> bool:
        """Whether the tuner has started this run, or is about to."""
        return self.first_run < run <= self.last_run

    def asked(self, at: float) -> bool:
        """Whether a restart requested at ``at`` (Unix seconds) is the one that the tuner waits for."""
        return self.step in (TunerStep.RESTARTING, TunerStep.FINISHING) and at >= self.since

    @property
    def changes(self) -> str:
        """The changes of the current candidate: ``max-num-seqs 4 → 16``; empty for the original flags."""
        return changes_text(self.set, self.was)

    @property
    def place(self) -> str:
        """``trial 2 of 4``; empty before the first one and after the last."""
        return f"trial {self.trial} of {self.trials}" if self.trial else ""

    @property
    def short_place(self) -> str:
        """``2/4``: the trial; empty before the first one and after the last."""
        return f"{self.trial}/{self.trials}" if self.trial else ""

    def doing(self, length: TextLength = TextLength.FULL) -> str:
        """Its current activity: ``measuring max-num-seqs 4 → 16``."""
        full, changes = length is TextLength.FULL, self._changes(length)
        if self.step is TunerStep.PREDICTING:
            return "predicting every combination of flags" if full else "predicting"
        if self.step is TunerStep.FINISHING and full and changes:
            changes = f"the better flags, {changes}"
        verbs = {TunerStep.FINISHING: "ending with", TunerStep.RESTARTING: "restarting with"}
        return f"{verbs.get(self.step, 'measuring')} {changes or 'the original flags'}"

    def _changes(self, length: TextLength) -> str:
        if length < TextLength.SHORT:
            return self.changes
        short = {_SHORT_NAMES.get(name, name): value for name, value in self.set.items()}
        if length is TextLength.SHORTEST:
            return flags_text(short)
        return changes_text(short, {_SHORT_NAMES.get(name, name): value for name, value in self.was.items()})

    @property
    def restart(self) -> str:
        """Why it restarts the server: ``trial 2 of 4 of a tuner, max-num-seqs 4 → 16``."""
        if self.step is TunerStep.FINISHING:
            return f"a tuner ends with {f'the better flags, {self.changes}' if self.set else 'the original flags'}"
        return f"{self.place} of a tuner, {self.changes}"

    def found(self, length: TextLength = TextLength.FULL) -> str:
        """``best so far: max-num-seqs 16, 9.1 req/s (original 7.9 req/s)``; empty if nothing was measured.

        While the original flags are measured, the preliminary result: ``so far ≥7.0 req/s``.
        """
        if self.original is None:
            return f"so far {figure_text(self.so_far, self.unit)}" if self.so_far is not None else ""
        original = figure_text(self.original, self.unit)
        lead = "best so far" if length is TextLength.FULL else "best"
        if length >= TextLength.SHORT:
            return f"original {original}" if self.best is None else f"best {figure_text(self.best.measured, self.unit)}"
        if self.best is None:
            return f"{lead}: the original flags, {original}"
        best = figure_text(self.best.measured, self.unit)
        return f"{lead}: {flags_text(self.best.set)}, {best} (original {original})"

    def sentence(self, now: float) -> str:
        """A full description: its activity at ``now`` (Unix seconds), its position, and its results."""
        left = f"at most {duration(max(0.0, self.until - now))} left"
        parts = (self.place, f"{self.doing()} for {duration(max(0.0, now - self.since))}", self.found(), left)
        return plain("; ".join(filter(None, (*parts, f"pid {self.pid}"))))

    def kept(self, flags: Flags) -> str:
        """Flags that a server still has from the tuner, as ``max-num-seqs 16``; empty if it has the original ones."""
        return flags_text({name: flags.get(name) for name in self._changed(flags)})

    def restoring(self, flags: Flags) -> str:
        """The options of ``restart`` that restore a server's original flags; empty if it has them."""
        originals = {name: self.was[name] for name in self._changed(flags)}
        return " ".join(
            f"--unset {name}" if value is None else f"--set {shlex.quote(f'{name}={value_word(value)}')}"
            for name, value in originals.items()
        )

    def _changed(self, flags: Flags) -> list[str]:
        return [name for name, value in self.was.items() if flags.get(name) != value]


def figure_text(one: TunerFigure, unit: str) -> str:
    """A value of an objective: ``7.9 req/s``, ``410 tok/s``, or a latency; ``≥7.9 req/s`` if it is a bound."""
    mark = {"most": "<", "least": "≥"}.get(one.bound, "")
    if unit == "s":
        return mark + seconds(one.value)
    return mark + rate(one.value, "req" if unit == "requests/s" else "tok")


def flags_text(flags: Mapping[str, FlagValue | None]) -> str:
    """``max-num-seqs 16, gpu-memory-utilization unset``."""
    return ", ".join(plain(f"{name} {flag_text(value, 'unset')}") for name, value in flags.items())


def changes_text(flags: Flags, was: Mapping[str, FlagValue | None]) -> str:
    """``max-num-seqs 4 → 16``."""
    return plain(", ".join(change_text(name, was.get(name), value) for name, value in flags.items()))
