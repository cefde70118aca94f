"""Sleep and wake actions: the checks before them, and the switch of a standby pair, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_console.fleet.snapshot import ServerView, SleepView
from vllm_console.fleet.types import Say
from vllm_launchers.errors import OperationError, RefusedError
from vllm_launchers.keeper import client
from vllm_launchers.keeper.records import ServerRecord, Sleep, SleepStep, State
from vllm_launchers.launch.details import Details, unpack
from vllm_launchers.launch.server_records import ServerRecords
from vllm_launchers.launch.standby import one_switch, partner_of
from vllm_launchers.plan.flags import SLEEP_MODE
from vllm_launchers.vllm.release_defaults import default_utilization

if TYPE_CHECKING:
    from vllm_launchers.host.gpu.host import Host
    from vllm_launchers.vllm.modelfacts.facts import ModelFacts

FREED_SECONDS = 20.0
"""How long it may take until a sleeping server's memory is free."""
STEP_SECONDS = 3600.0
"""Timeout for one step, such as reading all weights from a slow disk."""
SLACK_GIB = 0.5
"""A driver keeps a little memory for itself."""


def possible_partners(servers: Sequence[ServerView]) -> list[str]:
    """This user's running servers with sleep mode and without a partner; a new server can share their GPUs."""
    return [
        server.name
        for server in servers
        if server.ours and not server.elsewhere and server.state.alive and not server.partner
        and server.flags.get(SLEEP_MODE) is True
    ]  # fmt: skip


def sleep_view(sleep: Sleep, details: Details) -> SleepView:
    """A record's sleep as shown."""
    held = _host_gib(details) if sleep.level == 1 and sleep.step is SleepStep.ASLEEP else None
    return SleepView(sleep.step, sleep.level, sleep.step_at, sleep.message, held, sleep.checked, sleep.differing)


def _host_gib(details: Details) -> float | None:
    from vllm_launchers.plan.checks.sleep import host_gib

    return host_gib(details.predicted.get("weights_gib"), details.flags)


class Sleeping:
    """Puts this user's servers to sleep and wakes them; every method blocks until that is done.

    ``facts`` returns the known facts of a server's model, ``host`` the host that its GPUs belong to, as of now (None if
    that can't be read); ``end_load`` ends the load that this console sends to a server, which would keep it busy.
    """

    def __init__(
        self,
        state: Path,
        records: ServerRecords,
        facts: Callable[[Details], ModelFacts | None],
        host: Callable[[Details], Host | None],
        end_load: Callable[[str], None],
    ) -> None:
        self._state, self._records, self._facts, self._host = state, records, facts, host
        self._end_load = end_load

    def sleep(self, record: ServerRecord, level: int, drain_seconds: float, say: Say) -> ServerRecord:
        """Put a server to sleep.

        Raises:
            RefusedError: this level would give wrong answers or fail, or the machine's memory is too small for it.
            OperationError: it can't go to sleep now, or requests were left.
        """
        self._check_level(record, level, say)
        if record.current.spec.sleep_mode:  # else the keeper refuses at once
            say(f"{record.name}: waiting for its requests to end ({drain_seconds:g}s at most)")
            self._end_load(record.name)
        client.sleep(self._state, record.name, level, drain_seconds)
        found = self._over(record.name)
        if found.state is not State.ASLEEP:
            why = found.sleep.message if found.sleep is not None and found.sleep.message else found.reason
            raise OperationError(f"{record.name} did not go to sleep and is {found.state}: {why}")
        say(f"{record.name}: asleep, level {level}")
        return found

    def wake(self, record: ServerRecord, level: int, drain_seconds: float, say: Say) -> ServerRecord:
        """Wake a server; the other server of its pair is first put to sleep at ``level``.

        Raises:
            RefusedError: the other one must not sleep at this level.
            OperationError: the other one did not go to sleep, its memory was not freed, or this one can't be woken.
        """
        with one_switch(self._state, self._records.read()[0], record.name):
            partner = partner_of(self._records.read()[0], record.name)
            try:
                return self._switch(client.read(self._state, record.name), partner, level, drain_seconds, say)
            except OperationError as error:
                both = [client.read(self._state, one.name) for one in (record, partner) if one is not None]
                if len(both) < 2 or any(one.state is not State.ASLEEP for one in both):
                    raise
                text = f"{error}. Now {both[0].name} and {both[1].name} are both asleep, and neither serves"
                raise OperationError(f"{text}: wake one up: vllm-console wake NAME") from error

    def _switch(
        self, record: ServerRecord, partner: ServerRecord | None, level: int, drain_seconds: float, say: Say
    ) -> ServerRecord:
        name = record.name
        if record.state is not State.ASLEEP:
            raise OperationError(f"{name} is {record.state}, not asleep")
        if partner is not None and partner.state.alive and partner.state is not State.ASLEEP:
            self.sleep(partner, level, drain_seconds, say)
        self._confirm_free(record, partner, say)
        say(f"{name}: waking up")
        client.wake(self._state, name)
        found = self._over(name)
        sleep = found.sleep
        if sleep is None or sleep.step is not SleepStep.AWAKE:
            why = sleep.message if sleep is not None and sleep.message else found.reason
            restarted = sleep is not None and sleep.step in (SleepStep.FAILED, SleepStep.MISMATCH)
            raise OperationError(
                f"{name} was restarted because {why}" if restarted else f"{name} is {found.state}: {why}"
            )
        prompts = f"{sleep.checked} golden prompts answered as before" if sleep.checked else sleep.message
        say(f"{name}: awake; {prompts}")
        return found

    def _check_level(self, record: ServerRecord, level: int, say: Say) -> None:
        from vllm_launchers.host.main_memory import main_memory
        from vllm_launchers.plan.checks.sleep import level_2_doubt, level_2_problem

        details = unpack(record.current.spec.details)
        if level == 2:
            facts = self._facts(details)
            release = details.engine.release if details.engine is not None else None
            if why := level_2_problem(details.flags, release, facts):
                raise RefusedError(f"{record.name} can't be put to sleep at level 2: {why}. Use --level 1")
            if doubt := level_2_doubt(details.flags, facts):
                say(f"{record.name}: level 2: {doubt}; the golden prompts will show it")
            return
        needed, free = _host_gib(details), main_memory().available_gib
        if needed is not None and free is not None and needed > free and not details.simulated:
            raise RefusedError(
                f"{record.name} can't sleep at level 1: its weights take about {needed:.1f} GiB of the machine's "
                f"memory, of which {free:.1f} GiB are available. Use --level 2"
            )

    def _confirm_free(self, record: ServerRecord, partner: ServerRecord | None, say: Say) -> None:
        """Wait until the memory that a sleeping server needs is free on its GPUs."""
        details = unpack(record.current.spec.details)
        host = self._host(details)
        if host is None or host.problem or not details.gpus:
            say(f"{record.name}: could not confirm that its GPUs have free memory: {_unread(host, details)}")
            return
        from vllm_launchers.host.gpu.monitor import wait_until_freed

        wanted = wanted_gib(host, record.name, details)
        if not wanted:
            say(f"{record.name}: could not confirm that its GPUs have free memory: its need is unknown")
            return
        ours = {holder.pid for gpu in host.gpus for holder in gpu.holders if partner and holder.server == partner.name}
        release = wait_until_freed(lambda: self._host(details) or host, wanted, ours, timeout=FREED_SECONDS)
        if not release.freed:
            raise OperationError(f"{record.name} stays asleep because its memory is not free: {release.reason}")
        say(f"{record.name}: " + ", ".join(f"GPU {gpu} has the {gib:.1f} GiB it needs" for gpu, gib in wanted.items()))

    def _over(self, name: str) -> ServerRecord:
        """Wait until a server has fallen asleep, woken, or ended."""
        return client.wait_for(
            self._state,
            name,
            lambda one: one.sleep is None or not one.sleep.step.under_way or not one.state.alive,
            STEP_SECONDS,
        )


def wanted_gib(host: Host, name: str, details: Details) -> dict[int, float]:
    """GiB that must be free on each GPU before waking a server: its share, less what it still holds."""
    from vllm_launchers.plan.budget.budget import needed_gib

    share = details.flags.get("gpu-memory-utilization")
    if not isinstance(share, int | float):
        share = default_utilization(details.engine.release if details.engine is not None else None)
    if "kv-cache-memory-bytes" in details.flags or "num-gpu-blocks-override" in details.flags:
        return {}  # its share does not determine what it takes
    wanted = {}
    for index in details.gpus:
        gpu = host.gpu(index)
        needed = needed_gib(gpu, share) if gpu is not None else None
        if gpu is not None and needed is not None and gpu.free_gib is not None:
            held = sum(holder.gib or 0.0 for holder in gpu.holders if holder.server == name)
            wanted[index] = max(0.0, needed - held - SLACK_GIB)
    return wanted


def _unread(host: Host | None, details: Details) -> str:
    if not details.gpus:
        return "it was given no GPUs"
    if host is None and details.simulated:
        return "it is simulated, on no GPU of this host"
    return (host.problem if host is not None else "") or "no GPU can be read here"
