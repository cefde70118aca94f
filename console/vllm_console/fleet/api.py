"""The verbs that ``cli`` and ``ui`` may use. Everything blocks briefly: a screen calls it from a worker thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from vllm_console.fleet.model import (
    Changes,
    Engine,
    Flags,
    FleetSnapshot,
    LaunchRequest,
    Preset,
    ServerView,
    Workload,
)
from vllm_launchers.plan.model import Plan, same_value

if TYPE_CHECKING:
    from vllm_console.fleet.leftovers import Leftovers, Removed
    from vllm_console.telemetry.comparison import Comparison
    from vllm_console.telemetry.ledger import Run
    from vllm_console.telemetry.workload import SeenWorkload
    from vllm_launchers.machine.board.model import Board
    from vllm_launchers.machine.flags.model import FlagTable
    from vllm_launchers.plan.choices.model import Choice
    from vllm_launchers.plan.findings import Finding
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


class UnfitError(FleetError):
    """The plan of a launch finds errors. ``findings`` are these errors, ``forceable`` says whether ``force`` helps."""

    def __init__(self, text: str, findings: Sequence[Finding] = (), *, forceable: bool = False) -> None:
        super().__init__(text)
        self.findings, self.forceable = tuple(findings), forceable


@dataclass(frozen=True, slots=True)
class PresetProblem:
    """A preset file that could not be used: where, and one sentence of what is wrong and what was expected."""

    path: str
    message: str


class Fleet(Protocol):
    """All servers of this box as one person sees them. Verbs raise `FleetError` with a sentence for people."""

    read_only: bool
    read_only_by: str
    """What makes it read-only, in a few words; empty where that is not known."""

    def snapshot(self, selected: str | None = None) -> FleetSnapshot:
        """Look once at everything. ``selected`` gets its chart series too. Never raises for one bad server."""

    def presets(self) -> tuple[Sequence[Preset], Sequence[PresetProblem]]:
        """All usable presets, shipped and the person's own, and the files that are not usable."""

    def engines(self) -> Sequence[Engine]:
        """The engines that can be launched here, the best first, the simulated one last."""

    def flags(self, engine: Engine | None = None) -> FlagTable | None:
        """All flags of an engine; without one, of that which a launch would take.

        Its own as learned from its files where that has been done, else those of its release, else None; learning
        goes on in the background meanwhile, so that a later call may know more.
        """

    def seen_workload(self, name: str) -> SeenWorkload | None:
        """The traffic that a server has had, as a workload; None where too little was measured."""

    def suggest(self, name: str, workload: Workload) -> Sequence[Choice]:
        """What traffic asks to change of a server's flags, each with its reason; nothing where they fit already."""

    def plan(self, request: LaunchRequest) -> Plan:
        """Resolve a launch without doing it: what stands in its way is in its findings."""

    def plan_restart(self, name: str, changes: Changes) -> Plan:
        """Resolve a restart with a difference of flags without doing it; what it holds now counts as free."""

    def start(self, request: LaunchRequest) -> ServerView:
        """Launch; returns as soon as a keeper holds it (state ``starting``).

        A launch whose plan finds an error is refused with `UnfitError`, unless ``force`` is asked for and may be.
        """

    def restart(self, name: str, changes: Changes, *, force: bool = False) -> ServerView:
        """Stop and start again with a difference of flags: same name, port and GPUs, next generation.

        Refused with `UnfitError` as a start is; the server then goes on as it is.
        """

    def switch(self, name: str, preset: str, *, force: bool = False) -> ServerView:
        """Hand the server's place (name, GPUs, port) to another preset; refused as a restart is."""

    def stop(self, name: str) -> ServerView:
        """Ask its keeper to stop it; returns at once (state ``stopping``)."""

    def forget(self, name: str) -> None:
        """Remove the record, log and history of a server that has stopped or failed."""

    def start_load(self, name: str, rate: float | None = None, seconds: float = 60.0) -> None:
        """Send the preset's workload to a server from a process of its own, bounded in count and time."""

    def stop_load(self, name: str) -> None:
        """End the load that this console sends."""

    def runs(self, name: str | None = None) -> tuple[Sequence[Run], Sequence[str]]:
        """The newest runs of one server or of all, newest first, also of servers that were removed; and notices."""

    def compare(self, before: str, after: str | None = None) -> Comparison:
        """Two runs side by side: numbers, ``NAME`` (its newest) or ``NAME@GENERATION``; with one name its last two."""

    def last_change(self, name: str) -> Comparison | None:
        """A server's last two runs side by side, quickly, from what is recorded; None where there is nothing to say."""

    def judge_past(self, name: str | None = None) -> str:
        """Enter in the ledger what held while no console was open; takes seconds. What went wrong, if anything did."""

    def board(self) -> Board:
        """The board that people of this machine share: who says what runs, and which GPUs are claimed till when."""

    def claim(self, gpus: Sequence[int], until: float, why: str = "") -> Board:
        """Say on the board that GPUs are taken, until when (Unix seconds) and why."""

    def release(self, gpus: Sequence[int] = ()) -> Board:
        """Take one's own claims of these GPUs back, or all of them."""

    def leftovers(self) -> Leftovers:
        """What servers that have ended left: processes without a keeper, and files in ``/dev/shm``. Only looks."""

    def remove_leftovers(self, wanted: Leftovers) -> Removed:
        """End and remove what `leftovers` found, as far as it is still so. Takes about 10 s at most."""

    def close(self) -> None:
        """Let go of what this console holds (loads it sends, open files). Servers go on."""


def flag_difference(before: Flags, after: Flags) -> Changes:
    """The change of flags that leads from ``before`` to ``after``."""
    changed = {name: value for name, value in after.items() if not same_value(before.get(name), value)}
    return Changes(set=changed, unset=tuple(sorted(before.keys() - after.keys())))
