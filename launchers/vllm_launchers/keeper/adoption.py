"""What a keeper makes of the record of one that died: pure judgements, which `Server` acts on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vllm_launchers.keeper.lifecycle import exit_unknown
from vllm_launchers.keeper.records import Exit, LaunchSpec, ServerRecord, State

ADOPTED = "a new keeper adopted it after the old one died; its exit code will be unknown"
ADOPTED_EXIT = "it was adopted by a new keeper, which is not its parent"


@dataclass(frozen=True, slots=True)
class Ended:
    """A server that does not run: how it ended, and what follows.

    ``then`` is to be started next; ``owed``: its own process is to be started after all; ``retry``: the restart policy
    is to be asked.
    """

    exit: Exit
    then: LaunchSpec | None
    owed: bool
    retry: bool


def ended(record: ServerRecord, boot_id: str, now: float, *, stranger: bool = False) -> Ended:
    """How a server ended (or was never started) while no keeper watched. ``now`` in Unix seconds.

    ``stranger``: the record points to a process that runs and is not this server's.
    """
    why, then, owed = "it ended while no keeper watched", record.then, record.owed
    rebooted = any(one is not None and one.boot_id != boot_id for one in (record.server, record.keeper))
    if rebooted:
        why = "the machine was restarted since"
        if then is not None or owed:  # nothing starts by itself after that
            other = " with other flags" if then is not None else ""
            why, then, owed = f"{why}; it was to start again{other}, which was not done", None, False
    elif record.server is None:
        why = "its keeper died before it was started"
    elif stranger:
        why = f"pid {record.server.pid} is no process of this server: it does not hold its log pipe, and was left alone"
    exit_ = record.current.exit or exit_unknown(record.state is State.STOPPING, why, now)
    # How it ended was seen: the policy applies. Of an end that nobody saw it is not known who wanted it.
    return Ended(exit_, then, owed, retry=record.current.exit is not None and not exit_.requested)


def missed_by_reboot(record: ServerRecord, boot_id: str) -> ServerRecord | None:
    """A record that waits for a start which a restart of the machine has made void, as it is to be; else None."""
    if record.keeper is None or record.keeper.boot_id == boot_id:
        return None
    why = f"{record.reason}; the machine was restarted since, so it is not started again"
    return replace(record, next_attempt_at=None, reason=why, keeper=None)
