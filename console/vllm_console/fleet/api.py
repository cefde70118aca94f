"""The verbs that ``cli`` and ``ui`` may use. Everything blocks briefly: a screen calls it from a worker thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from vllm_console.fleet.model import Changes, Engine, Flags, FleetSnapshot, LaunchRequest, Preset, ServerView
from vllm_launchers.plan.model import Plan, same_value

if TYPE_CHECKING:
    from vllm_launchers.plan.placement import Placement


class FleetError(Exception):
    """Something could not be done. The first line is one clear sentence; ``exit_code`` is what a command ends with."""

    exit_code = 1


class NotFoundError(FleetError):
    """No server or preset of that name."""

    exit_code = 3


class RefusedError(FleetError):
    """Not ours to touch, or the console is read-only."""

    exit_code = 4


class UsageError(FleetError):
    """What was asked for makes no sense as written."""

    exit_code = 2


class NoPlaceError(FleetError):
    """No set of GPUs will do. ``sets`` are what there is to choose from, the best first."""

    def __init__(self, text: str, sets: Sequence[Placement] = ()) -> None:
        super().__init__(text)
        self.sets = tuple(sets)


@dataclass(frozen=True, slots=True)
class PresetProblem:
    """A preset file that could not be used: where, and one sentence of what is wrong and what was expected."""

    path: str
    message: str


class Fleet(Protocol):
    """All servers of this box as one person sees them. Verbs raise `FleetError` with a sentence for people."""

    read_only: bool

    def snapshot(self, selected: str | None = None) -> FleetSnapshot:
        """Look once at everything. ``selected`` gets its chart series too. Never raises for one bad server."""

    def presets(self) -> tuple[Sequence[Preset], Sequence[PresetProblem]]:
        """All usable presets, shipped and the person's own, and the files that are not usable."""

    def engines(self) -> Sequence[Engine]:
        """The engines that can be launched here, the best first, the simulated one last."""

    def plan(self, request: LaunchRequest) -> Plan:
        """Resolve a launch without doing it."""

    def start(self, request: LaunchRequest) -> ServerView:
        """Launch; returns as soon as a keeper holds it (state ``starting``)."""

    def restart(self, name: str, changes: Changes) -> ServerView:
        """Stop and start again with a difference of flags: same name, port and GPUs, next generation."""

    def switch(self, name: str, preset: str) -> ServerView:
        """Hand the server's place (name, GPUs, port) to another preset."""

    def stop(self, name: str) -> ServerView:
        """Ask its keeper to stop it; returns at once (state ``stopping``)."""

    def forget(self, name: str) -> None:
        """Remove the record, log and history of a server that has stopped or failed."""

    def start_load(self, name: str, rate: float | None = None, seconds: float = 60.0) -> None:
        """Send the preset's workload to a server from a process of its own, bounded in count and time."""

    def stop_load(self, name: str) -> None:
        """End the load that this console sends."""

    def close(self) -> None:
        """Let go of what this console holds (loads it sends, open files). Servers go on."""


def flag_difference(before: Flags, after: Flags) -> Changes:
    """The change of flags that leads from ``before`` to ``after``."""
    changed = {name: value for name, value in after.items() if not same_value(before.get(name), value)}
    return Changes(set=changed, unset=tuple(sorted(before.keys() - after.keys())))
