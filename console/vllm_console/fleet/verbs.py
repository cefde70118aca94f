"""The verbs for ``cli`` and ``ui``. Every call blocks briefly: a screen makes it from a worker thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from vllm_console.fleet.snapshot import (
    Changes,
    Engine,
    Flags,
    FleetSnapshot,
    LaunchRequest,
    Preset,
    ServerView,
    Workload,
)
from vllm_console.history.time_view import LIVE, TimeView
from vllm_launchers.launch.errors import (
    FleetError,
    NoPlaceError,
    NotFoundError,
    RefusedError,
    UnfitError,
    UsageError,
)
from vllm_launchers.launch.request import AS_CONFIGURED, RestartOptions
from vllm_launchers.plan.model import Plan, same_value

if TYPE_CHECKING:
    from vllm_console.fleet.leftovers import Leftovers, Removed
    from vllm_console.fleet.rolling import AnswerComparison
    from vllm_console.history.probe_records import FinishedRequest
    from vllm_console.history.workload import SeenWorkload
    from vllm_console.runs.compare import Comparison
    from vllm_console.runs.store import Run
    from vllm_launchers.host.board import Board
    from vllm_launchers.listeners import Listener
    from vllm_launchers.plan.choices.inputs import Choice, SeenRoom
    from vllm_launchers.vllm.flags.flag_table import FlagTable
    from vllm_launchers.vllm.modelfacts.local import LocalModels


__all__ = [
    "Fleet",
    "FleetError",
    "NoPlaceError",
    "NotFoundError",
    "NothingToCompareError",
    "PresetProblem",
    "RefusedError",
    "Replay",
    "UnfitError",
    "UsageError",
    "flag_difference",
]


DRAIN_SECONDS = 60.0
"""How long requests may take to end before a server goes to sleep."""

Say = Callable[[str], None]
"""Gets each step of a verb that takes long, as a sentence."""


def silently(_: str) -> None:
    return


class NothingToCompareError(FleetError):
    """A run has no earlier one to be compared with."""


class PresetProblem(msgspec.Struct, frozen=True):
    """A preset file that could not be used: its path, and one sentence on what is wrong and what was expected."""

    path: str
    message: str


class Replay(msgspec.Struct, frozen=True):
    """A run that has ended and can be shown again: its number, ``NAME@GENERATION``, and when it ran (Unix seconds).

    ``at`` is the moment to begin with. ``removed`` is whether its server was removed.
    """

    run: int
    name: str
    started_at: float
    ended_at: float
    at: float
    removed: bool = False


class Fleet(Protocol):
    """All servers of this machine as one user sees them. Verbs raise `FleetError` with one clear sentence."""

    read_only: bool
    read_only_by: str
    """What makes it read-only, in a few words; empty where unknown."""
    judge_launches: bool
    """Whether a screen is to let the engine judge a launch while it is planned."""

    def snapshot(self, selected: str | None = None, time: TimeView = LIVE) -> FleetSnapshot:
        """All servers now. Never raises because of one bad server.

        ``selected`` gets its chart series too, over the range of ``time``; if that names a moment, the snapshot has its
        view of then as well. If it names a GPU, the snapshot has what that did over the range; if it names a run, the
        snapshot has that run as ``replay``.
        """

    def presets(self) -> tuple[Sequence[Preset], Sequence[PresetProblem]]:
        """All usable presets, shipped and the user's own, and the unusable files."""

    def engines(self) -> Sequence[Engine]:
        """The engines that can be launched here, the best first, the simulated one last."""

    def models(self) -> LocalModels:
        """The models on this machine: in the Hugging Face cache, and in the folders named in the settings."""

    def flags(self, engine: Engine | None = None) -> FlagTable | None:
        """All flags of an engine; without one, of the engine that a launch would use.

        Learned from its files if that has been done, else those of its release, else None. Learning continues in the
        background, so a later call may know more.
        """

    def seen_workload(self, name: str) -> SeenWorkload | None:
        """A server's past traffic as a workload; None if too little was measured."""

    def suggest(self, name: str, workload: Workload, room: SeenRoom | None = None) -> Sequence[Choice]:
        """The flag changes that traffic calls for, each with its reason; empty if the flags already fit.

        ``room`` is what its KV cache was observed to hold.
        """

    def plan(self, request: LaunchRequest) -> Plan:
        """Plan a launch without doing it; problems are in its findings."""

    def judged_plan(self, request: LaunchRequest) -> Plan | None:
        """Plan a launch and let the engine itself judge its flags, which takes seconds: its verdict is in the findings.

        One question at a time: a new one ends the one before, for which this then returns None.
        """

    @property
    def judging_mib(self) -> int | None:
        """The memory of the process that judges now; None if none does, or not known yet."""

    def stop_judging(self) -> None:
        """End the process that judges: nobody waits for its verdict any more."""

    def plan_restart(self, name: str, changes: Changes) -> Plan:
        """Plan a restart with changed flags without doing it; what the server holds now counts as free."""

    def start(self, request: LaunchRequest, planned: Callable[[Plan], None] | None = None) -> ServerView:
        """Launch; returns as soon as a keeper has it (state ``starting``). ``planned`` gets the plan before that.

        A launch whose plan has errors is refused with `UnfitError`, unless ``force`` is given and allowed.
        """

    def restart(self, name: str, changes: Changes, options: RestartOptions = AS_CONFIGURED) -> ServerView:
        """Stop and start again with changed flags: same name, port (unless another is given) and GPUs, next generation.

        Refused with `UnfitError` like a start; the server then keeps running unchanged. If the restart is prepared, the
        view's ``restart`` says how far that is.
        """

    def switch(self, name: str, preset: str, options: RestartOptions = AS_CONFIGURED) -> ServerView:
        """Replace the server with another preset, keeping name, GPUs and port; refused like a restart."""

    def cancel_restart(self, name: str) -> ServerView:
        """Cancel the restart that is being prepared, or going to sleep; the server goes on serving.

        Raises `FleetError` if there is neither.
        """

    def sleep(
        self, name: str, *, level: int = 1, drain_seconds: float = DRAIN_SECONDS, say: Say = silently
    ) -> ServerView:
        """Put a server to sleep; blocks until it is. ``say`` gets each step as a sentence.

        Its requests may take ``drain_seconds`` to end; if some are left then, it serves on and `FleetError` is raised.
        """

    def wake(
        self, name: str, *, level: int = 1, drain_seconds: float = DRAIN_SECONDS, say: Say = silently
    ) -> ServerView:
        """Wake a server up; blocks until it answers as before. ``say`` gets each step as a sentence.

        The other server of its pair is put to sleep first, at ``level``, and its memory must be free.
        """

    def start_beside(self, name: str, changes: Changes, options: RestartOptions = AS_CONFIGURED) -> ServerView:
        """Launch the same server with changed flags next to a ready one, which goes on serving.

        It has a name, a port and GPUs of its own. Refused with `NoPlaceError` or `UnfitError` if there is no room.
        """

    def compare_answers(self, old: str, new: str) -> AnswerComparison:
        """Compare the greedy answers of two of our ready servers to the golden prompts; takes seconds."""

    def listener(self, name: str) -> Listener | None:
        """Where one of our servers listens, for sending it requests; None if it does not.

        Raises OSError: another process answers on its port.
        """

    def stop(self, name: str) -> ServerView:
        """Ask its keeper to stop it; returns at once (state ``stopping``)."""

    def forget(self, name: str, *, purge: bool = False) -> bool:
        """Remove a server that has stopped or failed: its record and log are deleted, its history is kept for replays.

        ``purge`` keeps nothing, and deletes what was kept of servers with this name before. Returns whether there is
        something to replay.
        """

    def start_load(self, name: str, rate: float | None = None, seconds: float = 60.0) -> None:
        """Send the preset's workload to a server from a process of its own, bounded in count and time."""

    def stop_load(self, name: str) -> None:
        """End this console's load."""

    def requests(self, name: str, since: float | None = None) -> Sequence[FinishedRequest]:
        """A server's finished requests as its probe recorded them, oldest first: those of its present or last run, or
        of all runs ``since`` then (Unix seconds).
        """

    def runs(self, name: str | None = None) -> tuple[Sequence[Run], Sequence[str]]:
        """The newest runs of one server or of all, newest first, including removed servers; and notices."""

    def replay(self, word: str, at: float | None = None) -> Replay:
        """The finished run of that number, ``NAME@GENERATION`` or ``NAME`` (its newest, or that of the moment ``at``).

        Reads its history; `snapshot` shows it.
        """

    def removed_at(self, name: str, at: float) -> Replay | None:
        """The run of a removed server that had this name at a moment; None if the present one had it by then."""

    def used_presets(self) -> Sequence[str]:
        """The presets that ran, most recently used first."""

    def compare(self, before: str, after: str | None = None) -> Comparison:
        """Compare two runs: numbers, ``NAME`` (its newest) or ``NAME@GENERATION``; with one name its last two."""

    def last_change(self, name: str) -> Comparison | None:
        """Compare a server's last two runs, quickly, from what is recorded; None if there is nothing to compare."""

    def compare_again(self, before: int, after: int) -> Comparison:
        """Compare two runs by their numbers, quickly, from what is recorded."""

    def judge_past(self, name: str | None = None) -> str:
        """Record the findings open while no console was; takes seconds. Returns what went wrong, if anything."""

    def board(self) -> Board:
        """The board shared by this machine's users: who runs what, and which GPUs are claimed until when."""

    def claim(self, gpus: Sequence[int], until: float, why: str = "") -> Board:
        """Claim GPUs on the board, until when (Unix seconds) and why."""

    def release(self, gpus: Sequence[int] = ()) -> Board:
        """Release own claims of these GPUs, or all of them."""

    def leftovers(self) -> Leftovers:
        """What ended servers left: processes without a keeper, and files in ``/dev/shm``. Changes nothing."""

    def remove_leftovers(self, wanted: Leftovers) -> Removed:
        """End and remove what `leftovers` found, if it is still there. Takes about 10 s at most."""

    def close(self) -> None:
        """Release what this console holds (its loads, open files). Servers keep running."""


def flag_difference(before: Flags, after: Flags) -> Changes:
    """The flag change from ``before`` to ``after``."""
    changed = {name: value for name, value in after.items() if not same_value(before.get(name), value)}
    return Changes(set=changed, unset=tuple(sorted(before.keys() - after.keys())))
